"""Tests of every row of LAYERS with `check_layer`, and of the faults that it detects."""

from dataclasses import replace

import dask.array as da
import pytest
from layer_check import check_layer

from daskgpt.graph.calls import apply
from daskgpt.kernels import norms
from daskgpt.model.layers import LAYERS, LINEAR, RMSNORM, Layer, Row

# Below and above the lanes of a sum, and no multiples of them.
SIZES = {"small": {}, "wide": {"C": 41, "X": 120, "D": 30, "O": 70, "V": 72}}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_the_check_finds_nothing_wrong(layer, sizes):
    report = check_layer(layer, SIZES[sizes])
    assert report, report
    expected = {f"gradient of {name}{end}" for name in layer.backward for end in ("", " in chunks")}
    assert {finding.what for finding in report.findings} == expected | {"output in chunks", "dtype", "arguments"}
    assert report.layer in str(report)


def without_mean(dy, x, weight, **options):
    return norms.rmsnorm_backward_x(dy, x, weight, **options) + 1e-3 * dy


def anew(dy, x, *, accumulate, **options):
    return norms.rmsnorm_backward_weight(dy, x, accumulate=False, **options)


def across_tokens(x, weight, **options):
    return norms.rmsnorm(x - x.mean(axis=1, keepdims=True), weight, **options)


def over_its_argument(x, weight, **options):
    x *= 2
    return norms.rmsnorm(x, weight, **options)


def of_float64(x, weight, **options):
    return norms.rmsnorm(x, weight, **options).astype("f8")


FORWARD, BACKWARD = RMSNORM.forward, RMSNORM.backward
FAULTS = {
    "gradient of x": {"backward": BACKWARD | {"x": replace(BACKWARD["x"], kernel=without_mean)}},
    "gradient of weight in chunks": {"backward": BACKWARD | {"weight": replace(BACKWARD["weight"], kernel=anew)}},
    "gradient of weight": {"backward": {"x": BACKWARD["x"]}},
    "output in chunks": {"forward": replace(FORWARD, kernel=across_tokens)},
    "dtype": {"forward": replace(FORWARD, kernel=of_float64)},
    "arguments": {"forward": replace(FORWARD, kernel=over_its_argument)},
}


@pytest.mark.parametrize("what", FAULTS)
def test_check_names_faults(what):
    report = check_layer(replace(RMSNORM, **FAULTS[what]))
    assert not report
    assert what in [finding.what for finding in report.findings if not finding.right]
    assert f"WRONG  {what}" in str(report)


def test_invalid_layers_are_refused():
    layer = Layer("wide", Row(FORWARD.kernel, "btZ, Z -> btZ", "x weight"), "y", BACKWARD)
    with pytest.raises(ValueError, match="wide: every axis must have a size; got axes=btZ"):
        check_layer(layer)
    x, other = (da.zeros((4, 6, 8), chunks=(size, 3, 8), dtype="f4") for size in (2, 4))
    weight, bias = da.zeros((5, 8), chunks=(5, 4), dtype="f4"), da.zeros(5, dtype="f4")
    with pytest.raises(ValueError, match=r"linear: axis C must be one chunk; got chunks=\(4, 4\)"):
        apply("linear", LINEAR.forward.kernel, LINEAR.forward.signature, [x.rechunk((2, 3, 4)), weight, bias])
    with pytest.raises(ValueError, match=r"add: arrays must share the chunks of axis b; got \(2, 2\) and \(4,\)"):
        apply("add", None, "btC, btC -> btC", [x, other])


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "send.totals"},
        {"outputs": "y scale"},
        {"forward": replace(FORWARD, arguments="x")},
        {"forward": replace(FORWARD, signature="btC, C")},
        {"backward": {"x": replace(BACKWARD["x"], arguments="dx x weight")}},
        {"backward": {"x": replace(BACKWARD["x"], arguments="x x weight")}},
        {"backward": {"wieght": BACKWARD["weight"]}},
    ],
)
def test_rows_that_do_not_fit_are_refused(wrong):
    with pytest.raises(TypeError, match=r"^layer.*; got (signature|name|backward)="):
        replace(RMSNORM, **wrong)
