"""Checks and views that the public kernels share; each costs less than a microsecond."""

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.kernels.tracing import Operand


def contiguous(x: np.ndarray) -> np.ndarray:
    """Return x as a contiguous array, itself if it is one."""
    return np.ascontiguousarray(x, like=x)


def rows(x: np.ndarray) -> np.ndarray:
    """Return x as contiguous rows: all axes but the last are joined."""
    return contiguous(x).reshape(-1, x.shape[-1])


def matrices(x: np.ndarray) -> np.ndarray:
    """Return x as contiguous matrices: all axes but the last two are joined."""
    return contiguous(x).reshape(-1, *x.shape[-2:])


def flat(x: np.ndarray) -> np.ndarray:
    """Return x as one contiguous row, a view if it is contiguous."""
    return contiguous(x).reshape(-1)


def check_shape(where: str, name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `array` has this shape: a compiled kernel would read past the end of it."""
    if array.shape != shape:
        rule = f"{name} must have shape {shape}"
        raise refusal(ValueError, where, rule, {"shape": array.shape}, "Check the order of the arguments.")


def head_size(where: str, x: np.ndarray, heads: int, key_heads: int) -> int:
    """Return the channels of a head, where the columns of x are heads of queries, of keys and of values.

    Errors   ValueError unless there is a head of queries, no negative number of heads of keys, and no column too many
    """
    got = {"heads": heads, "key_heads": key_heads}
    require(heads >= 1 and key_heads >= 0, where, "there must be a head", got, "Check the model's numbers of heads.")
    size = x.shape[-1] // (heads + 2 * key_heads)
    check_shape(where, "x", x, (*x.shape[:-1], (heads + 2 * key_heads) * size))
    return size


def check_output(where: str, name: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise ValueError unless a result of this shape and dtype can be written into `array`."""
    check_shape(where, name, array, shape)
    flags = array.flags
    if array.dtype != dtype or not (flags.c_contiguous and flags.writeable):
        rule = f"{name} must be a writable contiguous {dtype} array"
        got = {"dtype": array.dtype, "contiguous": flags.c_contiguous, "writable": flags.writeable}
        raise refusal(ValueError, where, rule, got, "Allocate it with np.empty.")


def check_rows(where: str, total: np.ndarray, first_row: int, shape: tuple[int, int], dtype: np.dtype) -> None:
    """Raise ValueError unless rows from `first_row` on of a gradient of this shape can be written into `total`."""
    rows, columns = shape
    check_output(where, "total", total, (len(total), columns), dtype)
    if not 0 <= first_row <= rows - len(total):
        got = {"first_row": first_row, "rows": len(total)}
        raise refusal(ValueError, where, f"total must be some of the {rows} rows", got, "Check the first row.")


def checked_indices(where: str, name: str, indices: np.ndarray, count: int) -> np.ndarray:
    """Return flat indices; raise ValueError if one is outside range(count), since a compiled kernel would use it."""
    row = flat(indices)
    if isinstance(row, Operand):  # a step checks its tokens before
        return row
    if row.size and (row.min() < 0 or row.max() >= count):
        rule, wrong = f"{name} must be from 0 to {count - 1}", row[(row < 0) | (row >= count)]
        raise refusal(ValueError, where, rule, {name: wrong[0]}, "Check what they count.")
    return row
