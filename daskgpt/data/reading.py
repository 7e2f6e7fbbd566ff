"""Files of text, decompressed, the records and texts in them, and copies of pipes."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

from daskgpt.config.errors import refusal
from daskgpt.config.files import readable

WHERE = "data"
T = TypeVar("T")
# Forms of text: a document per file, or records: lines of JSON, a JSON array, Parquet, a table (by its separator).
DOCUMENT, LINES, ARRAY, PARQUET, TABLES = "document", "lines", "array", "Parquet", (",", "\t", ";")
FIELD = "text"  # of records, by default
LAST = sys.maxsize  # behind the end of every file
ROWS = 16  # of Parquet read at a time: few, since a text may be a book


@dataclass(frozen=True)
class File:
    """One file of a source.

    name      its path below the source's folder, or its own
    kind      one of KINDS; "" for what cannot be used
    form      how its text is written: DOCUMENT, LINES, ARRAY, PARQUET or one of TABLES
    packing   gzip, zstd, xz, bzip2, or "" if it is not compressed
    mark      length of the byte-order mark before its text
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
    packing: str = ""
    mark: int = 0
    fields: tuple[str, ...] = ()
    dtype: str = ""
    reason: str = ""
    advice: str = ""
    size: int = 0
    modified: int = 0


def _open_zstd(path: str, _: str) -> BinaryIO:
    import pyarrow

    return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(path, compression="zstd")))


OPENERS: Mapping[str, Callable[[str, str], Any]] = {
    "": open,
    "gzip": gzip.open,
    "bzip2": bz2.open,
    "xz": lzma.open,
    "zstd": _open_zstd,
}
# Exceptions of damaged compression; those of OSError have no number.
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


@contextmanager
def opened(file: File, where: str = WHERE) -> Iterator[BinaryIO]:
    """Yield the bytes of a file, decompressed, behind its mark.

    Errors   OSError if it cannot be read; ValueError for damaged compression
    """
    try:
        with OPENERS[file.packing](file.path, "rb") as stream:
            stream.read(file.mark)
            yield stream
    except DAMAGED as error:
        if getattr(error, "errno", None) is None:
            rule, got = "a compressed file must be complete", f"file={file.path} ({error})"
            raise refusal(ValueError, where, rule, got, "Make it again.") from error
        with readable(file.path, where):
            raise


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


def parts_of(stream: BinaryIO, file: File, separator: bytes, start: int, stop: int) -> Iterator[bytes]:
    """Yield the parts of an opened file that begin from `start` to before `stop` [bytes of text], each without the
    separator at its end.
    """
    position = max(0, start - len(separator))  # a separator may end where the first part begins
    if position:
        stream.seek(file.mark + position)
    rest = b""
    while position < stop and (read := stream.read(max(2**20, len(rest)))):
        *parts, rest = (rest + read).split(separator)
        for part in parts:
            if start <= position < stop:
                yield part
            position += len(part) + len(separator)
    if rest and start <= position < stop:
        yield rest


def records(
    file: File, where: str = WHERE, start: int = 0, stop: int = LAST, field: str | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield the records of a file from `start` to before `stop`, with their numbers: those of lines, or of rows.

    start, stop   of lines of JSON: bytes where records begin, and their numbers count from there; of Parquet: row
                  groups; of other forms 0 and LAST
    field         only column of Parquet to read; None = all

    Errors   ValueError naming the first line that is not JSON, or not UTF-8; as of `opened`
    """
    if file.form == PARQUET:
        with opened_parquet(file, where) as parquet:
            groups = range(start, min(stop, parquet.num_row_groups))
            first = 1 + sum(parquet.metadata.row_group(number).num_rows for number in range(start))
            batches = parquet.iter_batches(ROWS, row_groups=groups, columns=field and [field])
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), first)
        return
    with opened(file, where) as stream:
        if file.form == LINES:
            for number, line in enumerate(parts_of(stream, file, b"\n", start, stop), 1):
                if line.strip():
                    yield number, _parsed(line, file, {"line": number} | ({"from byte": start} if start else {}), where)
        elif file.form == ARRAY:
            yield from enumerate(_parsed(stream.read(), file, {}, where), 1)
        else:
            table = csv.reader(io.TextIOWrapper(stream, "utf-8", newline=""), delimiter=file.form)
            try:
                next(table)  # the names
                yield from ((table.line_num, dict(zip(file.fields, row))) for row in table if row)
            except (csv.Error, UnicodeDecodeError) as error:
                got = {"path": file.path, "line": table.line_num + 1, "found": str(error)[:60]}
                raise refusal(ValueError, where, "a table must be CSV in UTF-8", got, "Correct it.") from None


def _parsed(content: bytes, file: File, place: Mapping[str, int], where: str) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        got = {"path": file.path, **place, "found": f"{type(error).__name__}: {str(error)[:60]}"}
        advice = "Correct it; texts that are no JSON need an ending such as .txt."
        raise refusal(ValueError, where, "every line must be JSON in UTF-8", got, advice) from None


def parsed_records(
    parse: Callable[[Any], T], rule: str, advice: str, file: File, where: str = WHERE, *places: Any
) -> Iterator[tuple[int, T]]:
    """Yield what `parse` makes of each record of a file, with its number.

    file, where, places   as of `records`

    Errors   ValueError with the rule, naming the first record for which `parse` raises KeyError, TypeError or
             ValueError; as of `records`
    """
    for number, record in records(file, where, *places):
        try:
            value = parse(record)
        except (KeyError, TypeError, ValueError) as error:
            got = {"path": file.path, "line": number, "found": f"{type(error).__name__}: {str(error)[:120]}"}
            raise refusal(ValueError, where, rule, got, advice) from None
        yield number, value


def texts(
    file: File, field: str = FIELD, where: str = WHERE, start: int = 0, stop: int = LAST
) -> Iterator[tuple[int, str | None]]:
    """Yield the texts of a file's records, with their numbers; None for one with half a character, as JSON may hold.

    start, stop   as of `records`

    Errors   ValueError naming the first record without a text; as of `records`
    """

    def text_of(record: Any) -> str:
        text = record.get(field, record) if isinstance(record, dict) else record
        if not (text is None or isinstance(text, str | bytes)):
            names = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise TypeError(f"{repr(text)[:40]}, fields={names}")
        return text.decode() if isinstance(text, bytes) else text or ""

    rule, advice = (
        f"the field {field} of every record must be text",
        "Correct it, or name another with prepare --field.",
    )
    for number, text in parsed_records(text_of, rule, advice, file, where, start, stop, field):
        yield number, text if is_unicode(text) else None


def is_unicode(text: str) -> bool:
    """Return whether a text is made of whole characters: JSON may hold halves of some."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decoded(content: bytes, file: File, start: int = 0, where: str = WHERE) -> str:
    """Return a text of a file. Errors   ValueError naming the first byte that is not UTF-8; `start` is the text's"""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        got = {"source": file.path, "first wrong byte": start + error.start}
        advice = "Convert it, for example with iconv -t UTF-8 (-c leaves out what is none)."
        raise refusal(ValueError, where, "the file must be UTF-8 text", got, advice) from error


# Pipes

_COPIES: dict[str, IO[bytes]] = {}  # temporary files by the pipe; they are removed when the process ends


def is_pipe(path: Path) -> bool:
    """Return whether a path is read once, as a pipe is."""
    return path.exists() and not (path.is_file() or path.is_dir())


def copy_of_pipe(path: Path) -> Path:
    """Return a copy of what comes through a pipe."""
    if str(path) not in _COPIES:
        copy = tempfile.NamedTemporaryFile(prefix="daskgpt-")  # noqa: SIM115  it is open as long as it is needed
        with readable(path, WHERE), path.open("rb") as pipe:
            shutil.copyfileobj(pipe, copy)
        copy.flush()
        _COPIES[str(path)] = copy
    return Path(_COPIES[str(path)].name)
