"""exp, sigmoid and maximum inside kernels: the stated errors, the ends of the range, NaN."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from daskgpt.kernels.compilation import wide_vectors
from daskgpt.kernels.vectors import elementary


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


exp, log, sigmoid = (over_an_array(each) for each in (elementary.exp, elementary.log, elementary.sigmoid))


def units_in_the_last_place(y: np.ndarray, exact: np.ndarray) -> float:
    return float(np.max(np.abs(y - exact) / np.spacing(exact.astype(y.dtype))))


def test_exp_float32_is_within_two_units_in_the_last_place():
    x = np.linspace(-87, 88.7, 500_001).astype("f4")
    assert units_in_the_last_place(exp(x), np.exp(x.astype("f8"))) <= 2


def test_exp_float32_is_clamped_beyond_its_range():
    y = exp(np.array([-np.inf, -1000, -87, 0, 88.72, 1000, np.inf, np.nan], "f4"))
    assert (y[:3] == y[2]).all()
    assert 0 < y[0] < 2e-38
    assert y[3] == 1
    assert (y[4:7] == y[4]).all()
    assert 3.3e38 < y[4] < np.inf
    assert np.isnan(y[7])


def test_log_float32_is_within_two_units_in_the_last_place():
    x = np.concatenate([np.geomspace(2e-38, 3e38, 500_001), np.linspace(0.4, 2.5, 500_001)]).astype("f4")
    x = x[x != 1]
    assert units_in_the_last_place(log(x), np.log(x.astype("f8"))) <= 2
    ends = log(np.array([1, np.inf, np.nan], "f4"))
    assert ends[0] == 0
    assert ends[1] == np.inf
    assert np.isnan(ends[2])


def test_sigmoid_float32_is_within_three_units_in_the_last_place():
    x = np.linspace(-87, 87, 500_001).astype("f4")
    assert units_in_the_last_place(sigmoid(x), 1 / (1 + np.exp(-x.astype("f8")))) <= 3


def test_float64_is_the_library_s():
    x = np.linspace(-30, 30, 10_001)
    np.testing.assert_allclose(exp(x), np.exp(x), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 2, 31, 64, 1000])
def test_maximum_of_a_row(dtype, size):
    @numba.njit
    def largest(row):
        return elementary.maximum(row)

    random = np.random.default_rng(size)
    for shift in (-1e4, 0.0, 1e4):
        row = (random.normal(size=size) + shift).astype(dtype)
        assert largest(row) == row.max() == elementary.maximum(row)
    infinite = np.array([-np.inf, -0.0, -1e-30], dtype)
    assert largest(infinite) == 0
    assert largest(np.array([1, np.inf], dtype)) == np.inf


def test_exp_in_plain_python():
    assert elementary.exp(1.0) == pytest.approx(np.e)
