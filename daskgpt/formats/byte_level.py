"""Byte-level BPE in the library `tokenizers`: names of tokens, ways to split text, and what else is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from daskgpt.config.errors import refusal, require, short, tells_of_content

WHERE = "read_tokenizer"
OTHERS = "Other tokenizers are not supported: remove its files from the folder, and name an --encoding."
END_OF_TEXT = "<|endoftext|>"

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


def library_of(ranks: Mapping[bytes, int], specials: Mapping[str, int]) -> Tokenizer:
    """Return a tokenizer that splits text as GPT-2's, with tokens in the order of their merges, and special tokens."""
    library = byte_level_bpe({named(token): i for token, i in ranks.items()} | {**specials}, merges_of(ranks))
    library.add_special_tokens([END_OF_TEXT])
    return library


def splitting_of(pipeline: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a pipeline splits text; "" if it has none."""
    parts = pipeline["pre_tokenizer"].get("pretokenizers", [pipeline["pre_tokenizer"]])
    same = [part | {"trim_offsets": True} if part["type"] == "ByteLevel" else part for part in parts]
    name = next((name for name, form in SPLITTINGS.items() if form == same), "")
    whole_words = pipeline["model"].get("ignore_merges", False)
    return name if not pipeline["normalizer"] and whole_words == (name in WHOLE_WORDS) else ""


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return the names of the two tokens from which each longer token was merged, in order. They are what all earlier
    merges make of its bytes.

    ranks    ids of tokens, which are also the order of their merges

    Cost     a second for GPT-2's 50,257 tokens
    Errors   ValueError if a token is not a merge of two earlier ones
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [token[n : n + 1] for n in range(len(token))]
            while len(parts) > 2:
                least, place = min((ranks.get(a + b, rank), n) for n, (a, b) in enumerate(pairwise(parts)))
                rule, advice = "every token must be a merge of two before it", "Give ids in the order of merges."
                require(least < rank, WHERE, rule, {"id": rank}, advice)
                parts[place : place + 2] = [parts[place] + parts[place + 1]]
            merges.append((named(parts[0]), named(parts[1])))
    return merges


def check_byte_level(origin: Path, library: Tokenizer) -> None:
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


@contextmanager
def whole_files(origin: Path | str) -> Iterator[None]:
    """Raise the errors of files with another content than they should have in the common form."""
    try:
        yield
    except BaseException as error:
        if type(error) is ValueError or not tells_of_content(error):  # in this form already, or not of the files
            raise
        got = {"path": origin, "error": short(f"{type(error).__name__}: {error}", 80)}
        advice = "Copy them again, or update tokenizers."
        raise refusal(ValueError, WHERE, "the tokenizer's files must be whole", got, advice) from error
