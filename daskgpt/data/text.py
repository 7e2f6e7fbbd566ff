"""Text: the standard library's source, a file, a folder or a glob, read as documents."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import matching_files
from daskgpt.formats.pickles import refuse_pickle

STANDARD_LIBRARY = "stdlib"

# Whole files up to this size in all. Python 3.11 to 3.13 stay below it; a later, larger library is cut.
STANDARD_LIBRARY_BYTES = 9_000_000

# Copies of other programs, an editor, and tables in the form of modules: they would teach little but themselves.
_LEFT_OUT = {"encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"}
_LEFT_OUT_FOLDERS = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})


@dataclass(frozen=True)
class Document:
    """One file's text under its name."""

    name: str
    text: str


def read_text(source: str) -> list[Document]:
    """The documents of a source, in the order of their paths; empty ones are dropped.

    `stdlib` is the source of this Python's standard library. A folder is read with all folders below it, but without
    hidden ones. In folders and globs a file that is not UTF-8, or holds a NUL, is skipped; a file named alone must be
    UTF-8.

    Cost     reads every file once; the text stays in memory
    Errors   FileNotFoundError where nothing is there; ValueError where there is no text, or it is not UTF-8; OSError
             where a file cannot be read
    """
    path = Path(source).expanduser()
    if source == STANDARD_LIBRARY:
        documents = _standard_library(Path(sysconfig.get_path("stdlib")))
    elif path.is_file():
        refuse_pickle(path, "read_text", "Give a text, or token files.")
        documents = [Document(path.name, _decode_whole(path, source))]
    elif path.is_dir():
        documents = _decode_all(files_below(path), source)
    else:
        documents = _decode_all(matching_files(source, "read_text"), source)
    documents = [document for document in documents if document.text.strip()]
    rule, advice = "the text must not be empty", "Give a source that holds text."
    require(bool(documents), "read_text", rule, {"source": source}, advice)
    return documents


def _standard_library(root: Path) -> list[Document]:
    """Modules and packages of the library at `root`, up to a size in all.

    Only names that Python itself lists count: a distribution may put files of its own beside them.
    """
    documents, size = [], 0
    for path in files_below(root, left_out=_LEFT_OUT_FOLDERS):
        name = path.relative_to(root)
        top = name.parts[0].removesuffix(".py")
        if path.suffix != ".py" or top not in sys.stdlib_module_names or top in _LEFT_OUT:
            continue
        size += path.stat().st_size
        if size > STANDARD_LIBRARY_BYTES:
            break
        text = _decode(path.read_bytes())
        if text is not None:
            documents.append(Document(name.as_posix(), text))
    if not documents:
        rule = "the standard library must be there as source"
        raise refusal(FileNotFoundError, "read_text", rule, {"folder": root}, "Give a text file instead.")
    return documents


def files_below(folder: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """All files in the folder and those below it, sorted; nothing that is hidden or in a folder left out."""

    def walk() -> Iterator[Path]:
        for parent, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
            yield from (Path(parent, name) for name in names if not name.startswith("."))

    # By parts, not by the text of the path: the order is then the same whatever separates the folders.
    return sorted((path for path in walk() if path.is_file()), key=lambda path: path.parts)


def _decode_all(paths: list[Path], source: str) -> list[Document]:
    decoded = ((path, _decode(_content(path, source))) for path in paths)
    documents = [Document(str(path), text) for path, text in decoded if text is not None]
    rule, got = "at least one file must be UTF-8 text", {"source": source, "files": len(paths)}
    require(bool(documents), "read_text", rule, got, "Name token files by a path or glob that ends in .bin.")
    return documents


def _content(path: Path, source: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        got, advice = f"source={source}, file={path} ({error.strerror})", "Check its permissions and its disk."
        raise refusal(type(error), "read_text", "the file must be readable", got, advice) from error


def _decode(content: bytes) -> str | None:
    """The text, or None for a binary file."""
    try:
        return None if b"\0" in content else content.decode()
    except UnicodeDecodeError:
        return None


def _decode_whole(path: Path, source: str) -> str:
    try:
        return _content(path, source).decode()
    except UnicodeDecodeError as error:
        rule, got = "the file must be UTF-8 text", {"source": source, "first wrong byte": error.start}
        raise refusal(ValueError, "read_text", rule, got, "Convert it, for example with iconv -t UTF-8.") from error
