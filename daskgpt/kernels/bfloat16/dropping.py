"""Dropout of attention's probabilities, of which the products take patches of 32 x 32: a few numbers at a time."""

from llvmlite import ir
from numba.extending import intrinsic

from daskgpt.kernels.bfloat16.tiles import ROW
from daskgpt.kernels.compilation import helper
from daskgpt.kernels.philox import FIRST_MULTIPLIER, FIRST_STEP, ROUNDS, SECOND_MULTIPLIER, SECOND_STEP
from daskgpt.kernels.vectors.lanes import HALVES, I64, LANES, REALS, constant, load, splat, store, whole
from daskgpt.kernels.vectors.operations import PARTS, operation

_COUNTERS = ir.VectorType(I64, LANES)
_LOWER, _HALF = constant(_COUNTERS, 2**32 - 1), constant(_COUNTERS, 32)


def _philox(builder, counter, key, other):
    """Four vectors of words, as `philox.philox` makes them of numbers."""
    a, b, c, d = counter
    for _ in range(ROUNDS):
        first = builder.mul(a, constant(_COUNTERS, FIRST_MULTIPLIER))
        second = builder.mul(c, constant(_COUNTERS, SECOND_MULTIPLIER))
        a = builder.xor(builder.xor(builder.lshr(second, _HALF), b), splat(builder, key))
        c = builder.xor(builder.xor(builder.lshr(first, _HALF), d), splat(builder, other))
        b, d = builder.and_(second, _LOWER), builder.and_(first, _LOWER)
        key, other = (
            builder.and_(builder.add(each, whole(step)), whole(2**32 - 1))
            for each, step in ((key, FIRST_STEP), (other, SECOND_STEP))
        )
    return a, b, c, d


@intrinsic
def _factors(typing_context, target, stream, place, part, query, group, threshold, kept):
    """Factors of 16 queries and the keys 4 group ... 4 group + 3, a row of a patch a key: see `factors_of_patch`."""

    def build(builder, target, stream, place, part, query, group, threshold, kept):
        queries = builder.add(splat(builder, query), ir.Constant(_COUNTERS, list(range(LANES))))
        counter = splat(builder, group), queries, splat(builder, place), splat(builder, part)
        key, other = builder.and_(stream, whole(2**32 - 1)), builder.lshr(stream, whole(32))
        for row, word in enumerate(_philox(builder, counter, key, other)):
            gone = builder.icmp_unsigned("<", word, splat(builder, threshold))
            store(builder, builder.select(gone, constant(REALS, 0.0), splat(builder, kept)), target, row * ROW)

    return operation(build, 7, 1)


@helper
def factors_of_patch(stream, place, part, query, key, threshold, kept, patch):
    """A row of 32 queries for each of 32 keys: 0 where a probability is dropped, else `kept`; as `factors_of_row`."""
    for group in range(8):
        for half in range(2):
            _factors(
                patch + 4 * group * ROW + half * 64, stream, place, part, query + 16 * half, key // 4 + group,
                threshold, kept,
            )  # fmt: skip


@intrinsic
def drop_halves(typing_context, target, factors):
    """32 bfloat16 numbers at target: zero where one of the 32 float32 numbers at `factors` is."""

    def build(builder, target, factors):
        for first in PARTS:
            gone = builder.fcmp_ordered("==", load(builder, factors, first * 4), constant(REALS, 0.0))
            value = builder.select(gone, constant(HALVES, 0), load(builder, target, first * 2, HALVES))
            store(builder, value, target, first * 2)

    return operation(build, 2)


@intrinsic
def multiply_reals(typing_context, target, factors):
    """32 float32 numbers at target = they times the 32 at `factors`."""

    def build(builder, target, factors):
        for first in PARTS:
            product = builder.fmul(load(builder, target, first * 4), load(builder, factors, first * 4))
            store(builder, product, target, first * 4)

    return operation(build, 2)
