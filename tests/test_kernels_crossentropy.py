"""The head: losses and dlogits beside their formulas, the padded vocabulary, and refused arguments."""

from __future__ import annotations

import numpy as np
import pytest
from tolerances import TOLERANCES

from daskgpt.kernels import crossentropy

B, T, C, V, PADDED = 2, 9, 16, 45, 64


def inputs(dtype: str = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(10)
    x, wte = random.normal(size=(B, T, C)).astype(dtype), random.normal(size=(PADDED, C)).astype(dtype)
    return x, wte, random.integers(0, V, (B, T)).astype("i4")


def softmax(x: np.ndarray, wte: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype("f8") @ wte[:V].astype("f8").T)
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dlogits_are_softmax_minus_onehot_and_nothing_in_the_padding(dtype):
    x, wte, targets = inputs(dtype)
    losses, dlogits = crossentropy.forward(x, wte, targets, V)
    assert dlogits.shape == (B, T, PADDED)
    p = softmax(x, wte)
    np.testing.assert_allclose(dlogits[..., :V], p - np.eye(V)[targets], **TOLERANCES[f"kernel {dtype}"])
    expected = -np.log(np.take_along_axis(p, targets[..., None].astype(int), -1)[..., 0])
    np.testing.assert_allclose(losses, expected, **TOLERANCES[f"kernel {dtype}"])
    np.testing.assert_array_equal(dlogits[..., V:], 0)


def test_padding_rows_have_no_influence_and_no_gradient():
    x, wte, targets = inputs()
    losses, dlogits = crossentropy.forward(x, wte, targets, V)
    other = wte.copy()
    other[V:] = 1e9
    for result, same in zip(crossentropy.forward(x, other, targets, V), (losses, dlogits), strict=True):
        np.testing.assert_array_equal(result, same)
    total = crossentropy.backward_wte(np.ones((B, T)), dlogits, x, total=np.empty((PADDED, C)), accumulate=False)
    assert total[:V].any(axis=1).all()
    np.testing.assert_array_equal(total[V:], 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_big_logits_stay_finite(dtype):
    x, wte, targets = inputs(dtype)
    losses, dlogits = crossentropy.forward(x * 200, wte * 10, targets, V)
    assert np.isfinite(losses).all()
    assert np.isfinite(dlogits).all()
    logits = (x * 200).astype("f8") @ (wte[:V] * 10).astype("f8").T
    assert logits.max() > 5000
    top = logits.max(-1)
    expected = (
        top
        + np.log(np.exp(logits - top[..., None]).sum(-1))
        - np.take_along_axis(logits, targets[..., None].astype(int), -1)[..., 0]
    )
    # Logits of some thousands have an absolute rounding error of 1e-3 in float32.
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-2 if dtype == "float32" else 1e-9)


def test_a_nan_is_not_hidden():
    x, wte, targets = inputs("float32")
    x[1, 2, 3] = np.nan
    losses, dlogits = crossentropy.forward(x, wte, targets, V)
    assert np.isnan(losses[1, 2])
    assert np.isnan(losses).sum() == 1
    assert np.isnan(dlogits[1, 2, :V]).all()


def test_mean_is_the_same_as_of_the_batch():
    losses = np.random.default_rng(11).normal(size=(4, 8))
    total = np.full((), np.nan)
    for first in range(0, 4, 2):
        crossentropy.mean_forward(losses[first : first + 2], losses.size, total=total, accumulate=first > 0)
    assert total == pytest.approx(losses.mean(), rel=1e-14)
    gradient = crossentropy.mean_backward(np.asarray(2.0, "f4"), losses.astype("f4"), 32)
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(gradient, np.full((4, 8), 2 / 32, "f4"))


@pytest.mark.parametrize("target", [-1, V, PADDED - 1])
def test_a_target_outside_of_the_vocabulary_is_refused(target):
    x, wte, targets = inputs()
    targets[1, 4] = target
    with pytest.raises(ValueError) as error:
        crossentropy.forward(x, wte, targets, V)
    assert str(error.value) == (
        f"crossentropy.forward: targets must be from 0 to {V - 1}; got targets={target}. "
        "Check the vocabulary and the sequence length."
    )


@pytest.mark.parametrize("vocabulary", [0, PADDED + 1])
def test_a_vocabulary_that_the_table_does_not_hold_is_refused(vocabulary):
    with pytest.raises(ValueError) as error:
        crossentropy.forward(*inputs(), vocabulary)
    assert str(error.value) == (
        f"crossentropy.forward: vocabulary must be from 1 to the {PADDED} rows of wte; got vocabulary={vocabulary}. "
        "Check the padded vocabulary."
    )
