"""Rounding to bfloat16, the upper half of a float32, and back; arrays of bfloat16 numbers, as kernels take them."""

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.kernels.arguments import flat
from daskgpt.kernels.compilation import kernel, wide_vectors
from daskgpt.kernels.simd.math import nearest_half, widened

# Dtype of bfloat16 arrays: NumPy has no bfloat16, so its numbers are kept as uint16.
BFLOAT16 = np.dtype(np.uint16)
FLOAT32 = np.dtype(np.float32)

# Stands for a missing operand: its size is 0.
NOTHING = np.empty(0, BFLOAT16)


def check_float32(where: str, **arrays: np.ndarray) -> None:
    """Raise TypeError, with the name of the argument, unless these arrays are float32."""
    for name, array in arrays.items():
        if array.dtype != FLOAT32:
            got = {f"{name}.dtype": array.dtype}
            raise refusal(TypeError, where, f"{name} must be float32", got, "Convert it first.")


def words(array: np.ndarray) -> np.ndarray:
    """Return an array as 16-bit words: a writable view if it is contiguous, else a copy."""
    return flat(array).view(BFLOAT16)


def ceiling(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def aligned(size: int) -> np.ndarray:
    """Return `size` bfloat16 numbers, not set, that begin at a cache line."""
    line = 64 // BFLOAT16.itemsize
    memory = np.empty(size + line, BFLOAT16)
    first = -(memory.ctypes.data // BFLOAT16.itemsize) % line
    return memory[first : first + size]


@kernel("s1 H1")
def _to_bfloat16(x, y):
    wide_vectors()
    for i in range(x.size):
        y[i] = nearest_half(x[i])


@kernel("h1 S1")
def _from_bfloat16(x, y):
    wide_vectors()
    for i in range(x.size):
        y[i] = widened(x[i])


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16: to the nearest number, ties to the one whose last bit is 0.

    Shapes   x (...) -> y (...)
    Dtype    float32 -> uint16
    Cost     bound by memory
    Errors   TypeError when x is not float32
    """
    check_float32("to_bfloat16", x=x)
    y = np.empty(x.shape, BFLOAT16)
    _to_bfloat16(flat(x), flat(y))
    return y


def from_bfloat16(x: np.ndarray) -> np.ndarray:
    """Widen bfloat16 to float32, which is exact.

    Shapes   x (...) -> y (...)
    Dtype    uint16 -> float32
    Cost     bound by memory
    Errors   TypeError when x is not uint16
    """
    if x.dtype != BFLOAT16:
        rule = "x must be bfloat16 kept as uint16"
        raise refusal(TypeError, "from_bfloat16", rule, {"x.dtype": x.dtype}, "Use to_bfloat16.")
    y = np.empty(x.shape, FLOAT32)
    _from_bfloat16(flat(x), flat(y))
    return y


def rounded(x: np.ndarray) -> np.ndarray:
    """Return x rounded to bfloat16, as float32 numbers.

    Shapes   x (...) -> y (...)
    Dtype    float32
    Errors   TypeError when x is not float32
    """
    return from_bfloat16(to_bfloat16(x))
