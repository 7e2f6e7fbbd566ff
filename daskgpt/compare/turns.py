"""Two programs in turns on one machine: what else happens on it then meets both alike."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from daskgpt.measure import Spread

TURN_SECONDS = 0.5  # least length of a turn: the first step of it finds the caches full of the other's data
# Between turns. The other's threads spin for some milliseconds after their last work before they sleep.
PAUSE_SECONDS = 0.05

Pair = tuple[float, float]  # seconds a step, ours and theirs


class Side(Protocol):
    """A program that trains."""

    losses: list[float]

    def run(self, count: int) -> list[float]:
        """Seconds of each of some further steps, or the means of some together."""
        ...

    def reset_peak(self) -> None:
        """Let `peak` count from now on."""
        ...

    def peak(self) -> int:
        """Most bytes in memory since then."""
        ...


@dataclass(frozen=True)
class Comparison:
    """What two programs took for the same steps.

    name         the other program, as it is printed
    pairs        seconds a step of each turn, ours and theirs
    block        steps of a turn
    peaks        bytes, ours and theirs
    first_losses ours and theirs, before any update
    """

    name: str
    pairs: Sequence[Pair]
    block: int
    peaks: tuple[int, int]
    first_losses: tuple[float, float]
    threads: int

    @property
    def ours(self) -> Spread:
        return Spread.of([ours for ours, _ in self.pairs])

    @property
    def theirs(self) -> Spread:
        return Spread.of([theirs for _, theirs in self.pairs])

    @property
    def ratio(self) -> Spread:
        """Ours / theirs of each pair: below 1 where we are faster."""
        return Spread.of([ours / theirs for ours, theirs in self.pairs])

    def record(self) -> dict[str, Any]:
        """For a machine to read."""
        found: dict[str, Any] = {"against": self.name, "turns": len(self.pairs), "steps_a_turn": self.block}
        for name, spread, digits in (("ours_ms", self.ours, 3), ("theirs_ms", self.theirs, 3)):
            found |= spread.fields(name, 1e3, digits)
        found |= self.ratio.fields("ratio", 1, 4)
        found |= {"ours_peak_gb": round(self.peaks[0] / 1e9, 4), "theirs_peak_gb": round(self.peaks[1] / 1e9, 4)}
        found |= {"ours_first_loss": self.first_losses[0], "theirs_first_loss": self.first_losses[1]}
        return found | {"threads": self.threads}

    def describe(self) -> str:
        """For a person to read."""
        lines = [f"{len(self.pairs)} turns of {self.block} steps each, {self.threads} threads"]
        lines += [f"{'':32} {'ms a step':>10} {'min':>10} {'max':>10} {'peak GB':>9} {'first loss':>11}"]
        for name, spread, peak, loss in zip(
            ("daskgpt", self.name), (self.ours, self.theirs), self.peaks, self.first_losses
        ):
            times = "".join(f" {value * 1e3:10,.1f}" for value in (spread.median, spread.least, spread.largest))
            lines.append(f"{name:32}{times} {peak / 1e9:9.2f} {loss:11.5f}")
        ratio = self.ratio
        lines.append(f"{'ratio of each turn':32} {ratio.median:10.3f} {ratio.least:10.3f} {ratio.largest:10.3f}")
        return "\n".join(lines)


def block_of(seconds: float) -> int:
    """How many steps of that length make a turn."""
    return max(1, math.ceil(TURN_SECONDS / seconds))


def alternate(ours: Side, theirs: Side, turns: int, block: int) -> list[Pair]:
    """Mean seconds a step of each turn, ours and theirs; who begins changes from turn to turn."""
    pairs = []
    for turn in range(turns):
        taken = {}
        for side in (ours, theirs) if turn % 2 == 0 else (theirs, ours):
            time.sleep(PAUSE_SECONDS)
            taken[side] = fmean(side.run(block))
        pairs.append((taken[ours], taken[theirs]))
    return pairs


def compare(ours: Side, theirs: Side, warmup: int, turns: int) -> tuple[list[Pair], int]:
    """Warm both up, then let them take turns; the pairs, and the steps of a turn."""
    slower = max(min(side.run(warmup)) for side in (ours, theirs))
    for side in (ours, theirs):
        side.reset_peak()
    block = block_of(slower)
    return alternate(ours, theirs, turns, block), block
