"""Steps whose loss or norm lies far above those before: their update is left out.

The limits of a step follow from the steps before it and from nothing else, so the same steps are left out whoever makes
them, and again where they are made again. A step counts in later limits with its numbers as far as its own limits let
them: an outlier does not widen them at once, and a loss that has come to stay is let in after some steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import fsum, inf, sqrt
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.graph.nodes import Graph, Key, task
from daskgpt.graph.recording import GraphRun
from daskgpt.model.precision import values_of
from daskgpt.model.schedules import learning_rate
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoint import checkpoints
from daskgpt.training.job import Job
from daskgpt.training.metrics import METRICS
from daskgpt.training.step import NO_LIMITS, Limits, Outcome, State

WINDOW = 128  # steps that count
LEAST = 32  # steps before which nothing is left out


class Outliers:
    """The limits of steps, z standard deviations above the mean.

    seen   (step, loss, norm) of the steps that count, in order
    """

    def __init__(self, z: float, seen: Sequence[Sequence[Any]] = ()) -> None:
        self.z = z
        self.seen = [(int(step), float(loss), float(norm)) for step, loss, norm in seen]

    def limits(self, step: int) -> Limits:
        """Of loss and norm, above which the update of a step is left out."""
        known = [numbers for number, *numbers in self.seen if number < step][-WINDOW:]
        if not self.z or len(known) < LEAST:
            return NO_LIMITS
        losses, norms = zip(*known)
        return self._limit(losses), self._limit(norms)

    def note(self, step: int, outcome: Outcome) -> None:
        """A step is done; one that is made again counts once."""
        if self.z and outcome.norm is not None and (not self.seen or step > self.seen[-1][0]):
            most_loss, most_norm = self.limits(step)
            self.seen.append((step, min(outcome.loss, most_loss), min(outcome.norm, most_norm)))

    def facts(self, done: int) -> list[tuple[int, float, float]]:
        """What a checkpoint after so many steps says of them."""
        return [each for each in self.seen if each[0] < done][-WINDOW:]

    def _limit(self, values: Sequence[float]) -> float:
        mean = fsum(values) / len(values)
        deviation = sqrt(fsum((value - mean) ** 2 for value in values) / len(values))
        limit = mean + self.z * deviation
        return limit if limit < inf else inf


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
    found = scheduler.fetch(scheduler.run(GraphRun(graph, leaves, list(names))))
    return [name for own, finite in zip(names.values(), found) for name, is_finite in zip(own, finite) if not is_finite]


def _all_finite(places: list[int], pack: tuple[Any, ...]) -> list[bool]:
    return [_finite(pack[place]) for place in places]


def _finite(value: Any) -> bool:
    # A NaN is both the least and the largest value; unlike isfinite, this makes no array as long as the tensor.
    array = values_of(value)
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))
