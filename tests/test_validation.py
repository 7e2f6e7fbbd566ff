"""What a validation tells, and samples of text while a run goes on."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from command_lines import run, write_text
from small_runs import FLAGS, fit

from daskgpt.data.dataset import validation_batches
from daskgpt.training.resuming import Resumed


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_bits_a_byte_count_the_bytes_that_were_predicted(text, tmp_path):
    out = tmp_path / "run"
    fit(text, out, validate_every=4, save_every=4)
    validated = [record for record in metrics_of(out) if "validation_loss" in record]
    assert [record["step"] for record in validated] == [3, 7, 11]
    resumed = Resumed(str(out), {"run": {"steps": 20}})
    (tokens,) = validation_batches(resumed.job.tokens.validation, batch_size=4, sequence_length=16, count=1)
    resumed.folder.close()
    size = int(np.sum(tokens[1] < 256))  # end-of-text has no bytes
    for record in validated:
        expected = record["validation_loss"] * tokens[1].size / math.log(2) / size
        assert record["validation_bits_a_byte"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("barrier", ["step", "none"])
def test_samples_are_shown_while_a_run_goes_on(text, tmp_path, barrier):
    flags = [*FLAGS.split(), "--data", text, "--steps", 7, "--barrier", barrier, "--out", tmp_path / "run"]
    result = run("train", *flags, "--sample-tokens", 5, "--sample-every", 3)
    assert result.returncode == 0, result.stderr
    heads = [line for line in result.stdout.splitlines() if line.startswith("--- sample")]
    assert [head.strip("- ") for head in heads] == ["sample after 3 steps", "sample after 6 steps", "sample"]
    assert {len(head) for head in heads} == {71}
