"""Tuned numbers of the CUDA kernels, one record per GPU.

Results are the same with another value (some numbers decide which bits a result has); only speed
differs. ``python -m tileattn bench tuning`` lists the numbers and times the calls that one changes.
"""

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

_NEVER = 1 << 30  # more than any length


class Source(NamedTuple):
    """Where a measurement is recorded, and the GPU that it ran on."""

    text: str
    gpu: str


class TunedNumber(NamedTuple):
    """A tuned number, what it decides, and where it comes from."""

    name: str
    value: Any
    alternative: Any  # mostly the value that turns off what the number decides
    unit: str
    condition: str  # where x is the number
    source: Source


_BOTH, _H100, _H200 = "H100 SXM and H200", "H100 SXM", "H200"
_EITHER = "H100 SXM or H200 (not recorded which)"


def _row(words: str, gpu: str = _EITHER) -> Source:
    """Name a row of docs/tuning-log.md by some of its words."""
    return Source(f"docs/tuning-log.md: {words}", gpu)


def _commit(date: str, subject: str) -> Source:
    """Name a commit that measured a number and left no file of results."""
    return Source(f'measured {date}, no file (commit "{subject}")', _EITHER)


_TWO_GROUPS = _row("D and Dv up to 64 and a mean of at most 3,072 keys per query")
_SHORT_TILES = _row("few queries and keys: tiles that pad them less", _H200)
_SMALL = _commit("2026-11-26", "Run two groups of warpgroups in a CTA")
_TALL = _row("D above 64: tiles of 192 queries wherever they pad little", _H200)
_TALL_KEYS = _row("D = 65 to 96: tall tiles of 64 keys if 96 pad the keys much more", _H200)
_FAMILIES = _commit("2026-11-22", "Plan launches as pure values, by kernel families")
_PADDED = _row("D = 128: tiles of 80 queries if queries fill them")
_TALL_WINDOW = _row("D above 64: tiles of 80 queries with windows from 2,048 keys", _H100)
_MODIFIED = _row("tiles of 64 queries, not 128, with score modifiers, a mask or dropout")
_HEAD_MAJOR = _row("window with GQA: query heads of a KV head one after the other", _H100)
_DELTA = _row("the main kernel starts while a quarter of the SMs compute delta")
_QUERY_SPLITS = _row("few key blocks: splits of the query heads, or of the queries")
_PIECES = _row("pieces of a split: the kernel adds the sums over each piece in order", _H200)
_SPLITS = _commit("2026-11-24", "Split the keys of few queries into pieces on the GPU")
_LATENT = _commit("2026-11-25", "cut latent attention into longer pieces")
_SPLIT_WGMMA = _commit("2026-11-25", "Take many rows that share keys on Hopper")
_SMALL_SPLITS = _row("17 to 64 rows that share keys: two small thread blocks an SM", _H200)
_PACKED_HEADS = _row("17 to 64 queries of grouped heads: blocks of the rows", _H200)
_ONE_SPLIT = _row("the same over a single split, from 512 keys", _H200)
_SHORT_CACHES = _row("few queries over short caches: a tile has the rows of a key head", _H200)
_SHORT = _row("head groups four times smaller")
_DYNAMIC = _row("dynamic scheduler, head by head, that claims as late as loads allow", _BOTH)
_COST = _row("Other costs of a work tile 0.98 to 1.02")
_WAVES = _commit("2026-11-22", "Count waves in the host's scheduler")
_TEAMS = _row("up to D = 192 the two SMs of a TPC run in lockstep")
_LATE = _row("CTAs that start as others end take the last sixteenth of the work")
_LOCKSTEP = _row("CTAs run in lockstep if a head's keys exceed the L2 cache", _H100)
_WHOLE_WAVES = _row("as many heads at a time as fill whole waves of key blocks")
_LONG_WINDOW = _row("from a window of a quarter of the keys: four waves of key blocks", _H100)
_ALTERNATE = _row("every second wave of key blocks starts at the diagonal", _H100)
_IN_FLIGHT = _row("key blocks of 1,024 keys of a head at a time")
_STAGGER = _row("deterministic, D = 128, causal, up to 8192 keys: stagger heads evenly", _H100)
_STAGGER_AGAIN = _row("stagger heads at 16384 too; one wave up to 512 keys", _BOTH)
_DBIAS = _row("thread blocks share the tiles of a broadcast bias", _H200)
_HALF_WAVE = _row("half a wave of key blocks at a time", _H100)
_PLANES = _row("float32 as float16 numbers on wgmma: from 128 queries and keys", _H200)
_PLANE_KEYS = _row("the same with 65 to 127 keys, D above 32", _H200)
_SMALL_BLOCKS = _row("float32, D up to 32: blocks of 64 keys up to 384 keys", _H200)
_GENERIC_PLANES = _row("other GPUs, forward: `mma.sync` of float16 over planes", _H200)


def _tuned(value: Any, alternative: Any, unit: str, condition: str, source: Source) -> Any:
    number = TunedNumber("", value, alternative, unit, condition, source)
    return field(default=value, metadata=number._asdict())


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tuned numbers of one GPU; measured with float16 and bfloat16, unless they say float32."""

    # Forward tiles of the Hopper kernel.
    two_group_keys: int = _tuned(
        3072,
        0,
        "keys",
        "two groups of warps if D <= 64, and the middle query has <= x",
        _TWO_GROUPS,
    )
    small_tile_keys: int = _tuned(512, 0, "keys", "causal: the smallest tiles if Nk <= x", _SMALL)
    short_tile_rows: int = _tuned(
        512, 0, "rows", "short tiles if Nq and Nk <= x, and 128 x 128 pad more", _SHORT_TILES
    )
    tall_padding: float = _tuned(
        1.04, 0.0, "ratio", "D > 64: tall tiles if 192 queries pad Nq to <= x as much as 128", _TALL
    )
    tall_waves: float = _tuned(
        2.5, 0.0, "waves", "of tiles of 128 queries; with < x, they stand in for tall ones", _TALL
    )
    tall_key_padding: float = _tuned(
        1.06,
        float(_NEVER),
        "ratio",
        "64 < D <= 96: tall tiles of 64 keys if 96 pad Nk to > x as much",
        _TALL_KEYS,
    )
    masked_rows: int = _tuned(
        128, 192, "queries", "of a tile, at most, if a mask leaves tiles empty", _FAMILIES
    )
    # float32 on float16 tensor cores: Hopper's kernels, and the generic ones.
    plane_rows: int = _tuned(
        128, _NEVER, "queries and keys", "float32: split numbers if both are >= x", _PLANES
    )
    plane_keys: int = _tuned(
        65, 128, "keys", "float32, D > 32: split numbers if keys >= x", _PLANE_KEYS
    )
    generic_plane_rows: int = _tuned(
        512, _NEVER, "queries and keys", "the same with mma.sync", _GENERIC_PLANES
    )
    # Backward tiles of the Hopper kernel.
    padded_queries: float = _tuned(
        1.035, 1.0, "ratio", "tiles of 80 queries if they pad Nq to <= x Nq", _PADDED
    )
    tall_mask_keys: int = _tuned(
        2048, _NEVER, "keys", "tiles of 80 queries if a window has >= x", _TALL_WINDOW
    )
    modified_rows: int = _tuned(
        64, 128, "queries", "of a tile, at most, with modifiers, a mask, dropout", _MODIFIED
    )
    head_major_window: tuple[int, int] = _tuned(
        (2, 3), (0, 1), "of Nk", "GQA: query heads in turn if a window is <= x", _HEAD_MAJOR
    )
    # Backward: splits of the queries of a key block.
    split_ratio: int = _tuned(8, _NEVER, "queries per key", "keys are few if >= x", _QUERY_SPLITS)
    split_few_rows: tuple[int, int] = _tuned(
        (1024, 4096),
        (_NEVER, _NEVER),
        "rows of queries",
        "of a split if keys are few: 4 Nk, from x[0] to x[1]",
        _QUERY_SPLITS,
    )
    split_group: int = _tuned(
        8, _NEVER, "query heads per key head", "split them if >= x", _QUERY_SPLITS
    )
    split_long_keys: int = _tuned(
        8192, _NEVER, "keys", "split any group of query heads if >= x", _QUERY_SPLITS
    )
    split_rows: int = _tuned(
        2560, _NEVER, "rows of queries", "of a split of a group: Nk, and >= x", _QUERY_SPLITS
    )
    split_keys: int = _tuned(32768, 0, "keys", "of a head, times its splits, <= x", _QUERY_SPLITS)
    # The kernel that computes delta.
    rows_beside_waves: int = _tuned(
        8, _NEVER, "waves", "delta beside the main kernel if it has >= x", _DELTA
    )
    rows_beside_part: int = _tuned(
        4, 1, "SMs", "one in x computes delta beside the main kernel", _DELTA
    )
    # Split-KV.
    split_queries: int = _tuned(64, 0, "queries", "split the keys if Nq <= x", _SPLITS)
    split_bytes: int = _tuned(
        1 << 19, 1 << 20, "bytes", "of the keys and values of a split", _SPLITS
    )
    group_bytes: tuple[int, int] = _tuned(
        (1 << 19, 1 << 20),
        (1 << 20, 1 << 20),
        "bytes",
        "of the keys and values of a split: up to 16 rows on Hopper, and up to 32",
        _PIECES,
    )
    piece_bytes: int = _tuned(
        1 << 17, 1 << 18, "bytes", "of the keys and values of a piece of such a split", _PIECES
    )
    group_waves: float = _tuned(
        1.25, 0, "splits for each SM", "work tiles are pieces if there are < x", _PIECES
    )
    split_square: int = _tuned(
        32, 64, "rows**2 / keys", "of a split of > 128 rows, at most", _PACKED_HEADS
    )
    pack_keys: int = _tuned(
        512, _NEVER, "keys", "few queries: all heads of a key head in a tile if Nk >= x", _ONE_SPLIT
    )
    pack_queries: int = _tuned(
        16, 0, "queries", "the same over fewer keys if Nq <= x", _SHORT_CACHES
    )
    split_few_queries: int = _tuned(
        2, 0, "queries", "split-KV if no heads share keys and Nq <= x", _SHORT_CACHES
    )
    latent_keys_per_row: int = _tuned(
        64, 128, "keys", "of a split for each row that shares them, latent", _LATENT
    )
    split_wgmma_rows: int = _tuned(
        32, 128, "rows", "the Hopper kernel if > x share keys", _SPLIT_WGMMA
    )
    split_small_rows: int = _tuned(
        64, 0, "rows", "D = 128: two small thread blocks an SM if <= x", _SMALL_SPLITS
    )
    # Backward tiles of the generic kernel.
    small_block_keys: int = _tuned(
        384, 64, "keys", "float32, D <= 32: blocks of 64 keys if Nk <= x", _SMALL_BLOCKS
    )
    # Gradient of a bias.
    dbias_tasks: int = _tuned(
        396, 1, "thread blocks", "share tiles of a broadcast bias until there are x", _DBIAS
    )
    small_ds_tiles: float = _tuned(
        1.5, _NEVER, "ratio", "tiles of 64 x 64 if larger ones have >= x as many pairs", _DBIAS
    )
    # Head groups: heads whose keys and values stay in the L2 cache together.
    grid_l2_share: float = _tuned(
        2.0, 0.5, "L2 caches", "that a head group fills, generic forward kernel", _FAMILIES
    )
    short_l2_share: float = _tuned(
        1 / 8, 0.5, "L2 caches", "that a head group fills if Nk <= dynamic_keys", _SHORT
    )
    dynamic_keys: int = _tuned(
        2048, 0, "keys", "causal: the dynamic scheduler if Nk <= x", _DYNAMIC
    )
    # The LPT assignment of forward work tiles.
    tile_cost: int = _tuned(10, 1, "cost", "of a key tile", _COST)
    work_tile_cost: int = _tuned(12, 0, "cost", "of a work tile besides its key tiles", _COST)
    max_waves: int = _tuned(64, 8, "waves", "assign work tiles if <= x; more even out", _WAVES)
    team_dim: int = _tuned(
        192, 0, "D", "the SMs of a TPC take tiles of one length if D <= x", _TEAMS
    )
    late_rows: int = _tuned(192, _NEVER, "queries", "late thread blocks if a tile has >= x", _LATE)
    late_share: float = _tuned(1 / 16, 0.0, "of all work", "that late thread blocks take", _LATE)
    late_dim: int = _tuned(64, 256, "D", "late thread blocks if D <= x", _LATE)
    # Lockstep of thread blocks that would drift apart.
    lockstep_l2: float = _tuned(
        1, float(_NEVER), "L2 caches", "lockstep if a head fills > x", _LOCKSTEP
    )
    # Backward: how many heads run together.
    whole_wave_keys: int = _tuned(
        4096, _NEVER, "keys", "causal: heads that fill whole waves if Nk >= x", _WHOLE_WAVES
    )
    long_window: tuple[int, int] = _tuned(
        (1, 4),
        (_NEVER, 1),
        "of Nk",
        "query heads in turn: four waves if a window is >= x",
        _LONG_WINDOW,
    )
    alternate_group: int = _tuned(
        4, _NEVER, "query heads per key head", "causal: runs alternate if >= x", _ALTERNATE
    )
    alternate_keys: int = _tuned(
        1024, 0, "keys", "causal: runs of key blocks alternate if Nk >= x", _ALTERNATE
    )
    wave_keys: int = _tuned(
        16384, 8192, "keys", "of a wave of key blocks, if runs alternate", _ALTERNATE
    )
    # Deterministic backward: dq is summed in a fixed order.
    keys_in_flight: int = _tuned(
        1024, 2048, "keys", "of a head, whose blocks add to dq at a time", _IN_FLIGHT
    )
    stagger_dim: int = _tuned(64, 256, "D", "causal: stagger heads if D > x", _STAGGER)
    stagger_keys: int = _tuned(16384, 0, "keys", "causal: stagger heads if Nk <= x", _STAGGER_AGAIN)
    stagger_one_wave: int = _tuned(
        512, 0, "keys", "stagger one wave of heads, not two, if Nk <= x", _STAGGER_AGAIN
    )
    stagger_two_waves: int = _tuned(
        4096, _NEVER, "keys", "stagger two waves of heads, not three, if Nk <= x", _STAGGER
    )
    half_wave_group: int = _tuned(
        4, _NEVER, "query heads per key head", "causal: half a wave if >= x", _HALF_WAVE
    )
    half_wave_keys: int = _tuned(
        1024, 0, "keys", "causal: half a wave of key blocks if Nk <= x", _HALF_WAVE
    )


DEFAULT = Tuning(plane_rows=_NEVER)  # other GPUs need not tell calls apart by it
H100 = Tuning()  # and H200

_OF_ARCH = {"sm_90a": H100}


def tuning_of(arch: str) -> Tuning:
    """Return the tuned numbers of the GPU that kernels are compiled for."""
    return _OF_ARCH.get(arch, DEFAULT)


def tuned_numbers() -> tuple[TunedNumber, ...]:
    """List the tuned numbers."""
    return tuple(TunedNumber(**{**x.metadata, "name": x.name}) for x in fields(Tuning))
