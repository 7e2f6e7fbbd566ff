"""Workers of a cluster: which of them take tasks, the plugins by which a run checks, prepares and leaves them, and the
kernel calls that they have recorded.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import dask
import numpy as np
from distributed import SchedulerPlugin, WorkerPlugin

import daskgpt
from daskgpt.config.errors import refusal
from daskgpt.graph.program import RECORDER, Span, Spans
from daskgpt.kernels.bfloat16.isa import unit
from daskgpt.kernels.compilation import compile_all
from daskgpt.schedulers import dask_internals as internals
from daskgpt.schedulers.links import end_programs, forget_worker, is_not_reported, leave, ranks_of
from daskgpt.schedulers.local import keep_memory
from daskgpt.schedulers.protocol import METRIC, clock_offset

PREFIX = "daskgpt-"  # of the names of plugins
PAGE = "daskgpt.profiling.dashboard"  # by name: it is in a layer above
LOGGED = "distributed.admin.low-level-log-length"
SENT = 20  # messages that scheduler and client keep
REMOVING_SECONDS = 10.0  # until a worker counts as one that does not answer
TRIES, PAUSE = 10, 0.2  # seconds between two
PACKAGES = ("dask", "distributed", "numpy", "numba")
LATE_SECONDS = 1.0  # after which no message of a run that has ended comes any more
ASKED = "daskgpt-calls"  # the handler of a worker
KEPT = 4000  # calls of a window that are kept when it has ended
TOGETHER = 1e-4  # seconds between calls of one kernel that are drawn as one
RECEIVE = "receive."  # prefix of the names of tasks that wait for a message


def plugin_name(run: str, name: str) -> str:
    """Return the name of a run's plugin; two runs at once have one each."""
    return f"{PREFIX}{name}-{run}"


def register(client: Any, plugin: Any, look: Callable[[], Any]) -> None:
    """Register a plugin with the scheduler or with all workers; retry when a worker leaves meanwhile.

    look     called while this waits

    Errors   OSError if all tries fail, or the scheduler is gone; RuntimeError if a process refuses the plugin or cannot
             import it
    """
    for more in reversed(range(TRIES)):
        try:
            internals.awaited(client, look, client.register_plugin, plugin)
            return
        except OSError:
            if not more or client.status != "running":
                raise
            time.sleep(PAUSE)
        except RuntimeError:
            raise
        except Exception as error:  # whatever an import raises there; Dask sends some as plain exceptions
            rule, got = "every worker must be able to import daskgpt and its packages", str(error) or repr(error)
            raise refusal(RuntimeError, "daskgpt", rule, got, "Start workers in an equal environment.") from None


def show_run(run: str, dask_scheduler: Any) -> tuple[str, int] | None:
    """Begin to show a run on a page of the scheduler's dashboard; return address and port of that, if there is one."""
    with suppress(Exception):  # the run does not need it, and Bokeh may be missing there
        if import_module(PAGE).begin(dask_scheduler, run):
            return dask_scheduler.http_server.address, dask_scheduler.http_server.port
    return None


async def remove_run(run: str, dask_scheduler: Any) -> None:
    """Remove a run: its page, its plugins, from the scheduler and all workers, and failed tasks that nobody wants."""
    if PAGE in sys.modules:
        sys.modules[PAGE].end(dask_scheduler, run)
    with suppress(Exception):  # a worker has just gone or does not answer, or the scheduler is closing
        await asyncio.wait_for(internals.remove_plugins(dask_scheduler, PREFIX, f"-{run}"), REMOVING_SECONDS)
    internals.forget_failures(dask_scheduler)
    if not any(name.startswith(f"{PREFIX}cleanup-") for name in dask_scheduler.plugins):  # the last run
        internals.keep_messages(dask_scheduler, dask.config.get(LOGGED))


class Cleanup(SchedulerPlugin):
    """Removes a run's plugins and failed tasks when its client has gone, in whatever way; other runs' plugins stay.

    Meanwhile the scheduler remembers few messages to workers: each window's message has all its tokens.
    """

    def __init__(self, client: str, run: str) -> None:
        self.name, self.client, self.run = plugin_name(run, "cleanup"), client, run
        self.removing: asyncio.Task[None] | None = None

    async def start(self, scheduler: Any) -> None:
        internals.keep_messages(scheduler, SENT)

    def add_worker(self, scheduler: Any, worker: str) -> None:
        internals.keep_messages(scheduler, SENT)

    def remove_client(self, scheduler: Any, client: str) -> None:
        # This is called when the client disconnects, and when its connection ends.
        if client == self.client and self.removing is None:
            self.removing = asyncio.create_task(remove_run(self.run, scheduler))


def members(client: Any) -> dict[str, dict[str, Any]]:
    """Return the scheduler's information on each worker, by address. Errors   those of `scheduler_identity`"""
    return dict(internals.scheduler_identity(client)["workers"])


def running(client: Any) -> list[str]:
    """Return the addresses of the workers that are ready for tasks: their heartbeats contain `METRIC`, and they do not
    start, end, or lack memory.

    Errors     those of `scheduler_identity`
    """
    workers = members(client).items()
    return [address for address, one in workers if one["status"] == "running" and METRIC in one["metrics"]]


def identity(packed: bool) -> dict[str, str]:
    """Return the versions of this process and its arithmetic: bits and messages depend on these.

    packed   whether products run in bfloat16
    """
    facts = {"daskgpt": f"{daskgpt.__version__} ({_sources()})"} | {name: version(name) for name in PACKAGES}
    return facts | ({"bfloat16 products": unit().name.lower()} if packed else {})


@functools.cache
def _sources() -> str:
    """Return a digest of the package's sources, which differ between builds of one version."""
    folder = Path(daskgpt.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=str):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:8]


class VersionCheck(WorkerPlugin):
    """Refuses workers that differ from the run's own process: one that joins is closed; if one was there before, the
    run does not begin.
    """

    refused: ClassVar[set[str]] = set()  # workers of this process that end

    def __init__(self, run: str, packed: bool, there: Iterable[str]) -> None:
        """packed  whether products run in bfloat16
        there   addresses of the workers that were there before
        """
        self.name, self.packed, self.there = plugin_name(run, "version-check"), packed, tuple(there)
        self.expected = identity(packed)

    def setup(self, worker: Any) -> None:
        """Errors   RuntimeError naming what differs"""
        here = identity(self.packed)
        other = [f"{name}={here.get(name)} (the run: {v})" for name, v in self.expected.items() if here.get(name) != v]
        if not other:
            return
        rule = "a worker must have the versions and the arithmetic of the run"
        got = f"worker={worker.address}, {', '.join(other)}"
        error = refusal(RuntimeError, "daskgpt", rule, got, "Start it in an equal environment.")
        if worker.address in self.there:
            raise error
        # Dask would log the error of a joining worker, and let it work.
        logging.getLogger("distributed.worker").error(str(error))
        self.refused.add(worker.id)
        internals.refuse_work(worker)


class PrepareWorker(WorkerPlugin):
    """Compiles kernels before tasks need them, and keeps memory.

    From then on the worker's heartbeats contain `METRIC`: without it a worker is not ready for tasks. All of this is
    undone when the last run that uses the worker has ended.
    """

    users: ClassVar[Counter[str]] = Counter()  # runs by worker of this process

    def __init__(self, run: str) -> None:
        self.name, self.run = plugin_name(run, "prepare"), run

    async def setup(self, worker: Any) -> None:
        logging.getLogger("distributed.worker").addFilter(is_not_reported)
        self.users[worker.id] += 1
        if worker.id in VersionCheck.refused:
            return  # compiling would delay its end
        compile_all(np.float32, bfloat16=False)  # what bfloat16 needs is loaded at its first product
        keep_memory()
        internals.handle_messages(worker, ASKED, lambda since, most: latest_calls(worker, since, most))
        internals.add_metric(worker, METRIC, lambda worker: True)
        await internals.send_heartbeat(worker)

    async def teardown(self, worker: Any) -> None:
        if internals.closes(worker):
            await leave(self.run, worker)
        end_programs(self.run, worker)
        self.users[worker.id] -= 1
        if not self.users[worker.id]:
            internals.forget_metric(worker, METRIC)
            internals.forget_messages(worker, ASKED)
            del self.users[worker.id]
            # Messages that are under way may still come.
            internals.event_loop(worker).call_later(LATE_SECONDS, self._forget, worker)
        if not self.users.total() and not (internals.closes(worker) and worker.nanny):  # its process ends with it
            logging.getLogger("distributed.worker").removeFilter(is_not_reported)

    def _forget(self, worker: Any) -> None:
        if not self.users[worker.id]:
            forget_worker(worker)


def begin_spans() -> None:
    """Record every kernel call of a worker from now on."""
    RECORDER.spans = Spans()


def take_spans() -> tuple[float, list[Span]]:
    """Stop recording; return a worker's clock offset and the spans that it has recorded."""
    spans, RECORDER.spans = RECORDER.spans or Spans(), None
    return clock_offset(), spans


class LatestCall(NamedTuple):
    """One rectangle of a lane: a kernel and its place in the model, a thread, begin and end by the clock."""

    name: str
    thread: int
    start: float
    end: float


def latest_calls(worker: Any, since: float, most: int) -> tuple[list[LatestCall], bool, float]:
    """Return the last kernel calls of a worker, whether earlier ones were left out, and until when they are all.

    That is the time of day at which the tasks began that run now: their calls are known when they have ended. Calls of
    one kernel in one place that follow each other are joined.

    since   the calls have ended after this time of day, until which all were returned before
    most    how many are returned
    """
    now, offset, calls = time.time(), clock_offset(), list[LatestCall]()
    until = min([now, *(start + offset for spans in _newest(worker) for start in list(spans.running.values()))])
    latest: dict[int, int] = {}  # thread -> its earliest call in the list
    for count, span in enumerate(chain.from_iterable(map(reversed, _newest(worker)))):
        name, start, end = span.key[0].partition("_-")[0], span.start + offset, span.end + offset
        if count == KEPT:
            return calls[::-1], end > since, until
        if not since < end <= until:  # calls of a long task come after later ones of short tasks
            continue
        if len(calls) == most:
            return calls[::-1], True, until
        after = calls[latest[span.thread]] if span.thread in latest else None
        if after and after.name == name and after.start - end < TOGETHER:
            calls[latest[span.thread]] = after._replace(start=start)
        else:
            latest[span.thread] = len(calls)
            calls.append(LatestCall(name, span.thread, start, end))
    return calls[::-1], False, until


def _newest(worker: Any) -> list[Spans]:
    """Return the calls of the last windows, those of the last one of a run first."""
    programs = list(ranks_of(worker).programs.values())
    return [spans for program in programs for spans in reversed(list(program.recent))]
