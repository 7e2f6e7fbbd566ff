"""Muon whose products run in bfloat16: momentum, norm and the sums of the products stay float32."""

from functools import partial

import numpy as np

from daskgpt.kernels import muon as exact
from daskgpt.kernels import orthogonal
from daskgpt.kernels.bfloat16.packed_weight import pack_weight
from daskgpt.kernels.bfloat16.products import backward_x, forward


def iteration(x: np.ndarray) -> np.ndarray:
    """One Newton-Schulz step, as `orthogonal.iteration`, the operands of its three products rounded.

    Shapes   x (n, k) -> (n, k)
    Dtype    float32
    """
    packed = pack_weight(x)
    gram = forward(x, packed)
    square = forward(gram, pack_weight(gram))  # the gram matrix is its own transpose
    return orthogonal.add_scaled(x, backward_x(orthogonal.polynomial(gram, square), packed))


muon = partial(exact.muon, step=iteration)
muon_inplace = partial(exact.muon_inplace, step=iteration)
