"""A `dask.distributed` cluster, started here or borrowed; what may go wrong with it, and a monitor of its workers."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import dask
from distributed import Future, KilledWorker, span, wait

from daskgpt.graph.compiled import STATE, Submission
from daskgpt.graph.nodes import Key, in_one_layer, pinned, renamed, with_leaves
from daskgpt.graph.program import in_run
from daskgpt.schedulers import dask_internals as internals
from daskgpt.schedulers.links import unreached
from daskgpt.schedulers.protocol import METRIC, ClusterLost, ProcessSpans, Scheduler, WorkerLost
from daskgpt.schedulers.workers import VersionCheck, begin_spans, members, register, running, take_spans

REACHING = 6.0  # seconds of waiting after which workers are asked whether they reach each other; they answer in 8
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
SIGNS = (CancelledError, KilledWorker, OSError, internals.ClosedClientError)
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
    except (RuntimeError, AttributeError, UnboundLocalError) as error:
        is_source = str(error) == LOST_SOURCE
        if client.status == "running" and not is_source:
            raise  # a client that has closed, or closes, may raise any of these
        raise loss(client, "a result's source" if is_source else "closed") from None


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


def places_apart(results: Sequence[tuple[int, str]], workers: Sequence[str]) -> list[str]:
    """Return another worker for each result (its bytes, and its holder) than the one that has it, on another host if
    there is one; there must be two workers.

    The largest result is placed first, each on the worker that has been given the fewest bytes.
    """
    given: Counter[str] = Counter()
    places = {}
    for number, (size, holder) in sorted(enumerate(results), key=lambda item: -item[1][0]):
        host, others = internals.get_address_host(holder), [worker for worker in workers if worker != holder]
        places[number] = min(others, key=lambda worker: (internals.get_address_host(worker) == host, given[worker]))
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
    named    whether a line has named it
    """

    heard: float = 0.0
    silence: float = 0.0
    paused: float = math.inf
    named: bool = False


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
        self.looked = 0.0
        self.watched: dict[str, Watched] = {}

    def look(self) -> None:
        """Look at all workers; called about every half second."""
        now = time.monotonic()
        if now - self.looked < EVERY:
            return
        passed, self.looked = min(now - self.looked, 2 * EVERY), now
        workers = members(self.client)
        least = HEARTBEATS * internals.heartbeat_interval(len(workers))
        named = max(NAMED, least)
        seconds = named if self.stop_requested() else max(self.seconds or math.inf, least)
        before, self.watched = self.watched, {}
        for address, worker in workers.items():
            last, heard = before.get(address, Watched()), worker["last_seen"]
            watched = self.watched[address] = Watched(heard)
            watched.silence = last.silence + passed if heard == last.heard else 0.0
            watched.paused = min(last.paused, now) if is_blocked(worker) else math.inf
            prepared, words = METRIC in worker["metrics"] or not self.compiling, ""
            if prepared and watched.silence >= seconds:
                self._end(address)
            elif watched.silence >= named:
                after = f"ended after {self.seconds:g} s (--worker-seconds)" if self.seconds else "waited for"
                after = after if prepared else "it may be compiling kernels"
                words = f"silent: no heartbeat for {named:g} s; {after}"
            elif watched.paused <= now - NAMED:
                words = paused_words(worker)
            if words and not last.named:
                # By default, the address is its name.
                name = address if worker["name"] == address else f"{worker['name']} ({address})"
                self.say(f"workers    worker {name} is {words}")
            watched.named = bool(words)
        stuck = {address for address, watched in self.watched.items() if watched.paused <= now - NAMED}
        self.stuck = {address: f"which is {paused_words(workers[address])}" for address in stuck}

    def _end(self, address: str) -> None:
        self.left[address] = "which sent no heartbeat"
        internals.end_worker(self.client, address)


def is_blocked(worker: Mapping[str, Any]) -> bool:
    """Return whether a worker begins no tasks, and runs none."""
    return bool(worker["status"] == "paused" and not worker["metrics"].get("task_counts", {}).get("executing"))


def paused_words(worker: Mapping[str, Any]) -> str:
    """Return how much memory a worker that Dask has paused has taken, in words."""
    held, limit = worker["metrics"].get("memory", 0), worker["memory_limit"]
    return "paused" + f": {held / 1e9:.2f} of {limit / 1e9:.2f} GB, Dask's limit" * bool(limit)


class ClusterScheduler(Scheduler):
    """A `dask.distributed` cluster: results are futures and stay on the workers until they are fetched.

    Keys contain the number of the run, since equal keys mean equal results on a cluster. A future at a leaf is not
    sent: the tasks that read it refer to its key.

    name     identifies the run on the cluster; several may have one client
    monitor  names workers that take no tasks, and has `say` and `stop_requested` of the run
    minutes  to wait for a worker that takes tasks
    apart    workers that the run does without for some time
    needed   addresses of the workers that the run cannot do without: waiting for results ends when one is gone, or
             takes no tasks
    """

    in_place = False  # Dask may compute a lost result again from its inputs

    def __init__(self, client: Any, description: str) -> None:
        self.client, self.description = client, description
        with span("daskgpt"):  # otherwise Dask opens a span for each submission, and keeps it
            self.span = dask.get_annotations()["span"]
        self.name = f"{client.id}-{uuid4().hex[:8]}"
        self.monitor, self.minutes, self.apart = WorkerMonitor(client), 0.0, LeftOut()
        self.since = 0.0  # when the wait for results began, or workers were last asked whether they reach each other
        self.needed: set[str] = set()

    @property
    def threads(self) -> int:  # type: ignore[override]
        """Threads of all workers together."""
        return sum(self.threads_of_workers().values())

    def threads_of_workers(self) -> dict[str, int]:
        """Return the threads of each worker by its address, of those that take no tasks, too."""
        with losses_as_errors(self.client):
            return dict(self.client.nthreads())

    def run(self, submission: Submission) -> list[Any]:
        graph, leaves, keys, runs, _ = submission
        number, self.runs = self.runs, self.runs + runs
        new: dict[Key, Any] = {key: (f"{key[0]}-{number}", *key[1:]) for key in graph.keys() | leaves.keys()}
        held = {key: self.held(value) for key, value in leaves.items() if key[0] == STATE}
        new |= {key: future.key for key, future in held.items()}
        data = with_leaves(graph, {key: value for key, value in leaves.items() if key not in held})
        layer = in_one_layer({key: in_run(node, number) for key, node in renamed(data, new).items()})
        with losses_as_errors(self.client), self._annotated():
            return list(self.client.get(layer, [new[key] for key in keys], sync=False))

    def submit(
        self, name: str, function: Callable[..., Any], *arguments: Any, address: str = "", moves: bool = False
    ) -> Any:
        """Submit a call of a function; return its future.

        address  of the worker that makes it; empty for any worker
        moves    whether another one may make it if that one is gone
        """
        where = {"workers": [address], "allow_other_workers": moves} if address else {}
        with losses_as_errors(self.client), self._annotated():
            return self.client.submit(function, *arguments, key=f"{name}-{uuid4().hex}", pure=False, **where)

    def submit_together(self, name: str, calls: Sequence[tuple[str, Callable[[], Any]]]) -> list[Any]:
        """Submit calls that wait for each other, each to the worker with an address; return their futures.

        They reach the scheduler as one graph, and every worker in the same order as those of other runs: of two runs
        that share workers of one thread, neither waits for a call that is behind one of the other, which waits too.
        """
        keyed = {f"{name}-{number:06}-{uuid4().hex}": call for number, call in enumerate(calls)}
        with losses_as_errors(self.client), dask.annotate(span=self.span):
            # By default, Dask orders the graphs of a minute together, by their keys; those that tasks submit always.
            return list(self.client.get(pinned(keyed), list(keyed), sync=False, fifo_timeout=0))

    def _annotated(self) -> Any:
        """Annotate tasks that are submitted: they belong to the run, and run on the workers that it uses."""
        where = {"workers": sorted(self.addresses()), "allow_other_workers": True} if self.apart.now else {}
        return dask.annotate(span=self.span, **where)

    def fetch(self, handles: list[Any]) -> list[Any]:
        # Once one fails, `gather` does not wait for the others: they may wait for that one.
        return list(self._awaited(self.client.gather, handles))

    def call_on(self, function: Callable[..., Any], *arguments: Any, workers: Iterable[str] | None = None) -> Any:
        """Call a function in the processes of some workers, or of all, beside their tasks; return results by address.

        Workers that are gone are left out.
        """
        options = {"workers": None if workers is None else list(workers), "on_error": "ignore"}
        with losses_as_errors(self.client):
            return internals.awaited(self.client, self.monitor.look, self.client.run, function, *arguments, **options)

    def wait_for(self, handles: list[Any]) -> None:
        if handles:
            self._awaited(wait, handles)

    def _awaited(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the result of a method of Dask's client that waits, and look at the workers meanwhile."""
        self.since = time.monotonic()
        with losses_as_errors(self.client):
            return internals.awaited(self.client, self._look, method, *arguments, **options)

    def look(self) -> set[str]:
        """Look at the workers; return which of those that are needed are gone or take no tasks.

        While no worker takes tasks, this waits.

        Errors   ClusterLost if none does in time, or a stop is requested
        """
        with losses_as_errors(self.client):
            self.monitor.look()
        there = self.threads_of_workers().keys()
        if there and there <= self.monitor.stuck.keys():
            self.await_worker()
        return {address for address in self.needed if address not in there or address in self.monitor.stuck}

    def _look(self) -> None:
        """Check the workers while waiting for results: Dask itself would wait forever.

        Errors   WorkerLost if a needed worker, or the last one, is gone, takes no tasks, or does not reach another
        """
        if self.client.status != "running":
            return
        if self.look() or not self.threads_of_workers():
            raise loss(self.client, "a worker")
        if time.monotonic() - self.since > REACHING:  # Dask tries to fetch results from unreachable workers forever
            self.since = time.monotonic()
            if not self.without_unreached(sorted(self.needed or self.addresses())):
                raise loss(self.client, "a worker that others do not reach")

    def await_worker(self) -> None:
        """Wait until a worker takes tasks. Errors   ClusterLost if none does in time, or a stop is requested"""
        begin, waited, said = time.monotonic(), 0.0, ""
        while not self.addresses():
            with losses_as_errors(self.client):
                self.monitor.look()
            gone = not self.threads_of_workers()
            if not said and (gone or self.monitor.stuck):
                said = "all are gone" if gone else "none takes tasks"
                self.monitor.say(f"workers    {said}: the run ends unless one comes in {self.minutes:g} minutes")
            if (over := waited > 60 * self.minutes) or self.monitor.stop_requested():
                when = f"{self.minutes:g} minutes" if over else f"{waited:.0f} s, when a stop was requested"
                raise ClusterLost("train", "the cluster must have a worker that takes tasks", f"none for {when}")
            time.sleep(0.2)
            waited = time.monotonic() - begin

    def are_made(self, handles: list[Any]) -> bool:
        """Return whether results are made, without waiting. Errors as of `fetch`."""
        statuses = {handle.status for handle in handles}
        if {"cancelled", "error"} & statuses:
            raise loss(self.client, "a result")
        return statuses <= {"finished"}

    def present(self, handles: list[Any]) -> list[bool]:
        """Return whether each result is in the memory of a worker."""
        finished = [handle for handle in handles if handle.status == "finished"]
        with losses_as_errors(self.client):
            workers = self.client.who_has(finished)
        return [bool(set(workers.get(handle.key, ())) - self.apart.now) for handle in handles]

    def addresses(self) -> set[str]:
        """Return the addresses of the workers that take tasks now."""
        with losses_as_errors(self.client):
            there = set(running(self.client))
        return there - self.apart.now or there

    def without_unreached(self, addresses: Sequence[str]) -> bool:
        """Return whether all of some workers reach each other; if not, do without one of them for some time.

        Both addresses are named.
        """
        with losses_as_errors(self.client):
            unreached_by = {"": self.client.run_on_scheduler(unreached, addresses)}
        others = [address for address in addresses if address not in unreached_by[""]]
        unreached_by |= self.call_on(unreached, others, workers=others) if len(others) > 1 else {}
        pairs = {(source, target): why for source, reasons in unreached_by.items() for target, why in reasons.items()}
        if not pairs or len(addresses) < 2:
            return True
        for (source, target), why in pairs.items():
            self.monitor.say(f"workers    {source or 'the scheduler'} cannot connect to {target}: {why}. {REACHED}")
        # The one in most pairs is to blame; of two, the one that cannot be reached.
        blame = Counter(address for pair in pairs for address in pair if address)
        blame.update({target: 0.5 for _, target in pairs})
        apart = max(addresses, key=lambda address: blame[address])
        self.monitor.left[apart] = "which others do not reach"
        self.apart.add(apart)
        return False

    def admit(self, packed: bool) -> None:
        if packed:  # everything else was checked when the cluster was opened
            with losses_as_errors(self.client):
                register(self.client, VersionCheck(self.name, packed, members(self.client)), self.monitor.look)

    def memory_limits(self) -> list[int]:
        with losses_as_errors(self.client):
            return [int(worker["memory_limit"] or 0) for worker in members(self.client).values()]

    def attend(
        self, say: Callable[[str], None], stop_requested: Callable[[], bool], seconds: float, minutes: float
    ) -> None:
        self.monitor.say, self.monitor.stop_requested, self.monitor.seconds = say, stop_requested, seconds
        self.minutes = minutes
        self.await_worker()
        while not self.without_unreached(sorted(self.addresses())):
            pass

    def everywhere(self, function: Callable[..., Any], *arguments: Any, here: bool = False) -> list[Any]:
        return ([function(*arguments)] if here else []) + list(self.call_on(function, *arguments).values())

    def publish(self, topic: str, message: Any) -> None:
        with suppress(WorkerLost), losses_as_errors(self.client):  # the next request for results raises the error
            self.client.log_event(topic, message)

    def compute(self, bag: Any, take: Callable[[Any], object]) -> None:
        with losses_as_errors(self.client), self._annotated():
            waiting = self.client.compute(bag.to_delayed())
        while waiting:
            done, waiting = self._awaited(wait, waiting, return_when="FIRST_COMPLETED")
            for result in self.fetch(list(done)):
                take(result)

    @contextmanager
    def record(self) -> Iterator[list[ProcessSpans]]:
        recordings: list[ProcessSpans] = []
        self.call_on(begin_spans)
        try:
            yield recordings
        finally:
            with losses_as_errors(self.client):
                taken, workers = self.call_on(take_spans), members(self.client)
        for address, worker in sorted(workers.items(), key=lambda item: str(item[1]["name"])):
            if address in taken:
                recordings.append(ProcessSpans(f"worker {worker['name']}", worker["nthreads"], *taken[address]))

    def held(self, value: Any) -> Any:
        """Return a future of a value that stays on a worker."""
        if isinstance(value, Future):
            return value
        with losses_as_errors(self.client):
            try:
                where = list(self.addresses()) if self.apart.now else None
                return self.client.scatter([value], workers=where, hash=False)[0]
            except KeyError:  # the scheduler knows that worker no longer
                raise loss(self.client, "a worker") from None
