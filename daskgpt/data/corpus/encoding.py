"""A block's tokens: what one task makes of it, wherever it runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import tiktoken

from daskgpt.data.corpus.documents import Passage, Reading, passages_of
from daskgpt.data.corpus.sources import Block
from daskgpt.data.encodings import END_OF_TEXT, encode, get_encoding
from daskgpt.formats.vocabulary_file import know_vocabulary


@dataclass(frozen=True, eq=False)
class Encoded:
    """A block as tokens, each document behind an end-of-text.

    tokens       of both parts, (N,) uint16
    documents    of both parts; passages of one text that follow one another count once
    sizes        of both parts' texts in UTF-8 [bytes]
    continues    whether it may go on from the block before: then its first tokens have no end-of-text before them
    first, last  parts to which its first and its last passage belong, -1 where there is none
    skipped      documents that could not be decoded
    end_of_text  its id
    """

    tokens: tuple[np.ndarray, np.ndarray]
    documents: tuple[int, int]
    sizes: tuple[int, int]
    continues: bool
    first: int
    last: int
    skipped: int
    end_of_text: int


class BlockEncoder:
    """Encodes blocks; it travels to whoever does so, with a learned vocabulary if there is one."""

    def __init__(self, name: str, content: str, reading: Reading) -> None:
        """name      of the encoding
        content   of its file where it is a learned one, else ""
        """
        self.name, self.content, self.reading = name, content, reading

    def __call__(self, block: Block) -> Encoded:
        """Cost   tiktoken's time: it holds no lock of Python's while it encodes"""
        codec = _codec(self.name, self.content)
        runs: tuple[list[list[str]], list[list[str]]] = ([], [])
        sizes, skipped, first, last, continues = [0, 0], 0, -1, -1, False
        for passage in passages_of(block, self.reading):
            if passage is None:
                skipped, last = skipped + 1, -1
                continue
            part = int(passage.held_out)
            if first < 0:
                first, continues = part, not passage.opens
            _append(runs[part], passage, goes_on=part == last)
            sizes[part] += passage.size
            last = part
        tokens = [_encoded(codec, own, continues and part == first) for part, own in enumerate(runs)]
        documents = [len(own) - (continues and part == first) for part, own in enumerate(runs)]
        return Encoded(
            (tokens[0], tokens[1]),
            (documents[0], documents[1]),
            (sizes[0], sizes[1]),
            continues,
            first,
            last,
            skipped,
            codec.eot_token,
        )


def _append(runs: list[list[str]], passage: Passage, *, goes_on: bool) -> None:
    if goes_on and not passage.opens:
        runs[-1].append(passage.text)
    else:
        runs.append([passage.text])


class _Own(threading.local):
    """What a thread encodes with: an encoding of its own.

    An encoding's regular expressions keep what they work with in a pool. Its first thread has a place there, all others
    take turns: two threads with one encoding lose a tenth to two fifths of their time.
    """

    made: tuple[str, str] = ("", "")
    codec: tiktoken.Encoding


_own = _Own()


def _codec(name: str, content: str) -> tiktoken.Encoding:
    if _own.made != (name, content):
        if content:
            know_vocabulary(content, name)
        _own.codec, _own.made = get_encoding(name), (name, content)
    return _own.codec


def _encoded(codec: tiktoken.Encoding, runs: list[list[str]], unmarked: bool) -> np.ndarray:
    """Runs of passages as tokens, end-of-text before each; unmarked: not before the first one."""
    texts = ["".join(run) for run in runs]
    if not texts:
        return np.empty(0, np.uint16)
    if codec.name == "bytes" or any(END_OF_TEXT in text for text in texts):
        mark = np.array([codec.eot_token], np.uint16)
        found = [array for text in texts for array in (mark, encode(codec, text))]
        return np.concatenate(found[unmarked:])
    # One call for all of them: documents may be short, and each call costs some microseconds under Python's lock.
    whole = END_OF_TEXT.join(texts if unmarked else ["", *texts])
    return codec.encode_to_numpy(whole, allowed_special={END_OF_TEXT}, disallowed_special=()).astype(np.uint16)
