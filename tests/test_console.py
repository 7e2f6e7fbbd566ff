"""Tests of the program `daskgpt`: which commands it has, what it says, and how it is called."""

import pkgutil
import sys

import pytest

import daskgpt
from daskgpt.__main__ import COMMANDS, console


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
