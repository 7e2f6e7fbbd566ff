"""Tests of AdamW and Muon in place and into new arrays, and of Muon's polynomial.

Their steps are compared with PyTorch's in `test_model.py` (a model's ten steps) and `test_clipping.py` (arrays of odd
sizes).
"""

import numpy as np
import pytest
from product_cases import UNITS, assert_all_same, multiplying
from tolerances import TOLERANCES

from daskgpt.graph.update_in_place import Update
from daskgpt.kernels.bfloat16 import update as bf16
from daskgpt.kernels.optimizers import adamw_inplace, iteration, muon_inplace, orthogonalised

OPTIONS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
MUON = {"beta": 0.95, "scale": 0.2, "weight_decay": 0.1, "maps": 1}
SHAPES = [(21, 21), (12, 40), (40, 12), (1, 9), (64, 33), (128, 128), (130, 515)]


def hyper(name, step):
    """Return the input of an update for a step: the learning rate, and AdamW's corrections, which Muon's has, too."""
    rate = 3e-3 if name == "adamw" else step * 1e-2
    return np.array([rate, 1 - 0.9**step, 1 - 0.95**step])


def by_singular_values(x):
    """Muon's polynomial five times on each singular value: no product of the iteration is made."""
    u, s, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


# The kernel, its options, and how many moments there are.
UPDATES = {
    "adamw": (adamw_inplace, OPTIONS, 2),
    "muon": (muon_inplace, MUON, 1),
    "muon of 3 maps": (muon_inplace, MUON | {"maps": 3}, 1),
    "muon in bfloat16": (bf16.muon_inplace, MUON, 1),
}


def inputs(shape, dtype, moments=2):
    weight, gradient, m, v = np.random.default_rng(12).normal(size=(4, *shape))
    return [np.asarray(array, dtype) for array in (weight, gradient, m / 10, v * v / 100)[: 2 + moments]]


@pytest.mark.parametrize("shape", [(3, 3), (3, 5), (66, 33), (3, 1024)], ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_in_place_gives_the_same_bits_in_the_same_arrays(name, shape):
    inplace, options, moments = UPDATES[name]
    weight, gradient, *rest = inputs(shape, "float32", moments)
    gradient.flags.writeable = False
    for step in (1, 2, 3):
        given = [weight.copy(), gradient, *(array.copy() for array in rest)]
        for array in given:
            array.flags.writeable = False
        expected = Update(inplace)(*given, hyper(name, step), **options)
        assert_all_same(given, (weight, gradient, *rest))
        results = inplace(weight, gradient, *rest, hyper(name, step), **options)
        assert all(result is array for result, array in zip(results, (weight, *rest), strict=True))
        assert_all_same(results, expected)


@pytest.mark.parametrize("precision", ["float32", "float64", *UNITS])
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_go_through_the_polynomial(precision, shape, random):
    """Also with operands that are rounded to bfloat16."""
    x = random.normal(size=shape).astype("float64" if precision == "float64" else "float32")
    expected = by_singular_values(x)
    with multiplying(precision) as name:
        step = bf16.iteration if name == "bfloat16" else iteration
        result = orthogonalised(x.copy(), step)
        np.testing.assert_array_equal(orthogonalised(np.zeros_like(x), step), np.zeros_like(x))
    assert result.dtype == x.dtype
    if name == "bfloat16":
        error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
        assert error < TOLERANCES["orthogonalised bfloat16"]["of norm"]
    else:
        np.testing.assert_allclose(result, expected, **TOLERANCES[f"orthogonalised {name}"])
