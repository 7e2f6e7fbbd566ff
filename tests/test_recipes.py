"""Recipes of `--preset`: flags under one name, which others override."""

from __future__ import annotations

import tomllib

import pytest
from command_lines import refused, run, write_text

from daskgpt.config.recipes import RECIPES
from daskgpt.train import parsed, parser


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_flags_that_are_known(name):
    parser().parse_args(RECIPES[name].arguments)
    assert parsed(["--preset", name]).preset == RECIPES[name].preset


def test_what_is_given_beside_a_recipe_comes_after_it(tmp_path):
    pytest.importorskip("tokenizers")
    out = tmp_path / "run"
    flags = ("--validation-batches", 2, "--steps", 3, "--warmup", 1, "--sample-tokens", 0, "--out", out)
    result = run("train", "--preset", "speedrun", "--data", write_text(tmp_path), *flags)
    assert result.returncode == 0, result.stderr
    written = tomllib.loads((out / "config.toml").read_text())
    assert (written["data"]["held_out"], written["optimizer"]["optimizer"]) == ("end", "muon")
    assert (written["run"]["steps"], written["run"]["validation_batches"]) == (3, 2)
    assert (written["model"]["blocks"], written["model"]["channels"]) == (4, 128)
    assert written["data"]["encoding"].startswith("learned-")
    assert refused(run("train", "--resume", out, "--preset", "speedrun")).startswith(
        "train: --resume keeps the run's own settings; got "
    )
