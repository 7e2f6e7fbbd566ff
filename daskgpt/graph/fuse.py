"""Fuse tasks: choose the calls of a step that become one task, and build the graph of these tasks.

A fused task calls the same kernels in the same order on the same arrays, so the grain changes no bit of the result.

    kernel    one kernel call per task
    segment   all calls of a chunk between two gathers
    block     all calls of a chunk in one transformer block, forward or backward
    chunk     all calls of a chunk of whole sequences

Sums over the batch and updates belong to no chunk. A gradient, its update and similar ones are one task.

A fused graph has no cycles. Let the *depth* of a task be the greatest number of changes of chunk on a path to it. (1)
An edge never leads to a smaller depth: a path to its start continues to its end. (2) An edge that stays at its depth
stays in its chunk: if it changed the chunk, the depth of its end would be one more. So a path that leaves a group
(chunk, depth) has either grown in depth, and never comes back, or is in the same group. Blocks split such a group into
parts that follow one another, forward and backward, so that a path that has left a part does not come back either.
There is no such proof for groups of sums and updates: `fuse` checks for cycles at its end.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeVar

from dask.order import order

from daskgpt.config.errors import refusal
from daskgpt.graph.calls import READER, ChunkSum, Origin, RowSum, call_of, is_pick, is_sum, origin_of
from daskgpt.graph.nodes import Graph, Key, dependents_of, is_leaf, task, waiting_for
from daskgpt.graph.program import Place, program_of
from daskgpt.graph.update_in_place import RowUpdate, elements_of_task, squares_in

GRAINS = ("kernel", "segment", "block", "chunk")
OUTSIDE = "outside"  # of the blocks
FEW_THREADS = 2  # up to so many threads, chunks are as good as evenly shared whatever their number
Chunk = tuple[Any, ...]
Groups = Mapping[Key, Hashable]
Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True)
class Fusion:
    """The choice of tasks of a step that become one; tasks of the group None stay separate.

    grain    one of GRAINS
    first    places of the model outside the blocks that belong to the first block
    apart    whether forward, backward and update stay in separate tasks, since there are barriers within the step
    ranked   whether the graph is that of one of several ranks: the sums of a layer, its updates, and the rows from one
             rank are each a task
    threads  number of tasks that can run at once
    """

    grain: str
    first: Collection[str] = ()
    apart: bool = False
    ranked: bool = False
    threads: int = 1

    def groups(self, graph: Graph) -> Groups:
        """Return the group of each task of a graph, None for one that stays separate."""
        keys = [key for key, node in graph.items() if not is_leaf(node)]
        if self.grain == "kernel":
            return {key: next(iter(graph[key].dependencies)) if is_pick(graph[key]) else key for key in keys}
        chunk_groups = self._chunk_groups(graph, keys)
        buckets = _buckets(graph) if self.ranked and self.grain == "chunk" and not self.apart else {}
        units = {} if self.ranked else self._squares(graph)
        # Where all chunks run at once, nothing is gained by tasks between them and the updates.
        joined = not (self.ranked or units or self.apart) and self._chunks_at_once(graph, keys)
        if not self.ranked:
            units = self._updates(graph, bool(units), joined) | units
        read = {needed for node in graph.values() for needed in node.dependencies} if joined else set()

        def group_of(key: Key) -> Hashable:
            call, origin = graph[key].func, origin_of(graph[key])
            if isinstance(call, RowSum) and call.whole:
                # The sums of the tables are large, and are made at very different times.
                if call.micro is None or origin.block is None:
                    return None
                unit = unit_of(origin, self.grain) if self.ranked or self.grain == "chunk" else origin.where
                return "micro", call.micro, unit, origin.stage if self.apart else ""
            if self.ranked and not self.apart:
                if key in buckets:
                    return buckets[key]
                if call.bucket == "store":
                    return "store", min(graph[key].dependencies)
                if isinstance(call, RowSum | RowUpdate):
                    # Sums outside of the blocks are made at very different times, as those of the tied table.
                    unit = type(call).__name__, unit_of(origin, self.grain), key[1:]
                    return None if origin.block is None else unit
            phase = origin.phase if self.apart else ""
            if key in units:
                # The sums of several layers would be in the stage of one of them, and wait for those of the others.
                return phase, units[key], origin.stage if phase == "backward" else ""
            group = chunk_groups[key]
            if group is None:
                return (phase, ("update", 0), "") if joined and key not in read else None
            return phase, group

        return {key: group_of(key) for key in keys}

    def _chunks_at_once(self, graph: Graph, keys: Sequence[Key]) -> bool:
        """Return whether each chunk is one task, and all of them end before any can be of use: no more than there are
        threads, or two on one thread; micro-batches follow each other.
        """
        if self.grain != "chunk" or any(graph[key].func.micro is not None for key in keys):
            return False
        return len({chunk_of(graph, key, whole=True) for key in keys} - {None}) <= max(self.threads, FEW_THREADS)

    def _chunk_groups(self, graph: Graph, keys: Sequence[Key]) -> Groups:
        """Return the group of each task among those of its chunk, None for a task without a chunk."""
        places = [dict(zip(call_of(node).axes, key[1:])) for key, node in graph.items()]
        whole = self.grain != "segment" and not any(place.get("t") for place in places)
        chunks = {key: chunk_of(graph, key, whole) for key in graph}
        depths = _depths(graph, chunks)

        def group_of(key: Key) -> Hashable:
            if chunks[key] is None:
                return None
            if self.grain != "block":
                return chunks[key], depths[key]
            origin = origin_of(graph[key])
            block = 0 if origin.block is None and origin.where in self.first else origin.block
            return chunks[key], depths[key], block, block is not None and origin.phase == "backward"

        return {key: group_of(key) for key in keys}

    def _updates(self, graph: Graph, squared: bool, joined: bool) -> dict[Key, Hashable]:
        """Return the unit of each task that updates a parameter, of its picks, and of the sums before it.

        squared  whether all updates wait for the squares of all gradients
        joined   whether an earlier sum (the unembedding's part of the tied embedding's gradient) belongs to it.
                 Otherwise that stays separate: it is ready long before the rest, and its inputs can be dropped. So does
                 the same sum by rows beside an update that makes its own
        """
        keys = [key for key, node in graph.items() if (o := origin_of(node)) and o.phase == "update" and o.parameter]
        units = self._units(graph, [key for key in keys if not is_pick(graph[key])], squared or self.grain == "chunk")
        units |= {key: units[next(iter(graph[key].dependencies))] for key in keys if is_pick(graph[key])}
        sums = ChunkSum | RowSum if self.apart or joined else ChunkSum
        last = list(units)
        for key in last:
            before = [needed for needed in graph[key].dependencies if isinstance(call_of(graph[needed]), sums)]
            units |= dict.fromkeys(before, units[key])
            last += before if joined else ()
        return {key: ("update", unit) for key, unit in units.items()}

    def _squares(self, graph: Graph) -> dict[Key, Hashable]:
        """Return the unit of each task that squares a gradient, and of the sums that it reads; sums of rows of earlier
        pieces of the batch have units of their own.

        All updates wait for these sums, so none of them shares a task with an update.
        """
        units: dict[Key, Hashable] = {}
        for key, unit in self._units(graph, squares_in(graph, graph), self.grain == "chunk").items():
            sums = [needed for needed in graph[key].dependencies if is_sum(graph[needed])]
            units |= dict.fromkeys([key, *sums], ("squares", unit))
            while sums:
                later = sums.pop()
                earlier = [d for d in graph[later].dependencies if d[0] == later[0] and is_sum(graph[d])]
                units |= {before: ("squares", unit, before[1:]) for before in earlier}
                sums += earlier
        return units

    def _units(self, graph: Graph, keys: Sequence[Key], even: bool) -> dict[Key, Hashable]:
        """Return the unit of tasks that update a tensor or square its gradient: weight and bias of a layer, with a unit
        for each share of a large tensor's rows.

        even   the unit is the number of one of as many parts as there are threads, or more if they are large, of about
               the same size: for tasks that all run after the last chunk
        """
        if not even:
            rows = {key: key[1] if graph[key].func.by_rows else 0 for key in keys}
            return {key: (unit_of(origin_of(graph[key]), "block"), rows[key]) for key in keys}
        in_blocks = sorted(keys, key=lambda key: -1 if (block := origin_of(graph[key]).block) is None else block)
        sizes = {key: size_of_task(graph, key) for key in in_blocks}
        total, before = sum(sizes.values()), 0
        parts, units = max(self.threads, total // elements_of_task(self.threads)), dict[Key, Hashable]()
        for key, size in sizes.items():
            units[key] = parts * (2 * before + size) // (2 * total)
            before += size
        return units


def size_of_task(graph: Graph, key: Key) -> int:
    """Return how many numbers a task updates, or squares."""
    call = call_of(graph[key])
    if isinstance(call, RowUpdate):
        return call.size
    if call.origin.parameter:
        return math.prod(call.shapes(key)[0])
    return sum(math.prod(call_of(graph[needed]).shape) for needed in graph[key].dependencies if is_sum(graph[needed]))


def unit_of(origin: Origin, grain: str) -> Hashable:
    """Return the unit of an update: weight and bias of a layer, or with the grain chunk, all tensors of a block."""
    if grain == "chunk":
        return OUTSIDE if origin.block is None else origin.block
    return (origin.parameter or origin.where).rpartition(".")[0]


def _buckets(graph: Graph) -> dict[Key, Hashable]:
    """Return the groups of a rank's graph if a chunk is one task: all sums and messages of a bucket, all updates and
    their messages, and all messages received at the end. A value that only such a task reads belongs to it.
    """
    buckets = {key: node.func.bucket for key, node in graph.items() if not is_leaf(node)}
    bucket_of = {key: bucket for key, bucket in buckets.items() if bucket not in (None, READER)}
    readers = dependents_of(graph)
    for key in reversed(in_order(graph)):
        groups = {bucket_of.get(reader) for reader in readers[key]}
        if buckets.get(key) == READER and len(groups) == 1 and None not in groups:
            bucket_of[key] = groups.pop()
    return bucket_of


def title(origins: Sequence[Origin]) -> str:
    """Return the name of a fused task, kind and place: its layer and pass, or for several, the block, segment or
    update."""
    if len({origin.kind for origin in origins}) == 1:
        return f"{origins[0].kind}-{origins[0].place}"
    if any(origin.phase == "update" for origin in origins):
        last = next((origin for origin in reversed(origins) if origin.parameter), None)
        if last is None:  # sums of gradients, and their squares
            return f"gradient-{origins[-1].where.rpartition('.')[0]}"
        return f"update-{last.parameter.rpartition('.')[0] or last.parameter}"
    passes = {origin.phase for origin in origins}
    way = passes.pop() if len(passes) == 1 else "head"
    return f"tokens.{way}-{origins[0].place}"


def chunk_of(graph: Graph, key: Key, whole: bool) -> Chunk | None:
    """Return the part of the batch that a task works on, (b, t), or (b, None, h) for some heads of whole sequences;
    None for tasks without a chunk (leaves, sums).

    whole   whether a chunk holds whole sequences, so that a gathered sequence is the same as a chunk
    """
    index = dict(zip(call_of(graph[key]).axes, key[1:]))
    if not {"b", "t"} & index.keys():
        return None
    chunk = index.get("b"), 0 if whole else index.get("t")
    return (*chunk, index["h"]) if "h" in index else chunk


def fuse(
    graph: Graph,
    groups: Groups,
    wanted: Sequence[Key],
    *,
    places: Mapping[Key, Place],
    results: Sequence[Key],
    after: Mapping[Key, Iterable[Key]],
    token: str,
    drop: bool,
) -> tuple[Graph, dict[Key, Place]]:
    """Make one task of each group; tasks of no group stay on their own, leaves stay as they are.

    Return the graph of these tasks, and the places of the wanted values.

    wanted     keys whose results are read from outside
    places     places of leaves that are values in other data
    results    what the next run begins with: the results of a task come first in its tuple, in this order
    after      task -> tasks that must have run before it although it does not read them
    token      ends the first parts of the keys
    drop       whether a value is dropped after its last reader although other results of its task are still needed,
               which requires that no task runs twice

    Errors     RuntimeError if groups depend on each other in a cycle, naming it
    """
    members: dict[Hashable, list[Key]] = defaultdict(list)
    for key in in_order(_with_waits_inside(graph, groups, after)):
        if key in groups:
            members[("alone", key) if groups[key] is None else groups[key]].append(key)
    home = {key: group for group, keys in members.items() for key in keys}
    names: dict[Hashable, Key] = {
        group: (f"{title([origin_of(graph[key]) for key in keys])}_-{token}", number)
        for number, (group, keys) in enumerate(members.items())
    }
    packs = {home[result] for result in results}  # the next run always takes a tuple
    dependents = dependents_of(graph)
    # The other groups that read each value.
    readers = {key: {home[reader] for reader in dependents[key]} - {group} for key, group in home.items()}
    from_outside, turn = set(wanted), {key: number for number, key in enumerate(results)}
    outputs = {}
    for group, keys in members.items():
        outputs[group] = [key for key in keys if readers[key] or key in from_outside]
        outputs[group].sort(key=lambda key: turn.get(key, len(turn)))
    all_places = dict(places)
    for group, keys in outputs.items():
        for number, key in enumerate(keys):
            all_places[key] = Place(names[group], number if len(keys) > 1 or group in packs else None)
    # A wanted value has one reader more, and so is never dropped.
    counts = {key: len(readers[key]) + (key in from_outside) for key in home} if drop else None
    merged = {key: node for key, node in graph.items() if is_leaf(node) and key not in all_places}
    for group, keys in members.items():
        program, needed = program_of(graph, keys, outputs[group], all_places, counts, group in packs)
        before = {names[home[earlier]] for key in keys for earlier in after.get(key, ())}
        # Tasks to wait for come last among the arguments, and the program ignores them.
        needed += sorted(before - {names[group], *needed})
        merged[names[group]] = task(names[group], program, needed)
    needs = {key: node.dependencies & merged.keys() for key, node in merged.items()}
    one_by_one(needs, "fuse", "fused tasks must not wait for each other in a cycle")
    return merged, {key: all_places[key] for key in wanted}


def _with_waits_inside(graph: Graph, group: Groups, after: Mapping[Key, Iterable[Key]]) -> Graph:
    """Return the graph in which a task depends on what must run before it in its group, as in the program."""
    return graph | {
        key: waiting_for(graph[key], [earlier for earlier in before if group[earlier] == group[key] is not None])
        for key, before in after.items()
    }


def one_by_one(needs: Mapping[Node, Collection[Node]], where: str, rule: str) -> list[Node]:
    """Return things in an order in which each follows those that it needs. Errors   RuntimeError naming a cycle"""
    try:
        return list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        circle = " -> ".join(map(str, reversed(error.args[1])))
        raise refusal(RuntimeError, where, rule, circle, "Use a finer grain.") from None


def in_order(graph: Graph) -> list[Key]:
    """Return the keys in the order in which Dask would run them one by one."""
    return sorted(graph, key=order(graph).__getitem__)


def _depths(graph: Graph, chunks: Mapping[Key, Chunk | None]) -> dict[Key, int]:
    """Return the greatest number of changes of chunk on a path to each task."""
    depths: dict[Key, int] = {}
    # Each task follows those that it depends on; this takes a tenth of the time of `in_order`.
    for key in TopologicalSorter({key: node.dependencies & graph.keys() for key, node in graph.items()}).static_order():
        depths[key] = max(
            (depths[d] + (chunks[d] != chunks[key]) for d in graph[key].dependencies if not is_leaf(graph[d])),
            default=0,
        )
    return depths
