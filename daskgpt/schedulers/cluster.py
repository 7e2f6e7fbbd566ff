"""A `dask.distributed` cluster, started here or borrowed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from uuid import uuid4

import dask
import numpy as np
from distributed import Future, span, wait

from daskgpt.graph.nodes import Key, in_one_layer, renamed, with_leaves
from daskgpt.graph.program import in_run
from daskgpt.graph.recording import GraphRun
from daskgpt.schedulers.dask_internals import holders
from daskgpt.schedulers.failures import HeartbeatMonitor, loss, losses_as_errors
from daskgpt.schedulers.local import ahead_of
from daskgpt.schedulers.membership import check_versions, members, running
from daskgpt.schedulers.protocol import ProcessSpans, Scheduler, WorkerLost
from daskgpt.schedulers.workers import begin_spans, take_spans

LOOKING = 0.5  # seconds between two looks at the workers while waiting for results
TAG = "daskgpt"  # of the span of a run's tasks


class ClusterScheduler(Scheduler):
    """A `dask.distributed` cluster: results are futures and stay on the workers until they are fetched.

    Keys contain the number of the run, since equal keys mean equal results on a cluster. A future at a leaf is not
    sent: the tasks that read it refer to its key.

    needed   addresses of the workers that the run cannot do without: waiting for results ends when one is gone
    """

    in_place = False  # Dask may compute a lost result again from its inputs

    def __init__(self, client: Any, description: str) -> None:
        self.client, self.description = client, description
        with span(TAG):  # otherwise Dask opens a span for each submission, and keeps it
            self.annotation = {"span": dask.get_annotations()["span"]}
        self.silence = HeartbeatMonitor(client)
        self.needed: set[str] = set()

    @property
    def threads(self) -> int:  # type: ignore[override]
        """Threads of all workers together."""
        with losses_as_errors(self.client):
            return sum(self.client.nthreads().values())

    def run(self, submission: GraphRun) -> list[Any]:
        graph, leaves, keys, runs = submission
        number, self.runs = self.runs, self.runs + runs
        new: dict[Key, Any] = {key: (f"{key[0]}-{number}", *key[1:]) for key in graph.keys() | leaves.keys()}
        held = {key: self.held(value) for key, value in leaves.items() if not isinstance(value, np.ndarray)}
        new |= {key: future.key for key, future in held.items()}
        data = with_leaves(graph, {key: value for key, value in leaves.items() if key not in held})
        layer = in_one_layer({key: in_run(node, number) for key, node in renamed(data, new).items()})
        with losses_as_errors(self.client), dask.annotate(**self.annotation):
            return list(self.client.get(layer, [new[key] for key in keys], sync=False))

    def submit_to(
        self, address: str | None, name: str, function: Callable[..., Any], *arguments: Any, moves: bool = False
    ) -> Any:
        """Submit a call of a function to one worker, or to any; return its future.

        moves   whether the call may be made on another worker if that one is gone
        """
        where = {"workers": [address], "allow_other_workers": moves} if address else {}
        with losses_as_errors(self.client), dask.annotate(**self.annotation):
            return self.client.submit(function, *arguments, key=f"{name}-{uuid4().hex}", pure=False, **where)

    def fetch(self, handles: list[Any]) -> list[Any]:
        with losses_as_errors(self.client):
            fetching = self.client.sync(_begun, self.client, handles)
            try:
                while not self.client.sync(_soon, [fetching]):
                    self._look()
            except WorkerLost:
                self.client.loop.add_callback(fetching.cancel)
                raise
            return list(self.client.sync(_result, fetching))

    def fetch_together(self, handles: list[Any]) -> list[Any]:
        """Return the results of tasks that wait for each other: once one fails, do not wait for the others."""
        with losses_as_errors(self.client):
            while left := [handle for handle in handles if handle.status == "pending"]:
                self._wait(left, "FIRST_COMPLETED")
                for handle in handles:
                    if handle.status == "error":
                        handle.result()
                    elif handle.status not in ("pending", "finished"):
                        raise loss(self.client, "a rank")
        return self.fetch(handles)  # a worker may be lost now as well, with its result

    def settle(self, handles: list[Any]) -> None:
        with losses_as_errors(self.client):
            self._wait(handles)

    def _wait(self, handles: list[Any], which: str = "ALL_COMPLETED") -> None:
        """Wait for all futures, or for the first one."""
        while handles and not self.client.sync(_soon, handles, which):
            self._look()

    def _look(self) -> None:
        """Check the workers while waiting for results: Dask itself would wait forever.

        Errors   WorkerLost if a needed worker, or the last one, is gone
        """
        self.silence.look()
        if self.client.status == "running":
            there = self.client.nthreads().keys()
            if not there or self.needed - there:
                raise loss(self.client, "a worker")

    def settled(self, handles: list[Any]) -> bool:
        """Return whether results are made, without waiting. Errors as of `fetch`."""
        own = [handle.status for handle in handles if isinstance(handle, Future)]
        if {"cancelled", "error"} & set(own):
            raise loss(self.client, "a result")
        return set(own) <= {"finished"}

    def present(self, handles: list[Any]) -> list[bool]:
        """Return whether each result is in the memory of a worker; values of this process are."""
        keys = [handle.key for handle in handles if isinstance(handle, Future) and handle.status == "finished"]
        with losses_as_errors(self.client):
            held = holders(self.client, keys)
        return [bool(held.get(handle.key)) if isinstance(handle, Future) else True for handle in handles]

    def addresses(self) -> set[str]:
        with losses_as_errors(self.client):
            return set(running(self.client))

    def admit(self, packed: bool, silence: float = 0.0) -> None:
        if packed:  # everything else was checked when the cluster was opened
            with losses_as_errors(self.client):
                check_versions(self.client, packed)
        self.silence.seconds = silence

    def silent(self) -> set[str]:
        """Return the addresses of the workers that were ended because they sent no heartbeat."""
        return self.silence.left

    def everywhere(self, function: Callable[..., Any], *arguments: Any, here: bool = False) -> list[Any]:
        results = [function(*arguments)] if here else []
        return results + list(self.client.run(function, *arguments).values())

    def worker_metrics(self, name: str) -> dict[str, Any]:
        with losses_as_errors(self.client):
            workers = members(self.client).values()
        return {str(own["name"]): own["metrics"][name] for own in workers if name in own["metrics"]}

    def publish(self, topic: str, message: Any) -> None:
        with suppress(WorkerLost), losses_as_errors(self.client):  # the next request for results raises the error
            self.client.log_event(topic, message)

    def each(
        self, name: str, function: Callable[[Any], Any], items: Iterator[Any], take: Callable[[Any], None]
    ) -> None:
        under_way, ahead = deque[Any](), ahead_of(self.threads)
        for item in items:
            under_way.append(self.submit_to(None, name, partial(function, item)))
            if len(under_way) == ahead:
                take(*self.fetch([under_way.popleft()]))
        while under_way:
            take(*self.fetch([under_way.popleft()]))

    @contextmanager
    def record(self) -> Iterator[list[ProcessSpans]]:
        found: list[ProcessSpans] = []
        with losses_as_errors(self.client):
            self.client.run(begin_spans, on_error="ignore")  # workers may leave at any moment
        try:
            yield found
        finally:
            with losses_as_errors(self.client):
                taken = self.client.run(take_spans, on_error="ignore")
            workers = members(self.client)
        for address, worker in sorted(workers.items(), key=lambda item: str(item[1]["name"])):
            if address in taken:
                found.append(ProcessSpans(f"worker {worker['name']}", worker["nthreads"], *taken[address]))

    def held(self, value: Any) -> Any:
        """Return a future of a value that stays on a worker."""
        if isinstance(value, Future):
            return value
        with losses_as_errors(self.client):
            try:
                return self.client.scatter([value], hash=False)[0]
            except KeyError:  # the scheduler knows that worker no longer
                raise loss(self.client, "a worker") from None


async def _soon(handles: list[Any], which: str = "ALL_COMPLETED") -> bool:
    """Return whether results are ready within `LOOKING` seconds; `which` means all of them, or the first one.

    A timeout is a value and no error: an error that passes through `Client.sync` forms a cycle with the frames below
    it, and what they refer to, such as the state of a step, would stay on the workers until garbage is collected.
    """
    if isinstance(handles[0], asyncio.Future):
        return bool((await asyncio.wait(handles, timeout=LOOKING))[0])
    try:
        with handles[0].client.as_current():  # `wait` would use the newest client of this process
            await wait(handles, timeout=LOOKING, return_when=which)
    except TimeoutError:
        return False
    return True


async def _begun(client: Any, handles: list[Any]) -> Any:
    """Begin to fetch results; return a future of the event loop."""
    return asyncio.ensure_future(client.gather(handles, asynchronous=True))


async def _result(fetching: Any) -> Any:
    return await fetching
