"""Engines, which run the compiled steps of a job and hold the state that the steps change.

`LocalEngine` runs on the threads of this process, `TaskEngine` gives each task of a step to Dask's scheduler on a
cluster, and `RankEngine` (`training/rank_engine.py`) lets the workers of a cluster share each batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np

from daskgpt.config.errors import number_of
from daskgpt.config.model import ModelConfig
from daskgpt.data.dataset import Batch
from daskgpt.graph.compiled import Layout
from daskgpt.graph.distribute import Rank
from daskgpt.graph.program import Span
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import FLOAT32, Precision, values_of
from daskgpt.model.step import Arrays, CompiledStep, Dials, Outcome, as_weights, compile_step, weights_in
from daskgpt.schedulers.local import return_memory
from daskgpt.schedulers.machine import available_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.autotune import ChunkChoice, GrainChoice
from daskgpt.training.job import Job, Say


@dataclass(frozen=True)
class State:
    """Parameters and moments by name, packed by `layout`, where a scheduler holds them.

    Names are "weight.NAME" and "MOMENT.NAME" (m and v, say); a state for inference has weights only.

    packs   arrays of this process, or handles of results on a cluster
    step    number of steps before it
    """

    layout: Layout
    packs: Sequence[Any]
    step: int = 0

    @classmethod
    def of_weights(cls, config: ModelConfig, parameters: Arrays, precision: Precision = FLOAT32) -> State:
        """Return a state of parameters alone, for inference."""
        weights = as_weights(
            {name: precision.hold(tensor, parameters[name]) for name, tensor in tensors(config).items()}
        )
        layout = Layout((tuple(weights),))
        return cls(layout, layout.pack(weights))

    @property
    def weights(self) -> State:
        """The packs that hold parameters."""
        chosen = [(names, pack) for names, pack in zip(self.layout.packs, self.packs) if holds_weights(names)]
        return State(Layout(tuple(names for names, _ in chosen)), [pack for _, pack in chosen], self.step)

    def parameters(self, scheduler: Scheduler) -> dict[str, np.ndarray]:
        """Return the parameters as arrays of this process."""
        weights = self.weights
        return named_parameters(weights.layout.unpack(scheduler.fetch(list(weights.packs))))


def holds_weights(names: Sequence[str]) -> bool:
    """Return whether a pack of these names holds parameters."""
    return any(name.startswith("weight.") for name in names)


def named_parameters(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the parameters among a state's arrays."""
    return {name: values_of(value) for name, value in weights_in(values).items()}


class Engine(ABC):
    """Runs the steps of a job and holds the state that they change.

    What is not abstract fits an engine with one compiled step, for all sequences that it computes.

    ranks       whether the workers of a cluster share each batch
    undecided   whether the next step is measured to choose chunks or grain, and must run alone
    recorder    instrument that records its kernel calls: one at most
    step        the compiled step
    current     the state after the last step
    """

    job: Job
    scheduler: Scheduler
    recorder: Any = None
    ranks = False
    undecided = False
    step: CompiledStep
    current: State

    def _compile(self, rank: Rank | None = None) -> None:
        """Choose first chunks and grain, and compile the step with them."""
        job, scheduler, dataflow, shape = self.job, self.scheduler, self.job.dataflow, self.job.micro_shape
        parts = job.data.accumulate
        if rank:
            rows = rank.sequences_of(rank.number)
            # No micro-batch is larger than the rank's share of one of the job's.
            sequences, most = rows.stop - rows.start, max(1, job.data.batch_size // rank.count)
            parts = next(n for n in range(1, sequences + 1) if sequences % n == 0 and sequences // n <= most)
            shape = sequences // parts, shape[1]
            # The given number is of the whole batch.
            dataflow = replace(dataflow, batch_chunk=gcd(dataflow.batch_chunk, shape[0]) if dataflow.batch_chunk else 0)
        self.chunks = ChunkChoice(job.config, shape, dataflow, scheduler.threads, job.optimizer.dropout)
        self.choice = GrainChoice(dataflow.grain, dataflow.barrier, scheduler.in_place)
        given = dataflow.barrier, scheduler.in_place, parts, scheduler.threads, job.groups, job.precision
        dials = Dials(self.chunks.first, self.choice.first, *given)
        self.step = compile_step(job.config, job.batch_shape, job.optimizer, dials, rank)

    def start(self, parameters: Arrays, moments: Arrays | None = None, step: int = 0) -> None:
        """Begin with a state, see `initial`."""
        self.resume(self.initial(parameters, moments, step))

    def initial(self, parameters: Arrays, moments: Arrays | None = None, step: int = 0) -> State:
        """Return a state to begin with. In place it is overwritten: keep a copy of the given arrays if you need them.

        moments   "MOMENT.NAME" of every tensor that has it; None = zeros
        step      number of steps before it
        """
        packs = [self.scheduler.held(pack) for pack in self.step.state(parameters, moments)]
        return State(self.step.layout, packs, step)

    def resume(self, state: State) -> None:
        """Continue from a state that the scheduler holds."""
        self.current = state

    def run(self, batches: Sequence[Batch], steps: int) -> list[Outcome]:
        """Run one step per batch; return their outcomes.

        steps    number of steps of the run, on which the learning rate depends
        """
        outputs, packs = self.scheduler.outputs(self.step, self.inputs(batches, steps), self.current.packs)
        self.current = State(self.current.layout, packs, self.made + len(outputs))
        return [Outcome.of(outputs_of_step) for outputs_of_step in outputs]

    def inputs(self, batches: Sequence[Batch], steps: int) -> list[Arrays]:
        """Return the inputs of the next steps."""
        seed = self.job.run.seed
        return [self.step.inputs(batch, number, steps, seed) for number, batch in enumerate(batches, self.made)]

    def state(self) -> State:
        """Return the state after the last step. In place, the next step overwrites it."""
        return self.current

    def weights(self) -> State:
        """Return the parameters of the state, as steps hold them."""
        return self.state().weights

    @property
    def made(self) -> int:
        """Number of steps before the state."""
        return self.current.step

    def together(self) -> int:
        """Return how many of the next steps may run together, as a window."""
        alone = self.job.dataflow.barrier != "none" or self.undecided
        return 1 if alone else self.job.dataflow.window

    @property
    def chunk(self) -> tuple[int, int]:
        """Sequences and tokens in a chunk of the coming steps."""
        return self.step.dials.chunk

    @property
    def grain(self) -> str:
        """The grain of the steps; on ranks, that of the first one, or the given one before its first steps."""
        return self.step.dials.grain

    @property
    def tasks(self) -> int:
        """Number of tasks of a step."""
        return self.step.tasks

    @property
    def described_chunks(self) -> str:
        """Number and size of the chunks, and why, for people."""
        return self.chunks.described(self.chunk)

    @property
    @abstractmethod
    def described_tasks(self) -> str:
        """Description of a task, for people; empty while it is undecided."""

    def close(self) -> None:  # noqa: B027
        """Release what the engine holds outside of this process."""


class LocalEngine(Engine):
    """Runs steps in this process, which write over the state; chunks and grain are chosen with the first ones."""

    def __init__(
        self, job: Job, scheduler: Scheduler, say: Say = print, rank: Rank | None = None, memory: float | None = None
    ) -> None:
        """say     prints a line on what was chosen
        rank    this process among several that share the batch; None if it is alone
        memory  bytes that a step may take; None for what is available
        """
        self.job, self.scheduler, self.say, self.memory = job, scheduler, say, memory
        self.untidy = True  # whether memory may be in pieces of steps of other tasks
        self._compile(rank)
        window = job.dataflow.window if job.dataflow.barrier == "none" else 1
        self.step, warning = self.chunks.fit(self.step, window, self.available)
        if warning:
            say(f"memory     {warning}")

    @property
    def available(self) -> float:
        """Bytes that a step may take."""
        return available_memory() if self.memory is None else self.memory

    @property
    def undecided(self) -> bool:  # type: ignore[override]
        return self.chunks.undecided or self.choice.undecided

    @property
    def described_tasks(self) -> str:
        return "" if self.choice.undecided else f"{self.grain}, {number_of(self.tasks, 'task')} a step"

    def tune(self, spans: Sequence[Span], steps: int) -> None:
        """Choose chunks or grain by the kernel calls of a step; steps: how many remain."""
        if self.chunks.undecided:
            self.step, line = self.chunks.choose(self.step, spans, steps)
            if line:  # other chunks take another step to measure
                return self.say(f"chunks     {line}")
        if self.choice.undecided:
            self.step, line = self.choice.choose(self.step, spans, self.scheduler.threads, self.available)
            self.say(f"grain      {line}")

    def run(self, batches: Sequence[Batch], steps: int) -> list[Outcome]:
        if not self.undecided:
            outcomes = super().run(batches, steps)
            if self.untidy:  # by now the chosen tasks have made what they keep
                return_memory()
                self.untidy = False
            return outcomes
        with self.scheduler.record() as processes:
            outcomes = super().run(batches[:1], steps)
        self.tune([span for process in processes for span in process.spans], steps - self.made)
        return outcomes


class TaskEngine(Engine):
    """Runs steps on a cluster whose scheduler places each task; the state is replaced by results of a step."""

    def __init__(self, job: Job, scheduler: Scheduler) -> None:
        self.job, self.scheduler = job, scheduler
        self._compile()

    @property
    def described_tasks(self) -> str:
        return f"{self.grain}, {self.tasks:,} tasks a step, each of which costs Dask's scheduler some milliseconds"
