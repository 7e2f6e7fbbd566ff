"""Dot products of some rows of a matrix with some vectors: each row is read once, and memory fetched ahead.

A product sums in 16 lanes, number l, l + 16, l + 32 ... in lane l, which meet in a tree (`reductions.folded`), whatever
the number of rows and vectors that are multiplied together. Vectors end with zeros, up to a multiple of 16 numbers.
"""

from collections.abc import Callable
from typing import Any

from numba.core import cgutils

from daskgpt.kernels.compilation import part, stay_apart, wide_vectors
from daskgpt.kernels.simd.lanes import (
    HALVES,
    LANES,
    REALS,
    below,
    constant,
    fma,
    has_avx512,
    instruction,
    load,
    load_masked,
    prefetch,
    store,
    whole,
    widen,
)
from daskgpt.kernels.simd.reductions import folded

# Rows that are worked on together, and what of them is multiplied at once: all with one vector, or some with some.
ROWS = 8
_LINE = 64
TILE_ROWS, TILE_VECTORS = (4, 4) if has_avx512() else (2, 2)  # sums that fit the registers


def _tile(builder: Any, values: list[Any], rows: int, vectors: int, halves: bool) -> None:
    """rows x vectors dot products, see `_of`."""
    place, pitch, count, xs, x_pitch, out, out_pitch, ahead, all_of_it = values
    kind, size = (HALVES, 2) if halves else (REALS, 4)
    sums = [[cgutils.alloca_once(builder, REALS) for _ in range(vectors)] for _ in range(rows)]
    for total in (each for own in sums for each in own):
        builder.store(constant(REALS, 0.0), total)
    row_places = [builder.add(place, builder.mul(pitch, whole(row))) for row in range(rows)]
    vector_places = [builder.add(xs, builder.mul(x_pitch, whole(number))) for number in range(vectors)]

    def add(index: Any, mask: Any) -> None:
        offset, x_offset = (builder.mul(index, whole(LANES * bytes_of)) for bytes_of in (size, 4))
        x = [load(builder, each, x_offset) for each in vector_places]
        for row, own in zip(row_places, sums, strict=True):
            found = load(builder, row, offset, kind) if mask is None else load_masked(builder, row, offset, mask, kind)
            weight = widen(builder, found) if halves else found
            for each, total in zip(x, own, strict=True):
                builder.store(fma(builder, weight, each, builder.load(total)), total)

    lines = max(rows * LANES * size // _LINE, 1)  # that a pass of the loop multiplies, and fetches for later
    fetched = builder.select(builder.icmp_signed("!=", all_of_it, whole(0)), whole(lines), whole((lines + 1) // 2))
    fewer = (lines + 1) // 2
    with cgutils.for_range(builder, builder.lshr(count, whole(4))) as loop:
        first = builder.add(ahead, builder.mul(loop.index, builder.mul(fetched, whole(_LINE))))
        for line in range(fewer):
            prefetch(builder, first, line * _LINE)
        with builder.if_then(builder.icmp_signed(">", fetched, whole(fewer))):
            for line in range(fewer, lines):
                prefetch(builder, first, line * _LINE)
        add(loop.index, None)
    rest = builder.and_(count, whole(LANES - 1))
    with builder.if_then(builder.icmp_signed("!=", rest, whole(0))):
        add(builder.lshr(count, whole(4)), below(builder, rest))
    for row, own in enumerate(sums):
        for number, total in enumerate(own):
            store(
                builder,
                folded(builder, builder.load(total)),
                out,
                builder.add(builder.mul(out_pitch, whole(number)), whole(4 * row)),
            )


def either(builder: Any, halves: Any, build: Callable[[bool], None]) -> None:
    """Code for rows of bfloat16 where the number `halves` is not 0, and for rows of float32 where it is."""
    with builder.if_else(builder.icmp_signed("!=", halves, whole(0))) as branches:
        for branch, chosen in zip(branches, (True, False)):
            with branch:
                build(chosen)


def _of(rows: int, vectors: int) -> Any:
    """An intrinsic of (halves, place, pitch, count, xs, x_pitch, out, out_pitch, ahead, all_of_it), all of 64 bits.

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
    """The products of up to ROWS rows with some vectors; `ahead` is where the next rows lie.

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
            # Two groups of vectors fetch half of the next rows each, others what is there already.
            half, alone = m // TILE_VECTORS, 1 if squares == TILE_VECTORS else 0
            then = (ahead if half < 2 else place) + r * pitch + (half & 1) * (TILE_ROWS * pitch // 2)
            _square(halves, row, pitch, count, x, x_pitch, y, out_pitch, then, alone)
    m = squares
    while m < vectors:
        then = ahead if m == 0 else place
        _column(halves, place, pitch, count, xs + m * x_pitch, x_pitch, out + m * out_pitch, out_pitch, then, 1)
        m += 1
