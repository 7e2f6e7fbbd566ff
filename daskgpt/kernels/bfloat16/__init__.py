"""The arithmetic of `--precision bfloat16`: products of bfloat16 operands with float32 sums, and attention.

One interface, three ways to multiply: AMX tiles, AVX-512 with BF16, and float32 on rounded operands. The processor
decides, or the environment variable DASKGPT_MATMUL (amx, avx512 or portable). bfloat16 arrays are uint16 arrays.
"""
