"""A vocabulary as Hugging Face's GPT-2 tokenizer has it in files: byte-level pairs, with the merges that make them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from daskgpt.config.errors import require

END_OF_TEXT = "<|endoftext|>"


def _characters() -> dict[int, str]:
    """One printable character a byte: itself where it is printable, else one from 256 on, in turn."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


# How these files write tokens, which need not be text. Source: GPT-2, encoder.py: bytes_to_unicode.
CHARACTERS = _characters()


def tokenizer_files(ranks: Mapping[bytes, int], positions: int) -> dict[str, bytes]:
    """The files of a tokenizer, by name: vocab.json, merges.txt, tokenizer.json (all of it), tokenizer_config.json.

    ranks       every token but end-of-text, with its id, which is also the order in which tokens were merged;
                end-of-text has the id behind them
    positions   longest sequence of the model [tokens]

    Cost        a second for GPT-2's 50,257 tokens
    Errors      ValueError where a token is no merge of two that come before it
    Source      transformers and tokenizers, as they write GPT-2's tokenizer
    """
    ids = {_written(token): i for token, i in sorted(ranks.items(), key=lambda item: item[1])}
    merges = merges_of(ranks)
    end = len(ids)
    vocabulary = ids | {END_OF_TEXT: end}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    settings = {"add_prefix_space": False, "model_max_length": positions, "tokenizer_class": "GPT2Tokenizer"}
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    return {
        "vocab.json": _text(vocabulary),
        "merges.txt": ("\n".join(lines) + "\n").encode(),
        "tokenizer.json": _text(_pipeline(vocabulary, merges, end)),
        "tokenizer_config.json": _text(settings | special),
    }


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


def _pipeline(vocabulary: Mapping[str, int], merges: list[tuple[str, str]], end: int) -> dict[str, Any]:
    """The whole tokenizer as the library `tokenizers` has it."""

    def level(*, prefix: bool, trim: bool) -> dict[str, Any]:
        return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim, "use_regex": True}

    mark: dict[str, Any] = {"id": end, "content": END_OF_TEXT, "special": True, "normalized": False}
    mark |= {"single_word": False, "lstrip": False, "rstrip": False}
    pairs: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False}
    pairs |= {"continuing_subword_prefix": "", "end_of_word_suffix": "", "byte_fallback": False, "ignore_merges": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [mark],
        "normalizer": None,
        "pre_tokenizer": level(prefix=False, trim=True),
        "post_processor": level(prefix=True, trim=False),
        "decoder": level(prefix=True, trim=True),
        "model": pairs | {"vocab": vocabulary, "merges": [list(pair) for pair in merges]},
    }


def _text(known: Mapping[str, Any]) -> bytes:
    return json.dumps(known, ensure_ascii=False).encode()
