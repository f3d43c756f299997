"""Kinds of CPU that kernels are compiled for: vector width, register block, instructions."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of CPU, recognised by its features."""

    name: str
    triple: str  # LLVM's target triple
    cpu: str  # LLVM's name of the CPU
    features: str  # LLVM's feature string
    vector_bytes: int  # bytes of a vector register
    rows: int  # register block of a matmul: rows * vectors vector sums
    vectors: int
    keys: int = 64  # keys of a tile of the forward pass
    scalef: bool = False  # one instruction multiplies by a power of two (AVX-512)
    fma: bool = True  # fused multiply-add
    half: bool = True  # instructions that convert float16
    bf16: str = ""  # instructions that multiply bfloat16: "avx512", "amx" or none

    def width(self, size: int) -> int:
        """Return the lanes of a tile for sums of this size: query rows forward, keys backward."""
        return self.vectors * self.vector_bytes // size


# The register block, a row of B and a broadcast element fit the vector registers: 32 of AVX-512 and
# NEON, 16 of AVX2 and SSE.
_X86, _WIDE = "x86_64-unknown-linux-gnu", "-prefer-256-bit"
AVX512 = Target("AVX-512", _X86, "x86-64-v4", _WIDE, 64, rows=8, vectors=3, scalef=True)
AVX512_BF16 = replace(
    AVX512, name="AVX512-BF16", features=f"{_WIDE},+avx512bf16", vectors=4, keys=128, bf16="avx512"
)
AMX = replace(
    AVX512_BF16, name="AMX", features=f"{AVX512_BF16.features},+amx-tile,+amx-bf16", bf16="amx"
)
AVX2 = Target("AVX2", _X86, "x86-64-v3", "", 32, rows=4, vectors=3)
NEON = Target("NEON", "aarch64-unknown-linux-gnu", "generic", "+neon", 16, rows=8, vectors=3)
GENERIC = Target("generic", _X86, "x86-64", "", 16, rows=4, vectors=2, fma=False, half=False)
