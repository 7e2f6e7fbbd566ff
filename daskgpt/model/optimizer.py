"""AdamW over the parameter table, and the learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import dask.array as da
import numpy as np

from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.calls import apply
from daskgpt.kernels.adamw import adamw
from daskgpt.model.parameters import decayed
from daskgpt.model.tape import Tape


@dataclass(frozen=True)
class Updated:
    """A parameter tensor after its update, with its moments."""

    weight: da.Array
    m: da.Array
    v: da.Array


def update(
    parameters: Mapping[str, da.Array],
    gradients: Mapping[str, da.Array],
    m: Mapping[str, da.Array],
    v: Mapping[str, da.Array],
    hyper: da.Array,
    config: OptimizerConfig,
    tape: Tape,
) -> dict[str, Updated]:
    """One AdamW update of every tensor: a task each.

    hyper    what changes from step to step, see `hyper_parameters`
    Source   Loshchilov and Hutter 2019, arXiv:1711.05101
    """
    updated = {}
    for name, weight in parameters.items():
        axes = "OC"[: weight.ndim]
        options = {
            "beta1": config.beta1,
            "beta2": config.beta2,
            "eps": config.eps,
            "weight_decay": config.weight_decay if decayed(name, config.decay) else 0.0,
        }
        new = apply(
            f"adamw-{name}-{tape.token}",
            tape.replaced.get(adamw, adamw),
            f"{axes}, {axes}, {axes}, {axes}, S -> {axes}, {axes}, {axes}",
            [weight, gradients[name], m[name], v[name], hyper],
            options=options,
        )
        updated[name] = Updated(*new)
    return updated


def hyper_parameters(config: OptimizerConfig, step: int, steps: int) -> np.ndarray:
    """Learning rate and the two bias corrections of a step (the first is 0), float64 (3,)."""
    return np.array(
        [learning_rate(config, step, steps), 1 - config.beta1 ** (step + 1), 1 - config.beta2 ** (step + 1)]
    )


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Constant; or a linear rise over `warmup` steps, then half a cosine down to the final learning rate.

    Source   Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts
    """
    if config.schedule == "constant":
        return config.learning_rate
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(steps - 1 - config.warmup, 1)
    fall = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + fall * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
