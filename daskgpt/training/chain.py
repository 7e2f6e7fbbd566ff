"""The chain of a run: `chain.jsonl` has the entries of every state.json, those of deleted checkpoints included.

Each entry names the digest of the one before, so the digest of the last one determines them all: settings, data, the
digests of models and moments, and the losses in between. The first entry is the beginning of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from daskgpt.config.files import digest_of, set_aside, write_file
from daskgpt.training.checkpoint import DIGEST
from daskgpt.training.logs import RecordFile, json_lines

CHAIN = "chain.jsonl"
LINK = "chain"  # entry of state.json that makes it a link of the chain
Entry = dict[str, Any]  # the entries of a state.json without its own digest
NUMBERS, PARTS = ("step", "seed"), ("data", "configuration", "arithmetic", "versions", "files")


class Chain:
    """Writes the chain of a run, a line a checkpoint.

    numbered   step and digest of each entry
    """

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        """Continue behind an entry: the beginning of a new run, or the state of the checkpoint that one continues from.

        Lines behind it are cut. A file that lacks it is set aside, and the chain begins with this entry.
        """
        lines, wanted = read_chain(path), digest_of(entry)
        digests = [digest_of(earlier) if earlier else "" for _, earlier in lines]
        length = digests.index(wanted) + 1 if wanted in digests else 0
        if lines and not length:
            set_aside(path, "damaged")
        elif length < len(lines):
            write_file(path, b"".join(line for line, _ in lines[:length]), "RunFolder")
        self.numbered = [(earlier["step"], digest) for (_, earlier), digest in zip(lines[:length], digests) if earlier]
        self.file = RecordFile(path)
        if not length:
            self.add(entry)

    def link(self, step: int, losses: Sequence[float]) -> dict[str, str]:
        """Return the entry by which the state after some steps follows the one before.

        losses   of all steps so far
        """
        since, previous = next(entry for entry in reversed(self.numbered) if entry[0] < step)
        return {"previous": previous, "losses": digest_of(losses[since:step])}

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append an entry, and flush it to the disk.

        Errors   OSError if there is no room: the entry is written later
        """
        numbered = entry["step"], digest_of(entry)
        if numbered not in self.numbered[-1:]:  # otherwise its checkpoint could not be written at first
            self.numbered.append(numbered)
            self.file.write({**entry, DIGEST: numbered[1]})
        self.file.sync()


def read_chain(path: Path) -> list[tuple[bytes, Entry | None]]:
    """Return the lines of a chain, each with its entry; None for a line that is not as it was written."""

    def is_unchanged(entry: Entry) -> bool:
        return bool(entry.pop(DIGEST) == digest_of(entry)) and is_entry(entry)

    return json_lines(path, is_unchanged) if path.exists() else []


def is_entry(entry: Mapping[str, Any]) -> bool:
    """Return whether the values of a state.json have the right types: its digest could be right all the same."""
    numbers = all(type(entry.get(name)) is int for name in NUMBERS)
    return numbers and all(type(value) is dict for value in (*map(entry.get, PARTS), entry.get(LINK, {})))
