"""Products of linear layers and of the head in bfloat16 with float32 sums: packed weights, y = x weightᵀ + bias,
dx = dy weight, and dweight = dyᵀ x.

A trained matrix is a `TrainedWeight`: its float32 values, which an optimizer updates, and the same values rounded and
packed for the products, which each update renews. Everything else (layernorm, softmax, GELU, sums, moments) stays
float32. On the portable unit, operands are rounded to bfloat16 and multiplied in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.kernels.arguments import check_rows, check_shape, contiguous, rows
from daskgpt.kernels.bfloat16 import tiles
from daskgpt.kernels.bfloat16.isa import VARIABLE, Unit, scratch, unit
from daskgpt.kernels.bfloat16.rounding import FLOAT32, NOTHING, aligned, ceiling, check_float32, rounded, words
from daskgpt.kernels.bfloat16.tiles import DEPTH, PATCH, ROW, STEP
from daskgpt.kernels.compilation import helper, kernel, wide_vectors
from daskgpt.kernels.crossentropy import scale_rows, softmax_losses
from daskgpt.kernels.float32.blas import gemm_address, multiply, multiply_rows
from daskgpt.kernels.simd.lanes import address_of, read_real, write_real


@dataclass(frozen=True, slots=True)
class TrainedWeight:
    """A matrix in float32, which an optimizer updates, and the same matrix in bfloat16, laid out for both products.

    In tiles, `forward` holds a panel for every 32 outputs, for y = x weightᵀ, and `backward` one for every 32 channels,
    for dx = dy weight. For the portable unit one float32 array of rounded values serves both products. A weight can be
    sent to another process whose unit uses the same layout.

    Shapes   values (O, C); it is indexed by rows and has a shape like an array
    """

    values: np.ndarray
    forward: np.ndarray
    backward: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> TrainedWeight:
        """Pack a float32 matrix.

        Errors   TypeError when it is not float32
        """
        outputs, channels = values.shape
        if unit() is Unit.PORTABLE:
            forward = backward = np.empty(values.shape, FLOAT32)
        else:
            size = ceiling(outputs, 32) * ceiling(channels, 32)
            forward, backward = aligned(size), aligned(size)
        weight = cls(values, forward, backward)
        weight.pack(values)
        return weight

    @property
    def shape(self) -> tuple[int, int]:
        outputs, channels = self.values.shape
        return outputs, channels

    @property
    def in_tiles(self) -> bool:
        return self.forward.dtype != FLOAT32

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + packed_bytes(*self.shape)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return the values of some rows, to be updated in place and packed again."""
        return self.values[rows]

    def pack(self, values: np.ndarray, first: int = 0) -> None:
        """Round these values of rows from `first` on and lay them out for both products.

        So several tasks can pack parts of a weight, also of one whose values are in another process.

        Shapes   values (rows, C)
        Dtype    float32
        Cost     reads and writes 4 bytes per number
        Errors   TypeError when values are not float32; ValueError when the channels do not fit or the rows do not begin
                 and end at multiples of 32 (or the last row); RuntimeError for another unit's layout
        """
        where, (outputs, channels), last = "TrainedWeight.pack", self.shape, first + len(values)
        check_float32(where, values=values)
        check_layout(where, self)
        check_shape(where, "values", values, (len(values), channels))
        check_panel_rows(where, outputs, first, last)
        if self.in_tiles:
            _pack(words(values), self.forward, self.backward, outputs, channels, first, last)
        else:
            self.forward[first:last] = rounded(values)


def packed_bytes(outputs: int, channels: int) -> int:
    """Return the bytes of what a `TrainedWeight` holds besides its values."""
    return 4 * (outputs * channels if unit() is Unit.PORTABLE else ceiling(outputs, 32) * ceiling(channels, 32))


@kernel("h1 H1 H1 n n n n", cost=2)
def _pack(weight, forward, backward, outputs, channels, first, last):
    wide_vectors()
    across, along = address_of(forward), address_of(backward)
    tiles.pack_weight_rows(address_of(weight), first, last - first, outputs, channels, across, along)


def check_panel_rows(where: str, outputs: int, first: int, last: int) -> None:
    """Raise ValueError unless first .. last are rows of a weight that begin and end with a panel."""
    if not 0 <= first < last <= outputs or first % 32 or (last % 32 and last != outputs):
        rule = f"rows must begin and end at multiples of 32 (or at the last row) within 0..{outputs}"
        raise refusal(ValueError, where, rule, {"rows": (first, last)}, "Round them.")


def check_layout(where: str, weight: TrainedWeight) -> None:
    """Raise RuntimeError when a weight was packed for another unit's layout."""
    if weight.in_tiles != (unit() is not Unit.PORTABLE):
        rule = "the weight must be packed for the unit that multiplies"
        got = f"in_tiles={weight.in_tiles} for {unit().name.lower()}"
        raise refusal(RuntimeError, where, rule, got, f"Set {VARIABLE} to one unit in all processes.")


# The rows of x that are multiplied with one panel of the weight after another: they stay in the second cache.
_ROWS_BYTES = 1 << 20
# A summed axis longer than this is cut into pieces of half the length, for up to this many rows at a time, so that the
# weight is read less often.
_LONGEST, _DEEP_ROWS = 2048, 256
# With fewer bands of rows than this, a panel is multiplied faster than the next one can be fetched.
_PATCHES_TO_FETCH = 3


@kernel("h1 h1 h1 H1 n n3 n6", cost=6)
def _multiply(x, weight, bias, y, unit, sizes, plan):
    """Multiply. Loops from outside: rows that fit the cache, pieces of the summed axis, panels, steps, row bands."""
    wide_vectors()
    tiles.open_unit(unit)
    rows, depth, width = sizes
    left, sums, chunk_rows, chunk_depth, patch_step, bias_step = plan
    start = address_of(bias) if bias.size else tiles.zero_row()
    panel = (depth + 31) // 32 * STEP
    for row0 in range(0, rows, chunk_rows):
        chunk = min(chunk_rows, rows - row0)
        patches = (chunk + 31) // 32
        for depth0 in range(0, depth, chunk_depth):
            deep = min(chunk_depth, depth - depth0)
            steps = (deep + 31) // 32
            source = address_of(x) + (row0 * depth + depth0) * 4
            tiles.pack_rows(source, depth * 4, chunk, deep, False, left, steps * STEP)
            for column in range(0, width, 32):
                right = address_of(weight) + column // 32 * panel + depth0 // 32 * STEP
                for step in range(0, steps, DEPTH):
                    count = min(DEPTH, steps - step)
                    fresh = step == 0 and depth0 == 0
                    done = step + count == steps and depth0 + deep == depth
                    for i in range(patches):
                        patch = sums + column // 32 * patch_step + i * PATCH
                        begin = start + column // 32 * bias_step if fresh else patch
                        if patches >= _PATCHES_TO_FETCH:
                            tiles.fetch(right + panel + step * STEP, count, i, patches)
                        tiles.multiply_patch(
                            unit, left + (i * steps + step) * STEP, right + step * STEP, count,
                            begin, 0 if fresh else ROW, patch, ROW,
                        )  # fmt: skip
                        if done:
                            row = row0 + i * 32
                            high, wide = min(32, rows - row), min(32, width - column)
                            target = address_of(y) + (row * width + column) * 4
                            tiles.copy_rows(patch, ROW, target, width * 4, high, wide)
    tiles.close_unit(unit)


@functools.lru_cache(1024)
def _plan(rows: int, depth: int, width: int) -> tuple[int, int, int, int, int]:
    """Return bytes of a block's left panels and sums, its rows, its depth, and bytes between columns of patches."""
    if depth > _LONGEST:
        chunk_rows, chunk_depth = max(32, min(_DEEP_ROWS, ceiling(rows, 32))), _LONGEST // 2
        patch_step = chunk_rows // 32 * PATCH
        return chunk_rows * chunk_depth * 2, ceiling(width, 32) // 32 * patch_step, chunk_rows, chunk_depth, patch_step
    chunk_depth = ceiling(depth, 32)
    most = max(32, _ROWS_BYTES // (2 * chunk_depth) // 32 * 32)
    chunks = max(1, -(-rows // most))
    chunk_rows = max(32, ceiling(-(-rows // chunks), 32))
    return chunk_rows * chunk_depth * 2, chunk_rows // 32 * PATCH, chunk_rows, chunk_depth, 0


def _product(
    where: str, name: str, x: np.ndarray, weight: TrainedWeight, backward: bool, bias: np.ndarray | None = None
) -> np.ndarray:
    """Return x weightᵀ + bias, or with `backward` x weight; `name` is what errors call x."""
    check_layout(where, weight)
    depth, width = weight.shape if backward else weight.shape[::-1]
    check_shape(where, name, x, (*x.shape[:-1], depth))
    check_float32(where, **{name: x})
    if bias is not None:
        check_shape(where, "bias", bias, (width,))
        check_float32(where, bias=bias)
    y = np.empty((*x.shape[:-1], width), FLOAT32)
    if not weight.in_tiles:
        multiply(gemm_address(FLOAT32), not backward, rows(rounded(x)), weight.forward, 0, rows(y))
        if bias is not None:
            y += bias
        return y
    count = x.size // depth
    left_bytes, sums_bytes, *chunks = _plan(count, depth, width)
    plan = *scratch(left_bytes, sums_bytes), *chunks, 0 if bias is None else ROW
    start = NOTHING
    if bias is not None:  # with zeros up to a multiple of 32 numbers
        start = words(np.concatenate([bias, np.zeros(-width % 32, FLOAT32)]))
    operand = weight.backward if backward else weight.forward
    _multiply(words(x), operand, start, words(y), int(unit()), (count, depth, width), plan)
    return y


def forward(x: np.ndarray, weight: TrainedWeight, bias: np.ndarray | None = None) -> np.ndarray:
    """Return the output of a linear layer, in bfloat16 with float32 sums.

    y = x weightᵀ + bias

    Shapes   x (..., C), weight of (O, C), bias (O,) -> y (..., O)
    Dtype    float32; x is rounded
    Cost     2 C O operations a row; with AMX or AVX-512 a row's bits do not depend on the other rows
    Errors   TypeError for other dtypes; ValueError when shapes do not fit; RuntimeError for another unit's layout
    """
    return _product("bfloat16.forward", "x", x, weight, False, bias)


def backward_x(dy: np.ndarray, weight: TrainedWeight) -> np.ndarray:
    """Return the gradient of a linear layer with respect to its input, in bfloat16 with float32 sums.

    dx = dy weight

    Shapes   dy (..., O), weight of (O, C) -> dx (..., C)
    Dtype    float32; dy is rounded
    Cost     2 C O operations a row; with AMX or AVX-512 a row's bits do not depend on the other rows
    Errors   as forward
    """
    return _product("bfloat16.backward_x", "dy", dy, weight, True)


# The panels of dy and x that are multiplied by each other share the second cache with the rows of sums.
_LEFT_BYTES, _RIGHT_BYTES, _SUMS_BYTES, _MOST_ROWS = 1 << 19, 1 << 19, 3 << 19, 256
# Columns of the table of parts of a sum over tokens: addresses of dy and x; runs of tokens, and tokens of each, which
# begins a new step; the total that the part is added to, whether that total begins with it at zero, and how many
# additions of two totals follow.
_DY, _X, _RUNS, _TOKENS, _TOTAL, _FRESH, _ADDITIONS = range(7)


class Plan(NamedTuple):
    """Memory of a sum over tokens: addresses of panels and totals, bytes per total and per row, the size of a patch."""

    left: int
    right: int
    totals: int
    total_step: int
    sums_step: int
    band_rows: int
    band_columns: int


@helper
def _pack_runs(source, row_bytes, runs, tokens, columns, transposed, target, panel):
    """Pack the panels of several runs of tokens; each run begins at the start of a step."""
    for run in range(runs):
        place = source + run * tokens * row_bytes
        tiles.pack_pairs(
            place, row_bytes, tokens, columns, transposed, target + run * ((tokens + 31) // 32) * STEP, panel
        )


@helper
def pack_x(parts, channels, right):
    """Pack the right panels of all parts, one part after the other."""
    for part in range(len(parts)):
        runs, tokens = parts[part, _RUNS], parts[part, _TOKENS]
        panel = (tokens + 31) // 32 * runs * STEP
        _pack_runs(parts[part, _X], channels * 4, runs, tokens, channels, False, right, panel)
        right += (channels + 31) // 32 * panel


@helper
def _add_rows(source, target, step, rows, columns):
    for row in range(rows):
        for i in range(columns):
            write_real(target + row * step, i, read_real(target + row * step, i) + read_real(source + row * step, i))


@helper
def sum_parts(unit, parts, outputs, channels, row0, rows, plan, totals, step):
    """Sum dyᵀ x of all parts into the first total, for `rows` rows; further totals hold groups to be added later.

    Loops from outside: parts, bands of columns, 32 rows. Totals lie at `totals`, with `step` bytes from row to row.
    """
    right = plan.right
    for part in range(len(parts)):
        runs, tokens, sums = parts[part, _RUNS], parts[part, _TOKENS], totals + parts[part, _TOTAL] * plan.total_step
        steps = (tokens + 31) // 32 * runs
        panel = steps * STEP
        _pack_runs(parts[part, _DY] + row0 * 4, outputs * 4, runs, tokens, rows, True, plan.left, panel)
        for column in range(0, channels, plan.band_columns):
            columns, panels = min(plan.band_columns, channels - column), right + column // 32 * panel
            for i in range(0, rows, 32):
                place = sums + i * step + column * 4
                start, start_step = (tiles.zero_row(), 0) if parts[part, _FRESH] else (place, step)
                left = plan.left + i // 32 * panel
                tiles.sum_rows(unit, left, panels, panel, steps, columns, start, start_step, place, step)
        right += (channels + 31) // 32 * panel
        for _ in range(parts[part, _ADDITIONS]):
            _add_rows(sums, sums - plan.total_step, step, rows, channels)
            sums -= plan.total_step


@kernel("l2 H1 n n4 n7", cost=6)
def _sum_tokens(parts, total, unit, sizes, places):
    """Sum one part in bands of rows; aside, where patches would reach beyond the rows or columns of the total."""
    wide_vectors()
    tiles.open_unit(unit)
    (outputs, channels, first, last), plan = sizes, Plan(*places)
    row_bytes = channels * 4
    pack_x(parts, channels, plan.right)
    for row0 in range(first, last, plan.band_rows):
        rows = min(plan.band_rows, last - row0)
        place = address_of(total) + (row0 - first) * row_bytes
        aside = rows % 32 != 0 or channels % 32 != 0
        sums, step = (plan.totals, plan.sums_step) if aside else (place, row_bytes)
        if aside and not parts[0, _FRESH]:
            tiles.copy_rows(place, row_bytes, sums, step, rows, channels)
        sum_parts(unit, parts, outputs, channels, row0, rows, plan, sums, step)
        if aside:
            tiles.copy_rows(sums, step, place, row_bytes, rows, channels)
    tiles.close_unit(unit)


def runs_of_tokens(dy: np.ndarray) -> tuple[int, int]:
    """Return the number of runs that are multiplied, and the tokens of each; each sequence begins a new step.

    How the products of a step's tokens, 32 (a tile) or two (a pair), are added depends on the unit. Which tokens form
    a step must not depend on the chunk: each sequence of a chunk is a run, or all are one run if each fills its steps.
    """
    tokens = dy.shape[-2] if dy.ndim > 1 else 1
    sequences = dy.size // max(tokens * dy.shape[-1], 1)
    return (1, sequences * tokens) if tokens % 32 == 0 else (sequences, tokens)


def part_of(dy: np.ndarray, x: np.ndarray, total: int, fresh: bool, additions: int) -> tuple[int, ...]:
    """Return the row of a part in the table, from contiguous arrays."""
    return dy.ctypes.data, x.ctypes.data, *runs_of_tokens(dy), total, fresh, additions


@functools.lru_cache(1024)
def _sizes(longest: int, steps: int, channels: int, totals: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the bytes of the three pieces of memory of a `Plan`, and its other numbers.

    longest, steps   steps of 32 tokens of the longest part, and of all parts
    totals           number of totals that stay in the cache, 0 if the sums are written to memory
    """
    rows = max(64, _LEFT_BYTES // (longest * STEP) * 32)
    if totals:
        rows = max(32, _SUMS_BYTES // (channels * 4 * totals) // 32 * 32)
    rows, width = min(_MOST_ROWS, rows), ceiling(channels, 32)
    columns, sums_step = min(width, max(128, _RIGHT_BYTES // (longest * STEP) * 32)), width * 4 + 64
    pieces = rows // 32 * longest * STEP, width // 32 * steps * STEP, max(totals, 1) * rows * sums_step
    return pieces, (rows * sums_step, sums_step, rows, columns)


def plan_of(parts: Sequence[tuple[int, ...]], channels: int, totals: int = 0) -> tuple[int, ...]:
    """Return the `Plan` of a sum over these parts; totals as of `_sizes`."""
    steps = [-(-part[_TOKENS] // 32) * part[_RUNS] for part in parts]
    pieces, others = _sizes(max(steps), sum(steps), channels, totals)
    return *scratch(*pieces), *others


def backward_weight(
    dy: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool, first_row: int = 0
) -> np.ndarray:
    """Return the gradient of a linear layer with respect to its weight, or some rows of it.

    total (+)= Σ_tokens dyᵀ x

    Shapes   dy (..., O), x (..., C) -> total (rows, C), the rows of the gradient from `first_row` on
    Dtype    float32; dy and x are rounded to bfloat16, sums are float32
    Cost     2 O C operations per token; the rows of a weight can be divided among several tasks without a change of
             bits
    Errors   TypeError for other dtypes; ValueError when shapes do not fit, rows do not exist or total cannot be written
    """
    where, outputs, channels = "bfloat16.backward_weight", dy.shape[-1], x.shape[-1]
    check_shape(where, "dy", dy, (*x.shape[:-1], outputs))
    check_rows(where, total, first_row, (outputs, channels), FLOAT32)
    check_float32(where, dy=dy, x=x)
    last = first_row + len(total)
    if not dy.size:
        if not accumulate:
            total[...] = 0
        return total
    if unit() is Unit.PORTABLE:
        # The rows of a weight are computed in bands, each of which rounds only its own part of dy.
        part = rounded(rows(dy)[:, first_row:last])
        multiply_rows(gemm_address(FLOAT32), part, 0, rows(rounded(x)), accumulate, total)
        return total
    dy, x = contiguous(dy), contiguous(x)
    parts = [part_of(dy, x, 0, not accumulate, 0)]
    sizes = outputs, channels, first_row, last
    _sum_tokens(np.array(parts, np.int64), words(total), int(unit()), sizes, plan_of(parts, channels))
    return total


def crossentropy_forward(
    x: np.ndarray, wte: TrainedWeight, targets: np.ndarray, vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `crossentropy.forward` returns: losses, and their gradient with respect to the logits.

    Shapes   x (b, t, C), wte (V padded, C), targets (b, t) -> losses (b, t), dlogits (b, t, V padded)
    Dtype    int32 targets, float32
    """
    dlogits = forward(x, wte)
    return softmax_losses(dlogits, targets, vocabulary), dlogits


def crossentropy_backward_x(dy: np.ndarray, dlogits: np.ndarray, wte: TrainedWeight) -> np.ndarray:
    """Return dx = dy (dlogits wte).

    Shapes   dy (b, t), dlogits (b, t, V padded), wte (V padded, C) -> dx (b, t, C)
    Dtype    float32
    """
    return scale_rows(backward_x(dlogits, wte), dy)


def crossentropy_backward_wte(
    dy: np.ndarray, dlogits: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool, first_row: int = 0
) -> np.ndarray:
    """Return dwte = dlogitsᵀ (dy x), or some rows of it.

    Shapes   dy (b, t), dlogits (b, t, V padded), x (b, t, C) -> total (rows, C), from first_row on
    Dtype    float32
    """
    return backward_weight(dlogits, scale_rows(x, dy), total=total, accumulate=accumulate, first_row=first_row)
