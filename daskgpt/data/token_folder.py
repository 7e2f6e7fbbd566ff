"""A folder of token files: its manifest, and a writer with a journal to continue from.

    DIR/train_000000.bin ...   llm.c's token files; one that is not full has no header yet
        val_000000.bin ...
        vocabulary.tiktoken    if it was learned; vocabulary.json if it is that of a Hugging Face folder
        manifest.json          written last: without it the folder is incomplete

The journal records the block of the input up to which everything is on the disk, and the length of each file then. A
process that continues truncates the files to these lengths and does the rest: everything that was written after the
journal is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import digest_of, locked, replacing, sync, sync_folder, written
from daskgpt.formats.llmc import HEADER_BYTES, token_header
from daskgpt.formats.vocabulary import is_learned, read_vocabulary

WHERE = "prepare"
MANIFEST, JOURNAL, LOCK, VOCABULARY_FILE = "manifest.json", ".journal.json", ".lock", "vocabulary.tiktoken"
TOKENIZER_FILE = "vocabulary.json"
VERSION, KIND = 1, "daskgpt tokens"
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

    @property
    def begun(self) -> int:
        """The number of tokens in a file that is not full."""
        return self.tokens - sum(shard.tokens for shard in self.shards)


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
        known = {"version": VERSION, "kind": KIND, **asdict(self)}
        with replacing(folder / MANIFEST, WHERE) as file:
            file.write(json.dumps(known | {"check": digest_of(known)}, indent=1, ensure_ascii=False).encode() + b"\n")


@dataclass(frozen=True, eq=False)
class Encoded:
    """A block as tokens, each document after an end-of-text.

    tokens       of both parts, (N,) uint16 or uint32
    documents    number in both parts; consecutive passages of one text count once
    sizes        of both parts' texts in UTF-8 [bytes]
    continued    the part of the first passage if that may continue the previous block, and so has no end-of-text before
                 it; else -1
    last         the part of the last passage, -1 if that was skipped; None for a block without any
    skipped      number of documents that could not be decoded
    end_of_text  id of the token
    """

    tokens: list[np.ndarray]
    documents: list[int]
    sizes: list[int]
    continued: int
    last: int | None
    skipped: int
    end_of_text: int


def is_prepared(folder: Path) -> bool:
    """Return whether a preparation wrote a folder, completely or in part."""
    manifest = folder / MANIFEST
    if (folder / JOURNAL).is_file():
        return True
    if not manifest.is_file():
        return False
    with manifest.open("rb") as file:  # other programs have files of this name, too
        return KIND.encode() in file.read(2**12) or any(folder.glob(f"{PARTS[0]}_*.bin"))


def encoding_of(folder: Path, manifest: Manifest, where: str) -> str:
    """Return the name of a folder's encoding, which is known from here on.

    Errors   ValueError if its vocabulary is another one than that of its tokens
    """
    encoding = manifest.encoding
    found = read_vocabulary(vocabulary_file(folder)) if is_learned(encoding) else encoding
    rule, got = f"the vocabulary must be unchanged, {encoding}", {"folder": folder, "encoding": found}
    require(found == encoding, where, rule, got, "Prepare it again.")
    return encoding


def vocabulary_file(folder: Path) -> Path:
    """Return the file of a folder's own vocabulary, which exists only where it has one."""
    path = folder / TOKENIZER_FILE
    return path if path.is_file() else folder / VOCABULARY_FILE


def read_manifest(folder: Path, where: str) -> Manifest:
    """Return the manifest of a folder.

    Errors   FileNotFoundError if it has none; ValueError if it is damaged or of another version
    """
    path = folder / MANIFEST
    rule, advice = "the folder must hold prepared tokens", "Name one that daskgpt.prepare wrote."
    if (folder / JOURNAL).is_file():
        rule = "the preparation of the folder must be complete"
        advice = "Give the same daskgpt.prepare command again: it continues."
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


@contextmanager
def locked_folder(path: str) -> Iterator[Path]:
    """Yield a folder, made if it is missing, into which no other process writes meanwhile.

    Errors    ValueError if it has other content than a preparation; RuntimeError if another process writes it; OSError
              if the system refuses
    """
    folder = Path(path).expanduser()
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    fresh = all(name == LOCK or (name.startswith(".") and name.endswith(".tmp")) for name in names)
    rule, advice = "the folder must be new, empty, or left by the same command", "Name another with --out."
    good = (fresh or JOURNAL in names) and (folder.is_dir() or not folder.exists())
    require(good, WHERE, rule, {"out": folder}, advice)
    with written(folder, WHERE):
        folder.mkdir(parents=True, exist_ok=True)
        lock = locked(folder / LOCK, WHERE, "no other process must write the folder")
    with lock:
        yield folder


class FolderWriter:
    """Writes the blocks of a corpus into a locked folder, in order.

    blocks    number of blocks that were written, also by earlier processes
    finished  whether earlier processes have written all, including the manifest
    again     whether unfinished content of other inputs or settings was removed
    """

    def __init__(
        self,
        folder: Path,
        decides: Mapping[str, Any],
        command: Mapping[str, Any],
        shard_tokens: int,
        dtype: np.dtype[Any],
    ) -> None:
        """decides       inputs and settings that decide the content
        command       settings and inputs as the user gave them
        shard_tokens  tokens of a full file
        dtype         of tokens, uint16 or uint32

        Errors    ValueError if the folder holds tokens of another command; OSError if the system refuses
        """
        self.folder, self.shard_tokens = folder, shard_tokens
        self.decides, self.command = digest_of(decides), digest_of(command)
        self.dtype, self.finished = dtype.newbyteorder("<"), (folder / MANIFEST).is_file()
        known = self._known()
        self.again = known is None
        known = known or {"blocks": 0, "last": -1, "skipped": 0, **{name: asdict(Part()) for name in PARTS}}
        self.blocks, self.last, self.skipped = (known[name] for name in ("blocks", "last", "skipped"))
        self.parts = {name: Part.of(known[name]) for name in PARTS}
        with written(folder, WHERE):
            for leftover in folder.glob(".*.tmp"):  # left by a process that was killed
                leftover.unlink(missing_ok=True)
            if self.again:
                self.save(decides="")  # nobody continues from here if this process is killed before the next line
                own = (VOCABULARY_FILE, TOKENIZER_FILE, *(f"{part}_*.bin" for part in PARTS))
                for leftover in (path for name in own for path in folder.glob(name)):
                    leftover.unlink()
            if not self.finished:
                self.save()

    def _known(self) -> dict[str, Any] | None:
        """Return the content of the journal; empty without one; None if it is of other inputs or settings.

        Those may have been corrected after an error: what was written is worth nothing then, unless another command
        has written whole files.

        Errors   ValueError if the folder holds tokens of another command
        """
        path = self.folder / JOURNAL
        if not path.is_file():
            return {}
        try:
            known: dict[str, Any] = json.loads(path.read_bytes())
            if known["decides"] == self.decides:
                return known
            worthless = known["command"] == self.command or not any(known[name]["shards"] for name in PARTS)
        except (ValueError, KeyError, TypeError):
            worthless = False
        rule, got = "the folder must not hold tokens of other inputs or settings", {"out": self.folder}
        require(worthless and not self.finished, WHERE, rule, got, "Name another with --out, or remove it.")
        return None

    def save(self, decides: str | None = None) -> None:
        """Flush everything to the disk, and record it in the journal."""
        for name, part in self.parts.items():
            if part.begun:
                with self._current(name).open("rb") as file:
                    sync(file.fileno())
        sync_folder(self.folder)
        known: dict[str, Any] = {"decides": self.decides if decides is None else decides, "command": self.command}
        known |= {"blocks": self.blocks, "last": self.last}
        known |= {"skipped": self.skipped, **{name: asdict(part) for name, part in self.parts.items()}}
        with replacing(self.folder / JOURNAL, WHERE) as file:
            file.write(json.dumps(known).encode())

    def take(self, block: Encoded) -> None:
        """Write the next block.

        Errors   OSError if the system refuses, with the path
        """
        with written(self.folder, WHERE):
            if block.continued >= 0 and self.last != block.continued:
                self._append(PARTS[block.continued], np.array([block.end_of_text], self.dtype))
                self.parts[PARTS[block.continued]].documents += 1
            for name, tokens, documents, size in zip(PARTS, block.tokens, block.documents, block.sizes):
                self._append(name, tokens)
                self.parts[name].documents += documents
                self.parts[name].bytes += size
            if block.last is not None:
                self.last = block.last
            self.skipped += block.skipped
            self.blocks += 1
            if self.blocks % BLOCKS_BETWEEN == 0:
                self.save()

    def close_shards(self) -> None:
        """Finish every file and flush it to the disk."""
        with written(self.folder, WHERE):
            for name, part in self.parts.items():
                if part.begun:
                    self._close(name)
            self.save()

    def _current(self, name: str) -> Path:
        """Return the path of a part's file that is not full, or of the next one."""
        return self.folder / f"{name}_{len(self.parts[name].shards):06}.bin"

    def _append(self, name: str, tokens: np.ndarray) -> None:
        """Append tokens to as many files of a part as they need."""
        part = self.parts[name]
        while tokens.size:
            now, tokens = np.split(tokens, [self.shard_tokens - part.begun])
            with self._current(name).open("ab") as file:
                # A new file gets room for its header; an old one loses what was written after the journal.
                file.truncate(HEADER_BYTES + self.dtype.itemsize * part.begun)
                file.write(np.ascontiguousarray(now, self.dtype).data)
            part.tokens += now.size
            if part.begun == self.shard_tokens:
                self._close(name)

    def _close(self, name: str) -> None:
        """Write the header of a part's current file."""
        part, path = self.parts[name], self._current(name)
        with path.open("r+b") as file:
            file.truncate(HEADER_BYTES + self.dtype.itemsize * part.begun)
            file.write(token_header(self.dtype, part.begun))
            file.flush()
            sync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        part.shards.append(Shard(path.name, part.begun, digest))
