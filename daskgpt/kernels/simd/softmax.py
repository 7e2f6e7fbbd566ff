"""Softmax of a row of scores up to a limit, and its gradient, for use inside kernels.

float32 runs in vectors of 32 numbers, which may read and write up to PADDING numbers beyond the row; sums are in the
order of `reductions`. float64 takes a number at a time.
"""

from llvmlite import ir
from numba.core import cgutils

from daskgpt.kernels.compilation import for_float32, helper, instruction
from daskgpt.kernels.simd import lanes
from daskgpt.kernels.simd.math import exp
from daskgpt.kernels.simd.reductions import dot, folded, sum_of

PADDING = 31
_LANES = PADDING + 1
_REALS = ir.VectorType(lanes.F32, _LANES)
_ZERO = lanes.constant(_REALS, 0.0)


def _parts(builder, count, limit):
    """Yield the distance in bytes of each vector of `count` numbers, and its lanes below the limit."""
    with cgutils.for_range(builder, builder.lshr(builder.add(count, lanes.whole(PADDING)), lanes.whole(5))) as loop:
        first = builder.shl(loop.index, lanes.whole(5))
        yield builder.shl(first, lanes.whole(2)), lanes.below(builder, builder.sub(limit, first), lanes=_LANES)


@instruction("n n n s s", "s")
def _exponentials(builder, row, limit, last, scale, top):
    scale, top = lanes.splat(builder, scale, _LANES), lanes.splat(builder, top, _LANES)
    total = cgutils.alloca_once_value(builder, _ZERO)
    for offset, mask in _parts(builder, last, limit):
        score = builder.fmul(scale, lanes.load(builder, row, offset, _REALS))
        value = builder.select(mask, lanes.exp(builder, builder.fsub(score, top)), _ZERO)
        lanes.store(builder, value, row, offset)
        builder.store(builder.fadd(builder.load(total), value), total)
    return folded(builder, builder.load(total))


@instruction("n n n n s s")
def _score_gradients(builder, row, gradients, limit, last, scale, total):
    factor = lanes.splat(builder, builder.fdiv(lanes.constant(lanes.F32, 1.0), total), _LANES)
    scale, sums = lanes.splat(builder, scale, _LANES), cgutils.alloca_once_value(builder, _ZERO)
    for offset, mask in _parts(builder, limit, limit):
        p = builder.fmul(lanes.load(builder, row, offset, _REALS), factor)
        lanes.store(builder, p, row, offset)
        gradient = builder.select(mask, lanes.load(builder, gradients, offset, _REALS), _ZERO)
        builder.store(lanes.fma(builder, p, gradient, builder.load(sums)), sums)
    delta = lanes.splat(builder, folded(builder, builder.load(sums)), _LANES)
    for offset, mask in _parts(builder, last, limit):
        p, gradient = (lanes.load(builder, place, offset, _REALS) for place in (row, gradients))
        value = builder.fmul(builder.fmul(scale, p), builder.fsub(gradient, delta))
        lanes.store(builder, builder.select(mask, value, _ZERO), gradients, offset)


@helper
def _exponentials_float32(row, limit, last, scale, top):
    return _exponentials(lanes.address_of(row), limit, last, scale, top)


@for_float32(_exponentials_float32)
def exponentials(row, limit, last, scale, top):
    """Set numbers of a row to exp(scale x - top) below the limit and to zeros up to `last`; return their sum."""
    for j in range(limit):
        row[j] = exp(scale * row[j] - top)
    row[limit:last] = 0
    return sum_of(row[:limit])


@helper
def _score_gradients_float32(row, gradients, limit, last, scale, total):
    _score_gradients(lanes.address_of(row), lanes.address_of(gradients), limit, last, scale, total)


@for_float32(_score_gradients_float32)
def score_gradients(row, gradients, limit, last, scale, total):
    """Divide the numbers of a row by their total; replace their gradients by those of the scores, zeros from the limit.

    p = row / total;  gradients = scale p (gradients - sum(p gradients))
    """
    for j in range(limit):
        row[j] *= 1 / total
    delta = dot(row[:limit], gradients[:limit])
    for j in range(limit):
        gradients[j] = scale * row[j] * (gradients[j] - delta)
    gradients[limit:last] = 0
