"""A run whose numbers are no longer finite stops there, says so in one line and writes no model."""

from __future__ import annotations

import json
import math
import re
import signal

import numpy as np
import pytest
from command_lines import SMALL, run, write_text
from conftest import random_parameters

import daskgpt

MODEL = daskgpt.preset("tiny", blocks=1, heads=2, channels=16, positions=32)
STEEP = daskgpt.OptimizerConfig(learning_rate=1e30, schedule="constant")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def fit(text, optimizer=None, *, dataflow=None, parameters=None, on_step=None, **settings):
    data = daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=16)
    return daskgpt.fit(
        MODEL,
        data,
        optimizer,
        daskgpt.DataflowConfig(**dataflow or {}),
        daskgpt.RunConfig(**{"steps": 20, "validation_batches": 1} | settings),
        parameters=parameters,
        on_step=on_step,
    )


def strict(line):
    """JSON as its standard has it: Python's own reader takes NaN for a number."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def metrics_of(folder):
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_command_line_stops_at_the_first_loss_that_is_not_finite(text, tmp_path):
    out = tmp_path / "run"
    steep = ("--learning-rate", 1e30, "--schedule", "constant", "--steps", 50)
    result = run("train", "--data", text, *SMALL, *steep, "--out", out)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    first, last = metrics_of(out)
    assert result.stderr.splitlines()[-1] == (
        "train: the loss must stay finite; got step=1, loss=nan, learning_rate=1e+30. "
        f"It came at once, from {first['loss']:.3f}: likely one update that was too large: lower --learning-rate, give "
        "more --warmup or --clip 1. No such model is written; "
        f"the losses are in {out / 'metrics.jsonl'}. There is no checkpoint to go on from."
    )
    assert math.isfinite(first["loss"])
    assert (last["step"], last["loss"]) == (1, None)
    assert {path.name for path in out.iterdir()} == {".lock", "config.toml", "metrics.jsonl"}


@pytest.mark.parametrize("barrier", ["step", "none"])
@pytest.mark.parametrize("scheduler", ["sync", "threads", "local"])
def test_every_scheduler_stops_at_the_same_step(text, tmp_path, scheduler, barrier):
    dataflow = {"scheduler": scheduler, "barrier": barrier, "window": 4, "threads": 2}
    message = "the loss must stay finite; got step=1, loss=nan, learning_rate=1e+30."
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fit(text, STEEP, dataflow=dataflow, out=str(tmp_path / "run"))
    assert [record["loss"] is None for record in metrics_of(tmp_path / "run")] == [False, True]


def test_what_the_last_update_spoils_is_seen_at_the_validation(text, tmp_path):
    message = "the validation loss must stay finite; got step=0, validation_loss=nan, learning_rate=1e+30."
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fit(text, STEEP, out=str(tmp_path / "run"), steps=1)
    (record,) = metrics_of(tmp_path / "run")
    assert math.isfinite(record["loss"])
    assert record["validation_loss"] is None
    assert not list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize("dataflow", [{}, {"precision": "bfloat16"}, {"scheduler": "local", "threads": 2}])
def test_parameters_that_no_loss_reads_are_looked_at_too(text, tmp_path, random, dataflow):
    parameters = random_parameters(MODEL, random)
    parameters["wpe.weight"][20, 3] = np.nan  # a position beyond the sequences
    message = "parameters must stay finite; got step=3, parameter=wpe.weight, learning_rate="
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fit(text, dataflow=dataflow, parameters=parameters, out=str(tmp_path / "run"), validate_every=4)
    assert [math.isfinite(record["loss"]) for record in metrics_of(tmp_path / "run")] == [True] * 4
    assert not list((tmp_path / "run").glob("step-*"))


def test_a_run_that_is_stopped_writes_no_model_of_them_either(text, tmp_path):
    def stop(step, metrics):
        signal.raise_signal(signal.SIGINT)

    steep = daskgpt.OptimizerConfig(learning_rate=1e300, schedule="constant")  # more than float32 holds
    with pytest.raises(RuntimeError, match="parameters must stay finite; got step=0"):
        fit(text, steep, on_step=stop, out=str(tmp_path / "run"))
    assert not list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize("name", ["learning_rate", "final_learning_rate", "eps", "weight_decay"])
def test_settings_must_be_finite(name):
    with pytest.raises(ValueError, match=re.escape(f"OptimizerConfig: {name} must be finite; got {name}=inf.")):
        daskgpt.OptimizerConfig(**{name: math.inf})


def test_the_last_good_checkpoint_is_named(text, tmp_path):
    out = tmp_path / "run"
    fit(text, {"schedule": "constant"}, out=str(out), steps=3, save_every=2, sample_tokens=0)
    given = {"run": {"steps": 40}, "optimizer": {"learning_rate": 1e30}}
    with pytest.raises(RuntimeError, match="must stay finite") as ended:
        daskgpt.fit(resume=out, quiet=True, **given)
    said = str(ended.value)
    (found,) = re.findall(r"The last good checkpoint is (\S+): --resume (\S+) goes on from there", said)
    assert found == (str(sorted(out.glob("step-*"))[-1]), str(out))
    assert "It came at once" in said
    assert daskgpt.load(found[0])
