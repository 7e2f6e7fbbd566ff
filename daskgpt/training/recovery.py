"""Going on when a worker is lost: back to the newest state that there is, and the steps since then once more."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daskgpt.schedulers.losses import LostCluster, LostResults
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoints import newest_good, read_checkpoint
from daskgpt.training.job import Job
from daskgpt.training.recovery_points import RecoveryPoints
from daskgpt.training.resuming import Beginning
from daskgpt.training.step import State

LOOKING = 2.0  # seconds between two looks at who is there
MOST_IN_VAIN = 10  # losses in a row without a step further than before: then something ends the workers


@dataclass
class Losses:
    """Counts losses: a run may lose as many workers as there are, as long as it gets on between two losses.

    done     steps that had been made before the last loss
    restart  the step from which it was gone on with
    in_vain  how many losses in a row have left both as they were
    """

    done: int = -1
    restart: int = -1
    in_vain: int = 0

    def count(self, done: int, restart: int, error: LostResults) -> None:
        """Another one. Errors   LostCluster where the run does not get on"""
        self.in_vain = 0 if (done, restart) > (self.done, self.restart) else self.in_vain + 1
        self.done, self.restart = done, restart
        if self.in_vain >= MOST_IN_VAIN:
            rule = "a run must get on between losses"
            raise LostCluster("train", rule, f"{self.in_vain} in a row at step={done}; the last: {error.got}")


@dataclass
class Recovery:
    """What a run does when something of it is lost: back to the newest state that there is, and what that has cost.

    folder   of the run, None where nothing is written
    asked    whether somebody has asked to stop
    """

    job: Job
    scheduler: Scheduler
    steps: Any
    beginning: Beginning
    folder: Path | None
    say: Callable[[str], None]
    asked: Callable[[], bool]
    points: RecoveryPoints = field(init=False)
    losses: Losses = field(default_factory=Losses)
    known: set[str] = field(default_factory=set)  # who was there at the last look
    gone: list[str] = field(default_factory=list)  # who was, at the last look
    looked: float = 0.0
    lost_at: float = 0.0
    again: int = 0  # steps that are to be made again
    metrics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.points = RecoveryPoints(self.job, self.scheduler, self.say, active=self.steps.recovers)

    def after(self, state: State) -> None:
        """Called after each step with the state."""
        if self.again and state.step >= self.losses.done:
            self.metrics = {"lost_steps": self.again, "lost_s": round(time.perf_counter() - self.lost_at, 3)}
            self.again = 0
        self.points.after(state)
        if self.steps.recovers and time.monotonic() - self.looked > LOOKING:
            self._look()

    def news(self) -> dict[str, Any]:
        """Metrics of a loss that is made up for, once; empty where there was none."""
        news, self.metrics = self.metrics, {}
        return news

    def back(self, error: LostResults, done: int) -> State:
        """The state to go on from after a loss.

        done     steps that have ever been made

        Errors   LostCluster where nobody is left to go on with, LostResults where something is lost meanwhile
        """
        if not self.steps.recovers:
            raise error
        start = time.perf_counter()
        if not self.again:
            self.lost_at = start
        gc.collect()  # frames of the error hold futures of what cannot be used any more
        who = self._gone()
        self._await_worker(error)
        state, source = self._newest()
        self.losses.count(done, state.step, error)
        self.again = done - state.step
        steps = f"{self.again} step{'s' * (self.again != 1)}"
        seconds = time.perf_counter() - start
        self.say(f"lost       {who}: from step {done} back to {state.step}, {source} ({steps} again, {seconds:.1f} s)")
        return state

    def _newest(self) -> tuple[State, str]:
        if (state := self.points.newest_whole()) is not None:
            return state, "a recovery point"
        found = newest_good(self.folder, self.say) if self.folder and self.folder.is_dir() else None
        if found is not None:
            checkpoint = read_checkpoint(*found, self.job.moments)
            return (
                self.steps.initial(checkpoint.model.parameters, checkpoint.moments, checkpoint.step),
                "the last checkpoint",
            )
        first = self.beginning
        return self.steps.initial(first.parameters, first.moments, first.step), "the beginning"

    def _gone(self) -> str:
        """Who is gone, in words."""
        now = self.scheduler.addresses()
        gone, self.gone = self.gone + sorted(self.known - now), []
        self.known = now
        return ", ".join(f"worker {who}" for who in self._told(gone)) if gone else "a worker's results"

    def _told(self, gone: list[str]) -> list[str]:
        """Who is gone, and of whom it was only found that nothing came from there."""
        silent = self.scheduler.silent() if gone else set()
        return [f"{address}{', which said nothing' * (address in silent)}" for address in gone]

    def _look(self) -> None:
        """Say who has come and gone; with a second worker there is somewhere to copy the state to."""
        self.looked = time.monotonic()
        now, before = self.scheduler.addresses(), self.known
        come, gone, self.known = sorted(now - before), sorted(before - now), now
        self.gone = gone  # of whom the look before has told, steps have been made without
        self.steps.look(len(now))
        if before and (come or gone):
            self.points.changed(gone=bool(gone))
            told = [f"{what} {', '.join(who)}" for what, who in (("gone:", self._told(gone)), ("new:", come)) if who]
            self.say(f"workers    {'; '.join(told)}")

    def _await_worker(self, error: LostResults) -> None:
        """Wait until there is a worker.

        Errors   LostCluster where none comes in time, or somebody asks to stop
        """
        if self.scheduler.addresses():
            return
        minutes = self.job.run.worker_minutes
        self.say(f"workers    all are gone: the run ends unless one comes in {minutes:g} minutes")
        begin, waited = time.monotonic(), 0.0
        while not self.scheduler.addresses():
            if (over := waited > 60 * minutes) or self.asked():
                got = f"none for {minutes:g} minutes" if over else f"none for {waited:.0f} s, when it was asked to stop"
                raise LostCluster("train", "the cluster must have a worker", got) from error
            time.sleep(0.2)
            waited = time.monotonic() - begin
