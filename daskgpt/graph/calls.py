"""The calls that tasks run, and the application of kernels to chunked dask arrays, from which graphs are recorded.

Only this module uses `dask.array.blockwise`. There are five kinds of calls:

    KernelCall   a kernel on the chunks of one place of the batch
    ChunkSum     a summing kernel over all chunks: a gradient, or the loss
    RowSum       some rows of such a sum over some of the chunks (the passes divide sums)
    RowUpdate    an update of some rows of a tensor in place, from the rows of a gradient (`graph.update_in_place`)
    Exchange     any other function of results: sending, receiving, waiting, and one of several results

A call knows its origin in the model, its results (axes, sizes, dtype) and their stand-ins for predictions of memory, so
that no pass has to derive these from a key or from the letters of a signature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Protocol

import dask.array as da
import numpy as np

from daskgpt.config.errors import require
from daskgpt.graph.nodes import GraphNode, Key
from daskgpt.graph.sum_order import ONE_GROUP, Chain, Cut, Groups, SumOrder
from daskgpt.kernels.native import flush_to_zero

CUT = "bth"
ROWS_ELEMENTS = 768 * 1024  # numbers of a gradient that are summed at a time: 3 MiB of float32, in the last cache
Band = tuple[int, int]  # first row, and the row after the last
Totals = np.ndarray | tuple[np.ndarray, ...]

PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True)
class Origin:
    """The call of a layer that a task, or a part of one, belongs to.

    layer      name of the layer's row, or of the optimizer
    phase      one of PHASES
    where      in the model, by GPT-2's published names: `h.0.attn.c_attn`
    argument   in backward: the argument whose gradient it is
    parameter  the tensor that an update writes
    again      whether it recomputes a result of forward in backward
    """

    layer: str
    phase: str
    where: str
    argument: str = ""
    parameter: str = ""
    again: bool = False

    @property
    def block(self) -> int | None:
        """Number of the transformer block, None outside them."""
        first, _, rest = self.where.partition(".")
        return int(rest.partition(".")[0]) if first == "h" else None

    @property
    def kind(self) -> str:
        """Layer and pass, as keys begin: `linear.forward`, `adamw`."""
        return self.layer if self.phase == "update" else f"{self.layer}.{self.phase}"

    @property
    def place(self) -> str:
        """The place in the model, with the argument that distinguishes the calls of a layer's backward pass."""
        return ".".join(filter(None, (self.where, "again" if self.again else self.argument)))

    @property
    def stage(self) -> str:
        """The loop of a fork-join program that it belongs to: a layer's forward, a layer's backward, or the update.

        The gradients of one layer belong together; recomputed results come before them.
        """
        if self.phase == "update":
            return self.phase
        return f"{self.kind} {self.where}{' again' if self.again else ''}"

    def name(self, token: str) -> str:
        """The first part of the keys: Dask's dashboard colors and groups by the text before the first dash.

        Dask would take a part of only letters after a dash as more of the name; hence the underscore.
        """
        return f"{self.kind}-{self.place}_-{token}"


class Memory(Protocol):
    """Makes arrays with a size and no data, whose bytes count as long as they are referenced."""

    def array(self, kind: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return an array of a kind: "gradients" or "activations"."""

    def updated(self, parameter: str) -> list[Any]:
        """Return new arrays for the weight and the moments of a parameter."""


class Message:
    """A stand-in for a message between ranks, which is not counted; so is each of its items."""

    nbytes = 0

    def __getitem__(self, place: int) -> Message:
        return self


class TaskCall:
    """A call that a task runs. All attributes are hints for the passes.

    kernel   that it calls
    axes     of the grid of a kernel call: their indices follow the name in the keys of its tasks
    origin   the call of a layer that it belongs to
    by_rows  whether it works on some rows of a tensor, whose number is in the keys of its tasks
    micro    number of its micro-batch, if it has no place in the batch
    bucket   the task that it belongs to in the program of a rank, if a chunk is one task; READER: that of its
             readers, if they share one
    """

    kernel: Callable[..., Any] | None = None
    axes: str = ""
    origin: Origin | None = None
    by_rows: bool = False
    micro: int | None = None
    bucket: Hashable = None

    @property
    def traceable(self) -> bool:
        """True if it may be lowered (`graph.lowering`): its kernel is one of the package."""
        return is_ours(self.kernel)

    def __call__(self, *chunks: Any) -> Any:
        with flush_to_zero():
            return self.run(*self.arrange(chunks))

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        """Return the arguments of `run` from Dask's nested lists of arrays, keys or slots."""
        return list(chunks)

    def run(self, *arguments: Any) -> Any:
        """Make the call."""
        raise NotImplementedError

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> Any:
        """Return the stand-in for the result of this call, from the stand-ins for its arguments."""
        raise NotImplementedError


def is_ours(kernel: Any) -> bool:
    """Return whether a kernel belongs to the package; one that calls another `kernel` does only if that one does."""
    ours = getattr(kernel, "__module__", "").startswith("daskgpt.")
    return ours and (not hasattr(kernel, "kernel") or is_ours(kernel.kernel))


@dataclass(eq=False)
class KernelCall(TaskCall):
    """A call of a kernel on the chunks that Dask passes, with subnormal numbers flushed to zero.

    Dask passes an axis that the output lacks as a (nested) list of chunks. A whole axis has one chunk: its list is
    unwrapped. A cut axis that is whole in the output is gathered: the kernel gets the list.

    inputs   axes of each argument
    axes     of the task's grid, whose indices in its key are its place in the batch
    options  of the kernel
    outputs  axes of each result of the kernel
    chunks   axis of an argument or a result -> sizes of its chunks
    dtype    of all results
    """

    kernel: Callable[..., Any] = field()  # without TaskCall's default
    inputs: Sequence[str]
    axes: str = field()
    options: Mapping[str, Any]
    outputs: Sequence[str]
    chunks: Mapping[str, tuple[int, ...]]
    dtype: np.dtype
    origin: Origin | None = None

    def shapes(self, key: Key) -> list[tuple[int, ...]]:
        """Return the shape of each value that the task of this key returns."""
        index = dict(zip(self.axes, key[1:]))
        return [tuple(self.chunks[axis][index.get(axis, 0)] for axis in axes) for axes in self.outputs]

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        return [self.chunk_at(c, axes, {}) for c, axes in zip(chunks, self.inputs)]

    def run(self, *arguments: Any) -> Any:
        return self.kernel(*arguments, **self.options)

    def check(self, key: Key, result: Any) -> None:
        """Check what a kernel from outside of the package returned: the next kernel would blame its own arguments.

        Errors   TypeError for other arrays than the signature says, or a first one of another dtype
        """
        if is_ours(self.kernel) or (self.origin and self.origin.parameter):  # an update returns copies of its arguments
            return
        made = result if len(self.outputs) > 1 and isinstance(result, tuple | list) else [result]
        shapes, right, where = [getattr(a, "shape", None) for a in made], self.shapes(key), key[0].rpartition("_-")[0]
        dtype = getattr(next(iter(made), None), "dtype", None)
        rule, got = f"its kernel must return {right}, {self.dtype}", f"{shapes}, {dtype}"
        advice = "Compare it with its row's signature; the dtype is that of its arguments."
        require((shapes, dtype) == (right, self.dtype), where, rule, got, advice, TypeError)

    def on_rows(self) -> KernelCall:
        """Return the call for some rows of each argument, which are passed without Dask's lists."""
        call = replace(self, inputs=("",) * len(self.inputs))
        call.by_rows = True
        return call

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> Any:
        if self.origin and self.origin.parameter:
            made = memory.updated(self.origin.parameter)
        else:
            made = [memory.array("activations", shape, self.dtype) for shape in self.shapes(key)]
        return made[0] if len(made) == 1 else tuple(made)

    def chunk_at(self, chunks: Any, axes: str, index: Mapping[str, int]) -> Any:
        """Return the chunk at `index`; a cut axis that is not in it stays a list (a gather)."""
        for number, axis in enumerate(axes):
            if axis in self.axes:
                continue
            if axis in CUT and axis not in index:
                return [self.chunk_at(c, axes[number + 1 :], index) for c in chunks]
            chunks = chunks[index.get(axis, 0)]
        return chunks


@dataclass(eq=False)
class ChunkSum(KernelCall):
    """A summing kernel over every chunk, in order, into one total; a further argument is the start of the total.

    The order is that of `graph.sum_order`.

    order   of the rows of all chunks
    """

    order: SumOrder = field(kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the total."""
        return tuple(sum(self.chunks[axis]) for axis in self.axes)

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        """Return for each piece a list of chunks, each a list of the kernel's arguments; and the start, if any."""
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
        return memory.array(kind, self.shape, self.dtype)

    def in_order(self, pieces: Sequence[Sequence[Sequence[np.ndarray]]], first: int = 0) -> list[Chain]:
        """Return the arguments of the kernel calls that sum the rows in order, as chains.

        first   number of the first of these pieces
        """
        calls: list[tuple[int, Sequence[np.ndarray]]] = []
        for number, piece in enumerate(pieces, first):
            joined = self.order.together and len(piece) > 1
            parts = [[_joined(chunks, axes) for chunks, axes in zip(zip(*piece), self.inputs)]] if joined else piece
            for cut in self.order.cuts(number):
                calls += [(cut.group, [_sequences(a, axes, cut) for a, axes in zip(p, self.inputs)]) for p in parts]
        return self.order.chains(calls, first + len(pieces))

    def bands(self, most: float = math.inf) -> list[tuple[int, int]]:
        """Return the bands of rows that are summed at a time, small enough for the cache. They do not affect the order
        of a sum.

        most   numbers of a band, if less than usual
        """
        if len(self.shape) < 2:
            return [(0, self.shape[0] if self.shape else 1)]
        rows = max(int(min(most, ROWS_ELEMENTS)) // self.shape[1] // 64, 1) * 64
        return [(first, min(first + rows, self.shape[0])) for first in range(0, self.shape[0], rows)]

    def add(self, chains: Sequence[Chain], totals: Sequence[np.ndarray], first: int, *, started: bool) -> None:
        """Sum rows from the first one on over consecutive chains.

        totals    these rows (of a vector: all of it) of the totals so far, and space for new ones
        started   whether the first chain continues from its total; otherwise the total's content is ignored
        """
        options = {**self.options, "first_row": first} if len(self.shape) > 1 else self.options
        # Other totals of the tree are added at once, while they are in the cache.
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
    """Some rows of a sum over some pieces of the batch, in a separate task.

    It takes the chunks of the pieces, in lists as of `ChunkSum.arrange`, and the totals that it continues from, and
    returns the totals that wait for others in the tree of groups: an array if there is one, else a tuple.

    given   number of totals that it continues from
    left    number of totals that it returns
    whole   whether it sums all rows, of a micro-batch (`micro`, or None after all of them)
    """

    by_rows = True
    whole = False

    @property
    def traceable(self) -> bool:
        return self.call.traceable

    def __init__(
        self, call: ChunkSum, bands: Sequence[Band], pieces: range, *, started: bool = False, over: bool = True
    ) -> None:
        """bands     of rows, consecutive
        pieces    of the sum's order
        started   whether the whole sum continues from another one
        over      whether it overwrites the totals that it continues from, which requires that no task runs twice
        """
        self.call, self.bands, self.pieces, self.over = call, tuple(bands), pieces, over
        self.origin = call.origin
        self.given = call.order.totals_before(pieces.start) if pieces.start else int(started)
        self.left = call.order.totals_before(pieces.stop)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return (self.bands[-1][1] - self.bands[0][0], *self.call.shape[1:]) if self.call.shape else ()

    def run(self, pieces: Sequence[Any], start: Totals = ()) -> Totals:
        base = self.bands[0][0]
        chains = self.call.in_order(pieces, self.pieces.start)
        any_of = chains[0].calls[0][0]
        totals = [total if self.over else total.copy() for total in several(start)]
        totals += [np.empty(self.shape, self.call.dtype, like=any_of) for _ in range(len(totals), self.left)]
        # The total of a group that was begun before is among the given ones, above those of earlier groups.
        started = self.given > self.call.order.level(chains[0].group)
        for first, last in self.bands:
            rows = [total[first - base : last - base] if total.ndim else total for total in totals]
            self.call.add(chains, rows, first, started=started)
        return totals[0] if self.left == 1 else tuple(totals[: self.left])

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> Any:
        totals = list(several(arguments[1])) if len(arguments) > 1 else []
        for _ in range(len(totals), self.left):
            totals.append(memory.array("gradients", self.shape, self.call.dtype))
        return totals[0] if self.left == 1 else tuple(totals[: self.left])


def several(totals: Any) -> Sequence[Any]:
    """Return the totals of some subtrees as a list; a single one may be passed alone."""
    return totals if isinstance(totals, list | tuple) else [totals]


def _joined(parts: Sequence[np.ndarray], axes: str) -> np.ndarray:
    """Return the token chunks of some sequences as one."""
    return np.concatenate(parts, axis=axes.index("t")) if "t" in axes else parts[0]


def _sequences(array: np.ndarray, axes: str, cut: Cut) -> np.ndarray:
    """Return some sequences of a chunk; an array without sequences belongs to all of them."""
    return array[cut.first : cut.last] if axes.startswith("b") else array


NOTHING, MESSAGE, FIRST, PICK = "nothing", "message", "first", "pick"
READER = "reader"


@dataclass(eq=False)
class Exchange(TaskCall):
    """A function of the results of other tasks other than a kernel: it sends, receives, picks or waits.

    returns   for memory: NOTHING; a MESSAGE, which is not counted; the size of its FIRST argument; or the PICK of one
              of several results
    size      bytes that it sends, adds or copies
    peer      the rank that it sends to or receives from, on a channel; -1 for none
    """

    function: Callable[..., Any]
    origin: Origin | None
    returns: str = NOTHING
    axes: str = ""
    size: int = 0
    peer: int = -1
    channel: Hashable = None

    @property
    def traceable(self) -> bool:
        return self.returns == PICK

    def run(self, *results: Any) -> Any:
        return self.function(*results)

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> Any:
        if self.returns == FIRST:
            return arguments[0]
        if self.returns == PICK:
            return self.run(*arguments)
        return Message() if self.returns == MESSAGE else None


def wait(*results: object) -> None:
    """Do nothing, in a task that only waits for others."""


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
        for axis, sizes in zip(axes, array.chunks):
            whole = not axis.isupper() or len(sizes) == 1
            require(whole, where, f"axis {axis} must be one chunk", {"chunks": sizes}, "Gather it first.")
            first_sizes = chunks.setdefault(axis, sizes)
            rule = f"arrays must share the chunks of axis {axis}"
            require(first_sizes == sizes, where, rule, f"{first_sizes} and {sizes}", "Rechunk one.")
    return chunks


def apply(
    name: str,
    kernel: Callable[..., Any],
    signature: str,
    arrays: Sequence[da.Array],
    *,
    options: Mapping[str, Any] | None = None,
    origin: Origin | None = None,
    new_axes: Mapping[str, int] | None = None,
    start: da.Array | None = None,
    at_once: int = 1,
    groups: Groups = ONE_GROUP,
    after: tuple[da.Array, str] | None = None,
) -> tuple[da.Array, ...]:
    """Call a kernel on every chunk; return one lazy dask array for each output. Nothing is computed.

    name       of the first output, unique in its graph
    signature  axes of arguments and outputs, see `daskgpt.model.layers`
    options    of the kernel
    origin     the call of a layer
    new_axes   sizes of axes that no argument has
    start      the start of a sum over the chunks (an array like the output), None for zero
    at_once    tokens of a sequence that a summing kernel takes in one step
    groups     the groups of the batch that these sequences are, see `graph.sum_order`
    after      an array and its axes whose chunk must be computed before, although the kernel does not read it

    Errors     ValueError if chunks do not fit the signature, or groups the batch
    """
    inputs, outputs = parse(signature)
    chunks = axis_chunks(name, arrays, inputs)
    chunks |= {axis: (size,) for axis, size in (new_axes or {}).items()}
    unknown = sorted(set("".join(outputs)) - chunks.keys() - {"T"})
    advice = "Name the axes of its result as those of its arguments."
    require(not unknown, name, "an axis of a result must be one of an argument", {"signature": signature}, advice)
    if "T" in outputs[0] and "t" in chunks:
        chunks["T"] = (sum(chunks["t"]),)
    dtype = next(array.dtype for array in arrays if array.dtype.kind == "f")
    summed = not any(axis in CUT for axis in "".join(outputs)) and any(axis in CUT for axis in "".join(inputs))
    grid = outputs[0] if len(outputs) == 1 else "".join(axis for axis in outputs[0] if axis in CUT)
    call = KernelCall(kernel, inputs, grid, options or {}, outputs, chunks, dtype, origin)
    if summed:
        groups = groups if "b" in chunks else ONE_GROUP
        order = SumOrder.of(chunks.get("b", (1,)), chunks.get("t", (1,)), at_once, groups)
        call = ChunkSum(**vars(call), order=order)
        after = None if start is None else (start, outputs[0])
    if after is not None:
        arrays, inputs = [*arrays, after[0]], [*inputs, after[1]]

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
    # Dask's blockwise has one output: a task returns all in an array of tuples over the cut axes, from which each is
    # picked.
    both = blockwise(name, call, call.axes, given, np.dtype(object))
    return tuple(
        blockwise(f"{name}.{n}", Exchange(itemgetter(n), origin, PICK, axes=axes), axes, [both, call.axes], dtype)
        for n, axes in enumerate(outputs)
    )


NO_CALL = TaskCall()


def call_of(node: GraphNode) -> Any:
    """Return the call of a task; for data and other tasks one without properties."""
    call = getattr(node, "func", None)
    return call if isinstance(call, TaskCall) else NO_CALL


def origin_of(node: GraphNode) -> Any:
    """Return the origin of a task; None for data and for tasks without an origin."""
    return call_of(node).origin


def is_pick(node: GraphNode) -> bool:
    """Return whether a task only takes one of several results out of a tuple."""
    return isinstance(call := call_of(node), Exchange) and call.returns == PICK


def is_sum(node: GraphNode) -> bool:
    """Return whether a task makes a sum over the batch, or a part of one."""
    return isinstance(call_of(node), ChunkSum | RowSum)
