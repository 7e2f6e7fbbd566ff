"""Token files: llm.c's, a header of 256 int32 and then ids, little-endian; nanoGPT's, ids without a header; and folders
of llm.c's, with a manifest, and what a preparation keeps there until it is complete.

    DIR/train_000000.bin ...       llm.c's token files, numbered as the partitions of the text
        val_000000.bin ...
        vocabulary.json            if it was learned, or is that of a Hugging Face folder
        manifest.json              written last: without it the folder is incomplete
        .journal.json              digest of the inputs and settings, which are the folder's from the beginning on;
                                   locked while a process writes the folder
        .partition_000000.json ... what is in the files of a partition, written after them; removed at the end

A part of a partition that has no text has no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import refusing, require
from daskgpt.config.files import digest_of, digest_of_file, locked, remove, sync, sync_folder, write_file, written
from daskgpt.formats.encoding import is_learned, read_vocabulary
from daskgpt.formats.stored_model import mapped, require_file

HEADER_BYTES = 256 * 4
TOKENS, WIDE_TOKENS = 20240520, 20240801
KINDS = {  # kinds of llm.c's files, by the first number
    20240326: "model",
    20240327: "debug state",
    20240328: "tokenizer",
    TOKENS: "token file",
    WIDE_TOKENS: "token file of 4-byte ids",
    20240522: "evaluation set",
    20240527: "train state; give the model file beside it",
}
# Dtypes of the ids in a token file, and its version; the wider ones are Llama 3's.
TOKEN_DTYPES, TOKEN_VERSIONS = {TOKENS: "<u2", WIDE_TOKENS: "<u4"}, {TOKENS: 1, WIDE_TOKENS: 7}
LARGEST_COUNT = 2**31 - 1  # tokens of a file
META = "meta.pkl"  # nanoGPT's file of the characters behind the ids


def token_header(dtype: np.dtype, count: int) -> bytes:
    """Return the header of a file of `count` tokens."""
    kind = TOKENS if dtype.itemsize == 2 else WIDE_TOKENS
    return np.array([kind, TOKEN_VERSIONS[kind], count, *[0] * 253], "<i4").tobytes()


def read_tokens(path: str | Path) -> np.ndarray:
    """Return the tokens of a file: llm.c's, or ids of two bytes without a header, as nanoGPT writes them.

    Shapes   (N,)
    Dtype    that of the file, read-only
    Cost     the file is mapped, not read
    Errors   FileNotFoundError if there is no file; ValueError for a file that is not a complete token file: another
             kind or version of llm.c's files, truncated, or with bytes after the last token
    """
    path, where = Path(path), "read_tokens"
    require_file(path, where)
    size = path.stat().st_size
    got = {"path": path, "bytes": size}
    header = np.fromfile(path, "<i4", count=256)
    kind, version, count = [*header[:3].tolist(), 0, 0, 0][:3]
    # A header, good or damaged, is recognized by its first number, or by zeros after the eighth: ids alone would need
    # some 480 ids of 0 at the beginning.
    zeros = header.size == 256 and np.count_nonzero(header[8:]) <= 8
    if not zeros and kind not in KINDS:
        rule, advice = "ids without a header must be 2 bytes each", "It is truncated, or holds no token ids."
        require(size > 0 and size % 2 == 0, where, rule, got, advice)
        return mapped(path, "<u2")
    rule, advice = f"the file must begin with a header of {HEADER_BYTES} bytes", "It is truncated."
    require(header.size == 256, where, rule, got, advice)
    advice = f"It is an llm.c {KINDS[kind]}." if kind in KINDS else "It is not an llm.c file, or is damaged."
    require(kind in TOKEN_DTYPES, where, "the file must be an llm.c token file", {"path": path, "magic": kind}, advice)
    rule, advice = f"the version must be {TOKEN_VERSIONS[kind]}", "Write the file again with a newer llm.c."
    require(version == TOKEN_VERSIONS[kind], where, rule, {"path": path, "version": version}, advice)
    require(count > 0, where, "the file must hold tokens", got | {"count": count}, "Write it again.")
    expected = HEADER_BYTES + np.dtype(TOKEN_DTYPES[kind]).itemsize * count
    problem = "The file is truncated" if size < expected else f"{size - expected} bytes follow the last value"
    rule, advice = f"the file must have {expected} bytes, by its header", f"{problem}: copy or write it again."
    require(size == expected, where, rule, got, advice)
    return mapped(path, TOKEN_DTYPES[kind], HEADER_BYTES)


# Folders

WHERE = "prepare"
MANIFEST, JOURNAL, VOCABULARY_FILE = "manifest.json", ".journal.json", "vocabulary.json"
VERSION, KIND = 1, "daskgpt tokens"
PARTS = ("train", "val")
AGAIN = "Remove the folder, and prepare it again."


@dataclass
class Shard:
    """A file of tokens, with the SHA-256 of the whole file."""

    file: str
    tokens: int
    sha256: str


@dataclass
class Part:
    """The tokens to train on, or those held out.

    bytes   of its text in UTF-8, without end-of-text
    """

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)

    def add(self, other: Part) -> None:
        """Append what follows."""
        self.tokens += other.tokens
        self.documents += other.documents
        self.bytes += other.bytes
        self.shards += other.shards


@dataclass
class Manifest:
    """The inputs and settings that decide the tokens of a folder, and the results, which are a pure function of them.

    encoding     name; the file of a learned one lies in the folder
    ids          number of ids of the encoding, with end-of-text, the last one
    settings     settings that decide the tokens
    inputs       number, bytes, and digest of names and sizes of the files
    """

    train: Part
    val: Part
    encoding: str
    ids: int
    settings: dict[str, Any]
    inputs: dict[str, Any]


def is_prepared(folder: Path) -> bool:
    """Return whether a preparation wrote a folder, completely or in part."""
    if (folder / JOURNAL).is_file():
        return True
    if not (folder / MANIFEST).is_file():
        return False
    with (folder / MANIFEST).open("rb") as file:  # other programs have files of this name, too
        return KIND.encode() in file.read(2**12)


def encoding_of_folder(folder: Path) -> str:
    """Return the name of a folder's encoding, which is known from here on.

    Errors   as of `read_manifest`; ValueError if its vocabulary is another one than that of its tokens
    """
    encoding = read_manifest(folder).encoding
    name = read_vocabulary(folder / VOCABULARY_FILE) if is_learned(encoding) else encoding
    rule, got = f"the vocabulary must be unchanged, {encoding}", {"folder": folder, "encoding": name}
    require(name == encoding, WHERE, rule, got, AGAIN)
    return encoding


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Errors   FileNotFoundError if it has none; ValueError if it is damaged or of another version
    """
    path = folder / MANIFEST
    rule, advice = "the folder must hold prepared tokens", "Name one that daskgpt.prepare wrote."
    if (folder / JOURNAL).is_file():
        rule = "the preparation of the folder must be complete"
        advice = "Give the same daskgpt.prepare command again: it continues."
    require(path.is_file(), WHERE, rule, {"folder": folder}, advice, FileNotFoundError)
    rule, advice = "the manifest must be unchanged", AGAIN
    with refusing((ValueError, TypeError, KeyError, AttributeError), WHERE, rule, {"path": path}, advice):
        fields = json.loads(path.read_bytes())
        check = fields.pop("check")
    require(check == digest_of(fields), WHERE, rule, {"path": path, "check": str(check)[:12]}, advice)
    rule, got = f"its version must be {VERSION}", {"path": path, "version": fields.pop("version")}
    require(got["version"] == VERSION, WHERE, rule, got, "A newer daskgpt wrote it: use that version.")
    del fields["kind"]
    with refusing(TypeError, WHERE, "the manifest must be of this version", {"path": path}, advice):
        return Manifest(**fields | {name: _part(fields[name]) for name in PARTS})


def _part(fields: dict[str, Any]) -> Part:
    """Return a part from its JSON."""
    return Part(**fields | {"shards": [Shard(**shard) for shard in fields["shards"]]})


@contextmanager
def begun_folder(folder: Path, decides: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a folder, made if it is missing, into which no other process writes meanwhile.

    decides   inputs and settings that decide the content

    Errors    ValueError if it has other content than a preparation of them; RuntimeError if another process writes it;
              OSError if the system refuses
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    rule, advice = "the folder must be new, empty, or left by the same command", "Name another with --out."
    require(not names or JOURNAL in names, WHERE, rule, {"out": folder}, advice)
    content = json.dumps({"decides": digest_of(decides)}).encode()
    with written(folder, WHERE):
        folder.mkdir(parents=True, exist_ok=True)
        journal = locked(folder / JOURNAL, WHERE, "no other process must write the folder")
    with journal:
        journal.seek(0)
        begun = journal.read()
        rule, advice = "the folder must not be of other inputs or settings", "Name another with --out, or remove it."
        require(begun in (b"", content), WHERE, rule, {"out": folder}, advice)
        if not begun:
            with written(folder, WHERE):
                journal.write(content)
                sync(journal.fileno())  # before any partition: an empty journal would pass for that of other settings
        yield folder


def complete(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which completes a folder, and remove what is not needed any more.

    Errors   OSError if the system refuses
    """
    fields = {"version": VERSION, "kind": KIND, **asdict(manifest)}
    content = json.dumps(fields | {"check": digest_of(fields)}, indent=1, ensure_ascii=False).encode() + b"\n"
    with written(folder, WHERE):
        sync_folder(folder)
    write_file(folder / MANIFEST, content, WHERE)
    for path in (*folder.glob(".partition_*.json"), *folder.glob(".*.tmp")):
        remove(path)


def write_contents(folder: Path, number: int, parts: list[Part]) -> None:
    """Write what is in the files of a partition, which are complete. Errors   OSError if the system refuses"""
    contents = dict(zip(PARTS, map(asdict, parts)))
    write_file(_contents_path(folder, number), json.dumps(contents).encode(), WHERE)


def read_contents(folder: Path, number: int, *, compare: bool = False) -> list[Part] | None:
    """Return what is in the files of a partition; None if they are not complete.

    compare   whether files that have changed since count as not complete, which reads all of them
    """
    try:
        contents = json.loads(_contents_path(folder, number).read_bytes())
        parts = [_part(contents[name]) for name in PARTS]
        shards = [shard for part in parts for shard in part.shards] if compare else []
        unchanged = all(digest_of_file(folder / shard.file) == shard.sha256 for shard in shards)
    except (OSError, ValueError, TypeError, KeyError):  # missing, or damaged
        return None
    return parts if unchanged else None


def _contents_path(folder: Path, number: int) -> Path:
    return folder / f".partition_{number:06}.json"
