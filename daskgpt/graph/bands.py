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
from daskgpt.graph.inplace import InPlaceRule, dependents_of, unwrapped
from daskgpt.graph.nodes import Graph, Key, combined, only, reference
from daskgpt.graph.spreading import Join, met


class BandedUpdate(KernelCall):
    """Sums a gradient and makes new arrays of a tensor and its moments, some rows at a time.

    rule     says how rows are written over
    total    the sum that is made here
    others   how many totals of other parts are given
    """

    def __init__(
        self,
        call: KernelCall,
        total: ChunkSum,
        others: int,
        rule: InPlaceRule,
        blank: Callable[[Any], Any],
        values_of: Callable[[Any], np.ndarray],
    ) -> None:
        """call       the update that this is
        blank      makes a parameter's like without values, as it is held
        values_of  its values
        """
        self.__dict__.update(call.__dict__)
        self.rule, self.total, self.others = rule, total, others
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
        for bands in self.rule.at_once(self.total.bands()):
            base, end = bands[0][0], bands[-1][1]
            gradient = np.empty((end - base, *self.total.shape[1:]), self.total.dtype)
            for first, last in bands:
                self.total.add(chains, [gradient[first - base : last - base]], first, last, started=False)
            for source, target in zip(old, new):
                self.values_of(target)[base:end] = self.values_of(source)[base:end]
            weight, *moments = (each[base:end] for each in new)
            total = met(gradient, *(other[base:end] for other in others))
            self.rule.kernel(weight, total, *moments, hyper, **self.options)
        return tuple(new) if len(new) > 1 else new[0]


def update_by_bands(
    graph: Graph,
    updates: Iterable[Key],
    rule_of: Callable[[Any], InPlaceRule],
    blank: Callable[[Any], Any],
    values_of: Callable[[Any], np.ndarray],
) -> Graph:
    """The graph with updates that sum their gradients, where one sum over the batch is all that leads to a gradient.

    Where it goes on from another one (the tied table's) it stays apart: it can be made long before.

    updates   the tasks (weight, gradient, *moments, hyper) -> tuple of the new tensors
    rule_of   origin of an update -> how rows are written over
    blank, values_of   see `BandedUpdate`
    """
    new, readers = dict(graph), dependents_of(graph)
    for key in updates:
        weight, gradient, *rest = graph[key].args
        last = only(gradient)
        # The first of several totals is that of the part that updates.
        total, *others = map(only, graph[last].args) if isinstance(graph[last].func, Join) else [last]
        if not _alone(graph, total) or any(len(readers[own]) > 1 for own in (last, total)):
            continue
        own, rule = graph[key].func, rule_of(graph[key].func.origin)
        call = BandedUpdate(own, graph[total].func, len(others), rule, blank, values_of)
        given = [*graph[total].args, *map(reference, others)]
        new[key] = combined(key, call, [*given, weight, *rest])
        for gone in {last, total}:
            del new[gone]
    return new


def _alone(graph: Graph, key: Key) -> bool:
    """Whether a task is a sum over the batch that goes on from no other."""
    call = graph[key].func
    return isinstance(call, ChunkSum) and len(graph[key].args) == len(call.inputs)
