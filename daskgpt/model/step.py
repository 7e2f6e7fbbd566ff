"""Compile a training step: `compile_step` from a model, the shape of a batch, an optimizer and dials to tasks.

This module knows no scheduler and no state: an engine (`training/engine.py`) runs compiled steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import dask.array as da
import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.accumulate import MicroBatches, accumulate
from daskgpt.graph.barriers import memory_waits, stages_of
from daskgpt.graph.compiled import CompiledGraph, KernelGraph, compile_graph
from daskgpt.graph.distribute import Distribution, Rank
from daskgpt.graph.fuse import Fusion
from daskgpt.graph.nodes import array_of, from_numpy, graph_of, keys_of
from daskgpt.graph.sum_order import Groups
from daskgpt.graph.update_in_place import Rewritten, UpdateRules, update_in_place
from daskgpt.kernels.arguments import checked_indices
from daskgpt.kernels.dropout import streams
from daskgpt.kernels.optimizers import GRAD_INFO
from daskgpt.model.layers import CROSSENTROPY
from daskgpt.model.optimizer import clipped, optimizer_of, update
from daskgpt.model.parameters import Tensor, tensors, trained_tensors
from daskgpt.model.precision import FLOAT32, Precision
from daskgpt.model.tape import Tape
from daskgpt.model.transformer import EMBEDDED, mean_loss

Arrays = Mapping[str, np.ndarray]
Lazy = dict[str, da.Array]
T = TypeVar("T")

# The inputs of a step other than its state, with axes and dtype: b and t are cut into the chunks of the batch.
INPUTS: Mapping[str, tuple[str, type]] = {
    "tokens": ("bt", np.int32),
    "targets": ("bt", np.int32),
    "shares": ("bt", np.float64),  # of each target's loss in the mean loss
    "positions": ("t", np.int32),  # of tokens in their sequence
    "streams": ("b", np.int64),  # keys of the random numbers of each sequence, see `kernels.dropout`
    "hyper": ("S", np.float64),  # numbers of the updates that change from step to step
}


@dataclass(frozen=True)
class Dials:
    """Settings of a step beyond its model, batch and optimizer. Only groups and precision decide bits.

    chunk       sequences and tokens of a chunk
    grain       size of a task
    barrier     where all threads wait: after each layer, each phase (forward, backward, update) or the step
    in_place    whether the state's arrays are overwritten, for schedulers that never compute a task again
    accumulate  number of consecutive micro-batches into which the sequences are divided
    threads     number of tasks that can run at once
    groups      number of groups of sequences into which sums over the batch are divided
    precision   precision of products
    """

    chunk: tuple[int, int]
    grain: str = "block"
    barrier: str = "step"
    in_place: bool = False
    accumulate: int = 1
    threads: int = 2
    groups: int = 1
    precision: Precision = FLOAT32

    @property
    def apart(self) -> bool:
        """True if sums and updates are tasks of their own phases, since there are barriers within the step."""
        return self.barrier in ("layer", "phase")

    def fusion(self, ranked: bool) -> Fusion:
        """Return the choice of tasks that become one; ranked: whether several ranks share the batch."""
        return Fusion(self.grain, (EMBEDDED,), apart=self.apart, ranked=ranked, threads=self.threads)


@dataclass(frozen=True, kw_only=True)
class CompiledStep(CompiledGraph):
    """Forward, backward and update of one batch, in tasks.

    batch_shape   sequences and tokens of the whole batch
    rank          this process among several that share the batch; None if it is alone
    owned         the rows of each trained tensor that are updated here
    """

    config: ModelConfig
    batch_shape: tuple[int, int]
    optimizer: OptimizerConfig
    dials: Dials
    rank: Rank | None
    owned: Mapping[str, Sequence[slice]]

    @property
    def sequences(self) -> slice:
        """The sequences of the batch that are computed here."""
        return self.rank.sequences_of(self.rank.number) if self.rank else slice(0, self.batch_shape[0])

    @property
    def share(self) -> tuple[int, int]:
        """Number of sequences that are computed here, and tokens of each."""
        return self.sequences.stop - self.sequences.start, self.batch_shape[1]

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return math.prod(whole // part for whole, part in zip(self.share, self.dials.chunk))

    @property
    def moments(self) -> dict[str, Tensor]:
        """Arrays of the state besides the weights: "MOMENT.NAME" -> tensor of the model."""
        return optimizer_of(self.optimizer.optimizer).state(trained_tensors(self.config))

    def with_dials(self, **changed: Any) -> CompiledStep:
        """Return the step with other dials.

        In place, a state stays valid, and no bit of the results changes if products sum in one order. Out of place, the
        packs of the state change with chunks and grain.
        """
        dials = replace(self.dials, **changed)
        if changed.keys() == {"grain"}:
            tasks = in_tasks(self.kernels, self.share, self.config.channels, dials, ranked=self.rank is not None)
            return replace(self, **vars(tasks), dials=dials)
        return compile_step(self.config, self.batch_shape, self.optimizer, dials, self.rank)

    def state(self, parameters: Arrays, moments: Arrays | None = None) -> list[Any]:
        """Return the packs of a state. In place they are overwritten: keep a copy of the given arrays if you need them.

        moments   "MOMENT.NAME" of every tensor with that moment; None = zeros

        Zeros are written: with `np.zeros` the first update would fetch each moment's memory page by page from the
        system, and its kernel times, which choose chunks and grain, would be five times too long.
        """
        precision = self.dials.precision
        table = tensors(self.config)
        values = as_weights({name: precision.hold(tensor, parameters[name]) for name, tensor in table.items()})
        for key, tensor in self.moments.items():
            values[key] = moments[key] if moments else np.zeros(tensor.shape, precision.dtype)
            for rows in self.owned[tensor.name] if not moments else ():
                values[key][rows] = 0
        return self.layout.pack(values)

    def inputs(self, batch: Sequence[np.ndarray], step: int, steps: int, seed: int = 0) -> Arrays:
        """Return the inputs of a step by name, as whole arrays.

        batch    tokens, targets, and of pairs loss weights, of the sequences that are computed here
        steps    number of steps of the run, on which the learning rate depends
        seed     of dropout
        """
        hyper = np.atleast_1d(optimizer_of(self.optimizer.optimizer).hyper(self.optimizer, step, steps))
        rows = self.sequences
        for name, ids in zip(("tokens", "targets"), batch):
            checked_indices("step", name, ids, self.config.vocabulary)  # native calls do not
        random = streams(seed, step, rows.stop)[rows] if self.optimizer.dropout else None
        return input_values(*batch, count=math.prod(self.batch_shape), hyper=hyper, streams=random)


def compile_step(
    config: ModelConfig,
    batch_shape: tuple[int, int],
    optimizer: OptimizerConfig,
    dials: Dials,
    rank: Rank | None = None,
) -> CompiledStep:
    """Return the tasks of forward, backward and update of one batch.

    batch_shape   sequences and tokens of the whole batch
    rank          the process that computes its part of the batch; None for one that computes all of it. Ranks update in
                  place

    The passes are those of this function and of `in_tasks`, in order: tape, graph, micro-batches, updates in place or
    their distribution, fusion, barriers.
    """
    rows = rank.sequences_of(rank.number) if rank else slice(0, batch_shape[0])
    shape, precision, row = (rows.stop - rows.start, batch_shape[1]), dials.precision, optimizer_of(optimizer.optimizer)
    groups = rank.groups_of(rank.number) if rank else Groups(dials.groups)
    tape = Tape(precision, groups, dials.threads * dials.accumulate)  # micro-batches follow each other
    inputs = input_leaves(tape, shape, dials.chunk, np.size(row.hyper(optimizer, 0, 1)))
    table = trained_tensors(config)
    state, weights = state_leaves(tape, config, precision, row.state(table))
    loss = mean_loss(tape, config, weights, inputs, optimizer.dropout)
    gradients = gradients_of(tape, config, weights, loss)
    outputs, grad_info = {"loss": loss}, inputs["hyper"]
    if optimizer.clip:
        grad_info = clipped(gradients, grad_info, optimizer, tape)
        outputs["grad_info"] = grad_info
    updated = update(table, state, gradients, grad_info, optimizer, tape)

    graph = graph_of([*outputs.values(), *updated.values()])
    if dials.accumulate > 1:
        micro_batches = MicroBatches(dials.accumulate, shape[0] // dials.chunk[0])
        graph = accumulate(graph, micro_batches, tape.token, over=dials.in_place, ranked=rank is not None)
    rewritten, owned = Rewritten(graph), {name: [slice(0, tensor.shape[0])] for name, tensor in table.items()}
    if dials.in_place:
        threads = rank.threads if rank else dials.threads
        rules = UpdateRules(math.prod(shape), threads, ranked=rank is not None)
        if rank is None:
            rewritten = update_in_place(graph, rules, apart=dials.apart)
        else:
            distribution = Distribution(graph, rules, rank, keys_of(loss)[0], precision.rounding, tape.token)
            rewritten, owned = distribution.rewritten(), distribution.owned()
    state = {name: state[name] for name in updated} | state  # constants come last
    kernels = KernelGraph(tape.token, rewritten, inputs, outputs, state, updated)
    return CompiledStep(
        **vars(in_tasks(kernels, shape, config.channels, dials, ranked=rank is not None)),
        config=config,
        batch_shape=batch_shape,
        optimizer=optimizer,
        dials=dials,
        rank=rank,
        owned=owned,
    )


def in_tasks(
    kernels: KernelGraph, shape: tuple[int, int], channels: int, dials: Dials, *, ranked: bool
) -> CompiledGraph:
    """Return a step's kernel calls in tasks of the grain of the dials, with their barriers.

    shape    sequences that are computed here, and tokens of each
    ranked   whether several ranks share the batch
    """
    micro_batches = MicroBatches(dials.accumulate, shape[0] // dials.chunk[0])
    waits, stages = None, None
    # From so many tokens on, activations take more memory than weights, and tasks wait so that it is released in time.
    if math.prod(shape) > channels and dials.grain != "chunk" and dials.in_place and not dials.apart:
        head, threads = CROSSENTROPY.name, dials.threads
        waits = memory_waits(kernels.graph, head, micro_batches, threads=threads, ranked=ranked)
    if dials.apart:
        stages = stages_of(kernels.graph, dials.barrier, micro_batches)
    return compile_graph(kernels, dials.fusion(ranked).groups(kernels.graph), waits, stages)


class Outcome(NamedTuple):
    """The outcome of a step.

    loss  loss before the update [nats per token]
    norm  norm of all gradients, before they are clipped; None if nothing needs it
    """

    loss: float
    norm: float | None = None

    @classmethod
    def of(cls, outputs: Mapping[str, np.ndarray]) -> Outcome:
        """Return the outcome from a step's outputs."""
        norm = float(outputs["grad_info"][-GRAD_INFO]) if "grad_info" in outputs else None
        return cls(float(outputs["loss"]), norm)


def input_leaves(tape: Tape, batch_shape: tuple[int, int], chunk: tuple[int, int], hyper_size: int = 0) -> Lazy:
    """Return Dask arrays without data for every input, cut into chunks."""
    cut = {axis: (part,) * (whole // part) for axis, part, whole in zip("bt", chunk, batch_shape)}
    cut["S"] = (hyper_size,)
    leaves = {}
    for name, (axes, dtype) in INPUTS.items():
        leaves[name] = array_of(f"{name}-{tape.token}", tuple(cut[axis] for axis in axes), dtype)
    return leaves


def input_values(
    tokens: np.ndarray,
    targets: np.ndarray | None = None,
    loss_weights: np.ndarray | float = 1.0,
    *,
    count: int = 0,
    **others: np.ndarray | None,
) -> Arrays:
    """Return the inputs of a step by name, as whole arrays; inputs that are None, which no task reads, are left out.

    loss_weights  weights of the targets, with a mean of 1 over the whole batch
    count         number of tokens of the whole batch if these are a part of it; 0 = these are all
    others        further inputs, by their names in INPUTS
    """
    shares = np.full(tokens.shape, loss_weights / (count or tokens.size))
    values = {"tokens": tokens, "targets": targets, "shares": shares, **others}
    values["positions"] = np.arange(tokens.shape[1], dtype=np.int32)
    return {name: value for name, value in values.items() if value is not None}


def state_leaves(
    tape: Tape, config: ModelConfig, precision: Precision, moments: Mapping[str, Tensor] | None = None
) -> tuple[Lazy, Lazy]:
    """Return arrays without data for a state, by their names there, and the weights among them, by parameter."""
    leaves = {
        name: array_of(f"{name}-{tape.token}", tuple((size,) for size in tensor.shape), precision.dtype)
        for name, tensor in {**as_weights(tensors(config)), **(moments or {})}.items()
    }
    return leaves, weights_in(leaves)


def gradients_of(tape: Tape, config: ModelConfig, weights: Lazy, loss: da.Array) -> Lazy:
    """Return the gradient of the loss with respect to every trained parameter.

    Errors   ValueError if the loss does not depend on one, or a layer has no gradient for it
    """
    one, trained = from_numpy(f"one-{tape.token}", np.ones((), loss.dtype), ()), trained_tensors(config)
    constants = {weight.name for name, weight in weights.items() if name not in trained}
    gradients = tape.backward(loss, one, constants)
    missing = [name for name in trained if weights[name].name not in gradients]
    rule, advice = "every parameter must have a gradient", "Give its layer a row of `backward` for it."
    require(not missing, "layer", rule, {"without one": ", ".join(missing)}, advice)
    return {name: gradients[weights[name].name] for name in trained}


def as_weights(values: Mapping[str, T]) -> dict[str, T]:
    """Return values by parameter under the names that parameters have in a state: weight.NAME."""
    return {f"weight.{name}": value for name, value in values.items()}


def weights_in(values: Mapping[str, T]) -> dict[str, T]:
    """Return those values of a state that belong to parameters, under the names of the parameters."""
    return {name.removeprefix("weight."): value for name, value in values.items() if name.startswith("weight.")}
