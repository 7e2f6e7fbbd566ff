"""Muon: one matrix's update along the nearest orthogonal matrix to its momentum, into new arrays or in place."""

import math
from collections.abc import Callable

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, flat
from daskgpt.kernels.compilation import kernel
from daskgpt.kernels.float32.blas import matmul
from daskgpt.kernels.vectors.elementary import fma
from daskgpt.kernels.vectors.sums import dot

ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315  # of the polynomial, whose slope at 0 is as steep as five steps allow
EPS = 1e-7

# The matrix after one Newton-Schulz step, in memory of its own.
Iteration = Callable[[np.ndarray], np.ndarray]


@kernel("r1 w1 w1 f f")
def _direction(gradient, m, direction, beta, keep):
    for i in range(gradient.size):
        m[i] = beta * m[i] + keep * gradient[i]
        direction[i] = beta * m[i] + keep * gradient[i]


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
def _scaled(x, y, factor):
    for i in range(x.size):
        y[i] = factor * x[i]


@kernel("r1 w1 f")
def _add_scaled(x, y, factor):
    for i in range(x.size):
        y[i] = fma(factor, x[i], y[i])


@kernel("w1 r1 f f f")
def _step(weight, direction, rate, scale, decay):
    for i in range(weight.size):
        weight[i] = weight[i] - rate * (scale * direction[i] + decay * weight[i])


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
    Cost     4 n² k + 2 n³ operations
    """
    gram, square = (np.empty((len(x), len(x)), x.dtype) for _ in range(2))
    matmul(x, x, gram, transpose_b=True)
    matmul(gram, gram, square)
    result = np.empty_like(x)
    _scaled(flat(x), flat(result), A)
    return matmul(polynomial(gram, square), x, result, accumulate=True)


def orthogonalised(x: np.ndarray, step: Iteration = iteration) -> np.ndarray:
    """About the nearest matrix with orthonormal rows or columns: U Vᵀ of x = U S Vᵀ, but for singular values near 1.

    Five steps of a polynomial that pulls the singular values of x / |x| towards 1, the least of them fastest: from
    0.01 on they end between 0.68 and 1.14.

    Shapes   x (n, k) -> (n, k); x is written over
    Dtype    float32 or float64
    Cost     5 steps of 4 a² b + 2 a³ operations for sides a <= b
    Source   Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
    """
    tall = x.shape[0] > x.shape[1]
    x = np.ascontiguousarray(x.T) if tall else x
    _normalise(x, EPS)
    for _ in range(ITERATIONS):
        x = step(x)
    return np.ascontiguousarray(x.T) if tall else x


def muon(
    weight: np.ndarray,
    gradient: np.ndarray,
    m: np.ndarray,
    hyper: np.ndarray,
    *,
    beta: float,
    scale: float,
    weight_decay: float,
    maps: int,
    step: Iteration = iteration,
) -> tuple[np.ndarray, np.ndarray]:
    """One step of Muon with decoupled decay, into new arrays.

    m' = beta m + (1 - beta) g;  d = beta m' + (1 - beta) g  (Nesterov)
    weight' = weight - rate (scale sqrt(max(n, k)) orthogonalised(d) + weight_decay weight);  hyper = [rate, ...]

    An orthogonal matrix times the root of its longer side has numbers of root mean square 1: scale is that of a step,
    in units of the rate.

    Shapes   weight, gradient, m (maps n, k), hyper (1 or more,) float64 -> weight', m'; the maps lie one below the
             other, and each is orthogonalised for itself
    Dtype    float32 or float64, one for all but hyper
    Source   Jordan et al. 2024, as above; the scale: Liu et al. 2025, arXiv:2502.16982
    Errors   ValueError when the shapes do not fit
    """
    return muon_inplace(
        weight.copy(),
        gradient,
        m.copy(),
        hyper,
        beta=beta,
        scale=scale,
        weight_decay=weight_decay,
        maps=maps,
        step=step,
    )


def muon_inplace(
    weight: np.ndarray,
    gradient: np.ndarray,
    m: np.ndarray,
    hyper: np.ndarray,
    *,
    beta: float,
    scale: float,
    weight_decay: float,
    maps: int,
    step: Iteration = iteration,
) -> tuple[np.ndarray, np.ndarray]:
    """The same step, the same bits, written over weight and m, which are returned.

    Shapes   weight, gradient, m (maps n, k), hyper (1 or more,) float64 -> weight, m
    Dtype    float32 or float64, one for all but hyper
    Errors   ValueError when the shapes do not fit, or weight or m cannot be written
    """
    rows, columns = len(weight) // maps, weight.shape[1]
    check_shape("muon", "gradient", gradient, (maps * rows, columns))
    for name, array in (("weight", weight), ("m", m)):
        check_output("muon", name, array, gradient.shape, weight.dtype)
    rate = float(hyper[0])
    for first in range(0, maps * rows, rows):
        own = slice(first, first + rows)
        direction = np.empty((rows, columns), weight.dtype)
        _direction(flat(gradient[own]), flat(m[own]), flat(direction), beta, 1 - beta)
        length = scale * math.sqrt(max(rows, columns))
        _step(flat(weight[own]), flat(orthogonalised(direction, step)), rate, length, weight_decay)
    return weight, m
