"""Tests of runs in folders that are not, or no longer, their own, and of folders from untrusted sources."""

import json
import shutil
import signal

import pytest
from small_runs import fit, same

import daskgpt
from daskgpt.config.files import digest_of


def resume(folder, **changes):
    return daskgpt.fit(resume=folder, quiet=True, **changes)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_links_in_a_run_folder_are_not_followed(name, small_text, tmp_path):
    victim, out = tmp_path / "victim", tmp_path / "run"
    fit(small_text, out)
    shutil.move(out / name, victim)
    (out / name).symlink_to(victim)
    content = victim.read_bytes()
    with pytest.raises(ValueError, match=r"symbolic link"):
        resume(out, run={"steps": 14})
    assert victim.read_bytes() == content


@pytest.mark.parametrize("taken", [True, False])
def test_nothing_is_written_into_a_folder_that_was_moved_or_taken(taken, small_text, tmp_path, capfd):
    out, moved = tmp_path / "run", tmp_path / "moved"

    def move(step, metrics):
        if step == 5:
            shutil.move(out, moved)
            if taken:
                out.mkdir()
                (out / ".lock").write_text("another run's")
        if step == 9:
            assert [path.name for path in out.glob("*")] == [".lock"] * taken
            shutil.rmtree(out, ignore_errors=True)
            shutil.move(moved, out)

    fit(small_text, out, on_step=move, save_every=7)
    fit(small_text, tmp_path / "whole")
    assert same(out, tmp_path / "whole")
    with pytest.raises(OSError, match="must stay where it is"):
        fit(small_text, tmp_path / "second", on_step=lambda step, _: step == 5 and shutil.rmtree(tmp_path / "second"))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "file:scheduler.json"])
def test_address_in_a_folder_is_not_used(address, small_text, tmp_path, monkeypatch):
    out = tmp_path / "run"
    fit(small_text, out)
    (state,) = out.glob("step-*/state.json")
    content = json.loads(state.read_text())
    del content["sha256"]
    content["configuration"]["dataflow"]["scheduler"] = address
    state.write_text(json.dumps(content | {"sha256": digest_of(content)}))
    monkeypatch.setattr("daskgpt.training.trainer.open_scheduler", lambda address, *_: pytest.fail(address))
    with pytest.raises(pytest.fail.Exception, match="auto"):
        resume(out, run={"steps": 14})
    monkeypatch.undo()
    assert len(resume(out, run={"steps": 14}).losses) == 14


def test_damaged_step_number_costs_one_line(small_text, tmp_path):
    out = tmp_path / "run"
    fit(small_text, out)
    metrics = out / "metrics.jsonl"
    damaged = metrics.read_text().replace('"step": 3,', '"step": 50,')
    metrics.write_text(damaged)
    result = resume(out, run={"steps": 14})
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0, 1, 2, *range(4, 14)]
    assert (out / "metrics.jsonl.damaged-1").read_text() == damaged
    assert result.losses[3] != result.losses[3], "it is not a number"


def test_closed_terminal_stops_with_a_checkpoint(small_text, tmp_path):
    def close(step, metrics):
        if step == 4:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)  # shells send it together with others

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, as it should be
    try:
        result = fit(small_text, tmp_path, on_step=close)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.stopped
    assert result.checkpoint.name == "step-00000005"
