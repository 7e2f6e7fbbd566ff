"""What a run gives to the scheduler and the workers of a cluster goes with it, and what another run has given stays."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from distributed import SchedulerPlugin, WorkerPlugin
from distributed.client import ClosedClientError
from distributed.core import Status

import daskgpt
from daskgpt.config.errors import refusal
from daskgpt.kernels.bfloat16.units import unit
from daskgpt.kernels.float32.blas import one_order

TRIES, PAUSE = 10, 0.2  # seconds between two


def named(client: Any, name: str) -> str:
    """The name of a plugin that one run gives: two runs at once have one each, and the first to end takes its own."""
    return f"daskgpt-{name}-{client.id}"


def give(client: Any, plugin: Any) -> None:
    """Give a plugin to the scheduler, or to all workers; again where one of those leaves as it is told.

    Errors   OSError where that happens again and again, or the scheduler is gone
    """
    for more in reversed(range(TRIES)):
        try:
            client.register_plugin(plugin)
            return
        except OSError:
            if not more or client.status != "running":
                raise
            time.sleep(PAUSE)


async def take_back(client: str, dask_scheduler: Any) -> None:
    """Take every plugin that a run has given from the scheduler, and from all workers.

    client   its id
    """
    for name in [name for name in dask_scheduler.plugins if _of(name, client)]:
        dask_scheduler.plugins.pop(name, None)
    for name in [name for name in dask_scheduler.worker_plugins if _of(name, client)]:
        with suppress(Exception):  # a worker that has just gone; the scheduler may be closing
            await dask_scheduler.unregister_worker_plugin(None, name)


class TakeBack(SchedulerPlugin):
    """Takes back what a run has given when its client has gone, in whatever way."""

    def __init__(self, client: Any) -> None:
        self.name, self.client = named(client, "take-back"), client.id
        self.taking: asyncio.Task[None] | None = None

    def remove_client(self, scheduler: Any, client: str) -> None:
        if client == self.client and self.taking is None:  # called when it says goodbye, and when its connection ends
            self.taking = asyncio.create_task(take_back(client, scheduler))


def _of(name: str, client: str) -> bool:
    return name.startswith("daskgpt-") and name.endswith(f"-{client}")


def scheduler_identity(client: Any) -> dict[str, Any]:
    """What the scheduler says of itself and of all workers.

    Not `Client.scheduler_info`, which returns what the client has got last: every two seconds it asks for an answer
    without workers, and where that one comes meanwhile, nobody seems to be there.

    Errors   ClosedClientError, and OSError where the scheduler does not answer
    """
    if client.scheduler is None:
        raise ClosedClientError
    return dict(client.sync(client.scheduler.identity, n_workers=-1))


def members(client: Any) -> dict[str, dict[str, Any]]:
    """What the scheduler knows of each worker, by address. Errors   those of `scheduler_identity`"""
    return dict(scheduler_identity(client)["workers"])


def running(client: Any, ready: str = "") -> list[str]:
    """Addresses of the workers that take tasks: not of those that only begin, end, or have no memory left.

    ready   what the heartbeats of a worker must tell of as well

    Errors   those of `scheduler_identity`
    """
    known = members(client).items()
    return [a for a, worker in known if worker["status"] == "running" and (not ready or ready in worker["metrics"])]


PACKAGES = ("dask", "distributed", "numpy", "numba")


def identity(packed: bool) -> dict[str, str]:
    """Versions of this process, and who multiplies here: what bits and messages between processes depend on.

    packed   whether products run in bfloat16
    """
    known = {"daskgpt": f"{daskgpt.__version__} ({_sources()})"} | {name: version(name) for name in PACKAGES}
    known["float32 products"] = "fused" if one_order(np.dtype(np.float32)) else "library"
    return known | ({"bfloat16 products": unit().name.lower()} if packed else {})


@functools.cache
def _sources() -> str:
    """What tells this package's sources from others of the same version."""
    folder = Path(daskgpt.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=str):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:8]


class Admission(WorkerPlugin):
    """Refuses a worker that is another than the run's own process: one that comes ends, for one that is there already
    the run does not begin.
    """

    def __init__(self, name: str, expected: Mapping[str, str], packed: bool, there: Collection[str]) -> None:
        """there   addresses of the workers that were there before"""
        self.name, self.expected, self.packed, self.there = name, expected, packed, there

    def setup(self, worker: Any) -> None:
        """Errors   RuntimeError naming what differs"""
        own = identity(self.packed)
        other = [f"{name}={own.get(name)} (the run: {v})" for name, v in self.expected.items() if own.get(name) != v]
        if not other:
            return
        rule = "a worker must have the versions and the arithmetic of the run"
        got = f"worker={worker.address}, {', '.join(other)}"
        error = refusal(RuntimeError, "daskgpt", rule, got, "Start it in an equal environment.")
        if worker.address in self.there:
            raise error
        # Of a worker that comes Dask would log the error, and let it work. Closed like this, no nanny starts it again.
        logging.getLogger("distributed.worker").error(str(error))
        worker.status = Status.paused  # begins with no task meanwhile
        worker.loop.add_callback(worker.close, executor_wait=False, reason="not equal to the run")


def admit_equals(client: Any, packed: bool) -> None:
    """Let only workers take part, those that are there and those that come, that are equal to this process.

    Errors   RuntimeError naming a worker that is there and what of it differs
    """
    there = tuple(members(client))
    give(client, Admission(named(client, "admission"), identity(packed), packed, there))
