"""Metrics of steps, and checks that numbers stay finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.model.optimizer import learning_rate
from daskgpt.model.parameters import step_operations
from daskgpt.model.step import Outcome
from daskgpt.schedulers.machine import resident_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoint import checkpoints
from daskgpt.training.engine import Engine, named_parameters, run_on_packs
from daskgpt.training.job import Job
from daskgpt.training.logs import METRICS


class StepMetrics:
    """Computes the metrics of steps. The cost must be negligible: a step can take a few milliseconds.

    tokens          trained on so far, including the step
    seconds         of training so far, all processes of the run and validations included [s]
    tokens_per_s    of the step
    gflop_per_s     of its matrix products, without what is computed twice
    memory_bytes    of this process; Dask's dashboard has those of workers
    """

    def __init__(self, job: Job, scheduler: Scheduler) -> None:
        self.job, self.scheduler, self.tokens = job, scheduler, math.prod(job.batch_shape)
        self.operations = step_operations(job.config, *job.batch_shape)

    def of_window(
        self, window: range, outcomes: Sequence[Outcome], seconds: float, trained: float
    ) -> list[dict[str, Any]]:
        """Return the metrics of each of some steps.

        seconds   that all of them took
        trained   seconds that the run has trained
        """
        mean, optimizer, records = seconds / len(outcomes), self.job.optimizer, []
        shared: dict[str, Any] = {
            "seconds": round(trained, 3),
            "tokens_per_s": round(self.tokens / mean, 1),
            "gflop_per_s": round(self.operations / mean / 1e9, 3),
        }
        if self.scheduler.in_place:
            shared["memory_bytes"] = resident_memory()
        for number, outcome in zip(window, outcomes):
            metrics = {"step": number, "loss": outcome.loss, "tokens": (number + 1) * self.tokens, **shared}
            metrics |= {} if outcome.norm is None else {"norm": outcome.norm}
            metrics["learning_rate"] = learning_rate(optimizer, number, self.job.steps)
            records.append(metrics)
        return records


# Of the metrics of steps, what the page of a cluster's dashboard shows.
SHOWN = ("step", "loss", "validation_loss", "tokens_per_s", "lost_steps")


class Diverged(RuntimeError):
    """A loss or a parameter of a run is not finite."""


class Finite:
    """Checks that losses and parameters of a run stay finite, and explains where they do not."""

    def __init__(self, job: Job, losses: Sequence[float]) -> None:
        """losses   of all steps so far"""
        self.job, self.losses = job, losses

    def require(self, engine: Engine, metrics: Mapping[str, Any]) -> None:
        """Check the losses of a step, and with a validation loss every parameter.

        A validation reads nearly all parameters, but not positions beyond its sequences.

        Errors   Diverged with step, learning rate, the loss before, and the checkpoint to resume from
        """
        step = metrics["step"]
        for name, rule in {"loss": "the loss", "validation_loss": "the validation loss"}.items():
            if not math.isfinite(metrics.get(name, 0.0)):
                raise self._diverged(step, rule, f"{name}={metrics[name]}")
        if "validation_loss" in metrics:
            self.require_weights(engine, step)

    def require_weights(self, engine: Engine, step: int) -> None:
        """Check every parameter where the scheduler keeps it. Errors   as of `require`"""
        scheduler, weights = engine.scheduler, engine.weights()
        calls = [(partial(_not_finite, names), [pack]) for names, pack in zip(weights.layout.packs, weights.packs)]
        if names := list(chain(*scheduler.fetch(run_on_packs(scheduler, "parameters.finite", calls)))):
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise self._diverged(step, "parameters", f"parameter={names[0]}{others}")

    def _diverged(self, step: int, rule: str, got: str) -> Diverged:
        job, out = self.job, Path(self.job.run.out)
        rate = learning_rate(job.optimizer, step, job.steps)
        before = f"the loss before was {self.losses[step - 1]:.3f}" if 0 < step <= len(self.losses) else "it began so"
        clip = "" if job.optimizer.clip else " or --clip 1"
        losses = f"; the losses are in {out / METRICS}" if job.run.out else ""
        good = "There is no checkpoint to resume from."
        if job.run.out and (good_ones := checkpoints(out)):
            good = f"The last good checkpoint is {good_ones[-1]}: --resume {job.run.out} continues from there."
        advice = f"Lower --learning-rate, give more --warmup{clip}. No such model is written{losses}. {good}"
        got = f"step={step + 1}, {got}, learning_rate={rate:g} ({before})"
        return refusal(Diverged, "train", f"{rule} must stay finite", got, advice)


def _not_finite(names: Sequence[str], pack: tuple[Any, ...]) -> list[str]:
    """Return the names of the parameters of a pack that hold a NaN or an infinity."""
    # A NaN is both the least and the largest value; unlike isfinite, this needs no array of the tensor's size.
    values = named_parameters(dict(zip(names, pack)))
    return [name for name, value in values.items() if not np.isfinite([value.min(), value.max()]).all()]
