"""A pseudo-terminal for tests: a command in a terminal of some width, and the lines that it showed."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Sequence
from contextlib import suppress


def opened(columns: int) -> tuple[int, int]:
    """Our side and that of a program, of a terminal with so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    return ours, theirs


def everything(ours: int) -> str:
    """What is written to a terminal until nobody has it open."""
    written = b""
    with suppress(OSError):  # how a terminal ends once nobody writes to it
        while read := os.read(ours, 65536):
            written += read
    os.close(ours)
    return written.decode()


def in_terminal(command: Sequence[str], columns: int) -> tuple[int, str]:
    """Exit code and everything that a command wrote to a terminal with so many columns."""
    ours, theirs = opened(columns)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    written = everything(ours)
    return process.wait(), written


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
