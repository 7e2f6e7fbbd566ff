"""Text: files, the blocks, records and documents in them, and the part that is held out.

Every n-th span is held out for validation unless the settings name the end: the end of a book, or the last files of a
library, differ from the rest, so a loss measured there tells little about the whole. Spans are long compared with a
sequence, so few windows cross a joint, and short compared with the whole, so many places are sampled. Text is cut
before it is encoded: the held-out text does not depend on the encoding, and losses per byte can be compared.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np

from daskgpt.config.errors import refusal, refusing, require_package, short
from daskgpt.config.files import readable

WHERE = "data"
T = TypeVar("T")
LINES, PARQUET = "JSON lines", "Parquet"  # what records are written in
FIELD = "text"  # of records, by default
# Names of a prompt and its response in records. The further names of a prompt may be missing or empty.
PAIR_FIELDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("prompt",), "response"),
    (("prompt",), "completion"),
    (("instruction", "input", "context"), "output"),
    (("instruction", "input", "context"), "response"),
    (("question", "context"), "answer"),
    (("input",), "output"),
)
# Names of the messages of a chat, with those of role and content in each.
CHATS = {"messages": ("role", "content"), "conversations": ("from", "value")}
SYSTEM = "system"  # a field of records: what the model is told before; and the role that says it
# Fields of records and of messages that decide what the assistant says, and have no place in a conversation here.
LOST = ("tools", "history", "tool_calls", "function_call", "reasoning_content")
CONVERSED = [*CHATS, SYSTEM, *LOST]
CONVERSED += dict.fromkeys(name for asking, answering in PAIR_FIELDS for name in (*asking, answering))
BLOCK_BYTES = 2**22  # bytes of text that are read together
LAST = sys.maxsize  # behind the end of every file
ROWS = 16  # of Parquet that are read together: few, since a text may be a book


@dataclass(frozen=True)
class File:
    """One file of a source.

    name        its path below the source's folder, or its own
    kind        one of source.KINDS; "" for what cannot be used
    records     what its records are written in, LINES or PARQUET; "" for a file that is one document
    field       name of the text in its records; "" for those of pairs and chats
    compressed  whether it is compressed, by gzip
    reason      what it is, if it cannot be used
    advice      what helps then
    size        in bytes
    modified    time of the last change [ns]
    """

    path: str
    name: str
    kind: str = ""
    records: str = ""
    field: str = FIELD
    compressed: bool = False
    reason: str = ""
    advice: str = ""
    size: int = 0
    modified: int = 0

    @property
    def described(self) -> str:
        """Description of a file that is not used."""
        return self.reason or f"holds {self.kind}"


@contextmanager
def opened(file: File) -> Iterator[BinaryIO]:
    """Yield the bytes of a file, decompressed.

    Errors   OSError if it cannot be read; ValueError for damaged compression
    """
    damages, rule = (EOFError, zlib.error, gzip.BadGzipFile), "a compressed file must be complete"
    with (
        readable(file.path, WHERE),
        refusing(damages, WHERE, rule, {"file": file.path}, "Make it again."),
        cast(BinaryIO, gzip.open(file.path) if file.compressed else open(file.path, "rb")) as stream,
    ):
        yield stream


@contextmanager
def opened_parquet(file: File) -> Iterator[Any]:
    """Yield a file of Parquet.

    Errors   RuntimeError if pyarrow is not installed; ValueError for a damaged file; as of `opened`
    """
    require_package("pyarrow", "prepare", WHERE)
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    damages, rule = (ArrowException, OSError, ValueError, OverflowError), "the file must be complete Parquet"
    with (
        opened(file) as stream,
        refusing(damages, WHERE, rule, {"file": file.path}, "Make it again."),
        # By default, it would hold the whole column of a row group.
        ParquetFile(stream, buffer_size=BLOCK_BYTES, pre_buffer=False) as parquet,
    ):
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


def _lines(file: File, start: int, stop: int) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file that are not blank, with their places."""
    counted = f" from byte {start:,} on" if start else ""
    lines = (line for _, block in blocks(file, start, stop) for line in block.removesuffix(b"\n").split(b"\n"))
    yield from ((f"line {number}{counted}", line) for number, line in enumerate(lines, 1) if line.strip())


def _rows(file: File, start: int, stop: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of some row groups of Parquet, with their places in the file."""
    with opened_parquet(file) as parquet:
        first = 1 + sum(parquet.metadata.row_group(group).num_rows for group in range(start))
        groups = range(start, min(stop, parquet.num_row_groups))
        batches = parquet.iter_batches(ROWS, groups, [file.field] if file.field else CONVERSED)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"row {number}", row) for number, row in enumerate(rows, first))


def records(
    parse: Callable[[Any], T], rule: str, advice: str, file: File, start: int = 0, stop: int = LAST
) -> Iterator[tuple[str, T]]:
    """Yield what `parse` makes of each record of a file, with its place: the number of its line or row.

    start, stop   of lines as of `blocks`, and lines are counted from there; of Parquet, row groups

    Errors   ValueError with the rule, naming the first record for which `parse` raises TypeError, and what that says,
             or the first line that is not JSON, or not UTF-8; as of `opened` and `opened_parquet`
    """
    placed_records = _rows(file, start, stop) if file.records == PARQUET else _lines(file, start, stop)
    for place, record in placed_records:
        try:
            value = parse(json.loads(record.decode()) if isinstance(record, bytes) else record)
        except (TypeError, ValueError, RecursionError) as error:
            said = short(error, 120)
            if not isinstance(error, TypeError):
                rule, said = "every line must be JSON in UTF-8", f"{type(error).__name__}: {said}"
                advice = "Correct it; texts that are no JSON need an ending such as .txt."
            got = {"path": f"{file.path}, {place}", "found": said}
            raise refusal(ValueError, WHERE, rule, got, advice) from None
        yield place, value


def texts(file: File, start: int = 0, stop: int = LAST) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file's records, or the blocks of a document, with their places.

    start, stop   as of `records`

    Errors   ValueError naming the first record without a text, or the first byte that is not UTF-8; as of `records`
    """
    if not file.records:
        for place, content in blocks(file, start, stop):
            try:
                yield f"from byte {place:,} on", content.decode()
            except UnicodeDecodeError as error:
                got = {"source": file.path, "first wrong byte": place + error.start}
                advice = "Convert it, for example with iconv -t UTF-8 (-c leaves out what is none)."
                raise refusal(ValueError, WHERE, "the file must be UTF-8 text", got, advice) from error
        return

    def text_of(record: Any) -> str:
        if isinstance(record, dict) and file.field not in record:
            raise TypeError(f"a record with the fields {', '.join(record)}")
        return whole(record[file.field] if isinstance(record, dict) else record, file.field)

    rule = f"the field {file.field} of every record must be text"
    advice = "Correct it, or name another with prepare --field."
    yield from records(text_of, rule, advice, file, start, stop)


def whole(text: object, field: str) -> str:
    """Return the text of a field with ? for each half of a character, as JSON may hold; null is empty.

    Errors   TypeError for what is no text
    """
    return "" if text is None else of_kind(str, text, field).encode(errors="replace").decode()


def of_kind(kind: type[T], value: object, field: str) -> T:
    """Return the value of a field. Errors   TypeError, which says what it is, unless it is of this kind"""
    if not isinstance(value, kind):
        raise TypeError(f"{field}: {short(value)} ({type(value).__name__})")
    return value


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
    shorter spans. With a fraction of 0 or 1, all items are one run.
    """
    # As a fraction: the float 0.1 is not quite a tenth, and its multiples would fall to either side of a whole number.
    share = Fraction(fraction).limit_denominator(1_000_000)
    if share in (0, 1):
        return [Run(0, total, share == 1)]
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
    line_end = text.find("\n", position - 1, position + limit)
    return position if line_end == -1 else line_end + 1


def split_tokens(
    tokens: np.ndarray, fraction: float, held_out: str = SPANS
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return pieces of a row of tokens for training and for validation, as views."""
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for run in runs(tokens.size, SPAN_TOKENS, fraction, held_out):
        parts[run.held_out].append(tokens[run.start : run.stop])
    return parts
