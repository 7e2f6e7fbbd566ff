"""Uses of private attributes and undocumented modules of `distributed`, in one place.

Each was seen in distributed 2026.8.0. `tests/test_dask_internals.py` has a test for each, and `tests/test_dashboard.py`
for those that the dashboard needs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Those with a second name are used elsewhere; ruff lets no other module import from below `distributed`.
from distributed.client import ClosedClientError as ClosedClientError
from distributed.comm import connect
from distributed.comm.addressing import get_address_host as get_address_host
from distributed.comm.addressing import parse_address as parse_address
from distributed.comm.addressing import parse_host_port as parse_host_port
from distributed.core import Status
from distributed.diagnostics.task_stream import TaskStreamPlugin
from distributed.protocol import to_serialize as to_serialize
from distributed.scheduler import heartbeat_interval as heartbeat_interval
from distributed.security import Security
from distributed.utils import format_dashboard_link as format_dashboard_link

LOOKING = 0.5  # seconds between two looks at the workers while waiting
ANSWER_SECONDS = 1  # in which a process that has taken a connection says what it is
NANNY_SECONDS = 2  # in which a nanny ends its worker; none answers where the whole machine is gone


# Of a client: calls of the scheduler that `Client` itself has no method for, or one with other arguments.


def scheduler_identity(client: Any) -> dict[str, Any]:
    """Return the scheduler's information on itself and on all workers.

    `Client.scheduler_info` returns the latest answer that the client has received: it asks every two seconds for one
    without workers, so that the workers seem to be gone for a moment.

    Errors   ClosedClientError, and OSError if the scheduler does not answer
    """
    if client.scheduler is None:
        raise ClosedClientError
    return dict(client.sync(client.scheduler.identity, n_workers=-1))


def end_worker(client: Any, address: str) -> None:
    """Let the scheduler close a worker that may not answer, and its nanny start another."""
    how = {"wait_for_workers": False, "on_error": "return", "timeout": NANNY_SECONDS}
    client.sync(client.scheduler.restart_workers, workers=[address], stimulus_id="daskgpt-silent", **how)


async def _begun(client: Any, method: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    with client.as_current():  # `wait` would use the newest client of this process
        return asyncio.ensure_future(method(*arguments, **options))


def awaited(client: Any, look: Callable[[], Any], method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a client's method, or of `distributed.wait`, and call `look` while waiting for it: Dask
    itself would wait forever.

    Errors   those of the method, and of `look`, which end the wait
    """
    running = client.sync(_begun, client, method, arguments, options)
    try:
        while not client.sync(asyncio.wait, [running], timeout=LOOKING)[0]:
            look()
    except BaseException:
        client.loop.add_callback(running.cancel)
        raise
    return running.result()


async def identity_at(address: str, seconds: float) -> dict[str, Any]:
    """Return what the process of Dask at an address says of itself; it must take a connection within some seconds.

    `Client` would wait forever for one that takes a connection and says nothing, such as the server of a dashboard.

    Errors   OSError, TimeoutError or another error where none answers
    """
    async with asyncio.timeout(seconds + ANSWER_SECONDS):
        comm = await connect(address, timeout=seconds, **Security().get_connection_args("client"))
        try:
            await comm.write({"op": "identity", "reply": True})
            return dict(await comm.read())
        finally:
            comm.abort()


# Of the scheduler's process.


async def remove_plugins(dask_scheduler: Any, begin: str, end: str) -> None:
    """Remove plugins whose names begin and end so, the scheduler's own ones and those that it gives to workers."""
    for name in [*dask_scheduler.plugins, *dask_scheduler.worker_plugins]:
        if name.startswith(begin) and name.endswith(end):
            dask_scheduler.plugins.pop(name, None)
            if name in dask_scheduler.worker_plugins:
                await dask_scheduler.unregister_worker_plugin(None, name)


def forget_failures(dask_scheduler: Any) -> None:
    """Remove failed tasks that nobody wants any more.

    Dask keeps them as long as the scheduler lives if other tasks depended on them when their client released them.
    """
    ended = [task for task in dask_scheduler.tasks.values() if task.state in ("erred", "released")]
    unwanted = {task.key: "forgotten" for task in ended if not task.who_wants and not task.dependents}
    dask_scheduler.transitions(unwanted, stimulus_id="daskgpt-gone")


def keep_messages(dask_scheduler: Any, count: int) -> None:
    """Let the scheduler remember only its last messages to each worker; Dask keeps a thousand for debugging."""
    for sender in dask_scheduler.stream_comms.values():
        sender.recent_message_log = deque(sender.recent_message_log, count)


def add_to_task_stream(dask_scheduler: Any, worker: str, thread: int, name: str, span: Mapping[str, Any]) -> None:
    """Draw a rectangle on the task stream of the dashboard.

    span   action (compute, or transfer in red), start and stop by the time of day
    """
    fields = {"worker": worker, "thread": thread, "status": "OK", "startstops": [span]}
    for plugin in dask_scheduler.plugins.values():
        if isinstance(plugin, TaskStreamPlugin):
            plugin.transition(name, "processing", "memory", nbytes=0, type=b"", typename="", **fields)


def task_stream_is_shown(dask_scheduler: Any) -> bool:
    """Return whether a browser has asked for a task stream since the scheduler started."""
    return TaskStreamPlugin.name in dask_scheduler.plugins


def add_page(
    dask_scheduler: Any, prefix: str, path: str, show: Callable[[Any, Any], None], title: str
) -> Callable[[], None]:
    """Add a page to the scheduler's dashboard, and its name to the bar of all pages; return what removes it.

    prefix   of all paths of the dashboard
    show     called as show(scheduler, document) for each browser that opens the page
    title    of the page in the bar
    """
    from distributed.dashboard.components.scheduler import BOKEH_THEME, env  # loads Bokeh
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables
    from tornado.ioloop import IOLoop

    def shown(scheduler: Any, variables: dict[str, Any], document: Any) -> None:
        show(scheduler, document)
        document.template = env.get_template("simple.html")
        document.template_variables.update({"active_page": title} | variables)
        document.theme = BOKEH_THEME

    variables = template_variables(dask_scheduler)
    variables["pages"].append(path)
    served = BokehApplication({f"/{path}": shown}, dask_scheduler, prefix, variables)
    served.initialize(IOLoop.current())
    served.start()
    dask_scheduler.http_application.add_application(served)

    def remove() -> None:
        variables["pages"].remove(path)
        dask_scheduler.http_application.applications.remove(served)
        served.stop(wait=False)  # Bokeh 3.10 refuses to wait in the thread of the event loop

    return remove


def dashboard_prefix(dask_scheduler: Any) -> str | None:
    """Return the prefix of all paths of a scheduler's dashboard; None without a dashboard."""
    applications = dask_scheduler.http_application.applications  # those of Bokeh have a prefix
    return next((str(served.prefix) for served in applications if hasattr(served, "prefix")), None)


async def ask_worker(dask_scheduler: Any, worker: str, handler: str, **arguments: Any) -> Any:
    """Call a handler of a worker from the scheduler; return what it answers. Without the handler, no answer comes."""
    return await getattr(dask_scheduler.rpc(worker), handler)(**arguments)


# Of a worker's process.


def event_loop(worker: Any) -> asyncio.AbstractEventLoop:
    """Return the event loop in which a worker takes and sends messages."""
    loop: asyncio.AbstractEventLoop = worker.loop.asyncio_loop
    return loop


async def connection(worker: Any, address: str) -> Any:
    """Open a connection from one worker to another, which lasts until one of them ends.

    The worker's pool of connections, `worker.rpc`, ends those to a worker that the scheduler has removed, and that may
    still be leaving.
    """
    return await connect(address, **worker.connection_args)


def add_metric(worker: Any, name: str, metric: Callable[[Any], Any]) -> None:
    """Let a worker send the result of `metric(worker)` with each heartbeat."""
    worker.metrics.setdefault(name, metric)


def forget_metric(worker: Any, name: str) -> None:
    """Remove a metric, if the worker sends it."""
    worker.metrics.pop(name, None)


def handle_messages(worker: Any, name: str, handler: Callable[..., Any]) -> None:
    """Let a worker call `handler` with each message of this name."""
    worker.handlers[name] = handler


def forget_messages(worker: Any, name: str) -> None:
    """Remove a handler of messages, if the worker has it."""
    worker.handlers.pop(name, None)


async def send_heartbeat(worker: Any) -> None:
    """Send a heartbeat now, unless the worker is still starting and will send one."""
    if worker.periodic_callbacks["heartbeat"].is_running():
        await worker.heartbeat()


def refuse_work(worker: Any) -> None:
    """Let a worker begin no task, and close it so that no nanny starts it again."""
    worker.status = Status.paused
    worker.loop.add_callback(worker.close, executor_wait=False, reason="not equal to the run")


def closes(worker: Any) -> bool:
    """Return whether a worker is about to end."""
    return bool(worker.status == Status.closing)


def thread_count(worker: Any) -> int:
    """Return how many tasks a worker runs at once."""
    return int(worker.state.nthreads)
