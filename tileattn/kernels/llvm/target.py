"""Kinds of CPU that kernels are compiled for: vector width, register block, instructions."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of CPU, recognised by its features.

    Parameters
    ----------
    name : str
        Name in messages.
    triple : str
        LLVM's target triple.
    cpu, features : str
        LLVM's CPU name and feature string.
    vector_bytes : int
        Bytes of a vector register.
    rows, vectors : int
        Register block of a matmul: ``rows * vectors`` vector sums.
    keys : int
        Keys of a tile of the forward pass.
    scalef : bool
        True if one instruction multiplies by a power of two (AVX-512).
    fma : bool
        True with a fused multiply-add.
    half : bool
        True with instructions that convert float16.
    bf16 : str
        Instructions that multiply bfloat16: ``"avx512"``, ``"amx"`` or ``""``.
    """

    name: str
    triple: str
    cpu: str
    features: str
    vector_bytes: int
    rows: int
    vectors: int
    keys: int = 64
    scalef: bool = False
    fma: bool = True
    half: bool = True
    bf16: str = ""

    def width(self, size: int) -> int:
        """Return the lanes of a tile for sums of this size: query rows forward, keys backward."""
        return self.vectors * self.vector_bytes // size


AVX512 = Target(
    "AVX-512",
    "x86_64-unknown-linux-gnu",
    "x86-64-v4",
    "-prefer-256-bit",
    vector_bytes=64,
    rows=8,
    vectors=3,
    scalef=True,
)
AVX512_BF16 = replace(
    AVX512,
    name="AVX512-BF16",
    features="-prefer-256-bit,+avx512bf16",
    vectors=4,
    keys=128,
    bf16="avx512",
)
AMX = replace(
    AVX512_BF16, name="AMX", features="-prefer-256-bit,+avx512bf16,+amx-tile,+amx-bf16", bf16="amx"
)
AVX2 = Target("AVX2", "x86_64-unknown-linux-gnu", "x86-64-v3", "", 32, rows=4, vectors=3)
NEON = Target("NEON", "aarch64-unknown-linux-gnu", "generic", "+neon", 16, rows=8, vectors=3)
GENERIC = Target(
    "generic",
    "x86_64-unknown-linux-gnu",
    "x86-64",
    "",
    vector_bytes=16,
    rows=4,
    vectors=2,
    fma=False,
    half=False,
)
