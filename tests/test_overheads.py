"""What a run takes besides its steps is told, and the tool that measures it at the defaults runs."""

from __future__ import annotations

import json

import overheads
import pytest
from command_lines import write_text
from small_runs import fit

from daskgpt.instruments.records import read_records
from daskgpt.training.besides import PARTS

SMALL = "--blocks 1 --heads 2 --channels 16 --batch-size 4 --sequence-length 16 --warmup 2 --steps 6"
SMALL += " --validation-batches 1 --validate-every 2 --sample-every 3 --sample-tokens 4"


def test_a_result_tells_what_was_no_step(tmp_path):
    text = write_text(tmp_path)
    result = fit(text, tmp_path / "run", validate_every=4)
    assert list(result.besides) == list(PARTS)
    assert min(result.besides[part] for part in ("validation", "logs", "checkpoints")) > 0
    assert result.besides["samples"] == 0, "only the command line shows some"
    assert sum(result.besides.values()) < result.seconds
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validations = sum(record.get("validation_s", 0.0) for record in records)
    assert result.besides["validation"] >= validations - 1e-3 * len(records), "which are rounded to milliseconds"


@pytest.mark.slow
def test_the_overheads_of_a_run_are_measured_and_recorded(tmp_path, capsys):
    data = write_text(tmp_path)
    path = tmp_path / "records.jsonl"
    overheads.main([*SMALL.split(), "--data", str(data), "--turns", "2", "--record", str(path)])
    (found,) = read_records(path)
    assert {"validation", "logs", "samples", "checkpoints", overheads.AT_THE_END} < set(found.figures)
    assert all(figure.median > 0 for figure in found.figures.values())
    assert found.command.startswith("python tests/overheads.py --blocks 1")
    assert "--record" not in found.command
    assert "turn 1: " in capsys.readouterr().out
