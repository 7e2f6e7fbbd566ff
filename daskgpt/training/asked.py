"""Something asked of a model while it is trained, answered where its parameters are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np

from daskgpt.graph.nodes import Key, task
from daskgpt.graph.recording import Layout, Submission
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.step import State, named_parameters

ASKED = "model.ask"  # what Dask calls the task
Answer = TypeVar("Answer")


def asked(scheduler: Scheduler, state: State, function: Callable[[dict[str, np.ndarray]], Answer]) -> Answer:
    """What a function makes of a state's parameters, on a cluster in a task on one of the workers: none of them has to
    fit in this process.

    function   of the parameters by name; a cluster needs one that can be pickled, and an answer likewise

    Errors     those of the function; schedulers.losses.LostResults where a parameter is gone
    """
    if scheduler.in_place:
        return function(state.parameters(scheduler))
    token = uuid4().hex[:8]
    own = state.weights
    leaves: dict[Key, Any] = {(f"state-{number}_-{token}",): pack for number, pack in enumerate(own.packs)}
    key = (f"{ASKED}_-{token}",)
    graph = {key: task(key, partial(_answer, function, own.layout), list(leaves))}
    (answer,) = scheduler.fetch(scheduler.run(Submission(graph, leaves, [key])))
    found: Answer = answer
    return found


def _answer(function: Callable[[dict[str, np.ndarray]], Answer], layout: Layout, *packs: Any) -> Answer:
    return function(named_parameters(layout.unpack(packs)))
