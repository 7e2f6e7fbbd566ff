"""Tests of instruments that measure real processes: threads by number, what workers send, and the tools for records."""

import dashboard_cost
import overheads
import prepare_rate
import pytest
from records import read_records

MODEL = "--blocks 1 --heads 2 --channels 16 --batch-size 4 --sequence-length 16"
SHORT = f"{MODEL} --warmup 2 --steps 6 --validation-batches 1 --validate-every 2 --sample-every 3 --sample-tokens 4"


TOOLS = [
    (overheads, f"{SHORT} --turns 2 --data", {"validation", "logs", "samples", overheads.AT_THE_END}, "turn 1: "),
    (prepare_rate, "--encoding bytes --turns 1 --text", {"prepare", "tiktoken", "ratio"}, "median ratio"),
    (dashboard_cost, f"{MODEL} --pairs 2 --window 4 --data", {"a step with the page / without"}, "2 pairs of 4"),
]


@pytest.mark.parametrize(
    ("tool", "flags", "figures", "shown"), TOOLS, ids=["overheads", "prepare_rate", "dashboard_cost"]
)
def test_tools_measure_and_record(small_text, tmp_path, capsys, tool, flags, figures, shown):
    path = tmp_path / "records.jsonl"
    tool.main([*flags.split(), str(small_text), "--record", str(path)])
    (record,) = read_records(path)
    assert figures <= record.figures.keys()
    assert "--record" not in record.command
    assert shown in capsys.readouterr().out
