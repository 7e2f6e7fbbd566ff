"""Sums over a row, in an order that no compiler and no processor chooses.

There are 32 lanes, whatever the size of registers: lane l adds numbers l, l + 32, l + 64 ... one after the other, and
the lanes are added in a fixed tree: lane l and l + 16, then l + 8, 4, 2, 1. (They fill four registers of AVX2 or two of
AVX-512; with a single lane, each addition would wait for the one before it.)
"""

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from daskgpt.kernels.simd.lanes import F32, below, call, constant, instruction, load, load_masked, shuffle, whole

_LANES = 32


def folded(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Return the sum of the lanes, a power of two: the upper half is added to the lower one until one is left."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (shuffle(builder, vector, vector, [first + n for n in range(lanes)]) for first in (0, lanes))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, whole(0))


def _walk(builder: ir.IRBuilder, places: list[ir.Value], count: ir.Value, element: ir.Type) -> ir.Value:
    """Return sum(x) of one row, or sum(x y) of two rows, at addresses."""
    kind, size = ir.VectorType(element, _LANES), 4 if element is F32 else 8
    total = cgutils.alloca_once_value(builder, constant(kind, 0.0))

    def add(values: list[ir.Value]) -> None:
        before = builder.load(total)
        if len(values) == 1:
            builder.store(builder.fadd(before, values[0]), total)
        else:
            name = f"llvm.fma.v{_LANES}f{8 * size}"
            builder.store(call(builder, name, kind, [*values, before]), total)

    with cgutils.for_range(builder, builder.lshr(count, whole(5))) as loop:
        offset = builder.mul(loop.index, whole(_LANES * size))
        add([load(builder, place, offset, kind) for place in places])
    rest = builder.and_(count, whole(_LANES - 1))
    with builder.if_then(builder.icmp_signed("!=", rest, whole(0))):
        offset, mask = builder.mul(builder.sub(count, rest), whole(size)), below(builder, rest, lanes=_LANES)
        add([load_masked(builder, place, offset, mask, kind) for place in places])
    return folded(builder, builder.load(total))


def _of_arrays(context, builder, signature, arguments):
    rows = [context.make_array(kind)(context, builder, row) for kind, row in zip(signature.args, arguments)]
    places = [builder.ptrtoint(row.data, ir.IntType(64)) for row in rows]
    return _walk(builder, places, rows[0].nitems, context.get_value_type(signature.return_type))


@intrinsic
def sum_of(typing_context, row):
    """Return the sum of a contiguous row of numbers."""
    return row.dtype(row), _of_arrays


@intrinsic
def dot(typing_context, left, right):
    """Return the sum of the products of two contiguous rows of one length; each is added with one rounding."""
    return left.dtype(left, right), _of_arrays


@instruction("n n n", "s")
def dot_at(builder, left, right, count):
    """Return the `dot` of `count` float32 numbers at two addresses."""
    return _walk(builder, [left, right], count, F32)
