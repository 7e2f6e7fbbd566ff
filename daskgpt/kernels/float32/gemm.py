"""Float32 matrix product in vector registers.

A transformer multiplies few rows by large weights that come from memory. So, unlike in a library's product, a weight is
read once, and its next part is fetched meanwhile: every tile of sums fetches a share of it into the second cache; later
tiles pack that share, or read it where it lies.

    b transposed   y = x Wᵀ    few rows: W's rows stream past the packed columns of xᵀ, and the sums are turned to y
                               many rows: the rows of x stream past the packed columns of Wᵀ
    none           dx = dy W   few rows: dy stays in the cache, columns of W are packed while earlier ones are used
                               many rows: the rows of dy stream past the packed columns of W
    a transposed   dW = dyᵀ x  strips of dy's columns stream past packed columns of x

Small operands, and attention's, are read where they lie; what its causal mask makes vain is left out.

A sum starts at beta times the number in c and runs over all steps in order, with one rounding per step. Its bits depend
on nothing else: not on the tile, the other rows and columns, the transposes, alignment or thread, nor on how the summed
axis is divided into products that continue one another (beta 1).
"""

from typing import NamedTuple

import numpy as np

from daskgpt.kernels.compilation import helper, kernel
from daskgpt.kernels.float32 import tiles
from daskgpt.kernels.float32.tiles import LANES, LINE, ROWS, VECTOR, WIDTH
from daskgpt.kernels.simd.lanes import PAGE, read_real, write_real

# Steps of the summed axis that are packed at once.
DEPTH = 384
# Columns of the right operand that are packed at once: at most, and where rows of a left one stream past them, which
# with more columns would find no room in the second cache. Most rows of a left operand that stays in that cache.
COLUMNS, PACKED, BAND = 768, 384, 256
# Rows of a transposed result that are transposed at once, and the bytes from row to row.
GROUP, GROUP_STEP = 32, (COLUMNS + LANES) * 4

PANELS, STRIP, _TILE = DEPTH * COLUMNS * 4, 2 * DEPTH * VECTOR, GROUP * GROUP_STEP
SCRATCH = PANELS + STRIP + _TILE + PAGE


class Work(NamedTuple):
    """Addresses of one product: the table of code, and three places in the scratch memory."""

    functions: int
    panels: int
    strip: int
    tile: int


@helper
def panel_width(columns):
    """Return the number of vectors in the next panel: three, but two if four are left."""
    vectors = (columns + LANES - 1) // LANES
    return WIDTH if vectors == 3 or vectors > 4 else min(vectors, 2)


@helper
def count_panels(columns):
    return (columns + WIDTH * LANES - 1) // (WIDTH * LANES)


@helper
def panel_at(panels, steps, column):
    """Return the address of this column's packed panel; its last rows may be empty."""
    return panels + (steps + LANES - 1) // LANES * VECTOR * column


@helper
def plan_ahead(rows, lines, step, calls, steps):
    """Return how `calls` tiles share the fetching of rows of `lines` cache lines: (share, count, lines, step).

    share   rows that a tile fetches
    count   lines that it fetches every 16 steps
    """
    share = (rows + calls - 1) // calls
    times = max(steps // LINE, 1)
    return share, (share * lines + times - 1) // times, lines, step


@helper
def share_ahead(plan, start, call):
    """Return this tile's part of what is fetched of the rectangle at `start`."""
    share, count, lines, step = plan
    return start + call * share * step, count, lines, step


@helper
def _copy_part(source, source_step, target, target_step, rows, columns):
    for row in range(rows):
        for column in range(columns):
            write_real(target + row * target_step, column, read_real(source + row * source_step, column))


@helper
def multiply_rows(work, kind, rows, width, steps, left, right, packed, c, columns, ahead, beta):
    """Multiply up to 8 rows by one panel. Operands are pairs of an address and a step."""
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
        tiles.multiply(work.functions, kind, size, width, steps, operands, start, count, lines, ahead_step, beta)
        if not whole:
            _copy_part(to, to_step, at, step, size, columns)
        a += size * 4 if kind == tiles.BY_COLUMNS else size * a_step
        at += size * step
        rows -= size


@helper
def _pack_transposed(work, panel, right, width, steps, columns):
    """Pack one panel of an operand whose columns are contiguous."""
    at, step = right
    for part in range(width):
        exist = columns - part * LANES
        source = at + part * LANES * step
        for first in range(0, steps, LANES):
            operands = source + first * 4, step, exist, steps - first
            target = panel + (first * width + part) * VECTOR
            tiles.transpose(work.functions, operands, target, width * VECTOR, LANES, LANES)


@helper
def pack(work, panels, right, transposed, steps, columns):
    """Pack the right operand as panels, one after the other, each with rows of 1 to 3 vectors."""
    at, step = right
    done = 0
    while done < columns:
        width, panel = panel_width(columns - done), panel_at(panels, steps, done)
        if transposed:
            _pack_transposed(work, panel, (at + done * step, step), width, steps, columns - done)
        else:
            tiles.copy_rows(work.functions, width, at + done * 4, step, steps, columns - done, panel)
        done += width * LANES


@helper
def copy_strip(work, plan, source, columns, steps, call, strip):
    """Copy the rows of a strip, 16 columns of a transposed left operand, that tile `call` has fetched."""
    share, _, _, step = plan
    first, last = min(call * share, steps), min((call + 1) * share, steps)
    if last > first and columns > 0:
        place = strip + first * ROWS * 4
        tiles.copy_halves(work.functions, source + first * step, step, last - first, columns, place, steps * ROWS * 4)


@helper
def pack_share(work, plan, width, right, columns, steps, call, panel):
    """Pack the rows that tile `call` has fetched."""
    share, _, _, step = plan
    first = call * share
    if first < steps:
        source, target = right + first * step, panel + first * width * VECTOR
        tiles.copy_rows(work.functions, width, source, step, min(share, steps - first), columns, target)


# Up to this many steps, and numbers of the left operand, packing takes more time than it saves.
_SHORT, _SMALL = 64, 8192
# What a product leaves out beyond the diagonal of a causal mask, which ends in the last row and column: nothing;
# numbers of the result, which need not be written; or numbers of the left operand as it is stored, which are zeros.
NOTHING, RESULT, LEFT = 0, 1, 2
# Numbers of rows and of elements of the result below which it may be written by columns.
_FEW, _RESIDENT = 192, 2**20


@helper
def _turn(work, rows, columns, c, out):
    """Copy columns of the result to rows of the tile, or back with `out`."""
    at, step = c
    for row in range(0, rows, LANES):
        for column in range(0, columns, LANES):
            down, right = min(LANES, rows - row), min(LANES, columns - column)
            tile, place = work.tile + row * GROUP_STEP + column * 4, at + column * step + row * 4
            if out:
                tiles.transpose(work.functions, (tile, GROUP_STEP, down, right), place, step, right, down)
            else:
                operands = place, step, right, down
                tiles.transpose(work.functions, operands, tile, GROUP_STEP, LANES, LANES)


@helper
def _sum_group(work, rows, columns, steps, left, panels, following, beta):
    """Multiply a few rows of the left operand by all packed columns; `following` is the address of the next rows."""
    a, a_step = left
    plan = plan_ahead(ROWS, (steps + LINE - 1) // LINE, a_step, count_panels(columns), steps)
    for row in range(0, rows, ROWS):
        source = a + row * a_step
        start = source + ROWS * a_step if row + ROWS < rows else following
        done = call = 0
        while done < columns:
            width, ahead = panel_width(columns - done), share_ahead(plan, start, call)
            right = panel_at(panels, steps, done), width * VECTOR
            sums = work.tile + row * GROUP_STEP + done * 4, GROUP_STEP
            count, full = min(ROWS, rows - row), width * LANES
            multiply_rows(work, tiles.BY_ROWS, count, width, steps, (source, a_step), right, 0, sums, full, ahead, beta)
            done += width * LANES
            call += 1


@helper
def _sum_columns(work, rows, columns, k, left, c, beta, bias):
    """Compute the transposed result, a group of its rows at a time, each over all steps."""
    (a, a_step), (at, step) = left, c
    padded = (columns + LANES - 1) // LANES * LANES
    for group in range(0, rows, GROUP):
        count, source, sums = min(GROUP, rows - group), a + group * a_step, (at + group * 4, step)
        if beta != 0:
            _turn(work, count, columns, (bias + group * 4, 0) if bias != 0 else sums, False)
        for start in range(0, max(k, 1), DEPTH):
            steps, panels = min(DEPTH, k - start), work.panels + start * padded * 4
            scale = beta if start == 0 else np.float32(1)
            following = source + (start + DEPTH) * 4 if start + DEPTH < k else source + count * a_step
            rows_of_a = source + start * 4, a_step
            if start + DEPTH >= k:  # what the result is written to comes from the last cache or memory meanwhile
                for row in range(0, count, LINE):
                    tiles.fetch_lines(at + (group + row) * 4, step, columns)
            _sum_group(work, count, columns, steps, rows_of_a, panels, following, scale)
        _turn(work, count, columns, sums, True)


@helper
def _sum_strip(work, rows, columns, steps, left, strip, other, c, beta):
    """Compute LANES rows of the result: multiply their strip, already copied, by all packed columns.

    Of the tiles, every other one copies the part of the next strip that the one before it fetched, and fetches another
    part; the tiles in between fetch the next rows of the result.
    """
    (a, a_step), (at, step) = left, c
    half = (count_panels(columns) + 1) // 2
    plan, plan_of_sums = plan_ahead(steps, 1, a_step, 2 * half, steps), plan_ahead(ROWS, 2 * WIDTH, step, 1, steps)
    following = a + VECTOR
    for row in range(0, min(rows, LANES), ROWS):
        source = strip + row * steps * 4, ROWS * 4
        done = call = 0
        while done < columns:
            width, share = panel_width(columns - done), call // 2 + row // ROWS * half
            sums = at + row * step + done * 4
            if call % 2 == 1:
                ahead = share_ahead(plan_of_sums, sums + ROWS * step - WIDTH * VECTOR, 0)
            else:
                ahead = share_ahead(plan, following, share)
                if share > 0:
                    copy_strip(work, plan, following, rows - LANES, steps, share - 1, other)
            count, right = min(ROWS, rows - row), (panel_at(work.panels, steps, done), width * VECTOR)
            multiply_rows(
                work, tiles.BY_COLUMNS, count, width, steps, source, right, 0, (sums, step), columns - done, ahead, beta
            )
            done += width * LANES
            call += 1
    copy_strip(work, plan, following, rows - LANES, steps, 2 * half - 1, other)


@helper
def _sum_strips(work, rows, columns, steps, left, c, beta):
    """Multiply a transposed left operand: strips of LANES of its columns by all packed columns of the right one."""
    (a, a_step), (at, step) = left, c
    copy_strip(work, plan_ahead(steps, 1, a_step, 1, steps), a, rows, steps, 0, work.strip)
    for row in range(0, rows, LANES):
        odd = row // LANES % 2
        strip, other = work.strip + odd * DEPTH * VECTOR, work.strip + (1 - odd) * DEPTH * VECTOR
        place, sums = (a + row * 4, a_step), (at + row * step, step)
        _sum_strip(work, rows - row, columns, steps, place, strip, other, sums, beta)


@helper
def _sum_rows(work, rows, columns, steps, left, c, beta, bias):
    """Multiply rows of the left operand by all packed columns.

    Of the tiles of ROWS rows, every other one fetches the next rows; the tiles in between fetch rows of the result.
    """
    (a, a_step), (at, step) = left, c
    half, lines = (count_panels(columns) + 1) // 2, (steps + LINE - 1) // LINE
    plan, plan_of_sums = plan_ahead(ROWS, lines, a_step, half, steps), plan_ahead(ROWS, 2 * WIDTH, step, 1, steps)
    for row in range(0, rows, ROWS):
        source = a + row * a_step
        done = call = 0
        while done < columns:
            width = panel_width(columns - done)
            sums = at + row * step + done * 4
            ahead = share_ahead(plan, source + ROWS * a_step, call // 2)
            if call % 2 == 1:
                ahead = share_ahead(plan_of_sums, sums + ROWS * step - WIDTH * VECTOR, 0)
            count, right = min(ROWS, rows - row), (panel_at(work.panels, steps, done), width * VECTOR)
            rows_of_a, rest, kind = (source, a_step), columns - done, tiles.BY_ROWS
            if bias != 0:
                _copy_part(bias + done * 4, 0, sums, step, count, min(rest, width * LANES))
            multiply_rows(work, kind, count, width, steps, rows_of_a, right, 0, (sums, step), rest, ahead, beta)
            done += width * LANES
            call += 1


@helper
def _sum_panel(work, rows, width, steps, left, right, packed, panel, columns, c, beta):
    """Multiply all rows by one panel of columns; meanwhile, fetch the next rows of the result, and fetch and pack the
    next panel, tile by tile.

    Only the first panel is not packed before: its first tile of rows packs it.
    """
    (a, a_step), (b, b_step), (at, step) = left, right, c
    calls = (rows + ROWS - 1) // ROWS
    more, following = columns - width * LANES, b + width * VECTOR
    other, next_width = 2 * work.panels + DEPTH * WIDTH * VECTOR - panel, panel_width(more)
    plan = plan_ahead(steps, next_width, b_step, calls, steps)
    fuses = not packed and rows > ROWS and more >= 0
    if not packed and not fuses:
        tiles.copy_rows(work.functions, width, b, b_step, steps, columns, panel)
    for call in range(calls):
        row = call * ROWS
        ahead = a, 0, 1, 0
        if more > 0:
            ahead = share_ahead(plan, following, call)
        kind, source = tiles.BY_ROWS, (panel, width * VECTOR)
        if fuses and call == 0:
            kind, source = tiles.BY_ROWS_PACKING, right
        count, rows_of_a, sums = min(ROWS, rows - row), (a + row * a_step, a_step), (at + row * step, step)
        for part in range(0, width * LANES, LINE):
            tiles.fetch_lines(at + (row + ROWS) * step + part * 4, step, ROWS)
        multiply_rows(work, kind, count, width, steps, rows_of_a, source, panel, sums, columns, ahead, beta)
        if more > 0 and call > 0:
            pack_share(work, plan, next_width, following, more, steps, call - 1, other)
    if more > 0:
        pack_share(work, plan, next_width, following, more, steps, calls - 1, other)


@helper
def _sum_panels(work, rows, columns, steps, left, right, c, beta):
    """Multiply operands that are not transposed: the left one stays in the second cache, the right one streams past."""
    (b, b_step), (at, step) = right, c
    done = call = 0
    while done < columns:
        width = panel_width(columns - done)
        panel = work.panels + call % 2 * DEPTH * WIDTH * VECTOR
        place, sums = (b + done * 4, b_step), (at + done * 4, step)
        _sum_panel(work, rows, width, steps, left, place, done > 0, panel, columns - done, sums, beta)
        done += width * LANES
        call += 1


@helper
def _by_turned_columns(work, m, n, k, left, right, c, beta, bias):
    """Pack as many steps of the right operand at once as there is room for, and transpose the result each time."""
    (a, a_step), (b, b_step), (at, step) = left, right, c
    most = COLUMNS if k <= DEPTH else COLUMNS // 2
    for first in range(0, n, most):
        count = min(most, n - first)
        padded = (count + LANES - 1) // LANES * LANES
        depth = COLUMNS // padded * DEPTH
        for start in range(0, max(k, 1), depth):
            span = min(depth, k - start)
            for inner in range(start, start + span, DEPTH):
                panels, steps = work.panels + (inner - start) * padded * 4, min(DEPTH, k - inner)
                pack(work, panels, (b + first * b_step + inner * 4, b_step), True, steps, count)
            scale, row = (beta, bias) if start == 0 else (np.float32(1), 0)
            _sum_columns(work, m, count, span, (a + start * 4, a_step), (at + first * step, step), scale, row)


@helper
def _by_packed_columns(work, by_columns, transposed, m, n, k, left, right, c, beta, bias):
    """Pack the right operand, PACKED columns and DEPTH steps at a time, and multiply by it."""
    (a, a_step), (b, b_step), (at, step) = left, right, c
    for first in range(0, n, PACKED):
        count, sums = min(PACKED, n - first), (at + first * 4, step)
        for start in range(0, max(k, 1), DEPTH):
            steps = min(DEPTH, k - start)
            scale = beta if start == 0 else np.float32(1)
            place = b + (first * b_step + start * 4 if transposed else start * b_step + first * 4)
            pack(work, work.panels, (place, b_step), transposed, steps, count)
            if by_columns:
                _sum_strips(work, m, count, steps, (a + start * a_step, a_step), sums, scale)
            else:
                row = bias + first * 4 if bias != 0 and start == 0 else 0
                _sum_rows(work, m, count, steps, (a + start * 4, a_step), sums, scale, row)


@helper
def _in_place(work, masked, m, n, k, left, right, c, beta):
    """Multiply operands of whole vectors where they lie, a few steps at a time, without fetching ahead.

    With a masked result, rows of the right operand and of the result have room for whole vectors.
    """
    (a, a_step), (b, b_step), (at, step) = left, right, c
    for start in range(0, k, _SHORT):
        scale, done = beta if start == 0 else np.float32(1), 0
        while done < n:
            width, place = panel_width(n - done), (b + start * b_step + done * 4, b_step)
            for row in range(0, m, ROWS):
                vectors, steps = width, min(_SHORT, k - start)
                if masked == RESULT:
                    vectors = min(width, (row + ROWS + n - m - done + LANES - 1) // LANES)
                elif masked == LEFT:
                    steps = min(steps, row + ROWS + k - m - start)
                if min(vectors, steps) > 0:
                    rows, sums = (a + row * a_step + start * 4, a_step), (at + row * step + done * 4, step)
                    count, full, ahead = min(ROWS, m - row), vectors * LANES, (a, 0, 1, 0)
                    multiply_rows(work, tiles.BY_ROWS, count, vectors, steps, rows, place, 0, sums, full, ahead, scale)
            done += width * LANES


@helper
def _in_place_transposed(work, masked, m, n, k, left, right, c, beta):
    """Multiply a transposed left operand of few steps, where it lies, by the packed columns of the right one."""
    (a, a_step), (at, step) = left, c
    pack(work, work.panels, right, False, k, n)
    for row in range(0, m, ROWS):
        first, done = max(0, row + k - m) if masked == LEFT else 0, 0
        while done < n:
            width = panel_width(n - done)
            panel = panel_at(work.panels, k, done) + first * width * VECTOR, width * VECTOR
            rows, sums = (a + row * 4 + first * a_step, a_step), (at + row * step + done * 4, step)
            count, ahead, kind = min(ROWS, m - row), (a, 0, 1, 0), tiles.BY_COLUMNS
            multiply_rows(work, kind, count, width, k - first, rows, panel, 0, sums, n - done, ahead, beta)
            done += width * LANES


@helper
def _by_panels(work, m, n, k, left, right, c, beta):
    (a, a_step), (b, b_step) = left, right
    for start in range(0, max(k, 1), DEPTH):
        steps = min(DEPTH, k - start)
        scale = beta if start == 0 else np.float32(1)
        _sum_panels(work, m, n, steps, (a + start * 4, a_step), (b + start * b_step, b_step), c, scale)


@kernel("n n n n n n n n n n s n n n", cost=28)
def sgemm(masked, a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc, bias):
    """Compute c = beta c + a b, row-major, called by its address with the arguments of `blas.biased_gemm`.

    Shapes   a (m, k), b (k, n), c (m, n); a transposed a is stored (k, m), a transposed b (n, k)
    Dtype    float32
    Cost     2 m n k operations; 1.3 MB of scratch for every thread that is in a product at the same time
    Source   Goto and van de Geijn 2008, 10.1145/1356052.1356053; Van Zee and van de Geijn 2015, 10.1145/2764454
    """
    places = tiles.slots()
    taken = tiles.take(places, SCRATCH)
    panels = (taken + PAGE - 1) // PAGE * PAGE
    work = Work(tiles.code(), panels, panels + PANELS, panels + PANELS + STRIP)
    a_part, b_part, c_part = (a, lda * 4), (b, ldb * 4), (c, ldc * 4)
    # Transposing a and c may be cheaper than transposing b. A result larger than the caches is best written by rows.
    turned = (n + k) * m < n * k and (m < _FEW or m * n < _RESIDENT)
    small = not b_transposed and k > 0 and (masked != NOTHING or m * k <= _SMALL)
    if b_transposed and turned and not a_transposed:
        _by_turned_columns(work, n, m, k, b_part, a_part, c_part, beta, bias)
    elif a_transposed and small and k <= _SHORT and n <= COLUMNS:
        _in_place_transposed(work, masked, m, n, k, a_part, b_part, c_part, beta)
    elif masked == RESULT or (not a_transposed and small and n % LANES == 0 and (masked == LEFT or k <= _SHORT)):
        _in_place(work, masked, m, n, k, a_part, b_part, c_part, beta)
    elif a_transposed or b_transposed or m > BAND:
        _by_packed_columns(work, a_transposed, b_transposed, m, n, k, a_part, b_part, c_part, beta, bias)
    else:
        _by_panels(work, m, n, k, a_part, b_part, c_part, beta)
    tiles.give_back(places, taken)
