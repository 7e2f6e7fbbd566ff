"""exp, sigmoid and tanh for use inside kernels, without branches, so that LLVM turns loops over them into vector code.

float64 uses the C library's exp. The float32 versions differ from the exact value by at most

    exp       2 units in the last place (-87 <= x <= 88.7); outside, x is clamped: never 0, never infinite; NaN stays NaN
    sigmoid   3 units in the last place (x >= -87)
    tanh      2e-7 absolute
"""

import math
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from daskgpt.kernels._jit import helper

_f = np.float32
_LOG2_E = _f(1.44269504)
_LOG_2_HIGH, _LOG_2_LOW = _f(0.693359375), _f(-2.12194440e-4)
_LOWEST, _HIGHEST = _f(-87.0), _f(88.72)
# Adding and subtracting 1.5 * 2**23 rounds to a whole number, which is then in the sum's lowest bits.
_ROUND = _f(12582912.0)
_C2, _C3, _C4, _C5, _C6, _C7 = (
    _f(5.0000001201e-1), _f(1.6666665459e-1), _f(4.1665795894e-2), _f(8.3334519073e-3), _f(1.3981999507e-3), _f(1.9875691500e-4),
)  # fmt: skip


# Reordering would cancel the rounding constant, so this one function allows only contraction.
@numba.njit(nogil=True, error_model="numpy", fastmath={"contract"}, forceinline=True)
def _exp_float32(x):
    """Cody and Waite's reduction x = n ln(2) + r, then Cephes' polynomial for exp(r), then n added to the exponent bits."""
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = x - n * _LOG_2_HIGH - n * _LOG_2_LOW
    p = ((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2
    y = np.float32(p * (r * r) + r + _f(1.0))
    bits = y.view(np.int32) + (np.float32(shifted).view(np.int32) << np.int32(23))
    return np.int32(bits).view(np.float32)


def exp(x: Any) -> Any:
    """e**x of one number: inside kernels the versions below, in plain Python the C library's."""
    return math.exp(x)


@overload(exp, jit_options={"forceinline": True, "error_model": "numpy"})
def _exp(x):
    if x == numba.float32:
        return lambda x: _exp_float32(x)
    return lambda x: math.exp(x)


@helper
def sigmoid(x):
    """1 / (1 + exp(-x)) of one number."""
    one = type(x)(1)
    return one / (one + exp(-x))


@helper
def tanh(x):
    """Hyperbolic tangent of one number: 2 sigmoid(2x) - 1, with an absolute error of 2e-7 in float32."""
    one = type(x)(1)
    return one - (one + one) / (one + exp(x + x))
