"""Tests of products of float32 and float64: beside NumPy's, row by row the same bits, edges, threads."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from product_cases import call

from daskgpt.kernels.float32.gemm import LEFT, NOTHING, RESULT

ODD = [1, 7, 17, 33, 65, 100, 129]
TRANSPOSES = list(itertools.product((False, True), repeat=2))
# More than one round over every block: rows, packed columns, steps, panels of the same width.
LARGE = [
    (400, 70, 50),
    (400, 800, 400),
    (40, 800, 60),
    (24, 33, 1700),
    (393, 401, 33),
    (64, 128, 64),
    (72, 64, 32),
    (9, 96, 64),
]


def as_stored(matrix: np.ndarray, transposed: bool, gap: int) -> np.ndarray:
    """The matrix or its transpose with `gap` more numbers, NaN, after each row."""
    rows = matrix.T if transposed else matrix
    stored = np.full((rows.shape[0], rows.shape[1] + gap), np.nan, matrix.dtype)
    stored[:, : rows.shape[1]] = rows
    return stored


def random_operands(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(m * 10000 + n * 100 + k)
    return random.normal(size=(m, k)).astype("f4"), random.normal(size=(k, n)).astype("f4")


def check(m: int, n: int, k: int, dtype: str = "float32") -> None:
    """All transposes, with gaps between rows, beta 0 over NaN and others; nothing beside the result is written."""
    a, b = (operand.astype(dtype) for operand in random_operands(m, n, k))
    digit = 1e-6 if dtype == "float32" else 1e-15
    expected, tolerance = a.astype("f8") @ b.astype("f8"), digit * (10 + k)
    for transposes in TRANSPOSES:
        stored = as_stored(a, transposes[0], 3), as_stored(b, transposes[1], 2)
        for beta in (0.0, 0.25, 1.0):
            c = np.full((m + 1, n + 5), 2.0 if beta else np.nan, dtype)
            call(*stored, c, m, n, k, transposes, beta=beta)
            np.testing.assert_allclose(c[:m, :n], expected + 2 * beta, rtol=10 * digit, atol=tolerance)
            beside = c[:m, n:], c[m:]
            assert all((part == 2).all() if beta else np.isnan(part).all() for part in beside)


def test_odd_sizes_and_some_beyond_a_block_agree_with_numpy():
    for shape in [*itertools.product(ODD, repeat=3), *LARGE]:
        check(*shape)
    for shape in [(1, 1, 1), (5, 7, 3), (33, 65, 17), (64, 48, 64)]:
        check(*shape, "float64")


def test_a_sum_over_nothing_is_beta_times_c_and_an_empty_result_is_not_written():
    a, b, start = np.ones((20, 40), "f4"), np.ones((40, 40), "f4"), np.full((20, 40), 3.0, np.float32)
    for transposes, beta in itertools.product(TRANSPOSES, (0.0, 1.0)):
        np.testing.assert_array_equal(call(a, b, start.copy(), 20, 40, 0, transposes, beta=beta), beta * start)
        for m, n in ((0, 5), (5, 0)):
            np.testing.assert_array_equal(call(a, b, start.copy(), m, n, 5, transposes, beta=beta), start)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (131, 77), (500, 30), (33, 900), (1600, 385)])
def test_row_bits_do_not_depend_on_other_rows(transposes, n, k, beta):
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


def test_sums_run_in_order_with_one_rounding_a_step():
    k = 1000
    a, b = np.ones((1, k), "f4"), np.ones((k, 1), "f4")
    a[0, 0], a[0, k - 6] = 2**24, -(2.0**24)
    # 2²⁴ swallows every 1 that follows it, however many there are; five come after it is gone.
    assert call(a, b, np.empty((1, 1), "f4"), 1, 1, k).item() == 5
    a[0, 1], b[1] = 1 + 2.0**-12, 1 + 2.0**-12
    c = np.full((1, 1), -1, np.float32)
    assert call(a[:, 1:2], b[1:2], c, 1, 1, 1, beta=1.0).item() == 2.0**-11 + 2.0**-24


@pytest.mark.parametrize("shape", [(70, 130, 1000), (300, 401, 500), (9, 96, 64), (3, 5, 900), (257, 33, 77)], ids=str)
def test_cut_sum_continues(shape):
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(5, 7, 3), (40, 900, 800), (130, 401, 385), (413, 1600, 385)], ids=str)
def test_rows_that_start_at_a_bias_have_the_bits_of_a_result_that_holds_it(shape, dtype):
    m, n, k = shape
    a, b = (operand.astype(dtype) for operand in random_operands(m, n, k))
    bias = np.random.default_rng(4).normal(size=n).astype(dtype)
    expected = call(a, b.T.copy(), np.tile(bias, (m, 1)), m, n, k, (False, True), beta=1.0)
    c = call(a, b.T.copy(), np.full((m, n), np.nan, dtype), m, n, k, (False, True), beta=1.0, bias=bias)
    np.testing.assert_array_equal(c, expected)


def test_scratch_memory_is_used_again():
    """Without it every product would add 1.2 MB of its own, as long as there are places to keep them."""
    a, b, c = np.ones((768, 8), "f4"), np.ones((768, 384), "f4"), np.empty((8, 384), "f4")

    resident = []  # pages of this process that are in memory
    for _ in range(51):
        call(a, b, c, 8, 384, 768, (True, False))
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert resident[-1] - resident[0] < 5000  # of 4 KB: a third of what 50 products would have added


# Rows of queries and tokens up to the last of them, and the channels of a head.
MASKED = list(itertools.product([(1, 1), (5, 5), (32, 64), (64, 64), (20, 84), (64, 448)], [8, 16, 48, 80, 130]))


@pytest.mark.parametrize("shape", MASKED, ids=str)
def test_what_a_causal_mask_leaves_out_changes_no_bit(shape):
    """Scores q kᵀ of the last queries, whose numbers beyond the diagonal are left out, then scores v and scoresᵀ q."""
    (m, tokens), size = shape
    q, k_transposed = random_operands(m, tokens + 32, size)
    zeros = np.triu(np.ones((m, tokens), bool), tokens - m + 1)
    scores = np.full((m, tokens + 32), np.nan, np.float32)
    call(q, k_transposed, scores, m, tokens, size, masked=RESULT)
    whole = call(q, k_transposed, np.empty((m, tokens), "f4"), m, tokens, size)
    np.testing.assert_array_equal(scores[:, :tokens][~zeros], whole[~zeros])
    left = as_stored(np.where(zeros, np.float32(0), whole), False, 9)
    v = random_operands(tokens, 1, size)[0]
    for a_transposed, right, (rows, steps) in ((False, v, (m, tokens)), (True, q, (tokens, m))):
        sizes, transposes = (rows, size, steps), (a_transposed, False)
        for beta in (0.0, 1.0):
            starts = np.full((2, rows, size + 3), 2, np.float32)
            plain, masked = (call(left, right, c, *sizes, transposes, beta, m) for c, m in zip(starts, (NOTHING, LEFT)))
            np.testing.assert_array_equal(plain, masked)
