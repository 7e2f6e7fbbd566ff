"""Updates in place: the sums that make a gradient and the update that uses it as one task, a band of rows at a time.

Out of place, an update writes new arrays and Dask can compute it again when a worker is lost. The local schedulers lose
no workers, so there the arrays are written over. This module is where the two differ. It rewrites a finished graph:

    sum over chunks -> gradient -> update -> picks      becomes      one or several `RowUpdate` tasks

A band of rows of the gradient is summed, used and forgotten while it is in the cache: the whole gradient is never
written. A task may take a part of the rows, so that several threads share a large tensor.

Why the results are those of updates into new arrays, bit for bit:
- A sum is made row by row in the same order of chunks, whichever task makes a row, and an update looks at one number of
  each array at a time. One that looks at more (Muon's) says so, and is given all rows at once.
- Nobody sees a half-written tensor. Whoever reads the old value runs before the update: these edges are returned beside
  the graph (`after`). Nobody in the same run reads the new value; the next run starts when this one is done, or waits
  for the update where runs overlap (`recording.Runnable.window`).
- Nothing else reads what is not written any more. Where a gradient has other readers than its update (its norm, say),
  it is summed by tasks of its own, and the update takes its rows from there: whole, or where all of them are content
  with some rows each, by rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from daskgpt.graph.calls import KernelCall
from daskgpt.graph.nodes import Graph, Key, combined, listed, nested, only, reference

Band = tuple[int, int]  # from which row to which
TASK_ELEMENTS = 1 << 22  # of a tensor that one task updates at most: some 20 ms of sums and memory traffic


@dataclass(frozen=True)
class InPlace:
    """The rewritten graph.

    updates   the keys of the tasks that write, which nobody reads
    after     task -> tasks that must have run before although it does not need their results
    """

    graph: Graph
    updates: list[Key]
    after: dict[Key, list[Key]]


@dataclass(frozen=True)
class InPlaceRule:
    """How a tensor is written over.

    kernel   called as kernel(weight rows, gradient rows, *rows of each moment, hyper, **options)
    fused    summing kernel -> kernel that does its sum and the update in one pass
    whole    whether the kernel needs all rows at once
    """

    kernel: Callable[..., Any]
    fused: Mapping[Callable[..., Any], Callable[..., Any]]
    whole: bool

    def at_once(self, bands: Sequence[Band]) -> list[Sequence[Band]]:
        """The bands of rows that are summed before the kernel is called, for each time it is."""
        return [bands] if self.whole else [[band] for band in bands]


Totals = np.ndarray | tuple[np.ndarray, ...]


class RowSum:
    """Some rows of a sum over some pieces of the batch, in a task of their own; it goes on in the rows it starts from.

    It returns those of every total that waits for others in the tree of groups: an array where there is one.

    counts   how many chunks each piece has
    given    how many totals it starts from
    left     and how many it returns
    """

    axes = ""

    def __init__(
        self, call: Any, bands: Sequence[Band], counts: Sequence[int], first_piece: int, started: bool
    ) -> None:
        """first_piece   number of the first piece that is summed here
        started       whether the whole sum goes on from another one
        """
        self.call, self.bands, self.counts, self.first_piece = call, tuple(bands), tuple(counts), first_piece
        self.origin = call.origin
        self.given = call.order.totals_before(first_piece) if first_piece else int(started)
        self.left = call.order.totals_before(first_piece + len(counts))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return (self.bands[-1][1] - self.bands[0][0], *self.call.shape[1:])

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        pieces, position, each = [], 0, len(self.call.inputs)
        for count in self.counts:
            ends = range(position, position + count * each, each)
            pieces.append([list(chunks[first : first + each]) for first in ends])
            position += count * each
        return [pieces, *chunks[position:]]

    def run(self, pieces: Sequence[Any], start: Totals = ()) -> Totals:
        base = self.bands[0][0]
        chains = self.call.in_order(pieces, self.first_piece)
        totals = list(start) if isinstance(start, tuple) else [start]
        totals += [np.empty(self.shape, self.call.dtype) for _ in range(len(totals), self.left)]
        # A group that was begun before has its total among those that are given, above those of the groups before it.
        started = self.given > self.call.order.level(chains[0].group)
        for first, last in self.bands:
            self.call.add(chains, [rows[first - base : last - base] for rows in totals], first, last, started=started)
        return totals[0] if self.left == 1 else tuple(totals[: self.left])


class OfRows(KernelCall):
    """A call on some rows of a gradient. Who reads the whole one's result reads a list of those of all rows."""

    def __init__(self, call: KernelCall) -> None:
        self.__dict__.update(call.__dict__)

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        return [unwrapped(chunk) for chunk in chunks]


class RowUpdate:
    """Sum rows of a gradient over all chunks and update the same rows of a tensor in place.

    sums     the summing calls (`calls.ChunkSum`), each going on from the total of the one before
    counts   how many of a task's arguments belong to each sum
    rule     says which kernel updates the rows, and whether as a whole
    bands    the rows that are summed at a time
    base     the row with which the gradient that is given begins
    """

    axes = ""

    def __init__(
        self,
        sums: Sequence[Any],
        counts: Sequence[int],
        rule: InPlaceRule,
        options: dict[str, Any],
        bands: Sequence[Band],
        base: int,
        origin: Any,
    ) -> None:
        self.sums, self.counts, self.rule, self.options = tuple(sums), tuple(counts), rule, options
        self.bands, self.base, self.origin = tuple(bands), base, origin
        self.fused = rule.fused.get(sums[0].kernel) if len(sums) == 1 else None

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        """Each sum's pieces, what the first one starts from, and weight, moments and hyper."""
        pieces, start, position = [], [], 0
        if not self.sums:
            start, position = [chunks[0]], 1
        for call, count in zip(self.sums, self.counts):
            own, *rest = call.arrange(chunks[position : position + count])
            pieces.append(own)
            start += rest
            position += count
        return [pieces, start, [unwrapped(chunk) for chunk in chunks[position:]]]

    def run(self, pieces: Sequence[Any], start: Sequence[np.ndarray], state: Sequence[np.ndarray]) -> None:
        chains = [call.in_order(own) for call, own in zip(self.sums, pieces)]
        if self.fused is not None:
            first, last = self.bands[0][0], self.bands[-1][1]
            parts = [part for chain in chains[0] for part in chain.calls]
            groups = [chain.group for chain in chains[0] for _ in chain.calls]
            self.fused(parts, groups, start[0] if start else None, state, first, last, **self.options)
            return
        *tensors, hyper = state
        for bands in self.rule.at_once(self.bands):
            base, end = bands[0][0], bands[-1][1]
            weight, *moments = (tensor[base:end] for tensor in tensors)
            if start:
                gradient = start[0][base - self.base : end - self.base]
            else:
                gradient = np.empty((end - base, *self.sums[0].shape[1:]), self.sums[0].dtype)
            for first, last in bands:
                rows = gradient[first - base : last - base]
                for number, (call, own) in enumerate(zip(self.sums, chains)):
                    call.add(own, [rows], first, last, started=bool(start) or number > 0)
            self.rule.kernel(weight, gradient, *moments, hyper, **self.options)


def update_in_place(
    graph: Graph,
    updates: Sequence[Key],
    rule_of: Callable[[Any], InPlaceRule],
    summed: int,
    *,
    apart: bool,
    by_rows: Sequence[Callable[..., Any]] = (),
) -> InPlace:
    """Rewrite the updates of a graph to work in place.

    updates   the tasks (weight, gradient, *moments, hyper) -> tuple of the new tensors
    rule_of   origin of an update -> how it is done in place
    summed    how many rows each gradient is summed over, for all chunks together
    apart     whether sums and updates are tasks apart (there is a barrier between backward and update)
    by_rows   kernels of which a gradient's other readers may call one on some rows at a time, see `OfRows`
    """
    dependents = dependents_of(graph)
    new, done, after = dict(graph), [], {}
    parts: dict[Key, list[Any]] = defaultdict(list)  # a call on a whole gradient -> those on its rows
    for update in updates:
        weight, gradient, *moments, hyper = graph[update].args
        last, call = only(gradient), graph[update].func
        rule = rule_of(call.origin)
        others = dependents[last] - {update}
        of_rows = [key for key in sorted(others) if getattr(graph[key].func, "kernel", None) in by_rows]
        # Others read the whole gradient, or it is summed by parts of the batch: it stays as it is.
        shared = len(of_rows) < len(others) or isinstance(graph[last].func, RowSum)
        of_rows = [] if shared else of_rows
        sums = [] if apart or shared or of_rows else _chain(graph, dependents, last, summed)
        arguments = [list(graph[key].args) for key in sums]
        for later in arguments[1:]:
            later.pop()  # the sum it goes on from is made in the same task
        calls = [graph[key].func for key in sums]
        before = start_of(graph, sums[0]) if sums else last
        for key in [update, *dependents[update], *sums, *of_rows, *([] if shared else _starts(graph, before))]:
            del new[key]
        for number, bands in enumerate(shares(graph[last].func, rule)):
            first = []
            if before is not None:
                first = [reference(before if shared else row_sum(graph, new, before, number, bands, summed))]
            for reader in of_rows:
                key = (f"{reader[0]}.rows", number)
                new[key] = combined(key, OfRows(graph[reader].func), first)
                parts[reader].append(reference(key))
            if arguments and before:
                arguments[0][-1] = first[0]
            given = [*(a for own in arguments for a in own)] if arguments else first
            base = 0 if shared else bands[0][0]
            counts = [len(own) for own in arguments]
            program = RowUpdate(calls, counts, rule, call.options, bands, base, call.origin)
            key = (update[0], number)
            new[key] = combined(key, program, [*given, weight, *moments, hyper])
            done.append(key)
            after[key] = [reader for reader in dependents[only(weight)] if reader != update]
    for reader in {other for key in parts for other in dependents[key]}:
        arguments = [listed(parts[key]) if (key := only(a)) in parts else a for a in graph[reader].args]
        new[reader] = combined(reader, graph[reader].func, arguments)
    return InPlace(new, done, after)


def row_sum(graph: Graph, new: Graph, key: Key, number: int, bands: Sequence[Band], summed: int) -> Key:
    """Add the tasks that sum some rows of a gradient, and the ones they go on from; return the last one's key.

    Where the parts of all pieces are larger than the total, each piece has a task of its own, that adds its parts and
    lets go of them.
    """
    call, before = graph[key].func, start_of(graph, key)
    pieces, *_ = call.arrange([nested(argument) for argument in graph[key].args])
    start = [] if before is None else [reference(row_sum(graph, new, before, number, bands, summed))]
    together = len(pieces) if summed < call.shape[-1] else 1
    for first in range(0, len(pieces), together):
        own = pieces[first : first + together]
        task_key = (f"{key[0]}.rows", number, first)
        references = [reference(item) for piece in own for part in piece for item in part]
        program = RowSum(call, bands, [len(piece) for piece in own], first, started=before is not None)
        new[task_key] = combined(task_key, program, references + start)
        start = [reference(task_key)]
    return task_key


def _starts(graph: Graph, key: Key | None) -> list[Key]:
    """A sum and those it goes on from."""
    return [] if key is None else [key, *_starts(graph, start_of(graph, key))]


def _chain(graph: Graph, dependents: dict[Key, set[Key]], last: Key, summed: int) -> list[Key]:
    """The sums that one task makes, first one first: the last, and those it goes on from while their parts are small.

    Where the parts of a sum (summed, rows) are larger than its total (rows, columns), it is better made on its own as
    soon as they are there, so that they can be dropped.
    """
    chain = [last]
    before = start_of(graph, last)
    while before is not None and len(dependents[before]) == 1 and summed < graph[before].func.shape[-1]:
        chain.insert(0, before)
        before = start_of(graph, before)
    return chain


def start_of(graph: Graph, key: Key) -> Key | None:
    """The sum that a sum goes on from."""
    extra = graph[key].args[len(graph[key].func.inputs) :]
    return only(extra[0]) if extra else None


def shares(call: Any, rule: InPlaceRule) -> list[list[Band]]:
    """The bands of rows of a tensor in shares of at most TASK_ELEMENTS, where a share can be updated."""
    if isinstance(call, RowSum):
        call = call.call
    bands = call.bands()
    if rule.whole:
        return [bands]
    elements = math.prod(call.shape[1:]) * (bands[0][1] - bands[0][0])
    per_task = max(1, TASK_ELEMENTS // max(elements, 1))
    tasks = -(-len(bands) // per_task)
    ends = [len(bands) * number // tasks for number in range(tasks + 1)]
    return [bands[first:last] for first, last in pairwise(ends)]


def dependents_of(graph: Graph) -> dict[Key, set[Key]]:
    """Task -> the tasks that read its result."""
    dependents: dict[Key, set[Key]] = defaultdict(set)
    for key, node in graph.items():
        for dependency in node.dependencies:
            dependents[dependency].add(key)
    return dependents


def unwrapped(chunk: Any) -> Any:
    """The one chunk of an axis that is not cut, out of Dask's lists."""
    while isinstance(chunk, list):
        (chunk,) = chunk
    return chunk
