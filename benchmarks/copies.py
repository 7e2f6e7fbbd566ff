"""The rate of copies of memory on some threads at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np

ROUNDS = 5


def seconds_of_all(work: Callable[[int, int], None], threads: int, count: int) -> float:
    """Return the seconds until the last of some threads is done; each is called with its number and the count."""
    with ThreadPoolExecutor(threads) as pool:
        start = perf_counter()
        list(pool.map(work, range(threads), [count] * threads))
        return perf_counter() - start


def copy_rate(threads: int, size: int, count: int = 1) -> float:
    """Return the bytes a second that each thread reads and writes in copies: the best of some rounds.

    size    bytes that a copy reads and writes
    count   of copies in a round
    """
    arrays = [(np.ones(size // 2, np.uint8), np.ones(size // 2, np.uint8)) for _ in range(threads)]

    def work(number: int, count: int) -> None:
        for _ in range(count):
            np.copyto(*arrays[number])

    return size * count / min(seconds_of_all(work, threads, count) for _ in range(ROUNDS))
