"""The work of kernel calls: which kind of call a task makes, on arrays of which sizes, with how many operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from daskgpt.graph.calls import ChunkSum, Exchange, KernelCall, RowSum, call_of
from daskgpt.graph.nodes import Graph, Key
from daskgpt.graph.update_in_place import RowUpdate

Sizes = dict[str, int]
SAME = {"gather": "embedding.backward"}  # what an owner sums for all ranks


def work_of(graph: Graph, key: Key) -> tuple[str, Sizes] | None:
    """Return the kind of a kernel call, which ends with its signature, and the sizes of its axes; n counts how often
    the kernel is called. Return None for tasks that call no kernel.
    """
    call: Any = call_of(graph[key])
    if call.origin is None or isinstance(call, Exchange):
        return None
    name = SAME.get(call.origin.kind, call.origin.kind)
    if isinstance(call, ChunkSum):
        call = RowSum(call, call.bands(), range(len(call.order.pieces)))
    if isinstance(call, RowSum):
        return _summed(f"{name} sum", [call.call], call.bands, call.pieces)
    if isinstance(call, RowUpdate) and call.sums:
        return _summed(f"{name} update", call.sums, call.bands, range(len(call.sums[0].order.pieces)))
    if isinstance(call, RowUpdate):
        axes, rows = "OC"[: 1 + len(call.columns)], call.rows.stop - call.rows.start
        return f"{name} update {axes}->{axes}", dict(zip("OC", (rows, *call.columns))) | {"n": len(call.bands)}
    if call.by_rows:
        (rows_of,) = (call_of(graph[needed]) for needed in graph[key].dependencies)
        return f"{name} rows O->O", {"O": math.prod(rows_of.shape), "n": 1}
    assert isinstance(call, KernelCall)
    index = dict(zip(call.axes, key[1:]))
    sizes = {axis: own[index[axis]] if axis in index else sum(own) for axis, own in call.chunks.items()}
    inputs = ",".join(filter(None, call.inputs))  # without numbers, of which some calls have one for each tensor
    return f"{name} {inputs}->{','.join(call.outputs)}", sizes | {"n": 1}


def _summed(name: str, sums: Sequence[ChunkSum], bands: Sequence[tuple[int, int]], pieces: range) -> tuple[str, Sizes]:
    """Return kind and sizes of some rows of sums over some pieces; their tokens are those of axis b."""
    sizes = {axis: sum(own) for call in sums for axis, own in call.chunks.items()}
    order, calls = sums[0].order, 0
    cuts = 1 + max(t for piece in order.pieces for _, t in piece)  # of the tokens of a sequence
    sequences = sum(order.sequences[b] for number in pieces for b, _ in order.pieces[number])
    for call in sums:
        for number in pieces:
            calls += len(call.order.cuts(number)) * (1 if call.order.together else len(call.order.pieces[number]))
    sizes |= {"b": sequences * sizes.get("t", 1) // cuts, "t": 1, "n": calls * len(bands)}
    if sums[0].outputs[0]:
        sizes[sums[0].outputs[0][0]] = bands[-1][1] - bands[0][0]
    inputs = ",".join(axes for call in sums for axes in call.inputs)
    return f"{name} {inputs}->{sums[0].outputs[0]}", sizes


def features(kind: str, sizes: Mapping[str, int]) -> list[float]:
    """Return the calls, numbers read, numbers written and operations of a call."""
    inputs, outputs = (side.split(",") for side in kind.rpartition(" ")[2].split("->"))

    def numbers(arrays: Iterable[str]) -> int:
        return sum(math.prod(sizes[axis] for axis in axes) for axes in arrays)

    letters = set("".join([*inputs, *outputs]))
    # A layer of whole sequences reads each token for each other one; others multiply along all their axes.
    operations = sizes["T"] * numbers(inputs[:1]) if "T" in letters else numbers(["".join(letters)])
    return [sizes["n"], numbers(inputs), numbers(outputs), operations]
