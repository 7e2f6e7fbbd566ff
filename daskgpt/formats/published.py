"""How Hugging Face's GPT-2 files hold the tensors: matrices of the blocks (in, out), a vocabulary without padding."""

from __future__ import annotations

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.model.parameters import Tensor

DESCRIPTION = (
    "Hugging Face's GPT-2: names without a prefix; matrices of the blocks are (in, out), the transpose of what "
    "activations are multiplied with; wte.weight has the rows of the vocabulary, and its padding only if that is not 0"
)


def published_shapes(config: GPT2Config, tensor: Tensor) -> list[tuple[int, ...]]:
    """Shapes that a file may hold it in: one, but two for a table with rows of padding."""
    if tensor.row.is_conv1d:
        return [tensor.shape[::-1]]
    if tensor.row.axes[0] == "V" and config.padded_vocabulary > config.vocabulary:
        return [(config.vocabulary, *tensor.shape[1:]), tensor.shape]
    return [tensor.shape]


def to_published(config: GPT2Config, tensor: Tensor, values: np.ndarray) -> np.ndarray:
    """A view of a tensor as files hold it, which need not be contiguous.

    Shapes   tensor.shape -> one of published_shapes: padding is left out where all of its bits are 0, as they stay in
             training; a model of another program may hold something there, which is kept
    """
    if tensor.row.is_conv1d:
        return values.T
    rows = published_shapes(config, tensor)[0][0]
    return values if values[rows:].tobytes().strip(b"\0") else values[:rows]


def from_published(config: GPT2Config, tensor: Tensor, values: np.ndarray) -> np.ndarray:
    """The tensor as this program holds it, in memory of its own: the bits that to_published was given.

    Shapes   one of published_shapes -> tensor.shape, contiguous
    """
    if tensor.row.is_conv1d:
        return values.T.copy(order="C")
    if values.shape == tensor.shape:
        return values.copy()
    padded = np.zeros(tensor.shape, values.dtype)
    padded[: len(values)] = values
    return padded
