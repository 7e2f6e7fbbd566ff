"""Start of command lines in tests, and the size of the models that they train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SMALL = "--blocks 2 --heads 2 --channels 32 --batch-size 4 --sequence-length 32 --validation-batches 2 --warmup 5"
SMALL = SMALL.split()
PATIENCE = 300  # seconds for what takes a few, on a machine that may do much else


def run(
    command: str, *arguments: object, cwd: Path | None = None, seconds: float = PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command's process once it has ended within some seconds, with what it printed."""
    return subprocess.run(
        [sys.executable, "-m", f"daskgpt.{command}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one line with which a command line refuses its input."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line]
    return line


def write_text(folder: Path) -> Path:
    """A text that a small model learns in a few steps."""
    path = folder / "text.txt"
    path.write_text("".join(f"line {number}: the quick brown fox jumps over the lazy dog\n" for number in range(3000)))
    return path
