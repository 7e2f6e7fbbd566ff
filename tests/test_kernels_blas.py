"""Matrix products: BLAS and the portable product beside NumPy, transposes, gaps between rows, refused arguments."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import softmax_attention
from tolerances import TOLERANCES

from daskgpt.kernels import attention, crossentropy, linear
from daskgpt.kernels.float32 import blas
from daskgpt.kernels.float32.blas import PORTABLE, VARIABLE, find_gemm, gemm_address, matmul
from daskgpt.kernels.float32.sgemm import has_fma

SHAPES = [(1, 1, 1), (5, 7, 3), (33, 65, 17), (64, 48, 64), (2, 3, 0)]


def operands(m: int, n: int, k: int, transpose_a: bool, transpose_b: bool, dtype: str) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(m + n + k)
    a, b = random.normal(size=(k, m) if transpose_a else (m, k)), random.normal(size=(n, k) if transpose_b else (k, n))
    return a.astype(dtype), b.astype(dtype)


def product(a: np.ndarray, b: np.ndarray, transpose_a: bool, transpose_b: bool) -> np.ndarray:
    return (a.T if transpose_a else a).astype("f8") @ (b.T if transpose_b else b).astype("f8")


@pytest.fixture(params=["own", "numpy", "portable"])
def address(request, monkeypatch):
    """The ways to multiply; NumPy's wheels bring a BLAS, so that one must be found."""
    if request.param == "own" and not has_fma():
        pytest.skip("the processor has no FMA")
    monkeypatch.setenv(VARIABLE, request.param)
    assert find_gemm("s") != PORTABLE
    assert find_gemm("d") not in (PORTABLE, find_gemm("s"))
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transposes", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_matmul_agrees_with_numpy(shape, transposes, dtype, address):
    m, n, k = shape
    a, b = operands(m, n, k, *transposes, dtype)
    expected, flags = product(a, b, *transposes), dict(zip(("transpose_a", "transpose_b"), transposes, strict=True))
    out = np.full((m, n), np.nan, dtype)
    assert matmul(a, b, out, **flags) is out
    np.testing.assert_allclose(out, expected, **TOLERANCES[f"kernel {dtype}"])
    matmul(a, b, out, accumulate=True, **flags)
    np.testing.assert_allclose(out, 2 * expected, **TOLERANCES[f"kernel {dtype}"])


def test_rows_may_be_followed_by_a_gap(address):
    wide = np.random.default_rng(1).normal(size=(10, 30))
    a, b, place = wide[:4, 3:9], wide[2:8, 10:22], np.zeros((6, 20))
    matmul(a, b, place[1:5, 4:16])
    np.testing.assert_allclose(place[1:5, 4:16], a @ b, **TOLERANCES["kernel float64"])
    place[1:5, 4:16] = 0
    assert not place.any()


def test_read_only_operands_are_accepted():
    a, b = np.ones((3, 4), "f4"), np.ones((4, 5), "f4")
    a.flags.writeable = b.flags.writeable = False
    np.testing.assert_array_equal(matmul(a, b, np.empty((3, 5), "f4")), np.full((3, 5), 4))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_run_without_a_blas(dtype, address):
    random = np.random.default_rng(2)
    x, weight, bias = (random.normal(size=shape).astype(dtype) for shape in ((2, 40, 24), (36, 24), (36,)))
    tolerance = TOLERANCES[f"kernel {dtype}"]
    y = linear.forward(x, weight, bias)
    np.testing.assert_allclose(y, x.astype("f8") @ weight.T.astype("f8") + bias, **tolerance)
    np.testing.assert_allclose(linear.backward_x(y, weight), y.astype("f8") @ weight.astype("f8"), **tolerance)
    qkv = random.normal(size=(2, 70, 36)).astype(dtype)
    attended, logsumexp = attention.forward(qkv, 3)
    np.testing.assert_allclose(attended, softmax_attention(qkv.astype("f8"), 3)[0], **tolerance)
    gradient = attention.backward(attended, qkv, attended, logsumexp, 3)
    assert np.isfinite(gradient).all()
    losses, dlogits = crossentropy.forward(x, weight, np.zeros((2, 40), "i4"), 30)
    np.testing.assert_allclose(dlogits.astype("f8").sum(-1), 0, atol=1e-5)
    assert np.isfinite(losses).all()


def test_portable_and_blas_agree_on_attention_gradients(monkeypatch):
    qkv, dy = (np.random.default_rng(3).normal(size=(1, 70, columns)) for columns in (36, 12))
    results = []
    for found in (find_gemm("d"), PORTABLE):
        monkeypatch.setattr(blas, "find_gemm", lambda letter, found=found: found)
        assert gemm_address(qkv.dtype) == found
        results.append(attention.backward(dy, qkv, *attention.forward(qkv, 3), 3))
    np.testing.assert_allclose(results[0], results[1], **TOLERANCES["kernel float64"])


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError) as error:
        matmul(np.ones((3, 4)), np.ones((5, 6)), np.empty((3, 6)))
    assert str(error.value) == (
        "matmul: b must have shape (4, 6) and dtype float64; got shape=(5, 6), dtype=float64. "
        "Check the shapes and the transpose flags."
    )


def test_another_dtype_is_refused():
    with pytest.raises(
        ValueError, match=r"^matmul: a must have shape \(3, 4\) and dtype float64; got shape=\(3, 4\), dtype=float32. "
    ):
        matmul(np.ones((3, 4), "f4"), np.ones((4, 6)), np.empty((3, 6)))


def test_columns_that_are_not_contiguous_are_refused():
    with pytest.raises(ValueError) as error:
        matmul(np.ones((4, 3)).T, np.ones((4, 6)), np.empty((3, 6)))
    assert str(error.value) == (
        "matmul: the rows of a must be contiguous; got strides=(8, 24). Use np.ascontiguousarray."
    )


def test_a_read_only_result_is_refused():
    out = np.zeros((3, 6))
    out.flags.writeable = False
    with pytest.raises(ValueError) as error:
        matmul(np.ones((3, 4)), np.ones((4, 6)), out)
    assert str(error.value) == "matmul: out must be writable; got writeable=False. Give an array of your own."


def test_whole_numbers_are_refused():
    with pytest.raises(TypeError) as error:
        matmul(np.ones((3, 4), "i4"), np.ones((4, 6), "i4"), np.empty((3, 6), "i4"))
    assert str(error.value) == "matmul: arrays must be float32 or float64; got dtype=int32. Convert them first."
