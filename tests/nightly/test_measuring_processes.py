"""Tests of tools that measure real processes: shares of time beside the steps, scaling, and sizes of tasks."""

import json

import overheads
import pytest
import scale
import task_sizes
from records import read_records

MODEL = "--blocks 1 --heads 2 --channels 16 --batch-size 4 --sequence-length 16"
SHORT = f"{MODEL} --warmup 2 --steps 6 --validation-batches 1 --validate-every 2 --sample-every 3 --sample-tokens 4"


def test_overheads_are_measured_and_recorded(small_text, tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    overheads.main([*f"{SHORT} --turns 2 --data".split(), str(small_text), "--record", str(path)])
    (record,) = read_records(path)
    assert {"validation", "logs", "samples", overheads.AT_THE_END} <= record.figures.keys()
    assert "--record" not in record.command
    assert "turn 1: " in capsys.readouterr().out


def test_scaling_of_a_small_model(tmp_path, capsys, monkeypatch):
    """Of a small model on one and two threads; what finds no time is named."""
    monkeypatch.setattr(scale, "BATCHES", {"tiny": (4, 16)})
    scale.main(["--counts", "1,2", "--minutes", "3", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "scale.json").read_text())
    model = written["models"]["tiny"]
    assert {*model["seconds a step"]["barrier-free"]} == {"1", "2"}
    runs = sum(map(len, model["seconds a step"].values()))
    assert runs + len(model["left out"]) == 2 * len(scale.KINDS)
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    assert "scale.json and scale.png" in capsys.readouterr().out


def test_smaller_tasks_leave_less_time_for_work(monkeypatch, capsys):
    monkeypatch.setattr(task_sizes, "CHANNELS", (256, 16))
    monkeypatch.setattr(task_sizes, "SIDES", (512, 8))
    measured = task_sizes.table()
    assert all(large[0] > small[0] and large[1] > small[1] for large, small in measured.values())
    assert task_sizes.half([(1e-2, 0.9), (1e-4, 0.1)]) == pytest.approx(1e-3)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(measured)
