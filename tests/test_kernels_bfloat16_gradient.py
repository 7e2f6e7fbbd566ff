"""dweight = dyᵀ x on every unit, whole, by rows, added up, and fused with AdamW."""

from __future__ import annotations

import numpy as np
import pytest
from product_cases import TILE_UNITS, UNITS, arrays, assert_close, assert_same_bits, exact, magnitude, using
from tolerances import TOLERANCES

from daskgpt.kernels.adamw import adamw_inplace
from daskgpt.kernels.bfloat16 import (
    backward_weight,
    forward,
    pack_weight,
    rounded,
    update_weight,
)

PRODUCT = TOLERANCES["bfloat16 sums"]
# Tokens, outputs, channels: below and above a tile, a block and the tokens of one pass over the sums.
SHAPES = [(1, 1, 1), (7, 33, 17), (65, 100, 33), (64, 96, 64), (100, 7, 65), (300, 64, 96), (33, 300, 40)]
OPTIONS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
HYPER = np.array([1e-3, 1 - 0.9**3, 1 - 0.95**3])


@pytest.fixture(params=UNITS)
def name(request):
    with using(request.param):
        yield request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_weight(name, shape):
    tokens, outputs, channels = shape
    dy, x, start = arrays(1, (tokens, outputs), (tokens, channels), (outputs, channels))
    total = np.full((outputs, channels), np.nan, np.float32)
    assert backward_weight(dy, x, total=total, accumulate=False) is total
    expected, scale = exact(dy).T @ exact(x), magnitude(exact(dy).T, exact(x))
    assert_close(total, expected, scale, PRODUCT)
    again = backward_weight(rounded(dy), rounded(x), total=np.empty_like(total), accumulate=False)
    assert_same_bits(again, total)
    added = backward_weight(dy, x, total=start.copy(), accumulate=True)
    assert_close(added, start + expected, scale, PRODUCT)


@pytest.mark.parametrize("name", TILE_UNITS)
def test_rows_can_be_shared_out(name):
    with using(name):
        dy, x = arrays(2, (2, 50, 130), (2, 50, 70))
        whole = backward_weight(dy, x, total=np.empty((130, 70), "f4"), accumulate=False)
        parts = np.empty_like(whole)
        for rows in ((0, 33), (33, 34), (34, 130)):
            backward_weight(dy, x, total=parts[slice(*rows)], accumulate=False, rows=rows)
        assert_same_bits(parts, whole)


def test_rows_of_any_unit(name):
    dy, x = arrays(3, (50, 130), (50, 70))
    found = backward_weight(dy, x, total=np.empty((40, 70), "f4"), accumulate=False, rows=(33, 73))
    left = exact(dy)[:, 33:73].T
    assert_close(found, left @ exact(x), magnitude(left, exact(x)), PRODUCT)


def test_no_tokens(name):
    dy, x, total = np.empty((0, 5), "f4"), np.empty((0, 3), "f4"), np.ones((5, 3), "f4")
    np.testing.assert_array_equal(backward_weight(dy, x, total=total, accumulate=True), np.ones((5, 3)))
    np.testing.assert_array_equal(backward_weight(dy, x, total=total, accumulate=False), np.zeros((5, 3)))


def test_units_agree():
    dy, x = arrays(4, (90, 50), (90, 40))
    scale = magnitude(exact(dy).T, exact(x))
    results = []
    for name in UNITS:
        with using(name):
            results.append(backward_weight(dy, x, total=np.empty((50, 40), "f4"), accumulate=False))
    for found in results[1:]:
        assert_close(found, results[0], scale, PRODUCT)


def state(seed, outputs, channels):
    weight, m, v = arrays(seed, *[(outputs, channels)] * 3)
    return weight, m / 10, v * v / 100


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shape", [((1,), 1, 1), ((17, 5), 65, 33), ((100, 30, 64), 70, 300), ((300,), 320, 70)])
def test_an_update_in_one_pass_has_the_same_bits(name, shape, given):
    tokens, outputs, channels = shape
    dys, xs = (arrays(6, *[(count, width) for count in tokens]) for width in (outputs, channels))
    weight, m, v = state(7, outputs, channels)
    (gradient,) = arrays(8, (outputs, channels))
    total = gradient.copy()
    for chunk, (dy, x) in enumerate(zip(dys, xs)):
        backward_weight(dy, x, total=total, accumulate=given or chunk > 0)
    expected = weight.copy(), m.copy(), v.copy()
    packed = pack_weight(weight)
    update_weight(dys, xs, weight, m, v, packed, HYPER, gradient=gradient if given else None, **OPTIONS)
    adamw_inplace(expected[0], total, *expected[1:], HYPER, **OPTIONS)
    for found, wanted in zip((weight, m, v), expected):
        assert_same_bits(found, wanted)
    fresh = pack_weight(weight)
    assert_same_bits(packed.forward, fresh.forward)
    assert_same_bits(packed.backward, fresh.backward)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_totals_of_groups_meet_before_the_update(name, count, given):
    """The same bits as products, additions and update one after the other, also where a group has several chunks."""
    outputs, channels, tokens = 300, 70, (3, 40, 33, 64, 5, 32, 1, 50, 7)
    groups = [0, *range(8)] if count == 8 else [number * count // len(tokens) for number in range(len(tokens))]
    dys, xs = (arrays(seed, *((n, width) for n in tokens)) for seed, width in ((20, outputs), (21, channels)))
    (gradient,) = arrays(22, (outputs, channels))
    weight, m, v = state(23, outputs, channels)
    expected = [each.copy() for each in (weight, m, v)]
    sums = np.zeros((count, outputs, channels), np.float32)
    sums[0] = gradient if given else 0
    for number, (dy, x, group) in enumerate(zip(dys, xs, groups)):
        begun = groups[number - 1] == group if number else given
        backward_weight(dy, x, total=sums[group], accumulate=begun)
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    adamw_inplace(expected[0], sums[0], *expected[1:], HYPER, **OPTIONS)
    packed, start = pack_weight(weight), gradient if given else None
    update_weight(dys, xs, weight, m, v, packed, HYPER, groups=groups, gradient=start, **OPTIONS)
    for found, wanted in zip((weight, m, v), expected):
        assert_same_bits(found, wanted)
    with pytest.raises(ValueError, match=r"groups must be one a chunk, .*; got groups=\[0, 2, "):
        update_weight(dys, xs, weight, m, v, packed, HYPER, groups=[0, *[2] * (len(dys) - 1)], **OPTIONS)


@pytest.mark.parametrize("name", TILE_UNITS)
def test_updates_of_rows_make_the_whole(name):
    with using(name):
        dy, x = arrays(9, (2, 50, 100), (2, 50, 70))
        one, two = (list(state(10, 100, 70)) for _ in range(2))
        packed = [pack_weight(one[0]) for _ in range(2)]
        update_weight([rounded(dy)], [x], *one, packed[0], HYPER, **OPTIONS)
        for rows in ((32, 96), (0, 32), (96, 100)):
            update_weight([dy], [rounded(x)], *two, packed[1], HYPER, rows=rows, **OPTIONS)
        for found, wanted in zip(two, one):
            assert_same_bits(found, wanted)
        assert_same_bits(forward(x, packed[1]), forward(x, packed[0]))


def test_update_skips_chunks_without_tokens(name):
    dy, x = arrays(11, (50, 40), (50, 30))
    one, two = (list(state(12, 40, 30)) for _ in range(2))
    packed = [pack_weight(one[0]) for _ in range(2)]
    update_weight([dy], [x], *one, packed[0], HYPER, **OPTIONS)
    update_weight([dy, dy[:0]], [x, x[:0]], *two, packed[1], HYPER, **OPTIONS)
    for found, wanted in zip(two, one):
        assert_same_bits(found, wanted)


def test_wrong_gradients_are_refused(name):
    dy, x = arrays(13, (4, 5), (4, 6))
    total = np.empty((5, 6), "f4")
    with pytest.raises(ValueError) as error:
        backward_weight(dy[:3], x, total=total, accumulate=False)
    assert str(error.value) == (
        "bfloat16.backward_weight: dy and x must have the same tokens; got dy.shape=(3, 5), x.shape=(4, 6). "
        "Give those of one chunk."
    )
    with pytest.raises(ValueError) as error:
        backward_weight(dy, x, total=total, accumulate=False, rows=(2, 6))
    assert str(error.value) == (
        "bfloat16.backward_weight: rows must be (first, end) within 0..5; got rows=(2, 6). Count the outputs."
    )
    with pytest.raises(ValueError, match=r"total must have shape \(5, 6\); got shape=\(6, 5\)"):
        backward_weight(dy, x, total=total.T, accumulate=False)
    total.flags.writeable = False
    with pytest.raises(ValueError, match="total must be a writable contiguous float32 array"):
        backward_weight(dy, x, total=total, accumulate=False)
    with pytest.raises(TypeError, match="dy must be float32; got dy.dtype=float64"):
        backward_weight(dy.astype("f8"), x, total=np.empty((5, 6), "f4"), accumulate=False)


def test_wrong_updates_are_refused(name):
    dy, x = arrays(14, (4, 64), (4, 6))
    weight, m, v = state(15, 64, 6)
    packed = pack_weight(weight)
    with pytest.raises(ValueError) as error:
        update_weight([dy], [x, x], weight, m, v, packed, HYPER, **OPTIONS)
    assert str(error.value) == (
        "bfloat16.update_weight: dys and xs must have as many chunks; got 1 and 2. Give one of each."
    )
    with pytest.raises(ValueError, match=r"rows must begin and end at multiples of 32 .* got rows=\(0, 40\)"):
        update_weight([dy], [x], weight, m, v, packed, HYPER, rows=(0, 40), **OPTIONS)
    with pytest.raises(ValueError) as error:
        update_weight([dy], [x], weight, m, v, pack_weight(weight[:32]), HYPER, **OPTIONS)
    assert str(error.value) == (
        "bfloat16.update_weight: packed must be of the weight's shape (64, 6); got packed=(32, 6). "
        "Give the weight's own."
    )
    with pytest.raises(TypeError, match="gradient must be float32; got gradient.dtype=float64"):
        update_weight([dy], [x], weight, m, v, packed, HYPER, gradient=np.zeros((64, 6)), **OPTIONS)
    with pytest.raises(ValueError, match=r"m must have shape \(64, 6\)"):
        update_weight([dy], [x], weight, m[:32], v, packed, HYPER, **OPTIONS)
