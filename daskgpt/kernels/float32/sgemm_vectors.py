"""Pieces of LLVM code on vectors of 16 float32 numbers, and the functions that copy and transpose them.

Addresses and distances are in bytes.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

LANES = 16
VECTOR = 4 * LANES
I1, I8, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
F32, VOID = ir.FloatType(), ir.VoidType()
POINTER = I8.as_pointer()
REALS = ir.VectorType(F32, LANES)
MASK = ir.VectorType(I1, LANES)


@functools.cache
def has_avx512() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))


def whole(number: int) -> ir.Constant:
    return ir.Constant(I64, number)


def at(builder: Any, pointer: Any, offset: Any, kind: Any) -> Any:
    """Pointer to a value of `kind`, `offset` bytes on."""
    if isinstance(offset, int):
        offset = whole(offset)
    place = builder.gep(pointer, [offset], source_etype=I8)
    return builder.bitcast(place, kind.as_pointer())


def load_vector(builder: Any, pointer: Any, offset: Any, kind: Any = REALS) -> Any:
    return builder.load(at(builder, pointer, offset, kind), align=4)


def store_vector(builder: Any, value: Any, pointer: Any, offset: Any) -> None:
    builder.store(value, at(builder, pointer, offset, value.type), align=4)


def splat(builder: Any, value: Any) -> Any:
    lanes = builder.insert_element(ir.Constant(REALS, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def fma(builder: Any, left: Any, right: Any, total: Any) -> Any:
    kind = ir.FunctionType(REALS, [REALS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [left, right, total])


def prefetch(builder: Any, pointer: Any, offset: Any, write: bool, locality: int) -> None:
    kind = ir.FunctionType(VOID, [POINTER, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    place = builder.gep(pointer, [whole(offset) if isinstance(offset, int) else offset], source_etype=I8)
    builder.call(function, [place, *(ir.Constant(I32, number) for number in (0, locality, 1))])


def function(module: Any, name: str, kinds: list[Any], body: Callable[..., None]) -> Any:
    """The module's own function of this name, made at its first use."""
    found = module.globals.get(name)
    if found is None:
        found = ir.Function(module, ir.FunctionType(VOID, kinds), name)
        found.linkage = "internal"
        found.attributes.add("noinline")
        builder = ir.IRBuilder(found.append_basic_block("entry"))
        body(builder, *found.args)
        builder.ret_void()
    return found


def _interleave(builder: Any, left: Any, right: Any, unit: int, upper: int) -> Any:
    """vunpck: in each quarter of the vectors, the lower or upper units of both, in turn."""
    order = []
    for quarter in range(0, LANES, 4):
        for first in range(2 * upper, 2 * upper + 2, unit):
            for base in (0, LANES):
                order += [base + quarter + first + lane for lane in range(unit)]
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, LANES), order))


def _quarters(builder: Any, left: Any, right: Any, order: tuple[int, ...]) -> Any:
    """vshuff32x4: four quarters of the two vectors, numbered 0 to 7."""
    lanes = [4 * quarter + lane for quarter in order for lane in range(4)]
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, LANES), lanes))


def _transposed_quarters(builder: Any, rows: list[Any]) -> Iterator[list[Any]]:
    """For every four rows: four vectors; quarter q of vector l holds column 4 q + l of the four rows."""
    for first in range(0, len(rows), 4):
        a, b, c, d = rows[first : first + 4]
        pairs = [[_interleave(builder, *two, 1, upper) for upper in (0, 1)] for two in ((a, b), (c, d))]
        yield [_interleave(builder, pairs[0][half], pairs[1][half], 2, upper) for half in (0, 1) for upper in (0, 1)]


def _below(builder: Any, count: Any, first: int = 0) -> Any:
    """Which of the lanes first .. first + 15 are below count."""
    kind = ir.VectorType(I32, LANES)
    limit = builder.trunc(count, I32)
    limits = builder.insert_element(ir.Constant(kind, ir.Undefined), limit, ir.Constant(I32, 0))
    limits = builder.shuffle_vector(limits, limits, ir.Constant(kind, [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(kind, [first + lane for lane in range(LANES)]), limits)


def _load_masked(builder: Any, place: Any, mask: Any) -> Any:
    kind = ir.FunctionType(REALS, [POINTER, I32, MASK, REALS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v16f32.p0")
    return builder.call(function, [place, ir.Constant(I32, 4), mask, ir.Constant(REALS, [0.0] * LANES)])


def _store_masked(builder: Any, value: Any, place: Any, mask: Any) -> None:
    kind = ir.FunctionType(VOID, [REALS, POINTER, I32, MASK])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16f32.p0")
    builder.call(function, [value, place, ir.Constant(I32, 4), mask])


def _row_masks(builder: Any, rows: Any, columns: Any) -> list[Any]:
    """For each of 16 rows: its first `columns` lanes if it is one of the first `rows`, else none."""
    mask, nothing = _below(builder, columns), ir.Constant(MASK, [0] * LANES)
    return [builder.select(builder.icmp_signed("<", whole(row), rows), mask, nothing) for row in range(LANES)]


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


def transpose_body(builder: Any, *arguments: Any) -> None:
    source, step, rows, columns, target, target_step, target_rows, target_columns, beta = arguments
    source, target = (builder.inttoptr(address, POINTER) for address in (source, target))
    sources, targets = (
        [builder.gep(start, [builder.mul(step, whole(row))], source_etype=I8) for row in range(LANES)]
        for start, step in ((source, step), (target, target_step))
    )
    missing = builder.icmp_signed("<", rows, whole(LANES))
    for count in (columns, target_rows, target_columns):
        missing = builder.or_(missing, builder.icmp_signed("<", count, whole(LANES)))
    with builder.if_else(missing) as (edge, inside):
        with edge:
            masks, target_masks = _row_masks(builder, rows, columns), _row_masks(builder, target_rows, target_columns)
            _transpose_block(builder, sources, targets, masks, target_masks, beta)
        with inside:
            masks = [ir.Constant(MASK, [1] * LANES)] * LANES
            _transpose_block(builder, sources, targets, masks, masks, beta)


def _transpose_block(
    builder: Any, sources: list[Any], targets: list[Any], masks: list[Any], target_masks: list[Any], beta: Any
) -> None:
    values = _transposed(builder, [_load_masked(builder, *each) for each in zip(sources, masks, strict=True)])
    parts = list(zip(targets, target_masks, values, strict=True))
    with builder.if_else(builder.fcmp_ordered("==", beta, ir.Constant(F32, 0.0))) as (write, add):
        with write:
            for place, mask, value in parts:
                _store_masked(builder, value, place, mask)
        with add:
            scale = splat(builder, beta)
            for place, mask, value in parts:
                old = builder.fmul(_load_masked(builder, place, mask), scale)
                _store_masked(builder, builder.fadd(old, value), place, mask)


def copy_body(width: int) -> Callable[..., None]:
    def body(builder: Any, source: Any, step: Any, rows: Any, columns: Any, target: Any) -> None:
        source, target = (builder.inttoptr(address, POINTER) for address in (source, target))
        masks = [_below(builder, columns, LANES * part) for part in range(width)]
        with cgutils.for_range(builder, rows) as loop:
            start, end = builder.mul(loop.index, step), builder.mul(loop.index, whole(VECTOR * width))
            for part in range(width):
                place = builder.gep(source, [builder.add(start, whole(VECTOR * part))], source_etype=I8)
                value = _load_masked(builder, place, masks[part])
                store_vector(builder, value, target, builder.add(end, whole(VECTOR * part)))

    return body


def copy_halves_body(builder: Any, *arguments: Any) -> None:
    source, step, rows, columns, target, distance = arguments
    source, target = (builder.inttoptr(address, POINTER) for address in (source, target))
    mask, half, order = _below(builder, columns), LANES // 2, ir.VectorType(I32, LANES // 2)
    with cgutils.for_range(builder, rows) as loop:
        value = _load_masked(builder, builder.gep(source, [builder.mul(loop.index, step)], source_etype=I8), mask)
        place = builder.mul(loop.index, whole(VECTOR // 2))
        for first in (0, half):
            lanes = builder.shuffle_vector(value, value, ir.Constant(order, list(range(first, first + half))))
            store_vector(builder, lanes, target, place)
            place = builder.add(place, distance)
