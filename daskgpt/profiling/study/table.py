"""The table of a study, one row a run: in a CSV file that grows while it runs, and seen from a reference point."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from daskgpt.config.groups import groups_of_batch
from daskgpt.config.model import PRESETS, GPT2Config
from daskgpt.model.parameters import parameter_count
from daskgpt.profiling.records import PACKAGES, Figure, Record, measured
from daskgpt.profiling.statistics import Spread
from daskgpt.profiling.study.grid import DIALS, ORDER, Point, StudyConfig, sort_key

MODEL = tuple(f.name for f in fields(GPT2Config))
SHARED = ("batch_size", "sequence_length", "groups", "precision", "window", "warmup", "seed")
PHASES_MS = ("forward_ms", "backward_ms", "update_ms")
SHARES = ("overlap", "steps_overlap", "kernel_share", "inside_share", "scheduling_share", "waiting_share")
TEXT = ("date", "loss", "machine", "cpu", "python", "daskgpt", *PACKAGES)
FOUND = (
    *("batch_chunk_used", "sequence_chunk_used", "grain_used", "tasks", "steps"),
    *("step_ms", "step_ms_q1", "step_ms_q3", "tokens_per_s", *PHASES_MS, "recording_cost", "critical_path_ms"),
    *(*SHARES, "peak_gb", "others_cores", "cores", *TEXT),
)
COLUMNS = (*MODEL, *SHARED, *DIALS, "repetition", *FOUND)
# Column -> figure and unit of a record.
FIGURES = {
    **{"step_ms": ("step", "ms"), "critical_path_ms": ("critical_path", "ms"), "peak_gb": ("peak", "GB")},
    **{name: (name, "") for name in SHARES},
}

Row = dict[str, Any]


class Table:
    """The rows of a study, in memory and on disk.

    Errors   ValueError where the file is of another study: other columns, another model or batch
    """

    def __init__(self, path: Path, model: GPT2Config, study: StudyConfig) -> None:
        self.path = path
        self.shared = asdict(model) | {name: getattr(study, name) for name in SHARED}
        self.shared["groups"] = groups_of_batch(study.batch_size, study.sequence_length, study.groups)
        self.rows = list(self._read()) if path.exists() else []

    def _read(self) -> Iterator[Row]:
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                rule = "the table must have the columns of this version"
                raise ValueError(f"study: {rule}; got file={self.path}. Give another --out.")
            for texts in reader:
                row = {name: text if name in TEXT else _value(text) for name, text in texts.items()}
                for name, value in self.shared.items():
                    if row[name] != value:
                        got = f"{name}={value}, and {name}={row[name]} in {self.path}"
                        raise ValueError(f"study: a folder must hold one study; got {got}. Give another --out.")
                yield row

    def __contains__(self, run: tuple[Point, int]) -> bool:
        point, repetition = run
        wanted = asdict(point) | {"repetition": repetition}
        return any(wanted.items() <= row.items() for row in self.rows)

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


def _value(text: str) -> Any:
    """Return the number that was written, the word, or None."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


class Rows:
    """The rows of a study, seen from a reference point: the one whose values the most points share."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.all = list(rows)
        self.runs: Counter[tuple[Any, ...]] = Counter(tuple(row[dial] for dial in DIALS) for row in rows)
        counts = [Counter(values) for values in zip(*self.runs)]

        def commonness(point: tuple[Any, ...]) -> tuple[int, bool, tuple[Any, ...]]:
            return sum(own[value] for own, value in zip(counts, point)), "step" in point, point

        self.reference: dict[str, Any] = dict(zip(DIALS, sorted(self.runs, key=commonness)[-1]))

    def at(self, **values: Any) -> list[Row]:
        """Return the rows with these values, and those of the reference for the other settings; fork-join has grain
        kernel unless a grain is given.
        """
        wanted = self.reference | values
        if wanted["barrier"] == "layer" and "grain" not in values:
            wanted["grain"] = "kernel"
        return [row for row in self.all if wanted.items() <= row.items()]

    def along(self, dial: str, **values: Any) -> dict[Any, list[Row]]:
        """Return value of a setting -> its rows, for those values that were run."""
        known = sorted({row[dial] for row in self.all}, key=lambda value: sort_key(dial, value))
        found = {value: self.at(**{dial: value}, **values) for value in known}
        return {value: rows for value, rows in found.items() if rows}

    def sequential(self, column: str = "step_ms") -> Spread | None:
        """Return the times of the sequential run, the base of every speedup: one thread, and no barrier that costs.

        On one thread a barrier between phases costs next to nothing, and phases have times of their own there.
        """
        found = (spread(self.at(threads=1, barrier=barrier), column) for barrier in ("phase", "step", "none"))
        return next((times for times in found if times), None)

    def phase_times(self, barrier: str) -> dict[str, dict[int, Spread]]:
        """Return column of a phase, and of the step -> threads -> its times; empty where phases were not apart."""
        found = self.along("threads", barrier=barrier)
        times = {column: spreads(found, column) for column in (*PHASES_MS, "step_ms")}
        return times if all(times.values()) else {}

    def slicings(self) -> dict[int, dict[int, Spread]]:
        """Return sequences in a chunk -> number of chunks -> times of a step, most sequences first."""
        size, length = self.all[0]["batch_size"], self.all[0]["sequence_length"]
        series = {}
        for sequences in sorted({row["batch_chunk"] for row in self.all} - {0}, reverse=True):
            times = spreads(self.along("sequence_chunk", batch_chunk=sequences))
            times.pop(0, None)  # auto
            series[sequences] = {size // sequences * (length // tokens): times[tokens] for tokens in reversed(times)}
        return {sequences: times for sequences, times in series.items() if times}

    def schedulers(self) -> dict[str, list[Row]]:
        """Return `threads (2 threads)` -> its rows; on a cluster by both engines."""
        found = {}
        for scheduler in sorted({row["scheduler"] for row in self.all}, key=lambda own: sort_key("scheduler", own)):
            for engine in ORDER["engine"]:
                for threads, rows in self.along("threads", scheduler=scheduler, engine=engine).items():
                    own = count(threads, "thread" if scheduler in ("sync", "threads") else "worker")
                    found[f"{scheduler}{', engine tasks' * (engine == 'tasks')} ({own})"] = rows
        return found

    def records(self, arguments: Sequence[str]) -> list[Record]:
        """Return a record for each point, whose turns are its runs; arguments: the command line of the study."""
        shared = ("batch_size", "sequence_length", "groups", "precision", "window", "tasks", "others_cores", "loss")
        found = []
        for point in self.runs:
            rows = [row for row in self.all if tuple(row[dial] for dial in DIALS) == point]
            first, spreads = rows[0], {column: spread(rows, column) for column in FIGURES}
            settings = {"model": model_name(first)} | {name: first[name] for name in (*DIALS, *shared)}
            figures = {FIGURES[name][0]: Figure.of(own, FIGURES[name][1]) for name, own in spreads.items() if own}
            record = measured("daskgpt.study", arguments, figures, settings)
            where = {**record.machine, "processor": first["cpu"], "cores": first["cores"]}
            versions = {name: first[name] for name in record.versions}
            found.append(replace(record, date=str(rows[-1]["date"]), machine=where, versions=versions))
        return found


def spread(rows: Iterable[Row], column: str = "step_ms") -> Spread | None:
    """Return a column's values, over the runs that have it; None where none has."""
    values = tuple(float(row[column]) for row in rows if row[column] is not None)
    return Spread(values) if values else None


def spreads(found: Mapping[Any, Iterable[Row]], column: str = "step_ms") -> dict[Any, Spread]:
    """Return the `spread` of each name's rows, of those that have one."""
    own = {name: spread(rows, column) for name, rows in found.items()}
    return {name: values for name, values in own.items() if values is not None}


def median(rows: Iterable[Row], column: str) -> float:
    """Return a column's median; 0 where no row has it."""
    found = spread(rows, column)
    return found.median if found else 0.0


def speedups(times: Mapping[int, Spread], base: Spread | None) -> dict[int, float]:
    """Return thread count -> time of the base, divided by the time with these; empty without a base."""
    return {threads: base.median / own.median for threads, own in times.items()} if base else {}


def model_name(row: Row) -> str:
    """Return `gpt2 (124,439,808 parameters)` of a run's model; a size without a name is described by its numbers."""
    config = GPT2Config(**{name: row[name] for name in MODEL})
    known = [name for name, size in PRESETS.items() if size == config]
    numbers = f"a GPT-2 with {count(config.blocks, 'block')} of {config.channels} channels"
    return f"{known[0] if known else numbers} ({parameter_count(config):,} parameters)"


def count(number: int, what: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
