"""Open a scheduler by its name or address: one of this process, or a cluster.

`distributed` takes almost half a second to import, so it is imported where a cluster is used, here and elsewhere.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import dask

from daskgpt.config.errors import nearest, refusal, require, whole_number
from daskgpt.config.files import expanded
from daskgpt.schedulers.local import in_task, keep_memory, local_scheduler, own_threads
from daskgpt.schedulers.protocol import Scheduler

LOCAL_SCHEDULERS = ("auto", "sync", "threads", "local")  # those that no address names
CHOICES = ["sync", "threads", "local", "tcp://HOST:PORT", "tls://HOST:PORT", "[IPV6]:PORT", "file:scheduler.json"]
UNPARSED = ("file:", "inproc://", "ws://", "wss://", "ucx://", "gateway://")  # of files, and of Clients of any cluster
SETTING = "DASK_SCHEDULER_ADDRESS"
FILE_SECONDS = 10  # to wait for a scheduler file


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
    automatic = client is None and address == "auto"
    client = active_client() if automatic else client
    name = resolved_address(address) if client is None else ""
    threads = whole_number(threads, "open_scheduler", "threads") or own_threads()
    if name in ("sync", "threads"):
        keep_memory()
        yield local_scheduler(name, threads)
        return
    from daskgpt.schedulers.connect import borrowed_cluster, connected_cluster, local_cluster

    if client is not None:
        cluster = borrowed_cluster(client)
    else:
        cluster = local_cluster(threads) if name == "local" else connected_cluster(name)
    with cluster as scheduler:
        if automatic:
            scheduler.description = f"{SETTING if name else 'your active Client'}: {scheduler.description}"
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
    got, address = {"scheduler": address}, str(address).strip()
    if address == "auto":
        if in_task():
            return "threads"
        if (client := active_client()) is not None:
            return str(client.scheduler.address)
        if not (address := str(dask.config.get("scheduler-address", None) or "")):
            return "threads"
        got["scheduler"] = f"{address} ({SETTING})"
    if address in LOCAL_SCHEDULERS or address.startswith(UNPARSED):
        return address
    match = re.fullmatch(r"(?:(tcp|tls)://)?(\[[^]]+\]|[^][:/]+):(\d{1,5})/?", address, re.ASCII)
    valid = match is not None and 0 < int(match[3]) < 1 << 16
    rule = "the scheduler must be a name, or an address with a port from 1 to 65535"
    require(valid, "open_scheduler", rule, got, nearest(address, CHOICES))
    protocol, host, port = cast(Any, match).groups()
    return f"{protocol or 'tcp'}://{host}:{port}"


def resume_flags(folder: object, address: str) -> str:
    """Return the flags that continue a run where it was: an address in its folder is never used."""
    there = "" if address in LOCAL_SCHEDULERS else f" --scheduler {shlex.quote(address)}"
    return f"--resume {shlex.quote(str(folder))}{there}"


def resolved_address(address: str) -> str:
    """Return the address that `auto` stands for, or that a scheduler file holds; others as of `chosen_address`.

    A file is waited for, for some seconds; Dask itself would wait forever.

    Errors   as of `chosen_address`; RuntimeError if there is no such file in time
    """
    address = chosen_address(address)
    if not address.startswith("file:"):
        return address
    path, deadline = expanded(address.removeprefix("file:")), time.monotonic() + FILE_SECONDS
    while True:
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["address"])
        except FileNotFoundError:
            reason = "no such file"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "strerror", None) or "it has no address"
        if time.monotonic() > deadline:
            rule, got = "the scheduler file must hold an address", f"scheduler={address} ({reason})"
            advice = "Start a scheduler with `dask scheduler --scheduler-file FILE`."
            raise refusal(RuntimeError, "open_scheduler", rule, got, advice)
        time.sleep(0.1)


def require_scheduler(address: str) -> None:
    """Check that a scheduler answers, before anything slow; nothing is asked of one in this process.

    Errors   as of `open_scheduler`
    """
    if address == "auto" and active_client() is not None:
        return
    address = resolved_address(address)
    if address not in LOCAL_SCHEDULERS:
        from daskgpt.schedulers.connect import require_answer

        require_answer(address)
