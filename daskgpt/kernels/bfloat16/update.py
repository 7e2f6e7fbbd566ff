"""Updates of trained matrices: the gradient of one and its AdamW step in one pass, where the gradient never leaves the
cache; and Muon with products in bfloat16.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.kernels import optimizers
from daskgpt.kernels.arguments import check_output, check_shape, contiguous
from daskgpt.kernels.bfloat16 import gemm, tiles
from daskgpt.kernels.bfloat16.isa import unit
from daskgpt.kernels.bfloat16.rounding import FLOAT32, NOTHING, check_float32, words
from daskgpt.kernels.compilation import kernel, wide_vectors
from daskgpt.kernels.optimizers import adamw_numbers, rates_of
from daskgpt.kernels.simd.lanes import address_of
from daskgpt.kernels.totals import additions, level


@kernel("l2 H1 H1 H1 h1 H1 H1 d1 d d d d n n4 n7", cost=5)
def _update(
    parts, weight, m, v, gradient, forward, backward, hyper, beta1, beta2, eps, decay, unit, sizes, places
):  # fmt: skip
    wide_vectors()
    tiles.open_unit(unit)
    (outputs, channels, first, last), plan = sizes, gemm.Plan(*places)
    row_bytes, rates = channels * 4, rates_of(np.float32, hyper, beta1, beta2, eps, decay)
    gemm.pack_x(parts, channels, plan.right)
    for row0 in range(first, last, plan.band_rows):
        rows = min(plan.band_rows, last - row0)
        if gradient.size:
            source = address_of(gradient) + (row0 - first) * row_bytes
            tiles.copy_rows(source, row_bytes, plan.totals, plan.sums_step, rows, channels)
        gemm.sum_parts(unit, parts, outputs, channels, row0, rows, plan, plan.totals, plan.sums_step)
        place = row0 * row_bytes
        for row in range(rows):
            offset, gradients = place + row * row_bytes, plan.totals + row * plan.sums_step
            moments = address_of(m) + offset, address_of(v) + offset
            adamw_numbers(address_of(weight) + offset, gradients, *moments, channels, np.float32(1), rates)
        source = address_of(weight) + place
        tiles.pack_weight_rows(source, row0, rows, outputs, channels, address_of(forward), address_of(backward))
    tiles.close_unit(unit)


def _check(where, parts, groups, start, state, first, last):
    """Raise unless the arguments of `linear_update` fit."""
    weight, m, v, hyper = state
    if not parts or not all(dy.size for dy, _ in parts):
        rule, got = "parts must be one pair or more, with tokens", {"parts": [dy.shape for dy, _ in parts]}
        raise refusal(ValueError, where, rule, got, "Give dy and x.")
    in_order = [*groups] == sorted(groups) and {*groups} == {*range(len({*groups}))}
    if len(groups) != len(parts) or not in_order:
        rule = "groups must be one a part, 0 ... 0 1 ... 1 and so on"
        raise refusal(ValueError, where, rule, {"groups": list(groups)}, "Give each part the number of its group.")
    outputs, channels = shape = weight.shape
    gemm.check_panel_rows(where, outputs, first, last)
    check_shape(where, "hyper", hyper, (3,))
    for name, array in (("weight", weight.values), ("m", m), ("v", v)):
        check_output(where, name, array, shape, FLOAT32)
    gemm.check_layout(where, weight)
    rule, got = "weight must be packed in tiles, for a unit for bfloat16", {"in_tiles": weight.in_tiles}
    require(weight.in_tiles, where, rule, got, "Sum the gradient, and update by it.")
    for dy, x in parts:
        check_shape(where, "dy", dy, (*x.shape[:-1], outputs))
        check_shape(where, "x", x, (*x.shape[:-1], channels))
        check_float32(where, dy=dy, x=x)
    if start is not None:
        check_shape(where, "start", start, (last - first, channels))
        check_float32(where, start=start)


def linear_update(
    parts: Sequence[Sequence[np.ndarray]],
    groups: Sequence[int],
    start: np.ndarray | None,
    state: tuple[gemm.TrainedWeight, np.ndarray, np.ndarray, np.ndarray],
    first: int,
    last: int,
    **options: float,
) -> None:
    """Update rows first ... last - 1 of a linear layer's weight by AdamW, in place, straight from dy and x.

    g = start + Σ_parts Σ_tokens dyᵀ x, then adamw_inplace, then packing, with the bits of these three kernels

    parts    pairs of dy and x, in the order in which their rows are summed
    groups   group of each part, whose total the part is added to, see `kernels.totals`; the first continues from start
    start    rows first ... last - 1 of the gradient that the sum continues from, or None
    state    weight, m, v (whole), hyper
    options  options of adamw_inplace

    Shapes   dy (..., O), x (..., C), start (last - first, C), weight, m, v (O, C), hyper (3,) float64
    Dtype    float32; dy and x are rounded
    Cost     2 O C operations per token, 28 bytes per number; rows of the gradient stay in the second cache
    Errors   TypeError for other dtypes; ValueError when shapes or groups do not fit, a part has no tokens, rows do not
             begin and end at multiples of 32 (or the last row), or an array cannot be written; RuntimeError for another
             unit's layout
    """
    _check("bfloat16.linear_update", parts, groups, start, state, first, last)
    weight, m, v, hyper = state
    outputs, channels = weight.shape
    operands, table = [(contiguous(dy), contiguous(x)) for dy, x in parts], []
    before = None if start is None else 0  # the group that has a total
    for (dy, x), group, after in zip(operands, groups, [*groups[1:], None]):
        following = additions(group, parts=1 + groups[-1]) if group != after else 0
        table.append(gemm.part_of(dy, x, level(group), group != before, following))
        before = group
    plan = gemm.plan_of(table, channels, 1 + max(map(level, groups)))
    arrays = [NOTHING if array is None else words(array) for array in (weight.values, m, v, start)]
    packed, sizes = (weight.forward, weight.backward), (outputs, channels, first, last)
    constants = [options[name] for name in ("beta1", "beta2", "eps", "weight_decay")]
    _update(np.array(table, np.int64), *arrays, *packed, hyper, *constants, int(unit()), sizes, plan)


def iteration(x: np.ndarray) -> np.ndarray:
    """Return one Newton-Schulz step as `optimizers.iteration` does, with rounded operands in its three products.

    Shapes   x (n, k) -> (n, k)
    Dtype    float32
    """
    packed = gemm.TrainedWeight.of(x)
    gram = gemm.forward(x, packed)
    square = gemm.forward(gram, gemm.TrainedWeight.of(gram))  # the gram matrix is its own transpose
    return optimizers.add_scaled(x, gemm.backward_x(optimizers.polynomial(gram, square), packed))


def muon_inplace(*arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Update a matrix as `optimizers.muon_inplace` does, with products in bfloat16."""
    return optimizers.muon_inplace(*arrays, step=iteration, **options)
