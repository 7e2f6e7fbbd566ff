"""The state that a run on a cluster begins with: made where it is kept, so that no process ever holds all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.graph.nodes import Graph, Key, task
from daskgpt.graph.recording import FIRST, Layout, Submission
from daskgpt.model.parameters import RandomParameters, tensors
from daskgpt.model.precision import Precision
from daskgpt.schedulers.protocol import Scheduler


class FirstPack:
    """Makes a pack: random weights and moments of zeros from nothing, others of the arrays it is given.

    names    in a state, of the pack's arrays
    made     names of those that are not given
    random   initial values; None where the weights are given
    """

    def __init__(
        self,
        config: GPT2Config,
        precision: Precision,
        names: Sequence[str],
        made: frozenset[str],
        random: RandomParameters | None,
    ) -> None:
        self.config, self.precision, self.names, self.made, self.random = config, precision, names, made, random

    def __call__(self, given: Sequence[np.ndarray] = ()) -> tuple[Any, ...]:
        values, table = iter(given), tensors(self.config)
        pack = []
        for name in self.names:
            kind, _, own = name.partition(".")
            if name not in self.made:
                value = next(values)
            elif kind == "weight" and self.random is not None:
                value = self.random[own]
            else:
                value = np.full(table[own].shape, 0, self.precision.dtype)
            pack.append(self.precision.hold(table[own], value) if kind == "weight" else value)
        return tuple(pack)


def first_packs(
    scheduler: Scheduler,
    layout: Layout,
    home_of: Callable[[int], int | None],
    config: GPT2Config,
    precision: Precision,
    parameters: Mapping[str, np.ndarray],
    moments: Mapping[str, np.ndarray] | None,
) -> list[Any]:
    """Handles of the packs of a first state.

    home_of      number of the worker where a pack is at home, None where that does not matter
    parameters   by name; random ones are made by the tasks, all others are sent, a pack at a time
    moments      "MOMENT.NAME" of every tensor; None = zeros

    Errors       schedulers.losses.LostResults
    """
    token = uuid4().hex[:8]  # a run that lost everything begins again
    random = parameters if isinstance(parameters, RandomParameters) else None
    graph: Graph = {}
    leaves: dict[Key, Any] = {}
    homes: dict[Key, int] = {}
    for number, names in enumerate(layout.packs):
        made = frozenset(name for name in names if (random if name.startswith("weight.") else moments is None))
        key, leaf = (f"{FIRST}-{number}_-{token}",), (f"state.given-{number}_-{token}",)
        if given := [name for name in names if name not in made]:
            leaves[leaf] = tuple(
                parameters[name.removeprefix("weight.")] if name.startswith("weight.") else (moments or {})[name]
                for name in given
            )
        graph[key] = task(key, FirstPack(config, precision, names, made, random), [leaf] if given else [])
        if (home := home_of(number)) is not None:
            homes |= {key: home, leaf: home} if given else {key: home}
    return scheduler.run(Submission(graph, leaves, list(graph), homes=homes))
