"""Tests of a run's folder: when it is written, the content of its files, errors, and folders of others."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
from command_lines import SMALL
from small_runs import config_of, fit, same

import daskgpt
from daskgpt import audit, convert, plot, rewind, train
from daskgpt.config.files import digest_of
from daskgpt.schedulers.machine import usable_cores
from daskgpt.study import StudyConfig
from daskgpt.training import run_folder
from daskgpt.training.logs import RecordFile
from daskgpt.training.run_folder import RunFolder


def test_only_a_named_folder_is_written(small_text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fit(small_text, "", steps=3).checkpoint is None
    assert list(tmp_path.iterdir()) == []
    assert fit(small_text, "named", steps=3).checkpoint == Path("named/step-00000003")
    before = {path: path.read_bytes() for path in Path("named").rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match="must not hold a run already"):
        fit(small_text, "named")
    assert {path: path.read_bytes() for path in Path("named").rglob("*") if path.is_file()} == before
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert fit(small_text, "~/named", steps=3).checkpoint == tmp_path / "home/named/step-00000003"


@pytest.mark.parametrize("name", run_folder.FILES)
def test_folders_in_the_place_of_files_are_named(name, small_text, tmp_path):
    (tmp_path / "new" / name).mkdir(parents=True)
    rule = rf"^RunFolder: no folder may have the name of a run's file; got .*{re.escape(name)}\. Rename it"
    with pytest.raises(ValueError, match=rule):
        fit(small_text, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]
    fit(small_text, tmp_path / "run", steps=2)
    (tmp_path / "run" / name).rename(tmp_path / "aside")
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(ValueError, match=rule):
        daskgpt.fit(resume=tmp_path / "run", run={"steps": 3})


def test_the_folder_of_a_user_is_found_by_every_path(small_text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert StudyConfig(out="~/study").out == str(tmp_path / "study")
    result = fit(small_text, "~/run", steps=2)
    daskgpt.save("~/saved.safetensors", result.config, result.parameters)
    assert daskgpt.digest(daskgpt.load(tmp_path / "saved.safetensors")[1]) == daskgpt.digest(result.parameters)
    assert rewind.main(["~/run", "--step", "1", "--tensor", "wte.weight", "--out", "~/t.npy"]) == 0
    assert plot.main(["~/run", "--out", "~/curves.svg"]) == 0
    assert convert.main(["~/run", "~/model.safetensors"]) == 0
    assert {"run", "t.npy", "curves.svg", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit):
        audit.main(["~nobody-here/run"])
    assert "RUN: invalid Path value: '~nobody-here/run'" in capsys.readouterr().err


def test_command_line_chooses_a_folder(small_text, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder.time, "strftime", lambda pattern: "now")
    Path("runs/now").mkdir(parents=True)
    Path("runs/now-2").mkdir()
    assert train.main(["--data", str(small_text), *SMALL, "--steps", "1", "--sample-tokens", "0"]) == 0
    assert "\nrun written to runs/now-3\n" in capfd.readouterr().out
    folder = tmp_path / "runs" / "now-3"
    assert config_of(folder)["run"]["out"] == str(folder.resolve())


def test_configuration_matches_the_run(small_text, tmp_path, monkeypatch):
    monkeypatch.chdir(small_text.parent)
    folder = tmp_path / "run"
    fit("text.txt", os.path.relpath(folder), steps=2)
    written = config_of(folder)
    dataflow, data = written["dataflow"], written["data"]
    assert dataflow["grain"] in ("segment", "block", "chunk")
    assert dataflow["threads"] == usable_cores()
    assert (dataflow["batch_chunk"], dataflow["sequence_chunk"]) == (4, 16)
    assert (data["encoding"], data["data"]) == ("bytes", str(small_text.resolve()))
    assert written["run"]["out"] == str(folder.resolve())
    assert written["model"]["padded_vocabulary"] == 257


def test_the_configuration_of_a_run_on_a_cluster(small_text, tmp_path, cluster):
    cluster.have(2)
    named = f"file:{cluster.folder / 'scheduler.json'}"
    fit(small_text, tmp_path / "run", steps=2, dataflow={"scheduler": named, "threads": 7})
    dataflow = config_of(tmp_path / "run")["dataflow"]
    assert dataflow["scheduler"] == cluster.address
    assert dataflow["threads"] == 2
    assert dataflow["grain"] in ("segment", "block", "chunk")  # that of the first worker


def test_toml_escapes_round_trip(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    names = {"a": 'quote " backslash \\ tab \t', "b": "\x7f delete, \u2028 line, 😀 beyond the first plane", "c": "ü"}
    folder.begin({"data": names}, {"step": 0})
    folder.close()
    assert config_of(tmp_path / "run")["data"] == names


def test_a_folder_that_cannot_be_locked_stays_free(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "locked", Mock(side_effect=OSError("no locks")))
    folder, other = RunFolder(str(tmp_path / "run")), tmp_path / "run" / "chain.jsonl"
    other.parent.mkdir()
    other.touch()
    with pytest.raises(OSError, match="no locks"):
        folder.begin({}, {"step": 0})
    assert list((tmp_path / "run").iterdir()) == [other]


def test_two_runs_into_one_folder(tmp_path):
    first, second = RunFolder(str(tmp_path / "run")), RunFolder(str(tmp_path / "run"))  # neither is written yet
    first.begin({"run": {"seed": 1}}, {"step": 0})
    with pytest.raises(FileExistsError, match="must not hold a run already"):
        second.begin({"run": {"seed": 2}}, {"step": 0})
    first.log({"step": 0}, print)
    first.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert config_of(tmp_path / "run") == {"run": {"seed": 1}}


def test_a_folder_is_locked_until_its_records_are_written(tmp_path, monkeypatch):
    """Those for which there was no room are written at the end: by then, no other process may continue the run."""
    folder, was_locked = RunFolder(str(tmp_path / "run")), []
    monkeypatch.setattr(RecordFile, "close", lambda file: was_locked.append(not folder.lock.closed))
    folder.begin({}, {"step": 0})
    folder.close()
    assert was_locked == [True, True]
    assert folder.lock.closed


# Folders that are not, or no longer, a run's own, and folders from untrusted sources


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

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, as it should be
    result = fit(small_text, tmp_path, on_step=close)
    assert result.stopped
    assert result.checkpoint.name == "step-00000005"
