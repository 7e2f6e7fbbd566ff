"""Time the steps of a job: how long, where the time went, how much of the machine it used."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

from daskgpt.graph.calls import PHASES
from daskgpt.instruments import machine
from daskgpt.instruments.random_tokens import random_batch
from daskgpt.instruments.records import Figure, figures_of
from daskgpt.instruments.statistics import Spread
from daskgpt.instruments.timeline import StepRecorder, Timeline
from daskgpt.instruments.timeline.colours import is_message
from daskgpt.model.parameters import RandomParameters
from daskgpt.model.step_operations import step_operations
from daskgpt.schedulers.cluster import ClusterScheduler
from daskgpt.schedulers.machine import product_rate
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job
from daskgpt.training.trainer import steps_of

RANKS_WINDOW = 8  # steps that ranks make before anybody asks: a window costs some milliseconds


@dataclass(frozen=True)
class Measurement:
    """What was found. Seconds, bytes, and operations a second.

    step         seconds a step, over the timed steps
    busy         pass -> seconds a step that kernels ran, divided by the threads; from the recorded steps
    idle         share of the threads' time in the recorded steps in which no kernel ran
    operations   of a step, see `step_operations`
    matmul_rate  of the same machine and as many threads, see `schedulers.product_rate`
    peak         most bytes in memory in the timed steps, all processes together
    """

    step: Spread
    busy: dict[str, float]
    idle: float
    operations: int
    matmul_rate: float
    peak: int
    tasks: int
    grain: str
    threads: int

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.operations / self.step.median

    def figures(self) -> dict[str, Figure]:
        """For a record of measurements."""
        return {
            **figures_of({"step": self.step}, "ms", 1e3),
            **{name: Figure.single(seconds * 1e3, "ms") for name, seconds in self.busy.items()},
            "overhead": Figure.single(self.idle, ""),
            "rate": Figure.single(self.rate / 1e9, "GFLOP/s"),
            "matmul_rate": Figure.single(self.matmul_rate / 1e9, "GFLOP/s"),
            "peak": Figure.single(self.peak / 1e9, "GB"),
        }


class Steps:
    """Training steps of a job on random tokens, ready to be run and timed."""

    def __init__(self, job: Job, scheduler: Scheduler, seed: int) -> None:
        self.job, self.scheduler, self.seed = job, scheduler, seed
        self.steps = steps_of(job, scheduler, lambda line: None)
        self.ranks = self.steps.recovers  # whether workers share a batch
        self.state = self.steps.initial(RandomParameters(job.config, seed))
        self.losses: list[float] = []

    def run(self, count: int) -> list[float]:
        """Seconds of each of some further steps, from a batch to its loss.

        Steps that overlap (barrier none), and steps of workers that share a batch, are timed together, and always so
        many: a value for each window is its mean. With --engine tasks a cluster has a step's loss before its backward
        pass, so a step is timed from loss to loss; what it still does when the last loss is there counts to the first
        step, whose time has no such part.
        """
        window = self.window
        end, seconds = len(self.losses) + count, []
        while (done := len(self.losses)) < end:
            size = min(window, end - done) if self.ranks else window
            batches = [random_batch(self.job, self.seed, done + number) for number in range(size)]
            start = perf_counter()
            outcomes, self.state = self.steps.run(self.state, batches)
            seconds.append((perf_counter() - start) / len(outcomes))
            self.losses += [outcome.loss for outcome in outcomes]
        start = perf_counter()
        self.settle()
        if seconds and not self.scheduler.in_place and not self.ranks:
            seconds[0] += (perf_counter() - start) / window
        return seconds

    def settle(self) -> None:
        """Wait until a cluster has done what it goes on doing after a step's loss is there: the updates."""
        if not self.ranks:
            self.scheduler.settle(self.state.packs)

    def recorder(self) -> Any:
        """What records these steps as a timeline."""
        if self.ranks:
            from daskgpt.instruments.timeline.ranks import RankRecorder  # which needs `distributed`

            return RankRecorder(self.steps)
        return StepRecorder(self.steps.step, self.scheduler)

    def timeline(self, count: int) -> Timeline:
        """The timeline of so many further steps, of some more where the last window has more."""
        recorder, size, done = self.recorder(), self.window, len(self.losses)
        for first in range(done, done + count, size):
            with recorder.window(range(first, first + size)):
                self.run(size)
        made: Timeline = recorder.finish()
        return made

    def recorded(self, count: int) -> tuple[dict[str, float], float]:
        """Busy seconds by pass of all threads, and seconds, both a step, over some further steps."""
        done, start = len(self.losses), perf_counter()
        timeline = self.timeline(count)
        seconds, ran = perf_counter() - start, len(self.losses) - done
        kernels = [event for event in timeline.events if not is_message(event.layer)]
        busy = {phase: sum(event.seconds for event in kernels if event.phase == phase) for phase in PHASES}
        return {name: busy[name] / ran for name in PHASES}, seconds / ran

    def reset_peak(self) -> None:
        """Let `peak` count from now on."""
        self.scheduler.everywhere(machine.reset_peak_memory, here=True)

    def peak(self) -> int:
        """Most bytes in memory since then, of this process and of the workers, together."""
        return sum(self.scheduler.everywhere(machine.peak_memory, here=True))

    def cpu(self) -> dict[tuple[str, int], float]:
        """Seconds of processor time that this process, the workers and a cluster's scheduler have used, by process."""
        found = self.scheduler.everywhere(machine.processor_time, here=True)
        if isinstance(self.scheduler, ClusterScheduler):
            found.append(self.scheduler.client.run_on_scheduler(machine.processor_time))
        return {process: seconds for own in found for process, seconds in own.items()}

    @property
    def window(self) -> int:
        """How many steps the scheduler gets at once."""
        if self.ranks:
            return RANKS_WINDOW
        return self.job.dataflow.window if self.job.dataflow.barrier == "none" else 1

    @property
    def tasks(self) -> int:
        """Tasks of one step."""
        tasks: int = self.steps.tasks if self.ranks else self.steps.step.runnable.tasks
        return tasks

    @property
    def grain(self) -> str:
        """Of the steps so far."""
        grain: str = self.steps.used_grain if self.ranks else self.steps.step.grain
        return grain


def measure(steps: Steps, warmup: int, timed: int, recorded: int) -> Measurement:
    """Run and time some steps; those in which kernels are recorded are others, so that recording slows no timed one."""
    job, scheduler = steps.job, steps.scheduler
    threads = scheduler.threads
    steps.run(warmup)
    steps.reset_peak()
    step = Spread.of(steps.run(timed))
    peak = steps.peak()
    busy, seconds = steps.recorded(recorded)
    return Measurement(
        step=step,
        busy={name: total / threads for name, total in busy.items()},
        idle=1 - sum(busy.values()) / (threads * seconds),
        operations=step_operations(job.config, *job.batch_shape),
        matmul_rate=sum(scheduler.everywhere(matmul_rate, threads)),
        peak=peak,
        tasks=steps.tasks,
        grain=steps.grain,
        threads=threads,
    )


def matmul_rate(threads: int, dask_worker: Any = None) -> float:
    """`product_rate` of this process; a worker (Dask gives it under this name) has threads of its own number."""
    return product_rate(dask_worker.state.nthreads if dask_worker else threads)
