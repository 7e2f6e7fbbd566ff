"""Checks of files that other programs wrote: JSON of a sane size, and no pickled Python objects."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from daskgpt.config.errors import refusal, require

# Headers and indexes of GPT-2 have some ten thousand bytes. safetensors reads up to 100 MB, of which JSON makes a GB.
MAX_JSON_BYTES = 2**22
PICKLE_ENDINGS = (".pt", ".pth", ".pkl", ".pickle", ".ckpt")
CONVERT = "`python -m daskgpt.convert --help` has the lines that convert one."


def refuse_pickle(path: Path, where: str, advice: str = CONVERT) -> None:
    """Raise ValueError for a file of pickled Python objects, which can execute anything when they are read.

    Such a file is recognized by its first bytes or, if these are ambiguous, by its ending.
    """
    start = b""
    with suppress(OSError), open(path, "rb") as file:  # the reader reports a file that cannot be opened
        start = file.read(4)
    pickled = len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5
    pickled = pickled or start == b"PK\x03\x04" or path.suffix in PICKLE_ENDINGS  # PyTorch writes zip archives
    rule = "the file must be readable without executing it, not pickled Python objects"
    require(not pickled, where, rule, {"path": path}, advice)


def require_file(path: Path, where: str) -> None:
    """Raise FileNotFoundError if there is no such file."""
    advice = "Check the spelling and the folder."
    require(path.is_file(), where, "the file must exist", {"path": path}, advice, FileNotFoundError)


def read_json(path: Path, where: str, what: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    what     the object's name in error messages

    Errors   FileNotFoundError; ValueError for a file that is too long or not an object
    """
    require_file(path, where)
    size = path.stat().st_size
    rule, advice = f"{what} must be a JSON object of at most {MAX_JSON_BYTES:,} bytes", "Copy or write it again."
    require(size <= MAX_JSON_BYTES, where, rule, {"path": path, "bytes": size}, advice)
    try:
        known = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise refusal(ValueError, where, rule, {"path": f"{path} ({type(error).__name__})"}, advice) from error
    require(isinstance(known, dict), where, rule, {"path": path, "kind": type(known).__name__}, advice)
    return dict(known)


def short(value: Any, most: int = 40) -> str:
    """Return a value of a foreign file as one printable line of at most `most` characters."""
    text = "".join(character if character.isprintable() else "?" for character in str(value)[: 2 * most])
    return text if len(text) <= most else f"{text[: most - 3]}..."
