"""Flush subnormal numbers to zero in the calling thread.

An operation on a subnormal number (below 1.2e-38 in float32) takes an x86 processor a hundred cycles or more, and
vanishing gradients are full of them. The two bits that avoid this, FTZ for results and DAZ for arguments, are part of
a thread's state, so each thread that runs kernels sets them. On other processors these functions do nothing.
"""

import contextlib
from collections.abc import Iterator

from numba.core import cgutils

from daskgpt.kernels.compilation import instruction, kernel
from daskgpt.kernels.simd.lanes import I8, I32, I64, VOID, X86, at, call, whole

FLUSH = 1 << 15 | 1 << 6  # results, and arguments, that are subnormal numbers


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


@contextlib.contextmanager
def flush_to_zero() -> Iterator[None]:
    """Treat subnormal numbers as zero in the calling thread while the `with` block runs."""
    previous = _set_state(FLUSH, 1)
    try:
        yield
    finally:
        _set_state(previous, 0)
