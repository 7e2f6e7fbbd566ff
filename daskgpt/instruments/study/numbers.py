"""Medians, quartiles and comparisons of a study's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from daskgpt.config.model import PRESETS, GPT2Config
from daskgpt.instruments.statistics import Comparison, Spread, rounded
from daskgpt.instruments.study.dials import DIALS
from daskgpt.instruments.study.table import MODEL, Row
from daskgpt.model.parameters import parameter_count


def spread(rows: Iterable[Row], column: str) -> Spread | None:
    """Of a column, over the runs that have it; None where none has."""
    values = tuple(float(row[column]) for row in rows if row[column] is not None)
    return Spread(values) if values else None


def spreads(found: Mapping[Any, Iterable[Row]], column: str = "step_ms") -> dict[Any, Spread]:
    """The `spread` of each name's rows, of those that have one."""
    own = {name: spread(rows, column) for name, rows in found.items()}
    return {name: values for name, values in own.items() if values is not None}


def median(rows: Iterable[Row], column: str) -> float:
    """Of a column; 0 where no row has it."""
    found = spread(rows, column)
    return found.median if found else 0.0


class Rows:
    """The rows of a study, seen from a reference point: the one whose values the most points share."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.all = list(rows)
        points: list[tuple[Any, ...]] = sorted({tuple(row[dial] for dial in DIALS) for row in rows})
        counts = [Counter(values) for values in zip(*points)]

        def commonness(point: tuple[Any, ...]) -> tuple[int, bool, tuple[Any, ...]]:
            return sum(own[value] for own, value in zip(counts, point)), "step" in point, point

        most_common = max(points, key=commonness)
        self.reference: dict[str, Any] = dict(zip(DIALS, most_common))

    def at(self, **values: Any) -> list[Row]:
        """The rows with these values, and those of the reference for the other dials.

        Fork-join has grain kernel wherever it is asked for.
        """
        wanted = self.reference | values
        if wanted["barrier"] == "layer" and "grain" not in values:
            wanted["grain"] = "kernel"
        return [row for row in self.all if all(row[dial] == value for dial, value in wanted.items())]

    def along(self, dial: str, **values: Any) -> dict[Any, list[Row]]:
        """Value of a dial -> its rows, for those values that were run."""
        known = sorted({row[dial] for row in self.all}, key=DIALS[dial].order)
        found = {value: self.at(**{dial: value}, **values) for value in known}
        return {value: rows for value, rows in found.items() if rows}

    def sequential(self, column: str = "step_ms") -> Spread | None:
        """Return the times of the sequential run, the base of every speedup: one thread, and no barrier that costs.

        On one thread a barrier between phases costs next to nothing, and phases have times of their own there.
        """
        found = (spread(self.at(threads=1, barrier=barrier), column) for barrier in ("phase", "step", "none"))
        return next((times for times in found if times), None)


def compare(name: str, rows: Sequence[Row], other_name: str, other_rows: Sequence[Row]) -> Comparison | None:
    """Of the times of a step; None where one of them was not run."""
    times, other_times = spread(rows, "step_ms"), spread(other_rows, "step_ms")
    if times is None or other_times is None:
        return None
    return Comparison.of(name, times, other_name, other_times)


def sentence(found: Comparison) -> str:
    """Which takes longer, by how much, or that it cannot be told; bold only what several runs of both show."""
    fast, slow = (rounded(times.median) for times in found.times)
    if found.clear:
        return (
            f"**a step takes {rounded(found.ratio, 2)} times as long with {found.slower} as with {found.faster}** "
            f"({slow} against {fast} ms)."
        )
    if found.single:
        return (
            f"in single runs a step took {rounded(found.ratio, 2)} times as long with {found.slower} as with "
            f"{found.faster} ({slow} against {fast} ms)."
        )
    return (
        f"the times of a step with {found.slower} and with {found.faster} differ by less than the runs of each do "
        f"({slow} against {fast} ms, a ratio of {rounded(found.ratio, 2)})."
    )


def speedups(times: Mapping[int, Spread], base: Spread | None) -> dict[int, float]:
    """Thread count -> time of the base, divided by the time with these; empty without a base."""
    return {threads: base.median / own.median for threads, own in times.items()} if base else {}


def efficiencies(times: Mapping[int, Spread], base: Spread | None) -> dict[int, float]:
    """Thread count -> speedup divided by the threads; empty without a base."""
    return {threads: value / threads for threads, value in speedups(times, base).items()}


def model_of(row: Row) -> GPT2Config:
    """The size of the model of a run."""
    return GPT2Config(**{name: row[name] for name in MODEL})


def model_name(config: GPT2Config) -> str:
    """`gpt2 (124,439,808 parameters)`; a size that has no name is told by its numbers."""
    known = [name for name, size in PRESETS.items() if size == config]
    numbers = f"a GPT-2 with {count(config.blocks, 'block')} of {config.channels} channels"
    return f"{known[0] if known else numbers} ({parameter_count(config):,} parameters)"


def count(number: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def runs_a_point(rows: Sequence[Row]) -> tuple[int, int]:
    """Of the points that were run, the least and the largest number of runs."""
    counts = Counter(tuple(row[dial] for dial in DIALS) for row in rows)
    return min(counts.values()), max(counts.values())
