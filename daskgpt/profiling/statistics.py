"""Medians, quartiles, and what two samples of times let one say: the arithmetic of every measurement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import quantiles

from daskgpt.config.errors import refusal


@dataclass(frozen=True)
class Spread:
    """Some values of one quantity: how many, median, quartiles and ends.

    Errors   ValueError where there is no value
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise refusal(ValueError, "Spread", "there must be a value", "values=()", "Measure at least once.")

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        return cls(tuple(values))

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """A quarter, half and three quarters of the way through the values, in between linearly.

        Source   Hyndman and Fan 1996, definition 7: what NumPy's and Python's inclusive methods compute
        """
        if self.n == 1:
            return self.values[0], self.values[0], self.values[0]
        low, middle, high = quantiles(self.values, n=4, method="inclusive")
        return low, middle, high

    @property
    def median(self) -> float:
        return self.quartiles[1]

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def largest(self) -> float:
        return max(self.values)

    def text(self, unit: str = "ms", digits: int | None = None, factor: float = 1) -> str:
        """Return `30.1 ms (29.8 .. 30.5)`, the quartiles where there are several values; factor: units of a value."""
        low, middle, high = (rounded(factor * value, digits) for value in self.quartiles)
        return " ".join(filter(None, (middle, unit, f"({low} .. {high})" if self.n > 1 else "")))


@dataclass(frozen=True)
class Comparison:
    """Two settings by the time that they take, `times` in the same order: the faster one first."""

    faster: str
    slower: str
    times: tuple[Spread, Spread]

    @classmethod
    def of(cls, name: str, times: Spread, other_name: str, other_times: Spread) -> Comparison:
        """Of two settings, whichever is faster."""
        if times.median <= other_times.median:
            return cls(name, other_name, (times, other_times))
        return cls(other_name, name, (other_times, times))

    @property
    def ratio(self) -> float:
        """How many times as long the slower one takes: at least 1."""
        return self.times[1].median / self.times[0].median

    @property
    def single(self) -> bool:
        """Whether one of them was run once, from which nothing follows."""
        return min(times.n for times in self.times) == 1

    @property
    def clear(self) -> bool:
        """Whether the middle halves of the two lie apart; never of a single run."""
        return not self.single and self.times[0].quartiles[2] < self.times[1].quartiles[0]


def rounded(value: float, digits: int | None = None) -> str:
    """A number with three to four significant digits, or with so many decimals."""
    if digits is None:
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"
