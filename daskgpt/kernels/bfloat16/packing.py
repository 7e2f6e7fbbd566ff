"""Packing: a matrix in memory becomes panels of bfloat16 tiles, edges filled with zeros.

The axis that the product sums over is either the matrix's columns (`pack_rows`) or its rows (`pack_pairs`). Both can
transpose each tile, which turns a left operand's layout into a right operand's:

    pack_rows                 left operand     x of y = x weightᵀ, dy of dx = dy weight
    pack_rows, transposed     right operand    weight of y = x weightᵀ
    pack_pairs                right operand    weight of dx = dy weight, x of dweight = dyᵀ x
    pack_pairs, transposed    left operand     dy of dweight = dyᵀ x
"""

from daskgpt.kernels.bfloat16.tiles import STEP, TILE, fetch_step
from daskgpt.kernels.compilation import helper
from daskgpt.kernels.vectors.operations import pair_columns, round_columns, transpose_tile


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
def pack_rows(source, row_bytes, rows, columns, transposed, target, panel_bytes):
    """Panels of 32 rows, summed over the columns, 32 to a step."""
    for row in range(0, rows, 32):
        for column in range(0, columns, 32):
            tile = target + row // 32 * panel_bytes + column // 32 * STEP
            for side in range(0, 32, 16):
                place = source + (row + side) * row_bytes + column * 4
                _pack_tile_of_rows(place, row_bytes, rows - row - side, columns - column, tile)
                if transposed:
                    transpose_tile(tile)
                tile += TILE


@helper
def pack_pairs(source, row_bytes, rows, columns, transposed, target, panel_bytes):
    """Panels of 32 columns, summed over the rows, 32 to a step, the numbers of two rows side by side."""
    for row in range(0, rows, 32):
        for column in range(0, columns, 32):
            tile = target + column // 32 * panel_bytes + row // 32 * STEP
            for side in range(0, 32, 16):
                place = source + row * row_bytes + (column + side) * 4
                _pack_tile_of_pairs(place, row_bytes, rows - row, columns - column - side, tile)
                if transposed:
                    transpose_tile(tile)
                tile += TILE


@helper
def pack_weight_rows(source, row, rows, outputs, channels, forward, backward):
    """Rows of a float32 weight, from a multiple of 32 on, in both layouts, 32 x 32 numbers at a time."""
    forward_panel, backward_panel = (channels + 31) // 32 * STEP, (outputs + 31) // 32 * STEP
    row_bytes = channels * 4
    for i in range(0, rows, 32):
        panel = (row + i) // 32
        for column in range(0, channels, 32):
            place = source + i * row_bytes + column * 4
            across = forward + panel * forward_panel + column // 32 * STEP
            along = backward + column // 32 * backward_panel + panel * STEP
            fetch_step(along + backward_panel)
            for side in range(2):
                start, tile = place + side * 16 * row_bytes, across + side * TILE
                _pack_tile_of_rows(start, row_bytes, rows - i - side * 16, channels - column, tile)
                transpose_tile(tile)
                start, tile = place + side * 64, along + side * TILE
                _pack_tile_of_pairs(start, row_bytes, rows - i, channels - column - side * 16, tile)
