"""`KernelKey`: everything that a kernel is specialised for."""

import hashlib
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class KernelKey:
    """The identity of a compiled kernel; every field is one ``-D`` define."""

    kernel: str  # the file src/<kernel>.cu and the function in it
    dtype: str  # of q, and of k and v: its NumPy name, which the sources use too
    head_dim: int = 64  # bucket of q and k; the arrays may have fewer columns
    value_dim: int = 64  # bucket of v
    block_q: int = 64
    block_k: int = 64
    warps_m: int = 4  # warps of a thread block along the rows of its GEMMs
    warps_n: int = 1  # warps along their columns
    stages: int = 1  # buffers for the tiles of the inner loop; with 2, one is loaded ahead
    min_blocks_per_sm: int = 1  # for __launch_bounds__: limits the registers of a thread
    groups: int = 1  # groups of warps in a thread block, each with work tiles of its own
    kv_dtype: str = ""  # of k and v if they have 8 bits
    split_floats: bool = False  # float32: the kernel computes with two float16 numbers each
    alignment_bytes: int = 16  # alignment of every row, and width of a copy to shared memory
    bias: str = ""  # dtype of the bias; "" if there is none
    softcap: bool = False
    alibi: bool = False
    mask: bool = False
    block_mask: bool = False
    score_mod: bool = False
    mask_mod: bool = False
    dropout: bool = False
    origin: bool = False  # dropout counts positions from an origin
    packed: bool = False  # packed sequences: one after another in one batch entry
    paged: bool = False  # keys are in the pages of a block table
    gathered: bool = False  # the Hopper forward kernel copies their rows one by one, without TMA
    split_kv: bool = False  # the Hopper forward kernel takes splits of the keys
    invariant: bool = False  # sums over splits of the keys are added in the order of the keys
    fold_scale: bool = False  # the exponential applies the scale: nothing modifies scores
    add_dq: bool = False  # the kernel over key blocks also adds to dq
    write_dq: bool = False  # with add_dq: it writes dq itself, since one block has all keys
    head_major: bool = False  # it takes query heads that share keys one after another
    split_q: bool = False  # several work tiles share a key block: each has some of its queries
    write_dbias: bool = False  # it also writes dbias, of a bias without broadcast axes
    mask_vector_width: int = 1  # neighbouring mask elements read at once: 1, 2 or 16
    bias_alignment_bytes: int = 0  # width of a copy of the bias; 0: read element by element
    producer_warps: int = 0  # warps of a thread block that only copy
    head_flags: int = 0  # recompute only heads with these flags; 0: compute all heads
    smem_bytes: int = 0  # dynamic shared memory; a compile-time constant of Hopper kernels
    pair: bool = False  # two thread blocks (a cluster) hold half of the columns each
    functions: str = field(default="", repr=False)  # replaces the text of src/functions.cuh

    @property
    def threads(self) -> int:
        return 32 * (self.groups * self.warps_m * self.warps_n + self.producer_warps)

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return self.block_q, self.block_k

    @property
    def mapped_dtype(self) -> str:
        """The dtype of the elements of tensor maps. Kernels for float32 map planes of float16."""
        return "float16" if self.dtype == "float32" else self.dtype

    def defines(self) -> tuple[str, ...]:
        """Return the compiler's ``-D`` options, one per field and in their order.

        The text of `functions` is represented by its digest.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["functions"] = _digest(self.functions)
        return tuple(f"-DKEY_{name.upper()}={_text(value)}" for name, value in values.items())


def _digest(text: str) -> str:
    """Return a 64-bit digest of a text as C++ reads it, 0 for no text."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"0x{digest}ull" if text else "0"


def _text(value: str | int) -> str:
    """Write a value as C++ reads it: an absent type is ``void``, a bool 0 or 1."""
    return (value or "void") if isinstance(value, str) else str(int(value))
