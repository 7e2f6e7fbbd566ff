"""What a person sees of a run: in a terminal, in a file, in a notebook, from Python."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import nbformat
import numpy as np
import pytest
from command_lines import PATIENCE, SMALL, write_text
from nbclient import NotebookClient
from run_notebooks import ThisPython
from terminals import in_terminal, left_lines, shown_lines

import daskgpt
from daskgpt.training.progress import Progress

RUN = [*SMALL, *["--steps", "60", "--validate-every", "20", "--sample-tokens", "3"]]
KEPT = re.compile(
    r"step (20|40|60)/60  loss \d\.\d{3}, validation \d\.\d{3}( \(best\))?, [\d,]+ tokens/s, after \d\d:\d\d"
)
HEADER = ["model", "data", "batch", "chunks", "precision", "scheduler", "grain"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def command(text, out):
    return [sys.executable, "-m", "daskgpt.train", "--data", str(text), *RUN, "--out", str(out)]


@pytest.mark.parametrize("columns", [80, 60])
def test_a_terminal_has_one_line_that_fits_and_a_line_for_each_validation(columns, text, tmp_path):
    code, written = in_terminal(command(text, tmp_path / "out"), columns)
    assert code == 0, written
    shown, left = shown_lines(written), left_lines(written)
    header = shown[next(n for n, line in enumerate(shown) if line.startswith("model ")) :]
    run = header[: next(n for n, line in enumerate(header) if line.startswith("---"))]
    assert max(map(len, run)) <= columns
    live = [line for line in run if line.endswith(" left")]
    assert live
    if columns == 80:
        whole = re.compile(r" *\d+/60 .*loss \d\.\d{3}, validation \d\.\d{3}, [\d.]+[kM]? tokens/s, \d\d:\d\d left")
        assert any(whole.fullmatch(line) for line in live), live
        assert [KEPT.fullmatch(line)[1] for line in left if line.startswith("step")] == ["20", "40", "60"]
    else:
        assert [line.split("/")[0] for line in left if line.startswith("step")] == ["step 20", "step 40", "step 60"]
    assert not any(line.endswith(" left") for line in left), "the line that is written over is gone in the end"


def test_a_file_has_plain_lines_in_their_order(text, tmp_path):
    with (tmp_path / "log").open("w") as log:
        assert subprocess.run(command(text, tmp_path / "out"), stdout=log, stderr=log, timeout=PATIENCE).returncode == 0
    written = (tmp_path / "log").read_bytes().decode()
    assert "\r" not in written.partition("--- sample")[0]
    lines = written.splitlines()
    begins = [*HEADER, "step  1/60", "step 20/60", "step 40/60", "step 60/60"]
    places = [next(n for n, line in enumerate(lines) if line.startswith(begin)) for begin in begins]
    assert places == sorted(places)
    assert [KEPT.fullmatch(line)[1] for line in lines if "validation " in line and line.startswith("step")] == [
        "20",
        "40",
        "60",
    ]


def test_every_step_says_its_learning_rate(text, tmp_path):
    subprocess.run(command(text, tmp_path / "out"), capture_output=True, check=True, timeout=PATIENCE)
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    rates = [record["learning_rate"] for record in metrics]
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert rates[5] == 1e-3
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(1e-4)


def test_words_beside_the_bar_are_dropped_in_an_order_that_keeps_the_loss():
    progress = Progress(100_000, stream=io.StringIO())
    progress.begin()
    progress.step({"loss": 10.9, "tokens_per_s": 1_234_567.0, "validation_loss": 11.25})
    full = progress.live_words(100)
    assert re.fullmatch(r"loss 10\.900, validation 11\.250, 1\.23M tokens/s, [\d:]+ left", full)
    texts = [progress.live_words(room) for room in range(100)]
    assert all(len(text) <= room for room, text in enumerate(texts))
    words = list(dict.fromkeys(re.sub(r"[\d.:]+M?", "#", text) for text in reversed(texts)))
    assert words == [
        "loss #, validation #, # tokens/s, # left",
        "loss #, val #, # tokens/s, # left",
        "loss #, val #, # left",
        "loss #, val #",
        "loss #",
        "",
    ]
    assert len(progress.count) + 1 + len("loss 10.900, val 11.250, 1.23M tokens/s, 99:59:59 left") < 80


def test_a_file_gets_a_line_now_and_then_with_the_smoothed_loss():
    written = {}
    for every in (0, 3600):
        stream = io.StringIO()
        progress = Progress(4, stream=stream, plain_every=every)
        progress.begin()
        for loss in (8.0, 4.0, 4.0, 4.0):
            progress.step({"loss": loss, "tokens_per_s": 100.0})
        progress.close()
        written[every] = stream.getvalue().splitlines()
    assert [line.split("/")[0] for line in written[3600]] == ["step 1"]
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in written[0]]
    assert len(losses) == 4
    assert losses[0] == 8
    assert 4 < losses[3] < losses[2] < losses[1] < 8


CELL = """
import daskgpt
result = daskgpt.fit(
    daskgpt.GPT2Config(blocks=2, heads=2, channels=32, vocabulary=257, positions=32),
    daskgpt.DataConfig(data="text.txt", batch_size=4, sequence_length=32),
    run=daskgpt.RunConfig(steps=40, validate_every=20, validation_batches=2),
)
"""


def test_a_notebook_has_the_header_one_line_and_the_validations(text, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (CELL, "result")])
    place = {"metadata": {"path": str(text.parent)}}
    NotebookClient(notebook, timeout=PATIENCE, resources=place, kernel_manager_class=ThisPython).execute()
    outputs = [output for output in notebook.cells[0].outputs if "compiling" not in output.get("text", "")]
    assert {output.get("name") for output in outputs} == {"stdout"}, "no warning of a missing widget"
    written = "".join(output.text for output in outputs)
    lines = left_lines(written)
    assert [line.split()[0] for line in lines[:6]] == ["model", "data", "batch", "chunks", "precision", "scheduler"]
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == ["step 20/40", "step 40/40"]
    live = [line for line in shown_lines(written) if line.endswith(" left")]
    assert live
    assert max(map(len, live)) <= 80
    assert "Result of 40 steps" in notebook.cells[1].outputs[0].data["text/plain"]


@pytest.fixture(scope="module")
def fitted(text):
    def fit(**options):
        return daskgpt.fit(
            daskgpt.GPT2Config(blocks=2, heads=2, channels=32, vocabulary=257, positions=32),
            daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=32),
            run=daskgpt.RunConfig(steps=4, validation_batches=2),
            **options,
        )

    return fit


def test_from_python_the_same_header_is_printed_unless_quiet(fitted, capfd):
    fitted(quiet=True)
    capfd.readouterr()  # what compiling said
    fitted()
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == HEADER
    assert "step 4/4  loss " in err
    result = fitted(quiet=True)
    assert capfd.readouterr() == ("", "")
    assert len(result.losses) == 4


def test_from_python_a_cluster_tells_where_its_dashboard_is(fitted, capfd):
    fitted(dataflow=daskgpt.DataflowConfig(scheduler="local", threads=1))
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("scheduler")]
    assert re.search(r"dashboard http://127\.0\.0\.1:\d+/", line)


def test_a_result_fits_on_a_screen(fitted):
    result = fitted(quiet=True)
    lines = repr(result).splitlines()
    assert re.fullmatch(r"Result of 4 steps in \d+\.\d s", lines[0])
    assert lines[1] == "model       34,720 parameters in 28 arrays"
    assert lines[2] == f"loss        {result.losses[0]:.3f} -> {result.losses[-1]:.3f} nats a token"
    assert lines[3] == f"validation  {result.validation_loss:.3f} nats a token"
    assert lines[4:] == ["written to  nowhere"]
    result.validation_loss, result.losses = np.nan, []
    assert len(repr(result).splitlines()) == 3
