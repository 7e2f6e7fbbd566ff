"""What a model makes of a batch: loss, logits, gradients, without an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import dask.array as da
import numpy as np

from daskgpt.config.groups import Groups, groups_of_batch
from daskgpt.config.model import GPT2Config
from daskgpt.graph.nodes import from_numpy
from daskgpt.graph.recording import Layout, Recorded
from daskgpt.model.gpt2 import lazy_inputs, logits, mean_loss, transformer
from daskgpt.model.precision import FLOAT32, Precision
from daskgpt.model.tape import Tape
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.grouping import groups_of, title
from daskgpt.training.inputs import Moment, input_leaves, input_values
from daskgpt.training.step import Batch, Lazy, State, gradients_of, parameter_leaves


class Inference:
    """What a model makes of a batch, recorded once for states of one layout.

    wanted   any of "loss", "logits", "activations" (after the last layernorm) and "gradients" (one a parameter)
    groups   into how many groups of sequences sums over the batch are divided
    """

    def __init__(
        self,
        config: GPT2Config,
        batch_shape: tuple[int, int],
        chunk: tuple[int, int],
        layout: Layout,
        wanted: tuple[str, ...],
        precision: Precision = FLOAT32,
        grain: str = "block",
        groups: int = 1,
    ) -> None:
        outputs: Lazy = {}
        tape = Tape(precision, Groups(groups))
        inputs = input_leaves(tape, batch_shape, chunk)
        weights = parameter_leaves(tape, config, precision)
        if "logits" in wanted:
            outputs["logits"] = logits(Tape(precision), config, weights, inputs)
        if "activations" in wanted:
            outputs["activations"] = transformer(Tape(precision), config, weights, inputs)
        if "loss" in wanted or "gradients" in wanted:
            outputs["loss"] = mean_loss(tape, config, weights, inputs)
        if "gradients" in wanted:
            outputs |= gradients_of(tape, weights, outputs["loss"])
        state = {f"weight.{name}": weight for name, weight in weights.items()}
        recorded = Recorded.of(tape.token, inputs, outputs, state, {}, layout=layout)
        self.runnable = recorded.merged(groups_of(recorded.unmerged, grain), title)

    def __call__(
        self, scheduler: Scheduler, state: State, tokens: np.ndarray, targets: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """The wanted arrays; gradients under their parameters' names. `targets` is needed for loss and gradients."""
        results = scheduler.run(self.runnable.submission(input_values(Moment(tokens, targets)), state.packs))
        handles, _ = self.runnable.split(results, state.packs)
        return self.runnable.output(scheduler.fetch(handles))

    def of_all(self, scheduler: Scheduler, state: State, batches: Sequence[Batch]) -> list[dict[str, np.ndarray]]:
        """The same of several batches, as one graph: nobody waits for one batch before another one begins."""
        values = [input_values(Moment(tokens, targets)) for tokens, targets in batches]
        results = scheduler.run(self.runnable.window_submission(values, state.packs))
        fetched = scheduler.fetch(results)
        return [self.runnable.output(own) for own in self.runnable.split_window(fetched, len(batches))]


def loss_and_gradients(
    config: GPT2Config,
    parameters: Mapping[str, np.ndarray | da.Array],
    tokens: da.Array,
    targets: da.Array,
    groups: int = 0,
) -> tuple[da.Array, Lazy]:
    """Mean cross-entropy and its gradient with respect to every parameter, as lazy dask arrays.

    groups   into how many groups of sequences sums over the batch are divided; 0 = by the batch's shape, as in training

    Shapes   tokens, targets (B, T) int32, alike in chunks; their chunks are those of every activation
    Dtype    that of the parameters, float32 or float64
    Errors   ValueError where shapes or chunks do not fit the model, or groups the batch

    >>> import dask.array as da
    >>> import numpy as np
    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1)
    >>> tokens = da.from_array(np.arange(64, dtype=np.int32).reshape(2, 32), chunks=(1, 16))
    >>> targets = tokens + np.int32(1)
    >>> loss, gradients = daskgpt.loss_and_gradients(config, daskgpt.initial_parameters(config, 0), tokens, targets)
    >>> gradients["wpe.weight"]  # nothing has been computed
    dask.array<...shape=(64, 128), dtype=float32...>
    >>> bool(abs(loss.compute() - np.log(257)) < 0.1)  # a model that has learnt nothing hesitates between all tokens
    True
    """
    tape = Tape(groups=Groups(groups_of_batch(tokens.shape[0], tokens.shape[1], groups)))
    weights = {
        name: value.rechunk(-1)
        if isinstance(value, da.Array)
        else from_numpy(f"weight.{name}-{tape.token}", value, tuple((size,) for size in value.shape))
        for name, value in parameters.items()
    }
    loss = mean_loss(tape, config, weights, lazy_inputs(tape, tokens, targets))
    return loss, gradients_of(tape, weights, loss)
