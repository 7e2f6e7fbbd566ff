"""Accumulation: a batch as micro-batches that are worked on one after the other, in one graph.

Each sum over the batch becomes a chain of sums, one for each micro-batch, which goes on from the totals of the one
before: so it adds in the order of the whole batch (`graph.sum_order`), and no bit depends on how many there are. A
gradient is an array here, and what the layers of a micro-batch keep for it is dropped when its sums are made. Then only
the next one begins: its first tasks wait for a task that reads all of these sums.

Where a sum goes on from another one (the tied table's), it can only be made when that is done, at the end of the last
micro-batch: what it reads, the gradient of the embedding's output, is kept that long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from daskgpt.graph.calls import ChunkSum
from daskgpt.graph.inplace import RowSum, Totals
from daskgpt.graph.nodes import Graph, Key, combined, is_leaf, nested, only, reference, waiting_for


@dataclass(frozen=True)
class MicroBatches:
    """Which sequences belong to which micro-batch: consecutive ones to each.

    count    how many micro-batches there are
    chunks   how many chunks of sequences
    """

    count: int
    chunks: int

    def of_chunk(self, chunk: int) -> int:
        """The micro-batch of a chunk of sequences."""
        return chunk * self.count // self.chunks


class MicroSum(RowSum):
    """A sum over one micro-batch's sequences, or some of them, which goes on from the total of those before.

    micro   number of the micro-batch; None where it is made after all of them
    over    whether it writes over the totals that it goes on from
    """

    def __init__(
        self, call: ChunkSum, counts: Sequence[int], first: int, started: bool, micro: int | None, over: bool
    ) -> None:
        super().__init__(call, call.bands(), counts, first, started)
        self.micro, self.over = micro, over

    def run(self, pieces: Sequence[Any], start: Totals = ()) -> Totals:
        if not self.over:
            start = tuple(total.copy() for total in (start if isinstance(start, tuple) else (start,)))
        return super().run(pieces, start)


class Done:
    """All sums of a micro-batch are made: what the next one waits for."""

    axes = ""

    def __init__(self, micro: int, origin: Any = None) -> None:
        self.micro, self.origin = micro, origin

    def __reduce__(self) -> tuple[Any, ...]:
        return Done, (self.micro,)

    def __call__(self, *sums: Any) -> None:
        pass


def accumulated(
    graph: Graph,
    micro_batches: MicroBatches,
    token: str,
    origin_of_done: Callable[[int], Any],
    *,
    over: bool,
    ranked: bool = False,
) -> Graph:
    """The graph of a batch with its micro-batches one after the other.

    token            tells the keys of this graph's own tasks from others'
    origin_of_done   number of a micro-batch -> what the task at its end was made for
    over             whether a sum writes over the totals that it goes on from: where no task runs twice
    ranked           whether sums that go on from another one stay as they are: other ranks' sequences belong to them
    """
    new, links = dict(graph), defaultdict[int, list[Key]](list)
    begins = {only(start) for node in graph.values() if (start := _start(node)) is not None}
    for key, node in graph.items():
        if _is_split(node) and not (ranked and _start(node) is not None):
            own = _chain(graph, key, micro_batches, begun=key in begins, over=over)
            new |= own
            for link, made in own.items():
                if made.func.micro is not None:
                    links[made.func.micro].append(link)
    for micro, sums in links.items():
        key = (f"accumulate-{token}", micro)
        new[key] = combined(key, Done(micro, origin_of_done(micro)), map(reference, sums))
    for key, node in graph.items():
        if not is_leaf(node) and all(is_leaf(graph[needed]) for needed in node.dependencies if needed in graph):
            own_micro = micro_of(graph, key, micro_batches)
            before = [micro for micro in links if own_micro is not None and micro < own_micro]
            if before:
                new[key] = waiting_for(node, [(f"accumulate-{token}", max(before))])
    return new


def micro_of(graph: Graph, key: Key, micro_batches: MicroBatches) -> int | None:
    """The micro-batch that a task belongs to; None for what belongs to none (updates, the loss)."""
    function = getattr(graph[key], "func", None)
    if isinstance(function, MicroSum | Done):
        return function.micro
    return micro_batches.of_chunk(key[1]) if getattr(function, "axes", "").startswith("b") else None


def _is_split(node: Any) -> bool:
    call = getattr(node, "func", None)
    return isinstance(call, ChunkSum) and bool(call.shape) and len(call.order.sequences) > 1


def _start(node: Any) -> Any:
    """The argument that a sum goes on from."""
    call = getattr(node, "func", None)
    return node.args[-1] if isinstance(call, ChunkSum) and len(node.args) > len(call.inputs) else None


def _chain(graph: Graph, key: Key, micro_batches: MicroBatches, *, begun: bool, over: bool) -> Graph:
    """A sum as a chain of sums; the last one has its key.

    begun   whether another sum goes on from it: then each chunk is added, and let go, on its own
    """
    call: ChunkSum = graph[key].func
    pieces, *before = call.arrange([nested(argument) for argument in graph[key].args])
    start, new = [reference(total) for total in before], dict[Key, Any]()
    micros = [micro_batches.of_chunk(piece[0][0]) for piece in call.order.pieces]
    runs = [list(own) for _, own in groupby(range(len(micros)), key=(lambda n: n) if begun else micros.__getitem__)]
    for run in runs:
        own = [pieces[number] for number in run]
        rows = [reference(item) for piece in own for chunk in piece for item in chunk]
        link = key if run is runs[-1] else (f"{key[0]}.micro", run[0])
        micro = None if before else micros[run[0]]
        made = MicroSum(call, [len(piece) for piece in own], run[0], bool(before), micro, over)
        new[link] = combined(link, made, rows + start)
        start = [reference(link)]
    return new
