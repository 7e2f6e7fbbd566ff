"""Tests of dropout: masks that follow from seed, step and place alone, and none outside of training."""

import json

import numba
import numpy as np
import pytest
from conftest import GOLDEN, SMALL
from reference_dropout import factors
from small_runs import fit
from steps import step_of
from tolerances import TOLERANCES

from daskgpt.config.run import OptimizerConfig
from daskgpt.kernels.dropout import dropped, philox, streams, threshold_of

TORCH = json.loads((GOLDEN / "training.json").read_text())["dropout"]
# Nothing is learned: what differs is what is dropped.
STILL = {"learning_rate": 0, "final_learning_rate": 0, "warmup": 3}


@numba.njit
def words_of(numbers):
    return philox(*numbers)


def words(*numbers):
    """Of a counter of four words and a key of two."""
    return words_of(tuple(np.uint64(number) for number in numbers))


def test_philox_known_answers():
    """The known answers of Random123."""
    ones = 0xFFFFFFFF
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert words(*[0] * 6) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert words(*[ones] * 6) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert words(*counter, *key) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
@pytest.mark.parametrize(("step", "place", "channels"), [(0, 6, 21), (3, 1, 1), (2**32 + 1, 2, 8)])
def test_masks_match_an_independent_program(seed, step, place, channels):
    """Tokens from the middle of a sequence, and channels that are no multiple of anything."""
    x, keys = np.random.default_rng(1).normal(size=(3, 5, channels)), streams(seed, step, 3)
    result = dropped(x, keys, np.arange(4, 9, dtype=np.int32), place, 0.3)
    masks = [factors(seed, step, sequence, place, 0, 9, channels, 0.3)[4:] for sequence in range(3)]
    np.testing.assert_allclose(result, x * masks, **TOLERANCES["kernel float64"])


def test_seeds_are_of_64_bits():
    assert streams(2**64 + 7, 3, 2).tolist() == streams(7, 3, 2).tolist()


def test_dropped_share():
    x, tokens = np.ones((8, 64, 256), "f4"), np.arange(64, dtype=np.int32)
    for rate in TORCH:
        y, share = dropped(x, streams(1, 2, 8), tokens, 3, float(rate)), float(rate)
        assert y.max() == pytest.approx(TORCH[rate]["float32"]["value"], rel=1e-6)
        assert abs(y.mean(dtype=np.float64) - 1) < 4 * (share / (1 - share) / y.size) ** 0.5
    assert [threshold_of(share) for share in (0.0, 0.5, 1 - 1e-12)] == [0, 2**31, 2**32 - 1]


def test_without_dropout_a_step_has_no_more_tasks_and_inputs():
    step = step_of(SMALL, (4, 12), (2, 12), OptimizerConfig(), grain="kernel")
    assert "streams" not in step.kernels.inputs
    assert not any("dropout" in key[0] for key in step.kernels.graph)


def test_keys_follow_from_step_and_seed():
    """A step that is repeated, after a loss or a resume, must be the same step."""
    step, ids = step_of(SMALL, (4, 12), (2, 12), OptimizerConfig(dropout=0.3)), np.zeros((4, 12), np.int32)
    for number, seed in ((3, 0), (4, 0), (3, 1)):
        np.testing.assert_array_equal(step.inputs([ids, ids], number, 10, seed)["streams"], streams(seed, number, 4))


def test_validation_has_no_dropout(small_text, tmp_path):
    plain, other = (
        fit(small_text, tmp_path / str(rate), optimizer=OptimizerConfig(dropout=rate, **STILL), steps=4)
        for rate in (0.0, 0.3)
    )
    assert plain.validation_loss == other.validation_loss
    assert not set(plain.losses) & set(other.losses)
