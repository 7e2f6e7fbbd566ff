"""Tell glibc to keep the memory it is given back.

By default it returns each piece of 32 MiB or more to the kernel when it is freed, and the next array of that size costs
a page fault every 4 KiB: more than the kernel that fills it, for layers that are bound by memory.

A process that runs already can only be told in part: a thread that has asked for memory before keeps its own heap, of
which glibc gives back whole pieces of 64 MiB, and with many such threads the limit on heaps is not looked at any more.
So workers that we start have it in their environment. (gpt2 on two workers: 15 instead of 11.7 s a step, 3 of them in
the system, and in some runs only.)
"""

from __future__ import annotations

import ctypes
import platform

# From <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


# The same for a process that begins.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0"}


def keep_memory() -> bool:
    """Serve every allocation of this process from one heap that only grows; whether the C library does so.

    One heap, because glibc's heaps of other threads hold no piece above 64 MiB. It cannot be undone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all((mallopt(M_ARENA_MAX, 1), mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1)))
