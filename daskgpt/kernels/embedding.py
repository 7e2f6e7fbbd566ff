"""Token and position embedding, and the gradients of the two tables."""

import numpy as np

from daskgpt.kernels._arrays import check_indices, check_output, check_shape, rows
from daskgpt.kernels._jit import helper, kernel


@helper
def _first_outside(indices, count):
    """Position of the first index outside of range(count), -1 if there is none."""
    for i in range(indices.size):
        if indices[i] < 0 or indices[i] >= count:
            return i
    return -1


@kernel("i1 r2")
def _find_outside(indices, table):
    return _first_outside(indices, table.shape[0])


@kernel("i1 r2 i1 r2 w2")
def _forward(tokens, wte, positions, wpe, y):
    t = positions.size
    for i in range(tokens.size):
        token, position = tokens[i], positions[i % t]
        for j in range(y.shape[1]):
            y[i, j] = wte[token, j] + wpe[position, j]


@kernel("r2 i1 w2 n")
def _backward(dy, indices, total, accumulate):
    """Add row i of dy to row indices[i] of the table; the indices repeat when dy has more rows."""
    if accumulate == 0:
        total[:] = 0
    for i in range(dy.shape[0]):
        index = indices[i % indices.size]
        for j in range(dy.shape[1]):
            total[index, j] += dy[i, j]


def _indices(where: str, name: str, indices: np.ndarray, table: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(indices).reshape(-1)
    check_indices(where, name, _find_outside(flat, table), flat, len(table))
    return flat


def forward(tokens: np.ndarray, wte: np.ndarray, positions: np.ndarray, wpe: np.ndarray) -> np.ndarray:
    """Sum of the tokens' and the positions' rows.

    y[i, j] = wte[tokens[i, j]] + wpe[positions[j]]

    Shapes   tokens (b, t), wte (V, C), positions (t,), wpe (P, C) -> y (b, t, C)
    Dtype    int32 tokens and positions; float32 or float64 tables
    Errors   ValueError for a token or position outside of its table, or shapes that do not fit
    """
    check_shape("embedding.forward", "positions", positions, tokens.shape[1:])
    check_shape("embedding.forward", "wpe", wpe, (len(wpe), wte.shape[1]))
    wte, wpe = np.ascontiguousarray(wte), np.ascontiguousarray(wpe)
    flat_tokens = _indices("embedding.forward", "tokens", tokens, wte)
    flat_positions = _indices("embedding.forward", "positions", positions, wpe)
    y = np.empty((*tokens.shape, wte.shape[1]), wte.dtype)
    _forward(flat_tokens, wte, flat_positions, wpe, rows(y))
    return y


def backward_wte(dy: np.ndarray, tokens: np.ndarray, *, total: np.ndarray, accumulate: bool) -> np.ndarray:
    """Gradient of the token table: each token's rows of dy, added in order.

    Shapes   dy (b, t, C), tokens (b, t) -> total (V, C)
    Dtype    int32 tokens; float32 or float64, one for dy and total
    Errors   ValueError for a token outside of the table, or shapes that do not fit
    """
    check_shape("embedding.backward_wte", "tokens", tokens, dy.shape[:-1])
    check_output("embedding.backward_wte", "total", total, (len(total), dy.shape[-1]), dy.dtype)
    _backward(rows(dy), _indices("embedding.backward_wte", "tokens", tokens, total), total, accumulate)
    return total


def backward_wpe(dy: np.ndarray, positions: np.ndarray, *, total: np.ndarray, accumulate: bool) -> np.ndarray:
    """Gradient of the position table: each position's rows of dy, added in order.

    Shapes   dy (b, t, C), positions (t,) -> total (P, C)
    Dtype    int32 positions; float32 or float64, one for dy and total
    Errors   ValueError for a position outside of the table, or shapes that do not fit
    """
    check_shape("embedding.backward_wpe", "positions", positions, dy.shape[1:-1])
    check_output("embedding.backward_wpe", "total", total, (len(total), dy.shape[-1]), dy.dtype)
    _backward(rows(dy), _indices("embedding.backward_wpe", "positions", positions, total), total, accumulate)
    return total
