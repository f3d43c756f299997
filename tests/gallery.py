"""The calls of the gallery's functions, with arrays of any sizes."""

from typing import Any

import numpy as np

from examples import score_functions as gallery

Options = dict[str, Any]


def calls(B: int, Hq: int, Nq: int, Nk: int, dtype: Any = np.float64) -> dict[str, Options]:
    """Options of a call of each function of the gallery."""
    rng = np.random.default_rng(5)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(dtype)

    longest = max(Nq, Nk, 8)
    lengths = np.sort(rng.integers(0, 4, (B, longest)), axis=1)
    nodes = max(Nq, 1)
    ancestor = np.tril(rng.random((B, nodes, nodes)) < 0.6) | np.eye(nodes, dtype=bool)
    context = np.full(B, max(Nk - nodes, 0), np.int32)
    t5 = normal(Hq, 16), gallery.t5_buckets(longest)
    return {
        "alibi": {"score_mod": gallery.alibi},
        "soft_cap": {"score_mod": gallery.soft_cap},
        "relative_bias": {"score_mod": gallery.relative_bias, "aux": (normal(Hq, 33),)},
        "t5_bias": {"score_mod": gallery.t5_bias, "aux": t5},
        "transformer_xl": {
            "score_mod": gallery.transformer_xl,
            "aux": (normal(B, Hq, Nq, 25), normal(B, Hq, Nk)),
        },
        "temperature": {"score_mod": gallery.temperature, "aux": (normal(Hq),)},
        "gaussian": {
            "score_mod": gallery.gaussian,
            "aux": (3 * normal(Hq), (4 + rng.random(Hq)).astype(dtype)),
        },
        "masked_score": {"score_mod": gallery.masked_score},
        "sliding_window": {"mask_mod": gallery.sliding_window},
        "prefix_lm": {
            "mask_mod": gallery.prefix_lm,
            "aux": (rng.integers(0, Nk + 1, B),),
        },
        "documents": {"mask_mod": gallery.documents, "aux": (lengths,)},
        "dilated_window": {"mask_mod": gallery.dilated_window},
        "local_and_global": {"mask_mod": gallery.local_and_global},
        "neighbourhood": {"mask_mod": gallery.neighbourhood},
        "tree": {"mask_mod": gallery.tree, "aux": (ancestor, context)},
        "scattered": {"mask_mod": gallery.scattered},
    }
