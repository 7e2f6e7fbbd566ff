"""Recovery points: states that are kept on the cluster, in two copies on different workers, while steps go on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import chain, zip_longest
from typing import Any

from daskgpt.model.parameters import value_count
from daskgpt.schedulers.losses import LostResults
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job
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
