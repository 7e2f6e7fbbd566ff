"""The files that the metrics of a run are written to: `metrics.jsonl`, and on request TensorBoard's events."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BufferedWriter, BytesIO
from pathlib import Path
from typing import Any, cast

from daskgpt.config.errors import require, require_known, require_package
from daskgpt.config.files import open_no_link, replacing, set_aside, sync, written

Encode = Callable[[Mapping[str, Any]], bytes]
WAITING_BYTES = 1 << 20  # of records for which there is no room: some thousand steps


class RecordFile:
    """A file of a run to which records are appended. On a full disk they wait in memory, up to WAITING_BYTES.

    encode   returns the bytes of a record
    waits    whether there was no room for the last record
    """

    def __init__(self, path: Path, encode: Encode, *, new: bool, header: bytes = b"") -> None:
        """new      whether the file must not exist yet
        header   precedes the first record

        Errors   FileExistsError if it must not exist and does
        """
        self.path, self.encode, self.waits = path, encode, False
        # When it cannot write, Python's writer keeps what is left, and writes that first the next time.
        self.file = BufferedWriter(cast(Any, open_no_link(path, "x+b" if new else "a+b")), WAITING_BYTES)
        self.file.write(header)

    def write(self, record: bytes = b"") -> None:
        """Append an encoded record, and write those that wait.

        Errors   OSError if there is no room
        """
        self.waits = True
        with written(self.path, "RunFolder"):
            self.file.write(record)
            self.file.flush()
        self.waits = False

    def sync(self) -> None:
        """Flush the records to the disk. Errors   OSError if there is no room"""
        if not self.file.closed:
            self.write()
            sync(self.file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # there is no room for those that wait
            self.file.close()


METRICS = "metrics.jsonl"


def open_metrics(folder: Path, done: int | None) -> RecordFile:
    """Open the metrics of a new run (`done` is None), or those of a resumed one behind its first steps.

    Errors   FileExistsError if another run has begun here
    """
    path = folder / METRICS
    if done is not None:
        lines = [line for _, line in metrics_lines(path, done)]
        kept = b"".join(lines)
        if kept != path.read_bytes():
            if len(lines) < done:  # the file is damaged, and a copy stays
                set_aside(path, "damaged")
            with replacing(path, "RunFolder") as file:
                file.write(kept)
    return RecordFile(path, lambda record: f"{json.dumps(record, allow_nan=False)}\n".encode(), new=done is None)


def metrics_lines(path: Path, steps: int) -> list[tuple[dict[str, Any], bytes]]:
    """Return the records of the first steps in a file of metrics, in their order, with their lines.

    Lines that are no records, such as the one that a killed process was writing, are left out. Of several records of
    one step the first counts.
    """
    records: dict[int, tuple[dict[str, Any], bytes]] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, TypeError, KeyError):
            continue
        if line.endswith(b"\n") and type(step) is int and 0 <= step < steps:
            records.setdefault(step, (record, line))
    return [records[step] for step in sorted(records)]


FORMAT = "brain.Event:2"  # the version that TensorBoard's files begin with
LEFT_OUT = ("step", "tokens", "seconds")  # an event has step and time, and each number costs some microseconds


def open_tensorboard(folder: Path, done: int | None) -> RecordFile:
    """Open a file of events beside a run's metrics: `tensorboard --logdir RUNS` shows each run by its folder's name.

    done   how many steps of a resumed run count: TensorBoard drops later ones from earlier files
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    def framed(**fields: Any) -> bytes:
        buffer = BytesIO()
        RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
        return buffer.getvalue()

    def encode(record: Mapping[str, Any]) -> bytes:
        numbers = [Summary.Value(tag=tag, simple_value=value) for tag, value in tagged(record)]
        return framed(step=record["step"] + 1, summary=Summary(value=numbers))

    # TensorBoard reads the files of a folder in the order of their names.
    name = f"events.out.tfevents.{time.time():017.6f}.{platform.node()}.{os.getpid()}"
    header = framed(file_version=FORMAT)
    header += framed(step=done + 1, session_log=SessionLog(status=SessionLog.START)) if done is not None else b""
    return RecordFile(folder / name, encode, new=True, header=header)


def tagged(record: Mapping[str, Any], prefix: str = "run/") -> Iterator[tuple[str, float]]:
    """Yield a record's numbers by TensorBoard's names for them, such as run/loss or workers/0/idle."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from tagged(value, f"{name}/" if prefix == "run/" else f"{prefix}{name}/")
        elif isinstance(value, int | float) and name not in LEFT_OUT:
            yield f"{prefix}{name}", value


# What `--log` names: a function that opens a further file of metrics, for (folder, steps that a resumed run has made or
# None). It needs the package, and has the extra, of its name.
SINKS: dict[str, Callable[[Path, int | None], RecordFile]] = {"tensorboard": open_tensorboard}


def check_log(log: str, out: str) -> None:
    """Check the setting `log` of a run with a folder.

    Errors   ValueError for an unknown name or without a folder, RuntimeError if a package is missing
    """
    if log:
        require_known(log, SINKS, "train", "log")
        require(bool(out), "train", "a log must have a folder", {"log": log}, "Give RunConfig(out=...).")
        require_package(log, log, "train")


class Logs:
    """All files that a run's metrics are written to."""

    def __init__(self) -> None:
        self.files: list[RecordFile] = []

    def log(self, record: Mapping[str, Any]) -> list[tuple[Path, OSError]]:
        """Append the metrics of a step to each file; numbers that are not finite, which JSON does not have, as null.

        A record without room is kept and written later; the errors of files for which that is new are returned.
        """
        valid = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        errors = []
        for file in self.files:
            waited = file.waits
            try:
                file.write(file.encode(valid))
            except OSError as error:
                errors += [(file.path, error)] * (not waited)
        return errors

    def sync(self) -> None:
        """Flush the records to the disk. Errors   OSError if there is no room"""
        for file in self.files:
            file.sync()

    def close(self) -> None:
        for file in self.files:
            file.close()
