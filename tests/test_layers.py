"""Every row of LAYERS, whatever it is: gradients, purity, dtypes, chunkings."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from tolerances import TOLERANCES

from daskgpt.graph.calls import apply, parse
from daskgpt.model.layers import LAYERS, LINEAR, Layer
from daskgpt.model.tape import Tape

SIZES = {"b": 4, "t": 6, "T": 6, "C": 8, "X": 24, "O": 5, "V": 11, "P": 7}
OPTIONS = {"heads": 2, "vocabulary": 9, "count": 24}
CHUNKINGS = [(4, 6), (2, 3), (1, 2), (4, 1), (2, 6)]


def arguments_of(layer: Layer, random: np.random.Generator, dtype: str = "float64") -> dict[str, np.ndarray]:
    values = {}
    for name, axes in zip(layer.forward.arguments.split(), parse(layer.forward.signature)[0], strict=True):
        shape = tuple(SIZES[axis] for axis in axes)
        if name in ("tokens", "targets"):
            values[name] = random.integers(0, OPTIONS["vocabulary"], shape).astype(np.int32)
        elif name == "positions":
            values[name] = np.arange(*shape, dtype=np.int32)
        else:
            values[name] = random.normal(size=shape).astype(dtype)
    return values


def lazy(
    layer: Layer, values: dict[str, np.ndarray], chunk: tuple[int, int], sizes: dict[str, int] = SIZES
) -> dict[str, da.Array]:
    """Dask arrays cut along b and t only."""
    cut = dict(zip("bt", chunk))
    return {
        name: da.from_array(
            values[name], chunks=tuple(cut.get(axis, sizes[axis]) for axis in axes), name=f"{name}-leaf"
        )
        for name, axes in zip(layer.forward.arguments.split(), parse(layer.forward.signature)[0], strict=True)
    }


def run(layer: Layer, values: dict[str, np.ndarray], dy_of, chunk: tuple[int, int] = (2, 3), scheduler: str = "sync"):
    """Output, and gradients of sum(output * dy) by argument."""
    tape = Tape()
    arrays = lazy(layer, values, chunk)
    y = tape("here.0", layer, *arrays.values(), **OPTIONS)
    dy = da.from_array(dy_of(y), chunks=y.chunks, name="dy-leaf")
    gradients = tape.backward(y, dy)
    found = {name: gradients[array.name] for name, array in arrays.items() if array.name in gradients}
    return dask.compute(y, found, scheduler=scheduler)


def dy_of(y: da.Array) -> np.ndarray:
    return np.random.default_rng(3).normal(size=y.shape).astype(y.dtype)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_gradients_agree_with_a_numeric_derivative_in_a_random_direction(layer, random):
    values = arguments_of(layer, random)
    _, gradients = run(layer, values, dy_of)
    assert set(gradients) == set(layer.backward)
    for name, gradient in gradients.items():
        direction = random.normal(size=values[name].shape)
        ends = []
        for sign in (1, -1):
            moved = values | {name: values[name] + sign * 1e-6 * direction}
            y, _ = run(layer, moved, dy_of)
            ends.append((y * dy_of(y)).sum())
        numeric, exact = (ends[0] - ends[1]) / 2e-6, (gradient * direction).sum()
        assert exact == pytest.approx(numeric, **TOLERANCES["numeric derivative"]), name


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_any_chunking_gives_the_same_within_rounding(layer, random):
    values = arguments_of(layer, random, "float32")
    expected = run(layer, values, dy_of, CHUNKINGS[0])
    for chunk in CHUNKINGS[1:]:
        y, gradients = run(layer, values, dy_of, chunk)
        np.testing.assert_allclose(y, expected[0], **TOLERANCES["chunkings"])
        for name, gradient in gradients.items():
            scale = np.abs(expected[1][name]).max()
            np.testing.assert_allclose(
                gradient / scale, expected[1][name] / scale, **TOLERANCES["chunkings"], err_msg=name
            )


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_in_is_dtype_out_and_read_only_arguments_stay_as_they_are(layer, dtype, random):
    values = arguments_of(layer, random, dtype)
    before = {name: value.copy() for name, value in values.items()}
    for value in values.values():
        value.flags.writeable = False
    y, gradients = run(layer, values, dy_of)
    assert {np.asarray(a).dtype for a in [y, *gradients.values()]} == {np.dtype(dtype)}
    for name, value in values.items():
        np.testing.assert_array_equal(value, before[name])


def test_an_array_cut_where_the_signature_wants_it_whole_is_refused():
    x = da.zeros((4, 6, 8), chunks=(2, 3, 4), dtype="f4")
    weight, bias = da.zeros((5, 8), chunks=(5, 4), dtype="f4"), da.zeros(5, dtype="f4")
    with pytest.raises(ValueError, match=r"linear: axis C must be one chunk; got chunks=\(4, 4\). Gather it first."):
        apply("linear", LINEAR.forward.kernel, LINEAR.forward.signature, [x, weight, bias])


def test_arrays_whose_chunks_differ_are_refused():
    x, y = da.zeros((4, 6, 8), chunks=(2, 3, 8), dtype="f4"), da.zeros((4, 6, 8), chunks=(4, 3, 8), dtype="f4")
    with pytest.raises(
        ValueError, match=r"add: arrays must share the chunks of axis b; got \(2, 2\) and \(4,\). Rechunk one."
    ):
        apply("add", None, "btC, btC -> btC", [x, y])
