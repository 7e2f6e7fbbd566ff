"""How fast this machine copies memory: what the speed of generation is a share of."""

from __future__ import annotations

import numpy as np

from daskgpt.schedulers.product_rate import seconds_of_all

SIZE, ROUNDS = 1 << 27, 5  # bytes: more than the caches of most machines


def copy_rate(threads: int) -> float:
    """Bytes a second that are read and written by copies of arrays that fit no cache, on some threads at once.

    The best of some rounds: a share is of what the memory can do.
    """
    size = SIZE // threads
    arrays = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(threads)]

    def copies(number: int, count: int) -> None:
        for _ in range(count):
            np.copyto(*arrays[number])

    return 2 * size * threads / min(seconds_of_all(copies, threads, 1) for _ in range(ROUNDS))
