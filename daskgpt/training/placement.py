"""Which worker does what: sequences, sums and updates of a step that is spread over workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

from daskgpt.graph.accumulating import Done
from daskgpt.graph.bands import update_by_bands
from daskgpt.graph.calls import is_pick, origin_of
from daskgpt.graph.grain import GroupOf, chunk_of
from daskgpt.graph.inplace import InPlaceRule
from daskgpt.graph.nodes import Graph, Key, only
from daskgpt.graph.spreading import PartJoin, PartSum, PartTotal, Sent, Total, part_of, spread
from daskgpt.model.layers import CROSSENTROPY, EMBEDDING
from daskgpt.model.optimizer import SQUARES
from daskgpt.model.origins import Origin
from daskgpt.model.precision import blank, values_of
from daskgpt.training.grouping import OUTSIDE, is_sum, squared_tasks, update_group

# Updates of a block are one task: what a task costs a cluster is milliseconds, whatever it does.
MERGED = "chunk"
LOSS = "loss"  # the unit of the sum that updates nothing
Owners = Mapping[Hashable, int]


class Ownership:
    """Which part updates what of a step's graph, and which of its updates are one task.

    parts      over how many the step is spread
    sizes      parameter -> numbers in it: updates are shared out so that nobody holds much more than others
    one_task   whether all that a part updates is one task; else what it updates of a block is
    """

    def __init__(self, graph: Graph, parts: int, sizes: Mapping[str, int], *, one_task: bool) -> None:
        self.parts, self.one_task = parts, one_task
        self.owners = shared_out(graph, parts, sizes)

    def owner_of(self, origin: Origin) -> int:
        """The part that updates what a task was made for."""
        return self.owners[update_group(origin, MERGED)]

    def unit_of(self, origin: Origin) -> Hashable:
        """What is updated in one task with it."""
        return self.owner_of(origin) if self.one_task else update_group(origin, MERGED)


def spread_step(graph: Graph, ownership: Ownership) -> Graph:
    """A step's graph with every sum made where least has to be sent for it."""
    updated = updated_by(graph)

    def total_of(key: Key) -> Total:
        if key not in updated:
            return Total(LOSS, 0)
        unit, own = ownership.unit_of(updated[key]), origin_of(graph[key])
        # The tables have many rows and few tokens: what is best for one layer need not be for another. And the sum of
        # the one goes on from the sum of the other.
        if own.layer in (EMBEDDING.name, CROSSENTROPY.name):
            unit = own.layer, own.where
        return Total(unit, ownership.owner_of(updated[key]))

    return spread(graph, ownership.parts, total_of)


def banded_updates(graph: Graph, rule_of: Callable[[Any], InPlaceRule]) -> Graph:
    """A spread step's graph with sums that are made by the tasks that use them, see `graph.bands`.

    rule_of   origin of an update -> how rows are written over
    """
    updates = [key for key in graph if update_of(graph, key) is not None and not is_pick(graph[key])]
    return update_by_bands(graph, updates, rule_of, blank, values_of)


def spread_groups(graph: Graph, group_of: GroupOf, ownership: Ownership, *, apart: bool, tables_stay: bool) -> GroupOf:
    """The groups of a spread step: what a part sums, updates and has as new weights, of a block or of all, are a task
    each.

    New weights go to every worker, moments to none: so they leave an update as results of their own.

    group_of     of all other tasks
    apart        whether there are barriers inside of the step, which a task must not lie across
    tables_stay  see `homes_of`
    """
    ready = {
        dependency: origin
        for key, node in graph.items()
        if (origin := update_of(graph, key)) is not None and not is_pick(node)
        for dependency in node.dependencies
        if is_sum(graph, dependency)
    }
    squared = squared_tasks(graph)

    def spread_group(key: Key) -> Hashable:
        function, own = getattr(graph[key], "func", None), origin_of(graph[key])
        stage = own.stage if apart and own is not None else ""
        if isinstance(function, Sent):  # between barriers, what one task has made only
            source = only(graph[key])
            return "sent", function.share, (group_of(source) or source) if apart else None
        if isinstance(function, PartTotal | PartSum):
            return "sum", function.share, stage
        if isinstance(function, PartJoin):
            return "met", function.share, stage
        if tables_stay and is_embedding(own):
            return None  # a task of its own
        if key in squared:
            return SQUARES, ownership.unit_of(squared[key]), stage
        origin = update_of(graph, key) or ready.get(key)
        if origin is None:
            return group_of(key)
        return "weights" if is_weight(graph, key) else "update", ownership.unit_of(origin), stage

    return spread_group


def homes_of(graph: Graph, ownership: Ownership, chunks: int, *, tables_stay: bool) -> Callable[[Key], int]:
    """Task -> the number of the part that does it.

    chunks       along the sequences
    tables_stay  whether tokens are looked up by the tables' owner, who sends what it has found
    """
    updated = updated_by(graph) | squared_tasks(graph)

    @cache
    def home_of(key: Key) -> int:
        function = getattr(graph[key], "func", None)
        if isinstance(function, PartTotal | PartSum | PartJoin | Sent | Done):
            return function.share.part
        if key in updated:
            return ownership.owner_of(updated[key])
        if tables_stay and is_embedding(origin_of(graph[key])):
            return ownership.owners[OUTSIDE]
        chunk = chunk_of(graph, key, whole=False)
        return 0 if chunk is None or chunk[0] is None else part_of(chunk[0], chunks, ownership.parts)

    return home_of


def shared_out(graph: Graph, parts: int, sizes: Mapping[str, int]) -> Owners:
    """Update group -> the part that owns its tensors: the largest first, each to whoever has least.

    Equals go from the last to the first: a large one, the tables, keeps its owner from the next ones, and those should
    not be the blocks whose gradients come last, or their owner would still update when all others are done.
    """
    origins = {origin.parameter: origin for key in graph if (origin := update_of(graph, key)) is not None}
    groups: Counter[Hashable] = Counter()
    for name, size in reversed(list(sizes.items())):
        groups[update_group(origins[name], MERGED)] += size
    held, owners = [0] * parts, {}
    for group, size in groups.most_common():
        owners[group] = held.index(min(held))
        held[owners[group]] += size
    return owners


def updated_by(graph: Graph) -> dict[Key, Origin]:
    """Tasks that update a parameter, pick from what such a task returns, or make the sum that it reads; its origin."""
    found: dict[Key, Origin] = {}
    for key in graph:
        origin = update_of(graph, key)
        if origin is not None:
            found[key] = origin
            sums = [] if is_pick(graph[key]) else list(graph[key].dependencies)
            while sums:
                if is_sum(graph, each := sums.pop()):
                    found[each] = origin
                    sums += graph[each].dependencies
    return found


def update_of(graph: Graph, key: Key) -> Origin | None:
    """The origin of a task that updates a parameter, or picks from what such a task returns; None for others."""
    origin = origin_of(graph[key])
    return origin if origin is not None and origin.phase == "update" and origin.parameter else None


def is_embedding(origin: Origin | None) -> bool:
    """Whether a task looks tokens up."""
    return origin is not None and (origin.layer, origin.phase) == (EMBEDDING.name, "forward")


def is_weight(graph: Graph, key: Key) -> bool:
    """Whether a task picks the new weight out of what an update returns."""
    return is_pick(graph[key]) and graph[key].func.number == 0
