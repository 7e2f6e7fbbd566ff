"""Tests of a run whose workers join, leave, die, hang or differ: its model is that of threads."""

import json
import os
import random
import re
import shutil
import signal
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import dask
import psutil
import pytest
from command_lines import PATIENCE
from distributed import Client
from faults import HOST_KINDS, KINDS, disturb
from machines import KillAsItSends, KillInKernel, KillItself, Machines, on_workers, wait_until
from namespaces import Hosts, missing
from short_lives import short_lives
from small_runs import DISTURBED_STEPS, FLAGS, fit_in_parts, losses_of, same
from watched_run import WatchedRun

import daskgpt
from daskgpt.config.stopping import STOPPED

AT = 12
MATTERS = 0.6  # seconds that steps take around a change, so that it is seen before the next one


train = partial(fit_in_parts, steps=DISTURBED_STEPS, snapshot_every=4)


def acting(actions):
    """An `on_step` that does something after some steps, and makes later ones long enough to be looked at."""

    def act(number, metrics):
        if number + 1 in actions:
            actions[number + 1]()
        if number + 1 >= min(actions):
            time.sleep(MATTERS)

    return act


def test_run_waits_for_a_new_worker(cluster, small_text, whole, tmp_path, capsys):
    cluster.have(1)

    def kill():
        cluster.kill(cluster.alive()[0])
        threading.Timer(8, cluster.start_worker).start()

    train(small_text, tmp_path / "run", cluster.address, acting({AT: kill}), snapshot_every=0, save_every=5)
    assert same(tmp_path / "run", whole)
    said = capsys.readouterr().out
    assert "workers    all are gone: the run ends unless one comes in 10 minutes" in said
    assert re.search(r"from step \d+ back to \d+, the last checkpoint \(", said)


def test_worker_with_other_sources_joins_after_the_run(small_text, whole, tmp_path):
    with Machines(tmp_path, 1) as machines:
        machines.have(1)

        def join():
            copy = shutil.copytree(Path(daskgpt.__file__).parent, tmp_path / "other" / "daskgpt")
            (copy / "__init__.py").write_text((copy / "__init__.py").read_text() + "# changed\n")
            machines.environment["PYTHONPATH"] = str(copy.parent)
            name = machines.start_worker()
            wait_until(lambda: name in machines.ended(), "the worker's end")

        train(small_text, tmp_path / "run", machines.address, acting({AT: join}))
        assert same(tmp_path / "run", whole)
        assert re.search(r"daskgpt=.* \(the run: .*\)\.", machines.said())
        with Client(machines.address) as client:
            wait_until(lambda: not client.run_on_scheduler(plugins_on), "what is left of the run goes")
        machines.have(2)


def plugins_on(dask_scheduler):
    return [name for name in dask_scheduler.worker_plugins if "daskgpt" in name]


IN_A_STEP = ["attention.forward", "linear.backward", "adamw", "send.totals", "receive.totals", "receive.weights"]
BETWEEN = ["rank.begin", "rank.load", "state.rows", "recovery.copy", "parameters.finite", "sending"]


@pytest.mark.parametrize("kind", IN_A_STEP + BETWEEN)
def test_kill_matrix(kind, cluster, small_text, whole, tmp_path, capsys):
    """In forward, backward, update and communication, as ranks begin, as a recovery point and a checkpoint are made."""
    cluster.have(3)
    once = tmp_path / "killed"
    if kind == "sending":
        plugin = KillAsItSends("state.copy", 2, once)
    elif kind in IN_A_STEP:
        plugin = KillInKernel(kind, 30, once)
    else:
        plugin = KillItself(kind, 1 + (kind == "recovery.copy"), once)
    with on_workers(cluster.address, plugin):
        train(small_text, tmp_path / "run", cluster.address, save_every=3)
    assert once.exists(), "nobody was killed"
    assert len(cluster.alive()) == 2
    assert same(tmp_path / "run", whole)
    lost = re.findall("^lost .*", capsys.readouterr().out, re.MULTILINE)
    assert len(lost) == 1, "the state that was left is used at once"


@pytest.mark.parametrize("way", ["no worker", "asked to stop", "no scheduler"])
def test_lost_cluster_exits_with_a_resumable_run(way, whole, tmp_path):
    with Machines(tmp_path, 1 + (way == "no scheduler")) as machines:
        run, lines = WatchedRun(tmp_path, FLAGS), []
        flags = ["--save-every", 5, *(["--worker-minutes", 0.03] * (way == "no worker"))]
        with run.start(machines.address, *flags, heard=lines.append):
            wait_until(lambda: run.step > AT, "steps")
            if way == "no scheduler":
                wait_until(lambda: any(line.startswith("recovery") for line in lines), "a recovery point")
            machines.kill("scheduler" if way == "no scheduler" else machines.alive()[0])
            if way == "asked to stop":
                wait_until(lambda: any("all are gone" in line for line in lines), "the run's word")
                run.process.send_signal(signal.SIGINT)
            assert run.process.wait(PATIENCE) == STOPPED
    said = run.errors.read_text()
    assert "Traceback" not in said
    flags = f"--resume {run.out.resolve()} --scheduler {machines.address}"
    assert f". Continue with {flags}." in said.splitlines()[-1]
    steps = run.step + 5
    done = daskgpt.fit(resume=run.out, run={"steps": steps}, dataflow={"scheduler": "threads"}, quiet=True)
    assert len(losses_of(run.out)) == len(done.losses) == steps


def test_killed_client_leaves_nothing_on_the_cluster(cluster, tmp_path):
    cluster.have(2)
    run = WatchedRun(tmp_path, FLAGS)
    with run.start(cluster.address, "--snapshot-every", 2):
        wait_until(lambda: run.step > AT, "steps")
    with Client(cluster.address) as client:
        wait_until(lambda: not client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)), "tasks")
        wait_until(lambda: not any(client.run(lambda dask_worker: len(dask_worker.data)).values()), "results")
        assert client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) == 0


@pytest.mark.parametrize("way", ["stops for seconds", "silent"])
def test_stopped_worker_changes_no_bit(way, cluster, small_text, whole, tmp_path, capsys):
    cluster.have(2)
    name = cluster.start_worker()
    cluster.have(3)
    worker = psutil.Process(cluster.processes[name].pid)

    def stop():
        worker.suspend()
        if way != "silent":
            threading.Timer(4, worker.resume).start()

    train(
        small_text, tmp_path / "run", cluster.address, acting({AT: stop}), worker_seconds=2 if way == "silent" else 60
    )
    assert same(tmp_path / "run", whole)
    assert (", which sent no heartbeat" in capsys.readouterr().out) == (way == "silent")
    if way == "silent":
        worker.resume()
        wait_until(lambda: name in cluster.ended(), "the end of a worker that comes back too late")


def test_local_cluster_restarts_a_worker(small_text, whole, tmp_path):
    killed = []

    def kill():
        children = psutil.Process().children(recursive=True)
        killed.append(next(child for child in children if "spawn_main" in " ".join(child.cmdline())))
        killed[0].kill()

    train(small_text, tmp_path / "run", "local", acting({AT: kill}))
    assert killed
    assert same(tmp_path / "run", whole)


def test_local_cluster_does_not_give_up_a_worker_that_starts_slowly():
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1ms"}),
        daskgpt.open_scheduler("local", 2) as scheduler,
    ):
        psutil.Process(min(scheduler.everywhere(os.getpid))).kill()
        wait_until(lambda: len(scheduler.addresses()) == 1, "its loss")
        wait_until(lambda: len(scheduler.addresses()) == 2, "its return")


def test_short_lived_workers_change_no_bit(tmp_path):
    with (tmp_path / "short_lives.jsonl").open("w+") as log:
        seed = random.SystemRandom().randrange(10**6)
        coming, said = short_lives(tmp_path, log, seconds=90, life=20, stagger=5, seed=seed)
    assert coming.replaced >= 1, said
    assert len(set(coming.numbers)) > 1, said


@pytest.mark.parametrize("hosts", [False, True])
def test_random_faults_change_no_bit(hosts, tmp_path):
    """Killed, stopped and ended processes; with hosts of their own also those that are cut off or restarted."""
    if hosts and missing():
        pytest.skip(missing())
    faults, seed = 4 if hosts else 10, random.SystemRandom().randrange(10**6)
    with (tmp_path / "faults.jsonl").open("w+") as log, Hosts(4) if hosts else nullcontext() as network:
        said = disturb(tmp_path, log, faults=faults, seconds=40, workers=3, seed=seed, hosts=network)
        log.seek(0)
        kinds = [entry.get("kind") for entry in map(json.loads, log)]
    assert sum(kind in (HOST_KINDS if hosts else KINDS) for kind in kinds) == faults, said
