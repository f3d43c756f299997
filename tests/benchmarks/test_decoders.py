"""Decoding libraries get the pages and lengths of tileattn; here, their packages use PyTorch."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import decode, decoders, peers
from benchmarks.comparison import compare
from benchmarks.decode import Decoding
from benchmarks.libraries import Arrays
from tests.benchmarks.fake_gpu import Fake

torch = pytest.importorskip("torch", reason="a baseline, and no dependency: pip install torch")

CASES = [
    Decoding("equal", 4, 2, [24] * 3),
    Decoding("drafts", 4, 2, [24] * 3, Nq=4),
    Decoding("many queries", 4, 2, [24] * 3, Nq=9),
    Decoding("lengths", 4, 2, [5, 24, 17]),
    Decoding("pages", 4, 2, [24, 9, 18], page=5),
    Decoding("latent", 4, 1, [130, 24], page=64, is_latent=True),
    Decoding("latent drafts", 4, 1, [130, 24], Nq=2, page=64, is_latent=True),
]
ABLE = {
    "flashinfer": {case.name for case in CASES},
    "flashinfer_cuda_cores": {"equal", "lengths", "pages"},
    "flashmla": {"latent", "latent drafts"},
}


def attend(q: Any, k: Any, v: Any) -> Any:
    """Attend causally with queries (Nq, Hq, D) to keys (N, Hkv, D) of one sequence."""
    Nq, N = len(q), len(k)
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    mask = torch.ones(Nq, N, dtype=torch.bool).tril(N - Nq)
    function = torch.nn.functional.scaled_dot_product_attention
    out = function(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
    return out.transpose(0, 1).bfloat16()


def in_pages(q: Any, caches: Any, offsets: Any, indices: Any, lengths: Any) -> Any:
    """Attend with queries (B, Nq, Hq, D) to pages (pages, page, Hkv, D)."""
    found = []
    for n, length in enumerate(lengths.tolist()):
        own = indices[offsets[n] : offsets[n + 1]].long()
        found.append(attend(q[n], *(x[own].flatten(0, 1)[:length] for x in caches)))
    return torch.stack(found)


class Wrapper:
    """FlashInfer's wrappers, but for latent attention: plans, then runs."""

    def __init__(self, workspace: Any, layout: str, **_: Any) -> None:
        assert layout == "HND"
        assert workspace.numel() == decoders.WORKSPACE_BYTES

    def plan(self, *tables: Any, page_size: int, **_: Any) -> None:
        self.offsets, self.indices, last = tables[-3:]
        self.lengths = (self.offsets.diff() - 1) * page_size + last

    def run(self, q: Any, caches: Any) -> Any:
        rows = q.unflatten(0, (len(self.lengths), -1))
        pages = [x.transpose(1, 2) for x in caches]
        return in_pages(rows, pages, self.offsets, self.indices, self.lengths).flatten(0, 1)


class LatentWrapper:
    def __init__(self, workspace: Any, **_: Any) -> None:
        assert workspace.dtype == torch.uint8

    def plan(self, *, metadata: Any, head_dim_ckv: int, **_: Any) -> None:
        self.metadata, self.width = metadata, head_dim_ckv

    def run(self, *, query: Any, kv_cache: Any) -> Any:
        starts, *tables = self.metadata
        assert starts[-1] == len(query)
        rows = query.unflatten(0, (len(starts) - 1, -1))
        keys = kv_cache[:, :, None]
        return in_pages(rows, (keys, keys[..., : self.width]), *tables).flatten(0, 1)


def flash_mla(
    q: Any, k: Any, table: Any, lengths: Any, width: int, schedule: list[bool], *, causal: bool
) -> tuple[Any, None]:
    """Attend as FlashMLA, whose first call fills the schedule."""
    assert k.shape[1:] == (64, 1, 576)
    assert causal is (q.shape[1] > 1)
    schedule.append(True)
    offsets = torch.arange(len(table) + 1) * table.shape[1]
    return in_pages(q, (k, k[..., :width]), offsets, table.flatten(), lengths), None


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install packages that compute in PyTorch, with their versions."""
    metadata = SimpleNamespace(csr=lambda *tables: tables)
    mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=LatentWrapper, MLAPlanMetadata=metadata)
    kinds = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    flashinfer = SimpleNamespace(__version__="0.7", mla=mla, **dict.fromkeys(kinds, Wrapper))
    calls = {"get_mla_metadata": lambda: ([], None), "flash_mla_with_kvcache": flash_mla}
    flashmla = SimpleNamespace(__version__="1.0", **calls)
    modules = {"flashinfer": flashinfer, "flashinfer.mla": mla, "flash_mla": flashmla}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(decoders, "CACHE_PAGE", 8)
    monkeypatch.setattr(decoders, "MANY_QUERIES", 9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decoders_attend_to_the_cache_of_each_sequence(case: Decoding) -> None:
    found, missing = peers.find(ABLE)
    assert missing == {}
    libraries = {"tileattn": Arrays("tileattn"), **found}
    ((_, row),) = compare([decode.step_of(np, case, 8, 0)], libraries, Fake(), "bf16")
    assert (row["failed"], row["mismatch"]) == ({}, {})
    assert set(row["speedup_over"]) == {name for name in ABLE if case.name in ABLE[name]}


@pytest.mark.parametrize(("last", "able"), [(20, False), (16, True), (24, True)])
def test_no_page_ends_past_the_cache(last: int, able: bool) -> None:
    """FlashInfer reads a contiguous cache in pages of eight keys, the last one also in part."""
    case = Decoding("end", 4, 2, [max(last, 20) - 4, last])
    libraries = {"tileattn": Arrays("tileattn"), **peers.find(["flashinfer"])[0]}
    ((_, row),) = compare([decode.step_of(np, case, 8, 0)], libraries, Fake(), "bf16")
    assert (row["failed"], row["mismatch"]) == ({}, {})
    assert ("flashinfer" in row["us"]) is able


def test_versions_of_decoders_are_known() -> None:
    found = peers.versions()
    assert (found["flashinfer"], found["flashmla"]) == ("0.7", "1.0")
