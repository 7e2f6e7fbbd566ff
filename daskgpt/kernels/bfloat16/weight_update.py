"""The gradient of a weight and its AdamW step in one pass: the gradient never leaves the cache."""

import functools
from collections.abc import Sequence

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.kernels.adamw import adamw_inplace, next_moment, next_weight, step_scalars
from daskgpt.kernels.arguments import check_output, check_shape
from daskgpt.kernels.bfloat16.operands import FLOAT32, NOTHING, ceiling, check_float32, words
from daskgpt.kernels.bfloat16.packed_weight import PackedWeight, check_layout, check_panel_rows, pack_weight
from daskgpt.kernels.bfloat16.packing import pack_pairs, pack_weight_rows
from daskgpt.kernels.bfloat16.tiles import CONFIGURATION, STEP, ZEROS, close_unit, open_unit
from daskgpt.kernels.bfloat16.units import scratch, unit
from daskgpt.kernels.bfloat16.weight_gradient import (
    backward_weight,
    check_tokens,
    row_range,
    runs_of_tokens,
    sum_rows,
)
from daskgpt.kernels.compilation import helper, kernel, wide_vectors
from daskgpt.kernels.totals import additions, level, meet
from daskgpt.kernels.vectors.operations import address_of, copy_row, read_real, read_whole, write_real

# The rows of sums, and the panels of x that all of them are multiplied with, share the second cache.
_SUMS_BYTES, _RIGHT_BYTES, _MOST_ROWS = 3 << 19, 1 << 19, 256
# What the table of runs of tokens says of each: addresses of dy and x, tokens, which total they enter, whether that
# begins with them at zero, and how many additions of two totals follow.
_FIELDS = 6


@helper
def _pack_x(table, runs, channels, right):
    """The right panels of all runs, one after the other."""
    for run in range(runs):
        x, tokens = read_whole(table, run * _FIELDS + 1), read_whole(table, run * _FIELDS + 2)
        panel = (tokens + 31) // 32 * STEP
        pack_pairs(x, channels * 4, tokens, channels, False, right, panel)
        right += (channels + 31) // 32 * panel


@helper
def _add_rows(source, target, step, rows, columns):
    for row in range(rows):
        for i in range(columns):
            write_real(target + row * step, i, read_real(target + row * step, i) + read_real(source + row * step, i))


@helper
def _sum_runs(
    unit, table, runs, outputs, channels, row0, rows, zeros, left, right, totals, total_step, sums_step, band_columns
):
    """The first total (+)= dyᵀ x for `rows` rows, run after run, the others being those of groups that wait."""
    for run in range(runs):
        dy, tokens = read_whole(table, run * _FIELDS), read_whole(table, run * _FIELDS + 2)
        sums = totals + read_whole(table, run * _FIELDS + 3) * total_step
        fresh, meetings = read_whole(table, run * _FIELDS + 4), read_whole(table, run * _FIELDS + 5)
        steps = (tokens + 31) // 32
        panel = steps * STEP
        pack_pairs(dy + row0 * 4, outputs * 4, tokens, rows, True, left, panel)
        for column in range(0, channels, band_columns):
            columns = min(band_columns, channels - column)
            for i in range(0, rows, 32):
                target = sums + i * sums_step + column * 4
                start, start_step = (zeros, 0) if fresh else (target, sums_step)
                panels = right + column // 32 * panel
                sum_rows(
                    unit, left + i // 32 * panel, panels, panel, steps, columns, start, start_step, target, sums_step
                )
        right += (channels + 31) // 32 * panel
        for _ in range(meetings):
            _add_rows(sums, sums - total_step, sums_step, rows, channels)
            sums -= total_step


@helper
def _step(weight, gradient, m, v, channels, scalars):
    """AdamW of one row; addresses of float32 numbers."""
    rate, m_scale, v_scale = read_real(scalars, 0), read_real(scalars, 1), read_real(scalars, 2)
    beta1, keep1, beta2, keep2 = (
        read_real(scalars, 3), read_real(scalars, 4), read_real(scalars, 5), read_real(scalars, 6),
    )  # fmt: skip
    eps, decay = read_real(scalars, 7), read_real(scalars, 8)
    for i in range(channels):
        g = read_real(gradient, i)
        new_m = next_moment(read_real(m, i), g, beta1, keep1)
        new_v = next_moment(read_real(v, i), g * g, beta2, keep2)
        write_real(m, i, new_m)
        write_real(v, i, new_v)
        write_real(weight, i, next_weight(read_real(weight, i), new_m, new_v, rate, m_scale, v_scale, eps, decay))


@kernel("h1 H1 H1 H1 h1 H1 H1 h1 h1 n n n n n n n n n n n n n n")
def _update(
    table, weight, m, v, gradient, forward, backward, scalars, zeros, unit, configuration, runs, outputs, channels,
    first, last, left, right, sums, total_step, sums_step, band_rows, band_columns,
):  # fmt: skip
    wide_vectors()
    open_unit(unit, configuration)
    row_bytes = channels * 4
    _pack_x(address_of(table), runs, channels, right)
    for row0 in range(first, last, band_rows):
        rows = min(band_rows, last - row0)
        if gradient.size:
            for row in range(rows):
                copy_row(address_of(gradient) + (row0 - first + row) * row_bytes, sums + row * sums_step, channels)
        _sum_runs(
            unit, address_of(table), runs, outputs, channels, row0, rows, address_of(zeros), left, right, sums,
            total_step, sums_step, band_columns,
        )  # fmt: skip
        place = row0 * row_bytes
        for row in range(rows):
            offset = place + row * row_bytes
            _step(
                address_of(weight) + offset, sums + row * sums_step, address_of(m) + offset, address_of(v) + offset,
                channels, address_of(scalars),
            )  # fmt: skip
        pack_weight_rows(
            address_of(weight) + place, row0, rows, outputs, channels, address_of(forward), address_of(backward)
        )
    close_unit(unit)


@functools.lru_cache(1024)
def _plan(longest: int, channels: int, totals: int) -> tuple[int, int]:
    """Rows and columns of a patch, for runs of up to `longest` steps of 32 tokens and so many totals."""
    rows = min(_MOST_ROWS, max(32, _SUMS_BYTES // (channels * 4 * totals) // 32 * 32))
    return rows, min(ceiling(channels, 32), max(128, _RIGHT_BYTES // (longest * STEP) * 32))


def _check(where, dys, xs, groups, weight, m, v, packed, gradient, rows):
    """Raise unless the arguments of update_weight fit; returns the rows to update."""
    if not dys or len(dys) != len(xs):
        rule, found = "dys and xs must have as many chunks", f"{len(dys)} and {len(xs)}"
        raise refusal(ValueError, where, rule, found, "Give one of each.")
    count = len({*groups})
    in_order = [*groups] == sorted(groups) and {*groups} == {*range(count)}
    if len(groups) != len(dys) or not in_order:
        rule = "groups must be one a chunk, 0 ... 0 1 ... 1 and so on"
        raise refusal(ValueError, where, rule, {"groups": list(groups)}, "Leave them out for a single one.")
    outputs, channels = weight.shape
    first, last = row_range(where, outputs, rows)
    check_panel_rows(where, outputs, first, last)
    for name, array in (("weight", weight), ("m", m), ("v", v)):
        check_output(where, name, array, (outputs, channels), FLOAT32)
    check_layout(where, packed)
    if (packed.outputs, packed.channels) != (outputs, channels):
        rule = f"packed must be of the weight's shape {(outputs, channels)}"
        got = {"packed": (packed.outputs, packed.channels)}
        raise refusal(ValueError, where, rule, got, "Give the weight's own.")
    for dy, x in zip(dys, xs):
        check_tokens(where, dy, x)
        check_shape(where, "dy", dy, (*dy.shape[:-1], outputs))
        check_shape(where, "x", x, (*x.shape[:-1], channels))
        check_float32(where, dy=dy, x=x)
    if gradient is not None:
        check_shape(where, "gradient", gradient, (last - first, channels))
        check_float32(where, gradient=gradient)
    return first, last


def _in_two_steps(dys, xs, groups, weight, m, v, packed, hyper, gradient, first, last, options):
    shape = last - first, weight.shape[1]
    totals = [np.empty(shape, FLOAT32) for _ in range(1 + max(map(level, groups)))]
    if gradient is not None:
        totals[0][:] = gradient
    begun = gradient is not None
    for dy, x, group, after in zip(dys, xs, groups, [*groups[1:], None]):
        backward_weight(dy, x, total=totals[level(group)], accumulate=begun, rows=(first, last))
        begun = group == after
        if not begun:
            meet(totals, level(group), additions(group, parts=1 + groups[-1]))
    adamw_inplace(weight[first:last], totals[0], m[first:last], v[first:last], hyper, **options)
    pack_weight(weight[first:last], packed, first=first)


def _runs(dy, x):
    """The addresses of each run of tokens in dy and in x, and its length."""
    runs, tokens = runs_of_tokens(dy)
    down, across = tokens * dy.shape[-1] * dy.itemsize, tokens * x.shape[-1] * x.itemsize
    return [(dy.ctypes.data + run * down, x.ctypes.data + run * across, tokens) for run in range(runs)]


def _table(operands, groups, started):
    """The fields of every run; the first group goes on from a gradient where it is `started`."""
    runs = [(*place, group) for (dy, x), group in zip(operands, groups) for place in _runs(dy, x)]
    rows, before, count = [], 0 if started else None, 1 + groups[-1]
    for (*place, group), after in zip(runs, [*(run[-1] for run in runs[1:]), None]):
        rows.append((*place, level(group), group != before, additions(group, parts=count) if group != after else 0))
        before = group
    return np.array(rows, np.int64)


def _in_one_pass(dys, xs, groups, weight, m, v, packed, hyper, gradient, first, last, options):
    outputs, channels = weight.shape
    operands = [(np.ascontiguousarray(dy), np.ascontiguousarray(x)) for dy, x in zip(dys, xs)]
    table = _table(operands, groups, gradient is not None)
    steps, totals = [ceiling(count, 32) // 32 for count in table[:, 2].tolist()], 1 + int(table[:, 3].max())
    band_rows, band_columns = _plan(max(steps), channels, totals)
    sums_step = ceiling(channels, 32) * 4 + 64
    total_step = band_rows * sums_step
    left, right, sums = scratch(
        band_rows // 32 * max(steps) * STEP, ceiling(channels, 32) // 32 * sum(steps) * STEP, totals * total_step
    )
    scalars = np.array(step_scalars(hyper, **options), FLOAT32)
    _update(
        words(table), words(weight), words(m), words(v), NOTHING if gradient is None else words(gradient),
        packed.forward, packed.backward, words(scalars), ZEROS, unit(), CONFIGURATION, len(table), outputs, channels,
        first, last, left, right, sums, total_step, sums_step, band_rows, band_columns,
    )  # fmt: skip


def update_weight(
    dys: Sequence[np.ndarray],
    xs: Sequence[np.ndarray],
    weight: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    packed: PackedWeight,
    hyper: np.ndarray,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    groups: Sequence[int] | None = None,
    gradient: np.ndarray | None = None,
    rows: tuple[int, int] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, PackedWeight]:
    """AdamW step of a linear layer's weight, in place, straight from the chunks of dy and x; packs the new weight, too.

    g = gradient + Σ_chunks Σ_tokens dyᵀ x, then adamw_inplace, then pack_weight: the same bits as these three in a row

    groups   of each chunk its group, whose totals meet as `kernels.totals` says; the first one's goes on from gradient

    Shapes   dys of (..., O), xs of (..., C), weight, m, v (O, C), gradient (O, C) or, with rows=(first, end),
             (end - first, C), hyper (3,) float64 -> weight, m, v, packed
    Dtype    float32; dys and xs are rounded
    Cost     2 O C operations a token, 28 bytes a number; the gradient stays in the second cache, some rows at a time
    Errors   TypeError for other dtypes; ValueError when shapes or groups do not fit, rows do not begin and end at
             multiples of 32 (or the last row), or an array cannot be written; RuntimeError for another unit's layout
    """
    where = "bfloat16.update_weight"
    groups = [0] * len(dys) if groups is None else groups
    first, last = _check(where, dys, xs, groups, weight, m, v, packed, gradient, rows)
    options = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    if packed.in_tiles and all(dy.size for dy in dys):
        _in_one_pass(dys, xs, groups, weight, m, v, packed, hyper, gradient, first, last, options)
    else:
        _in_two_steps(dys, xs, groups, weight, m, v, packed, hyper, gradient, first, last, options)
    return weight, m, v, packed
