"""What a scheduler keeps for the page: the latest tasks, and what runs say of their steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from distributed import SchedulerPlugin
from distributed.utils import key_split

from daskgpt.schedulers.dask_internals import KERNEL
from daskgpt.schedulers.events import TOPIC
from daskgpt.schedulers.worker_metrics import METRIC

CALLS, STEPS = 4000, 5000  # the latest that are kept
WINDOW = 5.0  # seconds of lanes


class Call(NamedTuple):
    """A task that has run: on which worker, its name without what tells it from its like, seconds of the epoch."""

    worker: str
    name: str
    start: float
    end: float


class Collected(SchedulerPlugin):
    """The latest tasks and steps.

    calls     as they end
    steps     records of steps, see `schedulers.telling`, with `received_bytes`: of all workers until then
    runs      how many runs have told of steps: those of the latest one are kept
    recoveries  how many of them tell of a loss that was made up for
    """

    name = "daskgpt-dashboard"

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.calls: deque[Call] = deque(maxlen=CALLS)
        self.steps: deque[dict[str, Any]] = deque(maxlen=STEPS)
        self.runs = self.recoveries = 0

    def transition(
        self, key: Any, start: str, finish: str, *_: Any, startstops: Sequence[Any] = (), worker: str = "", **__: Any
    ) -> None:
        if start == "processing" and finish == "memory":
            ran = [own for own in startstops or () if own["action"] == "compute"]
            self.calls.extend(Call(worker, key_split(key), own["start"], own["stop"]) for own in ran)

    def log_event(self, topic: str, msg: Any) -> None:
        if topic != TOPIC:
            return
        received = sum(self._use(worker, "received") for worker in self.scheduler.workers.values())
        for record in msg:
            if not self.steps or record["step"] <= self.steps[-1]["step"]:
                self.steps.clear()
                self.runs += 1
            self.steps.append({**record, "received_bytes": received})
            self.recoveries += "lost_steps" in record

    @staticmethod
    def _use(worker: Any, name: str) -> float:
        return float(worker.metrics.get(METRIC, {}).get(name, 0.0))

    @property
    def latest(self) -> list[Call]:
        """The calls of the last seconds in which there were some."""
        end = max((call.end for call in self.calls), default=0.0)
        return [call for call in self.calls if call.end > end - WINDOW]

    def bytes_a_step(self, over: int = 20) -> float:
        """That workers receive from each other, in the mean of the last steps."""
        own = list(self.steps)[-over:]
        if len(own) < 2:
            return 0.0
        received = float(own[-1]["received_bytes"] - own[0]["received_bytes"])
        return received / int(own[-1]["step"] - own[0]["step"])

    def kernel_seconds(self) -> dict[str, float]:
        """Of every kernel, by layer and pass, in all tasks since the scheduler began, as Dask's fine metrics say."""
        found: dict[str, float] = {}
        for key, value in self.scheduler.cumulative_worker_metrics.items():
            if isinstance(key, tuple) and key[0] == "execute" and str(key[-2]).startswith(KERNEL):
                name = key[-2].removeprefix(KERNEL)
                found[name] = found.get(name, 0.0) + value
        return found


def idle_share(calls: Sequence[Call], threads: int) -> float:
    """Of the threads' time from the first start to the last end, that in which no task ran."""
    if not calls or not threads:
        return 0.0
    length = max(call.end for call in calls) - min(call.start for call in calls)
    busy = sum(call.end - call.start for call in calls)
    return max(0.0, 1 - busy / (threads * length)) if length else 0.0


def overlap_share(calls: Iterable[Call]) -> float:
    """Of the time in which tasks run, that in which tasks of different names do."""
    edges = sorted((time, change, call.name) for call in calls for time, change in ((call.start, 1), (call.end, -1)))
    running: dict[str, int] = {}
    some = several = 0.0
    different = 0  # names that run
    for (time, change, name), (after, *_) in pairwise(edges):
        before = running.get(name, 0)
        running[name] = before + change
        different += (before + change > 0) - (before > 0)
        some += (after - time) * (different > 0)
        several += (after - time) * (different > 1)
    return several / some if some else 0.0


def column(steps: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Numbers of steps, from 1, and what they say under a name, of those that say it."""
    own = [(record["step"] + 1, record[name]) for record in steps if name in record]
    return [step for step, _ in own], [value for _, value in own]
