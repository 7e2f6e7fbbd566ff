"""Products of a few vectors, which read every number once: with the rows of a weight, where the next rows are fetched
ahead; and attention of one query over kept keys and values.

A product with rows sums in 16 lanes, number l, l + 16, l + 32 ... in lane l, which meet in a tree (`rows.folded`),
whatever the number of rows and vectors that are multiplied together. Vectors end with zeros, up to a multiple of 16
numbers.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from daskgpt.kernels.compilation import helper, instruction, part, stay_apart, wide_vectors
from daskgpt.kernels.simd import lanes
from daskgpt.kernels.simd.lanes import LANES, REALS, address_of, read_real, write, write_real
from daskgpt.kernels.simd.math import exp, nearest_half
from daskgpt.kernels.simd.rows import folded, maximum, sum_of

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


# Kept keys of a head lie in groups of 64 positions, channel by channel, so that 64 scores are summed at a time; values
# lie position by position, with zeros up to a multiple of 16 channels. Both are read from one end to the other.
GROUP = 64


def _sums(builder: ir.IRBuilder, values: list[ir.Value], vectors: int, halves: bool) -> None:
    """Write code of out = sum over i of factor i times row i, of `vectors` times 16 numbers, at rows + i pitch."""
    factors, rows, pitch, count, out = values
    kind, size = (lanes.HALVES, 2) if halves else (REALS, 4)
    totals = [cgutils.alloca_once(builder, REALS) for _ in range(vectors)]
    for total in totals:
        builder.store(lanes.constant(REALS, 0.0), total)
    with cgutils.for_range(builder, count) as loop:
        factor = lanes.splat(builder, lanes.load(builder, factors, builder.shl(loop.index, lanes.whole(2)), lanes.F32))
        row = builder.add(rows, builder.mul(loop.index, pitch))
        for number, total in enumerate(totals):
            numbers = lanes.load(builder, row, number * LANES * size, kind)
            real = lanes.widen(builder, numbers) if halves else numbers
            builder.store(lanes.fma(builder, factor, real, builder.load(total)), total)
    for number, total in enumerate(totals):
        lanes.store(builder, builder.load(total), out, number * LANES * 4)


def _sums_of(vectors: int) -> Any:
    @instruction("n n n n n n")
    def sums(builder, halves, factors, rows, pitch, count, out):
        either(builder, halves, lambda chosen: _sums(builder, [factors, rows, pitch, count, out], vectors, chosen))

    return sums


_four, _one = _sums_of(4), _sums_of(1)


@helper
def keep(halves, numbers, kept, values, head, position, size, capacity, width):
    """Store the key, or with `values` the value, of one head of a token.

    numbers   address of `size` float32 numbers
    kept      address of the kept keys or values of all heads of all texts, of which this is number `head`
    """
    step, index = 1, (head * capacity + position) * width
    if not values:
        step, index = GROUP, (head * capacity + position // GROUP * GROUP) * size + position % GROUP
    for i in range(size):
        number = read_real(numbers, i)
        if halves:
            write(kept, index + i * step, nearest_half(number))
        else:
            write_real(kept, index + i * step, number)


@helper
def attend(halves, query, head_keys, head_values, head_size, width, limit, scores, out):
    """Write the attention of one head's query over the first `limit` positions to `out`, a row of `width` numbers.

    query    address of head_size float32 numbers
    scores   a row to work in, of limit numbers up to the next multiple of 64
    """
    size = 2 if halves else 4
    place = address_of(scores)
    for first in range(0, limit, GROUP):
        keys = head_keys + first * head_size * size
        # Sums over channels: the factors are the query's numbers, a row has the numbers of 64 keys in one channel.
        _four(halves, query, keys, GROUP * size, head_size, place + 4 * first)
    scale = np.float32(1) / np.float32(math.sqrt(np.float32(head_size)))
    top = scale * maximum(scores[:limit])
    for j in range(limit):
        scores[j] = exp(scale * scores[j] - top)
    inverse = np.float32(1) / sum_of(scores[:limit])
    c = 0
    while c < width:  # sums over positions: the factors are the probabilities, the rows are the values
        if c + GROUP <= width:
            _four(halves, place, head_values + c * size, width * size, limit, address_of(out) + 4 * c)
            c += GROUP
        else:
            _one(halves, place, head_values + c * size, width * size, limit, address_of(out) + 4 * c)
            c += LANES
    for c in range(width):
        out[c] *= inverse
