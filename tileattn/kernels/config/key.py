"""The identity of one compiled kernel."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class KernelKey:
    """What a kernel is specialised for: every field is one ``-D`` define.

    Parameters
    ----------
    kernel : str
        Stem of ``src/<kernel>.cu`` and name of the function in it.
    dtype : str
        Element type of q, k and v by its NumPy name, which the sources use too.
    head_dim, value_dim : int
        Head-dimension buckets of q and k, and of v; the arrays may have fewer columns.
    block_q, block_k : int
        Queries and keys of a tile.
    warps_m, warps_n : int
        Warps of a thread block along the rows of its GEMMs, and along their columns.
    stages : int
        Stages of shared memory for the tiles of the inner loop: with 2, the next tile is loaded
        during this one.
    min_blocks_per_sm : int
        Thread blocks that an SM must hold at once, which bounds the registers of a thread.
    alignment_bytes : int
        Bytes of one copy from global to shared memory: every row is aligned to them.
    bias : str
        Element type of the bias; empty where there is none.
    softcap, alibi, mask, block_mask, dropout : bool
        Enabled options.
    fold_scale : bool
        Whether the scale is applied within the exponential: no score modifier follows it, and it
        is positive.
    add_dq : bool
        Whether the kernel over key blocks also adds its part of dq.
    write_dbias : bool
        Whether it also writes dbias, where the bias is not broadcast.
    mask_vector_width : int
        Neighbouring keys of the mask that are read at once: 1, 2 or 16.
    bias_alignment_bytes : int
        Bytes of one copy of the bias to shared memory; 0 where its elements are read one by one.
    producer_warps : int
        Producer warps of a thread block, which only copy.
    head_flags : int
        Flags of the heads that the kernel computes again, mostly none; 0 where it computes all.
    smem_bytes : int
        Bytes of dynamic shared memory, for the Hopper kernels: they do not compile with another
        number than that of their layout.
    """

    kernel: str
    dtype: str
    head_dim: int = 64
    value_dim: int = 64
    block_q: int = 64
    block_k: int = 64
    warps_m: int = 4
    warps_n: int = 1
    stages: int = 1
    min_blocks_per_sm: int = 1
    alignment_bytes: int = 16
    bias: str = ""
    softcap: bool = False
    alibi: bool = False
    mask: bool = False
    block_mask: bool = False
    dropout: bool = False
    fold_scale: bool = False
    add_dq: bool = False
    write_dbias: bool = False
    mask_vector_width: int = 1
    bias_alignment_bytes: int = 0
    producer_warps: int = 0
    head_flags: int = 0
    smem_bytes: int = 0

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return 32 * (self.warps_m * self.warps_n + self.producer_warps)

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile; the naive kernels go pair by pair."""
        return (1, 1) if self.kernel.startswith("naive") else (self.block_q, self.block_k)

    def defines(self) -> tuple[str, ...]:
        """List the compiler's ``-D`` options, one for each field, in the order of the fields."""
        return tuple(f"-DKEY_{f.name.upper()}={_text(getattr(self, f.name))}" for f in fields(self))


def _text(value: str | int) -> str:
    """Write a value as C++ reads it: an absent type is ``void``, a truth value 0 or 1."""
    return (value or "void") if isinstance(value, str) else str(int(value))
