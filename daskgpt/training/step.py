"""A training step, the table of its inputs other than the state, and the steps of a job on a scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import dask.array as da
import numpy as np

from daskgpt.config.groups import Groups
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import OptimizerConfig
from daskgpt.data.dataset import Batch
from daskgpt.graph.accumulate import MicroBatches, accumulate
from daskgpt.graph.barriers import memory_waits, stage_of
from daskgpt.graph.calls import Origin
from daskgpt.graph.distribute import Distribution, Rank, RowAccess
from daskgpt.graph.fuse import FEW_THREADS, Fusion
from daskgpt.graph.nodes import Graph, Key, array_of, from_numpy, keys_of, task
from daskgpt.graph.recording import GraphRun, Layout, StepGraph
from daskgpt.graph.update_in_place import (
    InPlaceRule,
    Rewritten,
    UpdateRules,
    elements_of_task,
    pieces_of_task,
    update_in_place,
)
from daskgpt.kernels.dropout import streams
from daskgpt.kernels.float32.blas import one_order
from daskgpt.kernels.optimizers import GRAD_INFO, squares
from daskgpt.model.gpt2 import EMBEDDED, mean_loss
from daskgpt.model.layers import CROSSENTROPY
from daskgpt.model.optimizer import SQUARES, Guarded, guarded, guards, hyper_of, hyper_size, optimizer_of, update
from daskgpt.model.parameters import Tensor, tensors
from daskgpt.model.precision import FLOAT32, Precision, read_rows, values_of, write_rows
from daskgpt.model.tape import Tape
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Arrays, Job

Found = TypeVar("Found")
Lazy = dict[str, da.Array]
Limits = tuple[float, float]  # limits of loss and norm, above which the update of a step is skipped
NO_LIMITS: Limits = (math.inf, math.inf)

# The inputs of a step other than its state, with axes and dtype: b and t are cut into the chunks of the batch.
INPUTS: Mapping[str, tuple[str, type]] = {
    "tokens": ("bt", np.int32),
    "targets": ("bt", np.int32),
    "shares": ("bt", np.float64),  # of each target's loss in the mean loss
    "positions": ("t", np.int32),  # of tokens in their sequence
    "streams": ("b", np.int64),  # keys of the random numbers of each sequence, see `kernels.dropout`
    "hyper": ("S", np.float64),  # numbers of the updates that change from step to step
}


def input_leaves(tape: Tape, batch_shape: tuple[int, int], chunk: tuple[int, int], hyper_size: int = 0) -> Lazy:
    """Return Dask arrays without data for every input, cut into chunks."""
    cut = {axis: (part,) * (whole // part) for axis, part, whole in zip("bt", chunk, batch_shape)}
    cut["S"] = (hyper_size,)
    leaves = {}
    for name, (axes, dtype) in INPUTS.items():
        own = tuple(cut[axis] for axis in axes)
        leaves[name] = array_of(f"{name}-{tape.token}", tuple(map(sum, own)), own, dtype)
    return leaves


def input_values(
    tokens: np.ndarray,
    targets: np.ndarray | None = None,
    loss_weights: np.ndarray | float = 1.0,
    *,
    count: int = 0,
    **others: np.ndarray | None,
) -> Arrays:
    """Return the inputs of a step by name, as whole arrays; those that are None are left out, for nothing reads them.

    loss_weights  of the targets, with a mean of 1 over the whole batch
    count         number of tokens of the whole batch if these are a part of it; 0 = these are all
    others        by their names in INPUTS
    """
    shares = np.full(tokens.shape, loss_weights / (count or tokens.size))
    values = {"tokens": tokens, "targets": targets, "shares": shares, **others}
    values["positions"] = np.arange(tokens.shape[1], dtype=np.int32)
    return {name: value for name, value in values.items() if value is not None}


def of_sequences(inputs: Arrays, rows: slice) -> Arrays:
    """Return the inputs of some sequences."""
    return {name: value[rows] if INPUTS[name][0].startswith("b") else value for name, value in inputs.items()}


class Outcome(NamedTuple):
    """The outcome of a step.

    loss  before the update [nats a token]
    norm  of all gradients, before they are clipped; None if nothing needs it
    made  whether the update was made
    """

    loss: float
    norm: float | None = None
    made: bool = True

    @classmethod
    def of(cls, outputs: Mapping[str, np.ndarray]) -> Outcome:
        """Return the outcome from a step's outputs."""
        norm, _, made = outputs["grad_info"][-GRAD_INFO:].tolist() if "grad_info" in outputs else (None, 1, True)
        return cls(float(outputs["loss"]), norm, bool(made))


@dataclass
class State:
    """Parameters and their moments, packed by `layout`, where the scheduler holds them.

    Names are "weight.NAME" and "MOMENT.NAME" (m and v, say); a state for inference has weights only.
    """

    layout: Layout
    packs: list[Any]
    step: int = 0

    @classmethod
    def of_weights(cls, config: ModelConfig, parameters: Arrays, precision: Precision = FLOAT32) -> State:
        """Return a state of parameters alone, for inference."""
        weights = held_weights(config, parameters, precision)
        layout = Layout((tuple(weights),))
        return cls(layout, layout.pack(weights))

    @property
    def weights(self) -> State:
        """The packs that hold parameters."""
        held = [names for names in self.layout.packs if any(name.startswith("weight.") for name in names)]
        return State(Layout(tuple(held)), [self.packs[self.layout.packs.index(names)] for names in held], self.step)

    def parameters(self, scheduler: Scheduler) -> dict[str, np.ndarray]:
        """Return the parameters as arrays of this process."""
        own = self.weights
        return named_parameters(own.layout.unpack(scheduler.fetch(own.packs)))


def as_weights(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by parameter under the names that parameters have in a state: weight.NAME."""
    return {f"weight.{name}": value for name, value in values.items()}


def weights_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values of a state that belong to parameters, under the names of the parameters."""
    return {name.removeprefix("weight."): value for name, value in values.items() if name.startswith("weight.")}


def named_parameters(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the parameters among a state's arrays."""
    return {name: values_of(value) for name, value in weights_in(values).items()}


def held_weights(config: ModelConfig, parameters: Arrays, precision: Precision) -> dict[str, Any]:
    """Return parameters as a step holds them, under their names in a state."""
    return as_weights({name: precision.hold(tensor, parameters[name]) for name, tensor in tensors(config).items()})


Calls = Iterable[tuple[Callable[..., Any], Sequence[Any]]]  # functions, each with packs of a state for its arguments


def run_on_packs(scheduler: Scheduler, name: str, calls: Calls) -> list[Any]:
    """Call functions of packs where the scheduler holds these; return handles of the results."""
    token = uuid4().hex[:8]  # another client of the cluster may run the same tasks
    graph, leaves = Graph(), dict[Key, Any]()
    for number, (function, packs) in enumerate(calls):
        key: Key = (f"{name}-{number}_-{token}",)
        own: dict[Key, Any] = {(f"{name}.of-{number}_-{token}", place): pack for place, pack in enumerate(packs)}
        graph[key] = task(key, function, own)
        leaves |= own
    return scheduler.run(GraphRun(graph, leaves, list(graph)))


def call_on_model(scheduler: Scheduler, state: State, function: Callable[[dict[str, np.ndarray]], Found]) -> Found:
    """Return the result of a function of a state's parameters.

    On a cluster the function runs in a task on a worker, so that parameters need not fit into this process.

    function   of the parameters by name; a cluster pickles it and its result

    Errors     those of the function; schedulers.failures.WorkerLost if a parameter is lost
    """
    if scheduler.in_place:
        return function(state.parameters(scheduler))
    own = state.weights
    call = partial(_call, function, own.layout), own.packs
    results: list[Found] = scheduler.fetch(run_on_packs(scheduler, "model.call", [call]))
    return results[0]


def _call(function: Callable[[dict[str, np.ndarray]], Found], layout: Layout, *packs: Any) -> Found:
    return function(named_parameters(layout.unpack(packs)))


@dataclass(frozen=True)
class StepOptions:
    """Options for recording a step; only the groups and the seed change bits of the results.

    grain       size of a task
    barrier     where all threads wait: after each layer, each phase (forward, backward, update) or the step
    in_place    whether the state's arrays are overwritten, for schedulers that never compute a task again
    groups      number of groups of sequences into which sums over the batch are divided
    accumulate  number of consecutive micro-batches into which the sequences are divided
    seed        of dropout
    threads     number of tasks that can run at once
    """

    grain: str = "block"
    barrier: str = "step"
    in_place: bool = False
    groups: int = 1
    accumulate: int = 1
    seed: int = 0
    threads: int = 2


class TrainingStep:
    """Forward, backward and update of one batch, recorded once.

    distribution   how ranks share it; None if there is only one
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_shape: tuple[int, int],
        chunk: tuple[int, int],
        optimizer: OptimizerConfig,
        precision: Precision = FLOAT32,
        options: StepOptions = StepOptions(),
        rank: Rank | None = None,
    ) -> None:
        """rank   this process among several that share the batch in place; None if it is alone"""
        first, last = rank.sequences_of(rank.number) if rank else (0, batch_shape[0])
        self.rank, self.sequences, self.whole_shape = rank, slice(first, last), batch_shape
        self.distribution: Distribution | None = None
        self.config, self.optimizer, self.precision, self.options = config, optimizer, precision, options
        self.in_place, self.barrier = options.in_place, options.barrier
        # With barriers inside a step, sums and updates are tasks of their own phases.
        self.apart = options.barrier in ("layer", "phase")
        self.row = optimizer_of(optimizer.optimizer)
        # From here on activations take more memory than weights, and tasks wait so that it is released in time.
        self.batch_shape = last - first, batch_shape[1]
        self.large = math.prod(self.batch_shape) > config.channels
        self.grain = options.grain
        self.set_chunk(chunk)

    def set_chunk(self, chunk: tuple[int, int]) -> None:
        """Record the step with other chunks. In place, the state stays valid, and no bit of the results changes if
        products sum in one order; out of place, a state belongs to its chunks.
        """
        self.chunk = chunk
        self.chunks = math.prod(whole // part for whole, part in zip(self.batch_shape, chunk))
        config, optimizer, precision = self.config, self.optimizer, self.precision
        tape = Tape(precision, self.rank.groups_of(self.rank.number) if self.rank else Groups(self.options.groups))
        inputs = input_leaves(tape, self.batch_shape, chunk, hyper_size(optimizer, self.row))
        known = tensors(config)
        state, weights = state_leaves(tape, config, precision, self.row.state(known))
        loss = mean_loss(tape, config, weights, inputs, optimizer.dropout)
        gradients = gradients_of(tape, weights, loss)
        grad_info, outputs = inputs["hyper"], {"loss": loss}
        if guards(optimizer):
            grad_info = guarded(gradients, known, loss, grad_info, optimizer, self.row, tape)
            outputs["grad_info"] = grad_info
        new = update(known, state, gradients, grad_info, optimizer, self.row, tape)
        rewrite = partial(self._rewritten, loss=keys_of(loss)[0], token=tape.token)
        own = {name: state[name] for name in new}
        self.recorded = StepGraph(tape.token, inputs, outputs, own, new, rewrite=rewrite)
        self.set_grain(self.grain)

    @property
    def micro_batches(self) -> MicroBatches:
        """The sequences of each micro-batch."""
        return MicroBatches(self.options.accumulate, self.batch_shape[0] // self.chunk[0])

    def _rewritten(self, graph: Graph, loss: Key, token: str) -> Rewritten:
        if self.options.accumulate > 1:
            ranked = self.rank is not None
            graph = accumulate(graph, self.micro_batches, token, over=self.in_place, ranked=ranked)
        if not self.in_place:
            return Rewritten(graph)
        threads = self.rank.threads if self.rank else self.options.threads
        elements = elements_of_task(threads if one_order(self.precision.dtype) else 2, self.rank is not None)
        rules = UpdateRules(self._rule, math.prod(self.batch_shape), elements, pieces_of_task(threads), (squares,))
        if self.rank is None:
            return update_in_place(graph, rules, apart=self.apart)
        access = RowAccess(read_rows, write_rows, self.precision.rounding)
        self.distribution = Distribution(graph, rules, self.rank, loss, access, token)
        return self.distribution.rewritten()

    def _rule(self, origin: Origin) -> InPlaceRule:
        """Return the rule by which a parameter is updated in place."""
        row = self.row.of(tensors(self.config)[origin.parameter])
        kernel = Guarded(row.in_place) if guards(self.optimizer) else row.in_place
        return InPlaceRule(self.precision.update(kernel), row.fused, row.whole)

    def fusion(self, grain: str) -> Fusion:
        """Return the fusion of tasks at a grain."""
        spread = self.options.threads > FEW_THREADS
        return Fusion(grain, (EMBEDDED,), SQUARES, apart=self.apart, ranked=self.rank is not None, spread=spread)

    def set_grain(self, grain: str) -> None:
        """Fuse the step's tasks to another size; the state and every bit of the results stay the same.

        Out of place, the packs of the state change with the grain: set it before the first step.
        """
        graph, ranked, waits = self.recorded.unmerged, self.rank is not None, dict[Key, list[Key]]()
        if self.large and grain != "chunk" and self.in_place and not self.apart:
            threads = self.options.threads
            waits = memory_waits(graph, CROSSENTROPY.name, self.micro_batches, threads=threads, ranked=ranked)
        runnable = self.recorded.merged(self.fusion(grain).groups(graph), waits)
        if self.apart:
            stage = stage_of(graph, self.barrier, self.micro_batches)
            runnable = runnable.with_barriers(stage, tokens=not self.in_place)
        self.runnable, self.grain = runnable, grain

    def initial(self, parameters: Arrays, moments: Arrays | None = None, step: int = 0) -> State:
        """Return the state before a step. In place it is overwritten: keep a copy of the given arrays if you need them.

        moments   "MOMENT.NAME" of every tensor that has it; None = zeros
        step      number of steps before it

        Zeros are written: with `np.zeros` the first update would fetch each moment's memory page by page from the
        system, and its kernel times, which choose chunks and grain, would be five times too long.
        """
        values = held_weights(self.config, parameters, self.precision)
        for key, tensor in self.row.state(tensors(self.config)).items():
            values[key] = moments[key] if moments else np.zeros(tensor.shape, self.precision.dtype)
            for rows in self.owned_rows(tensor.name) if not moments else ():
                values[key][rows] = 0
        return State(self.runnable.layout, self.runnable.layout.pack(values), step)

    def owned_rows(self, parameter: str) -> list[slice]:
        """Return the rows of a tensor that are updated here; all of them without other ranks."""
        if not self.rank:
            return [slice(None)]
        assert self.distribution is not None
        every = [shard for own in self.distribution.shards.values() for shard in own if shard.parameter == parameter]
        return [shard.rows for shard in every if shard.owner == self.rank.number]

    def __call__(
        self, scheduler: Scheduler, state: State, tokens: np.ndarray, targets: np.ndarray, steps: int
    ) -> tuple[float, State]:
        """Make a step; return the loss before the update and the new state. `steps` is the length of the run."""
        handles, state = self.submit(scheduler, state, (tokens, targets), steps)
        return self.outcome(scheduler, handles).loss, state

    def submit(
        self, scheduler: Scheduler, state: State, batch: Batch, steps: int, limits: Limits = NO_LIMITS
    ) -> tuple[list[Any], State]:
        """Submit a step; return handles of its loss, and the state after it, without waiting on a cluster."""
        results = scheduler.run(self.runnable.submission(self.inputs(batch, state.step, steps, limits), state.packs))
        handles, packs = self.runnable.split(results, state.packs)
        return handles, State(state.layout, packs, state.step + 1)

    def window(
        self, scheduler: Scheduler, state: State, batches: Sequence[Batch], steps: int
    ) -> tuple[list[Outcome], State]:
        """Make several overlapping steps as one graph; return their outcomes, and the state after them.

        The state must be updated in place: otherwise each step would begin with the state of the first.
        """
        values = [self.inputs(batch, number, steps) for number, batch in enumerate(batches, state.step)]
        results = scheduler.run(self.runnable.window_submission(values, state.packs))
        outcomes = [self.outcome(scheduler, own) for own in self.runnable.split_window(results, len(batches))]
        return outcomes, State(state.layout, state.packs, state.step + len(batches))

    def outcome(self, scheduler: Scheduler, handles: list[Any]) -> Outcome:
        """Wait for a submitted step and return its outcome."""
        return Outcome.of(self.runnable.output(scheduler.fetch(handles)))

    def inputs(
        self, batch: Batch, step: int, steps: int, limits: Limits = NO_LIMITS, rows: slice | None = None
    ) -> Arrays:
        """Return the inputs of a step of a run of this length.

        rows   which sequences of the run's batch these are; None for those of this rank
        """
        rows, count = rows or self.sequences, math.prod(self.whole_shape)
        hyper = hyper_of(self.optimizer, self.row, step, steps, limits)
        random = streams(self.options.seed, step, rows.stop)[rows] if self.optimizer.dropout else None
        return input_values(*batch, count=count, hyper=hyper, streams=random)


def gradients_of(tape: Tape, weights: Lazy, loss: da.Array) -> Lazy:
    """Return the gradient of the loss with respect to every parameter."""
    one = from_numpy(f"one-{tape.token}", np.ones((), loss.dtype), ())
    gradients = tape.backward(loss, one)
    return {name: gradients[weight.name] for name, weight in weights.items()}


def state_leaves(
    tape: Tape, config: ModelConfig, precision: Precision, moments: Mapping[str, Tensor] | None = None
) -> tuple[Lazy, Lazy]:
    """Return arrays without data for a state, by their names there, and those of its weights by their own names."""
    found = {
        name: array_of(f"{name}-{tape.token}", tensor.shape, tuple((size,) for size in tensor.shape), precision.dtype)
        for name, tensor in {**as_weights(tensors(config)), **(moments or {})}.items()
    }
    return found, weights_in(found)


def training_step(
    job: Job, chunk: tuple[int, int], grain: str, in_place: bool, rank: Rank | None = None, threads: int = 2
) -> TrainingStep:
    """Record a job's step.

    rank     the rank that makes it, where several processes share a batch
    threads  number of tasks that can run at once
    """
    parts = micro_batches_of(job, rank)
    options = StepOptions(grain, job.dataflow.barrier, in_place, job.groups, parts, job.run.seed, threads)
    return TrainingStep(job.config, job.batch_shape, chunk, job.optimizer, job.precision, options, rank)


def micro_batches_of(job: Job, rank: Rank | None) -> int:
    """Return the number of micro-batches of a rank, none larger than the rank's share of one of the job's."""
    if rank is None:
        return job.data.accumulate
    first, last = rank.sequences_of(rank.number)
    own, most = last - first, max(1, job.data.batch_size // rank.count)
    return min(count for count in range(1, own + 1) if (own % count == 0 and own // count <= most) or count == own)
