"""Preparation of tokens: from the files of a corpus to a folder that training reads, with any of Dask's schedulers.

A bag holds the partitions of the text. A task reads one, encodes it and writes its token files, so workers of a cluster
need the inputs and the folder under the same paths. Whether a text is held out for validation follows from its hash.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from daskgpt.config.errors import require
from daskgpt.config.files import digest_of, replacing
from daskgpt.data import corpus, token_folder, tokenizer
from daskgpt.data.corpus import WHERE, Passage, PrepareConfig, Section
from daskgpt.data.token_folder import PARTIAL, PARTS, VOCABULARY_FILE, Contents, Manifest, ShardWriter
from daskgpt.formats.byte_characters import END_OF_TEXT
from daskgpt.formats.llmc import id_dtype
from daskgpt.formats.vocabulary import KNOWN, is_learned, known_vocabulary, read_vocabulary

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
        self.files, self.taken = corpus.list_sources(inputs, config)
        self.size = sum(file.size for file in self.files)
        self.encoding = config.encoding
        if tokenizer.is_to_be_learned(config.encoding):
            tokenizer.size_to_learn(config.encoding)
        else:
            self.encoding = tokenizer.encoding_named(config.encoding)
            tokenizer.get_encoding(self.encoding)
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

        decides = {"settings": self.settings, "files": [[file.name, file.size, file.modified] for file in self.files]}
        with token_folder.locked_folder(self.config.out) as folder:
            partial_folder = token_folder.begin(folder, decides)
            self.existed, self.again = partial_folder is None, len(list(folder.glob(f"{PARTIAL}*"))) > 1
            if partial_folder is None:
                return token_folder.read_manifest(folder, WHERE)
            partitions, stop = corpus.partitions(self.files), Stop()
            learned = tokenizer.is_to_be_learned(self.encoding)
            encoding = self._learned(partial_folder, partitions) if learned else self.encoding
            _keep_vocabulary(partial_folder, encoding)
            where = partial_folder.absolute()
            task = partial(tokenize, encoding=encoding, config=self.config, folder=where, stop=stop)
            tokens = bag.from_sequence(enumerate(partitions), partition_size=1).map(task)
            try:
                compute(tokens, lambda results: tell(sum(part.train.bytes + part.val.bytes for part in results)))
            finally:
                stop.set()
            manifest = self._manifest(partial_folder, encoding, len(partitions))
            token_folder.complete(folder, partial_folder, manifest)
            return manifest

    def _learned(self, folder: Path, partitions: list[list[Section]]) -> str:
        """Return the name of the corpus's own vocabulary, learned now or by an earlier process."""
        kept = folder / VOCABULARY_FILE
        if kept.is_file():
            return read_vocabulary(kept)
        every = max(1, -(-self.size // LEARNED_BYTES))
        sections = [section for partition in partitions for section in partition]
        sample = islice(corpus.blocks(sections, self.config), 0, None, every)
        texts = (passage.text for block in sample for passage in block if passage.text and not passage.held_out)
        return tokenizer.learn_encoding(texts, tokenizer.size_to_learn(self.encoding), str(kept))

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
        sizes = [[file.name, file.size] for file in self.files]
        inputs = {"files": len(sizes), "bytes": self.size, "digest": digest_of(sizes)}
        ids = tokenizer.vocabulary_size(encoding)
        return Manifest(encoding, ids, self.settings, inputs, whole.train, whole.val, whole.skipped)


def _keep_vocabulary(folder: Path, encoding: str) -> None:
    """Write the vocabulary of an encoding that is known by its content."""
    if is_learned(encoding) and not (folder / VOCABULARY_FILE).is_file():
        with replacing(folder / VOCABULARY_FILE, WHERE) as file:
            file.write(known_vocabulary(encoding).content.encode())


# The tokens of a partition


def tokenize(
    partition: tuple[int, list[Section]], encoding: str, config: PrepareConfig, folder: Path, stop: Stop
) -> Contents:
    """Write the token files of a partition into a folder, unless they are there; return their contents.

    partition  its number and its sections
    encoding   name; the file of a learned one is in the folder
    stop       ends the task after a block

    Cost       tiktoken's time, without Python's lock; memory for a block
    Errors     ValueError for invalid texts, OSError if the system refuses
    """
    rule, advice = "a worker must find the folder that the client has made", "Name one on a file system that both have."
    require(folder.is_dir(), WHERE, rule, {"out": config.out}, advice, FileNotFoundError)
    number, sections = partition
    if (contents := token_folder.read_contents(folder, number)) is not None:
        return contents
    codec, contents = _codec(encoding, folder, threading.get_ident()), Contents()
    with ExitStack() as files:
        paths, dtype = [folder / f"{name}_{number:06}" for name in PARTS], id_dtype(codec.n_vocab)
        writers = [ShardWriter(files, path, config.shard_tokens, dtype) for path in paths]
        for block in corpus.blocks(sections, config):
            contents.skipped += sum(passage.text is None for passage in block)
            for held_out, writer in enumerate(writers):
                passages = [passage for passage in block if passage.text and passage.held_out == held_out]
                documents, size = sum(passage.marked for passage in passages), sum(passage.size for passage in passages)
                writer.append(_encoded(codec, passages), documents, size)
            if stop.is_set():
                raise RuntimeError("the preparation has ended")
    contents.train, contents.val = (writer.part for writer in writers)
    token_folder.write_contents(folder, number, contents)
    return contents


@lru_cache(maxsize=256)
def _codec(name: str, folder: Path, thread: int) -> tokenizer.Encoding:
    """Return the encoding of a thread.

    An encoding's regular expressions keep their scratch data in a pool. Its first thread has a place there, all others
    take turns: two threads with one encoding lose a tenth to two fifths of their time.
    """
    if is_learned(name) and name not in KNOWN:
        read_vocabulary(folder / VOCABULARY_FILE)
    return tokenizer.get_encoding(name)


def _encoded(codec: tokenizer.Encoding, passages: list[Passage]) -> np.ndarray:
    """Return the tokens of passages, with end-of-text before those that are marked."""
    dtype, count = id_dtype(codec.n_vocab), sum(passage.marked for passage in passages)
    # One call for all of them: documents may be short, and each call costs some microseconds under Python's lock.
    whole = "".join(f"{END_OF_TEXT * passage.marked}{passage.text}" for passage in passages)
    if isinstance(codec, tiktoken.Encoding) and codec.name != "bytes" and whole.count(END_OF_TEXT) == count:
        try:
            return codec.encode_to_numpy(whole, allowed_special={END_OF_TEXT}, disallowed_special=()).astype(dtype)
        except BaseException as error:  # which `encode` mends, or names the text
            if not tokenizer.is_of_tokenizer(error):
                raise
    runs = list[list[Passage]]()  # neighbors that are encoded as one text
    for passage in passages:
        if passage.marked or not runs:
            runs.append([])
        runs[-1].append(passage)
    mark, rows = np.array([codec.eot_token], dtype), [np.empty(0, dtype)]
    for run in runs:
        text = "".join(passage.text or "" for passage in run)
        rows += [mark[: run[0].marked], tokenizer.encode(codec, text, run[0].origin)]
    return np.concatenate(rows)
