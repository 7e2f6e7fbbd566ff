"""Sources of a corpus: files in a fixed order, divided into partitions, which are read independently in blocks.

Partitions follow from names and sizes of the files. A file is cut at positions that follow from its bytes alone, so its
tokens depend on neither the scheduler nor the compression. Text is cut before the last line break in front of a word:
GPT-2's pattern, which all but some Hugging Face tokenizers share, ends a piece there anyway, so no token crosses the
cut. Lines, and documents with a separator, are cut after their ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from os.path import abspath
from typing import BinaryIO

from daskgpt.config.errors import require
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.config.settings import count as amount
from daskgpt.data.file_kinds import FIELD, TEXT
from daskgpt.data.reading import ARRAY, LINES, PARQUET, File, opened, opened_parquet
from daskgpt.data.source import recognize
from daskgpt.formats.llmc import LARGEST_COUNT

WHERE = "prepare"
BLOCK_BYTES = 2**22  # bytes of text that are encoded together
PARTITIONS = 1024  # most partitions of plain text; more blocks than that are divided among so many
SEARCHED = 2**16  # bytes in which a text is searched for a place to cut; without one it is cut between two characters
TEXTS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")  # columns of Parquet
ROWS = 16  # of Parquet read at a time: few, since a text may be a book

REFUSE, REPLACE, SKIP = "refuse", "replace", "skip"

# Unicode's white space beyond ASCII, in UTF-8.
_SPACES = rb"\s|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BEFORE_A_WORD = re.compile(rb"\n(?!" + _SPACES + rb")(?=.)", re.DOTALL)
_A_CHARACTER = re.compile(rb"[^\x80-\xbf]")


@documented
@dataclass(frozen=True)
class PrepareConfig(Checked):
    """Input, output and workers of the preparation.

    Scheduler and threads change no byte.
    """

    out: str = setting("", "folder to write, or to continue after the same command was stopped")
    encoding: str = setting("", "gpt2, bytes, or the file of a learned vocabulary; empty = gpt2")
    learn_vocabulary: int = setting(0, "ids of a vocabulary to learn from the corpus; 0 = none", unit="ids", least=0)
    shard_tokens: int = setting(
        100_000_000, "most tokens per file, such as 100M", unit="tokens", least=1, most=LARGEST_COUNT, parse=amount
    )
    validation_fraction: float = setting(
        0.1, "share of the documents that is held out, by hash; of a text file, whole passages", above=0, below=1
    )
    field: str = setting(FIELD, "name of the text field in JSONL objects, and of the column in Parquet files")
    separator: str = setting(
        "",
        "separator of the documents of a text file, such as <|endoftext|>; without it, a file is one document",
        blank=True,
    )
    undecodable: str = setting(REFUSE, "handling of a document that is not UTF-8", choices=(REFUSE, REPLACE, SKIP))
    scheduler: str = setting(
        "auto", "sync, threads, local, or an address (see train); auto = DASK_SCHEDULER_ADDRESS, else threads"
    )
    threads: int = setting(0, "threads, or worker processes of local; 0 = one per core", least=0, most=2**12)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, advice = "the tokens need a folder", "Add --out FOLDER."
        require(bool(self.out), WHERE, rule, {"out": "none"}, advice)
        rule, got = "a vocabulary must be either learned or given", {"learn_vocabulary": self.learn_vocabulary}
        either = not (self.learn_vocabulary and self.encoding)
        require(either, WHERE, rule, got | {"encoding": self.encoding}, "Leave one of them out.")


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, or rows of one.

    start   its offset in the uncompressed file; for rows, the number of the first one
    """

    path: str
    form: str
    start: int
    content: bytes | tuple[str | bytes, ...]


Block = tuple[Piece, ...]


def list_sources(inputs: list[str], config: PrepareConfig) -> tuple[list[File], list[str]]:
    """Return the files of some inputs, sorted, with absolute paths, and descriptions of what was taken of each input.

    Errors   as of `recognize`; ValueError for inputs without text
    """
    lenient = config.undecodable != REFUSE
    sources = [recognize(name, (TEXT,), config.field, WHERE, lenient=lenient) for name in inputs]
    for file in (file for source in sources for file in source.files):
        rule, got = "records must be lines of JSON, or Parquet", {"file": file.path, "form": file.form}
        require(file.form != ARRAY, WHERE, rule, got, "Write a record per line.")
    files = [replace(file, path=abspath(file.path)) for source in sources for file in source.files if file.size]
    rule, advice = "the inputs must hold text", "Give files, folders or globs that do."
    require(bool(files), WHERE, rule, {"inputs": " ".join(inputs)[:200]}, advice)
    return files, [f"{source.name} ({source.described})" for source in sources]


@dataclass(frozen=True)
class Section:
    """A part of a file that can be read by itself.

    start, stop   bytes of plain text, multiples of BLOCK_BYTES: the section lies between the first places at or after
                  them where the text can be cut; row groups of Parquet; of others nothing, since they can only be read
                  as a whole
    size          estimate [bytes]
    """

    file: File
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Partition:
    """Text that one task reads.

    number   in the order of the text
    """

    number: int
    sections: tuple[Section, ...]


def partitions(sources: list[File]) -> list[Partition]:
    """Return the files as partitions, each of some sections.

    Cost     reads the footers of Parquet files
    Errors   ValueError for invalid Parquet, OSError if it cannot be read
    """
    size = sum(source.size for source in sources)
    limit = BLOCK_BYTES * max(1, -(-size // (BLOCK_BYTES * PARTITIONS)))
    gathered, held = [list[Section]()], 0
    for section in (section for source in sources for section in _sections(source)):
        if gathered[-1] and held + section.size > limit:
            gathered.append([])
            held = 0
        gathered[-1].append(section)
        held += section.size
    return [Partition(number, tuple(sections)) for number, sections in enumerate(gathered)]


def _sections(source: File) -> Iterator[Section]:
    if source.form == PARQUET:
        yield from _row_groups(source)
    elif _is_plain(source):
        for start in range(0, source.size, BLOCK_BYTES):
            yield Section(source, start, start + BLOCK_BYTES, min(BLOCK_BYTES, source.size - start))
    else:
        yield Section(source, 0, 0, source.size)


def _row_groups(source: File) -> Iterator[Section]:
    """Yield row groups, small ones together, since opening a file takes a time for each that it has."""
    with opened_parquet(source, WHERE) as file:
        start, size = 0, 0
        for number in range(file.num_row_groups):
            size += file.metadata.row_group(number).total_byte_size
            if size >= BLOCK_BYTES or number + 1 == file.num_row_groups:
                yield Section(source, start, number + 1, size)
                start, size = number + 1, 0


def _is_plain(source: File) -> bool:
    return not source.packing and source.charset.startswith("utf-8")


def blocks(sections: Iterable[Section], config: PrepareConfig) -> Iterator[Block]:
    """Yield the pieces of sections, small ones together, as blocks that are encoded together.

    Errors   ValueError for invalid files, OSError for unreadable ones, when they are reached
    """
    gathered, held = list[Piece](), 0
    for section in sections:
        for piece in _rows(section, config.field) if section.file.form == PARQUET else _pieces(section, config):
            size = len(piece.content) if isinstance(piece.content, bytes) else sum(map(len, piece.content))
            if gathered and held + size > BLOCK_BYTES:
                yield tuple(gathered)
                gathered, held = [], 0
            gathered.append(piece)
            held += size
    if gathered:
        yield tuple(gathered)


def _pieces(section: Section, config: PrepareConfig) -> Iterator[Piece]:
    """Yield the text of a section, cut at the first possible place after each multiple of BLOCK_BYTES."""
    source, separator = section.file, b"\n" if section.file.form == LINES else config.separator.encode()
    with opened(source, WHERE) as file:
        if _is_plain(source):
            first = file.tell()  # behind a mark
            start, stop = (_place(file, first, position, separator) for position in (section.start, section.stop))
            file.seek(first + start)
            if content := file.read(stop - start):
                yield Piece(source.path, source.form, start, content)
            return
        held, start = bytearray(), 0  # data that were read and not yet yielded, and their offset
        for end in count(BLOCK_BYTES, BLOCK_BYTES):
            if end <= start:  # within a record that is longer than a block
                continue
            cut = _cut(file, held, end - start, separator)
            if not held:
                return
            yield Piece(source.path, source.form, start, bytes(held[:cut]))
            start += len(held[:cut])
            del held[:cut]


def _place(file: BinaryIO, first: int, position: int, separator: bytes) -> int:
    """Return the first place at or after a position where a text, which begins at `first`, can be cut."""
    searched = max(0, position - len(separator))
    file.seek(first + searched)
    return searched + _cut(file, bytearray(), position - searched, separator) if position else 0


def _cut(file: BinaryIO, held: bytearray, position: int, separator: bytes) -> int:
    """Return the first place to cut content at or after a position; it begins with `held`, and more is read as
    needed."""
    held += file.read(max(0, position + SEARCHED - len(held)))
    if not separator:
        return position + in_text(bytes(held[position : position + SEARCHED]))
    searched = max(0, position - len(separator))
    while (found := held.find(separator, searched)) < 0:
        searched = max(searched, len(held) - len(separator) + 1)
        if not (more := file.read(2**20)):
            return len(held)
        held += more
    return found + len(separator)


def in_text(window: bytes) -> int:
    """Return the number of bytes after which a text with this beginning is cut."""
    found = _BEFORE_A_WORD.search(window) or _A_CHARACTER.search(window)
    return found.start() if found else 0


def _rows(section: Section, field: str) -> Iterator[Piece]:
    """Yield the texts of row groups of Parquet, some at a time."""
    from pyarrow import DictionaryType

    with opened_parquet(section.file, WHERE) as file:
        kind = file.schema_arrow.field(field).type
        kind = kind.value_type if isinstance(kind, DictionaryType) else kind
        got = {"file": section.file.path, "field": field, "type": kind}
        require(str(kind) in TEXTS, WHERE, "the column must hold texts", got, "Name another with --field.")
        start = sum(file.metadata.row_group(number).num_rows for number in range(section.start))
        groups = range(section.start, section.stop)
        for batch in file.iter_batches(batch_size=ROWS, row_groups=groups, columns=[field]):
            rows = tuple(text or "" for text in batch.column(0).to_pylist())
            yield Piece(section.file.path, section.file.form, start, rows)
            start += len(rows)
