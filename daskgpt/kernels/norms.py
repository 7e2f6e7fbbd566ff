"""Normalization of rows, and its gradients: layernorm, RMSNorm, and RMSNorm of each head of queries and keys.

RMSNorm is layernorm without mean and without bias. That of queries and keys (qk_norm) has a weight for the queries and
one for the keys. It comes before they are turned by their positions, as in Qwen3; nanochat normalizes them without a
weight, after they are turned, which changes no length.
"""

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, contiguous, head_size, rows
from daskgpt.kernels.compilation import helper, kernel
from daskgpt.kernels.simd.math import fma
from daskgpt.kernels.simd.rows import dot, scale_of, sum_of

EPSILON = 1e-5
_ONE_PART = (1, 0)


@helper
def _centre(x, i, centred):
    """Write row i minus its mean; return 1 / standard deviation, from the centred row, so nothing cancels."""
    real = x.dtype.type
    mean = sum_of(x[i]) * (real(1) / real(centred.size))
    for j in range(centred.size):
        centred[j] = x[i, j] - mean
    return scale_of(centred, EPSILON)


@kernel("r2 r1 r1 w2")
def _layernorm(x, weight, bias, y):
    centred = np.empty(x.shape[1], x.dtype)
    for i in range(x.shape[0]):
        rstd = _centre(x, i, centred)
        for j in range(x.shape[1]):
            y[i, j] = fma(centred[j] * rstd, weight[j], bias[j])


@kernel("r2 r2 r1 w2")
def _layernorm_backward_x(dy, x, weight, dx):
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
def _layernorm_backward_weight(dy, x, total, accumulate):
    if accumulate == 0:
        total[:] = 0
    centred = np.empty(x.shape[1], x.dtype)
    for i in range(x.shape[0]):
        rstd = _centre(x, i, centred)
        for j in range(x.shape[1]):
            total[j] = fma(dy[i, j], centred[j] * rstd, total[j])


def layernorm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Normalize every row, then scale and shift its channels.

    y = (x - mean) * rstd * weight + bias;  rstd = 1 / sqrt(variance + 1e-5)

    Shapes   x (b, t, C), weight (C,), bias (C,) -> y (b, t, C)
    Dtype    float32 or float64, one for all
    Cost     3 passes over a row that stays in the first cache
    Source   Ba et al. 2016, arXiv:1607.06450
    Errors   ValueError when the shapes do not fit
    """
    check_shape("layernorm", "weight", weight, x.shape[-1:])
    check_shape("layernorm", "bias", bias, x.shape[-1:])
    y = np.empty(x.shape, x.dtype, like=x)
    _layernorm(rows(x), contiguous(weight), contiguous(bias), rows(y))
    return y


def layernorm_backward_x(dy: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the gradient of layernorm with respect to its input.

    x̂ = (x - mean) * rstd;  g = dy * weight;  dx = rstd * (g - mean(g) - x̂ * mean(g * x̂))

    Shapes   dy, x (b, t, C), weight (C,) -> dx (b, t, C)
    Dtype    float32 or float64, one for all
    Cost     4 passes over a row; mean and rstd computed again, not stored
    Source   Ba et al. 2016, arXiv:1607.06450
    Errors   ValueError when the shapes do not fit
    """
    check_shape("layernorm_backward_x", "dy", dy, x.shape)
    check_shape("layernorm_backward_x", "weight", weight, x.shape[-1:])
    dx = np.empty(x.shape, x.dtype, like=x)
    _layernorm_backward_x(rows(dy), rows(x), contiguous(weight), rows(dx))
    return dx


def layernorm_backward_weight(dy: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool) -> np.ndarray:
    """Return the gradient of layernorm with respect to its weight, summed over the rows in order.

    dweight = sum(dy * x̂);  x̂ = (x - mean) * rstd

    Shapes   dy, x (b, t, C) -> total (C,)
    Dtype    float32 or float64, one for all
    Cost     3 passes over a row; mean and rstd computed again, not stored
    Errors   ValueError when the shapes do not fit
    """
    check_shape("layernorm_backward_weight", "dy", dy, x.shape)
    check_output("layernorm_backward_weight", "total", total, x.shape[-1:], x.dtype)
    _layernorm_backward_weight(rows(dy), rows(x), total, accumulate)
    return total


@kernel("r2 r1 r1 n2 f w2", use="rmsnorm")
def _rmsnorm(x, weight, other, parts, eps, y):
    """Normalize parts of each row, as long as a weight: `parts` says how many have this one, and how many after them
    the other; what follows is copied.
    """
    (first, second), size = parts, weight.size
    for i in range(x.shape[0]):
        for part in range(first + second):
            factors, start = weight if part < first else other, part * size
            scale = scale_of(x[i, start : start + size], eps)
            for j in range(size):
                y[i, start + j] = x[i, start + j] * scale * factors[j]
        for j in range((first + second) * size, x.shape[1]):
            y[i, j] = x[i, j]


@kernel("r2 r2 r1 r1 n2 f w2", use="rmsnorm")
def _rmsnorm_backward_x(dy, x, weight, other, parts, eps, dx):
    """Write the gradient of `_rmsnorm` with respect to x."""
    (first, second), size, real = parts, weight.size, x.dtype.type
    inverse, g = real(1) / real(size), np.empty(size, x.dtype)
    for i in range(x.shape[0]):
        for part in range(first + second):
            factors, start = weight if part < first else other, part * size
            row = x[i, start : start + size]
            scale = scale_of(row, eps)
            for j in range(size):
                g[j] = dy[i, start + j] * factors[j]
            # x̂ mean(g x̂) = x scale mean(g x scale)
            slope = dot(g, row) * inverse * scale * scale
            for j in range(size):
                dx[i, start + j] = scale * fma(-slope, row[j], g[j])
        for j in range((first + second) * size, x.shape[1]):
            dx[i, j] = dy[i, j]


@kernel("r2 r2 n2 f w1 n", use="rmsnorm")
def _rmsnorm_backward_weight(dy, x, parts, eps, total, accumulate):
    """Add the gradient of the weight of parts first ... last - 1 of each row."""
    (first, last), size = parts, total.size
    if accumulate == 0:
        total[:] = 0
    for i in range(x.shape[0]):
        for part in range(first, last):
            row, g = x[i, part * size : (part + 1) * size], dy[i, part * size : (part + 1) * size]
            scale = scale_of(row, eps)
            for j in range(size):
                total[j] = fma(g[j], row[j] * scale, total[j])


def rmsnorm(x: np.ndarray, weight: np.ndarray, *, norm_eps: float = EPSILON) -> np.ndarray:
    """Divide every row by the root of its mean square, then scale its channels.

    y = x * scale * weight;  scale = 1 / sqrt(mean(x²) + norm_eps)

    Shapes   x (b, t, C), weight (C,) -> y (b, t, C)
    Dtype    float32 or float64, one for all
    Cost     2 passes over a row that stays in the first cache
    Source   Zhang and Sennrich 2019, arXiv:1910.07467
    Errors   ValueError when the shapes do not fit
    """
    check_shape("rmsnorm", "weight", weight, x.shape[-1:])
    y = np.empty(x.shape, x.dtype, like=x)
    weight = contiguous(weight)
    _rmsnorm(rows(x), weight, weight, _ONE_PART, norm_eps, rows(y))
    return y


def rmsnorm_backward_x(dy: np.ndarray, x: np.ndarray, weight: np.ndarray, *, norm_eps: float = EPSILON) -> np.ndarray:
    """Return the gradient of rmsnorm with respect to its input.

    x̂ = x * scale;  g = dy * weight;  dx = scale * (g - x̂ * mean(g * x̂))

    Shapes   dy, x (b, t, C), weight (C,) -> dx (b, t, C)
    Dtype    float32 or float64, one for all
    Cost     4 passes over a row; the scale is computed again, not stored
    Source   Zhang and Sennrich 2019, arXiv:1910.07467
    Errors   ValueError when the shapes do not fit
    """
    check_shape("rmsnorm_backward_x", "dy", dy, x.shape)
    check_shape("rmsnorm_backward_x", "weight", weight, x.shape[-1:])
    dx = np.empty(x.shape, x.dtype, like=x)
    weight = contiguous(weight)
    _rmsnorm_backward_x(rows(dy), rows(x), weight, weight, _ONE_PART, norm_eps, rows(dx))
    return dx


def rmsnorm_backward_weight(
    dy: np.ndarray, x: np.ndarray, *, norm_eps: float = EPSILON, total: np.ndarray, accumulate: bool
) -> np.ndarray:
    """Return the gradient of rmsnorm with respect to its weight, summed over the rows in order.

    dweight = sum(dy * x̂);  x̂ = x * scale

    Shapes   dy, x (b, t, C) -> total (C,)
    Dtype    float32 or float64, one for all
    Cost     2 passes over a row; the scale is computed again, not stored
    Errors   ValueError when the shapes do not fit
    """
    where = "rmsnorm_backward_weight"
    check_shape(where, "total", total, x.shape[-1:])
    return _sum(where, dy, x, (0, 1), norm_eps, total, accumulate)


def _sum(
    where: str, dy: np.ndarray, x: np.ndarray, parts: tuple[int, int], eps: float, total: np.ndarray, accumulate: bool
) -> np.ndarray:
    """Return the gradient of the weight that some parts of each row share.

    parts   the first of these, and the one after the last
    """
    check_shape(where, "dy", dy, x.shape)
    check_output(where, "total", total, total.shape, x.dtype)
    _rmsnorm_backward_weight(rows(dy), rows(x), parts, eps, total, accumulate)
    return total


def _check_parts(where: str, x: np.ndarray, heads: int, key_heads: int, *weights: np.ndarray) -> None:
    size = head_size(where, x, heads, key_heads)
    for weight in weights:
        check_shape(where, "the weight", weight, (size,))


def qk_norm(
    x: np.ndarray, q_norm: np.ndarray, k_norm: np.ndarray, *, heads: int, key_heads: int, norm_eps: float
) -> np.ndarray:
    """Return queries and keys, each head divided by the root of its mean square and scaled, and values.

    y = x * scale * weight;  scale = 1 / sqrt(mean(x²) + norm_eps);  weight of the queries or of the keys

    Shapes   x (b, t, (NH + 2 KH) HS), q_norm and k_norm (HS,) -> y as x
    Dtype    float32 or float64, one for all
    Errors   ValueError when the shapes do not fit
    Source   Henry et al. 2020, arXiv:2010.04245; Qwen3, arXiv:2505.09388
    """
    _check_parts("qk_norm", x, heads, key_heads, q_norm, k_norm)
    y = np.empty(x.shape, x.dtype, like=x)
    _rmsnorm(rows(x), contiguous(q_norm), contiguous(k_norm), (heads, key_heads), norm_eps, rows(y))
    return y


def qk_norm_backward_x(
    dy: np.ndarray,
    x: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    *,
    heads: int,
    key_heads: int,
    norm_eps: float,
) -> np.ndarray:
    """Return the gradient of `qk_norm` with respect to x, head by head as `rmsnorm_backward_x`.

    Shapes   dy and x (b, t, (NH + 2 KH) HS), q_norm and k_norm (HS,) -> dx as x
    Dtype    float32 or float64, one for all
    Errors   ValueError when the shapes do not fit
    """
    _check_parts("qk_norm_backward_x", x, heads, key_heads, q_norm, k_norm)
    check_shape("qk_norm_backward_x", "dy", dy, x.shape)
    dx = np.empty(x.shape, x.dtype, like=x)
    weights = contiguous(q_norm), contiguous(k_norm)
    _rmsnorm_backward_x(rows(dy), rows(x), *weights, (heads, key_heads), norm_eps, rows(dx))
    return dx


def qk_norm_backward_q_norm(
    dy: np.ndarray, x: np.ndarray, *, heads: int, key_heads: int, norm_eps: float, total: np.ndarray, accumulate: bool
) -> np.ndarray:
    """Return the gradient of `qk_norm` with respect to q_norm, summed over tokens and heads in order.

    Shapes   dy and x (b, t, (NH + 2 KH) HS) -> total (HS,)
    Dtype    float32 or float64, one for all
    Errors   ValueError when the shapes do not fit
    """
    where = "qk_norm_backward_q_norm"
    _check_parts(where, x, heads, key_heads, total)
    return _sum(where, dy, x, (0, heads), norm_eps, total, accumulate)


def qk_norm_backward_k_norm(
    dy: np.ndarray, x: np.ndarray, *, heads: int, key_heads: int, norm_eps: float, total: np.ndarray, accumulate: bool
) -> np.ndarray:
    """Return the gradient of `qk_norm` with respect to k_norm; see `qk_norm_backward_q_norm`."""
    where = "qk_norm_backward_k_norm"
    _check_parts(where, x, heads, key_heads, total)
    return _sum(where, dy, x, (heads, heads + key_heads), norm_eps, total, accumulate)
