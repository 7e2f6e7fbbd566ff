"""Check a layer before it is in a model: gradients, chunkings, dtypes, unchanged arguments.

Notebook 6 imports this module from its folder, and so do the tests of the package's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np

from daskgpt.config.errors import require
from daskgpt.graph.calls import parse
from daskgpt.model.layers import Layer, Row
from daskgpt.model.tape import Tape

SIZES = {"b": 4, "t": 6, "T": 6, "C": 8, "X": 24, "D": 6, "O": 5, "V": 11, "P": 7}
OPTIONS: dict[str, Any] = {"heads": 2, "key_heads": 1, "vocabulary": 9, "place": 5, "rate": 0.3}
OPTIONS |= {"norm_eps": 0.01, "rope": (100.0, 4.0, 1.0, 4.0, 30.0)}
CHUNKS = ((4, 6), (2, 3), (1, 2), (4, 1), (2, 6))  # of a batch of these sizes; the first is all of it
STEP = 1e-6  # of a numeric derivative
# A central difference in float64 has errors of 1e-10 relative; a wrong formula one of some per cent.
GRADIENT_ERROR = 1e-6
# float32 sums in another order, in units of the largest number; a missing chunk costs some tenths.
CHUNK_ERROR = 2e-5

Arrays = dict[str, np.ndarray]
Run = Callable[..., Arrays]  # from arguments and a chunk to "output" and "gradient of ..." of each argument


class Finding(NamedTuple):
    """One check: its subject, whether it holds, and the finding in words."""

    what: str
    right: bool
    told: str


@dataclass(frozen=True, repr=False)
class LayerReport:
    """The result of `check_layer`; true if all checks hold."""

    layer: str
    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return all(finding.right for finding in self.findings)

    def __repr__(self) -> str:
        lines = (f"{'ok' if right else 'WRONG':6} {what:28} {told}" for what, right, told in self.findings)
        return "\n".join([f"Layer {self.layer}", *lines])


def check_layer(
    layer: Layer, sizes: Mapping[str, int] | None = None, options: Mapping[str, Any] | None = None
) -> LayerReport:
    """Check a layer as the tests check every layer of the package; `check_layer(RMSNORM)` is true.

    Each gradient is compared with a numeric derivative in a random direction (float64), and output and gradients of a
    batch in chunks with those of the whole batch (float32). Dtypes must be kept, and arguments must stay unchanged.

    sizes     sizes of axes, by their letters; the letters of the package's layers have defaults
    options   options of the layer

    Errors    ValueError for a letter without a size; those of the layer's kernels
    """
    changed, dtypes, given = set[str](), set[str](), OPTIONS | dict(options or {})
    backward = {name: _watched(row, changed) if row else row for name, row in layer.backward.items()}
    watched = replace(layer, forward=_watched(layer.forward, changed), backward=backward)

    def run(values: Arrays, chunk: tuple[int, int] = (2, 3)) -> Arrays:
        y, gradients = run_layer(watched, values, chunk, given)
        results = {"output": y} | {f"gradient of {name}": gradient for name, gradient in gradients.items()}
        floats = {value.dtype.name for value in values.values() if value.dtype.kind == "f"}
        made = {np.asarray(result).dtype.name for result in results.values()}
        dtypes.update(f"{', '.join(floats)} in, {name} out" for name in made - floats)
        return results

    random = np.random.default_rng(20)
    double, single = (random_arguments(layer, random, kind, SIZES | dict(sizes or {})) for kind in ("f8", "f4"))
    findings = [*_gradients(run, double, random), *_chunkings(run, single)]
    kept = "; ".join(sorted(dtypes)) or "float32 stays float32, float64 float64"
    findings.append(Finding("dtype", not dtypes, kept))
    written = f"written over: {', '.join(sorted(changed))}" if changed else "stay as they are"
    findings.append(Finding("arguments", not changed, written))
    return LayerReport(layer.name, tuple(findings))


def random_arguments(layer: Layer, random: np.random.Generator, dtype: str, sizes: Mapping[str, int] = SIZES) -> Arrays:
    """Return arguments of a layer: tokens, positions, keys of random numbers, shares of 0 or 1, and normal numbers."""
    values: Arrays = {}
    for name, axes in zip(layer.forward.arguments.split(), parse(layer.forward.signature)[0], strict=True):
        rule, got = "every axis must have a size", {"axes": axes}
        require(set(axes) <= set(sizes), layer.name, rule, got, f"Give sizes={{'{axes[-1:]}': 8}}, say.")
        shape = tuple(sizes[axis] for axis in axes)
        if name in ("tokens", "targets"):
            values[name] = random.integers(0, OPTIONS["vocabulary"], shape).astype(np.int32)
        elif name == "shares":
            values[name] = random.integers(0, 2, shape)
        elif name == "positions":
            values[name] = np.arange(*shape, dtype=np.int32)
        elif name == "streams":
            values[name] = random.integers(-(2**63), 2**63, shape)
        else:
            values[name] = random.normal(size=shape).astype(dtype)
    return values


def lazy_arguments(layer: Layer, values: Mapping[str, np.ndarray], chunk: tuple[int, int]) -> dict[str, da.Array]:
    """Return arguments as dask arrays, which are cut along b and t only."""
    cut, found = dict(zip("bt", chunk)), {}
    for name, axes in zip(layer.forward.arguments.split(), parse(layer.forward.signature)[0], strict=True):
        chunks = tuple(cut.get(axis, size) for axis, size in zip(axes, values[name].shape))
        found[name] = da.from_array(values[name], chunks=chunks, name=f"{name}-leaf")
    return found


def run_layer(
    layer: Layer,
    values: Mapping[str, np.ndarray],
    chunk: tuple[int, int] = (2, 3),
    options: Mapping[str, Any] = OPTIONS,
) -> tuple[np.ndarray, Arrays]:
    """Return the output, and the gradient of sum(output * direction_of(output)) for each argument, from a tape."""
    tape = Tape()
    arrays = lazy_arguments(layer, values, chunk)
    y = tape("here.0", layer, *arrays.values(), **options)
    gradients = tape.backward(y, da.from_array(direction_of(y), chunks=y.chunks, name="dy-leaf"))
    found = {name: gradients[array.name] for name, array in arrays.items() if array.name in gradients}
    y_value, values_found = dask.compute(y, found, scheduler="sync")
    return y_value, values_found


def direction_of(y: da.Array) -> np.ndarray:
    """Return the gradient at the output, which is always the same random numbers."""
    values: np.ndarray = np.random.default_rng(3).normal(size=y.shape).astype(y.dtype)
    return values


def _gradients(run: Run, values: Arrays, random: np.random.Generator) -> Iterator[Finding]:
    """Compare each gradient with a central difference along a random direction."""
    gradients = run(values)
    for name, value in values.items():
        if value.dtype.kind != "f":
            continue
        what = f"gradient of {name}"
        gradient = gradients.get(what)
        if gradient is None:
            yield Finding(what, False, "there is none")
        elif gradient.shape != value.shape:
            yield Finding(what, False, f"shape {gradient.shape}, the argument's is {value.shape}")
        else:
            direction, ends = random.normal(size=value.shape), []
            for sign in (1, -1):
                y = run(values | {name: value + sign * STEP * direction})["output"]
                ends.append(float((y * direction_of(y)).sum()))
            numeric, exact = (ends[0] - ends[1]) / (2 * STEP), float((gradient * direction).sum())
            error = abs(exact - numeric) / max(abs(numeric), 0.1)
            yield Finding(what, error <= GRADIENT_ERROR, f"off by {error:.0e}")


def _chunkings(run: Run, values: Arrays) -> Iterator[Finding]:
    """Compare the results in several chunkings with those of the whole batch."""
    together, *chunkings = (run(values, chunk) for chunk in CHUNKS)
    for what, whole in together.items():
        others = [results[what] for results in chunkings]
        if any(np.shape(other) != np.shape(whole) for other in others):
            yield Finding(f"{what} in chunks", False, "of another shape")
            continue
        error = max(float(np.abs(other - whole).max()) for other in others) / max(float(np.abs(whole).max()), 1e-30)
        same = all(np.array_equal(other, whole) for other in others)
        found = "every bit" if same else f"off by {error:.0e}" + (" (rounding)" if error <= CHUNK_ERROR else "")
        yield Finding(f"{what} in chunks", error <= CHUNK_ERROR, found)


def _watched(row: Row, changed: set[str]) -> Row:
    """Return a row whose kernel adds the names of arguments that it changes to a set."""

    @wraps(row.kernel)
    def kernel(*arguments: Any, **options: Any) -> Any:
        before = [np.copy(argument) if isinstance(argument, np.ndarray) else argument for argument in arguments]
        result = row.kernel(*arguments, **options)
        named = zip(row.arguments.split(), before, arguments)
        changed.update(name for name, was, now in named if was is not now and not np.array_equal(was, now))
        return result

    return replace(row, kernel=kernel)
