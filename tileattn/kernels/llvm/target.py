"""What a CPU can do: the width of its vectors, and the register block of a matrix product."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of CPU, told by its features.

    Parameters
    ----------
    name : str
        For messages.
    triple : str
        LLVM's name of the platform; empty for this machine's.
    cpu, features : str
        What LLVM generates code for.
    vector_bytes : int
        Bytes of a vector register.
    rows, vectors : int
        A matrix product keeps ``rows * vectors`` sums in registers.
    keys : int
        Keys of a tile of the forward pass.
    scalef : bool
        Whether one instruction multiplies by a power of two (AVX-512).
    fma : bool
        Whether there is a fused multiply-add.
    half : bool
        Whether instructions convert float16.
    bf16 : str
        Which instructions multiply bfloat16: ``"avx512"``, ``"amx"`` or none.
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
        """Count the columns of a tile of sums of this size: rows forward, keys backward."""
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
