"""A folder of token files: its manifest, and a writer with a journal to continue from.

    DIR/train_000000.bin ...   llm.c's token files; one that is not full has no header yet
        val_000000.bin ...
        vocabulary.tiktoken    if it was learned
        manifest.json          written last: without it the folder is incomplete

The journal records the block of the input up to which everything is on the disk, and the length of each file then. A
process that continues truncates the files to these lengths and does the rest: everything that was written after the
journal is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import not_written, replacing, sync_folder
from daskgpt.formats.llmc import HEADER_BYTES, TOKENS, header_of

WHERE = "prepare"
MANIFEST, JOURNAL, LOCK, VOCABULARY_FILE = "manifest.json", ".journal.json", ".lock", "vocabulary.tiktoken"
VERSION = 1
PARTS = ("train", "val")
BLOCKS_BETWEEN = 32  # after which the journal is written again


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

    @classmethod
    def of(cls, known: dict[str, Any]) -> Part:
        """Return the part from its JSON."""
        return cls(**known | {"shards": [Shard(**shard) for shard in known["shards"]]})


@dataclass
class Manifest:
    """The inputs and settings that decide the tokens of a folder, and the results, which are a pure function of them.

    encoding     name; the file of a learned one lies in the folder
    ids          number of ids of the encoding, with end-of-text, the last one
    settings     settings that decide the tokens
    inputs       number, bytes, and digest of names and sizes of the files
    skipped      number of documents that could not be decoded
    """

    encoding: str
    ids: int
    settings: dict[str, Any]
    inputs: dict[str, Any]
    train: Part
    val: Part
    skipped: int = 0

    def write(self, folder: Path) -> None:
        """Write the manifest atomically, which completes the folder.

        Errors   OSError if the system refuses
        """
        known = {"version": VERSION, "kind": "daskgpt tokens", **asdict(self)}
        with replacing(folder / MANIFEST, WHERE) as file:
            file.write(json.dumps(known | {"check": digest_of(known)}, indent=1, ensure_ascii=False).encode() + b"\n")


@dataclass(frozen=True, eq=False)
class Encoded:
    """A block as tokens, each document after an end-of-text.

    tokens       of both parts, (N,) uint16
    documents    number in both parts; consecutive passages of one text count once
    sizes        of both parts' texts in UTF-8 [bytes]
    continues    whether it may continue the previous block: then its first tokens have no end-of-text before them
    first, last  parts of its first and its last passage, -1 if there is none
    skipped      number of documents that could not be decoded
    end_of_text  id of the token
    """

    tokens: list[np.ndarray]
    documents: list[int]
    sizes: list[int]
    continues: bool
    first: int
    last: int
    skipped: int
    end_of_text: int


def digest_of(known: Any) -> str:
    """Return the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(known, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path, where: str) -> Manifest:
    """Return the manifest of a folder.

    Errors   FileNotFoundError if it has none; ValueError if it is damaged or of another version
    """
    path, begun = folder / MANIFEST, (folder / JOURNAL).is_file()
    rule = "the preparation of the folder must be complete" if begun else "the folder must hold prepared tokens"
    advice = (
        "Give the same daskgpt.prepare command again: it continues."
        if begun
        else "Name one that daskgpt.prepare wrote."
    )
    require(path.is_file(), where, rule, {"folder": folder}, advice, FileNotFoundError)
    rule, advice = "the manifest must be unchanged", "Prepare it again."
    try:
        known = json.loads(path.read_bytes())
        check = known.pop("check")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise refusal(ValueError, where, rule, f"path={path} ({type(error).__name__})", advice) from None
    require(check == digest_of(known), where, rule, {"path": path, "check": str(check)[:12]}, advice)
    rule, got = f"its version must be {VERSION}", {"path": path, "version": known.pop("version")}
    require(got["version"] == VERSION, where, rule, got, "A newer daskgpt wrote it: use that version.")
    del known["kind"]
    return Manifest(**known | {name: Part.of(known[name]) for name in PARTS})


class _PartWriter:
    """The shards of one part, truncated to their lengths in the journal."""

    def __init__(self, folder: Path, name: str, part: Part, shard_tokens: int) -> None:
        self.folder, self.name, self.part, self.shard_tokens = folder, name, part, shard_tokens
        self.held = part.tokens - sum(shard.tokens for shard in part.shards)
        self.file: BufferedRandom | None = None
        known = {shard.file for shard in part.shards} | ({self._path().name} if self.held else set())
        for path in folder.glob(f"{name}_*.bin"):
            if path.name not in known:
                path.unlink()
        if self.held:
            self.file = self._path().open("r+b")
            self.file.truncate(HEADER_BYTES + 2 * self.held)
            self.file.seek(0, os.SEEK_END)

    def _path(self) -> Path:
        return self.folder / f"{self.name}_{len(self.part.shards):06}.bin"

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens to as many files as they need."""
        tokens = np.ascontiguousarray(tokens, "<u2")
        while tokens.size:
            if self.file is None:
                self.file = self._path().open("w+b")
                self.file.write(bytes(HEADER_BYTES))
            now, tokens = np.split(tokens, [self.shard_tokens - self.held])
            self.file.write(now.data)
            self.held += now.size
            self.part.tokens += now.size
            if self.held == self.shard_tokens:
                self.close()

    def close(self) -> None:
        """Write the header of the current file."""
        if self.file is not None:
            self.file.seek(0)
            self.file.write(header_of(TOKENS, 1, self.held))
            self.sync()
            self.file.seek(0)
            digest = hashlib.file_digest(self.file, "sha256").hexdigest()
            self.file.close()
            self.part.shards.append(Shard(self._path().name, self.held, digest))
            self.file, self.held = None, 0

    def sync(self) -> None:
        """Flush everything to the disk."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())


class FolderWriter:
    """Writes the blocks of a corpus in order; a context that locks the folder.

    blocks    number of blocks that earlier processes have written
    finished  whether they have written all, including the manifest
    """

    def __init__(self, path: str, decides: Mapping[str, Any], shard_tokens: int) -> None:
        """path          of the folder, which is new, empty, or begun by the same preparation
        decides       inputs and settings that decide the content
        shard_tokens  tokens of a full file

        Errors    ValueError if the folder has other content; RuntimeError if another process writes it; OSError if the
                  system refuses
        """
        self.folder, self.decides = Path(path).expanduser(), digest_of(decides)
        self.vocabulary = self.folder / VOCABULARY_FILE
        self.writers: list[_PartWriter] = []
        with _writing(self.folder):
            self._hold()
            try:
                known = self._known()
                for leftover in self.folder.glob(".*.tmp"):  # left by a process that was killed
                    leftover.unlink(missing_ok=True)
                self.finished = (self.folder / MANIFEST).is_file()
                self.blocks, self.last = known.get("blocks", 0), known.get("last", -1)
                self.skipped = known.get("skipped", 0)
                self.parts = [Part.of(known[name]) if name in known else Part() for name in PARTS]
                if not self.finished:
                    self.writers = [_PartWriter(self.folder, *own, shard_tokens) for own in zip(PARTS, self.parts)]
                    self.save()
            except BaseException:
                self.lock.close()
                raise

    def _hold(self) -> None:
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        fresh = all(name == LOCK or (name.startswith(".") and name.endswith(".tmp")) for name in names)
        rule, advice = "the folder must be new, empty, or begun by the same command", "Name another with --out."
        good = (fresh or JOURNAL in names) and (self.folder.is_dir() or not self.folder.exists())
        require(good, WHERE, rule, {"out": self.folder}, advice)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = (self.folder / LOCK).open("ab")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.close()
            rule, advice = "no other process must write the folder", "Wait for its end, or stop it."
            raise refusal(RuntimeError, WHERE, rule, {"out": self.folder}, advice) from None
        except OSError:
            return  # a file system without locks

    def _known(self) -> dict[str, Any]:
        """Return the content of the journal; empty at the beginning.

        Errors   ValueError if it belongs to another preparation
        """
        path = self.folder / JOURNAL
        if not path.is_file():
            return {}
        try:
            known: dict[str, Any] = json.loads(path.read_bytes())
            same = known["decides"] == self.decides
        except (ValueError, KeyError, TypeError):
            same = False
        rule = "the folder must be begun with the same inputs and settings"
        require(same, WHERE, rule, {"out": self.folder}, "Name another with --out, or remove it.")
        return known

    def save(self) -> None:
        """Flush everything to the disk, and record it in the journal."""
        for writer in self.writers:
            writer.sync()
        sync_folder(self.folder)
        known: dict[str, Any] = {"decides": self.decides, "blocks": self.blocks, "last": self.last}
        known |= {"skipped": self.skipped, **{name: asdict(part) for name, part in zip(PARTS, self.parts)}}
        with replacing(self.folder / JOURNAL, WHERE) as file:
            file.write(json.dumps(known).encode())

    def take(self, block: Encoded) -> None:
        """Write the next block.

        Errors   OSError if the system refuses, with the path
        """
        with _writing(self.folder):
            if block.continues and self.last != block.first:
                self.writers[block.first].write(np.array([block.end_of_text], np.uint16))
                self.parts[block.first].documents += 1
            for number, part in enumerate(self.parts):
                self.writers[number].write(block.tokens[number])
                part.documents += block.documents[number]
                part.bytes += block.sizes[number]
            if block.first >= 0 or block.skipped:
                self.last = block.last
            self.skipped += block.skipped
            self.blocks += 1
            if self.blocks % BLOCKS_BETWEEN == 0:
                self.save()

    def close_shards(self) -> None:
        """Finish every file and flush it to the disk."""
        with _writing(self.folder):
            for writer in self.writers:
                writer.close()
            self.save()

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.writers:
            if writer.file is not None:
                with suppress(OSError):  # an error in unwritten data: the journal does not count it
                    writer.file.close()
        self.lock.close()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise the system's errors in the common form."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # in this form already
            raise
        raise not_written(error, WHERE, error.filename or path) from error
