"""How a cluster's workers use their time: tasks, idle threads, bytes got and given, told with each heartbeat."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any

from tqdm import tqdm

from daskgpt.schedulers.failures import LostResults
from daskgpt.schedulers.links import done_of
from daskgpt.schedulers.machine import IN_BRIEF, product_rate
from daskgpt.schedulers.protocol import Scheduler

METRIC = "daskgpt"  # among those that a worker sends with its heartbeats
EVERY = 10.0  # seconds between two looks; one asks the scheduler, and nobody waits for a worker
HEARTBEATS = 1.5  # seconds in which every worker of a small cluster has sent some
BUSY = ("thread-cpu", "thread-noncpu")  # what Dask's workers call the time in which a thread runs a task, but for
KERNEL = "kernel "  # before layer and pass: what we call the time of its kernels, which Dask takes off from it
SHOWN = 8  # workers at the end of a run


@dataclass(frozen=True)
class Use:
    """What a worker has done since its count began, or between two looks.

    began      when its count began, by its own clock
    seconds    since then, or between the looks
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
        """What came after an earlier look: everything, where there was none, or the worker has begun anew."""
        if before is None or before.began != self.began:
            return self
        done = self.tasks - before.tasks, self.busy - before.busy
        passed = self.received - before.received, self.sent - before.sent
        return Use(self.began, self.seconds - before.seconds, self.threads, *done, *passed, self.memory, self.products)

    def and_then(self, more: Use) -> Use:
        done = self.tasks + more.tasks, self.busy + more.busy
        passed = self.received + more.received, self.sent + more.sent
        return Use(self.began, self.seconds + more.seconds, more.threads, *done, *passed, more.memory, more.products)

    @property
    def busy_share(self) -> float:
        """Of its threads' time."""
        return self.busy / (self.seconds * self.threads)

    def rates(self) -> dict[str, float]:
        """A second, the share of its threads' time in which they ran no task, and the memory that it has taken."""
        return {
            "tasks_per_s": round(self.tasks / self.seconds, 2),
            "idle": round(max(0.0, 1 - self.busy_share), 3),
            "received_bytes_per_s": round(self.received / self.seconds),
            "sent_bytes_per_s": round(self.sent / self.seconds),
            "memory_bytes": round(self.memory),
        }


class Count:
    """Counts what a worker does from here on: called by the worker with each heartbeat, from sums that Dask keeps
    anyway, but for what it receives, of which Dask keeps a list of the latest.
    """

    def __init__(self, worker: Any) -> None:
        self.products = product_rate(worker.state.nthreads, *IN_BRIEF)
        self.began, self.received = time.time(), 0.0
        self.latest = next(reversed(worker.transfer_incoming_log), None)
        self.before = self._sums(worker)

    def __call__(self, worker: Any) -> dict[str, float]:
        log = worker.transfer_incoming_log
        new = list(takewhile(lambda entry: entry is not self.latest, reversed(log)))
        self.received += sum(entry["total"] for entry in new)
        self.latest = new[0] if new else self.latest
        tasks, busy, sent, got = (now - before for now, before in zip(self._sums(worker), self.before))
        seconds = time.time() - self.began
        memory = worker.monitor.recent()["memory"]
        threads = worker.state.nthreads
        return asdict(Use(self.began, seconds, threads, tasks, busy, self.received + got, sent, memory, self.products))

    @staticmethod
    def _sums(worker: Any) -> tuple[float, float, float, float]:
        """Tasks, busy seconds, sent and received bytes since the worker began, of the last those of ranks alone."""
        sums = worker.digests_total.items()
        busy = sum(seconds for key, seconds in sums if key[0] == "execute" and _in_task(key[-2]))
        done, sent = done_of(worker), worker.transfer_outgoing_bytes_total
        return worker.state.executed_count + done["tasks"], busy + done["busy"], sent + done["sent"], done["received"]


def _in_task(label: Any) -> bool:
    return label in BUSY or str(label).startswith(KERNEL)


def imbalance(uses: Mapping[str, Use]) -> float:
    """By how much the busiest worker's time in tasks exceeds the mean, as a share of that."""
    shares = [own.busy_share for own in uses.values()]
    return max(shares) / fmean(shares) - 1 if any(shares) else 0.0


class Usage:
    """Looks at the workers of a scheduler; there is nothing to see under a local one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.at = 0.0
        self.last: dict[str, Use] = {}
        self.whole: dict[str, Use] = {}  # of the run
        self.products = 0.0  # float32 operations a second of all that take part

    def begin(self, products: bool = True) -> None:
        """What is told from here on.

        products   whether somebody wants to know how fast this process multiplies, which takes some tenth of a second
        """
        self.at, self.last = time.perf_counter(), self._told()
        if products and self.scheduler.in_place:
            self.products = product_rate(self.scheduler.threads, *IN_BRIEF)

    def news(self, every: float = EVERY) -> dict[str, Any]:
        """What each worker did a second since the last look, as metrics of a step; empty where that was just now.

        Of a worker that has said nothing since then nothing is told.
        """
        if self.scheduler.in_place or time.perf_counter() - self.at < every:
            return {}
        told, self.at = self._told(), time.perf_counter()
        known = {name: told[name].since(self.last.get(name)) for name in sorted(told)}
        known = {name: own for name, own in known.items() if own.seconds > 0}
        self.last |= told
        for name, own in known.items():
            self.whole[name] = self.whole[name].and_then(own) if name in self.whole else own
        if not known:
            return {}
        return {
            "workers": {name: own.rates() for name, own in known.items()},
            "imbalance": round(imbalance(known), 3),
            "memory_bytes": round(sum(own.memory for own in known.values())),
        }

    def lines(self) -> list[str]:
        """What they did in the run, for people: those that were idle longest first."""
        end = time.perf_counter() + HEARTBEATS
        self.news(every=0)
        while not self.whole and not self.scheduler.in_place and time.perf_counter() < end:
            time.sleep(0.1)  # a run that is shorter than the time between two heartbeats
            self.news(every=0)
        rows = sorted(self.whole.items(), key=lambda row: row[1].busy_share)
        if not rows:
            return []
        lines = [f"{'workers':10} {'tasks/s':>9} {'idle':>6} {'received/s':>11} {'sent/s':>9}"]
        for name, use in rows[:SHOWN]:
            own = use.rates()
            got, gave = (tqdm.format_sizeof(own[f"{way}_bytes_per_s"], "B") for way in ("received", "sent"))
            lines.append(f"{'':10} {own['tasks_per_s']:9,.1f} {own['idle']:6.0%} {got:>11} {gave:>9}  {name}")
        lines += [f"{'':10} and {len(rows) - SHOWN} more"] * (len(rows) > SHOWN)
        busiest = f"{'':10} the busiest was {imbalance(self.whole):.0%} busier than the mean"
        return [*lines, busiest] if len(rows) > 1 else lines

    def _told(self) -> dict[str, Use]:
        try:
            told = {name: Use(**own) for name, own in self.scheduler.told(METRIC).items()}
            self.products = sum(own.products for own in told.values()) or self.products
            return told
        except LostResults:
            return {}  # whoever asks for results next is told
