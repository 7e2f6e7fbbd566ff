"""Open a scheduler by its name or address: one of this process, or a cluster.

`distributed` takes almost half a second to import, so it is imported where a cluster is used, here and elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask

from daskgpt.config.errors import require
from daskgpt.schedulers.local import ONE_BLAS_THREAD, in_task, keep_memory, local_scheduler, own_threads
from daskgpt.schedulers.protocol import Scheduler

LOCAL_SCHEDULERS = ("auto", "sync", "threads", "local")  # those that no address names
SETTING = "DASK_SCHEDULER_ADDRESS"


@contextmanager
def open_scheduler(address: str = "auto", threads: int = 0, client: Any = None) -> Iterator[Scheduler]:
    """Open a scheduler by its name or address; it is closed at the end of the `with` block.

    address   sync, threads, local (a cluster of processes on this machine), tcp://host:port, tls://host:port,
              file:PATH, or auto (see `chosen_address`)
    threads   threads (threads) or worker processes of one thread (local); 0 = one a core, or one in a task of a worker
    client    a `distributed.Client` of any cluster, in place of an address: it stays open

    Errors    ValueError for an unknown name, TypeError for a client of another kind, RuntimeError if no scheduler
              answers or no worker comes

    >>> import daskgpt
    >>> with daskgpt.open_scheduler("threads", threads=2) as scheduler:
    ...     scheduler.description
    "Dask's threaded scheduler, 2 threads"
    """
    active = active_client() if client is None and address == "auto" else None
    if client is not None or active is not None:
        from daskgpt.schedulers.connect import borrowed_cluster

        with borrowed_cluster(client or active) as scheduler:
            scheduler.description = f"your active Client: {scheduler.description}" if active else scheduler.description
            yield scheduler
        return
    address, named = chosen_address(address), SETTING if address == "auto" else ""
    check_address(address)
    threads = threads or own_threads()
    if address in ("sync", "threads"):
        keep_memory()
        with ONE_BLAS_THREAD:
            yield local_scheduler(address, threads)
    else:
        from daskgpt.schedulers.connect import connected_cluster, local_cluster

        with local_cluster(threads) if address == "local" else connected_cluster(address, named) as scheduler:
            yield scheduler


def active_client() -> Any:
    """Return the Client that this process has open, as other programs for Dask find it; None if there is none.

    A task has none: the threads of its cluster run other tasks, and may wait for this one.

    Errors    TypeError for an asynchronous one, RuntimeError for one without a connection
    """
    if "distributed" not in sys.modules or in_task():
        return None
    from distributed import default_client

    from daskgpt.schedulers.connect import client_address

    try:
        client = default_client()
    except ValueError:
        return None
    client_address(client)
    return client


def chosen_address(address: str) -> str:
    """Return the address that `auto` stands for: that of the active Client, Dask's setting scheduler-address (the
    environment variable DASK_SCHEDULER_ADDRESS), or else `threads`; in a task of a worker, `threads`. Other names and
    addresses are returned as they are.
    """
    if address != "auto":
        return address
    if in_task():
        return "threads"
    if (client := active_client()) is not None:
        return str(client.scheduler.address)
    if not (found := dask.config.get("scheduler-address", None)):
        return "threads"
    from distributed.comm.addressing import normalize_address

    return str(normalize_address(str(found)))


def resolved_address(address: str) -> str:
    """Return the address that `auto` stands for or that a scheduler file names now; others as they are."""
    address = chosen_address(address)
    if not address.startswith("file:"):
        return address
    return str(json.loads(Path(address.removeprefix("file:")).read_text())["address"])


def check_address(address: str) -> None:
    """Check that `open_scheduler` knows a name; whether a scheduler answers is not checked.

    Errors   ValueError for an unknown name
    """
    known = address in LOCAL_SCHEDULERS or address.startswith(("tcp://", "tls://", "file:"))
    rule, got = "the scheduler must be known", {"scheduler": address}
    advice = "Choose from sync, threads, local, tcp://host:port, tls://host:port, file:scheduler.json."
    require(known, "open_scheduler", rule, got, advice)
