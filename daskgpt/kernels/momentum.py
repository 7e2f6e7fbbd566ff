"""Stochastic gradient descent with momentum: one parameter's update, into new arrays or in place."""

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, flat, into_new_arrays
from daskgpt.kernels.compilation import kernel


@kernel("w1 r1 w1 f f f")
def _momentum(weight, gradient, m, rate, beta, decay):
    for i in range(weight.size):
        m[i] = beta * m[i] + gradient[i]
        weight[i] = weight[i] - rate * (m[i] + decay * weight[i])


def momentum_inplace(
    weight: np.ndarray, gradient: np.ndarray, m: np.ndarray, hyper: np.ndarray, *, beta: float, weight_decay: float
) -> tuple[np.ndarray, np.ndarray]:
    """Make one step of momentum with decoupled decay, written over weight and m, which are returned.

    m' = beta m + g;  weight' = weight - rate (m' + weight_decay weight);  hyper = [rate]

    Shapes   weight, gradient, m of one shape, hyper (1,) float64 -> weight, m
    Dtype    float32 or float64, one for all but hyper
    Cost     5 arrays through memory
    Source   Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning"
    Errors   ValueError when the shapes differ, or weight or m cannot be written
    """
    check_shape("momentum", "gradient", gradient, weight.shape)
    check_shape("momentum", "hyper", hyper, (1,))
    for name, array in (("weight", weight), ("m", m)):
        check_output("momentum", name, array, weight.shape, weight.dtype)
    (rate,) = hyper.tolist()
    _momentum(flat(weight), flat(gradient), flat(m), rate, beta, weight_decay)
    return weight, m


momentum = into_new_arrays(momentum_inplace)
