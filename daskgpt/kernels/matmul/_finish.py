"""What follows a block of sums while it is in the first cache: residual, GELU or its gradient, rounding, writing."""

import numpy as np

from daskgpt.kernels._jit import helper, wide_vectors
from daskgpt.kernels.gelu import _CUBIC, _SLOPE
from daskgpt.kernels.matmul._tiles import BLOCK, ROW
from daskgpt.kernels.matmul._vectors import (
    add_columns,
    add_widened,
    read_real,
    store_columns,
    store_rounded,
    write_real,
)
from daskgpt.kernels.vector_math import sigmoid

# What follows a product: nothing, GELU, or the gradient of GELU.
PLAIN, GELU, GELU_GRADIENT = 0, 1, 2

_f = np.float32
_SLOPE_32, _CUBIC_32, _THREE_CUBIC_32, _ONE, _ZERO = _f(_SLOPE), _f(_CUBIC), _f(3 * _CUBIC), _f(1), _f(0)
_NUMBERS = BLOCK // 4


@helper
def _clear_block(block):
    for i in range(_NUMBERS):
        write_real(block, i, _ZERO)


@helper
def _add_block(source, halves, row_bytes, rows, columns, block):
    """Add rows x columns of a matrix in float32 or bfloat16 to a block."""
    for row in range(rows):
        if halves:
            add_widened(block + row * ROW, source + row * row_bytes, columns)
        else:
            add_columns(block + row * ROW, source + row * row_bytes, columns)


@helper
def _store_block(block, rows, columns, target, halves, row_bytes):
    """Copy a block to rows x columns of a matrix in float32 or bfloat16."""
    for row in range(rows):
        if halves:
            store_rounded(block + row * ROW, target + row * row_bytes, columns)
        else:
            store_columns(block + row * ROW, target + row * row_bytes, columns)


# Both loops always run over the whole block, so that a number never falls into the scalar end of a vector loop, which
# may round differently.
@helper
def _gelu_block(block):
    wide_vectors()
    for i in range(_NUMBERS):
        x = read_real(block, i)
        write_real(block, i, x * sigmoid(_SLOPE_32 * x * (_ONE + _CUBIC_32 * x * x)))


@helper
def _gelu_gradient_block(block, before):
    """Multiply a block by the slope of GELU at the numbers of the block `before`."""
    wide_vectors()
    for i in range(_NUMBERS):
        x = read_real(before, i)
        s = sigmoid(_SLOPE_32 * x * (_ONE + _CUBIC_32 * x * x))
        slope = s + x * s * (_ONE - s) * _SLOPE_32 * (_ONE + _THREE_CUBIC_32 * x * x)
        write_real(block, i, read_real(block, i) * slope)


@helper
def finish_block(
    block, spare, row, column, rows, columns, width, residual, residual_halves, activation, before, before_halves,
    reals, halves,
):  # fmt: skip
    """Everything that happens to the block of sums at (row, column) of results `width` wide.

    residual, before, reals and halves are addresses of matrices of the results' shape, 0 where there is none: what is
    added, what GELU is applied to (written by GELU, read by its gradient), and the results in float32 and in bfloat16.
    """
    place = row * width + column
    if residual != 0:
        size = 2 if residual_halves else 4
        _add_block(residual + place * size, residual_halves, width * size, rows, columns, block)
    size = 2 if before_halves else 4
    if activation == GELU:
        _store_block(block, rows, columns, before + place * size, before_halves, width * size)
        _gelu_block(block)
    if activation == GELU_GRADIENT:
        _clear_block(spare)
        _add_block(before + place * size, before_halves, width * size, rows, columns, spare)
        _gelu_gradient_block(block, spare)
    if reals != 0:
        _store_block(block, rows, columns, reals + place * 4, False, width * 4)
    if halves != 0:
        _store_block(block, rows, columns, halves + place * 2, True, width * 2)
