"""Tests of the study: its grid, its table, what its report concludes from numbers, and a small one in process."""

import csv
import re
import sys
from dataclasses import asdict, replace
from itertools import product

import pytest

from daskgpt.config.model import ModelConfig, preset
from daskgpt.profiling import study
from daskgpt.profiling.records import read_records, rounded
from daskgpt.profiling.report import SECTIONS, compare, write_report
from daskgpt.profiling.study import (
    BARRIERS,
    COLUMNS,
    DIALS,
    Rows,
    StudyConfig,
    Table,
    base_point,
    chosen_grid,
    default_grid,
    job_of_point,
    speedups,
    spread,
)
from daskgpt.schedulers import machine
from daskgpt.study import main, parser, settings

MODEL = ModelConfig(blocks=1, heads=2, channels=32, vocabulary=64, positions=16)
STUDY = StudyConfig(batch_size=4, sequence_length=64)
BASE = base_point(STUDY, 2)
FIGURES = ["phases", "barriers", "slicing", "grains", "overlap", "schedulers"]


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a study of the very small model, whose runs were in this process."""
    out = tmp_path_factory.mktemp("study") / "quick"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "run_one", study.run)
        patch.setattr(machine, "busy_cores", lambda: 0.0)
        with pytest.MonkeyPatch.context() as no_report:
            no_report.setattr("daskgpt.profiling.report.write_report", lambda *_: None)
            assert main(["--quick", "--out", str(out)]) == 0
        before = (out / "results.csv").read_text()
        (out / "results.csv").write_text("".join(before.splitlines(keepends=True)[:-1]))
        assert main(["--quick", "--out", str(out), "--record", str(out / "records")]) == 0
    return out, before


def test_a_study_writes_its_table(finished):
    rows = rows_of(finished[0] / "results.csv")
    assert tuple(rows[0]) == COLUMNS
    assert len({tuple(row[dial] for dial in DIALS) for row in rows}) == len(rows) == 11
    assert {row["barrier"] for row in rows} == set(BARRIERS)
    for row in rows:
        assert float(row["step_ms_q1"]) <= float(row["step_ms"]) <= float(row["step_ms_q3"])
        assert float(row["tokens_per_s"]) == pytest.approx(64e3 / float(row["step_ms"]), rel=1e-2)
        assert int(row["steps"]) >= (1 if row["barrier"] == "none" else 3)
        shares = [float(row[f"{name}_share"]) for name in ("kernel", "inside", "scheduling", "waiting")]
        assert sum(shares) == pytest.approx(1, abs=0.05)
        assert float(row["critical_path_ms"]) > 0
        assert float(row["recording_cost"]) > -1
        phases = [row[f"{phase}_ms"] for phase in ("forward", "backward", "update")]
        assert all(phases) or row["barrier"] not in ("layer", "phase")
        assert not all(phases) or sum(map(float, phases)) == pytest.approx(float(row["step_ms"]), abs=0.01)
    losses = {}
    for row in rows:
        losses.setdefault((row["batch_chunk"], row["sequence_chunk"]), set()).add(row["loss"])
    assert [len(own) for own in losses.values()] == [1, 1], "the same bits from every dial but the chunks"
    assert {row["overlap"] for row in rows if row["barrier"] == "layer"} == {"0.0"}


def test_what_is_in_the_table_is_not_run_again(finished):
    out, before = finished
    *kept, lost = before.splitlines(keepends=True)
    now = (out / "results.csv").read_text()
    assert now.startswith("".join(kept))
    new, old = rows_of(out / "results.csv")[-1], dict(zip(COLUMNS, next(csv.reader([lost]))))
    assert len(now.splitlines()) == len(before.splitlines())
    assert all(new[name] == old[name] for name in (*DIALS, "repetition", "loss", "batch_size"))
    for record, own in zip(read_records(out / "records"), rows_of(out / "results.csv"), strict=True):
        assert record.settings["barrier"] == own["barrier"]
        assert record.figures["step"].median == pytest.approx(float(own["step_ms"]), rel=1e-5)


def test_the_report_has_every_section_and_figure(finished):
    out, _ = finished
    text = (out / "report.md").read_text()
    assert len(re.findall(r"^## (.*)$", text, re.M)) == 9
    assert "Nothing was run" not in text
    assert re.findall(r"!\[.*\]\((.*)\)", text) == [f"{name}.png" for name in FIGURES]
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in FIGURES)
    assert all((out / f"{name}.svg").read_bytes().startswith(b"<?xml") for name in FIGURES)


REFUSED = [("--barrier layers", "barrier=layers"), ("--batch-chunk 5", "batch_chunk=5"), ("--threads two", "2")]
REFUSED += [("--scheduler thread", "scheduler=thread"), ("--repetitions 0", "repetitions=0"), ("--barriers step", "2")]
REFUSED += [("--minutes -1", "minutes=-1"), ("--timelines --record x", "record"), ("--preset tyni", "preset=tyni")]


@pytest.mark.parametrize(("flags", "keyword"), REFUSED)
def test_bad_input_is_refused_at_once(flags, keyword, tmp_path, monkeypatch):
    with pytest.raises((ValueError, SystemExit), match=keyword):
        main([*flags.split(), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("plots", "report"):
        monkeypatch.delitem(sys.modules, f"daskgpt.profiling.{name}", raising=False)
    with pytest.raises(RuntimeError, match="matplotlib must be installed"):
        main(["--quick", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_in_a_process_of_its_own_says_why():
    point = replace(BASE, batch_chunk=3, sequence_chunk=16)
    with pytest.raises(RuntimeError, match=r"exit code 1, ValueError: DataflowConfig: batch_chunk must"):
        study.run_one(MODEL, replace(STUDY, sequence_length=16), point)


def test_runs_that_fail_are_told_and_repetitions_end_with_the_time(tmp_path, monkeypatch, capsys):
    def failing(model, _, point):
        if point.threads == 1:
            raise RuntimeError("no")
        return {name: 1.0 for name in COLUMNS if name not in Table(tmp_path / "none", MODEL, STUDY).shared}

    monkeypatch.setattr(study, "run_one", failing)
    points, said = [BASE, replace(BASE, threads=1)], []
    for minutes, repetitions in ((0.0, 1), (9.0, 3)):
        table = Table(tmp_path / f"{minutes}.csv", MODEL, STUDY)
        own = replace(STUDY, repetitions=3, minutes=minutes)
        failed = study.run_all(MODEL, own, points, table, lambda table=table: said.append(len(table.rows)), {})
        assert (len(failed), len(table.rows)) == (repetitions, repetitions)
    assert said == [1, 1, 2, 3]


def test_the_default_grid_asks_five_questions():
    points = default_grid(STUDY, 2)
    assert len(points) == len(set(points)) == 22
    assert [p.engine for p in points if p.scheduler == "local"] == ["ranks", "tasks"]
    assert [getattr(BASE, dial) for dial in DIALS] == [2, "threads", "step", 2, 64, "block", "ranks"]
    assert {(p.threads, p.barrier) for p in points if p.scheduler == "threads"} >= set(product((1, 2), BARRIERS))
    assert {(4, 64), (4, 16), (2, 32), (1, 64), (1, 32)} <= {(p.batch_chunk, p.sequence_chunk) for p in points}
    assert {(p.barrier, p.grain) for p in points} >= {("step", "segment"), ("step", "chunk"), ("layer", "kernel")}
    assert ("layer", "block") not in {(p.barrier, p.grain) for p in points}
    assert {(p.scheduler, p.threads) for p in points} == {("threads", 1), ("threads", 2), ("sync", 1), ("local", 2)}
    for point in [*points, *study.quick_grid(STUDY, 2)]:
        dataflow = job_of_point(replace(MODEL, positions=64), STUDY, point).dataflow
        assert (dataflow.batch_chunk, dataflow.sequence_chunk) == (point.batch_chunk, point.sequence_chunk)


def test_chosen_values_are_combined():
    points = chosen_grid(STUDY, 2, {"threads": [1, 2], "barrier": ["layer", "none"], "grain": ["kernel", "block"]})
    assert len(points) == 2 * (1 + 2)  # fork-join has one grain
    assert {(p.scheduler, p.batch_chunk) for p in points} == {("threads", 2)}
    assert base_point(StudyConfig(batch_size=3), 2).batch_chunk == 3
    auto = parser().parse_args(["--threads", "1,2", "--batch-chunk", "auto,2"])
    assert (auto.threads, auto.batch_chunk) == ([1, 2], [0, 2])


def test_thread_counts_slicings_and_quick_settings():
    assert [study.thread_counts(cores) for cores in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert study.slicings(StudyConfig(batch_size=3, sequence_length=6)) == [(3, 6), (3, 3), (1, 6), (1, 3)]
    assert (1, 64) in study.slicings(StudyConfig(batch_size=12, sequence_length=64))
    model, own = settings(parser().parse_args(["--quick", "--steps", "7", "--channels", "16"]))
    assert (model.blocks, model.channels, own.steps, own.batch_size, own.repetitions) == (1, 16, 7, 4, 1)
    assert settings(parser().parse_args(["--preset", "gpt2"])) == (preset("gpt2"), StudyConfig())


# Conclusions from numbers by hand.


def row(point, repetition, value, **found):
    shared = asdict(MODEL) | {"batch_size": 4, "sequence_length": 64, "precision": "float32", "window": 4, "warmup": 2}
    numbers = dict.fromkeys(COLUMNS, 0.25) | shared | asdict(point) | {"repetition": repetition, "seed": 0}
    numbers |= {"step_ms": value, "recording_cost": 0.0, "critical_path_ms": value / 2, "date": "2020", "cpu": "a cpu"}
    numbers |= {"batch_chunk_used": point.batch_chunk, "sequence_chunk_used": point.sequence_chunk}
    numbers |= {"forward_ms": value / 4, "backward_ms": value / 2, "update_ms": value / 4}
    return numbers | {"predicted_ms": None, "loss": "1.5", "tasks": 10, "others_cores": 0.0} | found


def figures(view):
    found = {name: answer(view) for name, (_, answer) in SECTIONS.items()}
    return {name: section.draw() for name, section in found.items() if section.draw}


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Writes a report of rows without its figures, and returns its text."""
    monkeypatch.setattr("daskgpt.profiling.report._save", lambda *_: None)

    def written(rows, quick=False):
        write_report(tmp_path, rows, quick)
        return (tmp_path / "report.md").read_text()

    return written


def test_conclusions_follow_from_the_numbers_whichever_way_round(report):
    for step, layer, longer in ((10.0, 20.0, "layer (fork-join)"), (30.0, 15.0, "step (tasks)")):
        rows = [row(replace(BASE, barrier="step"), n, step + n / 10) for n in range(3)]
        rows += [row(replace(BASE, barrier="layer", grain="kernel"), n, layer + n / 10) for n in range(3)]
        text = report(rows)
        (found,) = re.findall(r"On 2 threads, \*\*a step takes ([\d.]+) times as long with barrier (.*) as with", text)
        assert found == ("1.99", longer)
        assert f"({max(step, layer) + 0.1:.2f} against {min(step, layer) + 0.1:.2f} ms)" in text
        assert text.count("Nothing was run for this question.") == 3  # slicing, grain and schedulers
        rows += [row(replace(BASE, barrier=own, threads=1), n, 50.0) for own in ("step", "layer") for n in range(3)]
        rows += [row(replace(BASE, barrier="step", grain="kernel"), n, layer / 2 + n / 10) for n in range(3)]
        text = report(rows)
        assert "On 2 threads, **a step takes 1.99 times" in text, "on the largest number of threads"
        assert "with barrier layer (fork-join) as with tasks of one kernel (barrier step" in text


def test_speedup_and_efficiency_are_reported_for_every_phase(report):
    times = {1: 40.0, 2: 25.0}
    rows = [row(replace(BASE, barrier="phase", threads=n), k, ms) for n, ms in times.items() for k in range(3)]
    for own in rows[3:]:
        own["forward_ms"] = 5.0
    text = report(rows)
    assert "**a step takes 1.60 times as long with 1 thread as with 2 threads** (40.00 against 25.00 ms)" in text
    assert re.search(r"^\| forward \| 10.00 .* \| 5.00 \(5.00 .. 5.00\) \| 2.00 \| 100% \|$", text, re.M)
    assert re.search(r"^\| total \| 40.00 .* \| 25.00 \(25.00 .. 25.00\) \| 1.60 \| 80% \|$", text, re.M)
    runtime, speedup, efficiency = figures(Rows(rows))["phases"].axes
    assert "| 1 thread | 2 threads | speedup on 2 threads | efficiency |" in text
    assert "Speedups are over the sequential run: one thread, barrier phase." in text
    assert len(runtime.containers) == 4
    assert [list(line.get_ydata()) for line in speedup.lines] == [[1, 2], [1, 1.6], [1, 1.6], [1, 1.6], [1, 2]]
    assert list(efficiency.lines[3].get_ydata()) == [100, 80]


def test_a_quick_study_and_a_busy_machine_stand_on_top(report):
    rows = [row(BASE, n, 10.0, others_cores=0.2) for n in range(3)]
    assert ">" not in report(rows)
    rows[1]["others_cores"] = 1.25
    lines = report(rows, quick=True).splitlines()
    assert lines[2].startswith("> **A quick study:** ")
    assert re.search(r"busy:\*\* before 1 of 3 runs.*1.25 at most", lines[4])
    assert not any(line.startswith("- On ") for line in lines), "a quick study says nothing of speed"
    assert "by 4.0% in the median of the runs, 4.0% at most" in report([own | {"recording_cost": 0.04} for own in rows])
    single = row(replace(BASE, barrier="phase"), 0, 40.0)
    assert "every point was run once" in report([single])
    assert "some points were run once" in report([single, *rows])


def test_slicings_are_compared_at_the_same_number_of_chunks(report):
    times = {(4, 32): 20.0, (2, 64): 10.0, (4, 16): 12.0, (1, 64): 24.0}
    rows = [row(replace(BASE, batch_chunk=b, sequence_chunk=t), n, ms) for (b, t), ms in times.items() for n in (0, 1)]
    text = report(rows)
    for pattern in (
        r"With 2 chunks, \*\*a step takes 2.00 times as long with slicing by tokens .* \(20.00 against 10.00 ms\)",
        r"With 4 chunks, \*\*a step takes 2.00 times as long with slicing by seq.* \(24.00 against 12.00 ms\)",
        r"2 chunks of 2 of the 4 sequences had the least median: 10.00 ms",
        r"\| 4 of 4 .* \| 20.00 \(.*\) \| 12.00 \(.*\) \|\n\| 2 of 4 .* \| 10.00 \(.*\) \|  \|\n",
        r"\| 1 of 4 sequences a chunk \|  \| 24.00 ",
    ):
        assert re.search(pattern, text), pattern
    axes = figures(Rows(rows))["slicing"].axes[0]
    drawn = [[round(place) for place in each[0].get_xdata()] for each in axes.containers]
    assert drawn == [[0, 1], [0], [1]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4"]


def test_grains_overlap_and_schedulers_are_told_and_drawn(report):
    values = {"kernel": (30.0, 90, 0.5), "block": (10.0, 20, 0.75)}
    rows = [row(replace(BASE, scheduler="sync", threads=1), n, 40.0, peak_gb=2) for n in (0, 1)]
    for grain, (ms, tasks, share) in values.items():
        found = {"tasks": tasks, "kernel_share": share, "scheduling_share": 0.125}
        rows += [row(replace(BASE, grain=grain), n, ms, **found) for n in (0, 1)]
    rows += [row(replace(BASE, barrier="none"), n, 8.0, overlap=0.5, steps_overlap=0.375) for n in (0, 1)]
    rows += [row(replace(BASE, scheduler="local", engine="tasks"), n, 80.0, peak_gb=3) for n in (0, 1)]
    text = report(rows)
    for words in (
        "Of the grains, fastest and slowest: **a step takes 3.00 times as long with grain kernel as with grain block**",
        "| kernel | 90 | 30.00 (30.00 .. 30.00) | 15.00 (15.00 .. 15.00) | 25.0% | 25.0% | 50.0% | 25.0% | 12.5% |",
        "| block | 20 | 10.00 (10.00 .. 10.00) | 5.00 (5.00 .. 5.00) | 25.0% | 25.0% | 75.0% | 25.0% | 12.5% | 25.0% |",
        "at the same time 25.0% (barrier step), 50.0% (barrier none) of the time",
        "| none | 10 | 8.00 (8.00 .. 8.00) | 4.00 (4.00 .. 4.00) | 50.0% | 37.5% | 25.0% | 25.0% | 25.0% | 25.0% |",
        "**a step takes 4.00 times as long with sync (1 thread) as with threads (2 threads)**",
        "| sync (1 thread) | 10 | 40.00 (40.00 .. 40.00) | 20.00 (20.00 .. 20.00) | ",
        "| local, engine tasks (2 workers) | 10 | 80.00 (80.00 .. 80.00) | ",
        "| 3.00 |",
    ):
        assert words in text
    drawn = figures(Rows(rows))

    def heights(axes):
        return [round(float(bar.get_height()), 6) for bar in axes.patches]

    assert heights(drawn["grains"].axes[0]) == [30, 10]
    assert heights(drawn["grains"].axes[2])[:2] == [50, 75]
    assert heights(drawn["overlap"].axes[1]) == [25, 50]
    assert drawn["overlap"].axes[0].lines[-1].get_ydata().tolist() == [5, 4]
    assert heights(drawn["schedulers"].axes[0]) == [40, 10, 80]


def test_medians_quartiles_and_ratios():
    rows = [row(BASE, n, value) for n, value in enumerate([1.0, 2.0, 3.0, 4.0, 10.0])]
    found = spread(rows, "step_ms")
    assert (found.quartiles, found.text()) == ((2.0, 3.0, 4.0), "3.00 ms (2.00 .. 4.00)")
    assert spread([row(BASE, 0, 1.0, step_ms=None)], "step_ms") is None
    times = {1: spread([row(BASE, 0, 30.0)], "step_ms"), 2: spread([row(BASE, 0, 20.0)], "step_ms")}
    assert speedups(times, times[1]) == {1: 1.0, 2: 1.5}
    assert speedups(times, None) == {}
    shown = {0.1234: "0.123", 1: "1.00", 1.234: "1.23", 100: "100.0", 1000: "1,000", 12345.6: "12,346"}
    assert {value: rounded(value) for value in shown} == shown

    def said(*other):
        return compare({"x": rows, "y": [row(BASE, n, value) for n, value in enumerate(other)]}, [("x", "y")], "")

    assert said(11.0, 11.0) == ["**a step takes 3.67 times as long with y as with x** (11.00 against 3.00 ms)."]
    assert said() == []
    (unclear,) = said(4.0, 4.0)
    assert "with y and with x differ by less than the runs of each do (4.00 against 3.00 ms, a" in unclear
    assert said(1.5)[0].startswith("in single runs a step takes 2.00 times as long with x as with y")


def test_the_reference_is_the_point_that_most_share_values_with():
    rows = [row(replace(BASE, grain=grain), 0, 1.0) for grain in ("kernel", "block")]
    rows += [row(replace(BASE, threads=1), 0, 2.0), row(replace(BASE, barrier="layer", grain="kernel"), 0, 3.0)]
    view = Rows([*rows, row(replace(BASE, barrier="phase"), 0, 4.0)])
    assert view.reference == {dial: getattr(BASE, dial) for dial in DIALS}
    assert [own["step_ms"] for own in view.at(barrier="layer")] == [3.0]
    assert list(view.along("threads")) == [1, 2]


def test_a_table_of_another_study_is_refused(tmp_path):
    path = tmp_path / "results.csv"
    table = Table(path, MODEL, STUDY)
    table.add(BASE, 0, {name: value for name, value in row(BASE, 0, 1.5).items() if name not in table.shared})
    again = Table(path, MODEL, STUDY)
    assert [(BASE, 0) in again, (BASE, 1) in again, (replace(BASE, threads=1), 0) in again] == [True, False, False]
    assert (again.rows[0]["step_ms"], again.rows[0]["threads"], again.rows[0]["cpu"]) == (1.5, 2, "a cpu")
    with pytest.raises(ValueError, match="channels=16, and channels=32"):
        Table(path, replace(MODEL, channels=16), STUDY)
    path.write_text("date,something\n")
    with pytest.raises(ValueError, match="columns"):
        Table(path, MODEL, STUDY)


def test_numbers_of_threads_alone_have_speedups_too(report):
    points = {n: replace(BASE, threads=n, batch_chunk=0, grain="auto") for n in (1, 2)}
    rows = [row(point, 0, 40.0 / n, predicted_ms=[36.0, 22.0][n - 1]) for n, point in points.items()]
    text = report(rows)
    assert "| step (tasks) | 40.00 | 20.00 | 2.00 | 100% |\n" in text
    assert "half of the times to within 10%, all to within 10%." in text
    measured, predicted, ideal = (line.get_ydata() for line in figures(Rows(rows))["barriers"].axes[1].lines)
    assert [[*measured], [*predicted], [*ideal]] == [[1, 2], [1, 36 / 22], [1, 2]]
    without = [own | {"predicted_ms": None} for own in rows]
    assert len(figures(Rows(without))["barriers"].axes[1].lines) == 2


def test_without_a_run_on_one_thread_there_is_no_speedup(report):
    rows = [row(replace(BASE, barrier=b, threads=n), 0, 40.0 / n) for b in ("phase", "step") for n in (2, 4)]
    text = report([*rows, rows[0] | {"loss": "1.6", "repetition": 1}])
    assert "| phase | 20.00 (20.00 .. 20.00) | 10.00 |\n" in text
    assert "| total | 20.00 (20.00 .. 20.00) | 10.00 |\n" in text
    assert "**Runs with the same chunks gave different losses: 2 x 64.**" in text
    assert "Speedups" not in text
    assert len(figures(Rows(rows))["barriers"].axes) == len(figures(Rows(rows))["phases"].axes) == 1
    # One base, the sequential run, is that of both series.
    rows.append(row(replace(BASE, barrier="phase", threads=1), 0, 40.0))
    assert Rows(rows).sequential().median == 40.0
    runtime, speedup, _ = figures(Rows(rows))["barriers"].axes
    assert len(runtime.containers) == 2
    assert [len(line.get_xdata()) for line in speedup.lines] == [3, 2, 3]  # phase, step, ideal


def test_timelines_of_every_barrier_are_written_apart_and_on_one_page(tmp_path, capsys, monkeypatch):
    pages = "daskgpt.profiling.pages"
    monkeypatch.setattr(f"{pages}.page_of", lambda timeline: timeline.title)
    monkeypatch.setattr(f"{pages}.page_of_several", lambda own, title: "\n".join([title, *own]))
    assert main(["--quick", "--timelines", "--window", "2", "--out", str(tmp_path / "out")]) == 0
    pages = {f"{name}.html" for name in (*BARRIERS, "barriers")}
    traces = {f"{name}.json" for name in BARRIERS}
    assert {path.name for path in (tmp_path / "out").iterdir()} == pages | traces
    title, *names = (tmp_path / "out" / "barriers.html").read_text().splitlines()
    assert title == "2 steps of a GPT-2 with 1 block of 32 channels (15,328 parameters), 4 x 16 tokens a step"
    assert names == [f"barrier {label}" for label in BARRIERS.values()]
    assert capsys.readouterr().out.count("critical path") == 4
