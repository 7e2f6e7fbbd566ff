"""`metrics.jsonl`: a line of JSON a step, the file that a run is gone on with and drawn from."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from daskgpt.config.files import replacing, set_aside
from daskgpt.training.record_file import RecordFile

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
