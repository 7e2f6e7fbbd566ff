"""Root-mean-square normalization over the channels, and its gradients: layernorm without mean and without bias."""

import math

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, contiguous, rows
from daskgpt.kernels.compilation import helper, kernel
from daskgpt.kernels.simd.math import fma
from daskgpt.kernels.simd.reductions import dot

EPSILON = 1e-5


@helper
def scale_of(row, eps):
    """Return 1 / root of the mean square of a row."""
    real = row.dtype.type
    return real(1) / math.sqrt(fma(dot(row, row), real(1) / real(row.size), real(eps)))


@kernel("r2 r1 f w2", use="rmsnorm")
def _forward(x, weight, eps, y):
    for i in range(x.shape[0]):
        scale = scale_of(x[i], eps)
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * scale * weight[j]


@kernel("r2 r2 r1 f w2", use="rmsnorm")
def _backward_x(dy, x, weight, eps, dx):
    real = x.dtype.type
    channels = x.shape[1]
    inverse = real(1) / real(channels)
    g = np.empty(channels, x.dtype)
    for i in range(x.shape[0]):
        scale = scale_of(x[i], eps)
        for j in range(channels):
            g[j] = dy[i, j] * weight[j]
        # x̂ mean(g x̂) = x scale mean(g x scale)
        slope = dot(g, x[i]) * inverse * scale * scale
        for j in range(channels):
            dx[i, j] = scale * fma(-slope, x[i, j], g[j])


@kernel("r2 r2 f w1 n", use="rmsnorm")
def _backward_weight(dy, x, eps, total, accumulate):
    if accumulate == 0:
        total[:] = 0
    for i in range(x.shape[0]):
        scale = scale_of(x[i], eps)
        for j in range(x.shape[1]):
            total[j] = fma(dy[i, j], x[i, j] * scale, total[j])


def forward(x: np.ndarray, weight: np.ndarray, *, norm_eps: float = EPSILON) -> np.ndarray:
    """Divide every row by the root of its mean square, then scale its channels.

    y = x * scale * weight;  scale = 1 / sqrt(mean(x²) + norm_eps)

    Shapes   x (b, t, C), weight (C,) -> y (b, t, C)
    Dtype    float32 or float64, one for all
    Cost     2 passes over a row that stays in the first cache
    Source   Zhang and Sennrich 2019, arXiv:1910.07467
    Errors   ValueError when the shapes do not fit
    """
    check_shape("rmsnorm.forward", "weight", weight, x.shape[-1:])
    y = np.empty(x.shape, x.dtype, like=x)
    _forward(rows(x), contiguous(weight), norm_eps, rows(y))
    return y


def backward_x(dy: np.ndarray, x: np.ndarray, weight: np.ndarray, *, norm_eps: float = EPSILON) -> np.ndarray:
    """Return the gradient of rmsnorm with respect to its input.

    x̂ = x * scale;  g = dy * weight;  dx = scale * (g - x̂ * mean(g * x̂))

    Shapes   dy, x (b, t, C), weight (C,) -> dx (b, t, C)
    Dtype    float32 or float64, one for all
    Cost     4 passes over a row; the scale is computed again, not stored
    Source   Zhang and Sennrich 2019, arXiv:1910.07467
    Errors   ValueError when the shapes do not fit
    """
    check_shape("rmsnorm.backward_x", "dy", dy, x.shape)
    check_shape("rmsnorm.backward_x", "weight", weight, x.shape[-1:])
    dx = np.empty(x.shape, x.dtype, like=x)
    _backward_x(rows(dy), rows(x), contiguous(weight), norm_eps, rows(dx))
    return dx


def backward_weight(
    dy: np.ndarray, x: np.ndarray, *, norm_eps: float = EPSILON, total: np.ndarray, accumulate: bool
) -> np.ndarray:
    """Return the gradient of rmsnorm with respect to its weight, summed over the rows in order.

    dweight = sum(dy * x̂);  x̂ = x * scale

    Shapes   dy, x (b, t, C) -> total (C,)
    Dtype    float32 or float64, one for all
    Cost     2 passes over a row; the scale is computed again, not stored
    Errors   ValueError when the shapes do not fit
    """
    check_shape("rmsnorm.backward_weight", "dy", dy, x.shape)
    check_output("rmsnorm.backward_weight", "total", total, x.shape[-1:], x.dtype)
    _backward_weight(rows(dy), rows(x), norm_eps, total, accumulate)
    return total
