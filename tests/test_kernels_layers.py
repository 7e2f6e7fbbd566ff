"""Tests of all layers' kernels: values, gradients, dtypes, sums in pieces, the same bits wherever they are run.

They are called as their rows say, on arrays of odd sizes, and compared with independent formulas.
"""

from collections.abc import Callable

import numpy as np
import pytest
from layer_check import random_arguments
from product_cases import assert_all_same, at_once
from tolerances import TOLERANCES

from daskgpt.graph.calls import parse
from daskgpt.kernels import crossentropy, embedding, linear, norms
from daskgpt.kernels.native import flush_to_zero
from daskgpt.model import layers
from daskgpt.model.layers import CROSSENTROPY, Layer, Row

Arrays = dict[str, np.ndarray]
# Not multiples of a vector's length, so that loops have remainders; T is longer than a block of attention's queries.
SIZES = {"b": 2, "t": 37, "T": 37, "C": 48, "X": 144, "D": 16, "O": 70, "V": 72, "P": 41}
VOCABULARY = 67
OPTIONS = {"heads": 3, "key_heads": 3, "vocabulary": VOCABULARY, "place": 5, "rate": 0.3}
OPTIONS |= {"norm_eps": 0.01, "rope": (100.0, 4.0, 1.0, 4.0, 30.0)}
# Those of chunks take lists of arrays.
LAYERS = [layer for layer in layers.LAYERS if layer not in (layers.GATHER, layers.SPLIT)]


def arrays_of(layer: Layer, dtype: str = "float64") -> Arrays:
    return random_arguments(layer, np.random.default_rng(5), dtype, SIZES)


def result_of(row: Row, arrays: Arrays) -> np.ndarray | tuple[np.ndarray, ...]:
    """What a kernel makes of arrays by their names; a total starts as NaN, so that a sum that reads it shows."""
    given = [arrays[name] for name in row.arguments.split()]
    options = {name: OPTIONS[name] for name in row.options.split()}
    axes = parse(row.signature)[1][0]
    if not {"b", "t"} & set(axes):
        total = np.full([SIZES[axis] for axis in axes], np.nan, given[0].dtype)
        return row.kernel(*given, **options, total=total, accumulate=False)
    return row.kernel(*given, **options)


def results_of(layer: Layer, arrays: Arrays) -> Arrays:
    """Every output of a layer and every gradient, by name; the gradient of the first output is random."""
    outputs = result_of(layer.forward, arrays)
    results = dict(zip(layer.outputs.split(), outputs if isinstance(outputs, tuple) else (outputs,)))
    y = next(iter(results.values()))
    dy = np.random.default_rng(6).standard_normal(y.shape, np.float32)
    known = arrays | results | {"dy": np.asarray(dy, y.dtype)}
    return results | {f"d{name}": result_of(row, known) for name, row in layer.backward.items() if row}


def _turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Queries and keys as complex numbers, multiplied by those of their angles; values as they are."""
    heads = x.reshape(*x.shape[:2], OPTIONS["heads"] + 2 * OPTIONS["key_heads"], -1)
    half = heads.shape[-1] // 2
    base, factor, low, high, length = OPTIONS["rope"]
    frequencies = base ** -(np.arange(half) / half)
    left = np.interp(length * frequencies / (2 * np.pi), [low, high], [1 / factor, 1])
    assert {1 / factor, 1} < set(left)  # all three kinds
    angles = positions[:, None, None] * (frequencies * left)
    pairs = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angles)
    turned = np.concatenate([pairs.real, pairs.imag], -1)
    turned[:, :, -OPTIONS["key_heads"] :] = heads[:, :, -OPTIONS["key_heads"] :]
    return turned.reshape(x.shape)


def _normalized(x: np.ndarray, q_norm: np.ndarray, k_norm: np.ndarray) -> np.ndarray:
    """Heads of queries and keys of length one, but for their weights; values as they are."""
    heads, key_heads = OPTIONS["heads"], OPTIONS["key_heads"]
    q, k, v = np.split(x.reshape(*x.shape[:2], -1, q_norm.size), [heads, heads + key_heads], axis=2)
    q, k = (part / np.sqrt((part**2).mean(-1, keepdims=True) + OPTIONS["norm_eps"]) for part in (q, k))
    return np.concatenate([q * q_norm, k * k_norm, v], 2).reshape(x.shape)


# Of the arguments of layers that the independent program has not; that of the cross entropy is at the end.
FORMULAS: dict[str, tuple[Layer, Callable[..., np.ndarray]]] = {
    "rmsnorm": (
        layers.RMSNORM,
        lambda x, weight: x / np.sqrt((x**2).mean(-1, keepdims=True) + OPTIONS["norm_eps"]) * weight,
    ),
    "swiglu": (layers.SWIGLU, lambda x: x[..., :72] / (1 + np.exp(-x[..., :72])) * x[..., 72:]),
    "relu2": (layers.RELU2, lambda x: np.maximum(x, 0) ** 2),
    "rotary": (layers.ROTARY, _turned),
    "qk_norm": (layers.QK_NORM, _normalized),
}


every_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])
B, T, C, O, V = 2, 37, 48, 70, 72
RANDOM = np.random.default_rng(8)
DY, X, WIDE, LOSSES, DLOGITS = (RANDOM.normal(size=(B, T, *axes)) for axes in ((C,), (C,), (O,), (), (V,)))
TOKENS, POSITIONS = RANDOM.integers(0, V, (B, T)).astype("i4"), np.arange(3, T + 3, dtype="i4")
# A kernel, what it sums, and the shape of its total; what the sums are is tested with the layers.
SUMS = {
    "embedding.wte": (embedding.backward, (DY, TOKENS), (V, C)),
    "embedding.wpe": (embedding.backward, (DY, POSITIONS), (T + 4, C)),
    "layernorm.weight": (norms.layernorm_backward_weight, (DY, X), (C,)),
    "rmsnorm.weight": (norms.rmsnorm_backward_weight, (DY, X), (C,)),
    "linear.weight": (linear.backward_weight, (WIDE, X), (O, C)),
    "linear.bias": (linear.backward_bias, (WIDE,), (O,)),
    "crossentropy.wte": (crossentropy.backward_wte, (LOSSES, DLOGITS, X), (V, C)),
    "mean": (crossentropy.mean_forward, (LOSSES, DY[..., 0]), ()),
}
every_sum = pytest.mark.parametrize("name", SUMS)
every_table = pytest.mark.parametrize("name", [name for name, case in SUMS.items() if len(case[2]) == 2])


def in_float64(arrays):
    return {name: array.astype("f8") if array.dtype.kind == "f" else array for name, array in arrays.items()}


def moved_in_memory(array, offset):
    """A copy that starts `offset` elements after a multiple of 64 bytes."""
    buffer = np.empty(array.nbytes + 64 + offset * array.itemsize, np.uint8)
    start = -buffer.ctypes.data % 64 + offset * array.itemsize
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("name", FORMULAS)
@every_dtype
def test_forward_agrees_with_the_formula(name, dtype):
    layer, formula = FORMULAS[name]
    arrays = arrays_of(layer, dtype)
    y, expected = next(iter(results_of(layer, arrays).values())), formula(**in_float64(arrays))
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    np.testing.assert_allclose(y, expected, **TOLERANCES[f"kernel {dtype}"])


@every_layer
def test_float32_agrees_with_float64(layer):
    arrays = arrays_of(layer, "float32")
    results, wanted = results_of(layer, arrays), results_of(layer, in_float64(arrays))
    for name, expected in wanted.items():
        assert (results[name].dtype, results[name].shape) == (np.float32, expected.shape)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            results[name] / scale, expected / scale, **TOLERANCES["kernel float32"], err_msg=name
        )


@every_layer
@every_dtype
def test_bits_do_not_depend_on_memory_or_thread(layer, dtype):
    def everything(arrays):
        return results_of(layer, arrays).values()

    arrays = arrays_of(layer, dtype)
    expected = everything({name: array.copy() for name, array in arrays.items()})
    before = {name: array.copy() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    assert_all_same(everything(arrays), expected)
    assert_all_same(arrays.values(), before.values())
    strided = {name: np.repeat(array, 2, axis=-1)[..., ::2] for name, array in arrays.items()}
    assert_all_same(everything(strided), expected)
    for offset in (0, 1, 4, 7):
        moved = {name: moved_in_memory(array, offset) for name, array in arrays.items()}
        assert_all_same(everything(moved), expected)

    def flushed():
        with flush_to_zero():
            return everything(arrays)

    alone = flushed()
    for results in at_once(3, flushed):
        assert_all_same(results, alone)


@every_table
@pytest.mark.parametrize("cut", [1, 16, 41])
def test_rows_can_be_summed_in_pieces(name, cut):
    kernel, arrays, shape = SUMS[name]
    expected, whole = np.full((2, *shape), np.nan)
    assert kernel(*arrays, total=expected, accumulate=False) is expected
    # A range of rows of one array: contiguous, but at any address.
    kernel(*arrays, total=whole[:cut], accumulate=False, first_row=0)
    assert np.isnan(whole[cut:]).all()
    kernel(*arrays, total=whole[cut:], accumulate=False, first_row=cut)
    np.testing.assert_allclose(whole, expected, **TOLERANCES["kernel float64"])


@every_table
def test_rows_outside_of_the_gradient_are_refused_or_zero(name):
    kernel, arrays, shape = SUMS[name]
    total = np.ones((3, C))
    if name.startswith("embedding"):
        kernel(*arrays, total=total, accumulate=False, first_row=shape[0] + 5)
        assert not total.any()
        return
    for first in (-1, shape[0] - 2):
        with pytest.raises(ValueError, match=f"total must be some of the {shape[0]} rows"):
            kernel(*arrays, total=total, accumulate=False, first_row=first)


@every_sum
def test_bad_totals_are_refused(name):
    kernel, arrays, shape = SUMS[name]
    read_only, gaps = np.zeros(shape), np.zeros((*shape, 2))[..., 0]
    read_only.flags.writeable = False
    # A single number is always contiguous.
    for total in (read_only, np.zeros(shape, "float32"), gaps if shape else read_only):
        with pytest.raises(ValueError, match="total must be a writable contiguous float64 array"):
            kernel(*arrays, total=total, accumulate=False)
        assert not total.any()


def head(dtype):
    return arrays_of(CROSSENTROPY, dtype).values()


@every_dtype
@pytest.mark.parametrize("scale", [1, 2000])
def test_losses_and_dlogits_match_the_formula(dtype, scale):
    x, wte, targets = head(dtype)
    x *= scale
    wte[VOCABULARY:] = 1e9
    losses, dlogits = crossentropy.forward(x, wte, targets, VOCABULARY)
    assert dlogits.shape == (B, T, V)
    logits = x.astype("f8") @ wte[:VOCABULARY].astype("f8").T
    assert scale == 1 or logits.max() > 5000  # exp(logit) would be infinite
    log_sum = np.logaddexp.reduce(logits, -1, keepdims=True)
    expected = (log_sum - np.take_along_axis(logits, targets[..., None].astype(int), -1))[..., 0]
    # Logits of some thousands have an absolute rounding error of 1e-3 in float32.
    coarse = {"rtol": 1e-5, "atol": 1e-2 if dtype == "float32" else 1e-9}
    tolerance = TOLERANCES[f"kernel {dtype}"] if scale == 1 else coarse
    np.testing.assert_allclose(losses, expected, **tolerance)
    wanted = np.exp(logits - log_sum) - np.eye(VOCABULARY)[targets]
    np.testing.assert_allclose(dlogits[..., :VOCABULARY], wanted, **tolerance)
    np.testing.assert_array_equal(dlogits[..., VOCABULARY:], 0)


def test_nan_is_not_hidden():
    x, wte, targets = head("float32")
    x[1, 2, 3] = np.nan
    losses, dlogits = crossentropy.forward(x, wte, targets, VOCABULARY)
    np.testing.assert_array_equal(np.argwhere(np.isnan(losses)), [[1, 2]])
    assert np.isnan(dlogits[1, 2, :VOCABULARY]).all()
