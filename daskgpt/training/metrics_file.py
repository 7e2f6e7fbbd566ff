"""`metrics.jsonl`: a line of JSON a step, the file that a run is gone on with and drawn from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from daskgpt.config.files import replacing
from daskgpt.training.record_file import RecordFile

METRICS = "metrics.jsonl"


def open_metrics(folder: Path, sections: Mapping[str, Any], done: int | None) -> RecordFile:
    """The file of a run that begins (`done` is None), or goes on behind its first so many steps.

    Errors   FileExistsError where another run has begun here
    """
    path = folder / METRICS
    if done is not None:
        kept = b"".join(line for _, line in metrics_lines(path, done))
        if kept != path.read_bytes():
            with replacing(path, "RunFolder") as file:
                file.write(kept)
    return RecordFile(path, json_line, new=done is None)


def json_line(record: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(record, allow_nan=False)}\n".encode()


def metrics_lines(path: Path, steps: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Records of a file of metrics and the lines that they are on, of steps below a number; what is no record is not
    among them, such as the part of a line that a killed process has left, nor is a step that was there before.
    """
    known = -1
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, TypeError, KeyError):
            continue
        if line.endswith(b"\n") and isinstance(step, int) and known < step < steps:
            known = step
            yield record, line
