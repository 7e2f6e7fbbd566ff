"""Tests of resumed runs: the bits of an uninterrupted run, settings that may change, and errors."""

import errno
import math
import os
import shutil
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from small_runs import (
    FLAGS,
    MODEL,
    OPTIMIZER,
    STEPS,
    config_of,
    fit,
    losses_of,
    metrics_of,
    same,
    steps_in,
    stopping_at,
    tensors_of,
)

import daskgpt
from daskgpt import audit, train
from daskgpt.data.dataset import load_dataset
from daskgpt.formats.encoding import get_encoding
from daskgpt.formats.huggingface import tokenizer_files
from daskgpt.training import checkpoint
from daskgpt.training.run_folder import RunFolder

THREADS = {"scheduler": "threads", "threads": 2, "batch_chunk": 2, "sequence_chunk": 16}
SYNC = {"scheduler": "sync", "batch_chunk": 4, "sequence_chunk": 4, "grain": "kernel"}
OVERLAPPING = {"scheduler": "threads", "threads": 3, "batch_chunk": 2, "barrier": "none", "window": 3}


@pytest.fixture(scope="module")
def whole(small_text, tmp_path_factory):
    """A run that is not stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    fit(small_text, out, dataflow=THREADS)
    return out


@pytest.fixture(scope="module")
def stopped(small_text, tmp_path_factory):
    """One that is, with two checkpoints."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    fit(small_text, out, save_every=5, on_step=stopping_at(7))
    return out


@pytest.fixture
def copy(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run", symlinks=True)


def resume(*arguments):
    return train.main(["--resume", *map(str, arguments)])


@pytest.mark.parametrize(
    ("first", "then"), [(THREADS, SYNC), (SYNC, THREADS), (OVERLAPPING, SYNC), (THREADS, OVERLAPPING)]
)
def test_resume_with_other_dials_changes_no_bit(small_text, tmp_path, whole, first, then):
    out = tmp_path / "run"
    assert fit(small_text, out, dataflow=first, save_every=6, on_step=stopping_at(6)).stopped
    result = daskgpt.fit(resume=out, dataflow=then, quiet=True)
    assert same(out, whole)
    assert losses_of(whole) == result.losses
    assert (result.first, result.stopped, result.checkpoint) == (6, False, out / f"step-{STEPS:08}")
    assert math.isfinite(result.validation_loss)
    assert result != replace(result)
    first, *_, last = result.losses
    shown = f"{last:.3f} in the last, {result.validation_loss:.3f} on held-out text\n{STEPS - 6} of {STEPS} steps in "
    assert repr(result).startswith(f"loss {first:.3f} nats a token in the first step, {shown}")
    assert config_of(out)["dataflow"]["scheduler"] == then["scheduler"]


def test_on_step_stops_and_run_resumes_repeatedly(small_text, whole, tmp_path):
    out, seen = tmp_path / "run", []
    fit(small_text, out, on_step=stopping_at(2))
    stop = lambda step, metrics: seen.append(step) or np.bool_(step in (2, 6))  # noqa: E731
    for end in (3, 7):
        result = daskgpt.fit(resume=out, on_step=stop, quiet=True)
        assert (result.stopped, len(result.losses)) == (True, end)
    assert seen == [2, 3, 4, 5, 6]
    assert steps_in(out)[-1] == 7
    result = daskgpt.fit(resume=str(out), on_step=lambda step, metrics: "not True", quiet=True)
    assert (result.stopped, result.first) == (False, 7)
    assert same(out, whole)


def test_resume_between_threads_and_a_cluster(small_text, tmp_path, whole, cluster, monkeypatch):
    """The cluster's checkpoints are fetched while it continues."""
    cluster.have(2)
    monkeypatch.setattr("daskgpt.training.rank_engine.WINDOW_SECONDS", 0)  # it ends after one
    out = tmp_path / "run"
    spread = {"scheduler": cluster.address, "batch_chunk": 1, "sequence_chunk": 8}
    fit(small_text, out, dataflow=THREADS, on_step=stopping_at(3))
    daskgpt.fit(resume=out, dataflow=spread, run={"save_every": 5, "keep": 9}, on_step=stopping_at(9), quiet=True)
    assert steps_in(out) == [3, 5, 9]
    shutil.rmtree(out / "step-00000009")
    assert daskgpt.fit(resume=out, dataflow=THREADS, quiet=True).first == 5
    assert same(out, whole)


OTHERS = [{"dataflow": {"precision": "bfloat16"}}, {"optimizer": {"optimizer": "muon", "warmup": 2}}]
LLAMA = replace(MODEL, norm="rmsnorm", position="rotary", activation="swiglu", kv_heads=1, head="untied")
OTHERS += [{"config": LLAMA, "optimizer": {"optimizer": "custom_layers:MINI", "warmup": 2}}]


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_other_arithmetic_optimizers_and_models(small_text, tmp_path, settings):
    fit(small_text, tmp_path / "whole", **settings)
    fit(small_text, tmp_path / "run", **settings, on_step=stopping_at(5))
    daskgpt.fit(resume=tmp_path / "run", dataflow={"batch_chunk": 1}, quiet=True)
    assert tensors_of(tmp_path / "run") == tensors_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("model.safetensors", lambda content: content[:-4], "bytes"),
        ("optimizer.safetensors", lambda content: content[:-9] + b"x" + content[-8:], "SHA-256"),
        ("optimizer.safetensors", None, "cannot be read"),
        ("state.json", lambda content: content[:300], "no JSON"),
        ("state.json", lambda content: content.replace(b'"step": 7', b'"step": 8'), "has changed"),
        ("state.json", None, "missing"),
    ],
)
def test_damaged_checkpoint_is_reported_and_skipped(copy, whole, capfd, name, damage, said):
    folder = copy / "step-00000007"
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage:
        (folder / name).write_bytes(damage(content))
    assert daskgpt.fit(resume=copy, run={"save_every": 1, "keep": 1}).first == 5
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "is damaged" in line]
    assert folder.name in line
    assert said in line
    assert tensors_of(copy) == tensors_of(whole)
    assert steps_in(copy) == [STEPS]
    aside = copy / "step-00000007.damaged-1"
    assert len(list(aside.iterdir())) == (3 if damage else 2)
    assert not damage or (aside / name).read_bytes() == damage(content)


@pytest.mark.parametrize("reader", ["read_json", "digest_of_file"])
def test_a_checkpoint_that_may_not_be_read_is_not_damaged(reader, copy, monkeypatch):
    monkeypatch.setattr(checkpoint, reader, Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(PermissionError, match="Permission denied"):
        resume(copy)
    assert steps_in(copy) == [5, 7]


def test_a_run_without_metrics_continues(copy, whole, capfd):
    (copy / "metrics.jsonl").unlink()
    (copy / "config.toml").unlink()
    assert daskgpt.fit(resume=copy).first == 7
    assert "7 of 7 steps are missing" in capfd.readouterr().out
    assert tensors_of(copy) == tensors_of(whole)


def test_a_run_without_a_good_checkpoint_or_steps_left(copy, tmp_path, whole, capsys):
    for folder in copy.glob("step-*"):
        (folder / "state.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="2 damaged.*step-00000007.*step-00000005.*another --out"):
        resume(copy)
    assert steps_in(copy) == [5, 7]
    with pytest.raises(FileNotFoundError, match="All of its checkpoints are damaged"):
        daskgpt.load(copy)
    for folder in copy.glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match=r"\(none\).*another --out"):
        resume(copy)
    with pytest.raises(FileNotFoundError, match="must hold a run"):
        resume(tmp_path)
    with pytest.raises(ValueError, match="must name the folder of a run"):
        resume(whole / "latest")
    with pytest.raises(ValueError, match="must have steps left"):
        resume(whole, "--steps", STEPS - 1)
    assert resume(whole) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize(
    ("flag", "value", "got"),
    [
        ("--batch-size", 8, r"batch_size=8 \(its own: 4\)"),
        ("--precision", "bfloat16", r"precision=bfloat16 \(its own: float32\)"),
        ("--blocks", 2, r"blocks=2 \(its own: 1\)"),
        ("--init", "model", r"init=model \(it has none\)"),
        ("--preset", "gpt2", "preset=gpt2"),
        ("--out", "elsewhere", "out=elsewhere"),
    ],
)
def test_refused_changes_list_what_may_change(copy, flag, value, got):
    allowed = "May change: --learning-rate, .*--window, --steps, .*--worker-seconds"
    with pytest.raises(ValueError, match=f"keeps .*{got}.* {allowed}"):
        resume(copy, flag, value)


def test_resume_checks_python_arguments(copy, small_text):
    with pytest.raises(ValueError, match="own parameters"):
        daskgpt.fit(resume=copy, parameters=daskgpt.initial_parameters(MODEL, 0))
    data = daskgpt.DataConfig(data=str(small_text), batch_size=4, sequence_length=16)
    result = daskgpt.fit(MODEL, data, OPTIMIZER, run=daskgpt.RunConfig(steps=STEPS), resume=copy, quiet=True)
    assert (result.first, len(result.losses)) == (7, STEPS)


def test_unchanged_settings_are_accepted(copy, small_text, whole, monkeypatch):
    monkeypatch.chdir(copy.parent)
    same = ("--batch-size", 4, "--out", copy, "--encoding", "auto", "--sample-tokens", 0)
    assert resume("run", "--data", os.path.relpath(small_text), *same) == 0
    assert tensors_of(copy) == tensors_of(whole)


def test_steps_and_learning_rate_may_change(copy, whole):
    daskgpt.fit(resume=copy, run={"steps": 15}, optimizer={"learning_rate": 1e-2}, quiet=True)
    records = metrics_of(copy)
    assert losses_of(copy)[:8] == losses_of(whole)[:8]  # the eighth is that of the checkpoint's parameters
    assert losses_of(copy)[8] != losses_of(whole)[8]
    assert len(records) == 15
    assert records[7]["learning_rate"] > 5e-3
    written = config_of(copy)
    assert (written["run"]["steps"], written["optimizer"]["learning_rate"]) == (15, 1e-2)
    shutil.rmtree(copy / "step-00000015")  # the next one takes them over
    assert len(daskgpt.fit(resume=copy, run=daskgpt.RunConfig(steps=16, save_every=5), quiet=True).losses) == 16


def test_moved_or_copied_run_resumes(stopped, whole, tmp_path):
    copy = shutil.copytree(stopped, tmp_path / "elsewhere")
    assert not (copy / "latest").is_symlink()
    daskgpt.fit(resume=copy, quiet=True)
    assert tensors_of(copy) == tensors_of(whole)
    assert (copy / "latest.copy-1" / "state.json").is_file()
    assert config_of(copy)["run"]["out"] == str(copy)


@pytest.fixture
def moved(stopped, small_text, tmp_path):
    """A copy of a run as another machine has it, whose data and model to start from were at places of the first one,
    and those that are here.
    """
    text, init = tmp_path / "first" / "text.txt", tmp_path / "first" / "init"
    text.parent.mkdir()
    shutil.copy(small_text, text)
    shutil.copytree(stopped, init)
    fit(text, tmp_path / "first" / "run", init=str(init), steps=4, save_every=2, on_step=stopping_at(2))
    (tmp_path / "first").rename(tmp_path / "second")
    return [tmp_path / "second" / name for name in ("run", "text.txt", "init")]


def test_moved_data_are_named_or_refused(moved, tmp_path, capsys):
    run, text, init = moved
    with pytest.raises(FileNotFoundError, match=r"first/text.txt.* --data"):
        resume(run)
    other = tmp_path / "other.txt"
    other.write_text("L" + text.read_text()[1:])
    with pytest.raises(ValueError, match=r"the data must be .*other.txt .*sha256=.*first/text.txt .*sha256="):
        daskgpt.fit(resume=run, data={"data": other})
    resume(run, "--data", text)
    assert config_of(run)["data"]["data"] == str(text)
    assert len(losses_of(run)) == 4
    assert audit.main([str(run)]) == 0  # of the steps before that, too
    assert "1 of 2 stretches" in capsys.readouterr().out
    assert audit.main([str(run), "--init", str(init)]) == 0
    assert "2 of 2 stretches" in capsys.readouterr().out


def test_moved_vocabulary_is_named_or_refused(small_text, tmp_path):
    for name, size in (("first", 270), ("other", 271)):
        encoding = load_dataset(str(small_text), f"learn:{size}").encoding_name
        (tmp_path / name).mkdir()
        for file, content in tokenizer_files(get_encoding(encoding), 16).items():
            (tmp_path / name / file).write_bytes(content)
    run = tmp_path / "run"
    flags = f"{FLAGS} --data {small_text} --encoding {tmp_path / 'first'} --out {run} --steps 2"
    train.main(flags.split())
    (tmp_path / "first").rename(tmp_path / "second")
    with pytest.raises(ValueError, match="keeps .*encoding="):
        resume(run, "--steps", 3, "--encoding", tmp_path / "other")
    assert resume(run, "--steps", 3, "--encoding", tmp_path / "second") == 0


def test_metrics_are_cut_back_and_gaps_reported(copy, whole, capfd):
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    beyond = '{"step": 7, "loss": 9.0}\n{"step": 8, "loss": 9.0}\n{"step": 9, "lo'
    (copy / "metrics.jsonl").write_text("".join(lines[:2] + lines[4:]) + beyond)
    shutil.rmtree(copy / "step-00000007")
    result = daskgpt.fit(resume=copy)
    assert result.first == 5
    assert "2 of 5 steps are missing" in capfd.readouterr().out
    assert [math.isnan(loss) for loss in result.losses] == [False, False, True, True] + [False] * 8
    records = metrics_of(copy)
    assert [(record["step"], record["loss"]) for record in records[2:]] == list(enumerate(losses_of(whole)))[4:]


def test_run_folder_is_locked(small_text, tmp_path):
    refusals = []

    def on_step(step, metrics):
        with pytest.raises(RuntimeError, match="no other process") as refusal:
            RunFolder(str(tmp_path / "run"), resumed=True)
        refusals.append(refusal)

    fit(small_text, tmp_path / "run", steps=2, on_step=on_step)
    assert len(refusals) == 2
    RunFolder(str(tmp_path / "run"), resumed=True).close()


def test_leftovers_of_killed_processes_are_removed(copy, whole):
    for name in (".step-00000009.1-ab.tmp", ".step-00000003.1-ab.tmp"):
        (copy / name).mkdir()
        (copy / name / "model.safetensors").write_bytes(b"half")
    (copy / ".config.toml.1-ab.tmp").write_text("half")
    (copy / ".latest.1-ab.tmp").symlink_to("step-00000009")
    daskgpt.fit(resume=copy, quiet=True)
    assert not list(copy.glob(".*.tmp"))
    assert tensors_of(copy) == tensors_of(whole)
