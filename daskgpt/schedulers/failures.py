"""Failures of a cluster: the errors of lost results, places for copies, and workers that do not answer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

from distributed import KilledWorker
from distributed.client import ClosedClientError
from distributed.comm.addressing import get_address_host
from distributed.scheduler import heartbeat_interval

from daskgpt.schedulers.dask_internals import end_worker
from daskgpt.schedulers.membership import members
from daskgpt.schedulers.protocol import ClusterLost, WorkerLost
from daskgpt.schedulers.worker_metrics import METRIC

EVERY = 0.5  # seconds between two looks at heartbeats
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


def loss(client: Any, sign: str) -> WorkerLost:
    """Return the error of a loss; `sign` is how it was noticed."""
    lost: type[WorkerLost]
    if client.status == "running":
        lost, who, what = WorkerLost, "every worker", "a worker lost with its part of the parameters"
    else:
        lost, who, what = ClusterLost, "the scheduler", "no record of where the parameters are"
    rule = f"{who} must live until the end of a run"
    return lost("ClusterScheduler", rule, f"{sign}, {what}")


def places_apart(results: Sequence[tuple[int, Collection[str]]], workers: Sequence[str]) -> list[str]:
    """Return another worker for each result (its bytes, and its holders) than those that have it.

    The largest result is placed first, each on the worker that has been given the fewest bytes.
    """
    given: Counter[str] = Counter()
    places = {}
    for number, (size, where) in sorted(enumerate(results), key=lambda item: -item[1][0]):
        others = [worker for worker in workers if worker not in where] or list(workers)
        hosts = {get_address_host(worker) for worker in where}
        elsewhere = [worker for worker in others if get_address_host(worker) not in hosts] or others
        places[number] = min(elsewhere, key=lambda worker: given[worker])
        given[places[number]] += size
    return [places[number] for number in range(len(results))]


class HeartbeatMonitor:
    """Detects workers that send no heartbeats while results are waited for, and lets Dask end them.

    A process that ends closes its connections, which the scheduler sees at once. A stopped process, or a machine that
    is cut off or loses power, closes nothing: Dask waits 5 minutes (`distributed.scheduler.worker-ttl`, a setting of
    the scheduler's process, not of this one), and a run with it.

    Silence is counted in looks, a late look for no more than any other: after a delay of this process or of the
    scheduler all workers seem silent.

    seconds  without a heartbeat after which a worker is ended; 0 = only Dask's own limit
    left     addresses of the workers that were ended
    """

    def __init__(self, client: Any) -> None:
        self.client, self.seconds, self.left = client, 0.0, set[str]()
        self.looked = 0.0
        self.heard: dict[str, tuple[float, float]] = {}  # of a worker: its last heartbeat, and silence since then

    def look(self) -> None:
        """Look at the heartbeats; called about every half second."""
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
            prepared = METRIC in worker["metrics"]  # before that, compilation delays heartbeats
            if prepared and self.heard[address][1] >= patience:
                log = logging.getLogger("distributed.scheduler")
                log.warning("%s sent no heartbeat for %g s", address, self.seconds)
                self.left.add(address)
                end_worker(self.client, address)
