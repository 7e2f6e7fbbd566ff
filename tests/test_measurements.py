"""Tests of records of measurements, and that the tables of pages match those that are stored."""

import json
from dataclasses import replace

import pytest
from measurements import DATA, main
from records import Figure, Record, append_records, check_records, command_line, read_records

from daskgpt.profiling.measure import Spread


def test_pages_match_the_data():
    assert main([]) == 0, "write them anew with: python benchmarks/measurements.py --write"


def test_every_file_holds_records():
    for path in DATA.glob("*.jsonl"):
        records = read_records(path)
        assert records
        assert all(record.machine["processor"] and record.versions for record in records)


FIGURES = {"step": Figure.of(Spread.of([0.3, 0.1, 0.2]), "ms", 1e3)}
MACHINE = {"processor": "a processor", "cores": 2}
RECORD = Record(command="python -m daskgpt.bench --preset gpt2", date="2026-11-22", machine=MACHINE, figures=FIGURES)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "all.jsonl"


def test_figures_have_turns_and_statistics():
    figure = RECORD.figures["step"]
    assert figure.turns == (300, 100, 200)
    assert (figure.least, figure.q1, figure.median, figure.q3, figure.largest) == (100, 150, 200, 250, 300)
    assert Figure.of(Spread.of([2.0]), "GB") == Figure.single(2.0, "GB") == Figure("GB", 2.0, n=1)
    assert Figure.single(1234567.0, "").median == 1234570
    assert Figure("ms", least=1, largest=2).median is None  # a range, where somebody told no more
    assert (figure.text(0), Figure.single(1.5, "").text()) == ("200 ms (100 .. 300)", "1.50")


def test_records_round_trip(path):
    other = replace(RECORD, against="PyTorch", note="quiet", settings={"batch_size": 4})
    append_records(path, [RECORD])
    append_records(path, [other, RECORD])
    assert read_records(path) == [RECORD, other, RECORD]
    assert json.loads(path.read_text().splitlines()[0])["figures"]["step"]["median"] == 200


CONTRADICTIONS = [{}, {"median": float("nan")}, {"median": 1, "least": 2, "largest": 3}, {"median": 1, "least": 1}]
CONTRADICTIONS += [{"median": 1, "q1": 1}, {"median": True}, {"median": "1"}, {"median": 2, "turns": (1, 1, 1)}]
CONTRADICTIONS += [{"median": 1, "turns": (1, 1), "n": 3}, {"median": 1, "least": 0, "largest": 2, "turns": (1, 1)}]
CONTRADICTIONS += [{"median": 1, "q1": 2, "q3": 0}]


@pytest.mark.parametrize("values", CONTRADICTIONS, ids=str)
def test_a_figure_that_contradicts_itself_is_refused(values):
    with pytest.raises(ValueError, match="records: a figure must"):
        Figure("ms", **values)


LACKING = [{"command": ""}, {"date": "yesterday"}, {"figures": {}}, {"machine": {"cores": 2}}, {"note": 3}]


@pytest.mark.parametrize("change", LACKING, ids=str)
def test_a_record_that_lacks_something_is_refused(change):
    with pytest.raises(ValueError, match=r"^records: .*; got "):
        replace(RECORD, **change)


NO_RECORDS = [b"{}", b"[1]", b"no json", b'{"figures": {"a": 1}}', RECORD.line()[:-2], RECORD.line()[:1] + b'"x": 1, ']


@pytest.mark.parametrize("line", NO_RECORDS)
def test_invalid_records_are_not_written(path, line):
    path.write_bytes(RECORD.line() + line + b"\n")
    with pytest.raises(ValueError, match="line=2"):
        check_records(path)
    with pytest.raises(ValueError, match="records: "):
        append_records(path, [RECORD])
    assert path.read_bytes() == RECORD.line() + line + b"\n"


def test_recorded_command_repeats_the_measurement():
    words = ["--preset", "gpt2", "--record", "all.jsonl", "--log", "my file"]
    assert command_line("python -m daskgpt.bench", words) == "python -m daskgpt.bench --preset gpt2 --log 'my file'"
    assert command_line("python x.py", ["--record=x", "--steps", "2", "y", "--z"]) == "python x.py --steps 2 y --z"
