"""Records of measurements: what a line holds, what is refused, and that a file has whole lines whatever stops it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from daskgpt import bench, study
from daskgpt.instruments.records import (
    Figure,
    Record,
    append_records,
    check_records,
    command_line,
    measured,
    read_records,
)
from daskgpt.instruments.statistics import Spread

RECORD = Record(
    command="python -m daskgpt.bench --preset gpt2",
    date="2026-11-22",
    machine={"processor": "a processor", "cores": 2},
    figures={"step": Figure.of(Spread.of([0.3, 0.1, 0.2]), "ms", 1e3)},
)
SMALL = "--blocks 1 --heads 2 --channels 16 --batch-size 2 --sequence-length 16 --steps 3 --warmup 1 --recorded 1"


def test_a_figure_has_its_turns_and_what_follows_from_them():
    figure = RECORD.figures["step"]
    assert figure.turns == (300, 100, 200)
    assert (figure.least, figure.q1, figure.median, figure.q3, figure.largest) == (100, 150, 200, 250, 300)
    assert Figure.of(Spread.of([2.0]), "GB") == Figure.single(2.0, "GB") == Figure("GB", 2.0, n=1)
    assert Figure("ms", least=1, largest=2).median is None  # a range, where somebody told no more


def test_what_is_written_is_read(tmp_path):
    path, other = tmp_path / "all.jsonl", replace(RECORD, against="PyTorch", note="quiet", settings={"batch_size": 4})
    append_records(path, [RECORD])
    append_records(path, [other, RECORD])
    assert read_records(path) == [RECORD, other, RECORD]
    assert json.loads(path.read_text().splitlines()[0])["figures"]["step"]["median"] == 200


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"median": float("nan")},
        {"median": 1, "least": 2, "largest": 3},
        {"median": 1, "least": 1},
        {"median": True},
        {"median": "1"},
        {"median": 2, "turns": (1, 1, 1)},
        {"median": 1, "turns": (1, 1), "n": 3},
        {"median": 1, "least": 0, "largest": 2, "turns": (1, 1)},
        {"median": 1, "q1": 2, "q3": 0},
    ],
    ids=str,
)
def test_a_figure_that_contradicts_itself_is_refused(values):
    with pytest.raises(ValueError, match="records: a figure must"):
        Figure("ms", **values)


@pytest.mark.parametrize(
    "change", [{"command": ""}, {"date": "yesterday"}, {"figures": {}}, {"machine": {"cores": 2}}, {"note": 3}], ids=str
)
def test_a_record_that_lacks_something_is_refused(change):
    with pytest.raises(ValueError, match=r"^records: .*; got "):
        replace(RECORD, **change)


@pytest.mark.parametrize(
    "line", [b"{}", b"[1]", b"no json", b'{"figures": {"a": 1}}', RECORD.line()[:-2], RECORD.line()[:1] + b'"x": 1, ']
)
def test_what_is_no_record_is_refused_and_nothing_is_added(tmp_path, line):
    path = tmp_path / "all.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(
        ValueError, match=r"^records: every line of the file must be a record; got record=.*, line=1\. "
    ):
        check_records(path)
    with pytest.raises(ValueError, match="records: "):
        append_records(path, [RECORD])
    assert path.read_bytes() == line + b"\n"


def test_a_line_that_a_power_cut_left_is_no_record_and_is_written_over(tmp_path):
    path = tmp_path / "all.jsonl"
    path.write_bytes(RECORD.line() + RECORD.line()[:50])
    assert read_records(path) == [RECORD]
    append_records(path, [RECORD])
    assert path.read_bytes() == RECORD.line() * 2


@pytest.mark.parametrize("fails", [0, 1, 40])
def test_where_there_is_no_room_the_file_stays_as_it_was(tmp_path, monkeypatch, fails):
    path, write = tmp_path / "all.jsonl", os.pwrite
    append_records(path, [RECORD])

    def full(descriptor, text, at):
        if fails:
            write(descriptor, text[:fails], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="all of the file must be written"):
        append_records(path, [RECORD])
    assert path.read_bytes() == RECORD.line()


def test_several_processes_add_whole_lines(tmp_path):
    path = tmp_path / "all.jsonl"
    script = "import sys; from daskgpt.instruments.records import append_records, read_records\n"
    script += "(record,) = read_records(sys.argv[1])\nfor _ in range(20): append_records(sys.argv[2], [record])"
    append_records(tmp_path / "one.jsonl", [RECORD])
    command = [sys.executable, "-c", script, str(tmp_path / "one.jsonl"), str(path)]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert read_records(path) == [RECORD] * 60


def test_the_command_is_what_somebody_types_to_measure_the_same():
    words = ["--preset", "gpt2", "--record", "all.jsonl", "--json", "--against", "llm.c", "my program"]
    assert command_line("daskgpt.bench", words) == "python -m daskgpt.bench --preset gpt2 --against llm.c 'my program'"
    assert command_line("daskgpt.bench", ["--record=x", "--scaling"]) == "python -m daskgpt.bench --scaling"


def test_a_measurement_says_where_it_was_made():
    found = measured("daskgpt.bench", [], RECORD.figures, {"threads": 2, "others_cores": None})
    assert found.machine["cores"] >= 1
    assert set(found.versions) >= {"python", "daskgpt", "numpy", "numba", "dask", "distributed"}
    assert found.settings == {"threads": 2}


@pytest.mark.parametrize(
    ("flags", "figures"),
    [
        ("", {"step", "forward", "backward", "update", "overhead", "peak"}),
        ("--scaling --threads 1", {"step_1", "speedup_1", "efficiency_1"}),
        ("--generation --positions 40", {"copy", "float32_1_10_step", "bfloat16_8_10_share", "flat_float32"}),
    ],
)
def test_bench_records_what_it_prints(tmp_path, capsys, flags, figures):
    path = tmp_path / "all.jsonl"
    assert bench.main([*SMALL.split(), *flags.split(), "--record", str(path)]) == 0
    (found,) = read_records(path)
    assert found.figures.keys() >= figures
    assert found.command == " ".join(["python -m daskgpt.bench", SMALL, flags]).strip()
    if not flags:
        assert len(found.figures["step"].turns) == 3
        assert found.settings["batch_size"] == 2
    assert capsys.readouterr().out


def test_a_study_records_its_points(tmp_path):
    path, out = tmp_path / "all.jsonl", tmp_path / "study"
    words = ["--quick", "--threads", "1", "--barrier", "layer,step", "--repetitions", "2", "--out", str(out)]
    assert study.main([*words, "--record", str(path)]) == 0
    found = read_records(path)
    assert [record.settings["barrier"] for record in found] in (["layer", "step"], ["step", "layer"])
    assert all(len(record.figures["step"].turns) == 2 for record in found)


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (bench.main, "--plan --record {folder}/new", "bench: --record must come without --plan"),
        (bench.main, "--record {folder}", "records: --record must name a file"),
        (bench.main, "--record {folder}/none/new", "records: --record must name a file"),
        (study.main, "--timelines --record {folder}/new", "study: --record must come without --timelines"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_runs(tmp_path, main, flags, message):
    with pytest.raises(ValueError, match=message):
        main(flags.format(folder=tmp_path).split())
    assert list(tmp_path.iterdir()) == []
