"""What a corpus is read from: files in an order of their own, cut into blocks that can be encoded apart.

A plain file's blocks are ranges, which whoever encodes them reads. What is compressed, and Parquet, can only be read
from its beginning: its blocks come with their content.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import matching_files
from daskgpt.data.corpus.cuts import record_cut, text_cut
from daskgpt.data.text import files_below

WHERE = "prepare"
BLOCK_BYTES = 2**22  # of text that one task encodes
LOOKED_AT = 2**13  # bytes of a file in a folder: with a zero among them it is no text, and left out
ROWS = 256  # of Parquet read at a time

TEXT, RECORDS, ROWS_OF_TEXT = "text", "records", "rows"
_ENDINGS = {".jsonl": RECORDS, ".ndjson": RECORDS, ".parquet": ROWS_OF_TEXT}
_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    name   as the manifest says it: what follows the input that it belongs to
    kind   text, records (JSONL), or rows (Parquet)
    """

    path: str
    name: str
    kind: str
    packing: str
    size: int
    modified: int


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, or rows of one.

    start, stop   where it lies; both are moved on to the next cut by who reads it. Of rows, their numbers
    content       what it holds, already cut; None where it is to be read from the file
    """

    path: str
    kind: str
    start: int
    stop: int
    content: bytes | tuple[str, ...] | None = None


Block = tuple[Piece, ...]


def list_sources(inputs: list[str]) -> list[SourceFile]:
    """The files of some inputs: a file, a folder (all texts below it that are not hidden) or a glob, in sorted order.

    Errors   FileNotFoundError where there is none; ValueError for empty inputs; OSError where one cannot be read
    """
    found = []
    for source in inputs:
        path = Path(source).expanduser()
        if path.is_dir():
            below = [_source(file, file.relative_to(path).as_posix()) for file in files_below(path)]
            found += [file for file in below if not _is_binary(file)]
        else:
            found += [_source(file, file.name) for file in matching_files(source, WHERE)]
    found = [file for file in found if file.size]
    rule, advice = "the inputs must hold text", "Give files, folders or globs that do."
    require(bool(found), WHERE, rule, {"inputs": " ".join(inputs)[:200]}, advice)
    return found


def _source(path: Path, name: str) -> SourceFile:
    endings = path.suffixes
    packing = path.suffix if path.suffix in _COMPRESSED else ""
    inner = endings[-2] if packing and len(endings) > 1 else path.suffix
    try:
        with open(path, "rb"):
            pass
        known = path.stat()
    except OSError as error:
        raise unreadable(error, path) from error
    kind = _ENDINGS.get(inner.lower(), TEXT)
    if inner == ".json" and packing:  # as some corpora name their lines of JSON; alone it is one object
        kind = RECORDS
    return SourceFile(str(path.resolve()), name, kind, packing, known.st_size, known.st_mtime_ns)


def _is_binary(source: SourceFile) -> bool:
    """Whether a file in a folder is there for another reason than its text."""
    if source.kind != TEXT or source.packing:
        return False
    with open(source.path, "rb") as file:
        return b"\0" in file.read(LOOKED_AT)


def unreadable(error: OSError, path: str | os.PathLike[str]) -> OSError:
    """The refusal of a file that the system does not give."""
    got = f"file={path} ({error.strerror or error})"
    advice = "Check its permissions and its disk; workers of a cluster must find it under the same path."
    return refusal(type(error), WHERE, "the file must be readable", got, advice)


def blocks(sources: list[SourceFile], field: str, separator: bytes, size: int = BLOCK_BYTES) -> Iterator[Block]:
    """Every file in pieces, small ones together: what one task works on.

    field       of Parquet's rows
    separator   between the documents of a text file, b"" where a file is one document
    size        bytes of a block: some more or fewer, as there is a place to cut

    Errors      ValueError for what is not of its kind, OSError for what cannot be read, when its turn comes
    """
    gathered: list[Piece] = []
    held = 0
    for source in sources:
        small = source.size <= size and not source.packing and source.kind != ROWS_OF_TEXT
        if gathered and (not small or held + source.size > size):
            yield tuple(gathered)
            gathered, held = [], 0
        if small:
            gathered.append(Piece(source.path, source.kind, 0, source.size))
            held += source.size
        else:
            for piece in _pieces(source, field, separator, size):
                yield (piece,)
    if gathered:
        yield tuple(gathered)


def _pieces(source: SourceFile, field: str, separator: bytes, size: int) -> Iterator[Piece]:
    if source.kind == ROWS_OF_TEXT:
        yield from _rows(source, field, size)
    elif source.packing:
        yield from _unpacked(source, separator, size)
    else:
        for start in range(0, source.size, size):
            yield Piece(source.path, source.kind, start, min(source.size, start + size))


def cut_of(read: Any, kind: str, position: int, separator: bytes) -> int:
    """Where a piece that would begin at `position` does begin."""
    if kind == RECORDS:
        return record_cut(read, position, b"\n")
    return record_cut(read, position, separator) if separator else text_cut(read, position)


def content_of(piece: Piece, separator: bytes) -> tuple[bytes, int]:
    """The bytes of a piece that is read from its file, and where they begin.

    Errors   OSError with the path
    """
    if isinstance(piece.content, bytes):
        return piece.content, piece.start
    try:
        descriptor = os.open(piece.path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(error, piece.path) from error
    try:
        end = os.fstat(descriptor).st_size

        def read(position: int, size: int) -> bytes:
            return os.pread(descriptor, size, position)

        start = cut_of(read, piece.kind, piece.start, separator)
        stop = end if piece.stop >= end else cut_of(read, piece.kind, piece.stop, separator)
        return (_all(read, start, stop), start) if start < stop else (b"", start)
    except OSError as error:
        raise unreadable(error, piece.path) from error
    finally:
        os.close(descriptor)


def _all(read: Any, start: int, stop: int) -> bytes:
    found = [read(start, stop - start)]
    while (held := sum(map(len, found))) < stop - start and found[-1]:
        found.append(read(start + held, stop - start - held))
    return b"".join(found)


class _Stream:
    """A stream as if it could be read anywhere, as far as it is not forgotten."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.begin, self.held = file, 0, bytearray()

    def read(self, position: int, size: int) -> bytes:
        missing = position + size - self.begin - len(self.held)
        while missing > 0:
            piece = self.file.read(max(missing, 2**20))
            if not piece:
                break
            self.held += piece
            missing -= len(piece)
        return bytes(self.held[position - self.begin : position - self.begin + size])

    def forget(self, position: int) -> None:
        del self.held[: position - self.begin]
        self.begin = position


def _unpacked(source: SourceFile, separator: bytes, size: int) -> Iterator[Piece]:
    """A compressed file in pieces: those that the same bytes would have in a plain one."""
    try:
        with _opened(source) as file:
            stream, start = _Stream(file), 0
            for number in count(1):
                if number * size <= start:  # within a record that is longer than a block
                    continue
                more = stream.read(number * size, 1)
                stop = cut_of(stream.read, source.kind, number * size, separator) if more else None
                content = stream.read(start, (stop - start) if stop is not None else number * size - start)
                if content:
                    yield Piece(source.path, source.kind, start, start + len(content), content)
                if stop is None:
                    return
                stream.forget(stop)
                start = stop
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        got = f"file={source.path} ({error})"
        raise refusal(ValueError, WHERE, "a compressed file must be whole", got, "Make it again.") from error
    except OSError as error:
        raise unreadable(error, source.path) from error


def _opened(source: SourceFile) -> Any:
    if source.packing == ".gz":
        return gzip.open(source.path, "rb")
    return _opened_zstandard(_extra("zstandard", source), source.path)


@contextmanager
def _opened_zstandard(library: Any, path: str) -> Iterator[_Zstandard]:
    with open(path, "rb") as file:
        yield _Zstandard(library, file)


class _Zstandard:
    """A zstd file of one or several frames, read to its end: a frame that is cut off is an error."""

    def __init__(self, library: Any, file: BinaryIO) -> None:
        self.library, self.file = library, file
        self.unpacker, self.ready = library.ZstdDecompressor().decompressobj(), bytearray()
        self.within = False

    def read(self, size: int) -> bytes:
        while len(self.ready) < size and (piece := self.file.read(2**17)):
            while piece:
                self.within = True
                try:
                    self.ready += self.unpacker.decompress(piece)
                except self.library.ZstdError as error:
                    raise EOFError(str(error)) from error
                piece = self.unpacker.unused_data
                if self.unpacker.eof:
                    self.unpacker, self.within = self.library.ZstdDecompressor().decompressobj(), False
        if len(self.ready) < size and self.within:
            raise EOFError("it ends within a frame")
        found = bytes(self.ready[:size])
        del self.ready[:size]
        return found


def _extra(name: str, source: SourceFile) -> Any:
    """A library that only some files need.

    Errors   ValueError where it is not installed
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        rule, got = f"{source.path.rpartition('.')[2]} files need {name.partition('.')[0]}", {"file": source.path}
        raise refusal(ValueError, WHERE, rule, got, 'Run pip install "daskgpt[prepare]".') from None


def _rows(source: SourceFile, field: str, size: int) -> Iterator[Piece]:
    """The texts of a Parquet file's column, some megabytes at a time."""
    library, arrow = _extra("pyarrow.parquet", source), _extra("pyarrow", source)
    try:
        with library.ParquetFile(source.path) as file:
            names = file.schema_arrow.names
            got = {"file": source.path, "field": field, "columns": ", ".join(names)[:120]}
            require(field in names, WHERE, "the file must have a column of that name", got, "Name one by --field.")
            kind = file.schema_arrow.field(field).type
            texts = arrow.types.is_string(kind) or arrow.types.is_large_string(kind)
            got = {"file": source.path, "field": field, "type": kind}
            require(texts, WHERE, "the column must hold texts", got, "Name another by --field.")
            held: list[str] = []
            start = number = bytes_held = 0
            for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    held.append(text or "")
                    bytes_held += len(held[-1])
                    if bytes_held >= size:
                        yield Piece(source.path, source.kind, start, number, tuple(held))
                        held, start, bytes_held = [], number, 0
            if held:
                yield Piece(source.path, source.kind, start, number, tuple(held))
    except arrow.ArrowException as error:
        found = f"file={source.path} ({str(error).splitlines()[0][:100]})"
        raise refusal(ValueError, WHERE, "the file must be whole Parquet", found, "Make it again.") from error
