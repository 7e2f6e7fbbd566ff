"""A pseudo-terminal for tests: a command in a terminal of some width, and the lines that it showed."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


def opened(columns: int) -> tuple[int, int]:
    """Our side and that of a program, of a terminal with so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    return ours, theirs


def read_to_end(ours: int) -> str:
    """What is written to a terminal until a NUL, which its user writes at the end.

    The other side is to stay open until this returns: what is in a terminal as its last writer closes it may be lost.
    """
    written = b""
    while not written.endswith(b"\0"):
        written += os.read(ours, 65536)
    return written[:-1].decode()


def in_terminal(command: Sequence[str], columns: int) -> tuple[int, str]:
    """Exit code and everything that a command wrote to a terminal with so many columns."""
    ours, theirs = opened(columns)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with ThreadPoolExecutor(1) as pool, os.fdopen(ours, "rb"), os.fdopen(theirs, "wb") as stream:
        written = pool.submit(read_to_end, ours)
        options = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
        code = subprocess.run(command, env=environment, **options).returncode
        stream.write(b"\0")
        stream.flush()
        return code, written.result()


def shown_lines(written: str) -> list[str]:
    """All lines that stood on the screen at some time, those that were written over too."""
    return [part for line in written.split("\n") for part in line.split("\r") if part.strip()]


def left_lines(written: str) -> list[str]:
    """The lines that stand on the screen in the end: what follows a carriage return is written over what was there."""
    kept = []
    for line in written.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        kept.append(shown.rstrip())
    return kept
