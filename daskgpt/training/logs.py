"""The logs of a run, in lines of JSON: `metrics.jsonl` has a line for each step, `chain.jsonl` one for each checkpoint.

The lines of the chain are the entries of every state.json, those of deleted checkpoints included. Each entry names the
digest of the one before, so the digest of the last one determines them all: settings, data, the digests of models and
moments, and the losses in between. The first entry is the beginning of the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any, cast

from daskgpt.config.files import digest_of, open_no_link, set_aside, sync, write_file, written
from daskgpt.training.checkpoint import DIGEST

METRICS, CHAIN = "metrics.jsonl", "chain.jsonl"
WAITING_BYTES = 1 << 20  # of records for which there is no room: some thousand steps


class RecordFile:
    """A file of a run to which records are appended, as lines of JSON.

    On a full disk they wait in memory, up to WAITING_BYTES.

    waits   whether there was no room for the last record
    """

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """new   whether the file must not exist yet

        Errors   FileExistsError if it must not exist and does
        """
        self.path, self.waits = path, False
        # When it cannot write, Python's writer keeps what is left, and writes that first the next time.
        self.file = BufferedWriter(cast(Any, open_no_link(path, "x+b" if new else "a+b")), WAITING_BYTES)

    def write(self, record: Mapping[str, Any] | None = None) -> None:
        """Append a record, and write those that wait. Numbers that are not finite, which JSON lacks, become null.

        Errors   OSError if there is no room
        """
        line = b"" if record is None else f"{json.dumps({k: _valid(v) for k, v in record.items()})}\n".encode()
        self.waits = True
        with written(self.path, "RunFolder"):
            self.file.write(line)
            self.file.flush()
        self.waits = False

    def sync(self) -> None:
        """Flush the records to the disk. Errors   OSError if there is no room"""
        self.write()
        with written(self.path, "RunFolder"):
            sync(self.file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # there is no room for those that wait
            self.file.close()


def _valid(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def continued_metrics(path: Path, done: int) -> RecordFile:
    """Open the metrics of a resumed run behind its first steps; what follows them is cut."""
    lines = [line for _, line in metrics_lines(path, done)]
    if (content := b"".join(lines)) != path.read_bytes():
        if len(lines) < done:  # the file is damaged, and a copy stays
            set_aside(path, "damaged")
        write_file(path, content, "RunFolder")
    return RecordFile(path)


def metrics_lines(path: Path, steps: int) -> list[tuple[dict[str, Any], bytes]]:
    """Return the records of the first steps in a file of metrics, in their order, with their lines.

    Lines that are no records, such as the one that a killed process was writing, are left out. Of several records of
    one step the first counts.
    """
    records: dict[int, tuple[dict[str, Any], bytes]] = {}
    for line, record in json_lines(path, lambda record: type(record["step"]) is int):
        if record and 0 <= record["step"] < steps:
            records.setdefault(record["step"], (record, line))
    return [records[step] for step in sorted(records)]


def json_lines(path: Path, is_valid: Callable[[Any], bool]) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Return the lines of a file, each with its JSON object; None for a line that is incomplete or not valid.

    is_valid   may raise errors for values of another form
    """
    lines = list[tuple[bytes, dict[str, Any] | None]]()
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            value = json.loads(line)
            lines.append((line, value if line.endswith(b"\n") and is_valid(value) else None))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            lines.append((line, None))
    return lines


LINK = "chain"  # entry of state.json that makes it a link of the chain
Entry = dict[str, Any]  # the entries of a state.json without its own digest
PARTS = ("data", "configuration", "arithmetic", "versions", "files")


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
    parts = *map(entry.get, PARTS), entry.get(LINK, {})
    return type(entry.get("step")) is int and all(type(part) is dict for part in parts)
