"""Matrix products inside Numba kernels: a function of addresses and row lengths as in BLAS, called by its address.

A kernel takes the address as an argument, so its compiled code can be cached on disk and does not depend on where the
function is loaded. float32 numbers are multiplied by `float32.gemm`; float64 ones, with which results are verified, by
plain loops. Each sum has one order, whatever the shapes, so that no chunk changes a bit: a library's has not.
"""

import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from daskgpt.kernels.compilation import Kernel, helper, kernel
from daskgpt.kernels.float32.gemm import NOTHING, sgemm
from daskgpt.kernels.simd.lanes import VOID, address_of, read, write


@functools.cache
def gemm_address(dtype: np.dtype) -> int:
    """Return the `blas` argument of `gemm` for arrays of `dtype`; the product is compiled at the first call."""
    return sgemm.address() if dtype.char == "f" else _DGEMM.address(dtype.char)


def _dgemm(masked, a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc, bias):
    """Compute what `biased_gemm` describes; each sum continues from beta * c, or from the bias."""
    a_row, a_column = (1, lda) if a_transposed else (lda, 1)
    zero = beta - beta
    for i in range(m):
        for j in range(n):
            total = zero if beta == zero else beta * read(c, i * ldc + j, beta)
            total = read(bias, j, beta) if bias != 0 else total
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
_DGEMM = Kernel(_dgemm, "n n n n n n n n n n f n n n")


@intrinsic
def biased_gemm(typing_context, blas, masked, a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc, bias):
    """Compute c (m, n) = a (m, k) @ b (k, n) + beta * c inside a kernel.

    a, b and c are addresses, lda, ldb and ldc their row lengths in elements. A transposed a is stored (k, m), a
    transposed b (n, k). The dtype is that of beta. With beta = 0, c is not read. `masked` is NOTHING, RESULT or LEFT of
    `float32.gemm`: with RESULT, rows of b and c have room for whole vectors, and what they hold beyond the diagonal is
    of no account; with LEFT, the zeros of a beyond the diagonal may be left out, which changes no bit.

    bias is 0 or, with a transposed b alone and beta = 1, the address of a row that each row of c starts at instead.
    """

    def generate(context, builder, signature, arguments):
        address, *values = arguments
        kind = ir.FunctionType(VOID, [value.type for value in values])
        builder.call(builder.inttoptr(address, kind.as_pointer()), values)
        return context.get_dummy_value()

    n = types.int64
    return types.void(n, n, n, n, n, n, n, n, n, n, n, beta, n, n, n), generate


@helper
def gemm(blas, masked, a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc):
    """Compute what `biased_gemm` describes, without a bias."""
    biased_gemm(blas, masked, a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc, 0)


@helper
def product(blas, b_transposed, a, b, beta, c):
    """Compute c = a @ b + beta * c of 2-D arrays inside a kernel; c may have more columns than the product."""
    (m, k), ldb, ldc = a.shape, b.shape[1], c.shape[1]
    n = b.shape[0] if b_transposed else ldb
    gemm(blas, NOTHING, 0, b_transposed, m, n, k, address_of(a), k, address_of(b), ldb, beta, address_of(c), ldc)


@kernel("n n r2 r2 n w2")
def multiply(blas, b_transposed, a, b, accumulate, c):
    """Write a @ b, or a @ bᵀ, to c, or add it with `accumulate`; further columns of c stay unchanged."""
    product(blas, b_transposed, a, b, a.dtype.type(accumulate), c)


@kernel("n r2 n r2 n w2")
def multiply_rows(blas, a, first_row, b, accumulate, c):
    """Write as many rows of aᵀ @ b as c has, from `first_row` on, to c, or add them with `accumulate`."""
    (k, lda), n, (m, ldc) = a.shape, b.shape[1], c.shape
    a_at = address_of(a) + first_row * a.itemsize
    gemm(blas, NOTHING, 1, 0, m, n, k, a_at, lda, address_of(b), n, a.dtype.type(accumulate), address_of(c), ldc)
