"""The public calls. Each validates, chooses a backend and hands over."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from tileattn.backends import registry
from tileattn.backends.buffers import ensure_workspace, ensure_writable
from tileattn.backends.known_calls import first_run, validated
from tileattn.backends.protocol import Explanation
from tileattn.call.options import ROWS, Options, wanted
from tileattn.call.parse import aux_arrays, four_axes, refuse_caches
from tileattn.call.prepared import CALLS, PreparedCall, SeenCall, signature
from tileattn.call.problem import Problem
from tileattn.expressions.functions import read_functions
from tileattn.results import Attention, Gradients
from tileattn.validation import check_flags


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    backend: str = "auto",
    out: Any | None = None,
    **options: Unpack[Options],
) -> Attention:
    """Exact attention, tile by tile with online softmax.

    Parameters
    ----------
    q : array, shape (B, Hq, Nq, D), (Hq, Nq, D) or (Nq, D)
        Queries; float16, bfloat16, float32 or float64. Any strides.
    k : array, shape (B, Hkv, Nk, D), (Hkv, Nk, D) or (Nk, D)
        Keys; ``Hq % Hkv == 0``, and query head h reads key head ``h // (Hq // Hkv)``. Of the dtype
        of q, or with ``k_descale`` float8_e4m3fn or int8.
    v : array, shape (B, Hkv, Nk, Dv), (Hkv, Nk, Dv) or (Nk, Dv)
        Values, of the dtype of k.
    backend : str
        ``"auto"``, ``"numpy"``, ``"llvm"``, ``"cupy"`` or a registered name. ``"auto"`` uses the
        name in ``TILEATTN_BACKEND`` if it is set. Otherwise CuPy arrays run on ``"cupy"``, and
        NumPy arrays on ``"llvm"`` if llvmlite is installed and the backend supports the call, else
        on ``"numpy"``; `explain` says why.
    out : array or None
        Array for the output, of its shape and dtype; it must not share memory with an input. It is
        written only after everything has succeeded.
    **options
        The options below, which ``backward`` takes too.

    Returns
    -------
    Attention
        Named tuple ``(out, lse)``: the output, and the natural logsumexp of the scores of each
        query.

    Other Parameters
    ----------------
    scale : float, default 1/sqrt(D)
        Multiplies ``q @ k.T``.
    softcap : float or None
        Caps the scaled product.
    alibi_slopes : array, shape (Hq,) or (B, Hq), or None
        Subtracts ``slope * |p - j|``.
    bias : array, floating, broadcastable to (B, Hq, Nq, Nk), or None
        Added to the scores; has a gradient.
    causal : bool
        Query at p attends to keys ``j <= p``.
    window : (int or None, int or None), or None
        ``(left, right)``: query at p attends to keys ``p - left <= j <= p + right``; None leaves a
        side open.
    mask : array of bool, broadcastable to (B, Hq, Nq, Nk), or None
        True = attended.
    block_mask : BlockMask or None
        Empty blocks are neither loaded nor computed.
    kv_lengths : int, array or sequence of int of shape (B,), or None
        Keys at and past the length are masked out.
    q_offset : int, array or sequence of int of shape (B,), or None
        Position p of query i is ``i + q_offset``; None is ``kv_length - Nq`` (aligned at the bottom
        right), 0 aligns at the top left.
    cu_seqlens_q, cu_seqlens_k : array or sequence of int, shape (S + 1,), or None
        Offsets of packed sequences, from 0 to the number of tokens: q is (Hq, Tq, D), k and v have
        Tk keys, and queries of sequence s attend only to keys of sequence s. One array holds for
        both if the other is None. Options with a batch axis have S entries. In the functions below,
        b is the sequence, and i and j count from its start. Not supported with ``mask``, ``bias``
        and ``block_mask``.
    block_table : array or sequence of int, shape (B, pages of a sequence), or None
        Keys and values are in pages: k is (pages, Hkv, page, D), v (pages, Hkv, page, Dv), and key
        j of sequence b is row ``j % page`` of page ``block_table[b, j // page]``. Requires
        ``kv_lengths``; may be combined with ``cu_seqlens_q``. Forward only.
    k_descale, v_descale : float or array of float32
        Factors of k and v of float8_e4m3fn or int8: the keys are ``k * k_descale``, the values
        ``v * v_descale``. A number holds for all heads. Shape (Hkv,) has a number for each head,
        and (B, Hkv) for each sequence and head, also with pages and packed sequences. Shape
        ``k.shape[:-1]`` has a number for each token and head; a shape that fits both is this one.
        q is float16, bfloat16 or float32, and out has its dtype. Forward only.
    tree_mask : array of bool, shape (B, Nq, Nq) or (1, Nq, Nq), or None
        Mask of the last Nq keys before ``kv_length``, such as the nodes of a tree in speculative
        decoding: query i attends to key ``kv_length - Nq + n`` if ``tree_mask[b, i, n]``. Only the
        other masks hold for earlier keys; all masks hold for these. Not supported with packed
        sequences.
    prefix : int, array or sequence of int of shape (B,), or None
        With ``causal``: every query also attends to the keys ``j < prefix``, as in a prefix
        language model. Other masks, and the left side of ``window``, still hold for these keys.
    origin : sequence or array of int, shape (4,) or (B, 4), or None
        Position of the call in a larger one: batch entry, query head, query and key. It is added to
        the indices of dropout and of the functions below, so that calls on blocks of a problem drop
        the same entries as one call. It does not shift masks and positions; ``q_offset`` does.
    sinks : array, floating, shape (Hq,), or None
        Logits that join the softmax denominator only; has a gradient.
    dropout_p : float
        Probability of dropping an entry; kept entries are divided by ``1 - dropout_p``.
    seed : int
        Seed of the dropout generator, from 0 to 2**64 - 1.
    score_mod : callable or None
        ``score_mod(s, b, h, i, j, *aux)`` returns the new score, after ``bias``, for batch entry b,
        query head h, query i and key j. It uses operators and NumPy's functions, and is traced: see
        the page "Your own score and mask functions".
    mask_mod : callable or None
        ``mask_mod(b, h, i, j, *aux)`` returns True if query i attends to key j. Tiles without
        visible pairs are not computed.
    invariant : bool
        Compute a row with the same bits in prefill, in chunks of it, in decoding and in speculative
        steps: whatever the number of queries, the batch, packing, pages and the keys after its
        last one. Some calls take longer: see "The same bits in prefill and decoding" on the page
        "Numerics". ``backward`` accepts the option, but does not promise this.
    aux : tuple of array
        Arrays that the functions index. Negative indices count from the end, as in NumPy; others
        outside an axis are clamped. Floating arrays that ``score_mod`` reads have gradients. Arrays
        that the functions capture are appended.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    BackendUnavailableError
        If the backend cannot run here.
    UnsupportedError
        If the backend does not support this problem.

    Notes
    -----
    The score of query i, at position ``p = i + q_offset``, and key j is::

        s = scale * q_i . k_j                         (k_j times k_descale, v_j times v_descale)
        s = softcap * tanh(s / softcap)
        s = s - alibi_slope * |p - j| + bias_ij
        s = score_mod(s, b, h, i, j, *aux)

    and the output is the mean of the values of all visible keys, weighted by the softmax of s.

    A query that attends to no key, or has only scores of -inf, has output 0 and lse -inf (with
    sinks: the sink).

    References
    ----------
    Dao, FlashAttention-2, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np
    >>> import tileattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 4, 100, 32), np.float32)
    >>> out, lse = tileattn.forward(q, k, v, causal=True)
    >>> out.shape, lse.shape
    ((2, 4, 100, 32), (2, 4, 100))
    >>> bool(np.allclose(out[:, :, 0], v[:, :, 0]))
    True
    """
    rows = q, k, v
    arrays = rows if out is None else (*rows, out)
    options = read_functions(options)
    key = signature(arrays, backend, options)
    valid: PreparedCall | SeenCall | None = CALLS.get(key)
    done: Attention | None = None
    if isinstance(valid, PreparedCall):  # a call like an earlier one goes straight to the launch
        launch = valid.cached.get(None)
        done = launch and launch(rows, options, out)
    elif out is None:
        done = first_run(valid, key, rows, backend, options, None)
    if done is not None:
        return done
    extra = {} if out is None else {"out": out}
    call, operands = validated(valid, q, k, v, backend, options, extra)
    problem = call.problem
    if out is not None:
        inputs = {"q": q, "k": k, "v": v, **options, **aux_arrays(options)}
        ensure_writable("out", out, inputs)
        result = call.forward(operands, four_axes(out))
        return Attention(out, _without_lead(result.lse, problem))
    result = call.forward(operands, None)
    if problem.ndim == 4:
        return result
    return Attention(*(_without_lead(x, problem) for x in result))


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any | None = None,
    deterministic: bool = False,
    wrt: Sequence[str] | None = None,
    backend: str = "auto",
    workspace: Any | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """Gradients of ``forward``, recomputing the probabilities from ``lse``.

    Parameters
    ----------
    dout : array, shape and dtype of out
        Upstream gradient of out.
    q, k, v : array
        As given to ``forward``.
    out, lse : array
        As ``forward`` has returned them.
    dlse : array, shape and dtype of lse, or None
        Upstream gradient of lse.
    deterministic : bool
        Ask for bitwise reproducible gradients; on the CPU they always are.
    wrt : sequence of str or None
        Names of the inputs whose gradients are computed, among ``"q"``, ``"k"``, ``"v"``,
        ``"bias"``, ``"sinks"`` and ``"aux"``; None for all. The other gradients are None.
    backend : str
        As for ``forward``.
    workspace : array of uint8, shape (n,), or None
        Memory for intermediate results; None allocates it from CuPy's pool. It must have at least
        ``explain(q, k, v, **options).workspace_bytes`` bytes, be contiguous, writable, on the
        device of q and aligned to 256 bytes, and share no memory with an input. It is overwritten.
    **options
        The same as ``forward`` was given.

    Returns
    -------
    Gradients
        Named tuple ``(dq, dk, dv, dbias, dsinks)``, each of its input's shape and dtype; the last
        two are None where the call has no ``bias`` or no ``sinks``. Its attribute ``daux`` has the
        gradients of ``aux``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    BackendUnavailableError
        If the backend cannot run here.
    UnsupportedError
        If the backend does not support this problem or a workspace; with ``block_table``, and with
        k and v of 8 bits.

    Notes
    -----
    No array of Nq x Nk is made. With P the probabilities and
    ``delta = rowsum(dout * out) - dlse``::

        dv = P.T @ dout
        ds = P * (dout @ v.T - delta)
        dq = scale * ds @ k
        dk = scale * ds.T @ q

    ``out`` and ``lse`` may be results of ``merge`` over more keys. If ``lse`` is so large that its
    rounding shows, it is computed again from these keys; the given one is used only where it is
    larger by more than rounding explains.

    Calls that run one after the other on a stream may share a workspace; concurrent calls need one
    each. The bytes that ``explain`` reports suffice with and without ``deterministic``, if lse and
    the rows of dout and out are contiguous, as ``forward`` returns them. Copies of other arrays
    need more; the error says how much. CPU backends need no workspace and do not write to it.

    References
    ----------
    Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> import tileattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 8))
    >>> out, lse = tileattn.forward(q, k, v)
    >>> dq, dk, dv, dbias, dsinks = tileattn.backward(np.ones_like(out), q, k, v, out, lse)
    >>> dq.shape, dbias is None
    ((5, 8), True)
    """
    refuse_caches("backward", options)
    extra = {"dout": dout, "out": out, "lse": lse}
    if dlse is not None:
        extra["dlse"] = dlse
    rows = q, k, v, *extra.values()
    options = read_functions(options)
    key = signature(rows, backend, options)
    valid: PreparedCall | SeenCall | None = CALLS.get(key)
    asked = wanted(wrt, options)
    has_rows = asked is None or asked.issuperset(ROWS)
    if has_rows and workspace is None and type(deterministic) is bool:
        done: Gradients | None = None
        if not isinstance(valid, PreparedCall):
            done = first_run(valid, key, rows, backend, options, deterministic, asked)
        elif asked is None:
            launch = valid.cached.get(deterministic)
            done = launch and launch(rows, options, None)
        if done is not None:
            return done
    call, operands = validated(valid, q, k, v, backend, options, extra)
    problem = call.problem
    operands = operands._replace(wrt=asked)
    check_flags(deterministic=deterministic)
    if workspace is not None:
        inputs = {"q": q, "k": k, "v": v, **extra, **options, **aux_arrays(options)}
        ensure_workspace(call.backend, workspace, inputs)
    if problem.ndim < 4:
        sums = (problem.B, problem.Hq, problem.Nq)
        out, dout, lse = four_axes(out), four_axes(dout), lse.reshape(sums)
        dlse = None if dlse is None else dlse.reshape(sums)
    result = call.backward(
        operands, dout, Attention(out, lse), dlse, bool(deterministic), workspace
    )
    callers = aux_arrays(options)  # functions may read others, of no gradient
    by_name = dict(zip(problem.aux_names, result.daux or (), strict=False))
    daux = tuple(by_name[name] for name in callers if name in by_name) or None
    found = result._asdict() | {"daux": daux}
    kept = {name: x if operands.wants(name[1:]) else None for name, x in found.items()}
    if kept["dbias"] is not None:
        kept["dbias"] = kept["dbias"].reshape(options["bias"].shape)
    for name in ("dq", "dk", "dv"):
        kept[name] = None if kept[name] is None else _without_lead(kept[name], problem)
    return Gradients(**kept)


def explain(
    q: Any, k: Any, v: Any, *, backend: str = "auto", **options: Unpack[Options]
) -> Explanation:
    """Describe what would run for a call, without running it.

    Parameters
    ----------
    q, k, v : array
        As for ``forward``.
    backend : str
        As for ``forward``.
    **options
        As for ``forward``.

    Returns
    -------
    Explanation
        Backend, kernel, tile sizes, fast memory, tiles by kind, a model of the bytes moved, and
        the reasons for the choice of the backend. ``str()`` of it is a short report.

    Raises
    ------
    TypeError, ValueError
        As for ``forward``.
    BackendUnavailableError
        If the backend cannot run here.
    UnsupportedError
        If the backend does not support this problem.

    Examples
    --------
    >>> import numpy as np
    >>> import tileattn
    >>> x = np.zeros((1, 1, 1024, 64), np.float32)
    >>> report = tileattn.explain(x, x, x, causal=True, backend="numpy")
    >>> report.kernel, report.reasons[0]
    ('tileattn.algorithm.spec', "backend='numpy' asks for it")
    """
    options = read_functions(options)
    call, operands = validated(None, q, k, v, backend, options, {})
    explanation: Explanation = call.backend.explain(call.problem, operands)
    reasons = registry.why(backend, call.backend, call.problem, q)
    return replace(explanation, reasons=(*reasons, *explanation.reasons))


def _without_lead(x: Any, problem: Problem) -> Any:
    """Take away the axes that the caller's arrays lack."""
    return x if problem.ndim == 4 else x[(0,) * (4 - problem.ndim)]
