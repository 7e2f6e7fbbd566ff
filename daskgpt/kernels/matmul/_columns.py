"""The product that sums over the tokens: dweight = dyᵀ x, by blocks of rows of the weight."""

from daskgpt.kernels._jit import helper, kernel, wide_vectors
from daskgpt.kernels.matmul._finish import load_block, store_block
from daskgpt.kernels.matmul._pack import pack_pairs
from daskgpt.kernels.matmul._tiles import BLOCK, STEP, load_configuration, multiply_block, prefetch, release_tiles
from daskgpt.kernels.matmul.units import Unit

_DEPTH = 8
_AMX = int(Unit.AMX)


@kernel(" ".join("n" * 20))
def multiply_columns_kernel(
    unit, configuration, dy, dy_halves, outputs, x, x_halves, channels, tokens, first, last,
    total, accumulate, left, right, sums, distance, zeros, block_rows, group
):  # fmt: skip
    wide_vectors()
    if unit == _AMX:
        load_configuration(configuration)
    dy_size = 2 if dy_halves else 4
    x_size = 2 if x_halves else 4
    steps = (tokens + 31) // 32
    panel = steps * STEP
    pack_pairs(x, x_halves, channels * x_size, tokens, channels, False, right, panel)
    width = channels * 4
    for row0 in range(first, last, block_rows):
        rows = min(block_rows, last - row0)
        pack_pairs(dy + row0 * dy_size, dy_halves, outputs * dy_size, tokens, rows, True, left, panel)
        for column0 in range(0, channels, group):
            columns = min(group, channels - column0)
            for i in range(0, rows, 32):
                high = min(32, rows - i)
                for step in range(0, steps, _DEPTH):
                    count = min(_DEPTH, steps - step)
                    done = step + count == steps
                    for column in range(column0, column0+columns, 32):
                        wide = min(32, channels - column)
                        whole = high == 32 and wide == 32
                        place = total + (row0 - first + i) * width + column * 4
                        block = sums + (column - column0) // 32 * BLOCK
                        start, start_step = block, 128
                        if step == 0:
                            if not accumulate:
                                start, start_step = zeros, 0
                            elif whole:
                                start, start_step = place, width
                            else:
                                load_block(place, 0, width, high, wide, block)
                        final, final_step = block, 128
                        if done and whole:
                            final, final_step = place, width
                        if step == 0 and distance:
                            for row in range(high):
                                prefetch(place+row*width+128*distance)
                                prefetch(place+row*width+64+128*distance)
                        multiply_block(
                            unit, left + i // 32 * panel + step * STEP, right + column // 32 * panel + step * STEP, count,
                            start, start_step, final, final_step
                        )  # fmt: skip
                        if done and not whole:
                            store_block(block, high, wide, place, 0, width)
    if unit == _AMX:
        release_tiles()
