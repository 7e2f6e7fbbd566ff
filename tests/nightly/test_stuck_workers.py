"""Tests of runs whose workers take no tasks: paused by Dask's memory limit, stopped, or unreachable."""

import mmap
import re
import signal
from functools import partial

import psutil
import pytest
from command_lines import PATIENCE, refused, run, write_text
from distributed import Client
from machines import Machines, wait_until
from namespaces import Hosts, missing
from small_runs import DISTURBED_STEPS, FLAGS, fit_in_parts, same, steps_in
from watched_run import WatchedRun

from daskgpt.config.stopping import STOPPED
from daskgpt.schedulers.workers import members

AT = 8
MEMORY, FULL = 1_000_000_000, 870_000_000  # bytes: the limit, and what Dask pauses at (80 %), and a little more


train = partial(fit_in_parts, steps=DISTURBED_STEPS, save_every=4, snapshot_every=4)


@pytest.fixture
def machines(tmp_path):
    with Machines(tmp_path, 0) as started:
        yield started


def fill(dask_worker, full=FULL):
    """Take memory until Dask pauses the worker; that of a mapping goes back to the system at once."""
    dask_worker.ballast = mmap.mmap(-1, full - psutil.Process().memory_info().rss)
    for place in range(0, len(dask_worker.ballast), 4096):
        dask_worker.ballast[place] = 1


def empty(dask_worker):
    dask_worker.ballast.close()


def started(machines, count):
    """A client, and the addresses of new workers with a limit of memory."""
    for _ in range(count):
        machines.start_worker(memory=str(MEMORY))
    client = Client(machines.address)
    client.wait_for_workers(count)
    return client, sorted(members(client))


def pause(client, addresses):
    client.run(fill, workers=addresses)
    paused = {"paused"}
    wait_until(lambda: {members(client)[address]["status"] for address in addresses} == paused, "paused workers")


PAUSED = r"workers    worker w\d \(tcp://\S+\) is paused: 0\.[89]\d of 1\.00 GB, Dask's limit"


def test_run_goes_on_without_a_paused_worker(machines, small_text, whole, tmp_path, capsys):
    client, addresses = started(machines, 2)
    with client:

        def act(number, metrics):
            if number + 1 == AT:
                pause(client, addresses[:1])

        train(small_text, tmp_path / "run", machines.address, act, snapshot_every=0)
    assert same(tmp_path / "run", whole)
    said = capsys.readouterr().out
    assert re.search(PAUSED, said)
    assert "workers    1 share each batch from now on" in said
    assert "lost  " not in said, "a paused worker hands on what it has"


def test_all_workers_paused_at_the_start(machines, tmp_path):
    client, addresses = started(machines, 2)
    run, lines = WatchedRun(tmp_path, FLAGS), []
    with client:
        pause(client, addresses)
        with run.start(machines.address, heard=lines.append):
            waits = "workers    none takes tasks: the run ends unless one comes in 10 minutes"
            wait_until(lambda: waits in lines, "the run's word")
            client.run(empty)
            wait_until(lambda: run.step > AT, "steps")
            run.require_undisturbed(run.stop(), "paused")
    said = "\n".join(lines) + run.errors.read_text()  # before the run begins, on stderr
    assert len(re.findall(PAUSED, said)) == 2


@pytest.mark.parametrize("way", ["paused", "stopped"])
def test_ctrl_c_is_heard_while_workers_take_no_tasks(way, machines, tmp_path):
    client, addresses = started(machines, 2)
    run, lines = WatchedRun(tmp_path, FLAGS), []
    with client, run.start(machines.address, "--snapshot-every", 2, heard=lines.append):
        wait_until(lambda: run.step > AT and any(line.startswith("recovery") for line in lines), "steps")
        if way == "paused":
            pause(client, addresses)
        else:
            machines.send(machines.alive()[0], signal.SIGSTOP)
        state = "is paused: " if way == "paused" else "is silent: "
        wait_until(lambda: any(state in line for line in lines), "its name")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(PATIENCE) == STOPPED, run.errors.read_text()
        if way == "stopped":
            machines.send(machines.alive()[0], signal.SIGCONT)
    assert steps_in(run.out)[-1] >= AT - 4, "from the newest recovery point"
    assert "Traceback" not in run.errors.read_text()


def test_stopped_worker_at_the_start_is_named_and_left_out(machines, small_text, whole, tmp_path, capsys, monkeypatch):
    client, addresses = started(machines, 2)
    monkeypatch.setattr("daskgpt.schedulers.cluster.SILENCE", 15)
    with client:
        name = members(client)[addresses[0]]["name"]
        machines.send(name, signal.SIGSTOP)
        train(small_text, tmp_path / "run", machines.address)
        machines.send(name, signal.SIGCONT)
    assert same(tmp_path / "run", whole)
    assert f"workers    worker {name} ({addresses[0]}) is silent: no heartbeat for 10 s" in capsys.readouterr().err


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("during", [False, True])
def test_workers_that_cannot_reach_each_other(during, small_text, whole, tmp_path, capsys):
    with Hosts(3) as hosts, Machines(tmp_path, 2, hosts) as machines, Client(machines.address) as client:
        client.wait_for_workers(2)

        def act(number, metrics):
            if number + 1 == AT and during:
                hosts.part(1, 2)

        if not during:
            hosts.part(1, 2)
        train(small_text, tmp_path / "run", machines.address, act)
        addresses = sorted(members(client))
    assert same(tmp_path / "run", whole)
    said = capsys.readouterr().out
    pairs = re.findall(r"workers    (tcp://\S+) cannot connect to (tcp://\S+): [\w ]+. Start workers with", said)
    assert set(pairs) == {tuple(addresses), tuple(addresses[::-1])}, said
    assert said.count("lost  ") == during


def test_model_that_does_not_fit_into_a_worker_is_refused(machines, tmp_path):
    client, _ = started(machines, 1)
    with client:
        flags = ["--preset", "gpt2", "--blocks", 24, "--encoding", "bytes", "--data", write_text(tmp_path)]
        line = refused(run("train", *flags, "--scheduler", machines.address))
    assert "must fit into the 1.0 GB of a worker (1 share the batch); got at least 2." in line


def test_unreachable_worker_is_refused_at_the_start(machines, tmp_path):
    flags = ["--listen-address", "tcp://127.0.0.1:0", "--contact-address", "tcp://127.0.0.1:9"]
    machines.start_worker(contact=flags)
    with Client(machines.address) as client:
        client.wait_for_workers(1)
    line = refused(run("train", *FLAGS.split(), "--data", write_text(tmp_path), "--scheduler", machines.address))
    assert f"got scheduler={machines.address}, worker=tcp://127.0.0.1:9 (Connection refused)" in line
    assert "--contact-address" in line
