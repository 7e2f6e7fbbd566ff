"""Preparation of tokens: from the files of a corpus to a folder that training reads, with any of Dask's schedulers.

A bag holds the partitions of the text. They follow from names and sizes of the files. A text is cut into blocks by its
bytes alone, so its tokens depend on neither the scheduler nor the compression. Lines belong to the block in which they
begin. A task reads a partition, encodes it and writes its token files, so workers of a cluster need the inputs and the
folder under the same paths.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.files import digest_of, digest_of_file, readable, replacing, write_file
from daskgpt.config.settings import Checked, setting
from daskgpt.data import text
from daskgpt.data.dataset import open_prepared
from daskgpt.data.source import TEXT, recognize
from daskgpt.data.text import FIELD, LAST, PARQUET, File, opened_parquet, split_text
from daskgpt.formats import encoding as encodings
from daskgpt.formats import token_files
from daskgpt.formats.huggingface import encoding_named
from daskgpt.formats.token_files import LARGEST_COUNT, MANIFEST, PARTS, VOCABULARY_FILE, WHERE, Manifest, Part, Shard

PARTITIONS = 1024  # most partitions of plain text; more blocks than that are divided among so many
LEARNED_BYTES = 100_000_000  # bytes of text from which a vocabulary is learned, spread over the corpus
# Computes a bag, and calls a function with the results of each partition.
Compute = Callable[[Any, Callable[[list[list[Part]]], object]], None]


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


class Section(NamedTuple):
    """A part of a file that can be read by itself: the lines that begin between two multiples of BLOCK_BYTES, all of a
    compressed file, or a row group of Parquet.
    """

    file: File
    start: int
    stop: int


def partitions_of(files: list[File]) -> list[list[Section]]:
    """Return the sections of the files as partitions, each of which a task reads: sections up to a total size, or a
    single larger one.

    Cost     reads the descriptions of Parquet files
    Errors   as of `opened_parquet`
    """
    limit = text.BLOCK_BYTES * max(1, -(-sum(file.size for file in files) // (text.BLOCK_BYTES * PARTITIONS)))
    partitions, total = list[list[Section]](), limit
    for file in files:
        if file.records == PARQUET:
            with opened_parquet(file) as parquet:
                step, groups = 1, range(parquet.num_row_groups)
                sizes = [parquet.metadata.row_group(group).total_byte_size for group in groups]
        else:
            step = LAST if file.compressed else text.BLOCK_BYTES
            sizes = [min(step, file.size - start) for start in range(0, file.size, step)]
        for number, size in enumerate(sizes):
            if total + size > limit:
                partitions.append([])
                total = 0
            partitions[-1].append(Section(file, number * step, (number + 1) * step))
            total += size
    return partitions


def documents(section: Section, config: PrepareConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield the records of a section, or the parts of its text, that are not blank: the text, whether it is held out,
    and its place for error messages.

    Errors   ValueError for invalid files, OSError for unreadable ones, when they are reached
    """
    file, fraction = section.file, config.validation_fraction
    for place, content in text.texts(file, section.start, section.stop):
        origin = f"{file.path}, {place}"
        if file.records:
            digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
            pieces = [(content, int.from_bytes(digest, "little") < fraction * 2**64)]
        else:
            training, validation = split_text([content], fraction)
            pieces = [(piece, False) for piece in training] + [(piece, True) for piece in validation]
        yield from ((piece, held_out, origin) for piece, held_out in pieces if piece.strip())


class Preparation:
    """Inputs and settings, checked before anything is encoded or written.

    existed   whether `run` found a folder that was complete
    taken     descriptions of what was taken of each input, and what was left out
    """

    def __init__(self, inputs: list[str], config: PrepareConfig) -> None:
        """inputs   files, folders and globs

        Errors   ValueError for inputs without text and unknown encodings, OSError for unreadable inputs
        """
        self.config = config
        sources = [recognize(name, (TEXT,), config.field) for name in inputs]
        self.taken = [f"{source.name} ({source.described})" for source in sources]
        files = [file for source in sources for file in source.files if file.size]
        self.files = [replace(file, path=os.path.abspath(file.path)) for file in files]
        rule, advice = "the inputs must hold text", "Give files, folders or globs that do."
        require(bool(files), WHERE, rule, {"inputs": " ".join(inputs)[:200]}, advice)
        self.encoding = encoding_named(config.encoding)
        if not encodings.is_to_be_learned(self.encoding):
            encodings.get_encoding(self.encoding)
        # The settings that, with the inputs, decide the tokens and their files.
        settings = {n: value for n, value in asdict(config).items() if n not in ("out", "scheduler", "threads")}
        sizes = {"block_bytes": text.BLOCK_BYTES, "partitions": PARTITIONS}
        self.settings = settings | {"encoding": self.encoding} | sizes

    def run(self, compute: Compute, tell: Callable[[int], object]) -> Manifest:
        """Make the folder, or continue it; its bytes depend on neither the scheduler nor the number of stops.

        compute   see schedulers.protocol.Scheduler.compute
        tell      called with the bytes of text of each partition that is complete

        Cost      memory for a block of 4 MiB, or a longer line or some rows of Parquet, with its tokens a task; for a
                  vocabulary that is learned, for the different words
        Errors    ValueError for invalid texts, inputs that change, and a folder of other inputs or settings; OSError if
                  the system refuses
        """
        from dask import bag  # it takes a fifth of a second to import

        decides = {"settings": self.settings, "files": [[file.name, file.size, file.modified] for file in self.files]}
        with token_files.begun_folder(Path(self.config.out), decides) as folder:
            self.existed = (folder / MANIFEST).is_file()
            if self.existed:
                open_prepared(folder)  # refuses files that have changed
                return token_files.read_manifest(folder)
            partitions, encoding = partitions_of(self.files), self.encoding
            if encodings.is_to_be_learned(encoding):
                encoding = self._learned(folder / VOCABULARY_FILE, partitions)
            if encodings.is_learned(encoding):
                write_file(folder / VOCABULARY_FILE, encodings.get_encoding(encoding).content.encode(), WHERE)
            ended = list[bool]()
            task = partial(tokenize, encoding=encoding, config=self.config, folder=folder.absolute(), ended=ended)
            tokens = bag.from_sequence(enumerate(partitions), partition_size=1).map(task)
            try:
                compute(tokens, lambda results: tell(sum(part.bytes for parts in results for part in parts)))
            finally:
                ended.append(True)
            for file in self.files:
                with readable(file.path, WHERE):
                    status = os.stat(file.path)
                same = (status.st_size, status.st_mtime_ns) == (file.size, file.modified)
                rule = "an input must not change while it is read"
                require(same, WHERE, rule, {"file": file.path}, "Prepare into a new folder.")
            manifest = self._manifest(folder, encoding, len(partitions))
            token_files.complete(folder, manifest)
            return manifest

    def _learned(self, kept: Path, partitions: list[list[Section]]) -> str:
        """Return the name of the corpus's own vocabulary, learned now or by an earlier process."""
        if kept.is_file():
            return encodings.read_vocabulary(kept)
        every = max(1, -(-sum(file.size for file in self.files) // LEARNED_BYTES))
        sections = (section for partition in partitions for section in partition)
        contents = (content for section in sections for content in documents(section, self.config))
        sample = islice((content for content, held_out, _ in contents if not held_out), 0, None, every)
        return encodings.learn_encoding(sample, encodings.vocabulary_size(self.encoding), str(kept))

    def _manifest(self, folder: Path, encoding: str, partitions: int) -> Manifest:
        """Return the manifest of the partitions in a folder.

        Errors   ValueError if a part has no text
        """
        sizes = [[file.name, file.size] for file in self.files]
        inputs = {"files": len(sizes), "bytes": sum(file.size for file in self.files), "digest": digest_of(sizes)}
        train, val = Part(), Part()
        for number in range(partitions):
            parts = token_files.read_contents(folder, number)
            assert parts is not None, f"partition {number} was written"
            train.add(parts[0])
            val.add(parts[1])
        got = {"documents": train.documents + val.documents, "validation_fraction": self.config.validation_fraction}
        for kind, part in (("training", train), ("validation", val)):
            rule, advice = f"the {kind} part must hold text", "Give more text or another fraction, and a new --out."
            require(part.tokens > 0, WHERE, rule, got, advice)
        return Manifest(train, val, encoding, encodings.vocabulary_size(encoding), self.settings, inputs)


def tokenize(
    partition: tuple[int, list[Section]], encoding: str, config: PrepareConfig, folder: Path, ended: list[bool]
) -> list[Part]:
    """Write the token files of a partition into a folder, unless they are there unchanged; return what is in them.

    partition  its number and its sections
    encoding   name; the file of a learned one is in the folder
    ended      is filled when the preparation ends early: tasks in threads of its process write nothing from then on

    Cost       tiktoken's time, without Python's lock; memory for a block, or a longer line or record, with its tokens
    Errors     ValueError for invalid texts, OSError if the system refuses
    """
    rule, advice = "a worker must find the folder that the client has made", "Name one on a file system that both have."
    require(folder.is_dir(), WHERE, rule, {"out": config.out}, advice, FileNotFoundError)
    number, sections = partition
    if (parts := token_files.read_contents(folder, number, compare=True)) is not None:
        return parts
    if encodings.is_learned(encoding) and encoding not in encodings.KNOWN:
        encodings.read_vocabulary(folder / VOCABULARY_FILE)
    codec = encodings.get_encoding(encoding)
    dtype = encodings.id_dtype(codec.n_vocab).newbyteorder("<")
    mark = np.array([codec.eot_token], dtype)
    paths, parts = [folder / f"{name}_{number:06}.bin" for name in PARTS], [Part(), Part()]
    with ExitStack() as stack:
        files = [stack.enter_context(replacing(path, WHERE)) for path in paths]
        for file in files:
            file.seek(token_files.HEADER_BYTES)
        for section in sections:
            for content, held_out, origin in documents(section, config):
                tokens = np.concatenate([mark, codec.encode(content, origin)], dtype=dtype)
                files[held_out].write(tokens.data)
                parts[held_out].add(Part(tokens.size, 1, len(content.encode())))
                if ended:
                    raise RuntimeError("the preparation has ended")
        for path, file, part in zip(paths, files, parts):
            rule, got = f"a token file must have at most {LARGEST_COUNT} tokens", {"path": path, "tokens": part.tokens}
            require(part.tokens <= LARGEST_COUNT, WHERE, rule, got, "Divide the compressed file.")
            file.seek(0)
            file.write(token_files.token_header(dtype, part.tokens))
    for path, part in zip(paths, parts):
        if part.tokens:
            part.shards.append(Shard(path.name, part.tokens, digest_of_file(path)))
        else:
            path.unlink()
    token_files.write_contents(folder, number, parts)
    return parts
