"""Training: `fit` from configurations to a result, and the loop of batches, steps, metrics and checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from daskgpt.config.errors import refusal, require, require_working_folder
from daskgpt.config.model import ModelConfig
from daskgpt.config.rich import html_table, svg_curve
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.config.stopping import CanGoOn, finishing_first
from daskgpt.data.dataset import BatchLoader
from daskgpt.kernels.compilation import compile_later
from daskgpt.model.parameters import check_config, parameter_count, parameter_shapes
from daskgpt.schedulers.opening import open_scheduler, require_scheduler
from daskgpt.schedulers.protocol import ClusterLost, Scheduler, WorkerLost
from daskgpt.schedulers.worker_metrics import Events, WorkerMetrics
from daskgpt.training.checkpoint import checkpoints, load, step_folder
from daskgpt.training.inference import Validation
from daskgpt.training.job import Arrays, Job, Say, compile_kernels, describe, require_memory
from daskgpt.training.job_steps import JobSteps, Steps
from daskgpt.training.logs import chosen_sinks
from daskgpt.training.metrics import Finite, Outliers, StepMetrics
from daskgpt.training.progress import Progress
from daskgpt.training.run_folder import Saver, reason
from daskgpt.training.start import Resumed, ResumeState, beginning, checkpoint_facts, new_run
from daskgpt.training.step import State

if TYPE_CHECKING:
    from daskgpt.training.recovery import Recovery

LABEL = 12  # columns of `model       ` and the like


@dataclass(repr=False)
class Result:
    """The result of a run.

    Fields   config: ModelConfig
                 size of the model
             parameters: dict[str, np.ndarray]
                 GPT-2's tensors under their published names, float32; of a cluster's run with a folder they are read
                 from there when they are first used
             losses: list[float]
                 loss of each step of the run, before its update; nan for a step of an earlier process that the metrics
                 lack [nats a token]
             validation_loss: float
                 the last one measured, nan if there was none [nats a token]
             seconds: float
                 duration of all steps and validations of this process [s]
             checkpoint: Path | None
                 the folder with the model, which `daskgpt.load` reads; None if no run folder was written
             first: int
                 how many steps earlier processes have made
             stopped: bool
                 whether Ctrl-C or SIGTERM has ended the run before its last step
             bits_a_byte: float
                 the validation loss by the bytes of the text, which compares different encodings; nan where this
                 process has measured none [bits a byte]
             timers: dict[str, float]
                 seconds that steps waited for validation, logs, samples, checkpoints and recovery points [s]
    """

    config: ModelConfig
    read: Callable[[], dict[str, np.ndarray]]  # returns the parameters
    losses: list[float]
    validation_loss: float
    seconds: float
    checkpoint: Path | None = None
    first: int = 0
    stopped: bool = False
    bits_a_byte: float = math.nan
    timers: dict[str, float] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters. Errors   as of `daskgpt.load` where they are read"""
        return self.read()

    def _repr_html_(self) -> str:
        """Return the same for notebooks, with the losses as a curve."""
        title, *lines = repr(self).splitlines()
        rows = [[line[:LABEL].strip(), line[LABEL:]] for line in lines]
        return html_table(title, rows) + svg_curve(self.losses, "loss of each step")

    def __repr__(self) -> str:
        """Return a few lines without any array."""
        steps = len(self.losses)
        own = f" ({steps - self.first:,} of them now)" if self.first else ""
        lines = [f"Result of {steps:,} step{'s' * (steps != 1)}{own} in {self.seconds:.1f} s"]
        arrays = len(parameter_shapes(self.config))
        lines.append(f"model       {parameter_count(self.config):,} parameters in {arrays} arrays")
        if self.losses:
            last = f"{self.losses[-1]:.3f} in the last"
            lines.append(f"loss        {self.losses[0]:.3f} nats a token in the first step, {last}")
        if self.validation_loss == self.validation_loss:
            lines.append(f"validation  {self.validation_loss:.3f} nats a token")
        return "\n".join([*lines, f"written to  {self.checkpoint or 'nowhere'}"])


Sampler = Callable[[Scheduler, State], str]  # text that a state writes
Changes = Mapping[str, Any]  # of a configuration, by the names of its fields


class Callback(Protocol):
    """An instrument that observes some steps of a run."""

    def begin(self, job: Job, steps: Steps, scheduler: Scheduler) -> int:
        """Prepare before the first step; return the number of the first step to observe.

        steps   what runs them
        """

    def watch(self, steps: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context manager that is entered around steps which are run together."""

    def end(self) -> None:
        """Write what was observed; called after the last step, when the model has been saved."""


@dataclass(frozen=True)
class Observers:
    """Functions and instruments that a run calls while it trains.

    on_step    called with (step, metrics) after each step; ends the run if it returns True
    callbacks  instruments that observe steps
    sampler    returns the text to print of a state
    quiet      whether nothing is printed
    """

    on_step: Any = None
    callbacks: Sequence[Callback] = ()
    sampler: Sampler | None = None
    quiet: bool = False


def fit(
    config: ModelConfig | None = None,
    data: DataConfig | Changes | None = None,
    optimizer: OptimizerConfig | Changes | None = None,
    dataflow: DataflowConfig | Changes | None = None,
    run: RunConfig | Changes | None = None,
    *,
    parameters: Arrays | None = None,
    resume: str | os.PathLike[str] | None = None,
    client: Any = None,
    on_step: Any = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> Result:
    """Train a model, as `python -m daskgpt.train` does. The run is written where `run.out` names a folder.

    parameters   initial values, float32; None for those of `run.init`, or random ones
    resume       a run folder to continue from its newest good checkpoint. Its settings are kept but for those that are
                 given: a mapping names what changes (`run={"steps": 4000}`), a configuration counts as a whole
    client       a `distributed.Client` whose cluster runs the tasks, in place of `dataflow.scheduler`; it stays open,
                 and nothing of the run stays on its cluster. None for the active Client of this process, if it has one
                 and dataflow names no scheduler. In a task of a Dask worker a run has one thread, and no client
    on_step      called with (step, metrics) after each step, counted from 0; if it returns True the run ends as with
                 Ctrl-C, with a checkpoint, and can be resumed
    callbacks    instruments that observe steps, such as `daskgpt.TimelineCallback`
    quiet        whether to print nothing: no header, no progress

    Errors       ValueError where the configurations do not fit each other or a setting must not change,
                 TypeError for a client of another kind, FileNotFoundError for missing data or no run to continue,
                 FileExistsError where `run.out` holds a run, RuntimeError where a loss or a parameter is not finite or
                 another process trains the run, OSError where the last checkpoint cannot be written

    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1, channels=32, positions=32)
    >>> data = {"data": daskgpt.__path__[0] + "/config/*.py", "sequence_length": 32}
    >>> result = daskgpt.fit(config, data, run={"steps": 20, "validation_batches": 2}, quiet=True)
    >>> len(result.losses), result.losses[-1] < result.losses[0]
    (20, True)
    """
    require_working_folder("fit")
    if client is not None:
        from daskgpt.schedulers.connect import client_address

        dataflow = {**_changes(dataflow), "scheduler": client_address(client)}
    sections = {"model": config, "data": data, "optimizer": optimizer, "dataflow": dataflow, "run": run}
    if resume is not None:
        rule, advice = "a run that is resumed has its own parameters", "Leave parameters out, or resume."
        require(parameters is None, "fit", rule, {"resume": resume}, advice)
        if client is None and "scheduler" in (changes := _changes(dataflow)):
            require_scheduler(changes["scheduler"])
        resumed = Resumed(os.fspath(resume), {name: _changes(own) for name, own in sections.items()})
        job, initial = resumed.job, resumed.initial
    else:
        rule, advice = "a new run must have the size of a model", "Give daskgpt.preset, say."
        require(config is not None, "fit", rule, {"config": config}, advice)
        check_config("fit", config)
        job, initial = new_run(sections, parameters, connects=client is None)
    return train(job, initial, Observers(on_step, callbacks, quiet=quiet), client)


def _changes(settings: Any) -> Mapping[str, Any]:
    """Return the settings that a configuration or a mapping gives."""
    return {} if settings is None else settings if isinstance(settings, Mapping) else asdict(settings)


def train(job: Job, initial: ResumeState, observers: Observers = Observers(), client: Any = None) -> Result:
    """Compile kernels, open the scheduler of a job, and train. The run's folder is closed."""
    try:
        compile_kernels(job.precision, job.uses)
        if observers.sampler:
            compile_later(np.float32, {"decoding"})
        with open_scheduler(job.dataflow.scheduler, job.dataflow.threads, client) as scheduler:
            return run_job(job, scheduler, initial, observers)
    finally:
        if initial.folder:
            initial.folder.close()


def run_job(job: Job, scheduler: Scheduler, initial: ResumeState, observers: Observers) -> Result:
    """Train on an open scheduler. Ctrl-C or SIGTERM ends the run after a step, with a checkpoint.

    Errors    KeyboardInterrupt at the second Ctrl-C: nothing more is saved
    """
    scheduler.admit(job.precision.packed)
    require_memory(job, scheduler.memory_limits())
    progress = Progress(job.steps, done=initial.step, quiet=observers.quiet)
    with finishing_first(progress.say, "step") as stop_requested:
        trainer = _Trainer(job, scheduler, initial, observers, progress, stop_requested)
        try:
            return trainer.run()
        except Exception as error:
            trainer.wait()  # for the checkpoint that is being written, which precedes the error
            if isinstance(error, WorkerLost):
                raise trainer.error_of(error) from None
            raise
        finally:
            trainer.close()


def steps_of(job: Job, scheduler: Scheduler, say: Say = print) -> Steps:
    """Return what runs the steps of a job: in this process, or on the ranks of a cluster."""
    if scheduler.in_place or job.dataflow.engine != "ranks":
        return JobSteps(job, scheduler, say)
    from daskgpt.training.rank_steps import RankSteps

    return RankSteps(job, cast(Any, scheduler), say)


@dataclass(eq=False, repr=False)
class _Trainer:
    """One run, from the state that it begins with to its result.

    validated   validation losses of this process, by the number of steps made
    enough      whether `on_step` has ended the run
    """

    job: Job
    scheduler: Scheduler
    initial: ResumeState
    observers: Observers
    progress: Progress
    stop_requested: Callable[[], bool]

    def __post_init__(self) -> None:
        job, scheduler, initial, progress = self.job, self.scheduler, self.initial, self.progress
        self.folder = folder = initial.folder
        self.losses = list(initial.losses)
        self.validated: dict[int, float] = {}
        self.enough = False
        self.start = time.perf_counter()
        self.steps = steps_of(job, scheduler, progress.say)
        self.loader = BatchLoader(job.tokens, job.data.sequences, job.data.sequence_length, job.run.seed, job.order)
        self.outliers = Outliers(job.optimizer.skip_outliers, initial.outliers)
        self.finite = Finite(job, self.losses, self.wait)
        self.worker_metrics, self.events = WorkerMetrics(scheduler), Events(scheduler)
        self.metrics = StepMetrics(job, self.worker_metrics, lambda: self.seconds)
        self.timed, timers = self.metrics.timed, self.metrics.timers
        self.result = Result(job.config, dict, self.losses, initial.validation, 0.0, first=initial.step, timers=timers)
        say, newest, best = progress.say, initial.step, initial.best
        self.saver = Saver(job, folder, scheduler, say, newest, best, self.losses) if folder else None
        self.recovery: Recovery | None = None
        if self.steps.ranks:
            from daskgpt.training.recovery import Recovery

            self.recovery = Recovery(job, cast(Any, self.steps), initial, progress.say)

    def run(self) -> Result:
        """Train, save the model, and let the instruments write what they observed."""
        job, progress, steps = self.job, self.progress, self.steps
        if self.saver:
            resolved, initial = self._resolved(), self.initial
            entry = initial.entry or beginning(job, resolved, initial.parameters)
            self.saver.folder.begin(resolved, entry, chosen_sinks(job.run.log, job.run.out))
            self.saver.begin()
        progress.say("\n".join([describe(job, self.scheduler, steps.described_chunks), *self.initial.messages]))
        run = job.run
        self.scheduler.attend(progress.say, self.stop_requested, run.worker_seconds, run.worker_minutes)
        if steps.described_tasks:  # otherwise it is printed when it is known
            progress.say(f"grain      {steps.described_tasks}")
        callbacks = self.observers.callbacks
        self.callbacks = [(callback.begin(job, steps, self.scheduler), callback) for callback in callbacks]
        self.worker_metrics.begin(products=bool(self.folder or self.observers.on_step))
        self.start = time.perf_counter()
        progress.begin()
        result, lost = None, None
        while result is None:
            try:
                # No name refers to the first state here: it would stay on the workers until the end of the run.
                state, stopped = self._train(self._first_state(lost))
                result = self._finished(state, stopped)
                if not stopped:  # whoever stops a run does not want to wait
                    self._sample_last(state)
            except ClusterLost:
                self._save_what_is_left()
                raise
            except WorkerLost as error:
                if self.recovery is None:
                    raise
                lost = error.with_traceback(None)  # its frames hold what is lost
                self.wait()
        for callback in callbacks:  # their files may not get written: the model is saved by now
            callback.end()
        return result

    def _first_state(self, lost: WorkerLost | None) -> State:
        """Return the state that the run begins with, or the one that it continues from after a loss."""
        if lost and self.recovery:
            return self.recovery.back(lost, len(self.losses))
        return self.steps.initial(self.initial.parameters, self.initial.moments, self.initial.step)

    def _train(self, state: State) -> tuple[State, bool]:
        """Make all steps, or those until a stop is requested; return the state, and whether a stop was requested.

        Steps run together, as a window, where nothing is due between them. Those that are made again after a loss are
        not recorded, validated or reported a second time.
        """
        job, steps = self.job, self.steps
        validation = Validation(job, self.scheduler, self.stop_requested)
        if job.run.init and not self.losses:
            self._sample(state)  # of the model to start from
        while state.step < job.steps:
            window = range(state.step, state.step + self._together(state.step))
            first_time, undecided = window[-1] >= len(self.losses), steps.open
            start = time.perf_counter()
            batches = self.loader.take(window)
            with self._observed(window):
                outcomes, state = steps.run(state, batches, self.outliers.limits(window.start))
            seconds = time.perf_counter() - start
            if self.folder and undecided:  # chunks and grain may have been chosen with this step
                self.folder.configure(self._resolved())

            with self.timed("logs"):
                for number, outcome in zip(window, outcomes):
                    self.outliers.note(number, outcome)
                records = self.metrics.of_window(window, outcomes, seconds)
            if first_time and state.step == self._next_validation(window[-1]):
                with self.timed("validation"):
                    records[-1] |= validation.of(state, steps.chunk)
            for record in records[max(len(self.losses) - window.start, 0) :]:
                self._report(record)
                with self.timed("validation" if "validation_loss" in record else "logs"):
                    self.finite.require(self.scheduler, state, record)
            if state.step == job.steps:
                break

            if first_time and not steps.open and job.horizon.passed(state.step, self.seconds):
                self.progress.steps = job.steps
            if self.enough or self.stop_requested():
                self.progress.say(f"stopped after {state.step} of {job.steps} steps")
                return state, True
            if self.recovery:
                with self.timed("recovery points"):
                    self.recovery.after(state)
            if first_time and job.run.sample_every and state.step % job.run.sample_every == 0:
                self._sample(state)
            self._save(state, checked="validation_loss" in records[-1])
        return state, False

    def _together(self, number: int) -> int:
        """Return how many steps from this one on run together: until the next one after which something is due."""
        run = self.job.run
        every = (run.save_every, run.keep_every) if self.saver else ()
        ends = [(number // count + 1) * count for count in (*every, run.sample_every) if count]
        ends += [first for first, _ in self.callbacks if number < first]
        ends += [end] if (end := self.job.horizon.next_change(number)) else []
        together: int = min(self.steps.together(number), min([*ends, self._next_validation(number)]) - number)
        return together

    def _next_validation(self, number: int) -> int:
        """Return how many steps will have been made at the next validation."""
        every = self.job.run.validate_every or self.job.steps
        return min((number // every + 1) * every, self.job.steps)

    @contextmanager
    def _observed(self, window: range) -> Iterator[None]:
        """Let the instruments observe steps that run together, each from the first step that it wants to see."""
        with ExitStack() as stack:
            if not self.steps.open:
                for first, callback in self.callbacks:
                    if window.start >= max(first, len(self.losses)):
                        stack.enter_context(callback.watch(window))
                if not self.callbacks:
                    stack.enter_context(self.metrics.record(self.steps.recorded))
            yield

    def _report(self, metrics: dict[str, Any]) -> None:
        """Show, log and publish the metrics of a step."""
        with self.timed("logs"):
            self.losses.append(metrics["loss"])
            if "validation_loss" in metrics:
                loss = self.result.validation_loss = self.validated[metrics["step"] + 1] = metrics["validation_loss"]
                self.result.bits_a_byte = metrics.get("validation_bits_a_byte", math.nan)
                if self.saver and self.saver.better(loss):
                    metrics["best"] = True
            self.progress.step(metrics)
            if self.recovery:
                metrics |= self.recovery.news()
            self.events.note(metrics)
            if self.saver:
                written = metrics | self.saver.news() | self.worker_metrics.news()
                for path, error in self.saver.folder.logs.log(written):
                    self.progress.say(f"metrics    {path} is to be written later: {reason(error)}; training goes on")
        if self.observers.on_step and self.observers.on_step(metrics["step"], metrics) is True:
            self.enough = True

    def _sample(self, state: State) -> None:
        """Print a sample, if there is to be one."""
        if sampler := self.observers.sampler:
            with self.timed("samples"):
                self.progress.show(sampler(self.scheduler, state))

    def _sample_last(self, state: State) -> None:
        """Print a sample of the trained model, which is saved by now."""
        try:
            if self.observers.sampler:
                self.progress.show(f"\n{self.observers.sampler(self.scheduler, state)}")
        except WorkerLost as error:
            self.progress.say(f"sample     there is none: {error.rule}; got {error.got}")

    def _save(self, state: State, *, checked: bool) -> None:
        """Begin to write a checkpoint if one is due; checked: whether the parameters are known to be finite."""
        if not self.saver:
            return
        with self.timed("checkpoints"):
            loss = self.validated.get(state.step)
            if self.saver.due(state.step, loss):
                if not checked:
                    self.finite.require_state(self.scheduler, state, state.step - 1)
                self.saver.save(state, self._facts(state), loss)

    def _resolved(self) -> dict[str, Any]:
        return self.job.resolved(self.scheduler, self.steps.chunk, self.steps.grain)

    def _facts(self, state: State) -> dict[str, Any]:
        """Return the entries of a checkpoint's state.json."""
        own = {"horizon": self.job.horizon.facts(self.seconds), "outliers": self.outliers.facts(state.step)}
        return checkpoint_facts(self.job, self._resolved(), state.step) | own

    def _save_what_is_left(self) -> None:
        """Save the newest recovery point of a run whose cluster is lost, where it can be had without its workers."""
        with suppress(WorkerLost, OSError):
            state = self.recovery.points.newest_whole() if self.recovery else None
            if self.saver and state and state.step > self.saver.saved:
                self.saver.save(state, self._facts(state), self.validated.get(state.step), last=True)

    def _finished(self, state: State, stopped: bool) -> Result:
        """Save the last state and return the result of the run."""
        self.events.flush()
        result = self.result
        result.seconds, result.stopped = time.perf_counter() - self.start, stopped
        self.finite.require_state(self.scheduler, state, max(state.step - 1, 0))
        result.checkpoint = step_folder(self.folder.path, state.step) if self.folder else None
        if result.checkpoint and not self.scheduler.in_place:
            result.read = partial(_parameters_in, result.checkpoint)
        else:
            result.read = partial(dict, state.parameters(self.scheduler))
        self.progress.close()
        for line in self.worker_metrics.lines():
            self.progress.say(line)
        del self.losses[state.step :]  # of steps that a loss has taken back
        if self.saver:
            self.saver.save(state, self._facts(state), self.validated.get(state.step), last=True)
            if self.job.run.minutes:  # the number of steps is known now
                self.saver.folder.configure(self._resolved())
            self.saver.folder.logs.sync()
        return result

    @property
    def seconds(self) -> float:
        """Seconds that the run has trained, earlier processes included."""
        return self.initial.seconds + time.perf_counter() - self.start

    def wait(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self.saver:
            self.saver.wait()

    def close(self) -> None:
        """Release what the run holds, on a cluster its state and the copies of it."""
        self.recovery = None
        self.steps.close()
        self.loader.close()
        self.progress.close()
        if self.folder:
            self.folder.close()

    def error_of(self, loss: WorkerLost) -> RuntimeError:
        """Return the error of a run whose cluster is lost; it names the checkpoint to resume from."""
        kind, advice = RuntimeError, "Start again: there is no checkpoint."
        if self.folder and checkpoints(self.folder.path):
            kind, advice = CanGoOn, f"Continue with --resume {self.folder.path}."
        return refusal(kind, loss.where, loss.rule, loss.got, advice)


def _parameters_in(checkpoint: Path) -> dict[str, np.ndarray]:
    return load(checkpoint)[1]
