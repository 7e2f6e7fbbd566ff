"""Which scheduler a name or address means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from threadpoolctl import threadpool_limits

from daskgpt.config.errors import require
from daskgpt.schedulers.allocator import keep_memory
from daskgpt.schedulers.cluster import connected_cluster, local_cluster
from daskgpt.schedulers.local import local_scheduler, usable_cores
from daskgpt.schedulers.protocol import Scheduler


@contextmanager
def open_scheduler(address: str, threads: int = 0) -> Iterator[Scheduler]:
    """The scheduler of that name, closed at the end.

    address   sync, threads, local (a cluster of processes on this machine), tcp://host:port, tls://host:port, file:PATH
    threads   threads (threads) or worker processes of one thread (local); 0 = one a core

    Errors    ValueError for an unknown name, RuntimeError where no scheduler answers or no worker comes
    """
    check_address(address)
    threads = threads or usable_cores()
    if address in ("sync", "threads"):
        keep_memory()
        with threadpool_limits(limits=1, user_api="blas"):
            yield local_scheduler(address, threads)
    else:
        with local_cluster(threads) if address == "local" else connected_cluster(address) as scheduler:
            yield scheduler


def resolved_address(address: str) -> str:
    """The address that a scheduler file names at this moment; any other name or address is itself."""
    if not address.startswith("file:"):
        return address
    return str(json.loads(Path(address.removeprefix("file:")).read_text())["address"])


def check_address(address: str) -> None:
    """Whether `open_scheduler` knows a name, not whether somebody answers.

    Errors   ValueError for an unknown name
    """
    known = address in ("sync", "threads", "local") or address.startswith(("tcp://", "tls://", "file:"))
    rule, got = "the scheduler must be known", {"scheduler": address}
    advice = "Choose from sync, threads, local, tcp://host:port, tls://host:port, file:scheduler.json."
    require(known, "open_scheduler", rule, got, advice)
