"""Causal self-attention of whole sequences, and its gradient.

Both kernels iterate over bands of query rows. A band's scores against all keys up to its diagonal are one matrix
product, which leaves out numbers beyond the diagonal as others leave out their zeros, and loops over a row of scores
end at the diagonal: this applies the causal mask. Besides the arrays, only scratch memory for one band of scores and
copies of some heads are held: O(T), never (T, T). The forward kernel keeps one number per row, the logarithm of the sum
of exponentials. From it the backward kernel computes the probabilities again, and also which of them were dropped.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.kernels.arguments import check_shape, checked_indices, contiguous, matrices
from daskgpt.kernels.compilation import helper, kernel, wide_vectors
from daskgpt.kernels.dropout import factors_of_row, threshold_of
from daskgpt.kernels.float32.blas import gemm, gemm_address
from daskgpt.kernels.float32.gemm import LEFT, RESULT
from daskgpt.kernels.simd.lanes import address_of
from daskgpt.kernels.simd.math import log
from daskgpt.kernels.simd.rows import PADDING, exponentials, maximum, score_gradients, transpose

# Numbers at the end of the scratch's rows: vectors may reach beyond the last token, and rows whose length is a power of
# two would compete for a few cache lines.
_GAP = PADDING + 1

# In long sequences, bands are wider, and heads of keys and values are copied: in the arrays, their rows lie so far
# apart that they would compete for a few lines of the second cache.
_MANY_TOKENS = 256

# Dropout as kernels take it: the streams of the sequences; the number of the place in the model and the word below
# which a probability is dropped; what the others are multiplied by.
Dropout = tuple[np.ndarray, tuple[int, int], float]
_NO_DROPOUT: Dropout = (np.empty(0, np.int64), (0, 0), 1.0)

_WHOLE = np.zeros(1, np.int32)  # the number of the only part


@helper
def _transpose(x, sequence, column, out):
    """Copy the columns of one head to rows: out[c, j] = x[sequence, j, column + c]."""
    tokens, step = x.shape[1], x.shape[2] * x.itemsize
    start = address_of(x) + sequence * tokens * step + column * x.itemsize
    transpose(x.dtype.type(0), start, step, tokens, out)


@helper
def _copy(x, column, out, out_column, count):
    """Copy some columns of all rows."""
    for i in range(len(x)):
        source, target = x[i, column : column + count], out[i, out_column : out_column + count]
        for c in range(count):
            target[c] = source[c]


@kernel("n r3 n2 w3 w3 w2 w2 w2 w1 w1 l1 n2 f w1", cost=6)
def _forward(
    blas, qkv, heads, y, logsumexp, scores, k_transposed, values, tops, totals, streams, dropout, kept, factors
):  # fmt: skip
    """Compute attention. Dropout comes after the softmax, so dropped probabilities count in a row's sum."""
    wide_vectors()
    real = y.dtype.type
    one, zero = real(1), real(0)
    (place, threshold), (heads, key_heads), tokens, channels = dropout, heads, y.shape[1], y.shape[2]
    hs, group = channels // heads, heads // key_heads
    ld, lds, size = qkv.shape[2], scores.shape[1], y.itemsize
    scale = one / real(math.sqrt(hs))
    band, s, kt = scores.shape[0], address_of(scores), address_of(k_transposed)
    for sequence in range(y.shape[0]):
        start = address_of(qkv) + sequence * tokens * ld * size
        for head in range(heads):
            column, key = head * hs, channels + head // group * hs
            value = key + key_heads * hs
            q, v, ldv = start + column * size, start + value * size, ld
            if head % group == 0:
                _transpose(qkv, sequence, key, k_transposed)
                if len(values) > 0:
                    _copy(qkv[sequence], value, values, 0, hs)
            if len(values) > 0:
                v, ldv = address_of(values), hs
            for first in range(0, tokens, band):
                last = min(first + band, tokens)
                n = last - first
                gemm(blas, RESULT, 0, 0, n, last, hs, q + first * ld * size, ld, kt, lds, zero, s, lds)
                for i in range(n):
                    limit = first + i + 1
                    tops[i] = scale * maximum(scores[i, :limit])
                    totals[i] = exponentials(scores[i], limit, last, scale, tops[i])
                    if threshold > 0:
                        row = first + i
                        factors_of_row(streams[sequence], place, head, row, 0, threshold, kept, factors, row + 1)
                        for j in range(row + 1):
                            scores[i, j] *= factors[j]
                row_of_sums = logsumexp[sequence, head, first:last]
                for i in range(n):
                    row_of_sums[i] = tops[i] + log(totals[i])
                out = address_of(y) + ((sequence * tokens + first) * channels + column) * size
                gemm(blas, LEFT, 0, 0, n, hs, last, s, lds, v, ldv, zero, out, channels)
                for i in range(n):
                    inverse, row_of_y = one / totals[i], y[sequence, first + i, column : column + hs]
                    for c in range(hs):
                        row_of_y[c] *= inverse


@kernel("n r3 r3 r3 n2 w3 w2 w2 w2 w2 w2 w2 w2 l1 n2 f w1", cost=4)
def _backward(
    blas, dy, qkv, logsumexp, heads, dqkv, scores, gradients, k_transposed, v_transposed, keys, dkeys, dvalues, streams,
    dropout, kept, factors,
):  # fmt: skip
    """Process the last band of queries first: it reads every key, so its products start the sums of dk and dv.

    The sums of keys that several heads share go on from head to head.
    """
    wide_vectors()
    real = dy.dtype.type
    one, zero = real(1), real(0)
    (place, threshold), (heads, key_heads), tokens, channels = dropout, heads, dy.shape[1], dy.shape[2]
    hs, group = channels // heads, heads // key_heads
    ld, lds, size = qkv.shape[2], scores.shape[1], dy.itemsize
    scale = one / real(math.sqrt(hs))
    band, s, ds = scores.shape[0], address_of(scores), address_of(gradients)
    kt, vt = address_of(k_transposed), address_of(v_transposed)
    for sequence in range(dy.shape[0]):
        start = sequence * tokens * ld * size
        for head in range(heads):
            column, key = head * hs, channels + head // group * hs
            value = key + key_heads * hs
            q, k = address_of(qkv) + start + column * size, address_of(qkv) + start + key * size
            dq, dk = address_of(dqkv) + start + column * size, address_of(dqkv) + start + key * size
            dv, ldk = dk + key_heads * hs * size, ld
            if head % group == 0:
                _transpose(qkv, sequence, key, k_transposed)
                _transpose(qkv, sequence, value, v_transposed)
                if len(keys) > 0:
                    _copy(qkv[sequence], key, keys, 0, hs)
            if len(keys) > 0:
                k, dk, dv, ldk = address_of(keys), address_of(dkeys), address_of(dvalues), hs
            for first in range((tokens - 1) // band * band, -1, -band):
                last = min(first + band, tokens)
                n = last - first
                down = first * ld * size
                d_out = address_of(dy) + ((sequence * tokens + first) * channels + column) * size
                gemm(blas, RESULT, 0, 0, n, last, hs, q + down, ld, kt, lds, zero, s, lds)
                gemm(blas, RESULT, 0, 0, n, last, hs, d_out, channels, vt, lds, zero, ds, lds)
                for i in range(n):
                    row = first + i
                    if threshold > 0:
                        factors_of_row(streams[sequence], place, head, row, 0, threshold, kept, factors, row + 1)
                        for j in range(row + 1):
                            gradients[i, j] *= factors[j]
                    # A logarithm near 1,000 has a rounding error of 3e-5, which every probability computed from it
                    # would share: division by their sum removes it. The sum of p dp is taken over the same
                    # probabilities: it equals sum(dy y), whose rounding error would dominate ds if one of them is
                    # nearly 1.
                    total = exponentials(scores[i], row + 1, last, scale, logsumexp[sequence, head, row])
                    score_gradients(scores[i], gradients[i], row + 1, last, scale, total)
                    if threshold > 0:
                        for j in range(row + 1):
                            scores[i, j] *= factors[j]
                beta = zero if last == tokens and head % group == 0 else one
                gemm(blas, LEFT, 1, 0, last, hs, n, s, lds, d_out, channels, beta, dv, ldk)
                gemm(blas, LEFT, 1, 0, last, hs, n, ds, lds, q + down, ld, beta, dk, ldk)
                gemm(blas, LEFT, 0, 0, n, hs, last, ds, lds, k, ldk, zero, dq + down, ld)
            if len(keys) > 0 and head % group == group - 1:
                _copy(dkeys, 0, dqkv[sequence], key, hs)
                _copy(dvalues, 0, dqkv[sequence], value, hs)


def check_forward(
    where: str,
    qkv: np.ndarray,
    streams: np.ndarray | None,
    heads: int,
    key_heads: int = 0,
    place: int = 0,
    rate: float = 0.0,
) -> tuple[int, tuple[int, int], Dropout]:
    """Return the channels of y, the numbers of heads of queries and of keys, and dropout in the form that kernels take.

    Errors   ValueError unless the columns of qkv are those of the heads, and there is a stream for each sequence
    """
    keys = key_heads or heads
    columns, fits = qkv.shape[-1], heads >= 1 and keys >= 1 and heads % keys == 0
    if not fits or columns % (heads + 2 * keys):
        rule = "qkv must have a column per channel of all heads, and key_heads must divide heads"
        got = {"columns": columns, "heads": heads, "key_heads": keys}
        raise refusal(ValueError, where, rule, got, "Check the order of the arguments.")
    channels = columns // (heads + 2 * keys) * heads
    if streams is None:
        return channels, (heads, keys), _NO_DROPOUT
    check_shape(where, "streams", streams, (math.prod(qkv.shape[:-2]),))
    return channels, (heads, keys), (contiguous(streams), (place, threshold_of(rate)), 1 / (1 - rate))


def check_backward(
    where: str, dy: np.ndarray, y: np.ndarray, logsumexp: np.ndarray, shape: tuple[int, ...], heads: int
) -> None:
    """Raise ValueError unless the other arguments of a backward have the shape (b, T, C) of y, and (b, NH, T)."""
    check_shape(where, "dy", dy, shape)
    check_shape(where, "y", y, shape)
    check_shape(where, "logsumexp", logsumexp, (*shape[:-2], heads, shape[-2]))


def _band(tokens: int) -> int:
    """Return the number of query rows in a band: wide bands make fast products, narrow ones compute little in vain."""
    return max(1, min(64 if tokens > _MANY_TOKENS else 32, tokens))


def _scratch(tokens: int, like: np.ndarray, *rows: int) -> list[np.ndarray]:
    return [np.empty((count, tokens + _GAP), like.dtype, like=like) for count in rows]


def _copies(tokens: int, like: np.ndarray, size: int, count: int) -> list[np.ndarray]:
    """Return memory for some heads of a long sequence, and none for those of a short one."""
    return [np.empty((tokens if tokens > _MANY_TOKENS else 0, size), like.dtype, like=like) for _ in range(count)]


def forward(
    qkv: np.ndarray,
    streams: np.ndarray | None = None,
    *,
    heads: int,
    key_heads: int = 0,
    place: int = 0,
    rate: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return causal self-attention, with scale 1 / sqrt(HS), and the log-sum-exp that `backward` needs.

    y = softmax(q kᵀ / sqrt(HS)) v, each query over the keys up to its own position
    logsumexp = log(sum(exp(q kᵀ / sqrt(HS))))

    qkv has the NH heads of queries, then the KH heads of keys, then those of values; NH / KH heads of queries share a
    head of keys.

    With streams, a share `rate` of the probabilities is set to 0 and the others are divided by 1 - rate. Whether one
    is dropped depends on the stream of the sequence, the place in the model, the head, the query and the key alone.

    key_heads   KH, 0 = as many as heads

    Shapes   qkv (b, T, (NH + 2 KH) HS), streams (b,) or None -> y (b, T, NH HS), logsumexp (b, NH, T); there may be
             more axes before T
    Dtype    float32 or float64; int64 streams
    Cost     2 b T² C operations, b NH T² / 2 exps; scratch O(T)
    Source   Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245, for shared keys; Dao et al.
             2022, arXiv:2205.14135, for the log-sum-exp
    Errors   ValueError when there are not (NH + 2 KH) HS columns, or not one stream per sequence
    """
    channels, numbers, dropout = check_forward("attention.forward", qkv, streams, heads, key_heads, place, rate)
    *sequences, tokens, _ = qkv.shape
    y = np.empty((*sequences, tokens, channels), qkv.dtype, like=qkv)
    logsumexp = np.empty((*sequences, heads, tokens), qkv.dtype, like=qkv)
    band, size = _band(tokens), channels // heads
    scratch = _scratch(tokens, qkv, band, size) + _copies(tokens, qkv, size, 1)
    tops, totals, factors = (np.empty(count, qkv.dtype, like=qkv) for count in (band, band, tokens + 3))
    results = matrices(y), matrices(logsumexp)
    _forward(gemm_address(qkv.dtype), matrices(qkv), numbers, *results, *scratch, tops, totals, *dropout, factors)
    return y, logsumexp


def backward(
    dy: np.ndarray,
    qkv: np.ndarray,
    y: np.ndarray,
    logsumexp: np.ndarray,
    streams: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    """Return the gradient of causal self-attention with respect to q, k and v.

    p = exp(q kᵀ / sqrt(HS) - logsumexp);  dp = f (dy vᵀ);  ds = p (dp - sum(p dp)) / sqrt(HS)
    dq = ds k;  dk = dsᵀ q;  dv = (f p)ᵀ dy

    f is 1, or with dropout 0 or 1 / (1 - rate); the dropped probabilities are determined again. y is used in bfloat16
    only, where sum(dy y) replaces sum(p dp).

    options   heads, key_heads, place and rate, as in `forward`

    Shapes   dy (b, T, C), qkv (b, T, (NH + 2 KH) HS), y (b, T, C), logsumexp (b, NH, T), streams (b,) or None -> dqkv
             as qkv; there may be more axes before T
    Dtype    float32 or float64, one for all; int64 streams
    Cost     5 b T² C operations, b NH T² / 2 exps; scratch O(T)
    Source   Dao et al. 2022, arXiv:2205.14135
    Errors   ValueError when the shapes do not fit
    """
    where, (*sequences, tokens, _) = "attention.backward", qkv.shape
    channels, numbers, dropout = check_forward(where, qkv, streams, **options)
    check_backward(where, dy, y, logsumexp, (*sequences, tokens, channels), numbers[0])
    dqkv = np.empty(qkv.shape, qkv.dtype, like=qkv)
    arguments, result = [matrices(array) for array in (dy, qkv, logsumexp)], matrices(dqkv)
    band, size = _band(tokens), channels // numbers[0]
    scratch = _scratch(tokens, qkv, band, band, size, size) + _copies(tokens, qkv, size, 3)
    factors = np.empty(tokens + 3, qkv.dtype, like=qkv)
    _backward(gemm_address(qkv.dtype), *arguments, numbers, result, *scratch, *dropout, factors)
    return dqkv


@kernel("r3 i1 w3 n n n n")
def _gather(x, part, y, first, start, column, width):
    start += part[0] * width
    for sequence in range(x.shape[0]):
        _copy(x[sequence], start, y[sequence, first:], column, width)


@kernel("r3 i1 w3 n n n")
def _split(x, positions, y, start, column, width):
    first, last = positions[0], positions[0] + y.shape[1]
    for sequence in range(y.shape[0]):
        _copy(x[sequence, first:last], start, y[sequence], column, width)


def gather(
    chunks: list[np.ndarray],
    positions: object,
    part: np.ndarray = _WHOLE,
    *,
    divided: Sequence[int] = (),
    parts: int = 1,
) -> np.ndarray:
    """Return whole sequences from their chunks: all channels, or those of a part of the heads.

    positions   not used
    part        number of the part
    divided     numbers of heads, each of which is divided by parts: of queries, keys and values, or of y
    parts       their number; 1 = all channels

    Shapes   chunks: list of (b, t, C); part (1,) -> (b, T, C), or (b, 1, T, C / parts) of a part
    Errors   ValueError when chunks differ in sequences or channels, or heads cannot be divided by parts, or there is no
             such part
    """
    where, (sequences, _, channels) = "attention.gather", chunks[0].shape
    check_shape(where, "part", part, (1,))
    part, columns = checked_indices(where, "part", part, parts), _columns(where, channels, divided, parts)
    for chunk in chunks:
        check_shape(where, "a chunk", chunk, (sequences, chunk.shape[1], channels))
    tokens = sum(chunk.shape[1] for chunk in chunks)
    y = np.empty((sequences, tokens, channels // parts), chunks[0].dtype, like=chunks[0])
    first = 0
    for chunk in chunks:
        for start, column, width in columns:
            _gather(contiguous(chunk), part, y, first, start, column, width)
        first += chunk.shape[1]
    return y.reshape(sequences, 1, tokens, y.shape[2]) if divided else y


def split(
    x: np.ndarray | list[np.ndarray],
    positions: np.ndarray,
    part: object = None,
    *,
    divided: Sequence[int] = (),
    parts: int = 1,
) -> np.ndarray:
    """Return the tokens at consecutive positions of whole sequences, of which each part of the heads may be an array.

    part    not used; divided and parts are those of `gather`

    Shapes   x (b, T, C), or a list of (b, 1, T, C / parts); positions (t,), at least one -> (b, t, C), contiguous
    Errors   ValueError for positions outside of the sequences, or that are not consecutive, or when heads cannot be
             divided by parts, or there is another number or shape of them
    """
    wholes = [matrices(one) for one in x] if isinstance(x, list) else [contiguous(x)]
    (sequences, tokens, channels), where = wholes[0].shape, "attention.split"
    columns, given = _columns(where, channels * parts, divided, parts), {"arrays": len(wholes), "parts": parts}
    require(len(wholes) == parts, where, "there must be an array for each part", given, "Pass all parts in a list.")
    for whole in wholes:
        check_shape(where, "a part", whole, wholes[0].shape)
    y = np.empty((sequences, len(positions), channels * parts), wholes[0].dtype, like=wholes[0])
    row = checked_indices(where, "positions", positions, tokens)
    if isinstance(row, np.ndarray):  # a step's own positions are consecutive
        consecutive, got = bool(np.all(np.diff(row) == 1)), {"first": row[:1], "last": row[-1:]}
        require(consecutive, where, "positions must be consecutive", got, "Take a part of np.arange(T).")
    for number, whole in enumerate(wholes):
        for start, column, width in columns:
            _split(whole, row, y, column, start + number * width, width)
    return y


def _columns(where: str, channels: int, divided: Sequence[int], parts: int) -> list[tuple[int, int, int]]:
    """Return the first channel of each kind of heads, among all and in a part, and how many of them a part has."""
    kinds = divided or (1,)
    got, advice = {"channels": channels, "divided": kinds, "parts": parts}, "Check the model's numbers of heads."
    require(
        min(*kinds, parts) >= 1 and not any(heads % parts for heads in kinds) and channels % sum(kinds) == 0, where,
        "parts must divide each number of heads, which must have equal numbers of channels", got, advice,
    )  # fmt: skip
    size, starts = channels // sum(kinds), accumulate(kinds, initial=0)
    return [(size * start, size * start // parts, size * heads // parts) for start, heads in zip(starts, kinds)]
