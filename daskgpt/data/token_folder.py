"""A folder of token files: its manifest, and what a preparation keeps there until it is complete.

    DIR/train_000000.bin ...       llm.c's token files, numbered as the partitions of the text
        val_000000.bin ...
        vocabulary.json            if it was learned, or is that of a Hugging Face folder
        manifest.json              written last: without it the folder is incomplete
        .journal.json              digest of the inputs and settings, which are the folder's from the beginning on
        .partition_000000.json ... what is in the files of a partition, written after them; removed at the end

A part of a partition that has no text has no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from daskgpt.config.errors import refusing, require
from daskgpt.config.files import digest_of, digest_of_file, locked, remove, replacing, sync_folder, write_file, written
from daskgpt.formats.encoding import is_learned, read_vocabulary
from daskgpt.formats.llmc import HEADER_BYTES, LARGEST_COUNT, token_header

WHERE = "prepare"
MANIFEST, JOURNAL, LOCK, VOCABULARY_FILE = "manifest.json", ".journal.json", ".lock", "vocabulary.json"
VERSION, KIND = 1, "daskgpt tokens"
PARTS = ("train", "val")


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
class Contents:
    """The tokens of a partition, or of a folder."""

    train: Part = field(default_factory=Part)
    val: Part = field(default_factory=Part)


@dataclass
class Manifest(Contents):
    """The inputs and settings that decide the tokens of a folder, and the results, which are a pure function of them.

    encoding     name; the file of a learned one lies in the folder
    ids          number of ids of the encoding, with end-of-text, the last one
    settings     settings that decide the tokens
    inputs       number, bytes, and digest of names and sizes of the files
    """

    encoding: str = ""
    ids: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)


def is_prepared(folder: Path) -> bool:
    """Return whether a preparation wrote a folder, completely or in part."""
    manifest = folder / MANIFEST
    if (folder / JOURNAL).is_file():
        return True
    if not manifest.is_file():
        return False
    with manifest.open("rb") as file:  # other programs have files of this name, too
        return KIND.encode() in file.read(2**12) or any(folder.glob(f"{PARTS[0]}_*.bin"))


def encoding_of(folder: Path) -> str:
    """Return the name of a folder's encoding, which is known from here on.

    Errors   as of `read_manifest`; ValueError if its vocabulary is another one than that of its tokens
    """
    encoding = read_manifest(folder).encoding
    name = read_vocabulary(folder / VOCABULARY_FILE) if is_learned(encoding) else encoding
    rule, got = f"the vocabulary must be unchanged, {encoding}", {"folder": folder, "encoding": name}
    require(name == encoding, WHERE, rule, got, "Prepare it again.")
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
    rule, advice = "the manifest must be unchanged", "Prepare it again."
    with refusing((ValueError, TypeError, KeyError, AttributeError), WHERE, rule, {"path": path}, advice):
        fields = json.loads(path.read_bytes())
        check = fields.pop("check")
    require(check == digest_of(fields), WHERE, rule, {"path": path, "check": str(check)[:12]}, advice)
    rule, got = f"its version must be {VERSION}", {"path": path, "version": fields.pop("version")}
    require(got["version"] == VERSION, WHERE, rule, got, "A newer daskgpt wrote it: use that version.")
    del fields["kind"]
    fields.pop("skipped", 0)  # of earlier versions
    return Manifest(**_parsed(fields))


@contextmanager
def begun_folder(folder: Path, decides: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a folder, made if it is missing, into which no other process writes meanwhile.

    decides   inputs and settings that decide the content

    Errors    ValueError if it has other content than a preparation of them; RuntimeError if another process writes it;
              OSError if the system refuses
    """
    content = json.dumps({"decides": digest_of(decides)}).encode()
    _has_journal(folder)  # nothing is written into a folder of others
    with written(folder, WHERE):
        folder.mkdir(parents=True, exist_ok=True)
        lock = locked(folder / LOCK, WHERE, "no other process must write the folder")
    with lock:
        if _has_journal(folder):  # another process may have written it before the lock
            same = (folder / JOURNAL).read_bytes() == content
            rule = "the folder must not be of other inputs or settings"
            require(same, WHERE, rule, {"out": folder}, "Name another with --out, or remove it.")
        else:
            write_file(folder / JOURNAL, content, WHERE)
        yield folder


def _has_journal(folder: Path) -> bool:
    """Return whether a preparation has begun a folder. Errors   ValueError if it has other content"""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    fresh = all(name == LOCK or (name.startswith(".") and name.endswith(".tmp")) for name in names)
    good = (fresh or JOURNAL in names) and (folder.is_dir() or not folder.exists())
    rule, advice = "the folder must be new, empty, or left by the same command", "Name another with --out."
    require(good, WHERE, rule, {"out": folder}, advice)
    return JOURNAL in names


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


def write_contents(folder: Path, number: int, contents: Contents) -> None:
    """Write the contents of a partition, whose files are complete. Errors   OSError if the system refuses"""
    write_file(folder / f".partition_{number:06}.json", json.dumps(asdict(contents)).encode(), WHERE)


def read_contents(folder: Path, number: int) -> Contents | None:
    """Return the contents of a partition; None if its files are not complete."""
    path = folder / f".partition_{number:06}.json"
    return Contents(**_parsed(json.loads(path.read_bytes()))) if path.is_file() else None


def _parsed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest, or of contents, from their JSON."""
    for name in PARTS:
        shards = [Shard(**shard) for shard in content[name]["shards"]]
        content[name] = Part(**content[name] | {"shards": shards})
    return content


class TokenWriter:
    """Writes the tokens of one part of a partition into a file, which exists only if there are any.

    part   what was written; its shard has its digest when the file is complete
    """

    def __init__(self, files: ExitStack, path: Path, dtype: np.dtype[Any]) -> None:
        """files   completes the file when it is closed, and removes it after an error
        dtype   of tokens, uint16 or uint32
        """
        self.files, self.path, self.dtype, self.part = files, path, dtype.newbyteorder("<"), Part()

    def append(self, tokens: np.ndarray, size: int) -> None:
        """Append the tokens of a document.

        size     of its text [bytes]

        Errors   OSError if the system refuses, with the path
        """
        if not self.part.shards:
            self.part.shards.append(Shard(self.path.name, 0, ""))
            self.file = self.files.enter_context(_token_file(self.path, self.part.shards[0], self.dtype))
        self.file.write(np.ascontiguousarray(tokens, self.dtype).data)
        self.part.shards[0].tokens += tokens.size
        self.part.add(Part(tokens.size, 1, size))


@contextmanager
def _token_file(path: Path, shard: Shard, dtype: np.dtype[Any]) -> Iterator[BinaryIO]:
    """Yield the file of a shard behind its header, which is written in the end, when its number of tokens is known."""
    with replacing(path, WHERE) as file:
        file.seek(HEADER_BYTES)
        yield file
        rule, got = f"a token file must have at most {LARGEST_COUNT} tokens", {"path": path, "tokens": shard.tokens}
        require(shard.tokens <= LARGEST_COUNT, WHERE, rule, got, "Divide the compressed file.")
        file.seek(0)
        file.write(token_header(dtype, shard.tokens))
    shard.sha256 = digest_of_file(path)
