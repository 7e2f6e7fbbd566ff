"""Float32 matrix product for processors with AVX-512, with cblas_sgemm's interface.

What differs from a library that packs both operands: a transformer multiplies few rows by large weights that come from
memory, so the large operand should be touched once. Its rows are read where they lie, its columns are packed by the
first tile that reads them, and every tile fetches its part of what comes next into the second cache.

    b transposed    y = x Wᵀ    the transposed product: W's rows stream past the packed columns of xᵀ
    none            dx = dy W   eight rows of dy after the other meet a panel of W's columns
    a transposed    dW = dyᵀ x  eight rows of dW after the other, over packed columns of x

A sum starts at zero every DEPTH steps, runs over them in order with one rounding a step, and is then added to the
result. Nothing else decides its bits: not the tile, the other rows and columns, the transposes, alignment or thread.
"""

import functools
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np

from daskgpt.kernels._jit import KERNELS, Kernel, helper
from daskgpt.kernels._sgemm_code import (
    BY_COLUMNS,
    BY_ROWS,
    BY_ROWS_PACKING,
    LANES,
    ROWS,
    SLOTS,
    VECTOR,
    WIDTH,
    allocate,
    code,
    copy_rows,
    fill_slot,
    has_avx512,
    load,
    multiply,
    release,
    slots,
    store,
    take_slot,
    transpose,
)

# Steps of the summed axis whose sums are finished at once: part of what the result is.
DEPTH = 768
# Columns of the right operand that are packed at once, and rows of the left one that stay in the second cache.
_COLUMNS, _BLOCK = 384, 384
# Rows of a transposed result that are turned at once, and the bytes from row to row.
_GROUP, _GROUP_STEP = 32, (_COLUMNS + LANES) * 4

# Products of attention: where packing would cost more than it brings.
_SMALL = 64

_PAGE = 4096
_PANELS, _STRIP, _TILE = DEPTH * _COLUMNS * 4, DEPTH * VECTOR, _GROUP * _GROUP_STEP
_SCRATCH = _PANELS + _STRIP + _TILE + _PAGE


class _Work(NamedTuple):
    """What every part of one product needs: the code, the factor, and three places of the scratch memory."""

    functions: int
    alpha: float
    panels: int
    strip: int
    tile: int


@helper
def _take_scratch(places):
    for slot in range(SLOTS):
        found = take_slot(places + 8 * slot)
        if found != 0:
            return found
    return allocate(_SCRATCH)


@helper
def _give_back(places, scratch):
    for slot in range(SLOTS):
        if fill_slot(places + 8 * slot, scratch):
            return
    release(scratch)


@helper
def _width(columns):
    """Vectors of the next panel: three, but four vectors are better cut into two and two."""
    vectors = (columns + LANES - 1) // LANES
    return WIDTH if vectors == 3 or vectors > 4 else min(vectors, 2)


@helper
def _count_panels(columns):
    count = 0
    while columns > 0:
        columns -= _width(columns) * LANES
        count += 1
    return count


@helper
def _panel(work, steps, column):
    """Where the packed panel of this column starts; its last rows may be empty."""
    return work.panels + (steps + LANES - 1) // LANES * VECTOR * column


@helper
def _lines_a_time(rows, lines, calls, steps):
    """How many of rows x lines each of `calls` tiles fetches every 16 steps."""
    times = calls * max(steps // LANES, 1)
    return (rows * lines + times - 1) // times


@helper
def _first_row(rows, lines, call, calls, steps):
    """Where the share of tile `call` starts."""
    before = call * max(steps // LANES, 1) * _lines_a_time(rows, lines, calls, steps)
    return min((before + lines - 1) // lines, rows)


@helper
def _share(start, rows, lines, step, call, calls, steps):
    """What one of `calls` tiles fetches of a rectangle of rows x lines: start, lines every 16 steps, lines, step."""
    row = _first_row(rows, lines, call, calls, steps)
    return start + row * step, _lines_a_time(rows, lines, calls, steps), lines, step


@helper
def _store_part(tile, rows, columns, c, beta):
    at, step = c
    for row in range(rows):
        for column in range(columns):
            value = load(tile + row * _GROUP_STEP + column * 4)
            place = at + row * step + column * 4
            if beta != 0:
                value += beta * load(place)
            store(place, value)


@helper
def _multiply_rows(work, kind, rows, width, steps, left, right, packed, c, columns, ahead, beta):
    """Up to 8 rows of one panel. Operands are pairs of an address and a step."""
    (a, a_step), (b, b_step), (at, step) = left, right, c
    start, count, lines, ahead_step = ahead
    whole = columns >= width * LANES
    size = ROWS
    while rows > 0:
        while size > rows:
            size //= 2
        to, to_step, scale = (at, step, beta) if whole else (work.tile, _GROUP_STEP, np.float32(0))
        operands = a, a_step, b, b_step, packed, to, to_step
        multiply(work.functions, kind, size, width, steps, operands, start, count, lines, ahead_step, work.alpha, scale)
        if not whole:
            _store_part(work.tile, size, columns, (at, step), beta)
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
def _pack(work, right, transposed, steps, columns):
    """The right operand as panels: one after the other, each with rows of 1 to 3 vectors."""
    at, step = right
    done = 0
    while done < columns:
        width, panel = _width(columns - done), _panel(work, steps, done)
        if transposed:
            _pack_transposed(work, panel, (at + done * step, step), width, steps, columns - done)
        else:
            copy_rows(work.functions, width, at + done * 4, step, steps, columns - done, panel)
        done += width * LANES


@helper
def _turn(work, rows, columns, c, beta):
    """Add rows of sums to columns of the result."""
    at, step = c
    for row in range(0, rows, LANES):
        for column in range(0, columns, LANES):
            down, right = min(LANES, rows - row), min(LANES, columns - column)
            operands = work.tile + row * _GROUP_STEP + column * 4, _GROUP_STEP, down, right
            transpose(work.functions, operands, at + column * step + row * 4, step, right, down, beta)


@helper
def _sum_columns(work, rows, columns, steps, left, c, beta):
    """The transposed result: rows of the left operand stream past all packed columns."""
    (a, a_step), (at, step) = left, c
    calls, lines = _count_panels(columns), (steps + LANES - 1) // LANES
    for group in range(0, rows, _GROUP):
        end = min(group + _GROUP, rows)
        for row in range(group, end, ROWS):
            source = a + row * a_step
            done = call = 0
            while done < columns:
                width = _width(columns - done)
                ahead = _share(source + ROWS * a_step, ROWS, lines, a_step, call, calls, steps)
                right = _panel(work, steps, done), width * VECTOR
                sums = work.tile + (row - group) * _GROUP_STEP + done * 4, _GROUP_STEP
                some, full = min(ROWS, end - row), width * LANES
                _multiply_rows(
                    work, BY_ROWS, some, width, steps, (source, a_step), right, 0, sums, full, ahead, np.float32(0)
                )
                done += width * LANES
                call += 1
        _turn(work, end - group, columns, (at + group * 4, step), beta)


@helper
def _sum_rows(work, by_columns, rows, columns, steps, left, c, beta):
    """Rows of the left operand stream past all packed columns; of a transposed one, 16 columns are copied at a time.

    Of the tiles of these rows, every other fetches what is read or copied next, the others the result's next rows.
    """
    (a, a_step), (at, step) = left, c
    half, lines = (_count_panels(columns) + 1) // 2, (steps + LANES - 1) // LANES
    for row in range(0, rows, ROWS):
        odd = row % LANES
        kind, source = BY_ROWS, (a + row * a_step, a_step)
        if by_columns:
            kind, source = BY_COLUMNS, (work.strip + odd * 4, VECTOR)
            if odd == 0:
                copy_rows(work.functions, 1, a + row * 4, a_step, steps, rows - row, work.strip)
        done = call = 0
        while done < columns:
            width = _width(columns - done)
            sums = at + row * step + done * 4
            if call % 2 == 1:
                ahead = _share(sums + ROWS * step - WIDTH * VECTOR, ROWS, 2 * WIDTH, step, 0, 1, steps)
            elif by_columns:
                following = a + (row - odd) * 4 + VECTOR
                ahead = _share(following, steps, 1, a_step, call // 2 + odd // ROWS * half, 2 * half, steps)
            else:
                ahead = _share(a + (row + ROWS) * a_step, ROWS, lines, a_step, call // 2, half, steps)
            some, right = min(ROWS, rows - row), (_panel(work, steps, done), width * VECTOR)
            _multiply_rows(work, kind, some, width, steps, source, right, 0, (sums, step), columns - done, ahead, beta)
            done += width * LANES
            call += 1


@helper
def _copy_share(work, width, right, columns, steps, call, calls, panel):
    """Pack what a tile has fetched."""
    b, b_step = right
    first = _first_row(steps, width, call, calls, steps)
    last = _first_row(steps, width, call + 1, calls, steps) if call + 1 < calls else steps
    copy_rows(work.functions, width, b + first * b_step, b_step, last - first, columns, panel + first * width * VECTOR)


@helper
def _sum_panel(work, rows, width, steps, left, right, packed, panel, columns, c, beta):
    """All rows of one panel of columns. While they are multiplied, the next panel is fetched and packed, tile by tile.

    Only the first panel is not packed yet: its first eight rows leave it packed.
    """
    (a, a_step), (b, b_step), (at, step) = left, right, c
    calls = (rows + ROWS - 1) // ROWS
    more = columns - width * LANES
    following = b + width * VECTOR, b_step
    other = 2 * work.panels + DEPTH * WIDTH * VECTOR - panel
    next_width = _width(more)
    fuses = not packed and rows > ROWS and more >= 0
    if not packed and not fuses:
        copy_rows(work.functions, width, b, b_step, steps, columns, panel)
    for call in range(calls):
        row = call * ROWS
        ahead = a, 0, 1, 0
        if more > 0:
            ahead = _share(following[0], steps, next_width, b_step, call, calls, steps)
        kind, source = BY_ROWS, (panel, width * VECTOR)
        if fuses and call == 0:
            kind, source = BY_ROWS_PACKING, right
        some, rows_of_a, sums = min(ROWS, rows - row), (a + row * a_step, a_step), (at + row * step, step)
        _multiply_rows(work, kind, some, width, steps, rows_of_a, source, panel, sums, columns, ahead, beta)
        if more > 0 and call > 0:
            _copy_share(work, next_width, following, more, steps, call - 1, calls, other)
    if more > 0:
        _copy_share(work, next_width, following, more, steps, calls - 1, calls, other)


@helper
def _sum_panels(work, rows, columns, steps, left, right, c, beta):
    """Nothing is transposed: the left operand stays in the second cache, panels of the right one stream past."""
    (b, b_step), (at, step) = right, c
    done = call = 0
    while done < columns:
        width = _width(columns - done)
        panel = work.panels + call % 2 * DEPTH * WIDTH * VECTOR
        place, sums = (b + done * 4, b_step), (at + done * 4, step)
        _sum_panel(work, rows, width, steps, left, place, done > 0, panel, columns - done, sums, beta)
        done += width * LANES
        call += 1


@helper
def _by_packed_columns(work, turned, by_columns, transposed, m, n, k, left, right, c, beta):
    """The right operand is packed, _COLUMNS columns and DEPTH steps at a time."""
    (a, a_step), (b, b_step), (at, step) = left, right, c
    for first in range(0, n, _COLUMNS):
        count = min(_COLUMNS, n - first)
        for start in range(0, max(k, 1), DEPTH):
            steps = min(DEPTH, k - start)
            scale = beta if start == 0 else np.float32(1)
            place = b + (first * b_step + start * 4 if transposed else start * b_step + first * 4)
            _pack(work, (place, b_step), transposed, steps, count)
            rows = a + start * (a_step if by_columns else 4), a_step
            if turned:
                _sum_columns(work, m, count, steps, rows, (at + first * step, step), scale)
            else:
                _sum_rows(work, by_columns, m, count, steps, rows, (at + first * 4, step), scale)


@helper
def _in_place(work, by_columns, m, n, k, left, right, c, beta):
    """A small product of whole panels: nothing is packed, nothing fetched ahead."""
    (a, a_step), (b, b_step), (at, step) = left, right, c
    kind = BY_COLUMNS if by_columns else BY_ROWS
    down = 4 if by_columns else a_step
    for done in range(0, n, 2 * LANES):
        for row in range(0, m, ROWS):
            sums = at + row * step + done * 4, step
            rows, columns = (a + row * down, a_step), (b + done * 4, b_step)
            ahead = a, 0, 1, 0
            some = min(ROWS, m - row)
            _multiply_rows(work, kind, some, 2, k, rows, columns, 0, sums, 2 * LANES, ahead, beta)


@helper
def _by_panels(work, m, n, k, left, right, c, beta):
    (a, a_step), (b, b_step), (at, step) = left, right, c
    for block in range(0, m, _BLOCK):
        count = min(_BLOCK, m - block)
        for start in range(0, max(k, 1), DEPTH):
            steps = min(DEPTH, k - start)
            scale = beta if start == 0 else np.float32(1)
            rows, sums = (a + block * a_step + start * 4, a_step), (at + block * step, step)
            _sum_panels(work, count, n, steps, rows, (b + start * b_step, b_step), sums, scale)


def _sgemm(order, a_order, b_order, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    places = slots()
    taken = _take_scratch(places)
    panels = (taken + _PAGE - 1) // _PAGE * _PAGE
    work = _Work(code(), alpha, panels, panels + _PANELS, panels + _PANELS + _STRIP)
    a_part, b_part, c_part = (a, lda * 4), (b, ldb * 4), (c, ldc * 4)
    # 111 is as it is, 112 transposed. The caller defines only the lower half of these two numbers.
    a_transposed, b_transposed = a_order & 1 == 0, b_order & 1 == 0
    if b_transposed:
        # What is turned: a and c, or b.
        turned = not a_transposed and (n + k) * m < n * k
        if turned or a_transposed:
            _by_packed_columns(work, True, False, not a_transposed, n, m, k, b_part, a_part, c_part, beta)
        else:
            _by_packed_columns(work, False, False, True, m, n, k, a_part, b_part, c_part, beta)
    elif k <= _SMALL and m <= _SMALL and n % (2 * LANES) == 0:
        _in_place(work, a_transposed, m, n, k, a_part, b_part, c_part, beta)
    elif a_transposed:
        _by_packed_columns(work, False, True, False, m, n, k, a_part, b_part, c_part, beta)
    else:
        _by_panels(work, m, n, k, a_part, b_part, c_part, beta)
    _give_back(places, taken)


class _Routine(Kernel):
    """A kernel of numbers alone, in float32; other kernels call it by its address, as a C function."""

    def kind_of(self, dtype: Any) -> str:
        return "f"

    def __call__(self, *arguments: Any) -> Any:
        return self.compile("f")(*arguments)

    def address(self) -> int:
        compiled = self.compile("f")
        result = compiled.overloads[compiled.signatures[0]]
        return result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name)


_ROUTINE = _Routine(_sgemm, "n n n n n n f n n n n f n n")
if has_avx512():
    KERNELS.append(_ROUTINE)


@functools.cache
def address() -> int:
    """Address of a function with cblas_sgemm's arguments, whole numbers in 64 bits; compiled at the first call.

    c = alpha a b + beta c, row-major

    Shapes   a (m, k), b (k, n), c (m, n); a transposed a is stored (k, m), a transposed b (n, k)
    Dtype    float32
    Cost     2 m n k operations; 1.3 MB of scratch for every thread that is in a product at the same time
    Source   Goto and van de Geijn 2008, 10.1145/1356052.1356053; Van Zee and van de Geijn 2015, 10.1145/2764454
    Errors   RuntimeError on a processor without AVX-512
    """
    if not has_avx512():
        raise RuntimeError(
            f"sgemm: the processor must have AVX-512; got processor={llvmlite.binding.get_host_cpu_name()}. "
            "Set DASKGPT_BLAS=numpy, or unset it."
        )
    return _ROUTINE.address()
