"""Preparation of tokens: from the files of a corpus to a folder that training reads, with any of Dask's schedulers.

A bag holds the partitions of the text. A task reads one, encodes it and writes its token files, so workers of a cluster
need the inputs and the folder under the same paths.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.files import digest_of, readable, write_file
from daskgpt.data import corpus, reading, token_folder, tokenizer
from daskgpt.data.corpus import WHERE, PrepareConfig, Section
from daskgpt.data.token_folder import MANIFEST, PARTS, VOCABULARY_FILE, Contents, Manifest, TokenWriter
from daskgpt.formats.encoding import KNOWN, is_learned, known_encoding, read_vocabulary
from daskgpt.formats.llmc import id_dtype

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
        sizes = {"block_bytes": reading.BLOCK_BYTES, "partitions": corpus.PARTITIONS}
        self.settings = settings | {"encoding": self.encoding} | sizes

    def run(self, compute: Compute, tell: Callable[[int], object]) -> Manifest:
        """Make the folder, or continue it; its bytes depend on neither the scheduler nor the number of stops.

        compute   see schedulers.protocol.Scheduler.compute
        tell      called with the bytes of text of each partition that is complete

        Cost      memory for a block of 4 MiB, or a longer line or record, with its tokens a task; for a vocabulary that
                  is learned, for the different words
        Errors    ValueError for invalid texts, inputs that change, and a folder of other inputs or settings; OSError if
                  the system refuses
        """
        from dask import bag  # it takes a fifth of a second to import

        decides = {"settings": self.settings, "files": [[file.name, file.size, file.modified] for file in self.files]}
        with token_folder.begun_folder(Path(self.config.out), decides) as folder:
            self.existed = (folder / MANIFEST).is_file()
            if self.existed:
                return token_folder.read_manifest(folder)
            partitions, stop = corpus.partitions(self.files), Stop()
            learned = tokenizer.is_to_be_learned(self.encoding)
            encoding = self._learned(folder, partitions) if learned else self.encoding
            if is_learned(encoding):
                write_file(folder / VOCABULARY_FILE, known_encoding(encoding).content.encode(), WHERE)
            task = partial(tokenize, encoding=encoding, config=self.config, folder=folder.absolute(), stop=stop)
            tokens = bag.from_sequence(enumerate(partitions), partition_size=1).map(task)
            try:
                compute(tokens, lambda results: tell(sum(part.train.bytes + part.val.bytes for part in results)))
            finally:
                stop.set()
            for file in self.files:
                with readable(file.path, WHERE):
                    status = os.stat(file.path)
                rule, same = "an input must not change while it is read", status.st_size == file.size
                same &= status.st_mtime_ns == file.modified
                require(same, WHERE, rule, {"file": file.path}, "Prepare into a new folder.")
            manifest = self._manifest(folder, encoding, len(partitions))
            token_folder.complete(folder, manifest)
            return manifest

    def _learned(self, folder: Path, partitions: list[list[Section]]) -> str:
        """Return the name of the corpus's own vocabulary, learned now or by an earlier process."""
        kept = folder / VOCABULARY_FILE
        if kept.is_file():
            return read_vocabulary(kept)
        every = max(1, -(-self.size // LEARNED_BYTES))
        sections = (section for partition in partitions for section in partition)
        documents = (document for section in sections for document in corpus.documents(section, self.config))
        texts = (document.text for document in documents if not document.held_out)
        sample = islice(texts, 0, None, every)
        return tokenizer.learn_encoding(sample, tokenizer.size_to_learn(self.encoding), str(kept))

    def _manifest(self, folder: Path, encoding: str, partitions: int) -> Manifest:
        """Return the manifest of the partitions in a folder.

        Errors   ValueError if a part has no text
        """
        sizes = [[file.name, file.size] for file in self.files]
        inputs = {"files": len(sizes), "bytes": self.size, "digest": digest_of(sizes)}
        ids = tokenizer.vocabulary_size(encoding)
        whole = Manifest(encoding=encoding, ids=ids, settings=self.settings, inputs=inputs)
        for number in range(partitions):
            contents = token_folder.read_contents(folder, number)
            assert contents is not None, f"partition {number} was written"
            whole.train.add(contents.train)
            whole.val.add(contents.val)
        documents, fraction = whole.train.documents + whole.val.documents, self.config.validation_fraction
        got = {"documents": documents, "validation_fraction": fraction}
        for kind, part in (("training", whole.train), ("validation", whole.val)):
            rule, advice = f"the {kind} part must hold text", "Give more text, or another --validation-fraction."
            require(part.tokens > 0, WHERE, rule, got, advice)
        return whole


def tokenize(
    partition: tuple[int, list[Section]], encoding: str, config: PrepareConfig, folder: Path, stop: Stop
) -> Contents:
    """Write the token files of a partition into a folder, unless they are there; return their contents.

    partition  its number and its sections
    encoding   name; the file of a learned one is in the folder
    stop       ends the task after a document

    Cost       tiktoken's time, without Python's lock; memory for a block, or a longer line or record, with its tokens
    Errors     ValueError for invalid texts, OSError if the system refuses
    """
    rule, advice = "a worker must find the folder that the client has made", "Name one on a file system that both have."
    require(folder.is_dir(), WHERE, rule, {"out": config.out}, advice, FileNotFoundError)
    number, sections = partition
    if (contents := token_folder.read_contents(folder, number)) is not None:
        return contents
    if is_learned(encoding) and encoding not in KNOWN:
        read_vocabulary(folder / VOCABULARY_FILE)
    codec, contents = tokenizer.get_encoding(encoding), Contents()
    dtype = id_dtype(codec.n_vocab)
    mark = np.array([codec.eot_token], dtype)
    with ExitStack() as files:
        writers = [TokenWriter(files, folder / f"{name}_{number:06}.bin", dtype) for name in PARTS]
        for section in sections:
            for text, held_out, origin in corpus.documents(section, config):
                tokens = np.concatenate([mark, tokenizer.encode(codec, text, origin)])
                writers[held_out].append(tokens, len(text.encode()))
                if stop.is_set():
                    raise RuntimeError("the preparation has ended")
    contents.train, contents.val = (writer.part for writer in writers)
    token_folder.write_contents(folder, number, contents)
    return contents
