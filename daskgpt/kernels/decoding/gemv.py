"""Dot products of rows of a matrix with a few vectors: each row is read once, and the next rows are fetched ahead.

A product sums in 16 lanes, number l, l + 16, l + 32 ... in lane l, which meet in a tree (`rows.folded`), whatever
the number of rows and vectors that are multiplied together. Vectors end with zeros, up to a multiple of 16 numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from daskgpt.kernels.compilation import instruction, part, stay_apart, wide_vectors
from daskgpt.kernels.simd import lanes
from daskgpt.kernels.simd.lanes import LANES, REALS
from daskgpt.kernels.simd.rows import folded

# Rows that are worked on together; a tile multiplies all of them by one vector, or a few of them by a few vectors.
ROWS = 8
_LINE = 64
TILE_ROWS, TILE_VECTORS = (4, 4) if lanes.has_avx512() else (2, 2)  # sums that fit the registers


def _tile(builder: ir.IRBuilder, values: list[ir.Value], rows: int, vectors: int, halves: bool) -> None:
    """Write the code of rows x vectors dot products, see `_of`."""
    place, pitch, count, xs, x_pitch, out, out_pitch, ahead, all_of_it = values
    kind, size = (lanes.HALVES, 2) if halves else (REALS, 4)
    sums = [[cgutils.alloca_once(builder, REALS) for _ in range(vectors)] for _ in range(rows)]
    for totals in sums:
        for total in totals:
            builder.store(lanes.constant(REALS, 0.0), total)
    row_places = [builder.add(place, builder.mul(pitch, lanes.whole(row))) for row in range(rows)]
    vector_places = [builder.add(xs, builder.mul(x_pitch, lanes.whole(number))) for number in range(vectors)]

    def add(index: ir.Value, load: Callable[..., ir.Value]) -> None:
        offset, x_offset = (builder.mul(index, lanes.whole(LANES * bytes_of)) for bytes_of in (size, 4))
        x = [lanes.load(builder, factor, x_offset) for factor in vector_places]
        for row, totals in zip(row_places, sums, strict=True):
            numbers = load(builder, row, offset, kind=kind)
            weight = lanes.widen(builder, numbers) if halves else numbers
            for factor, total in zip(x, totals, strict=True):
                builder.store(lanes.fma(builder, weight, factor, builder.load(total)), total)

    lines = max(rows * LANES * size // _LINE, 1)  # cache lines that a pass multiplies and fetches
    fewer = (lines + 1) // 2
    all_lines = builder.icmp_signed("!=", all_of_it, lanes.whole(0))
    fetched = builder.select(all_lines, lanes.whole(lines), lanes.whole(fewer))
    with cgutils.for_range(builder, builder.lshr(count, lanes.whole(4))) as loop:
        first = builder.add(ahead, builder.mul(loop.index, builder.mul(fetched, lanes.whole(_LINE))))
        for line in range(fewer):
            lanes.prefetch(builder, first, line * _LINE)
        with builder.if_then(builder.icmp_signed(">", fetched, lanes.whole(fewer))):
            for line in range(fewer, lines):
                lanes.prefetch(builder, first, line * _LINE)
        add(loop.index, lanes.load)
    rest = builder.and_(count, lanes.whole(LANES - 1))
    with builder.if_then(builder.icmp_signed("!=", rest, lanes.whole(0))):
        add(builder.lshr(count, lanes.whole(4)), partial(lanes.load_masked, mask=lanes.below(builder, rest)))
    for row, totals in enumerate(sums):
        for number, total in enumerate(totals):
            offset = builder.add(builder.mul(out_pitch, lanes.whole(number)), lanes.whole(4 * row))
            lanes.store(builder, folded(builder, builder.load(total)), out, offset)


def either(builder: ir.IRBuilder, halves: ir.Value, build: Callable[[bool], None]) -> None:
    """Build code for both dtypes of rows: bfloat16 runs where `halves` is not 0, float32 where it is 0."""
    with builder.if_else(builder.icmp_signed("!=", halves, lanes.whole(0))) as branches:
        for branch, chosen in zip(branches, (True, False)):
            with branch:
                build(chosen)


def _of(rows: int, vectors: int) -> Any:
    """Return an intrinsic of (halves, place, pitch, count, xs, x_pitch, out, out_pitch, ahead, all_of_it), all 64 bits.

    Row r lies at place + r pitch, `count` numbers long; vector m at xs + m x_pitch; their product goes to
    out + m out_pitch + 4 r. As many bytes as are read are fetched from `ahead`, or half as many unless `all_of_it`.
    """

    @instruction("n n n n n n n n n n")
    def products(builder, halves, place, pitch, count, xs, x_pitch, out, out_pitch, ahead, all_of_it):
        values = [place, pitch, count, xs, x_pitch, out, out_pitch, ahead, all_of_it]
        either(builder, halves, lambda chosen: _tile(builder, values, rows, vectors, chosen))

    return products


_column, _square, _single = _of(ROWS, 1), _of(TILE_ROWS, TILE_VECTORS), _of(1, 1)


@part
def rows_times_vectors(halves, rows, place, pitch, count, xs, x_pitch, vectors, out, out_pitch, ahead):
    """Multiply up to ROWS rows by the vectors; `ahead` is the address of the next rows.

    halves   whether the rows are bfloat16, else float32
    """
    stay_apart()
    wide_vectors()
    if rows < ROWS:
        for m in range(vectors):
            for r in range(rows):
                x, y, row = xs + m * x_pitch, out + m * out_pitch + 4 * r, place + r * pitch
                _single(halves, row, pitch, count, x, x_pitch, y, out_pitch, row, 1)
        return
    squares = vectors // TILE_VECTORS * TILE_VECTORS
    for m in range(0, squares, TILE_VECTORS):
        for r in range(0, ROWS, TILE_ROWS):
            row = place + r * pitch
            x, y = xs + m * x_pitch, out + m * out_pitch + 4 * r
            # Two groups of vectors fetch half of the next rows each; further groups fetch what is in the cache already.
            half, alone = m // TILE_VECTORS, 1 if squares == TILE_VECTORS else 0
            then = (ahead if half < 2 else place) + r * pitch + (half & 1) * (TILE_ROWS * pitch // 2)
            _square(halves, row, pitch, count, x, x_pitch, y, out_pitch, then, alone)
    m = squares
    while m < vectors:
        then = ahead if m == 0 else place
        _column(halves, place, pitch, count, xs + m * x_pitch, x_pitch, out + m * out_pitch, out_pitch, then, 1)
        m += 1
