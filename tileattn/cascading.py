"""Cascade attention: sequences that share pages of keys read these pages once."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tileattn.api import forward
from tileattn.backends.registry import ensure_one_owner
from tileattn.call.descale import descale_arrays
from tileattn.call.sequences import Paging, as_integers, kv_lengths_of, paging, together
from tileattn.merging import merge
from tileattn.messages import called, must_be
from tileattn.results import Attention
from tileattn.validation import check_flags, require_array

# Queries of a call on shared keys, at most and at least: split-KV takes `split_queries`
# (kernels/cuda/tuning.py). H200, bf16, D = 128: docs/tuning-log.md, cascade. JAX arrays may be on
# a GPU, so their groups are divided on any device.
_MOST_QUERIES, _LEAST_QUERIES = 64, 16


def cascade(
    q: Any,
    k: Any,
    v: Any,
    *,
    shared_lengths: Any,
    block_table: Any,
    kv_lengths: Any,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    tree_mask: Any = None,
    sinks: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    backend: str = "auto",
) -> Attention:
    """Exact attention over pages, which reads the keys that sequences share once.

    The batch is G groups of B / G consecutive sequences. The first keys of all sequences of a group
    are the same, such as the keys of a common prompt.

    Parameters
    ----------
    q : array, shape (B, Hq, Nq, D)
        Queries: float16, bfloat16, float32 or float64.
    k : array, shape (pages, Hkv, page, D)
        Pages of keys, of the dtype of q. Pages of int8 and float8_e4m3fn have descales.
    v : array, shape (pages, Hkv, page, Dv)
        Pages of values.
    shared_lengths : int, array or sequence of int of shape (G,)
        Number of keys that the sequences of a group share: 0, or a multiple of the page size that
        leaves at least the last Nq keys to each sequence. G divides B. An integer is for one group
        of all sequences.
    block_table : array or sequence of int, shape (B, pages of a sequence)
        Key j of sequence b is row ``j % page`` of page ``block_table[b, j // page]``. Shared keys
        are read from the pages of the first sequence of the group.
    kv_lengths : int, array or sequence of int of shape (B,)
        Number of keys of each sequence, with the shared ones.
    causal : bool
        As in ``forward``. Every query attends to all shared keys.
    scale : float, default 1/sqrt(D)
        As in ``forward``.
    softcap : float or None
        As in ``forward``.
    tree_mask : array of bool, shape (B, Nq, Nq) or (1, Nq, Nq), or None
        Mask of the last Nq keys of each sequence, as in ``forward``.
    sinks : array, floating, shape (Hq,), or None
        Logits that join the softmax denominator.
    k_descale, v_descale : float or array of float32
        Factors of pages of 8 bits, as in ``forward``. An array of shape (B, Hkv) must have the same
        numbers for all sequences of a group.
    backend : str
        As for ``forward``.

    Returns
    -------
    Attention
        As ``forward`` with the same arguments returns it, up to rounding.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or the sequences of a group have different pages of
        shared keys; the message names it. Values on a device are not validated.
    BackendUnavailableError
        If the backend cannot run here.
    UnsupportedError
        If the backend does not support this problem.

    Notes
    -----
    One call of ``forward`` takes the shared keys of each group, with the queries of all its
    sequences as the rows of one sequence. A second call takes the other keys of each sequence, and
    `merge` joins the results. Only queries, integers and results are copied.

    Lengths on a device stay there, and the host does not wait for them. A shared length on a device
    is rounded down to whole pages.

    References
    ----------
    Juravsky et al., Hydragen: High-Throughput LLM Inference with Shared Prefixes, arXiv:2402.05099.

    Examples
    --------
    >>> import numpy as np
    >>> import tileattn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 4, 1, 8))
    >>> k, v = rng.standard_normal((2, 5, 2, 16, 8))  # 5 pages of 16 keys
    >>> pages = {"block_table": [[3, 0, 1], [3, 0, 4]], "kv_lengths": [40, 33]}
    >>> out, lse = tileattn.cascade(q, k, v, shared_lengths=32, **pages)
    >>> bool(np.allclose(out, tileattn.forward(q, k, v, **pages).out))
    True
    """
    both = {"scale": scale, "softcap": softcap, "k_descale": k_descale, "v_descale": v_descale}
    last = {"tree_mask": tree_mask, "sinks": sinks}
    both, last = ({n: x for n, x in given.items() if x is not None} for given in (both, last))
    check_flags(causal=causal)
    arrays = {"q": q, "k": k, "v": v}
    for name, x in arrays.items():
        require_array(name, x)
    check_axes(arrays)
    integers = {"shared_lengths": shared_lengths, "block_table": block_table}
    integers["kv_lengths"] = kv_lengths
    owner = ensure_one_owner(arrays | last | descale_arrays(both), integers)
    pages, lengths, shared = places_of(q, k, integers)
    both |= {"backend": backend}
    last |= {"causal": causal}
    if shares_nothing(q, pages, shared):
        return forward(q, k, v, block_table=pages.block_table, kv_lengths=lengths, **both, **last)
    split, given = cascade_tables, (pages.block_table, lengths, shared)
    if not all(isinstance(x, np.ndarray) for x in given):
        split = getattr(owner, "cascade_tables", cascade_tables)
    tables = Tables(*split(*given, pages.page))
    return merged((q, k, v), tables, both, last, forward, merge)


def check_axes(arrays: Mapping[str, Any]) -> None:
    """Raise ValueError unless q, k and v have four axes."""
    for name, x in arrays.items():
        if x.ndim != 4:
            shape = "(B, Hq, Nq, D)" if name == "q" else "(pages, Hkv, page, D)"
            raise ValueError(f"{called(name)} must have shape {shape}; got {x.shape}")


def places_of(q: Any, k: Any, integers: Mapping[str, Any]) -> tuple[Paging, Any, Any]:
    """Validate the integers of a call; return pages, lengths, and the shared length of each group.

    Values on a device are not validated.
    """
    pages = paging(integers, k)
    if pages is None:
        raise TypeError(must_be("block_table", "integers of shape (B, pages of a sequence)", None))
    B, _, Nq, _ = q.shape
    lengths = kv_lengths_of(integers["kv_lengths"], B, pages.capacity)
    pages.check(lengths)
    shared = _shared_lengths(integers["shared_lengths"], B)
    if isinstance(shared, np.ndarray):
        _check_lengths(shared, lengths, (B, Nq), pages)
        _check_pages(shared // max(pages.page, 1), pages.block_table)
    return pages, lengths, shared


def shares_nothing(q: Any, pages: Paging, shared: Any) -> bool:
    """Return True if a plain call reads no key twice: without shared keys, or in groups of one."""
    on_host = isinstance(shared, np.ndarray)
    return q.shape[0] in (0, len(shared)) or not pages.page or (on_host and not shared.any())


class Tables(NamedTuple):
    """Pages and lengths of the two calls.

    Parameters
    ----------
    table, kv_lengths : array of int, shapes (B, pages of a sequence) and (B,)
        Pages and lengths of each sequence, without the shared keys.
    shared_table, shared_lengths : array of int, shapes (G, pages of a sequence) and (G,)
        Pages of each group, and the number of shared keys in them.
    """

    table: Any
    kv_lengths: Any
    shared_table: Any
    shared_lengths: Any


def merged(
    arrays: tuple[Any, Any, Any],
    tables: Tables,
    both: dict[str, Any],
    last: dict[str, Any],
    attend: Callable[..., Attention],
    join: Callable[..., Attention],
) -> Attention:
    """Attend to the shared keys and to the others, and merge the results.

    ``both`` has the options of both calls, ``last`` the options of the call on the other keys.
    ``attend`` and ``join`` are ``forward`` and ``merge``, or their counterparts for other arrays.
    """
    q, k, v = arrays
    (B, Hq, Nq, D), G = q.shape, len(tables.shared_lengths)
    R = B // G if isinstance(q, np.ndarray) else _members(B // G, Nq)
    descales = {name: _of_rows(name, x, G, R) for name, x in descale_arrays(both).items()}
    shared = {"block_table": tables.shared_table, "kv_lengths": tables.shared_lengths}
    if R * G < B:
        shared = {name: _repeated(x, B // (R * G)) for name, x in shared.items()}
        G = B // R
    # This call validates what both calls have: its messages show what the caller has passed.
    own = {"block_table": tables.table, "kv_lengths": tables.kv_lengths}
    rest = attend(q, k, v, **own, **both, **last)
    rows = q.reshape(G, R, Hq, Nq, D).swapaxes(1, 2).reshape(G, Hq, R * Nq, D)
    first = attend(rows, k, v, **shared, **both | descales)
    # Views with the axes G, R, Hq and Nq. NumPy's result has the order in memory of the first part.
    outs, lses = (
        [
            x.reshape(G, R, Hq, Nq, *x.shape[3:]),
            y.reshape(G, Hq, R, Nq, *y.shape[3:]).swapaxes(1, 2),
        ]
        for x, y in zip(rest, first, strict=True)
    )
    out, lse = join(outs, lses)
    return Attention(out.reshape(rest.out.shape), lse.reshape(rest.lse.shape))


def _repeated(x: Any, times: int) -> Any:
    """Repeat each entry of the first axis. Along a first axis, CuPy starts a kernel for each."""
    repeated = x[:, np.newaxis].repeat(times, axis=1)
    return repeated.reshape(len(x) * times, *x.shape[1:])


def _members(members: int, Nq: int) -> int:
    """Divide a group of ``members`` sequences into equal parts; return the sequences of a part."""
    largest = min(members, _MOST_QUERIES // max(Nq, 1))
    fitting = (n for n in range(largest, 0, -1) if members % n == 0)
    most = next(fitting, members)
    return most if members * Nq > _MOST_QUERIES and most * Nq >= _LEAST_QUERIES else members


def cascade_tables(table: Any, lengths: Any, shared: Any, page: int) -> tuple[Any, Any, Any, Any]:
    """Compute the `Tables` by array expressions: on the device if some integers are there.

    Shared lengths are rounded down to whole pages.
    """
    table, lengths, shared = together(table, lengths, shared)
    (B, width), (G,) = table.shape, shared.shape
    dropped = np.minimum(np.maximum(shared // page, 0), width)
    own = np.broadcast_to(dropped[:, np.newaxis], (G, B // G)).reshape(B)
    columns = own[:, np.newaxis] + np.arange(width, like=table)
    # Columns past the table may name any page: they have no keys.
    rest = table[np.arange(B, like=table)[:, np.newaxis], np.minimum(columns, width - 1)]
    return rest, lengths - own * page, table[:: B // G], dropped * page


def _shared_lengths(x: Any, B: int) -> Any:
    """Return the shared length of each group."""
    what = f"an integer, or integers of shape (G,) for G groups, where G divides the batch size {B}"
    found = as_integers("shared_lengths", x, what)
    if not found.shape:
        found = found.reshape(1)
    if found.ndim != 1 or (B % found.shape[0] if found.shape[0] else B):
        raise ValueError(f"{called('shared_lengths')} must be {what}; got shape {found.shape}")
    return found.astype(np.int64) if isinstance(found, np.ndarray) else found


def _check_lengths(shared: Any, lengths: Any, sizes: tuple[int, int], pages: Paging) -> None:
    """Raise ValueError for shared lengths that are not whole pages, or leave fewer than Nq keys."""
    name, (B, Nq), page = called("shared_lengths"), sizes, pages.page
    for g in np.flatnonzero((shared < 0) | (shared % page if page else shared)):
        raise ValueError(
            f"{name} must be multiples of the page size, {page}, and not negative; got {shared[g]} "
            f"for group {g}"
        )
    own, source = np.repeat(shared, B // max(len(shared), 1)), "kv_lengths"
    if not isinstance(lengths, np.ndarray):  # lengths on a device are not read
        lengths, source = np.full(B, pages.capacity), "block_table"
    for b in np.flatnonzero((own > 0) & (own + Nq > lengths)):
        raise ValueError(
            f"{name} must leave the last Nq = {Nq} keys to each sequence; got {own[b]}, and "
            f"{called(source)} has {lengths[b]} keys for sequence {b}"
        )


def _check_pages(shared_pages: Any, table: Any) -> None:
    """Raise ValueError if sequences of a group differ in shared pages; skip tables on a device."""
    if not isinstance(table, np.ndarray) or not shared_pages.size:
        return
    (B, width), G = table.shape, len(shared_pages)
    groups = table.reshape(G, B // G, width)
    is_shared = np.arange(width) < shared_pages[:, np.newaxis, np.newaxis]
    for g, b, n in np.argwhere(is_shared & (groups != groups[:, :1])):
        first = g * (B // G)
        raise ValueError(
            f"{called('block_table')} must have the same pages of shared keys for all sequences of "
            f"a group; got {groups[g, b, n]} for page {n} of sequence {first + b}, and "
            f"{groups[g, 0, n]} for sequence {first}"
        )


def _of_rows(name: str, x: Any, G: int, rows: int) -> Any:
    """Return the descales of each ``rows`` sequences; all sequences of a group must have the same.

    Descales that are not (B, Hkv) hold for groups as they are.
    """
    if x.ndim != 2:
        return x
    R = len(x) // G
    groups = x.reshape(G, R, x.shape[1])
    if isinstance(x, np.ndarray):
        for g, b, h in np.argwhere(groups != groups[:, :1]):
            raise ValueError(
                f"{called(name)} must have the same numbers for all sequences of a group; got "
                f"{groups[g, b, h]} for head {h} of sequence {g * R + b}, and {groups[g, 0, h]} "
                f"for sequence {g * R}"
            )
    return x[::rows]
