"""The head: unembedding and cross-entropy in one kernel, so that the logits of a chunk live in one task only.

The forward turns the logits into their gradient in place and hands it on; the two backwards are matrix products with it.
"""

import math

import numpy as np

from daskgpt.kernels._arrays import check_indices, check_output, check_shape, rows
from daskgpt.kernels._jit import helper, kernel, wide_vectors
from daskgpt.kernels.blas import address_of, gemm, gemm_address
from daskgpt.kernels.vector_math import exp

# Numbers of a block of logits: it is turned into exponentials while it is in the second cache.
_BLOCK = 1 << 18


@helper
def _exponentials(y, i, first, last):
    """Replace a part of row i by exp(y - its maximum); return the maximum and the sum."""
    real = y.dtype.type
    top = y[i, first]
    for j in range(first + 1, last):
        top = max(top, y[i, j])
    total = real(0)
    for j in range(first, last):
        e = exp(y[i, j] - top)
        y[i, j] = e
        total += e
    return top, total


@helper
def _normalise(y, i, width, vocabulary, tops, totals):
    """Scale the parts of row i to one softmax; return log(sum(exp(logits)))."""
    real = y.dtype.type
    parts = tops.shape[1]
    top = tops[i, 0]
    for part in range(1, parts):
        top = max(top, tops[i, part])
    total = real(0)
    for part in range(parts):
        total += totals[i, part] * math.exp(tops[i, part] - top)
    for part in range(parts):
        factor = real(math.exp(tops[i, part] - top) / total)
        for j in range(part * width, min((part + 1) * width, vocabulary)):
            y[i, j] *= factor
    for j in range(vocabulary, y.shape[1]):
        y[i, j] = 0
    return top + math.log(total)


@kernel("n r2 r2 i1 n n w2 w2 w1 w2")
def _forward(blas, x, wte, targets, vocabulary, width, tops, totals, losses, y):
    wide_vectors()
    real = x.dtype.type
    n, channels = x.shape
    padded = y.shape[1]
    size = x.itemsize
    for first in range(0, vocabulary, width):
        last = min(first + width, vocabulary)
        weight = address_of(wte) + first * channels * size
        logits = address_of(y) + first * size
        gemm(
            blas,
            0,
            1,
            n,
            last - first,
            channels,
            real(1),
            address_of(x),
            channels,
            weight,
            channels,
            real(0),
            logits,
            padded,
        )
        for i in range(n):
            if first <= targets[i] < last:
                losses[i] = y[i, targets[i]]
            tops[i, first // width], totals[i, first // width] = _exponentials(y, i, first, last)
    for i in range(n):
        losses[i] = _normalise(y, i, width, vocabulary, tops, totals) - losses[i]
        y[i, targets[i]] -= real(1)


@kernel("r2 r1 w2")
def _scale_rows(x, factors, y):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = factors[i] * x[i, j]


@kernel("n r1 r2 r2 w2")
def _backward_x(blas, dy, dlogits, wte, dx):
    real = dx.dtype.type
    n, channels = dx.shape
    k = wte.shape[0]
    gemm(
        blas,
        0,
        0,
        n,
        channels,
        k,
        real(1),
        address_of(dlogits),
        k,
        address_of(wte),
        channels,
        real(0),
        address_of(dx),
        channels,
    )
    for i in range(n):
        for j in range(channels):
            dx[i, j] *= dy[i]


@kernel("n r2 r2 n w2")
def _backward_wte(blas, dlogits, x, accumulate, total):
    real = x.dtype.type
    n, channels = x.shape
    m = dlogits.shape[1]
    beta = real(accumulate)
    gemm(
        blas,
        1,
        0,
        m,
        channels,
        n,
        real(1),
        address_of(dlogits),
        m,
        address_of(x),
        channels,
        beta,
        address_of(total),
        channels,
    )


@kernel("r1 f n w1")
def _mean(losses, inverse, accumulate, total):
    real = losses.dtype.type
    result = real(0)
    for i in range(losses.size):
        result += losses[i]
    result *= inverse
    total[0] = total[0] + result if accumulate else result


@kernel("i1 w1 n")
def _find_outside(targets, losses, vocabulary):
    for i in range(targets.size):
        if targets[i] < 0 or targets[i] >= vocabulary:
            return i
    return -1


def forward(x: np.ndarray, wte: np.ndarray, targets: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Cross-entropy of every token, and its gradient with respect to the logits x wteᵀ.

    loss = log(sum(exp(logits))) - logits[target];  dlogits = softmax(logits) - onehot(target)

    The rows of wte from `vocabulary` on are padding: no probability, no gradient (exact zeros).

    Shapes   x (b, t, C), wte (V padded, C), targets (b, t) -> losses (b, t), dlogits (b, t, V padded)
    Dtype    int32 targets; float32 or float64, one for x and wte
    Cost     2 b t C V operations in BLAS, 1 exp a logit
    Errors   ValueError for a target outside of the vocabulary, or shapes that do not fit
    """
    where = "crossentropy.forward"
    check_shape(where, "wte", wte, (len(wte), x.shape[-1]))
    check_shape(where, "targets", targets, x.shape[:-1])
    if not 0 < vocabulary <= len(wte):
        raise ValueError(
            f"{where}: vocabulary must be from 1 to the {len(wte)} rows of wte; got vocabulary={vocabulary}. "
            "Check the padded vocabulary."
        )
    losses, dlogits = np.empty(x.shape[:-1], x.dtype), np.empty((*x.shape[:-1], len(wte)), x.dtype)
    flat_losses, flat_targets, x = losses.reshape(-1), np.ascontiguousarray(targets).reshape(-1), rows(x)
    check_indices(where, "targets", _find_outside(flat_targets, flat_losses, vocabulary), flat_targets, vocabulary)
    width = min(max(_BLOCK // max(len(x), 1) // 64 * 64, 256), vocabulary)
    tops, totals = np.empty((2, len(x), -(-vocabulary // width)), x.dtype)
    wte = np.ascontiguousarray(wte)
    _forward(gemm_address(x.dtype), x, wte, flat_targets, vocabulary, width, tops, totals, flat_losses, rows(dlogits))
    return losses, dlogits


def backward_x(dy: np.ndarray, dlogits: np.ndarray, wte: np.ndarray) -> np.ndarray:
    """Gradient of the head with respect to its input.

    dx = dy (dlogits wte)

    Shapes   dy (b, t), dlogits (b, t, V padded), wte (V padded, C) -> dx (b, t, C)
    Dtype    float32 or float64, one for all
    Cost     2 b t C V operations in BLAS
    Errors   ValueError when the shapes do not fit
    """
    check_shape("crossentropy.backward_x", "dy", dy, dlogits.shape[:-1])
    check_shape("crossentropy.backward_x", "wte", wte, (dlogits.shape[-1], wte.shape[-1]))
    dx = np.empty((*dy.shape, wte.shape[1]), dlogits.dtype)
    flat_dy = np.ascontiguousarray(dy).reshape(-1)
    _backward_x(gemm_address(dx.dtype), flat_dy, rows(dlogits), np.ascontiguousarray(wte), rows(dx))
    return dx


def backward_wte(
    dy: np.ndarray, dlogits: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool
) -> np.ndarray:
    """Gradient of the head with respect to the unembedding.

    dwte = dlogitsᵀ (dy x)

    Shapes   dy (b, t), dlogits (b, t, V padded), x (b, t, C) -> total (V padded, C)
    Dtype    float32 or float64, one for all
    Cost     2 b t C V operations in BLAS
    Errors   ValueError when the shapes do not fit
    """
    check_shape("crossentropy.backward_wte", "dy", dy, dlogits.shape[:-1])
    check_shape("crossentropy.backward_wte", "x", x, (*dy.shape, x.shape[-1]))
    check_output("crossentropy.backward_wte", "total", total, (dlogits.shape[-1], x.shape[-1]), x.dtype)
    x = rows(x)
    scaled = np.empty_like(x)
    _scale_rows(x, np.ascontiguousarray(dy).reshape(-1), scaled)
    _backward_wte(gemm_address(x.dtype), rows(dlogits), scaled, accumulate, total)
    return total


def mean_forward(losses: np.ndarray, count: int, *, total: np.ndarray, accumulate: bool) -> np.ndarray:
    """Mean loss: the chunk's share of it.

    total = sum(losses) / count

    Shapes   losses (b, t), count = B T -> total ()
    Dtype    float32 or float64, one for both
    Errors   ValueError when total does not fit
    """
    check_output("crossentropy.mean_forward", "total", total, (), losses.dtype)
    _mean(np.ascontiguousarray(losses).reshape(-1), 1 / count, accumulate, total.reshape(1))
    return total


def mean_backward(dy: np.ndarray, losses: np.ndarray, count: int) -> np.ndarray:
    """Gradient of the mean loss with respect to every token's loss.

    dlosses = dy / count

    Shapes   dy (), losses (b, t), count = B T -> dlosses (b, t)
    Dtype    float32 or float64
    """
    return np.full(losses.shape, dy / losses.dtype.type(count), losses.dtype)
