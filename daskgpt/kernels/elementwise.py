"""Kernels that compute each number from those at its place: addition, and activations with their gradients.

The published formula of GELU is 0.5 x (1 + tanh(u)) with u = sqrt(2/π) (x + 0.044715 x³). The kernels compute the equal
x sigmoid(2u), which takes one exp and one division and stays precise where 1 + tanh(u) would cancel.
"""

import math

import numpy as np

from daskgpt.kernels.arguments import check_shape, flat, rows
from daskgpt.kernels.compilation import Kernel, kernel, wide_vectors
from daskgpt.kernels.simd.math import sigmoid

SLOPE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715


def _apply(where: str, kernel: Kernel, **arrays: np.ndarray) -> np.ndarray:
    """Return what a kernel computes from each number of one or more arrays, in the shape and dtype of the last one.

    Errors   ValueError when the shapes differ
    """
    *others, last = arrays.values()
    for name, array in zip(arrays, others, strict=False):
        check_shape(where, name, array, last.shape)
    result = np.empty(last.shape, last.dtype, like=last)
    kernel(*map(flat, arrays.values()), flat(result))
    return result


@kernel("r1 r1 w1")
def _add(x, y, z):
    for i in range(x.size):
        z[i] = x[i] + y[i]


def add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the sum of two arrays, where a residual connection ends.

    z = x + y

    Shapes   x, y (b, t, C) -> z (b, t, C)
    Dtype    float32 or float64, one for both
    Cost     1 addition per element, bound by memory
    Errors   ValueError when the shapes differ
    """
    return _apply("add", _add, x=x, y=y)


@kernel("r1 w1")
def _gelu(x, y):
    wide_vectors()
    real = x.dtype.type
    slope, cubic, one = real(SLOPE), real(CUBIC), real(1)
    for i in range(x.size):
        v = x[i]
        y[i] = v * sigmoid(slope * v * (one + cubic * v * v))


@kernel("r1 r1 w1")
def _gelu_backward(dy, x, dx):
    wide_vectors()
    real = x.dtype.type
    slope, cubic, one = real(SLOPE), real(CUBIC), real(1)
    three_cubic = real(3 * CUBIC)
    for i in range(x.size):
        v = x[i]
        s = sigmoid(slope * v * (one + cubic * v * v))
        dx[i] = dy[i] * (s + v * s * (one - s) * slope * (one + three_cubic * v * v))


def gelu(x: np.ndarray) -> np.ndarray:
    """Return GELU in its tanh form.

    y = 0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))

    Shapes   x (b, t, C) -> y (b, t, C)
    Dtype    float32 or float64
    Cost     1 exp and 1 division an element
    Source   Hendrycks and Gimpel 2016, arXiv:1606.08415
    """
    return _apply("gelu", _gelu, x=x)


def gelu_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of GELU with respect to its input.

    s = sigmoid(2u);  dx = dy * (s + x s (1 - s) 2 du/dx);  u = sqrt(2/π) (x + 0.044715 x³)

    Shapes   dy, x (b, t, C) -> dx (b, t, C)
    Dtype    float32 or float64, one for both
    Cost     1 exp and 1 division an element; the exp is computed again, not stored
    Errors   ValueError when the shapes differ
    """
    return _apply("gelu_backward", _gelu_backward, dy=dy, x=x)


@kernel("r1 w1", use="relu2")
def _relu2(x, y):
    zero = x.dtype.type(0)
    for i in range(x.size):
        positive = max(x[i], zero)
        y[i] = positive * positive


@kernel("r1 r1 w1", use="relu2")
def _relu2_backward(dy, x, dx):
    zero, two = x.dtype.type(0), x.dtype.type(2)
    for i in range(x.size):
        dx[i] = dy[i] * two * max(x[i], zero)


def relu2(x: np.ndarray) -> np.ndarray:
    """Return the square of ReLU.

    y = max(x, 0)²

    Shapes   x (b, t, C) -> y (b, t, C)
    Dtype    float32 or float64
    Cost     2 operations an element
    Source   So et al. 2021, arXiv:2109.08668
    """
    return _apply("relu2", _relu2, x=x)


def relu2_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of the square of ReLU with respect to its input.

    dx = dy * 2 max(x, 0)

    Shapes   dy, x (b, t, C) -> dx (b, t, C)
    Dtype    float32 or float64, one for both
    Cost     3 operations an element
    Errors   ValueError when the shapes differ
    """
    return _apply("relu2_backward", _relu2_backward, dy=dy, x=x)


@kernel("r2 w2", use="swiglu")
def _swiglu(x, y):
    wide_vectors()
    half = y.shape[1]
    for i in range(x.shape[0]):
        for j in range(half):
            gate = x[i, j]
            y[i, j] = gate * sigmoid(gate) * x[i, half + j]


@kernel("r2 r2 w2", use="swiglu")
def _swiglu_backward(dy, x, dx):
    wide_vectors()
    one = x.dtype.type(1)
    half = dy.shape[1]
    for i in range(x.shape[0]):
        for j in range(half):
            gate, up = x[i, j], x[i, half + j]
            s = sigmoid(gate)
            dx[i, j] = dy[i, j] * up * s * (one + gate * (one - s))
            dx[i, half + j] = dy[i, j] * gate * s


def swiglu(x: np.ndarray) -> np.ndarray:
    """Return the second half of the channels, gated by the first half, which passes through SiLU.

    y = gate sigmoid(gate) up, where gate is the first half of the channels, and up the second half

    Shapes   x (b, t, 2H) -> y (b, t, H)
    Dtype    float32 or float64
    Cost     1 exp and 1 division an element
    Source   Shazeer 2020, arXiv:2002.05202
    """
    half = x.shape[-1] // 2
    check_shape("swiglu", "x", x, (*x.shape[:-1], 2 * half))
    y = np.empty((*x.shape[:-1], half), x.dtype, like=x)
    _swiglu(rows(x), rows(y))
    return y


def swiglu_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of SwiGLU with respect to its input.

    s = sigmoid(gate);  dgate = dy up s (1 + gate (1 - s));  dup = dy gate s

    Shapes   dy (b, t, H), x (b, t, 2H) -> dx (b, t, 2H)
    Dtype    float32 or float64, one for both
    Cost     1 exp and 1 division an element of dy
    Errors   ValueError when the shapes do not fit
    """
    check_shape("swiglu_backward", "dy", dy, (*x.shape[:-1], x.shape[-1] // 2))
    dx = np.empty(x.shape, x.dtype, like=x)
    _swiglu_backward(rows(dy), rows(x), rows(dx))
    return dx
