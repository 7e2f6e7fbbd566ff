"""Workers come and go: they get work within some steps, and no bit depends on how many there are, or over what."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress

import dask
import numpy as np
import pytest
from command_lines import write_text
from distributed import Client
from machines import ROOT, KillAsItStarts, Machines, wait_until
from short_lives import LEAST, MOST, short_lives
from small_runs import MODEL, OPTIMIZER, losses_of, tensors_of

import daskgpt
from daskgpt.config.run import OptimizerConfig
from daskgpt.kernels.compilation import compile_all
from daskgpt.model.optimizer import OPTIMIZERS
from daskgpt.model.parameters import parameter_shapes
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.schedulers.leaving import give
from daskgpt.schedulers.members import members
from daskgpt.training.job import Job
from daskgpt.training.job_steps import JobSteps
from daskgpt.training.step import TrainingStep, repacked_state

STEPS, JOINED, LEFT = 30, 10, 20
MATTERS = 0.6  # seconds that steps take around a change, so that it is seen before the next one


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    compile_all(np.float32)
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The folder of a run with threads."""
    return train(text, tmp_path_factory.mktemp("whole") / "run", "threads")


def train(text, out, scheduler, on_step=None):
    settings = {"steps": STEPS, "validation_batches": 1, "validate_every": 7, "save_minutes": 0, "sample_tokens": 0}
    data = daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=16, groups=4)
    run = daskgpt.RunConfig(**settings, out=out, snapshot_every=5)
    dataflow = daskgpt.DataflowConfig(scheduler=scheduler, threads=2, batch_chunk=1)
    daskgpt.fit(MODEL, data, OPTIMIZER, dataflow, run, on_step=on_step)
    return out


def same(out, whole):
    return losses_of(out) == losses_of(whole) and tensors_of(out) == tensors_of(whole)


@pytest.mark.slow
def test_workers_that_stay_give_one_result_however_many(text, whole, tmp_path):
    with Machines(tmp_path, 0) as machines:
        for workers in (1, 2, 3, 4):
            machines.have(workers)
            assert same(train(text, tmp_path / str(workers), machines.address), whole), workers


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["tcp", "tls"])
def test_one_joins_and_one_leaves_and_the_others_share_the_work_anew(
    protocol, text, whole, tmp_path, capsys, monkeypatch
):
    settings = {}
    if protocol == "tls":
        if not shutil.which("openssl"):
            pytest.skip("openssl is not installed")
        subprocess.run([ROOT / "cluster" / "certificates.sh", tmp_path / "certificates"], check=True)
        monkeypatch.setenv("DASK_CONFIG", str(tmp_path / "certificates" / "dask.yaml"))
        settings = dask.config.merge(dask.config.config, dask.config.collect([str(tmp_path / "certificates")], env={}))
    with dask.config.set(settings), Machines(tmp_path, 2) as machines:
        machines.have(2)
        assert machines.address.startswith(f"{protocol}://")

        def change(number, metrics):
            if number + 1 == JOINED:
                machines.have(3)
            if number + 1 == LEFT:
                machines.kill(machines.alive()[0])
            if number + 1 >= JOINED:
                time.sleep(MATTERS)

        assert same(train(text, tmp_path / "run", machines.address, change), whole)
    said = capsys.readouterr().out
    assert f"{protocol}://" in said
    # A worker of the first two that had not told of itself yet as the run began is new as well.
    came = "workers    new: "
    joined = said.index("workers    3 take part from now on: 4 of 1 x 16", said.index(came) + len(came))
    assert "workers    2 take part from now on: " in said[joined:]


def test_steps_for_a_number_of_workers_are_recorded_once():
    """Where workers come and go, the same numbers of them come again and again."""
    data = daskgpt.DataConfig(batch_size=4, sequence_length=16, groups=4)
    dataflow = daskgpt.DataflowConfig(grain="block", batch_chunk=1, sequence_chunk=16)
    job, said, found = Job(MODEL, data, daskgpt.OptimizerConfig(), dataflow, daskgpt.RunConfig()), [], []
    with open_scheduler("local", 1) as scheduler:
        steps = JobSteps(job, scheduler, said.append)
        for workers in (4, 2, 4, 2, 3):
            for _ in range(2):  # once they have stayed
                steps.look(workers)
            found.append(steps.step)
    assert [step.spread_over for step in found] == [4, 2, 4, 2, 3]
    assert (found[2], found[3]) == (found[0], found[1])
    assert sum("take part from now on" in line for line in said) == len(found)


@pytest.mark.slow
def test_a_worker_of_half_the_speed_costs_time_only(text, whole, tmp_path, capsys):
    """It is stopped half of the time, as cpulimit does it."""
    with Machines(tmp_path, 2) as machines:
        machines.have(2)
        slow, over = machines.alive()[0], threading.Event()

        def hinder():
            while not over.wait(0.05):
                machines.send(slow, signal.SIGSTOP)
                over.wait(0.05)
                machines.send(slow, signal.SIGCONT)

        hindering = threading.Thread(target=hinder)
        hindering.start()
        try:
            out = train(text, tmp_path / "run", machines.address)
        finally:
            over.set()
            hindering.join()
    assert same(out, whole)
    said = capsys.readouterr().out
    assert "lost " not in said
    assert "busier than the mean" in said


@pytest.mark.slow
def test_a_worker_that_runs_out_of_memory_is_started_again_by_its_nanny(text, whole, tmp_path, capsys):
    with Machines(tmp_path, 1) as machines:
        nanny = machines.start_worker(nanny=True, memory="1GiB")
        machines.have(2)

        def fill(number, metrics):
            if number + 1 == JOINED:
                with Client(machines.address) as client:
                    workers = client.scheduler_info(n_workers=-1)["workers"]
                    (address,) = (address for address, own in workers.items() if own["name"] == nanny)
                    with suppress(OSError):  # the answer may not come any more
                        client.run(take_memory, workers=[address], on_error="ignore")
                wait_until(lambda: "memory budget. Restarting" in machines.said(), "the nanny's word")
            if number + 1 >= JOINED:
                time.sleep(MATTERS)

        assert same(train(text, tmp_path / "run", machines.address, fill), whole)
        machines.have(2)
        machines.send(nanny, signal.SIGTERM)
        machines.processes.pop(nanny).wait()
    said = capsys.readouterr().out
    assert re.search(r"^(lost       worker|workers    gone:) tcp://", said, re.MULTILINE)


def test_a_worker_that_dies_as_a_run_prepares_it_holds_up_nobody(tmp_path):
    with Machines(tmp_path, 2) as machines:
        machines.have(2)
        with Client(machines.address) as client:
            give(client, KillAsItStarts(tmp_path / "killed"))
            assert (tmp_path / "killed").exists()
            assert len(client.nthreads()) == 1


@pytest.mark.slow
def test_a_loss_names_who_was_lost_not_who_had_left_before(text, whole, tmp_path, capsys):
    addresses = {}
    with Machines(tmp_path, 3) as machines:
        machines.have(3)
        leaving, killed, _ = machines.alive()

        def change(number, metrics):
            if number + 1 == JOINED:
                with Client(machines.address) as client:
                    addresses.update({own["name"]: address for address, own in members(client).items()})
                    client.retire_workers([addresses[leaving]], close_workers=True)
            if number + 1 == LEFT:
                machines.kill(killed)
            if number + 1 >= JOINED:
                time.sleep(MATTERS)

        assert same(train(text, tmp_path / "run", machines.address, change), whole)
    said = capsys.readouterr().out
    assert f"gone: {addresses[leaving]}" in said
    lost = [line for line in said.splitlines() if line.startswith("lost ")]
    assert any(addresses[killed] in line for line in lost), said
    assert not any(addresses[leaving] in line for line in lost), lost


@pytest.mark.slow
def test_on_workers_that_live_for_seconds_a_run_has_the_same_bits(tmp_path):
    with (tmp_path / "short_lives.jsonl").open("w+") as log:
        seed = random.SystemRandom().randrange(10**6)
        coming, said = short_lives(tmp_path, log, seconds=90, life=20, stagger=5, seed=seed)
        log.seek(0)
        entries = [json.loads(line) for line in log]
    assert coming.replaced >= 1, said
    assert len(set(coming.numbers)) > 1, said
    assert {entry["kind"] for entry in entries if "kind" in entry} == {"wanted", "came", "gone"}
    assert all(LEAST <= entry["workers"] <= MOST for entry in entries if entry.get("kind") == "wanted")
    assert [entry["step"] for entry in entries if "step" in entry][-1] > 0


def take_memory():
    """Some more than a GiB, which stays."""
    take_memory.taken = np.ones(2**27 + 2**24)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_state_is_brought_into_the_packs_of_a_step_for_other_workers(optimizer):
    config = OptimizerConfig(optimizer=optimizer)
    random = np.random.default_rng(0)
    values = {name: random.normal(size=shape).astype("f4") for name, shape in parameter_shapes(MODEL).items()}
    tokens, targets = random.integers(0, 257, (2, 4, 16)).astype(np.int32)
    one, *others = (TrainingStep(MODEL, (4, 16), (1, 16), config, parts=parts, groups=4) for parts in (1, 2, 3, 4))
    with open_scheduler("local", 2) as scheduler:
        wanted, state = one.initial(values), one.initial(values)
        for step in others:
            _, wanted = one(scheduler, wanted, tokens, targets, 10)
            state = repacked_state(scheduler, step, state)
            assert state.layout != wanted.layout
            _, state = step(scheduler, state, tokens, targets, 10)
        found, expected = (own.layout.unpack(scheduler.fetch(own.packs)) for own in (state, wanted))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(array, expected[name]) for name, array in found.items())
