"""RMSNorm of each head of queries and keys, with a weight for the queries and one for the keys, and its gradients.

It comes before queries and keys are turned by their positions, as in Qwen3. nanochat normalizes them without a weight,
after they are turned, which changes no length.
"""

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, contiguous, rows
from daskgpt.kernels.compilation import kernel
from daskgpt.kernels.rmsnorm import scale_of
from daskgpt.kernels.simd.math import fma
from daskgpt.kernels.simd.reductions import dot


@kernel("r2 r1 r1 n2 f w2", use="qk_norm")
def _forward(x, q_norm, k_norm, heads, eps, y):
    queries, keys = heads
    size = q_norm.size
    for i in range(x.shape[0]):
        for head in range(queries + keys):
            weight, start = q_norm if head < queries else k_norm, head * size
            scale = scale_of(x[i, start : start + size], eps)
            for j in range(size):
                y[i, start + j] = x[i, start + j] * scale * weight[j]
        for j in range((queries + keys) * size, x.shape[1]):
            y[i, j] = x[i, j]


@kernel("r2 r2 r1 r1 n2 f w2", use="qk_norm")
def _backward_x(dy, x, q_norm, k_norm, heads, eps, dx):
    real = x.dtype.type
    queries, keys = heads
    size = q_norm.size
    inverse = real(1) / real(size)
    g = np.empty(size, x.dtype)
    for i in range(x.shape[0]):
        for head in range(queries + keys):
            weight, start = q_norm if head < queries else k_norm, head * size
            row = x[i, start : start + size]
            scale = scale_of(row, eps)
            for j in range(size):
                g[j] = dy[i, start + j] * weight[j]
            slope = dot(g, row) * inverse * scale * scale
            for j in range(size):
                dx[i, start + j] = scale * fma(-slope, row[j], g[j])
        for j in range((queries + keys) * size, x.shape[1]):
            dx[i, j] = dy[i, j]


@kernel("r2 r2 n2 f w1 n", use="qk_norm")
def _backward_weight(dy, x, heads, eps, total, accumulate):
    first, last = heads
    size = total.size
    if accumulate == 0:
        total[:] = 0
    for i in range(x.shape[0]):
        for head in range(first, last):
            start = head * size
            scale = scale_of(x[i, start : start + size], eps)
            for j in range(size):
                total[j] = fma(dy[i, start + j], x[i, start + j] * scale, total[j])


def _check(where: str, x: np.ndarray, heads: int, *weights: np.ndarray) -> None:
    size = x.shape[-1] // heads
    check_shape(where, "x", x, (*x.shape[:-1], heads * size))
    for weight in weights:
        check_shape(where, "the weight", weight, (size,))


def forward(
    x: np.ndarray, q_norm: np.ndarray, k_norm: np.ndarray, *, heads: int, key_heads: int, norm_eps: float
) -> np.ndarray:
    """Return queries and keys, each head divided by the root of its mean square and scaled, and values.

    y = x * scale * weight;  scale = 1 / sqrt(mean(x²) + norm_eps);  weight of the queries or of the keys

    Shapes   x (b, t, (NH + 2 KH) HS), q_norm and k_norm (HS,) -> y as x
    Dtype    float32 or float64, one for all
    Errors   ValueError when the shapes do not fit
    Source   Henry et al. 2020, arXiv:2010.04245; Qwen3, arXiv:2505.09388
    """
    _check("qk_norm.forward", x, heads + 2 * key_heads, q_norm, k_norm)
    y = np.empty(x.shape, x.dtype, like=x)
    _forward(rows(x), contiguous(q_norm), contiguous(k_norm), (heads, key_heads), norm_eps, rows(y))
    return y


def backward_x(
    dy: np.ndarray,
    x: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    *,
    heads: int,
    key_heads: int,
    norm_eps: float,
) -> np.ndarray:
    """Return the gradient of `forward` with respect to x, head by head as `rmsnorm.backward_x`.

    Shapes   dy and x (b, t, (NH + 2 KH) HS), q_norm and k_norm (HS,) -> dx as x
    Dtype    float32 or float64, one for all
    Errors   ValueError when the shapes do not fit
    """
    _check("qk_norm.backward_x", x, heads + 2 * key_heads, q_norm, k_norm)
    check_shape("qk_norm.backward_x", "dy", dy, x.shape)
    dx = np.empty(x.shape, x.dtype, like=x)
    weights = contiguous(q_norm), contiguous(k_norm)
    _backward_x(rows(dy), rows(x), *weights, (heads, key_heads), norm_eps, rows(dx))
    return dx


def backward_q_norm(
    dy: np.ndarray, x: np.ndarray, *, heads: int, key_heads: int, norm_eps: float, total: np.ndarray, accumulate: bool
) -> np.ndarray:
    """Return the gradient of `forward` with respect to q_norm, summed over tokens and heads in order.

    Shapes   dy and x (b, t, (NH + 2 KH) HS) -> total (HS,)
    Dtype    float32 or float64, one for all
    Errors   ValueError when the shapes do not fit
    """
    return _sum("qk_norm.backward_q_norm", dy, x, (0, heads, heads + 2 * key_heads), norm_eps, total, accumulate)


def backward_k_norm(
    dy: np.ndarray, x: np.ndarray, *, heads: int, key_heads: int, norm_eps: float, total: np.ndarray, accumulate: bool
) -> np.ndarray:
    """Return the gradient of `forward` with respect to k_norm; see `backward_q_norm`."""
    numbers = heads, heads + key_heads, heads + 2 * key_heads
    return _sum("qk_norm.backward_k_norm", dy, x, numbers, norm_eps, total, accumulate)


def _sum(
    where: str, dy: np.ndarray, x: np.ndarray, heads: tuple[int, int, int], eps: float, total: np.ndarray, more: bool
) -> np.ndarray:
    """Return the gradient of the weight that some heads share: their first, the one after their last, and all heads."""
    first, last, all_heads = heads
    _check(where, x, all_heads, total)
    check_shape(where, "dy", dy, x.shape)
    check_output(where, "total", total, total.shape, x.dtype)
    _backward_weight(rows(dy), rows(x), (first, last), eps, total, more)
    return total
