"""The functions of flash_attn, beside ``attention`` on one sequence at a time."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tileattn.errors import UnsupportedError  # noqa: E402 - PyTorch may be absent
from tileattn.torch import attention, flash_attn  # noqa: E402 - as above

flash: Any = flash_attn  # called with *tensors
HQ, HKV, D = 4, 2, 16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def drawn(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def one_sequence(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """Attend in one sequence, (N, H, D) each, with the options of the library."""
    rows = (x.transpose(0, 1) for x in (q, k, v))
    out, lse = attention(*rows, return_lse=True, **options)
    return out.transpose(0, 1), lse


# What each parameter means is tested in tests/contract/test_shim_parameters.py.
SLOPES = torch.linspace(0.1, 0.7, HQ, dtype=torch.float64)
GIVEN: dict[str, Any] = {"window_size": (4, 1), "softcap": 2.0, "alibi_slopes": SLOPES}
OPTIONS = {"window": (4, 1), "softcap": 2.0, "alibi_slopes": SLOPES}


def same(found: Any, expected: Any, tensors: Any) -> None:
    """Compare outputs and gradients."""
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(x.cos().sum(), tensors) for x in (found, expected))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y)


def test_flash_attn_func() -> None:
    tensors = drawn((3, 4, HQ, D), (3, 9, HKV, D), (3, 9, HKV, D))
    q, k, v = tensors
    out, lse, probabilities = flash.flash_attn_func(q, k, v, **GIVEN, return_attn_probs=True)
    assert probabilities is None
    each = [one_sequence(*(x[b] for x in tensors), **OPTIONS) for b in range(3)]
    expected, expected_lse = (torch.stack(parts) for parts in zip(*each, strict=True))
    torch.testing.assert_close(lse, expected_lse)
    assert torch.equal(out, flash.flash_attn_func(*tensors, **GIVEN))
    same(out, expected, tensors)


def test_flash_attn_varlen_func() -> None:
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 4, 9], [0, 6, 7, 16]))
    tensors = drawn((9, HQ, D), (16, HKV, D), (16, HKV, D))
    q, k, v = tensors
    out = flash.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, **GIVEN)
    cuts = zip(tensors, (cu_q, cu_k, cu_k), strict=True)
    parts = zip(*(x.split(cu.diff().tolist()) for x, cu in cuts), strict=True)
    same(out, torch.cat([one_sequence(*part, **OPTIONS)[0] for part in parts]), tensors)


def test_flash_attn_varlen_func_with_pages() -> None:
    q, k, v = (x.detach() for x in drawn((9, HQ, D), (5, 4, HKV, D), (5, 4, HKV, D)))
    cu_q, cu_k = torch.tensor([0, 4, 9]), torch.tensor([0, 6, 13])
    table = torch.tensor([[3, 0], [4, 1]])
    out = flash.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, causal=True, block_table=table)
    for s, (rows, n) in enumerate(((slice(0, 4), 6), (slice(4, 9), 7))):
        keys, values = (x[table[s]].flatten(0, 1)[:n] for x in (k, v))
        expected = one_sequence(q[rows], keys, values, causal=True)[0]
        torch.testing.assert_close(out[rows], expected)


def test_rows_that_are_packed_along_an_axis() -> None:
    options: dict[str, Any] = {"causal": True, "window_size": (5, -1), "return_attn_probs": True}
    qkv, q, kv = drawn((2, 9, 3, HQ, D), (2, 4, HQ, D), (2, 9, 2, HKV, D))
    cu_q, cu = torch.tensor([0, 3, 4]), torch.tensor([0, 4, 9])
    varlen, packed = flash.flash_attn_varlen_func, flash.flash_attn_varlen_kvpacked_func
    pairs = [
        (
            flash.flash_attn_qkvpacked_func(qkv, **options),
            flash.flash_attn_func(*qkv.unbind(2), **options),
        ),
        (
            flash.flash_attn_kvpacked_func(q, kv, **options),
            flash.flash_attn_func(q, *kv.unbind(2), **options),
        ),
        (
            flash.flash_attn_varlen_qkvpacked_func(qkv[0], cu, 5, **options),
            varlen(*qkv[0].unbind(1), cu, cu, 5, 5, **options),
        ),
        (
            packed(q[0], kv[0], cu_q, cu, 3, 5, **options),
            varlen(q[0], *kv[0].unbind(1), cu_q, cu, 3, 5, **options),
        ),
    ]
    for found, expected in pairs:
        assert found[2] is None
        sums = found[0].cos().sum(), expected[0].cos().sum()
        grads = (torch.autograd.grad(x, (qkv, q, kv), materialize_grads=True) for x in sums)
        for x, y in zip((*found[:2], *next(grads)), (*expected[:2], *next(grads)), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"kv must have shape \(B, N, 2, H, D\).*got \(2, 9, 3,"):
        flash.flash_attn_kvpacked_func(q, qkv)


def test_a_sink_joins_the_denominator_and_has_a_gradient() -> None:
    q, k, v, sink = drawn((2, 5, HQ, D), (2, 9, HKV, D), (2, 9, HKV, D), (HQ,))
    out = flash.flash_attn_func(q, k, v, learnable_sink=sink)
    without, lse = flash.flash_attn_func(q, k, v, return_attn_probs=True)[:2]
    share = torch.sigmoid(lse - sink[:, None])
    same(out, without * share.transpose(1, 2)[..., None], (q, k, v, sink))
    flat, offsets = [x.flatten(0, 1) for x in (q, k, v)], [[0, 5, 10], [0, 9, 18]]
    found = flash.flash_attn_varlen_func(*flat, *offsets, learnable_sink=sink)
    torch.testing.assert_close(found.view_as(out), out)
    with torch.no_grad():
        found = flash.flash_attn_with_kvcache(q, k, v, learnable_sink=sink)
    torch.testing.assert_close(found, out)


def test_only_the_keys_in_use_count() -> None:
    q, k, v = drawn((9, HQ, D), (16, HKV, D), (16, HKV, D))
    offsets, used = ([0, 4, 4, 9], [0, 6, 7, 16]), [5, 0, 7]
    options: dict[str, Any] = {"causal": True, "window_size": [6, None]}
    found = flash.flash_attn_varlen_func(q, k, v, *offsets, seqused_k=used, **options)
    short = [torch.cat([x[:5], x[7:14]]) for x in (k, v)]
    expected = flash.flash_attn_varlen_func(q, *short, offsets[0], [0, 5, 5, 12], **options)
    torch.testing.assert_close(found, expected)
    pages = [x.detach().view(4, 4, HKV, D) for x in (k, v)]
    table = [[3, 0], [1, 2], [2, 1]]
    given = q.detach(), *pages, offsets[0]
    found = flash.flash_attn_varlen_func(
        *given, None, block_table=table, seqused_k=[5, 0, 7], **options
    )
    expected = flash.flash_attn_varlen_func(*given, [0, 5, 5, 12], block_table=table, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def rotated(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    c, s, half = cos[positions][:, None], sin[positions][:, None], cos.shape[1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    y = x.clone()
    y[..., first] = x[..., first] * c - x[..., second] * s
    y[..., second] = x[..., second] * c + x[..., first] * s
    return y


LENGTHS = torch.tensor([5, 0, 30], dtype=torch.int32)
CAPACITY = 40


@pytest.mark.parametrize("place", ["entries", "other entries", "pages"])
@pytest.mark.parametrize(
    ("causal", "interleaved", "window_size"),
    [(False, False, (-1, -1)), (True, True, (-1, -1)), (False, True, (4, -1))],
)
def test_flash_attn_with_kvcache(
    place: str, causal: bool, interleaved: bool, window_size: tuple[int, int]
) -> None:
    options: dict[str, Any] = {"causal": causal, "window_size": window_size}
    window = tuple(None if n < 0 else n for n in window_size)
    shapes = (3, 3, HQ, D), (3, 3, HKV, D), (3, 3, HKV, D)
    q, k, v, k_old, v_old = (x.detach() for x in drawn(*shapes, *((3, CAPACITY, HKV, D),) * 2))
    angles = torch.arange(64)[:, None] * 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    cos, sin = angles.cos(), angles.sin()
    where: dict[str, Any] = {}
    entries = torch.arange(3)
    pages = [x.clone() for x in (k_old, v_old)]
    if place == "other entries":
        entries = where["cache_batch_idx"] = torch.tensor([2, 0, 1])
    if place == "pages":
        table = where["block_table"] = torch.randperm(12).view(3, 4)
        pages = [
            torch.empty(12, 10, HKV, D, dtype=x.dtype).index_copy(
                0, table.flatten(), x.view(12, 10, HKV, D)
            )
            for x in pages
        ]
    else:
        pages = [torch.empty_like(x).index_copy(0, entries, x) for x in pages]
    out, lse = flash.flash_attn_with_kvcache(
        q,
        pages[0],
        pages[1],
        k,
        v,
        cos,
        sin,
        cache_seqlens=LENGTHS,
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
        **where,
        **options,
    )
    for b, n in enumerate(LENGTHS.tolist()):
        at = n + torch.arange(3)
        in_order = causal or window_size != (-1, -1)
        own = rotated(q[b], cos, sin, at if in_order else torch.full((3,), n), interleaved)
        keys = torch.cat([k_old[b, :n], rotated(k[b], cos, sin, at, interleaved)])
        values = torch.cat([v_old[b, :n], v[b]])
        expected = one_sequence(own, keys, values, causal=causal, window=window)
        torch.testing.assert_close(out[b], expected[0])
        torch.testing.assert_close(lse[b], expected[1])
        kept = pages[0][table[b]].flatten(0, 1) if place == "pages" else pages[0][entries[b]]
        torch.testing.assert_close(kept[: n + 3], keys)
        assert torch.equal(kept[n + 3 :], k_old[b, n + 3 :])


def test_a_cache_is_read_without_new_keys() -> None:
    q, k, v = (x.detach() for x in drawn((2, 3, HQ, D), (2, 8, HKV, D), (2, 8, HKV, D)))
    for given, n in ((None, 8), (5, 5), (torch.tensor([5, 5]), 5)):
        out = flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=given, causal=True)
        expected = one_sequence(q[1], k[1, :n], v[1, :n], causal=True)[0]
        torch.testing.assert_close(out[1], expected)


def test_a_cache_has_no_gradient() -> None:
    x = torch.zeros(1, 8, HQ, D, requires_grad=True)
    with pytest.raises(UnsupportedError, match="q requires a gradient"):
        flash.flash_attn_with_kvcache(x, x.detach(), x.detach())


def test_rows_of_another_rank_are_named() -> None:
    with pytest.raises(ValueError, match=r"q must have shape \(B, N, H, D\), or.* got \(8, 16\)"):
        flash.flash_attn_func(*torch.zeros(3, 8, 16))


X = torch.zeros(2, 5, HQ, D)
CACHES = torch.zeros(2, 2, 8, HKV, D)
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "func": (flash.flash_attn_func, {"q": X, "k": X, "v": X}),
    "varlen": (
        flash.flash_attn_varlen_func,
        {**dict.fromkeys("qkv", X[0]), "cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 5]},
    ),
    "packed": (
        flash.flash_attn_varlen_qkvpacked_func,
        {"qkv": torch.zeros(5, 3, HQ, D), "cu_seqlens": [0, 5]},
    ),
    "read": (flash.flash_attn_with_kvcache, {"q": X, "k_cache": CACHES[0], "v_cache": CACHES[1]}),
    "append": (
        flash.flash_attn_with_kvcache,
        {
            **{"q": X, "k_cache": CACHES[0], "v_cache": CACHES[1]},
            **{"k": X[:, :, :HKV] + 1, "v": X[:, :, :HKV] + 1, "cache_seqlens": [0, 0]},
            **{"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4)},
        },
    ),
}


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("func", {"softmax_scale": "a"}, "softmax_scale must be a finite number"),
        ("func", {"window_size": (-5, 0)}, "window_size must be a pair"),
        ("func", {"learnable_sink": torch.zeros(3)}, r"learnable_sink must have shape \(4,\)"),
        ("func", {"learnable_sink": 1}, "learnable_sink must be .*; got int"),
        ("varlen", {"seqused_k": [9]}, "seqused_k must be from 0 to the 5 keys"),
        ("varlen", {"seqused_k": [2, 2]}, "seqused_k must be an integer, or integers of shape"),
        (
            "varlen",
            {"cu_seqlens_k": [0, 4]},
            "cu_seqlens_k must end at the number of tokens of k, 5",
        ),
        ("packed", {"cu_seqlens": [0, 4]}, "cu_seqlens must end at the number of tokens"),
        ("read", {"cache_seqlens": [3, 9]}, "cache_seqlens must be from 0 to"),
        ("read", {"k_cache": CACHES[0].double()}, "k_cache must have the dtype of q"),
        (
            "read",
            {"v_cache": CACHES[1][:, :7]},
            "v_cache must have the length of k_cache, 8; got 7",
        ),
        ("read", {"k_cache": CACHES[0][..., :7]}, "k_cache must have the head dimension of q"),
        ("read", {"cache_batch_idx": [0, 2]}, "cache_batch_idx must hold pages from 0 to 1; got 2"),
        ("read", {"block_table": [[0], [2]]}, "block_table must hold pages from 0 to 1; got 2"),
        ("append", {"cache_seqlens": [0, 4]}, "cache_seqlens must be from 0 to"),
        ("append", {"k_cache": CACHES[0].double()}, "k_cache must have the dtype of q"),
        ("append", {"k": X[:, :, :HKV].double()}, "k must have the dtype of k_cache"),
        ("append", {"rotary_cos": torch.ones(8, 9)}, "rotary_cos must have shape"),
        (
            "append",
            {"rotary_sin": torch.ones(8, 3)},
            "rotary_sin must have the shape of rotary_cos",
        ),
        (
            "append",
            {"cache_batch_idx": [0, 2]},
            "cache_batch_idx must hold pages from 0 to 1; got 2",
        ),
        ("append", {"softmax_scale": float("nan")}, "softmax_scale must be a finite number"),
        ("append", {"softcap": -1.0}, "softcap must be .*; got -1.0"),
        ("append", {"alibi_slopes": torch.zeros(7)}, "alibi_slopes must have shape"),
        ("append", {"learnable_sink": torch.zeros(3)}, r"learnable_sink must have .* got \(3,\)"),
        ("append", {"cache_seqlens": None}, "cache_seqlens must be given with k"),
        ("append", {"cache_leftpad": LENGTHS}, r"cache_leftpad must have shape \(2,\); got \(3,\)"),
        ("append", {"cache_leftpad": [0.5, 1.0]}, "cache_leftpad must have dtype int32 or int64"),
        ("append", {"cache_leftpad": [1, -2]}, r"cache_leftpad must not be negative; got \[1, -2"),
        ("append", {"cache_batch_idx": 1}, r"cache_batch_idx must have shape \(B,\)"),
        ("append", {"block_table": [0, 1]}, r"block_table must have shape \(B, pages of a seq"),
        ("append", {"return_softmax_lse": 1}, "return_softmax_lse must be True or False"),
        ("append", {"rotary_interleaved": 1}, "rotary_interleaved must be True or False"),
        ("append", {"window_size": 5}, "window_size must be a pair .* got 5"),
        ("append", {"window_size": torch.tensor([1, 2])}, "window_size must be a pair .* tensor"),
        ("append", {"k": X[0]}, r"k must have four axes, \(B, N, H, D\)"),
        ("append", {"v": None}, "v must be .*; got NoneType"),
        ("append", {"q": torch.zeros(2, 2, 3, D)}, ".*3 heads of q"),
        ("append", {"rotary_sin": None}, "rotary_sin must be .*; got NoneType"),
        (
            "append",
            {"block_table": [[0]] * 2, "cache_batch_idx": [0, 1]},
            "cache_batch_idx must be",
        ),
        ("varlen", {"cu_seqlens_q": None}, "cu_seqlens_q must be integers"),
        ("varlen", {"cu_seqlens_k": 3}, "cu_seqlens_k must be integers"),
        ("varlen", {"cu_seqlens_k": None, "block_table": [[0]]}, "cu_seqlens_k must be integers"),
        ("varlen", {"return_attn_probs": 1}, "return_attn_probs must be True or False"),
        ("varlen", {"dropout_p": torch.zeros(2)}, "dropout_p must be "),
        ("packed", {"cu_seqlens": None}, "cu_seqlens must be integers"),
    ],
)
def test_wrong_arguments_are_named_and_write_nothing(name: str, changed: Any, message: str) -> None:
    call, given = CALLS[name]
    CACHES.zero_()
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call(**(given | changed))
    assert not CACHES.any()
    call(**given)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call(**(given | changed))
