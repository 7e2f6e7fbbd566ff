"""The steps of a job on a scheduler: recorded once, chunks and grain settled with the first ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from daskgpt.graph.messages import Rank
from daskgpt.graph.program import Span
from daskgpt.graph.recording import StepGraph
from daskgpt.schedulers.machine import available_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.autotune import ChunkChoice, GrainChoice
from daskgpt.training.job import Job
from daskgpt.training.step import NO_LIMITS, Batch, Limits, Outcome, State, StepOptions, TrainingStep


def training_step(
    job: Job, chunk: tuple[int, int], grain: str, in_place: bool, rank: Rank | None = None
) -> TrainingStep:
    """A job's step, recorded.

    rank    whose step it is, where several processes share a batch
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
    """How many micro-batches a rank's sequences are: each has as many as its share of one of the job's, or fewer."""
    if rank is None:
        return job.data.accumulate
    first, last = rank.sequences_of(rank.number)
    own, most = last - first, max(1, job.data.batch_size // rank.count)
    return min(count for count in range(1, own + 1) if (own % count == 0 and own // count <= most) or count == own)


class JobSteps:
    """Runs a job's steps, as many together as are handed over.

    step     the recorded step
    chunks   the choice of its chunks
    choice   of its grain
    open     while one of them is, the next step is measured and must come alone
    """

    recovers = False  # from the loss of a worker

    def __init__(
        self, job: Job, scheduler: Scheduler, say: Callable[[str], None] = print, rank: Rank | None = None
    ) -> None:
        """say   where it is told what was found
        rank  see `training_step`
        """
        self.job, self.scheduler, self.say = job, scheduler, say
        dataflow, shape = job.dataflow, job.micro_shape
        if rank:
            first, last = rank.sequences_of(rank.number)
            shape = (last - first) // micro_batches_of(job, rank), shape[1]
            # What was asked for is of the whole batch.
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
    def recorded(self) -> StepGraph:
        """The graph of a step, of which kernel calls can be recorded."""
        return self.step.recorded

    @property
    def grain(self) -> str:
        """Of the steps to come; auto while it is open."""
        return "auto" if self.choice.open else self.step.grain

    @property
    def chunk(self) -> tuple[int, int]:
        """Sequences and tokens in a chunk of the steps to come."""
        return self.step.chunk

    @property
    def described_chunks(self) -> str:
        """How many of which size, and why, for people."""
        return self.chunks.described(self.chunk)

    @property
    def described_tasks(self) -> str:
        """Size and number of a step's tasks, and what that means on a cluster, for people; nothing while it is open."""
        text = f"{self.step.grain}, {self.step.runnable.tasks} tasks a step"
        if self.choice.open:
            return ""
        return text if self.step.in_place else f"{text}, each of which costs Dask's scheduler some milliseconds"

    @property
    def open(self) -> bool:
        return self.chunks.open or self.choice.open

    def together(self, number: int) -> int:
        """How many steps from this one on may be handed over together."""
        alone = self.job.dataflow.barrier != "none" or self.job.optimizer.skip_outliers or self.open
        return 1 if alone else self.job.dataflow.window

    def initial(
        self, parameters: Mapping[str, np.ndarray], moments: Mapping[str, np.ndarray] | None = None, step: int = 0
    ) -> State:
        """The state before the first step, see `TrainingStep.initial`."""
        return self.step.initial(parameters, moments, step)

    def run(
        self, state: State, batches: Sequence[Batch], limits: Limits = NO_LIMITS, length: int = 0
    ) -> tuple[list[Outcome], State]:
        """A step a batch: what they tell, and the state after them.

        limits   of a step that comes alone
        length   of the run in steps; 0 = as the job says
        """
        length = length or self.job.horizon.at(state.step)
        if self.open:
            with self.scheduler.record() as processes:
                handles, state = self.step.submit(self.scheduler, state, batches[0], length, limits)
                outcome = self.step.outcome(self.scheduler, handles)
            spans = [span for process in processes for span in process.spans]
            self._settle(spans, length - state.step)
            return [outcome], state
        if self.scheduler.in_place and len(batches) > 1:
            return self.step.window(self.scheduler, state, batches, length)
        submitted = []
        for own in batches:
            handles, state = self.step.submit(self.scheduler, state, own, length, limits)
            submitted.append(handles)
        return [self.step.outcome(self.scheduler, handles) for handles in submitted], state

    def close(self) -> None:
        """Nothing is held elsewhere."""

    def _settle(self, spans: Sequence[Span], steps: int) -> None:
        """Chunks first; the grain of other chunks takes another step to measure."""
        found = self.chunks.settle(self.step, spans, steps) if self.chunks.open else ""
        if found:
            self.say(f"chunks     {found}")
        elif self.choice.open:
            self.say(f"grain      {self.choice.settle(self.step, spans, self.scheduler.threads)}")
