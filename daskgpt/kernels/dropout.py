"""Dropout: in training, random numbers of an array are set to 0, and the others are scaled up to keep the mean.

Random numbers are computed by Philox from a key and a counter, without a state, so each task computes those that it
needs. A number depends on the stream of its sequence, the place in the model, and the position there.
"""

import numpy as np

from daskgpt.config.errors import require
from daskgpt.kernels.arguments import check_shape, flat, rows
from daskgpt.kernels.compilation import helper, kernel, wide_vectors

_LOWER, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # of the two halves of the key, from round to round
_NUMBERS = 2**32  # that a word has


@helper
def _round(a, b, c, d, key, other):
    first, second = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
    return (second >> _HALF) ^ b ^ key, second & _LOWER, (first >> _HALF) ^ d ^ other, first & _LOWER


@helper
def _two_rounds(a, b, c, d, key, other):
    a, b, c, d = _round(a, b, c, d, key, other)
    key, other = (key + _STEPS[0]) & _LOWER, (other + _STEPS[1]) & _LOWER
    a, b, c, d = _round(a, b, c, d, key, other)
    return a, b, c, d, (key + _STEPS[0]) & _LOWER, (other + _STEPS[1]) & _LOWER


@helper
def philox(a, b, c, d, key, other):
    """Return four random words for a counter of four words and a key of two (Philox4x32-10), all uint64 below 2**32.

    The rounds are written out: LLVM makes vector code of a loop over counters only if it holds no other loop.

    Source   Salmon et al. 2011, doi:10.1145/2063384.2063405
    """
    a, b, c, d, key, other = _two_rounds(a, b, c, d, key, other)
    a, b, c, d, key, other = _two_rounds(a, b, c, d, key, other)
    a, b, c, d, key, other = _two_rounds(a, b, c, d, key, other)
    a, b, c, d, key, other = _two_rounds(a, b, c, d, key, other)
    a, b, c, d, _, _ = _two_rounds(a, b, c, d, key, other)
    return a, b, c, d


@helper
def factors_of_row(stream, place, part, row, first, threshold, kept, factors, count):
    """factors[j] = 0 if word first + j of a row is below the threshold, else `kept`, for j below count and up to 3
    more.

    stream   of the sequence
    place    number of the place in the model
    part     of it, such as an attention head
    row      such as the position of a token
    first    a multiple of 4
    """
    zero, limit = factors.dtype.type(0), np.uint64(threshold)
    key, other = np.uint64(stream) & _LOWER, np.uint64(stream) >> _HALF
    row, place, part = np.uint64(row), np.uint64(place), np.uint64(part)
    for group in range((count + 3) // 4):
        a, b, c, d = philox(np.uint64(first // 4 + group), row, place, part, key, other)
        factors[4 * group] = kept if a >= limit else zero
        factors[4 * group + 1] = kept if b >= limit else zero
        factors[4 * group + 2] = kept if c >= limit else zero
        factors[4 * group + 3] = kept if d >= limit else zero


@kernel("L1 n n", use="dropout")
def _streams(keys, seed, step):
    key, number = np.uint64(seed), np.uint64(step)
    for i in range(keys.size):
        a, b, _, _ = philox(np.uint64(i), number & _LOWER, number >> _HALF, np.uint64(0), key & _LOWER, key >> _HALF)
        keys[i] = np.int64(a | (b << _HALF))


def streams(seed: int, step: int, sequences: int) -> np.ndarray:
    """Return the keys of the random numbers of a step's sequences, from the run's seed, the step and their numbers.

    Shapes   -> (sequences,)
    Dtype    int64
    """
    keys = np.empty(sequences, np.int64)
    _streams(keys, int(np.uint64(seed % 2**64).astype(np.int64)), step)
    return keys


def threshold_of(rate: float) -> int:
    """Return the threshold of random words: a number is dropped if its word lies below it.

    Errors   ValueError for a rate below 0, or of 1 and more
    """
    require(0 <= rate < 1, "dropout", "rate must be at least 0 and below 1", {"rate": rate}, "Take 0.1, say.")
    return min(round(rate * _NUMBERS), _NUMBERS - 1)


@kernel("r2 l1 i1 w2 w1 n n f", use="dropout")
def _dropped(x, streams, positions, y, factors, place, threshold, kept):
    wide_vectors()
    tokens = positions.size
    for i in range(x.shape[0]):
        factors_of_row(streams[i // tokens], place, 0, positions[i % tokens], 0, threshold, kept, factors, x.shape[1])
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * factors[j]


def dropped(x: np.ndarray, streams: np.ndarray, positions: np.ndarray, place: int, rate: float) -> np.ndarray:
    """Return x with a share of its numbers set to 0 and the others divided by 1 - rate. The gradient is the same for
    dy.

    Which numbers are dropped depends on the stream of the sequence, the place, the position of the token and the
    channel.

    place    number of the place in the model
    rate     share of the numbers that are dropped, at least 0 and below 1

    Shapes   x (b, t, C), streams (b,), positions (t,) -> y (b, t, C)
    Dtype    float32 or float64; int64 streams, int32 positions
    Cost     10 rounds of Philox for four numbers
    Source   Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.html
    Errors   ValueError when the shapes do not fit
    """
    check_shape("dropout.dropped", "streams", streams, x.shape[:1])
    check_shape("dropout.dropped", "positions", positions, x.shape[1:2])
    y, factors = (np.empty(shape, x.dtype, like=x) for shape in (x.shape, x.shape[-1] + 3))
    _dropped(rows(x), flat(streams), flat(positions), rows(y), factors, place, threshold_of(rate), 1 / (1 - rate))
    return y
