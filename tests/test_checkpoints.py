"""Checkpoints: what they hold, when they are written, which stay, and what becomes of a run whose disk is full."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from command_lines import PATIENCE, run, write_text
from machines import wait_until
from safetensors.numpy import load_file
from small_runs import FLAGS, MODEL, STEPS, fit, losses_of, steps_in, stopping_at, tensors_of

import daskgpt
from daskgpt.training import saving
from daskgpt.training.checkpoints import DamagedCheckpoint, checked_state

CONSTANT = daskgpt.OptimizerConfig(schedule="constant")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def saved(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("saved") / "run"
    return out, fit(text, out, save_every=5)


def test_a_checkpoint_has_the_model_the_moments_and_the_state(saved):
    out, result = saved
    assert {path.name for path in out.iterdir()} == {
        *(".lock", "config.toml", "metrics.jsonl", "latest", "best"),
        *("step-00000005", "step-00000010", "step-00000012"),
    }
    assert os.readlink(out / "latest") == "step-00000012"
    assert result.checkpoint == out / "step-00000012"
    model, optimizer = (load_file(out / "latest" / f"{name}.safetensors") for name in ("model", "optimizer"))
    assert set(optimizer) == {f"{moment}.{name}" for moment in "mv" for name in model}
    for name, values in model.items():
        own = result.parameters[name]
        assert np.array_equal(values, own.T if "c_" in name and own.ndim == 2 else own)
        assert optimizer[f"v.{name}"].shape == own.shape
    assert all((values > 0).any() for name, values in optimizer.items() if name.startswith("v."))
    state = json.loads((out / "latest" / "state.json").read_text())
    assert (state["step"], state["seed"], state["data"]["next_batch"]) == (STEPS, 0, STEPS)
    assert state["configuration"]["model"]["channels"] == 16
    assert state["configuration"]["dataflow"]["threads"] == len(os.sched_getaffinity(0))
    assert state["asked"]["grain"] == "auto"
    assert state["groups"] == state["configuration"]["data"]["groups"] == 1
    assert state["arithmetic"]["precision"] == "float32"
    assert state["versions"]["numpy"] == np.__version__
    for name, known in state["files"].items():
        content = (out / "latest" / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (known["bytes"], known["sha256"])


def test_each_is_the_state_after_its_steps_although_the_run_has_gone_on(text, tmp_path, monkeypatch):
    """The writer is held back until three more steps are made; beside steps it is nice, and only it is."""
    gone_on, write, niceness = threading.Event(), saving.write_checkpoint, []

    def late(*arguments, **options):
        assert gone_on.wait(60)
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return write(*arguments, **options)

    def on_step(step, metrics):
        if step == 7:
            gone_on.set()

    monkeypatch.setattr(saving, "write_checkpoint", late)
    fit(text, tmp_path / "run", optimizer=CONSTANT, save_every=5, on_step=on_step)
    monkeypatch.undo()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    beside = max(19, own) if sys.platform == "linux" else own
    assert niceness == [beside, beside, own]
    for steps in (5, 10):
        fit(text, tmp_path / f"{steps}", optimizer=CONSTANT, steps=steps)
        assert tensors_of(tmp_path / "run", steps) == tensors_of(tmp_path / f"{steps}")


def test_without_memory_for_a_copy_training_waits_and_says_so(text, tmp_path, saved, monkeypatch, capfd):
    monkeypatch.setattr(saving, "available_memory", lambda: 10_000)
    monkeypatch.setattr(saving, "copy_in_tasks", None)
    data = daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=16)
    settings = daskgpt.RunConfig(steps=STEPS, validation_batches=1, save_every=5, out=tmp_path / "run")
    daskgpt.fit(MODEL, data, daskgpt.OptimizerConfig(warmup=3), run=settings)
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("checkpoint")]
    assert said == [
        "checkpoint training waits while one is written: 0.00 GB for a copy are not free (0.00 GB are)",
    ]
    assert tensors_of(tmp_path / "run", 5) == tensors_of(saved[0], 5)
    assert tensors_of(tmp_path / "run") == tensors_of(saved[0])


def test_the_newest_stay_and_those_of_each_so_many_steps(text, tmp_path):
    fit(text, tmp_path / "a", save_every=1, keep=2, keep_every=4)
    assert steps_in(tmp_path / "a") == [4, 8, 11, 12]
    fit(text, tmp_path / "b", keep=1, keep_every=5)
    assert steps_in(tmp_path / "b") == [5, 10, 12]
    assert not list(tmp_path.glob("*/.*.tmp"))


def test_one_is_written_by_time_and_at_the_end(text, tmp_path):
    fit(text, tmp_path / "always", save_minutes=1e-9, keep=100, steps=100)
    assert len(steps_in(tmp_path / "always")) > 1
    assert steps_in(tmp_path / "always")[-1] == 100
    fit(text, tmp_path / "end")
    assert steps_in(tmp_path / "end") == [STEPS]


@pytest.mark.parametrize("window", [3, 5])
def test_steps_that_overlap_end_where_a_checkpoint_is_due(text, tmp_path, saved, window):
    dataflow = {"barrier": "none", "window": window, "grain": "block", "batch_chunk": 2, "sequence_chunk": 8}
    fit(text, tmp_path / "run", dataflow=dataflow, save_every=5)
    for step in (5, 10, 12):
        assert tensors_of(tmp_path / "run", step) == tensors_of(saved[0], step)


@pytest.mark.slow
def test_a_cluster_s_state_is_fetched_while_it_goes_on(text, tmp_path, saved):
    fit(text, tmp_path / "run", dataflow={"scheduler": "local", "threads": 2, "batch_chunk": 2}, save_every=5)
    for step in (5, 10, 12):
        assert tensors_of(tmp_path / "run", step) == tensors_of(saved[0], step)


def test_a_stopped_run_ends_with_a_checkpoint(text, tmp_path):
    result = fit(text, tmp_path / "run", on_step=stopping_at(7))
    assert result.stopped
    assert (len(result.losses), result.checkpoint) == (7, tmp_path / "run" / "step-00000007")
    assert steps_in(tmp_path / "run") == [7]


def test_what_is_loaded_is_the_newest_good_one(saved, tmp_path, capfd):
    out, result = saved
    copy = shutil.copytree(out, tmp_path / "run", symlinks=True)
    same = lambda path, step: assert_same(daskgpt.load(path)[1], daskgpt.load(out / f"step-{step:08}")[1])  # noqa: E731
    assert_same(daskgpt.load(copy)[1], result.parameters)
    same(copy / "latest", 12)
    same(copy / "step-00000005", 5)
    same(copy / "step-00000005" / "model.safetensors", 5)
    same(shutil.copytree(copy / "step-00000005", tmp_path / "best"), 5)
    model = copy / "step-00000012" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    capfd.readouterr()
    same(copy, 10)
    (line,) = capfd.readouterr().err.splitlines()
    size = model.stat().st_size
    assert line == (
        f"checkpoint {copy / 'step-00000012'} is damaged and passed over: "
        f"model.safetensors has {size:,} bytes instead of {size + 1:,}"
    )
    with pytest.raises(ValueError, match="model.safetensors has "):
        daskgpt.load(copy / "step-00000012")
    for step in (5, 10):
        shutil.rmtree(copy / f"step-{step:08}")
    with pytest.raises(FileNotFoundError, match="load: the run must have a good checkpoint; got path="):
        daskgpt.load(copy)


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(values.tobytes() == other[name].tobytes() for name, values in one.items())


def test_a_new_run_starts_from_a_checkpoint(saved, tmp_path):
    arguments = ("--batch-size", 4, "--steps", 2, "--sample-tokens", 0, "--validation-batches", 1, "--warmup", 1)
    for name in ("step-00000005", "latest"):
        result = run("train", "--init", saved[0] / name, *arguments, "--out", tmp_path / name)
        assert result.returncode == 0, result.stderr
        assert losses_of(tmp_path / name)[0] < losses_of(saved[0])[0]
    result = run("generate", saved[0] / "step-00000005", "--tokens", 3)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_every_changed_byte_is_found(saved, tmp_path, name, random):
    folder = shutil.copytree(saved[0] / "step-00000005", tmp_path / "step-00000005")
    content = bytearray((folder / name).read_bytes())
    for place in random.choice(len(content) - 1, 40, replace=False):  # all but the newline at the end
        changed = content.copy()
        changed[place] ^= 1 << int(random.integers(8))
        (folder / name).write_bytes(changed)
        try:
            found = checked_state(folder)
        except DamagedCheckpoint:
            continue
        # White space of JSON means nothing.
        assert name == "state.json"
        assert found == json.loads(content) | found
    (folder / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=name):
        checked_state(folder)


@pytest.fixture
def little_disk(tmp_path):
    """A disk of 500 KiB: four checkpoints, of 100 each, and little else."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=500k", "none", folder], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("only root may mount a disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_costs_checkpoints_and_not_the_run(text, little_disk, saved, monkeypatch):
    """Checkpoints that are never deleted fill it; then somebody makes room, and the last ones are written."""
    out, said, tried, write = little_disk / "run", [], [], saving.write_checkpoint
    filled = little_disk / "filled"
    filled.write_bytes(b"0" * 200_000)

    def tell(run, checkpoint, *arguments, **options):
        try:
            return write(run, checkpoint, *arguments, **options)
        finally:
            tried.append(checkpoint.step)

    def on_step(step, metrics):
        if step == 9:
            wait_until(lambda: 8 in tried, "the checkpoint of step 8, which has no room")
            filled.unlink()

    data = daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=16)
    settings = daskgpt.RunConfig(
        steps=STEPS, validation_batches=1, save_every=2, save_minutes=0, keep=2, keep_every=2, out=out
    )
    monkeypatch.setattr(saving, "write_checkpoint", tell)
    monkeypatch.setattr("daskgpt.training.progress.Progress.say", lambda self, line: said.append(line))
    daskgpt.fit(MODEL, data, daskgpt.OptimizerConfig(warmup=3), run=settings, on_step=on_step)
    monkeypatch.undo()
    lines = [line for line in said if line.startswith("checkpoint")]
    assert "checkpoint step 6 is not saved: No space left on device; training goes on, step 4 stays" in lines
    assert "checkpoint step 8 is not saved: No space left on device; training goes on, step 4 stays" in lines
    assert steps_in(out) == [2, 4, 10, 12]
    assert not list(out.glob(".*.tmp"))
    assert len(losses_of(out)) == STEPS
    assert losses_of(out) == losses_of(saved[0])


def test_a_last_checkpoint_that_does_not_fit_ends_with_one_line(text, little_disk):
    out = little_disk / "run"
    flags = ("--steps", 12, "--save-every", 2, "--keep-every", 2, "--out", out)
    result = run("train", "--data", text, *FLAGS.split(), *flags)
    assert result.returncode == 2
    said = result.stdout.splitlines()
    assert "checkpoint step 10 is not saved: No space left on device; training goes on, step 8 stays" in said
    assert result.stderr.splitlines()[-1] == (
        f"train: the last checkpoint must be written; got path={out / 'step-00000012'} (No space left on device). "
        "Make room there and go on with --resume from step 8."
    )
    assert "Traceback" not in result.stderr
    assert steps_in(out) == [2, 4, 6, 8]
    assert len(losses_of(out)) == 12
    shutil.rmtree(out / "step-00000002")
    shutil.rmtree(out / "step-00000004")
    result = run("train", "--resume", out, "--keep-every", 0, "--keep", 1)
    assert result.returncode == 0, result.stderr
    assert steps_in(out) == [12]


def test_a_writer_that_is_still_busy_is_ended_with_the_process(text, tmp_path):
    """The second Ctrl-C stops at once: what was being written is left over, what was there stays whole."""
    script = tmp_path / "script.py"
    script.write_text(BUSY.format(tests=os.path.dirname(__file__), text=str(text), out=str(tmp_path / "run")))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 130, done.stderr
    assert steps_in(tmp_path / "run") == [3]
    assert len(list((tmp_path / "run").glob(".step-*.tmp"))) == 1
    assert losses_of(tmp_path / "run")
    result = daskgpt.fit(resume=tmp_path / "run", quiet=True)
    assert (result.first, len(result.losses)) == (3, STEPS)
    assert not list((tmp_path / "run").glob(".*.tmp"))
    fit(text, tmp_path / "whole")
    assert tensors_of(tmp_path / "run") == tensors_of(tmp_path / "whole")


BUSY = """
import signal, sys, threading, time
sys.path.insert(0, {tests!r})
from daskgpt.formats import run_model
from daskgpt.training import checkpoints
from daskgpt.config.flags import run_command
from small_runs import fit

real, count = checkpoints._write_moments, 0

def slow(*arguments):
    global count
    count += 1
    if count > 1:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(600)
    return real(*arguments)

checkpoints._write_moments = slow

def on_step(step, metrics):
    if step == 6:
        signal.raise_signal(signal.SIGINT)

run_command(lambda arguments: fit({text!r}, {out!r}, save_every=3, on_step=on_step) and 0)
"""
