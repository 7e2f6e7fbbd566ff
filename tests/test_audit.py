"""Tests of audits: honest runs agree under other dials, and each kind of fault is found."""

import json
import random
import shutil

import pytest
from audit_faults import KINDS, edit_file, edit_loss, flip_in_file, honest, inject
from small_runs import MODEL, fit, stopping_at

import daskgpt
from daskgpt import audit
from daskgpt.training.logs import CHAIN, read_chain

OTHER = ("--scheduler", "threads", "--threads", "2", "--batch-chunk", "2", "--sequence-chunk", "8", "--barrier", "none")


@pytest.fixture(scope="module")
def whole(small_text, tmp_path_factory):
    return honest(small_text, tmp_path_factory.mktemp("honest") / "run")


def test_honest_run_agrees_under_other_dials(whole, called):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    code, told = called(audit, whole, *OTHER)
    assert code == 0, told
    stretches = [line.split(": ")[0] for line in told.splitlines()[1:-1]]
    assert stretches == [f"steps {steps} agree" for steps in ("1 to 3", "4 to 9", "10 to 12")]
    assert called(audit, whole, "--share", 0.3, "--seed", 1)[1].count(" agree: ") == 1
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_is_found(kind, small_text, whole, tmp_path):
    fault = inject(kind, small_text, whole, tmp_path, random.Random(3))
    assert fault.trace
    assert fault.found
    assert fault.right is not False
    assert fault.lag is None or fault.lag >= 0


@pytest.mark.parametrize("step", [12, 3, "x", -1])
def test_losses_beyond_the_chain_are_told(step, whole, tmp_path, called):
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
    code, told = called(audit, run, "--share", 0)
    assert (code, told.count("FAULT metrics.jsonl: ")) == (1, 1), told


def test_losses_of_a_killed_run_after_its_last_checkpoint_are_told(small_text, tmp_path, called):
    fit(small_text, tmp_path / "run", save_every=4, on_step=stopping_at(9))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "loss": 1.0}) + "\n" + '{"step": 10, "lo')  # as a killed process leaves it
    code, told = called(audit, tmp_path / "run")
    assert (code, "FAULT" in told) == (0, False)
    assert "losses of steps 9 to 9 follow the last checkpoint, and nothing vouches for them" in told


def test_edited_checkpoints_are_told(whole, tmp_path, called):
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    step, _ = edit_file(run, random.Random(2), "optimizer.safetensors", forged=True)
    code, told = called(audit, run)
    assert code == 1
    assert f"DIFFER: optimizer after step {step}" in told
    flip_in_file(run / f"step-{step:08}", "model.safetensors", random.Random(4))
    code, told = called(audit, run)
    assert code == 1
    assert f"FAULT step-{step:08}: model.safetensors has another SHA-256" in told


def test_an_edited_loss_is_told(whole, tmp_path, called):
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    step, _ = edit_loss(run, random.Random(2), forged=True)
    code, told = called(audit, run)
    assert (code, told.count("DIFFER: 1 loss, that of step ")) == (1, 1)
    assert f"that of step {step + 1} " in told


def test_chain_outlives_deleted_checkpoints_and_changed_settings(small_text, tmp_path, called):
    out = tmp_path / "run"
    fit(small_text, out, save_every=2, keep=1, keep_best=0, on_step=stopping_at(5))
    daskgpt.fit(resume=out, optimizer={"learning_rate": 5e-3}, run={"steps": 14, "save_every": 3}, quiet=True)
    code, told = called(audit, out, "--scheduler", "sync")
    assert code == 0, told
    assert [entry["step"] for _, entry in read_chain(out / CHAIN)] == [0, 2, 4, 5, 6, 9, 12, 14]
    assert "steps 1 to 14 agree" in told


def test_chain_is_cut_behind_a_damaged_checkpoint(small_text, tmp_path, called):
    out = tmp_path / "run"
    fit(small_text, out, save_every=4)
    (out / "step-00000012" / "model.safetensors").write_bytes(b"")
    assert daskgpt.fit(resume=out, optimizer={"clip": 0.5}, quiet=True).first == 8
    assert [entry["step"] for _, entry in read_chain(out / CHAIN)] == [0, 4, 8, 12]
    assert called(audit, out)[0] == 0
    lines = (out / CHAIN).read_text().splitlines(keepends=True)
    (out / CHAIN).write_text("".join(lines[:-1]) + lines[-1][:40])  # as a power cut leaves it
    daskgpt.fit(resume=out, run={"steps": 14}, quiet=True)
    assert (out / f"{CHAIN}.damaged-1").exists()
    code, told = called(audit, out)
    assert (code, f"FAULT step-00000008: {CHAIN} has another state.json, or none" in told) == (1, True)
    assert "steps 13 to 14 agree" in told


def test_other_ways_to_train(small_text, tmp_path, called):
    settings = {"optimizer": {"clip": 0.5}, "dataflow": {"precision": "bfloat16"}, "steps": 2000, "tokens": 640}
    fit(small_text, tmp_path / "run", **settings, save_every=4)
    code, told = called(audit, tmp_path / "run", "--scheduler", "threads", "--threads", "2")
    assert code == 0, told
    assert " 0 differ" in told


def test_runs_from_other_parameters(small_text, whole, tmp_path, called):
    fit(small_text, tmp_path / "tuned", init=str(whole), steps=4, save_every=2)
    assert called(audit, tmp_path / "tuned")[0] == 0
    fit(small_text, tmp_path / "own", parameters=daskgpt.initial_parameters(MODEL, seed=5), steps=4, save_every=2)
    code, told = called(audit, tmp_path / "own")
    assert (code, "steps 1 to 2 not computed: a program gave" in told, "steps 3 to 4 agree" in told) == (0, True, True)


def test_what_cannot_be_audited_is_refused(small_text, whole, tmp_path, called):
    with pytest.raises(ValueError, match="arithmetic.*float32 by .*here=bfloat16 by"):
        called(audit, whole, "--precision", "bfloat16")
    other = tmp_path / "other.txt"
    other.write_text("L" + small_text.read_text()[1:])
    with pytest.raises(ValueError, match="data must be those .*--data"):
        called(audit, whole, "--data", other)
    with pytest.raises(FileNotFoundError, match=CHAIN):
        called(audit, tmp_path)
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    for folder in run.glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match="a stretch .*checkpoints=0"):
        called(audit, run)
    assert called(audit, run, "--share", 0)[0] == 0
    record = json.loads((run / CHAIN).read_text().splitlines()[0])
    (run / CHAIN).write_text(json.dumps(record | {"step": "0"}) + "\n[]\n\xff\n{}")
    assert called(audit, run, "--share", 0)[1].count("is not as it was written") == 4
