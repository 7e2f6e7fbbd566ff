"""Tests of all layers' kernels: values, gradients, dtypes, sums in pieces, the same bits wherever they are run.

They are called as their rows say, on arrays of odd sizes, and compared with independent formulas.
"""

import numpy as np
import pytest
from layer_check import random_arguments
from product_cases import assert_all_same, at_once
from tolerances import TOLERANCES

from daskgpt.graph.calls import parse
from daskgpt.kernels import crossentropy
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


def with_outputs(layer: Layer, arrays: Arrays) -> Arrays:
    """Also every output of a layer, by name, and a random gradient of the first one."""
    outputs = result_of(layer.forward, arrays)
    results = dict(zip(layer.outputs.split(), outputs if isinstance(outputs, tuple) else (outputs,)))
    y = next(iter(results.values()))
    dy = np.random.default_rng(6).standard_normal(y.shape, np.float32)
    return arrays | results | {"dy": np.asarray(dy, y.dtype)}


def results_of(layer: Layer, arrays: Arrays) -> Arrays:
    """Every output of a layer and every gradient, by name."""
    arrays = with_outputs(layer, arrays)
    gradients = {f"d{name}": result_of(row, arrays) for name, row in layer.backward.items() if row}
    return {name: arrays[name] for name in layer.outputs.split()} | gradients


every_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])


def in_float64(arrays):
    return {name: array.astype("f8") if array.dtype.kind == "f" else array for name, array in arrays.items()}


def moved_in_memory(array, offset):
    """A copy that starts `offset` elements after a multiple of 64 bytes."""
    buffer = np.empty(array.nbytes + 64 + offset * array.itemsize, np.uint8)
    start = -buffer.ctypes.data % 64 + offset * array.itemsize
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@every_dtype
def test_relu2_agrees_with_the_formula(dtype):
    """Formulas of other layers are in the independent programs of `test_model.py` and `test_formats_llama.py`."""
    x = arrays_of(layers.RELU2, dtype)["x"]
    np.testing.assert_array_equal(layers.RELU2.forward.kernel(x), np.maximum(x, 0) ** 2, strict=True)


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


TABLES = [(layers.EMBEDDING, "wte"), (layers.EMBEDDING, "wpe"), (layers.LINEAR, "weight"), (CROSSENTROPY, "wte")]


@pytest.mark.parametrize(("layer", "name"), TABLES)
@pytest.mark.parametrize("cut", [1, 16, 40])
def test_rows_can_be_summed_in_pieces(layer, name, cut):
    row, arrays = layer.backward[name], with_outputs(layer, arrays_of(layer))
    given, expected = [arrays[argument] for argument in row.arguments.split()], result_of(row, arrays)
    whole = np.full_like(expected, np.nan)
    # A range of rows of one array: contiguous, but at any address.
    row.kernel(*given, total=whole[:cut], accumulate=False, first_row=0)
    assert np.isnan(whole[cut:]).all()
    row.kernel(*given, total=whole[cut:], accumulate=False, first_row=cut)
    np.testing.assert_allclose(whole, expected, **TOLERANCES["kernel float64"])


def head(dtype):
    return arrays_of(CROSSENTROPY, dtype).values()


@every_dtype
@pytest.mark.parametrize("scale", [1, 2000])
def test_losses_and_dlogits_match_the_formula(dtype, scale):
    x, wte, targets = head(dtype)
    x *= scale
    wte[VOCABULARY:] = 1e9
    losses, dlogits = crossentropy.forward(x, wte, targets, VOCABULARY)
    assert dlogits.shape == (SIZES["b"], SIZES["t"], SIZES["V"])
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
