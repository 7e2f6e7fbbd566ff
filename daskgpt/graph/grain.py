"""The size of a task: merge the tasks of one chunk. Knows chunks and dependencies, nothing of GPT-2.

A merged task calls the same kernels in the same order on the same arrays, so the grain changes no bit of the result.

    kernel    a task a kernel call
    segment   what one chunk does between two gathers
    block     what one chunk does in one stretch of the model (its transformer block), forward or backward
    chunk     all that one chunk does, where chunks hold whole sequences

Why a merged graph is free of circles. Let the *depth* of a task be how often the longest path to it has changed its
chunk. (1) An edge never leads to a smaller depth: a path to its start goes on to its end. (2) An edge that stays at its
depth stays in its chunk: if it changed the chunk, the depth of its end would be one more. So a path that leaves a group
(chunk, depth) has either grown in depth, and never comes back, or is in the same group. Blocks split such a group into
parts that follow one another, forward and backward, so that a path that has left a part does not come back either.
Groups that others choose (a gradient with its update) come with no such proof: `merge` looks for a circle at its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from dask.order import order

from daskgpt.config.errors import refusal
from daskgpt.graph.calls import is_pick
from daskgpt.graph.nodes import Graph, Key, is_leaf, task, waiting_for
from daskgpt.graph.program import Place, program_of

GRAINS = ("kernel", "segment", "block", "chunk")
Chunk = tuple[Any, ...]
GroupOf = Callable[[Key], Hashable]


@dataclass(frozen=True)
class Merged:
    """A graph of merged tasks, and where in it the wanted values are."""

    graph: Graph
    places: dict[Key, Place]


def chunk_of(graph: Graph, key: Key, whole: bool) -> Chunk | None:
    """Which part of the batch a task works on, (b, t); None for what belongs to no chunk (leaves, sums).

    whole   whether a chunk holds whole sequences, so that a gathered sequence is a chunk and no other thing
    """
    axes = _axes(graph, key)
    if not {"b", "t"} & set(axes):
        return None
    index = dict(zip(axes, key[1:]))
    return index.get("b"), 0 if whole else index.get("t")


def token_chunks(graph: Graph) -> int:
    """Into how many chunks the tasks of a graph cut a sequence."""
    found = (dict(zip(axes, key[1:])).get("t", 0) for key in graph if (axes := _axes(graph, key)))
    return 1 + max(found, default=0)


def groups(graph: Graph, grain: str, stretch_of: Callable[[Key], Hashable]) -> GroupOf:
    """Which merged task each task of a chunk goes into; None for tasks that belong to no chunk and stay on their own.

    stretch_of   for `block`: the stretch of the model that a task is in
    """
    if grain == "kernel":
        return lambda key: _source(graph, key)
    whole = grain != "segment" and token_chunks(graph) == 1
    chunks = {key: chunk_of(graph, key, whole) for key in graph}
    depths = _depths(graph, chunks)

    def group_of(key: Key) -> Hashable:
        if chunks[key] is None:
            return None
        return chunks[key], depths[key], stretch_of(key) if grain == "block" else None

    return group_of


def merge(
    graph: Graph,
    group_of: GroupOf,
    name_of: Callable[[Sequence[Key]], str],
    wanted: Iterable[Key],
    places: Mapping[Key, Place],
    carried: Mapping[Key, tuple[Key, Key]],
    after: Mapping[Key, Iterable[Key]],
    drop: bool = False,
) -> Merged:
    """Each group becomes one task; tasks of no group stay on their own, leaves stay as they are.

    name_of    what the task of these members is called: the first part of its key
    wanted     keys that are asked for from outside
    places     where leaves are found that are values in other data
    carried    leaves that the next run takes from what a task of this run returns: leaf -> (its data's key, the result)
    after      task -> tasks that must have run before it although it does not read them
    drop       whether a value is dropped when its last reader has taken it, even though other results of its task are
               still needed: only where no task runs twice

    Errors     RuntimeError where groups depend on each other in a circle, naming it
    """
    wanted = list(wanted)
    members: dict[Hashable, list[Key]] = defaultdict(list)
    own = {key: group_of(key) for key, node in graph.items() if not is_leaf(node)}
    for key in in_order(_with_waits_inside(graph, own, after)):
        if key in own:
            members[("alone", key) if own[key] is None else own[key]].append(key)
    home = {key: group for group, keys in members.items() for key in keys}
    names = {group: (name_of(keys), number) for number, (group, keys) in enumerate(members.items())}
    results = {result for _, result in carried.values()}
    packs = {home[result] for result in results}  # what the next run takes is a tuple, however short
    outputs = _outputs(graph, home, members, set(wanted), results)
    found = dict(places)
    for group, keys in outputs.items():
        for number, key in enumerate(keys):
            found[key] = Place(names[group], number if len(keys) > 1 or group in packs else None)
    readers = _readers(graph, home, set(wanted)) if drop else None
    for leaf, (data, result) in carried.items():
        found[leaf] = Place(data, found[result].number)
    merged = {key: node for key, node in graph.items() if is_leaf(node) and key not in found}
    for group, keys in members.items():
        program, needed = program_of(graph, keys, outputs[group], found, readers, group in packs)
        before = {names[home[earlier]] for key in keys for earlier in after.get(key, ())}
        # What a task waits for comes last among its arguments: the program does not look at it.
        needed += sorted(before - {names[group], *needed})
        merged[names[group]] = task(names[group], program, needed)
    _check_circle(merged)
    return Merged(merged, {key: found[key] for key in wanted})


def _with_waits_inside(graph: Graph, group: Mapping[Key, Hashable], after: Mapping[Key, Iterable[Key]]) -> Graph:
    """The graph in which a task depends on what must run before it in its own group: a program runs in this order."""
    inside = {
        key: [earlier for earlier in before if group[earlier] == group[key] is not None]
        for key, before in after.items()
    }
    return graph | {key: waiting_for(graph[key], before) for key, before in inside.items() if before}


def _check_circle(graph: Graph) -> None:
    try:
        TopologicalSorter({key: node.dependencies & graph.keys() for key, node in graph.items()}).prepare()
    except CycleError as error:
        circle = " -> ".join(str(key[0]) for key in reversed(error.args[1]))
        rule = "merged tasks must not wait for each other in a circle"
        raise refusal(RuntimeError, "merge", rule, circle, "Use a finer grain.") from None


def _readers(graph: Graph, home: Mapping[Key, Hashable], wanted: set[Key]) -> dict[Key, int]:
    """How many other groups read each value; one more where it is wanted from outside, so that it is never dropped."""
    readers: dict[Key, set[Hashable]] = defaultdict(set)
    for key in home:
        for dependency in graph[key].dependencies:
            readers[dependency].add(home[key])
    return {key: len(readers[key] - {home[key]}) + (key in wanted) for key in home}


def in_order(graph: Graph) -> list[Key]:
    """The keys in the order in which Dask would run them one by one."""
    return sorted(graph, key=order(graph).__getitem__)


def _outputs(
    graph: Graph, home: Mapping[Key, Hashable], members: Mapping[Hashable, list[Key]], wanted: set[Key], first: set[Key]
) -> dict[Hashable, list[Key]]:
    """What each group must return: what is wanted, and what tasks of other groups read; some of it first."""
    read = {d for key in home for d in graph[key].dependencies if d in home and home[d] != home[key]}
    returned = {group: [key for key in keys if key in read or key in wanted] for group, keys in members.items()}
    return {group: sorted(keys, key=lambda key: key not in first) for group, keys in returned.items()}


def _depths(graph: Graph, chunks: Mapping[Key, Chunk | None]) -> dict[Key, int]:
    """How often the longest path to a task has changed its chunk."""
    depths: dict[Key, int] = {}
    for key in in_order(graph):
        depths[key] = max(
            (depths[d] + (chunks[d] != chunks[key]) for d in graph[key].dependencies if not is_leaf(graph[d])),
            default=0,
        )
    return depths


def _axes(graph: Graph, key: Key) -> str:
    return getattr(getattr(graph[key], "func", None), "axes", "")


def _source(graph: Graph, key: Key) -> Key:
    """The task that computes a value: for a pick, the one it picks from."""
    return next(iter(graph[key].dependencies)) if is_pick(graph[key]) else key
