"""Operations on 16 numbers at a time, written in LLVM's vector types, at addresses: what packing and finishing a product needs.

A loop that Numba vectorises first compares every pair of its arrays for overlap. That pays for long arrays, not for the 32 columns that
lie between two tiles, so these few are spelled out. An address is a whole number; `count` says how many of the columns exist, and what
lies beyond them is neither read (it counts as zero) nor written.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from daskgpt.kernels.matmul.units import Unit, compiles

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_F32 = ir.FloatType()
_POINTER = _I8.as_pointer()
_WIDTH = 16
_BITS = ir.VectorType(_I32, _WIDTH)
_HALVES = ir.VectorType(_I16, _WIDTH)
_REALS = ir.VectorType(_F32, _WIDTH)
_MASK = ir.VectorType(_I1, _WIDTH)
# The columns of one block, as two vectors.
_PARTS = (0, _WIDTH)

_int = types.int64


def _splat(value):
    return ir.Constant(_BITS, [value] * _WIDTH)


def _at(builder, address, offset, kind):
    place = builder.add(address, ir.Constant(_I64, offset)) if isinstance(offset, int) else builder.add(address, offset)
    return builder.inttoptr(place, kind.as_pointer())


def _mask(builder, count, first):
    """Which of the columns first .. first + 15 are below count."""
    limit = builder.trunc(count, _I32)
    limits = builder.insert_element(ir.Constant(_BITS, ir.Undefined), limit, ir.Constant(_I32, 0))
    limits = builder.shuffle_vector(limits, limits, ir.Constant(_BITS, [0] * _WIDTH))
    return builder.icmp_signed("<", ir.Constant(_BITS, [first + column for column in range(_WIDTH)]), limits)


def _name(kind):
    return f"v{_WIDTH}" + {str(_I16): "i16", str(_I32): "i32", str(_F32): "f32"}[str(kind.element)]


def _load_masked(builder, address, offset, kind, mask):
    signature = ir.FunctionType(kind, [_POINTER, _I32, _MASK, kind])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.load.{_name(kind)}.p0")
    alignment = ir.Constant(_I32, kind.element.width // 8 if isinstance(kind.element, ir.IntType) else 4)
    return builder.call(function, [_at(builder, address, offset, _I8), alignment, mask, ir.Constant(kind, None)])


def _store_masked(builder, value, address, offset, mask):
    kind = value.type
    signature = ir.FunctionType(ir.VoidType(), [kind, _POINTER, _I32, _MASK])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.store.{_name(kind)}.p0")
    alignment = ir.Constant(_I32, kind.element.width // 8 if isinstance(kind.element, ir.IntType) else 4)
    builder.call(function, [value, _at(builder, address, offset, _I8), alignment, mask])


def _load(builder, address, offset, kind):
    return builder.load(_at(builder, address, offset, kind), align=4)


def _store(builder, value, address, offset):
    builder.store(value, _at(builder, address, offset, value.type), align=2)


def _round_by_integers(builder, bits):
    """To nearest, ties to even. A NaN keeps its upper half and becomes quiet, which the addition would not always do."""
    odd = builder.and_(builder.lshr(bits, _splat(16)), _splat(1))
    nearest = builder.add(builder.add(bits, _splat(0x7FFF)), odd)
    nan = builder.icmp_unsigned(">", builder.and_(bits, _splat(0x7FFFFFFF)), _splat(0x7F800000))
    rounded = builder.select(nan, builder.or_(bits, _splat(0x00400000)), nearest)
    return builder.trunc(builder.lshr(rounded, _splat(16)), _HALVES)


def _rounded(builder, bits):
    """16 float32 numbers, given as their bits, rounded to bfloat16.

    The processor's own instruction turns subnormal numbers into zeros; the products would read them as zeros anyway.
    """
    if not compiles(Unit.AVX512):
        return _round_by_integers(builder, bits)
    signature = ir.FunctionType(_HALVES, [_REALS])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512bf16.cvtneps2bf16.512")
    return builder.call(function, [builder.bitcast(bits, _REALS)])


def _void(*arguments):
    return types.void(*arguments)


@intrinsic
def round_columns(typing_context, source, target, count):
    """32 bfloat16 numbers at target = `count` float32 numbers at source, then zeros."""

    def generate(context, builder, signature, arguments):
        source, target, count = arguments
        for first in _PARTS:
            bits = _load_masked(builder, source, first * 4, _BITS, _mask(builder, count, first))
            halves = _rounded(builder, bits)
            _store(builder, halves, target, first * 2)
        return context.get_dummy_value()

    return _void(_int, _int, _int), generate


@intrinsic
def copy_columns(typing_context, source, target, count):
    """32 bfloat16 numbers at target = `count` bfloat16 numbers at source, then zeros."""

    def generate(context, builder, signature, arguments):
        source, target, count = arguments
        for first in _PARTS:
            _store(builder, _load_masked(builder, source, first * 2, _HALVES, _mask(builder, count, first)), target, first * 2)
        return context.get_dummy_value()

    return _void(_int, _int, _int), generate


@intrinsic
def pair_rounded(typing_context, upper, lower, target, upper_count, lower_count):
    """16 pairs at target: the float32 numbers at `upper` rounded to bfloat16, each followed by the one at `lower`; then zeros."""

    def generate(context, builder, signature, arguments):
        upper, lower, target, upper_count, lower_count = arguments
        first, second = (
            _rounded(builder, _load_masked(builder, row, 0, _BITS, _mask(builder, count, 0)))
            for row, count in ((upper, upper_count), (lower, lower_count))
        )
        first, second = builder.zext(first, _BITS), builder.zext(second, _BITS)
        _store(builder, builder.or_(first, builder.shl(second, _splat(16))), target, 0)
        return context.get_dummy_value()

    return _void(_int, _int, _int, _int, _int), generate


@intrinsic
def pair_columns(typing_context, upper, lower, target, upper_count, lower_count):
    """The same from two rows that are bfloat16 already."""

    def generate(context, builder, signature, arguments):
        upper, lower, target, upper_count, lower_count = arguments
        first, second = (
            builder.zext(_load_masked(builder, row, 0, _HALVES, _mask(builder, count, 0)), _BITS)
            for row, count in ((upper, upper_count), (lower, lower_count))
        )
        _store(builder, builder.or_(first, builder.shl(second, _splat(16))), target, 0)
        return context.get_dummy_value()

    return _void(_int, _int, _int, _int, _int), generate


@intrinsic
def clear_columns(typing_context, target):
    """64 bytes of zeros at target."""

    def generate(context, builder, signature, arguments):
        _store(builder, _splat(0), arguments[0], 0)
        return context.get_dummy_value()

    return _void(_int), generate


@intrinsic
def transpose_tile(typing_context, tile):
    """Transpose a tile of 16 x 16 pairs in place.

    Four rounds; round d exchanges, between rows i and i + d, the columns whose bit d is set with those whose bit d is clear.
    """

    def generate(context, builder, signature, arguments):
        rows = [_load(builder, arguments[0], 64 * row, _BITS) for row in range(_WIDTH)]
        for distance in (8, 4, 2, 1):
            kept = [column if not column & distance else column - distance + _WIDTH for column in range(_WIDTH)]
            moved = [column + distance if not column & distance else column + _WIDTH for column in range(_WIDTH)]
            for row in range(_WIDTH):
                if not row & distance:
                    a, b = rows[row], rows[row + distance]
                    rows[row] = builder.shuffle_vector(a, b, ir.Constant(_BITS, kept))
                    rows[row + distance] = builder.shuffle_vector(a, b, ir.Constant(_BITS, moved))
        for row, value in enumerate(rows):
            _store(builder, value, arguments[0], 64 * row)
        return context.get_dummy_value()

    return _void(_int), generate


@intrinsic
def add_columns(typing_context, total, source, count):
    """32 float32 numbers at total += `count` float32 numbers at source."""

    def generate(context, builder, signature, arguments):
        total, source, count = arguments
        for first in _PARTS:
            added = _load_masked(builder, source, first * 4, _REALS, _mask(builder, count, first))
            _store(builder, builder.fadd(_load(builder, total, first * 4, _REALS), added), total, first * 4)
        return context.get_dummy_value()

    return _void(_int, _int, _int), generate


@intrinsic
def load_columns(typing_context, source, target, count):
    """32 float32 numbers at target = `count` float32 numbers at source, then zeros."""

    def generate(context, builder, signature, arguments):
        source, target, count = arguments
        for first in _PARTS:
            _store(builder, _load_masked(builder, source, first * 4, _REALS, _mask(builder, count, first)), target, first * 4)
        return context.get_dummy_value()

    return _void(_int, _int, _int), generate


@intrinsic
def widen_columns(typing_context, source, target, count):
    """32 float32 numbers at target = `count` bfloat16 numbers at source, then zeros."""

    def generate(context, builder, signature, arguments):
        source, target, count = arguments
        for first in _PARTS:
            halves = _load_masked(builder, source, first * 2, _HALVES, _mask(builder, count, first))
            _store(builder, builder.shl(builder.zext(halves, _BITS), _splat(16)), target, first * 4)
        return context.get_dummy_value()

    return _void(_int, _int, _int), generate


@intrinsic
def store_columns(typing_context, source, target, count):
    """`count` float32 numbers at target = those at source."""

    def generate(context, builder, signature, arguments):
        source, target, count = arguments
        for first in _PARTS:
            value = _load(builder, source, first * 4, _REALS)
            _store_masked(builder, value, target, first * 4, _mask(builder, count, first))
        return context.get_dummy_value()

    return _void(_int, _int, _int), generate


@intrinsic
def store_rounded(typing_context, source, target, count):
    """`count` bfloat16 numbers at target = the float32 numbers at source, rounded."""

    def generate(context, builder, signature, arguments):
        source, target, count = arguments
        for first in _PARTS:
            bits = _load(builder, source, first * 4, _BITS)
            halves = _rounded(builder, bits)
            _store_masked(builder, halves, target, first * 2, _mask(builder, count, first))
        return context.get_dummy_value()

    return _void(_int, _int, _int), generate


@intrinsic
def read_real(typing_context, address, index):
    """Number `index` of the float32 numbers at an address."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _F32.as_pointer())
        return builder.load(builder.gep(pointer, [arguments[1]]), align=4)

    return types.float32(_int, _int), generate


@intrinsic
def write_real(typing_context, address, index, value):
    """Set number `index` of the float32 numbers at an address."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _F32.as_pointer())
        builder.store(arguments[2], builder.gep(pointer, [arguments[1]]), align=4)
        return context.get_dummy_value()

    return _void(_int, _int, types.float32), generate


@intrinsic
def copy_reals(typing_context, source, target, count, streaming):
    """`count` float32 numbers at target = those at source, in whole cache lines of the target.
    """
    if not isinstance(streaming, types.IntegerLiteral):
        return None
    flag = streaming.literal_value

    def generate(context, builder, signature, arguments):
        source, target, count, _ = arguments
        c = lambda v: ir.Constant(_I64, v)
        head = builder.and_(builder.lshr(builder.neg(target), c(2)), c(15))
        head = builder.select(builder.icmp_signed("<", head, count), head, count)
        mask = _mask(builder, head, 0)
        _store_masked(builder, _load_masked(builder, source, 0, _REALS, mask), target, 0, mask)
        skip = builder.shl(head, c(2))
        source, target, count = builder.add(source, skip), builder.add(target, skip), builder.sub(count, head)
        with cgutils.for_range(builder, builder.lshr(count, c(4))) as loop:
            place = builder.shl(loop.index, c(6))
            st = builder.store(_load(builder, source, place, _REALS), _at(builder, target, place, _REALS), align=64)
            if flag:
                st.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        first = builder.and_(count, c(-16))
        mask = _mask(builder, builder.sub(count, first), 0)
        place = builder.shl(first, c(2))
        _store_masked(builder, _load_masked(builder, source, place, _REALS, mask), target, place, mask)
        return context.get_dummy_value()

    return _void(_int, _int, _int, streaming), generate
