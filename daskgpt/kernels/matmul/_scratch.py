"""Memory that a thread's products work in: it is kept from call to call, because fresh memory costs a page fault every 4 KB."""

import threading

import numpy as np

_PAGE = 4096


class _Scratch(threading.local):
    """One thread's memory; it only grows."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)
        self.size = 0
        self.address = 0

    def grow(self, size: int) -> int:
        self.memory = np.empty(size + _PAGE, np.uint8)
        self.size = size
        self.address = -(-self.memory.ctypes.data // _PAGE) * _PAGE
        return self.address


_scratch = _Scratch()


def scratch(*sizes: int) -> list[int]:
    """Addresses of blocks of these many bytes, each at the start of a page; they hold until this thread's next call."""
    rounded = [-(-size // _PAGE) * _PAGE for size in sizes]
    total = sum(rounded)
    place = _scratch.address if total <= _scratch.size else _scratch.grow(total)
    addresses = []
    for size in rounded:
        addresses.append(place)
        place += size
    return addresses
