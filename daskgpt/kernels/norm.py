"""The norm of all gradients together, in an order that no chunk, task or worker changes; and what follows from it.

A tensor's squares are summed in float64 (a float32's square is exact there) by units of 64 rows, in each by 32 lanes
that meet in a tree. The units are summed one after the other, tensor by tensor. Tasks that sum gradients have whole
units of rows, so whoever has some of them makes the same numbers.
"""

from __future__ import annotations

import math

import numpy as np

from daskgpt.kernels.arguments import flat
from daskgpt.kernels.compilation import kernel

UNIT_ROWS = 64  # bands of sums over the batch are multiples of it (`graph.calls`)
GRAD_INFO = 3  # numbers after those of the optimizer: norm, factor of the gradients, whether the update is made
LIMITS = 2  # of loss and norm, above which no update is made
_LANES = 32
_EPSILON = 1e-6  # PyTorch's, in what gradients are multiplied by


@kernel("r1")
def _squares(x):
    lanes = np.zeros(_LANES)
    whole = x.size // _LANES * _LANES
    for first in range(0, whole, _LANES):
        for lane in range(_LANES):
            value = np.float64(x[first + lane])
            lanes[lane] += value * value
    for i in range(whole, x.size):
        value = np.float64(x[i])
        lanes[i - whole] += value * value
    count = _LANES
    while count > 1:
        count //= 2
        for lane in range(count):
            lanes[lane] += lanes[lane + count]
    return lanes[0]


def squares(gradient: np.ndarray) -> np.ndarray:
    """Sums of the squares of a gradient, or of some whole units of its rows: one a unit, of a vector one.

    Shapes   any -> (units,) float64
    Dtype    float32 or float64
    Cost     the gradient once through memory
    """
    if gradient.ndim < 2:
        return np.array([_squares(flat(gradient))])
    firsts = range(0, len(gradient), UNIT_ROWS)
    return np.array([_squares(flat(gradient[first : first + UNIT_ROWS])) for first in firsts])


def guard(
    hyper: np.ndarray, loss: np.ndarray, *sums: np.ndarray | list[np.ndarray], clip: float, limits: bool
) -> np.ndarray:
    """Return what an update gets, and whether it is made.

    hyper    the optimizer's numbers, then the limits of loss and norm
    loss     of this step, ()
    sums     of each tensor: what `squares` returns of it, or of its parts, in their order
    clip     the norm that gradients are scaled down to where theirs is larger; 0 = none
    limits   whether updates are left out where loss or norm is above its limit

    Shapes   (S + 2,) -> (S + 3,) float64: the optimizer's numbers; the norm; what gradients are multiplied by,
             1 where they are not clipped; 1 where the update is made, else 0
    Source   Pascanu et al. 2013, arXiv:1211.5063, as `torch.nn.utils.clip_grad_norm_` has it
    """
    total = 0.0
    for own in sums:
        for part in own if isinstance(own, list) else [own]:
            for value in part.tolist():
                total += value
    norm = math.sqrt(total)
    scale = min(1.0, clip / (norm + _EPSILON)) if clip else 1.0
    *told, most_loss, most_norm = hyper.tolist()
    made = not limits or (float(loss) <= most_loss and norm <= most_norm)
    return np.array([*told, norm, scale, float(made)])
