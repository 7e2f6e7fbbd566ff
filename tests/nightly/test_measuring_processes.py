"""Tests of instruments that measure real processes: threads by number, what workers send, and the tools for records."""

import json

import dashboard_cost
import overheads
import pytest
import scale
from records import read_records

MODEL = "--blocks 1 --heads 2 --channels 16 --batch-size 4 --sequence-length 16"
SHORT = f"{MODEL} --warmup 2 --steps 6 --validation-batches 1 --validate-every 2 --sample-every 3 --sample-tokens 4"


TOOLS = [
    (overheads, f"{SHORT} --turns 2 --data", {"validation", "logs", "samples", overheads.AT_THE_END}, "turn 1: "),
    (dashboard_cost, f"{MODEL} --pairs 2 --window 4 --data", {"a step with the page / without"}, "2 pairs of 4"),
]


@pytest.mark.parametrize(("tool", "flags", "figures", "shown"), TOOLS, ids=["overheads", "dashboard_cost"])
def test_tools_measure_and_record(small_text, tmp_path, capsys, tool, flags, figures, shown):
    path = tmp_path / "records.jsonl"
    tool.main([*flags.split(), str(small_text), "--record", str(path)])
    (record,) = read_records(path)
    assert figures <= record.figures.keys()
    assert "--record" not in record.command
    assert shown in capsys.readouterr().out


def test_scaling_within_a_minute(tmp_path, capsys, monkeypatch):
    """Of a small model on one and two threads; what finds no time is named."""
    monkeypatch.setattr(scale, "BATCHES", {"tiny": (4, 16)})
    scale.main(["--counts", "1,2", "--minutes", "1", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "scale.json").read_text())
    model = written["models"]["tiny"]
    assert {*model["seconds a step"]["barrier-free"]} == {"1", "2"}
    runs = sum(len(times) for kind, times in model["seconds a step"].items() if kind != "predicted")
    assert runs + len(model["left out"]) == 2 * len(scale.KINDS)
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    assert "scale.json and scale.png" in capsys.readouterr().out
