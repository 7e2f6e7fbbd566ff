"""Attention of one query over kept keys and values.

A head's keys lie in groups of 64 positions, channel by channel, so that 64 scores are summed beside each other; its
values lie position by position, with zeros up to a multiple of 16 channels. Both are read from one end to the other.
"""

import math
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from daskgpt.kernels.compilation import helper
from daskgpt.kernels.simd.lanes import (
    F32,
    HALVES,
    LANES,
    REALS,
    address_of,
    constant,
    fma,
    load,
    splat,
    store,
    whole,
    widen,
    write,
    write_real,
)
from daskgpt.kernels.simd.math import exp, maximum
from daskgpt.kernels.simd.reductions import sum_of

GROUP = 64  # positions of keys


def _sums(builder: Any, values: list[Any], vectors: int, halves: bool) -> None:
    """out = sum over i of factor i times row i, of `vectors` times 16 numbers; row i lies at rows + i pitch."""
    factors, rows, pitch, count, out = values
    kind, size = (HALVES, 2) if halves else (REALS, 4)
    totals = [cgutils.alloca_once(builder, REALS) for _ in range(vectors)]
    for total in totals:
        builder.store(constant(REALS, 0.0), total)
    with cgutils.for_range(builder, count) as loop:
        factor = splat(builder, load(builder, factors, builder.shl(loop.index, whole(2)), F32))
        row = builder.add(rows, builder.mul(loop.index, pitch))
        for number, total in enumerate(totals):
            found = load(builder, row, number * LANES * size, kind)
            real = widen(builder, found) if halves else found
            builder.store(fma(builder, factor, real, builder.load(total)), total)
    for number, total in enumerate(totals):
        store(builder, builder.load(total), out, number * LANES * 4)


def _of(vectors: int, halves: bool) -> Any:
    @intrinsic
    def sums(typing_context, factors, rows, pitch, count, out):
        def generate(context, builder, signature, arguments):
            _sums(builder, list(arguments), vectors, halves)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return sums


_four, _four_halves, _one, _one_halves = _of(4, False), _of(4, True), _of(1, False), _of(1, True)


@helper
def _weighted(halves, factors, rows, pitch, count, width, out):
    """out = sum of factors times rows, of `width` numbers, a multiple of 16."""
    size = 2 if halves else 4
    c = 0
    while c < width:
        wide = c + 64 <= width
        if halves and wide:
            _four_halves(factors, rows + c * size, pitch, count, out + 4 * c)
        elif halves:
            _one_halves(factors, rows + c * size, pitch, count, out + 4 * c)
        elif wide:
            _four(factors, rows + c * size, pitch, count, out + 4 * c)
        else:
            _one(factors, rows + c * size, pitch, count, out + 4 * c)
        c += 64 if wide else 16


@helper
def _nearest_half(value):
    """The bfloat16 nearest to a float32 number, as its 16 bits; ties to even, NaN stays NaN."""
    bits = np.uint32(np.float32(value).view(np.uint32))
    if value != value:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@helper
def _keep(halves, place, index, value):
    if halves:
        write(place, index, _nearest_half(value))
    else:
        write_real(place, index, value)


@helper
def keep_key(halves, head_keys, head_size, position, channel, numbers):
    """Some numbers of the key at a position, from a channel on."""
    place = (position // GROUP) * head_size * GROUP + position % GROUP
    for c in range(numbers.size):
        _keep(halves, head_keys, place + (channel + c) * GROUP, numbers[c])


@helper
def keep_value(halves, head_values, width, position, channel, numbers):
    """Some numbers of the value at a position, from a channel on."""
    for c in range(numbers.size):
        _keep(halves, head_values, position * width + channel + c, numbers[c])


@helper
def attend(halves, query, head_keys, head_values, head_size, width, limit, scores, out):
    """Attention of one head's query over the first `limit` positions, into `out`, a row of `width` numbers.

    query    address of head_size float32 numbers
    scores   a row to work in, of limit numbers up to the next multiple of 64
    """
    size = 2 if halves else 4
    place = address_of(scores)
    for first in range(0, limit, GROUP):
        keys = head_keys + first * head_size * size
        # Sums over channels: the query's are the factors, the rows 64 keys' numbers of one channel.
        if halves:
            _four_halves(query, keys, GROUP * size, head_size, place + 4 * first)
        else:
            _four(query, keys, GROUP * size, head_size, place + 4 * first)
    scale = np.float32(1) / np.float32(math.sqrt(np.float32(head_size)))
    top = scale * maximum(scores[:limit])
    for j in range(limit):
        scores[j] = exp(scale * scores[j] - top)
    inverse = np.float32(1) / sum_of(scores[:limit])
    _weighted(halves, place, head_values, width * size, limit, width, address_of(out))
    for c in range(width):
        out[c] *= inverse
