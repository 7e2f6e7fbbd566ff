"""Arrays as the kernels take them: checked, contiguous, seen as 16-bit numbers whatever they hold."""

import numpy as np

from daskgpt.kernels.bfloat16.rounding import BFLOAT16, FLOAT32

# Stands for an operand that is not given: its size is 0.
NOTHING = np.empty(0, BFLOAT16)


def check_float32(where: str, name: str, array: np.ndarray) -> None:
    """Raise TypeError unless an array is float32."""
    if array.dtype != FLOAT32:
        raise TypeError(f"{where}: {name} must be float32; got {name}.dtype={array.dtype}. Convert it first.")


def words(array: np.ndarray) -> np.ndarray:
    """A contiguous array as 16-bit words, to be written."""
    flat = array.reshape(-1)
    return flat if flat.dtype == BFLOAT16 else flat.view(BFLOAT16)


def ceiling(number: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def aligned(size: int) -> np.ndarray:
    """`size` bfloat16 numbers at the start of a cache line, not set."""
    line = 64 // BFLOAT16.itemsize
    memory = np.empty(size + line, BFLOAT16)
    first = -(memory.ctypes.data // BFLOAT16.itemsize) % line
    return memory[first : first + size]
