"""The layers whose products run in bfloat16: float32 in and out, operands rounded, sums in float32.

A trained matrix is a `TrainedWeight`: its float32 values, which an optimizer updates, and the same values rounded and
packed for the products, which each update renews. Everything else (layernorm, softmax, GELU, sums, moments) stays
float32. Linear layers need no kernels here: `gemm.forward`, `gemm.backward_x` and `gemm.backward_weight` take such
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from daskgpt.kernels import optimizers
from daskgpt.kernels.bfloat16.gemm import TrainedRows, TrainedWeight, backward_weight, backward_x, forward, pack_weight
from daskgpt.kernels.crossentropy import scale_rows, softmax_losses


def crossentropy_forward(
    x: np.ndarray, wte: TrainedWeight, targets: np.ndarray, vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `crossentropy.forward` returns: losses, and their gradient with respect to the logits.

    Shapes   x (b, t, C), wte (V padded, C), targets (b, t) -> losses (b, t), dlogits (b, t, V padded)
    Dtype    int32 targets, float32
    """
    dlogits = forward(x, wte)
    return softmax_losses(dlogits, targets, vocabulary), dlogits


def crossentropy_backward_x(dy: np.ndarray, dlogits: np.ndarray, wte: TrainedWeight) -> np.ndarray:
    """Return dx = dy (dlogits wte).

    Shapes   dy (b, t), dlogits (b, t, V padded), wte (V padded, C) -> dx (b, t, C)
    Dtype    float32
    """
    return scale_rows(backward_x(dlogits, wte), dy)


def crossentropy_backward_wte(
    dy: np.ndarray, dlogits: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool, first_row: int = 0
) -> np.ndarray:
    """Return dwte = dlogitsᵀ (dy x), or some rows of it.

    Shapes   dy (b, t), dlogits (b, t, V padded), x (b, t, C) -> total (rows, C), from first_row on
    Dtype    float32
    """
    return backward_weight(dlogits, scale_rows(x, dy), total=total, accumulate=accumulate, first_row=first_row)


class PackedUpdate:
    """An optimizer's kernel that also takes `TrainedRows`: it updates their float32 values and packs them again."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.kernel = kernel

    def __call__(self, weight: Any, *arrays: np.ndarray, **options: float) -> None:
        if not isinstance(weight, TrainedRows):
            self.kernel(weight, *arrays, **options)
            return
        values = weight.weight.values[weight.first : weight.last]
        self.kernel(values, *arrays, **options)
        pack_weight(values, weight.weight.packed, first=weight.first)


def iteration(x: np.ndarray) -> np.ndarray:
    """Return one Newton-Schulz step as `optimizers.iteration` does, with rounded operands in its three products.

    Shapes   x (n, k) -> (n, k)
    Dtype    float32
    """
    packed = pack_weight(x)
    gram = forward(x, packed)
    square = forward(gram, pack_weight(gram))  # the gram matrix is its own transpose
    return optimizers.add_scaled(x, backward_x(optimizers.polynomial(gram, square), packed))


def muon_inplace(*arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Update a matrix as `optimizers.muon_inplace` does, with products in bfloat16."""
    return optimizers.muon_inplace(*arrays, step=iteration, **options)
