"""Tests of the parts of kernels: exp, log, sigmoid, sums over a row, embedding, and flush-to-zero."""

import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest

from daskgpt.kernels import elementwise
from daskgpt.kernels.compilation import wide_vectors
from daskgpt.kernels.decoding.decode_step import _embed
from daskgpt.kernels.native import flush_to_zero
from daskgpt.kernels.simd import math as elementary
from daskgpt.kernels.simd.lanes import address_of, features
from daskgpt.kernels.simd.rows import dot, dot_at, sum_of

HALF_OF_THE_SMALLEST = np.full(40, 2.0**-127, np.float32)
ON_X86 = platform.machine().lower() in ("x86_64", "amd64")
CPU_INFO = Path("/proc/cpuinfo")


def over_an_array(function):
    @numba.njit
    def run(x, y):
        wide_vectors()
        for i in range(x.size):
            y[i] = function(x[i])

    def call(x: np.ndarray) -> np.ndarray:
        y = np.empty_like(x)
        run(x, y)
        return y

    return call


exp, log, sigmoid = (over_an_array(function) for function in (elementary.exp, elementary.log, elementary.sigmoid))
POSITIVE = np.concatenate([np.geomspace(2e-38, 3e38, 500_001), np.linspace(0.4, 2.5, 500_001)])


FUNCTIONS = [
    (exp, np.exp, np.linspace(-87, 88.7, 500_001), 2),
    (log, np.log, POSITIVE, 2),
    (sigmoid, lambda x: 1 / (1 + np.exp(-x)), np.linspace(-87, 87, 500_001), 3),
]


@pytest.mark.parametrize(("function", "exact", "x", "units"), FUNCTIONS, ids=["exp", "log", "sigmoid"])
def test_float32_is_within_some_units_in_the_last_place(function, exact, x, units):
    x = x.astype("f4")
    x = x[x != 1]
    expected = exact(x.astype("f8"))
    assert np.max(np.abs(function(x) - expected) / np.spacing(expected.astype("f4"))) <= units


def test_the_ends_of_float32():
    y = exp(np.array([-np.inf, -1000, -87, 0, 88.72, 1000, np.inf, np.nan], "f4"))
    assert (y[:3] == y[2]).all()
    assert 0 < y[0] < 2e-38
    np.testing.assert_array_equal(y[3:], [1, y[4], y[4], y[4], np.nan])
    assert 3.3e38 < y[4] < np.inf
    np.testing.assert_array_equal(log(np.array([1, np.inf, np.nan], "f4")), np.array([0, np.inf, np.nan], "f4"))


def test_float64_uses_the_c_library():
    x = np.linspace(-30, 30, 10_001)
    np.testing.assert_allclose(exp(x), np.exp(x), rtol=1e-14, atol=1e-15)
    assert elementary.exp(1.0) == pytest.approx(np.e)


@numba.njit
def run(x, y, out):
    out[0], out[1] = sum_of(x), dot(x, y)


@numba.njit
def run_at(x, y):
    return dot_at(address_of(x), address_of(y), x.size)


@numba.njit
def embed(tokens, positions, rows, x):
    _embed(0, tokens, positions, rows, x, x.shape[1])


def in_lanes(terms: np.ndarray) -> np.ndarray:
    """Rows of 32 numbers, added up one after the other; then the upper half to the lower one."""
    rows = np.zeros((-(-terms.size // 32), 32), terms.dtype)
    rows.reshape(-1)[: terms.size] = terms
    total = np.zeros(32, terms.dtype)
    for row in rows:
        total = total + row
    while total.size > 1:
        total = total[: total.size // 2] + total[total.size // 2 :]
    return total[0]


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 64, 100, 1027])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_row_sum_has_32_lanes_and_a_tree(length, dtype):
    random = np.random.default_rng(length)
    x = random.normal(size=length).astype(dtype)
    # Products of these are exact, so that adding them with one rounding is adding them.
    left, right = (random.integers(-63, 64, length).astype(dtype) for _ in range(2))
    sums = np.empty(2, dtype)
    run(x, x, sums)
    assert sums[0] == in_lanes(x)
    run(left, right, sums)
    assert sums[1] == in_lanes(left * right)
    if dtype == "float32":
        assert run_at(left, right) == sums[1]


def test_products_are_added_with_one_rounding():
    sums, one, other = np.empty(2, "f4"), np.zeros(33, "f4"), np.zeros(33, "f4")
    one[[0, 32]], other[[0, 32]] = (1, 1 + 2.0**-12), (-1, 1 + 2.0**-12)
    run(one, other, sums)
    assert sums[1] == np.float32(2.0**-11 + 2.0**-24)


def flushes() -> bool:
    """Whether the calling thread treats subnormal numbers as zero."""
    return bool((np.full(1, 2.0**-126, np.float32) * np.float32(0.5))[0] == 0)


def kernel_result() -> float:
    return float(elementwise.add(HALF_OF_THE_SMALLEST, HALF_OF_THE_SMALLEST)[0])


@pytest.mark.skipif(not ON_X86, reason="only x86 has the two bits; elsewhere the functions do nothing")
def test_a_thread_has_its_own_state():
    # A new thread starts with the state of the one that starts it; the bits of a running one are its own.
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(flushes).result()
        with flush_to_zero():
            with flush_to_zero():
                assert flushes()
            assert flushes()
            assert not pool.submit(flushes).result()
            with ThreadPoolExecutor(1) as other:
                assert other.submit(flushes).result()
        assert not flushes()
        state = flush_to_zero()
        pool.submit(state.__enter__).result()
        # As arguments subnormal numbers count as zero, so even their sum, a normal number, is lost.
        assert pool.submit(lambda: (flushes(), kernel_result())).result() == (True, 0.0)
        assert (flushes(), kernel_result()) == (False, 2.0**-126)
        pool.submit(state.__exit__, None, None, None).result()
        assert pool.submit(lambda: (flushes(), kernel_result())).result() == (False, 2.0**-126)
    # The state is restored after an error.
    with pytest.raises(KeyError), flush_to_zero():
        raise KeyError
    assert not flushes()


def test_embedded_tokens_are_written_once():
    """Every thread writes them, and others read them then: a sum of what was written before would be seen, or added to.

    Here that sum is seen: the table of positions, all zeros, is where the result is written.
    """
    tokens, x = np.arange(1, 41, dtype="f4").reshape(1, 40), np.zeros((1, 40), "f4")
    embed(tokens.ctypes.data, x.ctypes.data, np.zeros((1, 3), "i8"), x)
    assert x.tolist() == tokens.tolist()


@pytest.mark.skipif("NUMBA_CPU_FEATURES" in os.environ, reason="kernels are compiled for another processor")
@pytest.mark.skipif(not (ON_X86 and CPU_INFO.exists()), reason="the system does not list its processor's features")
def test_features_are_those_of_the_processor():
    """Without them results in float32 stay the same, and only speed would tell."""
    listed = re.search(r"^flags\s*:(.*)", CPU_INFO.read_text(), re.M)[1].split()
    names = {"sse2", "avx2", "fma", "avx512f", "avx512bw"}
    assert features() & names == names.intersection(listed)
