"""The length of a run: a number of steps or of tokens, or the steps that fit into a number of minutes.

How many steps fit into some minutes depends on the machine, and the learning rate on the number of all steps.
So that number is estimated again whenever a hundredth of the time has passed, and each estimate is recorded with the
step from which it counts: a step that is repeated after a loss has the same learning rate. Checkpoints have the
estimates, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from daskgpt.config.errors import require
from daskgpt.config.run import RunConfig

HORIZONS = ("steps", "tokens", "minutes")
ESTIMATES = 100  # in the time of a run
RECENT = 10  # number of estimates over which the time of a step is averaged


class Horizon:
    """The number of all steps.

    changes   (step, number of all steps from that step on), in order
    """

    def __init__(self, run: RunConfig, tokens_a_step: int) -> None:
        one_horizon({"tokens": run.tokens, "minutes": run.minutes})
        steps = -(-run.tokens // tokens_a_step) if run.tokens else run.steps
        self.changes = [(0, steps)]
        self.seconds = 60 * run.minutes  # of the run; 0 if it is not limited by time
        self.known: list[tuple[int, float]] = []  # steps and seconds at each estimate of this process

    @property
    def steps(self) -> int:
        """The number of all steps, as known now."""
        return self.changes[-1][1]

    def at(self, step: int) -> int:
        """Return the number of all steps, as known when a step was made."""
        return self.changes[max(self._following(step) - 1, 0)][1]

    def next_change(self, step: int) -> int | None:
        """Return the next step from which on another number counts, if there is one."""
        number = self._following(step)
        return self.changes[number][0] if number < len(self.changes) else None

    def _following(self, step: int) -> int:
        return bisect_right(self.changes, step, key=lambda change: change[0])

    def passed(self, done: int, seconds: float) -> bool:
        """Note between two steps that some steps have taken some seconds; return whether the estimate has changed.

        The estimate is never below the next step, which ends the run when its time is over.
        """
        if not self.seconds:
            return False
        if not self.known:  # the time before does not count: chunks and grain were chosen in it
            self.known.append((done, seconds))
            return False
        then, before = self.known[-1]
        due = seconds >= self.seconds or seconds - before >= self.seconds / ESTIMATES
        if done == then or not due:
            return False
        first, since = self.known[-RECENT:][0]
        self.known.append((done, seconds))
        left = (self.seconds - seconds) * (done - first) / (seconds - since)
        steps = done + max(round(left), 1)
        changed = steps != self.steps
        if changed:
            self.changes.append((done, steps))
        return changed

    def facts(self, seconds: float) -> dict[str, Any]:
        """Return the entry of a checkpoint: the estimates, and how long the run has trained."""
        return {"changes": list(self.changes), "seconds": round(seconds, 3), "of": self.seconds}

    def resume(self, facts: Mapping[str, Any], done: int) -> None:
        """Continue from the entry of a checkpoint after some steps.

        Errors   ValueError if no time is left
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
        if self.steps <= done:  # there is more time than before: as many steps as fit, by their mean time so far
            self.changes.append((done, max(done + 1, round(done * self.seconds / spent)) if spent else own))


def one_horizon(given: Mapping[str, Any]) -> None:
    """Check that the length of a run is given in one way at most. Errors   ValueError"""
    found = {name: given[name] for name in HORIZONS if given.get(name)}
    advice = f"Leave out {' or '.join(f'--{name}' for name in found)}."
    require(len(found) < 2, "train", "a run must have one length", found, advice)
