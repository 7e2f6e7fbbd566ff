"""Functions of the float32 product that copy and transpose parts of its operands, as LLVM code.

Addresses and distances are in bytes.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from daskgpt.kernels.float32.registers import LANES, MASK, REALS, VECTOR
from daskgpt.kernels.vectors.lanes import (
    F32,
    I8,
    POINTER,
    at,
    below,
    constant,
    load_masked,
    shuffle,
    splat,
    store,
    store_masked,
    transposed,
    whole,
)


def _row_masks(builder: Any, rows: Any, columns: Any) -> list[Any]:
    """For each row of a square: its first `columns` lanes if it is one of the first `rows`, else none."""
    mask, nothing = below(builder, columns, lanes=LANES), constant(MASK, 0)
    return [builder.select(builder.icmp_signed("<", whole(row), rows), mask, nothing) for row in range(LANES)]


def transpose_body(builder: Any, *arguments: Any) -> None:
    source, step, rows, columns, target, target_step, target_rows, target_columns, beta = arguments
    source, target = (builder.inttoptr(address, POINTER) for address in (source, target))
    sources, targets = (
        [at(builder, start, builder.mul(step, whole(row)), I8) for row in range(LANES)]
        for start, step in ((source, step), (target, target_step))
    )
    missing = builder.icmp_signed("<", rows, whole(LANES))
    for count in (columns, target_rows, target_columns):
        missing = builder.or_(missing, builder.icmp_signed("<", count, whole(LANES)))
    with builder.if_else(missing) as (edge, inside):
        with edge:
            masks, target_masks = _row_masks(builder, rows, columns), _row_masks(builder, target_rows, target_columns)
            _transpose_patch(builder, sources, targets, masks, target_masks, beta)
        with inside:
            masks = [constant(MASK, 1)] * LANES
            _transpose_patch(builder, sources, targets, masks, masks, beta)


def _transpose_patch(
    builder: Any, sources: list[Any], targets: list[Any], masks: list[Any], target_masks: list[Any], beta: Any
) -> None:
    values = transposed(
        builder, [load_masked(builder, row, 0, mask, REALS) for row, mask in zip(sources, masks, strict=True)]
    )
    parts = list(zip(targets, target_masks, values, strict=True))
    with builder.if_else(builder.fcmp_ordered("==", beta, ir.Constant(F32, 0.0))) as (write, add):
        with write:
            for place, mask, value in parts:
                store_masked(builder, value, place, 0, mask)
        with add:
            scale = splat(builder, beta, LANES)
            for place, mask, value in parts:
                old = builder.fmul(load_masked(builder, place, 0, mask, REALS), scale)
                store_masked(builder, builder.fadd(old, value), place, 0, mask)


def copy_body(width: int) -> Callable[..., None]:
    def body(builder: Any, source: Any, step: Any, rows: Any, columns: Any, target: Any) -> None:
        source, target = (builder.inttoptr(address, POINTER) for address in (source, target))
        masks = [below(builder, columns, LANES * part, LANES) for part in range(width)]
        with cgutils.for_range(builder, rows) as loop:
            start, end = builder.mul(loop.index, step), builder.mul(loop.index, whole(VECTOR * width))
            for part in range(width):
                value = load_masked(builder, source, builder.add(start, whole(VECTOR * part)), masks[part], REALS)
                store(builder, value, target, builder.add(end, whole(VECTOR * part)))

    return body


def copy_halves_body(builder: Any, *arguments: Any) -> None:
    source, step, rows, columns, target, distance = arguments
    source, target = (builder.inttoptr(address, POINTER) for address in (source, target))
    mask, half = below(builder, columns, lanes=LANES), LANES // 2
    with cgutils.for_range(builder, rows) as loop:
        value = load_masked(builder, source, builder.mul(loop.index, step), mask, REALS)
        place = builder.mul(loop.index, whole(VECTOR // 2))
        for first in (0, half):
            store(builder, shuffle(builder, value, value, list(range(first, first + half))), target, place)
            place = builder.add(place, distance)
