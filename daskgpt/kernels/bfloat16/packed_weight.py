"""Weights packed for the products: once an update, not once a product."""

from dataclasses import dataclass

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.kernels.arguments import check_shape
from daskgpt.kernels.bfloat16.operands import FLOAT32, aligned, ceiling, check_float32, words
from daskgpt.kernels.bfloat16.packing import pack_weight_rows
from daskgpt.kernels.bfloat16.rounding import rounded
from daskgpt.kernels.bfloat16.units import VARIABLE, Unit, unit
from daskgpt.kernels.compilation import kernel, wide_vectors
from daskgpt.kernels.vectors.operations import address_of


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight (outputs, channels) in bfloat16, laid out for y = x weightᵀ and for dx = dy weight.

    In tiles, `forward` holds a panel for every 32 outputs and `backward` one for every 32 channels. The portable unit
    keeps the rounded weight in float32 instead, one array for both. It can be sent to another process whose unit uses
    the same layout.
    """

    outputs: int
    channels: int
    in_tiles: bool
    forward: np.ndarray
    backward: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of memory: one array that serves both products counts once."""
        return sum(array.nbytes for array in {id(array): array for array in (self.forward, self.backward)}.values())


@kernel("h1 H1 H1 n n n n")
def _pack(weight, forward, backward, outputs, channels, first, last):
    wide_vectors()
    across, along = address_of(forward), address_of(backward)
    pack_weight_rows(address_of(weight), first, last - first, outputs, channels, across, along)


def check_panel_rows(where: str, outputs: int, first: int, last: int) -> None:
    """Raise ValueError unless first .. last are rows of a weight that begin and end with a panel."""
    if not 0 <= first < last <= outputs or first % 32 or (last % 32 and last != outputs):
        rule = f"rows must begin and end at multiples of 32 (or at the last row) within 0..{outputs}"
        raise refusal(ValueError, where, rule, {"rows": (first, last)}, "Round them.")


def check_layout(where: str, weight: PackedWeight) -> None:
    """Raise RuntimeError when a weight was packed for another unit's layout."""
    if weight.in_tiles != (unit() is not Unit.PORTABLE):
        rule = "the weight must be packed for the unit that multiplies"
        got = f"in_tiles={weight.in_tiles} for {unit().name.lower()}"
        raise refusal(RuntimeError, where, rule, got, f"Set {VARIABLE} to one unit in all processes.")


def empty_weight(outputs: int, channels: int) -> PackedWeight:
    """Memory for a packed weight, to be filled by pack_weight."""
    if unit() is Unit.PORTABLE:
        both = np.empty((outputs, channels), FLOAT32)
        return PackedWeight(outputs, channels, False, both, both)
    size = ceiling(outputs, 32) * ceiling(channels, 32)
    return PackedWeight(outputs, channels, True, aligned(size), aligned(size))


def pack_weight(weight: np.ndarray, packed: PackedWeight | None = None, *, first: int = 0) -> PackedWeight:
    """Round a weight to bfloat16 and lay it out for both products.

    With `packed`, write over its rows from `first` on: several tasks can pack parts of one weight.

    Shapes   weight (O, C), or (rows, C) with `packed` -> PackedWeight
    Dtype    float32 -> bfloat16
    Cost     reads 4 bytes and writes 4 bytes a number
    Errors   TypeError when weight is not float32; ValueError when the channels do not fit or the rows do not begin and
             end at multiples of 32 (or the last row); RuntimeError for another unit's layout
    """
    where = "pack_weight"
    check_float32(where, weight=weight)
    rows, channels = weight.shape
    if packed is None:
        packed = empty_weight(rows, channels)
    check_layout(where, packed)
    check_shape(where, "weight", weight, (rows, packed.channels))
    last = first + rows
    check_panel_rows(where, packed.outputs, first, last)
    if packed.in_tiles:
        _pack(words(weight), packed.forward, packed.backward, packed.outputs, channels, first, last)
    else:
        packed.forward[first:last] = rounded(weight)
    return packed
