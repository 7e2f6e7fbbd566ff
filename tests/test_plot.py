"""Tests of curves of runs: what is read from their metrics, what is drawn, and what is refused."""

import json
import math
import re

import numpy as np
import pytest
from small_runs import STEPS, fit

from daskgpt import plot
from daskgpt.instruments.plotting.curves_of_runs import read_runs, smoothed, thinned
from daskgpt.instruments.plotting.interactive import _plot
from daskgpt.instruments.plotting.panels import LOSSES, OTHERS, axis, other_panels
from daskgpt.instruments.plotting.picture import picture


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


def test_curves_are_what_a_run_has_written(small_text, tmp_path):
    run = tmp_path / "first"
    fit(small_text, run, validate_every=4)
    (curves,) = read_runs([str(run)])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (curves.name, curves.remark) == ("first", "")
    assert curves.steps.tolist() == list(range(1, STEPS + 1))
    for name in ("loss", "tokens", "seconds", "learning_rate", "tokens_per_s"):
        assert curves.values[name].tolist() == [record[name] for record in records]
    validated = np.flatnonzero(np.isfinite(curves.values["validation_loss"])) + 1
    assert validated.tolist() == [4, 8, 12]
    assert not curves.has("norm")


def test_means_start_with_the_first_value_and_pass_over_what_is_not_told(two):
    values = np.array([np.nan, 4.0, 4.0, np.nan, 4.0, 0.0])
    assert smoothed(values, 1).tolist()[1:] == [4, 4, 4, 4, 0]
    weights = np.array([1, 2 / 3, 4 / 9, 8 / 27])
    expected = [math.nan, 4, 4, 4, 4, 4 * weights[1:].sum() / weights.sum()]
    assert smoothed(values, 3) == pytest.approx(expected, nan_ok=True)
    for smooth, length in ((0, 10), (7, 7)):
        curves = read_runs(two, smooth)[0]
        assert curves.smoothed["loss"].tolist() == smoothed(curves.values["loss"], length).tolist()


def test_a_long_curve_keeps_its_ends_and_its_spikes():
    x, y = np.arange(100_000.0), np.ones(100_000)
    y[31_415], y[27_182], y[5] = 9, -9, np.nan
    shown, values = thinned(x, y, 1000)
    assert len(shown) <= 1000
    assert (shown == np.sort(shown)).all()
    assert (values.max(), values.min()) == (9, -9)
    assert shown[0] < 100
    assert thinned(x[:10], y[:10], 9)[0].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_runs_are_told_apart_by_as_much_of_their_paths_as_it_takes(tmp_path):
    paths = [write_run(tmp_path / name, 3) for name in ("a/run", "b/run")]
    names = [curves.name for curves in read_runs([*paths, f"{paths[0]}/metrics.jsonl"])]
    assert names == ["a/run (1)", "b/run", "a/run (3)"]
    assert [curves.name for curves in read_runs(paths[:1])] == ["run"]


def test_panels_axes_and_lines_of_a_page(two):
    runs = read_runs(two)
    assert [panel.y for panel in other_panels(runs)] == ["learning_rate", "tokens_per_s"]
    assert axis("steps", runs) == ("steps", 1)
    assert [axis("seconds", own) for own in ([runs[0]], runs)] == [("minutes of training", 60)] * 2
    loss = _plot(LOSSES[2], runs, 100)
    raw, mean, validated, *_ = (own.data_source.data for own in loss.renderers if own.name == "slow")
    assert raw["x"].tolist() == (runs[1].values["seconds"] / 60).tolist()
    assert raw["y"].tolist() == runs[1].values["loss"].tolist()
    assert mean["y"].tolist() == runs[1].smoothed["loss"].tolist()
    assert validated["step"].tolist() == [100, 200, 300]
    assert (_plot(OTHERS[1], runs, 100).y_range.start, _plot(OTHERS[1], runs, 100).y_range.end) == (0, 1.05 * 128)


def test_the_command_writes_each_kind_of_file(two, tmp_path, capsys):
    for kind, begin in {"png": b"\x89PNG\r\n", "svg": b"<?xml", "html": b"<!DOCTYPE html>"}.items():
        out = tmp_path / f"curves.{kind}"
        assert plot.main([*two, "--out", str(out)]) == 0
        assert capsys.readouterr().out == f"plot written to {out}\n"
        assert out.read_bytes().strip().startswith(begin)
    assert len(list(tmp_path.iterdir())) == 3
    page = (tmp_path / "curves.html").read_text()
    assert not re.search(r"\b(src|href)\s*=", re.sub(r"(?s)(<script[^>]*>).*?</script>", r"\1", page))
    assert all(f'"{name}"' in page for name in ("quick", "slow"))


def test_a_picture_has_the_panels_that_its_runs_tell_something_for(two, tmp_path, capsys):
    def panels(svg):
        return set(re.findall(rb'<g id="(axes_\d+)"', svg))

    assert len(panels(picture(read_runs(two), "svg"))) == 5
    odd = write_run(tmp_path / "one", 1), write_run(tmp_path / "broken", 3, loss=None, norm=1.0)
    drawn = picture(read_runs(odd), "svg")
    assert len(panels(drawn)) == 6
    assert drawn == picture(read_runs(odd), "svg"), "no date, no random names"
    with (tmp_path / "one" / "metrics.jsonl").open("a") as more:
        more.write('{"step": 3, "lo')
    assert plot.main([*odd, "--out", str(tmp_path / "odd.html")]) == 0
    assert "ends within a line" in capsys.readouterr().err


NO_RUNS = [(None, "metrics.jsonl"), (b"", "must have a step"), (b'{"step": 0, "loss"', "must have a step")]
NO_RUNS += [(bytes(range(256)) + b"\n", "line=1")]
NO_RUNS += [(b'{"step": 0, "loss": 1.0}\n{"step": 1, "lo\n{"step": 2, "loss": 1.0}\n', "line=2")]
NO_RUNS += [(b'{"step": 0, "loss": 1.0}\n{"step": 0, "loss": 1.0}\n', "line=2"), (b'{"step": "0"}\n', "line=1")]


@pytest.mark.parametrize(("content", "keyword"), NO_RUNS)
def test_what_is_no_run_is_refused(content, keyword, tmp_path):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=keyword):
        plot.main([str(tmp_path), "--out", str(tmp_path / "curves.png")])
    assert not (tmp_path / "curves.png").exists()


NO_FILES = [(["--out", "curves.gif"], ValueError, "out=curves.gif"), (["--out", "curves"], ValueError, "out=curves")]
NO_FILES += [([], ValueError, "out=nothing"), (["--out", "c.html", "--smooth", "-1"], ValueError, "smooth")]
NO_FILES += [(["--out", "nowhere/curves.html"], OSError, "folder must exist")]


@pytest.mark.parametrize(("flags", "error", "keyword"), NO_FILES)
def test_files_that_cannot_be_written_are_refused(two, flags, error, keyword, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=keyword):
        plot.main([*two, *flags])
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="matplotlib"):
        plot.require_extra("png")
    plot.require_extra("html")
