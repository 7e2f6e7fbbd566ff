"""Encodings between text and token ids: the 256 bytes, GPT-2's vocabulary, or a learned one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiktoken

from daskgpt.config.errors import nearest, require
from daskgpt.data.vocabulary import gpt2_ranks
from daskgpt.formats.huggingface import encoding_in
from daskgpt.formats.vocabulary_file import (
    is_learned,
    learned_ranks,
    learned_size,
    learned_specials,
    read_vocabulary,
)

END_OF_TEXT = "<|endoftext|>"

PADDING = 128  # ids that a model may have beyond those of its encoding
# Number of ids. End-of-text is the last of them in these two; others say which it is (`specials_of`).
VOCABULARY = {"bytes": 257, "gpt2": 50257}

# How GPT-2 cuts text into pieces that are encoded one by one; learned vocabularies do the same.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_ANY_CHARACTER = r"(?s:.)"


def vocabulary_size(name: str) -> int:
    """Number of token ids of an encoding, without loading it.

    Errors   ValueError for an unknown name, or a learned vocabulary that was not read in this process
    """
    if is_learned(name):
        return learned_size(name) or len(learned_ranks(name)) + 1
    advice = nearest(name, list(VOCABULARY))
    require(name in VOCABULARY, "vocabulary_size", "the encoding must be known", {"encoding": name}, advice)
    return VOCABULARY[name]


def encoding_named(name: str) -> str:
    """The name of an encoding that somebody names: by itself, by the file of a learned vocabulary, or by the folder of
    a Hugging Face tokenizer, which is read.

    Errors   ValueError for what is neither, or a file that holds none
    """
    path = Path(name).expanduser()
    if name not in VOCABULARY and not learned_size(name) and path.exists():
        return (encoding_in(path) if path.is_dir() else "") or read_vocabulary(path)
    vocabulary_size(name)
    return name


def get_encoding(name: str) -> tiktoken.Encoding:
    """The encoding `bytes` or `gpt2`, or a learned one, as one of tiktoken's.

    Errors   ValueError for an unknown name; FileNotFoundError where GPT-2's vocabulary is nowhere to be found
    """
    size = vocabulary_size(name)
    (_, end), *others = specials_of(name).items()  # called <|endoftext|> here in every encoding
    return tiktoken.Encoding(
        name,
        pat_str=_ANY_CHARACTER if name == "bytes" else GPT2_PATTERN,
        mergeable_ranks=ranks_of(name),
        special_tokens={END_OF_TEXT: end} | dict(others),
        explicit_n_vocab=size,
    )


def specials_of(name: str) -> dict[str, int]:
    """Return the special tokens of an encoding with their ids, end-of-text first."""
    return learned_specials(name) if learned_size(name) else {END_OF_TEXT: vocabulary_size(name) - 1}


def ranks_of(name: str) -> dict[bytes, int]:
    """Every token of an encoding but special ones, with its id.

    Errors   FileNotFoundError where GPT-2's vocabulary is nowhere to be found
    """
    if is_learned(name) or learned_size(name):
        return learned_ranks(name)
    return gpt2_ranks() if name == "gpt2" else {bytes([byte]): byte for byte in range(256)}


def sizes_of(encoding: tiktoken.Encoding) -> np.ndarray:
    """Bytes of text of every token; end-of-text has none.

    Shapes   (token ids,) int64
    """
    sizes = [len(encoding.decode_single_token_bytes(token)) for token in range(encoding.n_vocab)]
    sizes = [0 if encoding.is_special_token(token) else size for token, size in enumerate(sizes)]
    return np.array(sizes)


def encoding_of_model(vocabulary: int) -> str:
    """The encoding of somebody's model of so many token ids that says none: where they are those of an encoding.

    Errors   ValueError where they are of none that is known
    """
    sizes = {name: range(size, size + PADDING) for name, size in VOCABULARY.items()}
    found = [name for name, known in sizes.items() if vocabulary in known]
    rule, got = "the encoding of the model must be known", {"vocabulary": vocabulary}
    advice = "Name it: --encoding bytes, gpt2, a vocabulary's file, or the folder of its tokenizer."
    require(bool(found), "encoding", rule, got, advice)
    return found[0]


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
