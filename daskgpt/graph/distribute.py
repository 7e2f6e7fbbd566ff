"""Cut a recorded step into the program of one rank: its own sequences, and what it sends to and gets from the others.

A rank records a step of its own sequences, which are whole groups of the batch (`graph.sum_order`). The pass makes of

    sum over chunks -> gradient -> update

for some rows of a tensor, a *shard*, whose owner is one of the ranks:

    sum over own chunks -> send to the owner                                   where another rank owns the shard
    sum over own chunks -> add the totals of all ranks -> update in place      where this one does
    new rows -> send to all others; rows of others -> into the own weight      afterwards

So moments are needed where the owner is and nowhere else, weights everywhere. A sum that goes on from another one (the
tied table's) is made by the owner from the chunks of all ranks, which are smaller than a table.

What is sent lies in *buckets*, in the order in which the backward pass makes it: one message for each bucket and pair
of ranks. A task that receives waits in its thread. It runs when this rank has sent the bucket after it, which is why
ranks never wait for each other in a circle: the rank that is behind all others waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from daskgpt.config.groups import Groups, groups_of_rank
from daskgpt.graph.calls import ChunkSum, KernelCall
from daskgpt.graph.grain import in_order
from daskgpt.graph.inplace import (
    Band,
    InPlace,
    InPlaceRule,
    OfRows,
    RowSum,
    Totals,
    dependents_of,
    row_sum,
    shares,
    start_of,
)
from daskgpt.graph.nodes import Graph, Key, as_it_is, combined, listed, only, reference, task
from daskgpt.graph.sum_order import SumOrder
from daskgpt.kernels.totals import subtrees, tree_sum

BUCKET_BYTES = 1 << 23  # of totals that are sent together
SHARD_COST = 1 << 15  # of an update, whatever its size: as much as of so many numbers
AHEAD = 1  # buckets that are sent before the totals of one are waited for


Channel = tuple[str, int]  # what is sent on it, and the bucket


class Link(Protocol):
    """What carries messages between ranks: in order, from each rank to each other one."""

    def send(self, rank: int, channel: Channel, value: Any) -> None:
        """Begin to send; the arrays in it must stay as they are until the other rank has answered to them."""
        ...

    def receive(self, rank: int, channel: Channel) -> Any:
        """The next value of a channel, waited for."""
        ...


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
        """The groups of a rank."""
        return groups_of_rank(rank, self.count, self.groups)

    def sequences_of(self, rank: int) -> tuple[int, int]:
        """From which sequence of the batch to which a rank works."""
        own, size = self.groups_of(rank), self.sequences // self.groups
        return own.first * size, (own.first + own.count) * size

    @property
    def others(self) -> list[int]:
        """The other ranks, those first that follow this one: so not everybody sends to the same one at a time."""
        return [(self.number + step) % self.count for step in range(1, self.count)]

    def tree_sum(self, totals: Mapping[int, Sequence[np.ndarray]]) -> np.ndarray:
        """The sum of the batch from what each rank has: the totals of the subtrees that its groups are."""
        places = [
            (*ends, total)
            for rank in range(self.count)
            for ends, total in zip(self.subtrees_of(rank), totals[rank], strict=True)
        ]
        return tree_sum(places)

    def subtrees_of(self, rank: int) -> list[tuple[int, int]]:
        """What the groups of a rank are in the tree: from which group to which."""
        own = self.groups_of(rank)
        return subtrees(own.first, own.first + own.count)


@dataclass(frozen=True)
class Shard:
    """Rows of a tensor that are summed and updated together.

    update   the task that updates the tensor in the graph before
    number   among the shards of the tensor
    bands    its rows, so many of them as are summed at a time
    owner    the rank that updates it
    rounded  whether other ranks only multiply by it, in bfloat16
    """

    update: Key
    number: int
    bands: tuple[Band, ...]
    owner: int
    rounded: bool = False

    @property
    def rows(self) -> slice:
        """Of the tensor."""
        return slice(self.bands[0][0], self.bands[-1][1])


class PartialTotals:
    """A sum over the own chunks of a rank, with the totals of its subtrees for a result."""

    axes = ""

    def __init__(self, call: ChunkSum) -> None:
        self.call, self.origin = call, call.origin

    def arrange(self, chunks: Sequence[Any]) -> list[Any]:
        return self.call.arrange(chunks)

    def run(self, pieces: Sequence[Any]) -> list[np.ndarray]:
        order = self.call.order
        totals = [np.empty(self.call.shape, self.call.dtype) for _ in range(order.totals_before(len(order.pieces)))]
        chains = self.call.in_order(pieces)
        for first, last in self.call.bands():
            rows = [total[first:last] if total.ndim > 1 else total for total in totals]
            self.call.add(chains, rows, first, last, started=False)
        return totals


class Send:
    """Sends values to a rank."""

    axes = ""

    def __init__(self, link: Link, rank: int, channel: Channel, origin: Any, pick: Callable[..., Any] | None = None):
        """pick   makes what is sent of the values; None where they are sent as they are"""
        self.link, self.rank, self.channel, self.origin, self.pick = link, rank, channel, origin, pick

    def __call__(self, *values: Any) -> None:
        self.link.send(self.rank, self.channel, self.pick(*values) if self.pick else list(values))


class Receive:
    """Waits for what a rank sends; what it must wait for before comes as arguments."""

    axes = ""

    def __init__(self, link: Link, rank: int, channel: Channel, origin: Any) -> None:
        self.link, self.rank, self.channel, self.origin = link, rank, channel, origin

    def __call__(self, *_: Any) -> Any:
        return self.link.receive(self.rank, self.channel)


class Posted:
    """Comes after all that this rank sends of the buckets up to one.

    number   of that one
    """

    axes = ""

    def __init__(self, origin: Any, number: int = 0) -> None:
        self.origin, self.number = origin, number

    def __call__(self, *_: Any) -> None:
        pass


class TreeSum:
    """Adds the totals of all ranks: the own ones, and those of some place in the message of each other rank."""

    axes = ""

    def __init__(self, rank: Rank, place: int, origin: Any) -> None:
        self.rank, self.place, self.origin = rank, place, origin

    def __call__(self, own: Any, *messages: Sequence[Any]) -> np.ndarray:
        return self.rank.tree_sum(self.totals(own, messages))

    def totals(self, own: Any, messages: Sequence[Sequence[Any]]) -> dict[int, Sequence[np.ndarray]]:
        """The totals of each rank."""
        found = {other: message[self.place] for other, message in zip(self.rank.others, messages)}
        return {rank: _several(totals) for rank, totals in {self.rank.number: own, **found}.items()}


class ShardUpdate:
    """Adds the totals of all ranks and updates these rows in place, a band at a time while it is in the cache.

    total   adds them; None where the whole gradient's rows are given
    """

    axes = ""

    def __init__(self, shard: Shard, rule: InPlaceRule, call: KernelCall, total: TreeSum | None) -> None:
        self.shard, self.rule, self.options, self.total = shard, rule, call.options, total
        self.origin = call.origin

    def __call__(self, own: Any, *given: Any) -> None:
        others = self.total.rank.count - 1 if self.total else 0
        messages, (*tensors, hyper) = given[:others], given[others:]
        totals = self.total.totals(own, messages) if self.total else {0: [own]}
        base = self.shard.rows.start
        for bands in self.rule.at_once(self.shard.bands):
            first, last = bands[0][0], bands[-1][1]
            rows = {rank: [each[first - base : last - base] for each in some] for rank, some in totals.items()}
            gradient = self.total.rank.tree_sum(rows) if self.total else rows[0][0]
            weight, *moments = (tensor[first:last] for tensor in tensors)
            self.rule.kernel(weight, gradient, *moments, hyper, **self.options)


class Store:
    """Writes rows that their owner has updated into the own weight."""

    axes = ""

    def __init__(self, shard: Shard, place: int, write: Callable[[Any, slice, Any], None], origin: Any) -> None:
        self.shard, self.place, self.write, self.origin = shard, place, write, origin

    def __call__(self, message: Sequence[Any], weight: Any) -> None:
        self.write(weight, self.shard.rows, message[self.place])


class Joined:
    """The inputs of a sum over the own chunks, each as one array."""

    axes = ""

    def __init__(self, call: ChunkSum, origin: Any, parameter: str) -> None:
        """parameter   whose gradient the sum is"""
        self.call, self.origin, self.parameter = call, origin, parameter

    def __call__(self, *inputs: Any) -> list[np.ndarray]:
        chunks = [chunk for piece in self.call.order.pieces for chunk in piece]
        grid = {"b": 1 + max(b for b, _ in chunks), "t": 1 + max(t for _, t in chunks)}
        return [self._joined(given, axes, grid) for given, axes in zip(inputs, self.call.inputs)]

    def _joined(self, given: Any, axes: str, grid: Mapping[str, int]) -> np.ndarray:
        b, t = (grid[axis] if axis in axes else 1 for axis in "bt")
        rows = [[self.call.chunk_at(given, axes, {"b": i, "t": j}) for j in range(t)] for i in range(b)]
        joined = [np.concatenate(own, axes.index("t")) if t > 1 else own[0] for own in rows]
        return np.concatenate(joined, axes.index("b")) if b > 1 else joined[0]


class OfAllRanks(ChunkSum):
    """A sum over the own chunks as one over those of all ranks: the sequences of each are a chunk."""

    def __init__(self, call: ChunkSum, order: SumOrder, origin: Any) -> None:
        self.__dict__.update(call.__dict__)
        self.order, self.origin = order, origin


class Item:
    """What lies at some place in nested lists."""

    axes = ""

    def __init__(self, place: Sequence[int], origin: Any) -> None:
        self.place, self.origin = tuple(place), origin

    def __call__(self, values: Any) -> Any:
        for number in self.place:
            values = values[number]
        return values


class RowsOfTotals:
    """Some rows of totals that are there as a whole."""

    axes = ""

    def __init__(self, rows: slice, origin: Any) -> None:
        self.rows, self.origin = rows, origin

    def __call__(self, totals: Totals) -> list[np.ndarray]:
        return [total[self.rows] for total in _several(totals)]


class ReadRows:
    """Reads the rows of shards from the weights that they belong to; updates that it must wait for come after these."""

    def __init__(self, shards: Sequence[Shard], read: Callable[[Any, slice, bool], Any]) -> None:
        self.shards, self.read = tuple(shards), read

    def __call__(self, *values: Any) -> list[Any]:
        return [self.read(weight, shard.rows, shard.rounded) for shard, weight in zip(self.shards, values)]


class _Totals(NamedTuple):
    """Where the gradient of a shard comes from: tasks whose results `added` adds, or the task that returns it."""

    added: TreeSum | None
    keys: list[Key]


@dataclass(frozen=True)
class Rows:
    """How rows of a weight are sent: read from a weight as it is held, and written into another one.

    rounding   kernels that read nothing of a weight but what is rounded
    """

    read: Callable[[Any, slice, bool], Any]
    write: Callable[[Any, slice, Any], None]
    rounding: Collection[Callable[..., Any]] = ()


def distribute(
    graph: Graph,
    updates: Sequence[Key],
    rule_of: Callable[[Any], InPlaceRule],
    rank: Rank,
    loss: Key,
    rows: Rows,
    origin_of_message: Callable[[str, str, int], Any],
    token: str,
    summed: int,
    by_rows: Sequence[Callable[..., Any]] = (),
) -> InPlace:
    """The program of a rank, whose updates are in place.

    graph    of its own sequences, recorded with its groups
    updates  the tasks (weight, gradient, *moments, hyper) -> tuple of the new tensors, in the order of the model
    rule_of  origin of an update -> how it is done in place
    loss     the sum over the batch that every rank is to know
    rows     how rows of weights are sent
    origin_of_message   kind, pass and bucket -> what a task that sends or receives was made for
    token    tells the keys of this graph's own tasks from others'
    summed   how many rows each gradient is summed over here
    by_rows  kernels of which a gradient's other readers may call one on some rows at a time
    """
    return _Pass(graph, updates, rule_of, rank, loss, rows, origin_of_message, token, summed, by_rows).made()


class _Pass:
    """One call of `distribute`."""

    def __init__(
        self,
        graph: Graph,
        updates: Sequence[Key],
        rule_of: Callable[[Any], InPlaceRule],
        rank: Rank,
        loss: Key,
        rows: Rows,
        origin_of_message: Callable[[str, str, int], Any],
        token: str,
        summed: int,
        by_rows: Sequence[Callable[..., Any]],
    ) -> None:
        self.graph, self.rule_of, self.rank, self.loss, self.rows = graph, rule_of, rank, loss, rows
        self.origin_of_message, self.token, self.summed, self.by_rows = origin_of_message, token, summed, by_rows
        self.updates = list(reversed(updates))  # the backward pass comes to the first tensors last
        self.last = {update: only(graph[update].args[1]) for update in updates}  # the sum that is the gradient
        self.dependents = dependents_of(graph)
        self.new = dict(graph)
        self.shards = self._shards()
        self.posted: list[Key] = []  # tasks after which all totals are on their way

    def made(self) -> InPlace:
        first = {update: _first_sum(self.graph, last) for update, last in self.last.items()}
        # What is summed for another sum to go on from is there long before the rest.
        early = [update for update in self.updates if first[update] != self.last[update]]
        order = early + [update for update in self.updates if update not in early]
        self.totals: dict[tuple[Key, int], _Totals] = {}
        self._send_totals([(first[shard.update], shard) for update in order for shard in self.shards[update]])
        for update in early:
            self._sum_gathered(update, first[update])
        self._share_loss()
        self._guard()
        return self._update()

    def _shards(self) -> dict[Key, list[Shard]]:
        """The shards of each update: in each bucket the largest goes to the rank that owns least so far."""
        held, found = [0] * self.rank.count, dict[Key, list[Shard]]()
        sizes: dict[tuple[Key, int], tuple[int, tuple[Band, ...]]] = {}
        for update in self.updates:
            call = self.graph[self.last[update]].func
            shape = call.call.shape if isinstance(call, RowSum) else call.shape
            for number, bands in enumerate(shares(call, self.rule_of(self.graph[update].func.origin))):
                sizes[update, number] = (bands[-1][1] - bands[0][0]) * prod(shape[1:]), tuple(bands)
        for bucket in _buckets(list(sizes), lambda place: 4 * sizes[place][0]):
            for place in sorted(bucket, key=lambda place: -sizes[place][0]):
                owner = held.index(min(held))
                held[owner] += sizes[place][0] + SHARD_COST
                shard = Shard(*place, sizes[place][1], owner, self._is_rounded(place[0]))
                found.setdefault(place[0], []).append(shard)
        return {update: sorted(own, key=lambda shard: shard.number) for update, own in found.items()}

    def _is_rounded(self, update: Key) -> bool:
        """Whether who reads a weight, but for its update, reads only what is rounded."""
        readers = self.dependents[only(self.graph[update].args[0])] - {update}
        kernels = [getattr(self.graph[key].func, "kernel", None) for key in readers]
        return all(kernel in self.rows.rounding for kernel in kernels)

    def _owned(self, update: Key) -> list[Shard]:
        return [shard for shard in self.shards[update] if shard.owner == self.rank.number]

    def _send_totals(self, sums: Sequence[tuple[Key, Shard]]) -> None:
        """Sum what the own chunks add to each shard, and exchange it with its owner, bucket by bucket."""
        buckets = _buckets(list(sums), lambda each: 4 * self._elements(each[1]))
        partial = {each: self._partial(*each) for bucket in buckets for each in bucket}
        posted: list[Key] = []  # of each bucket a task that has waited for it, and for those before
        loss, node = (f"{self.loss[0]}.own",), self.graph[self.loss]
        self.new[loss] = combined(loss, PartialTotals(node.func), node.args)
        for number, bucket in enumerate(buckets):
            done = posted[-1:] or [self._send(other, "loss", 0, [loss], "forward") for other in self.rank.others]
            done += [partial[each] for each in bucket if each[1].owner == self.rank.number]
            for other in self.rank.others:
                if theirs := [partial[each] for each in bucket if each[1].owner == other]:
                    done.append(self._send(other, "totals", number, theirs, "backward"))
            posted.append((f"posted-{number}_-{self.token}",))
            self.new[posted[-1]] = task(posted[-1], Posted(self._message("posted", "backward", number), number), done)
        for number, bucket in enumerate(buckets):
            own = [each for each in bucket if each[1].owner == self.rank.number]
            if own:
                after = [posted[min(number + AHEAD, len(posted) - 1)]]
                messages = [self._receive(other, "totals", number, after) for other in self.rank.others]
            for place, (total, shard) in enumerate(own):
                added = TreeSum(self.rank, place, self._message("totals", "update", number))
                self.totals[total, shard.number] = _Totals(added, [partial[total, shard], *messages])
        self.posted = posted[-1:]
        for key in {key for key, _ in sums if not isinstance(self.graph[key].func, RowSum)}:
            del self.new[key]

    def _partial(self, key: Key, shard: Shard) -> Key:
        """The task that sums some rows over the own chunks."""
        if isinstance(self.graph[key].func, RowSum):  # by micro-batches, of which it is the last
            own = (f"{key[0]}.of", shard.number)
            self.new[own] = task(own, RowsOfTotals(shard.rows, self.graph[key].func.origin), [key])
            return own
        return row_sum(self.graph, self.new, key, shard.number, shard.bands, self.summed)

    def _sum_gathered(self, update: Key, first: Key) -> None:
        """Sum what goes on from another sum where that is, from the chunks of all ranks."""
        last = self.last[update]
        chain = [last]
        while (before := start_of(self.graph, chain[0])) != first:
            assert before is not None
            chain.insert(0, before)
        for number, (before, key) in enumerate(zip([first, *chain], chain)):
            pieces = self._gathered(update, key, len(self.updates) * number + self.updates.index(update))
            for shard in self._owned(update):
                start = self._whole(before, shard)
                whole = self._of_all(self.graph[key].func)
                own = (f"{key[0]}.rows", shard.number)
                program = RowSum(whole, shard.bands, [1] * len(whole.order.pieces), 0, started=True)
                self.new[own] = combined(own, program, [*map(reference, pieces), reference(start)])
                self.totals[key, shard.number] = _Totals(None, [own])
            del self.new[key]

    def _gathered(self, update: Key, key: Key, place: int) -> list[Key]:
        """The inputs of a sum of all ranks, piece by piece, where a shard of it is owned; the own ones are sent.

        place   of the sum among those that are gathered, the same on all ranks
        """
        call: ChunkSum = self.graph[key].func
        count = len(call.inputs)
        joined = (f"{key[0]}.own", 0)
        arguments = self.graph[key].args[:count]
        whose = self.graph[update].func.origin.parameter
        self.new[joined] = combined(joined, Joined(call, self._message("gather", "backward", 0), whose), arguments)
        owners = {shard.owner for shard in self.shards[update]}
        sent = [self._send(q, "gather", place, [joined], "backward") for q in self.rank.others if q in owners]
        self.posted += [*sent, joined]
        if self.rank.number not in owners:
            return []
        after = [*self.posted]
        there = {q: self._receive(q, "gather", place, after) for q in self.rank.others}
        pieces = []
        for rank in range(self.rank.count):
            source, outer = (there[rank], (0,)) if rank in there else (joined, ())
            for number in range(count):
                item = (f"{key[0]}.item", rank, number)
                self.new[item] = task(item, Item((*outer, number), self._message("gather", "update", rank)), [source])
                pieces.append(item)
        return pieces

    def _of_all(self, call: ChunkSum) -> ChunkSum:
        """A sum over the own chunks as one over those of all ranks, each rank's sequences being one chunk."""
        sequences = [last - first for first, last in map(self.rank.sequences_of, range(self.rank.count))]
        # Its start goes on in each sequence, in whatever pieces the tokens come.
        whole = SumOrder.of(sequences, (self.rank.tokens,), 1, Groups(self.rank.groups))
        return OfAllRanks(call, whole, self._message("gather", "update", 0))

    def _whole(self, key: Key, shard: Shard) -> Key:
        """The task that returns rows of a total of all ranks."""
        totals = self.totals[key, shard.number]
        if totals.added is None:
            return totals.keys[0]
        own = (f"{key[0]}.total", shard.number)
        if own not in self.new:
            self.new[own] = task(own, totals.added, totals.keys)
        return own

    def _share_loss(self) -> None:
        """Let every rank know the loss of the batch."""
        own = (f"{self.loss[0]}.own",)
        messages = [self._receive(other, "loss", 0, self.posted) for other in self.rank.others]
        self.new[self.loss] = task(
            self.loss, TreeSum(self.rank, 0, self._message("loss", "update", 0)), [own, *messages]
        )

    def _guard(self) -> None:
        """Where others than the update read a gradient, by rows: each owner does for its shards, and all are told."""
        readers: dict[Key, list[tuple[Key, int]]] = {}  # -> what it is called with, and of which shards
        found: dict[tuple[Key, int], Key] = {}
        for update in self.updates:
            for reader in self._readers_by_rows(update):
                readers[reader] = [(reader, shard.number) for shard in self.shards[update]]
                for shard in self._owned(update):
                    own = found[reader, shard.number] = (f"{reader[0]}.rows", shard.number)
                    rows = self._whole(self.last[update], shard)
                    self.new[own] = combined(own, OfRows(self.graph[reader].func), [reference(rows)])
                    self.totals[self.last[update], shard.number] = _Totals(None, [rows])
                del self.new[reader]
        if not readers:
            return
        owners = {
            (reader, shard.number): shard.owner
            for update in self.updates
            for shard in self.shards[update]
            for reader in self._readers_by_rows(update)
        }
        of_rank = [
            [place for own in readers.values() for place in own if owners[place] == rank]
            for rank in range(self.rank.count)
        ]
        mine = [found[place] for place in of_rank[self.rank.number]]
        sent = [self._send(other, "squares", 0, mine, "update") for other in self.rank.others]
        for other in self.rank.others:
            message = self._receive(other, "squares", 0, [*sent, *mine, *self.posted])
            for number, place in enumerate(of_rank[other]):
                found[place] = (f"{place[0][0]}.item", place[1])
                origin = self._message("squares", "update", other)
                self.new[found[place]] = task(found[place], Item((number,), origin), [message])
        self.posted += [*sent, *mine]
        for reader in {other for key in readers for other in self.dependents[key]}:
            arguments = [
                listed(reference(found[place]) for place in readers[key]) if (key := only(a)) in readers else a
                for a in self.graph[reader].args
            ]
            self.new[reader] = combined(reader, self.graph[reader].func, arguments)

    def _readers_by_rows(self, update: Key) -> list[Key]:
        """Who reads a gradient besides its update; a sum of micro-batches stays whole, and may have other readers."""
        readers = self.dependents[self.last[update]] - {update}
        by_rows = [key for key in readers if getattr(self.graph[key].func, "kernel", None) in self.by_rows]
        assert len(by_rows) == len(readers) or isinstance(self.graph[self.last[update]].func, RowSum)
        return sorted(by_rows)

    def _update(self) -> InPlace:
        """Update what this rank owns, send it to the others, and write what they have updated into the weights."""
        after: dict[Key, list[Key]] = {}
        done, sent = dict[tuple[Key, int], Key](), list[Key]()
        places = [(update, shard.number) for update in self.updates for shard in self.shards[update]]
        buckets = _buckets(places, lambda place: 4 * self._elements(self.shards[place[0]][place[1]]))
        for update in self.updates:
            weight, _, *moments, hyper = self.graph[update].args
            call = self.graph[update].func
            for shard in self._owned(update):
                key = done[update, shard.number] = (update[0], shard.number)
                totals = self.totals[self.last[update], shard.number]
                program = ShardUpdate(shard, self.rule_of(call.origin), call, totals.added)
                self.new[key] = task(key, program, [*totals.keys, *map(only, [weight, *moments, hyper])])
        for number, bucket in enumerate(buckets):
            own = [place for place in bucket if place in done]
            if own:
                weights = [only(self.graph[update].args[0]) for update, _ in own]
                rows = ReadRows([self.shards[update][shard] for update, shard in own], self.rows.read)
                given = [*weights, *(done[place] for place in own)]
                sent += [self._send(q, "weights", number, given, "update", rows) for q in self.rank.others]
        # The loss comes before: what is received on a channel must be in the order of the steps, where these overlap.
        for number, bucket in enumerate(buckets):
            for other in self.rank.others:
                theirs = [self.shards[update][shard] for update, shard in bucket]
                theirs = [shard for shard in theirs if shard.owner == other]
                message = self._receive(other, "weights", number, [*sent, *self.posted, self.loss]) if theirs else ()
                for place, shard in enumerate(theirs):
                    key = done[shard.update, shard.number] = (shard.update[0], shard.number)
                    origin = self.graph[shard.update].func.origin
                    store = Store(shard, place, self.rows.write, origin)
                    self.new[key] = task(key, store, [message, only(self.graph[shard.update].args[0])])
        for update in self.updates:
            readers = self.dependents[only(self.graph[update].args[0])] - {update}
            after |= {done[update, shard.number]: sorted(readers) for shard in self.shards[update]}
            for gone in [update, *self.dependents[update]]:
                if gone not in done.values():
                    del self.new[gone]
        return InPlace(self.new, list(done.values()), after)

    def _elements(self, shard: Shard) -> int:
        call = self.graph[self.last[shard.update]].func
        shape = call.call.shape if isinstance(call, RowSum) else call.shape
        rows: int = shard.rows.stop - shard.rows.start
        return rows * int(prod(shape[1:]))

    def _message(self, kind: str, phase: str, number: int) -> Any:
        return self.origin_of_message(kind, phase, number)

    def _send(self, rank: int, kind: str, number: int, values: Sequence[Key], phase: str, pick: Any = None) -> Key:
        key = (f"send.{kind}-{number}_-{self.token}", rank)
        origin = self._message(f"send.{kind}", phase, number)
        self.new[key] = task(key, Send(self.rank.link, rank, (kind, number), origin, pick), values)
        return key

    def _receive(self, rank: int, kind: str, number: int, after: Sequence[Key]) -> Key:
        key = (f"receive.{kind}-{number}_-{self.token}", rank)
        if key not in self.new:
            origin = self._message(f"receive.{kind}", "update", number)
            program = Receive(self.rank.link, rank, (kind, number), origin)
            self.new[key] = task(key, program, dict.fromkeys(after))
        return key


@dataclass(frozen=True)
class Peers:
    """This one of several ranks, and its link to the others."""

    number: int
    count: int
    link: Link = field(repr=False, compare=False)


def own_part(graph: Graph, ranks: Mapping[Key, int], own: Peers) -> tuple[Graph, Key]:
    """What one rank does of a graph whose tasks are those of several: with what it sends, and what it receives.

    ranks   of the tasks and of the leaves that they read

    Returns the graph, and a task that is done when all is sent.

    A task that receives waits in its thread. It runs when all is sent that has as many messages on its way, or fewer:
    so ranks never wait for each other in a circle.
    """

    def channel_of(source: Key) -> Channel:
        return f"{source[0].partition('_-')[0]}{source[1:]}", 0  # what comes after is another one on each rank

    level: dict[Key, int] = {}  # messages on the longest way to a task
    crossing: dict[tuple[Key, int], int] = {}  # a result and the rank that it is sent to -> the level of the message
    for key in in_order(graph):
        level[key] = 0
        for source in graph[key].dependencies:
            messages = level.get(source, 0) + (ranks[source] != ranks[key])
            level[key] = max(level[key], messages)
            if ranks[source] != ranks[key]:
                crossing[source, ranks[key]] = messages
    new, sent = dict[Key, Any](), dict[Key, int]()
    for (source, rank), messages in crossing.items():
        if ranks[source] == own.number:
            key = (f"send.{source[0]}", *source[1:], rank)
            new[key] = task(key, Send(own.link, rank, channel_of(source), None, as_it_is), [source])
            sent[key] = messages
    arrived: dict[Key, Key] = {}
    for (source, rank), messages in crossing.items():
        if rank == own.number:
            key = arrived[source] = (f"receive.{source[0]}", *source[1:], ranks[source])
            after = [other for other, own_messages in sent.items() if own_messages <= messages]
            new[key] = task(key, Receive(own.link, ranks[source], channel_of(source), None), after)
    for key, node in graph.items():
        if ranks[key] == own.number:
            new[key] = node.substitute({source: arrived[source] for source in node.dependencies if source in arrived})
    last = (f"sent-{own.number}",)
    new[last] = task(last, Posted(None), sent)
    return new, last


Place = TypeVar("Place")


def _buckets(places: Sequence[Place], bytes_of: Callable[[Place], int]) -> list[list[Place]]:
    """Places in their order, together until they have the bytes of a bucket."""
    buckets, size = list[list[Place]](), BUCKET_BYTES
    for place in places:
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(place)
        size += bytes_of(place)
    return buckets


def _first_sum(graph: Graph, key: Key) -> Key:
    """The sum that another one, and those in between, go on from; itself where it goes on from none."""
    while not isinstance(graph[key].func, RowSum) and (before := start_of(graph, key)) is not None:
        key = before
    return key


def _several(totals: Any) -> Sequence[np.ndarray]:
    """The totals of some subtrees, of which one may come alone."""
    return [totals] if isinstance(totals, np.ndarray) else totals
