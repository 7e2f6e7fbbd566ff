"""Token and position embedding, and the gradients of the two tables."""

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, checked_indices, contiguous, flat, rows
from daskgpt.kernels.compilation import kernel

_NOWHERE = np.empty(0, np.int32)


@kernel("i1 r2 i1 r2 w2")
def _forward(tokens, wte, positions, wpe, y):
    t = positions.size
    for i in range(tokens.size):
        token = tokens[i]
        if t > 0:
            position = positions[i % t]
            for j in range(y.shape[1]):
                y[i, j] = wte[token, j] + wpe[position, j]
        else:
            for j in range(y.shape[1]):
                y[i, j] = wte[token, j]


@kernel("r2 i1 w2 n n")
def _backward(dy, indices, total, accumulate, first_row):
    """Add row i of dy to row indices[i] of the table; the indices repeat when dy has more rows."""
    if accumulate == 0:
        total[:] = 0
    for i in range(dy.shape[0]):
        index = indices[i % indices.size] - first_row
        if 0 <= index < total.shape[0]:
            for j in range(dy.shape[1]):
                total[index, j] += dy[i, j]


def forward(
    tokens: np.ndarray, wte: np.ndarray, positions: np.ndarray | None = None, wpe: np.ndarray | None = None
) -> np.ndarray:
    """Return the sum of the tokens' and the positions' rows, or without positions the tokens' rows.

    y[i, j] = wte[tokens[i, j]] + wpe[positions[j]]

    Shapes   tokens (b, t), wte (V, C), positions (t,), wpe (P, C) -> y (b, t, C)
    Dtype    int32 tokens and positions; float32 or float64 tables
    Errors   ValueError for a token or position outside of its table, or shapes that do not fit
    """
    where, wte = "embedding.forward", contiguous(wte)
    places, table = _NOWHERE, wte
    if positions is not None and wpe is not None:
        check_shape(where, "positions", positions, tokens.shape[1:])
        check_shape(where, "wpe", wpe, (len(wpe), wte.shape[1]))
        places, table = checked_indices(where, "positions", positions, len(wpe)), contiguous(wpe)
    y = np.empty((*tokens.shape, wte.shape[1]), wte.dtype, like=wte)
    _forward(checked_indices(where, "tokens", tokens, len(wte)), wte, places, table, rows(y))
    return y


def backward(
    dy: np.ndarray, indices: np.ndarray, *, total: np.ndarray, accumulate: bool, first_row: int = 0
) -> np.ndarray:
    """Return the gradient of a table, or some rows of it: the rows of dy of each token or position, added in order.

    Indices of rows outside are skipped; `forward` has checked all.

    Shapes   dy (b, t, C), indices (b, t) or (t,) -> total (rows, C), those of the gradient from first_row on
    Dtype    int32 indices; float32 or float64, one for dy and total
    Errors   ValueError for shapes that do not fit
    """
    where = "embedding.backward"
    check_shape(where, "indices", indices, dy.shape[dy.ndim - 1 - indices.ndim : -1])
    check_output(where, "total", total, (len(total), dy.shape[-1]), dy.dtype)
    _backward(rows(dy), flat(indices), total, accumulate, first_row)
    return total
