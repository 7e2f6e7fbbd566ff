"""Where everybody waits: a pass that adds barriers between the stages of a finished graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter

from daskgpt.config.errors import refusal
from daskgpt.graph.nodes import Graph, Key, is_leaf, task, waiting_for


def barrier(*results: object) -> None:
    """What a barrier task runs: all it waits for has run, and nothing needs to be done."""


def with_barriers(graph: Graph, stage_of: Callable[[Key], str], *, name: str, tokens: bool) -> Graph:
    """The graph with a barrier after each stage: no task of a stage starts before all of the stages before it are done.

    stage_of   task -> its stage
    name       begins the keys of the barriers
    tokens     whether a barrier waits for a token of each task instead of its result: on a cluster, where a task's
               arguments travel to where it runs

    Errors     RuntimeError where stages depend on each other in a circle
    """
    members: dict[str, list[Key]] = defaultdict(list)
    for key, node in graph.items():
        if not is_leaf(node):
            members[stage_of(key)].append(key)
    stages = _in_order(graph, members, stage_of)
    new = {key: node for key, node in graph.items() if is_leaf(node)}
    before: list[Key] = []
    for number, stage in enumerate(stages):
        for key in members[stage]:
            new[key] = waiting_for(graph[key], before)
        if tokens:
            done = [(f"{name}-token-{number}_{place}", *key) for place, key in enumerate(members[stage])]
            new |= {token: task(token, barrier, [key]) for token, key in zip(done, members[stage])}
        else:
            done = members[stage]
        key = (f"{name}-{number}_",)
        new[key] = task(key, barrier, [*done, *before])
        before = [key]
    return new


def _in_order(graph: Graph, members: Mapping[str, list[Key]], stage_of: Callable[[Key], str]) -> list[str]:
    """The stages, each after those it depends on; of several possible ones, the one whose tasks come first."""
    needs: dict[str, set[str]] = {stage: set() for stage in members}
    for stage, keys in members.items():
        for key in keys:
            needs[stage] |= {stage_of(d) for d in graph[key].dependencies if d in graph and not is_leaf(graph[d])}
        needs[stage].discard(stage)
    try:
        return list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        rule, got = "stages must follow one another", f"a circle of {error.args[1]}"
        raise refusal(RuntimeError, "with_barriers", rule, got, "Use a finer grain.") from None
