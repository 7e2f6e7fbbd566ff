"""Tests of the recipes of `--preset`: flags under one name, which others override."""

import pytest
from command_lines import write_text
from small_runs import config_of

from daskgpt import train
from daskgpt.config.run import RECIPES


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_have_known_settings(name):
    known_names = {action.dest for action in train.parser()._actions}
    assert RECIPES[name].keys() <= known_names
    assert train.parsed(["--preset", name, "--init", "model"]).preset == RECIPES[name].get("preset")


def test_flags_override_a_recipe(tmp_path):
    pytest.importorskip("tokenizers")
    out, text = tmp_path / "run", write_text(tmp_path)
    flags = ["--validation-batches", "2", "--steps", "3", "--warmup", "1", "--sample-tokens", "0", "--blocks", "1"]
    assert train.main(["--preset", "speedrun", "--data", str(text), *flags, "--out", str(out)]) == 0
    written = config_of(out)
    assert (written["data"]["held_out"], written["optimizer"]["optimizer"]) == ("end", "muon")
    assert (written["run"]["steps"], written["run"]["validation_batches"]) == (3, 2)
    assert (written["model"]["blocks"], written["model"]["channels"]) == (1, 128)
    assert written["data"]["encoding"].startswith("learned-")
    with pytest.raises(ValueError, match="keeps the run's own settings; got preset=speedrun"):
        train.main(["--resume", str(out), "--preset", "speedrun"])
