"""Layer normalization over the channels, and its gradients."""

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, contiguous, rows
from daskgpt.kernels.compilation import helper, kernel
from daskgpt.kernels.simd.math import fma
from daskgpt.kernels.simd.reductions import dot, scale_of, sum_of

EPSILON = 1e-5


@helper
def _centre(x, i, centred):
    """Write row i minus its mean; return 1 / standard deviation, from the centred row, so nothing cancels."""
    real = x.dtype.type
    mean = sum_of(x[i]) * (real(1) / real(centred.size))
    for j in range(centred.size):
        centred[j] = x[i, j] - mean
    return scale_of(centred, EPSILON)


@kernel("r2 r1 r1 w2")
def _forward(x, weight, bias, y):
    centred = np.empty(x.shape[1], x.dtype)
    for i in range(x.shape[0]):
        rstd = _centre(x, i, centred)
        for j in range(x.shape[1]):
            y[i, j] = fma(centred[j] * rstd, weight[j], bias[j])


@kernel("r2 r2 r1 w2")
def _backward_x(dy, x, weight, dx):
    real = x.dtype.type
    channels = x.shape[1]
    inverse = real(1) / real(channels)
    centred, g = np.empty(channels, x.dtype), np.empty(channels, x.dtype)
    for i in range(x.shape[0]):
        rstd = _centre(x, i, centred)
        for j in range(channels):
            g[j] = dy[i, j] * weight[j]
        g_mean = sum_of(g) * inverse
        # x̂ mean(g x̂) = centred rstd mean(g centred rstd)
        slope = dot(g, centred) * inverse * rstd * rstd
        for j in range(channels):
            dx[i, j] = rstd * fma(-slope, centred[j], g[j] - g_mean)


@kernel("r2 r2 w1 n")
def _backward_weight(dy, x, total, accumulate):
    if accumulate == 0:
        total[:] = 0
    centred = np.empty(x.shape[1], x.dtype)
    for i in range(x.shape[0]):
        rstd = _centre(x, i, centred)
        for j in range(x.shape[1]):
            total[j] = fma(dy[i, j], centred[j] * rstd, total[j])


def forward(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Normalize every row, then scale and shift its channels.

    y = (x - mean) * rstd * weight + bias;  rstd = 1 / sqrt(variance + 1e-5)

    Shapes   x (b, t, C), weight (C,), bias (C,) -> y (b, t, C)
    Dtype    float32 or float64, one for all
    Cost     3 passes over a row that stays in the first cache
    Source   Ba et al. 2016, arXiv:1607.06450
    Errors   ValueError when the shapes do not fit
    """
    check_shape("layernorm.forward", "weight", weight, x.shape[-1:])
    check_shape("layernorm.forward", "bias", bias, x.shape[-1:])
    y = np.empty(x.shape, x.dtype, like=x)
    _forward(rows(x), contiguous(weight), contiguous(bias), rows(y))
    return y


def backward_x(dy: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the gradient of layernorm with respect to its input.

    x̂ = (x - mean) * rstd;  g = dy * weight;  dx = rstd * (g - mean(g) - x̂ * mean(g * x̂))

    Shapes   dy, x (b, t, C), weight (C,) -> dx (b, t, C)
    Dtype    float32 or float64, one for all
    Cost     4 passes over a row; mean and rstd computed again, not stored
    Source   Ba et al. 2016, arXiv:1607.06450
    Errors   ValueError when the shapes do not fit
    """
    check_shape("layernorm.backward_x", "dy", dy, x.shape)
    check_shape("layernorm.backward_x", "weight", weight, x.shape[-1:])
    dx = np.empty(x.shape, x.dtype, like=x)
    _backward_x(rows(dy), rows(x), contiguous(weight), rows(dx))
    return dx


def backward_weight(dy: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool) -> np.ndarray:
    """Return the gradient of layernorm with respect to its weight, summed over the rows in order.

    dweight = sum(dy * x̂);  x̂ = (x - mean) * rstd

    Shapes   dy, x (b, t, C) -> total (C,)
    Dtype    float32 or float64, one for all
    Cost     3 passes over a row; mean and rstd computed again, not stored
    Errors   ValueError when the shapes do not fit
    """
    check_shape("layernorm.backward_weight", "dy", dy, x.shape)
    check_output("layernorm.backward_weight", "total", total, x.shape[-1:], x.dtype)
    _backward_weight(rows(dy), rows(x), total, accumulate)
    return total
