"""What the processor can do, as Numba compiles for it: NUMBA_CPU_FEATURES can take instructions away."""

import functools
import platform

from numba.core.registry import cpu_target

X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


@functools.cache
def features() -> frozenset[str]:
    """LLVM's names of the instruction sets of an x86 processor; none elsewhere."""
    if not X86:
        return frozenset()
    listed = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(feature[1:] for feature in listed.split(",") if feature.startswith("+"))


def has_avx512() -> bool:
    """Whether code with vectors of 512 bits can be compiled here."""
    return "avx512f" in features()


def has_fma() -> bool:
    """Whether vectors are multiplied and added with one rounding: by AVX2's companion on x86, by any 64-bit ARM."""
    return features().issuperset(("avx2", "fma")) if X86 else platform.machine().lower() in ("aarch64", "arm64")


def has_avx512_bfloat16() -> bool:
    """Whether code that rounds to bfloat16 and multiplies pairs of them in one instruction can be compiled here."""
    return features().issuperset(("avx512f", "avx512bw", "avx512vl", "avx512bf16"))
