"""Learned vocabularies: files of tiktoken and of Hugging Face, named after their content.

A file of tiktoken has a line per token, base64 and id. Special tokens have lines with a third word: `end` for
end-of-text, `special` for others. A file without such lines has one special token, end-of-text, with the last id.

The name has size and digest: `learned-4096-1f2e3d4c5b6a`. Configurations, manifests and messages hold the name; a
model's file also holds the content, so that its text can be decoded anywhere. A vocabulary that was read once in a
process is found by its name from then on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from daskgpt.config.errors import nearest, refusal, require
from daskgpt.config.files import readable
from daskgpt.formats.stored_model import FilePath, read_json

WHERE = "read_vocabulary"
END_OF_TEXT = "<|endoftext|>"
ENCODINGS = ["bytes", "gpt2"]
PREFIX = "learned-"
LARGEST = 2**16 - 1  # ids have two bytes, and one is end-of-text
SIZE_LIMIT = 2**26  # largest file, in bytes
GPT2 = "306cd27f03c1"  # digest of GPT-2's own vocabulary, whose name is gpt2


# Hugging Face's files of a GPT-2 tokenizer: byte-level pairs, with the merges that make them.
TOKENIZER, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
SETTINGS, SPECIALS = "tokenizer_config.json", "special_tokens_map.json"
READ_TOKENIZER = "read_tokenizer"
OTHERS = "Other tokenizers are not supported: remove its files from the folder, and name an --encoding."
# Settings of a BPE model, with the values of GPT-2.
PAIR_SETTINGS = {"dropout": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
PAIR_SETTINGS |= {"byte_fallback": False, "ignore_merges": False}


# One printable character per byte: itself if it is printable, else the next one from 256 on. Source: GPT-2, encoder.py:
# bytes_to_unicode.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
BYTES = {character: byte for byte, character in CHARACTERS.items()}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of an encoding.

    ranks      ids of tokens, which are also the order of their merges
    specials   ids of special tokens, end-of-text first
    content    of its file
    """

    ranks: dict[bytes, int]
    specials: dict[str, int]
    content: str = ""


# Vocabularies by name: that of bytes, and those that were read in this process.
KNOWN = {"bytes": Vocabulary({bytes([byte]): byte for byte in range(256)}, {END_OF_TEXT: 256})}


def is_learned(name: str) -> bool:
    """Return whether an encoding's name is that of a learned vocabulary."""
    return name.startswith(PREFIX)


def known_vocabulary(name: str) -> Vocabulary:
    """Return a vocabulary that was read in this process, or that of bytes.

    Errors   ValueError for another name
    """
    advice = "Give its file: --encoding FOLDER/vocabulary.tiktoken." if is_learned(name) else nearest(name, ENCODINGS)
    require(name in KNOWN, "get_encoding", "the vocabulary must be available", {"encoding": name[:60]}, advice)
    return KNOWN[name]


def written_vocabulary(ranks: Mapping[bytes, int], specials: Mapping[str, int] | None = None) -> str:
    """Return the content of a file, tokens in the order of their ids.

    specials   special tokens with their ids, end-of-text first; None = end-of-text alone, with the last id
    """
    listed = {} if specials in (None, {END_OF_TEXT: len(ranks)}) else specials or {}
    rows = [(i, token, "") for token, i in ranks.items()]
    rows += [(i, name.encode(), " special" if place else " end") for place, (name, i) in enumerate(listed.items())]
    return "".join(f"{base64.b64encode(token).decode()} {i}{kind}\n" for i, token, kind in sorted(rows))


def read_vocabulary(path: FilePath) -> str:
    """Return the name of the vocabulary in a file, which is known from here on.

    Errors   OSError if it cannot be read; ValueError if it is not such a file, its ids are not 0, 1, 2 ..., or a byte
             is missing
    """
    with readable(path, WHERE):
        size = os.path.getsize(path)
        require(size <= SIZE_LIMIT, WHERE, "it must be a vocabulary", {"path": path, "bytes": size}, "Give another.")
        content = Path(path).read_text(encoding="ascii", errors="replace")
    return know_vocabulary(content, str(path))


def know_vocabulary(content: str, origin: str) -> str:
    """Return the name of a vocabulary, which is known from here on.

    content   of its file
    origin    where it comes from, for error messages

    Errors    ValueError as of read_vocabulary
    """
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    size = content.count("\n") + (" end\n" not in content)
    name = "gpt2" if digest == GPT2 else f"{PREFIX}{size}-{digest}"
    if name not in KNOWN:
        KNOWN[name] = _parsed(content, origin)
    return name


def _parsed(content: str, origin: str) -> Vocabulary:
    advice = "Give a file that tiktoken reads."
    ranks: dict[bytes, int] = {}
    specials: dict[str, int] = {}
    for number, line in enumerate(content.splitlines()):
        try:
            token, i, *kind = line.split()
            value = base64.b64decode(token, validate=True)
            name = value.decode() if kind else ""
        except ValueError:  # the limit of decoding, too
            i = ""
        rule = "a vocabulary's lines must be base64 and an id, from 0 on"
        require(i == str(number), WHERE, rule, {"path": origin, "line": f"{number + 1} ({line[:40]!r})"}, advice)
        if kind == ["end"]:
            specials = {name: number} | specials
        elif kind:
            specials[name] = number
        else:
            ranks[value] = number
        differ = len(ranks) + len(specials) == number + 1
        require(differ, WHERE, "tokens must differ", {"path": origin, "line": number + 1}, advice)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    whole = not missing and content.endswith("\n") and (not specials or " end\n" in content)
    rule, got = "every single byte must be a token", {"path": origin, "missing": missing[:1] or "line end"}
    require(whole, WHERE, rule, got, advice)
    sizes = {"path": origin, "tokens": len(ranks)}
    require(len(ranks) <= LARGEST, WHERE, f"it must have at most {LARGEST} tokens", sizes, "Learn a smaller one.")
    return Vocabulary(ranks, specials or {END_OF_TEXT: len(ranks)}, content)


# Hugging Face's files


def tokenizer_files(vocabulary: Vocabulary, positions: int) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: vocab.json, merges.txt, tokenizer.json, tokenizer_config.json.

    positions   longest sequence of the model [tokens]

    Cost        a second for GPT-2's 50,257 tokens
    Errors      ValueError if a token is not a merge of two earlier ones
    Source      transformers and tokenizers, as they write GPT-2's tokenizer
    """
    ids = token_ids(vocabulary)
    merges = merges_of(vocabulary.ranks)
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), next(iter(vocabulary.specials)))
    settings = {"add_prefix_space": False, "model_max_length": positions, "tokenizer_class": "GPT2Tokenizer"}
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    flags = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    added = [{"id": i, "content": name} | flags for name, i in ids.items() if name in vocabulary.specials]
    model = {"type": "BPE", "unk_token": None, "vocab": ids, "merges": [list(pair) for pair in merges]}
    level = {"type": "ByteLevel", "use_regex": True}
    pipeline: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    pipeline |= {"normalizer": None, "pre_tokenizer": level | {"add_prefix_space": False, "trim_offsets": True}}
    pipeline |= {"post_processor": level | {"add_prefix_space": True, "trim_offsets": False}}
    pipeline |= {"decoder": level | {"add_prefix_space": True, "trim_offsets": True}, "model": PAIR_SETTINGS | model}
    files: dict[str, Any] = {VOCABULARY: ids, TOKENIZER: pipeline, SETTINGS: settings | special}
    texts = {name: json.dumps(known, ensure_ascii=False).encode() for name, known in files.items()}
    return texts | {MERGES: ("\n".join(lines) + "\n").encode()}


def token_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the ids of all tokens, in their order, by names of one character a byte; special tokens by their own."""
    ids = {_written(token): i for token, i in vocabulary.ranks.items()} | vocabulary.specials
    return dict(sorted(ids.items(), key=lambda item: item[1]))


def encoding_in(folder: Path) -> str:
    """Return the name of the encoding of a folder's tokenizer, known from here on; "" without one.

    Errors   ValueError naming the difference if it is not byte-level BPE like GPT-2's, or if it is damaged
    """
    try:
        found = _read_tokenizer(folder)
    except (AttributeError, KeyError, TypeError) as error:
        rule, got = "the tokenizer's files must be whole", f"path={folder} ({type(error).__name__})"
        raise refusal(ValueError, READ_TOKENIZER, rule, got, "Copy them again.") from error
    return know_vocabulary(written_vocabulary(*found), str(folder)) if found else ""


def _read_tokenizer(folder: Path) -> tuple[dict[bytes, int], dict[str, int]] | None:
    """Return tokens and special tokens with their ids, end-of-text first; None without files."""
    specials: dict[str, int] = {}
    if (folder / TOKENIZER).is_file():
        known = read_json(folder / TOKENIZER, READ_TOKENIZER, TOKENIZER)
        _check_pipeline(folder / TOKENIZER, known)
        specials = {added["content"]: added["id"] for added in known.get("added_tokens") or ()}
        vocabulary, merges = known["model"]["vocab"] | specials, known["model"]["merges"]
    elif (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        vocabulary = read_json(folder / VOCABULARY, READ_TOKENIZER, VOCABULARY)
        lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
        merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    else:
        return None
    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in merges]
    tokens = {*CHARACTERS.values(), *map("".join, pairs)}
    specials = specials or {name: i for name, i in vocabulary.items() if name not in tokens}
    rule, got = "its tokens must be the 256 bytes, one for each merge, and special ones", {"path": folder}
    right = tokens <= vocabulary.keys() and len(vocabulary) == len(tokens | specials.keys())
    require(right and sorted(vocabulary.values()) == list(range(len(vocabulary))), READ_TOKENIZER, rule, got, OTHERS)
    end = _end_of_text(folder, list(specials))
    ranks = {decoded(token): vocabulary[token] for token in tokens - specials.keys()}
    rule = "the ids of merged tokens must rise with their merges"
    require(merges_of(ranks) == pairs, READ_TOKENIZER, rule, got, OTHERS)
    return ranks, {end: vocabulary[end]} | specials


def _end_of_text(folder: Path, specials: list[str]) -> str:
    """Return the special token that ends a document: GPT-2's, or the one that the folder's settings name."""
    said: list[Any] = [END_OF_TEXT]
    for name in (SETTINGS, SPECIALS):
        if (folder / name).is_file():
            found = read_json(folder / name, READ_TOKENIZER, name).get("eos_token")
            said.append(found.get("content") if isinstance(found, dict) else found)
    rule, got = "one of its special tokens must end a text", f"path={folder}, special tokens {', '.join(specials)[:60]}"
    known = [name for name in (*said, *specials[: len(specials) == 1]) if name in specials]
    require(bool(known), READ_TOKENIZER, rule, got, f"Name it in {SETTINGS}: eos_token.")
    return str(known[0])


def _check_pipeline(path: Path, known: Mapping[str, Any]) -> None:
    """Check that a tokenizer is GPT-2's except for tokens and merges.

    Errors   ValueError naming the part that differs
    """
    model, pre = known.get("model") or {}, known.get("pre_tokenizer") or {}
    none = {f"model.{name}": model.get(name) for name in PAIR_SETTINGS}
    none |= {"normalizer": known.get("normalizer"), "pre_tokenizer.add_prefix_space": pre.get("add_prefix_space")}
    wrong = {name: value for name, value in none.items() if value}
    if pre.get("type") != "ByteLevel" or not pre.get("use_regex", True):
        wrong["pre_tokenizer"] = pre.get("type")
    if model.get("type", "BPE") != "BPE" or not {"vocab", "merges"} <= model.keys():
        wrong["model"] = model.get("type")
    for name, value in wrong.items():
        got = {"path": path, name: json.dumps(value)[:60]}
        raise refusal(ValueError, READ_TOKENIZER, f"{name} must be that of GPT-2", got, OTHERS)


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return the two tokens from which each longer token was merged, in order: the result of all earlier merges on its
    bytes.
    """
    found = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [token[n : n + 1] for n in range(len(token))]
            while len(parts) > 2:
                least, place = min((ranks.get(a + b, rank), n) for n, (a, b) in enumerate(pairwise(parts)))
                rule, advice = "every token must be a merge of two before it", "Give ids in the order of merges."
                require(least < rank, "tokenizer_files", rule, {"id": rank}, advice)
                parts[place : place + 2] = [parts[place] + parts[place + 1]]
            found.append((_written(parts[0]), _written(parts[1])))
    return found


def decoded(token: str) -> bytes:
    """Return a token that these files write with one character per byte."""
    return bytes(BYTES[character] for character in token)


def _written(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)
