"""Tests of the study: its grid, its results, its table and figures from numbers, and a small one in process."""

import json
import sys
from dataclasses import asdict, replace
from itertools import product

import pytest

from daskgpt.config.model import ModelConfig, preset
from daskgpt.profiling import study
from daskgpt.profiling.measure import Spread, job_of, rounded
from daskgpt.profiling.study import (
    BARRIERS,
    DIALS,
    Results,
    StudyConfig,
    base_point,
    caption,
    chosen_grid,
    default_grid,
    figures,
    sequential,
    table_of,
)
from daskgpt.schedulers import machine
from daskgpt.study import main, parser, settings

MODEL = ModelConfig(blocks=1, heads=2, channels=32, vocabulary=64, positions=16)
STUDY = StudyConfig(batch_size=4, sequence_length=64)
BASE = base_point(STUDY, 2)
FIGURES = ["points", "threads"]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a study of the very small model, whose runs were in this process."""
    out = tmp_path_factory.mktemp("study") / "quick"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "run_one", study.run)
        patch.setattr(machine, "busy_cores", lambda: 0.0)
        patch.setattr(machine, "usable_cores", lambda: 2)
        with pytest.MonkeyPatch.context() as no_figures:
            no_figures.setattr(study, "write", lambda *_: None)
            assert main(["--quick", "--out", str(out)]) == 0
        before = (out / "results.jsonl").read_text()
        whole = before.splitlines(keepends=True)
        (out / "results.jsonl").write_text("".join(whole[:-1]) + whole[-1][:50])  # as a power cut leaves it
        assert main(["--quick", "--out", str(out)]) == 0
    return out, before


def test_a_study_writes_its_results(finished):
    rows = rows_of(finished[0] / "results.jsonl")
    assert len({tuple(row[dial] for dial in DIALS) for row in rows}) == len(rows) == 4 * len({1, study.usable_cores()})
    assert {row["barrier"] for row in rows} == set(BARRIERS)
    for row in rows:
        assert row["step_ms_q1"] <= row["step_ms"] <= row["step_ms_q3"]
        assert row["steps"] >= (1 if row["barrier"] == "none" else 3)
        assert sum(row[f"{name}_share"] for name in ("kernel", "inside", "scheduling", "waiting")) == pytest.approx(
            1, abs=0.05
        )
        assert row["critical_path_ms"] > 0
        assert row["machine"]["processor"]
        assert {"python", "daskgpt", "numpy", "dask"} <= row["versions"].keys()
    assert len({row["loss"] for row in rows}) == 1, "the same bits from every dial"
    assert {row["overlap"] for row in rows if row["barrier"] == "layer"} == {0.0}


def test_what_is_in_the_results_is_not_run_again(finished):
    out, before = finished
    *kept, lost = before.splitlines(keepends=True)
    now = (out / "results.jsonl").read_text()
    assert now.startswith("".join(kept))
    assert len(now.splitlines()) == len(before.splitlines())
    new, old = rows_of(out / "results.jsonl")[-1], json.loads(lost)
    assert all(new[name] == old[name] for name in (*DIALS, "repetition", "loss", "batch_size"))


def test_a_study_writes_a_table_and_figures(finished):
    out, _ = finished
    lines = (out / "table.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("- speedup over threads 1, scheduler threads, ")]
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(rows_of(out / "results.jsonl"))
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in FIGURES)
    assert all((out / f"{name}.svg").read_bytes().startswith(b"<?xml") for name in FIGURES)


REFUSED = [("--barrier layers", "barrier=layers"), ("--batch-chunk 5", "batch_chunk=5"), ("--threads two", "2")]
REFUSED += [("--scheduler thread", "scheduler=thread"), ("--repetitions 0", "repetitions=0"), ("--barriers step", "2")]
REFUSED += [("--minutes 1", "2"), ("--record x", "2"), ("--preset tyni", "preset=tyni")]


@pytest.mark.parametrize(("flags", "keyword"), REFUSED)
def test_bad_input_is_refused_at_once(flags, keyword, tmp_path, monkeypatch):
    with pytest.raises((ValueError, SystemExit), match=keyword):
        main([*flags.split(), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "daskgpt.profiling.plots", raising=False)
    with pytest.raises(RuntimeError, match="matplotlib must be installed"):
        main(["--quick", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_in_a_process_of_its_own_says_why():
    point = replace(BASE, batch_chunk=3, sequence_chunk=16)
    with pytest.raises(RuntimeError, match=r"exit code 1, ValueError: DataflowConfig: batch_chunk must"):
        study.run_one(MODEL, replace(STUDY, sequence_length=16), point)


def test_runs_that_fail_are_told(tmp_path, monkeypatch, capsys):
    def failing(model, _, point):
        if point.threads == 1:
            raise RuntimeError("no")
        return {"step_ms": 1.0}

    monkeypatch.setattr(study, "run_one", failing)
    points, written = [BASE, replace(BASE, threads=1)], []
    monkeypatch.setattr(study, "write", lambda results: written.append(len(results.rows)))
    results = Results(tmp_path / "results.jsonl", MODEL, STUDY)
    failures = study.run_all(replace(STUDY, repetitions=3), points, results)
    assert (len(failures), len(results.rows), written) == (3, 3, [1, 2, 3])


def test_the_default_grid_asks_five_questions():
    points = default_grid(STUDY, 2)
    assert len(points) == len(set(points)) == 19
    assert [p.engine for p in points if p.scheduler == "local"] == ["ranks", "tasks"]
    assert [getattr(BASE, dial) for dial in DIALS] == [2, "threads", "step", 2, 64, "block", "ranks"]
    assert {(p.threads, p.barrier) for p in points if p.scheduler == "threads"} >= set(product((1, 2), BARRIERS))
    assert {(4, 64), (4, 16), (2, 16), (1, 64), (1, 16)} <= {(p.batch_chunk, p.sequence_chunk) for p in points}
    assert {(p.barrier, p.grain) for p in points} >= {("step", "segment"), ("step", "chunk"), ("layer", "kernel")}
    assert ("layer", "block") not in {(p.barrier, p.grain) for p in points}
    assert {(p.scheduler, p.threads) for p in points} == {("threads", 1), ("threads", 2), ("sync", 1), ("local", 2)}
    for point in points:
        dataflow = job_of(replace(MODEL, positions=64), STUDY, point).dataflow
        assert (dataflow.batch_chunk, dataflow.sequence_chunk) == (point.batch_chunk, point.sequence_chunk)


def test_chosen_values_are_combined():
    points = chosen_grid(STUDY, 2, {"threads": [1, 2], "barrier": ["layer", "none"], "grain": ["kernel", "block"]})
    assert len(points) == 2 * (1 + 2)  # fork-join has one grain
    assert {(p.scheduler, p.batch_chunk) for p in points} == {("threads", 2)}
    assert base_point(StudyConfig(batch_size=3), 2).batch_chunk == 3
    assert [p.threads for p in chosen_grid(STUDY, 2, {"threads": [0]})] == [study.usable_cores()]
    auto = parser().parse_args(["--threads", "1,2", "--batch-chunk", "auto,2"])
    assert (auto.threads, auto.batch_chunk) == ([1, 2], [0, 2])


def test_thread_counts_and_quick_settings():
    counts = [sorted({p.threads for p in default_grid(STUDY, cores)}) for cores in (1, 2, 6, 8)]
    assert counts == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    model, quick = settings(parser().parse_args(["--quick", "--steps", "7", "--channels", "16"]))
    assert (model.blocks, model.channels, quick.steps, quick.batch_size, quick.repetitions) == (1, 16, 7, 4, 1)
    assert settings(parser().parse_args(["--preset", "gpt2"])) == (preset("gpt2"), StudyConfig())


# Table and figures of numbers by hand.


def row(point, repetition, value, **measured):
    settings = asdict(MODEL) | {name: getattr(STUDY, name) for name in study.SHARED} | asdict(point)
    numbers = {"groups": 1, "repetition": repetition, "step_ms": value, "critical_path_ms": value / 2, "peak_gb": 0.25}
    numbers |= dict.fromkeys((*study.SHARES, *study.OVERLAPS), 0.25) | {"others_cores": 0.0}
    numbers |= {"tasks": 10, "loss": 1.5, "date": "2020"}
    machine = {"machine": {"processor": "a cpu", "cores": 2}, "versions": {"daskgpt": "1"}}
    return settings | numbers | machine | measured


def results_of(tmp_path, rows):
    """Return the results of a file with these rows."""
    path = tmp_path / "results.jsonl"
    groups = Results(tmp_path / "none", MODEL, STUDY).shared["groups"]
    path.write_text("".join(json.dumps(line | {"groups": groups}) + "\n" for line in rows))
    return Results(path, MODEL, STUDY)


def cells(points):
    """Return the table as dictionaries, by what differs between points."""
    head, *lines = table_of(points)
    return [dict(zip(head, line)) for line in lines]


def ys(axes):
    return [[round(float(y), 6) for y in line.get_ydata()] for line in axes.lines]


def test_speedup_and_efficiency_by_threads(tmp_path):
    times = {1: 40.0, 2: 25.0}
    rows = [row(replace(BASE, barrier="phase", threads=n), k, ms) for n, ms in times.items() for k in range(3)]
    points = results_of(tmp_path, rows).points
    one, two = cells(points)
    assert (one["ms a step"], one["speedup"], one["efficiency"], one["runs"]) == (
        "40.00 (40.00 .. 40.00)",
        "1.00",
        "100%",
        "3",
    )
    assert (two["speedup"], two["efficiency"], two["critical path (ms)"], two["kernels"]) == (
        "1.60",
        "80%",
        "12.5",
        "25.0%",
    )
    drawn = figures(points)
    runtime, speedup, efficiency = drawn["threads"].axes
    assert ys(runtime)[0] == [40, 25]
    assert ys(speedup) == [[1, 1.6], [1, 2]]
    assert ys(efficiency) == [[100, 80], [100, 100]]
    assert set(drawn) == {"points", "threads"}


def test_the_base_is_named_and_one_for_all(tmp_path):
    rows = [
        row(replace(BASE, barrier=barrier, threads=n), 0, 40.0 / n) for barrier in ("phase", "step") for n in (2, 4)
    ]
    results = results_of(tmp_path, rows)
    assert sequential(results.points) == ()
    assert "no run on one thread, so no speedup" in caption(results)
    assert [line["speedup"] for line in cells(results.points)] == [""] * 4
    assert [len(figure.axes) for figure in figures(results.points).values()] == [1, 3]
    rows += [row(replace(BASE, barrier="step", threads=1), 0, 30.0)]
    assert median_of(results_of(tmp_path, rows)) == 30.0
    rows += [row(replace(BASE, barrier="phase", threads=1), 0, 40.0)]
    results = results_of(tmp_path, rows)
    assert median_of(results) == 30.0
    over = (
        "speedup over threads 1, scheduler threads, barrier step (tasks), batch chunk 2, sequence chunk 64, grain block"
    )
    assert over in caption(results)
    assert ys(figures(results.points)["threads"].axes[1]) == [[0.75, 1.5, 3], [1, 1.5, 3], [1, 2, 4]]


def median_of(results):
    return Spread.of(row["step_ms"] for row in sequential(results.points)).median


def test_a_busy_machine_and_different_losses_are_shown(tmp_path):
    rows = [row(BASE, n, 10.0) for n in range(3)]
    assert len(caption(results_of(tmp_path, rows))) == 3
    rows[1] |= {"others_cores": 1.25, "loss": 1.25}
    results = results_of(tmp_path, rows)
    assert caption(results)[-1] == "other programs kept up to 1.25 cores busy"
    assert cells(results.points)[0]["loss"] == "1.25 or 1.5"


def test_points_are_drawn_in_order_with_what_threads_did(tmp_path):
    rows = [row(replace(BASE, scheduler="local", engine="tasks"), 0, 80.0)]
    rows += [
        row(replace(BASE, grain=grain), 0, ms, kernel_share=0.5) for grain, ms in (("block", 10.0), ("kernel", 30.0))
    ]
    rows += [row(replace(BASE, barrier="none"), 0, 8.0, overlap=0.5, steps_overlap=0.0)]
    rows += [row(replace(BASE, scheduler="sync", threads=1), n, 40.0) for n in (0, 1)]
    results = results_of(tmp_path, rows)
    assert [line["ms a step"].split()[0] for line in cells(results.points)] == [
        "40.00",
        "30.00",
        "10.00",
        "8.00",
        "80.00",
    ]
    (axes,) = figures(results.points)["points"].axes
    assert [bar.get_width() for bar in axes.patches[:5]] == [10, 15, 5, 2, 20]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "threads 1, scheduler sync, barrier step (tasks), grain block"
    assert labels[-1] == "threads 2, scheduler local, barrier step (tasks), grain block, engine tasks"


def test_medians_and_quartiles():
    values = Spread.of([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (values.quartiles, values.text()) == ((2.0, 3.0, 4.0), "3.00 ms (2.00 .. 4.00)")
    shown = {0.1234: "0.123", 1: "1.00", 1.234: "1.23", 100: "100.0", 1000: "1,000", 12345.6: "12,346"}
    assert {value: rounded(value) for value in shown} == shown
    with pytest.raises(ValueError, match="value"):
        Spread(())


def test_results_of_another_study_are_refused(tmp_path):
    results = results_of(tmp_path, [row(BASE, 0, 1.5)])
    assert [*results.points] == [BASE]
    with pytest.raises(ValueError, match="channels=16, and channels=32"):
        Results(results.path, replace(MODEL, channels=16), STUDY)
    for line in ('{"date": 1}', "[1]", "no json", "{}"):
        results.path.write_text(line + "\n")
        with pytest.raises(ValueError, match="one study and version"):
            Results(results.path, MODEL, STUDY)


def test_timelines_of_every_barrier_are_written_apart_and_on_one_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("daskgpt.profiling.pages.page_of", lambda traces, title: "\n".join([title, *traces]))
    assert main(["--quick", "--timelines", "--window", "2", "--out", str(tmp_path / "out")]) == 0
    pages = {f"{name}.html" for name in (*BARRIERS, "barriers")}
    traces = {f"{name}.json" for name in BARRIERS}
    assert {path.name for path in (tmp_path / "out").iterdir()} == pages | traces
    title, *names = (tmp_path / "out" / "barriers.html").read_text().splitlines()
    assert title == "2 steps: 1 x 32 (15,328 parameters), 4 x 16 tokens a step, float32"
    assert names == [f"barrier {label}" for label in BARRIERS.values()]
    assert capsys.readouterr().out.count("critical path") == 4
