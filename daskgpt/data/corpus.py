"""A corpus: files in a fixed order, divided into partitions, and the passages of text in each.

Partitions follow from names and sizes of the files. A file is cut at positions that follow from its bytes alone, so its
tokens depend on neither the scheduler nor the compression. Text is cut before the last line break in front of a word:
GPT-2's pattern, which all but some Hugging Face tokenizers share, ends a piece there anyway, so no token crosses the
cut. Records, and documents with a separator, belong where they begin.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from os.path import abspath
from typing import NamedTuple, TypeVar

from daskgpt.config.errors import require
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.config.settings import count as amount
from daskgpt.data import reading
from daskgpt.data.reading import ARRAY, DOCUMENT, FIELD, LAST, PARQUET, File
from daskgpt.data.source import TEXT, recognize
from daskgpt.formats.llmc import LARGEST_COUNT

WHERE = "prepare"
T = TypeVar("T")
BLOCK_BYTES = 2**22  # bytes of text that are encoded together
PARTITIONS = 1024  # most partitions of plain text; more blocks than that are divided among so many
SEARCHED = 2**16  # bytes in which a text is searched for a place to cut; without one it is cut between two characters
PASSAGE_BYTES = 2**14  # of a text file that is one document; whole passages of it are held out

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
    encoding: str = setting(
        "gpt2", "gpt2, bytes, a vocabulary's file or a tokenizer's folder; learn:4096 learns a vocabulary of 4,096 ids"
    )
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
    scheduler: str = setting(
        "auto", "sync, threads, local, or an address (see train); auto = DASK_SCHEDULER_ADDRESS, else threads"
    )
    threads: int = setting(0, "threads, or worker processes of local; 0 = one per core", least=0, most=2**12)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, advice = "the tokens need a folder", "Add --out FOLDER."
        require(bool(self.out), WHERE, rule, {"out": "none"}, advice)


def list_sources(inputs: list[str], config: PrepareConfig) -> tuple[list[File], list[str]]:
    """Return the files of some inputs, sorted, with absolute paths, and descriptions of what was taken of each input.

    Errors   as of `recognize`; ValueError for inputs without text
    """
    sources = [recognize(name, (TEXT,), config.field, WHERE) for name in inputs]
    files = [replace(file, path=abspath(file.path)) for source in sources for file in source.files if file.size]
    rule, advice = "the inputs must hold text", "Give files, folders or globs that do."
    require(bool(files), WHERE, rule, {"inputs": " ".join(inputs)[:200]}, advice)
    return files, [f"{source.name} ({source.described})" for source in sources]


@dataclass(frozen=True)
class Section:
    """A part of a file that can be read by itself.

    start, stop   bytes of text, multiples of BLOCK_BYTES: the section lies between the first places at or after them
                  where the text can be cut; row groups of Parquet; 0 and LAST of compressed files and JSON arrays,
                  which can only be read as a whole
    size          estimate [bytes]
    """

    file: File
    start: int
    stop: int
    size: int


def partitions(files: list[File]) -> list[list[Section]]:
    """Return the sections of the files as partitions, each of which a task reads.

    Cost     reads the footers of Parquet files
    Errors   ValueError for invalid Parquet, OSError if it cannot be read
    """
    limit = BLOCK_BYTES * max(1, -(-sum(file.size for file in files) // (BLOCK_BYTES * PARTITIONS)))
    return list(_gathered(((section.size, section) for file in files for section in _sections(file)), limit))


def _gathered(items: Iterable[tuple[int, T]], limit: int) -> Iterator[list[T]]:
    """Yield items, each with its size, in lists of up to a total size, or of a single larger one."""
    gathered, total = list[T](), 0
    for size, item in items:
        if gathered and total + size > limit:
            yield gathered
            gathered, total = [], 0
        gathered.append(item)
        total += size
    if gathered:
        yield gathered


def _sections(file: File) -> Iterator[Section]:
    if file.form == PARQUET:
        yield from _row_groups(file)
    elif file.packing or file.form == ARRAY:
        yield Section(file, 0, LAST, file.size)
    else:
        for start in range(0, file.size, BLOCK_BYTES):
            yield Section(file, start, start + BLOCK_BYTES, min(BLOCK_BYTES, file.size - start))


def _row_groups(file: File) -> Iterator[Section]:
    """Yield row groups, small ones together, since opening a file takes a time for each that it has."""
    with reading.opened_parquet(file, WHERE) as parquet:
        start, size = 0, 0
        for number in range(parquet.num_row_groups):
            size += parquet.metadata.row_group(number).total_byte_size
            if size >= BLOCK_BYTES or number + 1 == parquet.num_row_groups:
                yield Section(file, start, number + 1, size)
                start, size = number + 1, 0


# The text of a partition


class Passage(NamedTuple):
    """A document, or a part of a text file.

    text     none for a record with half a character, which is left out
    size     of the text in UTF-8 [bytes]
    marked   whether an end-of-text goes before it, since it does not continue the passage before it
    origin   for error messages
    """

    text: str | None
    size: int
    marked: bool
    held_out: bool
    origin: str


def blocks(sections: list[Section], config: PrepareConfig) -> Iterator[list[Passage]]:
    """Yield the passages of neighboring sections in lists that are encoded together.

    Errors   ValueError for invalid files, OSError for unreadable ones, when they are reached
    """
    uncut = ((sum(passage.size for passage in passages), passages) for passages in _passages(sections, config))
    for gathered in _gathered(uncut, BLOCK_BYTES):
        yield [passage for passages in gathered for passage in passages]


def _passages(sections: list[Section], config: PrepareConfig) -> Iterator[list[Passage]]:
    """Yield the passages of sections; those of a text in lists that end where no token crosses the cut."""
    held_out = None  # whether the last passage of the text was
    for section in sections:
        if section.file.form != DOCUMENT or config.separator:
            for number, text in _documents(section, config):
                if text is None or text.strip():
                    encoded = (text or "").encode()
                    origin = f"{section.file.path}, document {number}"
                    is_held_out = _is_held_out(encoded, config.validation_fraction)
                    yield [Passage(text, len(encoded), True, is_held_out, origin)]
            continue
        if section.start and section is sections[0]:
            before = replace(section, start=section.start - BLOCK_BYTES, stop=section.start)
            held_out = next(
                (passages[-1].held_out for passages in _passages_of_text(before, config, None) if passages), None
            )
        for passages in _passages_of_text(section, config, held_out):
            yield passages
            held_out = passages[-1].held_out if passages else None


def _documents(section: Section, config: PrepareConfig) -> Iterator[tuple[int, str | None]]:
    """Yield the documents of a section of records, or of a text with separators, with their numbers."""
    file, places = section.file, (section.start, section.stop)
    if file.form != DOCUMENT:
        yield from reading.texts(file, config.field, WHERE, *places)
        return
    with reading.opened(file, WHERE) as stream:
        for number, part in enumerate(reading.parts_of(stream, file, config.separator.encode(), *places), 1):
            yield number, reading.decoded(part.strip(b"\r\n"), file, 0, WHERE)


def _passages_of_text(section: Section, config: PrepareConfig, last: bool | None) -> Iterator[list[Passage]]:
    """Yield the passages of each block of a text.

    last   whether the passage before the section is held out; None without one
    """
    for start, block in _blocks_of_text(section):
        last = last if start else None
        passages, end = list[Passage](), 0
        while end < len(block):
            begin, end = end, end + PASSAGE_BYTES
            if end < len(block):
                end += _in_text(block[end : end + PASSAGE_BYTES])
            encoded = block[begin:end]
            text = reading.decoded(encoded, section.file, start + begin, WHERE)
            opens = start == 0 and not passages
            if not opens or text.strip():
                held_out = _is_held_out(encoded, config.validation_fraction)
                origin = f"{section.file.path}, from byte {start + begin:,} on"
                passages.append(Passage(text, len(encoded), opens or held_out != last, held_out, origin))
                last = held_out
        yield passages


def _blocks_of_text(section: Section) -> Iterator[tuple[int, bytes]]:
    """Yield a text, cut at the first possible place after each multiple of BLOCK_BYTES, with the places."""
    with reading.opened(section.file, WHERE) as stream:
        start, multiple, content = section.start, section.start, b""
        if start:
            stream.seek(section.file.mark + start)
            content = stream.read(SEARCHED)
            start += (cut := _in_text(content))
            content = content[cut:]
        while multiple < section.stop:
            multiple += BLOCK_BYTES
            content += stream.read(multiple + SEARCHED - start - len(content))
            if not content:
                return
            cut = multiple - start
            cut += _in_text(content[cut : cut + SEARCHED])
            yield start, content[:cut]
            start, content = start + cut, content[cut:]


def _in_text(window: bytes) -> int:
    """Return the number of bytes after which a text with this beginning is cut."""
    match = _BEFORE_A_WORD.search(window) or _A_CHARACTER.search(window)
    return match.start() if match else 0


def _is_held_out(encoded: bytes, fraction: float) -> bool:
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64
