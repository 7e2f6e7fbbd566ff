"""Curves of runs: what is read from their metrics, what is drawn, and what bad input is told."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from chromium import PATH, visit
from command_lines import refused, run, write_text
from small_runs import STEPS, fit

from daskgpt import plot
from daskgpt.instruments.plotting.curves_of_runs import read_runs, smoothed, thinned
from daskgpt.instruments.plotting.picture import picture

SVG = "{http://www.w3.org/2000/svg}"


def write_run(folder, steps=300, slower=1.0, **changes):
    """A run folder's metrics, as a run writes them."""
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            record = {"step": step, "loss": 2 + 3 * math.exp(-step / 50), "tokens": 64 * (step + 1)}
            record |= {"seconds": slower * 0.5 * (step + 1), "tokens_per_s": 128 / slower, "learning_rate": 1e-3}
            record |= {"validation_loss": 2.5} if step % 100 == 99 else {}
            file.write(json.dumps(record | changes.get(f"step_{step}", {})) + "\n")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    fit(write_text(folder), folder / "first", validate_every=4)
    return folder / "first"


@pytest.fixture
def two(tmp_path):
    return write_run(tmp_path / "quick"), write_run(tmp_path / "slow", slower=40.0)


def test_curves_are_what_a_run_has_written(trained):
    (curves,) = read_runs([str(trained)])
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert curves.name == "first"
    assert curves.steps.tolist() == list(range(1, STEPS + 1))
    for name in ("loss", "tokens", "seconds", "learning_rate", "tokens_per_s"):
        assert curves.values[name].tolist() == [record[name] for record in records]
    validated = np.flatnonzero(np.isfinite(curves.values["validation_loss"])) + 1
    assert validated.tolist() == [4, 8, 12]
    assert not curves.has("norm")
    assert curves.remark == ""


def test_a_run_of_an_older_version_tells_its_tokens_and_time_by_its_rate(trained, tmp_path):
    older = tmp_path / "older"
    older.mkdir()
    (older / "config.toml").write_bytes((trained / "config.toml").read_bytes())
    records = [{"step": step, "loss": 3.0, "tokens_per_s": 32.0} for step in range(3)]
    (older / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (curves,) = read_runs([str(older)])
    assert curves.values["tokens"].tolist() == [64, 128, 192]
    assert curves.values["seconds"].tolist() == [2, 4, 6]


def test_means_start_with_the_first_value_and_pass_over_what_is_not_told():
    values = np.array([np.nan, 4.0, 4.0, np.nan, 4.0, 0.0])
    assert smoothed(values, 1).tolist()[1:] == [4, 4, 4, 4, 0]
    mean = smoothed(values, 3)
    assert math.isnan(mean[0])
    assert mean[1:5] == pytest.approx([4, 4, 4, 4])
    weights = np.array([1, 2 / 3, 4 / 9, 8 / 27])
    assert mean[5] == pytest.approx(4 * weights[1:].sum() / weights.sum())


def test_a_long_curve_keeps_its_ends_and_its_spikes():
    x, y = np.arange(100_000.0), np.ones(100_000)
    y[31_415], y[27_182], y[5] = 9, -9, np.nan
    shown, values = thinned(x, y, 1000)
    assert len(shown) <= 1000
    assert (shown == np.sort(shown)).all()
    assert dict(zip(shown, values))[31_415] == 9
    assert dict(zip(shown, values))[27_182] == -9
    assert shown[0] < 100
    assert np.isfinite(values).all()
    short = thinned(x[:10], y[:10], 1000)[0]
    assert short.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_runs_are_told_apart_by_as_much_of_their_paths_as_it_takes(tmp_path):
    paths = [write_run(tmp_path / name, 3) for name in ("a/run", "b/run")]
    names = [curves.name for curves in read_runs([*map(str, paths), str(paths[0] / "metrics.jsonl")])]
    assert names == ["a/run (1)", "b/run", "a/run (3)"]
    assert [curves.name for curves in read_runs([str(paths[0])])] == ["run"]


def test_the_command_writes_each_kind_of_file(two, tmp_path):
    begins = {"png": b"\x89PNG\r\n", "svg": b"<?xml", "html": b"<!DOCTYPE html>"}
    for kind, begin in begins.items():
        out = tmp_path / f"curves.{kind}"
        result = run("plot", *two, "--out", out)
        assert (result.returncode, result.stderr) == (0, ""), result.stderr
        assert result.stdout == f"plot written to {out}\n"
        assert out.read_bytes().strip().startswith(begin)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {f"curves.{kind}" for kind in begins}


def test_a_picture_has_the_panels_that_its_runs_tell_something_for(two, tmp_path):
    def panels(*runs):
        page = ElementTree.fromstring(picture(read_runs([str(path) for path in runs]), "svg"))
        return {group.get("id") for group in page.iter(f"{SVG}g") if (group.get("id") or "").startswith("axes_")}

    assert len(panels(*two)) == 5
    clipped = write_run(tmp_path / "clipped", 5, **{f"step_{step}": {"norm": 1.0} for step in range(5)})
    assert len(panels(two[0], clipped)) == 6
    again = [picture(read_runs([str(path) for path in two]), "svg") for _ in range(2)]
    assert again[0] == again[1], "no date, no random names"


def test_a_run_with_one_step_and_one_without_a_finite_loss_are_drawn(tmp_path):
    one = write_run(tmp_path / "one", 1)
    broken = write_run(tmp_path / "broken", 3, **{f"step_{step}": {"loss": None} for step in range(3)})
    for kind in ("png", "html"):
        result = run("plot", one, broken, "--out", tmp_path / f"odd.{kind}")
        assert (result.returncode, result.stderr) == (0, ""), result.stderr


def test_a_line_that_is_being_written_is_left_out_and_said(tmp_path):
    folder = write_run(tmp_path / "run", 3)
    file = folder / "metrics.jsonl"
    with file.open("a") as more:
        more.write('{"step": 3, "lo')
    result = run("plot", folder, "--out", tmp_path / "curves.html")
    assert result.returncode == 0
    said = "ends within a line, which is left out: its run is writing it, or was killed"
    assert result.stderr == f"plot: {file} {said}\n"
    assert (tmp_path / "curves.html").exists()


BAD = {
    "nowhere": "plot: a run must have its metrics.jsonl; got run={run}. Name the folder of a run, or such a file.",
    "empty": "plot: the metrics must have a step; got metrics={file}. Wait for the run's first one.",
    "half": "plot: the metrics must have a step; got metrics={file}. Wait for the run's first one.",
    "binary": "plot: each line of the metrics must be a step after the one before; got metrics={file}, line=1. "
    "The file is damaged, or none of metrics.",
    "cut": "plot: each line of the metrics must be a step after the one before; got metrics={file}, line=2. "
    "The file is damaged, or none of metrics.",
    "twice": "plot: each line of the metrics must be a step after the one before; got metrics={file}, line=2. "
    "The file is damaged, or none of metrics.",
}
CONTENT = {
    "empty": b"",
    "half": b'{"step": 0, "loss"',
    "binary": bytes(range(256)) + b"\n",
    "cut": b'{"step": 0, "loss": 1.0}\n{"step": 1, "lo\n{"step": 2, "loss": 1.0}\n',
    "twice": b'{"step": 0, "loss": 1.0}\n{"step": 0, "loss": 1.0}\n',
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_run_is_refused_in_one_line(name, tmp_path):
    folder, out = tmp_path / name, tmp_path / "curves.png"
    if name in CONTENT:
        folder.mkdir()
        (folder / "metrics.jsonl").write_bytes(CONTENT[name])
    line = refused(run("plot", folder, "--out", out))
    assert line == BAD[name].format(run=folder, file=folder / "metrics.jsonl")
    assert not out.exists()


def test_files_that_cannot_be_written_are_refused_in_one_line(two, tmp_path, monkeypatch):
    kinds = ".png, .svg, .html"
    for given, said in ((["--out", "curves.gif"], "curves.gif"), (["--out", "curves"], "curves"), ([], "nothing")):
        line = refused(run("plot", *two, *given, cwd=tmp_path))
        assert line == f"plot: the file must end with {kinds}; got out={said}. Give --out FILE, say curves.png."
    line = refused(run("plot", *two, "--out", tmp_path / "nowhere" / "curves.png"))
    assert line.startswith(f"plot: the folder must exist; got path={tmp_path / 'nowhere' / 'curves.png'}. Make ")
    assert "RUN" in refused(run("plot", "--out", "curves.png"))
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    plot.require_extra("html")
    with pytest.raises(RuntimeError, match=r"plot: matplotlib must be installed; got out=a picture \(png\). Install"):
        plot.require_extra("png")


def test_a_page_asks_for_nothing(two, tmp_path):
    run("plot", *two, "--out", tmp_path / "curves.html")
    page = (tmp_path / "curves.html").read_text()
    outside = re.sub(r"<script[^>]*>.*?</script>", lambda found: found[0].partition(">")[0], page, flags=re.DOTALL)
    assert not re.search(r"\b(src|href)\s*=", outside)
    assert all(f'"{path.name}"' in page for path in two)


READY = "document.querySelector('.bk-Tabs') !== null || (window.Bokeh && Bokeh.documents.length > 0)"
NAMED = "Bokeh.documents[0].all_models ? [...Bokeh.documents[0].all_models].filter(m => m.name === 'slow').length : 0"
WIDTH = "document.documentElement.scrollWidth"


@pytest.mark.skipif(PATH is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1400, 500])
def test_a_browser_shows_the_page_without_a_network(two, tmp_path, width):
    run("plot", *two, "--out", tmp_path / "curves.html")
    page = tmp_path / "curves.html"
    found = visit(page, tmp_path / "profile", READY, (NAMED, WIDTH), size=(width, 1150))
    assert [request for request in found.requests if not request.startswith("data:")] == [page.absolute().as_uri()]
    assert found.messages == []
    assert found.values[0] > 0
    assert found.values[1] <= width
