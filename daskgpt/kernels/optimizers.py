"""Updates of parameters: AdamW, Muon, and the norm that clips gradients.

An update `NAME_inplace` overwrites the weight and its moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, flat
from daskgpt.kernels.compilation import helper, kernel
from daskgpt.kernels.float32.blas import gemm, gemm_address, product
from daskgpt.kernels.float32.gemm import NOTHING
from daskgpt.kernels.simd.lanes import address_of, read, write
from daskgpt.kernels.simd.math import fma
from daskgpt.kernels.simd.rows import dot, transpose

HYPER_SIZE = 3  # numbers that change from step to step: the learning rate and AdamW's two corrections
GRAD_INFO = 2  # numbers that `clipped_hyper` appends to those of an optimizer: norm, and factor of gradients


def _check(where: str, hyper: np.ndarray, weight: np.ndarray, gradient: np.ndarray, **moments: np.ndarray) -> None:
    """Raise ValueError unless the gradient is of the weight's shape, weight and moments can be updated in place, and
    hyper has its numbers, alone or with those that `clipped_hyper` appends.
    """
    check_shape(where, "gradient", gradient, weight.shape)
    for name, array in {"weight": weight, **moments}.items():
        check_output(where, name, array, weight.shape, weight.dtype)
    check_shape(where, "hyper", hyper, (HYPER_SIZE + (GRAD_INFO if hyper.size > HYPER_SIZE else 0),))


class Rates(NamedTuple):
    """Numbers of an AdamW update that all elements of a tensor share."""

    rate: float
    m_scale: float
    v_scale: float
    beta1: float
    keep1: float
    beta2: float
    keep2: float
    eps: float
    decay: float


@helper
def rates_of(real, hyper, beta1, beta2, eps, decay):
    """The numbers of an update, of the type `real`, from those of `adamw_inplace`."""
    return Rates(
        real(hyper[0]), real(1.0 / hyper[1]), real(1.0 / hyper[2]), real(beta1), real(1.0 - beta1), real(beta2),
        real(1.0 - beta2), real(eps), real(decay),
    )  # fmt: skip


@helper
def _factor_of(hyper):
    """The factor of the gradients, which `clipped_hyper` appends."""
    return hyper[HYPER_SIZE + 1] if hyper.size > HYPER_SIZE else 1.0


# Shared with the update in one pass with its gradient (`bfloat16.update`), which has the same bits.
@helper
def adamw_numbers(weight, gradient, m, v, count, factor, rates):
    """Update `count` numbers at these addresses; the gradient's are multiplied by a factor of their type."""
    for i in range(count):
        g = read(gradient, i, factor) * factor
        new_m = rates.beta1 * read(m, i, factor) + rates.keep1 * g
        new_v = rates.beta2 * read(v, i, factor) + rates.keep2 * (g * g)
        write(m, i, new_m)
        write(v, i, new_v)
        before = read(weight, i, factor)
        direction = new_m * rates.m_scale / (math.sqrt(new_v * rates.v_scale) + rates.eps)
        write(weight, i, before - rates.rate * (direction + rates.decay * before))


@kernel("w1 r1 w1 w1 d1 d d d d")
def _adamw(weight, gradient, m, v, hyper, beta1, beta2, eps, decay):
    real = weight.dtype.type
    places = address_of(weight), address_of(gradient), address_of(m), address_of(v)
    rates = rates_of(real, hyper, beta1, beta2, eps, decay)
    adamw_numbers(*places, weight.size, real(_factor_of(hyper)), rates)


def adamw_inplace(
    weight: np.ndarray,
    gradient: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    hyper: np.ndarray,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make one AdamW step with decoupled decay; weight, m and v are updated in place and returned.

    m' = beta1 m + (1 - beta1) g;  m̂ = m' / (1 - beta1^step)
    v' = beta2 v + (1 - beta2) g²;  v̂ = v' / (1 - beta2^step)
    weight' = weight - rate (m̂ / (sqrt(v̂) + eps) + weight_decay weight)
    hyper = [rate, 1 - beta1^step, 1 - beta2^step], or the result of `clipped_hyper` for it

    Shapes   weight, gradient, m, v of one shape, hyper (3,) or (5,) float64 -> weight, m, v
    Dtype    float32 or float64, one for all but hyper
    Cost     7 arrays through memory
    Source   Loshchilov and Hutter 2019, arXiv:1711.05101
    Errors   ValueError when the shapes differ, or weight, m or v cannot be written
    """
    _check("adamw", hyper, weight, gradient, m=m, v=v)
    _adamw(flat(weight), flat(gradient), flat(m), flat(v), hyper, beta1, beta2, eps, weight_decay)
    return weight, m, v


# Of Muon.
_ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315  # coefficients of the polynomial, whose slope at 0 is as steep as five steps allow
_LEAST_NORM = 1e-7

_BAND = 16  # rows of a symmetric product that are computed at once

# The matrix after one Newton-Schulz step, in memory of its own.
Iteration = Callable[[np.ndarray], np.ndarray]


@kernel("w2 f", use="muon")
def _normalise(x, eps):
    squares = 0.0
    for i in range(x.shape[0]):
        squares += dot(x[i], x[i])
    scale = x.dtype.type(1.0 / max(math.sqrt(squares), eps))
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] *= scale


@kernel("w1 r1 f f", use="muon")
def _polynomial(square, gram, b, c):
    for i in range(square.size):
        square[i] = fma(c, square[i], b * gram[i])


@kernel("r1 w1 f", use="muon")
def _add_scaled(x, y, factor):
    for i in range(x.size):
        y[i] = fma(factor, x[i], y[i])


@kernel("r2 w2", use="muon")
def _turn(x, y):
    """Write y = xᵀ."""
    transpose(x.dtype.type(0), address_of(x), x.shape[1] * x.itemsize, len(x), y)


@helper
def _symmetric(blas, x, y):
    """Write y = x xᵀ: compute its upper half in bands of rows, and copy the lower half from it.

    Both halves are sums of the same products, so a product with a fixed order of sums would give the same bits.
    """
    (n, k), size = x.shape, x.itemsize
    source, target, zero = address_of(x), address_of(y), x.dtype.type(0)
    for first in range(0, n, _BAND):
        last = min(first + _BAND, n)
        rows, place = source + first * k * size, target + (first * n + first) * size
        gemm(blas, NOTHING, 0, 1, last - first, n - first, k, rows, k, rows, k, zero, place, n)
        for j in range(last, n):
            for i in range(first, last):
                y[j, i] = y[i, j]


@kernel("n r2 w2 w2 w2 f f f", cost=2, use="muon")
def _iteration(blas, x, gram, square, y, a, b, c):
    """y = a x + (b g + c g²) x with g = x xᵀ, which is its own transpose."""
    _symmetric(blas, x, gram)
    _symmetric(blas, gram, square)
    for i in range(len(x)):
        for j in range(len(x)):
            square[i, j] = fma(c, square[i, j], b * gram[i, j])
        for j in range(x.shape[1]):
            y[i, j] = a * x[i, j]
    product(blas, 0, square, x, x.dtype.type(1), y)


def polynomial(gram: np.ndarray, square: np.ndarray) -> np.ndarray:
    """B gram + C square, written over the square."""
    _polynomial(flat(square), flat(gram), B, C)
    return square


def add_scaled(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A x + y, written over y."""
    _add_scaled(flat(x), flat(y), A)
    return y


def iteration(x: np.ndarray) -> np.ndarray:
    """Return one Newton-Schulz step: A x + (B g + C g²) x with g = x xᵀ.

    Shapes   x (n, k) -> (n, k)
    Dtype    float32 or float64
    Cost     3 n² k + n³ operations: g and g² are symmetric, and half of each is computed
    """
    gram, square = (np.empty((len(x), len(x)), x.dtype, like=x) for _ in range(2))
    y = np.empty_like(x)
    _iteration(gemm_address(x.dtype), x, gram, square, y, A, B, C)
    return y


def _turned(x: np.ndarray) -> np.ndarray:
    y = np.empty(x.shape[::-1], x.dtype, like=x)
    _turn(x, y)
    return y


def orthogonalised(x: np.ndarray, step: Iteration = iteration) -> np.ndarray:
    """Return an approximation of the nearest matrix with orthonormal rows or columns, U Vᵀ where x = U S Vᵀ.

    Five steps of a polynomial move the singular values of x / |x| towards 1, the smallest fastest: those above 0.01
    end between 0.68 and 1.14.

    Shapes   x (n, k) -> (n, k); x is overwritten
    Dtype    float32 or float64
    Cost     5 steps of 3 a² b + a³ operations for sides a <= b
    Source   Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
    """
    tall = x.shape[0] > x.shape[1]
    x = _turned(x) if tall else x
    _normalise(x, _LEAST_NORM)
    for _ in range(_ITERATIONS):
        x = step(x)
    return _turned(x) if tall else x


@kernel("r1 w1 w1 d1 f f", use="muon")
def _direction(gradient, m, direction, hyper, beta, keep):
    scale = gradient.dtype.type(_factor_of(hyper))
    for i in range(gradient.size):
        g = gradient[i] * scale
        moment = beta * m[i] + keep * g
        direction[i] = beta * moment + keep * g
        m[i] = moment


@kernel("w1 r1 d1 f f", use="muon")
def _step(weight, direction, hyper, scale, decay):
    rate = weight.dtype.type(hyper[0])
    for i in range(weight.size):
        weight[i] = weight[i] - rate * (scale * direction[i] + decay * weight[i])


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
    """Make one step of Muon with decoupled decay; weight and m are updated in place and returned.

    m' = beta m + (1 - beta) g;  d = beta m' + (1 - beta) g  (Nesterov)
    weight' = weight - rate (scale sqrt(max(n, k)) orthogonalised(d) + weight_decay weight)
    hyper = [rate, ..., ...], or the result of `clipped_hyper` for it

    An orthogonal matrix times the square root of its longer side has elements of root mean square 1, so a step has the
    root mean square `scale` times the rate.

    Shapes   weight, gradient, m (maps n, k), hyper (3,) or (5,) float64 -> weight, m; the maps lie one below the
             other, and each is orthogonalised on its own
    Dtype    float32 or float64, one for all but hyper
    Source   Jordan et al. 2024, as of `orthogonalised`; the scale: Liu et al. 2025, arXiv:2502.16982
    Errors   ValueError when the shapes do not fit, or weight or m cannot be written
    """
    rows, columns = len(weight) // maps, weight.shape[1]
    check_shape("muon", "weight", weight, (maps * rows, columns))
    _check("muon", hyper, weight, gradient, m=m)
    for first in range(0, maps * rows, rows):
        rows_of_map = slice(first, first + rows)
        direction = np.empty((rows, columns), weight.dtype, like=weight)
        _direction(flat(gradient[rows_of_map]), flat(m[rows_of_map]), flat(direction), hyper, beta, 1 - beta)
        length = scale * math.sqrt(max(rows, columns))
        _step(flat(weight[rows_of_map]), flat(orthogonalised(direction, step)), hyper, length, weight_decay)
    return weight, m


# The norm of all gradients, summed in an order that no chunk, task or worker changes. Squares of a tensor are summed in
# float64 (which holds the square of a float32 exactly) in units of 64 rows, each by 32 lanes that meet in a tree. The
# sums of units are added one after the other, tensor by tensor. Tasks that sum gradients have whole units of rows, so
# they compute the same numbers.
UNIT_ROWS = 64  # bands of sums over the batch are multiples of it (`graph.calls`)
_LANES = 32
_EPSILON = 1e-6  # PyTorch's, in what gradients are multiplied by


@kernel("r1 n D1")
def _squares(x, unit, sums):
    lanes = np.empty(_LANES)
    for number in range(sums.size):
        first, last = unit * number, min(unit * (number + 1), x.size)
        lanes[:] = 0
        whole = last - (last - first) % _LANES
        for i in range(first, whole, _LANES):
            for lane in range(_LANES):
                value = np.float64(x[i + lane])
                lanes[lane] += value * value
        for i in range(whole, last):
            value = np.float64(x[i])
            lanes[i - whole] += value * value
        count = _LANES
        while count > 1:
            count //= 2
            for lane in range(count):
                lanes[lane] += lanes[lane + count]
        sums[number] = lanes[0]


def squares(gradient: np.ndarray) -> np.ndarray:
    """Return the sums of squares of a gradient, or of whole units of its rows: one per unit; a vector is one unit.

    Shapes   any -> (units,) float64
    Dtype    float32 or float64
    Cost     reads the gradient once
    """
    unit = gradient.size if gradient.ndim < 2 else UNIT_ROWS * (gradient.size // len(gradient))
    sums = np.empty(-(-gradient.size // unit), np.float64, like=gradient)
    _squares(flat(gradient), unit, sums)
    return sums


def clipped_hyper(hyper: np.ndarray, *sums: np.ndarray | list[np.ndarray], clip: float) -> np.ndarray:
    """Return the hyper array of an update of clipped gradients.

    hyper    scalars of the optimizer
    sums     for each tensor, the results of `squares` for it or for its parts, in order
    clip     the largest norm, to which larger gradients are scaled down

    Shapes   (S,) -> (S + 2,) float64: scalars of the optimizer; the norm; the factor of the gradients
    Source   Pascanu et al. 2013, arXiv:1211.5063, as `torch.nn.utils.clip_grad_norm_` has it
    """
    total = 0.0
    for sums_of_tensor in sums:
        for part in sums_of_tensor if isinstance(sums_of_tensor, list) else [sums_of_tensor]:
            for value in part.tolist():
                total += value
    norm = math.sqrt(total)
    return np.array([*hyper.tolist(), norm, min(1.0, clip / (norm + _EPSILON))])
