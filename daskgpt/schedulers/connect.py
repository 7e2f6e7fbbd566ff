"""Connections to clusters: started here for one run, found at an address, or borrowed."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import dask
from distributed import Client, LocalCluster

from daskgpt.config.errors import IS_COMMAND, number_of, refusal, require, short
from daskgpt.config.stopping import delayed_interrupts
from daskgpt.schedulers import dask_internals as internals
from daskgpt.schedulers.cluster import REACHED, ClusterScheduler, losses_as_errors
from daskgpt.schedulers.links import unreached
from daskgpt.schedulers.local import ENVIRONMENT
from daskgpt.schedulers.protocol import TOPIC
from daskgpt.schedulers.workers import (
    LOGGED,
    SENT,
    Cleanup,
    PrepareWorker,
    VersionCheck,
    members,
    register,
    remove_run,
    show_run,
)

CONNECT_TIMEOUT = 10  # seconds
DASHBOARD_PORT = 8787
HEARTBEATS_TIMEOUT = 3  # seconds in which a worker sends a heartbeat
SPAWN = "distributed.nanny.pre-spawn-environ"  # variables of worker processes
IDLE = "distributed.scheduler.idle-timeout"  # a cluster of our own ends with its run
# After 15 s, Dask gives up a worker that starts again, which takes longer where the machine is busy.
STARTS_AGAIN = {"distributed.deploy.lost-worker-timeout": "1d"}
# Intervals of what Dask's processes do between tasks: (Dask's default, ours). With two workers on two cores, workers,
# nannies, scheduler and client take 15 % of a core with the defaults, and 5 % with ours. With the default cycle, the
# memory of workers grows by 5 MB a minute for an hour.
BETWEEN_TASKS: dict[str, tuple[object, object]] = {
    "distributed.admin.tick.interval": ("20ms", "500ms"),  # every process checks that it responds, warns after 3 s
    "distributed.worker.profile.interval": ("10ms", "100ms"),  # samples of running tasks, for Dask's report
    "distributed.worker.profile.cycle": ("1000ms", "10s"),  # of each such time a worker keeps a profile, for an hour
    "distributed.admin.system-monitor.disk": (True, False),
}
WORKERS_TIMEOUT = 30  # seconds; Dask itself would wait for a first worker forever
NO_ANSWER = (
    "Start one with `dask scheduler`, or check the address (--scheduler, DASK_SCHEDULER_ADDRESS); that of a cluster "
    "with TLS begins with tls:// and needs DASK_CONFIG (cluster/README.md)."
)
_warned: set[str] = set()


@contextmanager
def local_cluster(workers: int) -> Iterator[ClusterScheduler]:
    with (
        _own_environment(),
        _silent_client(),
        dask.config.set(STARTS_AGAIN),
        _cluster_of_processes(workers) as cluster,
        _client(cluster) as client,
    ):
        yield _ready(
            ClusterScheduler(client, f"local cluster, {number_of(workers, 'worker process', 'worker processes')}"),
            ends_with_it=True,
        )


@contextmanager
def _own_environment() -> Iterator[None]:
    """Restore the variables that Dask sets in this process for its worker processes, and leaves there."""
    names = dask.config.get(SPAWN).keys() | ENVIRONMENT.keys() | {"PYTHONHASHSEED"}
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _cluster_of_processes(workers: int) -> LocalCluster:
    """Start worker processes that ignore Ctrl-C and SIGTERM: terminals, `timeout` and Slurm send them to all processes,
    and the client ends the workers.

    A worker imports the script that is running. A script that starts a cluster outside of `__main__` would start one in
    the worker too, which multiprocessing forbids: the worker ends here, and the client reports the reason.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)
    resource_tracker.ensure_running()  # otherwise the start of a worker does this, and enables interrupts again
    try:
        settings: dict[str, Any] = {SPAWN: {**dask.config.get(SPAWN), **ENVIRONMENT}, LOGGED: SENT, IDLE: None}
        settings |= {name: better for name, (usual, better) in BETWEEN_TASKS.items() if dask.config.get(name) == usual}
        with delayed_interrupts(), dask.config.set(settings), warnings.catch_warnings():
            # Another dashboard may have the usual port: Dask takes a free one then.
            warnings.filterwarnings("ignore", r"Port \d+ is already in use")
            return LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address=f"127.0.0.1:{DASHBOARD_PORT}",
            )
    except Exception as error:  # of any kind: Dask's settings may be wrong in many ways
        reason: BaseException = error
        while reason.__cause__:
            reason = reason.__cause__
        rule = "the worker processes of a local cluster must start"
        got, advice = short(f"{type(reason).__name__}: {reason}", 200).rstrip("."), "Check Dask's settings."
        if str(reason).startswith("Nanny failed") and not IS_COMMAND:
            advice = 'Each imports the script that is running: put its code under `if __name__ == "__main__":`.'
        raise refusal(RuntimeError, "open_scheduler", rule, got, advice) from None


@contextmanager
def connected_cluster(address: str) -> Iterator[ClusterScheduler]:
    """Connect to the cluster of the scheduler at an address. Errors   as of `require_answer`; those of a cluster"""
    require_answer(address)
    with _silent_client(), _client(address) as client:
        yield _ready(ClusterScheduler(client, _described(client)))


def require_answer(address: str) -> None:
    """Check that a scheduler answers at an address.

    Errors   RuntimeError if none does, with the reason
    """
    rule, got = "a Dask scheduler must answer", f"scheduler={address}"
    with ThreadPoolExecutor(1) as thread:  # this one may have an event loop, as in notebooks
        asked = thread.submit(asyncio.run, internals.identity_at(address, CONNECT_TIMEOUT))
    # TypeError: tls:// without certificates, RuntimeError: tcp:// where Dask's settings ask for TLS; MemoryError and
    # others: the answer of another program.
    if (error := asked.exception()) is not None:
        silent = "it takes the connection and says nothing" if isinstance(error, TimeoutError) else type(error).__name__
        reason = str(error).partition("\n")[0] or silent
        settings = os.environ.get("DASK_CONFIG", "")
        nowhere = f", DASK_CONFIG={settings} (no such file)" if settings and not os.path.exists(settings) else ""
        raise refusal(RuntimeError, "open_scheduler", rule, f"{got} ({reason}){nowhere}", NO_ANSWER)
    answer = asked.result()
    other, advice = str(answer.get("type", "another program")), "Give the address that `dask scheduler` prints."
    advice = f"Give that of its scheduler, {answer['scheduler']}." if answer.get("scheduler") else advice
    require(other == "Scheduler", "open_scheduler", rule, f"{got} ({other})", advice, RuntimeError)


@contextmanager
def borrowed_cluster(client: Any) -> Iterator[ClusterScheduler]:
    """Use a client that stays open; nothing of a run remains on its cluster.

    Errors   those of `client_address`; RuntimeError if no worker comes
    """
    with _silent_client():
        scheduler = ClusterScheduler(client, _described(client))
        try:
            yield _ready(scheduler)
        finally:
            with suppress(OSError, RuntimeError, ValueError), losses_as_errors(client):  # its cluster is gone
                client.run_on_scheduler(remove_run, scheduler.name)


def client_address(client: Any) -> str:
    """Return the address of a client's scheduler.

    Errors   TypeError for an asynchronous client or another object, RuntimeError for a closed client
    """
    rule, got = "the client must be a distributed.Client that waits for results", {"client": repr(client)}
    waits = isinstance(client, Client) and not client.asynchronous
    advice = "Give Client(cluster), not asynchronous=True; or name a scheduler, such as threads."
    require(waits, "open_scheduler", rule, got, advice, TypeError)
    rule, advice = "the client must be connected", "Open one that lives as long as the run."
    require(client.status == "running", "open_scheduler", rule, {"client": client.status}, advice, RuntimeError)
    return str(client.scheduler.address)


def _described(client: Any) -> str:
    """Return the description of a connected cluster once it has a worker; warn where it is open to other machines.

    Errors   those of `client_address`; RuntimeError if no worker comes
    """
    address, kind = client_address(client), type(client.cluster).__name__ if client.cluster else "cluster"
    end = time.monotonic() + WORKERS_TIMEOUT
    while not members(client):  # `Client.wait_for_workers` does not count those that are paused
        if time.monotonic() > end:
            rule, got = "the cluster must have a worker", f"none at scheduler={address} in {WORKERS_TIMEOUT} seconds"
            advice = f"Start one with `dask worker {address}`."
            raise refusal(RuntimeError, "open_scheduler", rule, got, advice)
        time.sleep(0.1)
    identity = internals.scheduler_identity(client)
    warn_of_open([identity["address"], *identity["workers"]])
    count = len(identity["workers"])
    return f"{kind} at {address}, {number_of(count, 'worker')} (more take part as they come)"


@contextmanager
def _silent_client() -> Iterator[None]:
    """Keep Dask from logging that a client loses its scheduler, or that a cluster does not start: the run reports it in
    one line.
    """
    names = ("distributed.client", "distributed.batched", "distributed.deploy.spec")
    loggers = [logging.getLogger(name) for name in names]
    record_filter = partial(is_shown)  # an object of this run: another may end before
    for logger in loggers:
        logger.addFilter(record_filter)
    try:
        yield
    finally:
        gc.collect()  # results that circles of objects hold are left on no cluster
        for logger in loggers:
            logger.removeFilter(record_filter)


def is_shown(record: logging.LogRecord) -> bool:
    """Return whether a record is critical, or of asyncio about something else than a wait of Dask's client that its end
    has cut short.
    """
    if record.name != "asyncio":
        return record.levelno >= logging.CRITICAL
    return not (record.exc_info and type(record.exc_info[1]).__name__ == "AllExit")


logging.getLogger("asyncio").addFilter(is_shown)  # for good: waits are reported when they are freed, after any error


def _client(address: Any) -> Client:
    with dask.config.set({LOGGED: SENT}):
        # It is no active Client of the process, which other runs would take for the user's.
        return Client(address, timeout=f"{CONNECT_TIMEOUT}s", set_as_default=False)


def _ready(scheduler: ClusterScheduler, *, ends_with_it: bool = False) -> ClusterScheduler:
    """Prepare the workers for a run.

    ends_with_it   whether the cluster ends with its client: then no plugin has to be removed

    Errors         RuntimeError if a worker cannot be reached, or differs from this process
    """
    client, run, look = scheduler.client, scheduler.name, scheduler.monitor.look
    with losses_as_errors(client):
        _require_reachable(scheduler)
        if not ends_with_it:
            register(client, Cleanup(client.id, run), look)
        register(client, VersionCheck(run, False, members(client)), look)  # before workers compile kernels
        scheduler.monitor.compiling = True
        register(client, PrepareWorker(run), look)
        if listens := client.run_on_scheduler(show_run, run):
            with suppress(KeyError, IndexError, ValueError):  # a variable of the link's template may not be set here
                link = re.sub("/status$", f"/{TOPIC}", dashboard_link(client, *listens))
                scheduler.description += f", dashboard {link}"
    return scheduler


def dashboard_link(client: Any, listens: str, port: int) -> str:
    """Return the link to a dashboard that listens at an address; Dask's own has the scheduler's up to its first colon.

    Errors   KeyError, IndexError or ValueError of the template in Dask's settings
    """
    if client.cluster:
        return str(client.cluster.dashboard_link)  # of a cluster manager, which may have another template
    everywhere = listens == "0.0.0.0" or ":" in listens
    host = client_address(client).partition("://")[2].rpartition(":")[0] if everywhere else listens
    return str(internals.format_dashboard_link(host or "localhost", port))


def _require_reachable(scheduler: ClusterScheduler) -> None:
    """Check that the scheduler reaches all workers; wait until those are ended that send no heartbeat either.

    Errors   RuntimeError naming one that sends heartbeats, and both addresses, or where the scheduler lacks daskgpt
    """
    client, monitor, begin = scheduler.client, scheduler.monitor, time.monotonic()
    try:
        client.run_on_scheduler(unreached, [])
    except ImportError as error:
        rule, advice = "the scheduler must be able to import daskgpt", "Start it in an equal environment."
        got = f"scheduler={client_address(client)} ({error})"
        raise refusal(RuntimeError, "open_scheduler", rule, got, advice) from None
    while not_reached := client.run_on_scheduler(unreached, list(members(client))):
        monitor.look()
        waited = time.monotonic() - begin > HEARTBEATS_TIMEOUT
        heard = {address for address, worker in monitor.watched.items() if worker.silence < HEARTBEATS_TIMEOUT / 2}
        if waited and (address := min(heard & not_reached.keys(), default="")):
            rule = "the scheduler must be able to connect to every worker"
            got = f"scheduler={client_address(client)}, worker={address} ({not_reached[address]})"
            raise refusal(RuntimeError, "open_scheduler", rule, got, REACHED)
        time.sleep(internals.LOOKING)


def warn_of_open(addresses: Iterable[str]) -> None:
    """Warn on stderr, once for each cluster, if other machines can reach one of its addresses without TLS."""
    if (exposed := next(filter(is_open, addresses), "")) and exposed not in _warned:
        _warned.add(exposed)
        text = f"warning: no TLS: anyone who reaches {exposed} can run code as you (cluster/README.md)"
        print(text, file=sys.stderr, flush=True)


def is_open(address: str) -> bool:
    """Return whether other machines can reach an address without TLS; host names other than localhost count as such."""
    if internals.parse_address(address)[0] in ("tls", "wss", "inproc"):
        return False
    host: str = internals.get_address_host(address)
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host != "localhost"
