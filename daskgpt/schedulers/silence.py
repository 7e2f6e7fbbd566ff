"""Workers that say nothing: stopped, cut off, or on a machine that lost its power. A run goes on without them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Any

from distributed import SchedulerPlugin
from distributed.core import rpc
from distributed.scheduler import heartbeat_interval
from tornado.ioloop import PeriodicCallback

from daskgpt.schedulers.forgetting import TAG
from daskgpt.schedulers.leaving import give, named
from daskgpt.schedulers.usage import METRIC

LOOKING = 0.25  # seconds between two looks
HEARTBEATS = 3  # that must be missing at least; of many workers each sends fewer
TOPIC = "daskgpt-silent"  # of Dask's events that say who was left


class LeaveSilent(SchedulerPlugin):
    """Removes a worker that holds or computes something of ours and has sent no heartbeat for some seconds.

    A process that ends closes its connections, which the scheduler sees at once. One that is stopped, and a machine
    that is cut off or loses power, closes nothing: Dask waits 5 minutes (`distributed.scheduler.worker-ttl`, a setting
    of the process in which the scheduler was started, not of ours) and a whole run with it.

    Silence counts by looks, a late look for no more than any other: where this process itself was held up, everybody
    seems silent. A worker is looked at from its first heartbeat with our metric on, for preparing itself holds it up.
    """

    def __init__(self, client: Any, seconds: float) -> None:
        self.name, self.seconds = named(client, "silence"), seconds

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.silent: dict[str, tuple[float, int]] = {}  # of a worker: its last heartbeat, and looks since then
        self.restarts: set[asyncio.Task[None]] = set()
        self.looking = PeriodicCallback(self._look, LOOKING * 1000)
        self.looking.start()

    async def _look(self) -> None:
        if self.scheduler.plugins.get(self.name) is not self:
            self.looking.stop()
            return
        looked = {address: (worker.last_seen, 0) for address, worker in self.scheduler.workers.items()}
        for address, (last, looks) in self.silent.items():
            if looked.get(address, (0, 0))[0] == last:
                looked[address] = last, looks + 1
        self.silent = looked
        patience = max(self.seconds, HEARTBEATS * heartbeat_interval(len(looked)))
        for address, (_, looks) in looked.items():
            if (worker := self.scheduler.workers.get(address)) is None:
                continue  # gone while another was left
            silent = looks * LOOKING >= patience and METRIC in worker.metrics
            if silent and _ours(chain(worker.processing, worker.has_what)):
                await self._leave(worker)

    async def _leave(self, worker: Any) -> None:
        logging.getLogger("distributed.scheduler").warning("%s said nothing for %g s", worker, self.seconds)
        self.scheduler.log_event(TOPIC, {"worker": worker.address, "seconds": self.seconds})
        await self.scheduler.remove_worker(worker.address, stimulus_id=self.name)
        if worker.nanny:
            restart = asyncio.create_task(self._start_again(worker.nanny))
            self.restarts.add(restart)
            restart.add_done_callback(self.restarts.discard)

    async def _start_again(self, nanny: str) -> None:
        """What a nanny does when its worker is killed. Nobody answers where the whole machine is gone."""
        with suppress(OSError, TimeoutError):
            async with rpc(nanny, connection_args=self.scheduler.connection_args) as own:
                await own.kill(reason=self.name)


def _ours(tasks: Iterable[Any]) -> bool:
    """Whether one of these tasks belongs to a run of ours."""
    spans = ((task.annotations or {}).get("span") for task in tasks)
    return any(span and span["name"][-1] == TAG for span in spans)


def leave_silent(client: Any, seconds: float) -> None:
    """From here on a worker that says nothing for so long counts as gone; 0 = as long as Dask itself waits."""
    if seconds:
        give(client, LeaveSilent(client, seconds))


def left(client: Any) -> set[str]:
    """Addresses of the workers that were left because they said nothing."""
    return {event["worker"] for _, event in client.get_events(TOPIC)}
