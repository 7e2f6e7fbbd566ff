"""AdamW: one parameter's update, into new arrays or in place."""

import math
from typing import NamedTuple

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, flat, into_new_arrays
from daskgpt.kernels.compilation import helper, kernel


# Shared with the update in one pass with its gradient (`bfloat16.update`), which has the same bits.
@helper
def next_moment(moment, value, beta, keep):
    return beta * moment + keep * value


@helper
def next_weight(weight, m, v, step):
    return weight - step.rate * (m * step.m_scale / (math.sqrt(v * step.v_scale) + step.eps) + step.decay * weight)


class Step(NamedTuple):
    """What the numbers of a tensor have in common, in the order of `step_scalars`."""

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
def step_of(scalars):
    """The fields in an array, for use inside kernels."""
    rate, m_scale, v_scale = scalars[0], scalars[1], scalars[2]
    beta1, keep1, beta2, keep2 = scalars[3], scalars[4], scalars[5], scalars[6]
    return Step(rate, m_scale, v_scale, beta1, keep1, beta2, keep2, scalars[7], scalars[8])


@kernel("w1 r1 w1 w1 r1")
def _adamw(weight, gradient, m, v, scalars):
    step = step_of(scalars)
    for i in range(weight.size):
        new_m = next_moment(m[i], gradient[i], step.beta1, step.keep1)
        new_v = next_moment(v[i], gradient[i] * gradient[i], step.beta2, step.keep2)
        m[i] = new_m
        v[i] = new_v
        weight[i] = next_weight(weight[i], new_m, new_v, step)


def step_scalars(
    dtype: np.dtype, hyper: np.ndarray, beta1: float, beta2: float, eps: float, weight_decay: float
) -> np.ndarray:
    """The fields of a `Step`, as kernels take them."""
    check_shape("adamw", "hyper", hyper, (3,))
    rate, correction1, correction2 = hyper.tolist()
    step = Step(rate, 1 / correction1, 1 / correction2, beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay)
    return np.array(step, dtype)


def adamw_inplace(
    weight: np.ndarray, gradient: np.ndarray, m: np.ndarray, v: np.ndarray, hyper: np.ndarray, **options: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make one AdamW step with decoupled decay, written over weight, m and v, which are returned.

    m' = beta1 m + (1 - beta1) g;  m̂ = m' / (1 - beta1^step)
    v' = beta2 v + (1 - beta2) g²;  v̂ = v' / (1 - beta2^step)
    weight' = weight - rate (m̂ / (sqrt(v̂) + eps) + weight_decay weight)
    hyper = [rate, 1 - beta1^step, 1 - beta2^step]

    options  beta1, beta2, eps, weight_decay

    Shapes   weight, gradient, m, v of one shape, hyper (3,) float64 -> weight, m, v
    Dtype    float32 or float64, one for all but hyper
    Cost     7 arrays through memory
    Source   Loshchilov and Hutter 2019, arXiv:1711.05101
    Errors   ValueError when the shapes differ, or weight, m or v cannot be written
    """
    check_shape("adamw", "gradient", gradient, weight.shape)
    for name, array in (("weight", weight), ("m", m), ("v", v)):
        check_output("adamw", name, array, weight.shape, weight.dtype)
    _adamw(flat(weight), flat(gradient), flat(m), flat(v), step_scalars(weight.dtype, hyper, **options))
    return weight, m, v


adamw = into_new_arrays(adamw_inplace)
