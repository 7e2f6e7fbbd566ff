"""Preparation of tokens: from the files of a corpus to a folder that training reads, with any scheduler.

A task encodes one block. Whether a text is held out for validation follows from its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import tiktoken

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import digest_of, replacing
from daskgpt.data import corpus, tokenizer
from daskgpt.data.corpus import WHERE, PrepareConfig
from daskgpt.data.reading import LINES
from daskgpt.data.token_folder import (
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    Encoded,
    FolderWriter,
    Manifest,
    locked_folder,
    read_manifest,
)
from daskgpt.formats.byte_characters import END_OF_TEXT
from daskgpt.formats.llmc import id_dtype
from daskgpt.formats.vocabulary import is_learned, know_vocabulary, known_vocabulary, read_vocabulary

PASSAGE_BYTES = 2**14  # of a text file that is one document; whole passages of it are held out
LEARNED_BYTES = 100_000_000  # bytes of text from which a vocabulary is learned, spread over the corpus
# Calls a function on each item in tasks, and another one on each result in this process, in order.
Each = Callable[[str, Callable[[corpus.Block], Encoded], Iterator[corpus.Block], Callable[[Encoded], None]], None]


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
        self.config, self.inputs = config, inputs
        self.sources, self.taken = corpus.list_sources(inputs, config)
        self.size = sum(source.size for source in self.sources)
        self.encoding = "" if config.learn_vocabulary else tokenizer.encoding_named(config.encoding or "gpt2")
        if self.encoding:
            tokenizer.get_encoding(self.encoding)
        else:
            tokenizer.check_learnable(config.learn_vocabulary, WHERE)
        # The settings that, with the inputs, decide the tokens.
        known = {n: value for n, value in asdict(config).items() if n not in ("out", "scheduler", "threads")}
        self.settings = known | {"encoding": self.encoding, "block_bytes": corpus.BLOCK_BYTES}

    def run(self, each: Each, tell: Callable[[int], object]) -> Manifest:
        """Make the folder, or continue it; its bytes depend on neither the scheduler nor the number of stops.

        each   see schedulers.protocol.Scheduler.each
        tell   called with the bytes of text encoded so far, whenever they grow

        Cost     memory for some blocks of 4 MiB, and for learning a vocabulary
        Errors   ValueError for invalid texts, OSError if the system refuses
        """
        decides = {"settings": self.settings, "files": [[file.name, file.size, file.modified] for file in self.sources]}
        paths = [os.path.abspath(os.path.expanduser(path)) for path in self.inputs]
        command = {"settings": self.settings, "inputs": paths}
        with locked_folder(self.config.out) as path:
            ids = tokenizer.vocabulary_size(self.encoding) if self.encoding else self.config.learn_vocabulary
            folder = FolderWriter(path, decides, command, self.config.shard_tokens, id_dtype(ids))
            self.existed, self.again = folder.finished, folder.again
            if self.existed:
                return read_manifest(path, WHERE)
            name = self.encoding or self._learned(folder)
            content = known_vocabulary(name).content if is_learned(name) else ""
            kept = path / (TOKENIZER_FILE if content.startswith("{") else VOCABULARY_FILE)
            if content and not kept.is_file():
                with replacing(kept, WHERE) as file:
                    file.write(content.encode())
            tell(sum(part.bytes for part in folder.parts.values()))

            def take(block: Encoded) -> None:
                folder.take(block)
                tell(sum(block.sizes))

            left = islice(corpus.blocks(self.sources, self.config), folder.blocks, None)
            each("encode", BlockEncoder(name, content, self.config), left, take)
            return self._finish(folder, name)

    def _learned(self, folder: FolderWriter) -> str:
        """Return the name of the corpus's own vocabulary, learned now or by an earlier process."""
        kept = folder.folder / VOCABULARY_FILE
        if kept.is_file():
            return read_vocabulary(kept)
        every = max(1, -(-self.size // LEARNED_BYTES))
        sample = islice(corpus.blocks(self.sources, self.config), 0, None, every)
        sampled = (passages_of(block, self.config) for block in sample)
        texts = (passage.text for passages in sampled for passage in passages if passage and not passage.held_out)
        return tokenizer.learn_encoding(texts, self.config.learn_vocabulary, str(kept))

    def _finish(self, folder: FolderWriter, name: str) -> Manifest:
        """Close the files, and write and return the manifest, which completes the folder.

        Errors   ValueError if a part has no text
        """
        training, validation = folder.parts.values()
        documents, fraction = training.documents + validation.documents, self.config.validation_fraction
        for kind, part in (("training", training), ("validation", validation)):
            rule, advice = f"the {kind} part must hold text", "Give more text, or another --validation-fraction."
            require(part.tokens > 0, WHERE, rule, {"documents": documents, "validation_fraction": fraction}, advice)
        folder.close_shards()
        sizes = [[source.name, source.size] for source in self.sources]
        inputs = {"files": len(sizes), "bytes": self.size, "digest": digest_of(sizes)}
        ids = tokenizer.vocabulary_size(name)
        manifest = Manifest(name, ids, self.settings, inputs, training, validation, folder.skipped)
        manifest.write(folder.folder)
        return manifest


# The tokens of a block


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


@dataclass(frozen=True)
class BlockEncoder:
    """Encodes blocks; it is sent to tasks, with the encoding's vocabulary if it has its own.

    name      of the encoding
    content   of the file of an encoding that is known by its content, else ""
    """

    name: str
    content: str
    config: PrepareConfig

    def __call__(self, block: corpus.Block) -> Encoded:
        """Encode a block. Cost   tiktoken's time, without Python's lock"""
        codec = _codec(self.name, self.content, threading.get_ident())
        runs: tuple[list[list[Passage]], list[list[Passage]]] = ([], [])
        sizes, skipped, continued, last = [0, 0], 0, -1, None
        for passage in passages_of(block, self.config):
            if passage is None:
                skipped, last = skipped + 1, -1
                continue
            part = int(passage.held_out)
            if last is None and not passage.opens:
                continued = part
            if part != last or passage.opens:
                runs[part].append([])
            runs[part][-1].append(passage)
            sizes[part] += passage.size
            last = part
        tokens = [_encoded(codec, own, part == continued) for part, own in enumerate(runs)]
        documents = [len(own) - (part == continued) for part, own in enumerate(runs)]
        return Encoded(tokens, documents, sizes, continued, last, skipped, codec.eot_token)


@lru_cache(maxsize=256)
def _codec(name: str, content: str, thread: int) -> tokenizer.Encoding:
    """Return the encoding of a thread.

    An encoding's regular expressions keep their scratch data in a pool. Its first thread has a place there, all others
    take turns: two threads with one encoding lose a tenth to two fifths of their time.
    """
    if content:
        know_vocabulary(content, name)
    return tokenizer.get_encoding(name)


def _encoded(codec: tokenizer.Encoding, runs: list[list[Passage]], unmarked: bool) -> np.ndarray:
    """Return runs of passages as tokens, end-of-text before each; with `unmarked`, not before the first one."""
    dtype, texts = id_dtype(codec.n_vocab), ["".join(passage.text for passage in run) for run in runs]
    # One call for all of them: documents may be short, and each call costs some microseconds under Python's lock.
    whole = END_OF_TEXT.join(texts if unmarked else ["", *texts])
    joined = codec.name != "bytes" and whole.count(END_OF_TEXT) == len(texts) - unmarked
    if joined and isinstance(codec, tiktoken.Encoding):
        try:
            return codec.encode_to_numpy(whole, allowed_special={END_OF_TEXT}, disallowed_special=()).astype(dtype)
        except BaseException as error:  # which `encode` mends, or names the text
            if not tokenizer.is_of_tokenizer(error):
                raise
    mark, found = np.array([codec.eot_token], dtype), [np.empty(0, dtype)]
    for text, run in zip(texts, runs):
        found += [mark, tokenizer.encode(codec, text, f"{run[0].path}, from {run[0].place:,} on")]
    return np.concatenate(found[:1] + found[1 + unmarked :])
