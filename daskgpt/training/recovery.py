"""Recovery points: states that are kept on the cluster, in two copies on different workers, while steps go on."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from daskgpt.model.parameters import value_count
from daskgpt.schedulers.failures import LostCluster, LostResults
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoint import newest_good, read_checkpoint
from daskgpt.training.job import Job
from daskgpt.training.start import Beginning
from daskgpt.training.step import State

SHARE = 0.01  # of the time that copying may cost
LEAST_COST = 1e-3  # seconds
HERE_BYTES = 2**26  # of a state that this process keeps a copy of where there is one worker only


class Point:
    """A state that is kept.

    packs   of the state, on the workers that it was made on
    copies  of each pack, on another worker; None until they are begun
    """

    def __init__(self, state: State) -> None:
        self.layout, self.step = state.layout, state.step
        self.packs: list[Any] = state.packs
        self.copies: list[list[Any]] | None = None

    def whole(self, scheduler: Scheduler) -> State | None:
        """The state, each pack from where it still is; None where one is nowhere."""
        kept, copies = [[pack] for pack in self.packs], self.copies or []
        none: list[Any] = []
        choices = [own + others for own, others in zip_longest(kept, copies, fillvalue=none)]
        there = iter(scheduler.present(list(chain(*choices))))
        found = [[copy for copy in own if next(there)] for own in choices]
        return State(self.layout, [own[0] for own in found], self.step) if all(found) else None


class RecoveryPoints:
    """Keeps the newest recovery point of a run, and makes the next one while steps go on.

    The first one, and the first after a loss, are waited for and timed: from that follows when the next one is due.

    soon   whether one is due at once: there is none, or it is not on two workers
    """

    def __init__(self, job: Job, scheduler: Scheduler, say: Callable[[str], None], *, active: bool = True) -> None:
        self.job, self.scheduler, self.say = job, scheduler, say
        self.every = job.run.snapshot_every
        self.active = active and self.every != 0
        self.kept: Point | None = None
        self.making: Point | None = None
        self.soon, self.alone = True, False
        self.cost, self.since, self.told = 0.0, 0.0, set[str]()
        self.begin, self.losses = time.monotonic(), 0

    def after(self, state: State) -> None:
        """Called after each step, with the state.

        A loss costs the point in the making; whether the run has lost something as well, its next step tells.
        """
        if not self.active:
            return
        try:
            if self.making is None and self._due(state.step):
                self.making, self.since = Point(state), time.monotonic()
            if self.making is not None:
                self._go_on(self.making)
        except LostResults:
            self.making, self.soon = None, True

    def changed(self, *, gone: bool) -> None:
        """Workers have come or gone: copies are gone as well, or there is now somewhere to copy the state to."""
        self.soon = self.soon or self.alone or gone

    def newest_whole(self) -> State | None:
        """The state of the newest point of which every part is somewhere. After a loss the next one is due at once."""
        found = ((point, point.whole(self.scheduler)) for point in (self.making, self.kept) if point is not None)
        self.kept, state = next(((point, state) for point, state in found if state is not None), (None, None))
        self.losses += 1
        self.making, self.soon = None, True
        return state

    def _due(self, step: int) -> bool:
        if self.soon:
            return True
        if self.every > 0:
            return self.kept is None or step - self.kept.step >= self.every
        return time.monotonic() - self.since >= self.interval

    @property
    def interval(self) -> float:
        """Seconds between two points: so many that copying costs its share, fewer where losses come so often that more
        is lost in making steps again.

        Source   Young 1974: with M seconds between losses, sqrt(2 cost M) makes the sum of both the least.
        """
        if not self.losses:
            return self.cost / SHARE
        between = (time.monotonic() - self.begin) / self.losses
        return min(self.cost / SHARE, math.sqrt(2 * self.cost * between))

    def _go_on(self, point: Point) -> None:
        """Copies are begun when all of the state is made, and the point counts when they are."""
        start = 0.0
        if self.soon:
            self.scheduler.settle(point.packs)
            start = time.perf_counter()
        if point.copies is None:
            if not self.scheduler.settled(point.packs):
                return
            point.copies = self.scheduler.copies(point.packs)
            if self.alone == bool(point.copies):  # what copying costs from now on has to be seen
                self.alone, self.soon, start = not self.alone, True, time.perf_counter()
            if self.alone and not self._copy_here(point):
                return
        copies = list(chain(*point.copies))
        if self.soon:
            self.scheduler.settle(copies)
            self.cost = max(time.perf_counter() - start, LEAST_COST)
            self._tell()
        if self.scheduler.settled(copies):
            self.kept, self.making, self.soon = point, None, False

    def _copy_here(self, point: Point) -> bool:
        """Where there is one worker, small states are copied to this process, and of others there is no point."""
        if self._bytes() > HERE_BYTES:
            self.making, self.soon = None, False
            self._tell()
            return False
        point.copies, point.packs = [[pack] for pack in self.scheduler.fetch(point.packs)], []
        return True

    def _bytes(self) -> int:
        own = self.job.local.replicas if self.job.local.local_steps else 0  # weights of replicas on their own
        moments = sum(math.prod(tensor.shape) for tensor in self.job.moments.values())
        return ((1 + own) * value_count(self.job.config) + moments) * self.job.precision.dtype.itemsize

    def _tell(self) -> None:
        """Once, what is kept where and how often."""
        where = "in this process" if self._bytes() <= HERE_BYTES else ""
        where = where if self.alone else "on two workers"
        often = f"every {self.every} steps" if self.every > 0 else f"every {self.interval:.0f} s"
        text = f"the state is kept {where} {often}, which takes {self.cost:.2f} s"
        if not where:
            text = "none: with one worker, which may be lost, a run goes back to its last checkpoint"
        if where not in self.told:
            self.say(f"recovery   {text}")
        self.told.add(where)


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
