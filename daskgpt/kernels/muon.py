"""Muon: one matrix's update along the nearest orthogonal matrix to its momentum, into new arrays or in place."""

import math

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, flat, into_new_arrays
from daskgpt.kernels.compilation import kernel
from daskgpt.kernels.orthogonal import Iteration, iteration, orthogonalised


@kernel("r1 w1 w1 f f")
def _direction(gradient, m, direction, beta, keep):
    for i in range(gradient.size):
        m[i] = beta * m[i] + keep * gradient[i]
        direction[i] = beta * m[i] + keep * gradient[i]


@kernel("w1 r1 f f f")
def _step(weight, direction, rate, scale, decay):
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
    """Make one step of Muon with decoupled decay, written over weight and m, which are returned.

    m' = beta m + (1 - beta) g;  d = beta m' + (1 - beta) g  (Nesterov)
    weight' = weight - rate (scale sqrt(max(n, k)) orthogonalised(d) + weight_decay weight);  hyper = [rate, ...]

    An orthogonal matrix times the root of its longer side has numbers of root mean square 1: scale is that of a step,
    in units of the rate.

    Shapes   weight, gradient, m (maps n, k), hyper (1 or more,) float64 -> weight, m; the maps lie one below the other,
             and each is orthogonalised for itself
    Dtype    float32 or float64, one for all but hyper
    Source   Jordan et al. 2024, as above; the scale: Liu et al. 2025, arXiv:2502.16982
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


muon = into_new_arrays(muon_inplace)
