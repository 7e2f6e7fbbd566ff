"""exp, log, sigmoid and a row's maximum for use inside kernels.

They have no branches, so that LLVM turns loops over them into vector code: 0.3 ns an element on one AVX-512 core.

float64 uses the C library's exp and log. The float32 versions differ from the exact value by at most

    exp       2 units in the last place; x is clamped to -87 ... 88.72, so never 0 and never infinite; NaN stays NaN
    log       2 units in the last place, of normal numbers above 0; infinity and NaN stay what they are
    sigmoid   3 units in the last place, from x = -87 on
"""

import math

import numba
import numpy as np
from numba.extending import intrinsic, overload

from daskgpt.kernels.compilation import helper
from daskgpt.kernels.simd import lanes


@lanes.instruction("s", "s")
def _exp_float32(builder, x):
    return lanes.exp(builder, x)


def exp(x: float) -> float:
    """Return e**x of one number: inside kernels by the versions below, in plain Python by the C library."""
    return math.exp(x)


@overload(exp, jit_options={"forceinline": True, "error_model": "numpy"})
def _exp(x):
    if x == numba.float32:
        return lambda x: _exp_float32(x)
    return lambda x: math.exp(x)


_f = np.float32
_GREATEST = np.finfo(_f).max
_ROOT_HALF, _LOG_2_HIGH, _LOG_2_LOW = _f(0.70710678118), _f(0.693359375), _f(-2.12194440e-4)
_L0, _L1, _L2 = _f(7.0376836292e-2), _f(-1.1514610310e-1), _f(1.1676998740e-1)
_L3, _L4, _L5 = _f(-1.2420140846e-1), _f(1.4249322787e-1), _f(-1.6668057665e-1)
_L6, _L7, _L8 = _f(2.0000714765e-1), _f(-2.4999993993e-1), _f(3.3333331174e-1)


@helper
def _log_float32(x):
    """Return log(x) for x = m 2**n with m around 1: Cephes' polynomial for log(m), then n log(2) in two parts."""
    bits = _f(x).view(np.int32)
    n = _f((bits >> np.int32(23)) - np.int32(126))
    m = np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000)).view(np.float32)
    if m < _ROOT_HALF:
        n, m = n - _f(1), m + m
    z = m - _f(1)
    p = fma(_L0, z, _L1)
    p = fma(p, z, _L2)
    p = fma(p, z, _L3)
    p = fma(p, z, _L4)
    p = fma(p, z, _L5)
    p = fma(p, z, _L6)
    p = fma(p, z, _L7)
    p = fma(p, z, _L8)
    y = fma(n, _LOG_2_LOW, p * z * (z * z))
    return fma(n, _LOG_2_HIGH, z + fma(_f(-0.5), z * z, y))


def log(x: float) -> float:
    """Return the natural logarithm of one number: inside kernels by the versions below, in plain Python by C's."""
    return math.log(x)


@overload(log, jit_options={"forceinline": True, "error_model": "numpy"})
def _log(x):
    if x == numba.float32:
        return lambda x: _log_float32(x) if x <= _GREATEST else x
    return lambda x: math.log(x)


@helper
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) of one number."""
    one = type(x)(1)
    return one / (one + exp(-x))


@intrinsic
def _fma(typing_context, left, right, total):
    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return total(total, total, total), generate


@helper
def fma(left, right, total):
    """Return left * right + total of single numbers with one rounding, on every processor."""
    return _fma(left, right, total)


def maximum(row: np.ndarray) -> float:
    """Return the largest number of a row. It may ignore a NaN, which stays in the row when the maximum is
    subtracted."""
    return row.max()


@helper
def _flip(bits):
    """Turn the bits of a float into a whole number of the same order, or back."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@helper
def _maximum_float32(row):
    """Return the maximum by comparing whole numbers, which LLVM vectorizes without assuming that there is no NaN."""
    top = np.int32(-(2**31))
    for j in range(row.size):
        top = max(top, _flip(np.float32(row[j]).view(np.int32)))
    return np.int32(_flip(top)).view(np.float32)


@helper
def _maximum_float64(row):
    top = row[0]
    for j in range(1, row.size):
        top = max(top, row[j])
    return top


@overload(maximum, jit_options={"forceinline": True})
def _maximum(row):
    if row.dtype == numba.float32:
        return lambda row: _maximum_float32(row)
    return lambda row: _maximum_float64(row)
