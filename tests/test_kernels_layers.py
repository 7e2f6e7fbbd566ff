"""All layers' kernels: values, gradients, dtypes, purity, and the same bits wherever and by whomever they are run."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from kernel_cases import CASES, GRADIENTS, Arrays
from tolerances import TOLERANCES

from daskgpt.kernels.floating_point import restore, set_flush_to_zero

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_gradient = pytest.mark.parametrize(("case", "name"), GRADIENTS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])


def everything(case, arrays: Arrays) -> list[np.ndarray]:
    """The forward's result and every gradient."""
    y = case.forward(arrays)
    return [y, *(gradient(case.dy(y), arrays) for gradient in case.gradients.values())]


def moved_in_memory(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that starts `offset` elements after a multiple of 64 bytes."""
    buffer = np.empty(array.nbytes + 64 + offset * array.itemsize, np.uint8)
    start = -buffer.ctypes.data % 64 + offset * array.itemsize
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@every_case
@every_dtype
def test_forward_agrees_with_the_formula(case, dtype):
    arrays = case.arrays(dtype)
    y = case.forward(arrays)
    expected = case.reference({name: a.astype("f8") if a.dtype.kind == "f" else a for name, a in arrays.items()})
    assert y.dtype == dtype
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, **TOLERANCES[f"kernel {dtype}"])


@every_gradient
def test_gradient_agrees_with_a_numeric_derivative_in_a_random_direction(case, name):
    arrays = case.arrays()
    direction = np.random.default_rng(7).normal(size=arrays[name].shape)
    dy = case.dy(case.reference(arrays))
    ends = [case.reference(arrays | {name: arrays[name] + sign * 1e-6 * direction}) for sign in (1, -1)]
    numeric = ((ends[0] - ends[1]) * dy).sum() / 2e-6
    exact = (case.gradients[name](dy, arrays) * direction).sum()
    assert exact == pytest.approx(numeric, **TOLERANCES["numeric derivative"])


@every_gradient
def test_float32_gradient_agrees_with_float64(case, name):
    arrays = case.arrays("float32")
    wide = {key: a.astype("f8") if a.dtype.kind == "f" else a for key, a in arrays.items()}
    dy = case.dy(case.forward(arrays))
    gradient, expected = case.gradients[name](dy, arrays), case.gradients[name](dy.astype("f8"), wide)
    assert gradient.dtype == np.float32
    assert gradient.shape == arrays[name].shape
    scale = np.abs(expected).max()
    np.testing.assert_allclose(gradient / scale, expected / scale, **TOLERANCES["kernel float32"])


@every_case
@every_dtype
def test_read_only_inputs_are_accepted_and_stay_as_they_are(case, dtype):
    arrays = case.arrays(dtype)
    expected = everything(case, {name: array.copy() for name, array in arrays.items()})
    before = {name: array.copy() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    for result, same in zip(everything(case, arrays), expected, strict=True):
        np.testing.assert_array_equal(result, same)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])


@every_case
def test_bits_do_not_depend_on_where_the_inputs_lie(case):
    arrays = case.arrays("float32")
    expected = everything(case, {name: moved_in_memory(array, 0) for name, array in arrays.items()})
    for offset in (1, 4, 7):
        results = everything(case, {name: moved_in_memory(array, offset) for name, array in arrays.items()})
        for result, same in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, same)


@every_case
def test_inputs_need_not_be_contiguous(case):
    arrays = case.arrays("float32")
    strided = {name: np.repeat(array, 2, axis=-1)[..., ::2] for name, array in arrays.items()}
    assert not strided[next(iter(arrays))].flags.c_contiguous
    for result, same in zip(everything(case, strided), everything(case, arrays), strict=True):
        np.testing.assert_array_equal(result, same)


@every_case
def test_bits_do_not_depend_on_the_thread(case):
    arrays = case.arrays("float32")
    previous = set_flush_to_zero()
    try:
        expected = everything(case, arrays)
    finally:
        restore(previous)
    results = []

    def work():
        set_flush_to_zero()
        results.append(everything(case, arrays))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for found in results:
        for result, same in zip(found, expected, strict=True):
            np.testing.assert_array_equal(result, same)
