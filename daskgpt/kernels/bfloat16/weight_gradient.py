"""The product that sums over the tokens: dweight = dyᵀ x, whole or by rows of the weight."""

import functools

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.kernels.arguments import check_output
from daskgpt.kernels.bfloat16 import portable
from daskgpt.kernels.bfloat16.operands import FLOAT32, ceiling, check_float32, words
from daskgpt.kernels.bfloat16.packing import pack_pairs
from daskgpt.kernels.bfloat16.tiles import (
    CONFIGURATION,
    DEPTH,
    STEP,
    ZEROS,
    close_unit,
    multiply_patch,
    open_unit,
    touch_patch,
)
from daskgpt.kernels.bfloat16.units import Unit, scratch, unit
from daskgpt.kernels.compilation import helper, kernel, wide_vectors
from daskgpt.kernels.vectors.operations import address_of, copy_row

# dy's and x's panels that are multiplied with each other, and the rows of sums, share the second cache.
_LEFT_BYTES, _RIGHT_BYTES, _MOST_ROWS = 1 << 19, 1 << 19, 256


@helper
def sum_rows(unit, left, right, panel, steps, columns, start, start_step, target, target_step):
    """32 rows of sums, `columns` wide: target = start + a left panel @ the right panels.

    A start_step of 0 starts every patch with the same 32 numbers.
    """
    for step in range(0, steps, DEPTH):
        count = min(DEPTH, steps - step)
        for column in range(0, columns, 32):
            begin, begin_step = target + column * 4, target_step
            if step == 0:
                begin, begin_step = (start + column * 4, start_step) if start_step else (start, 0)
                if start_step == 0:
                    touch_patch(unit, target + column * 4, target_step)
            multiply_patch(
                unit, left + step * STEP, right + column // 32 * panel + step * STEP, count,
                begin, begin_step, target + column * 4, target_step,
            )  # fmt: skip


@helper
def _copy_rows(source, source_step, target, target_step, rows, columns):
    for row in range(rows):
        copy_row(source + row * source_step, target + row * target_step, columns)


@helper
def _pack_runs(source, row_bytes, runs, tokens, columns, transposed, target, panel):
    """Panels of several runs of tokens, each from the start of a step on."""
    for run in range(runs):
        place = source + run * tokens * row_bytes
        pack_pairs(place, row_bytes, tokens, columns, transposed, target + run * ((tokens + 31) // 32) * STEP, panel)


@kernel("h1 h1 H1 h1 n n n n n n n n n n n n n n")
def _multiply(
    dy, x, total, zeros, unit, configuration, runs, tokens, outputs, channels, first, last, accumulate,
    left, right, sums, band_rows, band_columns,
):  # fmt: skip
    """The loops, from outside: bands of rows, bands of columns, 32 rows."""
    wide_vectors()
    open_unit(unit, configuration)
    steps = (tokens + 31) // 32 * runs
    panel, row_bytes, sums_step = steps * STEP, channels * 4, band_columns * 4 + 64
    _pack_runs(address_of(x), row_bytes, runs, tokens, channels, False, right, panel)
    for row0 in range(first, last, band_rows):
        rows = min(band_rows, last - row0)
        _pack_runs(address_of(dy) + row0 * 4, outputs * 4, runs, tokens, rows, True, left, panel)
        for column in range(0, channels, band_columns):
            columns = min(band_columns, channels - column)
            for i in range(0, rows, 32):
                high = min(32, rows - i)
                place = address_of(total) + (row0 - first + i) * row_bytes + column * 4
                aside = high < 32 or columns % 32 != 0
                target, target_step = (sums, sums_step) if aside else (place, row_bytes)
                if aside and accumulate:
                    _copy_rows(place, row_bytes, sums, sums_step, high, columns)
                start, start_step = (target, target_step) if accumulate else (address_of(zeros), 0)
                panels = right + column // 32 * panel
                sum_rows(
                    unit, left + i // 32 * panel, panels, panel, steps, columns, start, start_step, target, target_step
                )
                if aside:
                    _copy_rows(sums, sums_step, place, row_bytes, high, columns)
    close_unit(unit)


def runs_of_tokens(dy: np.ndarray) -> tuple[int, int]:
    """How many runs of how many tokens are multiplied: every sequence starts with a step of its own.

    A unit adds up the products of 32 tokens (a tile) or of two (a pair) in its own way. What meets in one must not
    depend on the chunk: a chunk's sequences are runs, or one run where each of them fills its steps.
    """
    tokens = dy.shape[-2] if dy.ndim > 1 else 1
    sequences = dy.size // max(tokens * dy.shape[-1], 1)
    return (1, sequences * tokens) if tokens % 32 == 0 else (sequences, tokens)


@functools.lru_cache(1024)
def _plan(steps: int, channels: int) -> tuple[int, int]:
    """Rows and columns of a patch, for so many steps of 32 tokens."""
    step_bytes = steps * STEP
    rows = min(_MOST_ROWS, max(64, _LEFT_BYTES // step_bytes * 32))
    return rows, min(ceiling(channels, 32), max(128, _RIGHT_BYTES // step_bytes * 32))


def row_range(where: str, outputs: int, rows: tuple[int, int] | None) -> tuple[int, int]:
    """The rows of the weight, all of them by default; raises ValueError when they do not exist."""
    first, last = (0, outputs) if rows is None else rows
    if not 0 <= first < last <= outputs:
        rule = f"rows must be (first, end) within 0..{outputs}"
        raise refusal(ValueError, where, rule, {"rows": rows}, "Count the outputs.")
    return first, last


def check_tokens(where: str, dy: np.ndarray, x: np.ndarray) -> None:
    """Raise ValueError unless dy and x have the same tokens."""
    if dy.shape[:-1] != x.shape[:-1]:
        got = {"dy.shape": dy.shape, "x.shape": x.shape}
        raise refusal(ValueError, where, "dy and x must have the same tokens", got, "Give those of one chunk.")


def backward_weight(
    dy: np.ndarray,
    x: np.ndarray,
    *,
    total: np.ndarray,
    accumulate: bool,
    rows: tuple[int, int] | None = None,
) -> np.ndarray:
    """Gradient of a linear layer with respect to its weight, or to `rows` of it, in bfloat16 with float32 sums.

    total (+)= Σ_tokens dyᵀ x

    Shapes   dy (..., O), x (..., C), total (O, C), or (end - first, C) with rows=(first, end) -> total
    Dtype    float32; dy and x are rounded
    Cost     2 O C operations a token; a weight's rows can be shared out to several tasks without a change of bits
    Errors   TypeError for other dtypes; ValueError when shapes do not fit, rows do not exist or total cannot be written
    """
    where = "bfloat16.backward_weight"
    check_tokens(where, dy, x)
    outputs, channels = dy.shape[-1], x.shape[-1]
    first, last = row_range(where, outputs, rows)
    check_output(where, "total", total, (last - first, channels), FLOAT32)
    check_float32(where, dy=dy, x=x)
    if unit() is Unit.PORTABLE or not dy.size:
        return portable.gradient(dy, x, total, accumulate, first, last)
    runs, tokens = runs_of_tokens(dy)
    steps = ceiling(tokens, 32) // 32 * runs
    band_rows, band_columns = _plan(steps, channels)
    left, right, sums = scratch(
        band_rows // 32 * steps * STEP, ceiling(channels, 32) // 32 * steps * STEP, 32 * (band_columns * 4 + 64)
    )
    _multiply(
        words(dy), words(x), words(total), ZEROS, unit(), CONFIGURATION, runs, tokens, outputs, channels, first, last,
        accumulate, left, right, sums, band_rows, band_columns,
    )  # fmt: skip
    return total
