"""Cut a recorded step into the program of one rank: its own sequences, and its messages to and from the others.

A rank records a step of its own sequences, which are whole groups of the batch (`graph.sum_order`). The pass replaces

    sum over chunks -> gradient -> update

for some rows of a tensor, a *shard*, whose owner is one of the ranks, by

    sum over own chunks -> send to the owner                                   where another rank owns the shard
    sum over own chunks -> add the totals of all ranks -> update in place      where this rank owns it
    new rows -> send to all others; rows of others -> into the own weight      afterwards

(a reduce-scatter and an all-gather). So moments are needed only on the owner, weights on every rank. The owner makes a
sum that continues from another one (the tied table's) from the chunks of all ranks, which are smaller than a table.

Shards are sent in *buckets*, in the order of the backward pass: there is one message for each bucket and pair of ranks.
A task that receives waits in its thread. It runs only after this rank has sent the next bucket, so ranks cannot
deadlock: the slowest rank never waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from math import prod
from operator import attrgetter, itemgetter
from types import EllipsisType
from typing import Any, NamedTuple, Protocol

import numpy as np

from daskgpt.graph.calls import CUT, FIRST, MESSAGE, READER, Band, ChunkSum, Exchange, Origin, RowSum, several, wait
from daskgpt.graph.nodes import Graph, Key, dependents_of, key_trees, only_key, read_parts, task
from daskgpt.graph.sum_order import Groups, SumOrder, sequences_of_rank, share_of_rank
from daskgpt.graph.update_in_place import Rewritten, RowUpdate, UpdateRules, chain_of, row_sum, shares, squares_in
from daskgpt.kernels.bfloat16.gemm import TrainedWeight
from daskgpt.kernels.bfloat16.rounding import from_bfloat16, to_bfloat16
from daskgpt.kernels.totals import subtrees, tree_sum

BUCKET_BYTES = 1 << 23  # bytes of totals that are sent together, by two or three ranks; more have more others to tell
SHARD_COST = 1 << 15  # fixed cost of an update, as a number of elements
PACKED_ROWS = 256  # rows that are widened at a time: some hundred kilobytes, in the second cache
AHEAD = 1  # number of buckets that are sent before waiting for the totals of one
SENT_IN = {"totals": "backward", "gather": "backward", "squares": "update", "weights": "update"}  # kind -> phase


Channel = tuple[str, int]  # kind of the data, and the bucket


class Link(Protocol):
    """A connection that carries messages between ranks, in order for each pair."""

    def send(self, rank: int, channel: Channel, value: Any) -> None:
        """Begin to send; the arrays must stay unchanged until the other rank has used them and replied."""

    def receive(self, rank: int, channel: Channel) -> Any:
        """Wait for the next value of a channel and return it."""


@dataclass(frozen=True)
class Rank:
    """One of the ranks that share a batch.

    number      among the ranks
    count       of the ranks
    link        to the others
    groups      of the batch
    sequences   of the batch
    tokens      of a sequence
    threads     of the rank with most of them: all ranks share a tensor's rows alike
    """

    number: int
    count: int
    link: Link = field(repr=False, compare=False)
    groups: int
    sequences: int
    tokens: int
    threads: int = 2

    def groups_of(self, rank: int) -> Groups:
        """Return the groups of a rank: consecutive ones, nearly as many for each rank."""
        numbers = share_of_rank(rank, self.count, self.groups)
        return Groups(len(numbers), numbers.start, self.groups)

    def sequences_of(self, rank: int) -> slice:
        """Return the sequences of a rank in the batch."""
        return sequences_of_rank(rank, self.count, self.groups, self.sequences)

    @property
    def others(self) -> list[int]:
        """The other ranks, beginning after this one, so that ranks do not all send to the same one at a time."""
        return [(self.number + step) % self.count for step in range(1, self.count)]

    def subtrees_of(self, rank: int) -> list[tuple[int, int]]:
        """Return the subtrees that the groups of a rank form, as ranges of groups."""
        groups = self.groups_of(rank)
        return subtrees(groups.first, groups.first + groups.count)

    def add(self, place: int, totals: Any, *messages: Sequence[Any], rows: slice | EllipsisType = ...) -> np.ndarray:
        """Return the sum of the batch, or some rows of it, from the totals that each rank has of its subtrees.

        place      in the message of each other rank
        totals     of this rank
        messages   of `others`
        """
        by_rank = {self.number: totals} | {other: message[place] for other, message in zip(self.others, messages)}
        return tree_sum(
            (*ends, total[rows])
            for rank in range(self.count)
            for ends, total in zip(self.subtrees_of(rank), several(by_rank[rank]), strict=True)
        )


@dataclass(eq=False)
class Shard:
    """Rows of a tensor that are summed and updated together.

    update     the task that updates the tensor in the graph before
    parameter  name of the tensor
    number     among the shards of the tensor
    bands      its rows, in bands that are summed at a time
    columns    numbers in a row
    rounded    whether other ranks only multiply by it, in bfloat16
    owner      the rank that updates it
    """

    update: Key
    parameter: str
    number: int
    bands: Sequence[Band]
    columns: int
    rounded: bool
    owner: int = 0

    @property
    def key(self) -> Key:
        """The task that updates it, or writes what its owner has sent."""
        return (self.update[0], self.number)

    @property
    def rows(self) -> slice:
        """The rows in the tensor."""
        return slice(self.bands[0][0], self.bands[-1][1])

    @property
    def bytes(self) -> int:
        """Bytes of its totals, in float32."""
        return 4 * self.columns * (self.bands[-1][1] - self.bands[0][0])

    @property
    def sent_bytes(self) -> int:
        """Bytes of its new rows as other ranks get them. Vectors are never held packed."""
        return self.bytes // (2 if self.rounded and self.columns > 1 else 1)


class _Totals(NamedTuple):
    """The source of a shard's gradient.

    tree   adds the totals of all ranks, which are the results of `keys`; None if the first of these is the gradient
    bucket of the messages
    """

    keys: list[Key]
    tree: Callable[..., Any] | None = None
    bucket: int = 0


class Distribution:
    """The program of a rank, whose updates are in place.

    last      sum that is the gradient of an update
    weight    that it updates
    readers   of this weight, but for the update
    shards    of the tensor that it updates
    posted    tasks after which all totals have been sent
    totals    by sum and number of the shard
    """

    def __init__(
        self,
        graph: Graph,
        rules: UpdateRules,
        rank: Rank,
        loss: Key,
        rounding: Collection[Callable[..., Any]],
        token: str,
    ) -> None:
        """graph     of its own sequences, recorded with its groups
        rules     how the updates are made
        loss      the sum over the batch that every rank needs
        rounding  kernels that read only the rounded values of a weight
        token     distinguishes the keys of this graph's own tasks
        """
        self.graph, self.rules, self.rank, self.loss, self.token = graph, rules, rank, loss, token
        self.rounding = rounding
        self.updates = rules.updates(graph)[::-1]  # the backward pass reaches the first tensors last
        self.weight = {update: only_key(graph[update].args[0]) for update in self.updates}
        self.last = {update: only_key(graph[update].args[1]) for update in self.updates}
        self.dependents = dependents_of(graph)
        self.readers = {update: self.dependents[weight] - {update} for update, weight in self.weight.items()}
        self.new, self.shards = dict(graph), self._shards()
        self.posted: list[Key] = []
        self.totals: dict[tuple[Key, int], _Totals] = {}

    def rewritten(self) -> Rewritten:
        """Return the graph of this rank."""
        first = {update: chain_of(self.graph, last)[0] for update, last in self.last.items()}
        # A sum that another one continues from is ready long before the rest.
        early = [update for update in self.updates if first[update] != self.last[update]]
        order = early + [update for update in self.updates if update not in early]
        self._exchange_totals([shard for update in order for shard in self.shards[update]], first)
        for update in early:
            self._sum_gathered(update)
        self._read_by_rows()
        return self._update()

    def owned(self) -> dict[str, list[slice]]:
        """Return the rows of each tensor that are updated here."""
        parameters = {self.graph[update].func.origin.parameter: update for update in self.updates}
        return {name: [shard.rows for shard in self._owned(self.shards[update])] for name, update in parameters.items()}

    def _shards(self) -> dict[Key, list[Shard]]:
        """Return the shards of each update: in each bucket the largest goes to the rank that owns the least so far."""
        every: list[Shard] = []
        for update in self.updates:
            call, parameter = self.graph[self.last[update]].func, self.graph[update].func.origin.parameter
            # If all readers of the weight except its update multiply by it, rounded rows suffice.
            rounded = all(self.graph[key].func.kernel in self.rounding for key in self.readers[update])
            for number, bands in enumerate(shares(call, self.rules.rules[parameter], self.rules.elements)):
                every.append(Shard(update, parameter, number, bands, prod(call.shape[1:]), rounded))
        held = [0] * self.rank.count
        for bucket in _buckets(every, self.rank.count):
            for shard in sorted(bucket, key=lambda shard: -shard.bytes):
                shard.owner = held.index(min(held))
                held[shard.owner] += shard.bytes // 4 + SHARD_COST
        return {update: list(shards) for update, shards in groupby(every, attrgetter("update"))}

    def _owned(self, shards: Iterable[Shard]) -> list[Shard]:
        return [shard for shard in shards if shard.owner == self.rank.number]

    def _exchange_totals(self, shards: Sequence[Shard], first: Mapping[Key, Key]) -> None:
        """Sum the own chunks for each shard, and exchange the totals with its owner, bucket by bucket.

        The loss goes to all others with the first bucket: a message costs half a millisecond of the interpreter's time.

        shards   in the order in which they are sent
        first    update -> the sum over chunks with which its gradient begins
        """
        buckets = _buckets(shards, self.rank.count)
        partial_sums = {
            shard: self._partial(first[shard.update], shard, ("sent", number))
            for number, bucket in enumerate(buckets)
            for shard in bucket
        }
        posted: list[Key] = []  # for each bucket, a task that has waited for it and for earlier ones
        loss, call = (f"{self.loss[0]}.own",), self.graph[self.loss].func
        pieces, *_ = call.arrange(key_trees(self.graph[self.loss]))
        self._add(loss, RowSum(call, call.bands(), range(len(pieces))), [pieces], ("sent", 0))
        for number, bucket in enumerate(buckets):
            done = posted[-1:] + [partial_sums[shard] for shard in self._owned(bucket)]
            for other in self.rank.others:
                shards_of = [shard for shard in bucket if shard.owner == other]
                theirs = [loss] * (number == 0) + [partial_sums[shard] for shard in shards_of]
                if theirs:
                    size = len(self.rank.subtrees_of(self.rank.number)) * sum(shard.bytes for shard in shards_of)
                    done.append(self._send(other, "totals", number, theirs, ("sent", number), size=size))
            key = (f"posted-{number}_-{self.token}",)
            posted.append(self._add(key, Exchange(wait, _origin("posted", "backward", number)), done, ("sent", number)))
        for number, bucket in enumerate(buckets):
            owned = self._owned(bucket)
            after = [posted[min(number + AHEAD, len(posted) - 1)]]
            if owned or number == 0:
                messages = [self._receive(other, "totals", number, after) for other in self.rank.others]
            if number == 0:
                whole = Exchange(partial(self.rank.add, 0), _origin("loss", "update", 0), FIRST)
                self._add(self.loss, whole, [loss, *messages], READER)
            for place, shard in enumerate(owned, start=number == 0):
                tree = partial(self.rank.add, place)
                keys = [partial_sums[shard], *messages]
                self.totals[first[shard.update], shard.number] = _Totals(keys, tree, number)
        self.posted = posted[-1:]
        for key in {key for key in first.values() if not isinstance(self.graph[key].func, RowSum)}:
            del self.new[key]

    def _partial(self, key: Key, shard: Shard, bucket: Hashable) -> Key:
        """Return the task that sums some rows over the chunks of this rank."""
        if isinstance(self.graph[key].func, RowSum):  # the last of the micro-batches
            part, origin = (f"{key[0]}.of", shard.number), self.graph[key].func.origin
            rows = Exchange(lambda totals: [total[shard.rows] for total in several(totals)], origin, FIRST)
            return self._add(part, rows, [key])
        part = row_sum(self.graph, self.new, key, shard.number, shard.bands, self.rules)
        self.new[part].func.bucket = bucket
        return part

    def _sum_gathered(self, update: Key) -> None:
        """Make sums that continue from another sum on its owner, from the chunks of all ranks."""
        for number, (before, key) in enumerate(pairwise(chain_of(self.graph, self.last[update]))):
            pieces = self._gathered(update, key, len(self.updates) * number + self.updates.index(update))
            # Each rank's sequences are a chunk. The sum does not depend on the cuts between tokens.
            sequences = [part.stop - part.start for part in map(self.rank.sequences_of, range(self.rank.count))]
            order = SumOrder.of(sequences, (self.rank.tokens,), 1, Groups(self.rank.groups))
            whole = replace(self.graph[key].func, order=order, origin=_origin("gather", "update", 0))
            for shard in self._owned(self.shards[update]):
                rows = RowSum(whole, shard.bands, range(len(order.pieces)), started=True)
                start, row_key = self._whole(before, shard), (f"{key[0]}.rows", shard.number)
                self.totals[key, shard.number] = _Totals([self._add(row_key, rows, [pieces, start], READER)])
            del self.new[key]

    def _gathered(self, update: Key, key: Key, place: int) -> list[Any]:
        """Send the inputs of a sum to the owners of its shards; return those of all ranks, a piece of one chunk for
        each, where this rank is an owner.

        place   of the sum among those that are gathered, the same on all ranks
        """
        call: ChunkSum = self.graph[key].func
        count, joined = len(call.inputs), (f"{key[0]}.own", 0)
        size = sum(4 * prod(sum(call.chunks[axis]) for axis in axes) for axes in call.inputs)
        join = Exchange(partial(inputs_in_one, call), _origin("gather", "backward", 0), MESSAGE, size=size)
        self._add(joined, join, self.graph[key].args[:count], ("sent", 0))
        owners = {shard.owner for shard in self.shards[update]}
        to, bucket = [other for other in self.rank.others if other in owners], ("sent", 0)
        sent = [self._send(other, "gather", place, [joined], bucket, list, size) for other in to]
        self.posted += [*sent, joined]
        if self.rank.number not in owners:
            return []
        messages = {other: self._receive(other, "gather", place, self.posted) for other in self.rank.others}
        pieces = []
        for rank in range(self.rank.count):
            keys, message = [(f"{key[0]}.item", rank, number) for number in range(count)], messages.get(rank, joined)
            pieces.append([[self._item(item, "gather", rank, message, number) for number, item in enumerate(keys)]])
        return pieces

    def _whole(self, key: Key, shard: Shard) -> Key:
        """Return the task that returns rows of a total of all ranks."""
        totals = self.totals[key, shard.number]
        if totals.tree is None:
            return totals.keys[0]
        total = (f"{key[0]}.total", shard.number)
        if total not in self.new:
            size = self.rank.count * shard.bytes
            whole = Exchange(totals.tree, _origin("totals", "update", totals.bucket), FIRST, size=size)
            self._add(total, whole, totals.keys, READER)
        return total

    def _read_by_rows(self) -> None:
        """Let each owner run other readers of a gradient than its update, by rows, and send the results to all."""
        squared = [
            (reader, shard)
            for update in self.updates
            for reader in squares_in(self.graph, sorted(self.dependents[self.last[update]]))
            for shard in self.shards[update]
        ]
        if not squared:
            return
        by_rank = {rank: [pair for pair in squared if pair[1].owner == rank] for rank in range(self.rank.count)}
        results: dict[tuple[Key, Shard], Key] = {}
        for reader, shard in by_rank[self.rank.number]:
            last, call = self.last[shard.update], self.graph[reader].func.on_rows()
            rows = self._whole(last, shard)
            results[reader, shard] = self._add((f"{reader[0]}.rows", shard.number), call, [rows])
            self.totals[last, shard.number] = _Totals([rows])
        mine = list(results.values())
        sent = [self._send(other, "squares", 0, mine) for other in self.rank.others]
        for other in self.rank.others:
            message = self._receive(other, "squares", 0, [*sent, *mine, *self.posted])
            for number, (reader, shard) in enumerate(by_rank[other]):
                key = (f"{reader[0]}.item", shard.number)
                results[reader, shard] = self._item(key, "squares", other, message, number)
        self.posted += [*sent, *mine]
        parts: dict[Key, list[Key]] = {reader: [] for reader, _ in squared}
        for pair in squared:
            parts[pair[0]].append(results[pair])
        read_parts(self.graph, self.new, self.dependents, parts)
        for reader in parts:
            del self.new[reader]

    def _update(self) -> Rewritten:
        """Update the shards of this rank, send them to the others, and write theirs into the weights."""
        sent: list[Key] = []
        every = [shard for update in self.updates for shard in self.shards[update]]
        buckets, done = _buckets(every, self.rank.count), [shard.key for shard in every]
        for number, bucket in enumerate(buckets):
            owned, to = self._owned(bucket), ("update", number)
            for shard in owned:
                weight, _, *moments, hyper = self.graph[shard.update].args
                totals, call = self.totals[self.last[shard.update], shard.number], self.graph[shard.update].func
                rule = self.rules.rules[shard.parameter]
                rows = RowUpdate(call, rule, shard.bands, base=shard.rows.start, tree=totals.tree)
                state = [only_key(argument) for argument in (weight, *moments, hyper)]
                self._add(shard.key, rows, [[], totals.keys, state], to)
            if owned:
                given = [*(self.weight[shard.update] for shard in owned), *(shard.key for shard in owned)]
                pick, size = partial(_read_all, owned), sum(shard.sent_bytes for shard in owned)
                sent += [self._send(q, "weights", number, given, to, pick, size) for q in self.rank.others]
        # The loss comes first: if steps overlap, messages on a channel must be received in the order of the steps.
        for number, bucket in enumerate(buckets):
            for other in self.rank.others:
                theirs = [shard for shard in bucket if shard.owner == other]
                message = self._receive(other, "weights", number, [*sent, *self.posted, self.loss]) if theirs else ()
                for place, shard in enumerate(theirs):
                    origin = self.graph[shard.update].func.origin
                    store = Exchange(partial(_store, shard, place), origin, size=shard.bytes)
                    self._add(shard.key, store, [message, self.weight[shard.update]], "store")
        for update in self.updates:
            for gone in {update, *self.dependents[update]} - {*done}:
                del self.new[gone]
        return Rewritten(self.new, done, {shard.key: sorted(self.readers[shard.update]) for shard in every})

    def _add(self, key: Key, call: Any, arguments: Iterable[Any], bucket: Hashable = None) -> Key:
        """Add a task; return its key. bucket   as of `TaskCall`"""
        call.bucket = bucket
        self.new[key] = task(key, call, arguments)
        return key

    def _item(self, key: Key, kind: str, rank: int, message: Key, number: int) -> Key:
        """Add a task that takes one of the arrays of a rank's message; return its key."""
        return self._add(key, Exchange(itemgetter(number), _origin(kind, "update", rank), MESSAGE), [message], READER)

    def _send(
        self,
        rank: int,
        kind: str,
        number: int,
        values: Sequence[Key],
        bucket: Hashable = None,
        pick: Callable[..., Any] | None = None,
        size: int = 0,
    ) -> Key:
        """Add a task that sends the results of others to a rank; return its key.

        pick   makes the message from the results; None if they are sent unchanged, in a list
        size   bytes of the message
        """
        link, channel, origin = self.rank.link, (kind, number), _origin(f"send.{kind}", SENT_IN[kind], number)

        def send(*results: Any) -> None:
            link.send(rank, channel, pick(*results) if pick else list(results))

        call = Exchange(send, origin, size=size, peer=rank, channel=channel)
        return self._add((f"send.{kind}-{number}_-{self.token}", rank), call, values, bucket)

    def _receive(self, rank: int, kind: str, number: int, after: Sequence[Key]) -> Key:
        """Add a task that waits in its thread for a message, after others have run; return its key."""
        link, channel, origin = self.rank.link, (kind, number), _origin(f"receive.{kind}", "update", number)
        key = (f"receive.{kind}-{number}_-{self.token}", rank)
        if key not in self.new:
            call = Exchange(lambda *_: link.receive(rank, channel), origin, MESSAGE, peer=rank, channel=channel)
            self._add(key, call, dict.fromkeys(after), READER)
        return key


def _origin(kind: str, phase: str, number: int) -> Origin:
    """Return the origin of a task that sends, receives or adds."""
    return Origin(kind, phase, f"bucket.{number}")


def inputs_in_one(call: ChunkSum, *inputs: Any) -> list[np.ndarray]:
    """Return the inputs of a sum over the own chunks, each as one array, from Dask's nested lists."""

    def in_one(chunks: Any, cut: Sequence[int]) -> np.ndarray:
        parts = [in_one(part, cut[1:]) for part in chunks] if cut else [chunks]
        return np.concatenate(parts, cut[0]) if len(parts) > 1 else parts[0]

    cut_axes = [[number for number, axis in enumerate(axes) if axis in CUT] for axes in call.inputs]
    return [in_one(call.chunk_at(given, axes, {}), cut) for given, axes, cut in zip(inputs, call.inputs, cut_axes)]


def read_rows(weight: Any, rows: slice, rounded: bool) -> np.ndarray:
    """Return rows of a weight in the form in which they are sent to another rank.

    rounded   whether that rank only multiplies by them; they are then sent in bfloat16
    """
    if not isinstance(weight, TrainedWeight):
        values: np.ndarray = weight[rows]
        return values
    return to_bfloat16(weight.values[rows]) if rounded else weight.values[rows]


def write_rows(weight: Any, rows: slice, values: np.ndarray) -> None:
    """Write received rows into a weight; rounded rows only into its packed values."""
    if values.dtype == np.uint16:
        for first in range(0, len(values), PACKED_ROWS):
            weight.pack(from_bfloat16(values[first : first + PACKED_ROWS]), rows.start + first)
    elif isinstance(weight, TrainedWeight):
        weight.values[rows] = values
        weight.pack(values, rows.start)
    else:
        weight[rows] = values


def _read_all(shards: Sequence[Shard], *values: Any) -> list[np.ndarray]:
    """Return the rows of shards from the weights that they belong to, which come first among the values."""
    return [read_rows(weight, shard.rows, shard.rounded) for shard, weight in zip(shards, values)]


def _store(shard: Shard, place: int, message: Sequence[Any], weight: Any) -> None:
    """Write rows from their owner's message into the own weight."""
    write_rows(weight, shard.rows, message[place])


def _buckets(shards: Sequence[Shard], ranks: int) -> list[list[Shard]]:
    """Return shards in order, grouped until a group has the bytes of a bucket."""
    most = BUCKET_BYTES * (ranks // 2)
    buckets, size = list[list[Shard]](), most
    for shard in shards:
        if size >= most:
            buckets.append([])
            size = 0
        buckets[-1].append(shard)
        size += shard.bytes
    return buckets
