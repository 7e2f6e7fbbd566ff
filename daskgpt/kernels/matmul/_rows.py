"""The product whose result has a row a token: y = x weightᵀ and dx = dy weight, against a packed weight."""

from daskgpt.kernels._jit import helper, kernel, wide_vectors
from daskgpt.kernels.matmul._finish import (
    GELU,
    GELU_GRADIENT,
    gelu_block,
    gelu_gradient_block,
    load_block,
    store_block,
)
from daskgpt.kernels.matmul._pack import pack_rows
from daskgpt.kernels.matmul._tiles import BLOCK, STEP, fetch, load_configuration, multiply_block, release_tiles
from daskgpt.kernels.matmul._vectors import add_columns
from daskgpt.kernels.matmul.units import Unit

# Tiles of the summed axis that are multiplied before the next rows come: 16 KB of the right operand stay in the first cache.
_DEPTH = 8
_AMX = int(Unit.AMX)


@helper
def _finish(
    block, spare, row, column, rows, columns, width, residual, residual_halves, activation, before, before_halves,
    reals, halves,
):  # fmt: skip
    """Everything that happens to one block of sums at (row, column) of the (rows, width) results."""
    place = row * width + column
    if residual != 0:
        size = 2 if residual_halves else 4
        load_block(residual + place * size, residual_halves, width * size, rows, columns, spare)
        for row in range(rows):
            add_columns(block + row * 128, spare + row * 128, 32)
    size = 2 if before_halves else 4
    if activation == GELU:
        store_block(block, rows, columns, before + place * size, before_halves, width * size)
        gelu_block(block, rows)
    if activation == GELU_GRADIENT:
        load_block(before + place * size, before_halves, width * size, rows, columns, spare)
        gelu_gradient_block(block, spare, rows)
    if reals != 0:
        store_block(block, rows, columns, reals + place * 4, 0, width * 4)
    if halves != 0:
        store_block(block, rows, columns, halves + place * 2, 1, width * 2)


@kernel(" ".join("n" * 24))
def multiply_rows_kernel(
    unit, configuration, x, x_halves, rows, depth, weight, width, chunk_rows, chunk_depth, left, sums, spare, block_step,
    start, start_step, residual, residual_halves, activation, before, before_halves, reals, halves, ahead
):  # fmt: skip
    wide_vectors()
    if unit == _AMX:
        load_configuration(configuration)
    size = 2 if x_halves else 4
    panel = (depth + 31) // 32 * STEP
    for row0 in range(0, rows, chunk_rows):
        chunk = min(chunk_rows, rows - row0)
        blocks = (chunk + 31) // 32
        for depth0 in range(0, depth, chunk_depth):
            deep = min(chunk_depth, depth - depth0)
            steps = (deep + 31) // 32
            source = x + (row0 * depth + depth0) * size
            pack_rows(source, x_halves, depth * size, chunk, deep, False, left, steps * STEP)
            for column in range(0, width, 32):
                right = weight + column // 32 * panel + depth0 // 32 * STEP
                for step in range(0, steps, _DEPTH):
                    count = min(_DEPTH, steps - step)
                    done = step + count == steps and depth0 + deep == depth
                    fresh = step == 0 and depth0 == 0
                    for i in range(blocks):
                        block = sums + column // 32 * block_step + i * BLOCK
                        if ahead:
                            fetch(right + panel + step * STEP, count, i, blocks)
                        multiply_block(
                            unit,
                            left + (i * steps + step) * STEP,
                            right + step * STEP,
                            count,
                            start + column // 32 * start_step if fresh else block,
                            0 if fresh else 128,
                            block,
                            128,
                        )
                        if done:
                            _finish(
                                block, spare, row0 + 32 * i, column, min(32, chunk - 32 * i), min(32, width - column), width,
                                residual, residual_halves, activation, before, before_halves, reals, halves,
                            )  # fmt: skip
    if unit == _AMX:
        release_tiles()
