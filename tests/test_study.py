"""Tests of `study`: its grid, its table and figure from numbers, and a small one in process."""

import contextlib
import io
import json
import signal
import sys
from dataclasses import asdict, replace

import pytest
from full_disk import full_disk

from daskgpt import bench, study
from daskgpt.config.model import ModelConfig
from daskgpt.config.stopping import ASKING
from daskgpt.profiling.measure import Spread, rounded
from daskgpt.schedulers import machine
from daskgpt.study import BARRIERS, DIALS, base_point, caption, described, figure_of, grid, main, table_of

MODEL = ModelConfig(blocks=1, heads=2, channels=32, vocabulary=64, positions=16)
STUDY = study.StudyConfig(batch_size=4, sequence_length=64)
BASE = base_point(STUDY, 2)
ABOUT = "a model and a batch"


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_process(flags, threads):
    """What a process of its own would measure."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert bench.main([*flags, "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a study of the very small model, whose runs were in this process."""
    out = tmp_path_factory.mktemp("study") / "quick"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "run_one", in_process)
        patch.setattr(machine, "busy_cores", lambda: 0.0)
        patch.setattr(machine, "usable_cores", lambda: 2)
        assert main(["--quick", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("number", ASKING)
def test_a_signal_ends_the_process_of_a_run(number, monkeypatch):
    before = signal.signal(number, lambda *_: None)
    monkeypatch.setattr(study.subprocess, "run", lambda *_, **__: signal.raise_signal(number))
    with pytest.raises(KeyboardInterrupt):
        study.run_one([], 1)
    signal.signal(number, before)


def test_a_study_writes_results_a_table_and_figures(finished):
    rows = rows_of(finished / "results.jsonl")
    assert len({tuple(row["point"][dial] for dial in DIALS) for row in rows}) == len(rows) == 4 * 2
    assert {row["point"]["barrier"] for row in rows} == set(BARRIERS)
    for row in rows:
        figures = {name: figure["median"] for name, figure in row["figures"].items()}
        assert row["figures"]["step"]["n"] >= (1 if row["point"]["barrier"] == "none" else 3)
        shares = 1 - figures["overhead"] + figures["inside"] + figures["scheduling"] + figures["waiting"]
        assert shares == pytest.approx(1, abs=0.05)
        assert figures["critical_path"] > 0
        assert row["machine"]["processor"]
        assert {"python", "daskgpt", "numpy", "dask"} <= row["versions"].keys()
        assert (figures["overlap"] == 0) >= (row["point"]["barrier"] == "layer")
    assert len({row["settings"]["loss"] for row in rows}) == 1, "the same bits from every dial"
    lines = (finished / "table.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(rows)
    assert (finished / "threads.png").read_bytes().startswith(b"\x89PNG")
    assert (finished / "threads.svg").read_bytes().startswith(b"<?xml")
    with pytest.raises(ValueError, match=f"a folder of its own; got out={finished}"):
        main(["--quick", "--out", str(finished)])


REFUSED = [("--barrier layers", "barrier=layers"), ("--batch-chunk 5", "batch_chunk=5"), ("--threads two", "2")]
REFUSED += [("--scheduler thread", "scheduler=thread"), ("--repetitions 0", "repetitions=0")]


@pytest.mark.parametrize(("flags", "keyword"), REFUSED)
def test_bad_input_is_refused_at_once(flags, keyword, tmp_path):
    with pytest.raises((ValueError, SystemExit), match=keyword):
        main([*flags.split(), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_matplotlib_is_needed_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "daskgpt.profiling.plots", raising=False)
    with pytest.raises(RuntimeError, match="matplotlib must be installed"):
        main(["--quick", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_run_in_a_process_of_its_own_measures_or_says_why(monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    model = study.flags_of(asdict(MODEL))
    quick, small = replace(STUDY, sequence_length=16, steps=1), replace(BASE, sequence_chunk=16)
    assert study.run_one([*model, *study.bench_flags(quick, small)], 2)["settings"]["batch_chunk"] == 2
    with pytest.raises(RuntimeError, match=r"exit code 2, DataflowConfig: batch_chunk must"):
        study.run_one([*model, *study.bench_flags(quick, replace(small, batch_chunk=3))], 2)


def test_runs_that_fail_are_told(tmp_path, monkeypatch):
    def failing(flags, threads):
        if threads == 1:
            raise RuntimeError("no")
        return {"figures": {}}

    written = []
    monkeypatch.setattr(study, "run_one", failing)
    monkeypatch.setattr(study, "write", lambda results, *_: written.append(len(results[BASE])))
    points = [BASE, replace(BASE, threads=1)]
    results, failures = study.run_all(points, replace(STUDY, repetitions=3), tmp_path, ABOUT)
    assert (len(failures), [*results], written) == (3, [BASE], [1, 2, 3])
    assert [row["repetition"] for row in rows_of(tmp_path / "results.jsonl")] == [0, 1, 2]


def test_chosen_values_are_combined():
    chosen = {"threads": [1, 2], "barrier": ["layer", "none"], "grain": ["kernel", "block"]}
    points = grid(STUDY, 2, chosen)
    assert len(points) == 2 * (1 + 2)  # fork-join has one grain
    assert {(p.scheduler, p.batch_chunk, p.sequence_chunk) for p in points} == {("threads", 2, 64)}
    assert [getattr(BASE, dial) for dial in DIALS] == ["threads", "step", "block", "ranks", 2, 64, 2]
    assert base_point(study.StudyConfig(batch_size=3), 2).batch_chunk == 3
    assert [p.threads for p in grid(STUDY, 2, {"threads": [0]})] == [study.usable_cores()]
    engines = grid(STUDY, 2, {"scheduler": ["sync", "local"], "engine": ["ranks", "tasks"]})
    wanted = [("sync", 1, "ranks"), ("local", 2, "ranks"), ("local", 2, "tasks")]
    assert [(p.scheduler, p.threads, p.engine) for p in engines] == wanted
    auto = study.parser().parse_args(["--threads", "1,2", "--batch-chunk", "auto,2"])
    assert (auto.threads, auto.batch_chunk) == ([1, 2], [0, 2])
    assert [study.thread_counts(cores) for cores in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_a_cluster_at_an_address_has_its_own_threads_and_both_engines(cluster):
    cluster.have(2)
    points = grid(STUDY, 1, {"scheduler": [cluster.address], "engine": ["ranks", "tasks"], "threads": [1, 3]})
    assert [(point.engine, point.threads) for point in points] == [("ranks", 2), ("tasks", 2)]
    assert [described(point, points) for point in points] == ["engine ranks", "engine tasks"]


# Table and figure of numbers by hand.


def runs_of(*runs):
    """The runs of points: point, milliseconds of a step, and other settings."""
    points = {}
    for point, ms, more in runs:
        values = {"step": ms, "critical_path": ms / 2, "peak": 0.25} | dict.fromkeys(study.SHARES, 0.25)
        row = {"date": "2020", "machine": {"processor": "a cpu", "cores": 2}}
        row["figures"] = {name: {"median": value} for name, value in values.items()}
        row["settings"] = {"others_cores": 0.0, "tasks": 10, "loss": 1.5} | more
        points.setdefault(point, []).append(row)
    return points


def cells(points):
    """The table as dictionaries."""
    head, *lines = table_of(points)
    return [dict(zip(head, line)) for line in lines]


def ys(axes):
    return [[round(float(y), 6) for y in line.get_ydata()] for line in axes.lines]


def test_speedup_and_efficiency_by_threads():
    times = {1: 40.0, 2: 25.0}
    points = runs_of(*[(replace(BASE, barrier="phase", threads=n), ms, {}) for n, ms in times.items() for _ in "abc"])
    one, two = cells(points)
    assert (one["ms a step"], one["speedup"], one["runs"]) == ("40.00 (40.00 .. 40.00)", "1.00", "3")
    names = ("speedup", "efficiency", "critical path (ms)", "tasks", "without a kernel")
    assert [two[name] for name in names] == ["1.60", "80%", "12.5", "10", "25.0%"]
    runtime, speedup, efficiency = figure_of(points).axes
    assert ys(runtime)[0] == [40, 25]
    assert ys(speedup) == [[1, 1.6], [1, 2]]
    assert ys(efficiency) == [[100, 80], [100, 100]]


def test_the_base_is_named_and_one_for_all():
    runs = [(replace(BASE, barrier=one, threads=n), 40.0 / n, {}) for one in ("phase", "step") for n in (2, 4)]
    points = runs_of(*runs)
    assert "no run on one thread, so no speedup" in caption(points, ABOUT)
    assert [line["speedup"] for line in cells(points)] == [""] * 4
    runs += [(replace(BASE, barrier="step", threads=1), 30.0, {})]
    runs += [(replace(BASE, barrier="phase", threads=1), 40.0, {})]
    points = runs_of(*runs)
    assert study.base_of(points) == 30.0
    barrier, cut = "barrier step (tasks)", "grain block, batch chunk 2, sequence chunk 64"
    assert f"speedup over scheduler threads, {barrier}, {cut}, threads 1" in caption(points, ABOUT)
    assert ys(figure_of(points).axes[1]) == [[0.75, 1.5, 3], [1, 1.5, 3], [1, 2, 4]]


def test_numbers_are_rounded_and_there_must_be_one():
    shown = {0.1234: "0.123", 1: "1.00", 1.234: "1.23", 100: "100.0", 1000: "1,000", 12345.6: "12,346"}
    assert {value: rounded(value) for value in shown} == shown
    with pytest.raises(ValueError, match="value"):
        Spread(())


def test_files_of_a_study_are_complete_or_absent(tmp_path):
    with full_disk(20_000), pytest.raises(OSError, match=r"study: all of the file must be written; got .*threads\.png"):
        study.write(runs_of((BASE, 1.5, {})), tmp_path, ABOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]
