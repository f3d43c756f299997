"""Serve a Llama of Hugging Face's transformers, many requests at a time, with caches in pages.

- Continuous batching: a step takes a few tokens of every running request, packed: a part of a
  prompt, or the last token and drafts. A request joins as soon as another has ended.
- Prefix sharing: requests whose texts begin alike share the pages of their common whole blocks.
  A request that has ended leaves its pages for others to share.
- Speculative decoding: what followed the last token earlier in the text are drafts. The model
  checks them in the same step, and keeps those that it would have written.
- Caches of 8 bits: pages of int8 or float8_e4m3fn, with a factor for each token and head.

    python examples/engine.py                         a small random model on the CPU
    python examples/engine.py --requests 40 --slots 8
    python examples/engine.py --cache int8            pages of 8 bits; or float8_e4m3fn

The program prints the speed, and whether each request got the tokens that transformers'
``generate`` gives it alone, with keys and values rounded to the same dtype. Rounding to 8 bits
enlarges rounding errors: where two tokens are almost as probable, either is right.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tileattn.torch import append_kv, attention, rope

PAGE = 16  # tokens whose keys and values one page has
CHUNK = 32  # tokens of a prompt in a step, at most
DRAFTS = 3  # tokens in a step of a request besides the last one, at most
# Differences of logits that count as ties: the last bit of a float32 key may change which number of
# 8 bits is the nearest, a step of 1 % of its row. Other caches have no tolerance.
TIES = {torch.int8: 0.1, torch.float8_e4m3fn: 0.1}

Cache = tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]


def empty_cache(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Cache:
    """Return keys, values and their descales; only caches of 8 bits have descales."""
    k, v = (torch.zeros(sizes, dtype=dtype, device=device) for _ in range(2))
    names = ("k_descale", "v_descale") if dtype.itemsize == 1 else ()
    return (k, v), {name: torch.zeros(sizes[:-1], device=device) for name in names}


class Request:
    """A prompt, and what was written after it so far."""

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self.tokens, self.end = list(prompt), len(prompt) + count
        self.pages: list[int] = []
        self.length = 0  # tokens whose keys are in the pages

    def next_tokens(self) -> list[int]:
        """Return what the next step reads: a part of the prompt, or the last token and drafts."""
        new = self.tokens[self.length :]
        if len(new) > 1:
            return new[:CHUNK]
        earlier = self.tokens[:-1]
        if new[0] not in earlier:
            return new
        after = len(earlier) - earlier[::-1].index(new[0])
        room = self.end - len(self.tokens) - 1  # the model itself writes one more
        return new + self.tokens[after : after + min(DRAFTS, room)]


class Pages:
    """The pages of a cache: who reads each, and which text its keys belong to."""

    def __init__(self, count: int) -> None:
        self.readers = [0] * count
        self.texts: dict[tuple[int, ...], int] = {}  # from whole blocks of a text to their page
        self.text_of: dict[int, tuple[int, ...]] = {}

    def available(self) -> int:
        """Count the pages that no request reads."""
        return self.readers.count(0)

    def take(self) -> int:
        """Return a page that no request reads; one with a known text only if there is no other."""
        known = self.text_of
        page = min((x for x, n in enumerate(self.readers) if not n), key=lambda x: x in known)
        self.texts.pop(self.text_of.pop(page, ()), None)
        self.readers[page] = 1
        return page

    def share(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages that hold the first blocks of a text, all but its last token."""
        found = list[int]()
        for end in range(PAGE, len(tokens), PAGE):
            page = self.texts.get(tuple(tokens[:end]))
            if page is None:
                break
            self.readers[page] += 1
            found.append(page)
        return found

    def keep(self, request: Request) -> None:
        """Remember the text of each page that a request has filled."""
        for n, page in enumerate(request.pages[: request.length // PAGE]):
            text = tuple(request.tokens[: (n + 1) * PAGE])
            if page not in self.text_of and text not in self.texts:
                self.texts[text], self.text_of[page] = page, text

    def leave(self, request: Request) -> None:
        """Give back the pages of a request; others may find their text later."""
        for page in request.pages:
            self.readers[page] -= 1


class Engine:
    """Runs a model over up to ``slots`` requests at a time.

    ``cache_dtype`` is the dtype of the pages: torch.int8, torch.float8_e4m3fn, or the model's.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        pages: int,
        slots: int,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        config, self.model, self.slots = model.config, model, slots
        sizes, dtype = (pages, config.num_key_value_heads, PAGE, config.head_dim), model.dtype
        self.caches = [
            empty_cache(sizes, cache_dtype or dtype, model.device) for _ in model.model.layers
        ]
        angle = torch.arange(config.max_position_embeddings, device=model.device)[:, None]
        angle = angle * model.model.rotary_emb.inv_freq.float()
        self.tables = angle.cos(), angle.sin()
        self.pages, self.running = Pages(pages), list[Request]()
        self.steps = self.shared = self.drafted = 0

    def serve(self, requests: Sequence[Request]) -> None:
        """Answer all requests, those that come first first."""
        waiting = deque(requests)
        while waiting or self.running:
            while waiting and len(self.running) < self.slots and self._join(waiting[0]):
                self.running.append(waiting.popleft())
            if not self.running:
                end = waiting[0].end
                raise ValueError(f"pages must be {-(-end // PAGE)} for a request of {end} tokens")
            self._step()
            for request in self.running:
                if len(request.tokens) >= request.end:
                    self.pages.leave(request)
            self.running = [x for x in self.running if len(x.tokens) < x.end]

    def _join(self, request: Request) -> bool:
        """Give a request its pages if there are enough."""
        shared = self.pages.share(request.tokens)
        needed = -(-request.end // PAGE) - len(shared)
        request.pages = shared
        if needed > self.pages.available():
            self.pages.leave(request)
            return False
        request.pages = shared + [self.pages.take() for _ in range(needed)]
        request.length = len(shared) * PAGE
        self.shared += request.length
        return True

    def _step(self) -> None:
        """Read a few tokens of each running request, and write those that follow."""
        new = [x.next_tokens() for x in self.running]
        with torch.no_grad():
            written = self._run(new)
        for request, tokens, after in zip(self.running, new, written, strict=True):
            known = len(request.tokens) - request.length  # the rest are drafts
            request.length += min(known, len(tokens))
            if known > len(tokens):  # of a prompt that is not read to its end
                continue
            right = known - 1
            request.tokens.append(after[right])
            while right + 1 < len(tokens) and tokens[right + 1] == after[right]:
                right += 1
                request.tokens.append(after[right])
                request.length += 1
                self.drafted += 1
            self.pages.keep(request)
        self.steps += 1

    def _run(self, new: list[list[int]]) -> list[list[int]]:
        """Run the model over packed tokens; return the most probable token after each."""
        core, device = self.model.model, self.model.device
        counts = [len(x) for x in new]
        starts = torch.tensor([0, *counts]).cumsum(0)
        old = torch.tensor([x.length for x in self.running])
        positions = torch.cat(
            [n + torch.arange(count) for n, count in zip(old, counts, strict=True)]
        )
        longest = max(len(x.pages) for x in self.running)
        table = torch.tensor([x.pages + [0] * (longest - len(x.pages)) for x in self.running])
        x = core.embed_tokens(torch.tensor([*chain(*new)], device=device))
        for layer, (cache, descales) in zip(core.layers, self.caches, strict=True):
            own, heads = layer.self_attn, (len(x), -1, self.model.config.head_dim)
            h = layer.input_layernorm(x)
            q, k, v = (
                f(h).view(heads).transpose(0, 1) for f in (own.q_proj, own.k_proj, own.v_proj)
            )
            q = rope(q, *self.tables, positions=positions)
            pages = {"block_table": table, **descales}
            lengths = append_kv(
                *cache, k, v, kv_lengths=old, cu_seqlens=starts, rotary=self.tables, **pages
            )
            options = {"kv_lengths": lengths, "cu_seqlens_q": starts, "causal": True, **pages}
            out = attention(q, *cache, **options).transpose(0, 1).reshape(len(x), -1)
            x = x + own.o_proj(out)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        best = self.model.lm_head(core.norm(x)).argmax(-1).cpu()
        return [list(map(int, part)) for part in best.split(counts)]


class RoundedCache(DynamicCache):  # type: ignore[misc]  # untyped
    """A cache of transformers with keys and values that are rounded to a dtype, and back."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, k: torch.Tensor, v: torch.Tensor, *where: Any, **options: Any) -> Any:
        """Append rounded keys and values."""
        stored, descales = empty_cache(k.shape, self.dtype, k.device)
        append_kv(*stored, k, v, kv_lengths=0, **descales)
        factors = [x[..., None] for x in descales.values()] or [1, 1]
        k, v = (x.to(k.dtype) * factor for x, factor in zip(stored, factors, strict=True))
        return super().update(k, v, *where, **options)


def alone(
    model: LlamaForCausalLM,
    prompt: Sequence[int],
    count: int,
    cache_dtype: torch.dtype | None = None,
) -> tuple[list[int], torch.Tensor]:
    """Generate with transformers, one request at a time; return tokens, and logits of new ones."""
    given = torch.tensor([prompt], device=model.device)
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    cache = RoundedCache(cache_dtype or model.dtype)
    found = model.generate(given, past_key_values=cache, **options)
    return found.sequences[0].tolist(), torch.cat(found.logits)


def agree(tokens: list[int], expected: list[int], logits: torch.Tensor, tie: float) -> bool:
    """Return True if two texts are equal until two tokens are almost as probable."""
    new = slice(len(expected) - len(logits), None)
    for token, best, row in zip(tokens[new], expected[new], logits, strict=True):
        if token != best:
            return bool(row[best] - row[token] < tie)
    return tokens == expected


def compare(
    model: LlamaForCausalLM,
    asked: Sequence[tuple[list[int], int]],
    slots: int,
    cache_dtype: torch.dtype | None = None,
) -> bool:
    """Serve, and print the speed; tell if each request got the tokens that it gets alone."""
    longest = max(-(-(len(prompt) + count) // PAGE) for prompt, count in asked)
    engine = Engine(model, longest * (slots + 2), slots, cache_dtype)
    requests = [Request(*each) for each in asked]
    start = time.perf_counter()
    engine.serve(requests)
    seconds, total = time.perf_counter() - start, sum(count for _, count in asked)
    start = time.perf_counter()
    expected = [alone(model, *each, cache_dtype) for each in asked]
    without = time.perf_counter() - start
    print(f"served     {total / seconds:8,.0f} tokens/s, {len(asked)} requests in {slots} slots")
    print(f"alone      {total / without:8,.0f} tokens/s, generate of transformers")
    print(f"prefixes   {engine.shared:8,} tokens of prompts were in the cache")
    print(f"drafts     {engine.drafted:8,} tokens were drafts, in {engine.steps:,} steps")
    tie, texts = TIES.get(cache_dtype or model.dtype, 0), [x.tokens for x in requests]
    equal = sum(x == tokens for x, (tokens, _) in zip(texts, expected, strict=True))
    same = all(agree(x, *each, tie) for x, each in zip(texts, expected, strict=True))
    print(f"equal      {equal:8,} requests got the tokens of generate")
    print("The tokens are the same, up to ties." if same else "THE TOKENS DIFFER.")
    return same


def requests_of(number: int, vocabulary: int) -> list[tuple[list[int], int]]:
    """Draw prompts that begin in one of two ways, and how many tokens each asks for."""
    random = torch.Generator().manual_seed(0)

    def draw(high: int, count: int) -> list[int]:
        return [int(n) + 1 for n in torch.randint(high - 1, (count,), generator=random)]

    prefixes = draw(vocabulary, 40), draw(vocabulary, 50)
    return [
        (prefixes[n % 2] + draw(vocabulary, draw(30, 1)[0]), 10 + draw(40, 1)[0])
        for n in range(number)
    ]


def model_of(seed: int = 0) -> LlamaForCausalLM:
    """Make a small model with random weights; its attention matters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 256, "initializer_range": 0.3, "eos_token_id": None},
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    """Serve a random model, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", default=16, metavar="N", type=int)
    parser.add_argument("--slots", default=4, metavar="N", type=int, help="requests at a time")
    dtypes = "float32", "int8", "float8_e4m3fn"
    parser.add_argument("--cache", default="float32", choices=dtypes, help="dtype of the pages")
    args = parser.parse_args()
    if min(args.requests, args.slots) < 1:
        parser.error("--requests and --slots must be at least 1")
    model = model_of()
    asked = requests_of(args.requests, model.config.vocab_size)
    sys.exit(0 if compare(model, asked, args.slots, getattr(torch, args.cache)) else 1)


if __name__ == "__main__":
    main()
