"""Spread a step over workers: each works on its own sequences, and what passes between them is as little as can be.

The sequences of a batch are dealt to *parts*, consecutive ones to each. A sum over the batch, which one part reads,
comes about in the way that sends the fewest bytes:

    gathered   its inputs are sent to where it is read: with few tokens they are smaller than the total (or it is a
               single number, the loss)
    joined     where every part has whole groups, as many as the others and a power of two, it makes the total of
               these, and the totals meet in the tree of `sum_order`, two at a time: who reads the sum gets as many
               totals as the tree has levels, and the others add theirs among themselves
    chained    else a part goes on from the total of the part before

All three add in the same order, so no bit depends on the way, or on how many parts there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from daskgpt.config.groups import Groups
from daskgpt.graph.calls import ChunkSum, KernelCall, Result, is_pick, origin_of
from daskgpt.graph.inplace import RowSum, Totals
from daskgpt.graph.nodes import (
    Graph,
    GraphNode,
    Key,
    combined,
    flat,
    is_leaf,
    nested,
    only,
    part_of_list,
    reference,
    task,
)
from daskgpt.graph.sum_order import SumOrder


@dataclass(frozen=True)
class Total:
    """A sum over the batch, for who decides how it comes about.

    unit   sums of one unit come about in the same way: some read the same chunks
    part   that reads it
    """

    unit: Hashable
    part: int


@dataclass(frozen=True)
class Share:
    """What a task does for the sums of a unit, and which part does it."""

    unit: Hashable
    part: int


class PartTotal(ChunkSum):
    """The total of one part's groups: a sum of its own."""

    KEPT_HERE: tuple[str, ...] = (*ChunkSum.KEPT_HERE, "share")

    def __init__(self, call: ChunkSum, order: SumOrder, share: Share) -> None:
        self.__dict__.update(call.__dict__)
        self.order, self.share = order, share


class Join(KernelCall):
    """Adds the total of the part that reads a sum and those of others: see `met`."""

    def __init__(self, call: ChunkSum, totals: int) -> None:
        known = {"outputs": call.outputs, "chunks": call.chunks, "origin": call.origin}
        super().__init__(met, [call.axes] * totals, call.axes, {}, **known)


class PartJoin(Join):
    """Adds a part's total and those of others on their way to another part."""

    KEPT_HERE: tuple[str, ...] = (*Join.KEPT_HERE, "share")

    def __init__(self, call: ChunkSum, totals: int, share: Share) -> None:
        super().__init__(call, totals)
        self.share = share


class PartSum(RowSum):
    """A sum over one part's sequences, which goes on from the total of the part before without writing to it."""

    def __init__(self, call: ChunkSum, counts: Sequence[int], first_piece: int, started: bool, share: Share) -> None:
        super().__init__(call, call.bands(), counts, first_piece, started)
        self.share = share

    def run(self, pieces: Sequence[Any], start: Totals = ()) -> Totals:
        totals = start if isinstance(start, tuple) else (start,)
        return super().run(pieces, tuple(total.copy() for total in totals))


class Sent:
    """A chunk that is read elsewhere, in a task of its own: all results of a task would go with it."""

    def __init__(self, axes: str, origin: Any, share: Share) -> None:
        self.axes, self.origin, self.share = axes, origin, share

    def __reduce__(self) -> tuple[Any, ...]:
        return Sent, (self.axes, None, None)

    def __call__(self, chunk: Any) -> Any:
        return chunk


def part_of(chunk: int, chunks: int, parts: int) -> int:
    """The part that works on a chunk of sequences, of so many."""
    return chunk * parts // chunks


def spread(graph: Graph, parts: int, total_of: Callable[[Key], Total]) -> Graph:
    """The graph with every sum over the batch made by parts. It keeps its key, so that who reads it stays as it is.

    total_of   of a sum's key
    """
    units: dict[Hashable, list[_Sum]] = defaultdict(list)
    for key, node in graph.items():
        if isinstance(getattr(node, "func", None), ChunkSum) and len(node.func.order.sequences) > 1:
            total = total_of(key)
            units[total.unit].append(_Sum(graph, key, parts, total))
    new = dict(graph)
    for sums in units.values():
        elsewhere = {chunk: size for each in sums for chunk, size in each.elsewhere()}
        if sum(elsewhere.values()) <= sum(each.passing() for each in sums) or not all(each.call.shape for each in sums):
            for each in sums:
                new |= each.gathered()
        else:
            for each in sums:
                new |= each.joined() if each.has_whole_groups else each.chained()
    return new


class _Sum:
    """A sum over the batch, and the ways in which it can come about."""

    def __init__(self, graph: Graph, key: Key, parts: int, total: Total) -> None:
        self.graph, self.key, self.node, self.parts, self.total = graph, key, graph[key], parts, total
        self.call: ChunkSum = self.node.func
        self.chunks = len(self.call.order.sequences)

    def elsewhere(self) -> Iterator[tuple[Key, int]]:
        """The chunks that it reads from other parts than its own, with their bytes."""
        for argument, axes in zip(self.node.args, self.call.inputs):
            if axes.startswith("b"):
                for b, own in enumerate(nested(argument)):
                    if part_of(b, self.chunks, self.parts) != self.total.part:
                        yield from ((key, _bytes_of(self.graph, key)) for key in flat(own))

    def passing(self) -> int:
        """Bytes that pass between parts where each of them sums."""
        size = prod(self.call.shape) * self.call.dtype.itemsize
        back = not self.has_whole_groups and self.total.part != self.parts - 1
        return size * (self.parts - 1 + back)

    @property
    def has_whole_groups(self) -> bool:
        """Whether the sequences of each part are the same number of whole groups, a subtree of the tree."""
        order = self.call.order
        groups = order.groups.count
        if groups % self.parts or groups & (groups - 1) or self.parts & (self.parts - 1):
            return False
        return len({sum(order.sequences[first:last]) for first, last in self._parts()}) == 1

    def gathered(self) -> Graph:
        """What it reads is sent there."""
        new: Graph = {}
        copies: dict[Key, Key] = {}
        for chunk, _size in self.elsewhere():
            if not is_leaf(self.graph[chunk]):
                axes = getattr(self.graph[chunk].func, "axes", "")
                share = Share(self.total.unit, part_of(chunk[1], self.chunks, self.parts))
                copies[chunk] = (f"{chunk[0]}.to.{self.total.part}", *chunk[1:])
                new[copies[chunk]] = task(copies[chunk], Sent(axes, origin_of(self.graph[chunk]), share), [chunk])
        return {**new, self.key: self.node.substitute(copies)}

    def joined(self) -> Graph:
        """Each part makes a total, and these meet."""
        new: Graph = {}
        order = self.call.order
        *inputs, start = [*self.node.args, None] if len(self.node.args) == len(self.call.inputs) else self.node.args
        for part, (first, last) in enumerate(self._parts()):
            own = SumOrder(
                tuple(tuple((b - first, t) for b, t in piece) for piece in order.pieces if first <= piece[0][0] < last),
                order.together,
                order.sequences[first:last],
                Groups(order.groups.count // self.parts),
            )
            arguments = [
                part_of_list(argument, first, last) if axes.startswith("b") else argument
                for argument, axes in zip(inputs, self.call.inputs)
            ]
            call = PartTotal(self.call, own, Share(self.total.unit, part))
            key = (f"{self.key[0]}.part", part)
            new[key] = combined(key, call, arguments + ([start] if start is not None and part == 0 else []))
        return new | self._meeting(list(new))

    def _meeting(self, totals: Sequence[Key]) -> Graph:
        """Where the totals of all parts meet, two subtrees at a time: at the part that reads the sum, and in subtrees
        that it is not in at the part that has the same place there.
        """
        added = {part: [total] for part, total in enumerate(totals)}
        meeting = {part: (f"{self.key[0]}.met", part) for part in added} | {self.total.part: self.key}
        size = 1
        while size < self.parts:
            size *= 2
            for first in range(0, self.parts, size):
                here = first + self.total.part % size
                other = here ^ size // 2
                added[here].append(meeting[other] if len(added[other]) > 1 else totals[other])
        return {meeting[part]: self._join(meeting[part], part, own) for part, own in added.items() if len(own) > 1}

    def _join(self, key: Key, part: int, totals: Sequence[Key]) -> GraphNode:
        """A part's task that adds totals."""
        if part == self.total.part:
            return task(key, Join(self.call, len(totals)), totals)
        return task(key, PartJoin(self.call, len(totals), Share(self.total.unit, part)), totals)

    def chained(self) -> Graph:
        """A part after the other: each goes on from the total of the one before."""
        new: Graph = {}
        call = self.call
        pieces, *before = call.arrange([nested(argument) for argument in self.node.args])
        start = [reference(total) for total in before]
        shares = _shares(call, self.parts)
        for number, (part, first, last) in enumerate(shares, 1):
            own = pieces[first:last]
            counts = [len(piece) for piece in own]
            rows = [reference(item) for piece in own for chunk in piece for item in chunk]
            key = self.key if number == len(shares) else (f"{self.key[0]}.part", part)
            share = Share(self.total.unit, part)
            new[key] = combined(key, PartSum(call, counts, first, bool(before), share), rows + start)
            start = [reference(key)]
        return new

    def _parts(self) -> list[tuple[int, int]]:
        """From which chunk of sequences to which the parts go."""
        owners = [part_of(b, self.chunks, self.parts) for b in range(self.chunks)]
        return [(owners.index(part), owners.index(part) + owners.count(part)) for part in range(self.parts)]


def met(total: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """The sum of a total and of others, each of as many groups as are in the sum by then: a path up the tree, in which
    it does not matter from which side one comes.
    """
    for other in others:
        total = np.add(total, other)
    return total


def _shares(call: ChunkSum, parts: int) -> list[tuple[int, int, int]]:
    """The pieces of a sum by part: the part, and from which piece to which."""
    chunks = len(call.order.sequences)
    owners = [part_of(piece[0][0], chunks, parts) for piece in call.order.pieces]
    shares = []
    for part, numbers in groupby(range(len(owners)), key=owners.__getitem__):
        first, *rest = numbers
        shares.append((part, first, first + len(rest) + 1))
    return shares


def _bytes_of(graph: Graph, key: Key) -> int:
    """Of a chunk. Data of a step are sent with its graph, and count as nothing."""
    node = graph[key]
    if is_leaf(node):
        return 0
    source, number = (only(node), node.func.number) if is_pick(node) else (key, 0)
    result: Result = graph[source].func.results(source)[number]
    return prod(result.shape) * result.dtype.itemsize
