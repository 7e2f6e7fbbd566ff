"""Tests of configurations: the checks and values of their fields, and their `help`."""

import math
import re
from dataclasses import fields

import numpy as np
import pytest

import daskgpt
from daskgpt.generate import GenerateConfig
from daskgpt.profiling.measure import BenchConfig
from daskgpt.profiling.recorder import TimelineConfig
from daskgpt.study import StudyConfig

PUBLIC = [getattr(daskgpt, name) for name in daskgpt.__all__ if name.endswith("Config")]


CONFIGS = list(dict.fromkeys([*PUBLIC, GenerateConfig, BenchConfig, StudyConfig, TimelineConfig]))


@pytest.mark.parametrize(
    ("config", "values", "error", "said"),
    [
        (daskgpt.RunConfig, {"steps": True}, TypeError, "whole number; got steps=True"),
        (daskgpt.RunConfig, {"steps": 0}, ValueError, "at least 1"),
        (daskgpt.RunConfig, {"tokens": "many"}, ValueError, "tokens"),
        (daskgpt.RunConfig, {"tokens": 400 * "9"}, ValueError, "at most"),
        (daskgpt.OptimizerConfig, {"eps": math.nan}, ValueError, "Try 1e-08"),
        (daskgpt.OptimizerConfig, {"beta1": -math.inf}, ValueError, "finite"),
        (daskgpt.OptimizerConfig, {"beta2": 1}, ValueError, "below 1"),
        (daskgpt.DataConfig, {"validation_fraction": 0}, ValueError, "above 0"),
        (daskgpt.DataflowConfig, {"grain": "blocks"}, ValueError, "Did you mean block?"),
        (daskgpt.RunConfig, {"out": " "}, ValueError, "out must not be empty"),
        (GenerateConfig, {"top_p": 2}, ValueError, "at most 1"),
    ],
)
def test_disallowed_values_are_refused(config, values, error, said):
    with pytest.raises(error, match=f"{config.__name__}: .*{re.escape(said)}"):
        config(**values)


def test_bounds_are_inclusive_or_exclusive():
    optimizer = daskgpt.OptimizerConfig(beta1=0, learning_rate=1e-30, beta2=0.9999999)
    assert (optimizer.beta1, optimizer.learning_rate, optimizer.beta2) == (0.0, 1e-30, 0.9999999)
    assert (daskgpt.RunConfig(steps=1).steps, daskgpt.RunConfig(seed=0).seed) == (1, 0)


@pytest.mark.parametrize("config", CONFIGS)
def test_fields_check_bounds_and_types(config):
    for f in fields(config):
        wrong = 1.5 if f.metadata["parse"] else 5 if isinstance(f.default, str) else "5"
        with pytest.raises(TypeError, match=f"^{config.__name__}: {f.name} must be "):
            config(**{f.name: wrong})
        if not isinstance(f.default, str):
            with pytest.raises(ValueError, match=f"^{config.__name__}: {f.name} must .*; got {f.name}=-"):
                config(**{f.name: -2})  # -1 may be a word's number


def test_numpy_numbers_and_paths_are_converted(tmp_path):
    run = daskgpt.RunConfig(steps=np.int64(5), out=tmp_path)
    optimizer = daskgpt.OptimizerConfig(learning_rate=np.float32(0.5), eps=1)
    held = run.steps, run.out, optimizer.learning_rate, optimizer.eps
    assert held == (5, str(tmp_path), 0.5, 1.0)
    assert [type(value) for value in held] == [int, str, float, float]
