"""Tokenizers in Hugging Face's folders: byte-level BPE with any pipeline, which the library `tokenizers` computes.

A tokenizer is kept as one text, which is stored with a model: JSON with `end_of_text`, the token that ends a document,
`tokenizer`, the content of a tokenizer.json that has all added tokens, and `chat_template` and `bos_token`, the token
that begins a text, if it has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from daskgpt.config.errors import refusal, require
from daskgpt.formats.byte_characters import BYTES, END_OF_TEXT, decoded
from daskgpt.formats.stored_model import read_json, short

TOKENIZER, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
SETTINGS, SPECIALS, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE = "chat_template.jinja"
# Files of tokenizers that are not byte-level BPE, or hold it in a form that only their own libraries read.
FOREIGN = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "tekken.json")
WHERE = "read_tokenizer"
OTHERS = "Other tokenizers are not supported: remove its files from the folder, and name an --encoding."
SIZE_LIMIT = 2**26  # largest file, in bytes
PREFIX = "learned-"  # of the names of encodings that are known by their content
# Settings that name tokens, and those that list them; flags of an added token.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTED = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

PIECE = 2**18  # characters that the library gets at once: each takes it some hundred bytes of memory
AROUND = 512  # characters on both sides of a cut, which are encoded with and without it
# Published vocabularies lack some bytes, which are then left out of texts, as transformers does: control characters
# but white space, and bytes that begin no character of today's Unicode.
_RARE = {*range(9), 11, 12, *range(14, 32), 127, 0xC0, 0xC1, *range(0xF1, 0x100)}
_NEEDED = {character for character, byte in BYTES.items() if byte not in _RARE}
_BETWEEN_WORDS = re.compile(r"(?<=\w)(?:\n(?=\w)|(?= \w))")


class LibraryEncoding:
    """An encoding that the library computes, with the part of tiktoken's interface that daskgpt uses.

    specials       special tokens with their ids, end-of-text first
    tokens         the bytes of each id, none for an id without a token
    chat_template  the form of a conversation (Jinja), "" without one
    bos_token      the token that begins a text, "" without one
    """

    def __init__(self, digest: str, content: str, origin: str) -> None:
        """digest    of the content, for the name
        content   see above
        origin    where it comes from, for error messages

        Errors    ValueError if it is no such content
        """
        try:
            fields = json.loads(content)
        except ValueError:
            fields = {}
        end, pipeline = fields.get("end_of_text"), fields.get("tokenizer", {})
        self.chat_template: str = fields.get("chat_template", "")
        self.content, self.library = content, _library_of(pipeline, origin)
        ids: dict[str, int] = self.library.get_vocab()
        require(end in ids, WHERE, "end_of_text must name a token", {"path": origin, "end_of_text": end}, OTHERS)
        added = self.library.get_added_tokens_decoder()
        self.bos_token: str = fields["bos_token"] if fields.get("bos_token") in ids else ""
        self.eot_token, self.n_vocab = ids[end], max(ids.values()) + 1
        self.name = f"{PREFIX}{self.n_vocab}-{digest}"
        self.specials = {end: ids[end]} | {token.content: i for i, token in added.items() if token.special}
        self.tokens = [b""] * self.n_vocab
        for token, i in ids.items():
            plain = (i in added and len(token) > 1) or not BYTES.keys() >= set(token)
            self.tokens[i] = token.encode() if plain else decoded(token)

    def encode_to_numpy(self, text: str, *, disallowed_special: Any = ()) -> np.ndarray:
        """Return the ids of a text, in which all added tokens are recognized.

        Dtype   uint32
        """
        return np.concatenate([np.array(self._ids(piece), np.uint32) for piece in self._pieces(text)])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 are replaced."""
        return b"".join(map(self.decode_single_token_bytes, tokens)).decode(errors="replace")

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Return the bytes of an id."""
        return self.tokens[token]

    def _ids(self, text: str) -> list[int]:
        (encoding,) = self.library.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield parts of a text whose ids are those of the whole text.

        It is cut between words, where the tokens around do not change. A text without such places stays whole.
        """
        start, place = 0, PIECE
        while match := _BETWEEN_WORDS.search(text, place):
            cut = match.end()
            before, after = text[max(start, cut - AROUND) : cut], text[cut : cut + AROUND]
            if same := self._ids(before + after) == self._ids(before) + self._ids(after):
                yield text[start:cut]
                start = cut
            place = cut + (PIECE if same else AROUND)
        yield text[start:]


_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# Ways to split text before its bytes are merged, by llama.cpp's names.
SPLITTINGS = {"gpt-2": [_LEVEL], "smollm": [{"type": "Digits", "individual_digits": True}, _LEVEL]}


def pipeline_of(ids: Mapping[str, int], merges: Sequence[Sequence[str]], splitting: str = "gpt-2") -> dict[str, Any]:
    """Return the content of a tokenizer.json with the given tokens, which splits text as GPT-2's or as `splitting`."""
    pipeline = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    model = {"type": "BPE", "vocab": ids, "merges": merges}
    first, *others = SPLITTINGS[splitting]
    split = {"type": "Sequence", "pretokenizers": [first, *others]} if others else first
    return pipeline | {"added_tokens": [], "pre_tokenizer": split, "decoder": _LEVEL, "model": model}


def splitting_of(pipeline: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a pipeline splits text; "" if it has none."""
    parts = pipeline["pre_tokenizer"].get("pretokenizers", [pipeline["pre_tokenizer"]])
    same = [part | {"trim_offsets": True} if part["type"] == "ByteLevel" else part for part in parts]
    return "" if pipeline["normalizer"] else next((name for name, form in SPLITTINGS.items() if form == same), "")


def content_of(
    form: tuple[Mapping[str, int], Sequence[Sequence[str]], str],
    added: Sequence[AddedToken],
    end: str,
    origin: Path,
    **others: str,
) -> str:
    """Return a tokenizer as text.

    form     tokens, merges and splitting, see `pipeline_of`
    added    those of its tokens that are recognized in texts
    end      the token that ends a text
    others   chat_template and bos_token; "" without one

    Errors    ValueError if it is not byte-level BPE
    """
    library = _library_of(pipeline_of(*form), origin)
    library.add_tokens(list(added))
    _check(origin, library)
    return _text_of(library, end, others)


def _text_of(library: Tokenizer, end: str, others: Mapping[str, str]) -> str:
    content = {"end_of_text": end, "tokenizer": json.loads(library.to_str())}
    return json.dumps(content | {name: text for name, text in others.items() if text}, ensure_ascii=False)


# Folders


def read_folder(folder: Path) -> str:
    """Return the tokenizer of a folder as text, with the tokens that transformers adds; "" without one.

    Errors   ValueError naming the part that is not supported, or a file that is damaged
    """
    try:
        if not (pipeline := _pipeline_in(folder)):
            return ""
        library = _library_of(pipeline, folder)
        _check(folder, library)
        settings = _add_tokens(library, folder)
        end = _end_of_text(folder, library, settings.get("eos_token"))
        others = {"chat_template": _template_in(folder, settings.get("chat_template"))}
        others |= {"bos_token": _content(settings.get("bos_token") or "")}
    except (AttributeError, KeyError, TypeError, UnicodeError) as error:
        got, advice = f"path={folder} ({type(error).__name__})", "Copy them again."
        raise refusal(ValueError, WHERE, "the tokenizer's files must be whole", got, advice) from error
    library.no_truncation()
    library.no_padding()
    return _text_of(library, end, others)


def _template_in(folder: Path, said: Any) -> str:
    """Return a folder's chat template: that of its own file, or what the settings say; of several, `default`."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    if isinstance(said, list):
        said = {template["name"]: template["template"] for template in said}.get("default")
    return said if isinstance(said, str) else ""


def _pipeline_in(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer.json, or one made from vocab.json and merges.txt; {} if these are missing too."""
    if pipeline := _read(folder, TOKENIZER):
        return pipeline
    if (folder / MERGES).is_file() and (ids := _read(folder, VOCABULARY)):
        lines = (folder / MERGES).read_text(encoding="utf-8", errors="replace").splitlines()
        return pipeline_of(ids, [line.split(" ") for line in lines if line and not line.startswith("#version")])
    wrong = [name for name in FOREIGN if (folder / name).is_file()]
    rule = f"a folder's tokenizer must be {TOKENIZER}, or {VOCABULARY} and {MERGES}"
    require(not wrong, WHERE, rule, {"path": folder, "found": ", ".join(wrong)}, OTHERS)
    return {}


def _read(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name, WHERE, name, SIZE_LIMIT) if (folder / name).is_file() else {}


def _check(folder: Path, library: Tokenizer) -> None:
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
        got = {"path": folder, "kind": type(getattr(library, name.split(".")[0])).__name__}
        require(holds, WHERE, f"{name} must be that of byte-level BPE", got, OTHERS)


def _library_of(pipeline: Mapping[str, Any], origin: Path | str) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(pipeline))
    except Exception as error:  # the library raises no other
        got, advice = {"path": origin, "error": short(error, 80)}, "Copy them again, or update tokenizers."
        raise refusal(ValueError, WHERE, "the tokenizer's files must be whole", got, advice) from error


def _add_tokens(library: Tokenizer, folder: Path) -> dict[str, Any]:
    """Add the tokens that the files beside tokenizer.json name; return the settings in tokenizer_config.json.

    Source   transformers, PreTrainedTokenizerBase._from_pretrained and PreTrainedTokenizerFast
    """
    settings, added = _read(folder, SETTINGS), _read(folder, ADDED)
    if "added_tokens_decoder" not in settings:
        settings |= _read(folder, SPECIALS)
    named = [settings[name] for name in NAMED if settings.get(name)]
    for name in LISTED:
        more = settings.get(name) or []
        named += more.values() if isinstance(more, dict) else more
    names = {_content(token) for token in named}
    if not (folder / TOKENIZER).is_file() and END_OF_TEXT in library.get_vocab().keys() - names:
        named.append(END_OF_TEXT)  # GPT-2's class adds it
    decoder = settings.get("added_tokens_decoder", {})
    tokens = [_token(decoder[i]) for i in sorted(decoder, key=lambda i: (len(i), i))]  # by their numbers
    contents = {token.content for token in (*library.get_added_tokens_decoder().values(), *tokens)}
    for name in sorted(added.keys() - contents, key=lambda name: added[name]):
        tokens.append(AddedToken(name, normalized=name not in names, special=name in names))
    contents |= added.keys()
    library.add_tokens(tokens + [_token(token, special=True) for token in named if _content(token) not in contents])
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
