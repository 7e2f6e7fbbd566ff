"""Stop a run whose numbers are no longer finite: nothing comes back from there, and no such model is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.graph.nodes import Graph, Key, task
from daskgpt.graph.recording import Submission
from daskgpt.model.optimizer import learning_rate
from daskgpt.model.precision import values_of
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoints import checkpoints
from daskgpt.training.job import Job
from daskgpt.training.metrics_file import METRICS
from daskgpt.training.step import State

RISEN = 0.5  # nats above the least loss, from which on a run was on its way up


class Finite:
    """What must be finite in a run, and what is to be said where it is not."""

    def __init__(self, job: Job, losses: Sequence[float], wait: Callable[[], None]) -> None:
        """losses   of all steps so far
        wait     until a checkpoint on its way is written
        """
        self.job, self.losses, self.wait = job, losses, wait

    def require(self, scheduler: Scheduler, state: State, metrics: Mapping[str, Any]) -> None:
        """The losses of a step must be finite, and with a validation loss every parameter.

        A validation reads nearly all parameters, but not positions beyond its sequences.

        Errors   RuntimeError with step, learning rate, the likely cause, and what to go on from
        """
        step = metrics["step"]
        for name, rule in {"loss": "the loss", "validation_loss": "the validation loss"}.items():
            if not math.isfinite(metrics.get(name, 0.0)):
                raise self._diverged(step, rule, f"{name}={metrics[name]}")
        if "validation_loss" in metrics:
            self.require_state(scheduler, state, step)

    def require_state(self, scheduler: Scheduler, state: State, step: int) -> None:
        """The same for every parameter, where the scheduler keeps it. Errors   as above"""
        self._require(step, not_finite(scheduler, state))

    def require_parameters(self, step: int, parameters: Mapping[str, np.ndarray]) -> None:
        """The same for the parameters that a run ends with. Errors   as above"""
        self._require(step, [name for name, value in parameters.items() if not _finite(value)])

    def _require(self, step: int, names: list[str]) -> None:
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise self._diverged(step, "parameters", f"parameter={names[0]}{others}")

    def _diverged(self, step: int, rule: str, got: str) -> RuntimeError:
        self.wait()
        job = self.job
        rate = learning_rate(job.optimizer, step, job.horizon.at(step))
        losses = f"; the losses are in {Path(job.run.out) / METRICS}" if job.run.out else ""
        clip = "" if job.optimizer.clip else " or --clip 1"
        return refusal(
            RuntimeError,
            "train",
            f"{rule} must stay finite",
            f"step={step}, {got}, learning_rate={rate:g}",
            f"{self._cause(step)}: lower --learning-rate, give more --warmup{clip}. No such model is written{losses}. "
            f"{self._last_good()}",
        )

    def _cause(self, step: int) -> str:
        """What has likely led there."""
        before = [loss for loss in self.losses[:step] if math.isfinite(loss)]
        if not before:
            return "It began so: either the values that it starts from, or its first update"
        least, last = min(before), before[-1]
        if last > least + RISEN:
            return f"The loss had risen from {least:.3f} to {last:.3f} before: the learning rate is likely too high"
        return f"It came at once, from {last:.3f}: likely one update that was too large"

    def _last_good(self) -> str:
        """The checkpoint that there is to go on from."""
        found = checkpoints(Path(self.job.run.out)) if self.job.run.out else []
        if not found:
            return "There is no checkpoint to go on from."
        return f"The last good checkpoint is {found[-1]}: --resume {self.job.run.out} goes on from there."


def not_finite(scheduler: Scheduler, state: State) -> list[str]:
    """Names of the parameters that hold a NaN or an infinity. Each is looked at where the scheduler keeps it."""
    token = uuid4().hex[:8]  # another client of the cluster may ask the same
    graph: Graph = {}
    leaves: dict[Key, Any] = {}
    names: dict[Key, list[str]] = {}
    own = state.weights
    for number, (held, pack) in enumerate(zip(own.layout.packs, own.packs)):
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
