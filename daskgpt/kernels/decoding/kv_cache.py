"""Attention of one query over kept keys and values.

The keys of a head lie in groups of 64 positions, channel by channel, so that 64 scores are summed at a time. Its
values lie position by position, with zeros up to a multiple of 16 channels. Both are read from one end to the other.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from daskgpt.kernels.compilation import helper, instruction
from daskgpt.kernels.decoding.gemv import either
from daskgpt.kernels.simd import lanes
from daskgpt.kernels.simd.lanes import LANES, REALS, address_of, read_real, write, write_real
from daskgpt.kernels.simd.math import exp, nearest_half
from daskgpt.kernels.simd.rows import maximum, sum_of

GROUP = 64  # positions of keys


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


def _of(vectors: int) -> Any:
    @instruction("n n n n n n")
    def sums(builder, halves, factors, rows, pitch, count, out):
        either(builder, halves, lambda chosen: _sums(builder, [factors, rows, pitch, count, out], vectors, chosen))

    return sums


_four, _one = _of(4), _of(1)


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
