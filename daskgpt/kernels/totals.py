"""Totals that are added in a fixed binary tree while their parts are summed one after the other.

The tree of n parts: total(lo, hi) = total(lo, mid) + total(mid, hi), with the largest power of two below hi - lo on the
left. So parts 2^k i ... 2^k (i + 1) are added before others join them, wherever a sum of consecutive parts begins.

The totals that wait for their right-hand side are then a binary counter: when part g of a sum that begins with part 0
has been added, as many additions follow as g has binary ones at its end, each adding the last total to the one before
it; after the last part of all, the totals that still wait are added from the right.
"""

from collections.abc import Iterable

import numpy as np


def subtrees(first: int, last: int) -> list[tuple[int, int]]:
    """The parts first ... last - 1 as the fewest subtrees of a tree that has more of them: (lo, hi) of each."""
    found = []
    while first < last:
        size = first & -first or 1 << last.bit_length()
        while first + size > last:
            size //= 2
        found.append((first, first + size))
        first += size
    return found


def level(part: int, first: int = 0) -> int:
    """How many totals lie below that of a part while it is summed: where its own stands among them.

    first   part that the sum begins with
    """
    return len(subtrees(first, part))


def additions(part: int, first: int = 0, parts: int = 0) -> int:
    """How many additions of two totals follow when a part has been summed.

    first   part that the sum begins with
    parts   how many there are in all; 0 if more follow, or where others are added elsewhere
    """
    left = 1 if part + 1 == parts else level(part + 1, first)
    return level(part, first) + 1 - left


def tree_add(totals: list[np.ndarray], last: int, count: int) -> None:
    """Add the last of some totals to the one before it, repeatedly.

    last   its place
    """
    for place in range(last, last - count, -1):
        np.add(totals[place - 1], totals[place], out=totals[place - 1])


def tree_sum(totals: Iterable[tuple[int, int, np.ndarray]]) -> np.ndarray:
    """The sum of all parts from the totals of subtrees, (lo, hi, total) of each in order; none of them is changed."""
    waiting: list[tuple[int, int, np.ndarray]] = []
    for low, high, total in totals:
        while waiting and waiting[-1][1] - waiting[-1][0] == high - low and waiting[-1][0] % (2 * (high - low)) == 0:
            low, _, before = waiting.pop()
            total = before + total
        waiting.append((low, high, total))
    *rest, (_, _, total) = waiting
    for _, _, before in reversed(rest):
        total = before + total
    return total
