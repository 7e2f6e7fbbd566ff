"""Totals that meet in a fixed binary tree while their parts are summed one after the other.

The totals that wait for their right-hand side are a binary counter: when part g has been summed, as many additions
follow as g has binary ones at its end, each adding the last total to the one before it. So before part g there are as
many totals as g has ones, and its own comes after them.
"""

import numpy as np


def level(part: int) -> int:
    """How many totals lie below that of a part while it is summed: where its own stands among them."""
    return part.bit_count()


def additions(part: int) -> int:
    """How many additions of two totals follow when a part has been summed."""
    return level(part) + 1 - level(part + 1)


def meet(totals: list[np.ndarray], part: int) -> None:
    """The additions that follow when a part has been summed; its total is the last one of `totals` that counts."""
    for last in range(level(part), level(part) - additions(part), -1):
        np.add(totals[last - 1], totals[last], out=totals[last - 1])
