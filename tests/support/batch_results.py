"""Logits, loss and gradients of a model for one batch, computed by the layers of training without an update."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from daskgpt.config.model import ModelConfig
from daskgpt.graph.sum_order import Groups
from daskgpt.model.precision import FLOAT32, Precision
from daskgpt.model.step import gradients_of, input_leaves, input_values, state_leaves
from daskgpt.model.tape import Tape
from daskgpt.model.transformer import logits, mean_loss
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.engine import State
from daskgpt.training.inference import compile_outputs


def results_of(
    scheduler: Scheduler,
    config: ModelConfig,
    parameters: Mapping[str, np.ndarray],
    batch: tuple[np.ndarray, ...],
    chunk: tuple[int, int],
    precision: Precision = FLOAT32,
    groups: int = 1,
) -> dict[str, np.ndarray]:
    """Return `logits`, and of a batch with targets `loss` and the gradients by their parameters' names.

    batch    tokens, or tokens and targets
    chunk    sequences and tokens of a chunk
    groups   number of groups of sequences by which sums over the batch are made
    """
    tape = Tape(precision, Groups(groups), scheduler.threads)
    inputs = input_leaves(tape, batch[0].shape, chunk)
    leaves, weights = state_leaves(tape, config, precision)
    outputs = {"logits": logits(Tape(precision), config, weights, inputs)}
    if len(batch) > 1:
        outputs["loss"] = mean_loss(tape, config, weights, inputs)
        outputs |= gradients_of(tape, config, weights, outputs["loss"])
    state = State.of_weights(config, parameters, precision)
    compiled = compile_outputs(tape, inputs, outputs, leaves, state.layout)
    (results,), _ = scheduler.outputs(compiled, [input_values(*batch)], state.packs)
    return results
