"""Rotary positions: queries and keys turned by the positions of their tokens.

A head is turned in pairs of channels i and i + HS / 2, by an angle of position / base^(2 i / HS). Scores then depend on
the distance of two tokens.

Llama 3 divides angles by a factor so that more positions fit: those that make fewer turns than `low` within so many
positions, but not those that make more than `high`, and those between in part. All of this is given as five numbers:
base, factor, low, high, positions. With a factor of 1, no angle is divided.
"""

import functools
import math

import numpy as np

from daskgpt.config.errors import require
from daskgpt.kernels.arguments import check_shape, flat, head_size, rows
from daskgpt.kernels.compilation import helper, kernel, wide_vectors

Rope = tuple[float, ...]  # base, factor, low, high, positions


@functools.cache
def angles_of(rope: Rope, pairs: int) -> np.ndarray:
    """Return, for each pair of channels of a head, the number that divides a position, and what is left of the angle.

    Shapes   (2, pairs)
    Dtype    float64
    """
    base, factor, low, high, positions = rope
    angles = np.ones((2, pairs))
    for i in range(pairs):
        angles[0, i] = slowness = math.pow(base, i / pairs)
        if factor != 1:
            turns = positions / (2 * math.pi * slowness)
            whole = min(max((turns - low) / (high - low), 0.0), 1.0)
            angles[1, i] = whole + (1 - whole) / factor
    angles.flags.writeable = False
    return angles


@helper
def set_angles(position, angles, sign, cosines, sines):
    """Set the cosines and sines of a token; in double precision, so that, rounded, all processors have the same."""
    for i in range(cosines.size):
        angle = position / angles[0, i] * angles[1, i]
        cosines[i], sines[i] = math.cos(angle), sign * math.sin(angle)


@helper
def turn(x, start, cosines, sines, y):
    """Write the turned channels of a head, from `start` on, into the same channels of y."""
    half = cosines.size
    middle, end = start + half, start + 2 * half
    ones, twos, turned_ones, turned_twos = x[start:middle], x[middle:end], y[start:middle], y[middle:end]
    for i in range(half):
        one, two = ones[i], twos[i]
        turned_ones[i] = one * cosines[i] - two * sines[i]
        turned_twos[i] = one * sines[i] + two * cosines[i]


@kernel("r2 i1 n2 d2 f w1 w1 w2", use="rotary")
def _turned(x, positions, heads, angles, sign, cosines, sines, y):
    wide_vectors()
    turned, kept = heads
    size = x.shape[1] // (turned + kept)
    # A token of all sequences after the other: they have the same angles.
    for token in range(positions.size):
        set_angles(float(positions[token]), angles, sign, cosines, sines)
        for row in range(token, x.shape[0], positions.size):
            for head in range(turned):
                turn(x[row], head * size, cosines, sines, y[row])
            for j in range(turned * size, x.shape[1]):
                y[row, j] = x[row, j]


def _turn(
    where: str, x: np.ndarray, positions: np.ndarray, heads: int, key_heads: int, rope: Rope, sign: float
) -> np.ndarray:
    check_shape(where, "positions", positions, x.shape[1:-1])
    size = head_size(where, x, heads, key_heads)
    require(len(rope) == 5, where, "rope must have five numbers", {"rope": rope}, "See `forward`.")
    require(size % 2 == 0, where, "a head must have pairs of channels", {"channels": size}, "Take an even number.")
    y = np.empty(x.shape, x.dtype, like=x)
    cosines, sines = (np.empty(size // 2, x.dtype, like=x) for _ in range(2))
    numbers = heads + key_heads, key_heads
    _turned(rows(x), flat(positions), numbers, angles_of(tuple(rope), size // 2), sign, cosines, sines, rows(y))
    return y


def forward(x: np.ndarray, positions: np.ndarray, *, heads: int, key_heads: int, rope: Rope) -> np.ndarray:
    """Return queries and keys turned by their positions, and values.

    rope     numbers that the angles follow from: base, factor, low, high, positions

    Shapes   x (b, t, (NH + 2 KH) HS), positions (t,) -> y as x
    Dtype    int32 positions; float32 or float64
    Cost     a sine and a cosine per pair of channels of a head and token
    Errors   ValueError when the shapes do not fit, or HS is odd
    Source   Su et al. 2021, arXiv:2104.09864; transformers, `_compute_llama3_parameters`
    """
    return _turn("rotary.forward", x, positions, heads, key_heads, rope, 1.0)


def backward(dy: np.ndarray, positions: np.ndarray, *, heads: int, key_heads: int, rope: Rope) -> np.ndarray:
    """Return the gradient of `forward` with respect to x: the same, turned back.

    Shapes   dy (b, t, (NH + 2 KH) HS), positions (t,) -> dx as dy
    Dtype    int32 positions; float32 or float64
    Errors   as `forward`
    """
    return _turn("rotary.backward", dy, positions, heads, key_heads, rope, -1.0)
