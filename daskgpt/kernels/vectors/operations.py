"""Operations of kernels on memory, by its address: numbers one by one, and a few columns of a row at once.

An address is a whole number; `count` says how many of the columns exist, and what lies beyond them is neither read (it
counts as zero) nor written.
"""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from daskgpt.kernels.vectors.lanes import (
    BITS,
    HALVES,
    I64,
    LANES,
    REALS,
    VECTOR,
    below,
    constant,
    load,
    load_masked,
    round_to_bfloat16,
    store,
    store_masked,
    transposed,
    whole,
)
from daskgpt.kernels.vectors.lanes import widen as widened

# Where the 32 columns that are worked on at once begin, as vectors.
PARTS = (0, LANES)


def operation(build: Any, integers: int, reals: int = 0) -> Any:
    """An intrinsic that returns nothing, of so many int64 and then float32 numbers; `build` writes its code."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        build(builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * integers, *[types.float32] * reals), generate


@intrinsic
def address_of(typing_context, array):
    """Address of the first element of an array."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, I64)

    return types.int64(array), generate


def _element(builder, address, index, kind):
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def _read(context, builder, signature, arguments):
    kind = context.get_value_type(signature.return_type)
    return builder.load(_element(builder, arguments[0], arguments[1], kind))


def _write(context, builder, signature, arguments):
    address, index, value = arguments
    builder.store(value, _element(builder, address, index, value.type))
    return context.get_dummy_value()


@intrinsic
def read(typing_context, address, index, like):
    """Number `index` of those at an address, which have the type of `like`."""
    return like(types.int64, types.int64, like), _read


@intrinsic
def write(typing_context, address, index, value):
    """Set number `index` of those at an address, which have the type of `value`."""
    return types.void(types.int64, types.int64, value), _write


@intrinsic
def read_real(typing_context, address, index):
    """Number `index` of the float32 numbers at an address."""
    return types.float32(types.int64, types.int64), _read


@intrinsic
def write_real(typing_context, address, index, value):
    """Set number `index` of the float32 numbers at an address."""
    return types.void(types.int64, types.int64, types.float32), _write


@intrinsic
def read_whole(typing_context, address, index):
    """Number `index` of the int64 numbers at an address."""
    return types.int64(types.int64, types.int64), _read


def _convert(builder, count, convert, source, source_kind, target):
    """Up to 16 numbers; whole vectors without a mask, which only AVX-512 has for 16-bit numbers."""
    with builder.if_else(builder.icmp_signed(">=", count, whole(LANES))) as (full, rest):
        with full:
            store(builder, convert(builder, load(builder, source, 0, source_kind)), target)
        with rest:
            mask = below(builder, count)
            store_masked(builder, convert(builder, load_masked(builder, source, 0, mask, source_kind)), target, 0, mask)


@intrinsic
def round_exactly(typing_context, source, target, count):
    """Up to 16 bfloat16 numbers at target = as many float32 numbers at source, subnormal ones too."""

    def convert(builder, reals):
        return round_to_bfloat16(builder, reals, subnormal=True)

    def build(builder, source, target, count):
        _convert(builder, count, convert, source, REALS, target)

    return operation(build, 3)


@intrinsic
def widen(typing_context, source, target, count):
    """Up to 16 float32 numbers at target = as many bfloat16 numbers at source."""

    def build(builder, source, target, count):
        _convert(builder, count, widened, source, HALVES, target)

    return operation(build, 3)


def _rounded(builder, source, first, count):
    """Numbers first .. first + 15 of `count` float32 numbers, rounded to bfloat16."""
    return round_to_bfloat16(builder, load_masked(builder, source, first * 4, below(builder, count, first)))


@intrinsic
def round_columns(typing_context, source, target, count):
    """32 bfloat16 numbers at target = `count` float32 numbers at source, then zeros."""

    def build(builder, source, target, count):
        for first in PARTS:
            store(builder, _rounded(builder, source, first, count), target, first * 2)

    return operation(build, 3)


def store_pairs(builder: Any, upper: Any, lower: Any, target: Any) -> None:
    """16 pairs of bfloat16 numbers at target, those of `upper` before those of `lower`."""
    upper, lower = builder.zext(upper, BITS), builder.zext(lower, BITS)
    store(builder, builder.or_(upper, builder.shl(lower, constant(BITS, 16))), target)


@intrinsic
def pair_columns(typing_context, upper, lower, target, upper_count, lower_count):
    """16 pairs at target: the float32 numbers at `upper` rounded to bfloat16, each before the one at `lower`; zeros."""

    def build(builder, upper, lower, target, upper_count, lower_count):
        first, second = _rounded(builder, upper, 0, upper_count), _rounded(builder, lower, 0, lower_count)
        store_pairs(builder, first, second, target)

    return operation(build, 5)


@intrinsic
def transpose_tile(typing_context, tile):
    """Transpose a tile of 16 x 16 numbers of 32 bits in place."""

    def build(builder, tile):
        rows = [load(builder, tile, VECTOR * row, BITS) for row in range(LANES)]
        for row, value in enumerate(transposed(builder, rows)):
            store(builder, value, tile, VECTOR * row)

    return operation(build, 1)


@intrinsic
def store_columns(typing_context, source, target, count):
    """`count` of 32 float32 numbers at target = those at source."""

    def build(builder, source, target, count):
        for first in PARTS:
            value = load(builder, source, first * 4)
            store_masked(builder, value, target, first * 4, below(builder, count, first))

    return operation(build, 3)


@intrinsic
def copy_row(typing_context, source, target, count):
    """`count` float32 numbers at target = those at source."""

    def build(builder, source, target, count):
        with cgutils.for_range(builder, builder.lshr(count, whole(4))) as loop:
            place = builder.shl(loop.index, whole(6))
            store(builder, load(builder, source, place), target, place)
        rest = builder.and_(count, whole(LANES - 1))
        place, mask = builder.shl(builder.sub(count, rest), whole(2)), below(builder, rest)
        store_masked(builder, load_masked(builder, source, place, mask), target, place, mask)

    return operation(build, 3)
