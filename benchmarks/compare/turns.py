"""Programs that take turns, so that noise hits all alike."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter
from typing import Protocol

from daskgpt.schedulers import machine

PAUSE_SECONDS = 0.05  # between turns: threads of OpenMP spin for some milliseconds after their last work
DISTURBED = 0.1  # cores that other programs keep busy
ATTEMPTS = 3  # times as many turns as requested, at most, to have enough that are not disturbed


@dataclass(frozen=True)
class Turn:
    """Seconds of each step of each program, and how many cores others kept busy meanwhile."""

    seconds: tuple[tuple[float, ...], ...]
    others: float = 0.0

    @property
    def means(self) -> tuple[float, ...]:
        """Mean seconds a step of each program."""
        return tuple(map(fmean, self.seconds))


class Side(Protocol):
    """A program that takes turns with others."""

    def run(self, count: int) -> list[float]:
        """Seconds of each of some further steps, or the means of some together."""
        ...

    def cpu(self) -> Mapping[tuple[str, int], float]:
        """Seconds of processor time used so far, by machine and process."""
        ...


def take_turns(sides: Sequence[Side], turns: int, steps: int) -> list[Turn]:
    """Let programs take turns of some steps until other programs have left so many undisturbed; who begins changes.

    Threads that wait for each other by spinning, as OpenMP's do, become many times slower beside another program than
    ours: a ratio that was measured then would be in our favour and wrong.
    """
    taken: list[Turn] = []
    while len(taken) - disturbed(taken) < turns and len(taken) < ATTEMPTS * turns:
        seconds = {}
        busy, start = _others_seconds(sides), perf_counter()
        first = len(taken) % len(sides)
        for side in (*sides[first:], *sides[:first]):
            time.sleep(PAUSE_SECONDS)
            seconds[side] = tuple(side.run(steps))
        others = (_others_seconds(sides) - busy) / (perf_counter() - start)
        taken.append(Turn(tuple(seconds[side] for side in sides), others))
    return taken


def undisturbed(turns: Sequence[Turn], wanted: int) -> Sequence[Turn]:
    """Return the turns that no other program disturbed, where these are at least half as many as wanted; else all."""
    quiet = [turn for turn in turns if turn.others <= DISTURBED]
    return quiet if 2 * len(quiet) >= wanted else turns


def disturbed(turns: Sequence[Turn]) -> int:
    """Count the turns in which other programs ran."""
    return sum(turn.others > DISTURBED for turn in turns)


def _others_seconds(sides: Sequence[Side]) -> float:
    """Return the processor time of other programs on this machine."""
    used = {process: seconds for side in sides for process, seconds in side.cpu().items()}
    return machine.busy_seconds() - sum(seconds for (node, _), seconds in used.items() if node == platform.node())
