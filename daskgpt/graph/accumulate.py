"""Accumulation: a batch as consecutive micro-batches in one graph.

Each sum over the batch becomes a chain of sums, one per micro-batch, each continuing from the totals of the one before:
so it adds in the order of the whole batch (`graph.sum_order`), and no bit depends on the number of micro-batches. A
gradient is an array here, and the activations of a micro-batch are dropped when its sums are made. Only then the next
one begins: its first tasks wait for a task that reads all of these sums.

A sum that continues from another one (the tied table's) can start only when that one is complete, at the end of the
last micro-batch: its input, the gradient of the embedding's output, is kept that long.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby

from daskgpt.graph.calls import ChunkSum, Exchange, Origin, RowSum, call_of, wait
from daskgpt.graph.nodes import Graph, Key, is_leaf, key_trees, task, waiting_for
from daskgpt.graph.update_in_place import start_of


@dataclass(frozen=True)
class MicroBatches:
    """The sequences of each micro-batch, which are consecutive.

    count    number of micro-batches
    chunks   number of chunks of sequences
    """

    count: int
    chunks: int

    def of_chunk(self, chunk: int) -> int:
        """Return the micro-batch of a chunk of sequences."""
        return chunk * self.count // self.chunks

    def of_task(self, graph: Graph, key: Key) -> int | None:
        """Return the micro-batch that a task belongs to; None for updates and the loss."""
        if self.count == 1:
            return None
        call = call_of(graph[key])
        return self.of_chunk(key[1]) if call.axes.startswith("b") else call.micro


def accumulate(graph: Graph, micro_batches: MicroBatches, token: str, *, over: bool, ranked: bool = False) -> Graph:
    """Return the graph of a batch with its micro-batches one after the other.

    token    distinguishes the keys of this graph's own tasks
    over     whether a sum overwrites the totals that it continues from, which requires that no task runs twice
    ranked   whether sums that continue from another one stay unchanged, since they include other ranks' sequences
    """
    new, links = dict(graph), defaultdict[int, list[Key]](list)
    starts = {key: start_of(graph, key) for key, node in graph.items() if isinstance(call_of(node), ChunkSum)}
    for key, start in starts.items():
        call = graph[key].func
        # The loss, and a sum over one chunk of sequences, stay as they are.
        if call.shape and len(call.order.sequences) > 1 and not (ranked and start is not None):
            links_of_sum = _chain(graph, key, micro_batches, begun=key in starts.values(), over=over)
            new |= links_of_sum
            for link, made in links_of_sum.items():
                if made.func.micro is not None:
                    links[made.func.micro].append(link)
    for micro, made in links.items():
        key = (f"accumulate-{token}", micro)
        done = Exchange(wait, Origin("accumulate", "backward", f"micro-batch.{micro}"))
        done.micro = micro
        new[key] = task(key, done, made)
    for key, node in graph.items():
        if not is_leaf(node) and all(is_leaf(graph[needed]) for needed in node.dependencies if needed in graph):
            own_micro = micro_batches.of_task(graph, key)
            before = [micro for micro in links if own_micro is not None and micro < own_micro]
            if before:
                new[key] = waiting_for(node, [(f"accumulate-{token}", max(before))])
    return new


def _chain(graph: Graph, key: Key, micro_batches: MicroBatches, *, begun: bool, over: bool) -> Graph:
    """Return a sum as a chain of sums; the last one has its key.

    begun   whether another sum continues from it: then each chunk is added and dropped separately
    """
    call: ChunkSum = graph[key].func
    pieces, *before = call.arrange(key_trees(graph[key]))
    start, new = before, Graph()
    micros = [micro_batches.of_chunk(piece[0][0]) for piece in call.order.pieces]
    runs = [
        list(numbers) for _, numbers in groupby(range(len(micros)), key=(lambda n: n) if begun else micros.__getitem__)
    ]
    for run in runs:
        link = key if run is runs[-1] else (f"{key[0]}.micro", run[0])
        made = RowSum(call, call.bands(), range(run[0], run[-1] + 1), started=bool(before), over=over)
        made.micro, made.whole = None if before else micros[run[0]], True
        new[link] = task(link, made, [pieces[run[0] : run[-1] + 1], *start])
        start = [link]
    return new
