"""Updates of trained matrices: the gradient of one and its AdamW step in one pass, where the gradient never leaves the
cache; Muon with products in bfloat16; and other optimizers, after whose updates matrices are packed again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.kernels import optimizers
from daskgpt.kernels.arguments import check_output, check_shape
from daskgpt.kernels.bfloat16 import tiles
from daskgpt.kernels.bfloat16.gemm import (
    TrainedRows,
    TrainedWeight,
    backward_weight,
    backward_x,
    check_layout,
    check_panel_rows,
    forward,
    runs_of_tokens,
    sum_rows,
)
from daskgpt.kernels.bfloat16.isa import scratch, unit
from daskgpt.kernels.bfloat16.rounding import FLOAT32, NOTHING, ceiling, check_float32, words
from daskgpt.kernels.bfloat16.tiles import STEP
from daskgpt.kernels.compilation import helper, kernel, wide_vectors
from daskgpt.kernels.optimizers import next_moment, next_weight, rates_of
from daskgpt.kernels.simd.lanes import address_of, read_real, write_real
from daskgpt.kernels.totals import additions, level, tree_add

# The rows of sums share the second cache with the panels of x.
_SUMS_BYTES, _RIGHT_BYTES, _MOST_ROWS = 3 << 19, 1 << 19, 256
# Columns of the table of runs of tokens: addresses of dy and x, number of tokens, the total that they are added to,
# whether that total begins with them at zero, and how many additions of two totals follow.
_DY, _X, _TOKENS, _TOTAL, _FRESH, _ADDITIONS = range(6)


class Plan(NamedTuple):
    """Memory of an update: addresses of panels and totals, bytes per total and per row, the size of a patch."""

    left: int
    right: int
    totals: int
    total_step: int
    sums_step: int
    band_rows: int
    band_columns: int


@helper
def _pack_x(runs, channels, right):
    """Pack the right panels of all runs, one after the other."""
    for run in range(len(runs)):
        x, tokens = runs[run, _X], runs[run, _TOKENS]
        panel = (tokens + 31) // 32 * STEP
        tiles.pack_pairs(x, channels * 4, tokens, channels, False, right, panel)
        right += (channels + 31) // 32 * panel


@helper
def _add_rows(source, target, step, rows, columns):
    for row in range(rows):
        for i in range(columns):
            write_real(target + row * step, i, read_real(target + row * step, i) + read_real(source + row * step, i))


@helper
def _sum_runs(unit, runs, outputs, channels, row0, rows, plan):
    """Sum dyᵀ x of all runs into the first total, for `rows` rows; the other totals hold groups to be added later."""
    right, total_step, sums_step = plan.right, plan.total_step, plan.sums_step
    for run in range(len(runs)):
        tokens, sums = runs[run, _TOKENS], plan.totals + runs[run, _TOTAL] * total_step
        steps = (tokens + 31) // 32
        panel = steps * STEP
        tiles.pack_pairs(runs[run, _DY] + row0 * 4, outputs * 4, tokens, rows, True, plan.left, panel)
        for column in range(0, channels, plan.band_columns):
            columns = min(plan.band_columns, channels - column)
            for i in range(0, rows, 32):
                target = sums + i * sums_step + column * 4
                start, start_step = (tiles.zero_row(), 0) if runs[run, _FRESH] else (target, sums_step)
                panels = right + column // 32 * panel
                sum_rows(
                    unit,
                    plan.left + i // 32 * panel,
                    panels,
                    panel,
                    steps,
                    columns,
                    start,
                    start_step,
                    target,
                    sums_step,
                )
        right += (channels + 31) // 32 * panel
        for _ in range(runs[run, _ADDITIONS]):
            _add_rows(sums, sums - total_step, sums_step, rows, channels)
            sums -= total_step


@helper
def _update_row(weight, gradient, m, v, channels, rates):
    """Update one row by AdamW; arguments are addresses of float32 numbers."""
    for i in range(channels):
        g = read_real(gradient, i)
        new_m = next_moment(read_real(m, i), g, rates.beta1, rates.keep1)
        new_v = next_moment(read_real(v, i), g * g, rates.beta2, rates.keep2)
        write_real(m, i, new_m)
        write_real(v, i, new_v)
        write_real(weight, i, next_weight(read_real(weight, i), new_m, new_v, rates))


@kernel("l2 H1 H1 H1 h1 H1 H1 d1 d d d d n n4 n7", cost=5)
def _update(
    runs, weight, m, v, gradient, forward, backward, hyper, beta1, beta2, eps, decay, unit, sizes, places
):  # fmt: skip
    wide_vectors()
    tiles.open_unit(unit)
    (outputs, channels, first, last), plan = sizes, Plan(*places)
    row_bytes, rates = channels * 4, rates_of(np.float32, hyper, beta1, beta2, eps, decay)
    _pack_x(runs, channels, plan.right)
    for row0 in range(first, last, plan.band_rows):
        rows = min(plan.band_rows, last - row0)
        if gradient.size:
            source = address_of(gradient) + (row0 - first) * row_bytes
            tiles.copy_rows(source, row_bytes, plan.totals, plan.sums_step, rows, channels)
        _sum_runs(unit, runs, outputs, channels, row0, rows, plan)
        place = row0 * row_bytes
        for row in range(rows):
            offset = place + row * row_bytes
            gradients, m_row, v_row = plan.totals + row * plan.sums_step, address_of(m) + offset, address_of(v) + offset
            _update_row(address_of(weight) + offset, gradients, m_row, v_row, channels, rates)
        source = address_of(weight) + place
        tiles.pack_weight_rows(source, row0, rows, outputs, channels, address_of(forward), address_of(backward))
    tiles.close_unit(unit)


@functools.lru_cache(1024)
def _plan(longest: int, channels: int, totals: int) -> tuple[int, int]:
    """Return the rows and columns of a patch, for runs of up to `longest` steps of 32 tokens and a number of totals."""
    rows = min(_MOST_ROWS, max(32, _SUMS_BYTES // (channels * 4 * totals) // 32 * 32))
    return rows, min(ceiling(channels, 32), max(128, _RIGHT_BYTES // (longest * STEP) * 32))


def _check(where, parts, groups, start, state, first, last):
    """Raise unless the arguments of `linear_update` fit."""
    weight, m, v, hyper = state
    if not parts:
        raise refusal(ValueError, where, "parts must be one pair or more", {"parts": len(parts)}, "Give dy and x.")
    in_order = [*groups] == sorted(groups) and {*groups} == {*range(len({*groups}))}
    if len(groups) != len(parts) or not in_order:
        rule = "groups must be one a part, 0 ... 0 1 ... 1 and so on"
        raise refusal(ValueError, where, rule, {"groups": list(groups)}, "Give each part the number of its group.")
    outputs, channels = shape = weight.shape
    check_panel_rows(where, outputs, first, last)
    check_shape(where, "hyper", hyper, (3,))
    for name, array in (("weight", weight.values), ("m", m), ("v", v)):
        check_output(where, name, array, shape, FLOAT32)
    check_layout(where, weight)
    for dy, x in parts:
        check_shape(where, "dy", dy, (*x.shape[:-1], outputs))
        check_shape(where, "x", x, (*x.shape[:-1], channels))
        check_float32(where, dy=dy, x=x)
    if start is not None:
        check_shape(where, "start", start, (last - first, channels))
        check_float32(where, start=start)


def _in_two_steps(parts, groups, start, state, first, last, options):
    weight, m, v, hyper = state
    totals = [np.empty((last - first, weight.shape[1]), FLOAT32) for _ in range(1 + max(map(level, groups)))]
    if start is not None:
        totals[0][:] = start
    begun = start is not None
    for (dy, x), group, after in zip(parts, groups, [*groups[1:], None]):
        backward_weight(dy, x, total=totals[level(group)], accumulate=begun, first_row=first)
        begun = group == after
        if not begun:
            tree_add(totals, level(group), additions(group, parts=1 + groups[-1]))
    values = weight.values[first:last]
    optimizers.adamw_inplace(values, totals[0], m[first:last], v[first:last], hyper, **options)
    weight.pack(values, first)


def _runs(dy, x):
    """Return the address of each run of tokens in dy and in x, and its length."""
    runs, tokens = runs_of_tokens(dy)
    down, across = tokens * dy.shape[-1] * dy.itemsize, tokens * x.shape[-1] * x.itemsize
    return [(dy.ctypes.data + run * down, x.ctypes.data + run * across, tokens) for run in range(runs)]


def _table(operands, groups, started):
    """Return the table of runs; if `started`, the first group continues from a gradient."""
    runs = [(*place, group) for (dy, x), group in zip(operands, groups) for place in _runs(dy, x)]
    rows, before, count = [], 0 if started else None, 1 + groups[-1]
    for (*place, group), after in zip(runs, [*(run[-1] for run in runs[1:]), None]):
        rows.append((*place, level(group), group != before, additions(group, parts=count) if group != after else 0))
        before = group
    return np.array(rows, np.int64)


def _in_one_pass(parts, groups, start, state, first, last, options):
    weight, m, v, hyper = state
    outputs, channels = weight.shape
    operands = [(np.ascontiguousarray(dy), np.ascontiguousarray(x)) for dy, x in parts]
    table = _table(operands, groups, start is not None)
    steps, totals = [ceiling(count, 32) // 32 for count in table[:, _TOKENS].tolist()], 1 + int(table[:, _TOTAL].max())
    band_rows, band_columns = _plan(max(steps), channels, totals)
    sums_step = ceiling(channels, 32) * 4 + 64
    total_step = band_rows * sums_step
    places = scratch(
        band_rows // 32 * max(steps) * STEP, ceiling(channels, 32) // 32 * sum(steps) * STEP, totals * total_step
    )
    plan = *places, total_step, sums_step, band_rows, band_columns
    arrays = [NOTHING if array is None else words(array) for array in (weight.values, m, v, start)]
    constants = [options[name] for name in ("beta1", "beta2", "eps", "weight_decay")]
    sizes = outputs, channels, first, last
    _update(table, *arrays, weight.forward, weight.backward, hyper, *constants, int(unit()), sizes, plan)


def linear_update(
    parts: Sequence[Sequence[np.ndarray]],
    groups: Sequence[int],
    start: np.ndarray | None,
    state: tuple[TrainedWeight, np.ndarray, np.ndarray, np.ndarray],
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
    Errors   TypeError for other dtypes; ValueError when shapes or groups do not fit, rows do not begin and end at
             multiples of 32 (or the last row), or an array cannot be written; RuntimeError for another unit's layout
    """
    _check("bfloat16.linear_update", parts, groups, start, state, first, last)
    in_one_pass = state[0].in_tiles and all(dy.size for dy, _ in parts)
    (_in_one_pass if in_one_pass else _in_two_steps)(parts, groups, start, state, first, last, options)


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
        weight.weight.pack(values, weight.first)


def iteration(x: np.ndarray) -> np.ndarray:
    """Return one Newton-Schulz step as `optimizers.iteration` does, with rounded operands in its three products.

    Shapes   x (n, k) -> (n, k)
    Dtype    float32
    """
    packed = TrainedWeight.of(x)
    gram = forward(x, packed)
    square = forward(gram, TrainedWeight.of(gram))  # the gram matrix is its own transpose
    return optimizers.add_scaled(x, backward_x(optimizers.polynomial(gram, square), packed))


def muon_inplace(*arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Update a matrix as `optimizers.muon_inplace` does, with products in bfloat16."""
    return optimizers.muon_inplace(*arrays, step=iteration, **options)
