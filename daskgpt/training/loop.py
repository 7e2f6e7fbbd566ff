"""The training loop: batches through a recorded step, metrics and checkpoints into a run folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.stopping import CanGoOn, finishing_first
from daskgpt.data.dataset import BatchLoader
from daskgpt.model.schedules import learning_rate
from daskgpt.schedulers.losses import LostCluster, LostResults
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.schedulers.telling import Telling
from daskgpt.schedulers.usage import Usage
from daskgpt.training.checkpoints import checkpoints, step_folder
from daskgpt.training.finite import Finite
from daskgpt.training.job import Job, describe
from daskgpt.training.job_steps import JobSteps
from daskgpt.training.local_steps import LocalSteps
from daskgpt.training.outliers import Outliers
from daskgpt.training.progress import Progress
from daskgpt.training.recovery import Recovery
from daskgpt.training.result import Result
from daskgpt.training.resuming import Beginning, facts
from daskgpt.training.run_folder import RunFolder, load
from daskgpt.training.saving import Saver, reason
from daskgpt.training.step import State
from daskgpt.training.step_metrics import StepMetrics
from daskgpt.training.validation import Validation
from daskgpt.training.watching import Watcher

Steps = Any  # JobSteps, LocalSteps or RankSteps
Sampler = Callable[[Scheduler, State], str]  # what is shown of a state
RUNNING = RLock()  # held by the thread whose run trains; its callbacks may train as well
Watching = Sequence[tuple[int, Watcher]]  # with the first step that each wants to see


def run_job(
    job: Job,
    scheduler: Scheduler,
    beginning: Beginning,
    folder: RunFolder | None,
    on_step: Any = None,
    watchers: Sequence[Watcher] = (),
    quiet: bool = False,
    sampler: Sampler | None = None,
) -> Result:
    """The loop itself. Ctrl-C or SIGTERM ends it after a step, and it keeps what it has learnt.

    Errors   KeyboardInterrupt at the second of them: nothing more is saved then; RuntimeError where another thread of
             this process trains, under a scheduler of this process
    """
    scheduler.admit(job.precision.packed)
    scheduler.leave_silent(job.run.worker_seconds)
    progress = Progress(job.steps, done=beginning.step, quiet=quiet)
    what = "round" if job.local.local_steps else "step"
    with only_run(scheduler), finishing_first(progress.say, what) as asked_to_stop:
        loop = _Loop(job, scheduler, beginning, folder, progress, sampler)
        try:
            return loop.run(on_step, watchers, asked_to_stop)
        except Exception as error:
            loop.wait()  # for a checkpoint on its way: what ends the run came after it
            if isinstance(error, LostResults):
                raise loop.ended_by(error) from None
            raise
        finally:
            loop.steps.close()
            loop.loader.close()
            progress.close()
            if folder:
                folder.close()


def steps_of(job: Job, scheduler: Scheduler, say: Callable[[str], None] = print) -> Steps:
    """The steps that a job asks for; say is told what was found."""
    if not scheduler.in_place and (job.local.local_steps or job.dataflow.engine == "ranks"):
        from daskgpt.training.rank_steps import RankSteps  # which needs `distributed`

        return RankSteps(job, scheduler, say)  # type: ignore[arg-type]
    return (LocalSteps if job.local.local_steps else JobSteps)(job, scheduler, say)


@contextmanager
def only_run(scheduler: Scheduler) -> Iterator[None]:
    """Hold the process for one run, where its scheduler is in it: what kernels take is recorded for the process.

    Errors   RuntimeError where another thread's run holds it
    """
    alone = RUNNING if scheduler.in_place else RLock()
    rule, got = "one run at a time may train in a process", "another thread's run"
    require(alone.acquire(blocking=False), "fit", rule, got, "Wait for its end, or start a process.", RuntimeError)
    try:
        yield
    finally:
        alone.release()


class _Loop:
    """One run from where it begins to its end."""

    def __init__(
        self,
        job: Job,
        scheduler: Scheduler,
        beginning: Beginning,
        folder: RunFolder | None,
        progress: Progress,
        sampler: Sampler | None = None,
    ) -> None:
        self.sampler = sampler
        self.job, self.scheduler, self.beginning, self.folder = job, scheduler, beginning, folder
        self.progress = progress
        self.losses, self.validation = list(beginning.losses), beginning.validation
        self.bits_a_byte = math.nan  # of the same text
        self.validated: dict[int, float] = {}  # loss on the held-out text after so many steps, of this process
        self.steps = steps_of(job, scheduler, progress.say)
        self.outliers = Outliers(job.optimizer.skip_outliers, beginning.outliers)
        self.finite = Finite(job, self.losses, self.wait)
        self.loader = BatchLoader(job.tokens, job.data.sequences, job.data.sequence_length, job.run.seed, job.order)
        self.usage, self.telling = Usage(scheduler), Telling(scheduler)
        self.told = StepMetrics(job, self.usage, self.steps, lambda: self.seconds)
        known = beginning.step, beginning.spared, beginning.best
        self.saver = Saver(job, folder, scheduler, progress.say, *known) if folder else None
        self.enough = False  # whether `on_step` has asked to stop

    @property
    def seconds(self) -> float:
        """How long the run has trained, earlier processes included."""
        return self.beginning.seconds + time.perf_counter() - self.start

    def wait(self) -> None:
        """Until what is being saved is written."""
        if self.saver:
            self.saver.wait()

    def run(self, on_step: Any, watchers: Sequence[Watcher], asked_to_stop: Callable[[], bool]) -> Result:
        """Train, save, and let the instruments write what they have seen."""
        job, progress, steps = self.job, self.progress, self.steps
        if self.folder:
            sections = job.resolved(self.scheduler, steps.chunk, steps.grain)
            self.folder.begin(sections, self.beginning.step, job.sinks)
        if self.saver:
            self.saver.begin()
        for line in (describe(job, self.scheduler, steps.described_chunks), *self.beginning.said):
            progress.say(line)
        if steps.described_tasks:  # else it is said when it is known
            progress.say(f"grain      {steps.described_tasks}")
        watching = [(watcher.begin(job, steps, self.scheduler), watcher) for watcher in watchers]
        folder = self.folder.path if self.folder else None
        recovery = Recovery(job, self.scheduler, steps, self.beginning, folder, progress.say, asked_to_stop)
        self.usage.begin(products=bool(self.folder or on_step))
        self.start = time.perf_counter()
        progress.begin()
        result, lost = None, None
        while result is None:
            try:
                # Kept by nobody here: what a run has begun with would stay on the workers until its end.
                state, stopped = self._train(
                    self._first_state(recovery, lost), watching, on_step, asked_to_stop, recovery
                )
                result = self._result(state, stopped)
                if not stopped:  # whoever stops it does not want to wait
                    self._show_sample(state)
            except LostCluster:
                raise
            except LostResults as error:
                lost = error.with_traceback(None)  # its frames hold what is lost
                self.wait()
        for watcher in watchers:  # whose files may not get written: the model is safe by now
            watcher.end()
        return result

    def _first_state(self, recovery: Recovery, lost: LostResults | None) -> State:
        """What steps go on from: where the run begins, or what a loss has left."""
        if lost:
            return recovery.back(lost, len(self.losses))
        first = self.beginning
        state: State = self.steps.initial(first.parameters, first.moments, first.step)
        return state

    def _result(self, state: State, stopped: bool) -> Result:
        """What the run led to, saved."""
        self.telling.flush()
        seconds, step = time.perf_counter() - self.start, max(state.step - 1, 0)
        checkpoint = step_folder(self.folder.path, state.step) if self.folder else None
        if checkpoint and not self.scheduler.in_place:
            self.finite.require_state(self.scheduler, state, step)
            read = partial(_parameters_in, checkpoint)
        else:
            parameters = state.parameters(self.scheduler)
            self.finite.require_parameters(step, parameters)
            read = partial(dict, parameters)
        self.progress.close()
        for line in self.usage.lines():
            self.progress.say(line)
        del self.losses[state.step :]  # of steps that a loss has taken back
        if self.saver and self.folder:
            self.saver.save(state, self._facts(state), self.validated.get(state.step), last=True)
            if self.job.run.minutes:  # the number of steps is known now
                self.folder.configure(self.job.resolved(self.scheduler, self.steps.chunk, self.steps.grain))
            self.folder.logs.write()
        first = self.beginning.step
        told = self.losses, self.validation, seconds, checkpoint, first, stopped, self.bits_a_byte
        return Result(self.job.config, read, *told, self.told.besides.seconds)

    def _show_sample(self, state: State) -> None:
        """At the end, where the model is safe by now."""
        try:
            if self.sampler:
                self.progress.show(f"\n{self.sampler(self.scheduler, state)}")
        except LostResults as error:
            self.progress.say(f"sample     there is none: {error.rule}; got {error.got}")

    def ended_by(self, error: LostResults) -> RuntimeError:
        """The error that ends a run whose cluster is lost: whether there is a checkpoint to go on from."""
        if self.folder and checkpoints(self.folder.path):
            advice = f"Go on with --resume {self.folder.path}."
            return refusal(CanGoOn, error.where, error.rule, error.got, advice)
        advice = "Start again: there is no checkpoint."
        return refusal(RuntimeError, error.where, error.rule, error.got, advice)

    def _train(
        self,
        state: State,
        watching: Watching,
        on_step: Any,
        asked_to_stop: Callable[[], bool],
        recovery: Recovery,
    ) -> tuple[State, bool]:
        """All steps, or those until somebody asks to stop: the state after them, and whether somebody has.

        Steps that a loss has taken back are made again, and told to nobody a second time.
        """
        job, steps, known, settled = self.job, self.steps, len(self.losses), not self.steps.open
        besides = self.told.besides.of
        validation = Validation(job, self.scheduler, asked_to_stop)
        for latest, metrics in _steps(
            job, steps, state, watching, self.saver, known, self.told, self.outliers, self.loader, validation
        ):
            state = latest
            if metrics["step"] >= known:
                if self.folder and not settled:
                    # What was chosen with this step, over what stood there.
                    self.folder.configure(job.resolved(self.scheduler, steps.chunk, steps.grain))
                    settled = not steps.open
                self._note(metrics, recovery, on_step)
                with besides("validation" if "validation_loss" in metrics else "logs"):
                    self.finite.require(self.scheduler, state, metrics)
            # Of steps that overlap there is a state after the last one only.
            if state.step != metrics["step"] + 1 or state.step == job.steps:
                continue
            new = state.step > known and job.meets(state.step) and not steps.open
            if new and job.horizon.passed(state.step, self.seconds):
                self.progress.expect(job.steps)
            if (self.enough or asked_to_stop()) and job.meets(state.step):
                self.progress.say(f"stopped after {state.step} of {job.steps} steps")
                return state, True
            with besides("recovery points"):
                recovery.after(state)
            if not job.meets(state.step):  # replicas are on their own: there is no model to save
                continue
            every, before = job.run.sample_every, job.round_begin(metrics["step"])
            if self.sampler and every and metrics["step"] >= known and state.step // every > before // every:
                with besides("samples"):
                    self.progress.show(self.sampler(self.scheduler, state))
            if self.saver:
                with besides("checkpoints"):
                    self._save(self.saver, state, metrics)
        return state, False

    def _save(self, saver: Saver, state: State, metrics: Mapping[str, Any]) -> None:
        """Begin a checkpoint, if one is due."""
        saver.prepare(state)
        loss = self.validated.get(state.step)
        if saver.due(state.step, loss):
            if "validation_loss" not in metrics:  # else they were looked at
                self.finite.require_state(self.scheduler, state, metrics["step"])
            saver.save(state, self._facts(state), loss)

    def _note(self, metrics: Mapping[str, Any], recovery: Recovery, on_step: Any) -> None:
        """Keep and show what a step has brought."""
        with self.told.besides.of("logs"):
            self.losses.append(metrics["loss"])
            if "validation_loss" in metrics:
                self.validation = self.validated[metrics["step"] + 1] = metrics["validation_loss"]
                self.bits_a_byte = metrics.get("validation_bits_a_byte", math.nan)
                if self.saver and self.saver.better(self.validation):
                    metrics = {**metrics, "best": True}
            self.progress.step(metrics)
            metrics = {**metrics, **recovery.news()}
            self.telling.note(metrics)
            if self.saver:
                self._log({**metrics, **self.saver.news(), **self.usage.news()})
        if on_step and on_step(metrics["step"], metrics) is True:
            self.enough = True

    def _log(self, metrics: Mapping[str, Any]) -> None:
        """Metrics of a step; a full disk is said once, and no reason to end."""
        assert self.folder is not None
        for path, error in self.folder.logs.log(metrics):
            self.progress.say(f"metrics    {path} waits for room: {reason(error)}; training goes on")

    def _facts(self, state: State) -> dict[str, Any]:
        known = facts(self.job, self.scheduler, self.steps.chunk, self.steps.grain, state.step)
        return known | {
            "horizon": self.job.horizon.facts(self.seconds),
            "outliers": self.outliers.facts(state.step),
        }


def _parameters_in(checkpoint: Path) -> dict[str, np.ndarray]:
    return load(checkpoint)[1]


def _steps(
    job: Job,
    steps: Steps,
    state: State,
    watching: Watching,
    saver: Saver | None,
    known: int,
    told: StepMetrics,
    outliers: Outliers,
    loader: BatchLoader,
    validation: Validation,
) -> Iterator[tuple[State, dict[str, Any]]]:
    """State and metrics after each step.

    known   how many steps were made before: those that are made again are not looked at or validated again
    """
    number = state.step
    while number < job.steps:
        start = time.perf_counter()
        numbers = range(number, number + _together(job, steps, number, watching, saver))
        batches = loader.take(numbers)
        with ExitStack() as looking:
            if not steps.open:
                for first, watcher in watching:
                    looking.enter_context(watcher.watch(numbers) if number >= max(first, known) else nullcontext())
                looking.enter_context(nullcontext() if watching else told.watch())
            outcomes, state = steps.run(state, batches, outliers.limits(number))
        seconds = time.perf_counter() - start
        with told.besides.of("logs"):
            recorded = told.of_all(len(outcomes), seconds)
        for number, outcome in zip(numbers, outcomes):
            with told.besides.of("logs"):
                metrics = {"step": number, "loss": outcome.loss, **told.of(number, seconds / len(outcomes))}
                outliers.note(number, outcome)
                metrics |= {} if outcome.norm is None else {"norm": outcome.norm}
                metrics |= {} if outcome.made else {"skipped": True}
                metrics |= recorded if number == numbers[-1] else {}
                metrics["learning_rate"] = learning_rate(job.optimizer, number, job.horizon.at(number))
            if number >= known and number + 1 == _next_validation(job, number):
                with told.besides.of("validation"):
                    metrics |= validation.of(state, steps.chunk)
            yield state, metrics
        number += 1


def _next_validation(job: Job, number: int) -> int:
    """How many steps will have been made at the next validation: where replicas meet, if there are any."""
    every = job.run.validate_every or job.steps
    return job.round_end((job.round_begin(number) // every + 1) * every - 1)


def _together(job: Job, steps: Steps, number: int, watching: Watching, saver: Saver | None) -> int:
    """How many steps from this one on are handed over together."""
    ends = [_next_validation(job, number), *(first for first, _ in watching if number < first)]
    ends += [end] if saver and (end := saver.next_fixed(number)) else []
    ends += [end] if (end := job.horizon.next_change(number)) else []
    ends += [(number // every + 1) * every] if (every := job.run.sample_every) else []
    together: int = min(steps.together(number), min(ends) - number)
    return together
