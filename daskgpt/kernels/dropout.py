"""Dropout: numbers that are left out at random while a model is trained, and others made larger to keep the mean."""

import numpy as np

from daskgpt.kernels.arguments import check_shape, flat, rows
from daskgpt.kernels.compilation import kernel, wide_vectors
from daskgpt.kernels.philox import factors_of_row, threshold_of


@kernel("r2 l1 i1 w2 w1 n n f")
def _dropped(x, streams, positions, y, factors, place, threshold, kept):
    wide_vectors()
    tokens = positions.size
    for i in range(x.shape[0]):
        factors_of_row(streams[i // tokens], place, 0, positions[i % tokens], threshold, kept, factors, x.shape[1])
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * factors[j]


def dropped(x: np.ndarray, streams: np.ndarray, positions: np.ndarray, place: int, rate: float) -> np.ndarray:
    """x with a share of its numbers set to 0 and the others divided by 1 - rate. Its gradient is the same of dy.

    Which ones follows from the stream of the sequence, the place, the position of the token and the channel alone.

    place    number of the place in the model: others are dropped elsewhere
    rate     the share, at least 0 and below 1

    Shapes   x (b, t, C), streams (b,), positions (t,) -> y (b, t, C)
    Dtype    float32 or float64; int64 streams, int32 positions
    Cost     10 rounds of Philox for four numbers
    Source   Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.html
    Errors   ValueError when the shapes do not fit
    """
    check_shape("dropout.dropped", "streams", streams, x.shape[:1])
    check_shape("dropout.dropped", "positions", positions, x.shape[1:2])
    y, factors = np.empty(x.shape, x.dtype), np.empty(x.shape[-1] + 3, x.dtype)
    _dropped(rows(x), flat(streams), flat(positions), rows(y), factors, place, threshold_of(rate), 1 / (1 - rate))
    return y
