"""SwiGLU: one half of the channels, passed through SiLU, gates the other half; and its gradient."""

import numpy as np

from daskgpt.kernels.arguments import check_shape, rows
from daskgpt.kernels.compilation import kernel, wide_vectors
from daskgpt.kernels.simd.math import sigmoid


@kernel("r2 w2", use="swiglu")
def _forward(x, y):
    wide_vectors()
    half = y.shape[1]
    for i in range(x.shape[0]):
        for j in range(half):
            gate = x[i, j]
            y[i, j] = gate * sigmoid(gate) * x[i, half + j]


@kernel("r2 r2 w2", use="swiglu")
def _backward(dy, x, dx):
    wide_vectors()
    one = x.dtype.type(1)
    half = dy.shape[1]
    for i in range(x.shape[0]):
        for j in range(half):
            gate, up = x[i, j], x[i, half + j]
            s = sigmoid(gate)
            dx[i, j] = dy[i, j] * up * s * (one + gate * (one - s))
            dx[i, half + j] = dy[i, j] * gate * s


def forward(x: np.ndarray) -> np.ndarray:
    """Return the gated half of the channels.

    y = gate sigmoid(gate) up, where gate is the first half of the channels, and up the second half

    Shapes   x (b, t, 2H) -> y (b, t, H)
    Dtype    float32 or float64
    Cost     1 exp and 1 division an element
    Source   Shazeer 2020, arXiv:2002.05202
    """
    half = x.shape[-1] // 2
    check_shape("swiglu.forward", "x", x, (*x.shape[:-1], 2 * half))
    y = np.empty((*x.shape[:-1], half), x.dtype, like=x)
    _forward(rows(x), rows(y))
    return y


def backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of SwiGLU with respect to its input.

    s = sigmoid(gate);  dgate = dy up s (1 + gate (1 - s));  dup = dy gate s

    Shapes   dy (b, t, H), x (b, t, 2H) -> dx (b, t, 2H)
    Dtype    float32 or float64, one for both
    Cost     1 exp and 1 division an element of dy
    Errors   ValueError when the shapes do not fit
    """
    check_shape("swiglu.backward", "dy", dy, (*x.shape[:-1], x.shape[-1] // 2))
    dx = np.empty(x.shape, x.dtype, like=x)
    _backward(rows(dy), rows(x), rows(dx))
    return dx
