"""A vocabulary as Hugging Face's GPT-2 tokenizer has it in files: byte-level pairs, with the merges that make them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from daskgpt.config.errors import refusal, require
from daskgpt.formats.safetensors_files import read_json

END_OF_TEXT = "<|endoftext|>"
TOKENIZER, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
SETTINGS, SPECIALS = "tokenizer_config.json", "special_tokens_map.json"
READ = "read_tokenizer"
OTHERS = "Other tokenizers are not known here: take its files out of the folder, and name an --encoding."
# Parts of a model of pairs that GPT-2's does not have.
UNKNOWN = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges")


def _characters() -> dict[int, str]:
    """One printable character a byte: itself where it is printable, else one from 256 on, in turn."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


# How these files write tokens, which need not be text. Source: GPT-2, encoder.py: bytes_to_unicode.
CHARACTERS = _characters()


def tokenizer_files(ranks: Mapping[bytes, int], positions: int, specials: Mapping[str, int]) -> dict[str, bytes]:
    """The files of a tokenizer, by name: vocab.json, merges.txt, tokenizer.json (all of it), tokenizer_config.json.

    ranks       every token but special ones, with its id, which is also the order in which tokens were merged
    specials    special tokens with their ids, end-of-text first
    positions   longest sequence of the model [tokens]

    Cost        a second for GPT-2's 50,257 tokens
    Errors      ValueError where a token is no merge of two that come before it
    Source      transformers and tokenizers, as they write GPT-2's tokenizer
    """
    ids = {_written(token): i for token, i in sorted(ranks.items(), key=lambda item: item[1])}
    merges = merges_of(ranks)
    vocabulary = dict(sorted((ids | dict(specials)).items(), key=lambda item: item[1]))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), next(iter(specials)))
    settings = {"add_prefix_space": False, "model_max_length": positions, "tokenizer_class": "GPT2Tokenizer"}
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    return {
        "vocab.json": _text(vocabulary),
        "merges.txt": ("\n".join(lines) + "\n").encode(),
        "tokenizer.json": _text(_pipeline(vocabulary, merges, specials)),
        "tokenizer_config.json": _text(settings | special),
    }


def read_tokenizer(folder: Path) -> tuple[dict[bytes, int], dict[str, int]] | None:
    """Read the tokenizer in a folder: tokens and special tokens with their ids, end-of-text first; None without files.

    Errors   ValueError where it is not byte-level pairs cut as GPT-2's are, with what is different, or is damaged
    """
    try:
        return _tokenizer_in(folder)
    except (AttributeError, KeyError, TypeError) as error:
        rule, got = "the tokenizer's files must be whole", f"path={folder} ({type(error).__name__})"
        raise refusal(ValueError, READ, rule, got, "Copy them again.") from error


def _tokenizer_in(folder: Path) -> tuple[dict[bytes, int], dict[str, int]] | None:
    if (folder / TOKENIZER).is_file():
        known = read_json(folder / TOKENIZER, READ, TOKENIZER)
        _check_pipeline(folder / TOKENIZER, known)
        vocabulary, merges = known["model"]["vocab"], known["model"]["merges"]
        specials = [added["content"] for added in known.get("added_tokens") or ()]
        vocabulary |= {added["content"]: added["id"] for added in known.get("added_tokens") or ()}
    elif (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        vocabulary, specials = read_json(folder / VOCABULARY, READ, VOCABULARY), []
        lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
        merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    else:
        return None
    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in merges]
    tokens = {*CHARACTERS.values(), *map("".join, pairs)}
    specials = specials or [name for name in vocabulary if name not in tokens]
    end = _end_of_text(folder, specials)
    byte_of = {character: byte for byte, character in CHARACTERS.items()}
    rule, got = "its tokens must be the 256 bytes, one for each merge, and special ones", {"path": folder}
    right = tokens <= vocabulary.keys() and len(vocabulary) == len(tokens | set(specials))
    require(right and sorted(vocabulary.values()) == list(range(len(vocabulary))), READ, rule, got, OTHERS)
    ranks = {bytes(byte_of[c] for c in token): vocabulary[token] for token in tokens - set(specials)}
    rule = "the ids of merged tokens must rise with their merges"
    require(merges_of(ranks) == pairs, READ, rule, got, OTHERS)
    return ranks, {end: vocabulary[end]} | {name: vocabulary[name] for name in specials}


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
    meant = {
        "normalizer": known.get("normalizer") is None,
        "pre_tokenizer": pre.get("type") == "ByteLevel" and pre.get("use_regex", True),
        "pre_tokenizer.add_prefix_space": not pre.get("add_prefix_space"),
        "model": model.get("type", "BPE") == "BPE" and {"vocab", "merges"} <= model.keys(),
        **{f"model.{name}": not model.get(name) for name in UNKNOWN},
    }
    for name, right in meant.items():
        value: Any = known
        for part in name.split("."):
            value = (value or {}).get(part)
        if isinstance(value, Mapping):
            value = value.get("type")
        got = {"path": path, name: json.dumps(value)[:60]}
        require(bool(right), READ, f"{name} must be that of GPT-2", got, OTHERS)


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


def _written(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)


def _pipeline(
    vocabulary: Mapping[str, int], merges: list[tuple[str, str]], specials: Mapping[str, int]
) -> dict[str, Any]:
    """The whole tokenizer as the library `tokenizers` has it."""

    def level(*, prefix: bool, trim: bool) -> dict[str, Any]:
        return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim, "use_regex": True}

    kind = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    pairs: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False}
    pairs |= {"continuing_subword_prefix": "", "end_of_word_suffix": "", "byte_fallback": False, "ignore_merges": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name} | kind for name, i in sorted(specials.items(), key=lambda s: s[1])],
        "normalizer": None,
        "pre_tokenizer": level(prefix=False, trim=True),
        "post_processor": level(prefix=True, trim=False),
        "decoder": level(prefix=True, trim=True),
        "model": pairs | {"vocab": vocabulary, "merges": [list(pair) for pair in merges]},
    }


def _text(known: Mapping[str, Any]) -> bytes:
    return json.dumps(known, ensure_ascii=False).encode()
