"""A block's documents, and to which part each belongs: what is held out for validation follows from a text's hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from daskgpt.config.errors import refusal, require
from daskgpt.data.corpus.cuts import passages
from daskgpt.data.corpus.sources import RECORDS, WHERE, Block, Piece, content_of

PASSAGE_BYTES = 2**14  # of a text file that is one document, of which whole passages are held out
REFUSE, REPLACE, SKIP = "refuse", "replace", "skip"
POLICIES = (REFUSE, REPLACE, SKIP)


@dataclass(frozen=True)
class Reading:
    """How documents are found in files.

    field         of JSONL's objects
    separator     between the documents of a text file, b"" where a file is one
    undecodable   what happens to bytes that are no UTF-8: refuse, replace, or skip (the document)
    fraction      share of documents, and of passages of text files, that is held out
    """

    field: str
    separator: bytes
    undecodable: str
    fraction: float


@dataclass(frozen=True)
class Passage:
    """A document, or some of a text file's.

    size   of its text in UTF-8 [bytes]
    opens  whether it does not go on from what stands before it
    """

    text: str
    size: int
    opens: bool
    held_out: bool


def passages_of(block: Block, reading: Reading) -> Iterator[Passage | None]:
    """The passages of a block in order; None for one that was skipped.

    Errors   ValueError for records that are none and bytes that cannot be decoded, OSError for files
    """
    for piece in block:
        opens = piece.start == 0  # else a text goes on from the block before
        for raw, place, whole in _raw(piece, reading):
            text = raw if isinstance(raw, str) else _decoded(raw, piece, place, reading)
            text = _encodable(text, piece, place, reading) if text is not None else None
            if text is None:
                yield None
                opens = True
                continue
            opens = opens or whole
            if opens and not text.strip():
                continue
            encoded = raw if isinstance(raw, bytes) and reading.undecodable != REPLACE else text.encode()
            yield Passage(text, len(encoded), opens, _is_held_out(encoded, reading.fraction))
            opens = False


def _raw(piece: Piece, reading: Reading) -> Iterator[tuple[bytes | str, int, bool]]:
    """What a piece consists of: text or bytes, where it stands, and whether it is a document of its own."""
    if isinstance(piece.content, tuple):
        yield from ((text, piece.start + number, True) for number, text in enumerate(piece.content))
        return
    content, start = content_of(piece, reading.separator)
    if piece.kind == RECORDS:
        place = start
        for line in content.split(b"\n"):
            if line.strip():
                yield _field(line, piece, place, reading), place, True
            place += len(line) + 1
    elif reading.separator:
        place = start
        for document in content.split(reading.separator):
            yield document.strip(b"\r\n"), place, True
            place += len(document) + len(reading.separator)
    else:
        for low, high in passages(content, PASSAGE_BYTES):
            yield content[low:high], start + low, False


def _field(line: bytes, piece: Piece, place: int, reading: Reading) -> str | bytes:
    """The text of a record; the record as it is where it cannot be decoded."""
    try:
        text = line.decode(errors="replace" if reading.undecodable == REPLACE else "strict")
    except UnicodeDecodeError:
        return line
    got: dict[str, Any] = {"file": piece.path, "byte": place}
    try:
        known = json.loads(text)
    except ValueError as error:
        raise refusal(ValueError, WHERE, "every line must be JSON", got | {"line": repr(text[:40])}, _JSON) from error
    names = ", ".join(known)[:80] if isinstance(known, dict) else type(known).__name__
    holds = isinstance(known, dict) and reading.field in known
    rule = "every record must have the field"
    require(holds, WHERE, rule, got | {"field": reading.field, "fields": names}, "Name it by --field.")
    value = known[reading.field]
    rule = "the field of every record must be text"
    require(isinstance(value, str), WHERE, rule, got | {reading.field: repr(value)[:40]}, "Name another by --field.")
    return str(value)


_JSON = "JSONL has one object a line; give other texts an ending such as .txt."


def _decoded(raw: bytes, piece: Piece, place: int, reading: Reading) -> str | None:
    try:
        return raw.decode(errors="replace" if reading.undecodable == REPLACE else "strict")
    except UnicodeDecodeError as error:
        _require_skipped(f"file={piece.path}, byte={place + error.start}", reading)
        return None


def _encodable(text: str, piece: Piece, place: int, reading: Reading) -> str | None:
    """The text, where it is one: JSON may hold halves of characters."""
    try:
        if not text.isascii():
            text.encode()
        return text
    except UnicodeEncodeError:
        if reading.undecodable == REPLACE:
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        _require_skipped(f"file={piece.path}, byte={place} (half of a character)", reading)
        return None


def _require_skipped(got: str, reading: Reading) -> None:
    """Errors   ValueError unless what cannot be decoded is skipped"""
    advice = "Convert it, or say --undecodable replace or skip."
    require(reading.undecodable == SKIP, WHERE, "texts must be UTF-8", got, advice)


def _is_held_out(encoded: bytes, fraction: float) -> bool:
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64
