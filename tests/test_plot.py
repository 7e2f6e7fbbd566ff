"""Tests of `daskgpt.plot`: reading of metrics, pictures, and errors."""

import json
import math
import re
import sys

import numpy as np
import pytest
from small_runs import STEPS, fit

from daskgpt import plot
from daskgpt.profiling.plots import COLORS, picture, read_runs


def write_run(folder, steps=300, slower=1.0, **changes):
    """A run folder's metrics, as a run writes them."""
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            record = {"step": step, "loss": 2 + 3 * math.exp(-step / 50), "tokens": 64 * (step + 1)}
            record |= {"seconds": slower * 0.5 * (step + 1), "tokens_per_s": 128 / slower, "learning_rate": 1e-3}
            record |= {"validation_loss": 2.5} if step % 100 == 99 else {}
            file.write(json.dumps(record | changes) + "\n")
    return str(folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return write_run(folder / "quick"), write_run(folder / "slow", slower=40.0)


def test_curves_match_the_metrics(small_text, tmp_path):
    run = tmp_path / "first"
    fit(small_text, run, validate_every=4)
    ((name, curves),) = read_runs([str(run)]).items()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert name == "first"
    assert curves["step"].tolist() == list(range(1, STEPS + 1))
    for name in ("loss", "learning_rate", "tokens_per_s"):
        assert curves[name].tolist() == [record[name] for record in records]
    validated = np.flatnonzero(np.isfinite(curves["validation_loss"])) + 1
    assert validated.tolist() == [4, 8, 12]
    assert not np.isfinite(curves["norm"]).any()


def test_run_labels_are_distinct(tmp_path):
    paths = [write_run(tmp_path / name, 3) for name in ("a/run", "b/run")]
    assert [*read_runs([paths[0], f"{paths[1]}/metrics.jsonl"])] == ["a/run", "b/run"]
    assert [*read_runs(paths[:1])] == ["run"]


def test_the_command_writes_each_kind_of_file(two, tmp_path, capsys):
    for kind, begin in {"png": b"\x89PNG\r\n", "svg": b"<?xml"}.items():
        out = tmp_path / f"curves.{kind}"
        assert plot.main([*two, "--out", str(out)]) == 0
        assert capsys.readouterr().out == f"plot written to {out}\n"
        assert out.read_bytes().strip().startswith(begin)
    assert len(list(tmp_path.iterdir())) == 2
    page = (tmp_path / "curves.svg").read_text()
    assert all(f"<!-- {words} -->" in page for words in ("quick", "slow", "steps", "learning rate"))


def test_names_are_shown_as_they_are(tmp_path):
    names = ("_first", "a$b$c")
    page = picture(read_runs([write_run(tmp_path / name, 3) for name in names]), "svg").decode()
    assert all(f"<!-- {name} -->" in page.replace("<!--  ", "<!-- ") for name in names)


def test_picture_has_the_panels_of_its_runs(two, tmp_path):
    def panels(svg):
        return set(re.findall(rb'<g id="(axes_\d+)"', svg))

    assert len(panels(picture(read_runs(two), "svg"))) == 3
    odd = write_run(tmp_path / "one", 1), write_run(tmp_path / "broken", 3, loss=None, norm=1.0)
    drawn = picture(read_runs(odd), "svg")
    assert len(panels(drawn)) == 4
    points = re.findall(rf"<use [^>]*fill: {COLORS[0]}".encode(), drawn)
    assert len(points) == 4, "a single step is a point in its three panels and in the legend"
    assert drawn == picture(read_runs(odd), "svg"), "no date, no random names"
    with (tmp_path / "one" / "metrics.jsonl").open("a") as more:
        more.write('no record\n{"step": 3, "lo')
    assert drawn == picture(read_runs(odd), "svg"), "damaged lines, and one that is being written, are left out"


def test_values_that_are_no_numbers_are_left_out(tmp_path):
    ((_, curves),) = read_runs([write_run(tmp_path / "odd", 3, loss="much", norm=10**400)]).items()
    assert np.isnan([curves["loss"], curves["norm"]]).all()
    assert np.isfinite(curves["learning_rate"]).all()


NO_RUNS = [(None, "metrics.jsonl"), (b"", "must have a step"), (b'{"step": 0, "loss"', "must have a step")]
NO_RUNS += [(b'[1]\n"step"\n5\n', "must have a step"), (b'{"step": 0, "loss": "low"}\n', "must have a number")]


@pytest.mark.parametrize(("content", "keyword"), NO_RUNS)
def test_other_folders_are_refused(content, keyword, tmp_path):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=keyword):
        plot.main([str(tmp_path), "--out", str(tmp_path / "curves.png")])
    assert not (tmp_path / "curves.png").exists()


NO_FILES = [(["--out", "curves.gif"], ValueError, "out=curves.gif"), (["--out", "curves"], ValueError, "out=curves")]
NO_FILES += [([], ValueError, "out=nothing")]
NO_FILES += [(["--out", "nowhere/curves.svg"], OSError, "folder must exist; got folder=nowhere[.]")]


@pytest.mark.parametrize(("flags", "error", "keyword"), NO_FILES)
def test_files_that_cannot_be_written_are_refused(two, flags, error, keyword, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=keyword):
        plot.main([*two, *flags])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "daskgpt.profiling.plots")
    with pytest.raises(RuntimeError, match="matplotlib"):
        plot.main([*two, "--out", "curves.png"])
