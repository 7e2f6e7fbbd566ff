"""Tests of the settings of glibc: it keeps memory in one heap."""

from types import SimpleNamespace

from daskgpt.schedulers import local


def test_glibc_keeps_memory_in_one_heap(monkeypatch):
    """The numbers are those of glibc's <malloc.h>: M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD."""
    for name, answer, kept in (("glibc", 1, True), ("glibc", 0, False), ("musl", 1, False)):
        told: list = []
        library = SimpleNamespace(mallopt=lambda *given, told=told, answer=answer: told.append(given) or answer)
        monkeypatch.setattr(local.platform, "libc_ver", lambda name=name: (name, "2"))
        monkeypatch.setattr(local.ctypes, "CDLL", lambda path, library=library: library)
        assert local.keep_memory() is kept
        assert told == ([(-8, 1), (-4, 0), (-1, -1)] if name == "glibc" else [])
