"""Tests of the command lines: what they print, write and refuse."""

import shlex

import numpy as np
import pytest
from command_lines import SMALL
from small_runs import metrics_of

from daskgpt import generate, train


def test_training_ends_with_a_working_next_command(small_text, tmp_path, called):
    out = tmp_path / "it's a run"
    code, told = called(train, "--data", small_text, *SMALL, "--steps", 2, "--sample-tokens", 5, "--out", out)
    lines = told.splitlines()
    assert code == 0
    assert f"run written to {out}" in lines
    assert sum(line.startswith("--- sample after 2 steps") for line in lines) == 1
    begins = "write text with it: python -m daskgpt."
    (line,) = [line for line in lines if line.startswith(begins)]
    command, *arguments = shlex.split(line.removeprefix(begins))
    assert (command, arguments[0]) == ("generate", str(out))
    assert called(generate, *arguments, "--tokens", 5)[1].startswith(arguments[-1])


def test_training_learns_and_generate_reads_the_run(small_text, tmp_path, called):
    trained = tmp_path / "run"
    flags = ("--steps", 60, "--validate-every", 30, "--sample-tokens", 0, "--out", trained)
    assert called(train, "--data", small_text, *SMALL, *flags)[0] == 0
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
