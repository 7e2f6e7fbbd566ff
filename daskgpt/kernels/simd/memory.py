"""Scratch memory of kernels, kept from call to call: fresh memory costs a page fault every 4 KB.

A function called from Python gets memory of its own thread (`Scratch`). Compiled code cannot look that up: a function
that is called by its address takes memory from slots that all threads share, and gives it back (`slots`, `take`,
`give_back`).
"""

import itertools
import threading
from collections.abc import Callable

import numpy as np
from llvmlite import ir

from daskgpt.kernels.compilation import helper, instruction
from daskgpt.kernels.simd.lanes import I64, POINTER, VOID, call, whole
from daskgpt.kernels.tracing import require_no_trace

PAGE = 4096
# Number of slots for addresses of free memory.
_SLOTS = 64


class Scratch(threading.local):
    """One thread's memory, which only grows.

    before_growing   called in a thread whenever its memory grows, also at the thread's first use
    """

    def __init__(self, before_growing: Callable[[], None]) -> None:
        self.before_growing = before_growing
        self.size, self.address = 0, 0

    def __call__(self, *sizes: int) -> list[int]:
        """Return addresses of pieces of these sizes in bytes, aligned to pages, valid until the thread's next call."""
        require_no_trace("memory of a thread")
        *starts, end = itertools.accumulate((-(-size // PAGE) * PAGE for size in sizes), initial=0)
        if end > self.size:
            self._grow(end)
        return [self.address + start for start in starts]

    def _grow(self, size: int) -> None:
        self.before_growing()
        self._memory = np.empty(size + PAGE, np.uint8)
        self.size, self.address = size, -(-self._memory.ctypes.data // PAGE) * PAGE


@instruction("", "n")
def slots(builder):
    """Return the address of the slots of the function that calls this. Only the outermost function calls it."""
    kind = ir.ArrayType(I64, _SLOTS)
    places = ir.GlobalVariable(builder.module, kind, "scratch_slots")
    places.linkage, places.initializer = "internal", ir.Constant(kind, None)
    return builder.ptrtoint(places, I64)


@instruction("n", "n")
def _take_slot(builder, slot):
    """Empty the slot at an address; return its content, 0 if it was empty."""
    return builder.atomic_rmw("xchg", builder.inttoptr(slot, I64.as_pointer()), whole(0), "acquire")


@instruction("n n", "n")
def _fill_slot(builder, slot, address):
    """Put an address into a slot if the slot is empty; return whether it was."""
    result = builder.cmpxchg(builder.inttoptr(slot, I64.as_pointer()), whole(0), address, "acq_rel", "acquire")
    return builder.zext(builder.extract_value(result, 1), I64)


@instruction("n", "n")
def _allocate(builder, size):
    return builder.ptrtoint(call(builder, "malloc", POINTER, [size]), I64)


@instruction("n")
def _release(builder, address):
    call(builder, "free", VOID, [builder.inttoptr(address, POINTER)])


@helper
def take(places, size):
    """Return the address of `size` bytes for this call alone; all requests at these slots have the same size."""
    for slot in range(_SLOTS):
        address = _take_slot(places + 8 * slot)
        if address != 0:
            return address
    return _allocate(size)


@helper
def give_back(places, scratch):
    """Give memory of `take` back, for the next call."""
    for slot in range(_SLOTS):
        if _fill_slot(places + 8 * slot, scratch):
            return
    _release(scratch)
