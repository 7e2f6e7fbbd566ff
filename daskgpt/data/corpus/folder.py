"""A folder of token files while it is written: shards that fill one after the other, and a journal to go on from.

    DIR/train_000000.bin ...   llm.c's token files, each under its name when it is full
        val_000000.bin ...
        vocabulary.tiktoken    where it was learned
        manifest.json          written last: without it nothing here counts

The journal says up to which block of the input all is on the disk, and how long each file is there. Whoever goes on
cuts the files back to that and does the rest: what was written after the journal, whole or half, is made again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import file_digest
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import not_written, replacing, sync_folder
from daskgpt.data.corpus.encoding import Encoded
from daskgpt.data.corpus.manifest import JOURNAL, LOCK, MANIFEST, PARTS, VOCABULARY_FILE, Part, Shard, digest_of
from daskgpt.formats.llmc_tokens import HEADER_BYTES, token_header

WHERE = "prepare"
BLOCKS_BETWEEN = 32  # of which the journal is written anew


class _PartWriter:
    """The shards of one part."""

    def __init__(self, folder: Path, name: str, part: Part, shard_tokens: int) -> None:
        self.folder, self.name, self.part, self.shard_tokens = folder, name, part, shard_tokens
        self.file: BinaryIO | None = None
        self.held = part.tokens - sum(shard.tokens for shard in part.shards)
        self._cut_back()

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.name}_{number:06}.bin"

    def _open_path(self) -> Path:
        path = self._path(len(self.part.shards))
        return path.with_name(f".{path.name}.tmp")

    def _cut_back(self) -> None:
        """Leave of the files what the journal knows."""
        known = {shard.file for shard in self.part.shards}
        open_path, number = self._open_path(), len(self.part.shards)
        if self.held and not open_path.exists():  # it was full when the journal was not written any more
            os.rename(self._path(number), open_path)
        for path in (*self.folder.glob(f"{self.name}_*.bin"), *self.folder.glob(f".{self.name}_*.bin.tmp")):
            if path.name not in known and (path != open_path or not self.held):
                path.unlink()
        if self.held:
            self.file = open_path.open("r+b")
            self.file.truncate(HEADER_BYTES + 2 * self.held)
            self.file.seek(0, os.SEEK_END)

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, to as many files as they need."""
        tokens = np.ascontiguousarray(tokens, "<u2")
        while tokens.size:
            if self.file is None:
                self.file = self._open_path().open("w+b")
                self.file.write(bytes(HEADER_BYTES))
            now, tokens = np.split(tokens, [self.shard_tokens - self.held])
            self.file.write(now.data)
            self.held += now.size
            self.part.tokens += now.size
            if self.held == self.shard_tokens:
                self.close()

    def close(self) -> None:
        """Give the file that is being filled its header and its name."""
        if self.file is None:
            return
        self.file.seek(0)
        self.file.write(token_header(self.held))
        self.sync()
        self.file.close()
        path = self._path(len(self.part.shards))
        with self._open_path().open("rb") as whole:
            digest = file_digest(whole, "sha256").hexdigest()
        os.rename(self._open_path(), path)
        self.part.shards.append(Shard(path.name, self.held, digest))
        self.file, self.held = None, 0

    def sync(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())

    def abandon(self) -> None:
        """Close the file as it is."""
        if self.file is not None:
            with suppress(OSError):  # of what is still to be written: the journal does not count it
                self.file.close()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Word what the system refuses, unless it is worded already."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise not_written(error, WHERE, error.filename or path) from error


class FolderWriter:
    """Writes the blocks of a corpus in order; a context that holds the folder against other processes.

    blocks    how many earlier processes have written
    finished  whether they have written all, manifest included
    """

    def __init__(self, path: str, decides: Mapping[str, Any], shard_tokens: int) -> None:
        """path          of the folder, which is new, empty, or one that the same preparation has begun
        decides       all that decides what is written
        shard_tokens  of a full file

        Errors    ValueError where something else is there; RuntimeError where another process writes it; OSError where
                  the system refuses
        """
        self.folder, self.decides = Path(path).expanduser(), digest_of(decides)
        self.shard_tokens = shard_tokens
        with _told(self.folder):
            self._hold()
        try:
            for leftover in self._leftovers():
                leftover.unlink(missing_ok=True)
            known = self._known()
            self.finished = (self.folder / MANIFEST).is_file()
            self.blocks, self.last, self.skipped = (
                known.get("blocks", 0),
                known.get("last", -1),
                known.get("skipped", 0),
            )
            self.parts = [Part.of(known[name]) if name in known else Part() for name in PARTS]
            if not self.finished:
                with _told(self.folder):
                    self.writers = [_PartWriter(self.folder, *own, shard_tokens) for own in zip(PARTS, self.parts)]
                    self.save()
        except BaseException:
            self.lock.close()
            raise

    def _hold(self) -> None:
        fresh = not self.folder.exists()
        rule, advice = "the folder must be new, empty, or begun by the same command", "Name another by --out."
        good = fresh or (self.folder.is_dir() and (self._begun() or not any(self.folder.iterdir())))
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

    def _begun(self) -> bool:
        names = {path.name for path in self.folder.iterdir()} - {path.name for path in self._leftovers()}
        return bool(names & {JOURNAL, MANIFEST}) or names <= {LOCK}

    def _leftovers(self) -> list[Path]:
        """Files that a process which was killed has left under temporary names, at its very beginning perhaps alone."""
        return [path for name in (JOURNAL, MANIFEST, VOCABULARY_FILE) for path in self.folder.glob(f".{name}.*.tmp")]

    def _known(self) -> dict[str, Any]:
        """What the journal says: empty where this is the beginning.

        Errors   ValueError where it is that of something else
        """
        path = self.folder / JOURNAL
        if not path.is_file():
            rule = "the folder must be new, empty, or begun by the same command"
            got, advice = {"out": self.folder}, "Name another by --out."
            require(not (self.folder / MANIFEST).is_file(), WHERE, rule, got, advice)
            return {}
        try:
            known: dict[str, Any] = json.loads(path.read_bytes())
            same = known["decides"] == self.decides
        except (ValueError, KeyError, TypeError):
            same = False
        rule = "the folder must be begun with the same inputs and settings"
        require(same, WHERE, rule, {"out": self.folder}, "Name another by --out, or remove it.")
        return known

    def save(self) -> None:
        """Let all that was written be on the disk, and the journal say so."""
        for writer in self.writers:
            writer.sync()
        sync_folder(self.folder)
        known: dict[str, Any] = {"decides": self.decides, "blocks": self.blocks, "last": self.last}
        known |= {"skipped": self.skipped, **{name: asdict(part) for name, part in zip(PARTS, self.parts)}}
        with replacing(self.folder / JOURNAL, WHERE) as file:
            file.write(json.dumps(known).encode())

    def take(self, block: Encoded) -> None:
        """Write the next block.

        Errors   OSError where the system refuses, with the path
        """
        if block.continues and self.last != block.first:
            self._write(block.first, np.array([block.end_of_text], np.uint16))
            self.parts[block.first].documents += 1
        for number, part in enumerate(self.parts):
            self._write(number, block.tokens[number])
            part.documents += block.documents[number]
            part.bytes += block.sizes[number]
        if block.first >= 0 or block.skipped:
            self.last = block.last
        self.skipped += block.skipped
        self.blocks += 1
        if self.blocks % BLOCKS_BETWEEN == 0:
            with _told(self.folder):
                self.save()

    def _write(self, part: int, tokens: np.ndarray) -> None:
        with _told(self.folder):
            self.writers[part].write(tokens)

    def close_shards(self) -> None:
        """Every file under its name, and on the disk."""
        with _told(self.folder):
            for writer in self.writers:
                writer.close()
            self.save()

    @property
    def vocabulary(self) -> Path:
        return self.folder / VOCABULARY_FILE

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.finished:
            for writer in self.writers:
                writer.abandon()
        self.lock.close()
