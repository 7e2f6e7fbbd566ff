"""Token and position embedding, and the gradients of the two tables."""

import numpy as np

from daskgpt.kernels.arguments import check_output, check_shape, checked_indices, contiguous, flat, rows
from daskgpt.kernels.compilation import kernel


@kernel("i1 r2 i1 r2 w2")
def _forward(tokens, wte, positions, wpe, y):
    t = positions.size
    for i in range(tokens.size):
        token, position = tokens[i], positions[i % t]
        for j in range(y.shape[1]):
            y[i, j] = wte[token, j] + wpe[position, j]


@kernel("i1 r2 w2", use="rotary")
def _of_tokens(tokens, wte, y):
    for i in range(tokens.size):
        for j in range(y.shape[1]):
            y[i, j] = wte[tokens[i], j]


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


def forward(tokens: np.ndarray, wte: np.ndarray, positions: np.ndarray, wpe: np.ndarray) -> np.ndarray:
    """Return the sum of the tokens' and the positions' rows.

    y[i, j] = wte[tokens[i, j]] + wpe[positions[j]]

    Shapes   tokens (b, t), wte (V, C), positions (t,), wpe (P, C) -> y (b, t, C)
    Dtype    int32 tokens and positions; float32 or float64 tables
    Errors   ValueError for a token or position outside of its table, or shapes that do not fit
    """
    check_shape("embedding.forward", "positions", positions, tokens.shape[1:])
    check_shape("embedding.forward", "wpe", wpe, (len(wpe), wte.shape[1]))
    wte, wpe = contiguous(wte), contiguous(wpe)
    flat_tokens = checked_indices("embedding.forward", "tokens", tokens, len(wte))
    flat_positions = checked_indices("embedding.forward", "positions", positions, len(wpe))
    y = np.empty((*tokens.shape, wte.shape[1]), wte.dtype, like=wte)
    _forward(flat_tokens, wte, flat_positions, wpe, rows(y))
    return y


def of_tokens(tokens: np.ndarray, wte: np.ndarray) -> np.ndarray:
    """Return the tokens' rows.

    Shapes   tokens (b, t), wte (V, C) -> y (b, t, C)
    Dtype    int32 tokens; a float32 or float64 table
    Errors   ValueError for a token outside of the table
    """
    wte = contiguous(wte)
    y = np.empty((*tokens.shape, wte.shape[1]), wte.dtype, like=wte)
    _of_tokens(checked_indices("embedding.of_tokens", "tokens", tokens, len(wte)), wte, rows(y))
    return y


def backward_wte(
    dy: np.ndarray, tokens: np.ndarray, *, total: np.ndarray, accumulate: bool, first_row: int = 0
) -> np.ndarray:
    """Return the gradient of the token table, or some rows of it: each token's rows of dy, added in order.

    Tokens whose rows lie outside are skipped; `forward` has checked all tokens.

    Shapes   dy (b, t, C), tokens (b, t) -> total (rows, C), those of the gradient from first_row on
    Dtype    int32 tokens; float32 or float64, one for dy and total
    Errors   ValueError for shapes that do not fit
    """
    check_shape("embedding.backward_wte", "tokens", tokens, dy.shape[:-1])
    return _add_rows("embedding.backward_wte", dy, tokens, total, accumulate, first_row)


def backward_wpe(
    dy: np.ndarray, positions: np.ndarray, *, total: np.ndarray, accumulate: bool, first_row: int = 0
) -> np.ndarray:
    """Return the gradient of the position table, or some rows of it: each position's rows of dy, added in order.

    Shapes   dy (b, t, C), positions (t,) -> total (rows, C), those of the gradient from first_row on
    Dtype    int32 positions; float32 or float64, one for dy and total
    Errors   ValueError for shapes that do not fit
    """
    check_shape("embedding.backward_wpe", "positions", positions, dy.shape[1:-1])
    return _add_rows("embedding.backward_wpe", dy, positions, total, accumulate, first_row)


def _add_rows(
    where: str, dy: np.ndarray, indices: np.ndarray, total: np.ndarray, accumulate: bool, first_row: int
) -> np.ndarray:
    check_output(where, "total", total, (len(total), dy.shape[-1]), dy.dtype)
    _backward(rows(dy), flat(indices), total, accumulate, first_row)
    return total
