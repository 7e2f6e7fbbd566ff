"""The result of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.config.rich import html_table, svg_curve
from daskgpt.model.parameters import parameter_count, parameter_shapes

LABEL = 12  # columns of `model       ` and the like


@dataclass(repr=False)
class Result:
    """The result of a run.

    Fields   config: GPT2Config
                 size of the model
             parameters: dict[str, np.ndarray]
                 GPT-2's tensors under their published names, float32; of a cluster's run with a folder they are read
                 from there when they are first used
             losses: list[float]
                 loss of each step of the run, before its update; nan for a step of an earlier process that the metrics
                 lack [nats a token]
             validation_loss: float
                 the last one measured, nan if there was none [nats a token]
             seconds: float
                 duration of all steps and validations of this process [s]
             checkpoint: Path | None
                 the folder with the model, which `daskgpt.load` reads; None if no run folder was written
             first: int
                 how many steps earlier processes have made
             stopped: bool
                 whether Ctrl-C or SIGTERM has ended the run before its last step
             bits_a_byte: float
                 the validation loss by the bytes of the text, which compares different encodings; nan where this
                 process has measured none [bits a byte]
             timers: dict[str, float]
                 seconds that steps waited for validation, logs, samples, checkpoints and recovery points [s]
    """

    config: GPT2Config
    read: Callable[[], dict[str, np.ndarray]]  # returns the parameters
    losses: list[float]
    validation_loss: float
    seconds: float
    checkpoint: Path | None = None
    first: int = 0
    stopped: bool = False
    bits_a_byte: float = math.nan
    timers: dict[str, float] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters. Errors   as of `daskgpt.load` where they are read"""
        return self.read()

    def _repr_html_(self) -> str:
        """Return the same for notebooks, with the losses as a curve."""
        title, *lines = repr(self).splitlines()
        rows = [[line[:LABEL].strip(), line[LABEL:]] for line in lines]
        return html_table(title, rows) + svg_curve(self.losses, "loss of each step")

    def __repr__(self) -> str:
        """Return a few lines without any array."""
        steps = len(self.losses)
        own = f" ({steps - self.first:,} of them now)" if self.first else ""
        lines = [f"Result of {steps:,} step{'s' * (steps != 1)}{own} in {self.seconds:.1f} s"]
        arrays = len(parameter_shapes(self.config))
        lines.append(f"model       {parameter_count(self.config):,} parameters in {arrays} arrays")
        lines += [f"loss        {self.losses[0]:.3f} -> {self.losses[-1]:.3f} nats a token"] if self.losses else []
        if self.validation_loss == self.validation_loss:
            lines.append(f"validation  {self.validation_loss:.3f} nats a token")
        return "\n".join([*lines, f"written to  {self.checkpoint or 'nowhere'}"])
