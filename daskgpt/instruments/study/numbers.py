"""Medians, quartiles and comparisons of a study's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from daskgpt.instruments.study.grid import DIALS
from daskgpt.instruments.study.table import Row


@dataclass(frozen=True)
class Spread:
    """The values of some runs: median, quartiles, and how many runs."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        if self.n == 1:
            return self.values * 3  # type: ignore[return-value]
        low, middle, high = quantiles(self.values, n=4, method="inclusive")
        return low, middle, high

    @property
    def median(self) -> float:
        return self.quartiles[1]

    def text(self, unit: str = "ms", digits: int | None = None) -> str:
        """`30.1 ms (29.8 .. 30.5)`, the quartiles where there are several runs."""
        low, middle, high = (figure(value, digits) for value in self.quartiles)
        return f"{middle} {unit} ({low} .. {high})" if self.n > 1 else f"{middle} {unit}"


def figure(value: float, digits: int | None = None) -> str:
    """A number with three to four significant digits, or with so many decimals."""
    if digits is None:
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def spread(rows: Iterable[Row], column: str) -> Spread | None:
    """Of a column, over the runs that have it; None where none has."""
    values = tuple(float(row[column]) for row in rows if row[column] is not None)
    return Spread(values) if values else None


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
        found = {value: self.at(**{dial: value}, **values) for value in sorted({row[dial] for row in self.all})}
        return {value: rows for value, rows in found.items() if rows}


@dataclass(frozen=True)
class Comparison:
    """Two settings by the time that they take.

    clear   whether the quartiles of the two do not overlap (with single runs: whether they differ by 5 % or more)
    """

    faster: str
    slower: str
    times: tuple[Spread, Spread]

    @property
    def ratio(self) -> float:
        return self.times[1].median / self.times[0].median

    @property
    def clear(self) -> bool:
        if min(self.times[0].n, self.times[1].n) == 1:
            return self.ratio >= SINGLE_RUNS
        return self.times[0].quartiles[2] < self.times[1].quartiles[0]

    def sentence(self) -> str:
        """Which takes longer, by how much, or that it cannot be told."""
        fast, slow = (figure(times.median) for times in self.times)
        if self.clear:
            return (
                f"**a step takes {figure(self.ratio, 2)} times as long with {self.slower} as with {self.faster}** "
                f"({slow} against {fast} ms)."
            )
        return (
            f"the times of a step with {self.slower} and with {self.faster} differ by less than the runs of each do "
            f"({slow} against {fast} ms, a ratio of {figure(self.ratio, 2)})."
        )


SINGLE_RUNS = 1.05


def compare(name: str, rows: Sequence[Row], other_name: str, other_rows: Sequence[Row]) -> Comparison | None:
    """Of the times of a step; None where one of them was not run."""
    times, other_times = spread(rows, "step_ms"), spread(other_rows, "step_ms")
    if times is None or other_times is None:
        return None
    if times.median <= other_times.median:
        return Comparison(name, other_name, (times, other_times))
    return Comparison(other_name, name, (other_times, times))


def speedups(times: dict[int, Spread]) -> dict[int, float]:
    """Thread count -> time with the fewest threads, divided by the time with these."""
    least = times[min(times)].median
    return {threads: least / spread.median for threads, spread in times.items()}


def efficiencies(times: dict[int, Spread]) -> dict[int, float]:
    """Speedup divided by how many times more threads there are."""
    return {threads: value * min(times) / threads for threads, value in speedups(times).items()}
