"""The tuned numbers of the CUDA kernels, one record per GPU.

A number here was measured: another value gives the same results, at another speed (some also
decide which bits a result has). Tile sizes, which are tuned as well, are in ``families/tiles.py``.
"""

from dataclasses import dataclass, field, fields
from typing import Any

_FORWARD = "docs/performance.md, Hopper forward kernel"
_BACKWARD = "docs/performance.md, Hopper backward kernels"
_OPTIONS = "docs/performance.md, Options on the Hopper kernels"
_DECODE = "benchmarks/results/gpu_decode.json"
_GENERIC = "docs/performance.md, Generic kernels"

_NEVER = 1 << 30


def _tuned(value: Any, off: Any, unit: str, when: str, source: str) -> Any:
    """Declare a number; ``off`` is the value that turns off what it decides."""
    return field(default=value, metadata={"off": off, "unit": unit, "when": when, "source": source})


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tuned numbers of one GPU. All defaults were measured on H100 and H200 SXM, in 16 bits."""

    # Forward tiles of the Hopper kernel.
    two_group_keys: int = _tuned(
        3072, 0, "keys", "at most, attended by the middle query: two groups of warps", _FORWARD
    )
    small_tile_keys: int = _tuned(
        512, 0, "keys", "at most, under a causal mask: the smallest tiles", _FORWARD
    )
    tall_queries: tuple[tuple[int, int], ...] = _tuned(
        ((64, 0), (96, 4096), (128, 8192)),
        ((64, 0),),
        "(columns, queries)",
        "at most and at least: forward tiles of 192 queries",
        _FORWARD,
    )
    masked_rows: int = _tuned(
        128, 192, "queries", "of a forward tile at most, if a mask leaves blocks empty", _OPTIONS
    )
    # Backward tiles of the Hopper kernel.
    padded_queries: float = _tuned(
        1.035, 1.0, "ratio", "at most, queries of all tiles of 80 over queries", _BACKWARD
    )
    tall_mask_keys: int = _tuned(
        2048, _NEVER, "keys", "at least, left by a mask to a query: tiles of 80 queries", _BACKWARD
    )
    modified_rows: int = _tuned(
        64, 128, "queries", "of a backward tile at most, with score modifiers or dropout", _OPTIONS
    )
    head_major_window: tuple[int, int] = _tuned(
        (2, 3), (0, 1), "part of the keys", "a window at most: heads in turn", _BACKWARD
    )
    # The kernel that computes delta.
    rows_beside_waves: int = _tuned(
        8, _NEVER, "waves", "of work tiles at least: delta beside the main kernel", _BACKWARD
    )
    rows_beside_part: int = _tuned(
        4, 1, "part of the SMs", "one in so many computes delta then", _BACKWARD
    )
    # Split-KV.
    split_queries: int = _tuned(64, 0, "queries", "at most: keys are split", _DECODE)
    split_bytes: int = _tuned(1 << 19, 1 << 20, "bytes", "of keys and values in a split", _DECODE)
    split_min_keys: int = _tuned(64, 128, "keys", "of a split, at least", _DECODE)
    latent_keys_per_row: int = _tuned(
        64, 128, "keys", "of a split for each row that shares them, latent attention", _DECODE
    )
    split_wgmma_rows: int = _tuned(
        32, 128, "rows", "that share keys, more than these: the Hopper kernel", _DECODE
    )
    warp_splits: int = _tuned(16, 0, "splits", "at most: one warp joins a row", _DECODE)
    # Head groups: heads whose keys and values stay in the L2 cache together.
    grid_l2_share: float = _tuned(
        2.0, 0.5, "of the L2 cache", "the generic forward kernel", _GENERIC
    )
    short_l2_share: float = _tuned(
        1 / 8, 0.5, "of the L2 cache", "forward, up to `dynamic_keys` keys", _FORWARD
    )
    dynamic_keys: int = _tuned(
        2048, 0, "keys", "at most, under a causal mask: dynamic scheduler", _FORWARD
    )
    # The LPT assignment of forward work tiles.
    tile_cost: int = _tuned(10, 1, "cost", "of a key tile", _FORWARD)
    work_tile_cost: int = _tuned(12, 0, "cost", "of a work tile besides its key tiles", _FORWARD)
    max_waves: int = _tuned(64, 8, "waves", "at most: more even out by themselves", _FORWARD)
    team_dim: int = _tuned(
        192, 0, "columns", "at most: the two SMs of a TPC take tiles of one length", _FORWARD
    )
    late_rows: int = _tuned(192, _NEVER, "queries", "of a tile at least: late blocks", _FORWARD)
    late_share: float = _tuned(1 / 16, 0.0, "of all work", "that late thread blocks take", _FORWARD)
    late_keys: int = _tuned(4096, 0, "keys", "at least: late thread blocks", _FORWARD)
    late_dim: int = _tuned(64, 256, "columns", "at most: late thread blocks", _FORWARD)
    # Lockstep of thread blocks that would drift apart.
    lockstep_l2: float = _tuned(
        1, float(_NEVER), "L2 caches", "that a head exceeds: lockstep", _FORWARD
    )
    # Backward: how many heads run together.
    whole_wave_keys: int = _tuned(
        4096, _NEVER, "keys", "at least, causal: heads that fill whole waves", _BACKWARD
    )
    long_window: tuple[int, int] = _tuned(
        (1, 4), (_NEVER, 1), "part of the keys", "a window at least: four waves", _BACKWARD
    )
    alternate_group: int = _tuned(
        4, _NEVER, "query heads per key head", "at least, causal: runs alternate", _BACKWARD
    )
    alternate_keys: int = _tuned(1024, 0, "keys", "at least: runs alternate", _BACKWARD)
    wave_keys: int = _tuned(16384, 8192, "keys", "of a wave of key blocks, about", _BACKWARD)
    # Backward, dq summed in a fixed order.
    keys_in_flight: int = _tuned(1024, 2048, "keys", "of a head", _BACKWARD)
    stagger_dim: int = _tuned(64, 256, "columns", "more than these: heads are staggered", _BACKWARD)
    stagger_keys: int = _tuned(16384, 0, "keys", "at most: heads are staggered", _BACKWARD)
    stagger_one_wave: int = _tuned(512, 0, "keys", "at most: one wave of heads", _BACKWARD)
    stagger_two_waves: int = _tuned(
        4096, _NEVER, "keys", "at most: two waves, else three", _BACKWARD
    )
    half_wave_group: int = _tuned(
        4, _NEVER, "query heads per key head", "at least, causal: half a wave", _BACKWARD
    )
    half_wave_keys: int = _tuned(1024, 0, "keys", "at most: half a wave", _BACKWARD)


DEFAULT = Tuning()
H100 = Tuning()  # and H200

_OF_ARCH = {"sm_90a": H100}


def tuning_of(arch: str) -> Tuning:
    """Return the tuned numbers of a GPU, by what kernels are compiled for."""
    return _OF_ARCH.get(arch, DEFAULT)


def names() -> tuple[str, ...]:
    """Name the tuned numbers."""
    return tuple(x.name for x in fields(Tuning))


def about(name: str) -> dict[str, Any]:
    """Describe a tuned number: ``off``, ``unit``, ``when``, ``source``."""
    return dict(next(x.metadata for x in fields(Tuning) if x.name == name))
