"""Results that are lost on a cluster: the errors that say so, and copies on other workers, which outlive a worker."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import dask
from distributed import Future, KilledWorker
from distributed.client import ClosedClientError
from distributed.scheduler import heartbeat_interval

from daskgpt.config.errors import refusal
from daskgpt.graph.nodes import Graph, as_it_is, task
from daskgpt.schedulers.membership import members, running

COPY = "recovery.copy"  # what Dask calls the tasks that copy
EVERY = 0.5  # seconds between two looks at the heartbeats of workers
HEARTBEATS = 3  # that must be missing at least; of many workers each sends fewer
NANNY_SECONDS = 2  # in which a nanny ends its worker; none answers where the whole machine is gone
# With what Dask's client says that results are gone: the first for those that nobody can compute again, the second for
# a task that was on several workers as they died, an OSError for a connection that broke meanwhile (also a timeout).
SIGNS = (CancelledError, KilledWorker, OSError, ClosedClientError)
LOST_SOURCE = "Worker holding Actor was lost"  # what Dask says of any result whose source cannot be made again


class LostResults(RuntimeError):
    """Results that a run needs are gone with a worker that held them. Whoever kept copies can go on from these.

    where, rule, got   as of `config.errors.refusal`
    """

    def __init__(self, where: str, rule: str, got: str) -> None:
        advice = "Start again, or go on from a checkpoint with --resume."
        super().__init__(str(refusal(RuntimeError, where, rule, got, advice)))
        self.where, self.rule, self.got = where, rule, got


class LostCluster(LostResults):
    """There is nobody left to go on with: the scheduler is gone, or no worker came in time."""


@contextmanager
def telling_losses(client: Any) -> Iterator[None]:
    """Say what Dask's client says of lost results as one error of ours.

    Errors   LostResults, LostCluster where the scheduler is gone
    """
    try:
        yield
    except LostResults:
        raise
    except SIGNS as error:
        raise loss(client, type(error).__name__) from None
    except RuntimeError as error:
        if str(error) != LOST_SOURCE:
            raise
        raise loss(client, "a result's source") from None


def loss(client: Any, sign: str) -> LostResults:
    """The error for a loss, of which something is known by a name."""
    lost: type[LostResults]
    if client.status == "running":
        lost, who, what = LostResults, "every worker", "a worker lost with its part of the parameters"
    else:
        lost, who, what = LostCluster, "the scheduler", "nobody who knows where the parameters are"
    rule = f"{who} must live until the end of a run"
    return lost("ClusterScheduler", rule, f"{sign}, {what}")


def present(client: Any, handles: Sequence[Any]) -> list[bool]:
    """Whether each result is in some worker's memory now, by what the scheduler knows; what is held here is."""
    keys = [handle.key for handle in handles if isinstance(handle, Future) and handle.status == "finished"]
    held = client.sync(client.scheduler.who_has, keys=keys) if keys else {}
    return [bool(held.get(handle.key)) if isinstance(handle, Future) else True for handle in handles]


def copies_apart(client: Any, handles: Sequence[Future], ready: str = "") -> list[list[Future]]:
    """A task for each result that returns it on another worker than it is on, on another host if possible.

    Empty where there is one worker. Each has a key of its own, for Dask's memory manager drops replicas of a key
    (those of `Client.replicate`, say), whichever it likes. A copy may come to lie elsewhere where its worker dies
    meanwhile.

    ready   as of `running`: on others only where nobody is
    """
    keys = [handle.key for handle in handles]
    holders = client.sync(client.scheduler.who_has, keys=keys)
    try:
        sizes = client.sync(client.scheduler.nbytes, keys=keys, summary=False)
    except KeyError:  # the scheduler has forgotten one meanwhile
        raise loss(client, "a result") from None
    workers = running(client, ready) or running(client)
    if len(workers) < 2:
        return []
    places = places_apart([(sizes[key], holders.get(key, ())) for key in keys], workers)
    token = uuid4().hex[:8]
    copies = [(f"{COPY}-{number}_-{token}",) for number in range(len(keys))]
    graph: Graph = {own: task(own, as_it_is, [key]) for own, key in zip(copies, keys)}
    with dask.annotate(workers=dict(zip(copies, places)).get, allow_other_workers=True):
        return [[copy] for copy in client.get(graph, copies, sync=False)]


def places_apart(results: Sequence[tuple[int, Collection[str]]], workers: Sequence[str]) -> list[str]:
    """Another worker for each result (its bytes, and who has it) than those that have it.

    The largest first, each time to who has been given least.
    """
    given: Counter[str] = Counter()
    places = {}
    for number, (size, holders) in sorted(enumerate(results), key=lambda item: -item[1][0]):
        others = [worker for worker in workers if worker not in holders] or list(workers)
        hosts = {_host(worker) for worker in holders}
        elsewhere = [worker for worker in others if _host(worker) not in hosts] or others
        places[number] = min(elsewhere, key=lambda worker: given[worker])
        given[places[number]] += size
    return [places[number] for number in range(len(results))]


class Silence:
    """Notices workers that say nothing, while results are waited for, and has Dask end them.

    A process that ends closes its connections, which the scheduler sees at once. One that is stopped, and a machine
    that is cut off or loses power, closes nothing: Dask waits 5 minutes (`distributed.scheduler.worker-ttl`, a setting
    of the process in which the scheduler was started, not of ours) and a whole run with it.

    Silence counts by looks, a late look for no more than any other: where this process or the scheduler was held up,
    everybody seems silent.

    seconds  for which a worker may say nothing; 0 = as long as Dask itself waits
    left     addresses of the workers that were ended
    """

    def __init__(self, client: Any, ready: str) -> None:
        """ready   what the heartbeats of a worker tell of that is prepared"""
        self.client, self.ready, self.seconds, self.left = client, ready, 0.0, set[str]()
        self.looked = 0.0
        self.heard: dict[str, tuple[float, float]] = {}  # of a worker: its last heartbeat, and silence since then

    def look(self) -> None:
        """Called about every half second."""
        now = time.monotonic()
        if not self.seconds or now - self.looked < EVERY:
            return
        passed, self.looked = min(now - self.looked, 2 * EVERY), now
        workers = members(self.client)
        patience = max(self.seconds, HEARTBEATS * heartbeat_interval(len(workers)))
        before, self.heard = self.heard, {}
        for address, worker in workers.items():
            last, silence = before.get(address, (0.0, 0.0))
            self.heard[address] = worker["last_seen"], silence + passed if worker["last_seen"] == last else 0.0
            prepared = self.ready in worker["metrics"]  # before, compiling holds it up
            if prepared and self.heard[address][1] >= patience:
                self._end(address)

    def _end(self, address: str) -> None:
        logging.getLogger("distributed.scheduler").warning("%s said nothing for %g s", address, self.seconds)
        self.left.add(address)
        how = {"wait_for_workers": False, "on_error": "return", "timeout": NANNY_SECONDS}
        self.client.sync(self.client.scheduler.restart_workers, workers=[address], stimulus_id="daskgpt-silent", **how)


def _host(address: str) -> str:
    """Of a worker's address, protocol://host:port."""
    return address.rpartition("://")[2].rpartition(":")[0]
