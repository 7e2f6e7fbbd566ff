"""Tests of local workers: each has one heap, also if it had threads before."""

import ctypes
import platform
import tempfile
from pathlib import Path

import pytest

import daskgpt


def heaps():
    """How many heaps this process has, as its C library says."""
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heaps.xml"
        file = ctypes.c_void_p(library.fopen(str(path).encode(), b"w"))
        library.malloc_info(0, file)
        library.fclose(file)
        return path.read_text().count("<heap ")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other heaps")
def test_local_worker_has_one_heap():
    with daskgpt.open_scheduler("local", 2) as scheduler:
        assert scheduler.everywhere(heaps) == [1, 1]
