"""A state that a cluster keeps, fetched a few arrays at a time: who writes it never holds all of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import prod
from typing import Any
from uuid import uuid4

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.graph.nodes import Graph, Key, task
from daskgpt.graph.recording import Submission
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import values_of
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.step import State

FETCHED = "state.fetch"  # what Dask calls the tasks
TOGETHER = 2**25  # bytes of small arrays


class FetchedState(Mapping[str, np.ndarray]):
    """The arrays of a state by their names there, in the order in which a checkpoint has them.

    It holds the state where that is, but here only what was asked for last.

    Cost     the largest array, or some small ones
    Errors   schedulers.losses.LostResults where one is gone
    """

    def __init__(self, scheduler: Scheduler, state: State, config: GPT2Config) -> None:
        self.scheduler, self.packs = scheduler, state.packs
        self.places = {
            name: (number, place)
            for number, names in enumerate(state.layout.packs[: len(state.packs)])
            for place, name in enumerate(names)
        }
        self.groups = {name: group for group in _groups(self.places, config) for name in group}
        self.latest: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.latest:
            self.latest = {}  # before there are others
            self.latest = self._fetched(self.groups[name])
        return self.latest[name]

    def __contains__(self, name: object) -> bool:
        return name in self.groups

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def _fetched(self, group: Sequence[str]) -> dict[str, np.ndarray]:
        """Arrays that are picked out of their packs where these are."""
        token = uuid4().hex[:8]
        picked: dict[int, list[str]] = defaultdict(list)
        for name in group:
            picked[self.places[name][0]].append(name)
        graph: Graph = {}
        leaves: dict[Key, Any] = {}
        for number, names in picked.items():
            leaf, key = (f"state-{number}_-{token}",), (f"{FETCHED}-{number}_-{token}",)
            leaves[leaf] = self.packs[number]
            graph[key] = task(key, partial(_pick, [self.places[name][1] for name in names]), [leaf])
        found = self.scheduler.fetch(self.scheduler.run(Submission(graph, leaves, list(graph))))
        return {name: value for names, own in zip(picked.values(), found) for name, value in zip(names, own)}


def _groups(names: Iterable[str], config: GPT2Config) -> Iterator[list[str]]:
    """Names of arrays that are fetched together: weights, or others, of some size."""
    table = tensors(config)
    numbers = {name: number for number, name in enumerate(table)}

    def turn(name: str) -> tuple[bool, str, int]:
        kind, _, own = name.partition(".")
        return kind != "weight", kind, numbers[own]

    for _, kind in groupby(sorted(names, key=turn), key=lambda name: name.startswith("weight.")):
        group: list[str] = []
        size = 0
        for name in kind:
            nbytes = 4 * prod(table[name.partition(".")[2]].shape)
            if group and size + nbytes > TOGETHER:
                yield group
                group, size = [], 0
            group.append(name)
            size += nbytes
        yield group


def _pick(places: Sequence[int], pack: Sequence[Any]) -> list[np.ndarray]:
    return [values_of(pack[place]) for place in places]
