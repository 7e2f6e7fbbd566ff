"""Summing kernels: start a total or go on with it, all rows or some, chunk after chunk."""

from __future__ import annotations

import numpy as np
import pytest
from tolerances import TOLERANCES

from daskgpt.kernels import crossentropy, embedding, layernorm, linear

B, T, C, O, V = 2, 37, 48, 70, 72


def _cases():
    random = np.random.default_rng(8)

    def floats(*shape: int) -> np.ndarray:
        return random.normal(size=shape)

    dy, x, wide = floats(B, T, C), floats(B, T, C), floats(B, T, O)
    tokens, positions = random.integers(0, V, (B, T)).astype("i4"), np.arange(3, T + 3, dtype="i4")
    table, places = np.zeros((V, C)), np.zeros((T + 4, C))
    np.add.at(table, tokens, dy)
    np.add.at(places, positions, dy.sum(0))
    x_hat = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    losses, dlogits = floats(B, T), floats(B, T, V)
    return {
        "embedding.wte": (embedding.backward_wte, (dy, tokens), {}, table),
        "embedding.wpe": (embedding.backward_wpe, (dy, positions), {}, places),
        "layernorm.weight": (layernorm.backward_weight, (dy, x), {}, (dy * x_hat).sum((0, 1))),
        "linear.weight": (linear.backward_weight, (wide, x), {}, np.einsum("bto,btc->oc", wide, x)),
        "linear.bias": (linear.backward_bias, (wide,), {}, wide.sum((0, 1))),
        "crossentropy.wte": (
            crossentropy.backward_wte,
            (losses, dlogits, x),
            {},
            np.einsum("bt,btv,btc->vc", losses, dlogits, x),
        ),
        "mean": (crossentropy.mean_forward, (losses,), {"count": B * T}, np.asarray(losses.mean())),
    }


CASES = _cases()
every_sum = pytest.mark.parametrize("name", CASES)
every_table = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3].ndim == 2])


def as_dtype(arrays: tuple[np.ndarray, ...], dtype: str) -> tuple[np.ndarray, ...]:
    return tuple(array.astype(dtype) if array.dtype.kind == "f" else array for array in arrays)


@every_sum
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_total_is_started_or_continued(name, dtype):
    kernel, arrays, options, expected = CASES[name]
    arrays, scale = as_dtype(arrays, dtype), np.abs(expected).max()
    total = np.full(expected.shape, np.nan, dtype)
    assert kernel(*arrays, total=total, accumulate=False, **options) is total
    np.testing.assert_allclose(total / scale, expected / scale, **TOLERANCES[f"kernel {dtype}"])
    assert kernel(*arrays, total=total, accumulate=True, **options) is total
    np.testing.assert_allclose(total / scale, 2 * expected / scale, **TOLERANCES[f"kernel {dtype}"])


@every_sum
def test_sequences_one_after_the_other_add_up_to_the_batch(name):
    kernel, arrays, options, expected = CASES[name]
    total = np.full(expected.shape, np.nan)
    for number in range(B):
        parts = [array[number : number + 1] if array.shape[0] == B else array for array in arrays]
        kernel(*parts, total=total, accumulate=number > 0, **options)
    np.testing.assert_allclose(total, expected, **TOLERANCES["kernel float64"])


@every_table
@pytest.mark.parametrize("cut", [1, 16, 41])
def test_rows_can_be_summed_in_pieces(name, cut):
    kernel, arrays, options, expected = CASES[name]
    whole = np.full(expected.shape, np.nan)
    # A range of rows of one array: contiguous, but at any address.
    kernel(*arrays, total=whole[:cut], accumulate=False, first_row=0, **options)
    assert np.isnan(whole[cut:]).all()
    kernel(*arrays, total=whole[cut:], accumulate=False, first_row=cut, **options)
    np.testing.assert_allclose(whole, expected, **TOLERANCES["kernel float64"])


@every_table
def test_rows_outside_of_the_gradient_are_refused_or_zero(name):
    kernel, arrays, options, expected = CASES[name]
    total = np.ones((3, C))
    if name.startswith("embedding"):
        kernel(*arrays, total=total, accumulate=False, first_row=len(expected) + 5, **options)
        assert not total.any()
    else:
        first = len(expected) - 2
        with pytest.raises(
            ValueError, match=f"total must be some of the {len(expected)} rows; got first_row={first}, rows=3. "
        ):
            kernel(*arrays, total=total, accumulate=False, first_row=first, **options)


FAULTS = [(name, fault) for name in CASES for fault in ("read-only", "other dtype", "not contiguous")]
FAULTS.remove(("mean", "not contiguous"))  # a single number always is


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_total_that_cannot_take_the_sum_is_refused(name, fault):
    kernel, arrays, options, expected = CASES[name]
    total = np.zeros(expected.shape, "float32" if fault == "other dtype" else "float64")
    if fault == "not contiguous":
        total = np.zeros((*expected.shape, 2))[..., 0]
    if fault == "read-only":
        total.flags.writeable = False
    flags = f"contiguous={fault != 'not contiguous'}, writable={fault != 'read-only'}. Allocate it with np.empty."
    with pytest.raises(ValueError) as error:
        kernel(*arrays, total=total, accumulate=False, **options)
    assert "total must be a writable contiguous float64 array; got dtype=" in str(error.value)
    assert str(error.value).endswith(flags)
    assert not total.any()


def test_a_total_of_another_shape_is_refused():
    x = np.ones((1, 2, 48))
    with pytest.raises(
        ValueError, match=r"^layernorm.backward_weight: total must have shape \(48,\); got shape=\(47,\)"
    ):
        layernorm.backward_weight(x, x, total=np.ones(47), accumulate=True)
