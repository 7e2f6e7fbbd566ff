"""Files of text as UTF-8, decompressed, the records in them, and copies of pipes."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from daskgpt.config.errors import refusal
from daskgpt.config.files import readable

WHERE = "data"
# Forms of text: a document per file, or records: lines of JSON, a JSON array, Parquet, a table (by its separator).
DOCUMENT, LINES, ARRAY, PARQUET, TABLES = "document", "lines", "array", "Parquet", (",", "\t", ";")


@dataclass(frozen=True)
class File:
    """One file of a source.

    name      its path below the source's folder, or its own
    kind      one of KINDS; "" for what cannot be used
    form      how its text is written: DOCUMENT, LINES, ARRAY, PARQUET or one of TABLES
    charset   Python's name of its encoding of characters
    packing   gzip, zstd, xz, bzip2, or "" if it is not compressed
    fields    names in its first record
    dtype     of token ids, little-endian
    reason    what it is, if it cannot be used
    advice    what helps then
    size      in bytes
    modified  time of the last change [ns]
    """

    path: str
    name: str
    kind: str = ""
    form: str = DOCUMENT
    charset: str = "utf-8"
    packing: str = ""
    fields: tuple[str, ...] = ()
    dtype: str = ""
    reason: str = ""
    advice: str = ""
    size: int = 0
    modified: int = 0


class _Pieces(io.RawIOBase):
    """A file of the bytes that an iterator returns, none of them empty."""

    def __init__(self, pieces: Iterator[bytes], source: IO[Any]) -> None:
        """source   of the pieces, closed with this file"""
        super().__init__()
        self.pieces, self.source, self.waiting = pieces, source, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.waiting = self.waiting or next(self.pieces, b"")
        size = min(len(buffer), len(self.waiting))
        buffer[:size], self.waiting = self.waiting[:size], self.waiting[size:]
        return size

    def close(self) -> None:
        self.source.close()
        super().close()


def _utf8(text: IO[str]) -> Iterator[bytes]:
    """Yield a text as UTF-8."""
    while piece := text.read(2**16):
        yield piece.encode(errors="surrogatepass")


def _frames(packed: BinaryIO) -> Iterator[bytes]:
    """Yield the content of all frames of a zstd file. Errors   EOFError if the last one is cut off"""
    import zstandard

    # Windows of up to 2 GiB, as zstd --long=31 writes them. The library's own file object ends where a cut file does.
    unpacker, frame, part = zstandard.ZstdDecompressor(max_window_size=2**31), None, b""
    while part := part or packed.read(2**14):
        frame = frame or unpacker.decompressobj()
        if piece := frame.decompress(part):
            yield piece
        part = frame.unused_data
        frame = None if frame.eof else frame
    if frame:
        raise EOFError("Compressed file ended before the end of a frame")


def unpacked(path: str, packing: str) -> BinaryIO:
    """Open a file, decompressed. Errors   OSError; of damaged content, `packing_errors` when it is read"""
    if packing == "zstd":
        packed = open(path, "rb")  # noqa: SIM115  closed with what is returned
        return cast(BinaryIO, io.BufferedReader(_Pieces(_frames(packed), packed)))
    openers: Mapping[str, Callable[..., Any]] = {"gzip": gzip.open, "xz": lzma.open, "bzip2": bz2.open}
    return cast(BinaryIO, openers.get(packing, open)(path, "rb"))


def packing_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of damaged compression."""
    zstandard: Any = sys.modules.get("zstandard")
    others = (zstandard.ZstdError,) if zstandard else ()
    return (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, *others)


@contextmanager
def opened(file: File, where: str = WHERE) -> Iterator[BinaryIO]:
    """Yield a file of text as UTF-8 without a mark, decompressed.

    Errors   OSError if it cannot be read; ValueError for damaged compression, or characters that are none in its
             encoding (of UTF-8, the reader finds them)
    """
    advice, got = "Make it again.", {"file": file.path}
    try:
        with unpacked(file.path, file.packing) as stream:
            if file.charset == "utf-8":
                yield stream
            elif file.charset == "utf-8-sig":
                stream.read(3)
                yield stream
            else:
                text = io.TextIOWrapper(stream, file.charset, newline="")
                with io.BufferedReader(_Pieces(_utf8(text), text)) as converted:
                    yield cast(BinaryIO, converted)
    except UnicodeDecodeError as error:
        if file.charset.startswith("utf-8"):
            raise
        rule = f"the file must be whole {file.charset.upper()}"
        raise refusal(ValueError, where, rule, got | {"first wrong byte": error.start}, advice) from error
    except packing_errors() as error:
        rule = "a compressed file must be complete"
        raise refusal(ValueError, where, rule, f"file={file.path} ({error})", advice) from error
    except OSError as error:
        if error.errno is None:  # it has the common form already
            raise
        with readable(file.path, where):
            raise


def records(file: File, where: str = WHERE) -> Iterator[tuple[int, Any]]:
    """Yield the records of a file, from 1 on, with their numbers: those of lines, or of rows.

    Errors   ValueError naming the first line that is not JSON, or not UTF-8; as of `opened`
    """
    advice = "Correct it; daskgpt prepare reads lines of plain text, too."
    if file.form == PARQUET:
        with opened_parquet(file, where) as parquet:
            yield from enumerate((row for batch in parquet.iter_batches(64) for row in batch.to_pylist()), 1)
        return
    with opened(file, where) as stream:
        if file.form == LINES:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, _parsed(line, file, number, where, advice)
        elif file.form == ARRAY:
            yield from enumerate(_parsed(stream.read(), file, 1, where, advice), 1)
        else:
            table = csv.reader(io.TextIOWrapper(stream, "utf-8", newline=""), delimiter=file.form)
            try:
                next(table)  # the names
                yield from ((table.line_num, dict(zip(file.fields, row))) for row in table if row)
            except (csv.Error, UnicodeDecodeError) as error:
                got = {"path": file.path, "line": table.line_num + 1, "found": str(error)[:60]}
                raise refusal(ValueError, where, "a table must be CSV in UTF-8", got, "Correct it.") from None


@contextmanager
def opened_parquet(file: File, where: str = WHERE) -> Iterator[Any]:
    """Yield a file of Parquet. Errors   ValueError for a damaged one"""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file.path) as parquet:
            yield parquet
    except pyarrow.ArrowException as error:
        problem = f"file={file.path} ({str(error).splitlines()[0][:100]})"
        raise refusal(ValueError, where, "the file must be complete Parquet", problem, "Make it again.") from error


def _parsed(content: bytes, file: File, number: int, where: str, advice: str) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        got = {"path": file.path, "line": number, "found": f"{type(error).__name__}: {str(error)[:60]}"}
        raise refusal(ValueError, where, "every line must be JSON in UTF-8", got, advice) from None


# Pipes

_COPIES: dict[str, IO[bytes]] = {}  # temporary files by the pipe; they are removed when the process ends


def is_pipe(path: Path) -> bool:
    """Return whether a path is read once, as a pipe is."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


def spooled(path: Path) -> Path:
    """Return a copy of what comes through a pipe."""
    if str(path) not in _COPIES:
        copy = tempfile.NamedTemporaryFile(prefix="daskgpt-")  # noqa: SIM115  it is open as long as it is needed
        with readable(path, WHERE), path.open("rb") as pipe:
            while part := pipe.read(2**20):
                copy.write(part)
        copy.flush()
        _COPIES[str(path)] = copy
    return Path(_COPIES[str(path)].name)
