"""y = x weightᵀ and dx = dy weight on every unit: against float64 products of the rounded operands."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from matmul_cases import TILE_UNITS, UNITS, arrays, assert_close, assert_same_bits, exact, magnitude, using
from tolerances import TOLERANCES

from daskgpt.kernels.matmul import backward_x, forward, forward_gelu, from_bfloat16, pack_weight, to_bfloat16

PRODUCT, GELU = TOLERANCES["bfloat16 sums"], TOLERANCES["kernel float32"]
# Rows, channels, outputs: below and above a tile and a block, odd numbers, a summed axis in one piece and in several.
SHAPES = [(1, 1, 1), (7, 17, 33), (33, 65, 100), (100, 33, 7), (65, 300, 32), (300, 64, 96), (3, 2500, 40)]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


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
    assert_same_bits(forward(to_bfloat16(x), packed, bias), y)
    dx = backward_x(dy, packed)
    assert_close(dx, exact(dy) @ w, magnitude(exact(dy), w), PRODUCT)
    assert_same_bits(backward_x(to_bfloat16(dy), packed), dx)


def test_results_in_bfloat16_or_both(name):
    x, weight, dy = arrays(2, (2, 19, 70), (45, 70), (2, 19, 45))
    packed = pack_weight(weight)
    for product, operand in ((forward, x), (backward_x, dy)):
        reals, halves = product(operand, packed, dtype="both")
        assert_same_bits(reals, product(operand, packed))
        assert_same_bits(halves, to_bfloat16(reals))
        assert_same_bits(product(operand, packed, dtype="bfloat16"), halves)


def test_residual(name):
    x, weight, bias, residual, dy, other = arrays(
        3, (2, 20, 40), (50, 40), (50,), (2, 20, 50), (2, 20, 50), (2, 20, 40)
    )
    packed = pack_weight(weight)
    y, dx = forward(x, packed, bias), backward_x(dy, packed)
    assert_same_bits(forward(x, packed, bias, residual=residual), y + residual)
    halves = to_bfloat16(residual)
    assert_same_bits(forward(x, packed, bias, residual=halves), y + from_bfloat16(halves))
    assert_same_bits(backward_x(dy, packed, residual=other), dx + other)


@pytest.mark.parametrize("before", ["float32", "bfloat16"])
def test_gelu(name, before):
    x, weight, bias = arrays(4, (2, 35, 40), (50, 40), (50,))
    packed = pack_weight(weight)
    h = forward(x, packed, bias)
    found, y = forward_gelu(x, packed, bias, before=before, dtype="float32")
    assert_same_bits(found, h if before == "float32" else to_bfloat16(h))
    np.testing.assert_allclose(y, gelu(h.astype(np.float64)), **GELU)
    assert_same_bits(forward_gelu(x, packed, bias, before=before)[1], to_bfloat16(y))


@pytest.mark.parametrize("halves", [False, True])
def test_gradient_of_gelu(name, halves):
    dy, weight, before = arrays(5, (2, 35, 40), (40, 50), (2, 35, 50))
    given = to_bfloat16(before) if halves else before
    values = from_bfloat16(given) if halves else before
    packed = pack_weight(weight)
    dx = backward_x(dy, packed)
    found = backward_x(dy, packed, before=given)
    np.testing.assert_allclose(found, dx * gelu_slope(values.astype(np.float64)), **GELU)


@pytest.mark.parametrize("name", TILE_UNITS)
def test_a_row_does_not_depend_on_the_others(name):
    with using(name):
        x, weight, bias, dy = arrays(6, (300, 70), (45, 70), (45,), (300, 45))
        packed = pack_weight(weight)
        y, dx = forward(x, packed, bias), backward_x(dy, packed)
        h, activated = forward_gelu(x, packed, bias)
        for rows in (slice(0, 1), slice(3, 40), slice(77, 300)):
            assert_same_bits(forward(x[rows], packed, bias), y[rows])
            assert_same_bits(backward_x(dy[rows], packed), dx[rows])
            for part, whole in zip(forward_gelu(x[rows], packed, bias), (h, activated)):
                assert_same_bits(part, whole[rows])


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
    x, weight, bias, residual = arrays(8, (37, 65), (41, 65), (41,), (37, 41))
    packed = pack_weight(weight)
    expected = forward(x, packed, bias, residual=residual)
    memory = np.empty(x.nbytes + 64, np.uint8)
    for offset in (4, 20, 36):
        moved = memory[offset : offset + x.nbytes].view(np.float32).reshape(x.shape)
        moved[...] = x
        moved.flags.writeable = False
        assert_same_bits(forward(moved, packed, bias, residual=residual), expected)
        np.testing.assert_array_equal(moved, x)
    strided = np.repeat(x, 2, axis=1)[:, ::2]
    assert_same_bits(forward(strided, packed, bias, residual=residual), expected)


def test_a_packed_weight_can_be_sent_and_lie_anywhere(name):
    x, weight = arrays(9, (20, 70), (45, 70))
    packed = pack_weight(weight)
    sent = pickle.loads(pickle.dumps(packed))
    assert_same_bits(forward(x, sent), forward(x, packed))
    assert_same_bits(backward_x(forward(x, sent), sent), backward_x(forward(x, packed), packed))


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
        "matmul.forward: x must be float32, or bfloat16 kept as uint16; got x.dtype=float64. Convert it first.",
        forward, x.astype("f8"), packed,
    )  # fmt: skip
    refused(
        TypeError, "matmul.forward: bias must be float32; got bias.dtype=float64. Convert it first.",
        forward, x, packed, np.zeros(5),
    )  # fmt: skip
    for array in ("residual", "before"):
        message = f"{array} must be float32, or bfloat16 kept as uint16; got {array}.dtype=int32. Convert it first."
        with pytest.raises(TypeError, match=message):
            backward_x(x[:, :5], packed, **{array: np.zeros((4, 6), "i4")})
    for function, arguments in ((forward, (x[:, :5], packed)), (backward_x, (x, packed))):
        with pytest.raises(ValueError, match=r"must have shape \(4, [56]\); got .*Check the order of the arguments"):
            function(*arguments)
    with pytest.raises(ValueError, match=r"residual must have shape \(4, 5\)"):
        forward(x, packed, residual=x)
    refused(
        ValueError,
        "matmul.backward_x: before and residual cannot both apply; got two arrays. Add the residual afterwards.",
        backward_x, x[:, :5], packed, before=x, residual=x,
    )  # fmt: skip


def test_wrong_choices_are_refused(name):
    x, weight = arrays(14, (4, 6), (5, 6))
    packed = pack_weight(weight)
    refused(
        ValueError, "matmul.forward: dtype must be float32, bfloat16 or both; got dtype=float16. Name one of them.",
        forward, x, packed, dtype="float16",
    )  # fmt: skip
    refused(
        ValueError, "matmul.forward_gelu: before must be float32 or bfloat16; got before=both. Name one of them.",
        forward_gelu, x, packed, before="both",
    )  # fmt: skip


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
            "matmul.forward: the weight must be packed for the unit that multiplies; got in_tiles=False for amx. "
            "Set DASKGPT_MATMUL to one unit in all processes.",
            forward, x, packed,
        )  # fmt: skip
