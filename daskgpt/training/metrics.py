"""Metrics of steps: how they are computed, shown while a run trains, and checked to be finite."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm
from tqdm.std import EMA

from daskgpt.config.errors import refusal
from daskgpt.config.files import printable
from daskgpt.model.optimizer import learning_rate
from daskgpt.model.parameters import step_operations
from daskgpt.model.step import Outcome
from daskgpt.schedulers.machine import resident_memory
from daskgpt.schedulers.opening import resume_flags
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoint import checkpoints
from daskgpt.training.engine import Engine, named_parameters
from daskgpt.training.job import Job
from daskgpt.training.logs import METRICS


class StepMetrics:
    """Computes the metrics of steps. The cost must be negligible: a step can take a few milliseconds.

    tokens          trained on so far, including the step
    seconds         of training so far, all processes of the run and validations included [s]
    tokens_per_s    of the step
    gflop_per_s     of its matrix products, without what is computed twice
    memory_bytes    of this process, as of the last second; Dask's dashboard has those of workers
    """

    def __init__(self, job: Job, scheduler: Scheduler) -> None:
        self.job, self.scheduler, self.tokens = job, scheduler, math.prod(job.batch_shape)
        self.operations = step_operations(job.config, *job.batch_shape)
        self.memory, self.looked = 0, -math.inf

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
            if trained >= self.looked + MEMORY_EVERY:
                self.memory, self.looked = resident_memory(), trained
            shared["memory_bytes"] = self.memory
        for number, outcome in zip(window, outcomes):
            metrics = {"step": number, "loss": outcome.loss, "tokens": (number + 1) * self.tokens, **shared}
            metrics |= {} if outcome.norm is None else {"norm": outcome.norm}
            metrics["learning_rate"] = learning_rate(optimizer, number, self.job.steps)
            records.append(metrics)
        return records


MEMORY_EVERY = 1  # seconds: to ask the system takes 0.1 ms between two steps
# Of the metrics of steps, what the page of a cluster's dashboard shows.
SHOWN = ("step", "loss", "validation_loss", "tokens_per_s", "lost_steps")
SMOOTHING = 0.1  # share of the newest step in the numbers that are shown: a mean of about ten steps
PLAIN_EVERY = 30  # seconds between the lines in a file
LIVE = "{n_fmt}/{total_fmt} |{bar}| {desc}"  # tqdm's line


class Progress:
    """Shows the steps of a run.

    A terminal or a notebook has one line that is overwritten, and a lasting line for each validation. A file has the
    latter, and a line at the first step and now and then.

    done     how many steps earlier processes have made
    quiet    whether to show nothing
    stream   of the lines; None for stdout in a notebook, which shows streams apart, else stderr
    """

    def __init__(self, steps: int, *, done: int = 0, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.steps, notebook = steps, in_notebook()
        self.stream = stream or (sys.stdout if notebook else sys.stderr)
        self.quiet = quiet or self.stream is None
        self.live = not self.quiet and (notebook or self.stream.isatty())
        self.closed: set[TextIO] = set()  # streams whose reader has ended
        self.done = done
        self.validation = ""
        self.loss, self.rate = EMA(SMOOTHING), EMA(SMOOTHING)
        self.start, self.last_line = time.perf_counter(), -float("inf")
        self.line: tqdm | None = None

    def begin(self) -> None:
        """Note the time at which the first step begins, and show the live line."""
        self.start = time.perf_counter()
        if self.live:
            options = {"leave": False, "dynamic_ncols": True, "bar_format": LIVE, "disable": False}
            self.line = tqdm(total=self.steps, initial=self.done, file=self.stream, **options)

    def say(self, text: str) -> None:
        """Print a text on stdout."""
        self._print(text, sys.stdout)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show a step that was made, by the metrics of its line in metrics.jsonl."""
        now = time.perf_counter()
        self.done += 1
        self.loss(metrics["loss"])
        self.rate(metrics["tokens_per_s"])
        seconds = metrics["tokens"] * (self.steps / self.done - 1) / max(self.rate(), 0.1)
        left = f"{tqdm.format_interval(seconds)} left"
        validated = "validation_loss" in metrics
        if validated:
            self.validation = f"validation {metrics['validation_loss']:.3f}"
        if not self.quiet and (validated or (not self.live and now - self.last_line >= PLAIN_EVERY)):
            self.last_line = now
            # With the time since the start after a validation, else with the time that is left.
            words = self.validation + " (best)" * ("best" in metrics) if validated else ""
            words = self._words(words, f"after {tqdm.format_interval(now - self.start)}" if validated else left)
            self._print(f"step {self.done:,}/{self.steps:,}  {words}", self.stream)
        if self.line is not None:
            try:
                self.line.set_description_str(self._words(self.validation, left), refresh=False)
                self.line.update()
            except OSError:  # the terminal was closed: the run continues without it
                self.closed.add(self.stream)
                self.line = None

    def close(self) -> None:
        """Remove the live line; printed lines stay."""
        line, self.line = self.line, None
        if line is not None:
            with suppress(OSError):
                line.close()

    def _words(self, validation: str, duration: str) -> str:
        """Return losses, rate and time; the mean loss, since the end of a run reports that of the last step."""
        parts = f"mean loss {self.loss():.3f}", validation, f"{self.rate():,.0f} tokens/s", duration
        return ", ".join(filter(None, parts))

    def _print(self, text: str, stream: TextIO) -> None:
        if self.quiet or stream is None or stream in self.closed:
            return
        try:
            tqdm.write(printable(text), file=stream)
            stream.flush()
        except OSError:  # its reader has ended, or its disk is full: the run continues without it
            self.closed.add(stream)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


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
        packs = zip(weights.layout.packs, weights.packs)
        checks = [scheduler.submit("parameters.finite", _not_finite, names, pack) for names, pack in packs]
        if names := list(chain(*scheduler.fetch(checks))):
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
            flags = resume_flags(job.run.out, job.dataflow.scheduler)
            good = f"The last good checkpoint is {good_ones[-1]}: {flags} continues from there."
        advice = f"Lower --learning-rate, give more --warmup{clip}. No such model is written{losses}. {good}"
        got = f"step={step + 1}, {got}, learning_rate={rate:g} ({before})"
        return refusal(Diverged, "train", f"{rule} must stay finite", got, advice)


def _not_finite(names: Sequence[str], pack: tuple[Any, ...]) -> list[str]:
    """Return the names of the parameters of a pack that hold a NaN or an infinity."""
    # A NaN is both the least and the largest value; unlike isfinite, this needs no array of the tensor's size.
    values = named_parameters(dict(zip(names, pack)))
    return [name for name, value in values.items() if not np.isfinite([value.min(), value.max()]).all()]
