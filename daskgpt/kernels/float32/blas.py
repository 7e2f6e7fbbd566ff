"""Matrix products inside Numba kernels: a function of addresses and row lengths as in BLAS, called by its address.

A kernel takes the address as an argument, so its compiled code can be cached on disk and does not depend on where the
function is loaded. float32 numbers are multiplied by `float32.gemm`; float64 ones, with which results are verified, by
plain loops. Each sum has one order, whatever the shapes, so that no chunk changes a bit: a library's has not.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from daskgpt.config.errors import refusal
from daskgpt.kernels.compilation import Kernel, helper, kernel
from daskgpt.kernels.float32 import gemm as sgemm
from daskgpt.kernels.simd.lanes import VOID, address_of, read, write


def gemm_address(dtype: np.dtype) -> int:
    """Return the `blas` argument of `gemm` for arrays of `dtype`."""
    return sgemm.address() if dtype.char == "f" else _DGEMM.address(dtype.char)


def _dgemm(a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc):
    """Compute what `gemm` describes; each sum continues from beta * c."""
    a_row, a_column = (1, lda) if a_transposed else (lda, 1)
    zero = beta - beta
    for i in range(m):
        for j in range(n):
            total = zero if beta == zero else beta * read(c, i * ldc + j, beta)
            if b_transposed:
                for p in range(k):
                    total += read(a, i * a_row + p * a_column, beta) * read(b, j * ldb + p, beta)
            write(c, i * ldc + j, total)
        if not b_transposed:
            for p in range(k):
                factor = read(a, i * a_row + p * a_column, beta)
                for j in range(n):
                    write(c, i * ldc + j, read(c, i * ldc + j, beta) + factor * read(b, p * ldb + j, beta))


# Compiled at its first use: hardly any process needs it.
_DGEMM = Kernel(_dgemm, "n n n n n n n n n f n n")


@intrinsic
def _call(typing_context, blas, a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc):
    """Call the product at address `blas`."""

    def generate(context, builder, signature, arguments):
        address, *values = arguments
        kind = ir.FunctionType(VOID, [value.type for value in values])
        builder.call(builder.inttoptr(address, kind.as_pointer()), values)
        return context.get_dummy_value()

    n = types.int64
    return types.void(n, n, n, n, n, n, n, n, n, n, beta, n, n), generate


@helper
def gemm(blas, a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc):
    """Compute c (m, n) = a (m, k) @ b (k, n) + beta * c inside a kernel.

    a, b and c are addresses, lda, ldb and ldc their row lengths in elements. A transposed a is stored (k, m), a
    transposed b (n, k). The dtype is that of beta. With beta = 0, c is not read.
    """
    _call(blas, a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc)


@helper
def product(blas, a_transposed, b_transposed, a, b, beta, c):
    """Compute c = a @ b + beta * c of 2-D arrays inside a kernel; c may have more columns than the product."""
    m, k = (a.shape[1], a.shape[0]) if a_transposed else a.shape
    n = b.shape[0] if b_transposed else b.shape[1]
    a_at, b_at, c_at = address_of(a), address_of(b), address_of(c)
    lda, ldb, ldc = a.shape[1], b.shape[1], c.shape[1]
    gemm(blas, a_transposed, b_transposed, m, n, k, a_at, lda, b_at, ldb, beta, c_at, ldc)


@kernel("n n r2 r2 n w2")
def multiply(blas, b_transposed, a, b, accumulate, c):
    """Write a @ b, or a @ bᵀ, to c, or add it with `accumulate`; further columns of c stay unchanged."""
    product(blas, 0, b_transposed, a, b, a.dtype.type(accumulate), c)


@kernel("n r2 n r2 n w2")
def multiply_rows(blas, a, first_row, b, accumulate, c):
    """Write as many rows of aᵀ @ b as c has, from `first_row` on, to c, or add them with `accumulate`."""
    (k, lda), n, (m, ldc) = a.shape, b.shape[1], c.shape
    a_at = address_of(a) + first_row * a.itemsize
    gemm(blas, 1, 0, m, n, k, a_at, lda, address_of(b), n, a.dtype.type(accumulate), address_of(c), ldc)


@kernel("n n n n n n n n n n f n n")
def _matmul(blas, a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc):
    gemm(blas, a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc)


def _row_length(name: str, array: np.ndarray, shape: tuple[int, int], dtype: np.dtype) -> int:
    """Return the distance of two rows in elements."""
    if array.shape != shape or array.dtype != dtype:
        rule, got = f"{name} must have shape {shape} and dtype {dtype}", {"shape": array.shape, "dtype": array.dtype}
        raise refusal(ValueError, "matmul", rule, got, "Check the shapes and the transpose flags.")
    row, element = array.strides
    gap_in_row = element != array.itemsize and shape[1] > 1
    if array.size and (gap_in_row or (row < shape[1] * array.itemsize and shape[0] > 1)):
        rule = f"the rows of {name} must be contiguous"
        raise refusal(ValueError, "matmul", rule, {"strides": array.strides}, "Use np.ascontiguousarray.")
    return max(row // array.itemsize, shape[1], 1)


def matmul(
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
) -> np.ndarray:
    """Write the matrix product of two 2-D arrays into a third, or add it to that.

    out = a @ b  (+ out)

    Shapes   a (m, k), b (k, n) -> out (m, n); a is (k, m) with transpose_a, b is (n, k) with transpose_b
    Dtype    float32 or float64, one for all; rows contiguous, a row may be followed by a gap
    Errors   ValueError when shapes, dtypes or strides do not fit, or out is read-only
    """
    m, n = out.shape
    k = a.shape[0] if transpose_a else a.shape[1]
    dtype = out.dtype
    lda = _row_length("a", a, (k, m) if transpose_a else (m, k), dtype)
    ldb = _row_length("b", b, (n, k) if transpose_b else (k, n), dtype)
    ldc = _row_length("out", out, (m, n), dtype)
    if not out.flags.writeable:
        got = {"writeable": False}
        raise refusal(ValueError, "matmul", "out must be writable", got, "Give an array of your own.")
    places = a.ctypes.data, lda, b.ctypes.data, ldb, 1.0 if accumulate else 0.0, out.ctypes.data, ldc
    _matmul.compile(dtype.char)(gemm_address(dtype), transpose_a, transpose_b, m, n, k, *places)
    return out
