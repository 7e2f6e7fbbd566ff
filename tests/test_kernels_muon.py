"""Muon: its formula by singular values, the same bits in place, inputs that stay as they are, and bfloat16 products."""

from __future__ import annotations

import numpy as np
import pytest
from product_cases import UNITS, using
from tolerances import TOLERANCES

from daskgpt.kernels.bfloat16 import rounded_muon
from daskgpt.kernels.float32.blas import matmul, one_order
from daskgpt.kernels.muon import muon, muon_inplace
from daskgpt.kernels.orthogonal import A, iteration, orthogonalised, polynomial

OPTIONS = {"beta": 0.95, "scale": 0.2, "weight_decay": 0.1, "maps": 1}
SHAPES = [(21, 21), (12, 40), (40, 12), (1, 9), (64, 33)]


def by_singular_values(x: np.ndarray) -> np.ndarray:
    """The polynomial five times on each singular value: no product of the iteration is made."""
    u, s, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


def values(random, dtype, shape=(24, 9)):
    return [random.normal(size=shape).astype(dtype) for _ in range(3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_singular_values_go_through_the_polynomial(dtype, shape, random):
    x = random.normal(size=shape).astype(dtype)
    found = orthogonalised(x.copy())
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_allclose(found, by_singular_values(x), **TOLERANCES[f"orthogonalised {dtype}"])


@pytest.mark.skipif(not one_order(np.dtype("float32")), reason="a library's sums have orders of their own")
@pytest.mark.parametrize("shape", [*SHAPES, (128, 128), (130, 515)])
def test_half_of_a_symmetric_product_is_all_of_it(shape, random):
    x = (random.normal(size=shape) / np.sqrt(np.prod(shape))).astype(np.float32)
    gram, square = (np.empty((len(x), len(x)), np.float32) for _ in range(2))
    matmul(x, x, gram, transpose_b=True)
    matmul(gram, gram, square)
    expected = matmul(polynomial(gram, square), x, np.float32(A) * x, accumulate=True)
    np.testing.assert_array_equal(iteration(x), expected)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_with_rounded_operands(unit, shape, random):
    x = random.normal(size=shape).astype(np.float32)
    with using(unit):
        found = orthogonalised(x.copy(), rounded_muon.iteration)
    expected = by_singular_values(x)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < TOLERANCES["orthogonalised bfloat16"]["of norm"]


def test_of_no_gradient_nothing_is_made():
    np.testing.assert_array_equal(orthogonalised(np.zeros((4, 6), np.float32)), np.zeros((4, 6)))


@pytest.mark.parametrize("maps", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_three_steps_are_those_of_the_formula(dtype, maps, random):
    weight, gradient, m = values(random, dtype)
    expected, momentum = weight.astype(np.float64), m.astype(np.float64)
    for rate in (1e-2, 2e-2, 3e-2):
        weight, m = muon(weight, gradient, m, np.array([rate, 0.1, 0.2]), **OPTIONS | {"maps": maps})
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = np.concatenate(
            [by_singular_values(part) for part in np.split(0.95 * momentum + 0.05 * gradient, maps)]
        )
        length = 0.2 * max(24 // maps, 9) ** 0.5
        expected = expected - rate * (length * direction + 0.1 * expected)
    assert weight.dtype == m.dtype == np.dtype(dtype)
    np.testing.assert_allclose(weight, expected, **TOLERANCES[f"kernel {dtype}"])
    np.testing.assert_allclose(m, momentum, **TOLERANCES[f"kernel {dtype}"])


@pytest.mark.parametrize(("new", "over"), [(muon, muon_inplace), (rounded_muon.muon, rounded_muon.muon_inplace)])
def test_in_place_has_the_bits_of_new_arrays_and_new_arrays_leave_the_old(new, over, random):
    weight, gradient, m = values(random, "float32")
    before, hyper = (weight.copy(), m.copy()), np.array([1e-2])
    for array in (weight, gradient, m):
        array.flags.writeable = False
    results = new(weight, gradient, m, hyper, **OPTIONS)
    np.testing.assert_array_equal(weight, before[0])
    np.testing.assert_array_equal(m, before[1])
    over(before[0], gradient, before[1], hyper, **OPTIONS)
    for one, other in zip(results, before):
        np.testing.assert_array_equal(one, other)


def test_shapes_that_do_not_fit_are_refused(random):
    weight, gradient, m = values(random, "float32")
    with pytest.raises(ValueError, match="muon: gradient must have shape"):
        muon(weight, gradient[1:], m, np.array([1e-2]), **OPTIONS)
    with pytest.raises(ValueError, match="muon: m must be a writable contiguous float32 array"):
        muon_inplace(weight, gradient, m.astype(np.float64), np.array([1e-2]), **OPTIONS)
