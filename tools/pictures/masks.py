"""The pairs that masks leave visible, as calls of ``tileattn.forward`` compute them."""

from pathlib import Path
from typing import Any

import numpy as np

import tileattn
from tools.drawing import Picture, Theme

N = 12
FEW = 5  # queries of a call on a cache
DOCUMENT = np.repeat([0, 1, 2], [5, 2, 5])
TREE = np.array(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 0, 1]], bool
)


def _documents(b: Any, h: Any, i: Any, j: Any, document: Any) -> Any:  # noqa: ARG001  # its form
    return (document[i] == document[j]) & (i >= j)


MASKS: dict[str, tuple[int, dict[str, Any]]] = {
    "causal=True": (N, {"causal": True}),
    "causal=True,\nwindow=(3, 0)": (N, {"causal": True, "window": (3, 0)}),
    "causal=True,\nprefix=4": (N, {"causal": True, "prefix": 4}),
    "causal=True, kv_lengths=8,\nq_offset=0": (N, {"causal": True, "kv_lengths": 8, "q_offset": 0}),
    "mask_mod=documents": (N, {"mask_mod": _documents, "aux": (DOCUMENT,)}),
    "5 queries,\ncausal=True": (FEW, {"causal": True}),
    "5 queries, causal=True,\nq_offset=0": (FEW, {"causal": True, "q_offset": 0}),
    "5 drafts,\ntree_mask=tree": (FEW, {"tree_mask": TREE[None]}),
}
"""Number of queries and options of a call, by the title of its picture."""


def visible(queries: int, options: dict[str, Any]) -> list[list[int]]:
    """Return 1 where a query attends to a key: the values are unit vectors."""
    q, k = np.zeros((queries, 1)), np.zeros((N, 1))
    out = tileattn.forward(q, k, np.eye(N), backend="numpy", **options).out
    pairs: list[list[int]] = (out > 0).astype(int).tolist()
    return pairs


def picture(results: Path) -> Picture:  # noqa: ARG001  # nothing here is measured
    return Picture(
        values={title: visible(*call) for title, call in MASKS.items()},
        size=(8.6, 4.9),
        draw=draw,
        alt="Eight small grids, queries downwards and keys to the right, in which the visible "
        "pairs are filled: causal, sliding window, prefix, padding, documents, five queries "
        "aligned with the last and with the first keys, and a tree of drafts.",
        caption="Filled: the query (downwards) attends to the key (to the right). Computed "
        "by `tileattn.forward` with the options in the titles.",
    )


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw a grid for each mask."""
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([theme.tones[0], theme.tones[2]])
    for axis, (title, pairs) in zip(figure.subplots(2, 4).flat, values.items(), strict=True):
        axis.pcolormesh(pairs, cmap=colours, vmin=0, vmax=1, edgecolors=theme.faint, linewidth=0.6)
        axis.set_ylim(len(pairs), 0)
        axis.set_aspect("equal")
        axis.set_title(title, fontsize=8, family="monospace")
        axis.grid(visible=False)
        axis.set_xticks([])
        axis.set_yticks([])
        for side in ("left", "bottom"):
            axis.spines[side].set_visible(False)
