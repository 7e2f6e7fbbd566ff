"""State in other packs: a step that is recorded anew updates its tensors in other tasks, and its packs follow these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daskgpt.graph.nodes import Key, task
from daskgpt.graph.recording import STATE, Layout, Runnable, Submission

REPACK = "state.repack"  # what Dask calls the tasks


class Repack:
    """Makes a pack out of arrays in others.

    sources   of each array: which of the given packs, and which array there
    """

    def __init__(self, sources: Sequence[tuple[int, int]]) -> None:
        self.sources = tuple(sources)

    def __call__(self, *packs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(packs[pack][number] for pack, number in self.sources)


def repacked(runnable: Runnable, layout: Layout, packs: Sequence[Any]) -> Submission:
    """The run of tasks that brings state from one layout into a runnable's own, each pack to where that updates it.

    layout, packs   of the state as it is
    """
    places, graph = layout.places(), dict[Key, Any]()
    homes: dict[Key, int] = {}
    for number, names in enumerate(runnable.layout.packs):
        read = list(dict.fromkeys(places[name].key for name in names))
        key = (f"{REPACK}-{runnable.recorded.token}", number)
        sources = [(read.index(places[name].key), places[name].number or 0) for name in names]
        graph[key] = task(key, Repack(sources), read)
        if (STATE, number) in runnable.homes:
            homes[key] = runnable.homes[STATE, number]
    leaves = {(STATE, number): pack for number, pack in enumerate(packs)}
    return Submission(graph, leaves, list(graph), homes=homes)
