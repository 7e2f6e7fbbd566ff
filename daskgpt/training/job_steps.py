"""The steps of a job on a scheduler: recorded once, chunks and grain settled with the first ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from daskgpt.graph.distribute import Rank
from daskgpt.graph.recording import StepGraph
from daskgpt.schedulers.machine import available_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.autotune import ChunkChoice, GrainChoice
from daskgpt.training.job import Job
from daskgpt.training.step import NO_LIMITS, Batch, Limits, Outcome, State, StepOptions, TrainingStep


def training_step(
    job: Job, chunk: tuple[int, int], grain: str, in_place: bool, rank: Rank | None = None
) -> TrainingStep:
    """Record a job's step.

    rank    the rank that makes it, where several processes share a batch
    """
    return TrainingStep(
        job.config,
        job.batch_shape,
        chunk,
        job.optimizer,
        job.precision,
        StepOptions(grain, job.dataflow.barrier, in_place, job.groups, micro_batches_of(job, rank), job.run.seed),
        rank,
    )


def micro_batches_of(job: Job, rank: Rank | None) -> int:
    """Return the number of micro-batches of a rank, none larger than the rank's share of one of the job's."""
    if rank is None:
        return job.data.accumulate
    first, last = rank.sequences_of(rank.number)
    own, most = last - first, max(1, job.data.batch_size // rank.count)
    return min(count for count in range(1, own + 1) if (own % count == 0 and own // count <= most) or count == own)


class Steps:
    """Runs the steps of a job: the interface that `JobSteps`, `LocalSteps` and `RankSteps` have in common.

    step      the recorded step
    chunks    the choice of its chunks
    open      whether the next step is measured to choose chunks or grain, and must run alone
    recovers  whether a run survives the loss of a worker
    recorded  the graph of a step; None if kernel calls are recorded elsewhere
    described_tasks   what a task is, for people
    """

    job: Job
    step: TrainingStep
    chunks: ChunkChoice
    open = False
    recovers = False
    recorded: StepGraph | None = None
    described_tasks = ""

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

    def close(self) -> None:
        """Release what steps hold outside of this process."""


class JobSteps(Steps):
    """Runs a job's steps on a scheduler; chunks and grain are chosen with the first ones.

    choice   the choice of its grain
    """

    def __init__(
        self, job: Job, scheduler: Scheduler, say: Callable[[str], None] = print, rank: Rank | None = None
    ) -> None:
        """say   prints a line on what was chosen
        rank  see `training_step`
        """
        self.job, self.scheduler, self.say = job, scheduler, say
        dataflow, shape = job.dataflow, job.micro_shape
        if rank:
            first, last = rank.sequences_of(rank.number)
            shape = (last - first) // micro_batches_of(job, rank), shape[1]
            # The given number is of the whole batch.
            dataflow = replace(dataflow, batch_chunk=gcd(dataflow.batch_chunk, shape[0]) if dataflow.batch_chunk else 0)
        self.chunks = ChunkChoice(
            job.config, shape, dataflow, job.precision, scheduler.threads, in_place=scheduler.in_place
        )
        self.choice = GrainChoice(dataflow.grain, dataflow.barrier, scheduler.in_place)
        self.step = training_step(job, self.chunks.first, self.choice.first, scheduler.in_place, rank)
        if scheduler.in_place:
            window = dataflow.window if dataflow.barrier == "none" else 1
            if warning := self.chunks.fit(self.step, window, available_memory()):
                say(f"memory     {warning}")

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
        return self.chunks.open or self.choice.open

    def together(self, number: int) -> int:
        """Return how many steps from this one on may run together."""
        alone = self.job.dataflow.barrier != "none" or self.job.optimizer.skip_outliers or self.open
        return 1 if alone else self.job.dataflow.window

    def initial(
        self, parameters: Mapping[str, np.ndarray], moments: Mapping[str, np.ndarray] | None = None, step: int = 0
    ) -> State:
        """Return the state before a step, see `TrainingStep.initial`."""
        return self.step.initial(parameters, moments, step)

    def run(
        self, state: State, batches: Sequence[Batch], limits: Limits = NO_LIMITS, length: int = 0
    ) -> tuple[list[Outcome], State]:
        """Make a step a batch; return their outcomes, and the state after them.

        limits   of a step that runs alone
        length   of the run in steps; 0 = the job's
        """
        length = length or self.job.horizon.at(state.step)
        if self.open:
            with self.scheduler.record() as processes:
                handles, state = self.step.submit(self.scheduler, state, batches[0], length, limits)
                outcome = self.step.outcome(self.scheduler, handles)
            spans = [span for process in processes for span in process.spans]
            found = self.chunks.settle(self.step, spans, length - state.step) if self.chunks.open else ""
            if found:
                self.say(f"chunks     {found}")
            elif self.choice.open:  # other chunks take another step to measure
                self.say(f"grain      {self.choice.settle(self.step, spans, self.scheduler.threads)}")
            return [outcome], state
        if self.scheduler.in_place and len(batches) > 1:
            return self.step.window(self.scheduler, state, batches, length)
        submitted = []
        for own in batches:
            handles, state = self.step.submit(self.scheduler, state, own, length, limits)
            submitted.append(handles)
        return [self.step.outcome(self.scheduler, handles) for handles in submitted], state
