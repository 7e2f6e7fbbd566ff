"""Tests of runs on a cluster of processes: the bits are those of threads, and nothing is left behind."""

import logging
import os
import re
import time
from dataclasses import replace
from functools import partial

import dask
import pytest
from distributed import Client
from machines import KillItself, on_workers, wait_until
from small_runs import OPTIMIZER, fit_in_parts, same

import daskgpt
from daskgpt.schedulers.dask_internals import closes
from daskgpt.schedulers.opening import require_scheduler
from daskgpt.schedulers.protocol import METRIC, WorkerLost
from daskgpt.schedulers.workers import members, running
from daskgpt.training.rank_program import RankProgram

DROPPING = replace(OPTIMIZER, dropout=0.1)
fit = partial(fit_in_parts, optimizer=DROPPING, validate_every=5)


@pytest.fixture(scope="module")
def whole(small_text, tmp_path_factory):
    """The folder of a run with threads."""
    return fit(small_text, tmp_path_factory.mktemp("whole") / "run", "threads")


def test_two_workers_give_the_bits_of_threads_in_bfloat16(cluster, small_text, tmp_path):
    cluster.have(2)
    options = {"precision": "bfloat16", "steps": 3}
    assert same(*(fit(small_text, tmp_path / name[:3], name, **options) for name in ("threads", cluster.address)))


def test_address_of_a_worker_names_its_scheduler(cluster):
    cluster.have(2)
    require_scheduler(cluster.address.removeprefix("tcp://"))
    with Client(cluster.address) as client:
        worker = min(members(client))
    with pytest.raises(RuntimeError, match=rf"\(Worker\)\. Give that of its scheduler, {cluster.address}\."):
        require_scheduler(worker)


def left_on(dask_scheduler):
    """What a run might leave on a scheduler."""
    plugins = [*dask_scheduler.plugins, *dask_scheduler.worker_plugins]
    return [str(key) for key in dask_scheduler.tasks], [name for name in plugins if "daskgpt" in name]


def messages_kept(dask_scheduler):
    """How many messages to each worker a scheduler keeps."""
    return {sender.recent_message_log.maxlen for sender in dask_scheduler.stream_comms.values()}


def left_with(dask_worker):
    """What a run might leave with a worker."""
    names = [*dask_worker.plugins, *dask_worker.handlers]
    names += map(str, logging.getLogger("distributed.worker").filters)
    return [name for name in names if "daskgpt" in name], METRIC in dask_worker.metrics, len(dask_worker.data)


def filters_here():
    names = "asyncio", "distributed.client", "distributed.batched", "distributed.worker"
    loggers = [logging.getLogger(name) for name in names]
    return [(list(logger.filters), logger.level) for logger in loggers]


def held_by(dask_scheduler):
    """Tasks, and spans of ours, which must not grow with the steps."""
    spans = dask_scheduler.extensions["spans"].spans.values()
    return len(dask_scheduler.tasks), sum(span.name[-1] == "daskgpt" for span in spans)


def places_of_copies(dask_scheduler):
    """The workers that hold the copies of each part of a recovery point."""
    places = {}
    for task in dask_scheduler.tasks.values():
        if str(task.key).startswith("recovery.copy") and task.who_has:
            rows = frozenset(source.key for source in task.dependencies)
            places.setdefault(rows, []).append({worker.address for worker in task.who_has})
    return list(places.values())


def test_copies_of_a_recovery_point_stay_on_different_workers(cluster, small_text, tmp_path):
    """Dask's memory manager may drop all replicas of a result but one, and so choose where it is."""
    cluster.have(2)
    with Client(cluster.address) as client:

        def look(step, metrics):
            if step in (4, 8):
                wait_until(
                    lambda: all(len(workers) == 2 for workers in client.run_on_scheduler(places_of_copies)), "copies"
                )
                for _ in range(3):
                    client.amm.run_once()
                time.sleep(0.5)
                places.extend(client.run_on_scheduler(places_of_copies))

        places = []
        fit(small_text, tmp_path / "run", cluster.address, on_step=look, snapshot_every=4)
    assert places
    assert all(len(workers) == 2 and not set.intersection(*workers) for workers in places)


@pytest.mark.parametrize("engine", ["ranks", "tasks"])
def test_borrowed_client_is_left_unchanged(engine, cluster, small_text, whole, tmp_path):
    cluster.have(2)
    with Client(cluster.address) as client, Client(cluster.address):  # a newer client must not matter
        kept = client.submit(sum, [1, 2])

        def left():
            return client.run_on_scheduler(left_on), client.run(left_with)

        def stop(step, metrics):
            raise KeyError("enough")

        def untouched():
            (tasks, plugins), workers = remains = left()
            used = plugins or any(names or has_metric for names, has_metric, _ in workers.values())
            return tasks == [kept.key] and not used and remains

        assert kept.result() == 3
        # The handlers of an earlier run's messages stay for a second after it.
        before, during, filters = wait_until(untouched, "earlier runs"), [], filters_here()
        wait_until(lambda: client.run_on_scheduler(messages_kept) == {1000}, "the end of earlier runs")
        options = {"client": client, "engine": engine, "on_step": lambda *_: during.append(left())}
        fit(small_text, tmp_path / "run", "threads", **options)
        assert same(tmp_path / "run", whole)
        wait_until(lambda: left() == before, "what is left goes")
        assert all(has_metric for _, has_metric, _ in during[-1][1].values())
        with pytest.raises(KeyError, match="enough"):
            fit(small_text, "", "threads", client=client, on_step=stop)
        wait_until(lambda: left() == before, "what is left goes")
        assert client.run_on_scheduler(messages_kept) == {1000}
        assert filters_here() == filters
        assert client.status == "running"
        assert list(client.futures) == [kept.key]


def test_steps_leak_nothing(cluster, small_text):
    cluster.have(2)
    counts = []
    with Client(cluster.address) as client:

        def look(step, metrics):
            if step in (7, 63):
                tasks = sum(client.run(lambda dask_worker: len(dask_worker.state.tasks)).values())
                counts.append((*client.run_on_scheduler(held_by), tasks))

        run = {"steps": 64, "snapshot_every": 8, "validate_every": 0}
        fit(small_text, "", "auto", client=client, on_step=look, **run)
    early, late = counts
    # What is in flight at a moment varies by some steps; of 56 steps that leave all of theirs there would be 1,000.
    assert all(after < before + 200 for before, after in zip(early, late)), counts


def test_cluster_by_scheduler_file_and_environment(cluster):
    cluster.have(2)
    file = f"file:{cluster.folder / 'scheduler.json'}"
    with dask.config.set({"scheduler-address": cluster.address.removeprefix("tcp://")}):
        for address, setting in ((file, ""), ("auto", "DASK_SCHEDULER_ADDRESS: ")):
            with daskgpt.open_scheduler(address) as scheduler:
                assert scheduler.description.startswith(f"{setting}cluster at {cluster.address}, 2 workers")
                assert scheduler.threads == len(scheduler.addresses()) == 2
                assert scheduler.everywhere(sum, [1, 2], here=True) == [3, 3, 3]
    with Client(cluster.address) as client:
        wait_until(lambda: client.run_on_scheduler(left_on) == ([], []), "what is left goes")


def test_workers_of_other_versions_are_refused(cluster, small_text, tmp_path, monkeypatch):
    cluster.have(2)
    versions = {"daskgpt": "0.0 (00000000)", "float32 products": "fused"}
    monkeypatch.setattr("daskgpt.schedulers.workers.identity", lambda packed: versions)
    prepared = []
    monkeypatch.setattr("daskgpt.schedulers.connect.PrepareWorker", prepared.append)
    with pytest.raises(RuntimeError, match=r"must have the versions.*worker=tcp://127.*daskgpt=.*the run: 0\.0 "):
        fit(small_text, tmp_path / "run", cluster.address)
    assert not list(tmp_path.glob("run/step-*"))
    assert not prepared, "workers compile kernels once they are known to be equal"


def test_worker_without_numpy_ends_in_one_line(cluster, tmp_path, monkeypatch):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('no library for products')")
    cluster.have(0)
    try:
        path = f"{tmp_path}{os.pathsep}{cluster.environment['PYTHONPATH']}"
        monkeypatch.setitem(cluster.environment, "PYTHONPATH", path)
        cluster.have(1)
        with (
            pytest.raises(RuntimeError, match="^daskgpt: every worker must.*import.*no library for products"),
            daskgpt.open_scheduler(cluster.address),
        ):
            pass
    finally:
        cluster.have(0)


def test_worker_death_in_a_step_changes_no_bit(cluster, small_text, whole, tmp_path, capsys):
    cluster.have(2)
    with on_workers(cluster.address, KillItself("rank.window", 2, tmp_path / "killed")):
        fit(small_text, tmp_path / "run", cluster.address, snapshot_every=3)
    assert (tmp_path / "killed").exists()
    assert len(cluster.alive()) == 1
    assert same(tmp_path / "run", whole)
    said = capsys.readouterr().out
    assert "recovery   the state is kept on two workers every 3 steps" in said
    (lost,) = re.findall(r"^lost .*", said, re.MULTILINE)
    assert re.search(r"from step 1 back to 1, a recovery point \(", lost)


def test_worker_death_between_the_end_of_its_task_and_the_fetch_is_a_loss(cluster, monkeypatch):
    cluster.have(2)
    gather = Client.gather

    def late(client, *arguments, **options):
        if set(cluster.alive()) >= {name}:
            cluster.kill(name)
        return gather(client, *arguments, **options)

    with daskgpt.open_scheduler(cluster.address) as scheduler:
        address, worker = min(members(scheduler.client).items())
        name = worker["name"]
        done = scheduler.submit("rank.window", int, address=address)
        scheduler.wait_for([done])
        scheduler.needed = {address}
        monkeypatch.setattr(Client, "gather", late)
        with pytest.raises(WorkerLost):
            scheduler.fetch([done])


def test_an_error_of_one_worker_is_the_error_of_the_run(cluster, small_text):
    cluster.have(2)

    def fail(dask_worker):
        def failing(*arguments):
            raise ZeroDivisionError("an error in a step")

        RankProgram.window, dask_worker.whole_window = failing, RankProgram.window

    def mend(dask_worker):
        RankProgram.window = dask_worker.whole_window

    with Client(cluster.address) as client:
        one = list(members(client))[:1]
        client.run(fail, workers=one)
        try:
            with pytest.raises(ZeroDivisionError, match="an error in a step"):
                fit(small_text, "", cluster.address)
        finally:
            client.run(mend, workers=one)


def leave_in_a_window(dask_worker):
    """Let a worker leave after it has begun its third window."""
    run, begun = RankProgram._run, []

    def leaving(*arguments):
        begun.append(arguments)
        if len(begun) == 3:
            dask_worker.loop.add_callback(dask_worker.close_gracefully)
            wait_until(lambda: closes(dask_worker))
        return run(*arguments)

    RankProgram._run = leaving


@pytest.mark.parametrize("within", [True, False], ids=["in a window", "between windows"])
def test_worker_that_leaves_loses_no_step(within, cluster, small_text, whole, tmp_path, capsys):
    cluster.have(3)
    with Client(cluster.address) as client:
        one = list(members(client))[:1]

        def leave(step, metrics):
            if step == 8:
                client.retire_workers(workers=one, close_workers=True)

        if within:
            client.run(leave_in_a_window, workers=one)
        options = {"snapshot_every": 3, "validate_every": 0}  # windows of three steps, and no newer copies
        fit(small_text, tmp_path / "run", cluster.address, on_step=None if within else leave, **options)
        wait_until(lambda: len(client.nthreads()) == 2, "a worker leaves")
    assert same(tmp_path / "run", whole)
    said = capsys.readouterr().out
    assert "lost  " not in said
    assert "workers    2 share each batch" in said


def test_joining_worker_takes_part_and_changes_no_bit(cluster, small_text, whole, tmp_path, capsys, monkeypatch):
    cluster.have(1)
    monkeypatch.setattr("daskgpt.training.recovery.LOOKING", 0)

    def join(step, metrics):
        if step == 3:
            cluster.start_worker()
            with Client(cluster.address) as client:
                wait_until(lambda: len(running(client)) == 2, "a second worker")

    options = {"on_step": join, "snapshot_every": 1}
    assert same(fit(small_text, tmp_path / "run", cluster.address, **options), whole)
    said = capsys.readouterr().out
    assert said.index("workers    new: tcp://") < said.index("workers    2 ")
