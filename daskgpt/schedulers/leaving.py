"""What a run gives to the scheduler and the workers of a cluster goes with it, and what another run has given stays."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from distributed import SchedulerPlugin

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
