"""Micro-batches of a step, in the words of the model: which tasks are merged, what waits, where barriers are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable

from daskgpt.graph.accumulating import MicroBatches, MicroSum, accumulated, micro_of
from daskgpt.graph.calls import origin_of
from daskgpt.graph.grain import GroupOf
from daskgpt.graph.nodes import Graph, Key
from daskgpt.model.origins import Origin
from daskgpt.training.grouping import LOOKAHEAD, update_group, updated_by


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
