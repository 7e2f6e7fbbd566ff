"""Preparation of tokens: from the files of a corpus to a folder that training reads, with any of Dask's schedulers.

A bag holds the partitions of the text. A task reads one, encodes it and writes its token files, so workers of a cluster
need the inputs and the folder under the same paths. Whether a text is held out for validation follows from its hash.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import digest_of, replacing
from daskgpt.data import corpus, token_folder, tokenizer
from daskgpt.data.corpus import WHERE, PrepareConfig
from daskgpt.data.reading import DOCUMENT, LINES
from daskgpt.data.token_folder import (
    PARTIAL,
    PARTS,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    Contents,
    Manifest,
    ShardWriter,
    locked_folder,
    read_manifest,
    vocabulary_file,
)
from daskgpt.formats.byte_characters import END_OF_TEXT
from daskgpt.formats.llmc import id_dtype
from daskgpt.formats.vocabulary import KNOWN, is_learned, known_vocabulary, read_vocabulary

PASSAGE_BYTES = 2**14  # of a text file that is one document; whole passages of it are held out
LEARNED_BYTES = 100_000_000  # bytes of text from which a vocabulary is learned, spread over the corpus
# Computes a bag, and calls a function with the results of each partition.
Compute = Callable[[Any, Callable[[list[Contents]], object]], None]


class Stop(threading.Event):
    """Is set when a preparation ends early: tasks in threads of its process write nothing from then on.

    Its copies on workers are never set: what they write is in the folder of the same inputs and settings.
    """

    def __reduce__(self) -> tuple[type[Stop], tuple[()]]:
        return Stop, ()


class Preparation:
    """Inputs and settings, checked before anything is encoded or written.

    existed   whether `run` found a folder that was complete
    taken     descriptions of what was taken of each input, and what was left out
    again     whether it removed what was begun there with other inputs or settings
    """

    def __init__(self, inputs: list[str], config: PrepareConfig) -> None:
        """inputs   files, folders and globs

        Errors   ValueError for inputs without text and unknown encodings, OSError for unreadable inputs
        """
        self.config = config
        self.sources, self.taken = corpus.list_sources(inputs, config)
        self.size = sum(source.size for source in self.sources)
        self.encoding = "" if config.learn_vocabulary else tokenizer.encoding_named(config.encoding or "gpt2")
        if self.encoding:
            tokenizer.get_encoding(self.encoding)
        else:
            tokenizer.check_learnable(config.learn_vocabulary, WHERE)
        # The settings that, with the inputs, decide the tokens and their files.
        settings = {n: value for n, value in asdict(config).items() if n not in ("out", "scheduler", "threads")}
        sizes = {"block_bytes": corpus.BLOCK_BYTES, "partitions": corpus.PARTITIONS}
        self.settings = settings | {"encoding": self.encoding} | sizes

    def run(self, compute: Compute, tell: Callable[[int], object]) -> Manifest:
        """Make the folder, or continue it; its bytes depend on neither the scheduler nor the number of stops.

        compute   see schedulers.protocol.Scheduler.compute
        tell      called with the bytes of text of each partition that is complete

        Cost      memory for a block of 4 MiB a task, and for learning a vocabulary
        Errors    ValueError for invalid texts, OSError if the system refuses
        """
        from dask import bag  # it takes a fifth of a second to import

        decides = {"settings": self.settings, "files": [[file.name, file.size, file.modified] for file in self.sources]}
        with locked_folder(self.config.out) as folder:
            partial_folder = token_folder.begin(folder, decides)
            self.existed, self.again = partial_folder is None, len(list(folder.glob(f"{PARTIAL}*"))) > 1
            if partial_folder is None:
                return read_manifest(folder, WHERE)
            partitions, stop = corpus.partitions(self.sources), Stop()
            encoding = self.encoding or self._learned(partial_folder, partitions)
            _keep_vocabulary(partial_folder, encoding)
            where = partial_folder.absolute()
            texts = bag.from_sequence(partitions, partition_size=1)
            tokens = texts.map(partial(tokenize, encoding=encoding, config=self.config, folder=where, stop=stop))
            try:
                compute(tokens, lambda results: tell(sum(map(_size, results))))
            finally:
                stop.set()
            manifest = self._manifest(partial_folder, encoding, len(partitions))
            token_folder.complete(folder, partial_folder, manifest)
            return manifest

    def _learned(self, folder: Path, partitions: list[corpus.Partition]) -> str:
        """Return the name of the corpus's own vocabulary, learned now or by an earlier process."""
        kept = folder / VOCABULARY_FILE
        if kept.is_file():
            return read_vocabulary(kept)
        every = max(1, -(-self.size // LEARNED_BYTES))
        sections = (section for partition in partitions for section in partition.sections)
        sample = islice(corpus.blocks(sections, self.config), 0, None, every)
        sampled = (passages_of(block, self.config) for block in sample)
        texts = (passage.text for passages in sampled for passage in passages if passage and not passage.held_out)
        return tokenizer.learn_encoding(texts, self.config.learn_vocabulary, str(kept))

    def _manifest(self, folder: Path, encoding: str, partitions: int) -> Manifest:
        """Return the manifest of the partitions in a folder.

        Errors   ValueError if a part has no text
        """
        whole = Contents()
        for number in range(partitions):
            contents = token_folder.read_contents(folder, number)
            assert contents is not None, f"partition {number} was written"
            whole.add(contents)
        documents, fraction = whole.train.documents + whole.val.documents, self.config.validation_fraction
        for kind, part in (("training", whole.train), ("validation", whole.val)):
            rule, advice = f"the {kind} part must hold text", "Give more text, or another --validation-fraction."
            require(part.tokens > 0, WHERE, rule, {"documents": documents, "validation_fraction": fraction}, advice)
        sizes = [[source.name, source.size] for source in self.sources]
        inputs = {"files": len(sizes), "bytes": self.size, "digest": digest_of(sizes)}
        ids = tokenizer.vocabulary_size(encoding)
        return Manifest(encoding, ids, self.settings, inputs, whole.train, whole.val, whole.skipped)


def _keep_vocabulary(folder: Path, encoding: str) -> None:
    """Write the vocabulary of an encoding that is known by its content."""
    content = known_vocabulary(encoding).content if is_learned(encoding) else ""
    path = folder / (TOKENIZER_FILE if content.startswith("{") else VOCABULARY_FILE)
    if content and not path.is_file():
        with replacing(path, WHERE) as file:
            file.write(content.encode())


def _size(contents: Contents) -> int:
    return contents.train.bytes + contents.val.bytes


# The tokens of a partition


def tokenize(partition: corpus.Partition, encoding: str, config: PrepareConfig, folder: Path, stop: Stop) -> Contents:
    """Write the token files of a partition into a folder, unless they are there; return their contents.

    encoding   name; the file of a learned one is in the folder
    stop       ends the task after a block

    Cost       tiktoken's time, without Python's lock; memory for a block
    Errors     ValueError for invalid texts, OSError if the system refuses
    """
    rule, advice = "a worker must find the folder that the client has made", "Name one on a file system that both have."
    require(folder.is_dir(), WHERE, rule, {"out": config.out}, advice, FileNotFoundError)
    if (contents := token_folder.read_contents(folder, partition.number)) is not None:
        return contents
    codec, contents = _codec(encoding, folder, threading.get_ident()), Contents()
    last = _held_out_before(partition.sections[0], config)
    with ExitStack() as files:
        paths, dtype = [folder / f"{name}_{partition.number:06}" for name in PARTS], id_dtype(codec.n_vocab)
        writers = [ShardWriter(files, path, config.shard_tokens, dtype) for path in paths]
        for block in corpus.blocks(partition.sections, config):
            runs: list[list[Run]] = [[] for _ in PARTS]
            last = last if block[0].start else None  # else its first text continues none
            for passage in passages_of(block, config):
                if passage is None:
                    contents.skipped, last = contents.skipped + 1, None
                    continue
                part, marked = int(passage.held_out), passage.opens or passage.held_out != last
                if marked or not runs[part]:
                    runs[part].append(Run(marked))
                runs[part][-1].passages.append(passage)
                last = passage.held_out
            for writer, part_runs in zip(writers, runs):
                size = sum(passage.size for run in part_runs for passage in run.passages)
                writer.append(_encoded(codec, part_runs), sum(run.marked for run in part_runs), size)
            if stop.is_set():
                raise RuntimeError("the preparation has ended")
    contents.train, contents.val = (writer.part for writer in writers)
    token_folder.write_contents(folder, partition.number, contents)
    return contents


def _held_out_before(section: corpus.Section, config: PrepareConfig) -> bool | None:
    """Return whether the text before a section is held out if its document goes on in the section, else None."""
    if not section.start or section.file.form != DOCUMENT or config.separator:
        return None
    before = replace(section, start=section.start - corpus.BLOCK_BYTES, stop=section.start)
    passages = [passage for block in corpus.blocks([before], config) for passage in passages_of(block, config)]
    return passages[-1].held_out if passages and passages[-1] else None


@dataclass(frozen=True)
class Passage:
    """A document, or a part of a text file.

    size   of its text in UTF-8 [bytes]
    opens  whether it begins a document
    place  byte or row of its file at which it begins
    """

    text: str
    size: int
    opens: bool
    held_out: bool
    path: str
    place: int


@dataclass(frozen=True)
class Run:
    """Neighboring passages of a document in the same part.

    marked   whether an end-of-text goes before them, since they do not continue the previous block
    """

    marked: bool
    passages: list[Passage] = field(default_factory=list)


def passages_of(block: corpus.Block, config: PrepareConfig) -> Iterator[Passage | None]:
    """Yield the passages of a block in order; None for one that was skipped.

    Errors   ValueError for invalid records and bytes that cannot be decoded
    """
    for piece in block:
        opens = piece.start == 0  # otherwise a text continues from the previous block
        for raw, place, whole in _parts(piece, config.separator.encode()):
            text = _decoded(raw, piece, place, config)
            if text and piece.form == LINES and not text.isspace():
                text = _decoded(_field(text, piece, place, config), piece, place, config)
            opens = opens or whole or text is None
            if text is None:
                yield None
            elif not opens or text.strip():
                encoded = text.encode()
                held_out = _is_held_out(encoded, config.validation_fraction)
                yield Passage(text, len(encoded), opens, held_out, piece.path, place)
                opens = False


def _is_held_out(encoded: bytes, fraction: float) -> bool:
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _parts(piece: corpus.Piece, separator: bytes) -> Iterator[tuple[bytes | str, int, bool]]:
    """Yield the records, documents or passages of a piece, their places, and whether each is a separate document."""
    content, place = piece.content, piece.start
    if isinstance(content, tuple):
        for number, row in enumerate(content):
            yield row, place + number, True
    elif separator := b"\n" if piece.form == LINES else separator:
        for document in content.split(separator):
            yield document.strip(b"\r\n"), place, True
            place += len(document) + len(separator)
    else:
        end = 0
        while end < len(content):
            begin, end = end, end + PASSAGE_BYTES
            if end < len(content):
                end += corpus.in_text(content[end : end + PASSAGE_BYTES])
            yield content[begin:end], place + begin, False


def _decoded(raw: bytes | str, piece: corpus.Piece, place: int, config: PrepareConfig) -> str | None:
    """Return a text, None if it is invalid and skipped: JSON may hold halves of characters."""
    try:
        if isinstance(raw, bytes):
            return raw.decode()
        raw.encode()
        return raw
    except UnicodeError as error:
        if config.undecodable == corpus.REPLACE:
            if isinstance(raw, bytes):
                return raw.decode(errors="replace")
            return raw.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        wrong = getattr(error, "start", 0) if isinstance(raw, bytes) else 0
        got, advice = {"file": piece.path, "byte": place + wrong}, "Convert it, or give --undecodable replace or skip."
        require(config.undecodable == corpus.SKIP, WHERE, "texts must be UTF-8", got, advice)
        return None


def _field(line: str, piece: corpus.Piece, place: int, config: PrepareConfig) -> str:
    """Return the text of a record."""
    got: dict[str, Any] = {"file": piece.path, "byte": place}
    try:
        known = json.loads(line)
    except ValueError as error:
        advice = "JSONL has one object per line; give other texts an ending such as .txt."
        got["line"] = repr(line[:40])
        raise refusal(ValueError, WHERE, "every line must be JSON", got, advice) from error
    value = known.get(config.field) if isinstance(known, dict) else None
    names = ", ".join(known)[:80] if isinstance(known, dict) else type(known).__name__
    rule, got = "the field of every record must be text", got | {"field": config.field, "fields": names}
    require(isinstance(value, str), WHERE, rule, got | {"found": repr(value)[:40]}, "Name another with --field.")
    return str(value)


@lru_cache(maxsize=256)
def _codec(name: str, folder: Path, thread: int) -> tokenizer.Encoding:
    """Return the encoding of a thread.

    An encoding's regular expressions keep their scratch data in a pool. Its first thread has a place there, all others
    take turns: two threads with one encoding lose a tenth to two fifths of their time.
    """
    if is_learned(name) and name not in KNOWN:
        read_vocabulary(vocabulary_file(folder))
    return tokenizer.get_encoding(name)


def _encoded(codec: tokenizer.Encoding, runs: list[Run]) -> np.ndarray:
    """Return the tokens of runs, with end-of-text before those that are marked."""
    dtype, texts = id_dtype(codec.n_vocab), ["".join(passage.text for passage in run.passages) for run in runs]
    # One call for all of them: documents may be short, and each call costs some microseconds under Python's lock.
    whole = "".join(END_OF_TEXT * run.marked + text for run, text in zip(runs, texts))
    joined = codec.name != "bytes" and whole.count(END_OF_TEXT) == sum(run.marked for run in runs)
    if joined and isinstance(codec, tiktoken.Encoding):
        try:
            return codec.encode_to_numpy(whole, allowed_special={END_OF_TEXT}, disallowed_special=()).astype(dtype)
        except BaseException as error:  # which `encode` mends, or names the text
            if not tokenizer.is_of_tokenizer(error):
                raise
    mark, found = np.array([codec.eot_token], dtype), [np.empty(0, dtype)]
    for run, text in zip(runs, texts):
        origin = f"{run.passages[0].path}, from {run.passages[0].place:,} on"
        found += [mark[: run.marked], tokenizer.encode(codec, text, origin)]
    return np.concatenate(found)
