"""The cache in memory: what stays, what is dropped, and what a look-up costs."""

import gc
import threading
import tracemalloc
from typing import Any
from weakref import ref

import pytest

from tileattn.lru import Lru


class Value:
    """An object that weak references may name."""


def test_a_missing_key_is_none() -> None:
    cache = Lru(9)
    assert cache.get(1) is None
    assert cache[1] is None
    cache.keep(None, 3)
    assert cache.get(None) is None
    assert len(cache) == 0


def test_an_entry_that_is_used_stays_while_others_are_dropped() -> None:
    cache, warm = Lru(30), Value()
    cache.keep("warm", warm)
    for n in range(10_000):
        if n % 10 == 0:
            assert cache.get("warm") is warm
        cache.keep(n, n)
        assert cache.get(n) == n
        assert len(cache) <= 30
    assert cache.get(5) is None


@pytest.mark.parametrize("entries", [1, 2, 3, 30, 100])
def test_a_loop_over_two_thirds_of_the_entries_finds_all(entries: int) -> None:
    cache, keys = Lru(entries), range(2 * entries // 3)
    for key in keys:
        cache.keep(key, key)
    for _ in range(7):
        assert [cache.get(key) for key in keys] == [*keys]


def test_what_is_not_used_is_freed_one_by_one() -> None:
    cache, made = Lru(30), []
    for n in range(200):
        value = Value()
        made.append(ref(value))
        before = sum(x() is None for x in made)
        cache.keep(n, value)
        del value
        assert sum(x() is None for x in made) <= before + 1
    assert all(x() is None for x in made[:-30])
    assert all(x() is not None for x in made[-10:])
    cache.clear()
    assert len(cache) == 0
    assert all(x() is None for x in made)


def test_bytes_are_bounded() -> None:
    cache = Lru(1000, nbytes=300, size_of=len)
    for n in range(100):
        cache.keep(n, b"x" * (10 + n % 50))
        assert cache.get(n) is not None
        assert sum(len(cache[k] or b"") for k in range(n + 1)) <= 300
    cache.keep("large", b"x" * 1000)
    assert len(cache.get("large")) == 1000
    for n in range(100, 200):
        cache.keep(n, b"x" * 60)
    assert cache.get("large") is None


def test_an_entry_may_be_replaced() -> None:
    cache = Lru(6)
    for n in range(50):
        cache.keep("a", n)
        cache.keep(n, n)
        assert cache.get("a") == n


def test_the_memory_of_a_full_cache_is_flat() -> None:
    cache = Lru(100)

    def fill(first: int) -> int:
        for n in range(first, first + 20_000):
            cache.keep((n, "key"), [n])
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = fill(0)
        assert fill(20_000) - before < 20_000
    finally:
        tracemalloc.stop()


def test_threads_share_a_cache() -> None:
    cache, wrong = Lru(9), list[Any]()

    def run(start: int) -> None:
        try:
            for n in range(20_000):
                key = (start + n) % 40
                if cache.get(key) not in (None, key):
                    wrong.append(key)
                cache.keep(key, key)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in (0, 13, 29)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
