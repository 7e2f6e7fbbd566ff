"""The products whose result has a row a token: y = x weightᵀ + bias and dx = dy weight, with what follows them."""

import functools
from typing import Any

import numpy as np

from daskgpt.kernels._arrays import check_shape
from daskgpt.kernels._jit import kernel, wide_vectors
from daskgpt.kernels.blas import address_of
from daskgpt.kernels.matmul import _portable
from daskgpt.kernels.matmul._finish import GELU, GELU_GRADIENT, PLAIN, finish_block
from daskgpt.kernels.matmul._operands import NOTHING, ceiling, check_float32, operand, words
from daskgpt.kernels.matmul._pack import pack_rows
from daskgpt.kernels.matmul._scratch import scratch
from daskgpt.kernels.matmul._tiles import (
    BLOCK,
    CONFIGURATION,
    DEPTH,
    ROW,
    STEP,
    close_unit,
    fetch,
    multiply_block,
    open_unit,
)
from daskgpt.kernels.matmul.bfloat16 import BFLOAT16, FLOAT32
from daskgpt.kernels.matmul.units import unit
from daskgpt.kernels.matmul.weights import PackedWeight, check_layout

# The rows of x that are multiplied with one panel of the weight after another: they stay in the second cache.
_ROWS_BYTES = 1 << 20
# A summed axis longer than this is cut into pieces of half the length, for so many rows, to read the weight less often.
_LONGEST, _DEEP_ROWS = 2048, 256
# Fewer blocks of rows than this use a panel up faster than it can be fetched ahead.
_BLOCKS_TO_FETCH = 3
_CONFIGURATION = CONFIGURATION.ctypes.data
_ZEROS = np.zeros(ROW // 2, BFLOAT16)
_DTYPES = ("float32", "bfloat16", "both")


@kernel("h1 h1 h1 h1 H1 H1 H1 n n n n n n n n n n n n n n n n")
def _multiply(
    x, weight, start, residual, before, reals, halves, unit, configuration, x_halves, residual_halves, before_halves,
    activation, rows, depth, width, start_step, left, sums, spare, block_step, chunk_rows, chunk_depth,
):  # fmt: skip
    """The loops, from outside: rows that fit in the cache, pieces of the summed axis, panels, steps, blocks of rows."""
    wide_vectors()
    open_unit(unit, configuration)
    residual_place = address_of(residual) if residual.size else 0
    before_place = address_of(before) if before.size else 0
    reals_place = address_of(reals) if reals.size else 0
    halves_place = address_of(halves) if halves.size else 0
    size = 2 if x_halves else 4
    panel = (depth + 31) // 32 * STEP
    for row0 in range(0, rows, chunk_rows):
        chunk = min(chunk_rows, rows - row0)
        blocks = (chunk + 31) // 32
        for depth0 in range(0, depth, chunk_depth):
            deep = min(chunk_depth, depth - depth0)
            steps = (deep + 31) // 32
            source = address_of(x) + (row0 * depth + depth0) * size
            pack_rows(source, x_halves, depth * size, chunk, deep, False, left, steps * STEP)
            for column in range(0, width, 32):
                right = address_of(weight) + column // 32 * panel + depth0 // 32 * STEP
                for step in range(0, steps, DEPTH):
                    count = min(DEPTH, steps - step)
                    fresh = step == 0 and depth0 == 0
                    done = step + count == steps and depth0 + deep == depth
                    for i in range(blocks):
                        block = sums + column // 32 * block_step + i * BLOCK
                        begin = address_of(start) + column // 32 * start_step if fresh else block
                        if blocks >= _BLOCKS_TO_FETCH:
                            fetch(right + panel + step * STEP, count, i, blocks)
                        multiply_block(
                            unit, left + (i * steps + step) * STEP, right + step * STEP, count,
                            begin, 0 if fresh else ROW, block, ROW,
                        )  # fmt: skip
                        if done:
                            finish_block(
                                block, spare, row0 + 32 * i, column, min(32, chunk - 32 * i), min(32, width - column),
                                width, residual_place, residual_halves, activation, before_place, before_halves,
                                reals_place, halves_place,
                            )  # fmt: skip
    close_unit(unit)


@functools.lru_cache(1024)
def _plan(rows: int, depth: int, width: int) -> tuple[int, int, int, int, int]:
    """Rows and depth of a chunk, bytes of its left panels and its sums, bytes from a column of blocks to the next."""
    if depth > _LONGEST:
        chunk_rows, chunk_depth = max(32, min(_DEEP_ROWS, ceiling(rows, 32))), _LONGEST // 2
        block_step = chunk_rows // 32 * BLOCK
        return chunk_rows, chunk_depth, chunk_rows * chunk_depth * 2, ceiling(width, 32) // 32 * block_step, block_step
    chunk_depth = ceiling(depth, 32)
    most = max(32, _ROWS_BYTES // (2 * chunk_depth) // 32 * 32)
    chunks = max(1, -(-rows // most))
    chunk_rows = max(32, ceiling(-(-rows // chunks), 32))
    return chunk_rows, chunk_depth, chunk_rows * chunk_depth * 2, chunk_rows // 32 * BLOCK, 0


def _starts(bias: np.ndarray | None, width: int) -> tuple[np.ndarray, int]:
    """What the sums start with, the bias or one row of zeros, and the bytes from 32 columns of it to the next."""
    if bias is None:
        return _ZEROS, 0
    if width % 32:
        padded = np.zeros(ceiling(width, 32), FLOAT32)
        padded[:width] = bias
        bias = padded
    return words(np.ascontiguousarray(bias)), ROW


class _Results:
    """The arrays that a product writes, in float32, in bfloat16 or in both."""

    def __init__(self, where: str, dtype: str, shape: tuple[int, ...]) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"{where}: dtype must be float32, bfloat16 or both; got dtype={dtype}. Name one of them.")
        self.reals = None if dtype == "bfloat16" else np.empty(shape, FLOAT32)
        self.halves = None if dtype == "float32" else np.empty(shape, BFLOAT16)

    def words(self) -> list[np.ndarray]:
        return [NOTHING if array is None else words(array) for array in (self.reals, self.halves)]

    def wanted(self) -> Any:
        if self.reals is None:
            return self.halves
        return self.reals if self.halves is None else (self.reals, self.halves)


def _product(where, name, x, weight, backward, *, bias, residual, activation, before, results):
    """Write into `results`; `before` is written if the activation is GELU, read if it is GELU's gradient."""
    check_layout(where, weight)
    depth, width = (weight.outputs, weight.channels) if backward else (weight.channels, weight.outputs)
    shape = (*x.shape[:-1], width)
    check_shape(where, name, x, (*x.shape[:-1], depth))
    if bias is not None:
        check_shape(where, "bias", bias, (width,))
        check_float32(where, "bias", bias)
    for each, array in (("residual", residual), ("before", before)):
        if array is not None:
            check_shape(where, each, array, shape)
    if not weight.in_tiles:
        _portable.product(where, name, x, weight, backward, bias, residual, activation, before, results)
        return
    x_words, x_halves = operand(where, name, x)
    residual_words, residual_halves = (NOTHING, False) if residual is None else operand(where, "residual", residual)
    before_words, before_halves = (NOTHING, False) if before is None else operand(where, "before", before)
    start, start_step = _starts(bias, width)
    rows = x.size // depth
    chunk_rows, chunk_depth, left_bytes, sums_bytes, block_step = _plan(rows, depth, width)
    left, sums, spare = scratch(left_bytes, sums_bytes, BLOCK)
    packed = weight.backward if backward else weight.forward
    _multiply(
        x_words, packed, start, residual_words, before_words, *results.words(), unit(), _CONFIGURATION, x_halves,
        residual_halves, before_halves, activation, rows, depth, width, start_step, left, sums, spare, block_step,
        chunk_rows, chunk_depth,
    )  # fmt: skip


def forward(
    x: np.ndarray,
    weight: PackedWeight,
    bias: np.ndarray | None = None,
    *,
    residual: np.ndarray | None = None,
    dtype: str = "float32",
) -> Any:
    """Linear layer in bfloat16 with float32 sums.

    y = x weightᵀ + bias + residual

    Shapes   x (..., C), weight of (O, C), bias (O,), residual (..., O) -> y (..., O), two of them with dtype "both"
    Dtype    x and residual float32 or bfloat16, bias float32; y as `dtype` says: float32, bfloat16 or both
    Cost     2 C O operations a row; with AMX or AVX-512 a row's bits do not depend on the other rows
    Errors   TypeError for other dtypes; ValueError when shapes do not fit; RuntimeError for another unit's layout
    """
    results = _Results("matmul.forward", dtype, (*x.shape[:-1], weight.outputs))
    _product(
        "matmul.forward", "x", x, weight, False,
        bias=bias, residual=residual, activation=PLAIN, before=None, results=results,
    )  # fmt: skip
    return results.wanted()


def forward_gelu(
    x: np.ndarray,
    weight: PackedWeight,
    bias: np.ndarray | None = None,
    *,
    before: str = "bfloat16",
    dtype: str = "bfloat16",
) -> tuple[np.ndarray, np.ndarray]:
    """Linear layer and GELU in one pass; what GELU was applied to is returned too, for the backward pass.

    h = x weightᵀ + bias;  y = GELU(h)

    Shapes   x (..., C), weight of (O, C), bias (O,) -> h (..., O), y (..., O)
    Dtype    x float32 or bfloat16, bias float32; h and y as `before` and `dtype` say: float32 or bfloat16
    Cost     2 C O operations a row, an exp and a division a number; y is computed from h before h is rounded
    Errors   as forward
    """
    where = "matmul.forward_gelu"
    for name, wanted in (("before", before), ("dtype", dtype)):
        if wanted not in _DTYPES[:2]:
            raise ValueError(f"{where}: {name} must be float32 or bfloat16; got {name}={wanted}. Name one of them.")
    shape = (*x.shape[:-1], weight.outputs)
    h = np.empty(shape, FLOAT32 if before == "float32" else BFLOAT16)
    results = _Results(where, dtype, shape)
    _product(where, "x", x, weight, False, bias=bias, residual=None, activation=GELU, before=h, results=results)
    return h, results.wanted()


def backward_x(
    dy: np.ndarray,
    weight: PackedWeight,
    *,
    before: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    dtype: str = "float32",
) -> Any:
    """Gradient of a linear layer with respect to its input, in bfloat16 with float32 sums.

    dx = dy weight + residual, or, if x was GELU(before):  dbefore = (dy weight) GELU'(before)

    Shapes   dy (..., O), weight of (O, C), before or residual (..., C) -> dx (..., C), two of them with dtype "both"
    Dtype    dy, before and residual float32 or bfloat16; dx as `dtype` says: float32, bfloat16 or both
    Cost     2 C O operations a row; with AMX or AVX-512 a row's bits do not depend on the other rows
    Errors   TypeError for other dtypes; ValueError when shapes do not fit or both before and residual are given;
             RuntimeError for a weight in another unit's layout
    """
    where = "matmul.backward_x"
    if before is not None and residual is not None:
        raise ValueError(
            f"{where}: before and residual cannot both apply; got two arrays. Add the residual afterwards."
        )
    activation = PLAIN if before is None else GELU_GRADIENT
    results = _Results(where, dtype, (*dy.shape[:-1], weight.channels))
    if before is not None:
        before = np.ascontiguousarray(before)
    _product(
        where,
        "dy",
        dy,
        weight,
        True,
        bias=None,
        residual=residual,
        activation=activation,
        before=before,
        results=results,
    )
    return results.wanted()
