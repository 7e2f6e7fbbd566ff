"""Tests of matrix products in both dtypes: transposes, sums that continue, gaps between rows."""

import numpy as np
import pytest
from tolerances import TOLERANCES

from daskgpt.kernels.float32.blas import matmul

TRANSPOSES = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (33, 65, 17), (64, 48, 64), (2, 3, 0)])
def test_matmul_agrees_with_numpy(shape, transposes, dtype):
    m, n, k = shape
    random = np.random.default_rng(m + n + k)
    a, b = random.normal(size=(m, k)).astype(dtype), random.normal(size=(k, n)).astype(dtype)
    expected = a.astype("f8") @ b.astype("f8")
    stored = [np.ascontiguousarray(x.T) if flag else x for x, flag in zip((a, b), transposes)]
    for operand in stored:
        operand.flags.writeable = False
    flags = dict(zip(("transpose_a", "transpose_b"), transposes))
    out = np.full((m, n), np.nan, dtype)
    assert matmul(*stored, out, **flags) is out
    np.testing.assert_allclose(out, expected, **TOLERANCES[f"kernel {dtype}"])
    matmul(*stored, out, accumulate=True, **flags)
    np.testing.assert_allclose(out, 2 * expected, **TOLERANCES[f"kernel {dtype}"])


def test_rows_may_be_followed_by_a_gap():
    wide = np.random.default_rng(1).normal(size=(10, 30))
    a, b, place = wide[:4, 3:9], wide[2:8, 10:22], np.zeros((6, 20))
    matmul(a, b, place[1:5, 4:16])
    np.testing.assert_allclose(place[1:5, 4:16], a @ b, **TOLERANCES["kernel float64"])
    place[1:5, 4:16] = 0
    assert not place.any()
