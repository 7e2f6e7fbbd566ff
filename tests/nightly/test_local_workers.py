"""Tests of workers that we start: each has one heap, whatever threads it has had before it was told, and one number."""

from __future__ import annotations

import ctypes
import platform
import tempfile
from pathlib import Path

import pytest
from one_number import MODELS, Dials, bits_after_steps, own_product

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
def test_a_worker_of_a_local_cluster_has_one_heap():
    with daskgpt.open_scheduler("local", 2) as scheduler:
        assert scheduler.everywhere(heaps) == [1, 1]


@pytest.mark.skipif(not own_product(), reason="the sums of a library's product depend on the shapes")
def test_workers_drop_what_one_process_drops():
    model = MODELS["odd with dropout"]
    bits = bits_after_steps(model, "float32", Dials(model.batch))
    assert bits_after_steps(model, "float32", Dials((1, 10), scheduler="local", threads=2)) == bits
