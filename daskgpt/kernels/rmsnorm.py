"""Root-mean-square normalization over the channels, and its gradients: layernorm without mean and without bias."""

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, contiguous, rows
from daskgpt.kernels.compilation import kernel
from daskgpt.kernels.simd.math import fma
from daskgpt.kernels.simd.reductions import dot, scale_of

EPSILON = 1e-5
_ONE_PART = (1, 0)


@kernel("r2 r1 r1 n2 f w2", use="rmsnorm")
def normalise(x, weight, other, parts, eps, y):
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
def differentiate(dy, x, weight, other, parts, eps, dx):
    """Write the gradient of `normalise` with respect to x."""
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
def sum_gradient(dy, x, parts, eps, total, accumulate):
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
    weight = contiguous(weight)
    normalise(rows(x), weight, weight, _ONE_PART, norm_eps, rows(y))
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
    weight = contiguous(weight)
    differentiate(rows(dy), rows(x), weight, weight, _ONE_PART, norm_eps, rows(dx))
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
    sum_gradient(rows(dy), rows(x), (0, 1), norm_eps, total, accumulate)
    return total
