"""`Lru`: a cache in memory that drops the entries that were not used for longest."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

_GENERATIONS = 3  # young, old and dropped


class Lru(dict[Any, Any]):
    """A dictionary that is bounded by entries and by bytes.

    `get` and ``[key]`` return None for a missing key, and cost what ``dict.get`` costs. New entries
    join the young generation. When it is full, it becomes the old one, and the old one is dropped.
    A hit in another generation moves the entry to the young one. So an entry stays if it is used at
    least once while a third of ``entries`` are added, and a loop over two thirds of ``entries``
    finds all of them. Each new entry frees one dropped entry: no call frees many.

    Single steps are safe among threads, without locks. Threads that fill the cache at the same time
    may lose entries, which are then made again.

    Parameters
    ----------
    entries : int
        The largest number of entries.
    nbytes : int, optional
        The largest sum of sizes; a value of more than a third is alone in its generation.
    size_of : callable, optional
        Returns the size of a value in bytes.
    """

    get = dict.__getitem__  # type: ignore[assignment] # without a default, which nothing needs

    def __init__(
        self,
        entries: int,
        nbytes: float = float("inf"),
        size_of: Callable[[Any], int] = lambda _: 0,
    ) -> None:
        super().__init__()
        self._share = max(entries // _GENERATIONS, 1), nbytes / _GENERATIONS
        self._room, self._bytes = self._share  # for further entries of the young generation
        self._size_of = size_of
        self._old: dict[Any, Any] = {}
        self._dropped: dict[Any, Any] = {}

    def keep(self, key: Any, value: Any) -> None:
        """Add an entry, unless its key is None."""
        if key is None:
            return
        self._add(key, value)
        if self._dropped:
            with suppress(KeyError):  # another thread may take the last one
                self._dropped.popitem()

    def clear(self) -> None:
        """Drop all entries."""
        super().clear()
        self._old, self._dropped = {}, {}
        self._room, self._bytes = self._share

    def _add(self, key: Any, value: Any) -> None:
        size = self._size_of(value)
        if self._room < 1 or size > self._bytes < self._share[1]:
            self._dropped, self._old = self._old, self.copy()
            super().clear()
            self._room, self._bytes = self._share
        self[key] = value
        self._room -= 1
        self._bytes -= size

    def __missing__(self, key: Any) -> Any:
        for generation in (self._old, self._dropped):
            value = generation.pop(key, None)
            if value is not None:
                self._add(key, value)
                return value
        return None

    def __len__(self) -> int:
        """Return the number of entries that are held, in all generations."""
        return super().__len__() + len(self._old) + len(self._dropped)
