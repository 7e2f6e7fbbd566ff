"""Optimizers as a table of updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import dask.array as da
import numpy as np

from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.calls import CallOptions, Origin, apply
from daskgpt.kernels import adamw, momentum, muon
from daskgpt.kernels.bfloat16 import rounded_layers
from daskgpt.kernels.norm import GRAD_INFO, LIMITS, guard, squares
from daskgpt.model.parameters import Tensor
from daskgpt.model.schedules import learning_rate
from daskgpt.model.tape import Tape

Kernel = Callable[..., Any]
SQUARES, NORM = "squares", "norm"  # layers of the tasks behind the norm of all gradients


@dataclass(frozen=True)
class Optimizer:
    """One row: how tensors are updated.

    kernel    (weight, gradient, *moments, hyper, **options) -> (new weight, *new moments), the weight alone where
              there are no moments
    in_place  the same of some rows, written over weight and moments
    moments   names of the arrays like the weight that pass from step to step, zero at the start
    options   what is the same in every step, of a tensor
    hyper     what changes from step to step: float64 (hyper_size,), from the step and the number of all steps
    fused     summing kernel -> kernel that makes its sum and this update in one pass
    whole     whether a tensor is updated as a whole: no row of it without the others
    updates   which tensors it updates
    others    the row of all others, which is given the same hyper
    """

    name: str
    kernel: Kernel
    in_place: Kernel
    moments: tuple[str, ...]
    options: Callable[[OptimizerConfig, Tensor], Mapping[str, float]]
    hyper: Callable[[OptimizerConfig, int, int], np.ndarray]
    hyper_size: int
    fused: Mapping[Kernel, Kernel] = field(default_factory=dict)
    whole: bool = False
    updates: Callable[[Tensor], bool] = lambda tensor: True
    others: Optimizer | None = None

    def of(self, tensor: Tensor) -> Optimizer:
        """The row that updates a tensor."""
        return self if self.others is None or self.updates(tensor) else self.others.of(tensor)

    def state(self, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a state beside the weights: "MOMENT.NAME" -> whose moment it is, moment by moment."""
        kinds = dict.fromkeys(kind for tensor in known.values() for kind in self.of(tensor).moments)
        return {
            f"{kind}.{name}": tensor
            for kind in kinds
            for name, tensor in known.items()
            if kind in self.of(tensor).moments
        }


def _adamw_options(config: OptimizerConfig, tensor: Tensor) -> Mapping[str, float]:
    decay = config.weight_decay if tensor.decayed(config.decay) else 0.0
    return {"beta1": config.beta1, "beta2": config.beta2, "eps": config.eps, "weight_decay": decay}


def _adamw_hyper(config: OptimizerConfig, step: int, steps: int) -> np.ndarray:
    """Learning rate and the two bias corrections of a step (the first is 0)."""
    corrections = (1 - _power(beta, step + 1) for beta in (config.beta1, config.beta2))
    return np.array([learning_rate(config, step, steps), *corrections])


ADAMW = Optimizer(
    name="adamw",
    kernel=adamw.adamw,
    in_place=adamw.adamw_inplace,
    moments=("m", "v"),
    options=_adamw_options,
    hyper=_adamw_hyper,
    hyper_size=3,
    fused={rounded_layers.linear_backward_weight: rounded_layers.linear_update},
)


def _momentum_options(config: OptimizerConfig, tensor: Tensor) -> Mapping[str, float]:
    return {"beta": config.beta1, "weight_decay": config.weight_decay if tensor.decayed(config.decay) else 0.0}


MOMENTUM = Optimizer(
    name="momentum",
    kernel=momentum.momentum,
    in_place=momentum.momentum_inplace,
    moments=("m",),
    options=_momentum_options,
    hyper=lambda config, step, steps: np.array([learning_rate(config, step, steps)]),
    hyper_size=1,
)


def _muon_options(config: OptimizerConfig, tensor: Tensor) -> Mapping[str, float]:
    decay = config.weight_decay if tensor.decayed(config.decay) else 0.0
    return {"beta": config.muon_beta, "scale": config.muon_scale, "weight_decay": decay, "maps": tensor.row.maps}


MUON = Optimizer(
    name="muon",
    kernel=muon.muon,
    in_place=muon.muon_inplace,
    moments=("m",),
    options=_muon_options,
    hyper=_adamw_hyper,
    hyper_size=3,
    whole=True,
    updates=lambda tensor: tensor.row.is_matrix and tensor.row.per_block,
    others=ADAMW,
)

OPTIMIZERS: dict[str, Optimizer] = {each.name: each for each in (ADAMW, MOMENTUM, MUON)}


class Guarded:
    """An optimizer's kernel for gradients that are clipped, and for updates that may be left out.

    It gets what `kernels.norm.guard` returns in place of hyper, for some rows as well as for all.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(self, weight: Any, gradient: np.ndarray, *others: np.ndarray, **options: float) -> Any:
        *moments, grad_info = others
        hyper, (_, scale, made) = grad_info[:-GRAD_INFO], grad_info[-GRAD_INFO:]
        if not made:
            return (weight, *moments) if moments else weight
        if scale != 1:
            gradient = gradient * gradient.dtype.type(scale)
        return self.kernel(weight, gradient, *moments, hyper, **options)


def guards(config: OptimizerConfig) -> bool:
    """Whether updates wait for the norm of all gradients."""
    return bool(config.clip or config.skip_outliers)


def hyper_size(config: OptimizerConfig, optimizer: Optimizer) -> int:
    """How many numbers a step is given for its updates."""
    return optimizer.hyper_size + (LIMITS if guards(config) else 0)


def hyper_of(
    config: OptimizerConfig, optimizer: Optimizer, step: int, steps: int, limits: tuple[float, float] = (math.inf,) * 2
) -> np.ndarray:
    """What a step is given for its updates: float64 (hyper_size,).

    limits   of loss and norm, above which no update is made
    """
    hyper = optimizer.hyper(config, step, steps)
    return np.append(hyper, limits) if guards(config) else hyper


def guarded(
    gradients: Mapping[str, da.Array],
    tensors: Mapping[str, Tensor],
    loss: da.Array,
    hyper: da.Array,
    config: OptimizerConfig,
    optimizer: Optimizer,
    tape: Tape,
) -> da.Array:
    """Return what updates get in place of hyper, see `kernels.norm.guard`: it needs the gradients of all tensors."""
    sums: list[da.Array] = []
    for name, tensor in tensors.items():
        origin = Origin(SQUARES, "update", name, tensor.block)
        signature = f"{'OC'[: len(tensor.shape)]} -> "
        sums += apply(origin.name(tape.token), squares, signature, [gradients[name]], origin=origin)
    origin = Origin(NORM, "update", "gradients")
    (grad_info,) = apply(
        origin.name(tape.token),
        guard,
        f"S{', ' * (1 + len(sums))} -> N",
        [hyper, loss, *sums],
        options={"clip": config.clip, "limits": bool(config.skip_outliers)},
        origin=origin,
        call_options=CallOptions(new_axes={"N": optimizer.hyper_size + GRAD_INFO}),
    )
    return grad_info


def update(
    tensors: Mapping[str, Tensor],
    state: Mapping[str, da.Array],
    gradients: Mapping[str, da.Array],
    hyper: da.Array,
    config: OptimizerConfig,
    optimizer: Optimizer,
    tape: Tape,
) -> dict[str, da.Array]:
    """One update of every tensor, a task each: the new state, by the names of the old one.

    state    "weight.NAME" of every tensor, and "MOMENT.NAME" of those that have it
    hyper    what changes from step to step, see `Optimizer.hyper` and `guarded`
    """
    new: dict[str, da.Array] = {}
    for name, tensor in tensors.items():
        axes, row = "OC"[: len(tensor.shape)], optimizer.of(tensor)
        kinds = ["weight", *row.moments]
        first, *moments = (state[f"{kind}.{name}"] for kind in kinds)
        origin = Origin(row.name, "update", name, tensor.block, parameter=name)
        inputs = ", ".join([axes] * (len(kinds) + 1))
        results = apply(
            origin.name(tape.token),
            tape.precision.update(Guarded(row.kernel) if guards(config) else row.kernel),
            f"{inputs}, S -> {', '.join([axes] * len(kinds))}",
            [first, gradients[name], *moments, hyper],
            options=row.options(config, tensor),
            origin=origin,
        )
        new |= {f"{kind}.{name}": result for kind, result in zip(kinds, results)}
    return new


# C libraries differ in the last bit of a power, and a run's bits would depend on the machine.
def _power(base: float, exponent: int) -> float:
    """base**exponent by squaring; exponent is 1 or more."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base *= base
        exponent //= 2
    return result
