"""Causal self-attention whose products run in bfloat16: `attention` with rounded operands and float32 sums.

All products are patches of 32 x 32 sums. The forward walks over 32 queries at a time and keeps their scores against the
keys up to the diagonal. The backward walks over 32 keys at a time and computes the scores transposed, a row a key:
rounded, the probabilities and their gradients are then the left operands of dv = pᵀ dy and dk = dsᵀ q as they stand,
and with the rows in pairs the right operand of dqᵀ = kᵀ dsᵀ. Only dqᵀ is transposed, once a head. What lies beyond the
tokens or the head is zero in the panels; what lies beyond the diagonal is left out of sums and is zero in operands. So
are the probabilities that dropout drops, and what it leaves is made larger after the sums.
"""

import math

import numpy as np

from daskgpt.kernels import attention
from daskgpt.kernels.bfloat16.attention_lanes import (
    exponentials,
    largest,
    raise_columns,
    score_gradients,
    sum_of_lanes,
)
from daskgpt.kernels.bfloat16.dropping import drop_halves, factors_of_patch, multiply_reals
from daskgpt.kernels.bfloat16.operands import FLOAT32, ceiling, check_float32, words
from daskgpt.kernels.bfloat16.packing import pack_pairs, pack_rows
from daskgpt.kernels.bfloat16.rounding import rounded
from daskgpt.kernels.bfloat16.tiles import (
    CONFIGURATION,
    PATCH,
    ROW,
    STEP,
    ZEROS,
    close_unit,
    multiply_patch,
    open_unit,
)
from daskgpt.kernels.bfloat16.units import Unit, scratch, unit
from daskgpt.kernels.bfloat16.weight_gradient import sum_rows
from daskgpt.kernels.compilation import helper, kernel, wide_vectors
from daskgpt.kernels.philox import factors_of_row
from daskgpt.kernels.vectors.elementary import log
from daskgpt.kernels.vectors.lanes import (
    VECTOR,
)
from daskgpt.kernels.vectors.operations import (
    address_of,
    copy_row,
    read_real,
    transpose_tile,
    write_real,
)
from daskgpt.kernels.vectors.sums import dot_at

_ZERO, _ONE, _LEAST = np.float32(0), np.float32(1), np.float32(-np.inf)
# Queries that two keys before the diagonal's patch must not be seen by: none.
_NONE = -2


@helper
def _score_queries(unit, q, keys, steps, patch, zeros, scores, tops):
    """Scores of 32 queries against the keys up to patch `patch`, the diagonal's, and their partial maxima."""
    for i in range(512):
        write_real(tops, i, _LEAST)
    for j in range(patch + 1):
        place = scores + j * PATCH
        multiply_patch(unit, q, keys + j * steps * STEP, steps, zeros, 0, place, ROW)
        for row in range(32):
            raise_columns(tops + row * VECTOR, place + row * ROW, row + 1 if j == patch else 32)


@helper
def _softmax(scores, patch, scale, tops, totals, p):
    """exp(scale (score - maximum)) of 32 queries as a left panel; tops and totals begin with a number a query."""
    for i in range(512):
        write_real(totals, i, _ZERO)
    for row in range(32):
        write_real(tops, row * 16, scale * largest(tops + row * VECTOR))
    for j in range(patch + 1):
        for row in range(32):
            exponentials(
                scores + j * PATCH + row * ROW, p + j * STEP + row * 64, totals + row * VECTOR,
                row + 1 if j == patch else 32, scale, read_real(tops, row * 16),
            )  # fmt: skip
    for row in range(32):
        write_real(totals, row * 16, sum_of_lanes(totals + row * VECTOR))


@helper
def _drop_queries(p, patch, stream, place, head, threshold, kept, factors):
    """Zeros for what is dropped of a left panel of 32 queries' probabilities."""
    for row in range(32):
        factors_of_row(stream, place, head, patch * 32 + row, threshold, kept, factors, (patch + 1) * 32)
        for j in range(patch + 1):
            drop_halves(p + j * STEP + row * 64, address_of(factors) + j * ROW)


@helper
def _store_output(sums, totals, rows, size, kept, target, target_step):
    """Rows of y = kept sums / total."""
    width = (size + 31) // 32 * 32
    for row in range(rows):
        inverse = kept / read_real(totals, row * 16)
        for c in range(width):
            write_real(sums, row * width + c, read_real(sums, row * width + c) * inverse)
        copy_row(sums + row * width * 4, target + row * target_step, size)


@kernel("h1 H1 H1 h1 n n n n n n n n n n n n n n n l1 n n s1 S1")
def _forward(
    qkv, y, logsumexp, zeros, unit, configuration, sequences, tokens, heads, size, q, keys, values, scores, p, sums,
    tops, totals, patch_steps, streams, place, threshold, kept, factors,
):  # fmt: skip
    """patch_steps: steps of the summed axis of q kᵀ, ceil(HS / 32)."""
    wide_vectors()
    open_unit(unit, configuration)
    channels, nothing = heads * size, address_of(zeros)
    row_bytes, patches = 12 * channels, (tokens + 31) // 32
    panel, scale = patch_steps * STEP, _ONE / np.float32(math.sqrt(size))
    for head in range(sequences * heads):
        sequence, column = head // heads, head % heads * size
        source = address_of(qkv) + (sequence * tokens * 3 * channels + column) * 4
        pack_rows(source + channels * 4, row_bytes, tokens, size, True, keys, panel)
        pack_pairs(source + channels * 8, row_bytes, tokens, size, False, values, patches * STEP)
        for patch in range(patches):
            first = patch * 32
            rows = min(32, tokens - first)
            pack_rows(source + first * row_bytes, row_bytes, rows, size, False, q, panel)
            _score_queries(unit, q, keys, patch_steps, patch, nothing, scores, tops)
            _softmax(scores, patch, scale, tops, totals, p)
            for row in range(rows):
                value = read_real(tops, row * 16) + log(read_real(totals, row * 16))
                write_real(address_of(logsumexp), head * tokens + first + row, value)
            if threshold > 0:
                _drop_queries(p, patch, streams[sequence], place, head % heads, threshold, kept[0], factors)
            width = patch_steps * ROW
            sum_rows(unit, p, values, patches * STEP, patch + 1, patch_steps * 32, nothing, 0, sums, width)
            target = address_of(y) + ((sequence * tokens + first) * channels + column) * 4
            _store_output(sums, totals, rows, size, kept[0], target, channels * 4)
    close_unit(unit)


@helper
def _prepare_queries(dy, y, logsumexp, row_numbers, tokens, size, offsets, deltas):
    """Of each query the logarithm of the sum and delta = sum(dy y); zeros for queries that only fill a patch."""
    for i in range((tokens + 31) // 32 * 32):
        offset, delta = _ZERO, _ZERO
        if i < tokens:
            offset = read_real(logsumexp, i)
            delta = dot_at(dy + i * row_numbers * 4, y + i * row_numbers * 4, size)
        write_real(offsets, i, offset)
        write_real(deltas, i, delta)


@helper
def _transpose_patch(patch, spare, rows, columns, target, target_step):
    """rows x columns at target = the transpose of the columns x rows in a patch."""
    for corner in range(4):
        row, column = corner // 2 * 16, corner % 2 * 16
        for i in range(16):
            copy_row(patch + (column + i) * ROW + row * 4, spare + i * 64, 16)
        transpose_tile(spare)
        for i in range(min(16, rows - row)):
            place = target + (row + i) * target_step + column * 4
            copy_row(spare + i * 64, place, max(0, min(16, columns - column)))


@helper
def _pack_head(q, dy, qkv_step, dy_step, kv_bytes, tokens, size, rows, pairs, panel, long_panel):
    """Panels of a head. rows: k, v (left), q, dy (right), a row a token; pairs: q, dy (right), k (left)."""
    each, each_long = (tokens + 31) // 32 * panel, (size + 31) // 32 * long_panel
    for which in range(2):
        place = q + (which + 1) * kv_bytes
        pack_rows(place, qkv_step, tokens, size, False, rows + which * each, panel)
        place, step = (dy, dy_step) if which else (q, qkv_step)
        pack_rows(place, step, tokens, size, True, rows + (2 + which) * each, panel)
        pack_pairs(place, step, tokens, size, False, pairs + which * each_long, long_panel)
    pack_pairs(q + kv_bytes, qkv_step, tokens, size, True, pairs + 2 * each_long, long_panel)


@helper
def _differentiate_patch(
    unit, left, right, v, dy, steps, zeros, work, offsets, deltas, p, ds, diagonal, scale, factors
):  # fmt: skip
    """32 keys against 32 queries: p and ds as left tiles, and ds in pairs behind the two patches at `work`.

    factors   of dropout, a patch like the scores; 0 where there is none
    """
    multiply_patch(unit, left, right, steps, zeros, 0, work, ROW)
    multiply_patch(unit, v, dy, steps, zeros, 0, work + PATCH, ROW)
    if factors != 0:
        for row in range(32):
            multiply_reals(work + PATCH + row * ROW, factors + row * ROW)
    for row in range(0, 32, 2):
        place = work + row * ROW
        score_gradients(
            place, place + PATCH, offsets, deltas, p + row * 64, ds + row * 64, work + 2 * PATCH + row * 32,
            row if diagonal else _NONE, scale,
        )  # fmt: skip
    if factors != 0:
        for row in range(32):
            drop_halves(p + row * 64, factors + row * ROW)


@kernel("h1 h1 h1 h1 H1 h1 n n n n n n n n n n n n n n n l1 n n s1")
def _backward(
    dy, qkv, y, logsumexp, dqkv, zeros, unit, configuration, sequences, tokens, heads, size, rows, pairs, work, offsets,
    deltas, lefts, sums, dq, factors, streams, place, threshold, kept,
):  # fmt: skip
    wide_vectors()
    open_unit(unit, configuration)
    channels, nothing, scale = heads * size, address_of(zeros), _ONE / np.float32(math.sqrt(size))
    patches, steps = (tokens + 31) // 32, (size + 31) // 32
    panel, long_panel, row_bytes = steps * STEP, patches * STEP, 12 * channels
    each, k_pairs, p, ds = patches * panel, pairs + 2 * steps * long_panel, lefts, lefts + long_panel
    for head in range(sequences * heads):
        sequence, column = head // heads, head % heads * size
        start = (sequence * tokens * channels + column) * 4
        start3 = (sequence * tokens * 3 * channels + column) * 4
        q, d_out, dq_out = address_of(qkv) + start3, address_of(dy) + start, address_of(dqkv) + start3
        _pack_head(q, d_out, row_bytes, channels * 4, channels * 4, tokens, size, rows, pairs, panel, long_panel)
        _prepare_queries(
            d_out, address_of(y) + start, address_of(logsumexp) + head * tokens * 4, channels, tokens, size, offsets,
            deltas,
        )  # fmt: skip
        for j in range(patches):
            for i in range(j, patches):
                key, query = rows + j * panel, rows + 2 * each + i * panel
                if threshold > 0:
                    factors_of_patch(
                        streams[sequence], place, head % heads, i * 32, j * 32, threshold, kept[0], factors
                    )  # fmt: skip
                _differentiate_patch(
                    unit, key, query, key + each, query + each, steps, nothing, work, offsets + i * ROW,
                    deltas + i * ROW, p + (i - j) * STEP, ds + (i - j) * STEP, i == j, scale,
                    factors if threshold > 0 else 0,
                )  # fmt: skip
                for c in range(steps):
                    patch = dq + (i * steps + c) * PATCH
                    begin, begin_step = (patch, ROW) if j else (nothing, 0)
                    left = k_pairs + c * long_panel + j * STEP
                    multiply_patch(unit, left, work + 2 * PATCH, 1, begin, begin_step, patch, ROW)
            for which in range(2):
                left, right = (p, pairs + steps * long_panel) if which else (ds, pairs)
                sum_rows(
                    unit, left, right + j * STEP, long_panel, patches - j, steps * 32, nothing, 0, sums, steps * ROW
                )
                if which and threshold > 0:
                    for n in range(32 * steps * 32):
                        write_real(sums, n, read_real(sums, n) * kept[0])
                target = dq_out + (which + 1) * channels * 4 + j * 32 * row_bytes
                for row in range(min(32, tokens - j * 32)):
                    copy_row(sums + row * steps * ROW, target + row * row_bytes, size)
        for i in range(patches):
            for c in range(steps):
                target = dq_out + i * 32 * row_bytes + c * 128
                _transpose_patch(
                    dq + (i * steps + c) * PATCH, work, min(32, tokens - i * 32), min(32, size - c * 32), target,
                    row_bytes,
                )  # fmt: skip
    close_unit(unit)


def forward(qkv: np.ndarray, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Causal self-attention, scale 1 / sqrt(HS), its products' operands rounded to bfloat16.

    y = softmax(q kᵀ / sqrt(HS)) v, each query over the keys up to its own position
    logsumexp = log(sum(exp(q kᵀ / sqrt(HS))))

    The probabilities are rounded before they are divided by their sum, which is that of the numbers not rounded. On the
    portable unit q, k and v are rounded, the probabilities are not.

    Shapes   qkv (b, T, 3C) -> y (b, T, C), logsumexp (b, NH, T)
    Dtype    float32; operands bfloat16, sums and softmax float32
    Cost     2 b T² C operations on the unit, b NH T² / 2 exps; scratch O(T)
    Source   Vaswani et al. 2017, arXiv:1706.03762; Dao et al. 2022, arXiv:2205.14135, for the log-sum-exp
    Errors   TypeError when qkv is not float32; ValueError when the columns are not 3 heads HS
    """
    return _attend("rounded_attention.forward", qkv, heads, attention.NOTHING)


def forward_dropped(
    qkv: np.ndarray, streams: np.ndarray, heads: int, place: int, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """`forward` with a share of the probabilities set to 0 and the others divided by 1 - rate: those of `attention`.

    Shapes   qkv (b, T, 3C), streams (b,) -> y (b, T, C), logsumexp (b, NH, T)
    Dtype    float32, int64 streams
    Errors   TypeError when qkv is not float32; ValueError when the shapes do not fit
    """
    where = "rounded_attention.forward_dropped"
    return _attend(where, qkv, heads, attention.check_dropped(where, qkv, streams, place, rate))


def _attend(where: str, qkv: np.ndarray, heads: int, dropped: attention.Dropped) -> tuple[np.ndarray, np.ndarray]:
    channels = attention.check_heads(where, qkv, heads)
    check_float32(where, qkv=qkv)
    if unit() is Unit.PORTABLE:
        return attention.attend(where, rounded(qkv), heads, dropped)
    sequences, tokens = qkv.shape[:2]
    y, logsumexp = np.empty((sequences, tokens, channels), FLOAT32), np.empty((sequences, heads, tokens), FLOAT32)
    size = channels // heads
    steps, patches = ceiling(size, 32) // 32, ceiling(tokens, 32) // 32
    panels = steps * patches * STEP
    addresses = scratch(
        steps * STEP, panels, panels, patches * PATCH, patches * STEP, steps * PATCH, 32 * VECTOR, 32 * VECTOR
    )
    _forward(
        words(qkv), words(y), words(logsumexp), ZEROS, unit(), CONFIGURATION, sequences, tokens, heads, size,
        *addresses, steps, *_told(dropped), np.empty(patches * 32, FLOAT32),
    )  # fmt: skip
    return y, logsumexp


def _told(dropped: attention.Dropped) -> tuple[np.ndarray, int, int, np.ndarray]:
    """The same with its float as an array: a kernel without arrays of floats has no type for one."""
    streams, place, threshold, kept = dropped
    return streams, place, threshold, np.array([kept], FLOAT32)


def backward(dy: np.ndarray, qkv: np.ndarray, y: np.ndarray, logsumexp: np.ndarray, heads: int) -> np.ndarray:
    """Gradient of causal self-attention with respect to q, k and v, its products' operands rounded to bfloat16.

    p = exp(q kᵀ / sqrt(HS) - logsumexp);  dp = dy vᵀ;  ds = p (dp - sum(dy y)) / sqrt(HS)
    dq = ds k;  dk = dsᵀ q;  dv = pᵀ dy

    On the portable unit q, k, v and dy are rounded, p and ds are not.

    Shapes   dy (b, T, C), qkv (b, T, 3C), y (b, T, C), logsumexp (b, NH, T) -> dqkv (b, T, 3C)
    Dtype    float32; operands bfloat16, everything else float32
    Cost     5 b T² C operations on the unit, b NH T² / 2 exps; scratch O(T)
    Source   Dao et al. 2022, arXiv:2205.14135
    Errors   TypeError when an array is not float32; ValueError when the shapes do not fit
    """
    return _differentiate("rounded_attention.backward", dy, qkv, y, logsumexp, heads, attention.NOTHING)


def backward_dropped(
    dy: np.ndarray,
    qkv: np.ndarray,
    y: np.ndarray,
    logsumexp: np.ndarray,
    streams: np.ndarray,
    heads: int,
    place: int,
    rate: float,
) -> np.ndarray:
    """Gradient of `forward_dropped` with respect to q, k and v, see `attention.backward_dropped`.

    Shapes   dy (b, T, C), qkv (b, T, 3C), y (b, T, C), logsumexp (b, NH, T), streams (b,) -> dqkv (b, T, 3C)
    Dtype    float32, int64 streams
    Errors   TypeError when an array is not float32; ValueError when the shapes do not fit
    """
    where = "rounded_attention.backward_dropped"
    dropped = attention.check_dropped(where, qkv, streams, place, rate)
    return _differentiate(where, dy, qkv, y, logsumexp, heads, dropped)


def _differentiate(
    where: str,
    dy: np.ndarray,
    qkv: np.ndarray,
    y: np.ndarray,
    logsumexp: np.ndarray,
    heads: int,
    dropped: attention.Dropped,
) -> np.ndarray:
    channels, (sequences, tokens) = attention.check_backward(where, dy, qkv, y, logsumexp, heads), qkv.shape[:2]
    check_float32(where, dy=dy, qkv=qkv, y=y, logsumexp=logsumexp)
    if unit() is Unit.PORTABLE:
        return attention.differentiate(where, rounded(dy), rounded(qkv), y, logsumexp, heads, dropped)
    dqkv, size = np.empty(qkv.shape, FLOAT32), channels // heads
    steps, patches = ceiling(size, 32) // 32, ceiling(tokens, 32) // 32
    panels, line = steps * patches * STEP, patches * ROW
    addresses = scratch(
        4 * panels, 3 * panels, 2 * PATCH + STEP, line, line, 2 * patches * STEP, steps * PATCH,
        steps * patches * PATCH, PATCH,
    )  # fmt: skip
    arrays = [words(array) for array in (dy, qkv, y, logsumexp)]
    sizes = sequences, tokens, heads, size
    _backward(*arrays, words(dqkv), ZEROS, unit(), CONFIGURATION, *sizes, *addresses, *_told(dropped))
    return dqkv
