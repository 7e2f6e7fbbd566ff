"""GELU of consecutive numbers, too few for a loop that Numba vectorizes to be faster."""

import math

from llvmlite import ir
from numba.core import cgutils

from daskgpt.kernels.simd.lanes import (
    LANES,
    REALS,
    VECTOR,
    below,
    constant,
    exp,
    fma,
    instruction,
    load,
    load_masked,
    store,
    store_masked,
    whole,
)

_SLOPE, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715  # see `kernels.gelu`


def _gelu(builder: ir.IRBuilder, v: ir.Value) -> ir.Value:
    one = constant(REALS, 1.0)
    inner = fma(builder, builder.fmul(constant(REALS, _CUBIC), v), v, one)
    power = exp(builder, builder.fmul(builder.fmul(constant(REALS, -_SLOPE), v), inner))
    return builder.fdiv(v, builder.fadd(one, power))


@instruction("n n")
def gelu_at(builder, place, count):
    """Apply GELU, in its tanh form, to `count` float32 numbers at an address, in place."""
    with cgutils.for_range(builder, builder.lshr(count, whole(4))) as loop:
        offset = builder.mul(loop.index, whole(VECTOR))
        store(builder, _gelu(builder, load(builder, place, offset)), place, offset)
    rest = builder.and_(count, whole(LANES - 1))
    offset, mask = builder.mul(builder.sub(count, rest), whole(4)), below(builder, rest)
    store_masked(builder, _gelu(builder, load_masked(builder, place, offset, mask)), place, offset, mask)
