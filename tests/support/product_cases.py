"""Helpers of the tests of products: calls by address, the unit to test, an independent rounding, float64 products."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import pytest
from tolerances import TOLERANCES

from daskgpt.kernels.bfloat16.isa import VARIABLE, Unit, unit, works
from daskgpt.kernels.float32.blas import gemm_address
from daskgpt.kernels.float32.gemm import NOTHING

UNITS = [unit.name.lower() for unit in Unit]
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


@contextmanager
def multiplying(precision: str) -> Iterator[str]:
    """The precision's name for a model, where it may be that of a unit."""
    if precision in UNITS:
        with using(precision):
            yield "bfloat16"
    else:
        yield precision


def call(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool] = (False, False),
    beta: float = 0.0,
    masked: int = NOTHING,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """c = a @ b + beta c of float32 or float64 through the address of the product; the arrays' own row lengths."""
    whole, place, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float if c.dtype == np.float32 else ctypes.c_double
    kinds = [*[whole] * 6, place, whole, place, whole, real, place, whole, place]
    function = ctypes.CFUNCTYPE(None, *kinds)(gemm_address(c.dtype))
    lda, ldb, ldc = (array.strides[0] // array.itemsize for array in (a, b, c))
    row = 0 if bias is None else bias.ctypes.data
    function(masked, *transposes, m, n, k, a.ctypes.data, lda, b.ctypes.data, ldb, beta, c.ctypes.data, ldc, row)
    return c


def round_one_by_one(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits of float32 numbers that are not NaN: the nearer of the two neighbours, at a tie the even one."""
    below = x.view(np.uint32) >> 16
    with np.errstate(invalid="ignore"):
        lower, upper = ((bits << 16).astype("u4").view("f4").astype("f8") for bits in (below, below + 1))
        # The neighbour above the largest number is infinite; in the arithmetic of rounding it is the next power of two.
        upper = np.where(np.isinf(upper) & np.isfinite(lower), np.copysign(2.0**128, lower), upper)
        to_lower, to_upper = np.abs(x - lower), np.abs(upper - x)
    up = (to_upper < to_lower) | ((to_upper == to_lower) & (below % 2 == 1))
    return np.where(up & np.isfinite(x), below + 1, below).astype(np.uint16)


def check_rounding(to_bfloat16: Callable[[np.ndarray], np.ndarray]) -> None:
    """Numbers of 16 bits, ties, and what lies just below and above them; a NaN stays one."""
    for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (np.arange(1 << 16, dtype=np.uint32) << 16 | low).view(np.float32)
        rounded, nan = to_bfloat16(x), np.isnan(x)
        np.testing.assert_array_equal(rounded[~nan], round_one_by_one(x[~nan]))
        assert (rounded[nan] & 0x7FFF > 0x7F80).all()


def exact(array: np.ndarray) -> np.ndarray:
    """The numbers that are multiplied, in float64: rounded to bfloat16."""
    return (round_one_by_one(array).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def assert_product(result: np.ndarray, left: np.ndarray, right: np.ndarray, start: np.ndarray | float = 0.0) -> None:
    """`start` and the product of rounded numbers, in units of the size of the numbers that were added."""
    left, right = exact(left), exact(right)
    error = (result - (start + left @ right)) / (np.abs(left) @ np.abs(right) + 1)
    np.testing.assert_allclose(error, np.zeros_like(error), **TOLERANCES["bfloat16 sums"])


def at_once(threads: int, work: Callable[[], T]) -> list[T]:
    """Return the results of the same work in several threads that begin together."""
    start = threading.Barrier(threads)

    def begin(_: int) -> T:
        start.wait()
        return work()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def assert_same_bits(result: np.ndarray, expected: np.ndarray) -> None:
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert result.tobytes() == expected.tobytes()


def assert_all_same(results: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> None:
    for one, other in zip(results, expected, strict=True):
        assert_same_bits(one, other)
