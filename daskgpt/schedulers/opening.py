"""Open a scheduler by its name or address: one of this process, or a cluster.

`distributed` takes almost half a second to import, so it is imported where a cluster is used, here and elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import dask

from daskgpt.config.errors import nearest, require
from daskgpt.schedulers.local import in_task, keep_memory, local_scheduler, own_threads
from daskgpt.schedulers.protocol import Scheduler

LOCAL_SCHEDULERS = ("auto", "sync", "threads", "local")  # those that no address names
CHOICES = ["sync", "threads", "local", "HOST:PORT", "[IPV6]:PORT", "tls://HOST:PORT", "file:scheduler.json"]
OPENS = "open_scheduler"
SETTING = "DASK_SCHEDULER_ADDRESS"


@contextmanager
def open_scheduler(address: str = "auto", threads: int = 0, client: Any = None) -> Iterator[Scheduler]:
    """Open a scheduler by its name or address; it is closed at the end of the `with` block.

    address   sync, threads, local (a cluster of processes on this machine), tcp://host:port, tls://host:port,
              file:PATH, or auto; see `chosen_address`
    threads   threads (threads) or worker processes of one thread (local); 0 = one a core, or one in a task of a worker
    client    a `distributed.Client` of any cluster, in place of an address: it stays open

    Errors    ValueError for an unknown name or a wrong address, TypeError for a client of another kind, RuntimeError if
              no scheduler answers or no worker comes

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
    threads = threads or own_threads()
    if address in ("sync", "threads"):
        keep_memory()
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
    """Return the name or address of the scheduler that `open_scheduler` opens; whether one answers is not checked.

    `auto` stands for the active Client's; for Dask's setting scheduler-address (the environment variable
    DASK_SCHEDULER_ADDRESS); or else for `threads`, as in a task of a worker. Dask's own default, tcp://, may be left
    out.

    Errors   ValueError for an unknown name or a wrong address; as of `active_client`
    """
    got, address = {"scheduler": address}, address.strip()
    if address == "auto":
        if in_task():
            return "threads"
        if (client := active_client()) is not None:
            return str(client.scheduler.address)
        if not (address := str(dask.config.get("scheduler-address", None) or "")):
            return "threads"
        got["scheduler"] = f"{address} ({SETTING})"
    if address in LOCAL_SCHEDULERS or address.startswith(("file:", "inproc://")):
        return address
    match = re.fullmatch(r"(?:(tcp|tls)://)?(\[[^]]+\]|[^][:/]+):(\d{1,5})/?", address, re.ASCII)
    valid = match is not None and 0 < int(match[3]) < 1 << 16
    require(valid, OPENS, "the scheduler must be known", got, nearest(address, CHOICES))
    protocol, host, port = cast(Any, match).groups()
    return f"{protocol or 'tcp'}://{host}:{port}"


def resolved_address(address: str) -> str:
    """Return the address that `auto` stands for or that a scheduler file names now; others as of `chosen_address`."""
    address = chosen_address(address)
    if not address.startswith("file:"):
        return address
    from daskgpt.schedulers.connect import address_in

    return address_in(address)


def require_scheduler(address: str) -> None:
    """Check that a scheduler answers, before anything slow; nothing is asked of one in this process.

    Errors   as of `open_scheduler`
    """
    if active_client() is None or address != "auto":
        chosen, named = chosen_address(address), SETTING if address == "auto" else ""
        if chosen not in LOCAL_SCHEDULERS:
            from daskgpt.schedulers.connect import address_of_scheduler

            address_of_scheduler(chosen, named)
