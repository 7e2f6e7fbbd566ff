"""Causal self-attention whose products run in bfloat16: `attention` with rounded operands and float32 sums.

All products are patches of 32 x 32 sums. The forward walks over 32 queries at a time and keeps their scores against the
keys up to the diagonal. The backward walks over 32 keys at a time and computes the scores transposed, a row a key:
rounded, the probabilities and their gradients are then the left operands of dv = pᵀ dy and dk = dsᵀ q as they stand,
and with the rows in pairs the right operand of dqᵀ = kᵀ dsᵀ. Only dqᵀ is transposed, once a head. What lies beyond the
tokens or the head is zero in the panels; what lies beyond the diagonal is left out of sums and is zero in operands.
"""

import math

import numpy as np
from numba import types
from numba.extending import intrinsic

from daskgpt.kernels import attention
from daskgpt.kernels.bfloat16.operands import FLOAT32, ceiling, check_float32, words
from daskgpt.kernels.bfloat16.packing import pack_pairs, pack_rows
from daskgpt.kernels.bfloat16.rounding import rounded
from daskgpt.kernels.bfloat16.tiles import (
    CONFIGURATION,
    PATCH,
    ROW,
    STEP,
    TILE,
    ZEROS,
    close_unit,
    multiply_patch,
    open_unit,
)
from daskgpt.kernels.bfloat16.units import Unit, scratch, unit
from daskgpt.kernels.bfloat16.weight_gradient import sum_rows
from daskgpt.kernels.compilation import helper, kernel, wide_vectors
from daskgpt.kernels.vectors.elementary import log
from daskgpt.kernels.vectors.lanes import (
    F32,
    LANES,
    REALS,
    VECTOR,
    below,
    call,
    constant,
    exp,
    fma,
    load,
    round_to_bfloat16,
    splat,
    store,
    whole,
)
from daskgpt.kernels.vectors.operations import (
    PARTS,
    address_of,
    copy_row,
    operation,
    read_real,
    store_pairs,
    transpose_tile,
    write_real,
)
from daskgpt.kernels.vectors.sums import dot_at, folded

_ZERO, _ONE, _LEAST = np.float32(0), np.float32(1), np.float32(-np.inf)
# Queries that two keys before the diagonal's patch must not be seen by: none.
_NONE = -2


@intrinsic
def _raise_columns(typing_context, tops, scores, count):
    """16 partial maxima at tops = the larger ones of them and `count` of the 32 scores. NaN is passed over."""

    def build(builder, tops, scores, count):
        top = load(builder, tops)
        for first in PARTS:
            score = load(builder, scores, first * 4)
            above = builder.and_(builder.fcmp_ordered(">", score, top), below(builder, count, first))
            top = builder.select(above, score, top)
        store(builder, top, tops)

    return operation(build, 3)


@intrinsic
def _maximum(typing_context, address):
    """The largest of 16 float32 numbers."""

    def generate(context, builder, signature, values):
        return call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [load(builder, values[0])])

    return types.float32(types.int64), generate


@intrinsic
def _sum(typing_context, address):
    """The sum of 16 float32 numbers."""

    def generate(context, builder, signature, values):
        return folded(builder, load(builder, values[0]))

    return types.float32(types.int64), generate


@intrinsic
def _exponentials(typing_context, scores, target, totals, count, scale, top):
    """p = exp(scale score - top) of `count` of 32 scores, then zeros: rounded at target, added to 16 totals."""

    def build(builder, scores, target, totals, count, scale, top):
        scale, negative_top = splat(builder, scale), splat(builder, builder.fneg(top))
        total = load(builder, totals)
        for first in PARTS:
            p = exp(builder, fma(builder, load(builder, scores, first * 4), scale, negative_top))
            p = builder.select(below(builder, count, first), p, constant(REALS, 0.0))
            total = builder.fadd(total, p)
            store(builder, round_to_bfloat16(builder, p), target, first * 2)
        store(builder, total, totals)

    return operation(build, 4, 2)


def _key_gradients(builder, place, first, hidden, scale):
    """p and ds of one key and 16 queries, rounded; zero for the first `hidden` queries of the patch."""
    scores, gradients, logsumexp, deltas = (load(builder, address, first * 4) for address in place)
    score = builder.fmul(scores, scale)
    p = exp(builder, builder.fsub(score, logsumexp))
    centred = builder.fsub(gradients, deltas)
    gradient = builder.fmul(builder.fmul(p, scale), centred)
    mask, zero = below(builder, hidden, first), constant(REALS, 0.0)
    return [round_to_bfloat16(builder, builder.select(mask, zero, value)) for value in (p, gradient)]


@intrinsic
def _score_gradients(typing_context, scores, gradients, logsumexp, deltas, p, ds, pairs, hidden, scale):
    """Two keys' rows of a transposed patch of scores and of dp: rounded rows of p and ds, and ds in pairs of rows.

    p = exp(scale score - logsumexp);  ds = scale p (dp - delta)
    """

    def build(builder, scores, gradients, logsumexp, deltas, p, ds, pairs, hidden, scale):
        scale = splat(builder, scale)
        for first in PARTS:
            both = []
            for row in (0, 1):
                down, across = whole(row * ROW), row * 64 + first * 2
                place = builder.add(scores, down), builder.add(gradients, down), logsumexp, deltas
                limit = builder.add(hidden, whole(row))
                probability, gradient = _key_gradients(builder, place, first, limit, scale)
                store(builder, probability, p, across)
                store(builder, gradient, ds, across)
                both.append(gradient)
            store_pairs(builder, both[0], both[1], builder.add(pairs, whole(first // LANES * TILE)))

    return operation(build, 8, 1)


@helper
def _score_queries(unit, q, keys, steps, patch, zeros, scores, tops):
    """Scores of 32 queries against the keys up to patch `patch`, the diagonal's, and their partial maxima."""
    for i in range(512):
        write_real(tops, i, _LEAST)
    for j in range(patch + 1):
        place = scores + j * PATCH
        multiply_patch(unit, q, keys + j * steps * STEP, steps, zeros, 0, place, ROW)
        for row in range(32):
            _raise_columns(tops + row * VECTOR, place + row * ROW, row + 1 if j == patch else 32)


@helper
def _softmax(scores, patch, scale, tops, totals, p):
    """exp(scale (score - maximum)) of 32 queries as a left panel; tops and totals begin with a number a query."""
    for i in range(512):
        write_real(totals, i, _ZERO)
    for row in range(32):
        write_real(tops, row * 16, scale * _maximum(tops + row * VECTOR))
    for j in range(patch + 1):
        for row in range(32):
            _exponentials(
                scores + j * PATCH + row * ROW, p + j * STEP + row * 64, totals + row * VECTOR,
                row + 1 if j == patch else 32, scale, read_real(tops, row * 16),
            )  # fmt: skip
    for row in range(32):
        write_real(totals, row * 16, _sum(totals + row * VECTOR))


@helper
def _store_output(sums, totals, rows, size, target, target_step):
    """Rows of y = sums / total."""
    width = (size + 31) // 32 * 32
    for row in range(rows):
        inverse = _ONE / read_real(totals, row * 16)
        for c in range(width):
            write_real(sums, row * width + c, read_real(sums, row * width + c) * inverse)
        copy_row(sums + row * width * 4, target + row * target_step, size)


@kernel("h1 H1 H1 h1 n n n n n n n n n n n n n n n")
def _forward(
    qkv, y, logsumexp, zeros, unit, configuration, sequences, tokens, heads, size, q, keys, values, scores, p, sums,
    tops, totals, patch_steps,
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
            width = patch_steps * ROW
            sum_rows(unit, p, values, patches * STEP, patch + 1, patch_steps * 32, nothing, 0, sums, width)
            target = address_of(y) + ((sequence * tokens + first) * channels + column) * 4
            _store_output(sums, totals, rows, size, target, channels * 4)
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
def _differentiate_patch(unit, left, right, v, dy, steps, zeros, work, offsets, deltas, p, ds, diagonal, scale):
    """32 keys against 32 queries: p and ds as left tiles, and ds in pairs behind the two patches at `work`."""
    multiply_patch(unit, left, right, steps, zeros, 0, work, ROW)
    multiply_patch(unit, v, dy, steps, zeros, 0, work + PATCH, ROW)
    for row in range(0, 32, 2):
        place = work + row * ROW
        _score_gradients(
            place, place + PATCH, offsets, deltas, p + row * 64, ds + row * 64, work + 2 * PATCH + row * 32,
            row if diagonal else _NONE, scale,
        )  # fmt: skip


@kernel("h1 h1 h1 h1 H1 h1 n n n n n n n n n n n n n n")
def _backward(
    dy, qkv, y, logsumexp, dqkv, zeros, unit, configuration, sequences, tokens, heads, size, rows, pairs, work, offsets,
    deltas, lefts, sums, dq,
):  # fmt: skip
    wide_vectors()
    open_unit(unit, configuration)
    channels, nothing, scale = heads * size, address_of(zeros), _ONE / np.float32(math.sqrt(size))
    patches, steps = (tokens + 31) // 32, (size + 31) // 32
    panel, long_panel, row_bytes = steps * STEP, patches * STEP, 12 * channels
    each, k_pairs, p, ds = patches * panel, pairs + 2 * steps * long_panel, lefts, lefts + long_panel
    for head in range(sequences * heads):
        sequence, column = head // heads, head % heads * size
        place = (sequence * tokens * channels + column) * 4
        place3 = (sequence * tokens * 3 * channels + column) * 4
        q, d_out, dq_out = address_of(qkv) + place3, address_of(dy) + place, address_of(dqkv) + place3
        _pack_head(q, d_out, row_bytes, channels * 4, channels * 4, tokens, size, rows, pairs, panel, long_panel)
        _prepare_queries(
            d_out, address_of(y) + place, address_of(logsumexp) + head * tokens * 4, channels, tokens, size, offsets,
            deltas,
        )  # fmt: skip
        for j in range(patches):
            for i in range(j, patches):
                key, query = rows + j * panel, rows + 2 * each + i * panel
                _differentiate_patch(
                    unit, key, query, key + each, query + each, steps, nothing, work, offsets + i * ROW,
                    deltas + i * ROW, p + (i - j) * STEP, ds + (i - j) * STEP, i == j, scale,
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
    where = "rounded_attention.forward"
    channels = attention.check_heads(where, qkv, heads)
    check_float32(where, qkv=qkv)
    if unit() is Unit.PORTABLE:
        return attention.forward(rounded(qkv), heads)
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
        *addresses, steps,
    )  # fmt: skip
    return y, logsumexp


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
    where = "rounded_attention.backward"
    channels, (sequences, tokens) = attention.check_backward(where, dy, qkv, y, logsumexp, heads), qkv.shape[:2]
    check_float32(where, dy=dy, qkv=qkv, y=y, logsumexp=logsumexp)
    if unit() is Unit.PORTABLE:
        return attention.backward(rounded(dy), rounded(qkv), y, logsumexp, heads)
    dqkv, size = np.empty(qkv.shape, FLOAT32), channels // heads
    steps, patches = ceiling(size, 32) // 32, ceiling(tokens, 32) // 32
    panels, line = steps * patches * STEP, patches * ROW
    addresses = scratch(
        4 * panels, 3 * panels, 2 * PATCH + STEP, line, line, 2 * patches * STEP, steps * PATCH, steps * patches * PATCH
    )
    arrays = [words(array) for array in (dy, qkv, y, logsumexp)]
    _backward(*arrays, words(dqkv), ZEROS, unit(), CONFIGURATION, sequences, tokens, heads, size, *addresses)
    return dqkv
