"""Tests of `--precision bfloat16`: what is held in two precisions, and the choice of `auto`."""

import numpy as np
from conftest import SMALL, random_batch, random_parameters
from steps import run_step, state_of, step_of

from daskgpt.config.run import OptimizerConfig
from daskgpt.kernels.bfloat16.gemm import TrainedWeight, pack_weight
from daskgpt.kernels.bfloat16.isa import outruns_float32, unit
from daskgpt.model.precision import BFLOAT16, FLOAT32, resolve
from daskgpt.schedulers.opening import open_scheduler


def test_an_update_renews_the_packed_copy(random):
    step = step_of(SMALL, (4, 12), (2, 12), OptimizerConfig(), precision=BFLOAT16, in_place=True)
    state = state_of(step, random_parameters(SMALL, random))
    with open_scheduler("threads", 2) as scheduler:
        _, state = run_step(scheduler, step, state, random_batch(SMALL, random), 1)
    trained = [value for pack in state.packs for value in pack if isinstance(value, TrainedWeight)]
    assert {weight.values.shape for weight in trained} == {(32, 16), (48, 16), (16, 16), (64, 16), (16, 64)}
    assert len(trained) == 9  # four a block and the embedding
    for weight in trained:
        fresh = pack_weight(weight.values)
        np.testing.assert_array_equal(weight.packed.forward, fresh.forward)
        np.testing.assert_array_equal(weight.packed.backward, fresh.backward)


def test_auto_precision_reports_its_choice():
    assert resolve("float32", 768) == (FLOAT32, "products in float32")
    for channels in (128, 255, 256, 768):
        picked, why = resolve("auto", channels)
        assert picked is (BFLOAT16 if outruns_float32(unit()) and channels >= 256 else FLOAT32)
        assert why.startswith("auto: ")
