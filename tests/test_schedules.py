"""Tests of learning rates against PyTorch's, and of the length of a run in steps or tokens."""

import json
from itertools import product
from types import SimpleNamespace

import pytest
from conftest import GOLDEN
from small_runs import fit

import daskgpt
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.config.settings import count, count_or_share, part_of
from daskgpt.model.optimizer import learning_rate
from daskgpt.training.job import Job

TORCH = json.loads((GOLDEN / "training.json").read_text())["schedules"]


@pytest.mark.parametrize("warmup", [8, "20%", "17.6%"])
@pytest.mark.parametrize("name", sorted(TORCH))
def test_rates_match_pytorch(name, warmup):
    config = OptimizerConfig(schedule=name, warmup=warmup, cooldown="25%", learning_rate=1e-3, final_learning_rate=1e-4)
    steps = len(TORCH[name])
    assert [learning_rate(config, step, steps) for step in range(steps)] == pytest.approx(TORCH[name], rel=1e-6)


@pytest.mark.parametrize("name", sorted(TORCH))
def test_no_length_leaves_the_bounds(name):
    for steps, warmup, cooldown in product((1, 2, 5, 9, 100), (0, 1, 8, 200, "0%", "100%"), (0, 1, 300, "100%")):
        config = OptimizerConfig(schedule=name, warmup=warmup, cooldown=cooldown)
        for step in range(steps + 3):
            assert 0 < learning_rate(config, step, steps) <= config.learning_rate * (1 + 1e-15)


def test_the_last_step_has_the_final_rate_where_two_follow_the_warmup():
    for name, steps, warmup, cooldown in product(TORCH, (1, 2, 6), (0, 1, 4, 5, 10), (0, 1, 300)):
        config = OptimizerConfig(schedule=name, warmup=warmup, cooldown=cooldown)
        rate = learning_rate(config, steps - 1, steps)
        if warmup <= steps or name == "constant":
            falls = name != "constant" and (name != "wsd" or cooldown) and steps - warmup > 1
            assert rate == (config.final_learning_rate if falls else config.learning_rate)


def test_amounts_of_tokens_and_steps():
    texts = ("7", "10M", "1.5k", "2e6", "3B", "2g", "2.3M", "9" * 400)
    numbers = [7, 10_000_000, 1500, 2_000_000, 3 * 10**9, 2 * 10**9, 2_300_000, 10**400 - 1]
    assert [count(text) for text in texts] == numbers
    with pytest.raises(ValueError, match=r"0\.4"):
        count("0.4")
    assert RunConfig(tokens="1.5k").tokens == 1500
    assert part_of(count_or_share("5%"), 1000) == 50
    assert part_of(count_or_share("0.5 %"), 1001) == 6
    assert part_of(count_or_share("30"), 1000) == 30
    assert part_of(count_or_share("0.07%"), 10_000) == 7  # of which the float 0.07 would make a little more
    settings = DataConfig(batch_size=1), OptimizerConfig(), DataflowConfig(), RunConfig(epochs=0.07)
    assert Job(daskgpt.preset("tiny"), *settings, SimpleNamespace(epoch=lambda length: 100)).steps == 7
    assert OptimizerConfig(warmup="05.0%").warmup == "5%"


@pytest.mark.parametrize("wrong", ["", "5%%", "101%", "-1%", "x", "nan%"])
def test_invalid_amounts_are_refused(wrong):
    with pytest.raises(ValueError, match=f"warmup={wrong!r}"):
        OptimizerConfig(warmup=wrong)


def test_tokens_determine_the_steps(small_text, tmp_path):
    with pytest.raises(ValueError, match="epochs=1.0, tokens=100"):
        fit(small_text, tmp_path / "run", tokens=100, epochs=1)
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
