"""Sums over a row: the lanes and the tree written down again, in NumPy, to the bit."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from daskgpt.kernels.vectors.operations import address_of
from daskgpt.kernels.vectors.sums import dot, dot_at, sum_of

LENGTHS = [1, 5, 31, 32, 33, 64, 100, 1027]


@numba.njit
def run(x, y, out):
    out[0], out[1] = sum_of(x), dot(x, y)


@numba.njit
def run_at(x, y):
    return dot_at(address_of(x), address_of(y), x.size)


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


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_is_summed_in_32_lanes_that_meet_in_a_tree(length, dtype):
    random = np.random.default_rng(length)
    x = random.normal(size=length).astype(dtype)
    # Products of these are exact, so that adding them with one rounding is adding them.
    left, right = (random.integers(-63, 64, length).astype(dtype) for _ in range(2))
    found = np.empty(2, dtype)
    run(x, x, found)
    assert found[0] == in_lanes(x)
    run(left, right, found)
    assert found[1] == in_lanes(left * right)
    if dtype == "float32":
        assert run_at(left, right) == found[1]


def test_products_are_added_with_one_rounding():
    x, found = np.array([1 + 2.0**-12], "f4"), np.empty(2, "f4")
    with_one = np.zeros(33, "f4")
    other = np.zeros(33, "f4")
    with_one[0], with_one[32], other[0], other[32] = 1, x[0], -1, x[0]
    run(with_one, other, found)
    assert found[1] == np.float32(2.0**-11 + 2.0**-24)
