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
from daskgpt.graph.spreading import PartSum, PartTotal, Share, part_of


@dataclass(frozen=True)
class MicroBatches:
    """Which sequences belong to which micro-batch: of each part, as many consecutive ones to each.

    count    how many micro-batches there are
    chunks   how many chunks of sequences
    parts    over how many workers these are spread
    """

    count: int
    chunks: int
    parts: int = 1

    def of_chunk(self, chunk: int) -> tuple[int, int]:
        """The part and the micro-batch of a chunk of sequences."""
        part = part_of(chunk, self.chunks, self.parts)
        own = [other for other in range(self.chunks) if part_of(other, self.chunks, self.parts) == part]
        return part, part_of(own.index(chunk), len(own), self.count)


class MicroSum(PartSum):
    """A sum over one micro-batch's sequences, or some of them, which goes on from the total of those before.

    micro   number of the micro-batch; None where it is made after all of them
    over    whether it writes over the totals that it goes on from
    """

    def __init__(
        self,
        call: ChunkSum,
        counts: Sequence[int],
        first: int,
        started: bool,
        share: Share,
        micro: int | None,
        over: bool,
    ) -> None:
        super().__init__(call, counts, first, started, share)
        self.micro, self.over = micro, over

    def run(self, pieces: Sequence[Any], start: Totals = ()) -> Totals:
        return RowSum.run(self, pieces, start) if self.over else super().run(pieces, start)


class Done:
    """All sums of a micro-batch are made: what the next one waits for."""

    axes = ""

    def __init__(self, share: Share, micro: int, origin: Any = None) -> None:
        self.share, self.micro, self.origin = share, micro, origin

    def __reduce__(self) -> tuple[Any, ...]:
        return Done, (self.share, self.micro)

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

    Where the sequences are spread over workers, each has micro-batches of its own. Sums that are no part's alone stay
    as they are, and what they read is kept.
    """
    new, links = dict(graph), defaultdict[tuple[int, int], list[Key]](list)
    begins = {only(start) for node in graph.values() if (start := _start(node)) is not None}
    for key, node in graph.items():
        if _is_split(node, micro_batches) and not (ranked and _start(node) is not None):
            own = _chain(graph, key, micro_batches, begun=key in begins, over=over)
            new |= own
            for link, made in own.items():
                if made.func.micro is not None:
                    links[made.func.share.part, made.func.micro].append(link)
    for (part, micro), sums in links.items():
        key = (f"accumulate-{token}", part, micro)
        done = Done(Share(None, part), micro, origin_of_done(micro))
        new[key] = combined(key, done, map(reference, sums))
    for key, node in graph.items():
        if not is_leaf(node) and all(is_leaf(graph[needed]) for needed in node.dependencies if needed in graph):
            place = micro_of(graph, key, micro_batches)
            if place is not None:
                before = [micro for part, micro in links if part == place[0] and micro < place[1]]
                if before:
                    new[key] = waiting_for(node, [(f"accumulate-{token}", place[0], max(before))])
    return new


def micro_of(graph: Graph, key: Key, micro_batches: MicroBatches) -> tuple[int, int] | None:
    """The part and the micro-batch that a task belongs to; None for what belongs to none (updates, the loss)."""
    function = getattr(graph[key], "func", None)
    if isinstance(function, MicroSum | Done):
        return None if function.micro is None else (function.share.part, function.micro)
    axes = getattr(function, "axes", "")
    if not axes.startswith("b") or isinstance(function, PartTotal | PartSum):
        return None
    return micro_batches.of_chunk(key[1])


def _is_split(node: Any, micro_batches: MicroBatches) -> bool:
    call = getattr(node, "func", None)
    if not isinstance(call, ChunkSum) or not call.shape or len(call.order.sequences) < 2:
        return False
    return isinstance(call, PartTotal) or micro_batches.parts == 1


def _start(node: Any) -> Any:
    """The argument that a sum goes on from."""
    call = getattr(node, "func", None)
    return node.args[-1] if isinstance(call, ChunkSum) and len(node.args) > len(call.inputs) else None


def _chain(graph: Graph, key: Key, micro_batches: MicroBatches, *, begun: bool, over: bool) -> Graph:
    """A sum as a chain of sums; the last one has its key.

    begun   whether another sum goes on from it: then each chunk is added, and let go, on its own
    """
    call: ChunkSum = graph[key].func
    share = call.share if isinstance(call, PartTotal) else Share(None, 0)
    pieces, *before = call.arrange([nested(argument) for argument in graph[key].args])
    order, start, new = call.order, [reference(total) for total in before], dict[Key, Any]()
    chunks = len(order.sequences)
    micros = [part_of(piece[0][0], chunks, micro_batches.count) for piece in order.pieces]
    runs = [list(own) for _, own in groupby(range(len(micros)), key=(lambda n: n) if begun else micros.__getitem__)]
    for run in runs:
        own = [pieces[number] for number in run]
        rows = [reference(item) for piece in own for chunk in piece for item in chunk]
        link = key if run is runs[-1] else (f"{key[0]}.micro", share.part, run[0])
        micro = None if before else micros[run[0]]
        made = MicroSum(call, [len(piece) for piece in own], run[0], bool(before), share, micro, over)
        new[link] = combined(link, made, rows + start)
        start = [reference(link)]
    return new
