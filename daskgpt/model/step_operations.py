"""How many floating-point operations a training step is, by the model's numbers alone."""

from __future__ import annotations

from daskgpt.config.model import GPT2Config
from daskgpt.model.parameters import parameter_count


def step_operations(config: GPT2Config, batch_size: int, sequence_length: int) -> int:
    """Floating-point operations of the matrix products of one step, nothing that is computed twice counted twice.

    6 N B T + 6 L C B T (T + 1): a multiplication and an addition for each of the N values that are multiplied,
    for each token, in the forward pass and twice in the backward one; and the same for attention's two products, where
    a token meets the (T + 1) / 2 tokens up to itself on average.
    """
    tokens = batch_size * sequence_length
    attention = config.blocks * config.channels * (sequence_length + 1)
    return 6 * tokens * (parameter_count(config, multiplied=True) + attention)
