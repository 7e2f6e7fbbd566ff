"""Optimizers as a table of updates, and the learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import dask.array as da
import numpy as np

from daskgpt.config.run import OptimizerConfig
from daskgpt.config.settings import part_of, row_of
from daskgpt.graph.calls import Origin, apply, is_ours
from daskgpt.graph.update_in_place import Update
from daskgpt.kernels import optimizers
from daskgpt.kernels.bfloat16 import gemm
from daskgpt.kernels.bfloat16.update import linear_update
from daskgpt.kernels.optimizers import GRAD_INFO, clipped_hyper, squares
from daskgpt.model.parameters import Tensor
from daskgpt.model.tape import Tape

Kernel = Callable[..., Any]


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, in a run of `steps`.

    The rate rises linearly over `warmup` steps to its maximum, and falls to the final rate in the last step, unless the
    run ends with the warm-up: with `linear` and `cosine` in all steps after the warm-up, with `wsd` (warmup, stable,
    decay) in a line in the last `cooldown` steps. With `constant` it neither rises nor falls.

    Source   Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts (cosine); Hu et al. 2024, arXiv:2404.06395,
             and Hägele et al. 2024, arXiv:2405.18392 (wsd)
    """
    warmup = 0 if config.schedule == "constant" else part_of(config.warmup, steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    wanted = {"constant": 0, "wsd": part_of(config.cooldown, steps)}.get(config.schedule, steps)
    if wanted == 0:
        return config.learning_rate
    falls = min(wanted, steps - 1 - warmup)
    way = min(max((step - (steps - 1 - falls)) / max(falls, 1), 0.0), 1.0)
    left = _half_cosine(way) if config.schedule == "cosine" else 1 - way
    return config.final_learning_rate + (config.learning_rate - config.final_learning_rate) * left


# C libraries differ in the last bit of a cosine, and a run's bits would depend on the machine.
def _half_cosine(progress: float) -> float:
    """Return (1 + cos(π progress)) / 2 for progress from 0 to 1: the square of cos(π progress / 2), by its Taylor
    series."""
    angle = math.pi / 2 * progress
    square = angle * angle
    total = term = 1.0
    for number in range(1, 27, 2):
        term *= -square / (number * (number + 1))
        total += term
    return total * total


@dataclass(frozen=True)
class Optimizer:
    """One row of the table of optimizers: how tensors are updated.

    kernel    called as kernel(weight, gradient, *moments, hyper, **options); it updates all rows of weight and moments
              in place, or a part of them
    moments   names of the arrays that are kept from step to step, zero at the start, in the shape of the weight
    per_row   names of moments that have one number per row of the weight instead
    options   returns the constants of a tensor
    hyper     returns what changes from step to step, float64 (S,) or a number, from the step and the number of steps
    fused     summing kernel -> kernel that computes that sum and this update in one pass, on a unit for bfloat16
    whole     whether all rows of a tensor must be updated together
    updates   returns whether this row updates a tensor
    others    row that updates all other tensors, with the same hyper
    """

    name: str
    kernel: Kernel
    moments: tuple[str, ...]
    options: Callable[[OptimizerConfig, Tensor], Mapping[str, float]]
    hyper: Callable[[OptimizerConfig, int, int], np.ndarray | float]
    fused: Mapping[Kernel, Kernel] = field(default_factory=dict)
    per_row: tuple[str, ...] = ()
    whole: bool = False
    updates: Callable[[Tensor], bool] = lambda tensor: True
    others: Optimizer | None = None

    def of(self, tensor: Tensor) -> Optimizer:
        """Return the row that updates a tensor."""
        return self if self.others is None or self.updates(tensor) else self.others.of(tensor)

    def state(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the moments of a state: "MOMENT.NAME" -> tensor of the weight, with the shape of the moment."""
        kinds = dict.fromkeys(kind for tensor in parameters.values() for kind in self.of(tensor).moments)
        return {
            f"{kind}.{name}": replace(tensor, shape=tensor.shape[:1]) if kind in row.per_row else tensor
            for kind in kinds
            for name, tensor in parameters.items()
            if kind in (row := self.of(tensor)).moments
        }


def _decay(config: OptimizerConfig, tensor: Tensor) -> float:
    return config.weight_decay if tensor.decayed(config.decay) else 0.0


def _adamw_options(config: OptimizerConfig, tensor: Tensor) -> Mapping[str, float]:
    decay = _decay(config, tensor)
    return {"beta1": config.beta1, "beta2": config.beta2, "eps": config.eps, "weight_decay": decay}


def _adamw_hyper(config: OptimizerConfig, step: int, steps: int) -> np.ndarray:
    """Return learning rate and the two bias corrections of a step (the first step is 0)."""
    corrections = (1 - _power(beta, step + 1) for beta in (config.beta1, config.beta2))
    return np.array([learning_rate(config, step, steps), *corrections])


ADAMW = Optimizer(
    name="adamw",
    kernel=optimizers.adamw_inplace,
    moments=("m", "v"),
    options=_adamw_options,
    hyper=_adamw_hyper,
    fused={gemm.backward_weight: linear_update},
)


def _muon_options(config: OptimizerConfig, tensor: Tensor) -> Mapping[str, float]:
    decay = _decay(config, tensor)
    return {"beta": config.muon_beta, "scale": config.muon_scale, "weight_decay": decay, "maps": tensor.maps}


MUON = Optimizer(
    name="muon",
    kernel=optimizers.muon_inplace,
    moments=("m",),
    options=_muon_options,
    hyper=_adamw_hyper,
    whole=True,
    updates=lambda tensor: tensor.row.is_matrix and tensor.row.per_block,
    others=ADAMW,
)

OPTIMIZERS: Mapping[str, Optimizer] = {row.name: row for row in (ADAMW, MUON)}


def optimizer_of(name: str) -> Optimizer:
    """Return the optimizer that a configuration names. Errors   as `row_of`"""
    return row_of(name, OPTIMIZERS, "train", "optimizer")


class Clipped:
    """A kernel from outside of the package, for gradients that are clipped.

    In place of hyper, it gets the result of `kernels.optimizers.clipped_hyper`, which the package's kernels read
    themselves. It updates all rows of a tensor or a part.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(self, weight: Any, gradient: np.ndarray, *others: np.ndarray, **options: float) -> Any:
        *moments, info = others
        hyper, (_, scale) = info[:-GRAD_INFO], info[-GRAD_INFO:]
        if scale != 1:
            gradient = gradient * gradient.dtype.type(scale)
        return self.kernel(weight, gradient, *moments, hyper, **options)


def clipped(gradients: Mapping[str, da.Array], hyper: da.Array, config: OptimizerConfig, tape: Tape) -> da.Array:
    """Return, from all gradients, the input of updates in place of hyper; see `kernels.optimizers.clipped_hyper`."""
    sums: list[da.Array] = []
    for name, gradient in gradients.items():
        origin = Origin("squares", "update", name)
        sums += apply(origin.name(tape.token), squares, f"{'OC'[: gradient.ndim]} -> ", [gradient], origin=origin)
    origin = Origin("norm", "update", "gradients")
    (info,) = apply(
        origin.name(tape.token),
        clipped_hyper,
        f"S{', ' * len(sums)} -> N",
        [hyper, *sums],
        options={"clip": config.clip},
        origin=origin,
        new_axes={"N": len(hyper) + GRAD_INFO},
    )
    return info


def update(
    tensors: Mapping[str, Tensor],
    state: Mapping[str, da.Array],
    gradients: Mapping[str, da.Array],
    hyper: da.Array,
    config: OptimizerConfig,
    tape: Tape,
) -> dict[str, da.Array]:
    """Update every tensor in a task; return the new state under the names of the old one.

    state    "weight.NAME" of every tensor, and "MOMENT.NAME" of tensors that have that moment
    hyper    numbers that change from step to step, see `Optimizer.hyper` and `clipped`
    """
    new: dict[str, da.Array] = {}
    for name, tensor in tensors.items():
        axes, row = "OC"[: len(tensor.shape)], optimizer_of(config.optimizer).of(tensor)
        kinds = ["weight", *row.moments]
        first, *moments = (state[f"{kind}.{name}"] for kind in kinds)
        origin = Origin(row.name, "update", name, parameter=name)
        kernel = Clipped(row.kernel) if config.clip and not is_ours(row.kernel) else row.kernel
        outputs = [axes[:1] if kind in row.per_row else axes for kind in kinds]
        results = apply(
            origin.name(tape.token),
            Update(tape.precision.kernel(kernel), row.fused if tape.precision.in_tiles else {}, row.whole),
            f"{', '.join([axes, axes, *outputs[1:]])}, S -> {', '.join(outputs)}",
            [first, gradients[name], *moments, hyper],
            options=row.options(config, tensor),
            origin=origin,
        )
        new |= {f"{kind}.{name}": result for kind, result in zip(kinds, results)}
    return new


# C libraries differ in the last bit of a power, and a run's bits would depend on the machine.
def _power(base: float, exponent: int) -> float:
    """Return base**exponent by squaring, for an exponent of at least 1."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base *= base
        exponent //= 2
    return result
