"""The curves of runs: what `metrics.jsonl` tells of each step, as arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.training.metrics import METRICS

TOLD = ("tokens", "seconds", "loss", "validation_loss", "learning_rate", "tokens_per_s", "norm")
SMOOTHED = ("loss", "tokens_per_s", "norm")
PART, LEAST = 100, 10  # of the longest run, but some steps, are in a mean where nobody says


@dataclass(frozen=True)
class Curves:
    """What a run's metrics tell.

    name       by which it is told from the others
    steps      how many were made: (N,), float64
    values     name -> (N,) float64, nan where a step does not tell it: those of TOLD
    smoothed   name -> (N,), means over the latest steps: those of SMOOTHED
    remark     what is to be said of its file; "" where there is nothing
    """

    name: str
    steps: np.ndarray
    values: dict[str, np.ndarray]
    smoothed: dict[str, np.ndarray]
    remark: str = ""

    def has(self, name: str) -> bool:
        """Whether any step tells it."""
        return bool(np.isfinite(self.values[name]).any())


def read_runs(paths: Sequence[str], smooth: int = 0) -> list[Curves]:
    """Curves of run folders, or of files of metrics.

    smooth   over how many steps to take means, 0 = a hundredth of the longest run, and at least ten

    Errors   FileNotFoundError where there are no metrics, ValueError where they are none or have no step
    """
    found = [(name, *_read(Path(path))) for name, path in zip(_names(paths), paths)]
    length = smooth or max(LEAST, *(len(steps) // PART for _, steps, _, _ in found))
    return [
        Curves(name, steps, values, {n: smoothed(values[n], length) for n in SMOOTHED}, remark)
        for name, steps, values, remark in found
    ]


def _read(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray], str]:
    file = path / METRICS if path.is_dir() else path
    rule, advice = f"a run must have its {METRICS}", "Name the folder of a run, or such a file."
    require(file.is_file(), "plot", rule, {"run": path}, advice, FileNotFoundError)
    content = file.read_bytes()
    *lines, rest = content.split(b"\n")
    records = list(_records(file, lines))
    rule, advice = "the metrics must have a step", "Wait for the run's first one."
    require(bool(records), "plot", rule, {"metrics": file}, advice)
    remark = f"{file} ends within a line, which is left out: its run is writing it, or was killed" if rest else ""
    values = {name: np.array([_number(record.get(name)) for record in records]) for name in TOLD}
    steps = np.array([record["step"] + 1.0 for record in records])
    return steps, values, remark


def _records(file: Path, lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """A record a line, in the order of their steps."""
    last = -1
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            step = record["step"]
            good = isinstance(step, int) and step > last
        except (ValueError, TypeError, KeyError):
            good = False
        if not good:
            rule, got = (
                "each line of the metrics must be a step after the one before",
                {"metrics": file, "line": number},
            )
            raise refusal(ValueError, "plot", rule, got, "The file is damaged, or none of metrics.")
        last = step
        yield record


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def smoothed(values: np.ndarray, length: int) -> np.ndarray:
    """Mean of each value and those before it, weighted by 1 - 1/length a step back; nan counts for nothing.

    Shapes   (N,) -> (N,)
    """
    kept, total, weight = 1 - 1 / max(length, 1), 0.0, 0.0
    found = np.full(len(values), np.nan)
    for number, value in enumerate(values):
        if np.isfinite(value):
            total, weight = kept * total + value, kept * weight + 1
        found[number] = total / weight if weight else np.nan
    return found


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points of a curve, the least and the largest of each piece among them; without nan.

    Shapes   (N,), (N,) -> (M,), (M,)
    """
    told = np.isfinite(x) & np.isfinite(y)
    x, y = x[told], y[told]
    if len(x) <= most:
        return x, y
    pieces = np.array_split(np.arange(len(x)), most // 2)
    kept = sorted({int(piece[at]) for piece in pieces for at in (y[piece].argmin(), y[piece].argmax())})
    return x[kept], y[kept]


def _names(paths: Sequence[str]) -> list[str]:
    """What tells the runs apart: the ends of their paths, as long as they must be; whole where they are the same."""
    parts = [path.parts[:-1] if path.name == METRICS else path.parts for path in (Path(p).absolute() for p in paths)]
    for length in range(1, 1 + max(map(len, parts))):
        names = ["/".join(own[-length:]) for own in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]
