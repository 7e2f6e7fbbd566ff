"""Arrays as the kernels take them: checked, contiguous, seen as 16-bit numbers whatever they hold."""

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.kernels.arguments import flat

# What the kernels accept. NumPy has no bfloat16, so its numbers are kept as uint16.
BFLOAT16 = np.dtype(np.uint16)
FLOAT32 = np.dtype(np.float32)

# Stands for an operand that is not given: its size is 0.
NOTHING = np.empty(0, BFLOAT16)


def check_float32(where: str, **arrays: np.ndarray) -> None:
    """Raise TypeError unless these arrays, by their names, are float32."""
    for name, array in arrays.items():
        if array.dtype != FLOAT32:
            got = {f"{name}.dtype": array.dtype}
            raise refusal(TypeError, where, f"{name} must be float32", got, "Convert it first.")


def words(array: np.ndarray) -> np.ndarray:
    """An array as 16-bit words: its own memory, to be written as well, where it is contiguous, else a copy's."""
    return flat(array).view(BFLOAT16)


def ceiling(number: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def aligned(size: int) -> np.ndarray:
    """`size` bfloat16 numbers at the start of a cache line, not set."""
    line = 64 // BFLOAT16.itemsize
    memory = np.empty(size + line, BFLOAT16)
    first = -(memory.ctypes.data // BFLOAT16.itemsize) % line
    return memory[first : first + size]
