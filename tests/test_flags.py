"""Tests of the command lines: advice for wrong flags, recipes, errors and exit codes, and the program `daskgpt`."""

import io
import os
import pkgutil
import signal
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from command_lines import write_text
from small_runs import config_of

import daskgpt
from daskgpt import train
from daskgpt.__main__ import COMMANDS, console
from daskgpt.config.flags import Parser, run_command, text
from daskgpt.config.run import RECIPES
from daskgpt.config.stopping import STOPPED, CanGoOn
from daskgpt.train import parser as train_parser


def answer(parser, capsys, *words):
    """Return the one line that a parser prints before exit code 2."""
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(list(words))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "flag", "said"),
    [
        (["--learning_rate", "1"], "--learning_rate", "Did you mean --learning-rate"),
        (["--batchsize", "3"], "--batchsize", "Did you mean --batch-size"),
        (["--batch-siz", "3"], "--batch-siz", "Did you mean --batch-size"),  # no flag may be shortened
        (["--lr=4"], "--lr", "--learning-rate"),
        (["--steps", "2", "text.txt"], "text.txt", "--data"),
        (["--steps", "2", ""], "''", "variable"),
        (["--steps", "many"], "--steps", "invalid int"),
    ],
)
def test_wrong_flags_get_advice(words, flag, said, capsys):
    line = answer(train_parser(), capsys, *words)
    assert line.startswith("python -m daskgpt.train: ")
    assert flag in line
    assert said in line


def parser_of(command, monkeypatch):
    """Return the parser of a command."""
    parsers = []

    def parse_args(parser, words):
        parsers.append(parser)
        raise LookupError

    with monkeypatch.context() as patched, suppress(LookupError):
        patched.setattr(Parser, "parse_args", parse_args)
        import_module(f"daskgpt.{command}").main([])
    return parsers[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_shown_and_values_of_unset_variables_are_refused(command, capsys, monkeypatch):
    parser = parser_of(command, monkeypatch)
    assert f"usage: python -m daskgpt.{command}" in parser.format_help()
    actions = [action for action in parser._actions if action.nargs != 0 and action.type in (None, str, Path, text)]
    places = [action.dest for action in actions if not action.option_strings]
    assert actions
    for action in actions:
        for value in [""] if action.type is text else ["", " ", "\t\n"]:
            words = [value if place == action.dest else "x" for place in places]
            if action.option_strings:
                words += [action.option_strings[0], value]
            assert f"must not be empty; got {value!r}" in answer(parser, capsys, *words)


def noted(error, note):
    error.add_note(note)
    return error


CODES = [
    (ValueError("wrong"), 2, "wrong"),
    (OSError(28, "No space left"), 2, "stdout"),
    (OSError(28, "No space left", "file"), 2, "file"),
    (PermissionError(13, "Permission denied", "file"), 2, "access to a file; got path=file, error=Permission denied."),
    (FileNotFoundError(2, "No such file"), 2, "got path=., error=No such file."),
    (noted(FileNotFoundError(2, "No such file", "file"), "(in step 5)"), 2, "its disk. (in step 5)"),
    (OSError(5, "Input/output error"), 2, "Input/output"),
    (BrokenPipeError(32, "Broken pipe"), 2, "Broken pipe"),
    (noted(RuntimeError("wrong"), "(in steps 5 to 8)"), 2, "wrong (in steps 5 to 8)"),
    (RuntimeError("can't start new thread"), 2, "permit more threads; got can't start new thread. Raise"),
    (CanGoOn("a cluster has gone"), STOPPED, "gone"),
    (KeyboardInterrupt(), 130, "stopped"),
    (SystemExit(2), 2, ""),
]


def ended(main):
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as exit:
        run_command(main)
    return exit.value.code


@pytest.mark.parametrize(("error", "code", "said"), CODES)
def test_errors_are_one_line_and_an_exit_code(error, code, said, capfd, monkeypatch):
    def main(arguments):
        raise error

    assert ended(main) == code
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == (said != "")
    assert all(said in line for line in lines)
    monkeypatch.setenv("DASKGPT_DEBUG", "1")
    if not isinstance(error, KeyboardInterrupt | SystemExit):
        with pytest.raises(type(error)):
            run_command(main)


def test_command_arguments_and_exit_code(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--steps", "2"])
    assert ended(len) == 2


def test_what_is_typed_need_not_be_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nb\n"), "utf-8"))
    assert ended(lambda arguments: print(input(), input()) or 0) == 0
    assert capsys.readouterr().out == "a\\xff b\n"


def test_closed_input_is_empty(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert ended(lambda arguments: len(sys.stdin.read())) == 0


HANDLERS = [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)]


@pytest.mark.parametrize(("before", "after"), HANDLERS)
def test_an_ended_command_has_no_handler_of_interrupts(before, after):
    signal.signal(signal.SIGINT, before)
    assert ended(lambda arguments: signal.getsignal(signal.SIGINT) is not before) == 0
    assert signal.getsignal(signal.SIGINT) is after


def test_command_ends_when_its_output_is_closed(monkeypatch):
    ours, theirs = os.pipe()
    os.close(ours)
    with suppress(BrokenPipeError), os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert ended(lambda arguments: print("x" * 100_000)) == 128 + 13


# The program


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
        ("bin/daskgpt train --preset finetun", 2, "train: preset must be known; got preset=finetun. Did you mean fine"),
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


# Recipes of --preset


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_have_known_settings(name):
    known_names = {action.dest for action in train.parser()._actions}
    assert RECIPES[name].keys() <= known_names
    assert train.parsed(["--preset", name, "--init", "model"]).preset == RECIPES[name].get("preset")


def test_flags_override_a_recipe(tmp_path):
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
