"""Tests of checkpoints: contents, when they are written and pruned, damage, a full disk, and the best one."""

import hashlib
import json
import os
import shutil
from contextlib import ExitStack

import numpy as np
import pytest
from full_disk import full_disk
from safetensors.numpy import load_file
from small_runs import STEPS, fit, losses_of, metrics_of, steps_in, stopping_at, tensors_of

import daskgpt
from daskgpt.training import checkpoint
from daskgpt.training.checkpoint import DamagedCheckpoint, checked_state


@pytest.fixture(scope="module")
def saved(small_text, tmp_path_factory):
    out = tmp_path_factory.mktemp("saved") / "run"
    return out, fit(small_text, out, save_every=5)


def test_checkpoint_has_model_moments_and_state(saved):
    out, result = saved
    names = ".lock config.toml metrics.jsonl chain.jsonl latest best"
    assert {path.name for path in out.glob("[!s]*")} == set(names.split())
    assert steps_in(out) == [5, 10, 12]
    assert os.readlink(out / "latest") == "step-00000012"
    assert result.checkpoint == out / "step-00000012"
    model, optimizer = (load_file(out / "latest" / f"{name}.safetensors") for name in ("model", "optimizer"))
    assert set(optimizer) == {f"{moment}.{name}" for moment in "mv" for name in model}
    for name, values in model.items():
        parameter = result.parameters[name]
        assert np.array_equal(values, parameter.T if "c_" in name and parameter.ndim == 2 else parameter)
        assert optimizer[f"v.{name}"].shape == parameter.shape
    assert all((values > 0).any() for name, values in optimizer.items() if name.startswith("v."))
    state = json.loads((out / "latest" / "state.json").read_text())
    assert (state["step"], state["configuration"]["run"]["seed"]) == (STEPS, 0)
    assert state["configuration"]["dataflow"]["grain"] == "auto", "as it was given: another machine chooses its own"
    assert (state["configuration"]["model"]["channels"], state["configuration"]["data"]["groups"]) == (16, 1)
    assert state["arithmetic"] == {"precision": "float32", "unit": "fused"}
    assert state["versions"]["numpy"] == np.__version__
    for name, facts in state["files"].items():
        content = (out / "latest" / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (facts["bytes"], facts["sha256"])


def test_checkpoints_by_time_and_at_the_end(small_text, tmp_path):
    for minutes in (1e-9, 1e9):
        fit(small_text, tmp_path / str(minutes), save_minutes=minutes, keep=100, steps=50)
    assert {50} < set(steps_in(tmp_path / "1e-09"))
    assert steps_in(tmp_path / "1000000000.0") == [50]


def test_windows_end_at_checkpoints(small_text, tmp_path, saved):
    dataflow = {"barrier": "none", "window": 3, "grain": "block", "batch_chunk": 2, "sequence_chunk": 8}
    fit(small_text, tmp_path / "run", dataflow=dataflow, save_every=5)
    for step in (5, 10, 12):
        assert tensors_of(tmp_path / "run", step) == tensors_of(saved[0], step)


def test_load_takes_the_newest_good_checkpoint(saved, tmp_path, capfd):
    out, result = saved
    copy = shutil.copytree(out, tmp_path / "run", symlinks=True)
    renamed = shutil.copytree(copy / "step-00000005", tmp_path / "best")
    five, model = copy / "step-00000005", copy / "step-00000012" / "model.safetensors"
    (model.parent / "optimizer.safetensors").unlink()  # no model needs it
    loaded = lambda path: {name: value.tobytes() for name, value in daskgpt.load(path)[1].items()}  # noqa: E731
    for path in (copy, copy / "latest"):
        assert loaded(path) == {name: value.tobytes() for name, value in result.parameters.items()}
    for path in (five, five / "model.safetensors", renamed):
        assert loaded(path) == loaded(out / "step-00000005")
    model.write_bytes(model.read_bytes()[:-1])
    capfd.readouterr()
    assert loaded(copy) == loaded(out / "step-00000010")
    (line,) = capfd.readouterr().err.splitlines()
    assert "step-00000012 is damaged and skipped" in line
    with pytest.raises(ValueError, match="model.safetensors has "):
        daskgpt.load(copy / "step-00000012")
    for step in (5, 10):
        shutil.rmtree(copy / f"step-{step:08}")
    with pytest.raises(FileNotFoundError, match="good checkpoint"):
        daskgpt.load(copy)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_every_changed_byte_is_detected(saved, tmp_path, name, random):
    folder = shutil.copytree(saved[0] / "step-00000005", tmp_path / "step-00000005")
    content = bytearray((folder / name).read_bytes())
    for place in random.choice(len(content) - 1, 40, replace=False):  # all but the newline at the end
        changed = content.copy()
        changed[place] ^= 1 << int(random.integers(8))
        (folder / name).write_bytes(changed)
        try:
            state = checked_state(folder)
        except DamagedCheckpoint:
            continue
        assert name == "state.json", "white space of JSON means nothing, and nothing else"
        assert state == json.loads(content) | state
    (folder / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=name):
        checked_state(folder)


def test_checkpoint_of_another_step_or_version_is_refused(saved, tmp_path):
    moved = shutil.copytree(saved[0] / "step-00000005", tmp_path / "step-00000006")
    with pytest.raises(DamagedCheckpoint, match="step 5"):
        checked_state(moved)
    state = json.loads((moved / "state.json").read_text()) | {"version": 2}
    del state[checkpoint.DIGEST]
    state[checkpoint.DIGEST] = checkpoint.digest_of(state)
    (moved / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="version"):
        checked_state(moved)


@pytest.fixture
def disk():
    """What enters the context of a full disk; closed, it has room again."""
    with ExitStack() as entered:
        yield entered


def test_full_disk_costs_checkpoints_not_the_run(small_text, tmp_path, disk, saved, monkeypatch):
    """No checkpoint fits from step 5 on; before the last ones somebody makes room."""
    said = []

    def on_step(step, metrics):
        if step == 4:
            disk.enter_context(full_disk(20_000))
        if step == 9:
            disk.close()

    monkeypatch.setattr("daskgpt.training.metrics.Progress.say", lambda self, line: said.append(line))
    fit(small_text, tmp_path / "run", save_every=2, keep=20, on_step=on_step)
    lost = [line for line in said if "is not saved" in line]
    assert [line.split(" is ")[0] for line in lost] == ["checkpoint step 6", "checkpoint step 8"]
    assert all("step 4 stays" in line for line in lost)
    assert steps_in(tmp_path / "run") == [2, 4, 10, 12]
    assert not list((tmp_path / "run").glob(".*.tmp"))
    assert losses_of(tmp_path / "run") == losses_of(saved[0])


def test_failed_last_checkpoint_is_an_error(small_text, tmp_path, disk, saved):
    out = tmp_path / "run"

    def on_step(step, metrics):
        if step == 8:
            disk.enter_context(full_disk(20_000))

    with pytest.raises(OSError, match="last checkpoint .* from step 5"):
        fit(small_text, out, save_every=5, on_step=on_step)
    disk.close()
    assert steps_in(out) == [5]
    assert len(losses_of(out)) == STEPS
    daskgpt.fit(resume=out, run={"keep": 1}, quiet=True)
    assert tensors_of(out) == tensors_of(saved[0])


# The checkpoint with the lowest validation loss

# Learns, and then takes steps so large that it forgets.
STEEP = daskgpt.OptimizerConfig(learning_rate=0.3, warmup=24, schedule="linear")
EACH = {"optimizer": STEEP, "steps": 24, "validate_every": 2}
GOES_ON = {"run": {"steps": 27, "validate_every": 1}}


@pytest.fixture(scope="module")
def steep(small_text, tmp_path_factory):
    """A run that is best somewhere before its end."""
    out = tmp_path_factory.mktemp("steep") / "run"
    fit(small_text, out, keep=1, **EACH)
    return out


@pytest.fixture
def copy(steep, tmp_path):
    return shutil.copytree(steep, tmp_path / "copy", symlinks=True)


def validated(out):
    """Validation loss after so many steps, and which of them are told to be the best so far."""
    records = {record["step"] + 1: record for record in metrics_of(out) if "validation_loss" in record}
    return {step: record["validation_loss"] for step, record in records.items()}, [
        step for step, record in records.items() if record.get("best")
    ]


def lowest(losses):
    return min(losses, key=losses.get)


def best_in(out):
    return int(os.readlink(out / "best").removeprefix("step-"))


def test_best_is_kept_and_marked_in_metrics(steep):
    losses, told = validated(steep)
    best = lowest(losses)
    assert 2 < best < 24, "a run that is best at an end shows nothing"
    assert best_in(steep) == best
    assert steps_in(steep) == [best, 24]
    assert told == [step for step in losses if losses[step] == min(l for s, l in losses.items() if s <= step)]
    state = json.loads((steep / "latest" / "state.json").read_text())
    assert state["best"] == {"step": best, "loss": losses[best]}


def test_best_holds_the_state_of_its_step(small_text, steep, tmp_path):
    """Steps overlap here, and the dials are others."""
    best = best_in(steep)
    fit(small_text, tmp_path / "run", dataflow={"barrier": "none", "window": 3}, keep=1, **EACH)
    assert best_in(tmp_path / "run") == best
    for step in (best, None):
        assert tensors_of(tmp_path / "run", step) == tensors_of(steep, step)
    lowest, last = (daskgpt.load(steep / name)[1] for name in ("best", "latest"))
    assert any((lowest[name] != last[name]).any() for name in lowest)


def test_resume_gives_the_best_of_an_uninterrupted_run(small_text, steep, tmp_path):
    best = best_in(steep)
    for stop in (best, best + 1):
        out = tmp_path / str(stop)
        fit(small_text, out, keep=1, on_step=stopping_at(stop), **EACH)
        daskgpt.fit(resume=out, quiet=True)
        assert (best_in(out), tensors_of(out, best)) == (best, tensors_of(steep, best))


@pytest.mark.parametrize("left", ["", "none", "an older one", "a copy"])
def test_resume_updates_a_stale_best_link(left, copy):
    """The process ended after the checkpoint had its name and before `best` meant it."""
    best = best_in(copy)
    if left:
        (copy / "best").unlink()
    if left == "an older one":
        (copy / "best").symlink_to("step-00000002")
    if left == "a copy":
        shutil.copytree(copy / "latest", copy / "best")
    daskgpt.fit(resume=copy, quiet=True, **GOES_ON)
    assert sorted(validated(copy)[0]) == [*range(2, 25, 2), 25, 26, 27]
    assert (best_in(copy), steps_in(copy)) == (best, [best, 27])
    assert (copy / "best.copy-1").exists() == (left == "a copy")


@pytest.mark.parametrize("harm", ["damaged", "gone"])
def test_damaged_best_is_replaced_by_a_later_one(harm, copy):
    old = copy / os.readlink(copy / "best")
    if harm == "gone":
        shutil.rmtree(old)
    else:
        content = bytearray((old / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (old / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="must be unchanged"):
            daskgpt.load(copy / "best")
    daskgpt.fit(resume=copy, quiet=True, **GOES_ON)
    losses, _ = validated(copy)
    assert best_in(copy) == lowest({step: losses[step] for step in (25, 26, 27)})
    assert daskgpt.load(copy / "best")[0].blocks == 1


def test_keep_best_zero_writes_no_best(small_text, copy, tmp_path):
    fit(small_text, tmp_path / "run", keep_best=0, **EACH)
    assert steps_in(tmp_path / "run") == [24]
    assert not os.path.lexists(tmp_path / "run" / "best")
    assert validated(tmp_path / "run")[1] == []
    daskgpt.fit(resume=copy, run={"steps": 25, "keep_best": 0}, quiet=True)
    assert not os.path.lexists(copy / "best")
    assert steps_in(copy) == [25]
