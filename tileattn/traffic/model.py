"""Bytes between slow and fast memory, and FLOPs, of three algorithms and both passes.

``counted`` counts over the schedule that the backends run, ``modelled`` has the same numbers in
closed form, and ``recorded`` counts what the NumPy backend really loads and stores.

References
----------
Dao et al., FlashAttention, arXiv:2205.14135, section 3.2 and Theorem 2; Dao, FlashAttention-2,
arXiv:2307.08691, section 3.1.
"""

from collections.abc import Callable

from tileattn.call.problem import Operands, Problem
from tileattn.traffic.counts import TileLoads, closed_form, loads_of_a_key, reached, scheduled
from tileattn.traffic.record import Traffic

ALGORITHMS = ("standard", "flash1", "flash2")
"""Unfused attention on whole matrices; FlashAttention; FlashAttention-2."""

KINDS = ("forward", "backward")
"""The two passes."""

_COLUMNS_OF_K = {"q", "k", "dq", "dk"}
_COLUMNS_OF_V = {"v", "out", "dout", "dv"}
_SUMS = {
    ("flash1", "forward"): {"out", "l", "m"},
    ("flash1", "backward"): {"dq", "l", "m"},
    ("flash2", "forward"): {"lse"},
    ("flash2", "backward"): {"dq", "lse", "delta"},
}


def counted(
    problem: Problem,
    operands: Operands,
    tile: tuple[int, int],
    algorithm: str = "flash2",
    kind: str = "forward",
    heads_per_load: int = 1,
) -> Traffic:
    """Count the reads and writes of an algorithm, over its schedule.

    Parameters
    ----------
    problem : Problem
        Problem of the call.
    operands : Operands
        Arrays of the call; only masks and sizes are read.
    tile : (int, int)
        Queries and keys of a tile.
    algorithm : {"standard", "flash1", "flash2"}
        Whole matrices, FlashAttention or FlashAttention-2.
    kind : {"forward", "backward"}
        Pass to count.
    heads_per_load : int
        Query heads of a group per load of k and v, and per store of dk and dv. 1 counts every query
        head by itself. With query blocks outside, heads that differ in their empty blocks never
        load together.

    Returns
    -------
    Traffic
        Elements read and written, and the bytes of an element. Running sums have the size of
        ``problem.accum_dtype``: lse, l, m, delta, dq of flash1 and flash2, and out in the forward
        pass of flash1. k and v have that of ``problem.kv_dtype``, where it is given; descales are
        not counted. All other arrays have that of ``problem.dtype``.

    Raises
    ------
    ValueError
        If the algorithm, the kind, the tile or ``heads_per_load`` is invalid.

    Notes
    -----
    What is read (``<-``) and written (``->``)::

        standard forward   <- q, k -> s; <- s -> p; <- p, v -> out
        standard backward  <- p, dout -> dv; <- dout, v -> dp; <- p, dp -> ds;
                           <- ds, k -> dq; <- ds, q -> dk
        flash1 forward     -> out, l, m
                           each key block <- k, v
                           each of its tiles <- q, out, l, m -> out, l, m
        flash1 backward    -> dq
                           each key block <- k, v -> dk, dv
                           each of its tiles <- q, out, dout, dq, l, m -> dq
        flash2 forward     each query block <- q -> out, lse
                           each of its tiles <- k, v
        flash2 backward    <- dout, out -> delta; -> dq
                           each key block <- k, v -> dk, dv
                           each of its tiles <- q, dout, dq, lse, delta -> dq

    A key block that no query attends to is not read, but its dk and dv are written. Standard
    attention computes all pairs.

    References
    ----------
    Dao et al., arXiv:2205.14135, Algorithms 0 to 4; Dao, arXiv:2307.08691, Algorithms 1 and 2.
    """
    _check(tile, algorithm, kind, heads_per_load)
    loads, _ = scheduled(problem, operands, tile, heads_per_load)
    return _traffic(problem, loads, heads_per_load, algorithm, kind)


def modelled(
    problem: Problem,
    tile: tuple[int, int],
    algorithm: str = "flash2",
    kind: str = "forward",
    density: float | None = None,
    heads_per_load: int = 1,
) -> Traffic:
    """Compute the reads and writes of an algorithm in closed form.

    Parameters
    ----------
    problem : Problem
        Problem with full lengths and queries that end where the keys end
        (``q_offset = Nk - Nq``).
    tile : (int, int)
        Queries and keys of a tile.
    algorithm : {"standard", "flash1", "flash2"}
        Whole matrices, FlashAttention or FlashAttention-2.
    kind : {"forward", "backward"}
        Pass to count.
    density : float or None
        Part of the blocks of a block mask that are not empty, from 0 to 1; it takes the place of
        causal and window. None is no block mask.
    heads_per_load : int
        As for ``counted``.

    Returns
    -------
    Traffic
        The numbers of ``counted``, except as noted below.

    Raises
    ------
    ValueError
        If an argument is invalid, or the problem has options whose traffic sizes do not determine.

    Notes
    -----
    The time does not grow with the lengths. With a density, the numbers are exact if the tile is
    the block of the mask, lengths are multiples of it and every key block is attended; otherwise
    they are means. The schedule halves a tile of more than 256 queries at a causal or window
    boundary, and each half loads its keys; the model loads them once.
    """
    _check(tile, algorithm, kind, heads_per_load)
    _check_model(problem, density)
    loads = closed_form(problem, tile, density, heads_per_load)
    return _traffic(problem, loads, heads_per_load, algorithm, kind)


def flops(
    problem: Problem,
    kind: str = "forward",
    density: float | None = None,
    algorithm: str = "flash2",
) -> int:
    """Count the FLOPs of the matmuls of a pass.

    Parameters
    ----------
    problem : Problem
        Problem, as for ``modelled``.
    kind : {"forward", "backward"}
        Pass to count.
    density : float or None
        As for ``modelled``.
    algorithm : str
        A name of ``ALGORITHMS``.

    Returns
    -------
    int
        ``2 (D + Dv)`` forward and ``2 (3 D + 2 Dv)`` backward per visible pair: two matmuls forward
        (4 D if D = Dv), five backward (10 D). The standard algorithm computes all pairs. It has
        stored the probabilities, so its backward pass takes ``2 (2 D + 2 Dv)``.

    Raises
    ------
    ValueError
        As for ``modelled``.
    """
    _check((1, 1), algorithm, kind, 1)
    _check_model(problem, density)
    P = problem
    if algorithm == "standard":
        pairs = P.B * P.Hq * P.Nq * P.Nk
    elif density is None:
        pairs = P.B * P.Hq * reached(P.Nq, P.Nk, 1, P.Nk - P.Nq, *P.window)
    else:
        pairs = round(density * (P.B * P.Hq * P.Nq * P.Nk))
    if kind == "forward":
        return 2 * pairs * (P.D + P.Dv)
    again = 0 if algorithm == "standard" else P.D
    return 2 * pairs * (2 * (P.D + P.Dv) + again)


def explained(
    problem: Problem,
    operands: Operands,
    forward_tile: tuple[int, int],
    backward_tile: tuple[int, int],
    heads_per_tile: int = 1,
) -> tuple[dict[str, int], dict[str, int], dict[str, tuple[int, int]]]:
    """Count the tiles of the forward pass, and the bytes of both passes of every algorithm.

    Parameters
    ----------
    problem : Problem
        Problem of the call.
    operands : Operands
        Arrays of the call; only masks and sizes are read.
    forward_tile, backward_tile : (int, int)
        Queries and keys of a tile of each pass.
    heads_per_tile : int
        Query heads of a group whose queries share a forward tile, and a load of k and v.

    Returns
    -------
    tiles : dict of str to int
        Tiles that are ``"skipped"``, ``"partial"`` and ``"full"``, of all heads.
    moved : dict of str to int
        Bytes that a FlashAttention-2 forward pass reads and writes, by array.
    traffic : dict of str to (int, int)
        Bytes of the forward and of the backward pass, by algorithm.
    """
    forward, tiles = scheduled(problem, operands, forward_tile, heads_per_tile)
    backward, _ = scheduled(problem, operands, backward_tile)
    passes = {
        name: (
            _traffic(problem, forward, heads_per_tile, name, "forward"),
            _traffic(problem, backward, 1, name, "backward"),
        )
        for name in ALGORITHMS
    }
    traffic = {name: (first.nbytes, second.nbytes) for name, (first, second) in passes.items()}
    return tiles, passes["flash2"][0].moved, traffic


_Counts = tuple[dict[str, int], dict[str, int]]


def _traffic(
    P: Problem, loads: TileLoads, heads_per_load: int, algorithm: str, kind: str
) -> Traffic:
    keys = loads_of_a_key(P, heads_per_load) * P.Nk
    reads, writes = _COUNTS[algorithm, kind](P, loads, keys)
    sums = _SUMS.get((algorithm, kind), set())

    def elements(rows: dict[str, int]) -> dict[str, int]:
        return {name: n * _width(P, name) for name, n in rows.items()}

    stored = {"k": P.kv_dtype or P.dtype, "v": P.kv_dtype or P.dtype}
    stored |= dict.fromkeys(sums, P.accum_dtype)
    sizes = {name: stored.get(name, P.dtype).itemsize for name in {**reads, **writes}}
    return Traffic(elements(reads), elements(writes), sizes)


def _width(P: Problem, name: str) -> int:
    """Elements of a row of an array; elements of whole matrices are counted one by one."""
    if name in _COLUMNS_OF_K:
        return P.D
    return P.Dv if name in _COLUMNS_OF_V else 1


# Each function returns the rows read and the rows written. ``queries`` counts the rows of all query
# heads. ``keys`` counts the rows of all key heads, times the loads that the heads of a group make.


def _standard_forward(P: Problem, loads: TileLoads, keys: int) -> _Counts:
    queries, pairs = P.B * P.Hq * P.Nq, loads.pairs
    reads = {"q": queries, "k": keys, "s": pairs, "p": pairs, "v": keys}
    return reads, {"s": pairs, "p": pairs, "out": queries}


def _standard_backward(P: Problem, loads: TileLoads, keys: int) -> _Counts:
    queries, pairs = P.B * P.Hq * P.Nq, loads.pairs
    reads = {"q": queries, "k": keys, "v": keys, "dout": 2 * queries}
    reads |= {"p": 2 * pairs, "dp": pairs, "ds": 2 * pairs}
    return reads, {"dp": pairs, "ds": pairs, "dq": queries, "dk": keys, "dv": keys}


def _flash1_forward(P: Problem, loads: TileLoads, _: int) -> _Counts:
    queries, rows, held = P.B * P.Hq * P.Nq, loads.rows, loads.held
    reads = {"q": rows, "k": held, "v": held, "out": rows, "l": rows, "m": rows}
    return reads, dict.fromkeys(("out", "l", "m"), queries + rows)


def _flash1_backward(P: Problem, loads: TileLoads, keys: int) -> _Counts:
    queries, rows, held = P.B * P.Hq * P.Nq, loads.rows, loads.held
    reads = {"q": rows, "k": held, "v": held}
    reads |= dict.fromkeys(("out", "dout", "dq", "l", "m"), rows)
    return reads, {"dq": queries + rows, "dk": keys, "dv": keys}


def _flash2_forward(P: Problem, loads: TileLoads, _: int) -> _Counts:
    queries = P.B * P.Hq * P.Nq
    reads = {"q": queries, "k": loads.keys, "v": loads.keys}
    return reads, {"out": queries, "lse": queries}


def _flash2_backward(P: Problem, loads: TileLoads, keys: int) -> _Counts:
    queries, rows, held = P.B * P.Hq * P.Nq, loads.rows, loads.held
    reads = {"q": rows, "k": held, "v": held, "out": queries, "dout": queries + rows}
    reads |= dict.fromkeys(("dq", "lse", "delta"), rows)
    return reads, {"delta": queries, "dq": queries + rows, "dk": keys, "dv": keys}


_COUNTS: dict[tuple[str, str], Callable[[Problem, TileLoads, int], _Counts]] = {
    ("standard", "forward"): _standard_forward,
    ("standard", "backward"): _standard_backward,
    ("flash1", "forward"): _flash1_forward,
    ("flash1", "backward"): _flash1_backward,
    ("flash2", "forward"): _flash2_forward,
    ("flash2", "backward"): _flash2_backward,
}


def _check(tile: tuple[int, int], algorithm: str, kind: str, heads_per_load: int) -> None:
    for name, value, accepted in (("algorithm", algorithm, ALGORITHMS), ("kind", kind, KINDS)):
        if value not in accepted:
            raise ValueError(f"{name} must be one of {', '.join(accepted)}; got {value!r}")
    if min(tile) < 1:
        raise ValueError(f"tile must be (queries, keys), 1 or more each; got {tile!r}")
    if heads_per_load < 1:
        raise ValueError(f"heads_per_load must be 1 or more; got {heads_per_load}")


def _check_model(problem: Problem, density: float | None) -> None:
    if density is not None and not 0 <= density <= 1:
        raise ValueError(f"density must be a number from 0 to 1; got {density}")
    unknown = list(problem.place_options)
    if problem.has_block_mask and density is None:
        unknown.append("block_mask")
    if unknown:
        remedy = "use counted(), which reads the arrays"
        if "block_mask" in unknown:
            remedy += ", or pass density= for a block mask"
        raise ValueError(f"sizes do not determine the traffic of {', '.join(unknown)}; {remedy}")
