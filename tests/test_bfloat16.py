"""`--precision bfloat16`: the same bits however it is run, close to float32, and every unit forced."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from command_lines import PATIENCE
from conftest import GOLDEN, SMALL, random_batch, random_parameters
from product_cases import using
from test_grain import assert_same_bits
from test_model import losses_and_parameters
from tolerances import TOLERANCES

from daskgpt.config.run import OptimizerConfig
from daskgpt.kernels import linear
from daskgpt.kernels.bfloat16 import Unit, outruns_float32, pack_weight, rounded_layers, unit, works
from daskgpt.kernels.bfloat16.rounded_layers import TrainedWeight
from daskgpt.model.precision import BFLOAT16, FLOAT32, settle
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.step import TrainingStep, held_weights

UNITS = [unit.name.lower() for unit in Unit]


def available(name):
    if not works(Unit[name.upper()]):
        pytest.skip(f"this processor has no {name} unit")


def test_every_way_to_run_it_gives_the_same_bits():
    expected = losses_and_parameters("sync", 1, (2, 12), grain="kernel", in_place=False, precision=BFLOAT16)
    for grain, scheduler, in_place in itertools.product(("segment", "chunk"), ("sync", "threads"), (True, False)):
        found = losses_and_parameters(scheduler, 2, (2, 12), grain=grain, in_place=in_place, precision=BFLOAT16)
        assert_same_bits(found, expected, f"{grain} {scheduler} {in_place}")
    for barrier in ("layer", "phase"):
        found = losses_and_parameters("threads", 2, (2, 12), barrier=barrier, precision=BFLOAT16)
        assert_same_bits(found, expected, barrier)


@pytest.mark.slow
def test_a_cluster_of_processes_gives_the_same_bits():
    expected = losses_and_parameters("threads", 2, (2, 12), steps=2, precision=BFLOAT16)
    found = losses_and_parameters("local", 2, (2, 12), steps=2, precision=BFLOAT16)
    assert_same_bits(found, expected, "local")


def test_losses_stay_close_to_those_of_float32():
    exact, _ = losses_and_parameters("threads", 2, (2, 12), steps=10)
    found, _ = losses_and_parameters("threads", 2, (2, 12), steps=10, precision=BFLOAT16)
    np.testing.assert_allclose(found, exact, **TOLERANCES["bfloat16 losses"])
    assert found != exact


def test_an_update_renews_the_packed_copy():
    random = np.random.default_rng(2)
    step = TrainingStep(SMALL, (4, 12), (2, 12), OptimizerConfig(), precision=BFLOAT16, in_place=True)
    state = step.initial(random_parameters(SMALL, random))
    with open_scheduler("threads", 2) as scheduler:
        _, state = step(scheduler, state, *random_batch(SMALL, random), 1)
    trained = [value for pack in state.packs for value in pack if isinstance(value, TrainedWeight)]
    assert len(trained) == 9  # four a block and the embedding
    for weight in trained:
        fresh = pack_weight(weight.values)
        np.testing.assert_array_equal(weight.packed.forward, fresh.forward)
        np.testing.assert_array_equal(weight.packed.backward, fresh.backward)


def test_products_round_their_operands_and_nothing_else(random):
    x, weight, bias = (random.normal(size=shape).astype("f4") for shape in ((2, 5, 40), (33, 40), (33,)))
    exact = linear.forward(x, weight, bias)
    found = rounded_layers.linear_forward(x, TrainedWeight.of(weight), bias)
    np.testing.assert_allclose(found, exact, **TOLERANCES["bfloat16 product"])
    assert not np.array_equal(found, exact)


def test_what_is_held_in_two_precisions():
    values = held_weights(SMALL, random_parameters(SMALL, np.random.default_rng(1)), BFLOAT16)
    packed = {name.removeprefix("weight.") for name, value in values.items() if isinstance(value, TrainedWeight)}
    assert "wte.weight" in packed
    assert "h.1.mlp.c_fc.weight" in packed
    assert "wpe.weight" not in packed
    assert not any(name.endswith("bias") for name in packed)


@pytest.mark.parametrize("name", UNITS)
def test_memory_that_both_directions_share_is_counted_once(name):
    with using(name):
        weight = TrainedWeight.of(np.ones((64, 96), np.float32))
    # Rounded values in float32 serve both products; in tiles each product has 2 bytes a number of its own.
    assert weight.nbytes == 2 * weight.values.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_agrees_with_the_golden_state(unit):
    available(unit)
    command = [sys.executable, "-m", "daskgpt.verify", str(GOLDEN / "gpt2_small.bin")]
    command += [str(GOLDEN / "gpt2_small_debug_state.bin"), "--precision", "bfloat16", "--batch-chunk", "2"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | {"DASKGPT_MATMUL": unit}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "all agree"


def test_auto_says_what_it_picked_and_why():
    assert settle("float32", 768) == (FLOAT32, "products in float32")
    for channels in (128, 768):
        picked, why = settle("auto", channels)
        assert picked is (BFLOAT16 if outruns_float32(unit()) and channels >= 256 else FLOAT32)
        assert why.startswith("auto: ")


@pytest.mark.parametrize(
    ("processor", "fast"),
    [("znver4", {Unit.AVX512, Unit.AMX}), ("sapphirerapids", {Unit.AMX})],
)
def test_which_units_outrun_float32_on_which_processors(monkeypatch, processor, fast):
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: processor)
    assert {each for each in Unit if outruns_float32(each)} == fast
