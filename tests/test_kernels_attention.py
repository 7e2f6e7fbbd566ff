"""Attention beside the explicit softmax: lengths around the block of queries, heads, big scores, causality."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import softmax_attention, softmax_attention_backward
from tolerances import TOLERANCES

from daskgpt.kernels import attention

LENGTHS = [1, 5, 31, 32, 33, 64, 130, 300]


def qkv_of(tokens: int, channels: int, dtype: str = "float64", scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(tokens).normal(size=(2, tokens, 3 * channels)) * scale).astype(dtype)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("channels", "heads"), [(6, 1), (48, 3), (64, 8)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_output_and_logsumexp(tokens, channels, heads, dtype):
    qkv = qkv_of(tokens, channels, dtype)
    y, logsumexp = attention.forward(qkv, heads)
    expected_y, expected_logsumexp = softmax_attention(qkv.astype("f8"), heads)
    assert (y.dtype, logsumexp.dtype) == (dtype, dtype)
    np.testing.assert_allclose(y, expected_y, **TOLERANCES[f"kernel {dtype}"])
    np.testing.assert_allclose(logsumexp, expected_logsumexp, **TOLERANCES[f"kernel {dtype}"])


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("heads", [1, 3])
def test_gradient_agrees_with_a_numeric_derivative_in_a_random_direction(tokens, heads):
    qkv, random = qkv_of(tokens, 12), np.random.default_rng(9)
    dy, direction = random.normal(size=(2, tokens, 12)), random.normal(size=qkv.shape)
    ends = [softmax_attention(qkv + sign * 1e-6 * direction, heads)[0] for sign in (1, -1)]
    gradient = attention.backward(dy, qkv, *attention.forward(qkv, heads), heads)
    numeric = ((ends[0] - ends[1]) * dy).sum() / 2e-6
    assert (gradient * direction).sum() == pytest.approx(numeric, **TOLERANCES["numeric derivative"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_big_scores_stay_finite_and_right(dtype):
    qkv = qkv_of(70, 16, dtype, scale=40)  # scores of some thousands: exp(score) would be infinite
    y, logsumexp = attention.forward(qkv, 2)
    expected_y, expected_logsumexp = softmax_attention(qkv.astype("f8"), 2)
    assert np.abs(expected_logsumexp).max() > 3000
    # Scores of 5,000 carry an absolute rounding error of 5,000 * 6e-8 * 4 in float32: so much do the weights differ.
    tolerance = {"rtol": 1e-5, "atol": 0.2} if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-9}
    np.testing.assert_allclose(y, expected_y, **tolerance)
    np.testing.assert_allclose(logsumexp, expected_logsumexp, rtol=1e-5)
    gradient = attention.backward(np.ones_like(y), qkv, y, logsumexp, 2)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("tokens", [63, 130])
@pytest.mark.parametrize("scale", [1, 18])
def test_saturated_scores_cost_no_more_precision_than_a_stored_softmax(tokens, scale):
    """Scores of some hundreds: a probability that follows from a rounded log-sum-exp alone would be 3e-5 off."""
    qkv = qkv_of(tokens, 336, "float32", scale)
    dy = np.random.default_rng(1).normal(size=(2, tokens, 336)).astype("f4")
    exact = softmax_attention_backward(dy.astype("f8"), qkv.astype("f8"), 7)
    textbook = softmax_attention_backward(dy, qkv, 7)
    ours = attention.backward(dy, qkv, *attention.forward(qkv, 7), 7)
    assert textbook.dtype == ours.dtype == np.float32
    for name, part in (("dq", 0), ("dk", 1), ("dv", 2)):
        columns = slice(part * 336, part * 336 + 336)
        errors = [np.square(g[..., columns] - exact[..., columns]).mean() ** 0.5 for g in (ours, textbook)]
        assert errors[0] <= TOLERANCES["attention, saturated"]["factor"] * errors[1], name


@pytest.mark.parametrize("tokens", [33, 130])
def test_no_token_sees_a_later_one(tokens):
    qkv = qkv_of(tokens, 16, "float32")
    y, logsumexp = attention.forward(qkv, 2)
    for cut in (1, 31, tokens - 1):
        changed = qkv.copy()
        changed[:, cut:] = 1e6
        again, logsumexp_again = attention.forward(changed, 2)
        np.testing.assert_array_equal(again[:, :cut], y[:, :cut])
        np.testing.assert_array_equal(logsumexp_again[..., :cut], logsumexp[..., :cut])
    dy = np.zeros_like(y)
    dy[:, :20] = 1
    assert not attention.backward(dy, qkv, y, logsumexp, 2)[:, 20:].any()


def test_a_nan_is_not_hidden():
    qkv = qkv_of(40, 16, "float32")
    qkv[0, 3, 2] = np.nan  # a query of the first head
    y, _ = attention.forward(qkv, 2)
    assert np.isnan(y[0, 3, :8]).all()
    assert np.isfinite(y[0, :3]).all()
    assert np.isfinite(y[1]).all()


@pytest.mark.parametrize(("columns", "heads"), [(50, 2), (48, 3), (48, 0)])
def test_columns_that_are_not_three_times_the_heads_are_refused(columns, heads):
    message = (
        f"attention.forward: qkv must have 3 * channels columns, channels a multiple of heads; got columns={columns}, "
        f"heads={heads}. Check the order of the arguments."
    )
    with pytest.raises(ValueError) as error:
        attention.forward(np.ones((1, 4, columns)), heads)
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["dy", "y", "logsumexp"])
def test_backward_refuses_arrays_that_do_not_fit(name):
    qkv = qkv_of(7, 8)
    y, logsumexp = attention.forward(qkv, 2)
    arrays = {"dy": y, "qkv": qkv, "y": y, "logsumexp": logsumexp}
    wrong = arrays[name][..., :-1]
    expected = (
        f"attention.backward: {name} must have shape {arrays[name].shape}; got shape={wrong.shape}. "
        "Check the order of the arguments."
    )
    with pytest.raises(ValueError) as error:
        attention.backward(*(arrays | {name: wrong}).values(), 2)
    assert str(error.value) == expected
