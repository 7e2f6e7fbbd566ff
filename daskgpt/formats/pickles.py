"""Files of pickled Python objects, which can run anything when they are read, and are never opened here."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from daskgpt.config.errors import refusal

ZIP, PICKLE = b"PK\x03\x04", 0x80
LAST_PROTOCOL = 5
ENDINGS = (".pt", ".pth", ".pkl", ".pickle", ".ckpt")
TOLD = "`python -m daskgpt.convert --help` has the lines that convert one."


def refuse_pickle(path: Path, where: str, advice: str = TOLD) -> None:
    """Errors   ValueError where a file is one of them, by its first bytes or, if they say nothing else, its ending"""
    start = b""
    with suppress(OSError), open(path, "rb") as file:  # what cannot be read is told of by who reads it
        start = file.read(4)
    kind = ""
    if start == ZIP:
        kind = "a zip archive, as PyTorch writes it, with pickled Python objects"
    elif len(start) > 1 and start[0] == PICKLE and 2 <= start[1] <= LAST_PROTOCOL:
        kind = "pickled Python objects"
    elif path.suffix in ENDINGS:
        kind = f"{path.suffix}, an ending of pickled Python objects"
    if kind:
        rule = "the file must be one that can be read without running what is in it"
        raise refusal(ValueError, where, rule, f"path={path} ({kind})", advice)
