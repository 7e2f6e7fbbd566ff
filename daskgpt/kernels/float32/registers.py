"""The shape of the float32 product's tiles, by the registers of the processor that code is compiled for.

32 registers of 16 numbers (AVX-512): a tile of 8 rows and 3 vectors. 16 registers of 8 (AVX2), and 32 of 4, which LLVM
makes the same vectors of (NEON): 4 rows and 3 vectors. Sums, a row of the right operand and a number of the left one
then fill the registers. Nothing of it changes a bit of a product.
"""

from llvmlite import ir

from daskgpt.kernels.vectors.lanes import F32, I1
from daskgpt.kernels.vectors.processor import has_avx512

LANES = 16 if has_avx512() else 8
VECTOR = 4 * LANES
REALS, MASK = ir.VectorType(F32, LANES), ir.VectorType(I1, LANES)
# Rows and vectors of the largest tile.
ROWS, WIDTH = LANES // 2, 3
# Numbers in a cache line: so many steps are between two looks ahead.
LINE = 16
