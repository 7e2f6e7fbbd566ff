"""The layers whose products run in bfloat16: float32 in and out, operands rounded, sums in float32.

A trained matrix is a `TrainedWeight`: its float32 values, which AdamW works on, and the same values rounded and packed
for the products, which each update renews. Everything else (layernorm, softmax, GELU, sums, moments) stays float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskgpt.kernels import embedding
from daskgpt.kernels.arguments import check_rows
from daskgpt.kernels.bfloat16 import PackedWeight, pack_weight, update_weight
from daskgpt.kernels.bfloat16 import backward_weight as weight_product
from daskgpt.kernels.bfloat16 import backward_x as input_product
from daskgpt.kernels.bfloat16 import forward as product
from daskgpt.kernels.crossentropy import scale_rows, softmax_losses


@dataclass(frozen=True, slots=True)
class TrainedWeight:
    """A matrix in float32, and packed in bfloat16.

    Shapes   values (O, C); it is indexed by rows and has a shape like an array
    """

    values: np.ndarray
    packed: PackedWeight

    @classmethod
    def of(cls, values: np.ndarray) -> TrainedWeight:
        """Pack a float32 matrix."""
        return cls(values, pack_weight(values))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.packed.nbytes

    def __getitem__(self, rows: slice) -> TrainedRows:
        first, last, _ = rows.indices(len(self.values))
        return TrainedRows(self, first, last)


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """Some rows of a trained matrix, to be updated in place."""

    weight: TrainedWeight
    first: int
    last: int


def linear_forward(x: np.ndarray, weight: TrainedWeight, bias: np.ndarray) -> np.ndarray:
    """y = x weightᵀ + bias.

    Shapes   x (b, t, C), weight (O, C), bias (O,) -> y (b, t, O)
    Dtype    float32
    """
    return product(x, weight.packed, bias)


def linear_without_bias(x: np.ndarray, weight: TrainedWeight) -> np.ndarray:
    """y = x weightᵀ.

    Shapes   x (b, t, C), weight (V, C) -> y (b, t, V)
    Dtype    float32
    """
    return product(x, weight.packed)


def linear_backward_x(dy: np.ndarray, weight: TrainedWeight) -> np.ndarray:
    """dx = dy weight.

    Shapes   dy (b, t, O), weight (O, C) -> dx (b, t, C)
    Dtype    float32
    """
    return input_product(dy, weight.packed)


def linear_backward_weight(
    dy: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool, first_row: int = 0
) -> np.ndarray:
    """dweight = dyᵀ x, or some rows of it.

    Shapes   dy (b, t, O), x (b, t, C) -> total (rows, C), the rows of the gradient from `first_row` on
    Dtype    float32
    """
    check_rows("rounded_layers.linear_backward_weight", total, first_row, dy.shape[-1])
    return weight_product(dy, x, total=total, accumulate=accumulate, rows=(first_row, first_row + len(total)))


def embedding_forward(tokens: np.ndarray, wte: TrainedWeight, positions: np.ndarray, wpe: np.ndarray) -> np.ndarray:
    """`embedding.forward` of the float32 table: nothing is multiplied."""
    return embedding.forward(tokens, wte.values, positions, wpe)


def crossentropy_forward(
    x: np.ndarray, wte: TrainedWeight, targets: np.ndarray, vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cross-entropy of every token, and its gradient with respect to the logits, as `crossentropy.forward`.

    Shapes   x (b, t, C), wte (V padded, C), targets (b, t) -> losses (b, t), dlogits (b, t, V padded)
    Dtype    int32 targets, float32
    """
    dlogits = product(x, wte.packed)
    return softmax_losses(dlogits, targets, vocabulary), dlogits


def crossentropy_backward_x(dy: np.ndarray, dlogits: np.ndarray, wte: TrainedWeight) -> np.ndarray:
    """dx = dy (dlogits wte).

    Shapes   dy (b, t), dlogits (b, t, V padded), wte (V padded, C) -> dx (b, t, C)
    Dtype    float32
    """
    return scale_rows(input_product(dlogits, wte.packed), dy)


def crossentropy_backward_wte(
    dy: np.ndarray, dlogits: np.ndarray, x: np.ndarray, *, total: np.ndarray, accumulate: bool, first_row: int = 0
) -> np.ndarray:
    """dwte = dlogitsᵀ (dy x), or some rows of it.

    Shapes   dy (b, t), dlogits (b, t, V padded), x (b, t, C) -> total (rows, C), from first_row on
    Dtype    float32
    """
    return linear_backward_weight(dlogits, scale_rows(x, dy), total=total, accumulate=accumulate, first_row=first_row)


class PackedUpdate:
    """An optimizer's kernel for trained matrices as well: it works on their float32 values, which are packed again.

    Into new arrays it is called with a whole `TrainedWeight` and returns another; in place with some `TrainedRows`.
    """

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.kernel = kernel

    def __call__(self, weight: Any, *arrays: np.ndarray, **options: float) -> Any:
        if isinstance(weight, TrainedWeight):
            new = self.kernel(weight.values, *arrays, **options)
            if not isinstance(new, tuple):  # without moments
                return TrainedWeight.of(new)
            values, *moments = new
            return TrainedWeight.of(values), *moments
        if isinstance(weight, TrainedRows):
            values = weight.weight.values[weight.first : weight.last]
            self.kernel(values, *arrays, **options)
            pack_weight(values, weight.weight.packed, first=weight.first)
            return None
        return self.kernel(weight, *arrays, **options)


def linear_update(
    parts: Sequence[Sequence[np.ndarray]],
    groups: Sequence[int],
    start: np.ndarray | None,
    state: Sequence[Any],
    first: int,
    last: int,
    **options: float,
) -> None:
    """Gradient, AdamW and packing of some rows of a linear layer's weight in one pass; the same bits as one by one.

    parts    pairs of dy and x, in the order in which their rows are summed
    groups   of each the group whose total it enters, see `kernels.totals`
    start    rows of the gradient that the sum goes on from, or None
    state    weight, m, v (whole), hyper
    """
    weight, m, v, hyper = state
    dys, xs = zip(*parts)
    update_weight(
        dys, xs, weight.values, m, v, weight.packed, hyper,
        groups=groups, gradient=start, rows=(first, last), **options,
    )  # fmt: skip
