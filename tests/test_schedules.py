"""Tests of learning rates against PyTorch's, and of the length of a run: steps, tokens, minutes."""

import json
from dataclasses import replace
from itertools import product

import pytest
from conftest import GOLDEN
from small_runs import OPTIMIZER, fit, metrics_of

import daskgpt
from daskgpt.config.run import OptimizerConfig, RunConfig
from daskgpt.config.settings import count, count_or_share, part_of
from daskgpt.model.optimizer import SCHEDULES, learning_rate
from daskgpt.training.job import Horizon

TORCH = json.loads((GOLDEN / "training.json").read_text())["schedules"]


@pytest.mark.parametrize("warmup", [8, "20%", "17.6%"])
@pytest.mark.parametrize("name", sorted({*SCHEDULES, *TORCH}))
def test_rates_match_pytorch(name, warmup):
    config = OptimizerConfig(schedule=name, warmup=warmup, cooldown="25%", learning_rate=1e-3, final_learning_rate=1e-4)
    steps = len(TORCH[name])
    assert [learning_rate(config, step, steps) for step in range(steps)] == pytest.approx(TORCH[name], rel=1e-6)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_no_length_leaves_the_bounds(name):
    for steps, warmup, cooldown in product((1, 2, 5, 9, 100), (0, 1, 8, 200, "0%", "100%"), (0, 1, 300, "100%")):
        config = OptimizerConfig(schedule=name, warmup=warmup, cooldown=cooldown)
        for step in range(steps + 3):
            assert 0 < learning_rate(config, step, steps) <= config.learning_rate * (1 + 1e-15)


def test_amounts_of_tokens_and_steps():
    texts = ("7", "10M", "1.5k", "2e6", "3B", "2g")
    assert [count(text) for text in texts] == [7, 10_000_000, 1500, 2_000_000, 3 * 10**9, 2 * 10**9]
    assert RunConfig(tokens="1.5k").tokens == 1500
    assert part_of(count_or_share("5%"), 1000) == 50
    assert part_of(count_or_share("0.5 %"), 1001) == 6
    assert part_of(count_or_share("30"), 1000) == 30
    assert OptimizerConfig(warmup="05.0%").warmup == "5%"


@pytest.mark.parametrize("wrong", ["", "5%%", "101%", "-1%", "x", "nan%"])
def test_invalid_amounts_are_refused(wrong):
    with pytest.raises(ValueError, match=f"warmup={wrong!r}"):
        OptimizerConfig(warmup=wrong)


def test_tokens_determine_the_steps(small_text, tmp_path):
    with pytest.raises(ValueError, match="tokens=100, minutes=1"):
        fit(small_text, tmp_path / "run", tokens=100, minutes=1)
    result = fit(small_text, tmp_path / "run", steps=99, tokens="500")
    assert len(result.losses) == 8  # of 64 tokens
    assert 'warmup = 3\ncooldown = "20%"' in (tmp_path / "run" / "config.toml").read_text()
    assert "steps = 8\nepochs = 0.0\ntokens = 500\n" in (tmp_path / "run" / "config.toml").read_text()
    assert result.losses == fit(small_text, tmp_path / "steps", steps=8).losses
    with pytest.raises(ValueError, match="steps left; got steps=8"):
        daskgpt.fit(resume=tmp_path / "run", quiet=True)
    assert len(daskgpt.fit(resume=tmp_path / "run", run={"tokens": 640}, quiet=True).losses) == 10
    assert len(daskgpt.fit(resume=tmp_path / "run", run={"steps": 12}, quiet=True).losses) == 12
    assert "steps = 12\nepochs = 0.0\ntokens = 0\n" in (tmp_path / "run" / "config.toml").read_text()


def test_estimates_follow_the_clock():
    horizon = Horizon(RunConfig(minutes=10, steps=50), 64)
    assert (horizon.steps, horizon.at(7), horizon.next_change(3)) == (50, 50, None)
    assert (horizon.passed(2, 20.0), horizon.passed(3, 22.0)) == (False, False)  # the first look
    assert (horizon.passed(6, 28.0), horizon.steps) == (True, 6 + 286)  # 2 s a step, 572 s left
    assert (horizon.at(5), horizon.at(6), horizon.next_change(5)) == (50, 292, 6)
    assert (horizon.passed(9, 40.0), horizon.steps) == (True, 9 + 196)  # 20 / 7 s a step by now
    assert (horizon.passed(10, 700.0), horizon.steps) == (
        True,
        11,
    )  # the time is over: one more
    other = Horizon(RunConfig(minutes=20, steps=50), 64)
    other.resume(horizon.facts(599.0), 10)
    assert other.changes == horizon.changes
    with pytest.raises(ValueError, match="minutes=10, spent=11.7"):
        Horizon(RunConfig(minutes=10), 64).resume(horizon.facts(700.0), 11)


@pytest.mark.parametrize("barrier", ["step", "none"])
def test_minutes_end_a_run_and_its_schedule(small_text, tmp_path, barrier):
    out = tmp_path / "run"
    optimizer = replace(OPTIMIZER, warmup="10%", schedule="linear")
    result = fit(small_text, out, optimizer=optimizer, dataflow={"barrier": barrier}, steps=100, minutes=0.05)
    records = metrics_of(out)
    assert len(records) == len(result.losses)
    assert "validation_loss" in records[-1]
    assert records[-1]["learning_rate"] == pytest.approx(optimizer.final_learning_rate)
    assert f"steps = {len(records)}\n" in (out / "config.toml").read_text()
    with pytest.raises(ValueError, match="time left"):
        daskgpt.fit(resume=out, quiet=True)


def test_resume_keeps_the_estimated_horizon(small_text, tmp_path):
    """A checkpoint holds the estimates, so repeated steps have the same learning rates."""
    out, changes = tmp_path / "run", {"save_every": 1, "keep": 100, "minutes": 0.05, "steps": 100}
    fit(small_text, out, **changes)
    early, *_, late = (json.loads((folder / "state.json").read_text()) for folder in sorted(out.glob("step-*")))
    first, *others = early["horizon"]["changes"]
    assert first == [0, 100]
    assert all(step <= early["step"] for step, _ in others)
    horizon = Horizon(RunConfig(minutes=1), 64)
    horizon.resume(late["horizon"], 0)
    for record in metrics_of(out):
        assert record["learning_rate"] == learning_rate(OPTIMIZER, record["step"], horizon.at(record["step"]))
