"""The products whose result has a row a token: y = x weightᵀ + bias and dx = dy weight."""

import functools
from typing import Any

import numpy as np

from daskgpt.kernels.arguments import check_shape
from daskgpt.kernels.bfloat16 import portable
from daskgpt.kernels.bfloat16.operands import FLOAT32, ceiling, check_float32, words
from daskgpt.kernels.bfloat16.packed_weight import PackedWeight, check_layout
from daskgpt.kernels.bfloat16.packing import pack_rows
from daskgpt.kernels.bfloat16.tiles import (
    CONFIGURATION,
    DEPTH,
    PATCH,
    ROW,
    STEP,
    ZEROS,
    close_unit,
    fetch,
    multiply_patch,
    open_unit,
)
from daskgpt.kernels.bfloat16.units import scratch, unit
from daskgpt.kernels.compilation import helper, kernel, wide_vectors
from daskgpt.kernels.vectors.operations import address_of, store_columns

# The rows of x that are multiplied with one panel of the weight after another: they stay in the second cache.
_ROWS_BYTES = 1 << 20
# A summed axis longer than this is cut into pieces of half the length, for so many rows, to read the weight less often.
_LONGEST, _DEEP_ROWS = 2048, 256
# Fewer bands of rows than this use a panel up faster than it can be fetched ahead.
_PATCHES_TO_FETCH = 3


@helper
def _store_patch(patch, rows, columns, target, row_bytes):
    """Copy a patch of sums to rows x columns of a matrix."""
    for row in range(rows):
        store_columns(patch + row * ROW, target + row * row_bytes, columns)


@kernel("h1 h1 h1 H1 n n n n n n n n n n n")
def _multiply(
    x, weight, start, y, unit, configuration, rows, depth, width, start_step, left, sums, patch_step, chunk_rows,
    chunk_depth,
):  # fmt: skip
    """The loops, from outside: rows that fit in the cache, pieces of the summed axis, panels, steps, bands of rows."""
    wide_vectors()
    open_unit(unit, configuration)
    panel = (depth + 31) // 32 * STEP
    for row0 in range(0, rows, chunk_rows):
        chunk = min(chunk_rows, rows - row0)
        patches = (chunk + 31) // 32
        for depth0 in range(0, depth, chunk_depth):
            deep = min(chunk_depth, depth - depth0)
            steps = (deep + 31) // 32
            source = address_of(x) + (row0 * depth + depth0) * 4
            pack_rows(source, depth * 4, chunk, deep, False, left, steps * STEP)
            for column in range(0, width, 32):
                right = address_of(weight) + column // 32 * panel + depth0 // 32 * STEP
                for step in range(0, steps, DEPTH):
                    count = min(DEPTH, steps - step)
                    fresh = step == 0 and depth0 == 0
                    done = step + count == steps and depth0 + deep == depth
                    for i in range(patches):
                        patch = sums + column // 32 * patch_step + i * PATCH
                        begin = address_of(start) + column // 32 * start_step if fresh else patch
                        if patches >= _PATCHES_TO_FETCH:
                            fetch(right + panel + step * STEP, count, i, patches)
                        multiply_patch(
                            unit, left + (i * steps + step) * STEP, right + step * STEP, count,
                            begin, 0 if fresh else ROW, patch, ROW,
                        )  # fmt: skip
                        if done:
                            row = row0 + i * 32
                            target = address_of(y) + (row * width + column) * 4
                            _store_patch(patch, min(32, rows - row), min(32, width - column), target, width * 4)
    close_unit(unit)


@functools.lru_cache(1024)
def _plan(rows: int, depth: int, width: int) -> tuple[int, int, int, int, int]:
    """Rows and depth of a chunk, bytes of its left panels and its sums, bytes from a column of patches to the next."""
    if depth > _LONGEST:
        chunk_rows, chunk_depth = max(32, min(_DEEP_ROWS, ceiling(rows, 32))), _LONGEST // 2
        patch_step = chunk_rows // 32 * PATCH
        return chunk_rows, chunk_depth, chunk_rows * chunk_depth * 2, ceiling(width, 32) // 32 * patch_step, patch_step
    chunk_depth = ceiling(depth, 32)
    most = max(32, _ROWS_BYTES // (2 * chunk_depth) // 32 * 32)
    chunks = max(1, -(-rows // most))
    chunk_rows = max(32, ceiling(-(-rows // chunks), 32))
    return chunk_rows, chunk_depth, chunk_rows * chunk_depth * 2, chunk_rows // 32 * PATCH, 0


def _starts(bias: np.ndarray | None, width: int) -> tuple[np.ndarray, int]:
    """What the sums start with, the bias or one row of zeros, and the bytes from 32 columns of it to the next."""
    if bias is None:
        return ZEROS, 0
    if width % 32:
        padded = np.zeros(ceiling(width, 32), FLOAT32)
        padded[:width] = bias
        bias = padded
    return words(bias), ROW


def _product(where: str, name: str, x: Any, weight: PackedWeight, backward: bool, bias: Any = None) -> np.ndarray:
    """x weightᵀ + bias, or with `backward` x weight."""
    check_layout(where, weight)
    depth, width = (weight.outputs, weight.channels) if backward else (weight.channels, weight.outputs)
    check_shape(where, name, x, (*x.shape[:-1], depth))
    check_float32(where, **{name: x})
    if bias is not None:
        check_shape(where, "bias", bias, (width,))
        check_float32(where, bias=bias)
    if not weight.in_tiles:
        return portable.product(x, weight, backward, bias)
    y = np.empty((*x.shape[:-1], width), FLOAT32)
    start, start_step = _starts(bias, width)
    rows = x.size // depth
    chunk_rows, chunk_depth, left_bytes, sums_bytes, patch_step = _plan(rows, depth, width)
    left, sums = scratch(left_bytes, sums_bytes)
    packed = weight.backward if backward else weight.forward
    _multiply(
        words(x), packed, start, words(y), unit(), CONFIGURATION, rows, depth, width, start_step, left, sums,
        patch_step, chunk_rows, chunk_depth,
    )  # fmt: skip
    return y


def forward(x: np.ndarray, weight: PackedWeight, bias: np.ndarray | None = None) -> np.ndarray:
    """Linear layer in bfloat16 with float32 sums.

    y = x weightᵀ + bias

    Shapes   x (..., C), weight of (O, C), bias (O,) -> y (..., O)
    Dtype    float32; x is rounded
    Cost     2 C O operations a row; with AMX or AVX-512 a row's bits do not depend on the other rows
    Errors   TypeError for other dtypes; ValueError when shapes do not fit; RuntimeError for another unit's layout
    """
    return _product("bfloat16.forward", "x", x, weight, False, bias)


def backward_x(dy: np.ndarray, weight: PackedWeight) -> np.ndarray:
    """Gradient of a linear layer with respect to its input, in bfloat16 with float32 sums.

    dx = dy weight

    Shapes   dy (..., O), weight of (O, C) -> dx (..., C)
    Dtype    float32; dy is rounded
    Cost     2 C O operations a row; with AMX or AVX-512 a row's bits do not depend on the other rows
    Errors   as forward
    """
    return _product("bfloat16.backward_x", "dy", dy, weight, True)
