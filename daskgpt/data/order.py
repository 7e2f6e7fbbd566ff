"""The order in which an epoch sees its sequences: a permutation that is computed place by place, and never held."""

from __future__ import annotations

import numpy as np

ROUNDS = 6

# splitmix64's constants (Steele, Lea and Flood 2014): every bit of a half depends on every bit of the other.
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def shuffled(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Which of `count` sequences stand at some places of an epoch.

    A Feistel network permutes the next larger square power of two; what falls beyond `count` is permuted again, which
    ends, since the places are on circles of it.

    Shapes   places (n,) -> (n,)
    Dtype    int64, from 0 to count - 1
    Cost     no memory that grows with count, whatever it is
    Source   Black and Rogaway 2002, Ciphers with arbitrary finite domains: cycle walking
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch, count])).random_raw(ROUNDS)
    found = np.asarray(places, np.uint64)
    beyond = np.ones(found.shape, bool)
    while beyond.any():
        found = np.where(beyond, _permuted(found, half, keys), found)
        beyond = found >= np.uint64(count)
    return found.astype(np.int64)


def _permuted(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    permuted: np.ndarray = (left << shift) | right
    return permuted


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
