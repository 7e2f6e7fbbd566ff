"""About the nearest matrix with orthonormal rows or columns: Newton-Schulz steps, which are products alone."""

import math
from collections.abc import Callable

import numpy as np

from daskgpt.kernels.arguments import flat
from daskgpt.kernels.compilation import helper, kernel
from daskgpt.kernels.float32.blas import gemm, gemm_address, product
from daskgpt.kernels.simd.lanes import address_of
from daskgpt.kernels.simd.math import fma
from daskgpt.kernels.simd.reductions import dot

ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315  # of the polynomial, whose slope at 0 is as steep as five steps allow
EPS = 1e-7

# Rows of a symmetric product that are made at once, and the side of the patches that a matrix is turned by.
_BAND, _PATCH = 16, 16

# The matrix after one Newton-Schulz step, in memory of its own.
Iteration = Callable[[np.ndarray], np.ndarray]


@kernel("w2 f")
def _normalise(x, eps):
    squares = 0.0
    for i in range(x.shape[0]):
        squares += dot(x[i], x[i])
    scale = x.dtype.type(1.0 / max(math.sqrt(squares), eps))
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] *= scale


@kernel("w1 r1 f f")
def _polynomial(square, gram, b, c):
    for i in range(square.size):
        square[i] = fma(c, square[i], b * gram[i])


@kernel("r1 w1 f")
def _add_scaled(x, y, factor):
    for i in range(x.size):
        y[i] = fma(factor, x[i], y[i])


@kernel("r2 w2")
def _turn(x, y):
    """y = xᵀ, a patch at a time: its lines stay in the first cache."""
    rows, columns = x.shape
    for i0 in range(0, rows, _PATCH):
        for j0 in range(0, columns, _PATCH):
            for i in range(i0, min(i0 + _PATCH, rows)):
                for j in range(j0, min(j0 + _PATCH, columns)):
                    y[j, i] = x[i, j]


@helper
def _symmetric(blas, x, y):
    """y = x xᵀ, the upper half of which is made, by bands of rows, and the lower one copied from it.

    Both halves are sums of the same products; where a product's sums have one order, they are the same numbers.
    """
    (n, k), size = x.shape, x.itemsize
    source, target, zero = address_of(x), address_of(y), x.dtype.type(0)
    for first in range(0, n, _BAND):
        last = min(first + _BAND, n)
        rows, place = source + first * k * size, target + (first * n + first) * size
        gemm(blas, 0, 1, last - first, n - first, k, rows, k, rows, k, zero, place, n)
        for j in range(last, n):
            for i in range(first, last):
                y[j, i] = y[i, j]


@kernel("n r2 w2 w2 w2 f f f")
def _iteration(blas, x, gram, square, y, a, b, c):
    """y = a x + (b g + c g²) x with g = x xᵀ, which is its own transpose."""
    _symmetric(blas, x, gram)
    _symmetric(blas, gram, square)
    for i in range(len(x)):
        for j in range(len(x)):
            square[i, j] = fma(c, square[i, j], b * gram[i, j])
        for j in range(x.shape[1]):
            y[i, j] = a * x[i, j]
    product(blas, 0, 0, square, x, x.dtype.type(1), y)


def polynomial(gram: np.ndarray, square: np.ndarray) -> np.ndarray:
    """B gram + C square, written over the square."""
    _polynomial(flat(square), flat(gram), B, C)
    return square


def add_scaled(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A x + y, written over y."""
    _add_scaled(flat(x), flat(y), A)
    return y


def iteration(x: np.ndarray) -> np.ndarray:
    """One Newton-Schulz step: A x + (B g + C g²) x with g = x xᵀ.

    Shapes   x (n, k) -> (n, k)
    Dtype    float32 or float64
    Cost     3 n² k + n³ operations: g and g² are symmetric, and half of each is computed
    """
    gram, square = (np.empty((len(x), len(x)), x.dtype) for _ in range(2))
    y = np.empty_like(x)
    _iteration(gemm_address(x.dtype), x, gram, square, y, A, B, C)
    return y


def _turned(x: np.ndarray) -> np.ndarray:
    y = np.empty(x.shape[::-1], x.dtype)
    _turn(x, y)
    return y


def orthogonalised(x: np.ndarray, step: Iteration = iteration) -> np.ndarray:
    """About the nearest matrix with orthonormal rows or columns: U Vᵀ of x = U S Vᵀ, but for singular values near 1.

    Five steps of a polynomial that pulls the singular values of x / |x| towards 1, the least of them fastest: from
    0.01 on they end between 0.68 and 1.14.

    Shapes   x (n, k) -> (n, k); x is written over
    Dtype    float32 or float64
    Cost     5 steps of 3 a² b + a³ operations for sides a <= b
    Source   Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
    """
    tall = x.shape[0] > x.shape[1]
    x = _turned(x) if tall else x
    _normalise(x, EPS)
    for _ in range(ITERATIONS):
        x = step(x)
    return _turned(x) if tall else x
