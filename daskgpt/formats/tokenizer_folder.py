"""Tokenizers in Hugging Face's folders: byte-level BPE with any pipeline, read and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from daskgpt.config.errors import require
from daskgpt.formats.byte_level import BYTES, END_OF_TEXT, OTHERS, WHERE, check_byte_level, whole_files
from daskgpt.formats.encoding import SIZE_LIMIT, Encoding, know_library, opened_library
from daskgpt.formats.stored_model import read_json

TOKENIZER, SETTINGS, SPECIALS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
# Files of tokenizers in other forms.
FOREIGN = ("merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "tekken.json")
# Settings that name tokens, and those that list them; flags of an added token.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTED = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def encoding_in(folder: Path) -> str:
    """Read the tokenizer of a folder, with the tokens that transformers adds, and return the name of its encoding; ""
    without one.

    Errors   ValueError naming the part that is not byte-level BPE, or a file that is damaged
    """
    if not (folder / TOKENIZER).is_file():
        others = [name for name in FOREIGN if (folder / name).is_file()]
        rule, advice = f"a folder's tokenizer must be {TOKENIZER}", f"transformers writes it. {OTHERS}"
        require(not others, WHERE, rule, {"path": folder, "files": ", ".join(others)}, advice)
        return ""
    with whole_files(folder):
        library = opened_library(_read(folder, TOKENIZER), folder)
        check_byte_level(folder, library)
        settings = _add_tokens(library, folder)
        end, bos = _end_of_text(folder, library, settings.get("eos_token")), _content(settings.get("bos_token") or "")
        template = _template_in(folder, settings.get("chat_template"))
    library.no_truncation()
    library.no_padding()
    return know_library(library, end, str(folder), chat_template=template, bos_token=bos)


def tokenizer_files(encoding: Encoding, positions: int) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: tokenizer.json and tokenizer_config.json.

    positions   longest sequence of the model [tokens]
    """
    end = next(iter(encoding.specials))
    settings: dict[str, object] = {"bos_token": encoding.bos_token or None, "eos_token": end, "unk_token": end}
    settings |= {"model_max_length": positions, "tokenizer_class": "PreTrainedTokenizerFast"}
    if encoding.chat_template:
        settings["chat_template"] = encoding.chat_template
    return {TOKENIZER: encoding.library.to_str().encode(), SETTINGS: json.dumps(settings).encode()}


def _template_in(folder: Path, said: Any) -> str:
    """Return a folder's chat template: that of its own file, or what the settings say; of several, `default`."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    if isinstance(said, list):
        said = {template["name"]: template["template"] for template in said}.get("default")
    return said if isinstance(said, str) else ""


def _read(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name, WHERE, name, SIZE_LIMIT) if (folder / name).is_file() else {}


def _add_tokens(library: Tokenizer, folder: Path) -> dict[str, Any]:
    """Add the tokens that the files beside tokenizer.json name; return the settings in tokenizer_config.json.

    Source   transformers, PreTrainedTokenizerBase._from_pretrained and PreTrainedTokenizerFast
    """
    settings = _read(folder, SETTINGS)
    if "added_tokens_decoder" not in settings:
        settings |= _read(folder, SPECIALS)
    special = [settings[name] for name in NAMED if settings.get(name)]
    for name in LISTED:
        more = settings.get(name) or []
        special += more.values() if isinstance(more, dict) else more
    decoder = settings.get("added_tokens_decoder", {})
    tokens = [_token(decoder[i]) for i in sorted(decoder, key=lambda i: (len(i), i))]  # by their numbers
    names = {token.content for token in (*library.get_added_tokens_decoder().values(), *tokens)}
    library.add_tokens(tokens + [_token(token, special=True) for token in special if _content(token) not in names])
    prefix, level = settings.get("add_prefix_space"), library.pre_tokenizer
    if isinstance(prefix, bool) and isinstance(level, pre_tokenizers.ByteLevel):
        level.add_prefix_space = prefix
    return settings


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _token(token: str | Mapping[str, Any], **flags: bool) -> AddedToken:
    settings = {} if isinstance(token, str) else {name: token[name] for name in FLAGS if name in token}
    return AddedToken(_content(token), **settings | flags)


def _end_of_text(folder: Path, library: Tokenizer, said: Any) -> str:
    """Return the token that ends a document: the one that the settings name, GPT-2's, or the only one that is neither
    a byte nor merged.
    """
    ids, model = library.get_vocab(), json.loads(library.to_str())["model"]
    merged = {"".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]}
    others = sorted(ids.keys() - merged - BYTES.keys(), key=lambda name: ids[name])
    wanted = [*([_content(said)] if said else []), END_OF_TEXT, *others[: len(others) == 1]]
    candidates = [name for name in wanted if name in ids]
    rule, got = "one of its special tokens must end a text", f"path={folder}, special tokens {', '.join(others)[:60]}"
    require(bool(candidates), WHERE, rule, got, f"Name it in {SETTINGS}: eos_token.")
    return candidates[0]
