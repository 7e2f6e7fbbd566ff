"""What the tests of bfloat16 products share: the unit to test, rounding written down again, float64 products."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import pytest

from daskgpt.kernels.bfloat16 import Unit, unit, works
from daskgpt.kernels.bfloat16.units import VARIABLE

UNITS = [each.name.lower() for each in Unit]
TILE_UNITS = UNITS[1:]
T = TypeVar("T")


@contextmanager
def using(name: str) -> Iterator[None]:
    """Multiply with this unit; skip the test where the processor lacks it."""
    if not works(Unit[name.upper()]):
        pytest.skip(f"this processor has no {name} unit")
    previous = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    unit.cache_clear()
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if previous is not None:
            os.environ[VARIABLE] = previous
        unit.cache_clear()


def round_one_by_one(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits of float32 numbers that are not NaN: the nearer of the two neighbours, at a tie the even one."""
    below = x.view(np.uint32) >> 16
    lower, upper = ((bits << 16).astype(np.uint32).view(np.float32).astype(np.float64) for bits in (below, below + 1))
    # The neighbour above the largest number is infinite; in the arithmetic of rounding it is the next power of two.
    upper = np.where(np.isinf(upper) & np.isfinite(lower), np.copysign(2.0**128, lower), upper)
    with np.errstate(invalid="ignore"):
        to_lower, to_upper = np.abs(x - lower), np.abs(upper - x)
    up = (to_upper < to_lower) | ((to_upper == to_lower) & (below % 2 == 1))
    return np.where(up & np.isfinite(x), below + 1, below).astype(np.uint16)


def exact(array: np.ndarray) -> np.ndarray:
    """The numbers that are multiplied, in float64: rounded to bfloat16."""
    return (round_one_by_one(array).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def magnitude(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The product of the absolute values: what float32 sums are exact against."""
    return np.abs(left) @ np.abs(right)


def assert_close(found: np.ndarray, expected: np.ndarray, scale: np.ndarray, tolerance: dict[str, float]) -> None:
    """Compare in units of `scale`, the size of the numbers that were added."""
    np.testing.assert_allclose((found - expected) / (scale + 1), np.zeros_like(expected), **tolerance)


def at_once(threads: int, work: Callable[[], T]) -> list[T]:
    """What the same work returns in so many threads that begin together."""
    start = threading.Barrier(threads)

    def begin(_: int) -> T:
        start.wait()
        return work()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()
