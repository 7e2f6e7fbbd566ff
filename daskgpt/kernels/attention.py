"""Causal self-attention of whole sequences, and its gradient.

Both walk over blocks of query rows. A block's scores against all keys up to its diagonal are one matrix product, the mask is where the
loops over a row end, and the scratch for a block of scores is all that is held beside the arrays: O(T), never (T, T). The forward keeps one
number a row, the logarithm of the sum of exponentials, from which the backward computes the probabilities again.
"""

import math

import numpy as np

from daskgpt.kernels._arrays import check_shape
from daskgpt.kernels._jit import helper, kernel, wide_vectors
from daskgpt.kernels.blas import address_of, gemm, gemm_address
from daskgpt.kernels.vector_math import exp

# Query rows of a block. More make better matrix products, fewer compute less beyond the diagonal.
_ROWS = 64
# Added to the rows of the scratch: row lengths that are powers of two would share few cache lines.
_GAP = 16


@helper
def _softmax(scores, row, limit, last, scale):
    """exp(scale (score - maximum)) of one row up to `limit`, zero from there to `last`; return scale * maximum and the sum."""
    real = scores.dtype.type
    top = scores[row, 0]
    for j in range(1, limit):
        top = max(top, scores[row, j])
    top *= scale
    total = real(0)
    for j in range(limit):
        e = exp(scale * scores[row, j] - top)
        scores[row, j] = e
        total += e
    for j in range(limit, last):
        scores[row, j] = 0
    return top, total


@kernel("n r3 n w3 w3 w2")
def _forward(blas, qkv, heads, y, logsumexp, scores):
    wide_vectors()
    real = y.dtype.type
    one, zero = real(1), real(0)
    tokens, channels = y.shape[1], y.shape[2]
    head_size = channels // heads
    ld, gap, size = 3 * channels, scores.shape[1], y.itemsize
    scale = one / real(math.sqrt(head_size))
    block, p = scores.shape[0], address_of(scores)
    for sequence in range(y.shape[0]):
        for head in range(heads):
            q = address_of(qkv) + (sequence * tokens * ld + head * head_size) * size
            k, v = q + channels * size, q + 2 * channels * size
            column = head * head_size
            for first in range(0, tokens, block):
                last = min(first + block, tokens)
                n = last - first
                gemm(blas, 0, 1, n, last, head_size, one, q + first * ld * size, ld, k, ld, zero, p, gap)
                out = address_of(y) + ((sequence * tokens + first) * channels + column) * size
                for i in range(n):
                    top, total = _softmax(scores, i, first + i + 1, last, scale)
                    logsumexp[sequence, head, first + i] = top + real(math.log(total))
                    inverse = one / total
                    for j in range(last):
                        scores[i, j] *= inverse
                gemm(blas, 0, 0, n, head_size, last, one, p, gap, v, ld, zero, out, channels)


@helper
def _score_gradients(probabilities, gradients, row, limit, last, scale, logsumexp, delta):
    """Scores -> probabilities, their gradients -> the scores' gradients, of one row up to `limit`; zero from there to `last`."""
    for j in range(limit):
        p = exp(scale * probabilities[row, j] - logsumexp)
        probabilities[row, j] = p
        gradients[row, j] = scale * p * (gradients[row, j] - delta)
    for j in range(limit, last):
        probabilities[row, j] = 0
        gradients[row, j] = 0


@kernel("n r3 r3 r3 r3 n w3 w2 w2")
def _backward(blas, dy, qkv, y, logsumexp, heads, dqkv, probabilities, gradients):
    """The last block of queries comes first: it meets every key, so its products start the sums of dk and dv."""
    wide_vectors()
    real = y.dtype.type
    one, zero = real(1), real(0)
    tokens, channels = y.shape[1], y.shape[2]
    head_size = channels // heads
    ld, gap, size = 3 * channels, probabilities.shape[1], y.itemsize
    scale = one / real(math.sqrt(head_size))
    block, p, ds = probabilities.shape[0], address_of(probabilities), address_of(gradients)
    for sequence in range(y.shape[0]):
        for head in range(heads):
            offset = (sequence * tokens * ld + head * head_size) * size
            q, dq = address_of(qkv) + offset, address_of(dqkv) + offset
            k, v, dk, dv = q + channels * size, q + 2 * channels * size, dq + channels * size, dq + 2 * channels * size
            column = head * head_size
            for first in range((tokens - 1) // block * block, -1, -block):
                last = min(first + block, tokens)
                n = last - first
                down = first * ld * size
                d_out = address_of(dy) + ((sequence * tokens + first) * channels + column) * size
                gemm(blas, 0, 1, n, last, head_size, one, q + down, ld, k, ld, zero, p, gap)
                gemm(blas, 0, 1, n, last, head_size, one, d_out, channels, v, ld, zero, ds, gap)
                for i in range(n):
                    row = first + i
                    delta = zero
                    for j in range(column, column + head_size):
                        delta += dy[sequence, row, j] * y[sequence, row, j]
                    _score_gradients(probabilities, gradients, i, row + 1, last, scale, logsumexp[sequence, head, row], delta)
                beta = zero if last == tokens else one
                gemm(blas, 1, 0, last, head_size, n, one, p, gap, d_out, channels, beta, dv, ld)
                gemm(blas, 1, 0, last, head_size, n, one, ds, gap, q + down, ld, beta, dk, ld)
                gemm(blas, 0, 0, n, head_size, last, one, ds, gap, k, ld, zero, dq + down, ld)


def _check_heads(where: str, qkv: np.ndarray, heads: int) -> int:
    channels = qkv.shape[-1] // 3
    if heads < 1 or qkv.shape[-1] != 3 * channels or channels % heads:
        raise ValueError(
            f"{where}: qkv must have 3 * channels columns, channels a multiple of heads; got columns={qkv.shape[-1]}, heads={heads}. "
            "Check the order of the arguments."
        )
    return channels


def _scratch(tokens: int, dtype: np.dtype) -> np.ndarray:
    return np.empty((min(_ROWS, tokens), tokens + _GAP), dtype)


def forward(qkv: np.ndarray, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Causal self-attention, scale 1 / sqrt(HS).

    y = softmax(q kᵀ / sqrt(HS)) v, each query over the keys up to its own position;  logsumexp = log(sum(exp(scores)))

    Shapes   qkv (b, T, 3C) -> y (b, T, C), logsumexp (b, NH, T)
    Dtype    float32 or float64
    Cost     2 b T² C operations in BLAS, b NH T² / 2 exps; scratch O(T)
    Source   Vaswani et al. 2017, arXiv:1706.03762; Dao et al. 2022, arXiv:2205.14135 (the log-sum-exp kept for the backward)
    Errors   ValueError when the columns are not 3 heads HS
    """
    channels = _check_heads("attention.forward", qkv, heads)
    sequences, tokens = qkv.shape[:2]
    y, logsumexp = np.empty((sequences, tokens, channels), qkv.dtype), np.empty((sequences, heads, tokens), qkv.dtype)
    scores = _scratch(tokens, qkv.dtype)
    _forward(gemm_address(qkv.dtype), np.ascontiguousarray(qkv), heads, y, logsumexp, scores)
    return y, logsumexp


def backward(dy: np.ndarray, qkv: np.ndarray, y: np.ndarray, logsumexp: np.ndarray, heads: int) -> np.ndarray:
    """Gradient of causal self-attention with respect to q, k and v.

    p = exp(q kᵀ / sqrt(HS) - logsumexp);  dp = dy vᵀ;  ds = p (dp - sum(dy y)) / sqrt(HS);  dq = ds k;  dk = dsᵀ q;  dv = pᵀ dy

    Shapes   dy (b, T, C), qkv (b, T, 3C), y (b, T, C), logsumexp (b, NH, T) -> dqkv (b, T, 3C)
    Dtype    float32 or float64, one for all
    Cost     5 b T² C operations in BLAS, b NH T² / 2 exps; scratch O(T)
    Source   Dao et al. 2022, arXiv:2205.14135
    Errors   ValueError when the shapes do not fit
    """
    where = "attention.backward"
    channels = _check_heads(where, qkv, heads)
    sequences, tokens = qkv.shape[:2]
    check_shape(where, "dy", dy, (sequences, tokens, channels))
    check_shape(where, "y", y, (sequences, tokens, channels))
    check_shape(where, "logsumexp", logsumexp, (sequences, heads, tokens))
    dqkv = np.empty(qkv.shape, qkv.dtype)
    dy, qkv, y, logsumexp = (np.ascontiguousarray(array) for array in (dy, qkv, y, logsumexp))
    scratch = _scratch(tokens, qkv.dtype), _scratch(tokens, qkv.dtype)
    _backward(gemm_address(qkv.dtype), dy, qkv, y, logsumexp, heads, dqkv, *scratch)
    return dqkv
