"""The products on any processor: operands rounded to bfloat16, products and sums in float32 by BLAS.

BLAS may sum a row in another order when there are more rows or fewer, so here a row's last bits can depend on the
others.
"""

import numpy as np

from daskgpt.kernels.arguments import rows
from daskgpt.kernels.bfloat16.rounding import rounded
from daskgpt.kernels.float32 import blas


def product(x, weight, backward, bias):
    """What products._product does."""
    width = weight.channels if backward else weight.outputs
    y = np.empty((*x.shape[:-1], width), np.float32)
    blas.matmul(rows(rounded(x)), weight.forward, rows(y), transpose_b=not backward)
    if bias is not None:
        y += bias
    return y


def gradient(dy, x, total, accumulate, first, last):
    """What weight_gradient.backward_weight does."""
    if not dy.size:
        if not accumulate:
            total[...] = 0
        return total
    # A weight's rows come in bands: of dy each of them rounds its own part alone.
    left, right = rounded(rows(dy)[:, first:last]), rows(rounded(x))
    return blas.matmul(left, right, total, transpose_a=True, accumulate=accumulate)
