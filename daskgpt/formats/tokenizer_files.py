"""A vocabulary as Hugging Face's GPT-2 tokenizer has it in files: byte-level pairs, with the merges that make them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from daskgpt.config.errors import refusal, require
from daskgpt.formats.checks import read_json
from daskgpt.formats.vocabulary import END_OF_TEXT, Vocabulary, know_vocabulary, written_vocabulary

TOKENIZER, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
SETTINGS, SPECIALS = "tokenizer_config.json", "special_tokens_map.json"
READ = "read_tokenizer"
OTHERS = "Other tokenizers are not known here: take its files out of the folder, and name an --encoding."
# Settings of a model of pairs, with the values that GPT-2's has.
PAIR_SETTINGS = {"dropout": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
PAIR_SETTINGS |= {"byte_fallback": False, "ignore_merges": False}


# One printable character a byte: itself where it is printable, else one from 256 on, in turn.
# Source: GPT-2, encoder.py: bytes_to_unicode.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
BYTES = {character: byte for byte, character in CHARACTERS.items()}


def tokenizer_files(vocabulary: Vocabulary, positions: int) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: vocab.json, merges.txt, tokenizer.json, tokenizer_config.json.

    positions   longest sequence of the model [tokens]

    Cost        a second for GPT-2's 50,257 tokens
    Errors      ValueError where a token is no merge of two that come before it
    Source      transformers and tokenizers, as they write GPT-2's tokenizer
    """
    ids = {_written(token): i for token, i in vocabulary.ranks.items()} | vocabulary.specials
    ids = dict(sorted(ids.items(), key=lambda item: item[1]))
    merges = merges_of(vocabulary.ranks)
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), next(iter(vocabulary.specials)))
    settings = {"add_prefix_space": False, "model_max_length": positions, "tokenizer_class": "GPT2Tokenizer"}
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    flags = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    added = [{"id": i, "content": name} | flags for name, i in ids.items() if name in vocabulary.specials]
    model = {"type": "BPE", "unk_token": None, "vocab": ids, "merges": [list(pair) for pair in merges]}
    level = {"type": "ByteLevel", "use_regex": True}
    pipeline = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level | {"add_prefix_space": False, "trim_offsets": True},
        "post_processor": level | {"add_prefix_space": True, "trim_offsets": False},
        "decoder": level | {"add_prefix_space": True, "trim_offsets": True},
        "model": PAIR_SETTINGS | model,
    }
    files: dict[str, Any] = {VOCABULARY: ids, TOKENIZER: pipeline, SETTINGS: settings | special}
    texts = {name: json.dumps(known, ensure_ascii=False).encode() for name, known in files.items()}
    return texts | {MERGES: ("\n".join(lines) + "\n").encode()}


def encoding_in(folder: Path) -> str:
    """Return the name of the encoding that a folder's tokenizer is, known from here on; "" where there is none.

    Errors   ValueError where it is not byte-level pairs cut as GPT-2's are, with what is different, or is damaged
    """
    try:
        found = _read_tokenizer(folder)
    except (AttributeError, KeyError, TypeError) as error:
        rule, got = "the tokenizer's files must be whole", f"path={folder} ({type(error).__name__})"
        raise refusal(ValueError, READ, rule, got, "Copy them again.") from error
    return know_vocabulary(written_vocabulary(*found), str(folder)) if found else ""


def _read_tokenizer(folder: Path) -> tuple[dict[bytes, int], dict[str, int]] | None:
    """Return tokens and special tokens with their ids, end-of-text first; None without files."""
    specials: dict[str, int] = {}
    if (folder / TOKENIZER).is_file():
        known = read_json(folder / TOKENIZER, READ, TOKENIZER)
        _check_pipeline(folder / TOKENIZER, known)
        specials = {added["content"]: added["id"] for added in known.get("added_tokens") or ()}
        vocabulary, merges = known["model"]["vocab"] | specials, known["model"]["merges"]
    elif (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        vocabulary = read_json(folder / VOCABULARY, READ, VOCABULARY)
        lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
        merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    else:
        return None
    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in merges]
    tokens = {*CHARACTERS.values(), *map("".join, pairs)}
    specials = specials or {name: i for name, i in vocabulary.items() if name not in tokens}
    rule, got = "its tokens must be the 256 bytes, one for each merge, and special ones", {"path": folder}
    right = tokens <= vocabulary.keys() and len(vocabulary) == len(tokens | specials.keys())
    require(right and sorted(vocabulary.values()) == list(range(len(vocabulary))), READ, rule, got, OTHERS)
    end = _end_of_text(folder, list(specials))
    ranks = {decoded(token): vocabulary[token] for token in tokens - specials.keys()}
    rule = "the ids of merged tokens must rise with their merges"
    require(merges_of(ranks) == pairs, READ, rule, got, OTHERS)
    return ranks, {end: vocabulary[end]} | specials


def _end_of_text(folder: Path, specials: list[str]) -> str:
    """Return the special token that ends a document: GPT-2's, or the one that the folder's settings name."""
    said: list[Any] = [END_OF_TEXT]
    for name in (SETTINGS, SPECIALS):
        if (folder / name).is_file():
            found = read_json(folder / name, READ, name).get("eos_token")
            said.append(found.get("content") if isinstance(found, dict) else found)
    rule, got = "one of its special tokens must end a text", f"path={folder}, special tokens {', '.join(specials)[:60]}"
    known = [name for name in (*said, *specials[: len(specials) == 1]) if name in specials]
    require(bool(known), READ, rule, got, f"Name it in {SETTINGS}: eos_token.")
    return str(known[0])


def _check_pipeline(path: Path, known: Mapping[str, Any]) -> None:
    """A tokenizer must be GPT-2's in all but its tokens and merges.

    Errors   ValueError naming the part that is not
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
        raise refusal(ValueError, READ, f"{name} must be that of GPT-2", got, OTHERS)


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """The two tokens that each token of several bytes was merged from, in order: what all merges before it make of its
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
    """Return a token that these files write with one character a byte."""
    return bytes(BYTES[character] for character in token)


def _written(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)
