"""Vocabularies of one's own: tiktoken's plain files (a line a token: base64 and id), known by a name of their content.

Special tokens have lines with a third word: `end` for end-of-text, `special` for others. A file without such lines has
one special token, end-of-text, whose id is behind all others.

The name says size and digest: `learned-4096-1f2e3d4c5b6a`. Configurations, manifests and messages hold the name; a
model's file holds the content beside it, so that it is decoded wherever it goes. What was read once in a process is
found by its name from then on.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from daskgpt.config.errors import refusal, require
from daskgpt.formats.gpt2_tokenizer import END_OF_TEXT

WHERE = "read_vocabulary"
PREFIX = "learned-"
LARGEST = 2**16 - 1  # ids of two bytes, one of them end-of-text
SIZE_LIMIT = 2**26  # bytes of a file
GPT2 = "306cd27f03c1"  # digest of GPT-2's own vocabulary, whose name is gpt2


@dataclass(frozen=True)
class Vocabulary:
    """Ids of tokens, which are also the order of their merges, and ids of special tokens, end-of-text the first."""

    ranks: Mapping[bytes, int]
    specials: Mapping[str, int]


_known: dict[str, Vocabulary] = {}
_contents: dict[str, str] = {}


def is_learned(name: str) -> bool:
    """Whether an encoding's name is that of a vocabulary of one's own."""
    return name.startswith(PREFIX)


def learned_size(name: str) -> int:
    """Token ids of a learned vocabulary that was read, end-of-text among them; 0 for any other name."""
    return len(_known[name].ranks) + len(_known[name].specials) if name in _known else 0


def learned_ranks(name: str) -> dict[bytes, int]:
    """Every token but special ones, with its id.

    Errors   ValueError for a vocabulary that was not read in this process
    """
    _require_known(name)
    return dict(_known[name].ranks)


def learned_specials(name: str) -> dict[str, int]:
    """Return the special tokens with their ids, end-of-text first.

    Errors   ValueError for a vocabulary that was not read in this process
    """
    _require_known(name)
    return dict(_known[name].specials)


def learned_content(name: str) -> str:
    """What its file holds, "" for a name that is none of a learned vocabulary.

    Errors   ValueError for a vocabulary that was not read in this process
    """
    if not is_learned(name):
        return ""
    _require_known(name)
    return _contents[name]


def _require_known(name: str) -> None:
    rule, advice = "the learned vocabulary must be at hand", "Give its file: --encoding FOLDER/vocabulary.tiktoken."
    require(name in _known, "get_encoding", rule, {"encoding": name[:60]}, advice)


def written_vocabulary(ranks: Mapping[bytes, int], specials: Mapping[str, int] | None = None) -> str:
    """The content of a file, tokens in the order of their ids.

    specials   special tokens with their ids, end-of-text first; None = end-of-text alone, behind all others
    """
    usual = {END_OF_TEXT: len(ranks)}
    listed = [] if specials in (None, usual) else list((specials or {}).items())
    rows = [(i, token, "") for token, i in ranks.items()]
    rows += [(i, name.encode(), " special" if place else " end") for place, (name, i) in enumerate(listed)]
    return "".join(f"{base64.b64encode(token).decode()} {i}{kind}\n" for i, token, kind in sorted(rows))


def read_vocabulary(path: str | os.PathLike[str]) -> str:
    """The name of the vocabulary in a file, which is known from here on.

    Errors   OSError where it cannot be read; ValueError where it is no such file, its ids are not 0, 1, 2 ..., or a
             byte is missing
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        require(size <= SIZE_LIMIT, WHERE, "it must be a vocabulary", {"path": path, "bytes": size}, "Give another.")
        content = path.read_text(encoding="ascii")
    except UnicodeDecodeError as error:
        rule, advice = "a vocabulary's lines must be base64 and an id", "Give a file that tiktoken reads."
        raise refusal(ValueError, WHERE, rule, {"path": path, "first wrong byte": error.start}, advice) from None
    except OSError as error:
        got = f"path={path} ({error.strerror})"
        raise refusal(type(error), WHERE, "the file must be readable", got, "Check the path.") from error
    return know_vocabulary(content, str(path))


def know_vocabulary(content: str, origin: str) -> str:
    """The name of a vocabulary, which is known from here on.

    content   of its file
    origin    where it comes from, for error messages

    Errors    ValueError as of read_vocabulary
    """
    found = hashlib.sha256(content.encode()).hexdigest()[:12]
    size = content.count("\n") + (" end\n" not in content)
    name = "gpt2" if found == GPT2 else f"{PREFIX}{size}-{found}"
    if name not in _known:
        _known[name] = _parsed(content, origin)
        _contents[name] = content
    return name


def _parsed(content: str, origin: str) -> Vocabulary:
    rule, advice = "a vocabulary's lines must be base64 and an id, from 0 on", "Give a file that tiktoken reads."
    ranks: dict[bytes, int] = {}
    specials: dict[str, int] = {}
    for number, line in enumerate(content.splitlines()):
        try:
            token, i, *kind = line.split()
            known = i.isdigit() and int(i) == number and kind in ([], ["special"], ["end"])
            value = base64.b64decode(token, validate=True)
            if kind:
                own = {value.decode(): number}
                specials = own | specials if kind == ["end"] else specials | own
            else:
                ranks[value] = number
        except (ValueError, binascii.Error):
            known = False
        require(known, WHERE, rule, {"path": origin, "line": f"{number + 1} ({line[:40]!r})"}, advice)
        differ = len(ranks) + len(specials) == number + 1
        require(differ, WHERE, "tokens must differ", {"path": origin, "line": number + 1}, advice)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    rule, whole = (
        "every single byte must be a token",
        not missing and content.endswith("\n") and (not specials or " end\n" in content),
    )
    require(whole, WHERE, rule, {"path": origin, "missing": missing[:1] or "line end"}, advice)
    rule, got = f"it must have at most {LARGEST} tokens", {"path": origin, "tokens": len(ranks)}
    require(len(ranks) <= LARGEST, WHERE, rule, got, "Learn a smaller one.")
    return Vocabulary(ranks, specials or {END_OF_TEXT: len(ranks)})
