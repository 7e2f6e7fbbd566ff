"""What attention in bfloat16 does with some numbers of a row at a time: softmax, and the gradients of the scores."""

from numba import types
from numba.extending import intrinsic

from daskgpt.kernels.bfloat16.tiles import ROW, TILE
from daskgpt.kernels.vectors.lanes import (
    F32,
    LANES,
    REALS,
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
from daskgpt.kernels.vectors.operations import PARTS, operation, store_pairs
from daskgpt.kernels.vectors.sums import folded


@intrinsic
def raise_columns(typing_context, tops, scores, count):
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
def largest(typing_context, address):
    """The largest of 16 float32 numbers."""

    def generate(context, builder, signature, values):
        return call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [load(builder, values[0])])

    return types.float32(types.int64), generate


@intrinsic
def sum_of_lanes(typing_context, address):
    """The sum of 16 float32 numbers."""

    def generate(context, builder, signature, values):
        return folded(builder, load(builder, values[0]))

    return types.float32(types.int64), generate


@intrinsic
def exponentials(typing_context, scores, target, totals, count, scale, top):
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
def score_gradients(typing_context, scores, gradients, logsumexp, deltas, p, ds, pairs, hidden, scale):
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
