"""The study: its grid, its table, what its report concludes from numbers, and a small one from start to end."""

from __future__ import annotations

import csv
import re
from base64 import b64decode
from dataclasses import asdict, fields, replace
from xml.etree import ElementTree

import pytest
from command_lines import run

from daskgpt.config.model import GPT2Config, preset
from daskgpt.config.run import DataflowConfig
from daskgpt.instruments.statistics import rounded
from daskgpt.instruments.study.dials import BARRIERS, DIALS
from daskgpt.instruments.study.figures import figures
from daskgpt.instruments.study.grid import (
    Point,
    StudyConfig,
    base_point,
    chosen_grid,
    default_grid,
    job_of_point,
    quick_grid,
    slicings,
    thread_counts,
)
from daskgpt.instruments.study.numbers import Rows, compare, efficiencies, speedups, spread
from daskgpt.instruments.study.one import Order
from daskgpt.instruments.study.report import write_report
from daskgpt.instruments.study.runs import run_one
from daskgpt.instruments.study.table import COLUMNS, Table
from daskgpt.study import main, settings

MODEL = GPT2Config(blocks=1, heads=2, channels=32, vocabulary=64, positions=16)
STUDY = StudyConfig(batch_size=4, sequence_length=64)
BASE = base_point(STUDY, 2)
SECTIONS = [
    "What came of it",
    "Threads: forward, backward, update",
    "Fork-join, tasks, barrier-free",
    "Slicing: tokens only, or tokens and sequences",
    "Size of a task",
    "Overlap and critical path",
    "Schedulers",
    "Same results",
    "Runs",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study of the very small model, from start to end."""
    out = tmp_path_factory.mktemp("study") / "quick"
    result = run("study", "--quick", "--out", out)
    assert result.returncode == 0, result.stderr
    return out, result


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_study_writes_its_table_figures_and_report(finished):
    out, result = finished
    assert result.stdout.splitlines()[-1] == f"study written to {out / 'report.html'} and report.md"
    rows = rows_of(out / "results.csv")
    assert tuple(rows[0]) == COLUMNS
    points = {tuple(row[dial] for dial in asdict(BASE)) for row in rows}
    assert len(points) == len(rows)
    assert {row["barrier"] for row in rows} == set(BARRIERS)
    for row in rows:
        assert float(row["step_ms_q1"]) <= float(row["step_ms"]) <= float(row["step_ms_q3"])
        assert int(row["steps"]) >= (1 if row["barrier"] == "none" else 3)
        shares = [float(row[f"{name}_share"]) for name in ("kernel", "inside", "scheduling", "waiting")]
        assert sum(shares) == pytest.approx(1, abs=0.05)
        assert 0 < float(row["critical_path_ms"]) <= float(row["recorded_ms"]) * 1.01
        assert row["cpu"]
        assert row["numpy"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", row["date"])
        apart = [row["forward_ms"], row["backward_ms"], row["update_ms"]]
        assert all(apart) or row["barrier"] not in ("layer", "phase")
    losses = {(row["batch_chunk"], row["sequence_chunk"]): set() for row in rows}
    for row in rows:
        losses[row["batch_chunk"], row["sequence_chunk"]].add(row["loss"])
    assert all(len(own) == 1 for own in losses.values()), "the same bits from every dial but the chunks"
    assert len(losses) == 2
    assert {row["overlap"] for row in rows if row["barrier"] == "layer"} == {"0.0"}


def test_the_report_has_every_section_and_shows_every_figure(finished):
    out, _ = finished
    text = (out / "report.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    shown = re.findall(r"!\[.*\]\((.*)\)", text)
    assert shown == [f"{name}.png" for name in ("phases", "barriers", "slicing", "grains", "overlap", "schedulers")]
    for name in shown:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert ElementTree.parse(out / name.replace("png", "svg")).getroot().tag.endswith("svg")
    assert "bit for bit" in text
    assert "Nothing was run" not in text


def test_what_is_in_the_table_is_not_run_again(finished):
    out, _ = finished
    before = (out / "results.csv").read_text()
    kept = before.splitlines(keepends=True)[:-1]
    (out / "results.csv").write_text("".join(kept))
    resumed = run("study", "--quick", "--out", out)
    assert resumed.returncode == 0, resumed.stderr
    rows, lost = rows_of(out / "results.csv"), before.splitlines()[-1]
    assert (out / "results.csv").read_text().startswith("".join(kept))
    assert len(rows) == len(kept)
    new = rows[-1]
    old = dict(zip(COLUMNS, next(csv.reader([lost]))))
    assert all(new[name] == old[name] for name in (*asdict(BASE), "repetition", "loss", "batch_size"))
    assert new["date"] >= old["date"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--barrier", "layers"], "DataflowConfig: barrier must be known; got barrier=layers. Did you mean layer?"),
        (
            ["--batch-chunk", "5"],
            "DataflowConfig: batch_chunk must divide batch_size; got batch_chunk=5, batch_size=12.",
        ),
        (["--scheduler", "thread"], "open_scheduler: the scheduler must be known; got scheduler=thread."),
        (["--repetitions", "0"], "StudyConfig: repetitions must be at least 1; got repetitions=0."),
        (["--minutes", "-1"], "StudyConfig: minutes must not be negative; got minutes=-1.0. Give 0 or more."),
        (["--preset", "tyni"], "preset: the name must be known; got preset=tyni. Did you mean tiny?"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        main([*arguments, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "two"], "daskgpt.study: argument --threads: invalid list of int value: 'two'"),
        (["--barriers", "step"], "daskgpt.study: --barriers must be a known flag. It is called --barrier here."),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"


def test_bad_input_on_the_command_line(tmp_path):
    result = run("study", "--batch-chunk", 5, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "out").exists()


def test_the_default_grid_asks_five_questions():
    points = default_grid(STUDY, 2)
    assert len(points) == len(set(points)) == 21
    assert Point(2, "threads", "step", 2, 64, "block") == BASE
    assert {(p.threads, p.barrier) for p in points if p.scheduler == "threads"} >= {
        (threads, barrier) for threads in (1, 2) for barrier in BARRIERS
    }
    cut = {(p.batch_chunk, p.sequence_chunk) for p in points}
    assert {(4, 64), (4, 16), (2, 32), (1, 64), (1, 32)} <= cut
    assert {p.grain for p in points if p.barrier == "step"} == {"kernel", "segment", "block", "chunk"}
    assert {p.grain for p in points if p.barrier == "layer"} == {"kernel"}
    assert {p.threads for p in points if p.scheduler == "sync"} == {1}
    assert {p.scheduler for p in points} == {"threads", "sync", "local"}
    for point in [*points, *quick_grid(STUDY, 2)]:
        dataflow = job_of_point(replace(MODEL, positions=64), STUDY, point).dataflow
        assert (dataflow.batch_chunk, dataflow.sequence_chunk) == (point.batch_chunk, point.sequence_chunk)


def test_chosen_values_are_combined():
    points = chosen_grid(STUDY, 2, {"threads": [1, 2], "barrier": ["layer", "none"], "grain": ["kernel", "block"]})
    assert len(points) == 2 * (1 + 2)  # fork-join has one grain
    assert {(p.scheduler, p.batch_chunk) for p in points} == {("threads", 2)}


def test_thread_counts_and_slicings():
    assert [thread_counts(cores) for cores in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert slicings(StudyConfig(batch_size=3, sequence_length=6)) == [(3, 6), (3, 3), (1, 6), (1, 3)]
    assert (1, 64) in slicings(StudyConfig(batch_size=12, sequence_length=64))


def test_quick_is_small_but_for_what_is_given():
    from daskgpt.study import parser

    model, own = settings(parser().parse_args(["--quick", "--steps", "7", "--channels", "16"]))
    assert (model.blocks, model.channels, own.steps, own.batch_size, own.repetitions) == (1, 16, 7, 4, 1)


def row(point, repetition, value, **found):
    shared = asdict(MODEL) | {"batch_size": 4, "sequence_length": 64, "precision": "float32", "window": 4, "warmup": 2}
    numbers = dict.fromkeys(COLUMNS, 0.25) | shared | asdict(point) | {"repetition": repetition, "seed": 0}
    numbers |= {"step_ms": value, "recorded_ms": value, "critical_path_ms": value / 2, "date": "2020", "cpu": "a cpu"}
    numbers |= {
        "forward_ms": value / 4,
        "backward_ms": value / 2,
        "update_ms": value / 4,
        "loss": "1.5",
        "tasks": 10,
        "others_cores": 0.0,
    }
    return numbers | found


def report(folder, rows):
    folder.mkdir(exist_ok=True)
    write_report(folder, rows)
    return (folder / "report.md").read_text()


def test_conclusions_follow_from_the_numbers_whichever_way_round(tmp_path):
    for name, step, layer, longer in (("a", 10.0, 20.0, "fork-join"), ("b", 30.0, 15.0, "tasks")):
        text = report(
            tmp_path / name,
            [row(replace(BASE, barrier="step"), n, step + n / 10) for n in range(3)]
            + [row(replace(BASE, barrier="layer", grain="kernel"), n, layer + n / 10) for n in range(3)],
        )
        (sentence,) = re.findall(
            r"On 2 threads, \*\*a step takes ([\d.]+) times as long with ([\w-]+) .* as with", text
        )
        assert sentence == ("1.99", longer)
        assert f"({max(step, layer) + 0.1:.2f} against {min(step, layer) + 0.1:.2f} ms)" in text
        assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
        assert text.count("Nothing was run for this question.") == 3  # slicing, grain and schedulers


def test_what_the_runs_do_not_settle_is_not_concluded(tmp_path):
    values = {"step": [10.0, 14.0, 18.0], "none": [11.0, 13.0, 17.0]}
    rows = [row(replace(BASE, barrier=barrier), n, v) for barrier, own in values.items() for n, v in enumerate(own)]
    text = report(tmp_path / "study", rows)
    assert (
        "On 2 threads, the times of a step with tasks (barrier step) and with barrier-free (barrier none) differ by "
        "less than the runs of each do (14.00 against 13.00 ms, a ratio of 1.08)."
    ) in text
    assert "**" not in text


def test_speedup_and_efficiency_are_reported_for_every_phase(tmp_path):
    times = {1: 40.0, 2: 25.0}
    rows = [row(replace(BASE, barrier="phase", threads=n), k, ms) for n, ms in times.items() for k in range(3)]
    for own in rows[3:]:
        own["forward_ms"] = 5.0
    text = report(tmp_path / "study", rows)
    assert "**a step takes 1.60 times as long with 1 thread as with 2 threads** (40.00 against 25.00 ms)" in text
    assert (
        "The efficiency is 80%; of the phases, forward gains most (2.00 times as fast) and backward least (1.60)"
        in text
    )
    assert re.search(r"^\| 2 \| 5.00 .* \| 25.00 \(25.00 .. 25.00\) \| 1.60 \| 80% \|$", text, re.M)


def test_without_a_run_on_one_thread_there_is_no_speedup(tmp_path):
    two, four = (spread([row(BASE, 0, ms)], "step_ms") for ms in (20.0, 15.0))
    assert speedups({2: two, 4: four}) == efficiencies({2: two, 4: four}) == {}
    rows = [row(replace(BASE, barrier=b, threads=n), 0, 40.0 / n) for b in ("phase", "step") for n in (2, 4)]
    text = report(tmp_path / "none", rows)
    assert text.count("| phase | 20.00 | 10.00 |  |  |\n") == 1
    assert "| 4 | 2.50 | 5.00 | 2.50 | 10.00 |  |  |\n" in text
    assert "The efficiency is" not in text
    assert len(figures(Rows(rows))["barriers"].axes) == len(figures(Rows(rows))["phases"].axes) == 1
    # One of two series has it: the other is drawn in the first panel only, and the figure says why.
    rows += [row(replace(BASE, barrier="phase", threads=1), 0, 40.0)]
    runtime, speedup, efficiency = figures(Rows(rows))["barriers"].axes
    assert len(runtime.containers) == 2
    assert [len(line.get_xdata()) for line in speedup.lines] == [3, 0, 3]  # phase, step, ideal
    assert [list(line.get_ydata()) for line in efficiency.lines][:2] == [[100, 100, 100], []]
    assert "no speedup without a run on 1 thread: step (tasks)" in figures(Rows(rows))["barriers"].get_suptitle()


def test_single_runs_are_told_and_conclude_nothing(tmp_path):
    rows = [row(replace(BASE, threads=n, barrier="phase"), 0, 40.0 / n) for n in (1, 2)]
    rows += [row(replace(BASE, barrier="step"), n, 90.0) for n in range(3)]
    text = report(tmp_path / "study", rows)
    assert "in single runs a step took 2.00 times as long with 1 thread as with 2 threads (40.00 against 20.00" in text
    assert "On 2 threads, in single runs a step took 4.50 times as long with tasks (barrier step) as with" in text
    assert re.findall(r"\*\*.*?\*\*", text) == ["**Single runs:**"]
    assert text.splitlines()[2].startswith("> **Single runs:** some points were run once.")


def test_a_quick_study_and_a_busy_machine_stand_on_top(tmp_path):
    rows = [row(BASE, n, 10.0, others_cores=0.1) for n in range(3)]
    assert ">" not in report(tmp_path / "a", rows)
    rows[1]["others_cores"] = 1.25
    tmp_path.joinpath("b").mkdir()
    page = write_report(tmp_path / "b", rows, quick=True)
    lines = (tmp_path / "b" / "report.md").read_text().splitlines()
    assert lines[2].startswith("> **A quick study:** ")
    assert lines[4].startswith("> **The machine was busy:** before 1 of 3 runs other programs kept more than 0.2 cores")
    assert "1.25 at most" in lines[4]
    assert page.read_text().count("<blockquote>") == 1


@pytest.mark.parametrize(
    ("model", "title"),
    [
        (preset("gpt2"), "Study of gpt2 (124,439,808 parameters), 4 x 64 tokens a step"),
        (MODEL, "Study of a GPT-2 with 1 block of 32 channels (15,328 parameters), 4 x 64 tokens a step"),
    ],
)
def test_the_title_says_what_model(tmp_path, model, title):
    rows = [row(replace(BASE, barrier=barrier), 0, 10.0, **asdict(model)) for barrier in ("step", "none")]
    assert report(tmp_path / "study", rows).startswith(f"# {title}\n")
    assert f"<title>{title}</title>" in (tmp_path / "study" / "report.html").read_text()
    for figure in figures(Rows(rows)).values():
        assert title.removeprefix("Study of ") in figure.get_suptitle()


def large_study():
    """Times of five digits, many threads, every barrier, slicing, grain and scheduler."""
    threads, values = (1, 2, 4, 8, 16, 32, 48, 64), {"others_cores": 0.0, **asdict(preset("gpt2"))}
    base = replace(BASE, threads=64)
    points = [replace(base, threads=n, barrier=b) for n in threads for b in BARRIERS]
    points += [replace(base, batch_chunk=b, sequence_chunk=t) for b, t in slicings(STUDY)]
    points += [replace(base, grain=grain) for grain in DIALS["grain"].looks]
    points += [replace(base, scheduler=own, threads=n) for own in ("sync", "local") for n in (1, 64)]
    points = list(dict.fromkeys(point.runnable() for point in points))
    return [row(p, n, 17_000.0 + 400 * k + n, **values) for k, p in enumerate(points) for n in range(3)]


def texts_of(figure):
    """Every text that is drawn: of tick labels those in view."""
    found = [figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        found += axes.get_legend().get_texts() if axes.get_legend() else []
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            places = zip(axis.get_majorticklocs(), axis.get_majorticklabels())
            found += [label for place, label in places if low <= place <= high]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("name", ["phases", "barriers", "slicing", "grains", "overlap", "schedulers"])
def test_no_two_labels_of_a_figure_collide(name):
    figure = figures(Rows(large_study()))[name]
    figure.draw_without_rendering()
    shown = texts_of(figure)
    boxes = {text: text.get_window_extent() for text in shown}
    assert len(boxes) > 10
    for number, text in enumerate(shown):
        assert boxes[text].x0 >= 0, f"{text} is cut off"
        assert boxes[text].x1 <= figure.bbox.x1, f"{text} is cut off"
        for other in shown[:number]:
            assert not boxes[text].padded(-0.5).overlaps(boxes[other].padded(-0.5)), f"{text} and {other}"
    for legend in [*figure.legends, *(axes.get_legend() for axes in figure.axes)]:
        for axes in figure.axes if legend else ():
            assert not axes.get_window_extent().overlaps(legend.get_window_extent()), "a legend covers what is drawn"


def test_the_page_holds_every_figure_and_asks_for_nothing(finished):
    out, _ = finished
    page = (out / "report.html").read_text()
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    images = [link for link in links if link.startswith("data:image/svg+xml;base64,")]
    assert len(images) == 6
    for link in images:
        assert ElementTree.fromstring(b64decode(link.partition(",")[2])).tag.endswith("svg")
    assert [link for link in links if link not in images] == ["results.csv"]
    assert re.findall(r"<h2>(.*)</h2>", page) == SECTIONS
    assert page.count("<table>") == (out / "report.md").read_text().count("| --- |\n")


def test_timelines_of_every_barrier_are_written_apart_and_on_one_page(tmp_path, capsys):
    assert main(["--quick", "--timelines", "--window", "2", "--out", str(tmp_path / "out")]) == 0
    pages = {f"{name}.html" for name in (*BARRIERS, "barriers")}
    traces = {f"{name}.json" for name in BARRIERS}
    assert {path.name for path in (tmp_path / "out").iterdir()} == pages | traces | {"fork_join.svg"}
    picture = ElementTree.fromstring((tmp_path / "out" / "fork_join.svg").read_text())
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    (fork_join, free) = [text for text in texts if " ms a step" in text]
    assert fork_join.startswith("barrier layer (fork-join): ")
    assert free.startswith("barrier none (barrier-free): ")
    text = (tmp_path / "out" / "barriers.html").read_text()
    assert "<title>2 steps of a GPT-2 with 1 block of 32 channels (15,328 parameters), 4 x 16 tokens a step<" in text
    for look in BARRIERS.values():
        assert f"barrier {look.label}" in text
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"{tmp_path / 'out' / 'barriers.html'}")


def test_slicings_are_compared_at_the_same_number_of_chunks(tmp_path):
    times = {(4, 32): 20.0, (2, 64): 10.0, (4, 16): 12.0, (1, 64): 24.0}
    rows = [row(replace(BASE, batch_chunk=b, sequence_chunk=t), n, ms) for (b, t), ms in times.items() for n in (0, 1)]
    text = report(tmp_path / "study", rows)
    for sentence in (
        "With 2 chunks, **a step takes 2.00 times as long with slicing by tokens only (4 sequences a chunk) as with "
        "slicing by sequences too (2 a chunk)** (20.00 against 10.00 ms).",
        "With 4 chunks, **a step takes 2.00 times as long with slicing by sequences too (1 a chunk) as with "
        "slicing by tokens only (4 sequences a chunk)** (24.00 against 12.00 ms).",
        "Of all slicings, 2 chunks of 2 of the 4 sequences had the least median: 10.00 ms a step.",
    ):
        assert sentence in text


def test_the_table_of_dials_is_that_of_the_points_and_of_the_settings():
    assert list(DIALS) == [f.name for f in fields(Point)]
    choices = {f.name: f.metadata["choices"] for f in fields(DataflowConfig) if f.metadata["choices"]}
    for name in ("barrier", "grain"):
        assert list(DIALS[name].looks) == list(choices[name])
    assert len({look.colour for look in BARRIERS.values()}) == len(BARRIERS)


def test_different_losses_are_reported(tmp_path):
    rows = [row(BASE, 0, 10.0), row(BASE, 1, 10.0, loss="1.6")]
    assert "**Runs with the same chunks gave different losses: 2 x 64.**" in report(tmp_path / "study", rows)


def test_medians_quartiles_and_ratios():
    rows = [row(BASE, n, value) for n, value in enumerate([1.0, 2.0, 3.0, 4.0, 10.0])]
    found = spread(rows, "step_ms")
    assert found.quartiles == (2.0, 3.0, 4.0)
    assert found.text() == "3.00 ms (2.00 .. 4.00)"
    assert spread([row(BASE, 0, 1.0, step_ms=None)], "step_ms") is None
    times = {1: spread([row(BASE, 0, 30.0)], "step_ms"), 2: spread([row(BASE, 0, 20.0)], "step_ms")}
    assert speedups(times) == {1: 1.0, 2: 1.5}
    assert efficiencies(times) == {1: 1.0, 2: 0.75}
    assert [rounded(value) for value in (0.1234, 1.234, 123.4, 12345.6)] == ["0.123", "1.23", "123.4", "12,346"]
    assert not compare("x", [row(BASE, 0, 100.0)], "y", [row(BASE, 0, 900.0)]).clear
    assert compare("x", rows, "y", [row(BASE, n, 11.0) for n in range(2)]).clear
    assert compare("x", rows, "y", []) is None


def test_the_reference_is_the_point_that_most_share_values_with():
    rows = [row(replace(BASE, grain=grain), 0, 1.0) for grain in ("kernel", "block")]
    rows += [row(replace(BASE, threads=1), 0, 2.0), row(replace(BASE, barrier="layer", grain="kernel"), 0, 3.0)]
    view = Rows([*rows, row(replace(BASE, barrier="phase"), 0, 4.0)])
    assert view.reference == asdict(BASE)
    assert [own["step_ms"] for own in view.at(barrier="layer")] == [3.0]
    assert list(view.along("threads")) == [1, 2]


def test_a_table_of_another_study_is_refused(tmp_path):
    path = tmp_path / "results.csv"
    table = Table(path, MODEL, STUDY)
    table.add(BASE, 0, {name: value for name, value in row(BASE, 0, 1.5).items() if name not in table.shared})
    again = Table(path, MODEL, STUDY)
    assert (BASE, 0) in again
    assert (BASE, 1) not in again
    assert (replace(BASE, threads=1), 0) not in again
    assert again.rows[0]["step_ms"] == 1.5
    assert again.rows[0]["threads"] == 2
    message = f"study: a folder must hold one study; got channels=16, and channels=32 in {path}. Give another --out."
    with pytest.raises(ValueError, match=re.escape(message)):
        Table(path, replace(MODEL, channels=16), STUDY)
    path.write_text("date,something\n")
    message = f"study: the table must have the columns of this version; got file={path}. Give another --out."
    with pytest.raises(ValueError, match=re.escape(message)):
        Table(path, MODEL, STUDY)


def test_a_run_that_fails_says_why():
    order = Order(MODEL, replace(STUDY, sequence_length=16), replace(BASE, batch_chunk=3, sequence_chunk=16))
    with pytest.raises(
        RuntimeError, match=r"the run must end; got exit code 1, ValueError: DataflowConfig: batch_chunk must"
    ):
        run_one(order)
