"""Tests of attention in float32, in float64, and with each bfloat16 unit: its formula, gradient, dropout and edges."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import reference_gpt2
from product_cases import UNITS, arrays, assert_same_bits, at_once, exact, using
from reference_dropout import factors
from tolerances import TOLERANCES

from daskgpt.kernels import attention
from daskgpt.kernels.bfloat16 import attention as bf16_attention
from daskgpt.kernels.dropout import streams

# Tokens, heads, heads of keys, and their size: around bands of 32 and 64 queries, and with heads that share keys.
SHAPES = [(tokens, *heads) for tokens in (1, 5, 31, 32, 33, 64, 130) for heads in ((1, 1, 6), (3, 3, 16))]
SHAPES += [(33, 2, 2, 80), (130, 2, 2, 80), (64, 12, 12, 3), (64, 8, 8, 8), (300, 2, 2, 20)]
SHAPES += [(33, 6, 2, 16), (130, 4, 1, 24), (5, 6, 3, 3), (300, 4, 2, 16)]


@dataclass(frozen=True)
class Kind:
    """Attention's kernels in one precision; `seen` makes of operands the numbers that are multiplied."""

    kernels: ModuleType
    dtype: str
    seen: Any
    rounds: bool

    def arrays(self, tokens, channels, columns=0, scale=1.0):
        qkv, dy = arrays(tokens, (2, tokens, columns or 3 * channels), (2, tokens, channels))
        return (qkv * scale).astype(self.dtype), dy.astype(self.dtype)

    def assert_near(self, result, expected):
        assert result.dtype == self.dtype
        if self.rounds:
            largest = np.abs(expected).max() or 1
            np.testing.assert_allclose(result / largest, expected / largest, **TOLERANCES["bfloat16 attention"])
        else:
            np.testing.assert_allclose(result, expected, **TOLERANCES[f"kernel {self.dtype}"])


@pytest.fixture(params=["float32", "float64", *UNITS])
def kind(request):
    if request.param.startswith("float"):
        yield Kind(attention, request.param, lambda x: x.astype("f8"), False)
    else:
        with using(request.param):
            yield Kind(bf16_attention, "float32", exact, True)


def run(kernels, qkv, dy, heads, rate=0.0, key_heads=0):
    """Output, log-sum-exp and gradient; place 7 of step 4 with seed 3."""
    keys = streams(3, 4, len(qkv)) if rate else None
    options = {"heads": heads, "key_heads": key_heads, "place": 7, "rate": rate}
    y, logsumexp = kernels.forward(qkv, keys, **options)
    return y, logsumexp, kernels.backward(dy, qkv, y, logsumexp, keys, **options)


@pytest.mark.parametrize("rate", [0, 0.3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_matches_an_independent_program(kind, shape, rate):
    """Its keys and values are repeated for the heads that share them, and their gradients added."""
    tokens, heads, key_heads, size = shape
    qkv, dy = kind.arrays(tokens, heads * size, (heads + 2 * key_heads) * size)
    y, logsumexp, gradient = run(kind.kernels, qkv, dy, heads, rate, key_heads)
    of_head = np.repeat(np.arange(key_heads), heads // key_heads)
    parts = np.split(qkv.reshape(2, tokens, -1, size), [heads, heads + key_heads], axis=2)
    repeated = np.concatenate([parts[0], parts[1][:, :, of_head], parts[2][:, :, of_head]], 2).reshape(2, tokens, -1)
    masks = np.array([[factors(3, 4, s, 7, h, tokens, tokens, rate) for h in range(heads)] for s in range(2)])
    expected, wanted, kept = reference_gpt2.attention(kind.seen(repeated), heads, masks)
    kind.assert_near(y, expected)
    assert logsumexp.dtype == kind.dtype
    np.testing.assert_allclose(logsumexp, wanted, **TOLERANCES[f"kernel {kind.dtype}"])
    of_repeated = reference_gpt2.attention_backward(kind.seen(dy), kept).reshape(2, tokens, 3, key_heads, -1, size)
    shared = of_repeated[:, :, 1:].sum(4).reshape(2, tokens, -1)
    kind.assert_near(gradient, np.concatenate([of_repeated[:, :, 0].reshape(2, tokens, -1), shared], 2))


def test_large_scores_stay_finite(kind):
    qkv, dy = kind.arrays(70, 16, scale=40)  # scores of some thousands: exp(score) would be infinite
    y, logsumexp, gradient = run(kind.kernels, qkv, dy, 2)
    expected, expected_logsumexp, _ = reference_gpt2.attention(kind.seen(qkv), 2)
    assert np.abs(expected_logsumexp).max() > 3000
    np.testing.assert_allclose(logsumexp, expected_logsumexp, rtol=1e-5)
    if kind.rounds:
        kind.assert_near(y, expected)
    else:
        # Scores of 5,000 carry an absolute rounding error of 5,000 * 6e-8 * 4 in float32: so much weights differ.
        tolerance = {"rtol": 1e-5, "atol": 0.2} if kind.dtype == "float32" else {"rtol": 1e-9, "atol": 1e-9}
        np.testing.assert_allclose(y, expected, **tolerance)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("tokens", [63, 130])
@pytest.mark.parametrize("scale", [1, 18])
def test_saturated_scores_keep_precision(tokens, scale):
    """Scores of some hundreds: a probability that follows from a rounded log-sum-exp alone would be 3e-5 off."""
    qkv, dy = arrays(tokens, (2, tokens, 3 * 144), (2, tokens, 144))
    qkv *= scale
    wanted, textbook = (
        reference_gpt2.attention_backward(dy.astype(dtype), reference_gpt2.attention(qkv.astype(dtype), 3)[2])
        for dtype in ("f8", "f4")
    )
    results = run(attention, qkv, dy, 3)[2], textbook
    for part in range(3):
        columns = slice(part * 144, part * 144 + 144)
        error, usual = (np.square(g[..., columns] - wanted[..., columns]).mean() ** 0.5 for g in results)
        assert error <= TOLERANCES["attention, saturated"]["factor"] * usual, "qkv"[part]


@pytest.mark.parametrize("tokens", [33, 130])
def test_attention_is_causal(kind, tokens):
    qkv, dy = kind.arrays(tokens, 48)
    dy[:, 20:] = 0
    y, logsumexp, gradient = run(kind.kernels, qkv, dy, 3)
    for cut in (1, 31, tokens - 1):
        changed = qkv.copy()
        changed[:, cut:] = 1e6
        again, logsumexp_again = kind.kernels.forward(changed, heads=3)
        np.testing.assert_array_equal(again[:, :cut], y[:, :cut])
        np.testing.assert_array_equal(logsumexp_again[..., :cut], logsumexp[..., :cut])
    assert not gradient[:, 20:].any()


def test_nan_is_not_hidden(kind):
    qkv, dy = kind.arrays(40, 16)
    qkv[0, 3, 2] = np.nan  # a query of the first head
    y, _, gradient = run(kind.kernels, qkv, dy, 2)
    assert np.isnan([y[0, 3, :8], gradient[0, 3, :8]]).all()
    assert np.isfinite(y[0, :3]).all()
    assert np.isfinite(y[1]).all()
    assert np.isfinite(gradient[1]).all()


def test_threads_at_once_give_the_same_bits_and_inputs_are_only_read(kind):
    qkv, dy = kind.arrays(100, 96)
    expected = run(kind.kernels, qkv, dy, 6, 0.3)
    before = [array.copy() for array in (qkv, dy)]
    moved = np.append(qkv[:1, :1, :1], qkv)[1:].reshape(qkv.shape)
    for array in (moved, qkv, dy):
        array.flags.writeable = False
    for results in at_once(4, lambda: [run(kind.kernels, x, dy, 6, 0.3) for x in (qkv, moved)]):
        for result, wanted in zip(sum(results, ()), expected * 2, strict=True):
            assert_same_bits(result, wanted)
    for array, copy in zip((qkv, dy), before):
        assert_same_bits(array, copy)
