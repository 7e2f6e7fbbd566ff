"""Configurations: what `help` shows a person who has no command line, and what their fields refuse."""

from __future__ import annotations

import math
import pydoc
import re
from dataclasses import fields

import numpy as np
import pytest

import daskgpt
from daskgpt.generate import GenerateConfig
from daskgpt.instruments.random_tokens import BenchConfig
from daskgpt.instruments.study.grid import StudyConfig
from daskgpt.instruments.timeline import TimelineConfig

PUBLIC = [getattr(daskgpt, name) for name in daskgpt.__all__ if name.endswith("Config")]


CONFIGS = list(dict.fromkeys([*PUBLIC, GenerateConfig, BenchConfig, StudyConfig, TimelineConfig]))


@pytest.mark.parametrize("config", CONFIGS)
def test_help_lists_every_field_with_its_meaning_unit_and_default(config):
    page = pydoc.render_doc(config, renderer=pydoc.plaintext)
    own = page[: page.index("Methods defined here")]
    told = " ".join(own.replace("|", " ").split())
    for f in fields(config):
        kind, meaning = (" ".join(text.replace("|", " ").split()) for text in (f.type, f.metadata["help"]))
        assert f" {f.name}: {kind} {meaning}" in told
        words = {number: word for word, number in f.metadata["words"].items()}
        default = words.get(f.default, f.default or "")
        for part in (f.metadata["unit"], ", ".join(f.metadata["choices"]), f"default: {default}".strip()):
            assert part in told
    assert max(map(len, own.split("Fields")[1].splitlines())) <= 80


def test_the_docstring_itself_comes_first():
    document = daskgpt.GPT2Config.__doc__
    assert document.startswith("The size of a GPT-2 model.\n\nErrors   ")
    assert document.index("Source   ") < document.index("Fields   blocks: int")


@pytest.mark.parametrize(
    ("config", "values", "error", "message"),
    [
        (daskgpt.RunConfig, {"steps": "5"}, TypeError, "steps must be a whole number; got steps='5'. Give an int."),
        (daskgpt.RunConfig, {"steps": 1.5}, TypeError, "steps must be a whole number; got steps=1.5. Give an int."),
        (daskgpt.RunConfig, {"steps": True}, TypeError, "steps must be a whole number; got steps=True. Give an int."),
        (daskgpt.RunConfig, {"out": None}, TypeError, "out must be a text; got out=None. Give a str."),
        (daskgpt.RunConfig, {"seed": -1}, ValueError, "seed must not be negative; got seed=-1. Give 0 or more."),
        (daskgpt.GPT2Config, {"blocks": 0}, ValueError, "blocks must be at least 1; got blocks=0. Give 1 or more."),
        (
            daskgpt.OptimizerConfig,
            {"learning_rate": "1e-3"},
            TypeError,
            "learning_rate must be a number; got learning_rate='1e-3'. Give a float.",
        ),
        (daskgpt.OptimizerConfig, {"eps": math.nan}, ValueError, "eps must be finite; got eps=nan. Try 1e-08."),
        (daskgpt.OptimizerConfig, {"beta1": -math.inf}, ValueError, "beta1 must be finite; got beta1=-inf. Try 0.9."),
        (daskgpt.OptimizerConfig, {"beta2": 1}, ValueError, "beta2 must lie in [0, 1); got beta2=1.0. Try 0.99."),
        (
            daskgpt.DataConfig,
            {"validation_fraction": 1},
            ValueError,
            "validation_fraction must lie between 0 and 1; got validation_fraction=1.0. Try 0.1.",
        ),
        (
            daskgpt.DataflowConfig,
            {"grain": "blocks"},
            ValueError,
            "grain must be known; got grain=blocks. Did you mean block?",
        ),
        (daskgpt.DataflowConfig, {"window": 0}, ValueError, "window must be at least 1; got window=0. Give 1 or more."),
        (GenerateConfig, {"temperature": -1}, ValueError, "temperature must not be negative; got temperature=-1.0."),
        (BenchConfig, {"batch_size": 0}, ValueError, "batch_size must be at least 1; got batch_size=0."),
        (StudyConfig, {"minutes": math.inf}, ValueError, "minutes must be finite; got minutes=inf. Try 28.0."),
        (TimelineConfig, {"timeline_steps": 2.0}, TypeError, "timeline_steps must be a whole number; got"),
    ],
)
def test_a_value_that_a_field_does_not_allow_is_refused(config, values, error, message):
    with pytest.raises(error, match=re.escape(f"{config.__name__}: {message}")):
        config(**values)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_number_has_bounds_and_no_field_takes_another_type(config):
    for f in fields(config):
        wrong = 1.5 if f.metadata["parse"] else 5 if isinstance(f.default, str) else "5"
        with pytest.raises(TypeError, match=f"^{config.__name__}: {f.name} must be "):
            config(**{f.name: wrong})
        if not isinstance(f.default, str):
            with pytest.raises(ValueError, match=f"^{config.__name__}: {f.name} must .*; got {f.name}=-"):
                config(**{f.name: -2})  # -1 may be a word's number


def test_numbers_of_numpy_and_paths_become_what_the_field_holds(tmp_path):
    run = daskgpt.RunConfig(steps=np.int64(5), out=tmp_path)
    optimizer = daskgpt.OptimizerConfig(learning_rate=np.float32(0.5), eps=0)
    held = run.steps, run.out, optimizer.learning_rate, optimizer.eps
    assert held == (5, str(tmp_path), 0.5, 0.0)
    assert [type(value) for value in held] == [int, str, float, float]
