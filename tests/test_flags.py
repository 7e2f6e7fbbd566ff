"""Flags that other programs have: what answers to them here, and what --help says."""

from __future__ import annotations

import pytest
from command_lines import refused, run

from daskgpt.bench import parser as bench_parser
from daskgpt.config.synonyms import MISSING, SYNONYMS
from daskgpt.study import parser as study_parser
from daskgpt.train import parser as train_parser


def answer(parser, capsys, *words):
    """The one line that a parser says before it ends with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(list(words))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "0.1"], "--lr must be a known flag. It is called --learning-rate here."),
        (["--lr=0.1"], "--lr must be a known flag. It is called --learning-rate here."),
        (["--batch", "4"], "--batch must be a known flag. It is called --batch-size here."),
        (["-b", "4"], "-b must be a known flag. It is called --batch-size here."),
        (["--n_layer", "4"], "--n_layer must be a known flag. It is called --blocks here."),
        (["--block-size", "64"], "--block-size must be a known flag. It is called --sequence-length here."),
        (["--max_iters", "9"], "--max_iters must be a known flag. It is called --steps here."),
        (["--learning_rate", "1"], "--learning_rate must be a known flag. Did you mean --learning-rate?"),
        (["--grad-clip", "1"], "--grad-clip must be a known flag. It is called --clip here."),
        (["--attn_pdrop", "0.1"], "--attn_pdrop must be a known flag. It is called --dropout here."),
        (["--resume-from", "runs/a"], "--resume-from must be a known flag. It is called --resume here."),
        (["--save-interval", "5"], "--save-interval must be a known flag. It is called --save-every here."),
        (["--epochs", "3"], "--epochs must be a known flag. A run is counted in --steps"),
        (["--device", "cuda"], "--device must be a known flag. Everything runs on CPUs"),
        (["--steps", "2", "text.txt"], "text.txt must follow a flag. A text is named by --data."),
    ],
)
def test_flags_of_other_programs_are_answered(words, said, capsys):
    line = answer(train_parser(), capsys, *words)
    assert line.startswith(f"daskgpt.train: {said}")


def test_each_synonym_is_answered_by_a_flag_and_is_none_itself(capsys):
    known = set(train_parser()._option_string_actions)
    for name, flag in SYNONYMS.items():
        assert f"--{flag}" in known, name
        assert f"--{name}" not in known or name == "workers", name  # of a plan; other commands have --threads only
    for name, said in MISSING.items():
        assert f"--{name}" not in known
        for word in said.replace(",", "").replace(".", "").replace(":", "").split():
            assert not word.startswith("--") or word in known, (name, word)
    assert not SYNONYMS.keys() & MISSING.keys()


def test_a_command_only_names_flags_that_it_has(capsys):
    assert answer(bench_parser(), capsys, "--dtype", "bf16").endswith("It is called --precision here.")
    assert "--learning-rate" not in answer(bench_parser(), capsys, "--lr", "0.1")
    assert "--threads" in answer(study_parser(), capsys, "--workers", "2")


def test_help_says_that_precision_is_another_arithmetic():
    text = run("train", "--help").stdout
    assert "changes a bit" not in text
    assert "bfloat16 rounds" in text
    assert refused(run("train", "--lr", 0.1)).startswith("daskgpt.train: --lr must be a known flag.")
