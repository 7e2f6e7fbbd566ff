"""Functions of a row of numbers: sums, in an order that no compiler and no processor chooses; its largest number;
softmax.

There are 32 lanes, whatever the size of registers: lane l adds numbers l, l + 32, l + 64 ... one after the other, and
the lanes are added in a fixed tree: lane l and l + 16, then l + 8, 4, 2, 1. (They fill four registers of AVX2 or two of
AVX-512; with a single lane, each addition would wait for the one before it.)
"""

import math
from collections.abc import Callable, Iterator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from daskgpt.kernels.compilation import helper, instruction
from daskgpt.kernels.simd import lanes
from daskgpt.kernels.simd.lanes import address_of, transpose_square
from daskgpt.kernels.simd.math import fma

_LANES = 32
_ALL = lanes.constant(ir.VectorType(lanes.I1, _LANES), 1)


def folded(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Return the sum of the lanes, a power of two: the upper half is added to the lower one until one is left."""
    count = vector.type.count
    while count > 1:
        count //= 2
        low, high = (lanes.shuffle(builder, vector, vector, [first + n for n in range(count)]) for first in (0, count))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, lanes.whole(0))


def _vectors(
    builder: ir.IRBuilder, places: list[ir.Value], count: ir.Value, element: ir.Type
) -> Iterator[tuple[list[ir.Value], ir.Value]]:
    """Yield 32 numbers of each row at an address, first in a loop, then the rest; and which of them exist, others 0."""
    kind, size = ir.VectorType(element, _LANES), 4 if element is lanes.F32 else 8
    with cgutils.for_range(builder, builder.lshr(count, lanes.whole(5))) as loop:
        offset = builder.mul(loop.index, lanes.whole(_LANES * size))
        yield [lanes.load(builder, place, offset, kind) for place in places], _ALL
    rest = builder.and_(count, lanes.whole(_LANES - 1))
    with builder.if_then(builder.icmp_signed("!=", rest, lanes.whole(0))):
        offset = builder.mul(builder.sub(count, rest), lanes.whole(size))
        mask = lanes.below(builder, rest, lanes=_LANES)
        yield [lanes.load_masked(builder, place, offset, mask, kind) for place in places], mask


def _sum(builder: ir.IRBuilder, places: list[ir.Value], count: ir.Value, element: ir.Type) -> ir.Value:
    """Return sum(x) of one row, or sum(x y) of two rows, at addresses."""
    total = cgutils.alloca_once_value(builder, lanes.constant(ir.VectorType(element, _LANES), 0.0))
    for values, _ in _vectors(builder, places, count, element):
        before = builder.load(total)
        if len(values) == 1:
            builder.store(builder.fadd(before, values[0]), total)
        else:
            builder.store(lanes.fma(builder, values[0], values[1], before), total)
    return folded(builder, builder.load(total))


def _largest(builder: ir.IRBuilder, places: list[ir.Value], count: ir.Value, element: ir.Type) -> ir.Value:
    """Return the largest number of one row."""
    top = cgutils.alloca_once_value(builder, lanes.constant(ir.VectorType(element, _LANES), -math.inf))
    for (value,), mask in _vectors(builder, places, count, element):
        before = builder.load(top)
        above = builder.and_(builder.fcmp_ordered(">", value, before), mask)
        builder.store(builder.select(above, value, before), top)
    name = f"llvm.vector.reduce.fmax.v{_LANES}{lanes.NAMES[element]}"  # no lane is NaN: comparisons with it are false
    return lanes.call(builder, name, element, [builder.load(top)], fastmath=("nnan",))


def _of_rows(write_code: Callable[..., ir.Value]) -> Callable[..., ir.Value]:
    """Return what generates the code of an intrinsic of contiguous rows of one length, and of numbers after them."""

    def generate(context, builder, signature, arguments):
        kinds = [kind for kind in signature.args if isinstance(kind, types.Array)]
        rows = [context.make_array(kind)(context, builder, row) for kind, row in zip(kinds, arguments)]
        places = [builder.ptrtoint(row.data, lanes.I64) for row in rows]
        element = context.get_value_type(kinds[0].dtype)
        return write_code(builder, places, rows[0].nitems, element, *arguments[len(rows) :])

    return generate


@intrinsic
def sum_of(typing_context, row):
    """Return the sum of a contiguous row of numbers."""
    return row.dtype(row), _of_rows(_sum)


@intrinsic
def dot(typing_context, left, right):
    """Return the sum of the products of two contiguous rows of one length; each is added with one rounding."""
    return left.dtype(left, right), _of_rows(_sum)


@intrinsic
def maximum(typing_context, row):
    """Return the largest number of a contiguous row. It ignores a NaN, which stays in the row when the maximum is
    subtracted."""
    return row.dtype(row), _of_rows(_largest)


@helper
def scale_of(row, eps):
    """Return 1 / root of the mean square of a row, to which `eps` is added."""
    real = row.dtype.type
    return real(1) / math.sqrt(fma(dot(row, row), real(1) / real(row.size), real(eps)))


@instruction("n n n", "s")
def dot_at(builder, left, right, count):
    """Return the `dot` of `count` float32 numbers at two addresses."""
    return _sum(builder, [left, right], count, lanes.F32)


# Softmax runs in vectors of 32 numbers, which may read and write up to PADDING numbers beyond the row.
PADDING = _LANES - 1


def _parts(builder, count, limit, kind):
    """Yield the distance in bytes of each vector of `count` numbers, and its lanes below the limit."""
    size = 4 if kind.element is lanes.F32 else 8
    with cgutils.for_range(builder, builder.lshr(builder.add(count, lanes.whole(PADDING)), lanes.whole(5))) as loop:
        first = builder.shl(loop.index, lanes.whole(5))
        yield builder.mul(first, lanes.whole(size)), lanes.below(builder, builder.sub(limit, first), lanes=_LANES)


def _exponentials(builder, places, count, element, limit, last, scale, top):
    (row,), kind = places, ir.VectorType(element, _LANES)
    zero = lanes.constant(kind, 0.0)
    scale, top = lanes.splat(builder, scale, _LANES), lanes.splat(builder, top, _LANES)
    total = cgutils.alloca_once_value(builder, zero)
    for offset, mask in _parts(builder, last, limit, kind):
        score = builder.fmul(scale, lanes.load(builder, row, offset, kind))
        value = builder.select(mask, lanes.exp(builder, builder.fsub(score, top)), zero)
        lanes.store(builder, value, row, offset)
        builder.store(builder.fadd(builder.load(total), value), total)
    return folded(builder, builder.load(total))


def _score_gradients(builder, places, count, element, limit, last, scale, total):
    (row, gradients), kind = places, ir.VectorType(element, _LANES)
    zero, factor = lanes.constant(kind, 0.0), builder.fdiv(lanes.constant(element, 1.0), total)
    factor = lanes.splat(builder, factor, _LANES)
    scale, sums = lanes.splat(builder, scale, _LANES), cgutils.alloca_once_value(builder, zero)
    for offset, mask in _parts(builder, limit, limit, kind):
        p = builder.fmul(lanes.load(builder, row, offset, kind), factor)
        lanes.store(builder, p, row, offset)
        gradient = builder.select(mask, lanes.load(builder, gradients, offset, kind), zero)
        builder.store(lanes.fma(builder, p, gradient, builder.load(sums)), sums)
    delta = lanes.splat(builder, folded(builder, builder.load(sums)), _LANES)
    for offset, mask in _parts(builder, last, limit, kind):
        p, gradient = (lanes.load(builder, place, offset, kind) for place in (row, gradients))
        value = builder.fmul(builder.fmul(scale, p), builder.fsub(gradient, delta))
        lanes.store(builder, builder.select(mask, value, zero), gradients, offset)
    return lanes.whole(0)


@intrinsic
def exponentials(typing_context, row, limit, last, scale, top):
    """Set numbers of a row to exp(scale x - top) below the limit and to zeros up to `last`; return their sum."""
    real = row.dtype
    return real(row, types.int64, types.int64, real, real), _of_rows(_exponentials)


@intrinsic
def score_gradients(typing_context, row, gradients, limit, last, scale, total):
    """Divide the numbers of a row by their total; replace their gradients by those of the scores, zeros from the limit.

    p = row / total;  gradients = scale p (gradients - sum(p gradients))
    """
    real = row.dtype
    return types.int64(row, gradients, types.int64, types.int64, real, real), _of_rows(_score_gradients)


@helper
def transpose(like, source, step, rows, out):
    """Write `rows` numbers of each column at an address, `step` bytes from row to row, to a row of `out`, which may be
    longer: 16 x 16 numbers of the type of `like` at a time, and zeros after the last ones.
    """
    size, out_step = out.itemsize, out.shape[1] * out.itemsize
    for first in range(0, rows, lanes.LANES):
        for column in range(0, out.shape[0], lanes.LANES):
            place, target = source + first * step + column * size, address_of(out) + column * out_step + first * size
            exist, width = out.shape[0] - column, out.shape[1] - first
            transpose_square(like, place, step, rows - first, exist, target, out_step, width)
