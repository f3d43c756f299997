"""The identity of one compiled kernel."""

import hashlib
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class KernelKey:
    """What a kernel is specialised for: every field is one ``-D`` define."""

    kernel: str  # stem of src/<kernel>.cu and name of the function in it
    dtype: str  # of q, k and v, by its NumPy name, which the sources use too
    head_dim: int = 64  # bucket of q and k; the arrays may have fewer columns
    value_dim: int = 64  # bucket of v
    block_q: int = 64
    block_k: int = 64
    warps_m: int = 4  # warps of a thread block along the rows of its GEMMs
    warps_n: int = 1  # and along their columns
    stages: int = 1  # for the tiles of the inner loop: with 2, one is loaded ahead
    min_blocks_per_sm: int = 1  # which bounds the registers of a thread
    groups: int = 1  # of warps in a thread block, each with tiles of its own
    alignment_bytes: int = 16  # of one copy to shared memory: every row is aligned to them
    bias: str = ""  # its element type; empty where there is none
    softcap: bool = False
    alibi: bool = False
    mask: bool = False
    block_mask: bool = False
    score_mod: bool = False
    mask_mod: bool = False
    dropout: bool = False
    origin: bool = False  # from which dropout counts
    packed: bool = False  # sequences lie one behind the other in one batch entry
    paged: bool = False  # keys are in pages, which a block table says
    split_kv: bool = False  # of Hopper's forward kernel: as `forward_split`, of many rows
    fold_scale: bool = False  # the exponential applies the scale, which no modifier follows
    add_dq: bool = False  # the kernel over key blocks also adds its part of dq
    head_major: bool = False  # and takes query heads that share keys one after the other
    write_dbias: bool = False  # and writes dbias, where the bias is not broadcast
    mask_vector_width: int = 1  # neighbouring keys of the mask that are read at once: 1, 2 or 16
    bias_alignment_bytes: int = 0  # of one copy of the bias; 0 where elements are read one by one
    producer_warps: int = 0  # of a thread block, which only copy
    head_flags: int = 0  # of the heads that the kernel computes again; 0 where it computes all
    smem_bytes: int = 0  # dynamic, of Hopper kernels: they compile with no other number
    pair: bool = False  # two thread blocks, a cluster, have half of the columns each
    functions: str = field(default="", repr=False)  # text in place of src/functions.cuh

    @property
    def threads(self) -> int:
        return 32 * (self.groups * self.warps_m * self.warps_n + self.producer_warps)

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return self.block_q, self.block_k

    def defines(self) -> tuple[str, ...]:
        """List the compiler's ``-D`` options, one for each field, in the order of the fields.

        Of the text of functions it is a digest.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["functions"] = _digest(self.functions)
        return tuple(f"-DKEY_{name.upper()}={_text(value)}" for name, value in values.items())


def _digest(text: str) -> str:
    """Write a number that stands for a text, 0 for none."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"0x{digest}ull" if text else "0"


def _text(value: str | int) -> str:
    """Write a value as C++ reads it: an absent type is ``void``, a truth value 0 or 1."""
    return (value or "void") if isinstance(value, str) else str(int(value))
