"""Failures of a cluster: the errors of lost results, places for copies, and workers that do not answer."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import KilledWorker

from daskgpt.schedulers.dask_internals import ClosedClientError, end_worker, get_address_host, heartbeat_interval
from daskgpt.schedulers.protocol import METRIC, ClusterLost, WorkerLost
from daskgpt.schedulers.workers import members

SILENCE = 60.0  # seconds without a heartbeat after which a worker is ended; a run has a setting of its own
EVERY = 0.4  # least seconds between two looks that count
NAMED = 10.0  # seconds without tasks or heartbeats after which a worker is named
REACHED = (
    "Start workers with addresses that all hosts reach (--host, --interface or --contact-address), and with ports that "
    "no firewall closes (--worker-port)."
)
LEAST_LEFT_OUT = 60.0  # seconds for which a run does without a worker that it cannot use
HEARTBEATS = 3  # least number of missing heartbeats; with many workers, each sends fewer
# Errors of Dask's client for lost results: that cannot be computed again; of a task that was on several workers when
# they died; of a connection that broke meanwhile, or timed out; of a scheduler that is gone.
SIGNS = (CancelledError, KilledWorker, OSError, ClosedClientError)
LOST_SOURCE = "Worker holding Actor was lost"  # Dask's message for any result whose source cannot be made again


@contextmanager
def losses_as_errors(client: Any) -> Iterator[None]:
    """Raise the different errors of Dask's client for lost results as one.

    Errors   WorkerLost, ClusterLost if the scheduler is gone
    """
    try:
        yield
    except WorkerLost:
        raise
    except SIGNS as error:
        raise loss(client, type(error).__name__) from None
    except RuntimeError as error:
        if str(error) != LOST_SOURCE:
            raise
        raise loss(client, "a result's source") from None
    except (AttributeError, UnboundLocalError):  # of a client that somebody closes meanwhile
        if client.scheduler is not None:
            raise
        raise loss(client, "closed") from None


def loss(client: Any, sign: str) -> WorkerLost:
    """Return the error of a loss; `sign` is how it was noticed."""
    lost: type[WorkerLost]
    if client.status == "running":
        lost, who, what = WorkerLost, "every worker", "a worker lost with its part of the parameters"
    else:
        who = "the scheduler" if client.scheduler is not None else "the client"
        lost, what = ClusterLost, "no record of where the parameters are"
    rule = f"{who} must live until the end of a run"
    return lost("ClusterScheduler", rule, f"{sign}, {what}")


def places_apart(results: Sequence[tuple[int, Collection[str]]], workers: Sequence[str]) -> list[str]:
    """Return another worker for each result (its bytes, and its holders) than those that have it.

    The largest result is placed first, each on the worker that has been given the fewest bytes.
    """
    given: Counter[str] = Counter()
    places = {}
    for number, (size, where) in sorted(enumerate(results), key=lambda item: -item[1][0]):
        hosts = {get_address_host(worker) for worker in where}
        others = [worker for worker in workers if worker not in where] or workers
        places[number] = min(others, key=lambda worker: (get_address_host(worker) in hosts, given[worker]))
        given[places[number]] += size
    return [places[number] for number in range(len(results))]


class LeftOut:
    """Workers that a run does without for some time, each time for twice as long."""

    def __init__(self) -> None:
        self.left_out: dict[str, tuple[float, float]] = {}  # address -> until when, and for how many seconds

    def add(self, address: str) -> None:
        _, before = self.left_out.get(address, (0.0, LEAST_LEFT_OUT / 2))
        self.left_out[address] = time.monotonic() + 2 * before, 2 * before

    @property
    def now(self) -> set[str]:
        """The addresses of those that are left out now."""
        return {address for address, (until, _) in self.left_out.items() if time.monotonic() < until}


@dataclass
class Watched:
    """A worker at the last look.

    heard    time of its last heartbeat, by the scheduler's clock
    silence  seconds of looks since then
    paused   when it was first seen to be paused and to run no task; infinite if it is not
    named    what was said of it
    """

    heard: float = 0.0
    silence: float = 0.0
    paused: float = math.inf
    named: str = ""


class WorkerMonitor:
    """Names workers that take no tasks while results are waited for, and lets Dask end those that send no heartbeat.

    A process that ends closes its connections, which the scheduler sees at once. A stopped process, or a machine that
    is cut off or loses power, closes nothing: Dask waits 5 minutes (`distributed.scheduler.worker-ttl`, a setting of
    the scheduler's process, not of this one), and a run with it. A worker that Dask has paused, since its memory is
    nearly full, ends the tasks that it has begun, and begins no others.

    Silence is counted in looks, a late look for no more than any other: after a delay of this process or of the
    scheduler all workers seem silent.

    seconds         without a heartbeat after which a worker is ended; 0 = only Dask's own limit, unless a stop is
                    requested
    compiling       whether workers may be compiling kernels, which delays their heartbeats
    say             prints a line
    stop_requested  returns whether the run shall end
    left            why workers are not there: those that were ended, by their addresses
    stuck           why workers take no tasks, by their addresses, after NAMED seconds
    """

    def __init__(self, client: Any) -> None:
        self.client, self.seconds, self.compiling = client, SILENCE, False
        self.left, self.stuck = dict[str, str](), dict[str, str]()
        self.say: Callable[[str], Any] = partial(print, file=sys.stderr, flush=True)
        self.stop_requested: Callable[[], bool] = lambda: False
        self.looked, self.looking = 0.0, threading.Lock()
        self.watched: dict[str, Watched] = {}

    def look(self) -> None:
        """Look at all workers, unless another thread does; called about every half second."""
        if self.looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self.looking.release()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self.looked < EVERY:
            return
        passed, self.looked = min(now - self.looked, 2 * EVERY), now
        workers = members(self.client)
        least = HEARTBEATS * heartbeat_interval(len(workers))
        named = max(NAMED, least)
        seconds = named if self.stop_requested() else max(self.seconds or math.inf, least)
        before, self.watched = self.watched, {}
        for address, worker in workers.items():
            last, heard = before.get(address, Watched()), worker["last_seen"]
            watched = self.watched[address] = Watched(heard, named=last.named)
            watched.silence = last.silence + passed if heard == last.heard else 0.0
            watched.paused = min(last.paused, now) if is_blocked(worker) else math.inf
            prepared = METRIC in worker["metrics"] or not self.compiling
            if prepared and watched.silence >= seconds:
                self._end(address)
            elif watched.silence >= named:
                after = f"ended after {self.seconds:g} s (--worker-seconds)" if self.seconds else "waited for"
                after = after if prepared else "it may be compiling kernels"
                self._name(address, worker, f"silent: no heartbeat for {named:g} s; {after}")
            elif watched.paused <= now - NAMED:
                self._name(address, worker, paused_words(worker))
            else:
                watched.named = ""
        stuck = {address for address, watched in self.watched.items() if watched.paused <= now - NAMED}
        self.stuck = {address: f"which is {paused_words(workers[address])}" for address in stuck}

    def _name(self, address: str, worker: Mapping[str, Any], words: str) -> None:
        """Say once what is the matter with a worker."""
        if not self.watched[address].named:
            self.say(f"workers    {title(address, worker)} is {words}")
        self.watched[address].named = words

    def _end(self, address: str) -> None:
        silence = self.watched[address].silence
        logging.getLogger("distributed.scheduler").warning("%s sent no heartbeat for %.0f s", address, silence)
        self.left[address] = "which sent no heartbeat"
        end_worker(self.client, address)


def is_blocked(worker: Mapping[str, Any]) -> bool:
    """Return whether a worker begins no tasks, and runs none."""
    return bool(worker["status"] == "paused" and not worker["metrics"].get("task_counts", {}).get("executing"))


def paused_words(worker: Mapping[str, Any]) -> str:
    """Return how much memory a worker that Dask has paused has taken, in words."""
    held, limit = worker["metrics"].get("memory", 0), worker["memory_limit"]
    return "paused" + f": {held / 1e9:.2f} of {limit / 1e9:.2f} GB, Dask's limit" * bool(limit)


def title(address: str, worker: Mapping[str, Any]) -> str:
    """Return a worker's name and address; by default, the address is its name."""
    return f"worker {address}" if worker["name"] == address else f"worker {worker['name']} ({address})"
