"""What the loops of the float32 product share: its scratch memory, panels of columns, and rows of one panel."""

from typing import NamedTuple

import numpy as np

from daskgpt.kernels.compilation import helper
from daskgpt.kernels.float32.registers import LANES, LINE, ROWS, VECTOR, WIDTH
from daskgpt.kernels.float32.sgemm_tiles import (
    BY_COLUMNS,
    copy_halves,
    copy_rows,
    multiply,
    transpose,
)
from daskgpt.kernels.vectors.operations import read_real, write_real
from daskgpt.kernels.vectors.scratch import PAGE

# Steps of the summed axis that are packed at once.
DEPTH = 384
# Columns of the right operand that are packed at once, and rows of the left one that stay in the second cache.
COLUMNS, BAND = 768, 384
# Rows of a transposed result that are turned at once, and the bytes from row to row.
GROUP, GROUP_STEP = 32, (COLUMNS + LANES) * 4

PANELS, STRIP, _TILE = DEPTH * COLUMNS * 4, 2 * DEPTH * VECTOR, GROUP * GROUP_STEP
SCRATCH = PANELS + STRIP + _TILE + PAGE


class Work(NamedTuple):
    """What every part of one product needs: the code, and three places of the scratch memory."""

    functions: int
    panels: int
    strip: int
    tile: int


@helper
def panel_width(columns):
    """Vectors of the next panel: three, but four vectors are better cut into two and two."""
    vectors = (columns + LANES - 1) // LANES
    return WIDTH if vectors == 3 or vectors > 4 else min(vectors, 2)


@helper
def count_panels(columns):
    count = 0
    while columns > 0:
        columns -= panel_width(columns) * LANES
        count += 1
    return count


@helper
def panel_at(panels, steps, column):
    """Where the packed panel of this column starts; its last rows may be empty."""
    return panels + (steps + LANES - 1) // LANES * VECTOR * column


@helper
def plan_ahead(rows, lines, step, calls, steps):
    """How `calls` tiles share the fetching of rows of `lines` cache lines.

    A tile's rows, its lines every 16 steps, lines, step.
    """
    each = (rows + calls - 1) // calls
    times = max(steps // LINE, 1)
    return each, (each * lines + times - 1) // times, lines, step


@helper
def share_ahead(plan, start, call):
    """What this tile fetches of the rectangle at `start`."""
    each, count, lines, step = plan
    return start + call * each * step, count, lines, step


@helper
def _copy_part(source, source_step, target, target_step, rows, columns):
    for row in range(rows):
        for column in range(columns):
            write_real(target + row * target_step, column, read_real(source + row * source_step, column))


@helper
def multiply_rows(work, kind, rows, width, steps, left, right, packed, c, columns, ahead, beta):
    """Up to 8 rows of one panel. Operands are pairs of an address and a step."""
    (a, a_step), (b, b_step), (at, step) = left, right, c
    start, count, lines, ahead_step = ahead
    whole = columns >= width * LANES
    size = ROWS
    while rows > 0:
        while size > rows:
            size //= 2
        to, to_step = (at, step) if whole else (work.tile, GROUP_STEP)
        if not whole and beta != 0:
            _copy_part(at, step, to, to_step, size, columns)
        operands = a, a_step, b, b_step, packed, to, to_step
        multiply(work.functions, kind, size, width, steps, operands, start, count, lines, ahead_step, beta)
        if not whole:
            _copy_part(to, to_step, at, step, size, columns)
        a += size * 4 if kind == BY_COLUMNS else size * a_step
        at += size * step
        rows -= size


@helper
def _pack_transposed(work, panel, right, width, steps, columns):
    """One panel of an operand whose columns are contiguous."""
    at, step = right
    for part in range(width):
        exist = columns - part * LANES
        source = at + part * LANES * step
        for first in range(0, steps, LANES):
            operands = source + first * 4, step, exist, steps - first
            target = panel + (first * width + part) * VECTOR
            transpose(work.functions, operands, target, width * VECTOR, LANES, LANES, np.float32(0))


@helper
def pack(work, panels, right, transposed, steps, columns):
    """The right operand as panels: one after the other, each with rows of 1 to 3 vectors."""
    at, step = right
    done = 0
    while done < columns:
        width, panel = panel_width(columns - done), panel_at(panels, steps, done)
        if transposed:
            _pack_transposed(work, panel, (at + done * step, step), width, steps, columns - done)
        else:
            copy_rows(work.functions, width, at + done * 4, step, steps, columns - done, panel)
        done += width * LANES


@helper
def copy_strip(work, plan, source, columns, steps, call, strip):
    """Copy the rows of a strip, 16 columns of a transposed left operand, that tile `call` has fetched."""
    each, _, _, step = plan
    first, last = min(call * each, steps), min((call + 1) * each, steps)
    if last > first and columns > 0:
        place = strip + first * ROWS * 4
        copy_halves(work.functions, source + first * step, step, last - first, columns, place, steps * ROWS * 4)


@helper
def pack_share(work, plan, width, right, columns, steps, call, panel):
    """Pack what a tile has fetched."""
    each, _, _, step = plan
    first = call * each
    if first < steps:
        source, target = right + first * step, panel + first * width * VECTOR
        copy_rows(work.functions, width, source, step, min(each, steps - first), columns, target)
