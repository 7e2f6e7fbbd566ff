"""Random numbers that are a function of a key and a counter: nobody holds a state, and any task makes its own ones.

A number of a step is known by the stream of its sequence, by the place in the model, and by where it stands there.
"""

import numpy as np

from daskgpt.kernels.compilation import helper, kernel

_LOWER, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
ROUNDS = 10
FIRST_MULTIPLIER, SECOND_MULTIPLIER = 0xD2511F53, 0xCD9E8D57
FIRST_STEP, SECOND_STEP = 0x9E3779B9, 0xBB67AE85  # of the two halves of the key, from round to round
_MULTIPLIERS = np.uint64(FIRST_MULTIPLIER), np.uint64(SECOND_MULTIPLIER)
_STEPS = np.uint64(FIRST_STEP), np.uint64(SECOND_STEP)
_SIXTY_FOUR_BITS = 2**64
NUMBERS = 2**32  # that a word has


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
    """Philox4x32-10: four random words of a counter of four words and a key of two, each an uint64 below 2**32.

    The rounds are no loop: a loop over counters becomes vector code only where there is none in it.

    Source   Salmon et al. 2011, doi:10.1145/2063384.2063405
    """
    a, b, c, d, key, other = _two_rounds(a, b, c, d, key, other)
    a, b, c, d, key, other = _two_rounds(a, b, c, d, key, other)
    a, b, c, d, key, other = _two_rounds(a, b, c, d, key, other)
    a, b, c, d, key, other = _two_rounds(a, b, c, d, key, other)
    a, b, c, d, _, _ = _two_rounds(a, b, c, d, key, other)
    return a, b, c, d


@helper
def factors_of_row(stream, place, part, row, threshold, kept, factors, count):
    """factors[j] = 0 where word j of a row is below the threshold, else `kept`, for j below count and up to 3 more.

    stream   of the sequence
    place    number of the place in the model
    part     of it, such as an attention head
    row      such as the position of a token
    """
    zero, limit = factors.dtype.type(0), np.uint64(threshold)
    key, other = np.uint64(stream) & _LOWER, np.uint64(stream) >> _HALF
    row, place, part = np.uint64(row), np.uint64(place), np.uint64(part)
    for group in range((count + 3) // 4):
        a, b, c, d = philox(np.uint64(group), row, place, part, key, other)
        factors[4 * group] = kept if a >= limit else zero
        factors[4 * group + 1] = kept if b >= limit else zero
        factors[4 * group + 2] = kept if c >= limit else zero
        factors[4 * group + 3] = kept if d >= limit else zero


@kernel("L1 n n")
def _streams(found, seed, step):
    key, number = np.uint64(seed), np.uint64(step)
    for i in range(found.size):
        a, b, _, _ = philox(np.uint64(i), number & _LOWER, number >> _HALF, np.uint64(0), key & _LOWER, key >> _HALF)
        found[i] = np.int64(a | (b << _HALF))


def streams(seed: int, step: int, sequences: int) -> np.ndarray:
    """The keys of the random numbers of each sequence of a step, by the run's seed, the step and its number there.

    Shapes   -> (sequences,)
    Dtype    int64
    """
    found = np.empty(sequences, np.int64)
    _streams(found, int(np.uint64(seed % _SIXTY_FOUR_BITS).astype(np.int64)), step)
    return found


@kernel("L1 l1 l1")
def _words(found, counter, key):
    a, b, c, d = philox(
        np.uint64(counter[0]), np.uint64(counter[1]), np.uint64(counter[2]), np.uint64(counter[3]),
        np.uint64(key[0]), np.uint64(key[1]),
    )  # fmt: skip
    found[0], found[1], found[2], found[3] = np.int64(a), np.int64(b), np.int64(c), np.int64(d)


def words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """The four words of a counter and a key, as other programs of the generator say them.

    Each is at least 0 and below 2**32.
    """
    found = np.empty(4, np.int64)
    _words(found, np.array(counter, np.int64), np.array(key, np.int64))
    return tuple(found.tolist())


def threshold_of(rate: float) -> int:
    """The word below which a number is dropped: a share of all words."""
    return min(round(rate * NUMBERS), NUMBERS - 1)
