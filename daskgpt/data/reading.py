"""Files of text, decompressed, and the blocks, records and texts in them."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

from daskgpt.config.errors import refusal
from daskgpt.config.files import readable

WHERE = "data"
T = TypeVar("T")
DOCUMENT, LINES, PARQUET = "document", "JSON lines", "Parquet"  # forms of text: a document per file, or records
FIELD = "text"  # of records, by default
BLOCK_BYTES = 2**22  # bytes of text that are read together
LAST = sys.maxsize  # behind the end of every file
ROWS = 16  # of Parquet read at a time: few, since a text may be a book


@dataclass(frozen=True)
class File:
    """One file of a source.

    name      its path below the source's folder, or its own
    kind      one of KINDS; "" for what cannot be used
    form      how its text is written: DOCUMENT, LINES or PARQUET
    packing   gzip, zstd, or "" if it is not compressed
    fields    names in its first record
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
    fields: tuple[str, ...] = ()
    reason: str = ""
    advice: str = ""
    size: int = 0
    modified: int = 0


def _open(file: File) -> BinaryIO:
    if file.packing == "zstd":
        import pyarrow

        return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(file.path, compression="zstd")))
    return cast(BinaryIO, gzip.open(file.path) if file.packing else open(file.path, "rb"))


@contextmanager
def opened(file: File) -> Iterator[BinaryIO]:
    """Yield the bytes of a file, decompressed.

    Errors   OSError if it cannot be read; ValueError for damaged compression
    """
    with _undamaged(file, "a compressed file must be complete", EOFError, zlib.error), _open(file) as stream:
        yield stream


@contextmanager
def _undamaged(file: File, rule: str, *damages: type[Exception]) -> Iterator[None]:
    """Refuse a file of damaged content, for which libraries raise also an OSError without a number."""
    try:
        yield
    except (OSError, *damages) as error:  # type: ignore[misc]
        if getattr(error, "errno", None) is None:
            got = f"file={file.path} ({' '.join(str(error).split())})"
            raise refusal(ValueError, WHERE, rule, got, "Make it again.") from error
        with readable(file.path, WHERE):
            raise


def beginning(file: File, size: int) -> bytes:
    """Return the first bytes of a file, decompressed. Errors   as of `opened`"""
    with opened(file) as stream:
        return stream.read(size)


@contextmanager
def opened_parquet(file: File) -> Iterator[Any]:
    """Yield a file of Parquet. Errors   ValueError for a damaged one"""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    rule = "the file must be complete Parquet"
    with _undamaged(file, rule, pyarrow.ArrowException), ParquetFile(file.path) as parquet:
        yield parquet


def blocks(file: File, start: int = 0, stop: int = LAST) -> Iterator[tuple[int, bytes]]:
    """Yield a text in blocks of whole lines, with their places [bytes]: a block has the lines that begin between
    neighboring multiples of BLOCK_BYTES.

    start, stop   multiples of BLOCK_BYTES, between which lines begin

    Errors        as of `opened`
    """
    with opened(file) as stream:
        if start:
            stream.seek(start - 1)
            start += len(stream.readline()) - 1
        while start < stop and (content := stream.read(BLOCK_BYTES - start % BLOCK_BYTES - 1) + stream.readline()):
            yield start, content if start else content.removeprefix(codecs.BOM_UTF8)
            start += len(content)


def _records(file: File, start: int, stop: int, field: str | None) -> Iterator[tuple[str, Any]]:
    if file.form == PARQUET:
        with opened_parquet(file) as parquet:
            groups = range(start, min(stop, parquet.num_row_groups))
            first = 1 + sum(parquet.metadata.row_group(number).num_rows for number in range(start))
            batches = parquet.iter_batches(ROWS, row_groups=groups, columns=field and [field])
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"row {number}", row) for number, row in enumerate(rows, first))
        return
    counted = f" from byte {start:,} on" if start else ""
    lines = (line for _, block in blocks(file, start, stop) for line in block.removesuffix(b"\n").split(b"\n"))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"line {number}{counted}"
        try:
            yield place, json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            got = {"path": f"{file.path}, {place}", "found": f"{type(error).__name__}: {str(error)[:60]}"}
            advice = "Correct it; texts that are no JSON need an ending such as .txt."
            raise refusal(ValueError, WHERE, "every line must be JSON in UTF-8", got, advice) from None


def records(
    parse: Callable[[Any], T],
    rule: str,
    advice: str,
    file: File,
    start: int = 0,
    stop: int = LAST,
    field: str | None = None,
) -> Iterator[tuple[str, T]]:
    """Yield what `parse` makes of each record of a file, with its place: the number of its line or row.

    start, stop   of lines of JSON as of `blocks`, and lines are counted from there; of Parquet: row groups
    field         only column of Parquet to read; None = all

    Errors   ValueError with the rule, naming the first record for which `parse` raises an error for another content,
             or the first line that is not JSON, or not UTF-8; as of `opened`
    """
    for place, record in _records(file, start, stop, field):
        try:
            value = parse(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            got = {"path": f"{file.path}, {place}", "found": f"{type(error).__name__}: {str(error)[:120]}"}
            raise refusal(ValueError, WHERE, rule, got, advice) from None
        yield place, value


def texts(file: File, field: str = FIELD, start: int = 0, stop: int = LAST) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file's records, or the blocks of a document, with their places.

    start, stop   as of `records` and `blocks`

    Errors   ValueError naming the first record without a text, or the first byte that is not UTF-8; as of `records`
    """
    if file.form == DOCUMENT:
        for place, content in blocks(file, start, stop):
            try:
                yield f"from byte {place:,} on", content.decode()
            except UnicodeDecodeError as error:
                got = {"source": file.path, "first wrong byte": place + error.start}
                advice = "Convert it, for example with iconv -t UTF-8 (-c leaves out what is none)."
                raise refusal(ValueError, WHERE, "the file must be UTF-8 text", got, advice) from error
        return

    def text_of(record: Any) -> str:
        text = record.get(field, record) if isinstance(record, dict) else record
        if not (text is None or isinstance(text, str | bytes)):
            names = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise TypeError(f"{repr(text)[:40]}, fields={names}")
        return text.decode() if isinstance(text, bytes) else whole(text)

    rule = f"the field {field} of every record must be text"
    advice = "Correct it, or name another with prepare --field."
    yield from records(text_of, rule, advice, file, start, stop, field)


def whole(text: str | None) -> str:
    """Return a text with ? for each half of a character, as JSON may hold; null is empty.

    Errors   TypeError for what is no text
    """
    return "" if text is None else str.encode(text, errors="replace").decode()
