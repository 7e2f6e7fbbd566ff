"""Queries, keys and values as attention takes them: turned by their positions, keys and values once per query head.

A head is turned in pairs of channels i and i + HS / 2, by an angle of position / base^(2 i / HS).
"""

import math

import numpy as np

from daskgpt.kernels.arguments import check_shape, flat, rows
from daskgpt.kernels.compilation import helper, kernel


@helper
def _turned(row, start, position, base, size, sign, out, place, add):
    """Turn a head of `row` from channel `start` on into `out` from channel `place` on; `add` adds to what is there."""
    real = row.dtype.type
    half = size // 2
    for i in range(half):
        # In double precision: rounded afterwards, they are the same on all processors.
        angle = position / math.pow(base, 2.0 * i / size) if base > 0 else 0.0
        cos, sin = real(math.cos(angle)), real(sign * math.sin(angle))
        one, two = row[start + i], row[start + half + i]
        first, second = one * cos - two * sin, one * sin + two * cos
        out[place + i] = first + out[place + i] if add else first
        out[place + half + i] = second + out[place + half + i] if add else second
    if size % 2:
        last = row[start + size - 1]
        out[place + size - 1] = last + out[place + size - 1] if add else last


@kernel("r2 i1 n n s w2", use="heads")
def _forward(x, positions, heads, key_heads, base, y):
    group = heads // key_heads
    size = x.shape[1] // (heads + 2 * key_heads)
    for row in range(x.shape[0]):
        position = float(positions[row % positions.size])
        for head in range(heads):
            key_head = head // group
            _turned(x[row], head * size, position, base, size, 1.0, y[row], head * size, False)
            key = heads + key_head
            _turned(x[row], key * size, position, base, size, 1.0, y[row], (heads + head) * size, False)
            for j in range(size):
                y[row, (2 * heads + head) * size + j] = x[row, (heads + key_heads + key_head) * size + j]


@kernel("r2 i1 n n s w2", use="heads")
def _backward(dy, positions, heads, key_heads, base, dx):
    group = heads // key_heads
    size = dy.shape[1] // (3 * heads)
    for row in range(dy.shape[0]):
        position = float(positions[row % positions.size])
        for head in range(heads):
            key_head, again = head // group, head % group > 0
            _turned(dy[row], head * size, position, base, size, -1.0, dx[row], head * size, False)
            key = heads + key_head
            _turned(dy[row], (heads + head) * size, position, base, size, -1.0, dx[row], key * size, again)
            for j in range(size):
                place = (heads + key_heads + key_head) * size + j
                value = dy[row, (2 * heads + head) * size + j]
                dx[row, place] = value + dx[row, place] if again else value


def forward(x: np.ndarray, positions: np.ndarray, *, heads: int, key_heads: int, turned_by: float) -> np.ndarray:
    """Return queries, keys and values with a key and a value per query head, queries and keys turned.

    Shapes   x (b, t, (NH + 2 KH) HS), positions (t,) -> y (b, t, 3 NH HS)
    Dtype    int32 positions; float32 or float64
    Cost     2 sines and 2 cosines per pair of channels
    Errors   ValueError when the shapes do not fit
    Source   Su et al. 2021, arXiv:2104.09864; Ainslie et al. 2023, arXiv:2305.13245
    """
    check_shape("heads.forward", "positions", positions, x.shape[1:-1])
    size = x.shape[-1] // (heads + 2 * key_heads)
    check_shape("heads.forward", "x", x, (*x.shape[:-1], (heads + 2 * key_heads) * size))
    y = np.empty((*x.shape[:-1], 3 * heads * size), x.dtype, like=x)
    _forward(rows(x), flat(positions), heads, key_heads, turned_by, rows(y))
    return y


def backward(dy: np.ndarray, positions: np.ndarray, *, heads: int, key_heads: int, turned_by: float) -> np.ndarray:
    """Return the gradient of `forward` with respect to x; gradients of a shared head are summed in order.

    Shapes   dy (b, t, 3 NH HS), positions (t,) -> dx (b, t, (NH + 2 KH) HS)
    Dtype    int32 positions; float32 or float64
    Errors   ValueError when the shapes do not fit
    """
    check_shape("heads.backward", "positions", positions, dy.shape[1:-1])
    size = dy.shape[-1] // (3 * heads)
    check_shape("heads.backward", "dy", dy, (*dy.shape[:-1], 3 * heads * size))
    dx = np.empty((*dy.shape[:-1], (heads + 2 * key_heads) * size), dy.dtype, like=dy)
    _backward(rows(dy), flat(positions), heads, key_heads, turned_by, rows(dx))
    return dx
