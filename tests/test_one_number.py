"""Tests of the one number: no chunk, grain, barrier, scheduler, thread or worker changes a bit of a random model."""

import json
from itertools import cycle
from pathlib import Path

import campaign
import pytest
from one_number import MODELS, SEED, VARIANTS, Dials, bits_after_steps, seed
from product_cases import UNITS, multiplying

LARGER = {"tiny", "tiny in 4 groups"}
SMALLER = [name for name in MODELS | VARIANTS if name not in LARGER | {"long"}]
CHUNKS = {
    "tiny": [(12, 64), (4, 64), (1, 64), (12, 32), (6, 16)],
    "odd": [(6, 20), (3, 20), (2, 20), (1, 20), (3, 10), (1, 4), (6, 1), (2, 5)],
    "long": [(3, 75), (1, 75), (3, 25), (1, 15), (1, 5), (3, 1)],
}
CHUNKS |= {"tiny in 4 groups": CHUNKS["tiny"], "odd in 2 groups": CHUNKS["odd"], "odd with muon": CHUNKS["odd"][::2]}
CHUNKS["odd with dropout"] = CHUNKS["odd"][1::2]
CHUNKS["llama"] = CHUNKS["llama with adapters"] = CHUNKS["odd"]
DIALS = [
    Dials((1, 5), "step", "kernel", "threads", 2, in_place=False),
    Dials((3, 10), "step", "segment", "threads", 2, accumulate=2),
    Dials((1, 20), "step", "chunk", "threads", 5, accumulate=3),
    Dials((1, 10), "layer", "block", "threads", 2, accumulate=2),
    Dials((2, 4), "layer", "kernel", in_place=False),
    Dials((2, 20), "phase", "kernel", "threads", 2, accumulate=3),
    Dials((1, 20), "none", "block", "threads", 2, accumulate=3, window=1),
    Dials((2, 10), "none", "segment", "threads", 2),
    Dials((3, 4), "phase", "chunk", in_place=False, accumulate=2),
    Dials((1, 10), "layer", "segment", in_place=False, accumulate=2),
    # More threads than chunks of sequences: attention is divided by heads.
    Dials((6, 10), "step", "segment", "threads", 2),
    Dials((3, 4), "none", "kernel", "threads", 8),
    Dials((1, 5), "step", "segment", "threads", 2, accumulate=2),
    Dials((1, 20), "step", "chunk", "threads", 12),
    Dials((1, 5), "step", "chunk", "threads", 12, in_place=False, accumulate=2),
    Dials((2, 10), "none", "segment", "threads", 2, in_place=False),
]


# bfloat16 with each unit that works here: one number each. Of the larger models one precision is enough in a hurry.
CASES = [(name, precision) for name in MODELS for precision in ("float32", *(() if name in LARGER else UNITS))]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_no_chunk_changes_a_bit(name, precision):
    with multiplying(precision) as unit:
        bits = {chunk: bits_after_steps(MODELS[name], unit, Dials(chunk)) for chunk in CHUNKS[name]}
    assert len(set(bits.values())) == 1, bits


@pytest.mark.parametrize(("name", "precision"), list(zip(SMALLER, cycle(["float32", "bfloat16"]))))
def test_none_of_these_dials_changes_a_bit(name, precision):
    model = (MODELS | VARIANTS)[name]
    expected = bits_after_steps(model, precision, Dials(model.batch))
    for dials in DIALS if name in MODELS else DIALS[::3]:
        assert bits_after_steps(model, precision, dials) == expected, dials


EXPECTED = json.loads((Path(__file__).parent / "golden" / "bits.json").read_text())


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_bits_match_the_golden_bits(name, precision):
    """Files of expected bits: float32 has one number, bfloat16 one for each unit."""
    with multiplying(precision) as unit:
        key = precision if precision == unit else f"{unit} {precision}"
        if name not in EXPECTED.get(key, ()):
            pytest.skip(f"no machine with the unit {precision} has written its bits yet")
        assert bits_after_steps(MODELS[name], unit, Dials(CHUNKS[name][2]), 20) == EXPECTED[key][name]


def test_sample_of_the_campaign():
    """Other cases each time; DASKGPT_TEST_SEED repeats them. The whole campaign: see CONTRIBUTING.md."""
    print(f"{SEED}={(number := seed())}")
    results = [campaign.check(number, case, clusters=False) for case in range(4)]
    assert [problem for _, problem in results if problem] == []


@pytest.mark.parametrize("precision", campaign.PRECISIONS)
def test_a_model_of_any_precision_agrees_with_the_independent_program(precision, monkeypatch):
    monkeypatch.setattr(campaign, "PRECISIONS", (precision,))
    print(f"{SEED}={(number := seed())}")
    for case in (1, 3):
        assert campaign.check(number, case) == (f"gradients {precision}", "")
