"""Tests of the advice for flags of other programs, and of errors and exit codes."""

import os
import re
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from daskgpt.__main__ import COMMANDS
from daskgpt.bench import parser as bench_parser
from daskgpt.config.flags import MISSING, SYNONYMS, Parser, run_command, text
from daskgpt.config.stopping import STOPPED, CanGoOn
from daskgpt.study import parser as study_parser
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
        (["--lr", "0.1"], "--lr", "--learning-rate"),
        (["--lr=0.1"], "--lr", "--learning-rate"),
        (["-b", "4"], "-b", "--batch-size"),
        (["--n_layer", "4"], "--n_layer", "--blocks"),
        (["--learning_rate", "1"], "--learning_rate", "Did you mean --learning-rate"),
        (["--attn_pdrop", "0.1"], "--attn_pdrop", "--dropout"),
        (["--batchsize", "3"], "--batchsize", "Did you mean --batch-size"),
        (["--batch-siz", "3"], "--batch-siz", "Did you mean --batch-size"),  # no flag may be shortened
        (["--num-train-epochs", "3"], "--num-train-epochs", "--epochs"),
        (["--device", "cuda"], "--device", "CPUs"),
        (["--steps", "2", "text.txt"], "text.txt", "--data"),
        (["--steps", "2", ""], "''", "variable"),
        (["--steps", "many"], "--steps", "invalid int"),
    ],
)
def test_flags_of_other_programs_get_advice(words, flag, said, capsys):
    line = answer(train_parser(), capsys, *words)
    assert line.startswith("python -m daskgpt.train: ")
    assert flag in line
    assert said in line


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_one_default_of_each_flag(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        import_module(f"daskgpt.{command}").main(["--help"])
    flags = re.split(r"\n  (?=-)", capsys.readouterr().out)
    assert len(flags) > 2
    assert [flag for flag in flags if flag.count("(default") > 1] == []


def test_advice_for_synonyms_names_existing_flags():
    flags = set(train_parser()._option_string_actions)
    for name, flag in SYNONYMS.items():
        assert f"--{flag}" in flags, name
        assert f"--{name}" not in flags or name == "workers", name  # of a plan; other commands have --threads only
    for name, said in MISSING.items():
        assert f"--{name}" not in flags
        for word in said.replace(",", "").replace(".", "").replace(":", "").split():
            assert not word.startswith("--") or word in flags, (name, word)
    assert not SYNONYMS.keys() & MISSING.keys()


def test_a_command_only_names_flags_that_it_has(capsys):
    assert answer(bench_parser(), capsys, "--dtype", "bf16").endswith("It is called --precision here.")
    assert "--learning-rate" not in answer(bench_parser(), capsys, "--lr", "0.1")
    assert "--threads" in answer(study_parser(), capsys, "--workers", "2")


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
def test_values_of_unset_variables_are_refused(command, capsys, monkeypatch):
    parser = parser_of(command, monkeypatch)
    actions = [action for action in parser._actions if action.nargs != 0 and action.type in (None, str, Path, text)]
    places = [action.dest for action in actions if not action.option_strings]
    assert actions
    for action in actions:
        for value in [""] if action.type is text else ["", " ", "\t\n"]:
            words = [value if place == action.dest else "x" for place in places]
            if action.option_strings:
                words += [action.option_strings[0], value]
            assert f"must not be empty; got {value!r}" in answer(parser, capsys, *words)


CODES = [
    (ValueError("wrong"), 2, "wrong"),
    (OSError(28, "No space left"), 2, "stdout"),
    (OSError(28, "No space left", "file"), 2, "file"),
    (OSError(5, "Input/output error"), 2, "Input/output"),
    (BrokenPipeError(32, "Broken pipe"), 2, "Broken pipe"),
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


def test_command_ends_when_its_output_is_closed(monkeypatch):
    ours, theirs = os.pipe()
    os.close(ours)
    with suppress(BrokenPipeError), os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert ended(lambda arguments: print("x" * 100_000)) == 128 + 13
