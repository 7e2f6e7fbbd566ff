"""Tests of the uses of private attributes and undocumented modules of distributed, as seen in 2026.8.0.

Those of the dashboard are in `test_dashboard.py`; those of plugins, metrics, messages and `identity_at` are in
`test_cluster.py`. Ruff finds private attributes and modules elsewhere.
"""

import asyncio

import pytest
from distributed import Client, Event, LocalCluster, wait
from distributed.core import Status
from machines import wait_until

from daskgpt.schedulers import dask_internals as internals

OPTIONS = {"n_workers": 2, "threads_per_worker": 2, "processes": False, "dashboard_address": ":0"}


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(**OPTIONS) as local, Client(local) as client:
        yield local, client


def test_few_messages_are_kept(cluster):
    local, client = cluster
    for _ in range(2):
        client.run_on_scheduler(internals.keep_messages, count=3)
        logs = [sender.recent_message_log for sender in local.scheduler.stream_comms.values()]
        assert [log.maxlen for log in logs] == [3, 3]
        for number in range(10):
            client.submit(abs, number, pure=False, workers=[local.workers[0].address]).result()
        assert max(map(len, logs)) == 3


def test_worker_is_closed_or_refused():
    with LocalCluster(**OPTIONS) as local, Client(local) as client:
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


def test_waiting_looks_and_ends_with_errors(cluster):
    _, client = cluster
    looks = []

    def stop():
        looks.append(1)
        raise KeyError("stop")

    event = Event("awaited", client=client)
    waiting = client.submit(event.wait, pure=False)
    for method in (client.gather, wait):
        with pytest.raises(KeyError, match="stop"):
            internals.awaited(client, stop, method, [waiting])
    event.set()
    assert internals.awaited(client, stop, client.gather, [waiting]) == [True]
    assert internals.awaited(client, stop, wait, [waiting]).done == {waiting}
    assert looks == [1, 1]
