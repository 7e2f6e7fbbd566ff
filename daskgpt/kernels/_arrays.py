"""Checks and views that the public kernels share; each costs less than a microsecond."""

import numpy as np


def rows(x: np.ndarray) -> np.ndarray:
    """x as contiguous rows: every axis but the last becomes one."""
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def check_shape(where: str, name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `array` has this shape: a compiled kernel would read past the end of it."""
    if array.shape != shape:
        raise ValueError(
            f"{where}: {name} must have shape {shape}; got {name}.shape={array.shape}. Check the order of the arguments."
        )


def check_output(where: str, name: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise ValueError unless a result of this shape and dtype can be written into `array`."""
    check_shape(where, name, array, shape)
    flags = array.flags
    if array.dtype != dtype or not (flags.c_contiguous and flags.writeable):
        raise ValueError(
            f"{where}: {name} must be a writable contiguous {dtype} array; got dtype={array.dtype}, "
            f"contiguous={flags.c_contiguous}, writable={flags.writeable}. Allocate it with np.empty({shape}, {str(dtype)!r})."
        )


def check_indices(where: str, name: str, position: int, indices: np.ndarray, count: int) -> None:
    """Raise ValueError when a kernel reports the `position` of an index outside of range(count); -1 is none."""
    if position >= 0:
        raise ValueError(
            f"{where}: {name} must be from 0 to {count - 1}; got {name}={indices.ravel()[position]}. "
            "Check the vocabulary and the sequence length."
        )
