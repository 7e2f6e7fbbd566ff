"""A corpus: files in a fixed order, divided into partitions, and the documents in each.

Partitions follow from names and sizes of the files. A text is cut into blocks by its bytes alone, so its tokens depend
on neither the scheduler nor the compression. Lines belong to the block in which they begin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os.path import abspath
from typing import NamedTuple

from daskgpt.config.errors import require
from daskgpt.config.settings import Checked, setting
from daskgpt.data import reading
from daskgpt.data.reading import DOCUMENT, FIELD, LAST, PARQUET, File
from daskgpt.data.source import TEXT, recognize
from daskgpt.data.text import split_text

WHERE = "prepare"
PARTITIONS = 1024  # most partitions of plain text; more blocks than that are divided among so many


class PrepareConfig(Checked):
    """Input, output and workers of the preparation.

    Scheduler and threads change no byte.
    """

    out: str = setting("", "folder to write, or to continue after the same command was stopped")
    encoding: str = setting(
        "gpt2", "gpt2, bytes, a vocabulary's file or a tokenizer's folder; learn:4096 learns a vocabulary of 4,096 ids"
    )
    validation_fraction: float = setting(
        0.1, "share that is held out: of records, by hash; of text, spans all over it", above=0, below=1
    )
    field: str = setting(FIELD, "name of the text field in JSONL objects, and of the column in Parquet files")
    scheduler: str = setting(
        "auto", "sync, threads, local, or an address (see train); auto = DASK_SCHEDULER_ADDRESS, else threads"
    )
    threads: int = setting(0, "threads, or worker processes of local; 0 = one per core", most=2**12)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, advice = "the tokens need a folder", "Add --out FOLDER."
        require(bool(self.out), WHERE, rule, {"out": "none"}, advice)


def list_sources(inputs: list[str], config: PrepareConfig) -> tuple[list[File], list[str]]:
    """Return the files of some inputs in their order, with absolute paths, and what was taken of each input.

    Errors   as of `recognize`; ValueError for inputs without text
    """
    sources = [recognize(name, (TEXT,), config.field) for name in inputs]
    files = [replace(file, path=abspath(file.path)) for source in sources for file in source.files if file.size]
    rule, advice = "the inputs must hold text", "Give files, folders or globs that do."
    require(bool(files), WHERE, rule, {"inputs": " ".join(inputs)[:200]}, advice)
    return files, [f"{source.name} ({source.described})" for source in sources]


@dataclass(frozen=True)
class Section:
    """A part of a file that can be read by itself.

    start, stop   of text, multiples of BLOCK_BYTES between which its lines begin; of Parquet, row groups; 0 and LAST of
                  compressed files, which can only be read as a whole
    size          estimate [bytes]
    """

    file: File
    start: int
    stop: int
    size: int


def partitions(files: list[File]) -> list[list[Section]]:
    """Return the sections of the files as partitions, each of which a task reads: sections up to a total size, or a
    single larger one.

    Cost     reads the footers of Parquet files
    Errors   ValueError for invalid Parquet, OSError if it cannot be read
    """
    limit = reading.BLOCK_BYTES * max(1, -(-sum(file.size for file in files) // (reading.BLOCK_BYTES * PARTITIONS)))
    gathered, total = list[list[Section]](), limit
    for section in (section for file in files for section in _sections(file)):
        if total + section.size > limit:
            gathered.append([])
            total = 0
        gathered[-1].append(section)
        total += section.size
    return gathered


def _sections(file: File) -> Iterator[Section]:
    if file.form == PARQUET:
        with reading.opened_parquet(file) as parquet:
            for number in range(parquet.num_row_groups):
                yield Section(file, number, number + 1, parquet.metadata.row_group(number).total_byte_size)
    elif file.packing:
        yield Section(file, 0, LAST, file.size)
    else:
        for start in range(0, file.size, reading.BLOCK_BYTES):
            size = min(reading.BLOCK_BYTES, file.size - start)
            yield Section(file, start, start + reading.BLOCK_BYTES, size)


class Document(NamedTuple):
    """A record, or a part of a text file.

    origin   for error messages
    """

    text: str
    held_out: bool
    origin: str


def documents(section: Section, config: PrepareConfig) -> Iterator[Document]:
    """Yield the documents of a section that are not blank.

    Errors   ValueError for invalid files, OSError for unreadable ones, when they are reached
    """
    file, fraction = section.file, config.validation_fraction
    for place, text in reading.texts(file, config.field, section.start, section.stop):
        origin = f"{file.path}, {place}"
        if file.form == DOCUMENT:
            for held_out, parts in enumerate(split_text([text], fraction)):
                yield from (Document(part, bool(held_out), origin) for part in parts if part.strip())
        elif text.strip():
            yield Document(text, _is_held_out(text, fraction), origin)


def _is_held_out(text: str, fraction: float) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64
