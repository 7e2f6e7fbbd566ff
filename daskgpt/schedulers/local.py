"""Dask's schedulers of this process: synchronous, and with threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import dask.local
import dask.threaded

from daskgpt.graph.nodes import Graph, Key, with_leaves


class LocalScheduler:
    """Dask's synchronous or threaded scheduler: results are arrays of this process."""

    in_place = True  # no worker is lost here, so no task is computed twice

    def __init__(self, get: Callable[..., Any], description: str, threads: int = 1) -> None:
        self.get, self.description, self.threads = get, description, threads

    def run(self, graph: Graph, leaves: Mapping[Key, Any], keys: list[Key]) -> list[Any]:
        return list(self.get(with_leaves(graph, leaves), keys))

    def fetch(self, results: list[Any]) -> list[Any]:
        return results


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_scheduler(name: str, threads: int) -> LocalScheduler:
    if name == "sync":
        return LocalScheduler(dask.local.get_sync, "Dask's synchronous scheduler")
    get = partial(dask.threaded.get, num_workers=threads)
    return LocalScheduler(get, f"Dask's threaded scheduler, {threads} threads", threads)
