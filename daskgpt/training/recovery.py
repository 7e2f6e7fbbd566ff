"""Recovery of a run on a cluster: copies of its state on different workers, and the return to one after a loss."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace
from itertools import chain
from typing import Any

from daskgpt.config.errors import number_of
from daskgpt.schedulers.protocol import ClusterLost, WorkerLost
from daskgpt.training.checkpoint import newest_good, read_checkpoint
from daskgpt.training.engine import State
from daskgpt.training.job import Say
from daskgpt.training.rank_engine import RankEngine
from daskgpt.training.start import Start

SHARE = 0.01  # of the run's time that copying may take
LEAST_COST = 1e-3  # seconds
NEARLY = 0.75  # of the interval, after which a point is due: points are made between windows


class RecoveryPoints:
    """Holds the newest recovery point of a run, and makes the next one.

    A point is a state whose packs are lists of copies, on different workers.

    With `auto`, steps wait for each point, which is timed, and a hundred times the time of the last one passes before
    the next. Every so many steps, points are made beside the next steps, but for the first one and the first one after
    a loss. There is none while there is only one worker.

    soon   whether a point is due at once: there is none, or it is not on two workers
    """

    def __init__(self, engine: RankEngine, say: Say) -> None:
        self.engine, self.scheduler, self.say = engine, engine.scheduler, say
        self.every = engine.job.run.snapshot_every
        self.kept: State | None = None
        self.making: State | None = None
        self.soon = True
        self.cost, self.since = math.inf, 0.0

    def make(self) -> None:
        """Make recovery points; called after each window.

        A loss costs the point that is being made. Whether the run itself has lost something, its next step shows.
        """
        if not self.every:
            return
        try:
            if self.making is None and self._due(self.engine.made) and len(self.scheduler.addresses()) > 1:
                self._copy()
            if self.making is not None and self.scheduler.are_made([copies[-1] for copies in self.making.packs]):
                self.kept, self.making = self.making, None
        except WorkerLost:
            self.making, self.soon = None, True

    def newest_whole(self) -> State | None:
        """Return the state of the newest point of which no part is lost; the next point is then due at once."""
        points = ((point, self._whole(point)) for point in (self.making, self.kept) if point is not None)
        self.kept, state = next(((point, state) for point, state in points if state is not None), (None, None))
        self.making, self.soon = None, True
        return state

    def _whole(self, point: State) -> State | None:
        """Return a state, each pack a copy that still is there; None if all copies of one are lost."""
        there = iter(self.scheduler.present(list(chain(*point.packs))))
        left = [[copy for copy in copies if next(there)] for copies in point.packs]
        return replace(point, packs=[copies[0] for copies in left]) if all(left) else None

    def _due(self, step: int) -> bool:
        if self.soon:
            return True
        if self.every > 0:
            return self.kept is None or step - self.kept.step >= self.every
        return time.monotonic() - self.since >= NEARLY * self.interval

    @property
    def interval(self) -> float:
        """Seconds between two points; infinite where steps are counted."""
        return math.inf if self.every > 0 else self.cost / SHARE

    def _copy(self) -> None:
        """Begin to copy the state to other workers."""
        self.since = time.monotonic()
        self.making = self.engine.copied_apart()
        if self.soon or self.every < 0:
            self.scheduler.wait_for([copies[-1] for copies in self.making.packs])
            first, self.soon = math.isinf(self.cost), False
            self.cost = max(time.monotonic() - self.since, LEAST_COST)
            if first:
                often = f"every {number_of(self.every, 'step')}" if self.every > 0 else f"every {self.interval:.0f} s"
                self.say(f"recovery   the state is kept on two workers {often}, which takes {self.cost:.2f} s")


LOOKING = 2.0  # seconds between two looks at the workers
MOST_IN_VAIN = 10  # losses in a row without progress, after which a run ends: something keeps ending its workers


class Recovery:
    """Takes a run back to the newest state that is left when something of it is lost, and reports what that costs.

    A run may lose any number of workers as long as it makes progress between two losses.

    workers         those at the last look
    gone            the workers that had gone at the last look
    reached         how many steps had been made before the last loss, and the step that the run went back to
    in_vain         how many losses in a row have left both as they were
    again           how many steps are to be repeated
    """

    def __init__(self, engine: RankEngine, start: Start, say: Say, news: dict[str, Any]) -> None:
        """news   gets the metrics of a loss once its steps have been repeated"""
        self.engine, self.start, self.say, self.news = engine, start, say, news
        self.scheduler, self.points = engine.scheduler, RecoveryPoints(engine, say)
        self.workers, self.gone = set[str](), list[str]()
        self.reached, self.in_vain, self.again = (-1, -1), 0, 0
        self.looked, self.lost_at = 0.0, 0.0

    def after_window(self) -> None:
        """Make recovery points and look at the workers."""
        if self.again and self.engine.made >= self.reached[0]:
            self.news |= {"lost_steps": self.again, "lost_s": round(time.perf_counter() - self.lost_at, 3)}
            self.again = 0
        self.points.make()
        self.engine.pace = self.points.interval
        if time.monotonic() - self.looked > LOOKING:
            self._look()

    def back(self, error: WorkerLost, done: int) -> State:
        """Return the state to continue from after a loss.

        done     how many steps have ever been made

        Errors   ClusterLost if no worker takes tasks, WorkerLost if something is lost in the meantime
        """
        start = time.perf_counter()
        if not self.again:
            self.lost_at = start
        gc.collect()  # frames of the error hold futures of lost results
        now = self.scheduler.addresses()
        gone, self.gone, self.workers = self.gone + sorted(self.workers - now), [], now
        who = ", ".join(f"worker {name}" for name in self._named(gone)) or "a worker's results"
        self.scheduler.await_worker()
        state, source = self._newest()
        self.count(done, state.step, error)
        self.again = done - state.step
        steps = number_of(self.again, "step")
        seconds = time.perf_counter() - start
        self.say(f"lost       {who}: from step {done} back to {state.step}, {source} ({steps} again, {seconds:.1f} s)")
        return state

    def count(self, done: int, restart: int, error: WorkerLost) -> None:
        """Count a loss. Errors   ClusterLost if the run makes no progress"""
        self.in_vain = 0 if (done, restart) > self.reached else self.in_vain + 1
        self.reached = done, restart
        if self.in_vain >= MOST_IN_VAIN:
            rule = "a run must make progress between losses"
            raise ClusterLost("train", rule, f"{self.in_vain} in a row at step={done}; the last: {error.got}")

    def _newest(self) -> tuple[State, str]:
        """Return the newest state that is left, and its origin in words."""
        if (state := self.points.newest_whole()) is not None:
            return state, "a recovery point"
        folder = self.start.folder
        if folder and (good := newest_good(folder.path, self.say)) is not None:
            parameters, moments = read_checkpoint(good[0], self.engine.job.moments)
            return self.engine.initial(parameters, moments, good[1]["step"]), "the last checkpoint"
        first = self.start
        return self.engine.initial(first.parameters, first.moments, first.step), "the beginning"

    def _named(self, gone: list[str]) -> list[str]:
        """Return the addresses of workers that are gone, and why, if that is known."""
        why = self.scheduler.monitor.left | self.scheduler.monitor.stuck
        return [", ".join(filter(None, (address, why.get(address)))) for address in gone]

    def _look(self) -> None:
        """Print which workers have come and gone."""
        self.looked = time.monotonic()
        self.scheduler.look()
        before, there = self.workers, self.scheduler.threads_of_workers().keys()
        now = self.scheduler.addresses() | (before & there)  # a worker that is paused is not gone
        come, gone, self.workers = sorted(now - before), sorted(before - now), now
        self.gone = gone  # those of the look before are reported: steps have been made without them
        self.engine.workers = len(now)  # new ranks begin with the next window
        if before and (come or gone):
            self.points.soon |= bool(gone)  # copies are lost
            parts = ("gone:", self._named(gone)), ("new:", come)
            changes = [f"{what} {', '.join(who)}" for what, who in parts if who]
            self.say(f"workers    {'; '.join(changes)}")
