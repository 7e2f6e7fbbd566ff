"""Where the metrics of a run are written: `metrics.jsonl`, and TensorBoard's events where they are wanted."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

from daskgpt.config.errors import nearest, refusal, require
from daskgpt.config.files import not_written, open_no_link, replacing, set_aside

Encode = Callable[[Mapping[str, Any]], bytes]


class RecordFile:
    """Takes records of a run and appends them, in one form. One thread does; others may wait for the disk.

    encode    the bytes of a record
    unwritten   those for which there was no room
    """

    def __init__(self, path: Path, encode: Encode, *, new: bool, header: bytes = b"") -> None:
        """new      whether the file must not be there yet
        header   what stands before the first record

        Errors   FileExistsError where it must be new and is not
        """
        self.path, self.encode = path, encode
        self.file = open_no_link(path, "x+b" if new else "a+b")
        self.unwritten = [header] if header else []
        self.writing = Lock()  # a record on its way is not one without room

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record.

        Errors   OSError where there is no room for all of it: it is kept, and written once there is
        """
        encoded = self.encode(record)
        with self.writing:
            self.unwritten.append(encoded)
            self._write()

    def write(self) -> None:
        """Write what is not written yet.

        Errors   OSError where there is no room for it: only whole records are in the file then
        """
        with self.writing:
            self._write()

    def _write(self) -> None:
        while self.unwritten:
            rest, before = self.unwritten[0], self.file.tell()
            try:
                while rest:
                    rest = rest[self.file.write(rest) :]
            except OSError as error:
                self.file.truncate(before)
                self.file.seek(before)
                raise not_written(error, "RunFolder", self.path) from error
            del self.unwritten[0]

    def sync(self) -> None:
        """Let the records so far be on the disk.

        Errors   OSError where they are not all written
        """
        if not self.file.closed:
            os.fsync(self.file.fileno())
        with self.writing:
            waits = bool(self.unwritten)
        if waits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def copy_to(self, path: Path) -> None:
        """Copy what is written so far, also where the file itself was moved away or removed."""
        self.file.seek(0)
        path.write_bytes(self.file.read())

    def close(self) -> None:
        self.file.close()


METRICS = "metrics.jsonl"


def open_metrics(folder: Path, sections: Mapping[str, Any], done: int | None) -> RecordFile:
    """The file of a run that begins (`done` is None), or goes on behind its first so many steps.

    Errors   FileExistsError where another run has begun here
    """
    path = folder / METRICS
    if done is not None:
        lines = [line for _, line in metrics_lines(path, done)]
        kept = b"".join(lines)
        if kept != path.read_bytes():
            if len(lines) < done:  # it is damaged: what it says of other steps is not thrown away
                set_aside(path, "damaged")
            with replacing(path, "RunFolder") as file:
                file.write(kept)
    return RecordFile(path, json_line, new=done is None)


def json_line(record: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(record, allow_nan=False)}\n".encode()


def metrics_lines(path: Path, steps: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the records of a file of metrics, and the lines that they are on, of steps below a number.

    What is no record is left out, such as the part of a line that a killed process has left. Of the others as many are
    taken as have steps that rise: one damaged number costs its own line.
    """
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, TypeError, KeyError):
            continue
        if line.endswith(b"\n") and type(step) is int and 0 <= step < steps:
            found.append((record, line))
    yield from (found[number] for number in longest_rise([record["step"] for record, _ in found]))


def longest_rise(numbers: Sequence[int]) -> list[int]:
    """Return the places of the longest part of a sequence that rises strictly.

    >>> longest_rise([0, 1, 50, 2, 2, 3])
    [0, 1, 3, 5]
    """
    least: list[int] = []  # the least number that a rise of each length ends with so far
    ends: list[int] = []  # its place
    before: list[int] = []  # the place before each place in its rise
    for place, number in enumerate(numbers):
        length = bisect_left(least, number)
        before.append(ends[length - 1] if length else -1)
        if least[length : length + 1] == [number]:
            continue  # the first of two alike is taken
        least[length:] = [number, *least[length + 1 :]]
        ends[length:] = [place, *ends[length + 1 :]]
    places, place = [], ends[-1] if ends else -1
    while place >= 0:
        places.append(place)
        place = before[place]
    return places[::-1]


FORMAT = "brain.Event:2"  # what TensorBoard calls its files' format
# Training and validation in one chart, and what belongs together under one heading; the rest is under "run".
GROUPS = {
    "loss": ("loss", "validation_loss"),
    "optimizer": ("learning_rate", "norm"),
    "speed": ("tokens_per_s", "gflop_per_s", "product_share"),
    "phases": ("forward_s", "backward_s", "update_s", "idle", "validation_s", "checkpoint_s", "checkpoint_waited_s"),
}
LEFT_OUT = ("step", "tokens", "seconds")  # an event has its step and time, and each number costs some microseconds
GROUP = {name: group for group, names in GROUPS.items() for name in names}


def open_tensorboard(folder: Path, sections: Mapping[str, Any], done: int | None) -> RecordFile:
    """A file of events beside a run's metrics: `tensorboard --logdir RUNS` shows each run by its folder's name.

    done   after how many steps a run goes on: what earlier files say of later ones counts no longer
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.record_writer import RecordWriter

    def framed(**fields: Any) -> bytes:
        buffer = BytesIO()
        RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
        return buffer.getvalue()

    def encode(record: Mapping[str, Any]) -> bytes:
        numbers = [Summary.Value(tag=tag, simple_value=value) for tag, value in tagged(record)]
        return framed(step=record["step"], summary=Summary(value=numbers))

    # TensorBoard reads the files of a folder in the order of their names.
    name = f"events.out.tfevents.{time.time():017.6f}.{platform.node()}.{os.getpid()}"
    told = TensorProto(dtype=DT_STRING, string_val=[as_markdown(sections).encode()])
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    configuration = Summary(value=[Summary.Value(tag="configuration", tensor=told, metadata=kind)])
    header = framed(file_version=FORMAT)
    header += framed(step=done, session_log=SessionLog(status=SessionLog.START)) if done is not None else b""
    header += framed(step=done or 0, summary=configuration)
    return RecordFile(folder / name, encode, new=True, header=header)


def tagged(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A record's numbers by the names that TensorBoard shows them under: `loss/validation_loss`, `workers/0/idle`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))
        elif name not in LEFT_OUT and isinstance(value, int | float):
            yield f"{GROUP.get(name, 'run')}/{name}", value


def _numbers(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float):
            yield f"{before}{name}", value


def as_markdown(sections: Mapping[str, Any]) -> str:
    """A run's configuration as a table, which TensorBoard's text page shows."""
    rows = ["| setting | value |", "|---|---|"]
    for title, section in sections.items():
        values = section if isinstance(section, Mapping) else vars(section)
        rows += [f"| {title}.{name} | {value} |" for name, value in values.items()]
    return "\n".join(rows)


@dataclass(frozen=True)
class Sink:
    """A form of the metrics.

    open      (folder, configuration by sections, steps that were made before or None for a new run) -> its file
    package   what must be installed for it, by an extra of the sink's name
    """

    open: Callable[[Path, Mapping[str, Any], int | None], RecordFile]
    package: str = ""


SINKS = {
    "metrics": Sink(open_metrics),  # always written: a run is gone on with from it
    "tensorboard": Sink(open_tensorboard, package="tensorboard"),
}
ALWAYS = "metrics"


def chosen_sinks(log: str, out: str) -> tuple[str, ...]:
    """Names of the rows that a run writes to, by its settings `log` (names with commas between them) and `out`.

    Errors   ValueError for an unknown name, or where there is no folder; RuntimeError where its package is missing
    """
    names = [part.strip() for part in log.split(",") if part.strip()]
    known = [name for name in SINKS if name != ALWAYS]
    for name in names:
        require(name in SINKS, "train", "the log must be known", {"log": name}, nearest(name, known))
        require(bool(out), "train", "a log must have a folder", {"log": name}, "Give RunConfig(out=...).")
        if (package := SINKS[name].package) and find_spec(package) is None:
            rule, got = f"{package} must be installed", {"log": name}
            raise refusal(RuntimeError, "train", rule, got, f"Install it with pip install 'daskgpt[{name}]'.")
    return tuple(dict.fromkeys([ALWAYS, *names]))


class Logs:
    """All files that a run's metrics go to."""

    def __init__(self) -> None:
        self.files: list[RecordFile] = []

    def open(self, name: str, folder: Path, sections: Mapping[str, Any], done: int | None) -> None:
        self.files.append(SINKS[name].open(folder, sections, done))

    def log(self, record: Mapping[str, Any]) -> list[tuple[Path, OSError]]:
        """Append one step to each; a number that is not finite, which JSON does not know, as null.

        What has no room is kept and written once there is: an error for each file for which that is new.
        """
        valid = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        errors = []
        for file in self.files:
            waited = bool(file.unwritten)
            try:
                file.log(valid)
            except OSError as error:
                errors += [(file.path, error)] * (not waited)
        return errors

    def write(self) -> None:
        """Write what is not written yet. Errors   OSError where there is no room for it"""
        for file in self.files:
            file.write()

    def sync(self) -> None:
        """Let the records so far be on the disk. Errors   OSError where they are not all written"""
        for file in self.files:
            file.sync()

    def close(self) -> None:
        for file in self.files:
            file.close()
