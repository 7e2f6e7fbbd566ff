"""Training: `fit` from configurations to a result, and the loop of batches, steps, metrics and checkpoints."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from daskgpt.config.errors import number_of, refusal, require
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.config.stopping import CanGoOn, finishing_first
from daskgpt.data.dataset import BatchLoader
from daskgpt.model.parameters import check_config, check_finite, check_parameters, merged
from daskgpt.model.step import Arrays
from daskgpt.schedulers.opening import open_scheduler, resolved_address, resume_flags
from daskgpt.schedulers.protocol import TOPIC, ClusterLost, Scheduler, WorkerLost
from daskgpt.training.checkpoint import checkpoints, load, step_folder
from daskgpt.training.engine import Engine, LocalEngine, State, TaskEngine
from daskgpt.training.inference import Validation
from daskgpt.training.job import Job, Say, compile_kernels, describe, require_memory
from daskgpt.training.metrics import SHOWN, Finite, Progress, StepMetrics
from daskgpt.training.run_folder import Saver, fetched_arrays
from daskgpt.training.start import (
    Start,
    WarmStart,
    beginning,
    checkpoint_facts,
    configurations,
    given_settings,
    new_run,
    resumed_run,
)

if TYPE_CHECKING:
    from daskgpt.training.recovery import Recovery


@dataclass(eq=False, repr=False)
class Result:
    """The result of a run.

    Fields   config: ModelConfig
                 size of the model
             parameters: dict[str, np.ndarray]
                 GPT-2's tensors under their published names, float32, adapters merged; of a cluster's run with a folder
                 they are read from there when they are first used
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
    """

    config: ModelConfig
    held: Arrays | None  # parameters in this process; None for those of the checkpoint
    losses: list[float]
    validation_loss: float
    seconds: float
    checkpoint: Path | None = None
    first: int = 0
    stopped: bool = False
    bits_a_byte: float = math.nan

    @cached_property
    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters. Errors   as of `daskgpt.load` where they are read"""
        return dict(self.held) if self.held is not None else load(self.checkpoint or "")[1]

    def __repr__(self) -> str:
        """Return two lines without any array."""
        steps, validation, loss = len(self.losses), "", ""
        if not math.isnan(self.validation_loss):
            validation = f", {self.validation_loss:.3f} on held-out text"
        if steps:
            loss = f"loss {self.losses[0]:.3f} nats a token in the first step, {self.losses[-1]:.3f} in the last"
        made = f"{steps - self.first} of " if self.first else ""
        return f"{loss}{validation}\n{made}{number_of(steps, 'step')} in {self.seconds:.1f} s".lstrip()


Sampler = Callable[[Scheduler, State], str]  # text that a state writes
Changes = Mapping[str, Any]  # of a configuration, by the names of its fields


class Callback(Protocol):
    """An instrument that observes some steps of a run."""

    def begin(self, job: Job, engine: Engine) -> int:
        """Prepare before the first step; return the number of the first step to observe."""

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

    parameters   initial values, float32; None for those of `run.init`, or random ones. Adapters begin at random
    resume       a run folder to continue from its newest good checkpoint. Its settings are kept but for those that are
                 given: in a mapping (`run={"steps": 4000}`), or in a configuration by values other than the defaults
    client       a `distributed.Client` whose cluster runs the tasks, in place of `dataflow.scheduler`; it stays open,
                 and nothing of the run stays on its cluster. None for the active Client of this process, if it has one
                 and dataflow names no scheduler. In a task of a Dask worker a run has one thread, and no client
    on_step      called with (step, metrics) after each step, counted from 0; if it returns True the run ends as with
                 Ctrl-C, with a checkpoint, and can be resumed
    callbacks    instruments that observe steps, such as `daskgpt.TimelineCallback`
    quiet        whether to print no header and no progress; what precedes the run, such as compiling, is printed

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
    if client is not None:
        from daskgpt.schedulers.connect import client_address

        dataflow = {**given_settings("fit", "dataflow", dataflow), "scheduler": client_address(client)}
    sections = {"model": config, "data": data, "optimizer": optimizer, "dataflow": dataflow, "run": run}
    if resume is not None:
        rule, advice = "a run that is resumed has its own parameters", "Leave parameters out, or resume."
        require(parameters is None, "fit", rule, {"resume": resume}, advice)
        changes = {name: given_settings("fit", name, given) for name, given in sections.items()}
        job, start = resumed_run(os.fspath(resume), changes, connects=client is None)
    else:
        rule, advice = "a new run must have the size of a model", "Give daskgpt.preset, say."
        require(config is not None, "fit", rule, {"config": config}, advice)
        check_config("fit", config)
        settings = configurations("fit", sections)
        size: ModelConfig = settings.pop("model")
        origin = WarmStart(settings["run"].init) if settings["run"].init else None
        if origin:
            rule = "the model's numbers must be those of the model to start from"
            origin.check_size(asdict(replace(size, lora=0)), "fit", rule, "Take them from daskgpt.load.")
        if parameters is not None:
            check_parameters(replace(size, lora=0), parameters)
        job, start = new_run(size, settings, origin, parameters, connects=client is None)
    return train(job, start, Observers(on_step, tuple(callbacks), quiet=quiet), client)


def train(job: Job, start: Start, observers: Observers, client: Any = None) -> Result:
    """Compile kernels, open the scheduler of a job, and train. The run's folder is closed."""
    try:
        compile_kernels(job.precision, job.uses)  # those of decoding at the first sample
        with open_scheduler(job.dataflow.scheduler, job.dataflow.threads, client) as scheduler:
            return run_job(job, scheduler, start, observers)
    finally:
        if start.folder:
            start.folder.close()


def run_job(job: Job, scheduler: Scheduler, start: Start, observers: Observers) -> Result:
    """Train on an open scheduler. Ctrl-C or SIGTERM ends the run after a step, with a checkpoint.

    Errors    KeyboardInterrupt at the second Ctrl-C: nothing more is saved; RuntimeError if the cluster is lost, with
              the checkpoint to resume from
    """
    scheduler.admit(job.precision.packed)
    progress = Progress(job.steps, done=start.step, quiet=observers.quiet)
    with finishing_first(progress.say) as stop_requested:
        trainer = _Trainer(job, scheduler, start, observers, progress, stop_requested)
        try:
            return trainer.run()
        except WorkerLost as loss:
            kind, advice = RuntimeError, "Start again: there is no checkpoint."
            if start.folder and checkpoints(start.folder.path):
                kind, advice = CanGoOn, f"Continue with {resume_flags(start.folder.path, job.dataflow.scheduler)}."
            raise refusal(kind, loss.where, loss.rule, loss.got, advice) from None
        finally:
            trainer.close()


def engine_of(job: Job, scheduler: Scheduler, say: Say = print) -> Engine:
    """Return the engine that runs a job's steps: in this process, task by task or on the ranks of a cluster.

    Errors   as of `require_memory`
    """
    require_memory(job, scheduler.memory_limits())
    if scheduler.in_place:
        return LocalEngine(job, scheduler, say)
    if job.dataflow.engine == "tasks":
        return TaskEngine(job, scheduler)
    from daskgpt.training.rank_engine import RankEngine

    return RankEngine(job, cast(Any, scheduler), say)


@contextmanager
def naming(steps: range, modules: Collection[str] = ()) -> Iterator[None]:
    """Add the numbers of steps, from 1, to an error that comes in one of them.

    modules   from outside of the package, in which the place of the error is named
    """
    try:
        yield
    except Exception as error:
        several = f"s {steps[0] + 1:,} to" if len(steps) > 1 else ""
        error.add_note(f"(in step{several} {steps[-1] + 1:,})")
        files = {sys.modules[name].__file__ for name in modules if name in sys.modules}
        for place in reversed(traceback.extract_tb(error.__traceback__)):
            if place.filename in files:
                error.add_note(f"({type(error).__name__} in {place.name}, {place.filename}, line {place.lineno})")
                break
        raise


@dataclass(eq=False, repr=False)
class _Trainer:
    """One run, from what it starts with to its result.

    validated   validation losses of this process, by the number of steps made
    news        metrics of what was done since the last step, for the line of the next one
    enough      whether `on_step` has ended the run
    """

    job: Job
    scheduler: Scheduler
    start: Start
    observers: Observers
    progress: Progress
    stop_requested: Callable[[], bool]

    def __post_init__(self) -> None:
        job, scheduler, start, say = self.job, self.scheduler, self.start, self.progress.say
        self.folder, self.losses = start.folder, list(start.losses)
        self.validated, self.news = dict[int, float](), dict[str, Any]()
        self.enough, self.began = False, time.perf_counter()
        self.engine = engine_of(job, scheduler, say)
        self.loader = BatchLoader(job.tokens, *job.batch_shape, job.run.seed, job.order)
        self.finite = Finite(job, self.losses)
        self.metrics = StepMetrics(job, scheduler)
        config = replace(job.config, lora=0)  # of the merged model
        self.result = Result(config, None, self.losses, start.validation, 0.0, first=start.step)
        self.validation = Validation(job, self.engine, self.stop_requested)
        self.saver: Saver | None = None
        if self.folder:
            self.saver = Saver(job, self.folder, scheduler, say, self.losses, self.news)
        self.recovery: Recovery | None = None
        if self.engine.ranks:
            from daskgpt.training.recovery import Recovery

            self.recovery = Recovery(cast(Any, self.engine), start, say, self.news)

    def run(self) -> Result:
        """Train, save the model, and let the instruments write what they observed."""
        self._begin()
        result, lost = None, None
        while result is None:
            try:
                if lost and self.recovery:
                    self.engine.resume(self.recovery.back(lost, len(self.losses)))
                else:
                    self.engine.start(self.start.parameters, self.start.moments, self.start.step)
                result = self._finished(stopped=self._train())
            except ClusterLost:
                self._save_what_is_left()
                raise
            except WorkerLost as error:
                if self.recovery is None:
                    raise
                lost = error.with_traceback(None)  # its frames hold what is lost
        if not result.stopped:  # whoever stops a run does not want to wait
            with suppress(WorkerLost):  # the model is saved by now
                self._sample()
        for callback in self.observers.callbacks:  # their files may not get written: the model is saved by now
            callback.end()
        return result

    def _train(self) -> bool:
        """Run all steps, or those until a stop is requested; return whether one was.

        Steps run together, as a window, where nothing is due between them. Those that are made again after a loss are
        not recorded, validated or reported a second time.
        """
        engine, length = self.engine, self.job.steps
        if self.job.run.init and not self.losses:
            self._sample()  # of the model to start from
        while engine.made < length:
            steps = range(engine.made, engine.made + self._together())
            with naming(steps, self.job.modules):
                batches = self.loader.take(steps)
                dials, begin = self._dials(), time.perf_counter()
                with self._observed(steps):
                    outcomes = engine.run(batches, length)
            seconds = time.perf_counter() - begin
            first_time = steps[-1] >= len(self.losses)  # else all of them are made again after a loss
            records = self.metrics.of_window(steps, outcomes, seconds, self.seconds)
            if self.saver and self._dials() != dials:  # they were chosen with this step
                self.saver.configure(self._settings())
            if first_time and engine.made == self._next_validation(steps[-1]):
                records[-1].update(self.validation.measure())
            new = records[max(len(self.losses) - steps.start, 0) :]
            for record in new:
                self._report(record)
            shown = {name: record[name] for record in new for name in SHOWN if name in record}
            if shown:
                self.scheduler.publish(TOPIC, shown)
            if engine.made == length:
                return False
            if self.enough or self.stop_requested():
                self.progress.say(f"stopped after {engine.made:,} of {length:,} steps")
                return True
            if self.recovery:
                self.recovery.after_window()
            if first_time and self.job.run.sample_every and engine.made % self.job.run.sample_every == 0:
                self._sample()
            self._save_if_due(checked="validation_loss" in records[-1])
        return False

    def _begin(self) -> None:
        """Begin to observe, write the folder's first files, print the header, and begin to watch workers."""
        job, progress, engine, start = self.job, self.progress, self.engine, self.start
        # Before anything is written: an instrument may refuse the run.
        self.callbacks = [(one.begin(job, engine), one) for one in self.observers.callbacks]
        if self.saver:
            # Once: places and versions are those of the beginning, even where a working directory or a file goes.
            self.facts = checkpoint_facts(job)
            self.place = {"scheduler": resolved_address(job.dataflow.scheduler), "threads": self.scheduler.threads}
            entry = start.entry or beginning(self.facts, start.parameters)
            self.saver.begin(self._settings(), entry, start.parameters)
        progress.say("\n".join([describe(job, self.scheduler, engine.described_chunks), *start.messages]))
        run = job.run
        self.scheduler.attend(progress.say, self.stop_requested, run.worker_seconds, run.worker_minutes)
        if engine.described_tasks:  # otherwise it is printed when it is known
            progress.say(f"grain      {engine.described_tasks}")
        self.began = time.perf_counter()
        progress.begin()

    def _together(self) -> int:
        """Return how many steps from the next one on run together: until the one after which something is due."""
        run, made = self.job.run, self.engine.made
        every = run.save_every if self.saver else 0
        ends: list[int] = [(made // count + 1) * count for count in (every, run.sample_every) if count]
        ends += [first for first, _ in self.callbacks if made < first]
        return min(self.engine.together(), min([*ends, self._next_validation(made)]) - made)

    def _next_validation(self, step: int) -> int:
        """Return how many steps will have been made at the first validation after a step."""
        every = self.job.run.validate_every or self.job.steps
        return min((step // every + 1) * every, self.job.steps)

    @contextmanager
    def _observed(self, steps: range) -> Iterator[None]:
        """Let the instruments observe steps that run together, each from the first step that it wants to see."""
        with ExitStack() as stack:
            if not self.engine.undecided:
                for first, callback in self.callbacks:
                    if steps.start >= max(first, len(self.losses)):
                        stack.enter_context(callback.watch(steps))
            yield

    def _report(self, metrics: dict[str, Any]) -> None:
        """Show and log the metrics of a step, and end the run if a number is not finite."""
        self.losses.append(metrics["loss"])
        if "validation_loss" in metrics:
            loss = self.result.validation_loss = self.validated[metrics["step"] + 1] = metrics["validation_loss"]
            self.result.bits_a_byte = metrics.get("validation_bits_a_byte", math.nan)
            if self.saver and self.saver.better(loss):
                metrics["best"] = True
        self.progress.step(metrics)
        metrics |= self.news
        self.news.clear()
        if self.saver:
            self.saver.folder.log(metrics, self.progress.say)
        if self.observers.on_step:
            answer = self.observers.on_step(metrics["step"], metrics)
            self.enough |= isinstance(answer, bool | np.bool_) and bool(answer)
        self.finite.require(self.engine, metrics)

    def _sample(self) -> None:
        """Print a sample, if there is to be one."""
        if sampler := self.observers.sampler:
            self.progress.say(sampler(self.scheduler, self.engine.weights()))

    def _save_if_due(self, *, checked: bool) -> None:
        """Write a checkpoint if one is due; checked: whether the parameters are known to be finite."""
        made = self.engine.made
        if self.saver and self.saver.due(made, self.validated.get(made)):
            if not checked:
                self.finite.require_weights(self.engine, made - 1)
            self._save(self.saver, self.engine.state())

    def _dials(self) -> dict[str, Any]:
        """Return the dials that the engine chooses, as they are now."""
        (sequences, length), grain = self.engine.chunk, self.engine.grain
        return {"batch_chunk": sequences, "sequence_chunk": length, "grain": grain}

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the run, with the dials that were chosen."""
        settings: dict[str, Any] = self.facts["configuration"]
        return settings | {"dataflow": settings["dataflow"] | self.place | self._dials()}

    def _save(self, saver: Saver, state: State, *, last: bool = False) -> None:
        facts = self.facts | {"seconds": round(self.seconds, 3)}
        saver.save(state, facts, self.validated.get(state.step), last=last)

    def _save_what_is_left(self) -> None:
        """Save the newest recovery point of a run whose cluster is lost, where it can be had without its workers."""
        with suppress(WorkerLost, OSError, ValueError):  # of numbers that are not finite
            state = self.recovery.points.newest_whole() if self.recovery else None
            if self.saver and state and state.step > self.saver.saved:
                check_finite("train", fetched_arrays(self.scheduler, state.weights))
                self._save(self.saver, state, last=True)

    def _finished(self, *, stopped: bool) -> Result:
        """Save the last state and return the result of the run."""
        result, engine = self.result, self.engine
        result.seconds, result.stopped = time.perf_counter() - self.began, stopped
        self.finite.require_weights(engine, max(engine.made - 1, 0))
        result.checkpoint = step_folder(self.folder.path, engine.made) if self.folder else None
        if self.scheduler.in_place or not result.checkpoint:
            result.held = merged(self.job.config, engine.weights().parameters(self.scheduler))[1]
        self.progress.close()
        del self.losses[engine.made :]  # of steps that a loss has taken back
        if self.saver:
            self._save(self.saver, engine.state(), last=True)
            self.saver.folder.metrics.sync()
        return result

    @property
    def seconds(self) -> float:
        """Seconds that the run has trained, earlier processes included."""
        return float(self.start.entry.get("seconds", 0.0)) + time.perf_counter() - self.began

    def close(self) -> None:
        """Release what the run holds, on a cluster its state and the copies of it."""
        self.recovery = None
        self.engine.close()
        self.loader.close()
        self.progress.close()
        if self.folder:
            self.folder.close()
