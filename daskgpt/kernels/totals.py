"""Sums of consecutive parts, whose totals are added in a fixed binary tree.

The tree of n parts is total(lo, hi) = total(lo, mid) + total(mid, hi), where mid - lo is the largest power of two below
hi - lo. So parts 2^k i ... 2^k (i + 1) - 1 form a subtree, wherever a sum of consecutive parts begins.

Parts are summed one after the other. The totals of complete subtrees are kept in a list, like the digits 1 of a binary
counter: after part g of a sum that begins with part 0, the last total is added to the one before it once for each
trailing 1 in the binary form of g. After the last part, the remaining totals are added from the right.
"""

from collections.abc import Iterable
from functools import cache

import numpy as np

from daskgpt.kernels.arguments import flat
from daskgpt.kernels.compilation import kernel


@kernel("w1 r1")
def _add_to(total, x):
    for i in range(total.size):
        total[i] += x[i]


def subtrees(first: int, last: int) -> list[tuple[int, int]]:
    """Return the fewest subtrees, (lo, hi) each, that together make up parts first ... last - 1 of a larger tree."""
    ranges = []
    while first < last:
        size = first & -first or 1 << last.bit_length()
        while first + size > last:
            size //= 2
        ranges.append((first, first + size))
        first += size
    return ranges


@cache
def level(part: int, first: int = 0) -> int:
    """Return the number of totals in the list before a part is summed, which is the place of the part's total.

    first   the part that the sum begins with
    """
    return len(subtrees(first, part))


@cache
def additions(part: int, first: int = 0, parts: int = 0) -> int:
    """Return the number of additions of two totals after a part has been summed.

    first   the part that the sum begins with
    parts   number of all parts; 0 if more parts follow, or are summed elsewhere
    """
    left = 1 if part + 1 == parts else level(part + 1, first)
    return level(part, first) + 1 - left


def tree_add(totals: list[np.ndarray], last: int, count: int) -> None:
    """Add the last total to the one before it, `count` times.

    last   place of the last total
    """
    for place in range(last, last - count, -1):
        _add_to(flat(totals[place - 1]), flat(totals[place]))


def tree_sum(totals: Iterable[tuple[int, int, np.ndarray]]) -> np.ndarray:
    """Return the sum of all parts from (lo, hi, total) of subtrees in order. The given totals are not changed."""
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
