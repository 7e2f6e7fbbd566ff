"""What tasks run, and the kernels on chunked dask arrays that a recorded graph begins with.

Only this module uses `dask.array.blockwise`. There are six kinds of calls:

    KernelCall   a kernel on the chunks of one place of the batch
    ChunkSum     a summing kernel over all chunks: a gradient, or the loss
    RowSum       some rows of such a sum over some of the chunks (the passes divide sums)
    RowUpdate    a gradient's rows are used and the same rows of a tensor written over (`graph.inplace`)
    Pick         one of several results
    Exchange     any other function of results: sending, receiving, waiting

A call knows what it was made for (its origin), what it returns (axes, sizes, dtype) and what stands in for that where
memory is predicted, so that no pass has to guess either from a key or from the letters of a signature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import dask.array as da
import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.groups import ONE_GROUP, Groups
from daskgpt.graph.nodes import GraphNode, Key
from daskgpt.graph.sum_order import Chain, Cut, SumOrder
from daskgpt.kernels.floating_point import restore, set_flush_to_zero

CUT = "bt"
ROWS_ELEMENTS = 768 * 1024  # of a gradient that is summed at a time: 3 MiB of float32, in the last cache
Band = tuple[int, int]  # from which row to which
Totals = np.ndarray | tuple[np.ndarray, ...]

PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True)
class Origin:
    """The call of a layer that a task, or a part of one, belongs to.

    layer      name of the layer's row, or of the optimizer
    phase      one of PHASES
    where      in the model, by GPT-2's published names: `h.0.attn.c_attn`
    block      number of the transformer block, None outside them
    argument   in backward: the argument whose gradient it is
    parameter  the tensor that an update writes
    again      whether forward's result is computed again in backward
    """

    layer: str
    phase: str
    where: str
    block: int | None = None
    argument: str = ""
    parameter: str = ""
    again: bool = False

    @property
    def kind(self) -> str:
        """Layer and pass, as keys begin: `linear.forward`, `adamw`."""
        return self.layer if self.phase == "update" else f"{self.layer}.{self.phase}"

    @property
    def place(self) -> str:
        """Where, with what tells the calls of one layer's backward pass apart."""
        return ".".join(filter(None, (self.where, "again" if self.again else self.argument)))

    @property
    def stage(self) -> str:
        """The loop of a fork-join program that it belongs to: a layer's forward, a layer's backward, or the update.

        The gradients of one layer belong together; what is computed again comes before them.
        """
        if self.phase == "update":
            return self.phase
        return f"{self.kind} {self.where}{' again' if self.again else ''}"

    def name(self, token: str) -> str:
        """The first part of the keys: Dask's dashboard colors and groups by what stands before the first dash.

        It takes a part of letters alone after a dash for more of the name; hence the underscore.
        """
        return f"{self.kind}-{self.place}_-{token}"


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


class Memory(Protocol):
    """Makes arrays that have a size and no data, whose bytes count as long as they are referred to."""

    def arrays(self, kind: str, count: int, shape: tuple[int, ...], dtype: np.dtype) -> list[Any]:
        """Return arrays of a kind: "gradients" or "activations"."""
        ...

    def updated(self, parameter: str) -> list[Any]:
        """Return the weight and the moments of a parameter anew."""
        ...

    def message(self) -> Any:
        """Return what comes from other ranks, or goes to them, which is not counted; any item of it is the same."""
        ...


class TaskCall:
    """What a task runs. All attributes are hints for the passes.

    axes     of the grid of a kernel call: their indices follow the name in the keys of its tasks
    origin   what the call was made for
    by_rows  whether it works on some rows of a tensor, whose number is in the keys of its tasks
    micro    number of the micro-batch that it belongs to, where it has no place in the batch
    bucket   the task that it belongs to in the program of a rank, where a chunk is one task; READER: that of its
             readers, where these are in one
    """

    axes: str = ""
    origin: Origin | None = None
    by_rows: bool = False
    micro: int | None = None
    bucket: Hashable = None

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> Any:
        """Return what stands for the result of this call, from what stands for its arguments."""
        raise NotImplementedError


@dataclass(eq=False)
class KernelCall(TaskCall):
    """What a task runs: a kernel on the chunks that Dask hands over, subnormal numbers flushed to zero.

    Dask passes an axis that the output lacks as a (nested) list of chunks. A whole axis has one chunk: the list is
    unwrapped. A cut axis that the output has whole is gathered: the kernel gets the list.

    inputs   axes of each argument
    axes     of the task's grid, whose indices stand in its key and say where in the batch it works
    options  of the kernel
    outputs  one for each value that the kernel returns
    chunks   axis -> sizes of its chunks
    """

    KEPT_HERE: ClassVar[tuple[str, ...]] = ("origin", "outputs", "chunks")
    kernel: Callable[..., Any]
    inputs: Sequence[str]
    axes: str = field()  # without TaskCall's default
    options: Mapping[str, Any]
    outputs: Sequence[Output]
    chunks: Mapping[str, tuple[int, ...]]
    origin: Origin | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker needs to run it: each step sends every call again. Passes look at graphs here alone."""
        return {name: value for name, value in self.__dict__.items() if name not in self.KEPT_HERE}

    def results(self, key: Key) -> list[Result]:
        """Return shape and dtype of each value that the task of this key returns."""
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
        """Return the arguments of `run` from Dask's nested lists, whatever these hold: arrays, or keys, or slots."""
        return [self.chunk_at(c, axes, {}) for c, axes in zip(chunks, self.inputs)]

    def run(self, *arguments: Any) -> Any:
        return self.kernel(*arguments, **self.options)

    def on_rows(self) -> KernelCall:
        """Return the call for some rows of each argument, which come without Dask's lists."""
        call = replace(self, inputs=("",) * len(self.inputs))
        call.by_rows = True
        return call

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> Any:
        if self.origin and self.origin.parameter:
            made = memory.updated(self.origin.parameter)
        else:
            made = [a for each in self.results(key) for a in memory.arrays("activations", 1, each.shape, each.dtype)]
        return made[0] if len(made) == 1 else tuple(made)

    def chunk_at(self, chunks: Any, axes: str, index: Mapping[str, int]) -> Any:
        """Return the chunk at `index`; a list stays where a cut axis is not in it (a gather)."""
        for number, axis in enumerate(axes):
            if axis in self.axes:
                continue
            if axis in CUT and axis not in index:
                return [self.chunk_at(c, axes[number + 1 :], index) for c in chunks]
            chunks = chunks[index.get(axis, 0)]
        return chunks


@dataclass(eq=False)
class ChunkSum(KernelCall):
    """A summing kernel over every chunk, in order, into one total; one more argument is where the total starts.

    The order is that of `graph.sum_order`.

    order   of the rows of all chunks
    """

    KEPT_HERE: ClassVar[tuple[str, ...]] = ("origin",)  # the shape of the total is needed everywhere
    order: SumOrder = field(kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the total."""
        return tuple(sum(self.chunks[axis]) for axis in self.axes)

    @property
    def dtype(self) -> np.dtype:
        return self.outputs[0].dtype

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        """Return for each piece a list of chunks, each the list of the kernel's arguments; and the start, if any."""
        pieces = [
            [[self.chunk_at(c, axes, {"b": b, "t": t}) for c, axes in zip(chunks, self.inputs)] for b, t in piece]
            for piece in self.order.pieces
        ]
        return [pieces, *chunks[len(self.inputs) :]]

    def run(self, pieces: Sequence[Any], start: np.ndarray | None = None) -> Totals:
        every = range(len(self.order.pieces))
        program = RowSum(self, self.bands(), every, started=start is not None, over=False)
        return program.run(pieces, () if start is None else start)

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> Any:
        kind = "gradients" if self.origin and self.origin.phase == "backward" else "activations"
        (total,) = memory.arrays(kind, 1, self.shape, self.dtype)
        self.hold_totals(memory, self.bands()[:1], range(len(self.order.pieces)), 1)
        return total

    def hold_totals(self, memory: Memory, bands: Sequence[Band], pieces: range, held: int) -> None:
        """Hold for a moment the totals of some pieces, a band of rows at a time, but for those that are held anyway."""
        for first, last in bands:
            shape = (last - first, *self.shape[1:]) if self.shape else ()
            memory.arrays("gradients", self.order.most_totals(pieces) - held, shape, self.dtype)

    def in_order(self, pieces: Sequence[Sequence[Sequence[np.ndarray]]], first: int = 0) -> list[Chain]:
        """Return the arguments of the kernel calls that take the rows in order, as chains.

        first   number of the first of these pieces
        """
        calls: list[tuple[int, Sequence[np.ndarray]]] = []
        for number, piece in enumerate(pieces, first):
            joined = self.order.together and len(piece) > 1
            parts = [[_concatenated(own, axes) for own, axes in zip(zip(*piece), self.inputs)]] if joined else piece
            for cut in self.order.cuts(number):
                calls += [(cut.group, [_sequences(a, axes, cut) for a, axes in zip(p, self.inputs)]) for p in parts]
        return self.order.chains(calls, first + len(pieces))

    def bands(self) -> list[tuple[int, int]]:
        """Return the rows that are summed at a time: so many that they stay in the cache. They do not decide the order
        of a sum, but the same bands everywhere make sure that BLAS rounds the same everywhere.
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
        started   whether the first chain continues from its total; else what that holds does not matter
        """
        options = {**self.options, "first_row": first} if len(self.shape) > 1 else self.options
        # Other totals of the tree are added again at once: they stay in the cache.
        deepest = max(self.order.level(chain.group) for chain in chains)
        room = [*totals, *(np.empty_like(totals[0]) for _ in range(len(totals), deepest + 1))]
        for chain in chains:
            for number, arguments in enumerate(chain.calls):
                total = room[self.order.level(chain.group)]
                self.kernel(*arguments, total=total, accumulate=started or number > 0, **options)
            started = False
            if chain.ends:
                self.order.tree_add(room, chain.group)


class RowSum(TaskCall):
    """Some rows of a sum over some pieces of the batch, in a task of their own.

    It takes the chunks as they follow in the pieces and the totals that it continues from, and returns those of every
    total that waits for others in the tree of groups: an array where there is one, else a tuple.

    given   how many totals it continues from
    left    how many it returns
    whole   whether it sums all rows, of a micro-batch (`micro`, or None after all of them)
    """

    by_rows = True
    whole = False

    def __init__(
        self, call: ChunkSum, bands: Sequence[Band], pieces: range, *, started: bool = False, over: bool = True
    ) -> None:
        """bands     of rows, which follow one another
        pieces    of the sum's order
        started   whether the whole sum continues from another one
        over      whether it writes over the totals that it continues from: where no task runs twice
        """
        self.call, self.bands, self.pieces, self.over = call, tuple(bands), pieces, over
        self.origin = call.origin
        self.given = call.order.totals_before(pieces.start) if pieces.start else int(started)
        self.left = call.order.totals_before(pieces.stop)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return (self.bands[-1][1] - self.bands[0][0], *self.call.shape[1:]) if self.call.shape else ()

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        pieces, position, each = [], 0, len(self.call.inputs)
        for number in self.pieces:
            ends = range(position, position + len(self.call.order.pieces[number]) * each, each)
            pieces.append([list(chunks[first : first + each]) for first in ends])
            position = ends.stop
        return [pieces, *chunks[position:]]

    def run(self, pieces: Sequence[Any], start: Totals = ()) -> Totals:
        base = self.bands[0][0]
        chains = self.call.in_order(pieces, self.pieces.start)
        totals = [total if self.over else total.copy() for total in several(start)]
        totals += [np.empty(self.shape, self.call.dtype) for _ in range(len(totals), self.left)]
        # A group that was begun before has its total among those that are given, above those of the groups before it.
        started = self.given > self.call.order.level(chains[0].group)
        for first, last in self.bands:
            rows = [total[first - base : last - base] if total.ndim else total for total in totals]
            self.call.add(chains, rows, first, last, started=started)
        return totals[0] if self.left == 1 else tuple(totals[: self.left])

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> Any:
        totals = list(several(arguments[1])) if len(arguments) > 1 else []
        totals += memory.arrays("gradients", self.left - len(totals), self.shape, self.call.dtype)
        self.call.hold_totals(memory, self.bands, self.pieces, len(totals))
        return totals[0] if self.left == 1 else tuple(totals[: self.left])


def several(totals: Any) -> Sequence[Any]:
    """Return the totals of some subtrees, of which one may come alone."""
    return totals if isinstance(totals, list | tuple) else [totals]


def _concatenated(parts: Sequence[np.ndarray], axes: str) -> np.ndarray:
    """Return the token chunks of some sequences as one."""
    return np.concatenate(parts, axis=axes.index("t")) if "t" in axes else parts[0]


def _sequences(array: np.ndarray, axes: str, cut: Cut) -> np.ndarray:
    """Return some sequences of a chunk; what has no sequences belongs to all of them."""
    return array[cut.first : cut.last] if axes.startswith("b") else array


@dataclass(eq=False)
class Pick(TaskCall):
    """One of the results of a task that has several."""

    number: int
    axes: str = field()
    origin: Origin | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Pick, (self.number, self.axes)

    def __call__(self, results: tuple[Any, ...]) -> Any:
        return results[self.number]

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> Any:
        return self(*arguments)


NOTHING, MESSAGE, FIRST = "nothing", "message", "first"
READER = "reader"


@dataclass(eq=False)
class Exchange(TaskCall):
    """A function of the results of other tasks that is no kernel: it sends, receives, picks or waits.

    returns   for memory: NOTHING; a MESSAGE, which is not counted; or as much as its FIRST argument
    """

    function: Callable[..., Any]
    origin: Origin | None
    returns: str = NOTHING
    bucket: Hashable = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Exchange, (self.function, None)

    def __call__(self, *results: Any) -> Any:
        return self.function(*results)

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> Any:
        if self.returns == FIRST:
            return arguments[0]
        return memory.message() if self.returns == MESSAGE else None


def wait(*results: object) -> None:
    """Do nothing: what a task runs that only waits for others."""


def parse(signature: str) -> tuple[list[str], list[str]]:
    """Return axes of the arguments and of the outputs of a signature such as `btC, OC -> btO`."""
    arguments, outputs = signature.split("->")
    return [axes.strip() for axes in arguments.split(",")], [axes.strip() for axes in outputs.split(",")]


def axis_chunks(where: str, arrays: Sequence[da.Array], inputs: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the chunks of every axis, from the arrays.

    Errors   ValueError if arrays disagree on an axis (blockwise would pair wrong chunks), or a whole axis is cut
    """
    chunks: dict[str, tuple[int, ...]] = {}
    for array, axes in zip(arrays, inputs, strict=True):
        rule = f"an array must have axes {axes}"
        require(array.ndim == len(axes), where, rule, {"shape": array.shape}, "Reshape it.")
        for axis, own in zip(axes, array.chunks):
            whole = not axis.isupper() or len(own) == 1
            require(whole, where, f"axis {axis} must be one chunk", {"chunks": own}, "Gather it first.")
            known = chunks.setdefault(axis, own)
            rule = f"arrays must share the chunks of axis {axis}"
            require(known == own, where, rule, f"{known} and {own}", "Rechunk one.")
    return chunks


@dataclass(frozen=True)
class CallOptions:
    """What else `apply` needs to know of a kernel with new axes, of a sum, or of a call that waits.

    new_axes   sizes of axes that no argument has
    start      where a sum over the chunks starts (an array like the output), None for zero
    at_once    tokens of a sequence that a summing kernel takes in one step
    groups     which groups of the batch these sequences are, see `graph.sum_order`
    after      an array and its axes whose chunk must be there before, although the kernel does not read it
    """

    new_axes: Mapping[str, int] = field(default_factory=dict)
    start: da.Array | None = None
    at_once: int = 1
    groups: Groups = ONE_GROUP
    after: tuple[da.Array, str] | None = None


def apply(
    name: str,
    kernel: Callable[..., Any],
    signature: str,
    arrays: Sequence[da.Array],
    *,
    options: Mapping[str, Any] | None = None,
    origin: Origin | None = None,
    call_options: CallOptions = CallOptions(),
) -> tuple[da.Array, ...]:
    """Call a kernel on every chunk; return one lazy dask array for each output. Nothing is computed.

    name       of the first output, unique in its graph
    signature  axes of arguments and outputs, see `daskgpt.model.layers`
    options    of the kernel
    origin     what the call is made for

    Errors     ValueError if chunks do not fit the signature, or groups the batch
    """
    inputs, outputs = parse(signature)
    chunks = axis_chunks(name, arrays, inputs)
    chunks |= {axis: (size,) for axis, size in call_options.new_axes.items()}
    if "T" in outputs[0] and "t" in chunks:
        chunks["T"] = (sum(chunks["t"]),)
    dtype = next(array.dtype for array in arrays if array.dtype.kind == "f")
    summed = not any(axis in CUT for axis in "".join(outputs)) and any(axis in CUT for axis in "".join(inputs))
    known: dict[str, Any] = {
        "outputs": [Output(axes, dtype) for axes in outputs],
        "chunks": {axis: chunks[axis] for axis in "".join(outputs)},
        "origin": origin,
    }
    call: KernelCall
    extra: tuple[da.Array, str] | None
    if summed:
        groups = call_options.groups if "b" in chunks else ONE_GROUP
        order = SumOrder.of(chunks.get("b", (1,)), chunks.get("t", (1,)), call_options.at_once, groups)
        call = ChunkSum(kernel, inputs, outputs[0], options or {}, order=order, **known)
        extra = None if call_options.start is None else (call_options.start, outputs[0])
    else:
        grid = outputs[0] if len(outputs) == 1 else "".join(axis for axis in outputs[0] if axis in CUT)
        call, extra = KernelCall(kernel, inputs, grid, options or {}, **known), call_options.after
    if extra is not None:
        arrays, inputs = [*arrays, extra[0]], [*inputs, extra[1]]

    def blockwise(own_name: str, function: TaskCall, axes: str, pairs: Sequence[Any], own_dtype: np.dtype) -> da.Array:
        return da.blockwise(
            function,
            axes,
            *pairs,
            name=own_name,
            new_axes={axis: chunks[axis] for axis in axes if axis not in "".join(pairs[1::2])},
            dtype=own_dtype,
            meta=np.empty((0,) * len(axes), own_dtype),
            concatenate=None,
            align_arrays=False,
        )

    given = [item for pair in zip(arrays, inputs) for item in pair]
    if len(outputs) == 1:
        return (blockwise(name, call, outputs[0], given, dtype),)
    # Dask's blockwise has one output: a task returns them all, in an array of tuples over the cut axes; each is picked.
    both = blockwise(name, call, call.axes, given, np.dtype(object))
    return tuple(
        blockwise(f"{name}.{number}", Pick(number, axes, origin), axes, [both, call.axes], dtype)
        for number, axes in enumerate(outputs)
    )


def origin_of(node: GraphNode) -> Any:
    """Return what a task was made for; None for data and for tasks without an origin."""
    return getattr(getattr(node, "func", None), "origin", None)


def is_pick(node: GraphNode) -> bool:
    """Return whether a task takes one result of several out of a tuple: no work of its own."""
    return isinstance(getattr(node, "func", None), Pick)
