"""Stop a run whose numbers are no longer finite: nothing comes back from there, and no such model is written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.graph.nodes import Graph, Key, task
from daskgpt.graph.recording import Submission
from daskgpt.model.precision import values_of
from daskgpt.model.schedules import learning_rate
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job
from daskgpt.training.metrics_file import METRICS
from daskgpt.training.step import State


def require_finite(job: Job, scheduler: Scheduler, state: State, metrics: Mapping[str, Any]) -> None:
    """The losses of a step must be finite, and with a validation loss every parameter.

    A validation reads nearly all parameters, but not positions beyond its sequences.

    Errors   RuntimeError with step, learning rate and what to do
    """
    step = metrics["step"]
    for name, rule in {"loss": "the loss", "validation_loss": "the validation loss"}.items():
        if not math.isfinite(metrics.get(name, 0.0)):
            raise _diverged(job, step, rule, f"{name}={metrics[name]}")
    if "validation_loss" in metrics:
        require_finite_state(job, scheduler, state, step)


def require_finite_state(job: Job, scheduler: Scheduler, state: State, step: int) -> None:
    """The same for every parameter, where the scheduler keeps it.

    Errors   RuntimeError with step, learning rate and what to do
    """
    _require_finite_parameters(job, step, not_finite(scheduler, state))


def require_finite_parameters(job: Job, step: int, parameters: Mapping[str, np.ndarray]) -> None:
    """The same for the parameters that a run ends with.

    Errors   RuntimeError with step, learning rate and what to do
    """
    _require_finite_parameters(job, step, [name for name, value in parameters.items() if not _finite(value)])


def not_finite(scheduler: Scheduler, state: State) -> list[str]:
    """Names of the parameters that hold a NaN or an infinity. Each is looked at where the scheduler keeps it."""
    token = uuid4().hex[:8]  # another client of the cluster may ask the same
    graph: Graph = {}
    leaves: dict[Key, Any] = {}
    names: dict[Key, list[str]] = {}
    for number, (held, pack) in enumerate(zip(state.layout.packs, state.packs)):
        leaf, key = (f"parameters-{number}_-{token}",), (f"parameters.finite-{number}_-{token}",)
        places = [place for place, name in enumerate(held) if name.startswith("weight.")]
        if places:
            leaves[leaf], names[key] = pack, [held[place].removeprefix("weight.") for place in places]
            graph[key] = task(key, partial(_all_finite, places), [leaf])
    found = scheduler.fetch(scheduler.run(Submission(graph, leaves, list(names))))
    return [name for own, finite in zip(names.values(), found) for name, is_finite in zip(own, finite) if not is_finite]


def _all_finite(places: list[int], pack: tuple[Any, ...]) -> list[bool]:
    return [_finite(pack[place]) for place in places]


def _finite(value: Any) -> bool:
    # A NaN is both the least and the largest value; unlike isfinite, this makes no array as long as the tensor.
    array = values_of(value)
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _require_finite_parameters(job: Job, step: int, names: list[str]) -> None:
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise _diverged(job, step, "parameters", f"parameter={names[0]}{others}")


def _diverged(job: Job, step: int, rule: str, got: str) -> RuntimeError:
    rate = learning_rate(job.optimizer, step, job.horizon.at(step))
    losses = f"; the losses are in {Path(job.run.out) / METRICS}" if job.run.out else ""
    return refusal(
        RuntimeError,
        "train",
        f"{rule} must stay finite",
        f"step={step}, {got}, learning_rate={rate:g}",
        f"Lower --learning-rate or give more --warmup. No such model is written{losses}.",
    )
