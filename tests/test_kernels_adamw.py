"""AdamW beside its formula, and the step in place beside the step into new arrays: the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from tolerances import TOLERANCES

from daskgpt.kernels.adamw import adamw, adamw_inplace

OPTIONS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
NAMES = ("weight", "gradient", "m", "v")


def hyper(step: int, learning_rate: float = 3e-3) -> np.ndarray:
    return np.array([learning_rate, 1 - OPTIONS["beta1"] ** step, 1 - OPTIONS["beta2"] ** step])


def inputs(shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    random = np.random.default_rng(12)
    weight, gradient, m, v = (random.normal(size=shape) for _ in range(4))
    return [np.asarray(array, dtype) for array in (weight, gradient, m / 10, v * v / 100)]


def formula(weight, gradient, m, v, rate, correction1, correction2):
    m = 0.9 * m + 0.1 * gradient
    v = 0.95 * v + 0.05 * gradient**2
    return weight - rate * (m / correction1 / (np.sqrt(v / correction2) + 1e-8) + 0.1 * weight), m, v


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 1024), (1, 7, 353)])
def test_a_step_agrees_with_the_formula(shape, dtype):
    arrays, scalars = inputs(shape, dtype), hyper(3)
    expected = formula(*(array.astype("f8") for array in arrays), *scalars)
    for array in arrays:
        array.flags.writeable = False
    results = adamw(*arrays, scalars, **OPTIONS)
    for result, want in zip(results, expected, strict=True):
        assert result.dtype == dtype
        assert result.shape == shape
        np.testing.assert_allclose(result, want, **TOLERANCES[f"kernel {dtype}"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 15, 1024, 5000])
def test_in_place_gives_the_same_bits_in_the_same_arrays(size, dtype):
    weight, gradient, m, v = inputs((size,), dtype)
    gradient.flags.writeable = False
    for step in (1, 2, 3):
        expected = adamw(weight, gradient, m, v, hyper(step), **OPTIONS)
        results = adamw_inplace(weight, gradient, m, v, hyper(step), **OPTIONS)
        assert all(result is given for result, given in zip(results, (weight, m, v), strict=True))
        for result, same in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, same)


def test_a_piece_of_a_parameter_gets_the_bits_of_the_whole():
    arrays = inputs((4, 300), "float32")
    whole = adamw(*arrays, hyper(2), **OPTIONS)
    adamw_inplace(*(array[1:3] for array in arrays), hyper(2), **OPTIONS)
    np.testing.assert_array_equal(arrays[0][1:3], whole[0][1:3])


def test_without_decay_a_weight_with_no_gradient_stays():
    weight = np.linspace(-1, 1, 50, dtype="f4")
    zero = np.zeros(50, "f4")
    stays, m, v = adamw(weight, zero, zero, zero, hyper(1), **OPTIONS | {"weight_decay": 0.0})
    np.testing.assert_array_equal(stays, weight)
    assert not m.any()
    assert not v.any()


@pytest.mark.parametrize("name", NAMES[1:])
def test_shapes_that_differ_are_refused(name):
    arrays = dict(zip(NAMES, inputs((4, 6), "float32"), strict=True))
    arrays[name] = arrays[name][:3]
    with pytest.raises(ValueError) as error:
        adamw(*arrays.values(), hyper(1), **OPTIONS)
    assert str(error.value) == (
        f"adamw: {name} must have shape (4, 6); got shape=(3, 6). Check the order of the arguments."
    )


@pytest.mark.parametrize("name", ["weight", "m", "v"])
def test_in_place_refuses_a_read_only_array(name):
    arrays = dict(zip(NAMES, inputs((4, 6), "float32"), strict=True))
    arrays[name].flags.writeable = False
    with pytest.raises(ValueError) as error:
        adamw_inplace(*arrays.values(), hyper(1), **OPTIONS)
    assert str(error.value) == (
        f"adamw_inplace: {name} must be a writable contiguous float32 array; got dtype=float32, contiguous=True, "
        "writable=False. Allocate it with np.empty."
    )


def test_hyper_must_have_three_numbers():
    with pytest.raises(ValueError, match=r"^adamw: hyper must have shape \(3,\); got shape=\(2,\). "):
        adamw(*inputs((4,), "float32"), np.ones(2), **OPTIONS)
