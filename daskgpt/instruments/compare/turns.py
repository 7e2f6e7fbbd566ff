"""Programs in turns on one machine, compared turn by turn, where nothing else runs on it."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol, TypeVar

from daskgpt.config.errors import require
from daskgpt.instruments import machine
from daskgpt.instruments.records import Figure, figures_of
from daskgpt.instruments.statistics import Spread
from daskgpt.training.job import Job

# Least length of a turn, whose first step finds the caches full of the other's data; and where that is not too long.
TURN_SECONDS, LONGEST_TURN = 0.5, 5.0
# Between turns. The other's threads spin for some milliseconds after their last work before they sleep.
PAUSE_SECONDS = 0.05

DISTURBED = 0.1  # cores that other programs keep busy
ATTEMPTS = 3  # times as many turns as are asked for, at most, to have enough that are not disturbed


@dataclass(frozen=True)
class Turn:
    """Seconds of each step of each program, and how many cores others kept busy meanwhile (0: it is not known)."""

    seconds: tuple[tuple[float, ...], ...]
    others: float = 0.0

    @property
    def means(self) -> tuple[float, ...]:
        """Mean seconds a step of each program."""
        return tuple(map(fmean, self.seconds))


@dataclass(frozen=True)
class Pair:
    """Mean seconds a step of one turn, and how many cores other programs kept busy meanwhile (0: it is not known)."""

    ours: float
    theirs: float
    others: float = 0.0

    @property
    def ratio(self) -> float:
        """Below 1 where we are faster."""
        return self.ours / self.theirs


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

    def cpu(self) -> Mapping[tuple[str, int], float]:
        """Seconds of processor time used so far, by machine and process."""
        ...


@dataclass(frozen=True)
class PairedTurns:
    """What two programs took for the same steps.

    name         the other program, as it is printed
    pairs        the turns that count
    steps        of a turn
    tried        turns with those in which other programs ran, where there were enough without
    peaks        bytes, ours and theirs
    first_losses ours and theirs, before any update
    """

    name: str
    pairs: Sequence[Pair]
    steps: int
    tried: int
    peaks: tuple[int, int]
    first_losses: tuple[float, float]
    threads: int

    @property
    def ours(self) -> Spread:
        return Spread.of(pair.ours for pair in self.pairs)

    @property
    def theirs(self) -> Spread:
        return Spread.of(pair.theirs for pair in self.pairs)

    @property
    def ratio(self) -> Spread:
        """Ours / theirs of each pair: below 1 where we are faster."""
        return Spread.of(pair.ratio for pair in self.pairs)

    @property
    def disturbed(self) -> int:
        """How many of the turns that count met other programs."""
        return disturbed(self.pairs)

    def record(self) -> dict[str, Any]:
        """For a machine to read."""
        found: dict[str, Any] = {"against": self.name, "turns": len(self.pairs), "steps_a_turn": self.steps}
        found |= {"disturbed_turns": self.disturbed, "left_out_turns": self.tried - len(self.pairs)}
        for name, spread, digits in (("ours_ms", self.ours, 3), ("theirs_ms", self.theirs, 3)):
            found |= spread.fields(name, 1e3, digits)
        found |= self.ratio.fields("ratio", 1, 4)
        found |= {"ours_peak_gb": round(self.peaks[0] / 1e9, 4), "theirs_peak_gb": round(self.peaks[1] / 1e9, 4)}
        found |= {"ours_first_loss": self.first_losses[0], "theirs_first_loss": self.first_losses[1]}
        return found | {"threads": self.threads}

    def figures(self) -> dict[str, Figure]:
        """For a record of measurements."""
        peaks = {"ours_peak": self.peaks[0], "theirs_peak": self.peaks[1]}
        return {
            **figures_of({"ours": self.ours, "theirs": self.theirs}, "ms", 1e3),
            "ratio": Figure.of(self.ratio, ""),
            **{name: Figure.single(peak / 1e9, "GB") for name, peak in peaks.items()},
        }

    def describe(self) -> str:
        """For a person to read."""
        lines = [f"{len(self.pairs)} turns of {self.steps} steps each, {self.threads} threads"]
        if self.tried > len(self.pairs):
            lines[0] += f"; {self.tried - len(self.pairs)} more left out, in which other programs ran"
        if self.disturbed:
            lines.append(f"WARNING: other programs ran in {self.disturbed} of these turns: the ratio says little")
        width = max(20, len(self.name))
        lines += [f"{'':{width}} {'ms a step':>10} {'min':>10} {'max':>10} {'peak GB':>9} {'first loss':>11}"]
        for name, spread, peak, loss in zip(
            ("daskgpt", self.name), (self.ours, self.theirs), self.peaks, self.first_losses
        ):
            times = "".join(f" {value * 1e3:10,.1f}" for value in (spread.median, spread.least, spread.largest))
            lines.append(f"{name:{width}}{times} {peak / 1e9:9.2f} {loss:11.5f}")
        ratio = self.ratio
        lines.append(f"{'ratio of each turn':{width}} {ratio.median:10.3f} {ratio.least:10.3f} {ratio.largest:10.3f}")
        return "\n".join(lines)


def steps_of_a_turn(faster: float, slower: float) -> int:
    """How many steps make a turn, from the seconds that one takes in the fastest and in the slowest program."""
    return max(1, min(math.ceil(TURN_SECONDS / faster), int(LONGEST_TURN / slower)))


def take_turns(sides: Sequence[Side], turns: int, steps: int) -> list[Turn]:
    """Turns of all programs, until so many were undisturbed by others; who begins changes from turn to turn.

    Threads that wait for each other by spinning, as OpenMP's do, become many times slower beside another program than
    ours: a ratio that was measured then would be in our favour and wrong.
    """
    found: list[Turn] = []
    while sum(turn.others <= DISTURBED for turn in found) < turns and len(found) < ATTEMPTS * turns:
        seconds = {}
        busy, start = _others_seconds(sides), time.perf_counter()
        first = len(found) % len(sides)
        for side in (*sides[first:], *sides[:first]):
            time.sleep(PAUSE_SECONDS)
            seconds[side] = tuple(side.run(steps))
        others = (_others_seconds(sides) - busy) / (time.perf_counter() - start)
        found.append(Turn(tuple(seconds[side] for side in sides), others))
    return found


def alternate(ours: Side, theirs: Side, turns: int, steps: int) -> list[Pair]:
    """Turns of two."""
    found = take_turns((ours, theirs), turns, steps)
    return [Pair(turn.means[0], turn.means[1], turn.others) for turn in found]


class _WithOthers(Protocol):
    @property
    def others(self) -> float: ...


Measured = TypeVar("Measured", bound=_WithOthers)


def undisturbed(turns: Sequence[Measured], wanted: int) -> Sequence[Measured]:
    """The turns that no other program disturbed, where these are at least half as many as wanted; else all."""
    found = [turn for turn in turns if turn.others <= DISTURBED]
    return found if 2 * len(found) >= wanted else turns


def disturbed(turns: Sequence[_WithOthers]) -> int:
    """How many turns met other programs."""
    return sum(turn.others > DISTURBED for turn in turns)


def _others_seconds(sides: Sequence[Side]) -> float:
    """Processor time of other programs on this machine; 0 where the system does not say."""
    everything = machine.busy_seconds()
    if everything is None:
        return 0.0
    own = {process: seconds for side in sides for process, seconds in side.cpu().items()}
    return everything - sum(seconds for (node, _), seconds in own.items() if node == platform.node())


def warm_up(sides: Sequence[Side], warmup: int) -> int:
    """Let all take some steps before peaks count; how many steps make a turn of theirs."""
    fastest = [min(side.run(warmup)) for side in sides]
    for side in sides:
        side.reset_peak()
    return steps_of_a_turn(min(fastest), max(fastest))


def compare(ours: Side, theirs: Side, warmup: int, turns: int) -> tuple[list[Pair], int]:
    """Warm both up, then let them take turns; the pairs, and the steps of a turn."""
    steps = warm_up((ours, theirs), warmup)
    return alternate(ours, theirs, turns, steps), steps


def require_published_model(job: Job) -> None:
    """What other programs train.

    Errors   ValueError for another model than GPT-2 or another optimizer than AdamW
    """
    rule, advice = "other programs must be able to train the same", "Leave --norm out, or compare nothing."
    require(job.config.norm == "layernorm", "bench", rule, {"norm": job.config.norm}, advice)
    require(job.optimizer.optimizer == "adamw", "bench", rule, {"optimizer": job.optimizer.optimizer}, advice)
