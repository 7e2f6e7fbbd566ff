"""Vocabularies that are known by a digest of their content: learned ones, and those of Hugging Face's folders.

A learned vocabulary is a file of tiktoken with a line per token, base64 and id. Special tokens have lines with a third
word: `end` for end-of-text, `special` for others. A file without such lines has one special token, end-of-text, with
the last id. The vocabularies of Hugging Face's folders are JSON (`formats/tokenizer_folder`).

A name has size and digest: `learned-4096-1f2e3d4c5b6a`. Configurations, manifests and messages hold the name; a
model's file also holds the content, so that its text can be decoded anywhere. Once a process has read a vocabulary, it
is available by its name.
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

from tokenizers import AddedToken, Tokenizer

from daskgpt.config.errors import nearest, require
from daskgpt.config.files import readable
from daskgpt.formats.byte_characters import END_OF_TEXT, named
from daskgpt.formats.stored_model import FilePath
from daskgpt.formats.tokenizer_folder import (
    MERGES,
    PREFIX,
    SETTINGS,
    SIZE_LIMIT,
    TOKENIZER,
    VOCABULARY,
    LibraryEncoding,
    pipeline_of,
    read_folder,
    splitting_of,
)

WHERE = "read_vocabulary"
ENCODINGS = ["bytes", "gpt2"]
GPT2, GPT2_IDS = "306cd27f03c1", 50257  # digest and size of GPT-2's own vocabulary, whose name is gpt2


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

    @property
    def n_vocab(self) -> int:
        """Number of ids."""
        return len(self.ranks) + len(self.specials)


# Vocabularies by name: that of bytes, and those that were read in this process.
KNOWN: dict[str, Vocabulary | LibraryEncoding] = {
    "bytes": Vocabulary({bytes([byte]): byte for byte in range(256)}, {END_OF_TEXT: 256})
}


def is_learned(name: str) -> bool:
    """Return whether an encoding's name is that of a learned vocabulary."""
    return name.startswith(PREFIX)


def known_vocabulary(name: str) -> Vocabulary | LibraryEncoding:
    """Return a vocabulary that was read in this process, or that of bytes.

    Errors   ValueError for another name
    """
    advice = "Give its file: --encoding FOLDER/vocabulary.tiktoken." if is_learned(name) else nearest(name, ENCODINGS)
    require(name in KNOWN, "get_encoding", "the vocabulary must be available", {"encoding": name[:60]}, advice)
    return KNOWN[name]


def written_vocabulary(ranks: Mapping[bytes, int]) -> str:
    """Return the content of a file of tiktoken, tokens in the order of their ids; end-of-text has the last one."""
    rows = sorted((i, token) for token, i in ranks.items())
    return "".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in rows)


def read_vocabulary(path: FilePath) -> str:
    """Read the vocabulary in a file, and return its name, by which it is available from here on.

    Errors   OSError if it cannot be read; ValueError if it is not such a file, its ids are not 0, 1, 2 ..., or a byte
             is missing
    """
    with readable(path, WHERE):
        size = os.path.getsize(path)
        require(size <= SIZE_LIMIT, WHERE, "it must be a vocabulary", {"path": path, "bytes": size}, "Give another.")
        content = Path(path).read_text(encoding="utf-8", errors="replace")
    return know_vocabulary(content, str(path))


def know_vocabulary(content: str, origin: str) -> str:
    """Register a vocabulary, and return its name, by which it is available from here on.

    content   content of its file
    origin    where it comes from, for error messages

    Errors    ValueError as `read_vocabulary`
    """
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    if not (name := next((name for name in KNOWN if name.endswith(f"-{digest}")), "")):
        json_text = content.startswith("{")
        vocabulary = LibraryEncoding(digest, content, origin) if json_text else _parsed(content, origin)
        name = "gpt2" if digest == GPT2 else f"{PREFIX}{vocabulary.n_vocab}-{digest}"
        KNOWN[name] = vocabulary
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
    return Vocabulary(ranks, specials or {END_OF_TEXT: len(ranks)}, content)


# Hugging Face's files


def encoding_in(folder: Path) -> str:
    """Read the tokenizer of a folder, and return the name of its encoding; "" without one.

    Errors   ValueError naming the difference if it is not byte-level BPE, or if it is damaged
    """
    content = read_folder(folder)
    return encoding_of_content(content, str(folder)) if content else ""


def encoding_of_content(content: str, origin: str) -> str:
    """Return the name of the encoding of a tokenizer in Hugging Face's form; GPT-2's own one is gpt2.

    origin   where it comes from, for error messages
    """
    name = know_vocabulary(content, origin)
    encoding = KNOWN[name]
    if encoding.n_vocab == GPT2_IDS and isinstance(encoding, LibraryEncoding):
        plain = written_vocabulary({token: i for i, token in enumerate(encoding.tokens[:-1])})
        added, is_gpt2 = len(encoding.specials), hashlib.sha256(plain.encode()).hexdigest().startswith(GPT2)
        if is_gpt2 and added == 1 and splitting_of(json.loads(encoding.library.to_str())) == "gpt-2":
            return know_vocabulary(plain, origin)
    return name


def tokenizer_files(vocabulary: Vocabulary | LibraryEncoding, positions: int) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: tokenizer.json, tokenizer_config.json, and for a vocabulary of tiktoken
    also vocab.json and merges.txt.

    positions   longest sequence of the model [tokens]

    Cost        a second for GPT-2's 50,257 tokens
    Errors      ValueError if a token is not a merge of two earlier ones
    """
    library, end = library_of(vocabulary), next(iter(vocabulary.specials))
    settings: dict[str, object] = {"bos_token": bos_of(vocabulary) or None, "eos_token": end, "unk_token": end}
    settings |= {"model_max_length": positions, "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {TOKENIZER: library.to_str().encode()}
    if isinstance(vocabulary, LibraryEncoding) and vocabulary.chat_template:
        settings["chat_template"] = vocabulary.chat_template
    if isinstance(vocabulary, Vocabulary):
        settings |= {"add_prefix_space": False, "tokenizer_class": "GPT2Tokenizer"}
        model = json.loads(files[TOKENIZER])["model"]
        lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
        files |= {VOCABULARY: _json(model["vocab"]), MERGES: ("\n".join(lines) + "\n").encode()}
    return files | {SETTINGS: _json(settings)}


def _json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def bos_of(vocabulary: Vocabulary | LibraryEncoding) -> str:
    """Return the token that begins a text; "" for a Hugging Face tokenizer without one, end-of-text for others."""
    return vocabulary.bos_token if isinstance(vocabulary, LibraryEncoding) else next(iter(vocabulary.specials))


def library_of(vocabulary: Vocabulary | LibraryEncoding) -> Tokenizer:
    """Return a vocabulary as a tokenizer of the library `tokenizers`.

    Errors   ValueError if a token is not a merge of two earlier ones
    """
    if isinstance(vocabulary, LibraryEncoding):
        return vocabulary.library
    specials = sorted(vocabulary.specials, key=lambda name: vocabulary.specials[name])
    ids = {named(token): i for token, i in vocabulary.ranks.items()} | vocabulary.specials
    library = Tokenizer.from_str(json.dumps(pipeline_of(ids, merges_of(vocabulary.ranks))))
    library.add_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return library


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return the two tokens from which each longer token was merged, in order. They are what all earlier merges make of
    its bytes.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [token[n : n + 1] for n in range(len(token))]
            while len(parts) > 2:
                least, place = min((ranks.get(a + b, rank), n) for n, (a, b) in enumerate(pairwise(parts)))
                rule, advice = "every token must be a merge of two before it", "Give ids in the order of merges."
                require(least < rank, "tokenizer_files", rule, {"id": rank}, advice)
                parts[place : place + 2] = [parts[place] + parts[place + 1]]
            merges.append((named(parts[0]), named(parts[1])))
    return merges
