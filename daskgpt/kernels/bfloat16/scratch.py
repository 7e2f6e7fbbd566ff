"""Memory that a thread's products work in, kept from call to call: fresh memory costs a page fault every 4 KB."""

import threading

import numpy as np

from daskgpt.kernels.bfloat16.units import Unit, request_tiles, unit

_PAGE = 4096


class _Scratch(threading.local):
    """One thread's memory, which only grows; growing, the thread's first use included, asks for the tile registers."""

    size = 0
    address = 0
    memory: np.ndarray

    def grow(self, size: int) -> None:
        if unit() is Unit.AMX:
            request_tiles()
        self.memory = np.empty(size + _PAGE, np.uint8)
        self.size = size
        self.address = -(-self.memory.ctypes.data // _PAGE) * _PAGE


_scratch = _Scratch()


def scratch(*sizes: int) -> list[int]:
    """Addresses of pieces of these many bytes, each at the start of a page; they hold until this thread's next call."""
    rounded = [-(-size // _PAGE) * _PAGE for size in sizes]
    total = sum(rounded)
    if total > _scratch.size:
        _scratch.grow(total)
    place = _scratch.address
    addresses = []
    for size in rounded:
        addresses.append(place)
        place += size
    return addresses
