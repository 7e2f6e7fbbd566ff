"""The folder that keeps compiled kernels, and the check of its files before Numba reads them.

Numba runs whatever its files hold: with a damaged file a process crashes or computes wrong numbers. Each file
therefore ends with a seal, a SHA-256 of its name and content, which Numba does not read.

If Numba finds no writable folder, or its folder is full, kernels are kept in a temporary folder that all processes of
a user on a machine share.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numba

SEAL = hashlib.sha256().digest_size
ROOM = 1 << 24  # bytes: more than all kernels take


def seal(paths: Iterable[Path]) -> None:
    """Append a seal to files that have none.

    Errors   OSError if there is no room
    """
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb+") as file:  # another process may have removed it
            content = file.read()
            if not _is_sealed(path, content):
                file.write(_seal_of(path, content))


def is_sealed(path: Path) -> bool:
    """Return whether a file is as it was when it was sealed."""
    try:
        return _is_sealed(path, path.read_bytes())
    except OSError:
        return False


def _seal_of(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()


def _is_sealed(path: Path, content: bytes) -> bool:
    return content[-SEAL:] == _seal_of(path, content[:-SEAL])


class Place:
    """The place of this process for kernels: the folder that Numba chooses, a temporary one, or nowhere.

    folder    the temporary one; empty for Numba's choice, None for nowhere
    reason    why it is not Numba's choice
    """

    folder: str | None = ""
    reason = ""
    _is_told = False
    _lock = threading.Lock()

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Let Numba choose this folder for functions that are made meanwhile."""
        with self._lock:
            before = numba.config.CACHE_DIR
            numba.config.CACHE_DIR = self.folder or before
            try:
                yield
            finally:
                numba.config.CACHE_DIR = before

    def move(self, reason: str) -> None:
        """Choose the next folder, because this one cannot keep kernels."""
        self.reason = self.reason or reason
        self.folder = _temporary() if self.folder == "" else None

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which other processes choose this folder at once."""
        return {"NUMBA_CACHE_DIR": self.folder} if self.folder else {}

    def told(self, seconds: float) -> str:
        """Return a line, once in a process, about another folder than Numba's choice; empty for that.

        seconds   that compiling and loading kernels took
        """
        if not self.reason or self._is_told:
            return ""
        self._is_told = True
        kept = f"are in {self.folder} until the machine restarts" if self.folder else "are compiled at each start"
        took = f"compiling and loading them took {seconds:.1f} s"
        return f"kernels {kept} ({self.reason}); {took}. Set NUMBA_CACHE_DIR to a folder with {ROOM >> 20} MiB."


PLACE = Place()


def _temporary() -> str | None:
    """Return a folder that other users cannot write, whose files Numba may therefore trust; None without one."""
    try:
        path = Path(tempfile.gettempdir()) / f"daskgpt-kernels-{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return str(path) if private and stat.S_ISDIR(status.st_mode) else None


@functools.cache
def problem_of(folder: str) -> str:
    """Return why a folder cannot keep kernels; empty if it can."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM))
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return ""
