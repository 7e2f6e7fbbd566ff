"""Products of a linear layer in bfloat16 with float32 sums: what `--precision bfloat16` computes with.

One interface, three units: AMX tiles, AVX-512 with BF16, and float32 BLAS on rounded operands. The processor decides,
or the environment variable DASKGPT_MATMUL (amx, avx512 or portable). bfloat16 arrays are uint16 arrays.
"""

from daskgpt.kernels.bfloat16.packed_weight import PackedWeight, pack_weight
from daskgpt.kernels.bfloat16.products import backward_x, forward
from daskgpt.kernels.bfloat16.rounding import from_bfloat16, rounded, to_bfloat16
from daskgpt.kernels.bfloat16.units import Unit, outruns_float32, unit, works
from daskgpt.kernels.bfloat16.weight_gradient import backward_weight
from daskgpt.kernels.bfloat16.weight_update import update_weight

__all__ = [
    "PackedWeight",
    "Unit",
    "backward_weight",
    "backward_x",
    "forward",
    "from_bfloat16",
    "outruns_float32",
    "pack_weight",
    "rounded",
    "to_bfloat16",
    "unit",
    "update_weight",
    "works",
]
