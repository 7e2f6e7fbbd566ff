"""Rounding to bfloat16, and back."""

from __future__ import annotations

import numpy as np
import pytest
from product_cases import round_one_by_one

from daskgpt.kernels.bfloat16 import from_bfloat16, to_bfloat16

ALL = np.arange(1 << 16, dtype=np.uint16)


def test_every_bfloat16_number_survives():
    widened = from_bfloat16(ALL)
    assert widened.dtype == np.float32
    np.testing.assert_array_equal(widened.view(np.uint32), ALL.astype(np.uint32) << 16)
    numbers = ~np.isnan(widened)
    np.testing.assert_array_equal(to_bfloat16(widened)[numbers], ALL[numbers])


@pytest.mark.parametrize("size", [1, 7, 15, 16, 17, 33, 1000])
def test_rounds_to_nearest_even(size):
    x = np.random.default_rng(1).integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
    x = np.where(np.isnan(x), np.float32(1), x)
    np.testing.assert_array_equal(to_bfloat16(x), round_one_by_one(x))


def test_ties_carries_subnormal_and_infinite_numbers():
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3FFFFFFF, 0x7F7FFFFF, 0x00018000, 0x00000001, 0x80000000], "u4"
    )
    expected = [0x3F80, 0x3F82, 0x3F81, 0x4000, 0x7F80, 0x0002, 0x0000, 0x8000]
    np.testing.assert_array_equal(to_bfloat16(bits.view(np.float32)), np.array(expected, "u2"))
    np.testing.assert_array_equal(to_bfloat16(np.array([np.inf, -np.inf], "f4")), np.array([0x7F80, 0xFF80], "u2"))


def test_nan_stays_nan_whatever_its_bits():
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    assert np.isnan(from_bfloat16(to_bfloat16(bits.view(np.float32)))).all()


def test_shapes_strides_and_read_only_arrays(random):
    x = random.normal(size=(3, 4, 10)).astype(np.float32)
    x.flags.writeable = False
    columns = x[:, ::2, 1::3]
    rounded = to_bfloat16(columns)
    assert rounded.shape == columns.shape
    np.testing.assert_array_equal(rounded, round_one_by_one(np.ascontiguousarray(columns)))
    assert from_bfloat16(rounded[:, :, ::2]).shape == (3, 2, 2)
    assert to_bfloat16(np.empty((0, 4), np.float32)).shape == (0, 4)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError) as error:
        to_bfloat16(np.zeros(3))
    assert str(error.value) == "to_bfloat16: x must be float32; got x.dtype=float64. Convert it first."
    with pytest.raises(TypeError) as error:
        from_bfloat16(np.zeros(3, np.float32))
    assert str(error.value) == (
        "from_bfloat16: x must be bfloat16 kept as uint16; got x.dtype=float32. Use to_bfloat16."
    )
