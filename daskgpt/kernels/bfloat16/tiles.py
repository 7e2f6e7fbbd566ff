"""Instructions of the two units, as Numba intrinsics, and the one product that both compute: a patch of 32 x 32 sums.

A *tile* is 1 KB: 16 rows of 64 bytes. Left tiles hold 16 rows of 32 bfloat16 numbers. Right tiles hold 16 pairs of rows
of 16 columns, the two numbers of a pair side by side. A *panel* has 32 rows of the left operand (or 32 columns of the
right one): along the summed axis, 32 numbers a step, two tiles. A *patch* of sums is 32 rows of 32 float32 numbers.

On a processor without the unit the intrinsics generate no code; `isa` ensures that they are not called.
"""

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

from daskgpt.kernels.bfloat16.isa import Unit, compiles
from daskgpt.kernels.compilation import helper, instruction
from daskgpt.kernels.float32.tiles import fetch_lines
from daskgpt.kernels.simd import lanes

TILE = 1024
STEP = 2 * TILE
PATCH = 4096
# Bytes from row to row in a patch.
ROW = 128
# Steps that are multiplied before the other operand moves on: 16 KB of one panel stay in the first cache.
DEPTH = 8
AMX = int(Unit.AMX)

# Rows of sums that AVX-512 keeps in registers: 8 x 2 vectors, two more for the right operand.
_GROUP = 8


# What ldtilecfg reads: palette 1, eight tiles of 16 rows of 64 bytes.
_CONFIGURATION = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])


def _constant_bytes(builder, name, content):
    """Return the address of constant bytes."""
    kind = ir.ArrayType(lanes.I8, len(content))
    variable = cgutils.global_constant(builder, name, ir.Constant(kind, bytearray(content)))
    variable.align = 64
    return builder.ptrtoint(variable, lanes.I64)


@instruction("", "n")
def zero_row(builder):
    """Return the address of 32 float32 zeros, with which the sums of a product without a bias start."""
    return _constant_bytes(builder, "zero_row", bytes(ROW))


@instruction("")
def _load_configuration(builder):
    if compiles(Unit.AMX):
        place = builder.inttoptr(_constant_bytes(builder, "tile_configuration", _CONFIGURATION), lanes.POINTER)
        lanes.call(builder, "llvm.x86.ldtilecfg", lanes.VOID, [place])


@instruction("")
def release_tiles(builder):
    if compiles(Unit.AMX):
        lanes.call(builder, "llvm.x86.tilerelease", lanes.VOID, [])


def _move(builder, name, tiles, place, step):
    """Load or store four tiles, the quarters of a patch whose rows lie `step` bytes apart."""
    for number, tile in enumerate(tiles):
        row = builder.add(place, builder.mul(step, lanes.whole(number // 2 * 16)))
        quarter = builder.inttoptr(builder.add(row, lanes.whole(number % 2 * 64)), lanes.POINTER)
        lanes.call(builder, name, lanes.VOID, [ir.Constant(lanes.I8, tile), quarter, step])


# Tiles 0 to 3 are the sums, 4 and 5 the left panel, 6 and 7 the right one. In assembly, because LLVM would keep a
# pointer for every address of the loop and run out of registers.
_LOOP = """
1:
tileloadd ($0,$3,1), %tmm4
tileloadd ($1,$3,1), %tmm6
tdpbf16ps %tmm6, %tmm4, %tmm0
tileloadd 1024($1,$3,1), %tmm7
tdpbf16ps %tmm7, %tmm4, %tmm1
tileloadd 1024($0,$3,1), %tmm5
tdpbf16ps %tmm6, %tmm5, %tmm2
tdpbf16ps %tmm7, %tmm5, %tmm3
addq $$2048, $0
addq $$2048, $1
decq $2
jnz 1b
"""
_OPERANDS = "=r,=r,=r,r,0,1,2,~{memory},~{cc}," + ",".join(f"~{{tmm{tile}}}" for tile in range(8))


@instruction("n n n n n n n")
def _multiply_by_tiles(builder, left, right, steps, start, start_step, total, total_step):
    """Compute a patch at total = the one at start + a left panel @ a right panel, over `steps` (at least one)."""
    if not compiles(Unit.AMX):
        return
    llvmlite.binding.initialize_native_asmparser()
    _move(builder, "llvm.x86.tileloadd64", range(4), start, start_step)
    kind = ir.FunctionType(ir.LiteralStructType([lanes.I64] * 3), [lanes.I64] * 4)
    builder.asm(kind, _LOOP, _OPERANDS, [lanes.whole(64), left, right, steps], True)
    _move(builder, "llvm.x86.tilestored64", range(4), total, total_step)


def _multiply_pair(builder, sums, left, right):
    """Add one pair of columns of 8 left rows, times the same pair of rows of a right panel, to the sums.

    vdpbf16ps adds the products of 16 pairs of bfloat16 numbers, both products of a pair.
    """
    columns = [lanes.load(builder, right, offset, lanes.BITS) for offset in (0, TILE)]
    for row in range(_GROUP):
        pair = lanes.splat(builder, lanes.load(builder, left, 64 * row, lanes.I32))
        for half in (0, 1):
            total = sums[row, half]
            operands = [builder.load(total), pair, columns[half]]
            builder.store(lanes.call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", lanes.REALS, operands), total)


@instruction("n n n n n n n")
def _multiply_rows(builder, left, right, steps, start, start_step, total, total_step):
    """Compute 8 x 32 numbers at total = those at start + 8 rows of a left panel @ a right panel, by AVX512-BF16."""
    if not compiles(Unit.AVX512):
        return
    sums = {(row, half): cgutils.alloca_once(builder, lanes.REALS) for row in range(_GROUP) for half in (0, 1)}
    for (row, half), place in sums.items():
        line = builder.add(start, builder.mul(start_step, lanes.whole(row)))
        builder.store(lanes.load(builder, line, 64 * half), place)
    with cgutils.for_range(builder, builder.mul(steps, lanes.whole(16))) as loop:
        step = builder.mul(builder.lshr(loop.index, lanes.whole(4)), lanes.whole(STEP))
        pair = builder.and_(loop.index, lanes.whole(15))
        rows = builder.add(builder.add(left, step), builder.mul(pair, lanes.whole(4)))
        columns = builder.add(builder.add(right, step), builder.mul(pair, lanes.whole(64)))
        _multiply_pair(builder, sums, rows, columns)
    for (row, half), place in sums.items():
        line = builder.add(total, builder.mul(total_step, lanes.whole(row)))
        lanes.store(builder, builder.load(place), line, 64 * half)


@helper
def _multiply_by_vectors(left, right, steps, start, start_step, total, total_step):
    for row in range(0, 32, 8):
        rows = left + row // 16 * TILE + row % 16 * 64
        _multiply_rows(rows, right, steps, start + row * start_step, start_step, total + row * total_step, total_step)


@helper
def multiply_patch(unit, left, right, steps, start, start_step, total, total_step):
    """Compute 32 x 32 float32 sums at `total` = those at `start` + a left panel @ a right panel, over `steps`.

    start_step and total_step are the bytes from row to row; a start_step of 0 starts every row with the same numbers.
    A call continues the sums of the call before it, so dividing the summed axis into calls does not change a bit.
    """
    if unit == AMX:
        _multiply_by_tiles(left, right, steps, start, start_step, total, total_step)
    else:
        _multiply_by_vectors(left, right, steps, start, start_step, total, total_step)


@helper
def fetch(panel, steps, part, parts):
    """Fetch part `part` of `parts` of a panel's first steps into the second cache, ahead of their use."""
    lines = STEP // 64 * steps
    first, last = part * lines // parts, (part + 1) * lines // parts
    fetch_lines(panel + first * 64, 64, last - first)


@instruction("n n")
def _touch(builder, patch, step):
    if compiles(Unit.AMX):
        _move(builder, "llvm.x86.tileloadd64", range(4, 8), patch, step)


@helper
def touch_patch(unit, patch, step):
    """Read a patch that is about to be written, rows `step` bytes apart.

    A processor has more reads than writes under way at a time: with few tokens, this makes the gradient of a weight a
    third faster.
    """
    if unit == AMX:
        _touch(patch, step)


@helper
def sum_rows(unit, left, right, panel, steps, columns, start, start_step, target, target_step):
    """Compute 32 rows of sums, `columns` wide: target = start + a left panel @ the right panels.

    A start_step of 0 starts every patch with the same 32 numbers.
    """
    for step in range(0, steps, DEPTH):
        count = min(DEPTH, steps - step)
        for column in range(0, columns, 32):
            begin, begin_step = target + column * 4, target_step
            if step == 0:
                begin, begin_step = (start + column * 4, start_step) if start_step else (start, 0)
                if start_step == 0:
                    touch_patch(unit, target + column * 4, target_step)
            multiply_patch(
                unit, left + step * STEP, right + column // 32 * panel + step * STEP, count,
                begin, begin_step, target + column * 4, target_step,
            )  # fmt: skip


@helper
def open_unit(unit):
    """Prepare the unit for the first product of a kernel."""
    if unit == AMX:
        _load_configuration()


@helper
def close_unit(unit):
    """Release the unit after the last product of a kernel: a thread that holds tiles is slower to switch."""
    if unit == AMX:
        release_tiles()


# Packing: a matrix in memory becomes panels of tiles, edges filled with zeros. The axis that the product sums over is
# either the matrix's columns (`pack_rows`) or its rows (`pack_pairs`). Both can transpose each tile, which turns a left
# operand's layout into a right operand's:
#
#     pack_rows                 left operand     x of y = x weightᵀ, dy of dx = dy weight
#     pack_rows, transposed     right operand    weight of y = x weightᵀ
#     pack_pairs                right operand    weight of dx = dy weight, x of dweight = dyᵀ x
#     pack_pairs, transposed    left operand     dy of dweight = dyᵀ x


def _rounded(builder, source, first, count):
    """Return numbers first .. first + 15 of `count` float32 numbers, rounded to bfloat16."""
    return lanes.round_to_bfloat16(
        builder, lanes.load_masked(builder, source, first * 4, lanes.below(builder, count, first))
    )


@instruction("n n n")
def round_columns(builder, source, target, count):
    """Write 32 bfloat16 numbers: `count` float32 numbers at source, rounded, then zeros."""
    for first in lanes.PARTS:
        lanes.store(builder, _rounded(builder, source, first, count), target, first * 2)


def store_pairs(builder, upper, lower, target):
    """Write 16 pairs of bfloat16 numbers, each with a number of `upper` before one of `lower`."""
    upper, lower = builder.zext(upper, lanes.BITS), builder.zext(lower, lanes.BITS)
    lanes.store(builder, builder.or_(upper, builder.shl(lower, lanes.constant(lanes.BITS, 16))), target)


@instruction("n n n n n")
def pair_columns(builder, upper, lower, target, upper_count, lower_count):
    """Write 16 pairs, each a float32 number at `upper` before one at `lower`, rounded to bfloat16; then zeros."""
    first, second = _rounded(builder, upper, 0, upper_count), _rounded(builder, lower, 0, lower_count)
    store_pairs(builder, first, second, target)


@instruction("n")
def transpose_tile(builder, tile):
    """Transpose a tile of 16 x 16 numbers of 32 bits in place."""
    rows = [lanes.load(builder, tile, lanes.VECTOR * row, lanes.BITS) for row in range(lanes.LANES)]
    for row, value in enumerate(lanes.transposed(builder, rows)):
        lanes.store(builder, value, tile, lanes.VECTOR * row)


@instruction("n n n")
def copy_row(builder, source, target, count):
    """Copy `count` float32 numbers from source to target."""
    with cgutils.for_range(builder, builder.lshr(count, lanes.whole(4))) as loop:
        place = builder.shl(loop.index, lanes.whole(6))
        lanes.store(builder, lanes.load(builder, source, place), target, place)
    rest = builder.and_(count, lanes.whole(lanes.LANES - 1))
    place, mask = builder.shl(builder.sub(count, rest), lanes.whole(2)), lanes.below(builder, rest)
    lanes.store_masked(builder, lanes.load_masked(builder, source, place, mask), target, place, mask)


@helper
def copy_rows(source, source_step, target, target_step, rows, columns):
    """Copy rows of float32 numbers, which lie some bytes apart."""
    for row in range(rows):
        copy_row(source + row * source_step, target + row * target_step, columns)


@helper
def _pack_tile_of_rows(place, row_bytes, rows, columns, tile):
    for row in range(16):
        round_columns(place, tile + row * 64, columns if row < rows else 0)
        place += row_bytes


@helper
def _pack_tile_of_pairs(place, row_bytes, rows, columns, tile):
    for row in range(0, 32, 2):
        upper = columns if row < rows else 0
        lower = columns if row + 1 < rows else 0
        pair_columns(place, place + row_bytes, tile + row * 32, upper, lower)
        place += 2 * row_bytes


@helper
def _pack_square(place, row_bytes, rows, columns, pairs, transposed, tile):
    """Pack two tiles, 32 x 32 numbers of which rows x columns exist."""
    for side in range(0, 32, 16):
        if pairs:
            _pack_tile_of_pairs(place + side * 4, row_bytes, rows, columns - side, tile)
        else:
            _pack_tile_of_rows(place + side * row_bytes, row_bytes, rows - side, columns, tile)
        if transposed:
            transpose_tile(tile)
        tile += TILE


@helper
def pack_rows(source, row_bytes, rows, columns, transposed, target, panel_bytes):
    """Pack panels of 32 rows, to be summed over the columns, 32 per step."""
    for row in range(0, rows, 32):
        for column in range(0, columns, 32):
            place, tile = source + row * row_bytes + column * 4, target + row // 32 * panel_bytes + column // 32 * STEP
            _pack_square(place, row_bytes, rows - row, columns - column, False, transposed, tile)


@helper
def pack_pairs(source, row_bytes, rows, columns, transposed, target, panel_bytes):
    """Pack panels of 32 columns, to be summed over the rows, 32 per step, with the numbers of two rows side by side."""
    for row in range(0, rows, 32):
        for column in range(0, columns, 32):
            place, tile = source + row * row_bytes + column * 4, target + column // 32 * panel_bytes + row // 32 * STEP
            _pack_square(place, row_bytes, rows - row, columns - column, True, transposed, tile)


@helper
def pack_weight_rows(source, row, rows, outputs, channels, forward, backward):
    """Pack rows of a float32 weight, from a multiple of 32 on, in both layouts, 32 x 32 numbers at a time."""
    forward_panel, backward_panel = (channels + 31) // 32 * STEP, (outputs + 31) // 32 * STEP
    row_bytes = channels * 4
    for i in range(0, rows, 32):
        panel = (row + i) // 32
        for column in range(0, channels, 32):
            place = source + i * row_bytes + column * 4
            across = forward + panel * forward_panel + column // 32 * STEP
            along = backward + column // 32 * backward_panel + panel * STEP
            fetch(along + backward_panel, 1, 0, 1)
            _pack_square(place, row_bytes, rows - i, channels - column, False, True, across)
            _pack_square(place, row_bytes, rows - i, channels - column, True, False, along)
