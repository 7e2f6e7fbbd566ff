"""Kernels on chunked dask arrays: the only user of `dask.array.blockwise`.

A call knows what it was made for (its origin, which this room only carries) and what it returns (axes, sizes, dtype),
so that nobody has to guess either from a key or from the letters of a signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.config.groups import ONE_GROUP, Groups
from daskgpt.graph.nodes import GraphNode, Key
from daskgpt.graph.sum_order import Chain, Cut, SumOrder
from daskgpt.kernels.floating_point import restore, set_flush_to_zero

CUT = "bt"
ROWS_ELEMENTS = 768 * 1024  # of a gradient that is summed at a time: 3 MiB of float32, in the last cache


@dataclass(frozen=True)
class Output:
    """What a call returns on every chunk: axes and dtype."""

    axes: str
    dtype: np.dtype


@dataclass(frozen=True)
class Result:
    """What a call returns on one chunk."""

    shape: tuple[int, ...]
    dtype: np.dtype


class KernelCall:
    """What a task runs: a kernel on the chunks that Dask hands over, subnormal numbers flushed to zero.

    Dask passes an axis that the output lacks as a (nested) list of chunks. A whole axis has one chunk: the list is
    unwrapped. A cut axis that the output has whole is gathered: the kernel gets the list.
    """

    KEPT_HERE: tuple[str, ...] = ("origin", "outputs", "chunks")

    def __init__(
        self,
        kernel: Callable[..., Any],
        inputs: Sequence[str],
        axes: str,
        options: Mapping[str, Any],
        *,
        outputs: Sequence[Output],
        chunks: Mapping[str, tuple[int, ...]],
        origin: Any = None,
    ):
        """axes     of the task's grid, whose indices stand in its key and say where in the batch it works
        outputs  one a value that the kernel returns
        chunks   axis -> sizes of its chunks
        origin   what the call was made for
        """
        self.kernel, self.inputs, self.axes, self.options = kernel, tuple(inputs), axes, dict(options)
        self.outputs, self.chunks, self.origin = tuple(outputs), dict(chunks), origin

    def __getstate__(self) -> dict[str, Any]:
        """What a worker needs to run it: who looks at graphs has them here, and each step sends every call again."""
        return {name: value for name, value in self.__dict__.items() if name not in self.KEPT_HERE}

    def results(self, key: Key) -> list[Result]:
        """Shape and dtype of each value that the task of this key returns."""
        index = dict(zip(self.axes, key[1:]))
        return [
            Result(tuple(self.chunks[axis][index.get(axis, 0)] for axis in output.axes), output.dtype)
            for output in self.outputs
        ]

    def __call__(self, *chunks: Any) -> Any:
        previous = set_flush_to_zero()
        try:
            return self.run(*self.arrange(chunks))
        finally:
            restore(previous)

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        """The arguments of `run` from Dask's nested lists, whatever these hold: arrays, or what stands for them."""
        return [self.chunk_at(c, axes, {}) for c, axes in zip(chunks, self.inputs)]

    def run(self, *arguments: Any) -> Any:
        return self.kernel(*arguments, **self.options)

    def chunk_at(self, chunks: Any, axes: str, index: Mapping[str, int]) -> Any:
        """The chunk at `index`; a list stays where a cut axis is not in it (a gather)."""
        for number, axis in enumerate(axes):
            if axis in self.axes:
                continue
            if axis in CUT and axis not in index:
                return [self.chunk_at(c, axes[number + 1 :], index) for c in chunks]
            chunks = chunks[index.get(axis, 0)]
        return chunks


class ChunkSum(KernelCall):
    """A summing kernel over every chunk, in order, into one total; one more argument is where the total starts.

    The order is that of `graph.sum_order`.

    order   of the rows of all chunks
    """

    KEPT_HERE: tuple[str, ...] = ("origin",)  # the shape of the total is needed everywhere

    def __init__(self, *arguments: Any, order: SumOrder, **known: Any) -> None:
        super().__init__(*arguments, **known)
        self.order = order

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the total."""
        return tuple(sum(self.chunks[axis]) for axis in self.axes)

    @property
    def dtype(self) -> np.dtype:
        return self.outputs[0].dtype

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        """For each piece a list of chunks, each the list of the kernel's arguments; and the start or None."""
        pieces = [
            [[self.chunk_at(c, axes, {"b": b, "t": t}) for c, axes in zip(chunks, self.inputs)] for b, t in piece]
            for piece in self.order.pieces
        ]
        return [pieces, *chunks[len(self.inputs) :]]

    def run(self, pieces: Sequence[Any], start: np.ndarray | None = None) -> np.ndarray:
        total = np.empty(self.shape, self.dtype) if start is None else start.copy()
        chains = self.in_order(pieces)
        for first, last in self.bands():
            rows = total[first:last] if len(self.shape) > 1 else total
            self.add(chains, [rows], first, last, started=start is not None)
        return total

    def in_order(self, pieces: Sequence[Sequence[Sequence[np.ndarray]]], first: int = 0) -> list[Chain]:
        """The arguments of the kernel calls that take the rows in order, as chains.

        first   number of the first of these pieces
        """
        calls: list[tuple[int, Sequence[np.ndarray]]] = []
        for number, piece in enumerate(pieces, first):
            joined = self.order.together and len(piece) > 1
            parts = [[_joined(own, axes) for own, axes in zip(zip(*piece), self.inputs)]] if joined else piece
            for cut in self.order.cuts(number):
                calls += [(cut.group, [_sequences(a, axes, cut) for a, axes in zip(p, self.inputs)]) for p in parts]
        return self.order.chains(calls, first + len(pieces))

    def bands(self) -> list[tuple[int, int]]:
        """The rows that are summed at a time: so many that they stay in the cache. They decide the order of nothing,
        but the same bands everywhere make sure that BLAS rounds the same everywhere.
        """
        if len(self.shape) < 2:
            return [(0, self.shape[0] if self.shape else 1)]
        rows = max(ROWS_ELEMENTS // self.shape[1] // 64, 1) * 64
        return [(first, min(first + rows, self.shape[0])) for first in range(0, self.shape[0], rows)]

    def add(
        self, chains: Sequence[Chain], totals: Sequence[np.ndarray], first: int, last: int, *, started: bool
    ) -> None:
        """Sum rows first .. last over chains, which follow one another.

        totals    the same rows (of a vector: all of it) of the totals so far, and room for those that are to be kept
        started   whether the first chain goes on from its total; else what that holds does not matter
        """
        options = self.options | {"first_row": first} if len(self.shape) > 1 else self.options
        # Other totals of the tree are met again at once: they stay in the cache.
        deepest = max(self.order.level(chain.group) for chain in chains)
        room = [*totals, *(np.empty_like(totals[0]) for _ in range(len(totals), deepest + 1))]
        for chain in chains:
            for number, arguments in enumerate(chain.calls):
                total = room[self.order.level(chain.group)]
                self.kernel(*arguments, total=total, accumulate=started or number > 0, **options)
            started = False
            if chain.ends:
                self.order.meet(room, chain.group)


def _joined(parts: Sequence[np.ndarray], axes: str) -> np.ndarray:
    """The token chunks of some sequences as one."""
    return np.concatenate(parts, axis=axes.index("t")) if "t" in axes else parts[0]


def _sequences(array: np.ndarray, axes: str, cut: Cut) -> np.ndarray:
    """Some sequences of a chunk; what has no sequences belongs to all of them."""
    return array[cut.first : cut.last] if axes.startswith("b") else array


class Pick:
    """One of the results of a task that has several."""

    def __init__(self, number: int, axes: str, origin: Any = None):
        self.number, self.axes, self.origin = number, axes, origin

    def __reduce__(self) -> tuple[Any, ...]:
        return Pick, (self.number, self.axes)

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
            raise refusal(ValueError, where, f"an array must have axes {axes}", {"shape": array.shape}, "Reshape it.")
        for axis, own in zip(axes, array.chunks):
            if axis.isupper() and len(own) > 1:
                raise refusal(ValueError, where, f"axis {axis} must be one chunk", {"chunks": own}, "Gather it first.")
            if chunks.setdefault(axis, own) != own:
                raise refusal(
                    ValueError,
                    where,
                    f"arrays must share the chunks of axis {axis}",
                    f"{chunks[axis]} and {own}",
                    "Rechunk one.",
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
    at_once: int = 1,
    groups: Groups = ONE_GROUP,
    after: tuple[da.Array, str] | None = None,
    origin: Any = None,
) -> tuple[da.Array, ...]:
    """Call a kernel on every chunk; one lazy dask array an output. Nothing is computed.

    name       of the first output, unique in its graph
    signature  axes of arguments and outputs, see `daskgpt.model.layers`
    new_axes   sizes of axes that no argument has
    start      where a sum over the chunks starts (an array like the output), None for zero
    at_once    tokens of a sequence that a summing kernel takes in one step
    groups     which groups of the batch these sequences are, see `graph.sum_order`
    after      an array and its axes whose chunk must be there before, although the kernel does not read it
    origin     what the call is made for, for those who look at the graph later

    Errors     ValueError where chunks do not fit the signature, or groups the batch
    """
    inputs, outputs = parse(signature)
    chunks = axis_chunks(name, arrays, inputs)
    chunks |= {axis: (size,) for axis, size in (new_axes or {}).items()}
    if "T" in outputs[0] and "t" in chunks:
        chunks["T"] = (sum(chunks["t"]),)
    dtype = next(array.dtype for array in arrays if array.dtype.kind == "f")
    summed = not any(axis in CUT for axis in "".join(outputs)) and any(axis in CUT for axis in "".join(inputs))
    known = {
        "outputs": [Output(axes, dtype) for axes in outputs],
        "chunks": {axis: chunks[axis] for axis in "".join(outputs)},
        "origin": origin,
    }
    call: KernelCall
    if summed:
        groups = groups if "b" in chunks else ONE_GROUP
        order = SumOrder.of(chunks.get("b", (1,)), chunks.get("t", (1,)), at_once, groups)
        call = ChunkSum(kernel, inputs, outputs[0], options or {}, order=order, **known)
        if start is not None:
            arrays, inputs = [*arrays, start], [*inputs, outputs[0]]
    else:
        grid = outputs[0] if len(outputs) == 1 else "".join(axis for axis in outputs[0] if axis in CUT)
        call = KernelCall(kernel, inputs, grid, options or {}, **known)
        if after is not None:
            arrays, inputs = [*arrays, after[0]], [*inputs, after[1]]
    if len(outputs) == 1:
        return (_blockwise(name, call, outputs[0], arrays, inputs, chunks, dtype),)
    # Dask's blockwise has one output: a task returns them all, in an array of tuples over the cut axes; each is picked.
    both = _blockwise(name, call, call.axes, arrays, inputs, chunks, np.dtype(object))
    return tuple(
        _blockwise(f"{name}.{number}", Pick(number, axes, origin), axes, [both], [call.axes], chunks, dtype)
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


def origin_of(node: GraphNode) -> Any:
    """What a task was made for; None for data and for tasks that were made for nothing in particular."""
    return getattr(getattr(node, "func", None), "origin", None)


def is_pick(node: GraphNode) -> bool:
    """Whether a task takes one result of several out of a tuple: no work of its own."""
    return isinstance(getattr(node, "func", None), Pick)
