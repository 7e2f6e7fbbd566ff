"""A layer and optimizers from outside of the package, which configurations name: `custom_layers:SQUARED_RELU`.

The examples of CONTRIBUTING.md: a squared ReLU as the activation, an optimizer that goes by the gradient's sign, and
one whose second moment has one number per row of the weight (Adam-mini).
"""

from dataclasses import replace

import numpy as np

from daskgpt.model.layers import ATTENTION, RMSNORM, Layer, Row
from daskgpt.model.optimizer import ADAMW, Optimizer


def squared_relu(x):
    return np.maximum(x, 0) ** 2


def squared_relu_backward(dy, x):
    return dy * 2 * np.maximum(x, 0)


SQUARED_RELU = Layer(
    "squared_relu",
    Row(squared_relu, "btC -> btC", "x"),
    backward={"x": Row(squared_relu_backward, "btC, btC -> btC", "dy x")},
)


def relu_and_mask(x):
    return np.maximum(x, 0), np.sign(np.maximum(x, 0))


CHEAP_WITH_MASK = Layer(
    "cheap_with_mask",
    Row(relu_and_mask, "btC -> btC, btC", "x"),
    outputs="y mask",
    backward={"x": Row(np.multiply, "btC, btC -> btC", "dy mask")},
    cheap=True,
)


def broken(x):
    raise ArithmeticError("it cannot be done")


BROKEN = replace(SQUARED_RELU, forward=Row(broken, "btC -> btC", "x"))
NO_GRADIENT = replace(RMSNORM, backward={"x": RMSNORM.backward["x"]})
NO_RESULT = replace(SQUARED_RELU, forward=Row(lambda x: None, "btC -> btC", "x"))
NO_RESULTS = replace(CHEAP_WITH_MASK, forward=Row(lambda x: (), "btC -> btC, btC", "x"))
NO_PLACE = replace(SQUARED_RELU, forward=Row(squared_relu, "btC -> btC", "x", "place"))
NO_OPTION = replace(SQUARED_RELU, forward=Row(squared_relu, "btC -> btC", "x", "slope"))
OTHER_AXES = replace(SQUARED_RELU, forward=Row(squared_relu, "btC -> btQ", "x"))


def unchanged(x):
    return x.copy()


# In place of positions: none at all.
NO_POSITIONS = Layer(
    "no_positions", Row(unchanged, "btX -> btX", "x"), backward={"x": Row(unchanged, "btX -> btX", "dy")}
)
SAME_ATTENTION = replace(ATTENTION, name="same_attention")


def sign(weight, gradient, hyper):
    weight -= (hyper[0] * np.sign(gradient)).astype(weight.dtype)


def not_in_place(weight, gradient, hyper):
    return weight - hyper[0] * gradient


SIGN = Optimizer(
    name="sign",
    kernel=sign,
    moments=(),
    options=lambda config, tensor: {},
    hyper=lambda config, step, steps: config.learning_rate,
)


def mini(weight, gradient, m, v, hyper, *, beta1, beta2, eps, weight_decay):
    rate, correction1, correction2 = hyper
    m += (1 - beta1) * (gradient - m)
    v += (1 - beta2) * ((gradient**2).reshape(len(v), -1).mean(1) - v)
    scale = (np.sqrt(v / correction2) + eps).reshape(-1, *[1] * (weight.ndim - 1))
    weight -= (rate * (m / correction1 / scale + weight_decay * weight)).astype(weight.dtype)


NOT_IN_PLACE = replace(SIGN, kernel=not_in_place)
MINI = replace(ADAMW, name="mini", kernel=mini, fused={}, per_row=("v",))
NO_ROW = "a text"
