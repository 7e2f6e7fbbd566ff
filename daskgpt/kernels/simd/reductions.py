"""Sums over a row, in an order that no compiler and no processor chooses; and its largest number.

There are 32 lanes, whatever the size of registers: lane l adds numbers l, l + 32, l + 64 ... one after the other, and
the lanes are added in a fixed tree: lane l and l + 16, then l + 8, 4, 2, 1. (They fill four registers of AVX2 or two of
AVX-512; with a single lane, each addition would wait for the one before it.)
"""

import math
from collections.abc import Callable, Iterator

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from daskgpt.kernels.compilation import helper, instruction
from daskgpt.kernels.simd.lanes import F32, I1, I64, NAMES, below, call, constant, load, load_masked, shuffle, whole
from daskgpt.kernels.simd.math import fma

_LANES = 32


def folded(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Return the sum of the lanes, a power of two: the upper half is added to the lower one until one is left."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (shuffle(builder, vector, vector, [first + n for n in range(lanes)]) for first in (0, lanes))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, whole(0))


def _vectors(
    builder: ir.IRBuilder, places: list[ir.Value], count: ir.Value, element: ir.Type
) -> Iterator[tuple[list[ir.Value], ir.Value]]:
    """Yield 32 numbers of each row at an address, first in a loop, then the rest; and which of them exist, others 0."""
    kind, size = ir.VectorType(element, _LANES), 4 if element is F32 else 8
    with cgutils.for_range(builder, builder.lshr(count, whole(5))) as loop:
        offset = builder.mul(loop.index, whole(_LANES * size))
        yield [load(builder, place, offset, kind) for place in places], constant(ir.VectorType(I1, _LANES), 1)
    rest = builder.and_(count, whole(_LANES - 1))
    with builder.if_then(builder.icmp_signed("!=", rest, whole(0))):
        offset, mask = builder.mul(builder.sub(count, rest), whole(size)), below(builder, rest, lanes=_LANES)
        yield [load_masked(builder, place, offset, mask, kind) for place in places], mask


def _sum(builder: ir.IRBuilder, places: list[ir.Value], count: ir.Value, element: ir.Type) -> ir.Value:
    """Return sum(x) of one row, or sum(x y) of two rows, at addresses."""
    total = cgutils.alloca_once_value(builder, constant(ir.VectorType(element, _LANES), 0.0))
    for values, _ in _vectors(builder, places, count, element):
        before = builder.load(total)
        if len(values) == 1:
            builder.store(builder.fadd(before, values[0]), total)
        else:
            name = f"llvm.fma.v{_LANES}{NAMES[element]}"
            builder.store(call(builder, name, before.type, [*values, before]), total)
    return folded(builder, builder.load(total))


def _largest(builder: ir.IRBuilder, places: list[ir.Value], count: ir.Value, element: ir.Type) -> ir.Value:
    """Return the largest number of one row."""
    top = cgutils.alloca_once_value(builder, constant(ir.VectorType(element, _LANES), -math.inf))
    for (value,), mask in _vectors(builder, places, count, element):
        before = builder.load(top)
        above = builder.and_(builder.fcmp_ordered(">", value, before), mask)
        builder.store(builder.select(above, value, before), top)
    name = f"llvm.vector.reduce.fmax.v{_LANES}{NAMES[element]}"  # no lane is NaN: comparisons with it are false
    return call(builder, name, element, [builder.load(top)], fastmath=("nnan",))


def _of_rows(write_code: Callable[..., ir.Value]) -> Callable[..., ir.Value]:
    """Return what generates the code of an intrinsic of contiguous rows of one length."""

    def generate(context, builder, signature, arguments):
        rows = [context.make_array(kind)(context, builder, row) for kind, row in zip(signature.args, arguments)]
        places = [builder.ptrtoint(row.data, I64) for row in rows]
        return write_code(builder, places, rows[0].nitems, context.get_value_type(signature.return_type))

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
    return _sum(builder, [left, right], count, F32)
