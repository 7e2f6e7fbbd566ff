"""Every row of LAYERS, whatever it is: gradients, purity, dtypes, chunkings."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from tolerances import TOLERANCES

import daskgpt
from daskgpt.graph.calls import apply
from daskgpt.instruments.layer_check import CHUNK_ERROR, GRADIENT_ERROR, direction_of, random_arguments, run_layer
from daskgpt.kernels import rmsnorm
from daskgpt.model.layers import LAYERS, LINEAR, RMSNORM, Layer, Row

CHUNKINGS = [(4, 6), (2, 3), (1, 2), (4, 1), (2, 6)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_gradients_agree_with_a_numeric_derivative_in_a_random_direction(layer, random):
    values = random_arguments(layer, random, "float64")
    _, gradients = run_layer(layer, values, direction_of)
    assert set(gradients) == set(layer.backward)
    for name, gradient in gradients.items():
        direction = random.normal(size=values[name].shape)
        ends = []
        for sign in (1, -1):
            moved = values | {name: values[name] + sign * 1e-6 * direction}
            y, _ = run_layer(layer, moved, direction_of)
            ends.append((y * direction_of(y)).sum())
        numeric, exact = (ends[0] - ends[1]) / 2e-6, (gradient * direction).sum()
        assert exact == pytest.approx(numeric, **TOLERANCES["numeric derivative"]), name


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_any_chunking_gives_the_same_within_rounding(layer, random):
    values = random_arguments(layer, random, "float32")
    expected = run_layer(layer, values, direction_of, CHUNKINGS[0])
    for chunk in CHUNKINGS[1:]:
        y, gradients = run_layer(layer, values, direction_of, chunk)
        np.testing.assert_allclose(y, expected[0], **TOLERANCES["chunkings"])
        for name, gradient in gradients.items():
            scale = np.abs(expected[1][name]).max()
            np.testing.assert_allclose(
                gradient / scale, expected[1][name] / scale, **TOLERANCES["chunkings"], err_msg=name
            )


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_in_is_dtype_out_and_read_only_arguments_stay_as_they_are(layer, dtype, random):
    values = random_arguments(layer, random, dtype)
    before = {name: value.copy() for name, value in values.items()}
    for value in values.values():
        value.flags.writeable = False
    y, gradients = run_layer(layer, values, direction_of)
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


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_the_check_that_everybody_can_run_finds_nothing_wrong(layer):
    report = daskgpt.check_layer(layer)
    assert report, report
    assert len(report.findings) == 3 + 2 * len(layer.backward)


def without_mean(dy, x, weight):
    return rmsnorm.backward_x(dy, x, weight) + 1e-3 * dy


def anew(dy, x, *, total, accumulate):
    return rmsnorm.backward_weight(dy, x, total=total, accumulate=False)


def across_tokens(x, weight):
    return rmsnorm.forward(x - x.mean(axis=1, keepdims=True), weight)


def in_float64(x, weight):
    return rmsnorm.forward(x, weight).astype("float64")


def over_its_argument(x, weight):
    x *= 2
    return rmsnorm.forward(x, weight)


FORWARD, BACKWARD = RMSNORM.forward, RMSNORM.backward
FAULTS = {
    "gradient of x": {"backward": BACKWARD | {"x": replace(BACKWARD["x"], kernel=without_mean)}},
    "gradient of weight in chunks": {"backward": BACKWARD | {"weight": replace(BACKWARD["weight"], kernel=anew)}},
    "gradient of weight": {"backward": {"x": BACKWARD["x"]}},
    "output in chunks": {"forward": replace(FORWARD, kernel=across_tokens)},
    "dtype": {"forward": replace(FORWARD, kernel=in_float64)},
    "arguments": {"forward": replace(FORWARD, kernel=over_its_argument)},
}


@pytest.mark.parametrize("what", FAULTS)
def test_the_check_that_everybody_can_run_names_what_is_wrong(what):
    report = daskgpt.check_layer(replace(RMSNORM, **FAULTS[what]))
    assert not report
    assert what in [each.what for each in report.findings if not each.right]
    assert f"WRONG  {what}" in str(report)


def test_the_check_that_everybody_can_run_is_as_strict_as_the_tests():
    assert TOLERANCES["numeric derivative"]["rel"] >= GRADIENT_ERROR
    assert TOLERANCES["chunkings"]["rtol"] >= CHUNK_ERROR


def test_an_axis_without_a_size_is_told():
    layer = Layer("wide", Row(RMSNORM.forward.kernel, "btZ, Z -> btZ", "x weight"), "y", BACKWARD)
    with pytest.raises(ValueError, match=r"wide: every axis must have a size; got axes=btZ. Give sizes="):
        daskgpt.check_layer(layer)
