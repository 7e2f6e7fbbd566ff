"""The steps of a job on a scheduler of this process; chunks and grain are chosen with the first ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from daskgpt.data.dataset import Batch
from daskgpt.graph.distribute import Rank
from daskgpt.graph.program import Span
from daskgpt.graph.recording import StepGraph
from daskgpt.schedulers.machine import available_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.autotune import ChunkChoice, GrainChoice
from daskgpt.training.job import Arrays, Job, Say
from daskgpt.training.step import (
    NO_LIMITS,
    Limits,
    Outcome,
    State,
    TrainingStep,
    micro_batches_of,
    training_step,
)


class Steps(ABC):
    """Runs the steps of a job: the interface that `JobSteps` and `RankSteps` have in common.

    chunks    the choice of the chunks
    open      whether the next step is measured to choose chunks or grain, and must run alone
    recorded  the graph of a step; None if kernel calls are recorded elsewhere
    described_tasks   what a task is, for people
    ranks     whether the workers of a cluster share each batch
    """

    job: Job
    step: TrainingStep
    chunks: ChunkChoice
    open = False
    recorded: StepGraph | None = None
    described_tasks = ""
    ranks = False

    @abstractmethod
    def together(self, number: int) -> int:
        """Return how many steps from this one on may run together."""

    @abstractmethod
    def initial(self, parameters: Arrays, moments: Arrays | None = None, step: int = 0) -> State:
        """Return the state before a step, see `TrainingStep.initial`."""

    @abstractmethod
    def run(self, state: State, batches: Sequence[Batch], limits: Limits = NO_LIMITS) -> tuple[list[Outcome], State]:
        """Make a step a batch; return their outcomes, and the state after them.

        limits   of a step that runs alone
        """

    @property
    def grain(self) -> str:
        """The grain of the coming steps."""
        return self.job.dataflow.grain

    @property
    def chunk(self) -> tuple[int, int]:
        """Sequences and tokens in a chunk of the coming steps."""
        return self.step.chunk

    @property
    def described_chunks(self) -> str:
        """Number and size of the chunks, and why, for people."""
        return self.chunks.described(self.chunk)

    def close(self) -> None:  # noqa: B027
        """Release what steps hold outside of this process."""


class JobSteps(Steps):
    """Runs a job's steps on a scheduler; chunks and grain are chosen with the first ones.

    choice   the choice of its grain
    """

    def __init__(
        self, job: Job, scheduler: Scheduler, say: Say = print, rank: Rank | None = None, memory: float | None = None
    ) -> None:
        """say     prints a line on what was chosen
        rank    see `training_step`
        memory  bytes that a step may take; None for what is available
        """
        self.job, self.scheduler, self.say, self.memory = job, scheduler, say, memory
        dataflow, shape = job.dataflow, job.micro_shape
        if rank:
            first, last = rank.sequences_of(rank.number)
            shape = (last - first) // micro_batches_of(job, rank), shape[1]
            # The given number is of the whole batch.
            dataflow = replace(dataflow, batch_chunk=gcd(dataflow.batch_chunk, shape[0]) if dataflow.batch_chunk else 0)
        self.chunks = ChunkChoice(job.config, shape, dataflow, job.precision, scheduler.threads)
        self.choice = GrainChoice(dataflow.grain, dataflow.barrier, scheduler.in_place)
        threads = scheduler.threads
        self.step = training_step(job, self.chunks.first, self.choice.first, scheduler.in_place, rank, threads)
        if scheduler.in_place:
            window = dataflow.window if dataflow.barrier == "none" else 1
            if warning := self.chunks.fit(self.step, window, self.available):
                say(f"memory     {warning}")

    @property
    def available(self) -> float:
        """Bytes that a step may take."""
        return available_memory() if self.memory is None else self.memory

    @property
    def recorded(self) -> StepGraph:  # type: ignore[override]
        return self.step.recorded

    @property
    def grain(self) -> str:
        """The grain of the coming steps, or `auto` while it is open."""
        return "auto" if self.choice.open else self.step.grain

    @property
    def described_tasks(self) -> str:  # type: ignore[override]
        """Grain and number of a step's tasks, and what they cost on a cluster, for people; empty while it is open."""
        if self.choice.open:
            return ""
        text = f"{self.step.grain}, {self.step.runnable.tasks} tasks a step"
        return text if self.step.in_place else f"{text}, each of which costs Dask's scheduler some milliseconds"

    @property
    def open(self) -> bool:  # type: ignore[override]
        # Out of place the state has another layout with other chunks, and with another grain.
        return self.scheduler.in_place and (self.chunks.open or self.choice.open)

    def together(self, number: int) -> int:
        alone = self.job.dataflow.barrier != "none" or self.job.optimizer.skip_outliers or self.open
        return 1 if alone else self.job.dataflow.window

    def initial(self, parameters: Arrays, moments: Arrays | None = None, step: int = 0) -> State:
        return self.step.initial(parameters, moments, step)

    def settle(self, spans: Sequence[Span], steps: int) -> None:
        """Choose chunks or grain by the kernel calls of a step.

        steps   how many remain
        """
        found = self.chunks.settle(self.step, spans, steps) if self.chunks.open else ""
        if found:
            self.say(f"chunks     {found}")
        elif self.choice.open:  # other chunks take another step to measure
            self.say(f"grain      {self.choice.settle(self.step, spans, self.scheduler.threads, self.available)}")

    def run(self, state: State, batches: Sequence[Batch], limits: Limits = NO_LIMITS) -> tuple[list[Outcome], State]:
        length = self.job.horizon.at(state.step)
        if self.open:
            with self.scheduler.record() as processes:
                handles, state = self.step.submit(self.scheduler, state, batches[0], length, limits)
                outcome = self.step.outcome(self.scheduler, handles)
            self.settle([span for process in processes for span in process.spans], length - state.step)
            return [outcome], state
        if self.scheduler.in_place and len(batches) > 1:
            return self.step.window(self.scheduler, state, batches, length)
        submitted = []
        for own in batches:
            handles, state = self.step.submit(self.scheduler, state, own, length, limits)
            submitted.append(handles)
        return [self.step.outcome(self.scheduler, handles) for handles in submitted], state
