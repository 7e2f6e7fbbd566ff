"""Kernels on chunked dask arrays: the only user of `dask.array.blockwise`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from operator import itemgetter
from typing import Any

import dask.array as da
import numpy as np

from daskgpt.kernels.floating_point import restore, set_flush_to_zero

CUT = "bt"


class KernelCall:
    """What a task runs: a kernel on the chunks that Dask hands over, subnormal numbers flushed to zero.

    Dask passes an axis that the output lacks as a (nested) list of chunks. A whole axis has one chunk: the list is
    unwrapped. A cut axis is summed over in chunk order, each part added to one running total.
    """

    def __init__(self, kernel: Callable[..., Any], inputs: Sequence[str], grid: str, options: Mapping[str, Any]):
        self.kernel, self.inputs, self.grid, self.options = kernel, tuple(inputs), grid, dict(options)

    def chunk_at(self, chunks: Any, axes: str, index: Mapping[str, int]) -> Any:
        """The chunk at `index`; a list stays where a cut axis is not in it (a gather)."""
        for axis in axes:
            if axis in self.grid:
                continue
            if axis in CUT and axis not in index:
                return [self.chunk_at(c, axes[axes.index(axis) + 1 :], index) for c in chunks]
            chunks = chunks[index.get(axis, 0)]
        return chunks

    def call(self, chunks: Sequence[Any]) -> Any:
        return self.kernel(*(self.chunk_at(c, axes, {}) for c, axes in zip(chunks, self.inputs)), **self.options)

    def __call__(self, *chunks: Any) -> Any:
        previous = set_flush_to_zero()
        try:
            return self.call(chunks)
        finally:
            restore(previous)


class ChunkSum(KernelCall):
    """A summing kernel over every chunk, in order, into one total; one more argument is where the total starts."""

    def __init__(self, *arguments: Any, shape: tuple[int, ...], dtype: np.dtype):
        super().__init__(*arguments)
        self.shape, self.dtype = shape, dtype

    def counts(self, chunks: Sequence[Any]) -> dict[str, int]:
        """How many chunks each summed axis has."""
        counts: dict[str, int] = {}
        for chunk, axes in zip(chunks, self.inputs):
            for axis in axes:
                if axis in CUT:
                    counts[axis] = len(chunk)
                if axis not in self.grid:
                    chunk = chunk[0]
        return counts

    def call(self, chunks: Sequence[Any]) -> Any:
        started = len(chunks) > len(self.inputs)
        # The sum so far belongs to the task that made it and may be asked for again: it is never written.
        total = chunks[-1].copy() if started else np.empty(self.shape, self.dtype)
        counts = self.counts(chunks)
        for number, position in enumerate(product(*map(range, counts.values()))):
            index = dict(zip(counts, position))
            parts = (self.chunk_at(c, axes, index) for c, axes in zip(chunks, self.inputs))
            self.kernel(*parts, total=total, accumulate=started or number > 0, **self.options)
        return total


def parse(signature: str) -> tuple[list[str], list[str]]:
    """Axes of the arguments and of the outputs of a signature such as `btC, OC -> btO`."""
    arguments, outputs = signature.split("->")
    return [axes.strip() for axes in arguments.split(",")], [axes.strip() for axes in outputs.split(",")]


def axis_chunks(where: str, arrays: Sequence[da.Array], inputs: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Chunks of every axis, from the arrays.

    Errors   ValueError where arrays disagree on an axis (blockwise would pair wrong chunks), or a whole axis is cut
    """
    chunks: dict[str, tuple[int, ...]] = {}
    for array, axes in zip(arrays, inputs, strict=True):
        if array.ndim != len(axes):
            raise ValueError(f"{where}: an array must have axes {axes}; got shape={array.shape}. Reshape it.")
        for axis, own in zip(axes, array.chunks):
            if axis.isupper() and len(own) > 1:
                raise ValueError(f"{where}: axis {axis} must be one chunk; got chunks={own}. Gather it first.")
            if chunks.setdefault(axis, own) != own:
                raise ValueError(
                    f"{where}: arrays must share the chunks of axis {axis}; got {chunks[axis]} and {own}. Rechunk one."
                )
    return chunks


def apply(
    name: str,
    kernel: Callable[..., Any],
    signature: str,
    arrays: Sequence[da.Array],
    *,
    options: Mapping[str, Any] | None = None,
    new_axes: Mapping[str, int] | None = None,
    start: da.Array | None = None,
) -> tuple[da.Array, ...]:
    """Call a kernel on every chunk; one lazy dask array an output. Nothing is computed.

    name       of the first output, unique in its graph; `layer.pass-where`
    signature  axes of arguments and outputs, see `daskgpt.layers`
    new_axes   sizes of axes that no argument has
    start      where a sum over the chunks starts (an array like the output), None for zero

    Errors     ValueError where chunks do not fit the signature
    """
    inputs, outputs = parse(signature)
    chunks = axis_chunks(name, arrays, inputs)
    chunks |= {axis: (size,) for axis, size in (new_axes or {}).items()}
    if "T" in outputs[0] and "t" in chunks:
        chunks["T"] = (sum(chunks["t"]),)
    dtype = next(array.dtype for array in arrays if array.dtype.kind == "f")
    summed = not any(axis in CUT for axis in "".join(outputs)) and any(axis in CUT for axis in "".join(inputs))
    call: KernelCall
    if summed:
        shape = tuple(sum(chunks[axis]) for axis in outputs[0])
        call = ChunkSum(kernel, inputs, outputs[0], options or {}, shape=shape, dtype=dtype)
        if start is not None:
            arrays, inputs = [*arrays, start], [*inputs, outputs[0]]
    else:
        grid = outputs[0] if len(outputs) == 1 else "".join(axis for axis in outputs[0] if axis in CUT)
        call = KernelCall(kernel, inputs, grid, options or {})
    if len(outputs) == 1:
        return (_blockwise(name, call, outputs[0], arrays, inputs, chunks, dtype),)
    # Dask's blockwise has one output: a task returns them all, in an array of tuples over the cut axes; each is picked.
    both = _blockwise(name, call, call.grid, arrays, inputs, chunks, np.dtype(object))
    return tuple(
        _blockwise(f"{name}.{number}", itemgetter(number), axes, [both], [call.grid], chunks, dtype)
        for number, axes in enumerate(outputs)
    )


def _blockwise(
    name: str,
    call: Callable[..., Any],
    output: str,
    arrays: Sequence[da.Array],
    inputs: Sequence[str],
    chunks: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
) -> da.Array:
    known = set("".join(inputs))
    return da.blockwise(
        call,
        output,
        *(item for pair in zip(arrays, inputs) for item in pair),
        name=name,
        new_axes={axis: chunks[axis] for axis in output if axis not in known},
        dtype=dtype,
        meta=np.empty((0,) * len(output), dtype),
        concatenate=None,
        align_arrays=False,
    )
