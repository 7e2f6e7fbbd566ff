"""The head: unembedding and cross-entropy in one kernel, so that the logits of a chunk live in one task only.

The forward kernel overwrites the logits with their gradient and returns it; the two backward kernels multiply by it.
"""

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.kernels import linear
from daskgpt.kernels.arguments import check_output, check_shape, checked_indices, contiguous, flat, rows
from daskgpt.kernels.compilation import helper, kernel, wide_vectors
from daskgpt.kernels.float32.blas import gemm_address, multiply
from daskgpt.kernels.simd.math import exp, fma, log
from daskgpt.kernels.simd.rows import maximum, sum_of

# Number of logits that fit into the first cache, where they are summed.
_PIECE = 2048


@helper
def _softmax(row):
    """Turn a row of logits, which stays in the second cache, into probabilities; return log(sum(exp(logits)))."""
    top = maximum(row)
    total = row.dtype.type(0)
    for first in range(0, row.size, _PIECE):
        piece = row[first : first + _PIECE]
        for j in range(piece.size):
            piece[j] = exp(piece[j] - top)
        total += sum_of(piece)
    factor = row.dtype.type(1) / total
    for j in range(row.size):
        row[j] *= factor
    return top + log(total)


@kernel("i1 n w1 w2")
def _softmax_losses(targets, vocabulary, losses, y):
    wide_vectors()
    real = y.dtype.type
    for i in range(y.shape[0]):
        logit = y[i, targets[i]]
        losses[i] = _softmax(y[i, :vocabulary]) - logit
        y[i, targets[i]] -= real(1)
        y[i, vocabulary:] = 0


@kernel("r1 d1 n w1")
def _mean(losses, shares, accumulate, total):
    real = losses.dtype.type
    result = total[0] if accumulate else real(0)
    for i in range(losses.size):
        result = fma(losses[i], real(shares[i]), result)
    total[0] = result


@kernel("r1 d1 w1")
def _mean_backward(dy, shares, dlosses):
    real = dy.dtype.type
    for i in range(shares.size):
        dlosses[i] = dy[0] * real(shares[i])


@kernel("r2 r1 w2")
def _scale_rows(x, factors, y):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * factors[i]


def forward(x: np.ndarray, wte: np.ndarray, targets: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cross-entropy of every token, and its gradient with respect to the logits x wteᵀ.

    loss = log(sum(exp(logits))) - logits[target];  dlogits = softmax(logits) - onehot(target)

    The rows of wte from `vocabulary` on are padding: no probability, no gradient (exact zeros).

    Shapes   x (b, t, C), wte (V padded, C), targets (b, t) -> losses (b, t), dlogits (b, t, V padded)
    Dtype    int32 targets; float32 or float64, one for x and wte
    Cost     2 b t C V operations, 1 exp per logit
    Errors   ValueError for a target outside the vocabulary, or shapes that do not fit
    """
    where = "crossentropy.forward"
    check_shape(where, "wte", wte, (len(wte), x.shape[-1]))
    dlogits = np.empty((*x.shape[:-1], len(wte)), x.dtype, like=x)
    multiply(gemm_address(x.dtype), 1, rows(x), contiguous(wte)[:vocabulary], 0, rows(dlogits))
    return softmax_losses(dlogits, targets, vocabulary), dlogits


def softmax_losses(logits: np.ndarray, targets: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return the cross-entropy of every token from its logits, and overwrite the logits with their gradient.

    loss = log(sum(exp(logits))) - logits[target];  logits become softmax(logits) - onehot(target), padding 0

    Shapes   logits (b, t, V padded), targets (b, t) -> losses (b, t)
    Dtype    int32 targets; float32 or float64
    Cost     1 exp per logit
    Errors   ValueError for a target outside the vocabulary, or shapes that do not fit
    """
    where = "crossentropy.forward"
    check_shape(where, "targets", targets, logits.shape[:-1])
    if not 0 < vocabulary <= logits.shape[-1]:
        rule = f"vocabulary must be from 1 to the {logits.shape[-1]} rows of wte"
        raise refusal(ValueError, where, rule, {"vocabulary": vocabulary}, "Check the padded vocabulary.")
    losses = np.empty(logits.shape[:-1], logits.dtype, like=logits)
    indices = checked_indices(where, "targets", targets, vocabulary)
    _softmax_losses(indices, vocabulary, flat(losses), rows(logits))
    return losses


def scale_rows(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return each token's row times its factor.

    Shapes   x (b, t, C), factors (b, t) -> (b, t, C)
    Dtype    float32 or float64, one for both
    """
    check_shape("crossentropy.scale_rows", "factors", factors, x.shape[:-1])
    y = np.empty(x.shape, x.dtype, like=x)
    _scale_rows(rows(x), flat(factors), rows(y))
    return y


def backward_x(dy: np.ndarray, dlogits: np.ndarray, wte: np.ndarray) -> np.ndarray:
    """Return the gradient of the head with respect to its input.

    dx = dy (dlogits wte)

    Shapes   dy (b, t), dlogits (b, t, V padded), wte (V padded, C) -> dx (b, t, C)
    Dtype    float32 or float64, one for all
    Cost     2 b t C V operations
    Errors   ValueError when the shapes do not fit
    """
    check_shape("crossentropy.backward_x", "dy", dy, dlogits.shape[:-1])
    dx = linear.backward_x(dlogits, wte)
    _scale_rows(rows(dx), flat(dy), rows(dx))
    return dx


def backward_wte(
    dy: np.ndarray, dlogits: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool, first_row: int = 0
) -> np.ndarray:
    """Return the gradient of the head with respect to the unembedding, or some rows of it.

    dwte = dlogitsᵀ (dy x)

    Shapes   dy (b, t), dlogits (b, t, V padded), x (b, t, C) -> total (rows, C), from first_row on
    Dtype    float32 or float64, one for all
    Cost     2 b t C V operations
    Errors   ValueError when the shapes do not fit
    """
    scaled = scale_rows(x, dy)
    return linear.backward_weight(dlogits, scaled, total=total, accumulate=accumulate, first_row=first_row)


def mean_forward(losses: np.ndarray, shares: np.ndarray, *, total: np.ndarray, accumulate: bool) -> np.ndarray:
    """Add the shares of some tokens in the mean loss to a total.

    total = sum(losses * shares);  a share is 1 / (B T); where only N targets count, 1 / N for those and 0 for others

    Shapes   losses, shares (b, t) -> total ()
    Dtype    float32 or float64, one for losses and total; shares are rounded to it
    Errors   ValueError when the shapes or total do not fit
    """
    where = "crossentropy.mean_forward"
    check_shape(where, "shares", shares, losses.shape)
    check_output(where, "total", total, (), losses.dtype)
    _mean(flat(losses), flat(shares.astype(np.float64, copy=False)), accumulate, total.reshape(1))
    return total


def mean_backward(dy: np.ndarray, losses: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean loss with respect to every token's loss.

    dlosses = dy * shares

    Shapes   dy (), losses and shares (b, t) -> dlosses (b, t)
    Dtype    float32 or float64, that of losses; shares are rounded to it
    """
    check_shape("crossentropy.mean_backward", "shares", shares, losses.shape)
    check_shape("crossentropy.mean_backward", "dy", dy, ())
    dlosses = np.empty(losses.shape, losses.dtype, like=losses)
    _mean_backward(flat(dy), flat(shares.astype(np.float64, copy=False)), flat(dlosses))
    return dlosses
