"""Linear layer y = x weightᵀ + bias, its gradients, and the same without a bias (unembedding)."""

import numpy as np

from daskgpt.kernels.arguments import check_output, check_rows, check_shape, contiguous, rows
from daskgpt.kernels.compilation import kernel
from daskgpt.kernels.float32.blas import biased_gemm, gemm_address, multiply, multiply_rows
from daskgpt.kernels.float32.gemm import NOTHING
from daskgpt.kernels.simd.lanes import address_of


@kernel("n r2 r2 r1 w2")
def _forward(blas, x, weight, bias, y):
    (m, k), n, one = x.shape, len(weight), x.dtype.type(1)
    x_at, weight_at, y_at = address_of(x), address_of(weight), address_of(y)
    biased_gemm(blas, NOTHING, 0, 1, m, n, k, x_at, k, weight_at, k, one, y_at, n, address_of(bias))


@kernel("r2 w1 n")
def _backward_bias(dy, total, accumulate):
    if accumulate == 0:
        total[:] = 0
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            total[j] += dy[i, j]


def forward(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Return the output of a linear layer, or of the unembedding, which has no bias.

    y = x weightᵀ + bias

    Shapes   x (b, t, C), weight (O, C), bias (O,) -> y (b, t, O)
    Dtype    float32 or float64, one for all
    Cost     2 b t C O operations
    Errors   ValueError when the shapes do not fit
    """
    outputs = len(weight)
    check_shape("linear.forward", "weight", weight, (outputs, x.shape[-1]))
    y = np.empty((*x.shape[:-1], outputs), x.dtype, like=x)
    if bias is None:
        multiply(gemm_address(x.dtype), 1, rows(x), contiguous(weight), 0, rows(y))
    else:
        check_shape("linear.forward", "bias", bias, (outputs,))
        _forward(gemm_address(x.dtype), rows(x), contiguous(weight), contiguous(bias), rows(y))
    return y


def backward_x(dy: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the gradient of the linear layer with respect to its input.

    dx = dy weight

    Shapes   dy (b, t, O), weight (O, C) -> dx (b, t, C)
    Dtype    float32 or float64, one for both
    Cost     2 b t C O operations
    Errors   ValueError when the shapes do not fit
    """
    outputs, channels = dy.shape[-1], weight.shape[1]
    check_shape("linear.backward_x", "weight", weight, (outputs, channels))
    dx = np.empty((*dy.shape[:-1], channels), dy.dtype, like=dy)
    multiply(gemm_address(dy.dtype), 0, rows(dy), contiguous(weight), 0, rows(dx))
    return dx


def backward_weight(
    dy: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool, first_row: int = 0
) -> np.ndarray:
    """Return the gradient of the linear layer with respect to its weight, or some rows of it.

    dweight = dyᵀ x

    Shapes   dy (b, t, O), x (b, t, C) -> total (rows, C), the rows of the gradient from `first_row` on
    Dtype    float32 or float64, one for all
    Cost     2 b t C O operations
    Errors   ValueError when the shapes do not fit
    """
    where, outputs = "linear.backward_weight", dy.shape[-1]
    check_shape(where, "dy", dy, (*x.shape[:-1], outputs))
    check_rows(where, total, first_row, (outputs, x.shape[-1]), x.dtype)
    multiply_rows(gemm_address(x.dtype), rows(dy), first_row, rows(x), accumulate, total)
    return total


def backward_bias(dy: np.ndarray, *, total: np.ndarray, accumulate: bool) -> np.ndarray:
    """Return the gradient of a bias: the sum of dy over the rows, in order.

    Shapes   dy (b, t, O) -> total (O,)
    Dtype    float32 or float64, one for both
    Errors   ValueError when total does not fit
    """
    check_output("linear.backward_bias", "total", total, dy.shape[-1:], dy.dtype)
    _backward_bias(rows(dy), total, accumulate)
    return total
