"""Encodings between text and token ids: the 256 bytes, or GPT-2's vocabulary."""

from __future__ import annotations

import numpy as np
import tiktoken

from daskgpt.config.errors import nearest, require
from daskgpt.data.vocabulary import gpt2_ranks

END_OF_TEXT = "<|endoftext|>"

# Number of ids. End-of-text is the last of them, in both.
VOCABULARY = {"bytes": 257, "gpt2": 50257}

# How GPT-2 cuts text into pieces that are encoded one by one.
_GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_ANY_CHARACTER = r"(?s:.)"


def vocabulary_size(name: str) -> int:
    """Number of token ids of an encoding, without loading it.

    Errors   ValueError for an unknown name
    """
    advice = nearest(name, list(VOCABULARY))
    require(name in VOCABULARY, "vocabulary_size", "the encoding must be known", {"encoding": name}, advice)
    return VOCABULARY[name]


def get_encoding(name: str) -> tiktoken.Encoding:
    """The encoding `bytes` or `gpt2`, as one of tiktoken's.

    Errors   ValueError for an unknown name; FileNotFoundError where GPT-2's vocabulary is nowhere to be found
    """
    size = vocabulary_size(name)
    return tiktoken.Encoding(
        name,
        pat_str=_GPT2_PATTERN if name == "gpt2" else _ANY_CHARACTER,
        mergeable_ranks=ranks_of(name),
        special_tokens={END_OF_TEXT: size - 1},
        explicit_n_vocab=size,
    )


def ranks_of(name: str) -> dict[bytes, int]:
    """Every token of an encoding but end-of-text, with its id.

    Errors   FileNotFoundError where GPT-2's vocabulary is nowhere to be found
    """
    return gpt2_ranks() if name == "gpt2" else {bytes([byte]): byte for byte in range(256)}


def encoding_of(vocabulary: int) -> str:
    """The encoding that a model of so many token ids means: gpt2 where it has all of its ids, else bytes."""
    return "gpt2" if vocabulary >= VOCABULARY["gpt2"] else "bytes"


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Token ids of a text; end-of-text written out in it is text like any other.

    Dtype    uint16
    Cost     gpt2: about 15 MB of text a second; bytes: a copy
    """
    if encoding.name == "bytes":
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
    return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
