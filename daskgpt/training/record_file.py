"""A file that records are appended to, each whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from daskgpt.config.files import not_written, open_no_link

Encode = Callable[[Mapping[str, Any]], bytes]


class RecordFile:
    """Takes records of a run and appends them, in one form. One thread does; others may wait for the disk.

    encode    the bytes of a record
    unwritten   those for which there was no room
    """

    def __init__(self, path: Path, encode: Encode, *, new: bool, header: bytes = b"") -> None:
        """new      whether the file must not be there yet
        header   what stands before the first record

        Errors   FileExistsError where it must be new and is not
        """
        self.path, self.encode = path, encode
        self.file = open_no_link(path, "x+b" if new else "a+b")
        self.unwritten = [header] if header else []
        self.writing = Lock()  # a record on its way is not one without room

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record.

        Errors   OSError where there is no room for all of it: it is kept, and written once there is
        """
        encoded = self.encode(record)
        with self.writing:
            self.unwritten.append(encoded)
            self._write()

    def write(self) -> None:
        """Write what is not written yet.

        Errors   OSError where there is no room for it: only whole records are in the file then
        """
        with self.writing:
            self._write()

    def _write(self) -> None:
        while self.unwritten:
            rest, before = self.unwritten[0], self.file.tell()
            try:
                while rest:
                    rest = rest[self.file.write(rest) :]
            except OSError as error:
                self.file.truncate(before)
                self.file.seek(before)
                raise not_written(error, "RunFolder", self.path) from error
            del self.unwritten[0]

    def sync(self) -> None:
        """Let the records so far be on the disk.

        Errors   OSError where they are not all written
        """
        if not self.file.closed:
            os.fsync(self.file.fileno())
        with self.writing:
            waits = bool(self.unwritten)
        if waits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def copy_to(self, path: Path) -> None:
        """Copy what is written so far, also where the file itself was moved away or removed."""
        self.file.seek(0)
        path.write_bytes(self.file.read())

    def close(self) -> None:
        self.file.close()
