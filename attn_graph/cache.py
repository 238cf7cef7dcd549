"""A bounded cache that builds each thing once, even when threads ask for it together."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, final

from attrs import define, field, frozen

T = TypeVar("T")


@final
@frozen
class CacheInfo:
    """What the plan cache has done since it was cleared.

    hits, misses: of `compile`, and of calls that ask for their backward plan. builds: plans built;
    graphs that simplify to one graph share one. evictions: plans given up for newer ones. seconds:
    spent building. size, capacity: plans held now, and at most. bytes: workspace that the largest
    of them needs.
    """

    hits: int
    misses: int
    builds: int
    evictions: int
    seconds: float
    size: int
    capacity: int
    bytes: int


@final
@define(eq=False)
class Cache(Generic[T]):
    """Entries by key; the least recently used go first."""

    capacity: int
    entries: OrderedDict[Hashable, T] = field(factory=OrderedDict, init=False)
    turns: dict[Hashable, threading.Lock] = field(factory=dict, init=False)
    lock: threading.RLock = field(factory=threading.RLock, init=False)
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)
    builds: int = field(default=0, init=False)
    evictions: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)

    def get(self, key: Hashable) -> T | None:
        """The entry, now the most recent; None if there is none."""
        with self.lock:
            entry = self.entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self.entries.move_to_end(key)
            self.hits += 1
            return entry

    def put(self, key: Hashable, entry: T) -> None:
        with self.lock:
            self.entries[key] = entry
            while len(self.entries) > self.capacity:
                self.entries.popitem(last=False)
                self.evictions += 1

    def built(self, key: Hashable, build: Callable[[], T]) -> T:
        """The entry; if there is none, one thread builds it and the others wait for that."""
        with self.lock:
            turn = self.turns.setdefault(key, threading.Lock())
        try:
            with turn:
                entry = self.get(key)
                if entry is None:
                    start = time.perf_counter()
                    entry = build()
                    with self.lock:
                        self.builds += 1
                        self.seconds += time.perf_counter() - start
                    self.put(key, entry)
        finally:
            with self.lock:
                self.turns.pop(key, None)
        return entry

    def clear(self) -> None:
        with self.lock:
            self.entries.clear()
            self.hits = self.misses = self.builds = self.evictions = 0
            self.seconds = 0.0
