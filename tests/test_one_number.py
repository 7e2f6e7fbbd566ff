"""Tests of the one number: no chunk, grain, barrier, scheduler, thread or worker changes a bit of a random model."""

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import campaign
import dask
import dask.array as da
import numpy as np
import pytest
from layer_check import OPTIONS, lazy_arguments, random_arguments
from one_number import MODELS, SEED, VARIANTS, Dials, bits_after_steps, seed
from product_cases import UNITS, multiplying
from reference_gpt2 import expected
from tolerances import TOLERANCES

from daskgpt.graph.sum_order import Groups
from daskgpt.model.layers import LAYERS
from daskgpt.model.tape import Tape

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
    Dials((2, 10), "none", "segment", "threads", 2, in_place=False),
]
SIZES = {"b": 6, "t": 20, "T": 20, "C": 21, "X": 63, "O": 37, "V": 83, "P": 23}


# bfloat16 with each unit that works here: one number each. Of the larger models one precision is enough in a hurry.
CASES = [(name, each) for name in MODELS for each in ["float32", *UNITS] if each == "float32" or name not in LARGER]


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


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_chunks_change_no_bit_of_any_layer(layer, groups):
    """Forward and gradients: no row depends on its company, no sum on where a chunk ends."""
    wide = {"attention": {"X": 35}, "rotary": {"X": 30}, "qk_norm": {"X": 30, "D": 6}, "swiglu": {"X": 42}}
    sizes = SIZES | wide.get(layer.name, {})
    values, expected = random_arguments(layer, np.random.default_rng(4), "f4", sizes), None
    for chunk in CHUNKS["odd"]:
        tape, arrays = Tape(groups=Groups(groups)), lazy_arguments(layer, values, chunk)
        y = tape("here.0", layer, *arrays.values(), **OPTIONS | {"heads": 3})
        dy = np.random.default_rng(3).normal(size=y.shape).astype(np.float32)
        gradients = tape.backward(y, da.from_array(dy, chunks=y.chunks, name="dy-leaf"))
        gradients_by_name = {name: gradients[array.name] for name, array in arrays.items() if array.name in gradients}
        (results,) = dask.compute(gradients_by_name | {"y": y}, scheduler="sync")
        expected = expected or results
        for name, value in results.items():
            assert value.tobytes() == expected[name].tobytes(), f"{name} {chunk}"


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


def test_the_independent_program_agrees_with_the_golden_state(golden_model, golden_state):
    config, parameters = golden_model
    results = expected(parameters, golden_state.tokens, golden_state.targets, config.heads, config.vocabulary)
    assert set(results.gradients) == set(golden_state.gradients)
    compared = [(results.gradients[name], wanted) for name, wanted in golden_state.gradients.items()]
    compared += [(results.logits[..., : config.vocabulary], golden_state.logits), (results.loss, golden_state.loss)]
    errors = [campaign.relative_error(np.asarray(result), np.asarray(wanted)) for result, wanted in compared]
    assert max(errors) < TOLERANCES["float32 file"]["of largest"]


@pytest.mark.parametrize("grain", ["kernel", "segment"])
def test_untied_head_is_summed_over_several_chunks_of_a_micro_batch(grain):
    """Its gradient has no part of the embedding's, so that one task adds all chunks of a micro-batch."""
    model = replace(MODELS["odd"], config=replace(MODELS["odd"].config, head="untied"))
    expected = bits_after_steps(model, "float32", Dials(model.batch))
    for chunk, accumulate in (((1, 20), 2), ((1, 5), 2), ((1, 10), 3)):
        dials = Dials(chunk, "step", grain, "threads", 2, accumulate=accumulate)
        assert bits_after_steps(model, "float32", dials) == expected
