"""LLVM code of the float32 product: tiles of sums in AVX-512 registers, and packing and transposing of what they read.

Addresses and distances are in bytes. The functions stand in a table, and what calls them gets its address: Numba
compiles a helper with everything that it calls, and these would be compiled once more for every helper. On a processor
without AVX-512 the table is empty; `sgemm` sees to it that it is not used.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
VECTOR = 4 * LANES
# How a tile reads its left operand.
BY_ROWS, BY_COLUMNS, BY_ROWS_PACKING = 0, 1, 2
# Rows and vectors of the largest tile: 24 registers of sums, 3 of the right operand, 1 of the left.
ROWS, WIDTH = 8, 3
_ROWS = (1, 2, 4, 8)
_WIDTHS = (1, 2, 3)
# Steps along the summed axis between two looks ahead: a cache line of float32.
_LINE = 16
_UNROLL = 4

_I1, _I8, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_F32, _VOID = ir.FloatType(), ir.VoidType()
_POINTER = _I8.as_pointer()
_REALS = ir.VectorType(_F32, LANES)
_MASK = ir.VectorType(_I1, LANES)

_TILE_KINDS, _TRANSPOSE_KINDS, _COPY_KINDS = [_I64] * 12 + [_F32] * 2, [_I64] * 8 + [_F32], [_I64] * 5
_int, _real = types.int64, types.float32


@functools.cache
def has_avx512() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))


def _whole(number: int) -> ir.Constant:
    return ir.Constant(_I64, number)


def _at(builder: Any, pointer: Any, offset: Any, kind: Any) -> Any:
    """Pointer to a value of `kind`, `offset` bytes on."""
    if isinstance(offset, int):
        offset = _whole(offset)
    place = builder.gep(pointer, [offset], source_etype=_I8)
    return builder.bitcast(place, kind.as_pointer())


def _load(builder: Any, pointer: Any, offset: Any, kind: Any = _REALS) -> Any:
    return builder.load(_at(builder, pointer, offset, kind), align=4)


def _store(builder: Any, value: Any, pointer: Any, offset: Any) -> None:
    builder.store(value, _at(builder, pointer, offset, value.type), align=4)


def _splat(builder: Any, value: Any) -> Any:
    lanes = builder.insert_element(ir.Constant(_REALS, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _fma(builder: Any, left: Any, right: Any, total: Any) -> Any:
    kind = ir.FunctionType(_REALS, [_REALS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [left, right, total])


def _prefetch(builder: Any, pointer: Any, offset: Any, write: bool, locality: int) -> None:
    kind = ir.FunctionType(_VOID, [_POINTER, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    place = builder.gep(pointer, [_whole(offset) if isinstance(offset, int) else offset], source_etype=_I8)
    builder.call(function, [place, *(ir.Constant(_I32, number) for number in (0, locality, 1))])


def _function(module: Any, name: str, kinds: list[Any], body: Callable[..., None]) -> Any:
    """The module's own function of this name, made at its first use."""
    found = module.globals.get(name)
    if found is None:
        found = ir.Function(module, ir.FunctionType(_VOID, kinds), name)
        found.linkage = "internal"
        found.attributes.add("noinline")
        builder = ir.IRBuilder(found.append_basic_block("entry"))
        body(builder, *found.args)
        builder.ret_void()
    return found


class _Tile:
    """Code of rows x (16 width) sums: alpha * left @ right + beta * what was there.

    A left operand by rows has its summed axis contiguous, one by columns its rows; left_step is the distance along the
    other axis. A tile that packs also leaves the right operand's vectors behind, one after the other.
    """

    def __init__(self, kind: int, rows: int, width: int) -> None:
        self.by_columns, self.packs, self.rows, self.width = kind == BY_COLUMNS, kind == BY_ROWS_PACKING, rows, width
        self.name = f"sgemm_tile_{kind}_{rows}_{width}"
        self.places = [(row, part) for row in range(rows) for part in range(width)]

    def function(self, module: Any) -> Any:
        return _function(module, self.name, _TILE_KINDS, self._body)

    def _body(self, builder: Any, *arguments: Any) -> None:
        self.builder = builder
        steps, left, self.left_step, right, self.right_step, packed, total, total_step, *rest = arguments
        ahead, ahead_count, ahead_lines, ahead_step, alpha, beta = rest
        self.left, self.right, self.packed = (
            cgutils.alloca_once_value(builder, builder.inttoptr(address, _POINTER)) for address in (left, right, packed)
        )
        self.ahead, self.line = (
            cgutils.alloca_once_value(builder, ahead),
            cgutils.alloca_once_value(builder, ahead_lines),
        )
        zero = ir.Constant(_REALS, [0.0] * LANES)
        self.sums = {place: cgutils.alloca_once_value(builder, zero) for place in self.places}
        with cgutils.for_range(builder, builder.lshr(steps, _whole(4))):
            self._look_ahead(ahead_count, ahead_lines, ahead_step)
            with cgutils.for_range(builder, _whole(_LINE // _UNROLL)):
                self._multiply(_UNROLL)
        with cgutils.for_range(builder, builder.and_(steps, _whole(_LINE - 1))):
            self._multiply(1)
        self._finish(builder.inttoptr(total, _POINTER), total_step, alpha, beta)

    def _move(self, variable: Any, offset: Any) -> None:
        place = self.builder.gep(self.builder.load(variable), [offset], source_etype=_I8)
        self.builder.store(place, variable)

    def _look_ahead(self, count: Any, lines: Any, step: Any) -> None:
        """Fetch the next `count` lines of a rectangle of `lines` lines a row."""
        builder = self.builder
        beyond = builder.sub(step, builder.shl(lines, _whole(6)))
        with cgutils.for_range(builder, count):
            place, line = builder.load(self.ahead), builder.sub(builder.load(self.line), _whole(1))
            _prefetch(builder, builder.inttoptr(place, _POINTER), 0, False, 2)
            last = builder.icmp_signed("==", line, _whole(0))
            place = builder.add(place, builder.select(last, builder.add(beyond, _whole(64)), _whole(64)))
            builder.store(place, self.ahead)
            builder.store(builder.select(last, lines, line), self.line)

    def _multiply(self, count: int) -> None:
        builder = self.builder
        for step in range(count):
            left, right = builder.load(self.left), builder.load(self.right)
            columns = [_load(builder, right, VECTOR * part) for part in range(self.width)]
            if self.packs:
                for part in range(self.width):
                    _store(builder, columns[part], builder.load(self.packed), VECTOR * part)
                self._move(self.packed, _whole(VECTOR * self.width))
            for row in range(self.rows):
                offset = (
                    4 * row
                    if self.by_columns
                    else builder.add(builder.mul(self.left_step, _whole(row)), _whole(4 * step))
                )
                value = _splat(builder, _load(builder, left, offset, _F32))
                for part in range(self.width):
                    place = self.sums[row, part]
                    builder.store(_fma(builder, value, columns[part], builder.load(place)), place)
            if self.by_columns:
                self._move(self.left, self.left_step)
            self._move(self.right, self.right_step)
        if not self.by_columns:
            self._move(self.left, _whole(4 * count))

    def _finish(self, total: Any, total_step: Any, alpha: Any, beta: Any) -> None:
        builder = self.builder
        alpha, scale = _splat(builder, alpha), _splat(builder, beta)
        places = {
            (row, part): builder.add(builder.mul(total_step, _whole(row)), _whole(VECTOR * part))
            for row, part in self.places
        }
        sums = {place: builder.fmul(builder.load(self.sums[place]), alpha) for place in self.places}
        fresh = builder.fcmp_ordered("==", beta, ir.Constant(_F32, 0.0))
        with builder.if_else(fresh) as (write, add):
            with write:
                for place in self.places:
                    _store(builder, sums[place], total, places[place])
            with add:
                for place in self.places:
                    old = builder.fmul(_load(builder, total, places[place]), scale)
                    _store(builder, builder.fadd(old, sums[place]), total, places[place])


def _interleave(builder: Any, left: Any, right: Any, unit: int, upper: int) -> Any:
    """vunpck: in each quarter of the vectors, the lower or upper units of both, in turn."""
    order = []
    for quarter in range(0, LANES, 4):
        for first in range(2 * upper, 2 * upper + 2, unit):
            for base in (0, LANES):
                order += [base + quarter + first + lane for lane in range(unit)]
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, LANES), order))


def _quarters(builder: Any, left: Any, right: Any, order: tuple[int, ...]) -> Any:
    """vshuff32x4: four quarters of the two vectors, numbered 0 to 7."""
    lanes = [4 * quarter + lane for quarter in order for lane in range(4)]
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, LANES), lanes))


def _transposed_quarters(builder: Any, rows: list[Any]) -> Iterator[list[Any]]:
    """For every four rows: four vectors; quarter q of vector l holds column 4 q + l of the four rows."""
    for first in range(0, len(rows), 4):
        a, b, c, d = rows[first : first + 4]
        pairs = [[_interleave(builder, *two, 1, upper) for upper in (0, 1)] for two in ((a, b), (c, d))]
        yield [_interleave(builder, pairs[0][half], pairs[1][half], 2, upper) for half in (0, 1) for upper in (0, 1)]


def _below(builder: Any, count: Any, first: int = 0) -> Any:
    """Which of the lanes first .. first + 15 are below count."""
    kind = ir.VectorType(_I32, LANES)
    limit = builder.trunc(count, _I32)
    limits = builder.insert_element(ir.Constant(kind, ir.Undefined), limit, ir.Constant(_I32, 0))
    limits = builder.shuffle_vector(limits, limits, ir.Constant(kind, [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(kind, [first + lane for lane in range(LANES)]), limits)


def _load_masked(builder: Any, place: Any, mask: Any) -> Any:
    kind = ir.FunctionType(_REALS, [_POINTER, _I32, _MASK, _REALS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v16f32.p0")
    return builder.call(function, [place, ir.Constant(_I32, 4), mask, ir.Constant(_REALS, [0.0] * LANES)])


def _store_masked(builder: Any, value: Any, place: Any, mask: Any) -> None:
    kind = ir.FunctionType(_VOID, [_REALS, _POINTER, _I32, _MASK])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16f32.p0")
    builder.call(function, [value, place, ir.Constant(_I32, 4), mask])


def _row_masks(builder: Any, rows: Any, columns: Any) -> list[Any]:
    """For each of 16 rows: its first `columns` lanes if it is one of the first `rows`, else none."""
    mask, nothing = _below(builder, columns), ir.Constant(_MASK, [0] * LANES)
    return [builder.select(builder.icmp_signed("<", _whole(row), rows), mask, nothing) for row in range(LANES)]


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    groups = list(_transposed_quarters(builder, rows))
    columns = []
    for quarter in range(4):
        order = (0, 1, 4, 5) if quarter < 2 else (2, 3, 6, 7)
        odd = quarter % 2
        for lane in range(4):
            w, x, y, z = (group[lane] for group in groups)
            halves = _quarters(builder, w, x, order), _quarters(builder, y, z, order)
            columns.append(_quarters(builder, *halves, (odd, 2 + odd, 4 + odd, 6 + odd)))
    return columns


def _transpose_body(builder: Any, *arguments: Any) -> None:
    source, step, rows, columns, target, target_step, target_rows, target_columns, beta = arguments
    source, target = (builder.inttoptr(address, _POINTER) for address in (source, target))
    sources, targets = (
        [builder.gep(start, [builder.mul(step, _whole(row))], source_etype=_I8) for row in range(LANES)]
        for start, step in ((source, step), (target, target_step))
    )
    missing = builder.icmp_signed("<", rows, _whole(LANES))
    for count in (columns, target_rows, target_columns):
        missing = builder.or_(missing, builder.icmp_signed("<", count, _whole(LANES)))
    with builder.if_else(missing) as (part, whole):
        with part:
            masks = _row_masks(builder, rows, columns), _row_masks(builder, target_rows, target_columns)
            _transpose_block(builder, sources, targets, *masks, beta)
        with whole:
            masks = [ir.Constant(_MASK, [1] * LANES)] * LANES
            _transpose_block(builder, sources, targets, masks, masks, beta)


def _transpose_block(
    builder: Any, sources: list[Any], targets: list[Any], masks: list[Any], target_masks: list[Any], beta: Any
) -> None:
    values = _transposed(builder, [_load_masked(builder, *each) for each in zip(sources, masks, strict=True)])
    parts = list(zip(targets, target_masks, values, strict=True))
    with builder.if_else(builder.fcmp_ordered("==", beta, ir.Constant(_F32, 0.0))) as (write, add):
        with write:
            for place, mask, value in parts:
                _store_masked(builder, value, place, mask)
        with add:
            scale = _splat(builder, beta)
            for place, mask, value in parts:
                old = builder.fmul(_load_masked(builder, place, mask), scale)
                _store_masked(builder, builder.fadd(old, value), place, mask)


def _copy_body(width: int) -> Callable[..., None]:
    def body(builder: Any, source: Any, step: Any, rows: Any, columns: Any, target: Any) -> None:
        source, target = (builder.inttoptr(address, _POINTER) for address in (source, target))
        masks = [_below(builder, columns, LANES * part) for part in range(width)]
        with cgutils.for_range(builder, rows) as loop:
            start, end = builder.mul(loop.index, step), builder.mul(loop.index, _whole(VECTOR * width))
            for part in range(width):
                place = builder.gep(source, [builder.add(start, _whole(VECTOR * part))], source_etype=_I8)
                value = _load_masked(builder, place, masks[part])
                _store(builder, value, target, builder.add(end, _whole(VECTOR * part)))

    return body


# Where the functions stand in the table.
_TRANSPOSE = 0


def _number(kind: Any, rows: Any, width: Any) -> Any:
    """Of a tile; 1, 2 and 3 copy rows of so many vectors."""
    return kind * 64 + rows * 4 + width


def _functions(module: Any) -> Iterator[tuple[int, Any]]:
    yield _TRANSPOSE, _function(module, "sgemm_transpose", _TRANSPOSE_KINDS, _transpose_body)
    for width in _WIDTHS:
        yield width, _function(module, f"sgemm_copy_{width}", _COPY_KINDS, _copy_body(width))
        for rows in _ROWS:
            for kind in (BY_ROWS, BY_COLUMNS, BY_ROWS_PACKING)[: 3 if rows == ROWS else 2]:
                yield _number(kind, rows, width), _Tile(kind, rows, width).function(module)


@intrinsic
def code(typing_context):
    """Address of the table of all functions; only what asks for it is compiled together with them."""

    def generate(context, builder, signature, arguments):
        if not has_avx512():
            return _whole(0)
        functions = dict(_functions(builder.module))
        kind = ir.ArrayType(_POINTER, max(functions) + 1)
        empty = ir.Constant(_POINTER, None)
        entries = [
            functions[number].bitcast(_POINTER) if number in functions else empty for number in range(kind.count)
        ]
        table = ir.GlobalVariable(builder.module, kind, "sgemm_code")
        table.linkage, table.global_constant, table.initializer = "internal", True, ir.Constant(kind, entries)
        return builder.ptrtoint(table, _I64)

    return _int(), generate


def _call(builder: Any, table: Any, number: Any, kinds: list[Any], arguments: list[Any]) -> None:
    place = builder.add(table, builder.shl(number, _whole(3)))
    function = builder.load(builder.inttoptr(place, _POINTER.as_pointer()))
    builder.call(builder.bitcast(function, ir.FunctionType(_VOID, kinds).as_pointer()), arguments)


@intrinsic
def multiply(
    typing_context, code, kind, rows, width, steps, operands, ahead, ahead_count, ahead_lines, ahead_step, alpha, beta
):
    """`rows` (1, 2, 4 or 8) x 16 `width` (1, 2, 3) numbers at total = alpha * left @ right + beta * those numbers.

    operands: left, left_step, right, right_step, where to pack the right one, total, total_step.
    """

    def generate(context, builder, signature, arguments):
        code, kind, rows, width, steps, operands, *rest = arguments
        number = builder.add(builder.shl(kind, _whole(6)), builder.add(builder.shl(rows, _whole(2)), width))
        values = [steps, *cgutils.unpack_tuple(builder, operands), *rest]
        _call(builder, code, number, _TILE_KINDS, values)
        return context.get_dummy_value()

    return types.void(*[_int] * 5, types.UniTuple(_int, 7), *[_int] * 4, _real, _real), generate


@intrinsic
def transpose(typing_context, code, operands, target, target_step, target_rows, target_columns, beta):
    """16 x 16 numbers at target = those at source, transposed, + beta * what was there.

    operands: source, its step, rows and columns; beyond them it counts as zero. Beyond its own, target is not touched.
    """

    def generate(context, builder, signature, arguments):
        code, operands, *rest = arguments
        values = [*cgutils.unpack_tuple(builder, operands), *rest]
        _call(builder, code, _whole(_TRANSPOSE), _TRANSPOSE_KINDS, values)
        return context.get_dummy_value()

    return types.void(_int, types.UniTuple(_int, 4), *[_int] * 4, _real), generate


@intrinsic
def copy_rows(typing_context, code, width, source, step, rows, columns, target):
    """`rows` rows of 16 `width` numbers, one after the other at target; beyond `columns` of source they are zero."""

    def generate(context, builder, signature, arguments):
        code, width, *rest = arguments
        _call(builder, code, width, _COPY_KINDS, rest)
        return context.get_dummy_value()

    return types.void(*[_int] * 7), generate


# Places for addresses of free scratch memory, for all threads. A call takes one out and puts it back: fresh memory
# would cost a page fault every 4 KB, and memory of each thread's own a look-up that compiled code does not have.
SLOTS = 64


@intrinsic
def slots(typing_context):
    """Address of the slots. For the function at the top alone: every function that asks gets slots of its own."""

    def generate(context, builder, signature, arguments):
        kind = ir.ArrayType(_I64, SLOTS)
        places = ir.GlobalVariable(builder.module, kind, "sgemm_slots")
        places.linkage, places.initializer = "internal", ir.Constant(kind, None)
        return builder.ptrtoint(places, _I64)

    return _int(), generate


@intrinsic
def take_slot(typing_context, slot):
    """The address in the slot at an address, which is empty (0) afterwards."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("xchg", builder.inttoptr(arguments[0], _I64.as_pointer()), _whole(0), "acquire")

    return _int(_int), generate


@intrinsic
def fill_slot(typing_context, slot, address):
    """Put an address into the slot at an address; whether the slot was empty. Otherwise nothing happens."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        result = builder.cmpxchg(place, _whole(0), arguments[1], "acq_rel", "acquire")
        return builder.zext(builder.extract_value(result, 1), _I64)

    return _int(_int, _int), generate


@intrinsic
def allocate(typing_context, size):
    def generate(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_POINTER, [_I64]), "malloc")
        return builder.ptrtoint(builder.call(function, arguments), _I64)

    return _int(_int), generate


@intrinsic
def release(typing_context, address):
    def generate(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VOID, [_POINTER]), "free")
        builder.call(function, [builder.inttoptr(arguments[0], _POINTER)])
        return context.get_dummy_value()

    return types.void(_int), generate


@intrinsic
def load(typing_context, address):
    """The number at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], _F32.as_pointer()))

    return _real(_int), generate


@intrinsic
def store(typing_context, address, value):
    """Write a number to an address."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], _F32.as_pointer()))
        return context.get_dummy_value()

    return types.void(_int, _real), generate
