"""Tests of validations, and of samples of text during a run."""

import math
import signal
from contextlib import contextmanager
from unittest.mock import Mock

import numpy as np
import pytest
from batch_results import results_of
from small_runs import FLAGS, MODEL, OPTIMIZER, STEPS, fit, metrics_of, tensors_of

import daskgpt
from daskgpt import train
from daskgpt.audit import main
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


@pytest.mark.parametrize(("save", "best"), [(0, 1), (0, 0), (4, 1)])
def test_a_validation_that_a_stop_cuts_short_is_made_when_the_run_continues(small_text, tmp_path, save, best):
    """In the middle of the run, and after its last step: metrics, best checkpoint and bits are those of a whole run."""

    def stopping_at(number):
        @contextmanager
        def watch(steps):
            yield
            if number in steps:
                signal.raise_signal(signal.SIGINT)

        return Mock(watch=watch, begin=lambda *of_run: 0)

    out, whole = tmp_path / "run", tmp_path / "whole"
    settings = {"validate_every": 4, "save_every": save, "keep_best": best, "save_minutes": 0, "sample_tokens": 0}
    run = {"steps": STEPS, "validation_batches": 1, "out": str(out), **settings}
    data = {"data": str(small_text), "batch_size": 4, "sequence_length": 16}
    assert daskgpt.fit(MODEL, data, OPTIMIZER, run=run, callbacks=[stopping_at(3)], quiet=True).stopped
    assert "validation_loss" not in metrics_of(out)[-1]
    assert daskgpt.fit(resume=out, callbacks=[stopping_at(11)], quiet=True).stopped
    assert len(metrics_of(out)) == STEPS
    result = daskgpt.fit(resume=out, quiet=True)
    assert (result.stopped, result.first, len(result.losses)) == (False, STEPS, STEPS)
    with pytest.raises(ValueError, match="must have steps left"):
        daskgpt.fit(resume=out, quiet=True)
    fit(small_text, whole, **settings)
    losses = [[record.get("validation_loss") for record in metrics_of(folder)] for folder in (out, whole)]
    assert losses[0] == losses[1]
    assert [loss is not None for loss in losses[0]] == [False, False, False, True] * 3
    assert (out / "best").exists() == (whole / "best").exists() == bool(best)
    assert (out / "best").resolve().name == (whole / "best").resolve().name
    assert main([str(out)]) == 0
    assert tensors_of(out) == tensors_of(whole)


@pytest.mark.parametrize("barrier", ["step", "none"])
def test_samples_during_a_run(small_text, tmp_path, barrier, capfd):
    flags = [*FLAGS.split(), "--data", small_text, "--steps", 7, "--barrier", barrier, "--out", tmp_path / "run"]
    assert train.main([*map(str, flags), "--sample-tokens", "5", "--sample-every", "3"]) == 0
    heads = [line for line in capfd.readouterr().out.splitlines() if line.startswith("--- sample")]
    assert [head.strip("- ") for head in heads] == [f"sample after {steps} steps" for steps in (3, 6, 7)]
