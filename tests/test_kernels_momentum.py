"""Momentum SGD: its formula, the same bits in place, and inputs that stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
from tolerances import TOLERANCES

from daskgpt.kernels.momentum import momentum, momentum_inplace

OPTIONS = {"beta": 0.9, "weight_decay": 0.1}


def values(random, dtype, shape=(5, 7)):
    return [random.normal(size=shape).astype(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_three_steps_are_those_of_the_formula(dtype, random):
    weight, gradient, m = values(random, dtype)
    expected_weight, expected_m = weight.astype(np.float64), m.astype(np.float64)
    for rate in (1e-2, 2e-2, 3e-2):
        weight, m = momentum(weight, gradient, m, np.array([rate]), **OPTIONS)
        expected_m = 0.9 * expected_m + gradient
        expected_weight = expected_weight - rate * (expected_m + 0.1 * expected_weight)
    assert weight.dtype == m.dtype == np.dtype(dtype)
    np.testing.assert_allclose(weight, expected_weight, **TOLERANCES[f"kernel {dtype}"])
    np.testing.assert_allclose(m, expected_m, **TOLERANCES[f"kernel {dtype}"])


def test_in_place_has_the_bits_of_new_arrays_and_new_arrays_leave_the_old(random):
    weight, gradient, m = values(random, "float32")
    before = weight.copy(), m.copy()
    for array in (weight, gradient, m):
        array.flags.writeable = False
    new = momentum(weight, gradient, m, np.array([1e-2]), **OPTIONS)
    np.testing.assert_array_equal(weight, before[0])
    np.testing.assert_array_equal(m, before[1])
    momentum_inplace(*before[:1], gradient, before[1], np.array([1e-2]), **OPTIONS)
    for one, other in zip(new, before):
        np.testing.assert_array_equal(one, other)


def test_shapes_that_do_not_fit_are_refused(random):
    weight, gradient, m = values(random, "float32")
    with pytest.raises(ValueError, match="momentum: gradient must have shape"):
        momentum(weight, gradient[1:], m, np.array([1e-2]), **OPTIONS)
