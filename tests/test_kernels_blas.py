"""Tests of matrix products in both dtypes: transposes, sums that continue, gaps between rows."""

import numpy as np
import pytest
from product_cases import call
from tolerances import TOLERANCES

TRANSPOSES = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (33, 65, 17), (64, 48, 64), (2, 3, 0)])
def test_products_agree_with_numpy(shape, transposes, dtype):
    m, n, k = shape
    random = np.random.default_rng(m + n + k)
    a, b = random.normal(size=(m, k)).astype(dtype), random.normal(size=(k, n)).astype(dtype)
    expected = a.astype("f8") @ b.astype("f8")
    stored = [np.ascontiguousarray(x.T) if flag else x for x, flag in zip((a, b), transposes)]
    for operand in stored:
        operand.flags.writeable = False
    out = call(*stored, np.full((m, n), np.nan, dtype), m, n, k, transposes)
    np.testing.assert_allclose(out, expected, **TOLERANCES[f"kernel {dtype}"])
    call(*stored, out, m, n, k, transposes, beta=1.0)
    np.testing.assert_allclose(out, 2 * expected, **TOLERANCES[f"kernel {dtype}"])


def test_rows_may_be_followed_by_a_gap():
    wide = np.random.default_rng(1).normal(size=(10, 30))
    a, b, place = wide[:4, 3:9], wide[2:8, 10:22], np.zeros((6, 20))
    call(a, b, place[1:5, 4:16], 4, 12, 6)
    np.testing.assert_allclose(place[1:5, 4:16], a @ b, **TOLERANCES["kernel float64"])
    place[1:5, 4:16] = 0
    assert not place.any()
