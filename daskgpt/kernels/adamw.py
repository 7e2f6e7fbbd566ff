"""AdamW: one parameter's update, into new arrays or in place."""

import math

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, flat
from daskgpt.kernels.compilation import helper, kernel

# So much of every array stays in the first cache between the three short loops. They are short because LLVM gives up
# on vector code for one loop over seven arrays: it would have to prove too many of them apart.
_PIECE = 1024


# Shared, so that the step in place has the bits of the step into new arrays.
@helper
def next_moment(moment, value, beta, keep):
    return beta * moment + keep * value


@helper
def next_weight(weight, m, v, rate, m_scale, v_scale, eps, decay):
    return weight - rate * (m * m_scale / (math.sqrt(v * v_scale) + eps) + decay * weight)


@kernel("r1 r1 r1 r1 w1 w1 w1 f f f f f f f f f")
def _adamw(
    weight, gradient, m, v, new_weight, new_m, new_v, rate, m_scale, v_scale, beta1, keep1, beta2, keep2, eps, decay
):
    for first in range(0, weight.size, _PIECE):
        piece = slice(first, first + _PIECE)
        w, g, m0, v0 = weight[piece], gradient[piece], m[piece], v[piece]
        w1, m1, v1 = new_weight[piece], new_m[piece], new_v[piece]
        for i in range(w.size):
            m1[i] = next_moment(m0[i], g[i], beta1, keep1)
        for i in range(w.size):
            v1[i] = next_moment(v0[i], g[i] * g[i], beta2, keep2)
        for i in range(w.size):
            w1[i] = next_weight(w[i], m1[i], v1[i], rate, m_scale, v_scale, eps, decay)


@kernel("w1 r1 w1 w1 f f f f f f f f f")
def _adamw_inplace(weight, gradient, m, v, rate, m_scale, v_scale, beta1, keep1, beta2, keep2, eps, decay):
    for i in range(weight.size):
        new_m = next_moment(m[i], gradient[i], beta1, keep1)
        new_v = next_moment(v[i], gradient[i] * gradient[i], beta2, keep2)
        m[i] = new_m
        v[i] = new_v
        weight[i] = next_weight(weight[i], new_m, new_v, rate, m_scale, v_scale, eps, decay)


def step_scalars(hyper: np.ndarray, beta1: float, beta2: float, eps: float, weight_decay: float) -> tuple[float, ...]:
    check_shape("adamw", "hyper", hyper, (3,))
    rate, correction1, correction2 = hyper.tolist()
    return rate, 1 / correction1, 1 / correction2, beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay


def adamw(
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
    """One AdamW step with decoupled decay, into new arrays.

    m' = beta1 m + (1 - beta1) g;  m̂ = m' / (1 - beta1^step)
    v' = beta2 v + (1 - beta2) g²;  v̂ = v' / (1 - beta2^step)
    weight' = weight - rate (m̂ / (sqrt(v̂) + eps) + weight_decay weight)
    hyper = [rate, 1 - beta1^step, 1 - beta2^step]

    Shapes   weight, gradient, m, v of one shape, hyper (3,) float64 -> weight', m', v'
    Dtype    float32 or float64, one for all but hyper
    Cost     7 arrays through memory (10 counting the lines that are fetched to be overwritten)
    Source   Loshchilov and Hutter 2019, arXiv:1711.05101
    Errors   ValueError when the shapes differ
    """
    for name, array in (("gradient", gradient), ("m", m), ("v", v)):
        check_shape("adamw", name, array, weight.shape)
    scalars = step_scalars(hyper, beta1, beta2, eps, weight_decay)
    new = np.empty(weight.shape, weight.dtype), np.empty(m.shape, m.dtype), np.empty(v.shape, v.dtype)
    _adamw(*(flat(array) for array in (weight, gradient, m, v, *new)), *scalars)
    return new


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
    """The same step, the same bits, written over weight, m and v, which are returned.

    Shapes   weight, gradient, m, v of one shape, hyper (3,) float64 -> weight, m, v
    Dtype    float32 or float64, one for all but hyper
    Cost     7 arrays through memory
    Errors   ValueError when the shapes differ, or weight, m or v cannot be written
    """
    check_shape("adamw_inplace", "gradient", gradient, weight.shape)
    for name, array in (("weight", weight), ("m", m), ("v", v)):
        check_output("adamw_inplace", name, array, weight.shape, weight.dtype)
    scalars = step_scalars(hyper, beta1, beta2, eps, weight_decay)
    _adamw_inplace(flat(weight), flat(gradient), flat(m), flat(v), *scalars)
    return weight, m, v
