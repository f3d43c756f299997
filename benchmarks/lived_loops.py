"""Loops in which no call repeats: lengths, seeds, offsets or captured numbers are new each step."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.configurations import normal
from benchmarks.libraries import Step

DROPOUT = 0.1


def scaled(number: float) -> Any:
    return lambda s, b, h, i, j: s * number


def windowed(number: int) -> Any:
    return lambda b, h, i, j: (i >= j) & (i - j < number)


class Sizes(NamedTuple):
    """The sizes of the loops on a device."""

    dtype: str
    D: int  # of training
    B: int
    H: int
    lengths: tuple[int, int]  # of training: the least and the most
    decoding: tuple[int, int, int, int]  # B, Hq, Hkv, D
    cache: tuple[int, int]  # keys: the least and the most
    packed: tuple[int, int, int, int]  # sequences, heads, the least and the most tokens of one

    @property
    def fixed(self) -> int:
        """Return the length of training where it is not what is new."""
        return sum(self.lengths) // 2


GPU = Sizes("bf16", 64, 8, 12, (300, 1500), (4, 32, 8, 128), (1000, 4000), (16, 16, 100, 900))
CPU = Sizes("f32", 64, 1, 8, (16, 400), (1, 8, 8, 64), (64, 1024), (6, 8, 8, 64))


class Loop(NamedTuple):
    """What is new in each step, and the step that a value makes."""

    name: str
    about: str  # its sizes
    most: int  # distinct values
    step: Callable[[int, bool], Step]  # of a value, and True if memory has tokens first


class Loops:
    """The loops on a device; their arrays are made once."""

    def __init__(self, xp: Any, sizes: Sizes) -> None:
        self.xp, self.sizes = xp, sizes

    def all(self) -> list[Loop]:
        s = self.sizes
        training = f"B = {s.B}, H = {s.H}, D = {s.D}"
        fixed = f"{training}, N = {s.fixed}"
        B, Hq, Hkv, D = s.decoding
        cache = f"B = {B}, {Hq} heads over {Hkv}, D = {D}, {s.cache[0]} to {s.cache[1]} keys"
        count, heads, least, most = s.packed
        packed = f"{count} sequences of {least} to {most}, H = {heads}, D = {s.D}"
        keys, lengths = s.cache[1] - s.cache[0], s.lengths[1] - s.lengths[0]
        many = 1 << 16
        return [
            Loop("decoding, growing cache", cache, keys, self.growing),
            Loop("decoding, new lengths in an array", cache, keys, self.length_array),
            Loop("decoding, new lengths in a list", cache, keys, self.length_list),
            Loop("training, new length", f"{training}, N = {s.lengths}", lengths, self.length),
            Loop("training, dropout, new seed", fixed, many, self.seed),
            Loop("training, packed, new offsets", packed, many, self.offsets),
            Loop("training, new scale", fixed, many, self.scale),
            Loop("training, new number in score_mod", fixed, many, self.temperature),
            Loop("training, new window in mask_mod", fixed, s.fixed - 16, self.window),
        ]

    # --- arrays -----------------------------------------------------------------------------------

    @lru_cache(maxsize=8)  # noqa: B019 - loops live as long as the program
    def _drawn(self, kinds: tuple[tuple[int, ...], ...], tokens_first: bool) -> tuple[Any, ...]:
        """Draw arrays of these shapes, (..., H, N, D)."""
        made = [normal(self.xp, shape, self.sizes.dtype, n) for n, shape in enumerate(kinds)]
        if not tokens_first:
            return tuple(made)
        return tuple(self.xp.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2) for x in made)

    def _cache(self, tokens_first: bool) -> tuple[Any, ...]:
        B, Hq, Hkv, D = self.sizes.decoding
        cache = B, Hkv, self.sizes.cache[1], D
        return self._drawn(((B, Hq, 1, D), cache, cache), tokens_first)

    def _batch(self, tokens_first: bool) -> tuple[Any, ...]:
        s = self.sizes
        return self._drawn(((s.B, s.H, s.lengths[1], s.D),) * 4, tokens_first)

    def _training(self, tokens_first: bool, **options: Any) -> Step:
        rows = tuple(x[:, :, : self.sizes.fixed] for x in self._batch(tokens_first))
        return Step(rows, {"causal": True} | options)

    # --- steps ------------------------------------------------------------------------------------

    def growing(self, value: int, tokens_first: bool) -> Step:
        """Attend to a contiguous cache, a view of a larger one."""
        q, k, v = self._cache(tokens_first)
        n = self.sizes.cache[0] + value
        return Step((q, k[:, :, :n], v[:, :, :n]), {})

    def _lengths(self, value: int) -> list[int]:
        least, B = self.sizes.cache[0], self.sizes.decoding[0]
        return [least + value - n * value // (n + 2) for n in range(B)]

    def length_array(self, value: int, tokens_first: bool) -> Step:
        lengths = self.xp.asarray(np.array(self._lengths(value), np.int32))
        return Step(self._cache(tokens_first), {"kv_lengths": lengths})

    def length_list(self, value: int, tokens_first: bool) -> Step:
        return Step(self._cache(tokens_first), {"kv_lengths": self._lengths(value)})

    def length(self, value: int, tokens_first: bool) -> Step:
        """Train on a batch that is padded to its longest sequence."""
        n = self.sizes.lengths[0] + value
        return Step(tuple(x[:, :, :n] for x in self._batch(tokens_first)), {"causal": True})

    def seed(self, value: int, tokens_first: bool) -> Step:
        return self._training(tokens_first, dropout_p=DROPOUT, seed=value)

    def offsets(self, value: int, _tokens_first: bool) -> Step:
        """Train on packed sequences, whose tokens come first in memory."""
        count, heads, least, most = self.sizes.packed
        shape = heads, count * most, self.sizes.D
        arrays = self._drawn((shape,) * 4, tokens_first=True)
        width = (most - least) / count
        rng = np.random.default_rng(value)  # one length of each part of the range, in any order
        drawn = least + rng.permutation((np.arange(count) + rng.random(count)) * width)
        cu = np.concatenate([[0], np.cumsum(drawn.astype(int))]).astype(np.int32)
        total, longest = int(cu[-1]), int(drawn.max())
        options = {"causal": True, "cu_seqlens_q": self.xp.asarray(cu)}
        return Step(tuple(x[:, :total] for x in arrays), options, longest=longest)

    def scale(self, value: int, tokens_first: bool) -> Step:
        return self._training(tokens_first, scale=self.sizes.D**-0.5 * (1 + 1e-5 * value))

    def temperature(self, value: int, tokens_first: bool) -> Step:
        """Train with a temperature that a function captures."""
        number = 0.5 + 1e-5 * value
        return self._training(tokens_first, score_mod=scaled(number))._replace(number=number)

    def window(self, value: int, tokens_first: bool) -> Step:
        """Train with a causal window that a function captures."""
        number = 16 + value
        step = self._training(tokens_first, mask_mod=windowed(number), causal=False)
        return step._replace(number=number)
