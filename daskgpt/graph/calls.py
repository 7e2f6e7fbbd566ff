"""Kernels on chunked dask arrays: the only user of `dask.array.blockwise`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import dask.array as da
import numpy as np

from daskgpt.kernels.floating_point import restore, set_flush_to_zero

CUT = "bt"
ROWS_ELEMENTS = 768 * 1024  # of a gradient that is summed at a time: 3 MiB of float32, in the last cache


class KernelCall:
    """What a task runs: a kernel on the chunks that Dask hands over, subnormal numbers flushed to zero.

    Dask passes an axis that the output lacks as a (nested) list of chunks. A whole axis has one chunk: the list is
    unwrapped. A cut axis that the output has whole is gathered: the kernel gets the list.

    axes   of the result, which with the indices in a task's key say where in the batch it stands
    """

    def __init__(self, kernel: Callable[..., Any], inputs: Sequence[str], axes: str, options: Mapping[str, Any]):
        self.kernel, self.inputs, self.axes, self.options = kernel, tuple(inputs), axes, dict(options)

    def __call__(self, *chunks: Any) -> Any:
        previous = set_flush_to_zero()
        try:
            return self.run(*self.arrange(chunks))
        finally:
            restore(previous)

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        """The arguments of `run` from Dask's nested lists, whatever these hold: arrays, or what stands for them."""
        return [self._chunk_at(c, axes, {}) for c, axes in zip(chunks, self.inputs)]

    def run(self, *arguments: Any) -> Any:
        return self.kernel(*arguments, **self.options)

    def _chunk_at(self, chunks: Any, axes: str, index: Mapping[str, int]) -> Any:
        """The chunk at `index`; a list stays where a cut axis is not in it (a gather)."""
        for number, axis in enumerate(axes):
            if axis in self.axes:
                continue
            if axis in CUT and axis not in index:
                return [self._chunk_at(c, axes[number + 1 :], index) for c in chunks]
            chunks = chunks[index.get(axis, 0)]
        return chunks


class ChunkSum(KernelCall):
    """A summing kernel over every chunk, in order, into one total; one more argument is where the total starts."""

    def __init__(self, *arguments: Any, shape: tuple[int, ...], dtype: np.dtype):
        super().__init__(*arguments)
        self.shape, self.dtype = shape, dtype

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        """A list of the kernel's arguments for each chunk, and the start or None."""
        counts = self._counts(chunks)
        parts = []
        for position in product(*map(range, counts.values())):
            index = dict(zip(counts, position))
            parts.append([self._chunk_at(c, axes, index) for c, axes in zip(chunks, self.inputs)])
        return [parts, *chunks[len(self.inputs) :]]

    def run(self, parts: Sequence[Sequence[Any]], start: np.ndarray | None = None) -> np.ndarray:
        total = np.empty(self.shape, self.dtype) if start is None else start.copy()
        for first, last in self.blocks():
            rows = total[first:last] if len(self.shape) > 1 else total
            self.add(parts, rows, first, last, started=start is not None)
        return total

    def blocks(self) -> list[tuple[int, int]]:
        """The rows that are summed at a time: so many that they stay in the cache. They decide the order of nothing,
        but the same blocks everywhere make sure that BLAS rounds the same everywhere.
        """
        if len(self.shape) < 2:
            return [(0, self.shape[0] if self.shape else 1)]
        rows = max(ROWS_ELEMENTS // self.shape[1] // 64, 1) * 64
        return [(first, min(first + rows, self.shape[0])) for first in range(0, self.shape[0], rows)]

    def add(self, parts: Sequence[Sequence[Any]], total: np.ndarray, first: int, last: int, *, started: bool) -> None:
        """Sum rows first .. last over all chunks into `total` (of a vector: all of it).

        started   whether total holds a sum to go on from; else what it holds does not matter
        """
        options = self.options | {"first_row": first} if len(self.shape) > 1 else self.options
        for number, arguments in enumerate(parts):
            self.kernel(*arguments, total=total, accumulate=started or number > 0, **options)

    def _counts(self, chunks: Sequence[Any]) -> dict[str, int]:
        """How many chunks each summed axis has."""
        counts: dict[str, int] = {}
        for chunk, axes in zip(chunks, self.inputs):
            for axis in axes:
                if axis in CUT:
                    counts[axis] = len(chunk)
                if axis not in self.axes:
                    chunk = chunk[0]
        return counts


class Pick:
    """One of the results of a task that has several."""

    def __init__(self, number: int, axes: str):
        self.number, self.axes = number, axes

    def __call__(self, results: tuple[Any, ...]) -> Any:
        return results[self.number]


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
    after: tuple[da.Array, str] | None = None,
) -> tuple[da.Array, ...]:
    """Call a kernel on every chunk; one lazy dask array an output. Nothing is computed.

    name       of the first output, unique in its graph; `layer.pass-where`
    signature  axes of arguments and outputs, see `daskgpt.model.layers`
    new_axes   sizes of axes that no argument has
    start      where a sum over the chunks starts (an array like the output), None for zero
    after      an array and its axes whose chunk must be there before, although the kernel does not read it

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
        if after is not None:
            arrays, inputs = [*arrays, after[0]], [*inputs, after[1]]
    if len(outputs) == 1:
        return (_blockwise(name, call, outputs[0], arrays, inputs, chunks, dtype),)
    # Dask's blockwise has one output: a task returns them all, in an array of tuples over the cut axes; each is picked.
    both = _blockwise(name, call, call.axes, arrays, inputs, chunks, np.dtype(object))
    return tuple(
        _blockwise(f"{name}.{number}", Pick(number, axes), axes, [both], [call.axes], chunks, dtype)
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
