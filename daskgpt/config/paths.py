"""Which files a source names: one file, or what a glob matches."""

from __future__ import annotations

import glob
from pathlib import Path

from daskgpt.config.errors import refusal, require


def matching_files(source: str, where: str) -> list[Path]:
    """The file itself, or every file that the glob matches, sorted.

    Errors   FileNotFoundError where there is no such file or the glob matches none; `where` opens the message
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    require(not path.is_dir(), where, "the source must name a file", {"source": source}, "Give a file or a glob.")
    if not glob.has_magic(source):
        raise refusal(FileNotFoundError, where, "the file must exist", {"source": source}, "Check the path.")
    found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
    if not found:
        rule, advice = "the glob must match at least one file", "Check the path; ** spans folders."
        raise refusal(FileNotFoundError, where, rule, {"source": source}, advice)
    return found
