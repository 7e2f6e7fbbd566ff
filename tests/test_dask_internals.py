"""Tests of every use of Dask beyond its documented interface, as seen in distributed 2026.8.0."""

import asyncio

import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from distributed.core import Status
from distributed.diagnostics import task_stream
from distributed.utils import color_of
from machines import wait_until

from daskgpt.schedulers import dask_internals as internals


@pytest.fixture(scope="module")
def cluster():
    options = {"threads_per_worker": 2, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(n_workers=2, **options) as local, Client(local) as client:
        yield local, client


def workers_of(cluster):
    return {worker.address: worker for worker in cluster[0].workers.values()}


def test_few_messages_are_kept(cluster):
    local, client = cluster
    for _ in range(2):
        client.run_on_scheduler(internals.keep_messages, count=3)
        logs = [sender.recent_message_log for sender in local.scheduler.stream_comms.values()]
        assert [log.maxlen for log in logs] == [3, 3]
        for number in range(10):
            client.submit(abs, number, pure=False, workers=[min(workers_of(cluster))]).result()
        assert max(map(len, logs)) == 3


def test_task_streams_are_colored(cluster):
    def color(key, status="OK"):
        return task_stream.colors["compute"]({"key": key, "status": status})

    before = dict(task_stream.colors)
    internals.color_task_streams({"gelu.forward": "#010203", "erred": "red", "other": ""}.get)
    assert color("gelu.forward-h.0_-1") == "#010203"
    assert (color("erred-1", "error"), color("other-1")) == ("black", color_of("other"))
    internals.color_task_streams(None)
    assert task_stream.colors == before


def test_worker_messages_and_heartbeats(cluster):
    address, worker = min(workers_of(cluster).items())
    got = []
    internals.handle_messages(worker, "daskgpt-test", lambda value: got.append(value))

    async def send():
        comm = await internals.connection(worker, address)
        await comm.write({"op": "daskgpt-test", "reply": False, "value": 7})
        await internals.send_heartbeat(worker)
        comm.abort()

    asyncio.run_coroutine_threadsafe(send(), internals.event_loop(worker)).result()
    wait_until(lambda: got == [7])


def test_worker_counts_tasks_seconds_and_bytes(cluster):
    _, client = cluster
    (first, one), (second, other) = sorted(workers_of(cluster).items())
    assert internals.thread_count(one) == 2
    received, before = internals.Received(other), internals.executed(one)
    array = client.submit(np.ones, 10**6, workers=[first], pure=False)
    client.submit(np.sum, array, workers=[second], pure=False).result()
    wait_until(lambda: internals.executed(one)[0] == before[0] + 1)
    wait_until(lambda: internals.executed(one)[1] > before[1])
    assert received.count() == received.count() >= 0  # nothing is sent within a process


def test_worker_is_closed_or_refused():
    options = {"threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(n_workers=2, **options) as local, Client(local) as client:
        address, worker = min((worker.address, worker) for worker in local.workers.values())

        async def refuse():
            internals.refuse_work(worker)

        assert not internals.closes(worker)
        asyncio.run_coroutine_threadsafe(refuse(), internals.event_loop(worker)).result()
        wait_until(lambda: internals.closes(worker) or worker.status == Status.closed)
        internals.end_worker(client, max(worker.address for worker in local.workers.values()))
        wait_until(lambda: address not in internals.scheduler_identity(client)["workers"])


def test_failed_tasks_that_nobody_wants_are_forgotten(cluster):
    _, client = cluster

    def release(dask_scheduler, keys):
        for key in keys:  # as Dask leaves some of them
            task = dask_scheduler.tasks[key]
            for one in task.who_wants:
                one.wants_what.discard(task)
            task.who_wants.clear()

    first = client.submit(divmod, 1, 0, pure=False)
    then = client.submit(sum, first, pure=False)
    wanted = client.submit(divmod, 2, 0, pure=False)
    wait([then, wanted])
    client.run_on_scheduler(release, keys=[first.key, then.key])
    client.run_on_scheduler(internals.forget_failures)
    assert client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks)) == [wanted.key]
