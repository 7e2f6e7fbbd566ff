"""Updates into new arrays by bands of rows, for workers that may be lost.

An update on a cluster leaves the arrays that it reads as they are. A band of rows of the gradient is summed, used and
forgotten while it is in the cache nevertheless, as where updates are in place (`graph.inplace`): one task makes the
last sum, adds the totals of other parts, and writes these rows of the new arrays. The gradient is never whole, nor is
the total of the part that updates. A row is summed in the same order whichever task does it, so no bit changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from daskgpt.graph.calls import ChunkSum, KernelCall
from daskgpt.graph.inplace import dependents_of, unwrapped
from daskgpt.graph.nodes import Graph, Key, combined, only, reference
from daskgpt.graph.spreading import Join, tree_sum


class BandedUpdate(KernelCall):
    """Sums a gradient and makes new arrays of a tensor and its moments, some rows at a time.

    kernel   writes over rows: kernel(weight rows, gradient rows, *rows of each moment, hyper, **options)
    total    the sum that is made here
    place    its number among the totals of all parts; the others are given
    others   how many are
    """

    def __init__(
        self,
        call: KernelCall,
        total: ChunkSum,
        place: int,
        others: int,
        kernel: Callable[..., Any],
        blank: Callable[[Any], Any],
        values_of: Callable[[Any], np.ndarray],
    ) -> None:
        """call       the update that this is
        blank      makes a parameter's like without values, as it is held
        values_of  its values
        """
        self.__dict__.update(call.__dict__)
        self.kernel, self.total, self.place, self.others = kernel, total, place, others
        self.blank, self.values_of = blank, values_of

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        """The pieces of the sum, the totals of other parts, and weight, moments and hyper."""
        count = len(self.total.inputs)
        pieces, *_ = self.total.arrange(chunks[:count])
        state = [unwrapped(chunk) for chunk in chunks[count + self.others :]]
        return [pieces, chunks[count : count + self.others], state]

    def run(self, pieces: Sequence[Any], others: Sequence[np.ndarray], state: Sequence[Any]) -> Any:
        *old, hyper = state
        new = [self.blank(each) for each in old]
        chains = self.total.in_order(pieces)
        for first, last in self.total.bands():
            gradient = np.empty((last - first, *self.total.shape[1:]), self.total.dtype)
            self.total.add(chains, [gradient], first, last, started=False)
            totals = [other[first:last] for other in others]
            totals.insert(self.place, gradient)
            for source, target in zip(old, new):
                self.values_of(target)[first:last] = self.values_of(source)[first:last]
            weight, *moments = (each[first:last] for each in new)
            self.kernel(weight, tree_sum(*totals), *moments, hyper, **self.options)
        return tuple(new) if len(new) > 1 else new[0]


def update_by_bands(
    graph: Graph,
    updates: Iterable[Key],
    part_of: Callable[[Key], int],
    kernel: Callable[..., Any],
    blank: Callable[[Any], Any],
    values_of: Callable[[Any], np.ndarray],
) -> Graph:
    """The graph with updates that sum their gradients, where one sum over the batch is all that leads to a gradient.

    Where it goes on from another one (the tied table's) it stays apart: it can be made long before.

    updates   the tasks (weight, gradient, *moments, hyper) -> tuple of the new tensors
    part_of   the part that makes an update
    kernel, blank, values_of   see `BandedUpdate`
    """
    new, readers = dict(graph), dependents_of(graph)
    for key in updates:
        weight, gradient, *rest = graph[key].args
        last = only(gradient)
        totals = list(map(only, graph[last].args)) if isinstance(graph[last].func, Join) else [last]
        place = part_of(key) if len(totals) > 1 else 0
        total = totals.pop(place)
        if not _alone(graph, total) or any(len(readers[own]) > 1 for own in (last, total)):
            continue
        call = BandedUpdate(graph[key].func, graph[total].func, place, len(totals), kernel, blank, values_of)
        given = [*graph[total].args, *map(reference, totals)]
        new[key] = combined(key, call, [*given, weight, *rest])
        for gone in {last, total}:
            del new[gone]
    return new


def _alone(graph: Graph, key: Key) -> bool:
    """Whether a task is a sum over the batch that goes on from no other."""
    call = graph[key].func
    return isinstance(call, ChunkSum) and len(graph[key].args) == len(call.inputs)
