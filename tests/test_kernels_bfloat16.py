"""Tests of bfloat16: rounding, packed weights, scratch memory, the choice of a unit, and its three products."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from product_cases import UNITS, arrays, assert_all_same, assert_product, check_rounding, round_one_by_one, using

from daskgpt.graph.distribute import read_rows, write_rows
from daskgpt.kernels.bfloat16 import gemm, isa
from daskgpt.kernels.bfloat16.gemm import TrainedWeight
from daskgpt.kernels.bfloat16.isa import Unit, outruns_float32, unit, works
from daskgpt.kernels.bfloat16.rounding import from_bfloat16, rounded, to_bfloat16
from daskgpt.kernels.bfloat16.update import linear_update
from daskgpt.kernels.optimizers import adamw_inplace
from daskgpt.kernels.simd.lanes import PAGE

ALL = np.arange(1 << 16, dtype=np.uint16)
# Rows, channels, outputs: below and above a tile and a block, odd numbers, a summed axis in one piece and in several.
SHAPES = [(1, 1, 1), (7, 17, 33), (33, 65, 100), (100, 33, 7), (65, 300, 32), (300, 64, 96), (3, 2500, 40)]
SHAPES += [(300, 2100, 40)]  # enough rows for the summed axis to be cut
# Tokens, outputs, channels: below and above a tile, a block and the tokens of one pass over the sums; over 31 panels.
GRADIENT_SHAPES = [(1, 1, 1), (7, 33, 17), (65, 100, 33), (64, 96, 64), (100, 7, 65), (300, 64, 96), (33, 300, 40)]
GRADIENT_SHAPES += [(40, 33, 1056)]
OPTIONS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
HYPER = np.array([1e-3, 1 - 0.9**3, 1 - 0.95**3])


@pytest.fixture(params=UNITS)
def name(request):
    with using(request.param):
        yield request.param


@pytest.fixture(params=UNITS[1:])
def tiles(request):
    """A unit whose rows do not depend on their company."""
    with using(request.param):
        yield request.param


def gradient_of(dy, x, rows, first_row=0):
    total = np.full((rows, x.shape[-1]), np.nan, "f4")
    assert gemm.backward_weight(dy, x, total=total, accumulate=False, first_row=first_row) is total
    return total


def state(seed, outputs, channels):
    weight, m, v = arrays(seed, *[(outputs, channels)] * 3)
    return [weight, m / 10, v * v / 100]


def test_every_bfloat16_number_survives():
    widened = from_bfloat16(ALL)
    assert widened.dtype == np.float32
    np.testing.assert_array_equal(widened.view(np.uint32), ALL.astype(np.uint32) << 16)
    check_rounding(to_bfloat16)


@pytest.mark.parametrize("last", [1, 7, 15, 16, 17, 33, 1000])
def test_rounding_takes_any_size_and_strides_and_read_only_arrays(last, random):
    columns = random.normal(size=(3, 4, 3 * last)).astype(np.float32)[:, ::2, 1::3]
    columns.flags.writeable = False
    rounded_bits = to_bfloat16(columns)
    np.testing.assert_array_equal(rounded_bits, round_one_by_one(np.ascontiguousarray(columns)))
    assert from_bfloat16(rounded_bits[..., ::2]).shape == (3, 2, (last + 1) // 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward_x(name, shape):
    rows, channels, outputs = shape
    x, weight, bias, dy = arrays(1, (rows, channels), (outputs, channels), (outputs,), (rows, outputs))
    packed = TrainedWeight.of(weight)
    y, dx = gemm.forward(x, packed, bias), gemm.backward_x(dy, packed)
    assert y.dtype == np.float32
    assert_product(y, x, weight.T, bias)
    assert_product(gemm.forward(x, packed), x, weight.T)
    assert_product(dx, dy, weight)
    x, dy = rounded(x), rounded(dy)
    assert_all_same((gemm.forward(x, packed, bias), gemm.backward_x(dy, packed)), (y, dx))


def test_inputs_are_only_read_wherever_they_lie(name):
    x, weight, bias = arrays(8, (37, 65), (41, 65), (41,))
    packed = TrainedWeight.of(weight)
    expected = gemm.forward(x, packed, bias)
    memory = np.empty(x.nbytes + 64, np.uint8)
    for offset in (4, 20, 36):
        moved = memory[offset : offset + x.nbytes].view(np.float32).reshape(x.shape)
        moved[...] = x
        moved.flags.writeable = False
        assert_all_same((gemm.forward(moved, packed, bias), moved), (expected, x))
    assert_all_same([gemm.forward(np.repeat(x, 2, axis=1)[:, ::2], packed, bias)], [expected])


def test_sent_weight_gives_the_owners_bits(name):
    weight, old, x, dy = arrays(11, (600, 70), (600, 70), (9, 70), (9, 600))
    trained, other = TrainedWeight.of(weight), TrainedWeight.of(old)
    for rows in (slice(0, 320), slice(320, 600)):
        sent = read_rows(trained, rows, rounded=True)
        assert sent.nbytes == weight[rows].nbytes / 2
        write_rows(other, rows, sent)
    expected = gemm.forward(x, trained), gemm.backward_x(dy, trained)
    for packed in (other, pickle.loads(pickle.dumps(trained))):
        assert_all_same((gemm.forward(x, packed), gemm.backward_x(dy, packed)), expected)


def test_shared_memory_is_counted_once(name):
    weight = TrainedWeight.of(np.ones((64, 96), np.float32))
    # Rounded values in float32 serve both products; in tiles each product has 2 bytes a number of its own.
    packed = {array.ctypes.data: array.nbytes for array in (weight.forward, weight.backward)}
    assert weight.nbytes == weight.values.nbytes + sum(packed.values()) == 2 * weight.values.nbytes
    odd = TrainedWeight.of(np.ones((33, 31), np.float32))  # panels have whole multiples of 32
    assert (odd.nbytes - odd.values.nbytes) // 4 == (64 * 32 if odd.in_tiles else 33 * 31)


def test_without_rows_or_tokens_nothing_is_added(name):
    packed = TrainedWeight.of(arrays(11, (45, 70))[0])
    assert gemm.forward(np.empty((0, 70), "f4"), packed).shape == (0, 45)
    assert gemm.backward_x(np.empty((2, 0, 45), "f4"), packed).shape == (2, 0, 70)
    dy, x, total = np.empty((0, 5), "f4"), np.empty((0, 3), "f4"), np.ones((5, 3), "f4")
    np.testing.assert_array_equal(gemm.backward_weight(dy, x, total=total, accumulate=True), np.ones((5, 3)))
    np.testing.assert_array_equal(gradient_of(dy, x, 5), np.zeros((5, 3)))


def test_nan_and_infinity_reach_the_result(name):
    x, weight = arrays(12, (40, 70), (45, 70))
    x[3, 5], x[20, 7] = np.nan, np.inf
    y = gemm.forward(x, TrainedWeight.of(np.abs(weight) + 1))
    assert np.isnan(y[3]).all()
    assert np.isposinf(y[20]).all()
    assert np.isfinite(np.delete(y, (3, 20), axis=0)).all()


@pytest.mark.parametrize("shape", GRADIENT_SHAPES)
def test_backward_weight(name, shape):
    tokens, outputs, channels = shape
    dy, x, start = arrays(1, (tokens, outputs), (tokens, channels), (outputs, channels))
    total = gradient_of(dy, x, outputs)
    assert_product(total, dy.T, x)
    assert_all_same([gradient_of(rounded(dy), rounded(x), outputs)], [total])
    assert_product(gemm.backward_weight(dy, x, total=start.copy(), accumulate=True), dy.T, x, start)
    first, last = outputs // 3, outputs // 3 + (outputs + 1) // 2
    assert_product(gradient_of(dy, x, last - first, first), dy[:, first:last].T, x)


def test_rows_can_be_divided(tiles):
    dy, x = arrays(2, (2, 50, 130), (2, 50, 70))
    parts = [gradient_of(dy, x, last - first, first) for first, last in ((0, 33), (33, 34), (34, 130))]
    assert_all_same([np.concatenate(parts)], [gradient_of(dy, x, 130)])


UPDATES = [
    (1, (1,), 1, 1),
    (1, (17, 5), 65, 33),
    (1, (100, 30, 64), 70, 300),
    *((count, (3, 40, 33, 64, 5, 32, 1, 50, 7), 300, 70) for count in (2, 4, 8)),
]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("count", "tokens", "outputs", "channels"), UPDATES)
def test_an_update_in_one_pass_has_the_bits_of_products_additions_and_adamw(
    tiles, count, tokens, outputs, channels, given
):
    """Totals of groups meet before the update, also where a group has several chunks."""
    groups = [0, *range(8)] if count == 8 else [number * count // len(tokens) for number in range(len(tokens))]
    dys, xs = (arrays(seed, *((n, width) for n in tokens)) for seed, width in ((20, outputs), (21, channels)))
    (gradient,) = arrays(22, (outputs, channels))
    weight, m, v = state(23, outputs, channels)
    expected = [array.copy() for array in (weight, m, v)]
    sums = np.zeros((count, outputs, channels), np.float32)
    sums[0] = gradient if given else 0
    for number, (dy, x, group) in enumerate(zip(dys, xs, groups)):
        begun = groups[number - 1] == group if number else given
        gemm.backward_weight(dy, x, total=sums[group], accumulate=begun)
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    adamw_inplace(expected[0], sums[0], *expected[1:], HYPER, **OPTIONS)
    packed, start = TrainedWeight.of(weight), gradient if given else None
    linear_update(list(zip(dys, xs)), groups, start, (packed, m, v, HYPER), 0, outputs, **OPTIONS)
    fresh = TrainedWeight.of(weight)
    updated = weight, m, v, packed.forward, packed.backward
    assert_all_same(updated, (*expected, fresh.forward, fresh.backward))


def test_updates_of_rows_make_the_whole(tiles):
    dy, x = arrays(9, (2, 50, 100), (2, 50, 70))
    one, two = ((TrainedWeight.of(weight), m, v, HYPER) for weight, m, v in (state(10, 100, 70) for _ in range(2)))
    linear_update([(rounded(dy), x)], [0], None, one, 0, 100, **OPTIONS)
    for rows in ((32, 96), (0, 32), (96, 100)):
        linear_update([(dy, rounded(x))], [0], None, two, *rows, **OPTIONS)
    assert_all_same(*([weight.values, m, v, gemm.forward(x, weight)] for weight, m, v, _ in (two, one)))


@pytest.fixture
def named(monkeypatch):
    """What `unit` answers where the variable names a unit, with this function in the place of `works`."""

    def answer(name, works=works):
        monkeypatch.setattr(isa, "works", works)
        monkeypatch.setenv(isa.VARIABLE, name)
        unit.cache_clear()
        return unit()

    yield answer
    unit.cache_clear()


def test_the_variable_names_the_unit(named):
    assert [named(name, lambda unit: True) for name in UNITS] == list(Unit)
    with pytest.raises(ValueError, match="the unit must be amx, avx512 or portable; got DASKGPT_MATMUL=gpu"):
        named("gpu")
    with pytest.raises(RuntimeError, match="the processor must have the unit"):
        named("avx512", lambda unit: unit is Unit.PORTABLE)


THE_FASTEST_UNIT_THAT_OUTRUNS_FLOAT32_IS_PICKED = [
    ("znver4", {Unit.AVX512, Unit.AMX}, {Unit.AVX512}, Unit.AVX512),
    ("znver4", {Unit.AVX512, Unit.AMX}, set(), Unit.PORTABLE),
    ("sapphirerapids", {Unit.AMX}, {Unit.AVX512}, Unit.PORTABLE),
    ("sapphirerapids", {Unit.AMX}, {Unit.AVX512, Unit.AMX}, Unit.AMX),
]


@pytest.mark.parametrize(("processor", "fast", "available", "picked"), THE_FASTEST_UNIT_THAT_OUTRUNS_FLOAT32_IS_PICKED)
def test_the_fastest_unit_that_outruns_float32_is_picked(monkeypatch, named, processor, fast, available, picked):
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: processor)
    assert {kind for kind in Unit if outruns_float32(kind)} == fast
    assert named("", lambda unit: unit in available) is picked


def test_units_are_compiled_if_the_processor_has_them(monkeypatch):
    portable, avx512 = {Unit.PORTABLE}, {Unit.PORTABLE, Unit.AVX512}
    for has, tiles, compiled in ((True, "tile bf16", {*Unit}), (True, "tile", avx512), (False, "tile bf16", portable)):
        monkeypatch.setattr(isa, "has_avx512_bfloat16", lambda has=has: has)
        monkeypatch.setattr(isa, "features", lambda tiles=tiles: frozenset(f"amx-{name}" for name in tiles.split()))
        assert {unit for unit in Unit if isa.compiles(unit)} == compiled


def test_scratch_pieces_are_page_aligned_and_disjoint():
    scratch = isa.Scratch()
    sizes = (1, PAGE, 0, PAGE + 1, 7)
    addresses = scratch(*sizes)
    assert all(address % PAGE == 0 for address in addresses)
    assert [after - before for before, after in pairwise(addresses)] == [PAGE, PAGE, 0, 2 * PAGE]
    assert scratch(*sizes) == addresses
    assert scratch(PAGE) == addresses[:1], "less is found where more was"


def test_scratch_is_per_thread(monkeypatch):
    """A thread requests the tile registers there: without the request, its first product would crash."""
    asked: list[int] = []
    monkeypatch.setattr(isa, "unit", lambda: Unit.AMX)
    monkeypatch.setattr(isa, "request_tiles", lambda: asked.append(threading.get_ident()))
    scratch = isa.Scratch()
    assert asked == [], "nothing is asked for by whoever only imports"

    def use(size: int) -> tuple[int, list[int]]:
        return threading.get_ident(), scratch(size)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        first, (place,) = one.submit(use, 100).result()
        second, (elsewhere,) = other.submit(use, 100).result()
        assert first != second
        assert abs(place - elsewhere) >= PAGE
        assert asked == [first, second]
        assert one.submit(use, PAGE).result() == (first, [place])
        assert asked == [first, second]
        one.submit(use, PAGE + 1).result()
        assert asked == [first, second, first]
