"""The unit of the processor that multiplies bfloat16 numbers: AMX tiles, AVX-512 with BF16, or none (float32 products);
and scratch memory.

Every thread requests the tile registers before its first product with them, when it requests scratch memory.
"""

import ctypes
import enum
import functools
import itertools
import os
import platform
import threading

import llvmlite.binding
import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.kernels.simd.lanes import PAGE, features, has_avx512_bfloat16

VARIABLE = "DASKGPT_MATMUL"
_ADVICE = "Unset it to use the fastest that works here."
_REQUEST_PERMISSION, _TILE_DATA, _ARCH_PRCTL = 0x1023, 18, 158


class Unit(enum.IntEnum):
    """The three ways to multiply."""

    PORTABLE = 0
    AVX512 = 1
    AMX = 2


def outruns_float32(unit: Unit) -> bool:
    """Return whether products with this unit take less time here than float32 products do.

    With AVX-512, AMD's processors multiply pairs of bfloat16 twice as fast as float32 (200 and 105 GFLOP/s per core
    measured), and Intel's more slowly (88 and 140).
    """
    return unit is Unit.AMX or (unit is Unit.AVX512 and llvmlite.binding.get_host_cpu_name().startswith("znver"))


def compiles(unit: Unit) -> bool:
    """Return whether code for this unit can be compiled here."""
    if unit is Unit.AMX:
        return has_avx512_bfloat16() and features().issuperset(("amx-tile", "amx-bf16"))
    return unit is Unit.PORTABLE or has_avx512_bfloat16()


def request_tiles() -> bool:
    """Ask Linux for the tile registers of this process; return whether they are granted. Asking again costs little."""
    if platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


@functools.cache
def works(unit: Unit) -> bool:
    """Return whether this unit can be used here: the processor has it and the operating system grants it."""
    return compiles(unit) and (unit is not Unit.AMX or request_tiles())


@functools.cache
def unit() -> Unit:
    """Return the unit that multiplies in this process: the fastest one, or the one that DASKGPT_MATMUL names.

    Errors   ValueError for an unknown name, RuntimeError when the processor or the operating system lacks the unit
    """
    name = os.environ.get(VARIABLE)
    if not name:
        fast = (kind for kind in (Unit.AMX, Unit.AVX512) if works(kind) and outruns_float32(kind))
        return next(fast, Unit.PORTABLE)
    names = {kind.name.lower(): kind for kind in Unit}
    if name not in names:
        raise refusal(ValueError, VARIABLE, "the unit must be amx, avx512 or portable", {VARIABLE: name}, _ADVICE)
    if not works(names[name]):
        rule = "the processor must have the unit and the operating system must grant it"
        raise refusal(RuntimeError, VARIABLE, rule, {VARIABLE: name}, _ADVICE)
    return names[name]


class Scratch(threading.local):
    """One thread's memory, which only grows: fresh memory costs a page fault every 4 KB.

    Kernels that use it cannot be traced, since an operand cannot be viewed as words.
    """

    size = address = 0

    def __call__(self, *sizes: int) -> list[int]:
        """Return addresses of pieces of these sizes in bytes, aligned to pages, valid until the thread's next call."""
        *starts, end = itertools.accumulate((-(-size // PAGE) * PAGE for size in sizes), initial=0)
        if end > self.size:
            self._grow(end)
        return [self.address + start for start in starts]

    def _grow(self, size: int) -> None:
        if unit() is Unit.AMX:
            request_tiles()
        self._memory = np.empty(size + PAGE, np.uint8)
        self.size, self.address = size, -(-self._memory.ctypes.data // PAGE) * PAGE


scratch = Scratch()
