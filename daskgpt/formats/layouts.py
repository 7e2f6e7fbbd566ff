"""Conversion between tensors here and in files: transposed matrices, padded vocabularies, 16-bit numbers.

Hugging Face's GPT-2 has the matrices of the blocks as (in, out) and a vocabulary without padding; llm.c has both as
they are here. Both formats may also have 16-bit values. The result is always float32 in the table's shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.model.parameters import Tensor

# The dtypes of values that can be read, by safetensors' names; bfloat16 as the uint16 of its bits.
READABLE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PIECE_BYTES = 2**24


def require_default_settings(config: GPT2Config, known: Collection[str], where: str, file: str) -> None:
    """Check that all settings that a format cannot hold are GPT-2's, since a reader would assume these.

    known    settings that the file holds
    file     name of the file, for error messages

    Errors   ValueError
    """
    for f in fields(config):
        value = getattr(config, f.name)
        rule, advice = (
            f"{file} has no {f.name}, which must be {f.default}",
            "Write a .safetensors file, which has all settings.",
        )
        require(f.name in known or value == f.default, where, rule, {f.name: value}, advice)


def published_shapes(config: GPT2Config, tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the shapes that a tensor may have in a file: one, or two for a table with rows of padding."""
    if tensor.row.is_conv1d:
        return [tensor.shape[::-1]]
    if tensor.row.axes[0] == "V" and config.padded_vocabulary > config.vocabulary:
        return [(config.vocabulary, *tensor.shape[1:]), tensor.shape]
    return [tensor.shape]


def to_published(config: GPT2Config, tensor: Tensor, values: np.ndarray) -> np.ndarray:
    """Return a view of a tensor in the layout of files, which need not be contiguous.

    Shapes   tensor.shape -> one of published_shapes: padding is left out if all of its bits are 0, as training leaves
             them; other values, from another program, are kept
    """
    if tensor.row.is_conv1d:
        return values.T
    rows = published_shapes(config, tensor)[0][0]
    return values if values[rows:].tobytes().strip(b"\0") else values[:rows]


def held(tensor: Tensor, values: np.ndarray, dtype: str = "F32") -> np.ndarray:
    """Return values of a file in the table's shape: rows of padding are added as 0, or left out.

    tensor   its shape has the number of rows to return
    values   in the table's layout, with any number of rows
    dtype    of the values, one of READABLE

    Dtype    float32; 16-bit values are widened, which is exact
    Cost     none for float32 with all rows, which may be a view of read-only memory; else the tensor
    """
    values = values[: tensor.shape[0]]
    if dtype == "F32" and values.shape == tensor.shape:
        return values
    found = np.zeros(tensor.shape, np.float32)
    if dtype == "BF16":
        bits = found.view(np.uint32)
        bits[: len(values)] = values
        bits <<= 16
    else:
        found[: len(values)] = values
    return found


def in_memory(values: np.ndarray) -> np.ndarray:
    """Return the values as a contiguous, writable array, copied only if necessary."""
    own = values.flags.c_contiguous and values.flags.writeable
    return values if own else values.copy(order="C")


def pieces(values: np.ndarray, most: int = PIECE_BYTES) -> Iterator[np.ndarray]:
    """Yield the values of an array in C order, in contiguous arrays of about this many bytes, views if possible."""
    if values.ndim < 2 or values.nbytes <= most:
        yield np.ascontiguousarray(values)
        return
    rows = max(1, most * len(values) // values.nbytes)
    for first in range(0, len(values), rows):
        yield np.ascontiguousarray(values[first : first + rows])
