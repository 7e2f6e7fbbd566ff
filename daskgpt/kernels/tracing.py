"""Traces: the native calls of a kernel, found from the shapes of its arguments alone.

A kernel checks its arguments, allocates its results, and calls native functions (`compilation.Kernel`). Called with
*operands*, which have a shape, a dtype and a place but no data, it does the same, except that its native calls are
noted instead of made. What it does with an operand beyond that (arithmetic of NumPy, a decision on a value) cannot be
noted, and raises `NotNative`: such a kernel stays a Python call.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

RETURNS = 2  # words before the arguments of a native function: where it leaves its result, and its error
MOST_WORDS = 160  # of a call, these included
FLOATS = 8  # arguments that a processor takes in registers for floating-point numbers


class NotNative(Exception):
    """A kernel uses an operand in another way than as an argument of a native function."""


@dataclass(eq=False)
class Buffer:
    """Memory that operands are places in.

    shape    and dtype: those it was made with
    source   names what it is outside of the trace; None for memory that a kernel has allocated
    written  whether a native call writes into it
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source: Any = None
    written: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Operand:
    """An array without data, contiguous and writable, for kernels to be called with."""

    flags = np.empty(0).flags

    def __init__(self, trace: Trace, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype, offset: int = 0) -> None:
        """offset   bytes from the start of the buffer"""
        self.trace, self.buffer, self.shape, self.dtype, self.offset = trace, buffer, shape, dtype, offset
        self.ndim, self.size, self.itemsize = len(shape), math.prod(shape), dtype.itemsize
        self.nbytes = self.size * self.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: Any) -> Operand:
        sizes = list(shape[0] if isinstance(shape[0], tuple) else shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.size // max(-math.prod(sizes), 1)
        return Operand(self.trace, self.buffer, tuple(sizes), self.dtype, self.offset)

    def __getitem__(self, index: Any) -> Operand:
        """Return a range of the first axis."""
        if not isinstance(index, slice) or index.step is not None or not self.shape:
            raise NotNative(f"an index {index}")
        first, last, _ = index.indices(len(self))
        row = self.nbytes // max(len(self), 1)
        shape = max(last - first, 0), *self.shape[1:]
        return Operand(self.trace, self.buffer, shape, self.dtype, self.offset + first * row)

    def astype(self, dtype: Any, copy: bool = True) -> Operand:
        if copy or self.dtype != dtype:
            raise NotNative(f"a conversion to {dtype}")
        return self

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Operand:
        """Allocate memory by NumPy's functions with `like` (NEP 35)."""
        if function is np.ascontiguousarray:
            return self if self.shape else self.reshape(1)
        if function is np.empty_like:
            return self.trace.empty(self.shape, self.dtype)
        if function is np.empty:
            shape, dtype = args
            return self.trace.empty(shape if isinstance(shape, tuple) else (shape,), np.dtype(dtype))
        raise NotNative(function.__name__)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotNative("arithmetic or values of an operand")

    __array_ufunc__ = __array__ = __bool__ = __float__ = __int__ = __index__ = __iter__ = __setitem__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __imul__ = __iadd__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # libraries look for these; Python 3.13 prints any other error
            raise AttributeError(name)
        raise NotNative(f"attribute {name}")


@dataclass
class NativeCall:
    """A call of a native function.

    address  of the function
    floats   bits of its floating-point arguments
    words    of its other arguments: numbers, or operands, whose addresses are not known yet
    """

    address: int
    floats: list[int]
    words: list[int | Operand]


@dataclass
class Trace:
    """The native calls that kernels would make, in order.

    constants   arrays that they read besides operands; they must live as long as the calls
    """

    calls: list[NativeCall] = field(default_factory=list)
    constants: list[np.ndarray] = field(default_factory=list)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Operand:
        """Return an operand in new memory."""
        return Operand(self, Buffer(shape, dtype), shape, dtype)

    def call(self, words: Sequence[str], address: Callable[[], int], kind: str, arguments: Sequence[Any]) -> None:
        """Note a call of a native function.

        words     of its signature, see `compilation.kernel`
        address   returns that of the function
        kind      of its real numbers: the character of their dtype

        Errors    NotNative for arguments that do not fit the signature
        """
        floats: list[int] = []
        others: list[int | Operand] = [0] * RETURNS
        for word, argument in zip(words, arguments, strict=True):
            letter, count = word[0], word[1:]
            if letter in "nfsd" and not (letter in "sd" and count):
                numbers = argument if count else [argument]
                if letter == "n":
                    others += map(int, numbers)
                else:
                    real = "d" if letter == "d" or (letter == "f" and kind == "d") else "f"
                    floats += (_bits(real, number) for number in numbers)
            else:
                others += self._words_of(letter, int(count), kind, argument)
        if len(floats) > FLOATS or len(others) > MOST_WORDS:
            raise NotNative(f"{len(floats)} floating-point arguments and {len(others)} words")
        self.calls.append(NativeCall(address(), floats, others))

    def _words_of(self, letter: str, axes: int, kind: str, array: Any) -> list[int | Operand]:
        """Return an array as native functions take it: no owner, sizes, address, shape and strides."""
        dtype = np.dtype({"i": "i", "h": "H", "l": "l", "s": "f", "d": "d"}.get(letter.lower(), kind))
        place: int | Operand = array
        written = letter in "wHLSD"
        if isinstance(array, np.ndarray):
            if written or not array.flags.c_contiguous:
                raise NotNative("an array among operands")
            self.constants.append(array)
            place = array.ctypes.data
        elif written:
            array.buffer.written = True
        if array.dtype != dtype or array.ndim != axes:
            raise NotNative(f"an array of {array.ndim} axes and {array.dtype}")
        strides = [math.prod(array.shape[axis + 1 :]) * array.itemsize for axis in range(axes)]
        return [0, 0, array.size, array.itemsize, place, *array.shape, *strides]


def _bits(real: str, number: float) -> int:
    """Return a number as the lowest bits of a floating-point register."""
    bits: int = struct.unpack("<q", struct.pack(f"<{real}", number).ljust(8, b"\0"))[0]
    return bits
