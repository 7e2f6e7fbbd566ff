"""Tests of validations, and of samples of text during a run."""

import math

import numpy as np
import pytest
from batch_results import results_of
from small_runs import FLAGS, MODEL, OPTIMIZER, fit, metrics_of

from daskgpt import train
from daskgpt.config.run import DataConfig, DataflowConfig, RunConfig
from daskgpt.data.dataset import validation_batches
from daskgpt.model.parameters import initial_parameters
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.engine import LocalEngine
from daskgpt.training.inference import TOGETHER, Validation
from daskgpt.training.job import Job
from daskgpt.training.start import open_dataset, resumed_run


def test_bits_per_byte_count_predicted_bytes(small_text, tmp_path):
    out = tmp_path / "run"
    fit(small_text, out, validate_every=4, save_every=4)
    validated = [record for record in metrics_of(out) if "validation_loss" in record]
    assert [record["step"] for record in validated] == [3, 7, 11]
    job, start = resumed_run(str(out), {"run": {"steps": 20}})
    (tokens,) = validation_batches(job.tokens.validation, batch_size=4, sequence_length=16, count=1)
    start.folder.close()
    size = int(np.sum(tokens[1] < 256))  # end-of-text has no bytes
    for record in validated:
        expected = record["validation_loss"] * tokens[1].size / math.log(2) / size
        assert record["validation_bits_a_byte"] == pytest.approx(expected, rel=1e-12)


def test_validation_in_one_graph_matches_single_batches(small_text):
    """More of them than one graph has."""
    data = DataConfig(data=str(small_text), batch_size=4, sequence_length=16)
    run, tokens = RunConfig(validation_batches=TOGETHER + 2), open_dataset(data, MODEL.vocabulary)
    job = Job(MODEL, data, OPTIMIZER, DataflowConfig(), run, tokens)
    with open_scheduler("threads", 2) as scheduler:
        engine = LocalEngine(job, scheduler)
        engine.start(initial_parameters(MODEL, seed=1))
        given = scheduler, MODEL, engine.weights().parameters(scheduler)
        batches = validation_batches(job.tokens.validation, batch_size=4, sequence_length=16, count=TOGETHER + 2)
        losses = [float(results_of(*given, batch, (2, 8), groups=job.groups)["loss"]) for batch in batches]
        assert len(set(losses)) > 1
        assert Validation(job, engine).loss() == sum(losses) / len(losses)


@pytest.mark.parametrize("barrier", ["step", "none"])
def test_samples_during_a_run(small_text, tmp_path, barrier, capfd):
    flags = [*FLAGS.split(), "--data", small_text, "--steps", 7, "--barrier", barrier, "--out", tmp_path / "run"]
    assert train.main([*map(str, flags), "--sample-tokens", "5", "--sample-every", "3"]) == 0
    heads = [line for line in capfd.readouterr().out.splitlines() if line.startswith("--- sample")]
    assert [head.strip("- ") for head in heads] == [f"sample after {steps} steps" for steps in (3, 6, 7)]
