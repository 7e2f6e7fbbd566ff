"""Flush subnormal numbers to zero in the calling thread.

An operation on a subnormal number (below 1.2e-38 in float32) takes an x86 processor a hundred cycles or more, and
vanishing gradients are full of them. The two bits that avoid this, FTZ for results and DAZ for arguments, are part of
a thread's state, so each thread that runs kernels sets them. On other processors these functions do nothing.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
from numba.core import cgutils

from daskgpt.kernels.compilation import kernel
from daskgpt.kernels.simd.lanes import I8, I32, I64, VOID, X86, at, call, instruction, whole

FLUSH = 1 << 15 | 1 << 6  # results, and arguments, that are subnormal numbers
_SMALLEST_NORMAL = np.full(1, 2.0**-126, np.float32)
_HALF = np.float32(0.5)


@instruction("", "n")
def read_state(builder):
    if not X86:
        return whole(0)
    place = cgutils.alloca_once(builder, I32)
    call(builder, "llvm.x86.sse.stmxcsr", VOID, [at(builder, place, 0, I8)])
    return builder.zext(builder.load(place), I64)


@instruction("n")
def write_state(builder, state):
    if X86:
        place = cgutils.alloca_once(builder, I32)
        builder.store(builder.trunc(state, I32), place)
        call(builder, "llvm.x86.sse.ldmxcsr", VOID, [at(builder, place, 0, I8)])


@kernel("n n")
def _set_state(state, adding):
    """Write the state, or set its bits in addition to those already set; return the previous state."""
    previous = read_state()
    write_state(state | previous if adding else state)
    return previous


def set_flush_to_zero() -> int:
    """Make the calling thread treat subnormal numbers as zero; return the previous state for `restore`."""
    return _set_state(FLUSH, 1)


def restore(previous: int) -> None:
    """Give the calling thread the floating-point state that `set_flush_to_zero` returned."""
    _set_state(previous, 0)


@contextlib.contextmanager
def flush_to_zero() -> Iterator[None]:
    """Treat subnormal numbers as zero in the calling thread while the `with` block runs."""
    previous = set_flush_to_zero()
    try:
        yield
    finally:
        restore(previous)


def flushes() -> bool:
    """Return whether the calling thread treats subnormal numbers as zero."""
    return bool((_SMALLEST_NORMAL * _HALF)[0] == 0)
