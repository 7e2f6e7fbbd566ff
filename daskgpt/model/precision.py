"""Precisions: which kernels replace others, and how a parameter is held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daskgpt.config.errors import require_known
from daskgpt.graph.calls import is_ours
from daskgpt.kernels import attention, crossentropy, embedding, linear, optimizers
from daskgpt.kernels.bfloat16 import attention as bf16_attention
from daskgpt.kernels.bfloat16 import gemm
from daskgpt.kernels.bfloat16 import update as bf16_update
from daskgpt.kernels.bfloat16.gemm import TrainedWeight, packed_bytes
from daskgpt.kernels.bfloat16.isa import Unit, unit
from daskgpt.model.parameters import Tensor

Kernel = Callable[..., Any]
TILE_TOKENS = 32  # that a product of bfloat16 adds in one step


@dataclass(frozen=True)
class OfArrays:
    """A kernel that takes arrays, made to take parameters as any precision holds them."""

    kernel: Kernel

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.kernel(*map(values_of, arguments), **options)


@dataclass(frozen=True)
class Precision:
    """One of float32, float64 (with which gradients are checked) and bfloat16.

    dtype     dtype of parameters and activations
    replaced  kernel -> kernel that runs in its place; all other kernels run unchanged
    packed    whether tensors that activations are multiplied by are also held packed, as a `TrainedWeight`
    rounding  kernels that read only the packed values of such a tensor
    at_once   kernel of a sum over the chunks -> number of tokens of a sequence that it adds in one step, if more than
              one; a chunk that ends inside such a step would change the order of the sum
    """

    name: str
    dtype: np.dtype
    replaced: Mapping[Kernel, Kernel] = field(default_factory=dict)
    packed: bool = False
    rounding: frozenset[Kernel] = frozenset()
    at_once: Mapping[Kernel, int] = field(default_factory=dict)

    def kernel(self, kernel: Kernel) -> Kernel:
        """Return the kernel that replaces one of a table; a kernel from outside the package gets only arrays."""
        if self.packed and not is_ours(kernel):
            return OfArrays(kernel)
        return self.replaced.get(kernel, kernel)

    @property
    def in_tiles(self) -> bool:
        """True if products run on a unit for bfloat16."""
        return self.packed and unit() is not Unit.PORTABLE

    def hold(self, tensor: Tensor, value: np.ndarray) -> Any:
        """Return a parameter as a step holds it, without a copy if it has the dtype already."""
        if self.packed and tensor.multiplied:
            return TrainedWeight.of(value)
        return np.asarray(value, self.dtype)

    def held_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a parameter as it is held."""
        values = int(np.prod(tensor.shape)) * self.dtype.itemsize
        return values + (packed_bytes(*tensor.shape) if self.packed and tensor.multiplied else 0)


def values_of(held: Any) -> np.ndarray:
    """Return the array of a parameter that is held in any precision."""
    return held.values if isinstance(held, TrainedWeight) else held


FLOAT32 = Precision("float32", np.dtype("float32"))
FLOAT64 = Precision("float64", np.dtype("float64"))
# The operands of products are rounded to bfloat16; sums and everything else stay float32.
BFLOAT16 = Precision(
    "bfloat16",
    np.dtype("float32"),
    {
        embedding.forward: OfArrays(embedding.forward),  # nothing is multiplied
        linear.forward: gemm.forward,
        attention.forward: bf16_attention.forward,
        attention.backward: bf16_attention.backward,
        linear.backward_x: gemm.backward_x,
        linear.backward_weight: gemm.backward_weight,
        crossentropy.forward: gemm.crossentropy_forward,
        crossentropy.backward_x: gemm.crossentropy_backward_x,
        crossentropy.backward_wte: gemm.crossentropy_backward_wte,
        optimizers.muon_inplace: bf16_update.muon_inplace,
    },
    packed=True,
    rounding=frozenset((gemm.forward, gemm.backward_x, gemm.crossentropy_forward, gemm.crossentropy_backward_x)),
    at_once=dict.fromkeys((linear.backward_weight, crossentropy.backward_wte), TILE_TOKENS),
)
PRECISIONS = {precision.name: precision for precision in (FLOAT32, BFLOAT16, FLOAT64)}


def precision_of(name: str) -> Precision:
    """Return the precision of a name.

    Errors   ValueError for an unknown name
    """
    require_known(name, PRECISIONS, "precision_of", "precision")
    return PRECISIONS[name]


def products_of(precision: Precision) -> str:
    """Return how matrix products are computed at a precision, for people.

    Errors   ValueError or RuntimeError if DASKGPT_MATMUL names a unit that is unknown or missing
    """
    if not precision.packed:
        return f"products in {precision.name}"
    return f"operands of products rounded to bfloat16, multiplied by {unit().name.lower()}, sums in float32"
