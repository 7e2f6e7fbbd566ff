"""The outer step of local steps: Nesterov momentum along the mean change of the replicas' weights."""

from collections.abc import Sequence

import numpy as np

from daskgpt.kernels.arguments import check_shape, flat

_PIECE = 1 << 14  # numbers of each array at a time: their float64 values stay in the cache


def nesterov(
    start: np.ndarray, momentum: np.ndarray, ends: Sequence[np.ndarray], *, rate: float, beta: float
) -> tuple[np.ndarray, np.ndarray]:
    """One step of stochastic gradient descent with Nesterov momentum, into new arrays.

    g = ((start - ends[0]) + (start - ends[1]) + ...) / R;  momentum' = beta momentum + g
    start' = start - rate (g + beta momentum')

    Computed in float64 from first to last and rounded once, so that one replica with rate 1 and beta 0 ends where it
    stands (start - (start - end) would not, in float32). The sum is one chain, by the replicas' numbers. NumPy's
    operations on single numbers are rounded as they are written.

    Shapes   start, momentum and each of the R ends of one shape -> start', momentum'
    Dtype    float32 or float64, one for all
    Cost     R + 4 arrays through memory
    Source   Nesterov as PyTorch's torch.optim.SGD(nesterov=True) has it, without dampening, its buffer zero at first;
             the outer step of DiLoCo, Douillard et al. 2023, arXiv:2311.08105
    Errors   ValueError when the shapes differ
    """
    check_shape("nesterov", "momentum", momentum, start.shape)
    for end in ends:
        check_shape("nesterov", "ends", end, start.shape)
    new_start, new_momentum = np.empty(start.shape, start.dtype), np.empty(start.shape, start.dtype)
    sources = [flat(array) for array in (start, momentum, *ends)]
    for first in range(0, start.size, _PIECE):
        piece = slice(first, first + _PIECE)
        old, kept, *found = (array[piece].astype(np.float64) for array in sources)
        total = old - found[0]
        for end in found[1:]:
            total += old - end
        gradient = total / len(found)
        kept = beta * kept + gradient
        flat(new_momentum)[piece] = kept
        flat(new_start)[piece] = old - rate * (gradient + beta * kept)
    return new_start, new_momentum
