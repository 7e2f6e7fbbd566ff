"""RMSNorm of each head of queries and keys, with a weight for the queries and one for the keys, and its gradients.

It comes before queries and keys are turned by their positions, as in Qwen3. nanochat normalizes them without a weight,
after they are turned, which changes no length.
"""

import numpy as np

from daskgpt.kernels.arguments import check_heads, check_output, check_shape, contiguous, rows
from daskgpt.kernels.rmsnorm import differentiate, normalise, sum_gradient


def _check(where: str, x: np.ndarray, heads: int, key_heads: int, *weights: np.ndarray) -> None:
    check_heads(where, heads, key_heads)
    size = x.shape[-1] // (heads + 2 * key_heads)
    check_shape(where, "x", x, (*x.shape[:-1], (heads + 2 * key_heads) * size))
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
    _check("qk_norm.forward", x, heads, key_heads, q_norm, k_norm)
    y = np.empty(x.shape, x.dtype, like=x)
    normalise(rows(x), contiguous(q_norm), contiguous(k_norm), (heads, key_heads), norm_eps, rows(y))
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
    _check("qk_norm.backward_x", x, heads, key_heads, q_norm, k_norm)
    check_shape("qk_norm.backward_x", "dy", dy, x.shape)
    dx = np.empty(x.shape, x.dtype, like=x)
    weights = contiguous(q_norm), contiguous(k_norm)
    differentiate(rows(dy), rows(x), *weights, (heads, key_heads), norm_eps, rows(dx))
    return dx


def backward_q_norm(
    dy: np.ndarray, x: np.ndarray, *, heads: int, key_heads: int, norm_eps: float, total: np.ndarray, accumulate: bool
) -> np.ndarray:
    """Return the gradient of `forward` with respect to q_norm, summed over tokens and heads in order.

    Shapes   dy and x (b, t, (NH + 2 KH) HS) -> total (HS,)
    Dtype    float32 or float64, one for all
    Errors   ValueError when the shapes do not fit
    """
    where, first = "qk_norm.backward_q_norm", 0
    return _sum(where, dy, x, (heads, key_heads), (first, heads), norm_eps, total, accumulate)


def backward_k_norm(
    dy: np.ndarray, x: np.ndarray, *, heads: int, key_heads: int, norm_eps: float, total: np.ndarray, accumulate: bool
) -> np.ndarray:
    """Return the gradient of `forward` with respect to k_norm; see `backward_q_norm`."""
    where, last = "qk_norm.backward_k_norm", heads + key_heads
    return _sum(where, dy, x, (heads, key_heads), (heads, last), norm_eps, total, accumulate)


def _sum(
    where: str,
    dy: np.ndarray,
    x: np.ndarray,
    heads: tuple[int, int],
    shared: tuple[int, int],
    eps: float,
    total: np.ndarray,
    more: bool,
) -> np.ndarray:
    """Return the gradient of the weight that some heads share: the first of these, and the one after the last."""
    _check(where, x, *heads, total)
    check_shape(where, "dy", dy, x.shape)
    check_output(where, "total", total, total.shape, x.dtype)
    sum_gradient(rows(dy), rows(x), shared, eps, total, more)
    return total
