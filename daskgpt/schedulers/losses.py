"""Results that are lost on a cluster: the errors that say so, and copies on other workers, which outlive a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import dask
from distributed import Future, KilledWorker
from distributed.client import ClosedClientError

from daskgpt.config.errors import refusal
from daskgpt.graph.nodes import Graph, as_it_is, task
from daskgpt.schedulers.members import running

COPY = "recovery.copy"  # what Dask calls the tasks that copy
# With what Dask's client says that results are gone: the first for those that nobody can compute again, the second for
# a task that was on several workers as they died, an OSError for a connection that broke meanwhile (also a timeout).
SIGNS = (CancelledError, KilledWorker, OSError, ClosedClientError)


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
    """Two tasks for each result that return it: one where it is, one on another worker, on another host if possible.

    Empty where there is one worker. Each has a key of its own, for Dask's memory manager drops replicas of a key
    (those of `Client.replicate`, and the result itself where a step has sent it to others), whichever it likes. A copy
    may come to lie elsewhere where its worker dies meanwhile.

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
    pairs = places_apart([(sizes[key], holders.get(key, ())) for key in keys], workers)
    token = uuid4().hex[:8]
    graph: Graph = {}
    where: dict[Any, str] = {}
    for number, (key, pair) in enumerate(zip(keys, pairs)):
        for copy, worker in enumerate(pair):
            own = (f"{COPY}-{number}.{copy}_-{token}",)
            graph[own], where[own] = task(own, as_it_is, [key]), worker
    with dask.annotate(workers=where.get, allow_other_workers=True):
        copies = iter(client.get(graph, list(graph), sync=False))
    return [[next(copies), next(copies)] for _ in keys]


def places_apart(results: Sequence[tuple[int, Collection[str]]], workers: Sequence[str]) -> list[tuple[str, str]]:
    """Two workers for each result (its bytes, and who has it): one that has it, and another one.

    The largest first, each time to who has been given least.
    """
    given: Counter[str] = Counter()
    places = {}
    for number, (size, holders) in sorted(enumerate(results), key=lambda item: -item[1][0]):
        here = min([worker for worker in workers if worker in holders] or workers, key=lambda worker: given[worker])
        others = [worker for worker in workers if worker != here]
        elsewhere = [worker for worker in others if _host(worker) != _host(here)] or others
        places[number] = here, min(elsewhere, key=lambda worker: given[worker])
        given.update(dict.fromkeys(places[number], size))
    return [places[number] for number in range(len(results))]


def _host(address: str) -> str:
    """Of a worker's address, protocol://host:port."""
    return address.rpartition("://")[2].rpartition(":")[0]
