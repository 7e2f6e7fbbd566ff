"""Causal self-attention whose products run in bfloat16: `attention` with rounded operands and float32 sums.

All products are patches of 32 x 32 sums. The forward kernel takes 32 queries at a time and keeps their scores against
the keys up to the diagonal. The backward kernel takes 32 keys at a time and computes the scores transposed, one row per
key. Rounded, the probabilities and their gradients are then the left operands of dv = pᵀ dy and dk = dsᵀ q, and with
their rows in pairs the right operand of dqᵀ = kᵀ dsᵀ. Only dqᵀ is transposed, once per head, and so are dropout's
factors. Panels hold zeros beyond the tokens and the head. Scores beyond the diagonal are left out of sums, and are zero
in operands. So are the probabilities that dropout drops; the others are scaled up after the sums.
"""

import math
from typing import Any

import numpy as np

from daskgpt.kernels import attention
from daskgpt.kernels.bfloat16 import tiles
from daskgpt.kernels.bfloat16.isa import Unit, scratch, unit
from daskgpt.kernels.bfloat16.rounding import FLOAT32, ceiling, check_float32, rounded, words
from daskgpt.kernels.bfloat16.tiles import PATCH, ROW, STEP, TILE
from daskgpt.kernels.compilation import helper, instruction, kernel, wide_vectors
from daskgpt.kernels.dropout import factors_of_row
from daskgpt.kernels.simd import lanes
from daskgpt.kernels.simd.lanes import VECTOR, address_of, read_real, write_real
from daskgpt.kernels.simd.math import log
from daskgpt.kernels.simd.rows import dot_at, folded


@instruction("n n n")
def raise_columns(builder, tops, scores, count):
    """Raise 16 partial maxima at `tops` to `count` of the 32 scores, where those are larger; NaN is ignored."""
    top = lanes.load(builder, tops)
    for first in lanes.PARTS:
        score = lanes.load(builder, scores, first * 4)
        above = builder.and_(builder.fcmp_ordered(">", score, top), lanes.below(builder, count, first))
        top = builder.select(above, score, top)
    lanes.store(builder, top, tops)


@instruction("n", "s")
def largest(builder, address):
    """Return the largest of 16 float32 numbers."""
    return lanes.call(builder, "llvm.vector.reduce.fmax.v16f32", lanes.F32, [lanes.load(builder, address)])


@instruction("n", "s")
def sum_of_lanes(builder, address):
    """Return the sum of 16 float32 numbers."""
    return folded(builder, lanes.load(builder, address))


@instruction("n n n n s s")
def exponentials(builder, scores, target, totals, count, scale, top):
    """Write p = exp(scale score - top) of `count` of 32 scores, rounded, then zeros; add them to 16 totals."""
    scale, negative_top = lanes.splat(builder, scale), lanes.splat(builder, builder.fneg(top))
    total = lanes.load(builder, totals)
    for first in lanes.PARTS:
        p = lanes.exp(builder, lanes.fma(builder, lanes.load(builder, scores, first * 4), scale, negative_top))
        p = builder.select(lanes.below(builder, count, first), p, lanes.constant(lanes.REALS, 0.0))
        total = builder.fadd(total, p)
        lanes.store(builder, lanes.round_to_bfloat16(builder, p), target, first * 2)
    lanes.store(builder, total, totals)


def _key_gradients(builder, place, first, hidden, scale):
    """Return p and ds of one key and 16 queries, rounded; zero for the first `hidden` queries of the patch."""
    scores, gradients, logsumexp, deltas = (lanes.load(builder, address, first * 4) for address in place)
    score = builder.fmul(scores, scale)
    p = lanes.exp(builder, builder.fsub(score, logsumexp))
    centred = builder.fsub(gradients, deltas)
    gradient = builder.fmul(builder.fmul(p, scale), centred)
    mask, zero = lanes.below(builder, hidden, first), lanes.constant(lanes.REALS, 0.0)
    return [lanes.round_to_bfloat16(builder, builder.select(mask, zero, value)) for value in (p, gradient)]


@instruction("n n n n n n n n s")
def score_gradients(builder, scores, gradients, logsumexp, deltas, p, ds, pairs, hidden, scale):
    """Compute rounded rows of p and ds, and pairs of ds, from the rows of two keys in patches of scores and of dp.

    p = exp(scale score - logsumexp);  ds = scale p (dp - delta)
    """
    scale = lanes.splat(builder, scale)
    for first in lanes.PARTS:
        both = []
        for row in (0, 1):
            down, across = lanes.whole(row * ROW), row * 64 + first * 2
            place = builder.add(scores, down), builder.add(gradients, down), logsumexp, deltas
            limit = builder.add(hidden, lanes.whole(row))
            probability, gradient = _key_gradients(builder, place, first, limit, scale)
            lanes.store(builder, probability, p, across)
            lanes.store(builder, gradient, ds, across)
            both.append(gradient)
        tiles.store_pairs(builder, both[0], both[1], builder.add(pairs, lanes.whole(first // lanes.LANES * TILE)))


@instruction("n n")
def drop_halves(builder, target, factors):
    """Set those of 32 bfloat16 numbers at target to zero whose float32 number at `factors` is zero."""
    for first in lanes.PARTS:
        gone = builder.fcmp_ordered("==", lanes.load(builder, factors, first * 4), lanes.constant(lanes.REALS, 0.0))
        value = builder.select(
            gone, lanes.constant(lanes.HALVES, 0), lanes.load(builder, target, first * 2, lanes.HALVES)
        )
        lanes.store(builder, value, target, first * 2)


@instruction("n n")
def multiply_reals(builder, target, factors):
    """Multiply 32 float32 numbers at target by the 32 at `factors`."""
    for first in lanes.PARTS:
        product = builder.fmul(lanes.load(builder, target, first * 4), lanes.load(builder, factors, first * 4))
        lanes.store(builder, product, target, first * 4)


_ZERO, _ONE, _LEAST = np.float32(0), np.float32(1), np.float32(-np.inf)
# Number of hidden queries in a patch before the diagonal.
_NONE = -2


@helper
def _score_queries(unit, q, keys, steps, patch, zeros, scores, tops):
    """Compute the scores of 32 queries against the keys up to `patch`, on the diagonal, and their partial maxima."""
    for i in range(512):
        write_real(tops, i, _LEAST)
    for j in range(patch + 1):
        place = scores + j * PATCH
        tiles.multiply_patch(unit, q, keys + j * steps * STEP, steps, zeros, 0, place, ROW)
        for row in range(32):
            raise_columns(tops + row * VECTOR, place + row * ROW, row + 1 if j == patch else 32)


@helper
def _softmax(scores, patch, scale, tops, totals, p):
    """Write exp(scale (score - maximum)) of 32 queries as a left panel; tops and totals have one number per query."""
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
    """Set the dropped probabilities of a left panel of 32 queries to zero."""
    for row in range(32):
        factors_of_row(stream, place, head, patch * 32 + row, 0, threshold, kept, factors, (patch + 1) * 32)
        for j in range(patch + 1):
            drop_halves(p + j * STEP + row * 64, address_of(factors) + j * ROW)


@helper
def _store_output(sums, totals, rows, size, kept, target, target_step):
    """Write rows of y = kept sums / total."""
    width = (size + 31) // 32 * 32
    for row in range(rows):
        inverse = kept / read_real(totals, row * 16)
        for c in range(width):
            write_real(sums, row * width + c, read_real(sums, row * width + c) * inverse)
        tiles.copy_row(sums + row * width * 4, target + row * target_step, size)


@kernel("h1 H1 H1 n n4 n8 l1 n2 s S1", cost=9)
def _forward(qkv, y, logsumexp, unit, sizes, scratch, streams, dropout, kept, factors):
    """sizes: sequences, tokens, heads, numbers of a head; dropout: place, threshold."""
    wide_vectors()
    tiles.open_unit(unit)
    sequences, tokens, heads, size = sizes
    q, keys, values, scores, p, sums, tops, totals = scratch
    place, threshold = dropout
    channels, nothing, patch_steps = heads * size, tiles.zero_row(), (size + 31) // 32
    row_bytes, patches = 12 * channels, (tokens + 31) // 32
    panel, scale = patch_steps * STEP, _ONE / np.float32(math.sqrt(size))
    for head in range(sequences * heads):
        sequence, column = head // heads, head % heads * size
        source = address_of(qkv) + (sequence * tokens * 3 * channels + column) * 4
        tiles.pack_rows(source + channels * 4, row_bytes, tokens, size, True, keys, panel)
        tiles.pack_pairs(source + channels * 8, row_bytes, tokens, size, False, values, patches * STEP)
        for patch in range(patches):
            first = patch * 32
            rows = min(32, tokens - first)
            tiles.pack_rows(source + first * row_bytes, row_bytes, rows, size, False, q, panel)
            _score_queries(unit, q, keys, patch_steps, patch, nothing, scores, tops)
            _softmax(scores, patch, scale, tops, totals, p)
            for row in range(rows):
                value = read_real(tops, row * 16) + log(read_real(totals, row * 16))
                write_real(address_of(logsumexp), head * tokens + first + row, value)
            if threshold > 0:
                _drop_queries(p, patch, streams[sequence], place, head % heads, threshold, kept, factors)
            width = patch_steps * ROW
            tiles.sum_rows(unit, p, values, patches * STEP, patch + 1, patch_steps * 32, nothing, 0, sums, width)
            target = address_of(y) + ((sequence * tokens + first) * channels + column) * 4
            _store_output(sums, totals, rows, size, kept, target, channels * 4)
    tiles.close_unit(unit)


@helper
def _prepare_queries(dy, y, logsumexp, row_numbers, tokens, size, offsets, deltas):
    """Compute the logarithm of the sum and delta = sum(dy y) of each query; zeros for rows that only fill a patch."""
    for i in range((tokens + 31) // 32 * 32):
        offset, delta = _ZERO, _ZERO
        if i < tokens:
            offset = read_real(logsumexp, i)
            delta = dot_at(dy + i * row_numbers * 4, y + i * row_numbers * 4, size)
        write_real(offsets, i, offset)
        write_real(deltas, i, delta)


@helper
def _transpose_patch(patch, spare, rows, columns, target, target_step):
    """Write rows x columns numbers at target, the transpose of columns x rows in a patch."""
    for corner in range(4):
        row, column = corner // 2 * 16, corner % 2 * 16
        tiles.copy_rows(patch + column * ROW + row * 4, ROW, spare, 64, 16, 16)
        tiles.transpose_tile(spare)
        place = target + row * target_step + column * 4
        tiles.copy_rows(spare, 64, place, target_step, min(16, rows - row), max(0, min(16, columns - column)))


@helper
def _factors_of_patch(stream, place, part, query, key, threshold, kept, row, spare, patch):
    """Write a row of 32 queries per key, 32 keys: 0 where a probability is dropped, else `kept` (`factors_of_row`)."""
    for i in range(32):
        factors_of_row(stream, place, part, query + i, key, threshold, kept, row, 32)
        tiles.copy_row(address_of(row), spare + i * ROW, 32)
    _transpose_patch(spare, spare + PATCH, 32, 32, patch, ROW)


@helper
def _pack_head(q, dy, qkv_step, dy_step, kv_bytes, tokens, size, rows, pairs, panel, long_panel):
    """Pack the panels of a head. rows: k, v (left), q, dy (right), a row per token; pairs: q, dy (right), k (left)."""
    head_bytes, long_head_bytes = (tokens + 31) // 32 * panel, (size + 31) // 32 * long_panel
    for which in range(2):
        place = q + (which + 1) * kv_bytes
        tiles.pack_rows(place, qkv_step, tokens, size, False, rows + which * head_bytes, panel)
        place, step = (dy, dy_step) if which else (q, qkv_step)
        tiles.pack_rows(place, step, tokens, size, True, rows + (2 + which) * head_bytes, panel)
        tiles.pack_pairs(place, step, tokens, size, False, pairs + which * long_head_bytes, long_panel)
    tiles.pack_pairs(q + kv_bytes, qkv_step, tokens, size, True, pairs + 2 * long_head_bytes, long_panel)


@helper
def _differentiate_patch(
    unit, left, right, v, dy, steps, zeros, work, offsets, deltas, p, ds, diagonal, scale, factors
):  # fmt: skip
    """Compute p and ds of 32 keys and 32 queries as left tiles, and ds in pairs behind the two patches at `work`.

    factors   address of the dropout factors, a patch like the scores; 0 without dropout
    """
    tiles.multiply_patch(unit, left, right, steps, zeros, 0, work, ROW)
    tiles.multiply_patch(unit, v, dy, steps, zeros, 0, work + PATCH, ROW)
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


@kernel("h1 h1 h1 h1 H1 n n4 n9 l1 n2 s S1", cost=12)
def _backward(dy, qkv, y, logsumexp, dqkv, unit, sizes, scratch, streams, dropout, kept, row):
    wide_vectors()
    tiles.open_unit(unit)
    sequences, tokens, heads, size = sizes
    rows, pairs, work, offsets, deltas, lefts, sums, dq, factors = scratch
    place, threshold = dropout
    channels, nothing, scale = heads * size, tiles.zero_row(), _ONE / np.float32(math.sqrt(size))
    patches, steps = (tokens + 31) // 32, (size + 31) // 32
    panel, long_panel, row_bytes = steps * STEP, patches * STEP, 12 * channels
    head_bytes, k_pairs, p, ds = patches * panel, pairs + 2 * steps * long_panel, lefts, lefts + long_panel
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
                key, query = rows + j * panel, rows + 2 * head_bytes + i * panel
                if threshold > 0:
                    _factors_of_patch(
                        streams[sequence], place, head % heads, i * 32, j * 32, threshold, kept, row, work, factors
                    )  # fmt: skip
                _differentiate_patch(
                    unit, key, query, key + head_bytes, query + head_bytes, steps, nothing, work, offsets + i * ROW,
                    deltas + i * ROW, p + (i - j) * STEP, ds + (i - j) * STEP, i == j, scale,
                    factors if threshold > 0 else 0,
                )  # fmt: skip
                for c in range(steps):
                    patch = dq + (i * steps + c) * PATCH
                    begin, begin_step = (patch, ROW) if j else (nothing, 0)
                    left = k_pairs + c * long_panel + j * STEP
                    tiles.multiply_patch(unit, left, work + 2 * PATCH, 1, begin, begin_step, patch, ROW)
            for which in range(2):
                left, right = (p, pairs + steps * long_panel) if which else (ds, pairs)
                tiles.sum_rows(
                    unit, left, right + j * STEP, long_panel, patches - j, steps * 32, nothing, 0, sums, steps * ROW
                )
                if which and threshold > 0:
                    for n in range(32 * steps * 32):
                        write_real(sums, n, read_real(sums, n) * kept)
                target = dq_out + (which + 1) * channels * 4 + j * 32 * row_bytes
                tiles.copy_rows(sums, steps * ROW, target, row_bytes, min(32, tokens - j * 32), size)
        for i in range(patches):
            for c in range(steps):
                target = dq_out + i * 32 * row_bytes + c * 128
                _transpose_patch(
                    dq + (i * steps + c) * PATCH, work, min(32, tokens - i * 32), min(32, size - c * 32), target,
                    row_bytes,
                )  # fmt: skip
    tiles.close_unit(unit)


def forward(qkv: np.ndarray, streams: np.ndarray | None = None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return causal self-attention as `attention.forward` does, its products' operands rounded to bfloat16.

    The probabilities are rounded before they are divided by their sum, which is taken before rounding. Dropout drops
    the same probabilities. On the portable unit, and where heads share keys, q, k and v are rounded, but not the
    probabilities.

    options   heads, key_heads, place and rate, as in `attention.forward`

    Shapes   qkv (b, T, (NH + 2 KH) HS), streams (b,) or None -> y (b, T, C), logsumexp (b, NH, T)
    Dtype    float32; operands bfloat16, sums and softmax float32; int64 streams
    Cost     2 b T² C operations on the unit, b NH T² / 2 exps; scratch O(T)
    Source   Vaswani et al. 2017, arXiv:1706.03762; Dao et al. 2022, arXiv:2205.14135, for the log-sum-exp
    Errors   TypeError when qkv is not float32; ValueError when the shapes do not fit
    """
    where = "bfloat16.attention.forward"
    channels, (heads, keys), dropout = attention.check_forward(where, qkv, streams, **options)
    check_float32(where, qkv=qkv)
    if unit() is Unit.PORTABLE or keys != heads:
        return attention.forward(rounded(qkv), streams, **options)
    *sequences, tokens, _ = qkv.shape
    y, logsumexp = np.empty((*sequences, tokens, channels), FLOAT32), np.empty((*sequences, heads, tokens), FLOAT32)
    size = channels // heads
    steps, patches = ceiling(size, 32) // 32, ceiling(tokens, 32) // 32
    panels = steps * patches * STEP
    addresses = scratch(
        steps * STEP, panels, panels, patches * PATCH, patches * STEP, steps * PATCH, 32 * VECTOR, 32 * VECTOR
    )
    sizes, factors = (math.prod(sequences), tokens, heads, size), np.empty(patches * 32, FLOAT32)
    _forward(words(qkv), words(y), words(logsumexp), int(unit()), sizes, tuple(addresses), *dropout, factors)
    return y, logsumexp


def backward(
    dy: np.ndarray,
    qkv: np.ndarray,
    y: np.ndarray,
    logsumexp: np.ndarray,
    streams: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    """Return the gradient of attention as `attention.backward` does, its products' operands rounded to bfloat16.

    p = exp(q kᵀ / sqrt(HS) - logsumexp);  dp = dy vᵀ;  ds = p (dp - sum(dy y)) / sqrt(HS)
    dq = ds k;  dk = dsᵀ q;  dv = pᵀ dy

    On the portable unit, and where heads share keys, q, k, v and dy are rounded, p and ds are not.

    options   heads, key_heads, place and rate, as in `attention.forward`

    Shapes   dy (b, T, C), qkv (b, T, (NH + 2 KH) HS), y (b, T, C), logsumexp (b, NH, T), streams (b,) or None -> dqkv
             as qkv
    Dtype    float32; operands bfloat16, everything else float32; int64 streams
    Cost     5 b T² C operations on the unit, b NH T² / 2 exps; scratch O(T)
    Source   Dao et al. 2022, arXiv:2205.14135
    Errors   TypeError when an array is not float32; ValueError when the shapes do not fit
    """
    where = "bfloat16.attention.backward"
    *sequences, tokens, _ = qkv.shape
    channels, (heads, keys), dropout = attention.check_forward(where, qkv, streams, **options)
    attention.check_backward(where, dy, y, logsumexp, (*sequences, tokens, channels), heads)
    check_float32(where, dy=dy, qkv=qkv, y=y, logsumexp=logsumexp)
    if unit() is Unit.PORTABLE or keys != heads:
        return attention.backward(rounded(dy), rounded(qkv), y, logsumexp, streams, **options)
    dqkv, size = np.empty(qkv.shape, FLOAT32), channels // heads
    steps, patches = ceiling(size, 32) // 32, ceiling(tokens, 32) // 32
    panels, line = steps * patches * STEP, patches * ROW
    addresses = scratch(
        4 * panels, 3 * panels, 2 * PATCH + STEP, line, line, 2 * patches * STEP, steps * PATCH,
        steps * patches * PATCH, PATCH,
    )  # fmt: skip
    arrays = [words(array) for array in (dy, qkv, y, logsumexp)]
    sizes = math.prod(sequences), tokens, heads, size
    row = np.empty(32, FLOAT32)
    _backward(*arrays, words(dqkv), int(unit()), sizes, tuple(addresses), *dropout, row)
    return dqkv
