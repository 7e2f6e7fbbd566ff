"""Tokenizers in Hugging Face's folders: byte-level BPE with any pipeline, which the library `tokenizers` computes.

A tokenizer is kept as one text, which is stored with a model: JSON with `end_of_text`, the token that ends a document,
`tokenizer`, the content of a tokenizer.json that has all added tokens, `chat_template` and `bos_token`, the token that
begins a text, if it has them, and for a vocabulary that was learned here `learned`, since its end-of-text is ordinary
text where it occurs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from daskgpt.config.errors import refusal, require
from daskgpt.formats.byte_characters import BYTES, END_OF_TEXT, decoded
from daskgpt.formats.stored_model import read_json, short

TOKENIZER, SETTINGS, SPECIALS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
# Files of tokenizers in other forms.
FOREIGN = ("merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "tekken.json")
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
        with whole_files(origin):
            fields = json.loads(content)
            end, self.learned = fields["end_of_text"], bool(fields.get("learned"))
            self.chat_template: str = fields.get("chat_template", "")
            self.content, self.library = content, Tokenizer.from_str(json.dumps(fields["tokenizer"]))
        ids: dict[str, int] = self.library.get_vocab()
        require(end in ids, WHERE, "end_of_text must name a token", {"path": origin, "end_of_text": end}, OTHERS)
        added = self.library.get_added_tokens_decoder()
        bos = fields.get("bos_token", end if self.learned else "")
        self.bos_token: str = bos if bos in ids else ""
        self.eot_token, self.n_vocab = ids[end], max(ids.values()) + 1
        self.name = f"{PREFIX}{self.n_vocab}-{digest}"
        self.specials = {end: ids[end]} | {token.content: i for i, token in added.items() if token.special}
        self.tokens = [b""] * self.n_vocab
        for token, i in ids.items():
            plain = (i in added and len(token) > 1) or not BYTES.keys() >= set(token)
            self.tokens[i] = token.encode() if plain else decoded(token)

    @property
    def ranks(self) -> dict[bytes, int]:
        """The tokens but end-of-text, with their ids, which are in the order of merges if it was learned here."""
        return {token: i for i, token in enumerate(self.tokens) if i != self.eot_token}

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


def byte_level_bpe(ids: Mapping[str, int], merges: Sequence[Sequence[str]], splitting: str = "gpt-2") -> Tokenizer:
    """Return a tokenizer with the given tokens, which splits text as GPT-2's or as `splitting`.

    Errors   Exception, as the library raises it
    """
    first, *others = SPLITTINGS[splitting]
    split = {"type": "Sequence", "pretokenizers": [first, *others]} if others else first
    model = {"type": "BPE", "vocab": ids, "merges": merges}
    return Tokenizer.from_str(json.dumps({"pre_tokenizer": split, "decoder": _LEVEL, "model": model}))


def content_of(library: Tokenizer, end_of_text: str, **others: str | bool) -> str:
    """Return a tokenizer as the text that is kept of it.

    others   `learned`, `chat_template` and `bos_token`, of which empty ones are left out
    """
    fields = {"end_of_text": end_of_text, "tokenizer": json.loads(library.to_str())}
    return json.dumps(fields | {name: value for name, value in others.items() if value}, ensure_ascii=False)


def splitting_of(pipeline: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a pipeline splits text; "" if it has none."""
    parts = pipeline["pre_tokenizer"].get("pretokenizers", [pipeline["pre_tokenizer"]])
    same = [part | {"trim_offsets": True} if part["type"] == "ByteLevel" else part for part in parts]
    return "" if pipeline["normalizer"] else next((name for name, form in SPLITTINGS.items() if form == same), "")


# Folders


def read_folder(folder: Path) -> str:
    """Return the tokenizer of a folder as text, with the tokens that transformers adds; "" without one.

    Errors   ValueError naming the part that is not supported, or a file that is damaged
    """
    if not (folder / TOKENIZER).is_file():
        others = [name for name in FOREIGN if (folder / name).is_file()]
        rule, advice = f"a folder's tokenizer must be {TOKENIZER}", f"transformers writes it. {OTHERS}"
        require(not others, WHERE, rule, {"path": folder, "files": ", ".join(others)}, advice)
        return ""
    with whole_files(folder):
        library = Tokenizer.from_str(json.dumps(_read(folder, TOKENIZER)))
        check_byte_level(folder, library)
        settings = _add_tokens(library, folder)
        end, bos = _end_of_text(folder, library, settings.get("eos_token")), _content(settings.get("bos_token") or "")
        template = _template_in(folder, settings.get("chat_template"))
    library.no_truncation()
    library.no_padding()
    return content_of(library, end, chat_template=template, bos_token=bos)


def _template_in(folder: Path, said: Any) -> str:
    """Return a folder's chat template: that of its own file, or what the settings say; of several, `default`."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    if isinstance(said, list):
        said = {template["name"]: template["template"] for template in said}.get("default")
    return said if isinstance(said, str) else ""


@contextmanager
def whole_files(origin: Path | str) -> Iterator[None]:
    """Raise the errors of files with another content than they should have in the common form."""
    try:
        yield
    except Exception as error:  # the library raises no other
        if type(error) is ValueError or isinstance(error, OSError):  # in this form already
            raise
        got = {"path": origin, "error": short(f"{type(error).__name__}: {error}", 80)}
        advice = "Copy them again, or update tokenizers."
        raise refusal(ValueError, WHERE, "the tokenizer's files must be whole", got, advice) from error


def _read(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name, WHERE, name, SIZE_LIMIT) if (folder / name).is_file() else {}


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
