"""How long a run is: so many steps, the steps of so many tokens, or as many as there are in so many minutes.

Minutes are a matter of the machine, and the learning rate follows the number of all steps. So that number is estimated
again whenever a hundredth of the time has passed, and each estimate is kept with the step from which on it counts. Of a
step that is made again after a loss the learning rate is then what it was; checkpoints have the estimates too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from daskgpt.config.errors import refusal, require
from daskgpt.config.run import RunConfig

HORIZONS = ("steps", "tokens", "minutes")
ESTIMATES = 100  # in the time of a run
RECENT = 10  # estimates ago: since then the time of a step is taken


class Horizon:
    """The number of all steps, as it is known in each of them.

    changes   (from this step on, so many in all), in order
    """

    def __init__(self, run: RunConfig, tokens_a_step: int) -> None:
        one_horizon({"tokens": run.tokens, "minutes": run.minutes})
        steps = -(-run.tokens // tokens_a_step) if run.tokens else run.steps
        self.changes = [(0, steps)]
        self.seconds = 60 * run.minutes  # of the run; 0 where it is not time that ends it
        self.known: list[tuple[int, float]] = []  # steps and seconds at the last estimates of this process

    @property
    def steps(self) -> int:
        """As known now."""
        return self.changes[-1][1]

    def at(self, step: int) -> int:
        """As known when a step was made."""
        return self.changes[max(bisect_right(self.changes, step, key=lambda change: change[0]) - 1, 0)][1]

    def next_change(self, step: int) -> int | None:
        """The next step from which on another number counts; None where there is none yet."""
        number = bisect_right(self.changes, step, key=lambda change: change[0])
        return self.changes[number][0] if number < len(self.changes) else None

    def passed(self, done: int, seconds: float) -> bool:
        """Told between two steps how many were made in how many seconds: whether the estimate has changed.

        It is never below the next step, which ends the run where the time is over.
        """
        if not self.seconds:
            return False
        if not self.known:  # the time before is none of steps as they will be: chunks and grain were chosen in it
            self.known.append((done, seconds))
            return False
        then, before = self.known[-1]
        over = seconds >= self.seconds
        if done == then or not (over or seconds - before >= self.seconds / ESTIMATES):
            return False
        first, since = self.known[-RECENT:][0]
        self.known.append((done, seconds))
        left = (self.seconds - seconds) * (done - first) / (seconds - since)
        steps = done + max(round(left), 1)
        if steps == self.steps:
            return False
        self.changes.append((done, steps))
        return True

    def facts(self, seconds: float) -> dict[str, Any]:
        """What a checkpoint says of it: the estimates, and how long the run has trained."""
        return {"changes": list(self.changes), "seconds": round(seconds, 3), "of": self.seconds}

    def go_on(self, facts: Mapping[str, Any], done: int) -> None:
        """Take up what a checkpoint after so many steps says.

        Errors   ValueError where no time is left
        """
        if not self.seconds:
            return
        own = self.steps
        self.changes = [(int(first), int(steps)) for first, steps in facts.get("changes", ())] or [(0, own)]
        spent, minutes = facts.get("seconds", 0.0), self.seconds / 60
        rule, advice = "the run must have time left", "Give more --minutes: they count all processes of the run."
        ended = self.steps <= done and self.seconds <= facts.get("of", 0.0)
        got = {"minutes": f"{minutes:g}", "spent": f"{spent / 60:.1f}"}
        require(spent < self.seconds and not ended, "train", rule, got, advice)
        if self.steps <= done:  # more time than before: as many steps as fit, by what they took on average
            self.changes.append((done, max(done + 1, round(done * self.seconds / spent)) if spent else own))


def one_horizon(given: Mapping[str, Any]) -> None:
    """Errors   ValueError where a run is told in more than one way how long it is"""
    names: Sequence[str] = [name for name in HORIZONS if given.get(name)]
    if len(names) > 1:
        rule, advice = "a run must have one length", f"Leave out --{names[0]} or --{names[1]}."
        raise refusal(ValueError, "train", rule, {name: given[name] for name in names}, advice)
