"""Text: the standard library's source, a file, a folder or a glob, read as documents, and the part that is held out.

Every n-th span is held out for validation unless the settings name the end: the end of a book, or the last files of a
library, differ from the rest, so a loss measured there tells little about the whole. Spans are long compared with a
sequence, so few windows cross a joint, and short compared with the whole, so many places are sampled. Text is cut
before it is encoded: the held-out text does not depend on the encoding, and losses per byte can be compared.
"""

from __future__ import annotations

import math
import os
import sys
import sysconfig
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import matching_files, readable
from daskgpt.formats.stored_model import refuse_pickle

STANDARD_LIBRARY = "stdlib"

# Whole files up to this size in all. Python 3.11 to 3.13 stay below it; a later, larger library is cut.
STANDARD_LIBRARY_BYTES = 9_000_000

# Copies of other programs, an editor, and tables in the form of modules, from which a model would learn little.
_LEFT_OUT = {"encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"}
_LEFT_OUT_FOLDERS = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})


def read_text(source: str) -> list[str]:
    """Return the documents of a source, in the order of their paths; empty ones are dropped.

    `stdlib` is the source of this Python's standard library. A folder is read with all folders below it, but without
    hidden ones. In folders and globs a file that is not UTF-8, or holds a NUL, is skipped; a single file must be UTF-8.

    Cost     reads every file once; the text stays in memory
    Errors   FileNotFoundError if no file is there; ValueError if there is no text, or it is not UTF-8; OSError if a
             file cannot be read
    """
    path, where = Path(source).expanduser(), "read_text"
    alone = path.is_file() and source != STANDARD_LIBRARY
    if alone:
        refuse_pickle(path, where, "Give a text, or token files.")
    if source == STANDARD_LIBRARY:
        paths = _standard_library(Path(sysconfig.get_path("stdlib")))
    else:
        paths = files_below(path) if path.is_dir() else matching_files(source, where)
    documents = []
    for each in paths:
        with readable(each, where):
            content = each.read_bytes()
        try:
            documents += [content.decode()] if alone or b"\0" not in content else []
        except UnicodeDecodeError as error:
            rule, got = "the file must be UTF-8 text", {"source": source, "first wrong byte": error.start}
            if alone:
                advice = "Convert it, for example with iconv -t UTF-8."
                raise refusal(ValueError, where, rule, got, advice) from error
    rule, got = "at least one file must be UTF-8 text", {"source": source, "files": len(paths)}
    require(bool(documents), where, rule, got, "Name token files by a path or glob that ends in .bin.")
    documents = [document for document in documents if document.strip()]
    rule, advice = "the text must not be empty", "Give a source that holds text."
    require(bool(documents), where, rule, {"source": source}, advice)
    return documents


def _standard_library(root: Path) -> list[Path]:
    """Return the files of the library at `root`, up to a total size.

    Only names that Python itself lists count: a distribution may add files.
    """
    found, size = list[Path](), 0
    for path in files_below(root, left_out=_LEFT_OUT_FOLDERS):
        top = path.relative_to(root).parts[0].removesuffix(".py")
        if path.suffix == ".py" and top in sys.stdlib_module_names and top not in _LEFT_OUT:
            size += path.stat().st_size
            if size > STANDARD_LIBRARY_BYTES:
                break
            found.append(path)
    rule, advice = "the source of the standard library must be installed", "Give a text file instead."
    require(bool(found), "read_text", rule, {"folder": root}, advice, FileNotFoundError)
    return found


def files_below(folder: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """Return all files in the folder and below it, sorted, except hidden ones and those in excluded folders."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    # By parts, not by the text of the path, so that the order does not depend on the separator of folders.
    return sorted((path for path in found if path.is_file()), key=lambda path: path.parts)


# What is held out

SPANS, END = "spans", "end"
SPAN_CHARACTERS = 16384
SPAN_TOKENS = 4096

# A cut in a text moves to the end of its line, if that is near.
LINE_CHARACTERS = 1024


@dataclass(frozen=True)
class Run:
    """Neighboring spans of the same part: [start, stop), held out or not."""

    start: int
    stop: int
    held_out: bool


def runs(total: int, span: int, fraction: float, held_out: str = SPANS) -> list[Run]:
    """Cut `total` items into runs, so that a fraction of the spans is held out, evenly spread; or the end, to the item.

    Span i is held out where floor(i * fraction + 1/2) grows: 4, 14, 24, ... for a tenth. A short text is cut into
    shorter spans.
    """
    # As a fraction: the float 0.1 is not quite a tenth, and its multiples would fall to either side of a whole number.
    share = Fraction(fraction).limit_denominator(1_000_000)
    if share == 0:
        return [Run(0, total, False)]
    if held_out == END:
        cut = math.floor(total * (1 - share))
        return [Run(0, cut, False), Run(cut, total, True)]
    half = Fraction(1, 2)
    span = min(span, max(1, math.ceil(total * min(share, 1 - share))))

    def is_held_out(index: int) -> bool:
        return math.floor((index + 1) * share + half) > math.floor(index * share + half)

    groups = [(key, list(group)) for key, group in groupby(range(math.ceil(total / span)), is_held_out)]
    return [Run(group[0] * span, min(total, (group[-1] + 1) * span), key) for key, group in groups]


def split_text(documents: list[str], fraction: float, held_out: str = SPANS) -> tuple[list[str], list[str]]:
    """Return pieces of text for training and for validation. Spans end with lines, unless these are too long.

    Errors   none: a text too short to be split leaves one part empty
    """
    cuts = runs(sum(map(len, documents)), SPAN_CHARACTERS, fraction, held_out)
    stops = [run.stop for run in cuts]
    parts: tuple[list[str], list[str]] = ([], [])
    position = 0
    for text in documents:
        inside = cuts[bisect_right(stops, position) : bisect_left(stops, position + len(text)) + 1]
        cuts_inside = (_line_end(text, a.stop - position, b, held_out) for a, b in pairwise(inside))
        ends = [0, *cuts_inside, len(text)]
        for run, (start, stop) in zip(inside, pairwise(ends)):
            if start < stop:
                parts[run.held_out].append(text[start:stop])
        position += len(text)
    return parts


def _line_end(text: str, position: int, following: Run, held_out: str) -> int:
    """Return the end of the line at a position, if it is near; with `held_out="end"` the position itself."""
    if held_out == END:
        return position
    # At most half of the next run, so that some of it is left.
    limit = min(LINE_CHARACTERS, (following.stop - following.start) // 2)
    found = text.find("\n", position - 1, position + limit)
    return position if found == -1 else found + 1


def split_tokens(
    tokens: np.ndarray, fraction: float, held_out: str = SPANS
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return pieces of a row of tokens for training and for validation, as views."""
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for run in runs(tokens.size, SPAN_TOKENS, fraction, held_out):
        parts[run.held_out].append(tokens[run.start : run.stop])
    return parts
