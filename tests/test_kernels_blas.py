"""Tests of matrix products: our own, NumPy's BLAS and the portable one, transposes, gaps between rows, the choice."""

import numpy as np
import pytest
from tolerances import TOLERANCES

from daskgpt.kernels.float32 import blas, gemm
from daskgpt.kernels.float32.blas import VARIABLE, find_gemm, gemm_address, matmul, one_order

TRANSPOSES = [(False, False), (True, False), (False, True), (True, True)]
SINGLE, DOUBLE = np.dtype("f4"), np.dtype("f8")


@pytest.fixture(params=["own", "numpy", "portable"])
def way(request, monkeypatch):
    """The ways to multiply; NumPy's wheels bring a BLAS, so that one must be found."""
    if request.param == "own" and not gemm.has_fma():
        pytest.skip("the processor has no FMA")
    monkeypatch.setenv(VARIABLE, request.param)
    assert find_gemm("s") != 0
    assert find_gemm("d") not in (0, find_gemm("s"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (33, 65, 17), (64, 48, 64), (2, 3, 0)])
def test_matmul_agrees_with_numpy(shape, transposes, dtype, way):
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


def test_rows_may_be_followed_by_a_gap(way):
    wide = np.random.default_rng(1).normal(size=(10, 30))
    a, b, place = wide[:4, 3:9], wide[2:8, 10:22], np.zeros((6, 20))
    matmul(a, b, place[1:5, 4:16])
    np.testing.assert_allclose(place[1:5, 4:16], a @ b, **TOLERANCES["kernel float64"])
    place[1:5, 4:16] = 0
    assert not place.any()


def test_the_variable_chooses(monkeypatch):
    address = gemm.address() if gemm.has_fma() else find_gemm("s")
    assert address not in (0, find_gemm("s")) or not gemm.has_fma()
    portable = tuple(blas._PORTABLE.address(kind) for kind in "fd")
    addresses = {"numpy": (find_gemm("s"), find_gemm("d")), "portable": portable}
    addresses |= {"own": (address, find_gemm("d")), "": (address, find_gemm("d"))}
    for choice, expected in addresses.items():
        if choice != "own" or gemm.has_fma():
            monkeypatch.setenv(VARIABLE, choice)
            assert (gemm_address(SINGLE), gemm_address(DOUBLE)) == expected
            assert one_order(SINGLE) == (choice in ("own", "") and gemm.has_fma())
            assert not one_order(DOUBLE)
    monkeypatch.delenv(VARIABLE)
    assert gemm_address(SINGLE) == address
    monkeypatch.setenv(VARIABLE, "mkl")
    with pytest.raises(ValueError, match="own, numpy or portable; got DASKGPT_BLAS=mkl"):
        gemm_address(SINGLE)


def test_processor_without_fma_uses_numpy(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for module in (blas, gemm):
        monkeypatch.setattr(module, "has_fma", lambda: False)
    gemm.address.cache_clear()
    assert gemm_address(SINGLE) == find_gemm("s")
    monkeypatch.setenv(VARIABLE, "own")
    with pytest.raises(RuntimeError, match="sgemm: the processor must have fused multiply-adds"):
        gemm_address(SINGLE)
