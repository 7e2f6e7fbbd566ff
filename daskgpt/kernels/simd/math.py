"""exp, log, sigmoid and conversions of bfloat16 numbers for use inside kernels.

They have no branches, so that LLVM turns loops over them into vector code: 0.3 ns an element on one AVX-512 core.

float64 uses the C library's exp and log. The float32 versions differ from the exact value by at most

    exp       2 units in the last place; x is clamped to -87 ... 88.72, so never 0 and never infinite; NaN stays NaN,
              unless its low bits are set (`lanes.exp`)
    log       2 units in the last place, of normal numbers above 0; infinity and NaN stay what they are
    sigmoid   3 units in the last place, from x = -87 on
"""

import math

import numpy as np
from numba.extending import intrinsic

from daskgpt.kernels.compilation import for_float32, helper, instruction
from daskgpt.kernels.simd import lanes


@for_float32(instruction("s", "s")(lanes.exp))
def exp(x: float) -> float:
    """Return e**x of one number: of float32 by `lanes.exp`, of float64 and in plain Python by the C library."""
    return math.exp(x)


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
    return fma(n, _LOG_2_HIGH, z + fma(_f(-0.5), z * z, y)) if x <= _GREATEST else x


@for_float32(_log_float32)
def log(x: float) -> float:
    """Return the natural logarithm of one number: of float64 and in plain Python by the C library."""
    return math.log(x)


@helper
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) of one number."""
    one = type(x)(1)
    return one / (one + exp(-x))


@intrinsic
def fma(typing_context, left, right, total):
    """Return left * right + total of single numbers with one rounding, on every processor."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return total(total, total, total), generate


nearest_half, widened = instruction("s", "h")(lanes.round_to_bfloat16), instruction("h", "s")(lanes.widen)
