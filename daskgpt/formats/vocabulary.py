"""Learned vocabularies: tiktoken's plain files (a line a token: base64 and id), known by a name of their content.

Special tokens have lines with a third word: `end` for end-of-text, `special` for others. A file without such lines has
one special token, end-of-text, whose id is behind all others.

The name says size and digest: `learned-4096-1f2e3d4c5b6a`. Configurations, manifests and messages hold the name; a
model's file holds the content as well, so that it is decoded wherever it goes. A vocabulary that was read once in a
process is found by its name from then on.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from daskgpt.config.errors import refusal, require

WHERE = "read_vocabulary"
END_OF_TEXT = "<|endoftext|>"
PREFIX = "learned-"
LARGEST = 2**16 - 1  # ids of two bytes, one of them end-of-text
SIZE_LIMIT = 2**26  # bytes of a file
GPT2 = "306cd27f03c1"  # digest of GPT-2's own vocabulary, whose name is gpt2


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of an encoding.

    ranks      ids of tokens, which are also the order of their merges
    specials   ids of special tokens, end-of-text the first
    content    of its file
    """

    ranks: dict[bytes, int]
    specials: dict[str, int]
    content: str = ""


_known: dict[str, Vocabulary] = {}


def is_learned(name: str) -> bool:
    """Return whether an encoding's name is that of a learned vocabulary."""
    return name.startswith(PREFIX)


def known_vocabulary(name: str) -> Vocabulary | None:
    """Return a vocabulary that was read in this process, None for any other name."""
    return _known.get(name)


def learned_vocabulary(name: str) -> Vocabulary:
    """Return a vocabulary that was read in this process.

    Errors   ValueError where it was not
    """
    rule, advice = "the learned vocabulary must be at hand", "Give its file: --encoding FOLDER/vocabulary.tiktoken."
    require(name in _known, "get_encoding", rule, {"encoding": name[:60]}, advice)
    return _known[name]


def learned_content(name: str) -> str:
    """Return the content of a learned vocabulary's file, "" for the name of another encoding.

    Errors   ValueError for a vocabulary that was not read in this process
    """
    return learned_vocabulary(name).content if is_learned(name) else ""


def written_vocabulary(ranks: Mapping[bytes, int], specials: Mapping[str, int] | None = None) -> str:
    """Return the content of a file, tokens in the order of their ids.

    specials   special tokens with their ids, end-of-text first; None = end-of-text alone, behind all others
    """
    listed = {} if specials in (None, {END_OF_TEXT: len(ranks)}) else specials or {}
    rows = [(i, token, "") for token, i in ranks.items()]
    rows += [(i, name.encode(), " special" if place else " end") for place, (name, i) in enumerate(listed.items())]
    return "".join(f"{base64.b64encode(token).decode()} {i}{kind}\n" for i, token, kind in sorted(rows))


def read_vocabulary(path: str | os.PathLike[str]) -> str:
    """Return the name of the vocabulary in a file, which is known from here on.

    Errors   OSError where it cannot be read; ValueError where it is no such file, its ids are not 0, 1, 2 ..., or a
             byte is missing
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        require(size <= SIZE_LIMIT, WHERE, "it must be a vocabulary", {"path": path, "bytes": size}, "Give another.")
        return know_vocabulary(path.read_text(encoding="ascii", errors="replace"), str(path))
    except OSError as error:
        got = f"path={path} ({error.strerror})"
        raise refusal(type(error), WHERE, "the file must be readable", got, "Check the path.") from error


def know_vocabulary(content: str, origin: str) -> str:
    """Return the name of a vocabulary, which is known from here on.

    content   of its file
    origin    where it comes from, for error messages

    Errors    ValueError as of read_vocabulary
    """
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    size = content.count("\n") + (" end\n" not in content)
    name = "gpt2" if digest == GPT2 else f"{PREFIX}{size}-{digest}"
    if name not in _known:
        _known[name] = _parsed(content, origin)
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
        except ValueError:  # of decoding as well
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
