"""Steps whose loss or norm lies far above those before: their update is left out.

The limits of a step follow from the steps before it and from nothing else, so the same steps are left out whoever makes
them, and again where they are made again. A step counts in later limits with its numbers as far as its own limits let
them: an outlier does not widen them at once, and a loss that has come to stay is let in after some steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, inf, sqrt
from typing import Any

from daskgpt.training.step import NO_LIMITS, Limits, Outcome

WINDOW = 128  # steps that count
LEAST = 32  # steps before which nothing is left out


class Outliers:
    """The limits of steps, z standard deviations above the mean.

    seen   (step, loss, norm) of the steps that count, in order
    """

    def __init__(self, z: float, seen: Sequence[Sequence[Any]] = ()) -> None:
        self.z = z
        self.seen = [(int(step), float(loss), float(norm)) for step, loss, norm in seen]

    def limits(self, step: int) -> Limits:
        """Of loss and norm, above which the update of a step is left out."""
        known = [numbers for number, *numbers in self.seen if number < step][-WINDOW:]
        if not self.z or len(known) < LEAST:
            return NO_LIMITS
        losses, norms = zip(*known)
        return self._limit(losses), self._limit(norms)

    def note(self, step: int, outcome: Outcome) -> None:
        """A step is done; one that is made again counts once."""
        if self.z and outcome.norm is not None and (not self.seen or step > self.seen[-1][0]):
            most_loss, most_norm = self.limits(step)
            self.seen.append((step, min(outcome.loss, most_loss), min(outcome.norm, most_norm)))

    def facts(self, done: int) -> list[tuple[int, float, float]]:
        """What a checkpoint after so many steps says of them."""
        return [each for each in self.seen if each[0] < done][-WINDOW:]

    def _limit(self, values: Sequence[float]) -> float:
        mean = fsum(values) / len(values)
        deviation = sqrt(fsum((value - mean) ** 2 for value in values) / len(values))
        limit = mean + self.z * deviation
        return limit if limit < inf else inf
