"""Linear layer y = x weightᵀ + bias, its gradients, and the same without a bias (unembedding)."""

import numpy as np

from daskgpt.kernels._arrays import check_output, check_shape, rows
from daskgpt.kernels._jit import kernel
from daskgpt.kernels.blas import address_of, gemm, gemm_address


@kernel("n r2 r2 r1 w2")
def _forward(blas, x, weight, bias, y):
    """The bias is written first and the product added to it: no second pass over y."""
    real = x.dtype.type
    outputs, channels = weight.shape
    for i in range(y.shape[0]):
        for j in range(outputs):
            y[i, j] = bias[j]
    x_address, weight_address, y_address = address_of(x), address_of(weight), address_of(y)
    n = y.shape[0]
    gemm(
        blas,
        0,
        1,
        n,
        outputs,
        channels,
        real(1),
        x_address,
        channels,
        weight_address,
        channels,
        real(1),
        y_address,
        outputs,
    )


@kernel("n n n n n n r2 r2 n w2")
def _product(blas, a_transposed, b_transposed, m, n, k, a, b, accumulate, c):
    """c = a b, or c += a b, with the arrays' own row lengths."""
    real = a.dtype.type
    beta = real(accumulate)
    a_address, b_address, c_address = address_of(a), address_of(b), address_of(c)
    lda, ldb, ldc = a.shape[1], b.shape[1], c.shape[1]
    gemm(blas, a_transposed, b_transposed, m, n, k, real(1), a_address, lda, b_address, ldb, beta, c_address, ldc)


@kernel("r2 w1 n")
def _backward_bias(dy, total, accumulate):
    if accumulate == 0:
        total[:] = 0
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            total[j] += dy[i, j]


def forward(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Linear layer.

    y = x weightᵀ + bias

    Shapes   x (b, t, C), weight (O, C), bias (O,) -> y (b, t, O)
    Dtype    float32 or float64, one for all
    Cost     2 b t C O operations in BLAS
    Errors   ValueError when the shapes do not fit
    """
    outputs = len(weight)
    check_shape("linear.forward", "weight", weight, (outputs, x.shape[-1]))
    check_shape("linear.forward", "bias", bias, (outputs,))
    y = np.empty((*x.shape[:-1], outputs), x.dtype)
    _forward(gemm_address(x.dtype), rows(x), np.ascontiguousarray(weight), np.ascontiguousarray(bias), rows(y))
    return y


def forward_without_bias(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Linear layer without a bias: the unembedding.

    y = x weightᵀ

    Shapes   x (b, t, C), weight (V, C) -> y (b, t, V)
    Dtype    float32 or float64, one for all
    Cost     2 b t C V operations in BLAS
    Errors   ValueError when the shapes do not fit
    """
    outputs, channels = len(weight), x.shape[-1]
    check_shape("linear.forward_without_bias", "weight", weight, (outputs, channels))
    y = np.empty((*x.shape[:-1], outputs), x.dtype)
    x, flat_y = rows(x), rows(y)
    _product(gemm_address(x.dtype), 0, 1, len(x), outputs, channels, x, np.ascontiguousarray(weight), 0, flat_y)
    return y


def backward_x(dy: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Gradient of the linear layer with respect to its input.

    dx = dy weight

    Shapes   dy (b, t, O), weight (O, C) -> dx (b, t, C)
    Dtype    float32 or float64, one for both
    Cost     2 b t C O operations in BLAS
    Errors   ValueError when the shapes do not fit
    """
    outputs, channels = dy.shape[-1], weight.shape[1]
    check_shape("linear.backward_x", "weight", weight, (outputs, channels))
    dx = np.empty((*dy.shape[:-1], channels), dy.dtype)
    dy, flat_dx = rows(dy), rows(dx)
    _product(gemm_address(dy.dtype), 0, 0, len(dy), channels, outputs, dy, np.ascontiguousarray(weight), 0, flat_dx)
    return dx


def backward_weight(dy: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool) -> np.ndarray:
    """Gradient of the linear layer with respect to its weight.

    dweight = dyᵀ x

    Shapes   dy (b, t, O), x (b, t, C) -> total (O, C)
    Dtype    float32 or float64, one for all
    Cost     2 b t C O operations in BLAS
    Errors   ValueError when the shapes do not fit
    """
    outputs, channels = dy.shape[-1], x.shape[-1]
    check_shape("linear.backward_weight", "dy", dy, (*x.shape[:-1], outputs))
    check_output("linear.backward_weight", "total", total, (outputs, channels), x.dtype)
    dy, x = rows(dy), rows(x)
    _product(gemm_address(x.dtype), 1, 0, outputs, channels, len(x), dy, x, accumulate, total)
    return total


def backward_bias(dy: np.ndarray, *, total: np.ndarray, accumulate: bool) -> np.ndarray:
    """Gradient of a bias: the sum of dy over the rows, in order.

    Shapes   dy (b, t, O) -> total (O,)
    Dtype    float32 or float64, one for both
    Errors   ValueError when total does not fit
    """
    check_output("linear.backward_bias", "total", total, dy.shape[-1:], dy.dtype)
    _backward_bias(rows(dy), total, accumulate)
    return total
