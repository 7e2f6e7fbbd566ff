"""How a cluster's workers use their time: tasks, idle threads, bytes that they got and gave, looked at now and then."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tqdm import tqdm

from daskgpt.schedulers.losses import LostResults
from daskgpt.schedulers.protocol import Scheduler

EVERY = 10.0  # seconds between two looks; one takes some milliseconds
BUSY = ("thread-cpu", "thread-noncpu")  # what Dask's workers call the time in which a thread runs a task
SHOWN = 8  # workers at the end of a run


@dataclass(frozen=True)
class Use:
    """What a worker has done since it began, or between two looks.

    busy       seconds in tasks, of all its threads together
    received   bytes from other workers since the last look
    sent       bytes to other workers
    """

    threads: int
    tasks: float = 0.0
    busy: float = 0.0
    received: float = 0.0
    sent: float = 0.0

    def since(self, before: Use) -> Use:
        done = self.tasks - before.tasks, self.busy - before.busy
        return Use(self.threads, *done, self.received, self.sent - before.sent)

    def and_then(self, more: Use) -> Use:
        done = self.tasks + more.tasks, self.busy + more.busy
        return Use(more.threads, *done, self.received + more.received, self.sent + more.sent)

    def rates(self, seconds: float) -> dict[str, float]:
        """A second, and the share of its threads' time in which they ran no task."""
        idle = max(0.0, 1 - self.busy / (seconds * self.threads))
        return {
            "tasks_per_s": round(self.tasks / seconds, 2),
            "idle": round(idle, 3),
            "received_bytes_per_s": round(self.received / seconds),
            "sent_bytes_per_s": round(self.sent / seconds),
        }


def used(clocks: Mapping[str, float], dask_worker: Any = None) -> tuple[str, float, Use] | None:
    """A worker's name, its clock, and what it has done so far; None in a process that is no worker.

    clocks   of workers at the last look, by name: `received` counts from there, since Dask keeps no sum of it
    """
    if dask_worker is None:
        return None
    now, name, late = time.time(), str(dask_worker.name), dask_worker.scheduler_delay
    busy = sum(seconds for key, seconds in dask_worker.digests_total.items() if key[0] == "execute" and key[-2] in BUSY)
    log = takewhile(
        lambda entry: entry["stop"] - late > clocks.get(name, now), reversed(dask_worker.transfer_incoming_log)
    )
    received, sent = sum(entry["total"] for entry in log), dask_worker.transfer_outgoing_bytes_total
    return name, now, Use(dask_worker.state.nthreads, dask_worker.state.executed_count, busy, received, sent)


class Usage:
    """Looks at the workers of a scheduler; there is nothing to see under a local one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.last: dict[str, Use] = {}
        self.clocks: dict[str, float] = {}
        self.at = 0.0
        self.whole: dict[str, tuple[Use, float]] = {}  # of the run, with seconds

    def news(self, every: float = EVERY) -> dict[str, Any]:
        """What each worker did a second since the last look, as metrics of a step; empty where that was just now."""
        now = time.perf_counter()
        if self.scheduler.in_place or now - self.at < every:
            return {}
        try:
            looks = [look for look in self.scheduler.everywhere(used, self.clocks) if look]
        except (LostResults, OSError):
            return {}  # whoever asks for results next is told
        found, seconds = {name: own for name, _, own in looks}, now - self.at
        # A worker that has begun anew under its name counts from its first look.
        going = {name for name, own in found.items() if name in self.last and own.tasks >= self.last[name].tasks}
        known = {name: found[name].since(self.last[name]) for name in sorted(going)}
        self.clocks, self.last, self.at = {name: clock for name, clock, _ in looks}, found, now
        for name, own in known.items():
            before, passed = self.whole.get(name, (Use(own.threads), 0.0))
            self.whole[name] = before.and_then(own), passed + seconds
        return {"workers": {name: own.rates(seconds) for name, own in known.items()}} if known else {}

    def lines(self) -> list[str]:
        """What they did in the run, for people: those that were idle longest first."""
        self.news(every=0.1)
        rates = {name: own.rates(seconds) for name, (own, seconds) in self.whole.items()}
        rows = sorted(rates.items(), key=lambda row: -row[1]["idle"])
        lines = [f"{'workers':10} {'tasks/s':>9} {'idle':>6} {'received/s':>11} {'sent/s':>9}"] if rows else []
        for name, own in rows[:SHOWN]:
            got, gave = (tqdm.format_sizeof(own[f"{way}_bytes_per_s"], "B") for way in ("received", "sent"))
            lines.append(f"{'':10} {own['tasks_per_s']:9,.1f} {own['idle']:6.0%} {got:>11} {gave:>9}  {name}")
        return lines + [f"{'':10} and {len(rows) - SHOWN} more"] * (len(rows) > SHOWN)
