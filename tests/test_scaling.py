"""Tests of `bench --scaling`, in process, and of a run's timers."""

import json

import pytest
from small_runs import fit

from daskgpt import bench
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataflowConfig
from daskgpt.instruments import scaling
from daskgpt.instruments.measure import BenchConfig
from daskgpt.instruments.records import read_records
from daskgpt.training.step_metrics import PARTS

ROW = {"step_ms_q1": 1, "step_ms_q3": 9, "tokens_per_s": 7, "tasks": 5, "peak_gb": 0.5, "others_cores": 0, "loss": "1"}
ROW |= {"batch_chunk_used": 2, "sequence_chunk_used": 32, "grain_used": "block"}


def test_scaling_runs_each_number_of_threads(capsys, monkeypatch, tmp_path):
    times = {1: 8.0, 2: 5.0, 3: 4.0}
    monkeypatch.setattr(scaling, "run_one", lambda order: ROW | {"step_ms": times[order.point.threads]})
    path = str(tmp_path / "records")
    flags = ["--scaling", "--threads", "3", "--batch-size", "4", "--sequence-length", "64"]
    assert bench.main([*flags, "--json", "--record", path]) == 0
    (found,) = read_records(path)
    assert capsys.readouterr().out.encode() == found.line()
    figures = {name: figure.median for name, figure in found.figures.items()}
    assert [figures[f"speedup_{threads}"] for threads in times] == [1, 1.6, 2]
    assert [figures[name] for name in ("step_2", "efficiency_2", "efficiency_3", "peak_2")] == [5, 0.8, 0.666667, 0.5]
    assert found.settings["chosen_3"] == "4 of 2 x 32, block"
    assert bench.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].split()[:6] == ["2", "5.0", "1.0", "..", "9.0", "1.60"]
    assert "same loss" in lines[-1]


def test_given_dials_stay():
    found = scaling.orders(GPT2Config(), BenchConfig(), DataflowConfig(threads=4, batch_chunk=3, grain="block"))
    assert [order.point.threads for order in found] == [1, 2, 4]
    assert {(order.point.batch_chunk, order.point.grain) for order in found} == {(3, "block")}
    assert all(order.study.warmup >= 3 for order in found), "chunks and grain are settled before anything is timed"


def test_result_has_timers(small_text, tmp_path):
    result = fit(small_text, tmp_path / "run", validate_every=4)
    assert list(result.timers) == list(PARTS)
    assert min(result.timers[part] for part in ("validation", "logs", "checkpoints")) > 0
    assert result.timers["samples"] == 0, "only the command line shows some"
    assert sum(result.timers.values()) < result.seconds
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    validations = sum(record.get("validation_s", 0.0) for record in records)
    assert result.timers["validation"] == pytest.approx(validations, abs=1e-3 * len(records))  # they are rounded
