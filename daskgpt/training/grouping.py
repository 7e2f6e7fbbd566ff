"""Which tasks of a GPT-2 step are merged, in the words of the model: blocks, layers, updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from daskgpt.graph.accumulating import MicroBatches, MicroSum, accumulated, micro_of
from daskgpt.graph.calls import ChunkSum, KernelCall, is_pick, origin_of
from daskgpt.graph.distribute import (
    Item,
    Joined,
    OfAllRanks,
    PartialTotals,
    Posted,
    Receive,
    Send,
    ShardUpdate,
    Store,
    TreeSum,
)
from daskgpt.graph.grain import GroupOf, groups, in_order
from daskgpt.graph.inplace import OfRows, RowSum, RowUpdate, dependents_of
from daskgpt.graph.nodes import Graph, Key, is_leaf
from daskgpt.model.layers import CROSSENTROPY, DROPOUT, EMBEDDING
from daskgpt.model.optimizer import SQUARES
from daskgpt.model.origins import Origin

# Blocks, and chunks in the head, that may be worked on before the oldest of them is done with.
LOOKAHEAD = 2
OUTSIDE = "outside"  # of the blocks
GLUE = Item | TreeSum | Receive  # of a rank: what belongs to the task that reads it


def groups_of(graph: Graph, grain: str, *, updates: bool = False, apart: bool = False) -> GroupOf:
    """The groups of a step's graph at a grain; "step" is all of it as one task.

    updates   whether parameters are updated: a gradient, its update and others like it are a task
    apart     whether forward, backward and update stay in tasks of their own
    """
    if grain == "step":
        return lambda key: grain
    chunk_group = groups(graph, grain, lambda key: stretch_of(origin_of(graph[key])))
    asked = updates and grain != "kernel"
    squared = squared_tasks(graph) if asked else {}
    pieces = earlier_pieces(graph, squared)
    owners = update_tasks(graph, (ChunkSum, RowSum) if apart else (ChunkSum,)) if asked else {}

    def group_of(key: Key) -> Hashable:
        phase = origin_of(graph[key]).phase if apart else ""
        # Each share of a large tensor's rows stays a task.
        share = key[1] if isinstance(graph[key].func, RowUpdate | RowSum | OfRows) else 0
        if key in squared:
            return phase, SQUARES, update_group(squared[key], grain), share
        if key in pieces:
            return phase, SQUARES, update_group(pieces[key], grain), key[1:]
        if key in owners:
            # Updates that wait for all gradients can all run then: tasks of a block do, and are fewer.
            return phase, "update", update_group(owners[key], "chunk" if squared else grain), share
        group = chunk_group(key)
        return group if group is None else (phase, group)

    return group_of


def ranked_groups(graph: Graph, group_of: GroupOf, grain: str, *, apart: bool) -> GroupOf:
    """The groups of a rank's graph: the sums of a layer, its updates, and the rows from one rank are a task each.

    group_of   of the tasks of chunks
    apart      whether there are barriers inside of the step, which a task must not lie across
    """
    if apart:
        return group_of
    together = bucket_groups(graph) if grain == "chunk" else {}

    def ranked_group(key: Key) -> Hashable:
        if key in together:
            return together[key]
        function = graph[key].func
        if grain == "kernel" or not isinstance(function, RowSum | ShardUpdate | Store):
            return group_of(key)
        if isinstance(function, Store):
            return "store", function.shard.owner, min(graph[key].dependencies)
        unit = update_group(origin_of(graph[key]), grain)
        # The sums of the tables are large, and made long before or after each other.
        return None if unit == OUTSIDE else (type(function).__name__, unit, key[1:])

    return ranked_group


def bucket_groups(graph: Graph) -> dict[Key, Hashable]:
    """Where a chunk is one task, so is all that is summed and sent of a bucket, all that is updated and sent, and all
    that is received at the end.

    What comes from other ranks, and what is made of it for one of these, belongs to it.
    """
    found: dict[Key, Hashable] = {}
    for key, node in graph.items():
        function = getattr(node, "func", None)
        if isinstance(function, Store):
            found[key] = "store"
        elif isinstance(function, Joined):
            found[key] = "sent", 0
        elif isinstance(function, Send):
            kind, number = function.channel
            if kind == "weights":
                found |= dict.fromkeys([key, *_of(graph, key, ShardUpdate)], ("update", number))
            elif kind in ("loss", "gather"):
                found |= dict.fromkeys([key, *_of(graph, key, PartialTotals)], ("sent", 0))
        elif isinstance(function, Posted):
            sends = _of(graph, key, Send)
            own = [key, *sends, *_of(graph, key, RowSum)]
            own += [total for send in sends for total in _of(graph, send, RowSum)]
            found |= {each: ("sent", function.number) for each in own if each not in found}
    readers = dependents_of(graph)
    for key in reversed(in_order(graph)):
        groups, function = {found.get(reader) for reader in readers[key]}, getattr(graph[key], "func", None)
        is_glue = isinstance(function, GLUE) or isinstance(getattr(function, "call", None), OfAllRanks)
        if key not in found and len(groups) == 1 and is_glue:
            found[key] = groups.pop()
    return {key: group for key, group in found.items() if group is not None}


def _of(graph: Graph, key: Key, kinds: Any) -> list[Key]:
    """The tasks of some kinds that a task reads."""
    return [other for other in graph[key].dependencies if isinstance(getattr(graph.get(other), "func", None), kinds)]


def update_tasks(graph: Graph, sums: tuple[type, ...]) -> dict[Key, Origin]:
    """The tasks that update a parameter, and the origin of the update: it, what is picked from it, the last sum before.

    An earlier sum (the gradient that the unembedding gives to the tied embedding) stays apart: it is there long before
    the rest, and what it reads can be dropped. So does the same sum by rows beside an update that makes its own.
    """
    owners = {}
    for key, node in graph.items():
        origin = origin_of(node)
        if origin is not None and origin.phase == "update" and origin.parameter:
            owners[key] = origin
            for dependency in node.dependencies:
                if not is_leaf(graph[dependency]) and isinstance(graph[dependency].func, sums):
                    owners[dependency] = origin
    return owners


def squared_tasks(graph: Graph) -> dict[Key, Origin]:
    """The tasks that square gradients, and the origin of that: they, and the sums that they read.

    Updates wait for all of them, so these sums are in no task with an update.
    """
    found = {}
    for key, node in graph.items():
        origin = origin_of(node)
        if origin is not None and origin.layer == SQUARES:
            found[key] = origin
            found |= {only: origin for only in node.dependencies if is_sum(graph, only)}
    return found


def earlier_pieces(graph: Graph, squared: Mapping[Key, Origin]) -> dict[Key, Origin]:
    """The tasks that sum rows of earlier pieces of the batch for those that are squared, and the origin of that."""
    found = {}
    for key, origin in squared.items():
        while key := next((each for each in graph[key].dependencies if _is_piece_before(graph, each, key)), ()):
            found[key] = origin
    return found


def _is_piece_before(graph: Graph, key: Key, later: Key) -> bool:
    """Whether a task sums the same rows of an earlier piece."""
    return isinstance(getattr(graph[key], "func", None), RowSum) and key[0] == later[0]


def is_sum(graph: Graph, key: Key) -> bool:
    """Whether a task makes a sum over the batch, or the last part of one."""
    return isinstance(getattr(graph[key], "func", None), ChunkSum | RowSum)


def updated_by(graph: Graph) -> dict[Key, Origin]:
    """Tasks that update a parameter, pick from what such a task returns, or make the sum that it reads; its origin."""
    found: dict[Key, Origin] = {}
    for key, node in graph.items():
        origin = origin_of(node)
        if origin is None or origin.phase != "update" or not origin.parameter:
            continue
        found[key] = origin
        sums = [] if is_pick(node) else list(node.dependencies)
        while sums:
            if is_sum(graph, each := sums.pop()):
                found[each] = origin
                sums += graph[each].dependencies
    return found


def update_group(origin: Origin, grain: str) -> Hashable:
    """Weight and bias of a layer are updated together; where a chunk is one task, all tensors of a block are."""
    if grain == "chunk":
        return OUTSIDE if origin.block is None else origin.block
    return (origin.parameter or origin.where).rpartition(".")[0]


def stretch_of(origin: Origin) -> Hashable:
    """The block a task belongs to and whether forward or backward; the embedding goes with the first block."""
    before = origin.block is None and origin.layer in (EMBEDDING.name, DROPOUT.name)
    block = 0 if before else origin.block
    return block, block is not None and origin.phase == "backward"


def memory_edges(graph: Graph, *, ranked: bool = False) -> dict[Key, list[Key]]:
    """Task -> tasks that must run before it, so that memory is given back in time.

    ranked   whether updates wait for other ranks: then the sums of a block are what others wait for

    Dask would take one chunk through the whole backward pass before the next one, and keep what the weight gradients of
    all blocks wait for. So a block's backward waits for the updates of the blocks `LOOKAHEAD` above, and the logits of
    a chunk wait until those of the chunk `LOOKAHEAD` before have been added to the unembedding's gradient. Not where an
    update itself depends on that block (one that waits for the norm of all gradients): it would be a circle.
    """
    lowest = _lowest_blocks(graph)
    updates: dict[int, list[Key]] = defaultdict(list)
    backward: dict[Key, int] = {}
    for key, node in graph.items():
        origin = origin_of(node)
        if origin is None or origin.block is None:
            continue
        if isinstance(node.func, RowSum) if ranked else origin.phase == "update":
            updates[origin.block].append(key)
        elif origin.phase == "backward":
            backward[key] = origin.block
    edges = {
        key: [update for update in updates[block + LOOKAHEAD] if lowest[update] > block]
        for key, block in backward.items()
        if block + LOOKAHEAD in updates
    }
    return {key: earlier for key, earlier in edges.items() if earlier} | _head_edges(graph)


def _lowest_blocks(graph: Graph) -> dict[Key, float]:
    """Task -> the lowest block whose backward pass it needs."""
    lowest: dict[Key, float] = {}
    for key in in_order(graph):
        origin = origin_of(graph[key])
        own = float("inf")
        if origin is not None and origin.phase == "backward" and origin.block is not None:
            own = origin.block
        lowest[key] = min([own, *(lowest[dependency] for dependency in graph[key].dependencies)])
    return lowest


def _head_edges(graph: Graph) -> dict[Key, list[Key]]:
    def of_head(phase: str, kind: type) -> list[Key]:
        return [
            key
            for key, node in graph.items()
            if (origin := origin_of(node)) is not None
            and (origin.layer, origin.phase) == (CROSSENTROPY.name, phase)
            and isinstance(node.func, kind)
            and not is_pick(node)
        ]

    heads, sums = of_head("forward", KernelCall), of_head("backward", RowSum)
    order = next((graph[key].func.call.order for key in sums), None)
    if order is None or len({graph[key].func.first_piece for key in sums}) != len(order.pieces):
        return {}  # all chunks together are smaller than the gradient
    piece_of = {chunk: number for number, piece in enumerate(order.pieces) for chunk in piece}
    done: dict[int, list[Key]] = defaultdict(list)
    for key in sums:
        done[graph[key].func.first_piece + LOOKAHEAD].append(key)
    return {head: done[piece] for head in heads if (piece := piece_of[head[1:]]) in done}


def stage_of(graph: Graph, barrier: str) -> Callable[[Key], str]:
    """Task -> what it does between two barriers: a layer's forward or backward (fork-join), or a phase."""

    def stage(key: Key) -> str:
        origin: Origin = origin_of(graph[key])
        return origin.stage if barrier == "layer" else origin.phase

    return stage


def title(origins: Sequence[Origin]) -> tuple[str, str]:
    """What a merged task is called, kind and place: its layer and pass; of several, the block, segment or update."""
    kinds = {origin.kind for origin in origins}
    if len(kinds) == 1:
        return origins[0].kind, origins[0].place
    if any(origin.phase == "update" for origin in origins):
        last = next((origin for origin in reversed(origins) if origin.parameter), None)
        if last is None:  # sums of gradients, and their squares
            return "gradient", origins[-1].where.rpartition(".")[0]
        return "update", last.parameter.rpartition(".")[0] or last.parameter
    passes = {origin.phase for origin in origins}
    way = passes.pop() if len(passes) == 1 else "head"
    return f"tokens.{way}", origins[0].place


def accumulated_step(
    graph: Graph, micro_batches: MicroBatches, token: str, *, over: bool, ranked: bool = False
) -> Graph:
    """A step's graph with its micro-batches one after the other, see `graph.accumulating`."""

    def origin(micro: int) -> Origin:
        return Origin("accumulate", "backward", f"micro-batch.{micro}")

    return accumulated(graph, micro_batches, token, origin, over=over, ranked=ranked)


def accumulated_groups(graph: Graph, group_of: GroupOf, grain: str, *, apart: bool) -> GroupOf:
    """The groups of such a step: a micro-batch's sums for tensors that are updated together are a task.

    group_of   of all other tasks
    apart      whether there are barriers inside of the step, which a task must not lie across
    """
    updated = updated_by(graph)

    def group(key: Key) -> Hashable:
        function = getattr(graph[key], "func", None)
        if not isinstance(function, MicroSum):
            return group_of(key)
        # The tables' sums are large, and made long before or after each other.
        origin = updated.get(key) or origin_of(graph[key])  # where other ranks come between a sum and its update
        if grain == "kernel" or function.micro is None or origin.block is None:
            return None
        unit = update_group(origin, grain)
        return "micro", function.micro, unit, origin_of(graph[key]).stage if apart else ""

    return group


def accumulated_waits(graph: Graph, micro_batches: MicroBatches) -> dict[Key, list[Key]]:
    """Task -> tasks that must run before it, so that memory is given back in time.

    What `grouping.memory_edges` does with updates is done with the sums of a micro-batch: its backward pass through a
    block waits for the sums of the blocks `LOOKAHEAD` above.
    """
    sums: dict[Hashable, list[Key]] = defaultdict(list)
    backward: dict[Key, tuple[int, int]] = {}
    for key, node in graph.items():
        origin, place = origin_of(node), micro_of(graph, key, micro_batches)
        if origin is None or origin.block is None or origin.phase != "backward" or place is None:
            continue
        if isinstance(node.func, MicroSum):
            sums[place, origin.block].append(key)
        else:
            backward[key] = place, origin.block
    return {
        key: sums[micro, block + LOOKAHEAD]
        for key, (micro, block) in backward.items()
        if (micro, block + LOOKAHEAD) in sums
    }


def accumulated_stage(
    graph: Graph, stage_of: Callable[[Key], str], micro_batches: MicroBatches
) -> Callable[[Key], str]:
    """Task -> what it does between two barriers, of which each micro-batch has its own."""

    def stage(key: Key) -> str:
        place = micro_of(graph, key, micro_batches)
        return stage_of(key) if place is None else f"{stage_of(key)} {place}"

    return stage
