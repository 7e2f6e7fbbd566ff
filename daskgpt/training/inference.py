"""Results of a model for a batch without an update: loss and gradients, and the validation loss of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import dask.array as da
import numpy as np

from daskgpt.config.errors import require, whole_number
from daskgpt.config.model import ModelConfig
from daskgpt.data.dataset import validation_batches
from daskgpt.formats.encoding import get_encoding
from daskgpt.graph.compiled import CompiledGraph, KernelGraph, Layout, compile_graph
from daskgpt.graph.fuse import Fusion
from daskgpt.graph.nodes import from_numpy, graph_of
from daskgpt.graph.sum_order import Groups, groups_of_batch
from daskgpt.graph.update_in_place import Rewritten
from daskgpt.model.parameters import check_parameters
from daskgpt.model.precision import Precision
from daskgpt.model.step import Lazy, gradients_of, input_leaves, input_values, state_leaves
from daskgpt.model.tape import Tape
from daskgpt.model.transformer import check_tokens, lazy_inputs, mean_loss
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.autotune import Chunk
from daskgpt.training.engine import Engine, State
from daskgpt.training.job import Job


def compile_outputs(
    tape: Tape, inputs: Lazy, outputs: Lazy, state: Lazy, layout: Layout, native: bool = False
) -> CompiledGraph:
    """Compile what computes some arrays of a step, and updates nothing.

    inputs, state   the leaves of the step, by name
    native          as of `compile_graph`
    """
    kernels = KernelGraph(tape.token, Rewritten(graph_of(outputs.values())), inputs, outputs, state, {})
    # A task a chunk: there is work for all threads, and larger tasks only hand on less.
    return compile_graph(kernels, Fusion("chunk").groups(kernels.graph), layout=layout, native=native)


def loss_and_gradients(
    config: ModelConfig,
    parameters: Mapping[str, np.ndarray | da.Array],
    tokens: da.Array,
    targets: da.Array,
    groups: int = 0,
) -> tuple[da.Array, Lazy]:
    """Return mean cross-entropy and its gradient with respect to every trained parameter, as lazy dask arrays.

    groups   number of groups of sequences by which sums over the batch are made; 0 = by its shape, as in training

    Shapes   tokens, targets (B, T) int32, alike in chunks; their chunks are those of every activation
    Dtype    that of the parameters, float32 or float64
    Errors   ValueError if names, shapes or chunks do not fit the model, or groups the batch; TypeError for arguments of
             other kinds

    >>> import dask.array as da
    >>> import numpy as np
    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1)
    >>> tokens = da.from_array(np.arange(64, dtype=np.int32).reshape(2, 32), chunks=(1, 16))
    >>> targets = tokens + np.int32(1)
    >>> loss, gradients = daskgpt.loss_and_gradients(config, daskgpt.initial_parameters(config, 0), tokens, targets)
    >>> gradients["wpe.weight"]  # nothing has been computed
    dask.array<...shape=(64, 128), dtype=float32...>
    >>> bool(abs(loss.compute() - np.log(257)) < 0.1)  # an untrained model prefers no token
    True
    """
    check_parameters(config, parameters, (np.ndarray, da.Array), ("float32", "float64"))
    where, given = "loss_and_gradients", {"tokens": tokens, "targets": targets}
    rule, advice = "tokens and targets must be dask arrays of int32", "Give dask.array.from_array(ids.astype('int32'))."
    got = {name: f"{type(array).__name__} of {getattr(array, 'dtype', None)}" for name, array in given.items()}
    right = all(isinstance(array, da.Array) and array.dtype == np.int32 for array in given.values())
    require(right, where, rule, got, advice, TypeError)
    check_tokens(config, tokens, targets)
    groups = groups_of_batch(tokens.shape[0], tokens.shape[1], whole_number(groups, where, "groups"))
    tape = Tape(groups=Groups(groups))
    weights = dict[str, da.Array]()
    for parameter, value in parameters.items():
        name = f"weight.{parameter}-{tape.token}"  # a name of Dask's would be the same for arrays of the same values
        if isinstance(value, da.Array):
            dtype = value.dtype.newbyteorder("=")
            weights[parameter] = value.rechunk(-1).map_blocks(_of_machine, name=name, dtype=dtype)
        else:
            weights[parameter] = from_numpy(name, _of_machine(value), tuple((size,) for size in value.shape))
    loss = mean_loss(tape, config, weights, lazy_inputs(tape, tokens, targets))
    return loss, gradients_of(tape, config, weights, loss)


def _of_machine(array: np.ndarray) -> np.ndarray:
    """Return an array of a file, say, in the byte order and at addresses that kernels read."""
    return np.require(array, array.dtype.newbyteorder("="), "A")


def compile_loss(
    config: ModelConfig,
    batch_shape: Chunk,
    chunk: Chunk,
    layout: Layout,
    precision: Precision,
    *,
    groups: int = 1,
    native: bool = True,
) -> CompiledGraph:
    """Compile the loss of a batch, for states of a layout.

    batch_shape, chunk   sequences, and tokens of each
    native               as of `compile_graph`
    """
    tape = Tape(precision, Groups(groups))
    inputs = input_leaves(tape, batch_shape, chunk)
    state, weights = state_leaves(tape, config, precision)
    loss = mean_loss(tape, config, weights, inputs)
    return compile_outputs(tape, inputs, {"loss": loss}, state, layout, native)


TOGETHER = 20  # batches in one graph


def losses_of(
    scheduler: Scheduler, compiled: CompiledGraph, state: State, batches: Sequence[Sequence[np.ndarray]]
) -> list[float]:
    """Return the mean loss of each batch of tokens, targets and, where they differ, loss weights [nats a token]."""
    outputs, _ = scheduler.outputs(compiled, [input_values(*batch) for batch in batches], state.packs)
    return [float(outputs_of_batch["loss"]) for outputs_of_batch in outputs]


class Validation:
    """Measures the loss of fixed, evenly spread windows of the held-out text, or of held-out pairs.

    stop_requested   returns whether the run shall end: a validation is given up then
    """

    def __init__(self, job: Job, engine: Engine, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self.job, self.engine, self.stop_requested = job, engine, stop_requested
        self.compiled: CompiledGraph | None = None

    def measure(self) -> dict[str, Any]:
        """Return the metrics of the engine's state; none where the run ends before all windows are measured.

        validation_loss         [nats a token]
        validation_bits_a_byte  all nats / ln 2 / bytes of predicted text, which compares different encodings;
                                missing where the encoding's vocabulary is not here
        validation_s            duration [s]
        """
        start = time.perf_counter()
        if (loss := self.loss()) is None:
            return {}
        metrics: dict[str, Any] = {"validation_loss": loss}
        tokens, count = self.predicted
        if count:
            metrics["validation_bits_a_byte"] = loss * tokens / math.log(2) / count
        return metrics | {"validation_s": round(time.perf_counter() - start, 3)}

    @cached_property
    def predicted(self) -> tuple[int, int]:
        """Number of predicted tokens, and of the bytes of their text; 0 bytes where the vocabulary is not here."""
        targets = [ids[weights[0] > 0] if weights else ids for _, ids, *weights in self._batches()]
        tokens = sum(ids.size for ids in targets)
        try:
            sizes = get_encoding(self.job.tokens.encoding_name).sizes
        except FileNotFoundError:  # training does not need it
            return tokens, 0
        return tokens, sum(int(np.sum(sizes[ids])) for ids in targets)

    def loss(self) -> float | None:
        """Return the mean over the windows [nats a token]; None if the run ends before all are measured."""
        scheduler, weights = self.engine.scheduler, self.engine.weights()
        if self.compiled is None or self.compiled.layout != weights.layout:
            job = self.job
            given = job.batch_shape, self.engine.chunk, weights.layout, job.precision
            self.compiled = compile_loss(job.config, *given, groups=job.groups, native=scheduler.in_place)
        losses, batches = list[float](), self._batches()
        while together := list(islice(batches, TOGETHER)):
            if self.stop_requested():
                return None
            losses += losses_of(scheduler, self.compiled, weights, together)
        return sum(losses) / len(losses)

    def _batches(self) -> Any:
        (batch_size, length), count = self.job.batch_shape, self.job.run.validation_batches
        data, sizes = self.job.tokens, {"batch_size": batch_size, "sequence_length": length, "count": count}
        return validation_batches(data.validation, **sizes, vocabulary=data.vocabulary)
