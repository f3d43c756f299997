"""Models of `bench end_to_end`, with the attention of any library: a GPT and a Llama."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.libraries import Step, Torch


class Sizes(NamedTuple):
    """The sizes of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int  # of the perceptron
    vocabulary: int
    tokens: int  # positions


class Attention(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]  # PyTorch is untyped here
    """Attention of a library, for queries (B, N, Hq, D), and keys and values of Hkv heads."""

    def __init__(self, library: Torch, sizes: Sizes, **options: Any) -> None:
        super().__init__()
        self.library = library
        D = sizes.width // sizes.heads
        rows = tuple(torch.empty(1, h, 1, D) for h in (sizes.heads, *[sizes.kv_heads] * 2))
        full, causal = (library.attend(Step(rows, x | options)) for x in ({}, {"causal": True}))
        if full is None or causal is None:
            raise NotImplementedError(f"there is no {', '.join(options)}")
        self.full, self.causal = full, causal

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        """Attend; one query attends to all keys, as many queries as keys are causal."""
        attend = self.full if q.shape[1] == 1 else self.causal
        if self.library.tokens_first:
            return attend(q, k, v)
        return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class Rest(Torch):
    """Return v instead of attention: a step of such a model takes the time of all other layers."""

    tokens_first = True

    def attend(self, _: Step) -> Callable[..., Any]:
        return lambda *rows: rows[2]


# --- training -------------------------------------------------------------------------------------


class GptBlock(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]  # as above
    def __init__(self, sizes: Sizes, attention: Attention, dropout: float) -> None:
        super().__init__()
        width, self.heads, self.attention = sizes.width, sizes.heads, attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.rows, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, sizes.hidden), nn.Linear(sizes.hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        rows = self.rows(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.drop(self.out(self.attention(*rows).flatten(2)))
        y = functional.gelu(self.up(self.norms[1](x)), approximate="tanh")
        return x + self.drop(self.down(y))


class Gpt(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]  # as above
    """A GPT-2, whose `forward` is the loss of predicting the next token."""

    def __init__(self, sizes: Sizes, attention: Attention, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.tokens, sizes.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.drop = nn.Dropout(dropout)
        blocks = (GptBlock(sizes, attention, dropout) for _ in range(sizes.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, tokens: Any, targets: Any) -> Any:
        """Return the mean loss over the targets that are not -100, which mark padding."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.drop(self.tokens(tokens) + self.positions(places)))
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# --- generation -----------------------------------------------------------------------------------


class LlamaBlock(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]  # as above
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.heads, self.kv_heads = sizes.width, sizes.heads, sizes.kv_heads
        linear = partial(nn.Linear, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        D = width // sizes.heads
        self.rows = linear(width, (self.heads + 2 * self.kv_heads) * D)
        self.out = linear(width, width)
        self.gate, self.up = (linear(width, sizes.hidden) for _ in range(2))
        self.down = linear(sizes.hidden, width)

    def forward(self, x: Any, rotation: tuple[Any, Any], cache: list[Any], attention: Any) -> Any:
        """Append keys and values to the cache, by a copy as in transformers' dynamic cache."""
        B, N, _ = x.shape
        rows = self.rows(self.norms[0](x)).view(B, N, self.heads + 2 * self.kv_heads, -1)
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), 2)
        new = rotated(k, *rotation), v
        cache[:] = [torch.cat(x, 1) for x in zip(cache, new, strict=True)] if cache else new
        x = x + self.out(attention(rotated(q, *rotation), *cache).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]  # as above
    """A Llama that generates; each library computes attention with the same weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        D = sizes.width // sizes.heads
        frequencies = 10_000.0 ** (-torch.arange(0, D, 2) / D)
        angles = torch.outer(torch.arange(sizes.tokens), frequencies).repeat(1, 2)[:, None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Any, caches: list[list[Any]], attention: Attention) -> Any:
        """Return the logits after the last token."""
        start = caches[0][0].shape[1] if caches[0] else 0
        places = slice(start, start + tokens.shape[1])
        rotation = self.cos[places], self.sin[places]
        x = self.tokens(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, rotation, cache, attention)
        return self.head(self.norm(x[:, -1:]))

    @torch.inference_mode()  # type: ignore[untyped-decorator,unused-ignore]  # as above
    def generate(self, tokens: Any, count: int, attention: Attention) -> Any:
        """Return the tokens with the largest logits, one after another."""
        caches: list[list[Any]] = [[] for _ in self.blocks]
        found = []
        for _ in range(count):
            tokens = self(tokens, caches, attention).argmax(-1)
            found.append(tokens)
        return torch.cat(found, 1)


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Rotate pairs of a head's halves by their positions."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
