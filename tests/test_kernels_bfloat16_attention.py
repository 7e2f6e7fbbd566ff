"""Attention in bfloat16 beside the explicit softmax of rounded operands, on every unit, for any length and head."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import softmax_attention
from product_cases import TILE_UNITS, UNITS, arrays, assert_same_bits, at_once, exact, using
from tolerances import TOLERANCES

from daskgpt.kernels import attention
from daskgpt.kernels.bfloat16 import from_bfloat16, rounded_attention, to_bfloat16

LENGTHS = [1, 5, 33, 64, 130]
# Channels and heads: heads of 6, 16, 64, 80 and 3 numbers.
HEADS = [(6, 1), (48, 3), (128, 2), (160, 2), (36, 12)]


@pytest.fixture(params=UNITS)
def name(request):
    with using(request.param):
        yield request.param


def chunk(tokens: int, channels: int, sequences: int = 2) -> tuple[np.ndarray, np.ndarray]:
    qkv, dy = arrays(tokens, (sequences, tokens, 3 * channels), (sequences, tokens, channels))
    return qkv, dy


def softmax_gradient(dy: np.ndarray, qkv: np.ndarray, heads: int) -> np.ndarray:
    """The gradient with the whole (T, T) matrix, in the arrays' dtype."""
    b, t, _ = qkv.shape
    q, k, v, d = (x.reshape(b, t, heads, -1).transpose(0, 2, 1, 3) for x in (*np.split(qkv, 3, -1), dy))
    logsumexp = softmax_attention(qkv, heads)[1]
    scale = q.shape[-1] ** -0.5
    p = np.where(np.tri(t, dtype=bool), np.exp(np.minimum(scale * q @ k.swapaxes(2, 3) - logsumexp[..., None], 0)), 0)
    dp = d @ v.swapaxes(2, 3)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
    parts = (ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ d)
    return np.concatenate([part.transpose(0, 2, 1, 3).reshape(b, t, -1) for part in parts], -1)


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == np.float32
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found / largest, expected / largest, **TOLERANCES["bfloat16 attention"])


def assert_formula(qkv: np.ndarray, dy: np.ndarray, heads: int) -> None:
    y, logsumexp = rounded_attention.forward(qkv, heads)
    expected_y, expected_logsumexp = softmax_attention(exact(qkv), heads)
    assert_near(y, expected_y)
    np.testing.assert_allclose(logsumexp, expected_logsumexp, **TOLERANCES["kernel float32"])
    assert_near(
        rounded_attention.backward(dy, qkv, y, logsumexp, heads), softmax_gradient(exact(dy), exact(qkv), heads)
    )


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("channels", "heads"), HEADS)
def test_formula(name, tokens, channels, heads):
    assert_formula(*chunk(tokens, channels), heads)


def test_formula_of_a_long_sequence(name):
    assert_formula(*chunk(1024, 128, sequences=1), 2)


def test_float32_kernels_of_the_same_operands(name):
    qkv, dy = (from_bfloat16(to_bfloat16(array)) for array in chunk(130, 96))
    y, logsumexp = attention.forward(qkv, 4)
    found_y, found_logsumexp = rounded_attention.forward(qkv, 4)
    assert_near(found_y, y)
    np.testing.assert_allclose(found_logsumexp, logsumexp, **TOLERANCES["kernel float32"])
    found = rounded_attention.backward(dy, qkv, found_y, found_logsumexp, 4)
    expected = attention.backward(dy, qkv, y, logsumexp, 4)
    assert_near(found, expected)
    # Most numbers are far nearer than the worst one.
    assert np.linalg.norm(found - expected) < 3e-3 * np.linalg.norm(expected)


def test_big_scores_stay_finite_and_right(name):
    qkv, dy = chunk(70, 16)
    qkv *= 40  # scores of some thousands: exp(score) would be infinite
    y, logsumexp = rounded_attention.forward(qkv, 2)
    expected_y, expected_logsumexp = softmax_attention(exact(qkv), 2)
    assert np.abs(expected_logsumexp).max() > 3000
    assert_near(y, expected_y)
    np.testing.assert_allclose(logsumexp, expected_logsumexp, rtol=1e-5)
    assert np.isfinite(rounded_attention.backward(dy, qkv, y, logsumexp, 2)).all()


@pytest.mark.parametrize("tokens", [33, 130])
def test_no_token_sees_a_later_one(name, tokens):
    qkv, dy = chunk(tokens, 48)
    y, logsumexp = rounded_attention.forward(qkv, 3)
    for cut in (1, 31, tokens - 1):
        changed = qkv.copy()
        changed[:, cut:] = 1e6
        again, logsumexp_again = rounded_attention.forward(changed, 3)
        np.testing.assert_array_equal(again[:, :cut], y[:, :cut])
        np.testing.assert_array_equal(logsumexp_again[..., :cut], logsumexp[..., :cut])
    dy[:, 20:] = 0
    assert not rounded_attention.backward(dy, qkv, y, logsumexp, 3)[:, 20:].any()


def test_a_nan_is_not_hidden(name):
    qkv, dy = chunk(40, 16)
    qkv[0, 3, 2] = np.nan  # a query of the first head
    y, logsumexp = rounded_attention.forward(qkv, 2)
    assert np.isnan(y[0, 3, :8]).all()
    assert np.isfinite(y[0, :3]).all()
    assert np.isfinite(y[1]).all()
    gradient = rounded_attention.backward(dy, qkv, y, logsumexp, 2)
    assert np.isnan(gradient[0, 3, :8]).all()
    assert np.isfinite(gradient[1]).all()


@pytest.mark.parametrize("name", TILE_UNITS)
def test_a_sequence_does_not_depend_on_the_others_or_its_place_in_memory(name):
    with using(name):
        qkv, dy = chunk(45, 48, sequences=3)
        y, logsumexp = rounded_attention.forward(qkv, 3)
        gradient = rounded_attention.backward(dy, qkv, y, logsumexp, 3)
        for sequence in range(3):
            part = slice(sequence, sequence + 1)
            shifted = np.empty(qkv[part].size + 1, "f4")[1:].reshape(qkv[part].shape)
            shifted[...] = qkv[part]
            y_alone, logsumexp_alone = rounded_attention.forward(shifted, 3)
            assert_same_bits(y_alone, y[part])
            assert_same_bits(logsumexp_alone, logsumexp[part])
            assert_same_bits(rounded_attention.backward(dy[part], shifted, y[part], logsumexp[part], 3), gradient[part])


def test_threads_at_once_give_the_same_bits_and_inputs_are_only_read(name):
    qkv, dy = chunk(100, 96)
    y, logsumexp = rounded_attention.forward(qkv, 6)
    gradient = rounded_attention.backward(dy, qkv, y, logsumexp, 6)
    for array in (qkv, dy, y, logsumexp):
        array.flags.writeable = False
    before = [array.copy() for array in (qkv, dy, y, logsumexp)]

    def work():
        both = rounded_attention.forward(qkv, 6)
        return *both, rounded_attention.backward(dy, qkv, y, logsumexp, 6)

    for rounds in at_once(4, lambda: [work() for _ in range(3)]):
        for results in rounds:
            for result, expected in zip(results, (y, logsumexp, gradient), strict=True):
                assert_same_bits(result, expected)
    for array, copy in zip((qkv, dy, y, logsumexp), before):
        assert_same_bits(array, copy)


def test_columns_that_are_not_three_times_the_heads_are_refused():
    with pytest.raises(ValueError) as error:
        rounded_attention.forward(np.ones((1, 4, 50), "f4"), 2)
    assert str(error.value) == (
        "rounded_attention.forward: qkv must have 3 * channels columns, channels a multiple of heads; got columns=50, "
        "heads=2. Check the order of the arguments."
    )


@pytest.mark.parametrize("wrong", ["dy", "qkv", "y", "logsumexp"])
def test_backward_refuses_arrays_that_do_not_fit(wrong):
    qkv, dy = chunk(7, 8)
    given = {"dy": dy, "qkv": qkv, "y": dy, "logsumexp": np.zeros((2, 2, 7), "f4")}
    with pytest.raises(TypeError) as kind:
        rounded_attention.backward(*(given | {wrong: given[wrong].astype("f8")}).values(), 2)
    assert str(kind.value) == (
        f"rounded_attention.backward: {wrong} must be float32; got {wrong}.dtype=float64. Convert it first."
    )
    if wrong != "qkv":
        cut = given[wrong][..., :-1]
        with pytest.raises(ValueError) as shape:
            rounded_attention.backward(*(given | {wrong: cut}).values(), 2)
        assert str(shape.value) == (
            f"rounded_attention.backward: {wrong} must have shape {given[wrong].shape}; got shape={cut.shape}. "
            "Check the order of the arguments."
        )


def test_forward_refuses_other_dtypes():
    with pytest.raises(TypeError) as error:
        rounded_attention.forward(np.ones((1, 4, 48)), 2)
    assert str(error.value) == (
        "rounded_attention.forward: qkv must be float32; got qkv.dtype=float64. Convert it first."
    )
