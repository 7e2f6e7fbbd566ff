"""Damaged files of every format: some hundred cases of what `python tests/fuzz.py` tries thousands of."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_lines import PATIENCE

pytest.importorskip("hypothesis", reason="Hypothesis is not installed (the extra test)")

from fuzz_cases import FORMATS, Example, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files(name, tmp_path):
    example = Example(name, tmp_path / "files")

    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def case(data):
        example.check(*data.draw(damaged(example.whole)))

    case()


def test_every_file_of_an_example_is_needed(tmp_path):
    for number, (name, one) in enumerate(FORMATS.items()):
        example = Example(name, tmp_path / str(number))
        for file in one.damaged:
            assert example.check(file, example.whole[file]) == "read"
            assert example.check(file, b"") == "refused"


def test_the_command(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), "--cases", "90", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("90 cases: ")


def raising(error):
    def read(folder):
        raise error

    return read


@pytest.mark.parametrize(
    "wrong",
    [
        raising(KeyError("a")),
        raising(ValueError("a word")),
        raising(ValueError("where: the rule is this; got path=another file. Do that.")),
        lambda folder: {},
        lambda folder: FORMATS["llm.c"].read(folder) | {"ln_f.bias": FORMATS["llm.c"].read(folder)["ln_f.weight"]},
    ],
)
def test_a_reader_that_is_wrong_is_found(tmp_path, wrong):
    example = Example("llm.c", tmp_path / "files")
    example.format = replace(example.format, read=wrong)
    with pytest.raises((AssertionError, KeyError)):
        example.check("m.bin", example.whole["m.bin"])
