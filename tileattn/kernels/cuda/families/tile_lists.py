"""Kernels that classify the tiles of a ``mask_mod`` that reads arrays, and list them."""

from tileattn.kernels.cuda.families.context import ROW_WARPS, KernelLaunch
from tileattn.kernels.cuda.families.grid import Grid, Over
from tileattn.kernels.cuda.families.key import KernelKey

CLASSIFY = "classify_tiles"
LISTS = {"forward": ("list_key_tiles",), "backward": ("rank_key_tiles", "list_query_tiles")}
KERNELS = (CLASSIFY, *LISTS["forward"], *LISTS["backward"])

_CLASSIFY_WARPS = 16
_WHY = "mask_mod reads arrays, whose values decide which tiles are computed"
_LIST_WHY = "one warp for each line of tiles"


def classify_launch(dtype: str, tile: tuple[int, int], functions: str) -> KernelLaunch:
    """Launch the kernel that marks each tile as empty, partial or full."""
    key = KernelKey(
        *(CLASSIFY, dtype),
        block_q=tile[0],
        block_k=tile[1],
        warps_m=_CLASSIFY_WARPS,
        mask_mod=True,
        functions=functions,
    )
    return KernelLaunch(key, Grid("tile rows"), why=_WHY)


def list_launches(dtype: str, tile: tuple[int, int], direction: str) -> tuple[KernelLaunch, ...]:
    """Launch the kernels that list the tiles that are not empty."""
    launches = []
    for name in LISTS[direction]:
        key = KernelKey(name, dtype, block_q=tile[0], block_k=tile[1], warps_m=ROW_WARPS)
        over: Over = "listed columns" if name == "list_query_tiles" else "listed rows"
        grid = Grid(over, together=ROW_WARPS)
        launches.append(KernelLaunch(key, grid, why=_LIST_WHY))
    return tuple(launches)
