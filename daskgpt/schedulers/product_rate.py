"""How fast this machine multiplies matrices: what the speed of a step is a share of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
from threadpoolctl import threadpool_limits

from daskgpt.kernels.float32.blas import matmul

SIZE, PRODUCTS, ROUNDS = 1024, 8, 5  # 17 GFLOP a thread and round
IN_BRIEF = (2, 3)  # products and rounds: some tenth of a second in all


def product_rate(threads: int, products: int = PRODUCTS, rounds: int = ROUNDS) -> float:
    """Float32 operations a second that NumPy's BLAS reaches, through the kernels' way to it, on some threads at once.

    Every thread multiplies large square matrices of its own; the rate is that of all, the median of some rounds.
    """
    random = np.random.default_rng(0)
    matrices = [random.standard_normal((2, SIZE, SIZE), np.float32) for _ in range(threads)]
    results = [np.empty((SIZE, SIZE), np.float32) for _ in range(threads)]

    def multiply(number: int, count: int) -> None:
        for _ in range(count):
            matmul(matrices[number][0], matrices[number][1], results[number])

    with threadpool_limits(limits=1, user_api="blas"):
        seconds_of_all(multiply, threads, 1)
        seconds = median(seconds_of_all(multiply, threads, products) for _ in range(rounds))
    return threads * products * 2 * SIZE**3 / seconds


def seconds_of_all(work: Callable[[int, int], None], threads: int, count: int) -> float:
    """Seconds until the last of some threads is done."""
    workers = [threading.Thread(target=work, args=(number, count)) for number in range(threads)]
    start = perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return perf_counter() - start
