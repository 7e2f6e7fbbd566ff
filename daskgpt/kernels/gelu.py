"""GELU in its tanh form, and its gradient.

With u = sqrt(2/π) (x + 0.044715 x³) the published formula is 0.5 x (1 + tanh(u)). The kernels compute the equal
x sigmoid(2u), which takes one exp and one division and stays precise where 1 + tanh(u) would cancel.
"""

import math

import numpy as np

from daskgpt.kernels.arguments import elementwise
from daskgpt.kernels.compilation import kernel, wide_vectors
from daskgpt.kernels.simd.math import sigmoid

SLOPE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715


@kernel("r1 w1")
def _forward(x, y):
    wide_vectors()
    real = x.dtype.type
    slope, cubic, one = real(SLOPE), real(CUBIC), real(1)
    for i in range(x.size):
        v = x[i]
        y[i] = v * sigmoid(slope * v * (one + cubic * v * v))


@kernel("r1 r1 w1")
def _backward(dy, x, dx):
    wide_vectors()
    real = x.dtype.type
    slope, cubic, one = real(SLOPE), real(CUBIC), real(1)
    three_cubic = real(3 * CUBIC)
    for i in range(x.size):
        v = x[i]
        s = sigmoid(slope * v * (one + cubic * v * v))
        dx[i] = dy[i] * (s + v * s * (one - s) * slope * (one + three_cubic * v * v))


def forward(x: np.ndarray) -> np.ndarray:
    """Return GELU in its tanh form.

    y = 0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))

    Shapes   x (b, t, C) -> y (b, t, C)
    Dtype    float32 or float64
    Cost     1 exp and 1 division an element
    Source   Hendrycks and Gimpel 2016, arXiv:1606.08415
    """
    return elementwise("gelu.forward", _forward, x=x)


def backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of GELU with respect to its input.

    s = sigmoid(2u);  dx = dy * (s + x s (1 - s) 2 du/dx);  u = sqrt(2/π) (x + 0.044715 x³)

    Shapes   dy, x (b, t, C) -> dx (b, t, C)
    Dtype    float32 or float64, one for both
    Cost     1 exp and 1 division an element; the exp is computed again, not stored
    Errors   ValueError when the shapes differ
    """
    return elementwise("gelu.backward", _backward, dy=dy, x=x)
