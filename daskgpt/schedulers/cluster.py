"""A `dask.distributed` cluster, one's own or somebody's."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from uuid import uuid4

import dask
import numpy as np
from distributed import Client, Future, LocalCluster, span, wait

from daskgpt.config.errors import refusal, require
from daskgpt.config.stopping import delayed_interrupts
from daskgpt.graph.nodes import Key, in_one_layer, renamed, with_leaves
from daskgpt.graph.program import in_run
from daskgpt.graph.recording import GraphRun
from daskgpt.schedulers.bounded_map import each_submitted
from daskgpt.schedulers.failures import LostResults, Silence, copies_apart, loss, present, telling_losses
from daskgpt.schedulers.local import ENVIRONMENT
from daskgpt.schedulers.membership import TakeBack, admit_equals, give, members, running, scheduler_identity, take_back
from daskgpt.schedulers.protocol import ProcessSpans
from daskgpt.schedulers.security import reason_and_advice, warn_of_open
from daskgpt.schedulers.worker_metrics import METRIC

CONNECT_TIMEOUT = 10  # seconds
DASHBOARD_PORT = 8787
HEARTBEATS_TIMEOUT = 3  # seconds; one that only begins need not be waited for
PRELOAD, PAGE = "distributed.scheduler.preload", "daskgpt.instruments.dashboard"  # by its name: it stands above
SPAWN = "distributed.nanny.pre-spawn-environ"  # variables of worker processes
LOGGED, SENT = "distributed.admin.low-level-log-length", 20  # messages
# What Dask's processes do between tasks, as often as it is set: (as Dask sets it, as clusters of ours do). On two cores
# two workers, their nannies, scheduler and client take 15 % of a core for it, and with the second settings 5 %.
BETWEEN_TASKS: dict[str, tuple[object, object]] = {
    "distributed.admin.tick.interval": ("20ms", "500ms"),  # every process looks whether it answers, warns after 3 s
    "distributed.worker.profile.interval": ("10ms", "100ms"),  # what a task is doing, for Dask's report
    "distributed.admin.system-monitor.disk": (True, False),
}
LOOKING = 0.5  # seconds between two looks at the workers, while results are waited for
TAG = "daskgpt"  # of the span of a run's tasks
WORKERS_TIMEOUT = 30  # seconds; Dask itself would wait for a first worker for ever


class ClusterScheduler:
    """A `dask.distributed` cluster: results are futures and stay on the workers until they are fetched.

    Each run has its number in its keys, for a cluster takes an equal key for an equal result. A future at a leaf is
    not sent: the tasks that read it name its key.

    needed   addresses of the workers without which nothing goes on: results are not waited for where one is gone
    """

    in_place = False  # a lost worker's results are computed again from what they were made of

    def __init__(self, client: Any, description: str) -> None:
        self.client, self.description, self.runs = client, description, 0
        with span(TAG):  # without it Dask opens a span of its own for each submission, for ever
            self.annotation = {"span": dask.get_annotations()["span"]}
        self.silence = Silence(client, METRIC)
        self.needed: set[str] = set()

    @property
    def threads(self) -> int:
        """Of all workers together."""
        with telling_losses(self.client):
            return sum(self.client.nthreads().values())

    def run(self, submission: GraphRun) -> list[Any]:
        graph, leaves, keys, runs = submission
        number, self.runs = self.runs, self.runs + runs
        new: dict[Key, Any] = {key: (f"{key[0]}-{number}", *key[1:]) for key in graph.keys() | leaves.keys()}
        held = {key: self.held(value) for key, value in leaves.items() if not isinstance(value, np.ndarray)}
        new |= {key: future.key for key, future in held.items()}
        data = with_leaves(graph, {key: value for key, value in leaves.items() if key not in held})
        layer = in_one_layer({key: in_run(node, number) for key, node in renamed(data, new).items()})
        with telling_losses(self.client), dask.annotate(**self.annotation):
            return list(self.client.get(layer, [new[key] for key in keys], sync=False))

    def submit_to(self, address: str, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Begin to call a function on one worker, nowhere else; its handle."""
        with telling_losses(self.client), dask.annotate(**self.annotation):
            key = f"{name}-{uuid4().hex}"
            return self.client.submit(function, *arguments, key=key, workers=[address], pure=False)

    def fetch(self, handles: list[Any]) -> list[Any]:
        with telling_losses(self.client):
            fetching = self.client.sync(_begun, self.client, handles)
            try:
                while not self.client.sync(_soon, [fetching]):
                    self._look()
            except LostResults:
                self.client.loop.add_callback(fetching.cancel)
                raise
            return list(self.client.sync(_result, fetching))

    def fetch_together(self, handles: list[Any]) -> list[Any]:
        """The results of tasks that wait for each other: where one is lost, the others are not waited for."""
        with telling_losses(self.client):
            while left := [handle for handle in handles if handle.status == "pending"]:
                self._wait(left, "FIRST_COMPLETED")
                for handle in handles:
                    if handle.status == "error":
                        handle.result()
                    elif handle.status not in ("pending", "finished"):
                        raise loss(self.client, "a rank")
            return list(self.client.gather(handles))

    def settle(self, handles: list[Any]) -> None:
        with telling_losses(self.client):
            self._wait(handles)

    def _wait(self, handles: list[Any], which: str = "ALL_COMPLETED") -> None:
        """Wait for all, or for the first one."""
        while not self.client.sync(_soon, handles, which):
            self._look()

    def _look(self) -> None:
        """Look at the workers, while results are waited for: Dask itself would wait for ever.

        Errors   LostResults where a worker is gone without which nothing goes on, or the last one is
        """
        self.silence.look()
        if self.client.status == "running":
            there = self.client.nthreads().keys()
            if not there or self.needed - there:
                raise loss(self.client, "a worker")

    def settled(self, handles: list[Any]) -> bool:
        own = [handle.status for handle in handles if isinstance(handle, Future)]
        if {"cancelled", "error"} & set(own):
            raise loss(self.client, "a result")
        return set(own) <= {"finished"}

    def present(self, handles: list[Any]) -> list[bool]:
        with telling_losses(self.client):
            return present(self.client, handles)

    def copies(self, handles: list[Any]) -> list[list[Any]]:
        with telling_losses(self.client), dask.annotate(**self.annotation):
            return copies_apart(self.client, handles, METRIC)

    def addresses(self) -> set[str]:
        with telling_losses(self.client):
            return set(running(self.client, METRIC))

    def admit(self, packed: bool) -> None:
        with telling_losses(self.client):
            admit_equals(self.client, packed)

    def leave_silent(self, seconds: float) -> None:
        self.silence.seconds = seconds

    def silent(self) -> set[str]:
        return self.silence.left

    def everywhere(self, function: Callable[..., Any], *arguments: Any, here: bool = False) -> list[Any]:
        results = [function(*arguments)] if here else []
        return results + list(self.client.run(function, *arguments).values())

    def told(self, name: str) -> dict[str, Any]:
        with telling_losses(self.client):
            workers = members(self.client).values()
        return {str(own["name"]): own["metrics"][name] for own in workers if name in own["metrics"]}

    def tell(self, topic: str, message: Any) -> None:
        with suppress(LostResults), telling_losses(self.client):  # whoever asks for results next is told of a loss
            self.client.log_event(topic, message)

    def each(
        self, name: str, function: Callable[[Any], Any], items: Iterator[Any], take: Callable[[Any], None]
    ) -> None:
        run, self.runs = self.runs, self.runs + 1

        def submit(call: Callable[[], Any], key: str) -> Any:
            with telling_losses(self.client), dask.annotate(**self.annotation):
                return self.client.submit(call, key=f"{key}-{run}-{self.client.id}")

        each_submitted(submit, self.fetch, self.threads, name, function, items, take)

    @contextmanager
    def record(self) -> Iterator[list[ProcessSpans]]:
        from daskgpt.schedulers.workers import RecordSpans, take_spans

        found: list[ProcessSpans] = []
        with telling_losses(self.client):
            give(self.client, RecordSpans())
        try:
            yield found
        finally:
            with telling_losses(self.client):
                taken = self.client.run(take_spans, on_error="ignore")
                with suppress(OSError):  # of a worker that leaves: the others have been told as well
                    self.client.unregister_worker_plugin(RecordSpans.name)
            workers = members(self.client)
        names = {address: f"worker {worker['name']}" for address, worker in workers.items()}
        stayed = taken.keys() & names.keys()  # one may leave at any moment
        for address in sorted(stayed, key=lambda address: names[address]):
            offset, spans = taken[address]
            found.append(ProcessSpans(names[address], workers[address]["nthreads"], offset, spans))

    def held(self, value: Any) -> Any:
        """A future of what is to stay on the workers."""
        if isinstance(value, Future):
            return value
        with telling_losses(self.client):
            try:
                return self.client.scatter([value], hash=False)[0]
            except KeyError:  # the scheduler knows that worker no longer
                raise loss(self.client, "a worker") from None


async def _soon(handles: list[Any], which: str = "ALL_COMPLETED") -> bool:
    """Whether results are there within some seconds; which: all of them, or the first one.

    It is told without an error: one that comes through `Client.sync` makes a cycle of itself and the frames below it,
    and what they know, such as the state of a step, would stay on the workers until Python looks for garbage.
    """
    if isinstance(handles[0], asyncio.Future):
        return bool((await asyncio.wait(handles, timeout=LOOKING))[0])
    try:
        await wait(handles, timeout=LOOKING, return_when=which)
    except TimeoutError:
        return False
    return True


async def _begun(client: Any, handles: list[Any]) -> Any:
    """A future of the loop, of results that are fetched."""
    return asyncio.ensure_future(client.gather(handles, asynchronous=True))


async def _result(fetching: Any) -> Any:
    return await fetching


@contextmanager
def local_cluster(workers: int) -> Iterator[ClusterScheduler]:
    with _cluster_of_processes(workers) as cluster, _keeping_little(address=cluster) as client:
        described = f"local cluster, {workers} worker processes, dashboard {cluster.dashboard_link}"
        yield _ready(client, described, ends_with_it=True)


def _cluster_of_processes(workers: int) -> LocalCluster:
    """A cluster that Ctrl-C in a terminal, which every process of the run gets, leaves to its client to end.

    A worker imports the script that is running. If that starts a cluster outside of `__main__`, the worker would too,
    which multiprocessing forbids; it ends here, and the client says why.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)
    resource_tracker.ensure_running()  # else a worker's start does it, and that lets interrupts through again
    try:
        settings: dict[str, Any] = {
            PRELOAD: [*dask.config.get(PRELOAD), PAGE],
            SPAWN: {**dask.config.get(SPAWN), **ENVIRONMENT},
        }
        settings |= {name: own for name, (usual, own) in BETWEEN_TASKS.items() if dask.config.get(name) == usual}
        with delayed_interrupts(), dask.config.set(settings):
            return LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address=f"127.0.0.1:{_dashboard_port()}",
            )
    except RuntimeError as error:
        rule, script = "the worker processes of a local cluster must start", "the script that is running"
        advice = f'Each of them imports {script}: what it does must stand under `if __name__ == "__main__":`.'
        raise refusal(RuntimeError, "open_scheduler", rule, str(error).rstrip("."), advice) from None


def _dashboard_port() -> int:
    """Dask's usual port if it is free, else any: another run's dashboard may be there."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", DASHBOARD_PORT))
        except OSError:
            return 0
        return DASHBOARD_PORT


@contextmanager
def connected_cluster(address: str, named: str = "") -> Iterator[ClusterScheduler]:
    if address.startswith("file:"):
        client = _client(address, scheduler_file=_scheduler_file(address))
    else:
        client = _client(address, address=address)
    with _told_once(), client:
        yield _ready(client, _described(client, "cluster", address, named))


@contextmanager
def borrowed_cluster(client: Any) -> Iterator[ClusterScheduler]:
    """Somebody's client, which stays open; of a run nothing stays with it or on its cluster.

    Errors   those of `client_address`; RuntimeError where no worker comes
    """
    address = client_address(client)
    kind = type(client.cluster).__name__ if client.cluster else "cluster"
    with _told_once():
        try:
            yield _ready(client, _described(client, kind, address))
        finally:
            with suppress(OSError, RuntimeError, ValueError):  # its cluster is gone
                client.run_on_scheduler(take_back, client.id)


def client_address(client: Any) -> str:
    """Where the scheduler of a client is.

    Errors   TypeError for what is no client that waits for its results, RuntimeError for one that is closed
    """
    rule, got = "the client must be a distributed.Client that waits for results", {"client": repr(client)}
    waits = isinstance(client, Client) and not client.asynchronous
    require(waits, "open_scheduler", rule, got, "Give Client(cluster), not asynchronous=True.", TypeError)
    rule, advice = "the client must be connected", "Open one that lives as long as the run."
    require(client.status == "running", "open_scheduler", rule, {"client": client.status}, advice, RuntimeError)
    return str(client.scheduler.address)


def _described(client: Any, kind: str, address: str, named: str = "") -> str:
    """A connected cluster, for people, once it has a worker; who can reach it without TLS is warned of.

    named   what the address comes from
    """
    try:
        client.wait_for_workers(1, timeout=WORKERS_TIMEOUT)
    except TimeoutError:
        rule, got = "the cluster must have a worker", f"none at scheduler={address} in {WORKERS_TIMEOUT} seconds"
        advice = f"Start one with `dask worker {address}`."
        raise refusal(RuntimeError, "open_scheduler", rule, got, advice) from None
    found = scheduler_identity(client)
    warn_of_open([found["address"], *found["workers"]])
    at = f"{address} ({named})" if named else address
    count = len(found["workers"])
    workers = f"{count} worker{'s' * (count != 1)} (more take part as they come)"
    page = "" if client.run_on_scheduler(has_page) else f" (a page for runs: dask scheduler --preload {PAGE})"
    return f"{kind} at {at}, {workers}, dashboard {client.dashboard_link}{page}"


def has_page() -> bool:
    """Whether the scheduler that this runs on has the dashboard's page for runs."""
    return PAGE in sys.modules


@contextmanager
def _told_once() -> Iterator[None]:
    """Keep Dask's client from writing a traceback when it loses its scheduler, as it waits for it or just as it sends
    it something: the run says it in one line.
    """
    levels = {name: logging.getLogger(name).level for name in ("distributed.client", "distributed.batched")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _scheduler_file(address: str) -> str:
    """The path of a scheduler file that exists: Dask itself would wait for it for ever."""
    path = Path(address.removeprefix("file:"))
    deadline = time.monotonic() + CONNECT_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            rule, got = "the scheduler file must exist", f"none at scheduler={address} in {CONNECT_TIMEOUT} seconds"
            advice = "Start one with `dask scheduler --scheduler-file FILE`."
            raise refusal(RuntimeError, "open_scheduler", rule, got, advice)
        time.sleep(0.1)
    return str(path)


def _keeping_little(**arguments: Any) -> Client:
    """A client that keeps few of the messages that it has sent, a thousand of which Dask keeps for its developers: a
    graph of each step, with its batch.
    """
    with dask.config.set({LOGGED: SENT}):
        return Client(**arguments)


def _client(shown: str, **arguments: str) -> Client:
    try:
        return _keeping_little(**arguments, timeout=f"{CONNECT_TIMEOUT}s")
    except (OSError, TimeoutError, TypeError, ValueError, RuntimeError) as error:
        # TypeError: tls:// without certificates, RuntimeError: tcp:// where Dask's settings ask for TLS;
        # ValueError: an address or a scheduler file that is none.
        reason, advice = reason_and_advice(error)
    # A client that has not connected is collected now: collected while another one or a cluster starts, in a thread of
    # Dask's, it would wait for the lock that this start holds, and the start for it.
    gc.collect()
    rule = "a Dask scheduler must answer"
    raise refusal(RuntimeError, "open_scheduler", rule, f"scheduler={shown} ({reason})", advice)


def _ready(client: Any, description: str, *, ends_with_it: bool = False) -> ClusterScheduler:
    """ends_with_it   whether the cluster ends with its client: workers that close cannot give anything back"""
    from daskgpt.schedulers.workers import PrepareWorker

    for kind in [PrepareWorker] if ends_with_it else [TakeBack, PrepareWorker]:
        give(client, kind(client))
    _await_heartbeats(client)
    return ClusterScheduler(client, description)


def _await_heartbeats(client: Any) -> None:
    """Until every worker has told that it is ready: an older heartbeat may overtake the one that says so first."""
    deadline = time.monotonic() + HEARTBEATS_TIMEOUT
    while len(running(client, METRIC)) < len(running(client)) and time.monotonic() < deadline:
        time.sleep(0.05)
