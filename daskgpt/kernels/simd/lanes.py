"""Code on several numbers at a time, in LLVM's vector types, from which intrinsics and emitted functions are built.

A function takes an llvmlite builder first and returns a value. How many lanes there are follows from the type of its
arguments, LANES being the default. A place in memory is a pointer or an address (a whole number), and a distance in
bytes from it. The intrinsics at the end are for kernels: they read and write single numbers at an address.

A loop that Numba vectorizes first compares every pair of its arrays for overlap, and may round the last numbers, which
do not fill a vector, differently from the others. That pays for long arrays, not for a few columns.
"""

import functools
import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from daskgpt.kernels.compilation import instruction

# Instruction sets that Numba compiles for: NUMBA_CPU_FEATURES can remove some of the processor's.
X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


@functools.cache
def features() -> frozenset[str]:
    """Return LLVM's names of the instruction sets of an x86 processor; none elsewhere."""
    if not X86:
        return frozenset()
    listed = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(feature[1:] for feature in listed.split(",") if feature.startswith("+"))


def has_avx512() -> bool:
    """Return whether code with vectors of 512 bits can be compiled here."""
    return "avx512f" in features()


def has_avx512_bfloat16() -> bool:
    """Return whether code with instructions that round to bfloat16 and multiply pairs can be compiled here."""
    return features().issuperset(("avx512f", "avx512bw", "avx512vl", "avx512bf16"))


LANES = 16
VECTOR = 4 * LANES
PAGE = 4096  # bytes of memory that the system maps at once
# Where the 32 columns that some intrinsics work on at once begin, as vectors.
PARTS = (0, LANES)
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64, VOID = ir.FloatType(), ir.DoubleType(), ir.VoidType()
POINTER = I8.as_pointer()
HALVES, BITS, REALS, MASK = (ir.VectorType(element, LANES) for element in (I16, I32, F32, I1))
NAMES = {I16: "i16", I32: "i32", F32: "f32", F64: "f64"}
_BYTES = {I8: 1, I16: 2, I32: 4, F32: 4, I64: 8, F64: 8}

# exp: Cody and Waite's reduction, Cephes' polynomial.
_LOG2_E, _LOG_2_HIGH, _LOG_2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
_LOWEST, _HIGHEST = -87.0, 88.72
# Adding and subtracting 1.5 * 2**23 rounds to a whole number, which is then in the sum's lowest bits.
_ROUND = 12582912.0
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def whole(number: int) -> ir.Constant:
    """Return a constant of 64 bits."""
    return ir.Constant(I64, number)


def constant(kind: ir.Type, number: float) -> ir.Constant:
    """Return the same number in every lane; `kind` may be the type of a single number."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Value], **options: Any) -> ir.Value:
    """Call one of LLVM's intrinsics, or a function of the C library."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, **options)


def at(builder: ir.IRBuilder, place: ir.Value, offset: ir.Value, kind: ir.Type) -> ir.Value:
    """Return a pointer to a value of `kind`, `offset` bytes after `place`."""
    offset = whole(offset) if isinstance(offset, int) else offset
    if isinstance(place.type, ir.PointerType):
        return builder.bitcast(builder.gep(place, [offset], source_etype=I8), kind.as_pointer())
    return builder.inttoptr(builder.add(place, offset), kind.as_pointer())


def load(builder: ir.IRBuilder, place: ir.Value, offset: ir.Value = 0, kind: ir.Type = REALS) -> ir.Value:
    """Load a vector, or one number, aligned like one number."""
    return builder.load(at(builder, place, offset, kind), align=_BYTES[getattr(kind, "element", kind)])


def store(builder: ir.IRBuilder, value: ir.Value, place: ir.Value, offset: ir.Value = 0) -> None:
    """Store a vector, or one number."""
    element = getattr(value.type, "element", value.type)
    builder.store(value, at(builder, place, offset, value.type), align=_BYTES[element])


def splat(builder: ir.IRBuilder, value: ir.Value, lanes: int = LANES) -> ir.Value:
    """Return a vector with the same value in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return shuffle(builder, first, first, [0] * lanes)


def shuffle(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, order: list[int]) -> ir.Value:
    """Return lanes of two vectors, which are numbered through both."""
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(order)), order))


def below(builder: ir.IRBuilder, count: ir.Value, first: int = 0, lanes: int = LANES) -> ir.Value:
    """Return which of the lanes, numbered from `first` on, are below a 64-bit count."""
    limits = splat(builder, builder.trunc(count, I32), lanes)
    numbers = ir.Constant(limits.type, [first + lane for lane in range(lanes)])
    return builder.icmp_signed("<", numbers, limits)


def load_masked(
    builder: ir.IRBuilder, place: ir.Value, offset: ir.Value, mask: ir.Value, kind: ir.Type = REALS
) -> ir.Value:
    """Load a vector; where the mask is not set, memory is not read and the number is 0."""
    name = f"llvm.masked.load.{_suffix(kind)}.p0"
    align, pointer = ir.Constant(I32, _BYTES[kind.element]), at(builder, place, offset, kind)
    return call(builder, name, kind, [pointer, align, mask, ir.Constant(kind, None)])


def store_masked(builder: ir.IRBuilder, value: ir.Value, place: ir.Value, offset: ir.Value, mask: ir.Value) -> None:
    """Store the numbers where the mask is set."""
    kind = value.type
    name = f"llvm.masked.store.{_suffix(kind)}.p0"
    align, pointer = ir.Constant(I32, _BYTES[kind.element]), at(builder, place, offset, kind)
    call(builder, name, VOID, [value, pointer, align, mask])


def prefetch(builder: ir.IRBuilder, place: ir.Value, offset: ir.Value = 0) -> None:
    """Fetch a cache line into the second cache; any place is allowed."""
    call(builder, "llvm.prefetch.p0", VOID, [at(builder, place, offset, I8), *(ir.Constant(I32, n) for n in (0, 2, 1))])


def _suffix(kind: ir.Type) -> str:
    """Return how LLVM's intrinsics for this type end."""
    return f"v{kind.count}{NAMES[kind.element]}" if isinstance(kind, ir.VectorType) else NAMES[kind]


def fma(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, total: ir.Value) -> ir.Value:
    """Return left right + total with one rounding."""
    return call(builder, f"llvm.fma.{_suffix(total.type)}", total.type, [left, right, total])


def _like(kind: ir.Type, element: ir.Type) -> ir.Type:
    """Return the type with as many lanes as `kind`, or the type of a single number."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return e**x of a number or of each lane, of float64 by the C library.

    x is n ln(2) + r; the polynomial gives exp(r), and n is added to its exponent bits. At most 2 units in the last
    place; x is clamped to -87 ... 88.72, so never 0 and never infinite. A NaN that an operation makes stays NaN;
    low bits that others have, as in damaged files, would be added to the exponent.
    """
    kind, bits = x.type, _like(x.type, I32)
    if getattr(kind, "element", kind) is F64:
        return call(builder, f"llvm.exp.{_suffix(kind)}", kind, [x])

    def number(value: float) -> ir.Constant:
        return constant(kind, value)

    for order, limit in (("<", _LOWEST), (">", _HIGHEST)):
        x = builder.select(builder.fcmp_ordered(order, x, number(limit)), number(limit), x)
    shifted = fma(builder, x, number(_LOG2_E), number(_ROUND))
    n = builder.fsub(shifted, number(_ROUND))
    r = fma(builder, n, number(-_LOG_2_HIGH), x)
    r = fma(builder, n, number(-_LOG_2_LOW), r)
    p = number(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = fma(builder, p, r, number(coefficient))
    square = builder.fmul(r, r)
    y = builder.fadd(fma(builder, p, square, r), number(1))
    power = builder.shl(builder.bitcast(shifted, bits), constant(bits, 23))
    return builder.bitcast(builder.add(builder.bitcast(y, bits), power), kind)


def round_to_bfloat16(builder: ir.IRBuilder, reals: ir.Value) -> ir.Value:
    """Return the 16 bits of the bfloat16 nearest to a float32 number or to each lane; ties go to even, NaN stays NaN.

    The processor's instruction turns subnormal numbers into zeros, as the products would; without it, they are rounded
    like others.
    """
    bits, halves = _like(reals.type, I32), _like(reals.type, I16)
    if has_avx512_bfloat16() and reals.type == REALS:
        return call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", halves, [reals])
    given, half = builder.bitcast(reals, bits), constant(bits, 16)
    odd = builder.and_(builder.lshr(given, half), constant(bits, 1))
    nearest = builder.add(builder.add(given, constant(bits, 0x7FFF)), odd)
    # Rounding up could turn a NaN into infinity or change its sign: a NaN keeps its upper half and becomes quiet.
    nan = builder.icmp_unsigned(">", builder.and_(given, constant(bits, 0x7FFFFFFF)), constant(bits, 0x7F800000))
    rounded = builder.select(nan, builder.or_(given, constant(bits, 0x00400000)), nearest)
    return builder.trunc(builder.lshr(rounded, half), halves)


def widen(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """Return a bfloat16 number or each lane, given as 16 bits, as float32, which is exact."""
    bits = _like(halves.type, I32)
    wide = builder.shl(builder.zext(halves, bits), constant(bits, 16))
    return builder.bitcast(wide, _like(halves.type, F32))


def _transposed_quads(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Transpose every four lanes of four rows: lane 4 q + i of vector l is lane 4 q + l of row i."""
    lanes = rows[0].type.count

    def interleave(left: ir.Value, right: ir.Value, unit: int, upper: int) -> ir.Value:
        # In each four lanes the lower or upper `unit`s of both, in turn: one instruction on x86.
        firsts = [quad + first for quad in range(0, lanes, 4) for first in range(2 * upper, 2 * upper + 2, unit)]
        order = [base + first + lane for first in firsts for base in (0, lanes) for lane in range(unit)]
        return shuffle(builder, left, right, order)

    a, b, c, d = rows
    pairs = [[interleave(*two, 1, upper) for upper in (0, 1)] for two in ((a, b), (c, d))]
    return [interleave(pairs[0][half], pairs[1][half], 2, upper) for half in (0, 1) for upper in (0, 1)]


def _transposed_by_quads(builder: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """Transpose groups of four lanes, as many per vector as there are vectors: group g of q becomes group q of g."""
    if len(vectors) == 1:
        return vectors
    lanes = vectors[0].type.count
    parts = []
    for odd in (0, 4):
        order = [quad + odd + lane for quad in range(0, 2 * lanes, 8) for lane in range(4)]
        every_other = [shuffle(builder, *two, order) for two in zip(vectors[::2], vectors[1::2], strict=True)]
        parts.append(_transposed_by_quads(builder, every_other))
    return [vector for two in zip(*parts, strict=True) for vector in two]


def transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Return the columns of a square of numbers, with as many rows as lanes (4, 8 or 16)."""
    quads = [_transposed_quads(builder, rows[first : first + 4]) for first in range(0, len(rows), 4)]
    by_lane = [_transposed_by_quads(builder, [quad[lane] for quad in quads]) for lane in range(4)]
    return [vectors[quad] for quad in range(len(quads)) for vectors in by_lane]


def row_masks(builder: ir.IRBuilder, rows: ir.Value, columns: ir.Value, lanes: int = LANES) -> list[ir.Value]:
    """Return a mask for each row of a square: `columns` lanes for each of the first `rows` rows, none for others."""
    mask = below(builder, columns, lanes=lanes)
    nothing = constant(mask.type, 0)
    return [builder.select(builder.icmp_signed("<", whole(row), rows), mask, nothing) for row in range(lanes)]


def transpose_masked(
    builder: ir.IRBuilder,
    source: ir.Value,
    step: ir.Value,
    target: ir.Value,
    target_step: ir.Value,
    masks: list[ir.Value],
    target_masks: list[ir.Value],
    element: ir.Type = F32,
) -> None:
    """Write the transpose of a square of numbers, whose rows lie some bytes apart. What the masks of the source's rows
    leave out counts as zero; what those of the target's rows leave out is not changed.
    """
    kind = ir.VectorType(element, len(masks))
    rows = [load_masked(builder, source, builder.mul(step, whole(row)), mask, kind) for row, mask in enumerate(masks)]
    for row, (mask, value) in enumerate(zip(target_masks, transposed(builder, rows), strict=True)):
        store_masked(builder, value, target, builder.mul(target_step, whole(row)), mask)


@intrinsic
def transpose_square(typing_context, like, source, step, rows, columns, target, target_step, width):
    """Write the transpose of 16 x 16 numbers of the type of `like`, of which rows x columns exist: zeros beyond `rows`
    of the source, up to `width` numbers in a row of the target.
    """

    def generate(context, builder, signature, arguments):
        _, source, step, rows, columns, target, target_step, width = arguments
        masks = row_masks(builder, rows, columns), row_masks(builder, columns, width)
        transpose_masked(builder, source, step, target, target_step, *masks, context.get_value_type(like))
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 7), generate


@intrinsic
def address_of(typing_context, array):
    """Return the address of the first element of an array."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, I64)

    return types.int64(array), generate


def _element(builder, address, index, kind):
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


@intrinsic
def read(typing_context, address, index, like):
    """Return number `index` of the numbers at an address, which have the type of `like`."""

    def generate(context, builder, signature, arguments):
        return builder.load(_element(builder, arguments[0], arguments[1], context.get_value_type(like)))

    return like(types.int64, types.int64, like), generate


@intrinsic
def write(typing_context, address, index, value):
    """Set number `index` of the numbers at an address, which have the type of `value`."""

    def generate(context, builder, signature, arguments):
        address, index, value = arguments
        builder.store(value, _element(builder, address, index, value.type))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value), generate


@instruction("n n", "s")
def read_real(builder, address, index):
    """Return number `index` of the float32 numbers at an address."""
    return builder.load(_element(builder, address, index, F32))


@instruction("n n s")
def write_real(builder, address, index, value):
    """Set number `index` of the float32 numbers at an address."""
    builder.store(value, _element(builder, address, index, F32))
