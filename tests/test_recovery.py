"""What is killed on a cluster while a run goes on: the model is that of a run that nobody has disturbed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
from command_lines import PATIENCE, write_text
from distributed import Client, wait
from faults import HOST_KINDS, KINDS, disturb
from machines import KillAsItSends, KillItself, Machines, wait_until
from namespaces import Hosts, missing
from small_runs import FLAGS, MODEL, OPTIMIZER, losses_of, tensors_of

import daskgpt
from daskgpt.config.stopping import STOPPED
from daskgpt.kernels.compilation import compile_all
from daskgpt.schedulers.losses import LostCluster, LostResults, copies_apart, places_apart, present
from daskgpt.training.recovery import MOST_IN_VAIN, Losses

STEPS, KILLED_AT = 30, 12


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    compile_all(np.float32)  # once, before many processes would do it at the same time
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The folder of a run that nobody disturbs, with threads."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(text, out, "threads")
    return out


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """A cluster that tests kill parts of, and make whole with `have`."""
    with Machines(tmp_path_factory.mktemp("machines"), 2) as found:
        yield found


def train(text, out, scheduler, on_step=None, batch_chunk=0, optimizer=OPTIMIZER, grain="auto", **run):
    """batch_chunk   sequences in a chunk; with 1 every worker has some, with 0 = auto one may have all of them
    grain         auto makes one task of a chunk's forward and backward pass, for so small a model
    """
    settings = {"steps": STEPS, "validation_batches": 1, "save_minutes": 0, "sample_tokens": 0, "out": out} | run
    data = daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=16)
    dataflow = daskgpt.DataflowConfig(scheduler=scheduler, threads=2, batch_chunk=batch_chunk, grain=grain)
    return daskgpt.fit(MODEL, data, optimizer, dataflow, daskgpt.RunConfig(**settings), on_step=on_step)


def same(out, whole):
    return losses_of(out) == losses_of(whole) and tensors_of(out) == tensors_of(whole)


def lost_steps(out):
    """Of each loss that the metrics tell of, how many steps were made again."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["lost_steps"] for record in records if "lost_steps" in record]


def at_step(step, action):
    """An `on_step` that does something after a step, once."""

    def act(number, metrics):
        if number + 1 == step:
            action()

    return act


def started(text, out, scheduler, *flags):
    """A run as a process of its own, 100,000 steps long, which has made some."""
    command = [sys.executable, "-m", "daskgpt.train", *FLAGS.split(), "--data", str(text), "--out", str(out)]
    command += ["--steps", "100000", "--schedule", "constant", "--scheduler", scheduler, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=os.environ | {"COLUMNS": "200"}, **pipes)
    metrics = out / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > KILLED_AT, "steps")
    return process


def ended(process):
    """Exit code, stdout and the last line of stderr, which is no traceback."""
    shown, said = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in said
    return process.returncode, shown, said.splitlines()[-1]


def test_two_copies_are_never_on_one_worker_and_on_two_hosts_where_there_are_two():
    workers = [f"tcp://10.0.0.{host}:{port}" for host in (1, 2) for port in (1, 2)]
    results = [(100 - number, {workers[number % 4]}) for number in range(12)]
    pairs = places_apart(results, workers)
    assert all(here in holders for (here, _), (_, holders) in zip(pairs, results))
    assert all(here.split(":")[1] != there.split(":")[1] for here, there in pairs)
    given = [sum(size for (size, _), pair in zip(results, pairs) if worker in pair) for worker in workers]
    assert max(given) < 1.2 * min(given)
    assert places_apart([(8, set(workers[:2]))], workers[:2]) == [(workers[0], workers[1])]


def test_copies_survive_what_dask_does_to_replicas(machines):
    machines.have(2)
    with Client(machines.address) as client:
        futures = client.map(np.full, range(100, 106), range(6), pure=False)
        wait(futures)
        copies = copies_apart(client, futures)
        values = client.gather([copy for own in copies for copy in own])
        assert [value[0] for value in values] == [number for number in range(6) for _ in range(2)]
        client.replicate(futures)
        del futures
        time.sleep(5)  # the memory manager looks every 2 seconds
        holders = client.who_has([copy for own in copies for copy in own])
        for first, second in copies:
            (one,), (other,) = holders[first.key], holders[second.key]
            assert one != other
        assert present(client, [copy for own in copies for copy in own]) == [True] * 12


def test_a_worker_that_is_killed_costs_some_steps_and_no_bit(machines, text, whole, tmp_path, capsys):
    machines.have(2)
    kill = at_step(KILLED_AT, lambda: machines.kill(machines.alive()[0]))
    train(text, tmp_path / "run", machines.address, kill, snapshot_every=5)
    assert same(tmp_path / "run", whole)
    said = capsys.readouterr().out
    assert "recovery   the state is kept on two workers every 5 steps, which takes " in said
    assert "recovery   the state is kept in this process every 5 steps" in said, "one worker is left"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "grain"),
    [
        *(("tokens.forward", "block"), ("tokens.backward", "block"), ("tokens.head", "auto"), ("update", "auto")),
        *((kind, "auto") for kind in ("recovery.copy", "parameters.finite", "sending")),
    ],
)
def test_kill_matrix(kind, grain, machines, text, whole, tmp_path):
    """In forward, backward, update, as a recovery point is made, and as a checkpoint is made."""
    machines.have(3)
    once, after = tmp_path / "killed", 3 if kind in ("parameters.finite", "sending") else KILLED_AT
    plugin = KillAsItSends(2, once) if kind == "sending" else KillItself(kind, after, once)
    with Client(machines.address) as client:
        client.register_plugin(plugin)
        try:
            asked = {"batch_chunk": 1, "grain": grain, "snapshot_every": 4, "save_every": 3}
            train(text, tmp_path / "run", machines.address, **asked)
        finally:
            client.unregister_worker_plugin(plugin.name)
    assert once.exists(), "nobody was killed"
    assert len(machines.alive()) == 2
    assert same(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_pass_that_is_made_again_drops_the_same(machines, text, whole, tmp_path):
    """Whoever is killed dies as it begins with a forward task, which another worker then has to do."""
    machines.have(2)
    dropping, once = replace(OPTIMIZER, dropout=0.2), tmp_path / "killed"
    train(text, tmp_path / "threads", "threads", optimizer=dropping)
    plugin = KillItself("tokens.forward", KILLED_AT, once)
    with Client(machines.address) as client:
        client.register_plugin(plugin)
        try:
            asked = {"batch_chunk": 1, "grain": "block", "optimizer": dropping, "snapshot_every": 4}
            train(text, tmp_path / "run", machines.address, **asked)
        finally:
            client.unregister_worker_plugin(plugin.name)
    assert once.exists(), "nobody was killed"
    assert same(tmp_path / "run", tmp_path / "threads")
    assert not set(losses_of(tmp_path / "run")) & set(losses_of(whole)), "nothing was dropped"


@pytest.mark.slow
def test_who_holds_most_may_be_killed(machines, text, whole, tmp_path):
    machines.have(3)

    def kill():
        with Client(machines.address) as client:
            workers = client.scheduler_info(n_workers=-1)["workers"].values()
            machines.kill(max(workers, key=lambda worker: worker["metrics"]["managed_bytes"])["name"])

    train(text, tmp_path / "run", machines.address, at_step(KILLED_AT, kill), snapshot_every=5)
    assert same(tmp_path / "run", whole)


@pytest.mark.slow
def test_more_workers_than_dask_allows_for_a_task_may_be_killed_one_after_the_other(machines, text, whole, tmp_path):
    machines.have(2)
    killed = []

    def replace(number, metrics):
        if number % 4 == 3:
            killed.append(machines.alive()[0])
            machines.kill(killed[-1])
            machines.have(2)

    train(text, tmp_path / "run", machines.address, replace, snapshot_every=2)
    assert len(killed) == 7, "three deaths on a worker end a task"
    assert same(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(("snapshots", "back"), [(4, "9, a recovery point"), (0, "10, the last checkpoint")])
def test_the_last_worker_is_waited_for(snapshots, back, machines, text, whole, tmp_path, capsys):
    machines.have(2)
    machines.kill(machines.alive()[0])

    def kill():
        if not snapshots:  # it is written while steps go on
            wait_until((tmp_path / "run" / "step-00000010").exists, "the checkpoint")
        machines.kill(machines.alive()[0])
        machines.start_worker()

    train(*(text, tmp_path / "run", machines.address, at_step(KILLED_AT, kill)), snapshot_every=snapshots, save_every=5)
    assert same(tmp_path / "run", whole)
    assert lost_steps(tmp_path / "run") == [KILLED_AT - int(back.split(",")[0])]
    said = capsys.readouterr().out
    assert "workers    all are gone: the run ends unless one comes in 10 minutes" in said
    assert f"from step {KILLED_AT} back to {back} (" in said


@pytest.mark.slow
def test_without_any_copy_a_run_begins_again(machines, text, whole, tmp_path, capsys):
    machines.have(1)

    def kill():
        machines.kill(machines.alive()[0])
        machines.start_worker()

    train(text, tmp_path / "run", machines.address, at_step(KILLED_AT, kill), snapshot_every=0)
    assert same(tmp_path / "run", whole)
    assert "back to 0, the beginning (12 steps again" in capsys.readouterr().out


@pytest.mark.slow
def test_a_cluster_without_workers_ends_a_run_that_can_be_gone_on_with(machines, text, tmp_path):
    machines.have(1)
    out = tmp_path / "run"
    process = started(text, out, machines.address, "--save-every", "5", "--worker-minutes", "0.03")
    machines.kill(machines.alive()[0])
    code, shown, said = ended(process)
    assert code == STOPPED
    assert "workers    all are gone: the run ends unless one comes in 0.03 minutes" in shown
    assert said == (
        f"train: the cluster must have a worker; got none for 0.03 minutes. Go on with --resume {out.resolve()}."
    )
    done = daskgpt.fit(resume=out, run={"steps": 40}, dataflow={"scheduler": "threads"}, quiet=True)
    assert len(losses_of(out)) == len(done.losses) == 40


@pytest.mark.slow
def test_a_run_that_waits_for_workers_can_be_stopped(machines, text, tmp_path):
    machines.have(1)
    out = tmp_path / "run"
    process = started(text, out, machines.address, "--save-every", "5")
    machines.kill(machines.alive()[0])
    next(line for line in process.stdout if "workers    all are gone" in line)
    process.send_signal(signal.SIGINT)
    code, _, said = ended(process)
    assert code == STOPPED
    got = re.escape(f" s, when it was asked to stop. Go on with --resume {out.resolve()}.")
    assert re.fullmatch(rf"train: the cluster must have a worker; got none for \d+{got}", said)


@pytest.mark.slow
def test_a_scheduler_that_dies_ends_a_run_at_once(text, tmp_path):
    with Machines(tmp_path, 1) as machines:
        process = started(text, tmp_path / "run", machines.address, "--save-every", "5")
        machines.kill("scheduler")
        code, _, said = ended(process)
    assert code == STOPPED
    assert said.startswith("ClusterScheduler: the scheduler must live until the end of a run; got ")
    assert said.endswith(f". Go on with --resume {(tmp_path / 'run').resolve()}.")


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_nothing_on_the_cluster(machines, text, tmp_path):
    machines.have(2)
    process = started(text, tmp_path / "run", machines.address, "--snapshot-every", "2")
    process.kill()
    process.communicate()
    with Client(machines.address) as client:
        wait_until(lambda: not client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)), "tasks")
        wait_until(lambda: not any(client.run(lambda dask_worker: len(dask_worker.data)).values()), "results")


@pytest.mark.slow
def test_a_worker_that_stops_for_seconds_delays_a_run_only(machines, text, whole, tmp_path):
    machines.have(2)
    paused = machines.alive()[0]

    def pause():
        machines.send(paused, signal.SIGSTOP)
        threading.Timer(4, machines.send, (paused, signal.SIGCONT)).start()

    # That it is left would take longer than it stands still.
    patient = {"snapshot_every": 5, "worker_seconds": 60}
    train(text, tmp_path / "run", machines.address, at_step(KILLED_AT, pause), **patient)
    assert same(tmp_path / "run", whole)
    assert lost_steps(tmp_path / "run") == []


@pytest.mark.slow
def test_a_worker_that_says_nothing_is_left(machines, text, whole, tmp_path, capsys):
    machines.have(3)
    stopped = machines.alive()[0]
    stop = at_step(KILLED_AT, lambda: machines.send(stopped, signal.SIGSTOP))
    try:
        train(text, tmp_path / "run", machines.address, stop, batch_chunk=1, snapshot_every=5, worker_seconds=2)
    finally:
        machines.send(stopped, signal.SIGCONT)
    assert same(tmp_path / "run", whole)
    # Lost for the run, or only gone: Dask may have computed again what it held.
    assert ", which said nothing" in capsys.readouterr().out
    wait_until(lambda: stopped in machines.ended(), "the end of a worker that comes back too late")


@pytest.mark.slow
def test_a_nanny_starts_a_worker_again_that_says_nothing(machines, text, whole, tmp_path, capsys):
    machines.have(1)
    nanny = machines.start_worker(nanny=True)
    machines.have(2)
    stopped = psutil.Process(machines.processes[nanny].pid).children(recursive=True)[-1]
    stop = at_step(KILLED_AT, stopped.suspend)
    train(text, tmp_path / "run", machines.address, stop, batch_chunk=1, worker_seconds=2)
    assert same(tmp_path / "run", whole)
    # Lost for the run, or only gone: Dask may have computed again what it held.
    assert ", which said nothing" in capsys.readouterr().out
    machines.have(2)
    assert not stopped.is_running()
    machines.send(nanny, signal.SIGTERM)
    machines.processes.pop(nanny).wait()


@pytest.mark.slow
def test_a_local_cluster_starts_a_worker_again(text, whole, tmp_path):
    killed = []

    def kill():
        children = psutil.Process().children(recursive=True)
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        killed.append(workers[0])
        killed[0].kill()

    train(text, tmp_path / "run", "local", at_step(KILLED_AT, kill), snapshot_every=5)
    assert killed
    assert same(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_worker_that_joins_gets_tasks(machines, text, whole, tmp_path):
    machines.have(1)
    joined, done = [], []

    def join(number, metrics):
        if number == 5:
            joined.append(machines.start_worker())
            machines.have(2)
        if joined:
            time.sleep(0.3)  # the run looks every two seconds who is there
        if number == STEPS - 2:
            with Client(machines.address) as client:
                done.append(client.run(lambda dask_worker: (dask_worker.name, dask_worker.state.executed_count)))

    train(text, tmp_path / "run", machines.address, join)
    assert dict(done[0].values())[joined[0]] > 0
    assert same(tmp_path / "run", whole)


def test_a_run_that_does_not_get_on_between_losses_ends():
    losses = Losses()
    loss = LostResults("ClusterScheduler", "every worker must live until the end of a run", "KilledWorker")
    for done in range(20):
        losses.count(done, 0, loss)  # a step more each time
    for restart in range(1, 20):
        losses.count(19, restart, loss)  # from a later point each time
    for _ in range(MOST_IN_VAIN - 1):
        losses.count(19, 19, loss)
    said = r"^train: a run must get on between losses; got 10 in a row at step=19; the last: KilledWorker\. "
    with pytest.raises(LostCluster, match=said):
        losses.count(19, 19, loss)


@pytest.mark.slow
def test_recovery_points_leave_nothing_behind(machines, text, tmp_path):
    machines.have(2)
    found = []

    def look(step, metrics):
        if step in (50, 149):
            with Client(machines.address) as client:
                found.append(client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))

    train(text, tmp_path / "run", machines.address, look, steps=150, snapshot_every=1, validate_every=0)
    assert max(found) < 150, "a step has 14 tasks and a point 18"


@pytest.mark.slow
def test_a_campaign_of_faults_at_random_moments(tmp_path):
    with (tmp_path / "faults.jsonl").open("w+") as log:
        said = disturb(tmp_path, log, faults=10, seconds=40, workers=3, seed=random.SystemRandom().randrange(10**6))
        log.seek(0)
        noted = [json.loads(line) for line in log]
    faults = [entry for entry in noted if entry.get("kind") in KINDS]
    assert len(faults) == 10, said
    assert all(entry.keys() == {"time", "kind", "worker", "host", "step"} for entry in faults)
    assert [entry["time"] for entry in faults] == sorted(entry["time"] for entry in faults)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_hosts_that_are_cut_off_or_restarted_cost_no_bit(tmp_path):
    with (tmp_path / "faults.jsonl").open("w+") as log, Hosts(4) as hosts:
        seed = random.SystemRandom().randrange(10**6)
        said = disturb(tmp_path, log, faults=4, seconds=30, workers=3, seed=seed, hosts=hosts)
        log.seek(0)
        kinds = [entry.get("kind") for entry in map(json.loads, log)]
    assert all(kinds.count(kind) == 1 for kind in HOST_KINDS), said
