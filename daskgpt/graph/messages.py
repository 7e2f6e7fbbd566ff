"""Messages between ranks: the ranks of a batch, and the tasks that send, receive and add data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from types import EllipsisType
from typing import Any, Protocol

import numpy as np

from daskgpt.config.groups import Groups, groups_of_rank
from daskgpt.graph.calls import CUT, MESSAGE, READER, Band, ChunkSum, Exchange, Origin, several
from daskgpt.graph.nodes import Key
from daskgpt.kernels.totals import subtrees, tree_sum

Channel = tuple[str, int]  # kind of the data, and the bucket


class Link(Protocol):
    """A connection that carries messages between ranks, in order for each pair."""

    def send(self, rank: int, channel: Channel, value: Any) -> None:
        """Begin to send; the arrays must stay unchanged until the other rank has used them and replied."""
        ...

    def receive(self, rank: int, channel: Channel) -> Any:
        """Wait for the next value of a channel and return it."""
        ...


@dataclass(frozen=True)
class Peers:
    """This one of several ranks, and its link to the others."""

    number: int
    count: int
    link: Link = field(repr=False, compare=False)


@dataclass(frozen=True)
class Rank:
    """One of the ranks that share a batch.

    number      of this one
    count       how many there are
    groups      of the batch
    sequences   of the batch
    tokens      of a sequence
    link        to the others
    """

    number: int
    count: int
    groups: int
    sequences: int
    tokens: int
    link: Link = field(repr=False, compare=False)

    def groups_of(self, rank: int) -> Groups:
        """Return the groups of a rank."""
        return groups_of_rank(rank, self.count, self.groups)

    def sequences_of(self, rank: int) -> tuple[int, int]:
        """Return the first sequence of a rank in the batch, and the one after its last."""
        own, size = self.groups_of(rank), self.sequences // self.groups
        return own.first * size, (own.first + own.count) * size

    @property
    def others(self) -> list[int]:
        """The other ranks, beginning after this one, so that ranks do not all send to the same one at a time."""
        return [(self.number + step) % self.count for step in range(1, self.count)]

    def subtrees_of(self, rank: int) -> list[tuple[int, int]]:
        """Return the subtrees that the groups of a rank form, as ranges of groups."""
        own = self.groups_of(rank)
        return subtrees(own.first, own.first + own.count)

    def add(self, place: int, own: Any, *messages: Sequence[Any], rows: slice | EllipsisType = ...) -> np.ndarray:
        """Return the sum of the batch, or some rows of it, from the totals that each rank has of its subtrees.

        place      in the message of each other rank
        own        totals of this rank
        messages   of `others`
        """
        found = {self.number: own} | {other: message[place] for other, message in zip(self.others, messages)}
        return tree_sum(
            (*ends, total[rows])
            for rank in range(self.count)
            for ends, total in zip(self.subtrees_of(rank), several(found[rank]), strict=True)
        )


@dataclass(frozen=True)
class Shard:
    """Rows of a tensor that are summed and updated together.

    update     the task that updates the tensor in the graph before
    parameter  name of the tensor
    number     among the shards of the tensor
    bands      its rows, in bands that are summed at a time
    owner      the rank that updates it
    columns    numbers in a row
    rounded    whether other ranks only multiply by it, in bfloat16
    """

    update: Key
    parameter: str
    number: int
    bands: tuple[Band, ...]
    owner: int
    columns: int
    rounded: bool = False

    @property
    def rows(self) -> slice:
        """Of the tensor."""
        return slice(self.bands[0][0], self.bands[-1][1])

    @property
    def bytes(self) -> int:
        """Bytes of its totals, in float32."""
        return 4 * self.columns * (self.bands[-1][1] - self.bands[0][0])


@dataclass(frozen=True)
class RowAccess:
    """Access to rows of a weight that are sent: they are read from a weight as it is held, and written into another.

    rounding   kernels that read only the rounded values of a weight
    """

    read: Callable[[Any, slice, bool], Any]
    write: Callable[[Any, slice, Any], None]
    rounding: Sequence[Callable[..., Any]] | frozenset[Callable[..., Any]] = ()

    def read_all(self, shards: Sequence[Shard], *values: Any) -> list[Any]:
        """Return the rows of shards from the weights that they belong to, which come first among the values."""
        return [self.read(weight, shard.rows, shard.rounded) for shard, weight in zip(shards, values)]

    def store(self, shard: Shard, place: int, message: Sequence[Any], weight: Any) -> None:
        """Write rows from their owner's message into the own weight."""
        self.write(weight, shard.rows, message[place])


def send(
    link: Link, rank: int, channel: Channel, origin: Origin | None, pick: Callable[..., Any] | None = None
) -> Exchange:
    """Return a call that sends the results of other tasks to a rank.

    pick   makes the message from the results; None if they are sent unchanged, in a list
    """

    def run(*values: Any) -> None:
        link.send(rank, channel, pick(*values) if pick else list(values))

    return Exchange(run, origin)


def receive(link: Link, rank: int, channel: Channel, origin: Origin | None) -> Exchange:
    """Return a call that waits in its thread for a message; tasks that must run before are its arguments."""
    return Exchange(lambda *before: link.receive(rank, channel), origin, MESSAGE, READER)


def item(place: Sequence[int], origin: Origin) -> Exchange:
    """Return a call that takes the item at a place of a message's nested sequences."""
    return Exchange(lambda values: reduce(getitem, place, values), origin, MESSAGE, READER)


def inputs_in_one(call: ChunkSum, *inputs: Any) -> list[np.ndarray]:
    """Return the inputs of a sum over the own chunks, each as one array, from Dask's nested lists."""

    def in_one(chunks: Any, cut: Sequence[int]) -> np.ndarray:
        parts = [in_one(each, cut[1:]) for each in chunks] if cut else [chunks]
        return np.concatenate(parts, cut[0]) if len(parts) > 1 else parts[0]

    cut_axes = [[number for number, axis in enumerate(axes) if axis in CUT] for axes in call.inputs]
    return [in_one(call.chunk_at(given, axes, {}), cut) for given, axes, cut in zip(inputs, call.inputs, cut_axes)]
