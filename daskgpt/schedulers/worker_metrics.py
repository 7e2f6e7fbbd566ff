"""Metrics of a cluster's workers, and the events of a run that its dashboard shows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tqdm import tqdm

from daskgpt.schedulers.machine import IN_BRIEF, product_rate
from daskgpt.schedulers.protocol import Scheduler, WorkerLost

METRIC = "daskgpt"  # its name among the metrics of a heartbeat
EVERY = 10.0  # seconds between two readings, which ask the scheduler and wait for no worker
HEARTBEATS = 1.5  # seconds in which every worker of a small cluster has sent some
SHOWN = 8  # workers in the table at the end of a run


@dataclass(frozen=True)
class Use:
    """The use of a worker since its count began, or between two readings.

    began      when its count began, by its own clock
    seconds    since then, or between the readings
    busy       seconds in tasks, of all its threads together
    received   bytes from other workers
    sent       bytes to other workers
    memory     bytes of the process that are in memory now
    products   float32 operations a second that it multiplies with, see `product_rate`
    """

    began: float
    seconds: float
    threads: int
    tasks: float = 0.0
    busy: float = 0.0
    received: float = 0.0
    sent: float = 0.0
    memory: float = 0.0
    products: float = 0.0

    def since(self, before: Use | None) -> Use:
        """Return the use after an earlier reading; all of it if there was none, or the worker has restarted."""
        return self if before is None or before.began != self.began else self._with(before, -1)

    def plus(self, more: Use) -> Use:
        """Return the sum of two intervals, with the memory of the later one."""
        return more._with(self, 1)

    def _with(self, other: Use, sign: int) -> Use:
        names = ("seconds", "tasks", "busy", "received", "sent")
        return replace(self, **{name: getattr(self, name) + sign * getattr(other, name) for name in names})

    @property
    def busy_share(self) -> float:
        """Share of its threads' time."""
        return self.busy / (self.seconds * self.threads)

    def rates(self) -> dict[str, float]:
        """Return the figures a second, the share of its threads' time without tasks, and its memory."""
        return {
            "tasks_per_s": round(self.tasks / self.seconds, 2),
            "idle": round(max(0.0, 1 - self.busy_share), 3),
            "received_bytes_per_s": round(self.received / self.seconds),
            "sent_bytes_per_s": round(self.sent / self.seconds),
            "memory_bytes": round(self.memory),
        }


def imbalance(uses: Mapping[str, Use]) -> float:
    """Return by how much the busiest worker's share of time in tasks exceeds the mean, relative to the mean."""
    shares = [use.busy_share for use in uses.values()]
    return max(shares) / fmean(shares) - 1 if any(shares) else 0.0


class WorkerMetrics:
    """Reads the metrics of a scheduler's workers; a local scheduler has none.

    products   float32 operations a second of all workers, or of this process under a local scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.at = 0.0
        self.last: dict[str, Use] = {}
        self.whole: dict[str, Use] = {}  # of the run
        self.products = 0.0

    def begin(self, products: bool = True) -> None:
        """Start counting.

        products   whether to measure the rate of products of this process, which takes some tenth of a second
        """
        self.at, self.last = time.perf_counter(), self._read()
        if products and self.scheduler.in_place:
            self.products = product_rate(self.scheduler.threads, *IN_BRIEF)

    def news(self, every: float = EVERY) -> dict[str, Any]:
        """Return each worker's use per second since the last reading, as metrics of a step; empty if it is recent.

        Workers that have sent no heartbeat since then are left out.
        """
        if self.scheduler.in_place or time.perf_counter() - self.at < every:
            return {}
        latest, self.at = self._read(), time.perf_counter()
        since_then = {name: latest[name].since(self.last.get(name)) for name in sorted(latest)}
        since_then = {name: use for name, use in since_then.items() if use.seconds > 0}
        self.last |= latest
        for name, use in since_then.items():
            self.whole[name] = self.whole[name].plus(use) if name in self.whole else use
        if not since_then:
            return {}
        return {
            "workers": {name: use.rates() for name, use in since_then.items()},
            "imbalance": round(imbalance(since_then), 3),
            "memory_bytes": round(sum(use.memory for use in since_then.values())),
        }

    def lines(self) -> list[str]:
        """Return a table of the workers' use in the run, the idlest first."""
        end = time.perf_counter() + HEARTBEATS
        self.news(every=0)
        while not self.whole and not self.scheduler.in_place and time.perf_counter() < end:
            time.sleep(0.1)  # the run was shorter than the time between two heartbeats
            self.news(every=0)
        rows = sorted(self.whole.items(), key=lambda row: row[1].busy_share)
        if not rows:
            return []
        lines = [f"{'workers':10} {'tasks/s':>9} {'idle':>6} {'received/s':>11} {'sent/s':>9}"]
        for name, use in rows[:SHOWN]:
            rates = use.rates()
            received, sent = (tqdm.format_sizeof(rates[f"{way}_bytes_per_s"], "B") for way in ("received", "sent"))
            lines.append(f"{'':10} {rates['tasks_per_s']:9,.1f} {rates['idle']:6.0%} {received:>11} {sent:>9}  {name}")
        lines += [f"{'':10} and {len(rows) - SHOWN} more"] * (len(rows) > SHOWN)
        busiest = f"{'':10} the busiest was {imbalance(self.whole):.0%} busier than the mean"
        return [*lines, busiest] if len(rows) > 1 else lines

    def _read(self) -> dict[str, Use]:
        try:
            uses = {name: Use(**numbers) for name, numbers in self.scheduler.worker_metrics(METRIC).items()}
        except WorkerLost:
            return {}  # the next request for results raises it
        self.products = sum(numbers.products for numbers in uses.values()) or self.products
        return uses


TOPIC = "daskgpt"  # of the events
EVENTS_EVERY = 0.25  # seconds between two events: a step may be shorter, and the scheduler keeps the last thousand
FIELDS = ("step", "loss", "validation_loss", "tokens_per_s", "lost_steps")  # of a step's metrics
RARE = {"validation_loss", "lost_steps"}  # steps that have one of these are all published


class Events:
    """Publishes metrics of steps: of those that are rare, and else of one in each quarter of a second."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.latest, self.at = scheduler, dict[str, Any](), 0.0

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Publish the metrics of a step if it is time to."""
        if self.scheduler.in_place:
            return
        self.latest = {name: metrics[name] for name in FIELDS if name in metrics}
        if time.monotonic() - self.at > EVENTS_EVERY or RARE & metrics.keys():
            self.flush()

    def flush(self) -> None:
        """Publish the metrics of the latest step, unless they were."""
        if self.latest:
            self.scheduler.publish(TOPIC, self.latest)
            self.latest, self.at = {}, time.monotonic()
