"""Operations on 16 numbers at a time, written in LLVM's vector types, at addresses: what surrounds a product.

A loop that Numba vectorises first compares every pair of its arrays for overlap. That pays for long arrays, not for the
32 columns of a block of sums, so these few are spelled out. An address is a whole number; `count` says how many of the
columns exist, and what lies beyond them is neither read (it counts as zero) nor written.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from daskgpt.kernels.bfloat16.units import Unit, compiles

_I1, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
_WIDTH = 16
_MASK = ir.VectorType(_I1, _WIDTH)
HALVES = ir.VectorType(_I16, _WIDTH)
BITS = ir.VectorType(_I32, _WIDTH)
REALS = ir.VectorType(ir.FloatType(), _WIDTH)
_BYTES = {HALVES: 2, BITS: 4, REALS: 4}
_NAMES = {HALVES: "v16i16", BITS: "v16i32", REALS: "v16f32"}
# The columns of one block, as two vectors.
_PARTS = (0, _WIDTH)


def splat(number):
    """16 times the same constant."""
    return ir.Constant(BITS, [number] * _WIDTH)


def spread(builder, value):
    """16 times the same 32-bit value."""
    first = builder.insert_element(ir.Constant(BITS, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(BITS, [0] * _WIDTH))


def at(builder, address, offset, kind):
    """Pointer to `kind`, `offset` bytes from an address."""
    offset = ir.Constant(_I64, offset) if isinstance(offset, int) else offset
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def load(builder, address, offset, kind):
    """A vector from any address, aligned or not."""
    return builder.load(at(builder, address, offset, kind), align=2)


def store(builder, value, address, offset):
    """A vector to any address, aligned or not."""
    builder.store(value, at(builder, address, offset, value.type), align=2)


def columns_below(builder, count, first):
    """Which of the columns first .. first + 15 are below count."""
    limits = spread(builder, builder.trunc(count, _I32))
    return builder.icmp_signed("<", ir.Constant(BITS, [first + column for column in range(_WIDTH)]), limits)


def _load_masked(builder, address, offset, kind, mask):
    signature = ir.FunctionType(kind, [kind.as_pointer(), _I32, _MASK, kind])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.load.{_NAMES[kind]}.p0")
    place = at(builder, address, offset, kind)
    return builder.call(function, [place, ir.Constant(_I32, _BYTES[kind]), mask, ir.Constant(kind, None)])


def _store_masked(builder, value, address, offset, mask):
    kind = value.type
    signature = ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), _I32, _MASK])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.store.{_NAMES[kind]}.p0")
    place = at(builder, address, offset, kind)
    builder.call(function, [value, place, ir.Constant(_I32, _BYTES[kind]), mask])


def _round_by_integers(builder, bits):
    """To nearest, ties to even. A NaN keeps its upper half and becomes quiet, which adding would not always do."""
    odd = builder.and_(builder.lshr(bits, splat(16)), splat(1))
    nearest = builder.add(builder.add(bits, splat(0x7FFF)), odd)
    nan = builder.icmp_unsigned(">", builder.and_(bits, splat(0x7FFFFFFF)), splat(0x7F800000))
    rounded = builder.select(nan, builder.or_(bits, splat(0x00400000)), nearest)
    return builder.trunc(builder.lshr(rounded, splat(16)), HALVES)


def round_bits(builder, bits):
    """16 float32 numbers, given as their bits, rounded to bfloat16.

    The processor's own instruction turns subnormal numbers into zeros; the products would read them as zeros anyway.
    """
    if not compiles(Unit.AVX512):
        return _round_by_integers(builder, bits)
    signature = ir.FunctionType(HALVES, [REALS])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512bf16.cvtneps2bf16.512")
    return builder.call(function, [builder.bitcast(bits, REALS)])


def _widen(builder, halves):
    return builder.shl(builder.zext(halves, BITS), splat(16))


def operation(build, arguments):
    """An intrinsic of `arguments` whole numbers that returns nothing; `build` writes its code."""

    def generate(context, builder, signature, values):
        build(builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * arguments), generate


def _convert(builder, count, convert, source, source_kind, target):
    """Up to 16 numbers; whole vectors without a mask, which only AVX-512 has for 16-bit numbers."""
    with builder.if_else(builder.icmp_signed(">=", count, ir.Constant(_I64, _WIDTH))) as (whole, rest):
        with whole:
            store(builder, convert(builder, load(builder, source, 0, source_kind)), target, 0)
        with rest:
            mask = columns_below(builder, count, 0)
            _store_masked(
                builder, convert(builder, _load_masked(builder, source, 0, source_kind, mask)), target, 0, mask
            )


@intrinsic
def round_exactly(typing_context, source, target, count):
    """Up to 16 bfloat16 numbers at target = as many float32 numbers at source, subnormal ones too."""

    def build(builder, source, target, count):
        _convert(builder, count, _round_by_integers, source, BITS, target)

    return operation(build, 3)


@intrinsic
def widen(typing_context, source, target, count):
    """Up to 16 float32 numbers at target = as many bfloat16 numbers at source."""

    def build(builder, source, target, count):
        _convert(builder, count, _widen, source, HALVES, target)

    return operation(build, 3)


def _rounded(builder, source, first, count):
    """Numbers first .. first + 15 of `count` float32 numbers, rounded to bfloat16."""
    return round_bits(builder, _load_masked(builder, source, first * 4, BITS, columns_below(builder, count, first)))


@intrinsic
def round_columns(typing_context, source, target, count):
    """32 bfloat16 numbers at target = `count` float32 numbers at source, then zeros."""

    def build(builder, source, target, count):
        for first in _PARTS:
            store(builder, _rounded(builder, source, first, count), target, first * 2)

    return operation(build, 3)


def store_pairs(builder, upper, lower, target):
    """16 pairs of bfloat16 numbers at target, those of `upper` before those of `lower`."""
    upper, lower = builder.zext(upper, BITS), builder.zext(lower, BITS)
    store(builder, builder.or_(upper, builder.shl(lower, splat(16))), target, 0)


@intrinsic
def pair_columns(typing_context, upper, lower, target, upper_count, lower_count):
    """16 pairs at target: the float32 numbers at `upper` rounded to bfloat16, each before the one at `lower`; zeros."""

    def build(builder, upper, lower, target, upper_count, lower_count):
        first, second = _rounded(builder, upper, 0, upper_count), _rounded(builder, lower, 0, lower_count)
        store_pairs(builder, first, second, target)

    return operation(build, 5)


@intrinsic
def transpose_tile(typing_context, tile):
    """Transpose a tile of 16 x 16 pairs in place.

    Four rounds; round d exchanges, between rows i and i + d, the columns whose bit d is set with those whose bit d is
    clear.
    """

    def build(builder, tile):
        rows = [load(builder, tile, 64 * row, BITS) for row in range(_WIDTH)]
        for distance in (8, 4, 2, 1):
            kept = [column if not column & distance else column - distance + _WIDTH for column in range(_WIDTH)]
            moved = [column + distance if not column & distance else column + _WIDTH for column in range(_WIDTH)]
            for row in range(_WIDTH):
                if not row & distance:
                    a, b = rows[row], rows[row + distance]
                    rows[row] = builder.shuffle_vector(a, b, ir.Constant(BITS, kept))
                    rows[row + distance] = builder.shuffle_vector(a, b, ir.Constant(BITS, moved))
        for row, value in enumerate(rows):
            store(builder, value, tile, 64 * row)

    return operation(build, 1)


@intrinsic
def store_columns(typing_context, source, target, count):
    """`count` float32 numbers at target = those at source."""

    def build(builder, source, target, count):
        for first in _PARTS:
            _store_masked(
                builder,
                load(builder, source, first * 4, REALS),
                target,
                first * 4,
                columns_below(builder, count, first),
            )

    return operation(build, 3)


@intrinsic
def copy_row(typing_context, source, target, count):
    """`count` float32 numbers at target = those at source."""

    def build(builder, source, target, count):
        with cgutils.for_range(builder, builder.lshr(count, ir.Constant(_I64, 4))) as loop:
            place = builder.shl(loop.index, ir.Constant(_I64, 6))
            store(builder, load(builder, source, place, REALS), target, place)
        rest = builder.and_(count, ir.Constant(_I64, 15))
        place, mask = builder.shl(builder.sub(count, rest), ir.Constant(_I64, 2)), columns_below(builder, rest, 0)
        _store_masked(builder, _load_masked(builder, source, place, REALS, mask), target, place, mask)

    return operation(build, 3)


@intrinsic
def read_real(typing_context, address, index):
    """Number `index` of the float32 numbers at an address."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        return builder.load(builder.gep(pointer, [arguments[1]]), align=4)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def write_real(typing_context, address, index, value):
    """Set number `index` of the float32 numbers at an address."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        builder.store(arguments[2], builder.gep(pointer, [arguments[1]]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def read_whole(typing_context, address, index):
    """Number `index` of the int64 numbers at an address."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.load(builder.gep(pointer, [arguments[1]]), align=8)

    return types.int64(types.int64, types.int64), generate
