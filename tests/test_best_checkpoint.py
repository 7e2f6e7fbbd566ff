"""Tests of the checkpoint with the lowest validation loss: when it is written and kept, and the link `best`."""

import json
import os
import shutil

import pytest
from small_runs import fit, metrics_of, steps_in, stopping_at, tensors_of

import daskgpt

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
