"""The table of a study: one row a run, in a CSV file that grows while it runs."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from daskgpt.config.errors import refusal
from daskgpt.config.groups import groups_of_batch
from daskgpt.config.model import GPT2Config
from daskgpt.instruments.study.dials import DIALS
from daskgpt.instruments.study.grid import Point, StudyConfig

MODEL = tuple(f.name for f in fields(GPT2Config))
SHARED = ("batch_size", "sequence_length", "groups", "precision", "window", "warmup", "seed")
KEY = (*DIALS, "repetition")
SHARES = ("overlap", "steps_overlap", "kernel_share", "inside_share", "scheduling_share", "waiting_share")
KERNELS = ("forward_kernel_ms", "backward_kernel_ms", "update_kernel_ms")
TIMES = ("step_ms", "step_ms_q1", "step_ms_q3", "tokens_per_s", "forward_ms", "backward_ms", "update_ms", *KERNELS)
PLACE = ("others_cores", "machine", "cpu", "cores", "python", "daskgpt", "numpy", "numba", "dask", "distributed")
FOUND = (
    "date",
    "batch_chunk_used",
    "sequence_chunk_used",
    "grain_used",
    "tasks",
    "steps",
    *TIMES,
    "recording_cost",
    "critical_path_ms",
    *SHARES,
    "peak_gb",
    "loss",
    *PLACE,
)
COLUMNS = (*MODEL, *SHARED, *KEY, *FOUND)
WORDS = {"norm", "precision", "scheduler", "barrier", "grain", "date", "grain_used", "loss", "machine", "cpu"}
WORDS |= {"python", "daskgpt", "numpy", "numba", "dask", "distributed"}

Row = dict[str, Any]


class Table:
    """The rows of a study, in memory and on disk.

    Errors   ValueError where the file is of another study: other columns, another model or batch
    """

    def __init__(self, path: Path, model: GPT2Config, study: StudyConfig) -> None:
        self.path, self.rows = path, list[Row]()
        self.shared = asdict(model) | {name: asdict(study)[name] for name in SHARED}
        self.shared["groups"] = groups_of_batch(study.batch_size, study.sequence_length, study.groups)
        if path.exists():
            self.rows = list(self._read())

    def _read(self) -> Iterator[Row]:
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                rule = "the table must have the columns of this version"
                raise refusal(ValueError, "study", rule, {"file": self.path}, "Give another --out.")
            for texts in reader:
                row = {name: _value(name, text) for name, text in texts.items()}
                different = {name: row[name] for name, value in self.shared.items() if row[name] != value}
                if different:
                    name, value = next(iter(different.items()))
                    got = f"{name}={self.shared[name]}, and {name}={value} in {self.path}"
                    raise refusal(ValueError, "study", "a folder must hold one study", got, "Give another --out.")
                yield row

    def __contains__(self, run: tuple[Point, int]) -> bool:
        return key_of(*run) in {tuple(row[name] for name in KEY) for row in self.rows}

    def add(self, point: Point, repetition: int, found: Mapping[str, Any]) -> None:
        """Append a run's row."""
        new = not self.path.exists()
        row = self.shared | asdict(point) | {"repetition": repetition} | dict(found)
        self.rows.append(row)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)


def key_of(point: Point, repetition: int) -> tuple[Any, ...]:
    """What tells one run from another."""
    return (*asdict(point).values(), repetition)


def _value(name: str, text: str) -> Any:
    """What was written: a word, a number, or nothing."""
    if name in WORDS or text == "":
        return text if text else None
    return float(text) if "." in text or "e" in text else int(text)
