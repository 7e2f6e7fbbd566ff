"""Tests of the program `daskgpt` and its command lines: what they print, write and refuse, and recipes of flags."""

import pkgutil
import shlex
import sys

import numpy as np
import pytest
from command_lines import SMALL, write_text
from small_runs import config_of, metrics_of

import daskgpt
from daskgpt import generate, train
from daskgpt.__main__ import COMMANDS, console
from daskgpt.config.run import RECIPES


def test_the_commands_are_the_modules_of_the_package():
    modules = {module.name for module in pkgutil.iter_modules(daskgpt.__path__) if not module.ispkg}
    assert COMMANDS.keys() == modules - {"__main__"}


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("bin/daskgpt", 0, "\n  train "),
        ("bin/daskgpt --version", 0, f"daskgpt {daskgpt.__version__}\n"),
        ("bin/daskgpt trian", 2, "command=trian. Did you mean train?"),
        ("bin/daskgpt --steps 50", 2, "command=--steps. See daskgpt --help."),
        ("bin/daskgpt help plot", 0, "usage: daskgpt plot "),
        ("bin/daskgpt plot --ot 1 run", 2, "daskgpt plot: --ot must be a known flag. Did you mean --out?"),
        ("bin/daskgpt plot run", 2, "out=nothing"),
        ("daskgpt/__main__.py plot -h", 0, "usage: python -m daskgpt plot "),
    ],
)
def test_what_is_typed_is_answered(typed, code, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", typed.split())
    with pytest.raises(SystemExit) as end:
        console()
    out, error = capsys.readouterr()
    assert (end.value.code, said in (error if code else out)) == (code, True)
    assert error.count("\n") == (code == 2)


@pytest.fixture
def written(capsys):
    """What a command line prints."""

    def call(command, *arguments):
        capsys.readouterr()
        assert command.main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return call


def test_training_ends_with_a_working_next_command(small_text, tmp_path, written):
    out = tmp_path / "it's a run"
    lines = written(train, "--data", small_text, *SMALL, "--steps", 2, "--sample-tokens", 5, "--out", out).splitlines()
    assert f"run written to {out}" in lines
    assert sum(line.startswith("--- sample after 2 steps") for line in lines) == 1
    begins = "write text with it: python -m daskgpt."
    (line,) = [line for line in lines if line.startswith(begins)]
    command, *arguments = shlex.split(line.removeprefix(begins))
    assert (command, arguments[0]) == ("generate", str(out))
    assert written(generate, *arguments, "--tokens", 5).startswith(arguments[-1])


def test_training_learns_and_generate_reads_the_run(small_text, tmp_path, written):
    trained = tmp_path / "run"
    flags = ("--steps", 60, "--validate-every", 30, "--sample-tokens", 0, "--out", trained)
    written(train, "--data", small_text, *SMALL, *flags)
    metrics = metrics_of(trained)
    assert [record["step"] for record in metrics] == list(range(60))
    assert metrics[0]["loss"] == pytest.approx(np.log(257), abs=0.3)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1.5
    assert [record["step"] for record in metrics if "validation_loss" in record] == [29, 59]
    arguments = ("--prompt", "line 1", "--tokens", 30)
    first, again, file = (
        written(generate, path, *arguments, "--seed", 4)
        for path in (trained, trained, trained / "latest" / "model.safetensors")
    )
    assert first.startswith("line 1")
    assert len(first) > 30
    assert first == again == file
    assert written(generate, trained, *arguments, "--seed", 5) != first
    greedy = [written(generate, trained, *arguments, "--temperature", 0, "--seed", seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1] == written(generate, trained, *arguments, "--top-k", 1)


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
