"""The products on any processor: operands rounded to bfloat16, products and sums in float32 by BLAS.

BLAS may sum a row in another order when there are more rows or fewer, so here a row's last bits can depend on the
others.
"""

import numpy as np

from daskgpt.kernels import blas, gelu
from daskgpt.kernels.matmul._finish import GELU, GELU_GRADIENT
from daskgpt.kernels.matmul._operands import check_dtype
from daskgpt.kernels.matmul.bfloat16 import BFLOAT16, from_bfloat16, to_bfloat16


def _widened(array):
    """float32 numbers, rounded or not."""
    return from_bfloat16(array) if array.dtype == BFLOAT16 else array


def rounded(where, name, array):
    """A float32 or bfloat16 array as rows of float32 numbers that bfloat16 can hold."""
    check_dtype(where, name, array)
    halves = array if array.dtype == BFLOAT16 else to_bfloat16(array)
    return from_bfloat16(halves).reshape(-1, array.shape[-1])


def _write(values, target):
    """Write float32 values into an array of either dtype."""
    target[...] = to_bfloat16(values) if target.dtype == BFLOAT16 else values


def product(where, name, x, weight, backward, bias, residual, activation, before, results):
    """What linear._product does."""
    operand = rounded(where, name, x)
    both = weight.forward
    y = np.empty((len(operand), weight.channels if backward else weight.outputs), np.float32)
    blas.matmul(operand, both, y, transpose_b=not backward)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    if bias is not None:
        y += bias
    if residual is not None:
        check_dtype(where, "residual", residual)
        y += _widened(residual)
    if activation == GELU:
        _write(y, before)
        y = gelu.forward(y)
    if activation == GELU_GRADIENT:
        check_dtype(where, "before", before)
        y = gelu.backward(y, _widened(before))
    for target in (results.reals, results.halves):
        if target is not None:
            _write(y, target)


def gradient(where, dy, x, total, accumulate, first, last):
    """What gradient.backward_weight does."""
    left, right = rounded(where, "dy", dy), rounded(where, "x", x)
    if not len(left):
        if not accumulate:
            total[...] = 0
        return total
    return blas.matmul(left[:, first:last], right, total, transpose_a=True, accumulate=accumulate)
