"""A small sample of the campaign, and the independent program that it compares with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import campaign
import numpy as np
from command_lines import PATIENCE
from one_number import seed
from reference_gpt2 import expected
from tolerances import TOLERANCES


def test_a_sample_of_the_campaign_finds_nothing():
    """Other cases each time; DASKGPT_TEST_SEED repeats them. The whole campaign: see CONTRIBUTING.md."""
    number = seed()
    print(f"DASKGPT_TEST_SEED={number}")
    found = [campaign.check(number, case, clusters=False) for case in range(8)]
    assert [problem for _, problem in found if problem] == []
    assert {kind.split()[0] for kind, _ in found} == set(campaign.KINDS)


def test_the_independent_program_agrees_with_the_golden_state(golden_model, golden_state):
    config, parameters = golden_model
    found = expected(parameters, golden_state.tokens, golden_state.targets, config.heads, config.vocabulary)
    assert set(found.gradients) == set(golden_state.gradients)
    compared = [(found.gradients[name], wanted) for name, wanted in golden_state.gradients.items()]
    compared += [(found.logits[..., : config.vocabulary], golden_state.logits), (found.loss, golden_state.loss)]
    errors = [campaign.relative_error(np.asarray(own), np.asarray(wanted)) for own, wanted in compared]
    assert max(errors) < TOLERANCES["float32 file"]["of largest"]


def test_a_campaign_that_finds_something_says_how_to_repeat_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["campaign.py", "--seed", "3", "--cases", "3", "--first", "1"])

    def off(*arguments):
        found = expected(*arguments)
        found.gradients["ln_f.bias"][0] += 1
        return found

    monkeypatch.setattr(campaign, "expected", off)
    assert campaign.main() == 1
    printed = capsys.readouterr().out
    assert "ln_f.bias is off by" in printed
    assert "python tests/campaign.py --seed 3 --first 1 --cases 1" in printed
    assert "3 cases, 2 failed" in printed


def test_the_campaign_is_a_command():
    command = [sys.executable, str(Path(campaign.__file__)), "--cases", "2", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 cases, 0 failed: 1 bits ")
