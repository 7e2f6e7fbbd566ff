"""Sources of a corpus: files in a fixed order, cut into blocks that are encoded independently.

A file is cut at positions that follow from its bytes alone, so its tokens depend on neither the scheduler nor the
compression. Text is cut before the last line break in front of a word: GPT-2's pattern, which every vocabulary here
shares, ends a piece there anyway, so no token crosses the cut. Lines, and documents with a separator, are cut after
their ends.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from daskgpt.config.errors import refusal, require, require_package
from daskgpt.config.files import matching_files, readable
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.config.settings import count as amount
from daskgpt.data.text import files_below
from daskgpt.formats.llmc import LARGEST_COUNT

WHERE = "prepare"
BLOCK_BYTES = 2**22  # bytes of text that one task encodes
SEARCHED = 2**16  # bytes in which a text is searched for a place to cut; without one it is cut between two characters
LOOKED_AT = 2**13  # first bytes of a file in a folder: with a zero among them, it is not text and skipped
ROWS = 16  # of Parquet read at a time: few, since a text may be a book

TEXT, RECORDS, ROWS_OF_TEXT = "text", "records", "rows"
_ENDINGS = {".jsonl": RECORDS, ".ndjson": RECORDS, ".parquet": ROWS_OF_TEXT}
_COMPRESSED = (".gz", ".zst")
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

    out: str = setting("", "folder to write; if the same command has begun it, it is continued")
    encoding: str = setting("", "gpt2, bytes, or the file of a learned vocabulary (default: gpt2)")
    learn_vocabulary: int = setting(0, "ids of a vocabulary to learn from the corpus; 0 = none", unit="ids", least=0)
    shard_tokens: int = setting(
        100_000_000, "tokens per file, such as 100M", unit="tokens", least=1, most=LARGEST_COUNT, parse=amount
    )
    validation_fraction: float = setting(
        0.1, "share of the documents that is held out, by hash; of a text file, whole passages", above=0, below=1
    )
    field: str = setting("text", "name of the text field in JSONL objects, and of the column in Parquet files")
    separator: str = setting(
        "", "separator of the documents of a text file, such as <|endoftext|>; empty = one document per file"
    )
    undecodable: str = setting(REFUSE, "handling of a document that is not UTF-8", choices=(REFUSE, REPLACE, SKIP))
    scheduler: str = setting(
        "auto", "sync, threads, local, or an address (see train); auto = DASK_SCHEDULER_ADDRESS, else threads"
    )
    threads: int = setting(0, "threads, or worker processes of local; 0 = one a core", least=0, most=2**12)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, advice = "the tokens need a folder", "Add --out FOLDER."
        require(bool(self.out), WHERE, rule, {"out": "none"}, advice)
        rule, got = "a vocabulary must be either learned or given", {"learn_vocabulary": self.learn_vocabulary}
        either = not (self.learn_vocabulary and self.encoding)
        require(either, WHERE, rule, got | {"encoding": self.encoding}, "Leave one of them out.")


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    name   in the manifest: its path below the input
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

    start   its offset in the uncompressed file; for rows, the number of the first one
    """

    path: str
    kind: str
    start: int
    content: bytes | tuple[str, ...]


Block = tuple[Piece, ...]


def list_sources(inputs: list[str]) -> list[SourceFile]:
    """Return the files of some inputs, sorted: a file, a folder (all texts below it that are not hidden) or a glob.

    Errors   FileNotFoundError if there is none; ValueError for empty inputs; RuntimeError for files that need a library
             that is not installed; OSError if one cannot be read
    """
    found = []
    for source in inputs:
        path = Path(source).expanduser()
        if path.is_dir():
            found += [_source(file, file.relative_to(path).as_posix(), text_only=True) for file in files_below(path)]
        else:
            found += [_source(file, file.name) for file in matching_files(source, WHERE)]
    files = [file for file in found if file and file.size]
    rule, advice = "the inputs must hold text", "Give files, folders or globs that do."
    require(bool(files), WHERE, rule, {"inputs": " ".join(inputs)[:200]}, advice)
    return files


def _source(path: Path, name: str, *, text_only: bool = False) -> SourceFile | None:
    """Return a file of a corpus; with `text_only`, None for a file that is not text."""
    packing = path.suffix if path.suffix in _COMPRESSED else ""
    inner = path.suffixes[-2] if packing and len(path.suffixes) > 1 else path.suffix
    # .json.gz are lines of JSON in some corpora; .json alone is one object.
    kind = RECORDS if inner == ".json" and packing else _ENDINGS.get(inner.lower(), TEXT)
    with readable(path, WHERE), open(path, "rb") as file:
        if text_only and kind == TEXT and not packing and b"\0" in file.read(LOOKED_AT):
            return None
    if kind == ROWS_OF_TEXT or packing == ".zst":
        require_package("pyarrow", "prepare", WHERE)
    known = path.stat()
    return SourceFile(str(path.resolve()), name, kind, packing, known.st_size, known.st_mtime_ns)


def blocks(sources: list[SourceFile], config: PrepareConfig) -> Iterator[Block]:
    """Yield the pieces of every file, small ones together, as blocks for one task each.

    Errors   ValueError for invalid files, OSError for unreadable ones, when they are reached
    """
    gathered, held = list[Piece](), 0
    for source in sources:
        for piece in _rows(source, config.field) if source.kind == ROWS_OF_TEXT else _pieces(source, config.separator):
            size = len(piece.content) if isinstance(piece.content, bytes) else sum(map(len, piece.content))
            if gathered and held + size > BLOCK_BYTES:
                yield tuple(gathered)
                gathered, held = [], 0
            gathered.append(piece)
            held += size
    if gathered:
        yield tuple(gathered)


def _pieces(source: SourceFile, separator_text: str) -> Iterator[Piece]:
    """Yield a file's content, cut at the first possible place after each multiple of BLOCK_BYTES."""
    separator = b"\n" if source.kind == RECORDS else separator_text.encode()
    try:
        with _opened(source) as file:
            held, start = bytearray(), 0  # data that were read and not yet yielded, and their offset
            for end in count(BLOCK_BYTES, BLOCK_BYTES):
                if end <= start:  # within a record that is longer than a block
                    continue
                cut = _cut(file, held, end - start, separator)
                if not held:
                    return
                yield Piece(source.path, source.kind, start, bytes(held[:cut]))
                start += len(held[:cut])
                del held[:cut]
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            with readable(source.path, WHERE):
                raise
        got = f"file={source.path} ({error})"
        raise refusal(ValueError, WHERE, "a compressed file must be complete", got, "Make it again.") from error


def _cut(file: Any, held: bytearray, position: int, separator: bytes) -> int:
    """Return the first place to cut content at or after a position; it begins with `held`, and more is read as
    needed."""
    held += file.read(max(0, position + SEARCHED - len(held)))
    if not separator:
        return position + in_text(bytes(held[position : position + SEARCHED]))
    searched = position
    while (found := held.find(separator, searched)) < 0:
        searched = max(position, len(held) - len(separator) + 1)
        if not (more := file.read(2**20)):
            return len(held)
        held += more
    return found + len(separator)


def in_text(window: bytes) -> int:
    """Return the number of bytes after which a text with this beginning is cut."""
    found = _BEFORE_A_WORD.search(window) or _A_CHARACTER.search(window)
    return found.start() if found else 0


def _opened(source: SourceFile) -> Any:
    if source.packing == ".zst":
        import pyarrow

        return pyarrow.input_stream(source.path, compression="zstd")
    return gzip.open(source.path, "rb") if source.packing else open(source.path, "rb")


def _rows(source: SourceFile, field: str) -> Iterator[Piece]:
    """Yield the texts of a Parquet file's column, some at a time."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(source.path) as file:
            names, got = file.schema_arrow.names, {"file": source.path, "field": field}
            rule, columns = "the file must have a column of that name", got | {"columns": ", ".join(names)[:120]}
            require(field in names, WHERE, rule, columns, "Name one with --field.")
            kind = file.schema_arrow.field(field).type
            texts = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
            require(texts, WHERE, "the column must hold texts", got | {"type": kind}, "Name another with --field.")
            start = 0
            for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
                rows = tuple(text or "" for text in batch.column(0).to_pylist())
                yield Piece(source.path, source.kind, start, rows)
                start += len(rows)
    except pyarrow.ArrowException as error:
        found = f"file={source.path} ({str(error).splitlines()[0][:100]})"
        raise refusal(ValueError, WHERE, "the file must be complete Parquet", found, "Make it again.") from error
