"""Digests of the results of a fixed set of problems: whether a change keeps every bit.

    python -m tools.digests --record before.json                  on NumPy arrays
    python -m tools.digests --compare before.json                 which problems differ
    python -m tools.digests --backend cupy --record before.json   on the GPU

The problems have every dtype, every option in one of eleven combinations, and lengths of one tile
and of several. Files of different machines, or versions of NumPy or BLAS, may differ.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import tileattn
from tileattn.dtypes import DTYPES

# B, Hq, Hkv, Nq, Nk, D, Dv
SIZES = ((2, 4, 2, 37, 71, 24, 40), (1, 2, 1, 530, 1100, 64, 64), (2, 2, 2, 75, 141, 128, 128))


def options(rng: np.random.Generator, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Draw combinations in which every option comes."""
    B, Hq, _, Nq, Nk = sizes[:5]
    mask = rng.random((Nq, Nk)) < 0.7
    yield {}
    yield {"scale": 0.3, "softcap": 5.0}
    yield {"causal": True, "sinks": rng.standard_normal(Hq)}
    yield {"window": (20, 5), "q_offset": rng.integers(-20, 40, B)}
    yield {"causal": True, "kv_lengths": rng.integers(0, Nk + 1, B)}
    yield {"mask": mask, "bias": rng.standard_normal((Hq, 1, Nk))}
    yield {"bias": rng.standard_normal((B, 1, Nq, Nk)), "softcap": 3.0}
    yield {"alibi_slopes": rng.random((B, Hq)), "causal": True}
    yield {"block_mask": tileattn.BlockMask.from_mask(mask & (rng.random(Nk) < 0.1), (16, 24))}
    yield {"dropout_p": 0.3, "seed": 7}
    yield {
        "dropout_p": 0.2,
        "seed": 1 << 40,
        "bias": rng.standard_normal((Nq, 1)),
        "causal": True,
        "sinks": rng.standard_normal(Hq),
    }


def digests(backend: str) -> dict[str, str]:
    """Run all problems, and digest the results of each, by the problem and the result's name."""
    found = {}
    for dtype, sizes in product(DTYPES, SIZES):
        rng = np.random.default_rng(sum(sizes))
        B, Hq, Hkv, Nq, Nk, D, Dv = sizes
        shapes = ((B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv), (B, Hq, Nq, Dv))
        q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        for number, given in enumerate(options(rng, sizes)):
            name = f"{dtype.name} {'x'.join(map(str, sizes))} {number} {' '.join(given)}"
            for result, x in _run(backend, (q, k, v, dout), given).items():
                found[f"{name}: {result}"] = hashlib.sha256(x.tobytes()).hexdigest()[:16]
    return found


def _run(backend: str, arrays: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
    if backend == "cupy":
        import cupy

        arrays = [cupy.asarray(x) for x in arrays]
        given = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    q, k, v, dout = arrays
    attention = tileattn.forward(q, k, v, backend=backend, **given)
    gradients = tileattn.backward(
        dout, q, k, v, *attention, backend=backend, deterministic=True, **given
    )
    results = {**attention._asdict(), **gradients._asdict()}
    return {n: x.get() if backend == "cupy" else x for n, x in results.items() if x is not None}


def main(argv: Sequence[str]) -> int:
    """Record or compare; the exit status is 1 where a digest differs."""
    parser = argparse.ArgumentParser(prog="digests", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("numpy", "cupy"), default="numpy")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--record", type=Path, metavar="FILE")
    action.add_argument("--compare", type=Path, metavar="FILE")
    chosen = parser.parse_args(argv)
    found = digests(chosen.backend)
    if chosen.record:
        chosen.record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {len(found)} digests to {chosen.record}")
        return 0
    before = json.loads(chosen.compare.read_text(encoding="utf-8"))
    differ = [name for name in before | found if before.get(name) != found.get(name)]
    for name in differ:
        print(f"differs: {name}")
    print(f"{len(found)} digests, of which {len(differ)} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
