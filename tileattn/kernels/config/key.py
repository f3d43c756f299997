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
        Columns of q and k, and of v, that a kernel has room for; the arrays may have fewer.
    block_q, block_k : int
        Queries and keys of a tile.
    warps_m, warps_n : int
        Warps of a block along the rows of its products, and along their columns.
    stages : int
        Tiles of the inner loop that shared memory holds: 2 where the next is loaded during this.
    residents : int
        Blocks that a multiprocessor is to hold at once: what bounds the registers of a thread.
    vector : int
        Bytes that one copy from global to shared memory moves: every row starts at a multiple.
    bias : str
        Element type of the bias; empty where there is none.
    softcap, alibi, mask, block_mask, dropout : bool
        Options of the call that are in use.
    fold : bool
        Whether the scale may be applied within the exponential: no term follows it, and it is
        positive.
    add_dq : bool
        Whether the kernel over key blocks also adds its share of dq.
    write_dbias : bool
        Whether it also writes dbias, where the bias is not broadcast.
    span : int
        Neighbouring keys of the mask that can be read at once: 1, 2 or 16.
    bias_vector : int
        Bytes that one copy of the bias to shared memory moves, as ``vector``; 0 where its elements
        are read one by one.
    loaders : int
        Warps of a block that only copy.
    repairs : int
        Marks of the heads that the kernel works on, of which there are mostly none; 0 where it
        works on all heads.
    shared : int
        Bytes of shared memory of variable size, of Hopper's own kernels, which lay them out: with
        another number they do not compile.
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
    residents: int = 1
    vector: int = 16
    bias: str = ""
    softcap: bool = False
    alibi: bool = False
    mask: bool = False
    block_mask: bool = False
    dropout: bool = False
    fold: bool = False
    add_dq: bool = False
    write_dbias: bool = False
    span: int = 1
    bias_vector: int = 0
    loaders: int = 0
    repairs: int = 0
    shared: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps_m * self.warps_n + self.loaders)

    def defines(self) -> tuple[str, ...]:
        """List the compiler's ``-D`` options, one for each field, in the order of the fields."""
        return tuple(f"-DKEY_{f.name.upper()}={_text(getattr(self, f.name))}" for f in fields(self))


def _text(value: str | int) -> str:
    """Write a value as C++ reads it: an absent type is ``void``, a truth value 0 or 1."""
    return (value or "void") if isinstance(value, str) else str(int(value))
