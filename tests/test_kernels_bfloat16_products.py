"""y = x weightᵀ and dx = dy weight on every unit: against float64 products of the rounded operands."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from product_cases import TILE_UNITS, UNITS, arrays, assert_close, assert_same_bits, exact, magnitude, using
from tolerances import TOLERANCES

from daskgpt.kernels.bfloat16 import backward_x, forward, pack_weight, rounded
from daskgpt.kernels.bfloat16.rounded_layers import SentWeight, TrainedWeight

PRODUCT = TOLERANCES["bfloat16 sums"]
# Rows, channels, outputs: below and above a tile and a block, odd numbers, a summed axis in one piece and in several.
SHAPES = [(1, 1, 1), (7, 17, 33), (33, 65, 100), (100, 33, 7), (65, 300, 32), (300, 64, 96), (3, 2500, 40)]


@pytest.fixture(params=UNITS)
def name(request):
    with using(request.param):
        yield request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward_x(name, shape):
    rows, channels, outputs = shape
    x, weight, bias, dy = arrays(1, (rows, channels), (outputs, channels), (outputs,), (rows, outputs))
    packed, w = pack_weight(weight), exact(weight)
    y = forward(x, packed, bias)
    assert y.dtype == np.float32
    assert_close(y, exact(x) @ w.T + bias, magnitude(exact(x), w.T), PRODUCT)
    assert_same_bits(forward(rounded(x), packed, bias), y)
    dx = backward_x(dy, packed)
    assert_close(dx, exact(dy) @ w, magnitude(exact(dy), w), PRODUCT)
    assert_same_bits(backward_x(rounded(dy), packed), dx)


@pytest.mark.parametrize("name", TILE_UNITS)
def test_a_row_does_not_depend_on_the_others(name):
    with using(name):
        x, weight, bias, dy = arrays(6, (300, 70), (45, 70), (45,), (300, 45))
        packed = pack_weight(weight)
        y, dx = forward(x, packed, bias), backward_x(dy, packed)
        for rows in (slice(0, 1), slice(3, 40), slice(77, 300)):
            assert_same_bits(forward(x[rows], packed, bias), y[rows])
            assert_same_bits(backward_x(dy[rows], packed), dx[rows])


def test_units_agree():
    x, weight, dy = arrays(7, (50, 200), (90, 200), (50, 90))
    results = {}
    for name in UNITS:
        with using(name):
            packed = pack_weight(weight)
            results[name] = forward(x, packed), backward_x(dy, packed)
    scales = magnitude(exact(x), exact(weight).T), magnitude(exact(dy), exact(weight))
    for found in results.values():
        for one, other, scale in zip(found, results["portable"], scales):
            assert_close(one, other, scale, PRODUCT)


def test_inputs_are_only_read_wherever_they_lie(name):
    x, weight, bias = arrays(8, (37, 65), (41, 65), (41,))
    packed = pack_weight(weight)
    expected = forward(x, packed, bias)
    memory = np.empty(x.nbytes + 64, np.uint8)
    for offset in (4, 20, 36):
        moved = memory[offset : offset + x.nbytes].view(np.float32).reshape(x.shape)
        moved[...] = x
        moved.flags.writeable = False
        assert_same_bits(forward(moved, packed, bias), expected)
        np.testing.assert_array_equal(moved, x)
    strided = np.repeat(x, 2, axis=1)[:, ::2]
    assert_same_bits(forward(strided, packed, bias), expected)


def test_a_packed_weight_can_be_sent_and_lie_anywhere(name):
    x, weight = arrays(9, (20, 70), (45, 70))
    packed = pack_weight(weight)
    sent = pickle.loads(pickle.dumps(packed))
    assert_same_bits(forward(x, sent), forward(x, packed))
    assert_same_bits(backward_x(forward(x, sent), sent), backward_x(forward(x, packed), packed))


def test_what_is_sent_of_a_trained_weight_gives_the_bits_that_its_owner_packed(name):
    (weight,) = arrays(11, (600, 70))
    trained = TrainedWeight.of(weight)
    sent = SentWeight.of(trained)
    assert sent.nbytes == weight.nbytes / 2
    found = pickle.loads(pickle.dumps(sent)).received().packed
    x, dy = arrays(12, (9, 70), (9, 600))
    assert_same_bits(forward(x, found), forward(x, trained.packed))
    assert_same_bits(backward_x(dy, found), backward_x(dy, trained.packed))


def test_rows_of_a_weight_can_be_packed_apart(name):
    old, new = arrays(10, (100, 70), (100, 70))
    packed, expected = pack_weight(old), pack_weight(new)
    for first, last in ((32, 64), (64, 100), (0, 32)):
        assert pack_weight(new[first:last], packed, first=first) is packed
    assert_same_bits(packed.forward, expected.forward)
    assert_same_bits(packed.backward, expected.backward)


def test_no_rows(name):
    (weight,) = arrays(11, (45, 70))
    assert forward(np.empty((0, 70), "f4"), pack_weight(weight)).shape == (0, 45)
    assert backward_x(np.empty((2, 0, 45), "f4"), pack_weight(weight)).shape == (2, 0, 70)


def test_nan_and_infinity_reach_the_result(name):
    x, weight = arrays(12, (40, 70), (45, 70))
    x[3, 5], x[20, 7] = np.nan, np.inf
    y = forward(x, pack_weight(np.abs(weight) + 1))
    assert np.isnan(y[3]).all()
    assert np.isposinf(y[20]).all()
    assert np.isfinite(np.delete(y, (3, 20), axis=0)).all()


def refused(kind, message, function, *arguments, **options):
    with pytest.raises(kind) as error:
        function(*arguments, **options)
    assert str(error.value) == message


def test_wrong_operands_are_refused(name):
    x, weight = arrays(13, (4, 6), (5, 6))
    packed = pack_weight(weight)
    refused(
        TypeError,
        "bfloat16.forward: x must be float32; got x.dtype=float64. Convert it first.",
        forward, x.astype("f8"), packed,
    )  # fmt: skip
    refused(
        TypeError, "bfloat16.forward: bias must be float32; got bias.dtype=float64. Convert it first.",
        forward, x, packed, np.zeros(5),
    )  # fmt: skip
    for function, arguments in ((forward, (x[:, :5], packed)), (backward_x, (x, packed))):
        with pytest.raises(ValueError, match=r"must have shape \(4, [56]\); got .*Check the order of the arguments"):
            function(*arguments)


def test_wrong_weights_are_refused(name):
    weight, wide = arrays(15, (64, 6), (32, 7))
    refused(
        TypeError, "pack_weight: weight must be float32; got weight.dtype=float64. Convert it first.",
        pack_weight, weight.astype("f8"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"pack_weight: weight must have shape \(32, 6\); got shape=\(32, 7\)"):
        pack_weight(wide, pack_weight(weight))
    refused(
        ValueError,
        "pack_weight: rows must begin and end at multiples of 32 (or at the last row) within 0..64; got rows=(16, 48). "
        "Round them.",
        pack_weight, weight[:32], pack_weight(weight), first=16,
    )  # fmt: skip


def test_a_weight_in_another_layout_is_refused():
    x, weight = arrays(16, (4, 6), (5, 6))
    with using("portable"):
        packed = pack_weight(weight)
    with using("amx"):
        refused(
            RuntimeError,
            "bfloat16.forward: the weight must be packed for the unit that multiplies; got in_tiles=False for amx. "
            "Set DASKGPT_MATMUL to one unit in all processes.",
            forward, x, packed,
        )  # fmt: skip
