"""What follows a block of sums while it is in the first cache: bias, residual, GELU or its gradient, rounding, writing."""

import numpy as np

from daskgpt.kernels._jit import helper, wide_vectors
from daskgpt.kernels.gelu import _CUBIC, _SLOPE
from daskgpt.kernels.matmul._vectors import (
    load_columns,
    read_real,
    store_columns,
    store_rounded,
    widen_columns,
    write_real,
)
from daskgpt.kernels.vector_math import sigmoid

# What the `activation` argument of a product means.
NONE, GELU, GELU_GRADIENT = 0, 1, 2

_f = np.float32
_SLOPE_32, _CUBIC_32, _THREE_CUBIC_32, _ONE = _f(_SLOPE), _f(_CUBIC), _f(3 * _CUBIC), _f(1)


@helper
def load_block(source, halves, row_bytes, rows, columns, block):
    """Copy rows x columns of a matrix in float32 or bfloat16 to a block."""
    for row in range(rows):
        if halves:
            widen_columns(source + row * row_bytes, block + row * 128, columns)
        else:
            load_columns(source + row * row_bytes, block + row * 128, columns)


@helper
def store_block(block, rows, columns, target, halves, row_bytes):
    """Copy a block to rows x columns of a matrix in float32 or bfloat16; target 0: do nothing."""
    if target != 0:
        for row in range(rows):
            if halves:
                store_rounded(block + row * 128, target + row * row_bytes, columns)
            else:
                store_columns(block + row * 128, target + row * row_bytes, columns)


@helper
def gelu_block(block, rows):
    """GELU of the rows of a block, in place."""
    wide_vectors()
    for i in range(rows * 32):
        x = read_real(block, i)
        write_real(block, i, x * sigmoid(_SLOPE_32 * x * (_ONE + _CUBIC_32 * x * x)))


@helper
def gelu_gradient_block(block, before, rows):
    """Multiply the rows of a block by the slope of GELU at the rows of the block `before`."""
    wide_vectors()
    for i in range(rows * 32):
        x = read_real(before, i)
        s = sigmoid(_SLOPE_32 * x * (_ONE + _CUBIC_32 * x * x))
        slope = s + x * s * (_ONE - s) * _SLOPE_32 * (_ONE + _THREE_CUBIC_32 * x * x)
        write_real(block, i, read_real(block, i) * slope)
