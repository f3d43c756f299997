"""FlashInfer and FlashMLA, libraries for decoding, as libraries of the benchmarks.

Calls are planned when they are prepared. Caches have the memory of tileattn's, without a copy.
"""

import importlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from benchmarks.libraries import Step, Torch, tokens_first

WORKSPACE_BYTES = 128 << 20  # as FlashInfer's documentation recommends
CACHE_PAGE = 64  # keys; how FlashInfer reads a contiguous cache
MANY_QUERIES = 64  # from here on, FlashInfer's users call the wrapper for prefill
FLASHMLA_PAGE = 64  # keys; FlashMLA has no other pages
LARGEST_GROUP = 8  # query heads of a key head for which FlashInfer has kernels on CUDA cores


class Decoder(Torch):
    """A library that decodes from a cache; the memory of its queries is (B, Nq, Hq, D)."""

    def laid_out(self, step: Step) -> Step:
        q, *others = step.rows
        return step._replace(rows=(tokens_first(q), *others))

    def attend(self, step: Step) -> Callable[..., Any] | None:
        if step.without("causal", "kv_lengths", "block_table") or step.longest:
            return None
        is_causal = step.lengths[0] == 1 or step.options.get("causal")
        return self.planned(step) if is_causal and len(step.rows) == 3 else None

    @abstractmethod
    def planned(self, step: Step) -> Callable[..., Any] | None:
        """Plan a causal forward pass."""


class Pages(NamedTuple):
    """The pages of each sequence, as FlashInfer takes them: tensors of int32 on the GPU."""

    offsets: Any  # (B + 1,), into indices
    indices: Any
    last: Any  # (B,), the number of keys in the last page
    lengths: Any  # (B,)


class FlashInfer(Decoder):
    """FlashInfer's kernels on tensor cores."""

    on_tensor_cores = True

    def __init__(self, name: str = "FlashInfer") -> None:
        super().__init__(name)
        self._module = importlib.import_module("flashinfer")

    def planned(self, step: Step) -> Callable[..., Any] | None:
        B, Hq, Nq, D = step.rows[0].shape
        if is_latent(step):
            return self._latent(step)
        table = step.options.get("block_table")
        page = CACHE_PAGE if table is None else step.rows[1].shape[2]
        pages = self._pages(step, page)
        if table is None and int(pages.indices.max()) >= _rows(step.rows[1].shape, page):
            return None  # the last page would end past the cache
        sizes = {"num_qo_heads": Hq, "num_kv_heads": step.rows[1].shape[1], "page_size": page}
        sizes |= dict.fromkeys(("q_data_type", "kv_data_type"), self.torch.bfloat16)
        if Nq >= MANY_QUERIES:
            made = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            made.plan(self._starts(B, Nq), *pages[:3], head_dim_qk=D, causal=True, **sizes)
        else:
            made = self._module.BatchDecodeWithPagedKVCacheWrapper(
                *(self._workspace, "HND"),
                use_cuda_graph=True,
                use_tensor_cores=self.on_tensor_cores,
                paged_kv_indptr_buffer=pages.offsets,
                paged_kv_indices_buffer=pages.indices,
                paged_kv_last_page_len_buffer=pages.last,
            )
            made.plan(*pages[:3], head_dim=D, q_len_per_req=Nq, **sizes)

        def attend(q: Any, k: Any, v: Any) -> Any:
            caches = (k, v) if table is not None else (_in_pages(k, page), _in_pages(v, page))
            return _heads_first(made.run(_packed(q), caches), B)

        return attend

    def _latent(self, step: Step) -> Callable[..., Any] | None:
        """Plan latent attention."""
        mla = importlib.import_module("flashinfer.mla")
        B, Hq, Nq, D = step.rows[0].shape
        page, Dv = step.rows[2].shape[2:]
        pages, names = self._pages(step, page), ("qo_indptr", "kv_indptr", "kv_indices")
        known = (self._starts(B, Nq), pages.offsets, pages.indices, pages.lengths)
        buffers = dict(zip((*names, "kv_len_arr"), known, strict=True))
        made = mla.BatchMLAPagedAttentionWrapper(self._workspace, use_cuda_graph=True, **buffers)
        made.plan(
            metadata=mla.MLAPlanMetadata.csr(*known),
            num_heads=Hq,
            head_dim_ckv=Dv,
            head_dim_kpe=D - Dv,
            page_size=page,
            causal=Nq > 1,
            sm_scale=D**-0.5,
            **dict.fromkeys(("q_data_type", "kv_data_type"), self.torch.bfloat16),
        )
        return lambda q, k, _: _heads_first(made.run(query=_packed(q), kv_cache=k[:, 0]), B)

    def _pages(self, step: Step, page: int) -> Pages:
        """Return the pages of the block table, or of `_in_pages` for a contiguous cache."""
        torch, B = self.torch, len(step.rows[0])
        Hkv, N = step.rows[1].shape[1:3]
        table = step.options.get("block_table")
        lengths = step.options.get("kv_lengths", torch.full((B,), N)).cpu()
        counts = (lengths + page - 1) // page
        if table is None:
            starts = page * torch.arange(int(counts.max()))
            table = Hkv * N * torch.arange(B)[:, None] + starts
        used = torch.arange(table.shape[1]) < counts[:, None]
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        found = (offsets, table.cpu()[used], (lengths - 1) % page + 1, lengths)
        return Pages(*(x.int().to(self._workspace.device) for x in found))

    def _starts(self, B: int, Nq: int) -> Any:
        """Return the first query of each sequence, and the end."""
        make, device = self.torch.arange, self._workspace.device
        return Nq * make(B + 1, dtype=self.torch.int32, device=device)

    @cached_property
    def _workspace(self) -> Any:
        device = "cuda" if self.torch.cuda.is_available() else "cpu"
        return self.torch.zeros(WORKSPACE_BYTES, dtype=self.torch.uint8, device=device)


class FlashInferCudaCores(FlashInfer):
    """FlashInfer's decoding on CUDA cores, its default: one query, and small groups of heads."""

    on_tensor_cores = False

    def __init__(self) -> None:
        super().__init__("FlashInfer on CUDA cores")

    def planned(self, step: Step) -> Callable[..., Any] | None:
        q, k, _ = step.rows
        group = q.shape[1] // k.shape[1]
        has_kernel = step.lengths[0] == 1 and group <= LARGEST_GROUP and not is_latent(step)
        return super().planned(step) if has_kernel else None


class FlashMLA(Decoder):
    """FlashMLA's latent attention on Hopper, from pages."""

    def __init__(self) -> None:
        super().__init__("FlashMLA")
        self._module = importlib.import_module("flash_mla")

    def planned(self, step: Step) -> Callable[..., Any] | None:
        table, lengths = (step.options.get(name) for name in ("block_table", "kv_lengths"))
        if table is None or not is_latent(step) or step.lengths[1] != FLASHMLA_PAGE:
            return None
        schedule, _ = self._module.get_mla_metadata()
        is_causal, Dv = step.lengths[0] > 1, step.rows[2].shape[3]

        def attend(q: Any, k: Any, _: Any) -> Any:
            rows = (q.transpose(1, 2), k.transpose(1, 2))
            given = (*rows, table, lengths, Dv, schedule)
            return self._module.flash_mla_with_kvcache(*given, causal=is_causal)[0].transpose(1, 2)

        attend(*map(self.tensor, step.rows))  # the first call makes the schedule
        return attend


def is_latent(step: Step) -> bool:
    """Return True if the values are the first columns of the keys."""
    return bool(step.rows[2].shape[-1] != step.rows[1].shape[-1])


def _packed(q: Any) -> Any:
    """View (B, Hq, Nq, D) as (B * Nq, Hq, D); the memory is (B, Nq, Hq, D)."""
    return q.transpose(1, 2).flatten(0, 1)


def _heads_first(out: Any, B: int) -> Any:
    """View (B * Nq, Hq, D) as (B, Hq, Nq, D)."""
    return out.unflatten(0, (B, -1)).transpose(1, 2)


def _in_pages(cache: Any, page: int) -> Any:
    """View a contiguous cache (B, Hkv, N, D) as pages (rows, Hkv, page, D), one from each row.

    The pages overlap: page n of sequence b is the one from row b * Hkv * N + n * page.
    """
    _, Hkv, N, D = cache.shape
    return cache.as_strided((_rows(cache.shape, page), Hkv, page, D), (D, N * D, D, 1))


def _rows(shape: Sequence[int], page: int) -> int:
    """Count the rows at which a page of a contiguous cache may begin."""
    B, Hkv, N, _ = shape
    return (B - 1) * Hkv * N + N - page + 1
