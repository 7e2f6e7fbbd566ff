"""The float32 product of our own: beside float64, row by row the same bits, edges, the choice of a BLAS."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from daskgpt.kernels import linear
from daskgpt.kernels.float32 import blas, sgemm, sgemm_tiles
from daskgpt.kernels.float32.blas import PORTABLE, VARIABLE, find_gemm, gemm_address
from daskgpt.kernels.float32.registers import LANES, ROWS, WIDTH

needs_fma = pytest.mark.skipif(not sgemm.has_fma(), reason="the processor has no FMA")

ODD = [1, 7, 17, 33, 65, 100, 129]
TRANSPOSES = list(itertools.product((False, True), repeat=2))
# More than one round over every block: rows, packed columns, steps, panels of the same width.
LARGE = [(400, 70, 50), (40, 800, 60), (24, 33, 1700), (393, 401, 33), (64, 128, 64), (72, 64, 32), (9, 96, 64)]


def as_stored(matrix: np.ndarray, transposed: bool, gap: int) -> np.ndarray:
    """The matrix or its transpose with `gap` more numbers, NaN, after each row."""
    rows = matrix.T if transposed else matrix
    stored = np.full((rows.shape[0], rows.shape[1] + gap), np.nan, np.float32)
    stored[:, : rows.shape[1]] = rows
    return stored


def call(a, b, c, m, n, k, transposes=(False, False), beta=0.0):
    """cblas_sgemm through the address; the arrays' own row lengths."""
    whole, real, place = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    kinds = [*[ctypes.c_int32] * 3, *[whole] * 3, real, place, whole, place, whole, real, place, whole]
    function = ctypes.CFUNCTYPE(None, *kinds)(sgemm.address())
    orders = [112 if transposed else 111 for transposed in transposes]
    operands = a.ctypes.data, a.strides[0] // 4, b.ctypes.data, b.strides[0] // 4
    function(101, *orders, m, n, k, 1.0, *operands, beta, c.ctypes.data, c.strides[0] // 4)
    return c


def random_operands(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(m * 10000 + n * 100 + k)
    return random.normal(size=(m, k)).astype("f4"), random.normal(size=(k, n)).astype("f4")


def check(m: int, n: int, k: int) -> None:
    """All transposes, with gaps between rows, beta 0 over NaN and beta 1; nothing beside the result is written."""
    a, b = random_operands(m, n, k)
    expected, tolerance = a.astype("f8") @ b.astype("f8"), 1e-6 * (10 + k)
    for transposes in TRANSPOSES:
        stored = as_stored(a, transposes[0], 3), as_stored(b, transposes[1], 2)
        for beta in (0.0, 1.0):
            c = np.full((m + 1, n + 5), 2.0 if beta else np.nan, np.float32)
            call(*stored, c, m, n, k, transposes, beta=beta)
            np.testing.assert_allclose(c[:m, :n], expected + 2 * beta, rtol=1e-5, atol=tolerance)
            beside = c[:m, n:], c[m:]
            assert all((part == 2).all() if beta else np.isnan(part).all() for part in beside)


@needs_fma
@pytest.mark.parametrize("m", ODD)
def test_odd_sizes_agree_with_float64(m):
    for n, k in itertools.product(ODD, repeat=2):
        check(m, n, k)


@needs_fma
@pytest.mark.parametrize("shape", LARGE)
def test_sizes_beyond_a_block_agree_with_float64(shape):
    check(*shape)


@needs_fma
@pytest.mark.parametrize("transposes", TRANSPOSES)
def test_beta_scales(transposes):
    a, b = random_operands(70, 50, 1000)
    c = np.random.default_rng(1).normal(size=(70, 50)).astype("f4")
    expected = a.astype("f8") @ b.astype("f8") + 0.25 * c
    call(as_stored(a, transposes[0], 0), as_stored(b, transposes[1], 0), c, 70, 50, 1000, transposes, 0.25)
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-3)


@needs_fma
@pytest.mark.parametrize(("beta", "expected"), [(0.0, 0.0), (1.0, 3.0)])
def test_a_sum_over_nothing_is_beta_times_c(beta, expected):
    for transposes in TRANSPOSES:
        c = np.full((20, 40), 3.0, np.float32)
        call(np.ones((20, 40), "f4"), np.ones((40, 40), "f4"), c, 20, 40, 0, transposes, beta=beta)
        np.testing.assert_array_equal(c, np.full((20, 40), expected, "f4"))


@needs_fma
@pytest.mark.parametrize("shape", [(0, 5, 5), (5, 0, 5)])
def test_an_empty_result_is_not_written(shape):
    for transposes in TRANSPOSES:
        c = np.full((6, 6), 3.0, np.float32)
        call(np.ones((6, 6), "f4"), np.ones((6, 6), "f4"), c, *shape, transposes)
        assert (c == 3).all()


@needs_fma
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (131, 77), (500, 30), (33, 900), (1600, 385)])
def test_a_row_has_the_same_bits_in_any_company(transposes, n, k, beta):
    """Any cut of the rows or of the columns, any position in memory: also other tiles, loops and edges."""
    m = 413
    a, b = random_operands(m, n, k)
    start = np.random.default_rng(2).normal(size=(m, n)).astype("f4")
    whole = call(a, b, start.copy(), m, n, k, beta=beta)
    for size in (1, 8, 50, 64, 390, m):
        rows = slice(3, 3 + size)
        columns = slice(n // 3, n // 3 + max(n * size // m, 1))
        for part in ((rows, slice(None)), (rows, columns)):
            left, right, c = a[part[0]], b[:, part[1]], start[part].copy()
            stored = as_stored(left, transposes[0], 1), as_stored(right, transposes[1], 7)
            call(*stored, c, *c.shape, k, transposes, beta=beta)
            np.testing.assert_array_equal(c, whole[part])


@needs_fma
def test_sums_run_in_order_with_one_rounding_a_step():
    k = 1000
    a, b = np.ones((1, k), "f4"), np.ones((k, 1), "f4")
    a[0, 0], a[0, k - 6] = 2**24, -(2.0**24)
    # 2²⁴ swallows every 1 that follows it, however many there are; five come after it is gone.
    assert call(a, b, np.empty((1, 1), "f4"), 1, 1, k).item() == 5
    a[0, 1], b[1] = 1 + 2.0**-12, 1 + 2.0**-12
    c = np.full((1, 1), -1, np.float32)
    assert call(a[:, 1:2], b[1:2], c, 1, 1, 1, beta=1.0).item() == 2.0**-11 + 2.0**-24


@needs_fma
@pytest.mark.parametrize("shape", [(70, 130, 1000), (300, 401, 500), (9, 96, 64), (3, 5, 900), (257, 33, 77)], ids=str)
def test_a_sum_that_is_cut_goes_on_where_it_was(shape):
    """Products that follow one another have the bits of one, whatever the lengths, transposes and tiles."""
    m, n, k = shape
    a, b = random_operands(m, n, k)
    start = np.random.default_rng(3).normal(size=(m, n)).astype("f4")
    whole = call(a, b, start.copy(), m, n, k, beta=1.0)
    for transposes, ends in itertools.product(TRANSPOSES, ([k], [384, k], [1, 17, k], [32, 64, k])):
        c, first = start.copy(), 0
        for end in sorted({min(end, k) for end in ends}):
            left = as_stored(a[:, first:end], transposes[0], 3)
            right = as_stored(b[first:end], transposes[1], 1)
            call(left, right, c, m, n, end - first, transposes, beta=1.0)
            first = end
        np.testing.assert_array_equal(c, whole, err_msg=f"{transposes} {ends}")


@needs_fma
def test_infinity_and_nan_stay_in_their_row_and_column():
    a, b = random_operands(40, 50, 20)
    expected = a @ b
    a[3, 4], b[5, 6] = np.inf, np.nan
    got = call(a, b, np.empty((40, 50), "f4"), 40, 50, 20)
    assert not np.isfinite(got[3]).any()
    assert np.isnan(got[:, 6]).all()
    finite = np.ones((40, 50), bool)
    finite[3], finite[:, 6] = False, False
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-4, atol=1e-4)


@needs_fma
def test_threads_at_the_same_time_get_the_same_bits():
    shapes = [(70, 130, 800), (130, 70, 90), (64, 64, 64), (17, 400, 33)] * 6

    def multiply(shape):
        return [
            call(as_stored(a, left, 0), as_stored(b, right, 0), np.empty(shape[:2], "f4"), *shape, (left, right))
            for left, right in TRANSPOSES
            for a, b in [random_operands(*shape)]
        ]

    alone = [multiply(shape) for shape in shapes]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(multiply, shapes))
    for one, other in zip(itertools.chain(*alone), itertools.chain(*together), strict=True):
        np.testing.assert_array_equal(one, other)


@needs_fma
def test_scratch_memory_is_used_again():
    """Without it every product would add 1.2 MB of its own, as long as there are places to keep them."""
    code = (
        "import resource, numpy as np; from daskgpt.kernels.float32.blas import matmul\n"
        "a, b, c = np.ones((768, 8), 'f4'), np.ones((768, 384), 'f4'), np.empty((8, 384), 'f4')\n"
        "size = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "matmul(a, b, c, transpose_a=True); before = size()\n"
        "for _ in range(50): matmul(a, b, c, transpose_a=True)\n"
        "print(size() - before)"
    )
    environment = os.environ | {VARIABLE: "own", "PYTHONPATH": str(Path(sgemm.__file__).parents[3])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 4096  # of 1 KB


@needs_fma
def test_the_gradient_of_a_weight_does_not_depend_on_how_its_rows_are_cut(monkeypatch):
    monkeypatch.setenv(VARIABLE, "own")
    random = np.random.default_rng(5)
    dy, x = random.normal(size=(2, 40, 96)).astype("f4"), random.normal(size=(2, 40, 72)).astype("f4")
    whole = linear.backward_weight(dy, x, total=np.empty((96, 72), "f4"), accumulate=False)
    for size in (1, 8, 40):
        for first in range(0, 96 - size + 1, 23):
            total = np.full((size, 72), np.nan, "f4")
            linear.backward_weight(dy, x, total=total, accumulate=False, first_row=first)
            np.testing.assert_array_equal(total, whole[first : first + size])


def test_the_variable_chooses(monkeypatch):
    single, double = np.dtype("f4"), np.dtype("f8")
    monkeypatch.setenv(VARIABLE, "numpy")
    assert (gemm_address(single), gemm_address(double)) == (find_gemm("s"), find_gemm("d"))
    monkeypatch.setenv(VARIABLE, "portable")
    assert (gemm_address(single), gemm_address(double)) == (PORTABLE, PORTABLE)
    for unset in ("", None):
        monkeypatch.delenv(VARIABLE, raising=False) if unset is None else monkeypatch.setenv(VARIABLE, unset)
        assert gemm_address(single) == (sgemm.address() if sgemm.has_fma() else find_gemm("s"))
        assert gemm_address(double) == find_gemm("d")


@needs_fma
def test_the_variable_can_ask_for_ours(monkeypatch):
    monkeypatch.setenv(VARIABLE, "own")
    assert gemm_address(np.dtype("f4")) == sgemm.address() not in (PORTABLE, find_gemm("s"))
    assert gemm_address(np.dtype("f8")) == find_gemm("d")


def test_any_other_choice_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "mkl")
    with pytest.raises(ValueError) as error:
        gemm_address(np.dtype("f4"))
    assert str(error.value) == (
        "blas: DASKGPT_BLAS must be own, numpy or portable; got DASKGPT_BLAS=mkl. "
        "Unset it to take the fastest of this processor."
    )


def test_a_processor_without_fma_takes_numpy_and_refuses_ours(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for module in (blas, sgemm):
        monkeypatch.setattr(module, "has_fma", lambda: False)
    sgemm.address.cache_clear()
    assert gemm_address(np.dtype("f4")) == blas.find_gemm("s")
    monkeypatch.setenv(VARIABLE, "own")
    with pytest.raises(
        RuntimeError,
        match=r"^sgemm: the processor must have fused multiply-adds of vectors \(AVX2 and FMA, or NEON\); "
        r"got processor=\S+\. Set DASKGPT_BLAS=numpy, or unset it\.$",
    ):
        gemm_address(np.dtype("f4"))


def test_on_arm_every_step_is_one_fused_instruction():
    """Compiled for another processor, and looked at: as many fused multiply-adds as steps unrolled, and no call."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = "aarch64-unknown-linux-gnu"
    tile = sgemm_tiles._Tile(sgemm_tiles.BY_ROWS, ROWS, WIDTH).function(module)
    tile.linkage = "external"
    parsed = llvm.parse_assembly(str(module))
    machine = llvm.Target.from_triple(module.triple).create_target_machine(cpu="neoverse-n1", opt=3)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    assembly = machine.emit_assembly(parsed)
    unrolled = sgemm_tiles._UNROLL + 1  # and the rest, step by step
    assert len(re.findall(r"\bfmla\b", assembly)) == unrolled * ROWS * WIDTH * LANES // 4
    assert not re.findall(r"\bbl\b", assembly)
