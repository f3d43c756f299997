"""The tiles of a causal and of a block-sparse schedule, from ``tileattn.algorithm.mask``."""

from pathlib import Path
from typing import Any

from tileattn import BlockMask
from tileattn.algorithm.mask import AttentionMask, SlidingWindow, schedule
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL
from tools.drawing import Picture, Theme

N, BLOCK = 512, 64
ROW, COLUMN = 5, 1  # the query block and the key block whose tiles are numbered
KINDS = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}


def attention_masks() -> dict[str, AttentionMask]:
    """Make the two masks that are drawn: causal, and a causal window with the first keys."""
    sparse = BlockMask.from_predicate(
        lambda b, h, i, j: (j <= i) & ((i - j < 2 * BLOCK) | (j < BLOCK)),  # noqa: ARG005  # its form
        shape=(1, 1, N, N),
        block_size=(BLOCK, BLOCK),
    )
    return {
        "causal": AttentionMask(SlidingWindow(N, N, 0, None, 0), N),
        "block-sparse": AttentionMask(SlidingWindow(N, N, 0, None, None), N, block_mask=sparse),
    }


def tiles(attn_mask: AttentionMask) -> dict[str, Any]:
    """Masks of all tiles, and the tiles of one row and of one column, in their order."""
    kinds = [[EMPTY] * (N // BLOCK) for _ in range(N // BLOCK)]
    for tile in schedule(attn_mask, BLOCK, BLOCK):
        kinds[tile.q0 // BLOCK][tile.k0 // BLOCK] = tile.kind
    rows = schedule(attn_mask, BLOCK, BLOCK, outer_loop="q")
    columns = schedule(attn_mask, BLOCK, BLOCK, outer_loop="kv")
    return {
        "kinds": kinds,
        "row": [tile.k0 // BLOCK for tile in rows if tile.q0 // BLOCK == ROW],
        "column": [tile.q0 // BLOCK for tile in columns if tile.k0 // BLOCK == COLUMN],
    }


def picture(results: Path) -> Picture:  # noqa: ARG001  # nothing here is measured
    return Picture(
        values={name: tiles(mask) for name, mask in attention_masks().items()},
        size=(8.6, 4.9),
        draw=draw,
        alt="Two grids of tiles, queries downwards and keys to the right: the empty, partial and "
        "full tiles of a causal and of a block-sparse mask. Numbers show one row of tiles visited "
        "from left to right and one column from the top down.",
        caption="Solid frame: the tiles of one query block, the inner loop of FlashAttention-2. "
        "Dashed frame: the tiles of one key block, the inner loop of FlashAttention. Computed by "
        "`tileattn.algorithm.mask.schedule`.",
    )


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw a grid for each schedule, and the three tones beneath."""
    from matplotlib.patches import Patch

    axes = figure.subplots(1, len(values))
    for axis, (name, drawn) in zip(axes, values.items(), strict=True):
        _grid(axis, theme, drawn)
        axis.set_title(name)
    handles = [
        Patch(facecolor=theme.tones[kind], edgecolor=theme.faint, label=label)
        for kind, label in KINDS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _grid(axis: Any, theme: Theme, drawn: Any) -> None:
    from matplotlib.patches import Rectangle

    blocks = len(drawn["kinds"])
    for a, kinds in enumerate(drawn["kinds"]):
        for c, kind in enumerate(kinds):
            tone, edge = theme.tones[kind], theme.faint
            axis.add_patch(Rectangle((c, a), 1, 1, facecolor=tone, edgecolor=edge, linewidth=0.6))
    row = [(c, ROW) for c in drawn["row"]]
    column = [(COLUMN, a) for a in drawn["column"]]
    _visits(axis, theme, drawn, row, -0.2, "-")
    _visits(axis, theme, drawn, column, 0.2, "--")
    axis.set_xlim(-0.4, blocks + 0.1)
    axis.set_ylim(blocks + 0.1, -0.4)
    axis.set_aspect("equal")
    axis.grid(visible=False)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("key blocks")
    axis.set_ylabel("query blocks")
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)


def _visits(
    axis: Any, theme: Theme, drawn: Any, visited: list[tuple[int, int]], lift: float, dashes: str
) -> None:
    """Frame the tiles that are visited and number them in their order."""
    from matplotlib.patches import Rectangle

    (c0, a0), (c1, a1) = visited[0], visited[-1]
    frame = Rectangle((c0, a0), c1 - c0 + 1, a1 - a0 + 1, fill=False, linestyle=dashes, zorder=3)
    frame.set(edgecolor=theme.hues[0], linewidth=1.6)
    axis.add_patch(frame)
    for number, (c, a) in enumerate(visited, start=1):
        light = drawn["kinds"][a][c] == FULL
        colour = theme.background if light else theme.ink
        axis.text(c + 0.5 + lift, a + 0.5 - lift, number, color=colour, ha="center", va="center")
