"""A program that is in memory for its own turns only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from daskgpt.instruments.compare.turns import Side


class Apart:
    """A `compare.turns.Side` that is opened for each of its turns, warms up, runs and is closed.

    Large models that train beside each other, though one waits while another one runs, may leave a machine so little
    memory that its system looks for some in every step.

    losses   of the newest turn, with those of warming up
    """

    def __init__(self, opened: Callable[[], AbstractContextManager[Side]], warmup: int) -> None:
        """warmup   steps of a turn before those that are timed"""
        self.opened, self.warmup = opened, warmup
        self.losses: list[float] = []
        self.most, self.used = 0, dict[tuple[str, int], float]()

    def run(self, count: int) -> list[float]:
        with self.opened() as side:
            side.run(self.warmup)
            side.reset_peak()
            seconds = side.run(count)
            self.losses = list(side.losses)
            self.most = max(self.most, side.peak())
            self.used |= side.cpu()
        return seconds

    def reset_peak(self) -> None:
        self.most = 0

    def peak(self) -> int:
        return self.most

    def cpu(self) -> Mapping[tuple[str, int], float]:
        """Of its processes when they were last seen: most of them have ended."""
        return self.used
