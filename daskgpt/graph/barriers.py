"""Edges of a graph that carry no results: barriers, and waits that release memory in time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from daskgpt.graph.accumulate import MicroBatches
from daskgpt.graph.calls import KernelCall, RowSum, origin_of, wait
from daskgpt.graph.fuse import one_by_one
from daskgpt.graph.nodes import Graph, Key, is_leaf, task, waiting_for
from daskgpt.graph.update_in_place import squares_in

LOOKAHEAD = 2  # number of blocks, and with up to two threads of chunks in the head, that may be in progress
THREADS_OF_BLOCK = 8  # more threads leave each other behind, and may be in a block for each so many


def with_barriers(graph: Graph, stages: Mapping[Key, str], *, name: str, tokens: bool) -> Graph:
    """Return the graph with a barrier after each stage: no task of a stage starts before the stages before it end.

    stages     of the tasks
    name       begins the keys of the barriers
    tokens     whether a barrier waits for a token of each task instead of its result, since a cluster sends a task's
               arguments to its worker

    Errors     RuntimeError if stages depend on each other in a cycle
    """
    members: dict[str, list[Key]] = defaultdict(list)
    for key, node in graph.items():
        if not is_leaf(node):
            members[stages[key]].append(key)
    needs: dict[str, set[str]] = {}
    for stage, keys in members.items():
        read = {needed for key in keys for needed in graph[key].dependencies if needed in graph}
        needs[stage] = {stages[needed] for needed in read if not is_leaf(graph[needed])} - {stage}
    # Among several possible orders it is that with the earliest tasks.
    ordered = one_by_one(needs, "with_barriers", "stages must not wait for each other in a cycle")
    new = {key: node for key, node in graph.items() if is_leaf(node)}
    before: list[Key] = []
    for number, stage in enumerate(ordered):
        for key in members[stage]:
            new[key] = waiting_for(graph[key], before)
        if tokens:
            done = [(f"{name}-token-{number}_{place}", *key) for place, key in enumerate(members[stage])]
            new |= {token: task(token, wait, [key]) for token, key in zip(done, members[stage])}
        else:
            done = members[stage]
        key = (f"{name}-{number}_",)
        new[key] = task(key, wait, [*done, *before])
        before = [key]
    return new


def stages_of(graph: Graph, barrier: str, micro_batches: MicroBatches) -> dict[Key, str]:
    """Return the stage of each task between two barriers: a layer's forward or backward (fork-join), or a phase, for
    each micro-batch.
    """
    stages = {}
    for key, node in graph.items():
        if not is_leaf(node):
            origin, micro = origin_of(node), micro_batches.of_task(graph, key)
            stage = origin.stage if barrier == "layer" else origin.phase
            stages[key] = stage if micro is None else f"{stage} {micro}"
    return stages


def memory_waits(
    graph: Graph, head: str, micro_batches: MicroBatches, *, threads: int, ranked: bool = False
) -> dict[Key, list[Key]]:
    """Return for tasks the tasks that must run before them, so that memory is released in time.

    head     the layer that makes the logits of a chunk, and their loss
    threads  number of tasks that can run at once
    ranked   whether updates wait for other ranks: then tasks wait for the sums of a block instead

    Dask would take one chunk through the whole backward pass before the next one, and hold the inputs of the weight
    gradients of all blocks. So a block's backward waits for the updates of the block `LOOKAHEAD` above it (or more, of
    many threads), or for the sums of a micro-batch there; and the logits of a chunk wait until those of an earlier
    chunk have been added to the unembedding's gradient, so that as many chunks have logits as there are threads, or
    `LOOKAHEAD`. Updates that themselves wait for the whole backward pass, for the norm of all gradients, would close a
    cycle: then the squares of the gradients take their place.
    """
    ahead, clipped = max(LOOKAHEAD, threads // THREADS_OF_BLOCK), bool(squares_in(graph, graph))
    # Micro-batch or None, and block -> the tasks that release its memory.
    done = defaultdict[tuple[int | None, int], list[Key]](list)
    backward: dict[Key, tuple[int | None, int]] = {}
    for key, node in graph.items():
        origin, micro = origin_of(node), micro_batches.of_task(graph, key)
        if origin is None or origin.block is None:
            continue
        is_squares = origin.phase == "update" and not origin.parameter
        releases = is_squares if clipped else origin.phase == "update" and not is_squares
        if isinstance(node.func, RowSum) if ranked else releases:
            done[None, origin.block].append(key)
        if isinstance(node.func, RowSum) and micro is not None:
            done[micro, origin.block].append(key)
        elif origin.phase == "backward" and not (ranked and isinstance(node.func, RowSum)):
            backward[key] = micro, origin.block
    edges = {}
    for key, (micro, block) in backward.items():
        updates = done[None, block + ahead]
        edges[key] = updates if micro is None else done[micro, block + ahead] or updates
    return {key: earlier for key, earlier in edges.items() if earlier} | _head_waits(
        graph, head, max(LOOKAHEAD, threads)
    )


def _head_waits(graph: Graph, head: str, ahead: int) -> dict[Key, list[Key]]:
    """Return for the logits of a chunk the sums that the logits of the chunk `ahead` before it have been added to."""
    calls = {key: node.func for key, node in graph.items() if (origin := origin_of(node)) and origin.layer == head}
    heads = [key for key, call in calls.items() if call.origin.phase == "forward" and isinstance(call, KernelCall)]
    sums = {key: call for key, call in calls.items() if call.origin.phase == "backward" and isinstance(call, RowSum)}
    order = next((call.call.order for call in sums.values()), None)
    if order is None:
        return {}
    piece_of = {chunk: number for number, piece in enumerate(order.pieces) for chunk in piece}
    done: dict[int, list[Key]] = defaultdict(list)
    for key, call in sums.items():
        for piece in call.pieces:
            if piece + ahead > call.pieces[-1]:  # otherwise the sum adds the later chunk, too
                done[piece + ahead].append(key)
    return {key: done[piece] for key in heads if (piece := piece_of[key[1:]]) in done}
