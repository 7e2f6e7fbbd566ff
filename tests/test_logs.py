"""Tests of a run's metrics as lines of JSON, of its validations and its samples."""

import math
import shutil

import numpy as np
import pytest
from batch_results import results_of
from full_disk import full_disk
from small_runs import FLAGS, MODEL, OPTIMIZER, STEPS, fit, metrics_of

import daskgpt
from daskgpt import train
from daskgpt.config.run import DataConfig, DataflowConfig, RunConfig
from daskgpt.data.dataset import validation_batches
from daskgpt.model.parameters import initial_parameters, step_operations
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.engine import LocalEngine
from daskgpt.training.inference import TOGETHER, Validation
from daskgpt.training.job import Job
from daskgpt.training.logs import metrics_lines
from daskgpt.training.run_folder import RunFolder
from daskgpt.training.start import open_dataset, resumed_run

TOKENS = 4 * 16  # of a step of the smallest run


@pytest.fixture(scope="module")
def logged(tmp_path_factory, small_text):
    """A run that continued from its step 6, what it had done until step 9 once more."""
    out = tmp_path_factory.mktemp("run") / "run"
    fit(small_text, out, save_every=3, keep=9, validate_every=4, steps=9)
    shutil.rmtree(out / "step-00000009")
    daskgpt.fit(resume=out, run={"steps": STEPS}, quiet=True)
    return out


def test_metrics_of_a_step(logged):
    records = metrics_of(logged)
    assert [record["step"] for record in records] == list(range(STEPS))
    assert [record["tokens"] for record in records] == [TOKENS * (step + 1) for step in range(STEPS)]
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds), "a run that is continued has trained as long as all its processes"
    operations = step_operations(MODEL, 4, 16)
    for record in records:
        took = TOKENS / record["tokens_per_s"]
        assert record["gflop_per_s"] == pytest.approx(operations / took / 1e9, rel=0.02, abs=1e-3)
        assert 50e6 < record["memory_bytes"] < 20e9
    assert [record["step"] for record in records if "validation_s" in record] == [3, 7, 11]


def test_records_wait_for_disk_space(tmp_path):
    folder, said = RunFolder(str(tmp_path)), []
    folder.begin({}, {"step": 0})
    with full_disk(1500):
        for step in range(50):
            folder.log({"step": step, "loss": 1.5 * step, "tokens_per_s": float("nan")}, said.append)
        with pytest.raises(OSError, match="all of the file must be written; got path="):
            folder.metrics.sync()
    assert len(said) == 1
    assert (tmp_path / "metrics.jsonl").stat().st_size <= 1500
    folder.log({"step": 50, "loss": 75.0}, said.append)
    folder.close()
    records = metrics_of(tmp_path)
    assert [record["loss"] for record in records] == [1.5 * step for step in range(51)]
    assert records[0]["tokens_per_s"] is None


def test_invalid_metric_lines_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 0}\n', b'{"step": 1}\n', b'{"step": 3}\n'
    wrong = b'{"step": 1, "again": 1}\n', b"[1]\n", b'{"loss": 1}\n', b'{"step": "2"}\n', b"x\n", b'{"step": 4}\n'
    path.write_bytes(b"".join([*good[:2], *wrong[:5], good[2], wrong[5], b'{"step": 2}']))
    assert [line for _, line in metrics_lines(path, 4)] == list(good)


# Validations, and samples of text during a run


def test_bits_per_byte_count_predicted_bytes(logged):
    validated = [record for record in metrics_of(logged) if "validation_loss" in record]
    job, start = resumed_run(str(logged), {"run": {"steps": 20}})
    start.folder.close()
    (tokens,) = validation_batches(job.tokens.validation, batch_size=4, sequence_length=16, count=1)
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
