"""Tests of what a run prints: of its command line, in a terminal, in a file, from Python."""

import io
import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from command_lines import SMALL, write_text
from small_runs import metrics_of
from terminals import left_lines, opened, read_to_end, shown_lines

import daskgpt
from daskgpt import generate, train
from daskgpt.training.metrics import Progress


def test_training_learns_and_generate_reads_the_run(small_text, tmp_path, called):
    trained = tmp_path / "it's a run"
    flags = ("--steps", 60, "--validate-every", 30, "--sample-tokens", 5, "--out", trained)
    code, told = called(train, "--data", small_text, *SMALL, *flags)
    lines = told.splitlines()
    assert code == 0
    assert f"run written to {trained}" in lines
    assert sum(line.startswith("--- sample after 60 steps") for line in lines) == 1
    begins = "write text with it: python -m daskgpt."
    (line,) = [line for line in lines if line.startswith(begins)]
    command, *arguments = shlex.split(line.removeprefix(begins))
    assert (command, arguments[0]) == ("generate", str(trained))
    assert called(generate, *arguments, "--tokens", 5)[1].startswith(arguments[-1])
    metrics = metrics_of(trained)
    assert [record["step"] for record in metrics] == list(range(60))
    assert metrics[0]["loss"] == pytest.approx(np.log(257), abs=0.3)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1.5
    assert [record["step"] for record in metrics if "validation_loss" in record] == [29, 59]
    model, arguments = trained / "latest" / "model.safetensors", ("--prompt", "line 1", "--tokens", 30)
    first, again, file = (called(generate, path, *arguments, "--seed", 4) for path in (trained, trained, model))
    assert first[1].startswith("line 1")
    assert len(first[1]) > 30
    assert first == again == file
    assert called(generate, trained, *arguments, "--seed", 5) != first
    greedy = [called(generate, trained, *arguments, "--temperature", 0, "--seed", seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1] == called(generate, trained, *arguments, "--top-k", 1)


# What a run shows while it goes on: in a terminal, in a file, from Python

CONFIG = daskgpt.ModelConfig(blocks=2, heads=2, channels=32, vocabulary=257, positions=32)
HEADER = ["scheduler", "model", "data", "batch", "chunks", "precision", "grain"]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    data = {"data": write_text(tmp_path_factory.mktemp("text")), "batch_size": 4, "sequence_length": 32, "groups": 2}
    return partial(daskgpt.fit, CONFIG, data, run={"steps": 4, "validation_batches": 2})


def shown_in_terminal(columns, steps):
    """Return the output to a terminal of some width for a run of some steps with a validation every 20."""
    ours, theirs = opened(columns)
    with ThreadPoolExecutor(1) as pool, os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as stream:
        written = pool.submit(read_to_end, ours)
        progress = Progress(steps, stream=stream)
        progress.begin()
        for step in range(1, steps + 1):
            validated = {"validation_loss": 11.25} if step % 20 == 0 else {}
            progress.line.mininterval = 0
            best = {"best": True} if step == 20 else {}
            progress.step({"loss": 10.9, "tokens": step, "tokens_per_s": 1_234_567.0, **validated, **best})
        progress.close()
        print("\0", end="", file=stream, flush=True)
        return written.result()


@pytest.mark.parametrize("columns", [200, 80, 40])
def test_progress_in_a_terminal(columns):
    written = shown_in_terminal(columns, 60)
    live = [line for line in shown_lines(written) if re.match(r" *\d+/60 ", line)]
    assert max(map(len, live)) <= columns
    assert len(live) > 30
    assert any("validation 11.250, 1,234,567 tokens/s" in line for line in live) == (columns >= 80)
    left = left_lines(written)
    kept = [line for line in left if line.startswith("step")]
    assert [line.split("/")[0] for line in kept] == ["step 20", "step 40", "step 60"]
    assert [line.count("(best)") for line in left if "(best)" in line] == [1]
    assert all("/60  mean loss 10.900" in line for line in kept)
    assert not any(re.match(r" *\d+/60 ", line) for line in left), "the line that is written over is gone in the end"


def test_progress_in_a_file(monkeypatch):
    written = {}
    for every in (0, 3600):
        monkeypatch.setattr("daskgpt.training.metrics.PLAIN_EVERY", every)
        stream = io.StringIO()
        progress = Progress(4, stream=stream)
        progress.begin()
        for step, loss in enumerate((8.0, 4.0, 4.0, 4.0), 1):
            progress.step({"loss": loss, "tokens": 6001 * step, "tokens_per_s": 100.0})
        progress.close()
        written[every] = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue()
    assert [line.split("/")[0] for line in written[3600]] == ["step 1"]
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in written[0]]
    assert len(losses) == 4
    assert losses[0] == 8
    assert 4 < losses[3] < losses[2] < losses[1] < 8
    assert [line.split(", ")[-1] for line in written[0]] == [f"0{minutes}:00 left" for minutes in (3, 2, 1, 0)]


def test_fit_prints_the_header_unless_quiet(fitted, capfd):
    fitted(quiet=True)
    capfd.readouterr()  # what compiling said
    fitted()
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == HEADER
    assert "4 x 32 tokens, summed in 2 groups of 2" in out
    lines = [line for line in err.splitlines() if line.startswith("step")]
    assert [line.split("  ")[0] for line in lines] == ["step 1/4", "step 4/4"]
    assert re.fullmatch(r"step 4/4  mean loss \d\.\d{3}, validation [\d.]+, [\d,]+ tokens/s, after \d\d:\d\d", lines[1])
    result = fitted(quiet=True)
    assert capfd.readouterr() == ("", "")
    assert len(result.losses) == 4
