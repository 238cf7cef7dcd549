"""A bounded cache that builds each entry once, even where threads want it at the same time."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, final
from weakref import WeakSet

from attrs import define, field, frozen

T = TypeVar("T")


@final
@frozen
class CacheInfo:
    """What the plan cache has done since it was cleared.

    hits, misses: of `compile`, and of calls that look up their backward plan. builds: plans built;
    graphs that simplify to one graph share one. evictions: plans dropped for newer ones. seconds:
    spent building. size, capacity: plans in the cache now, and at most. bytes: workspace that
    the largest of them needs.
    """

    hits: int
    misses: int
    builds: int
    evictions: int
    seconds: float
    size: int
    capacity: int
    bytes: int

    @property
    def seconds_each(self) -> float:
        """The mean seconds that a plan took to build; 0 where none was built."""
        return self.seconds / self.builds if self.builds else 0.0


@final
@define(eq=False)
class Turn:
    """A lock for building one entry. waiting: how many threads build it or wait for it."""

    # The thread that builds may come back: a backend that compiles its own graph while it lowers
    # it gets RecursionError then, and does not wait for itself.
    lock: threading.RLock = field(factory=threading.RLock, init=False)
    waiting: int = field(default=0, init=False)


@final
@define(eq=False)
class Cache(Generic[T]):
    """Entries by key; the least recently used go first.

    kind: what keys have in common that differ in sizes alone; None where that does not matter. The
    entries of one kind take half of the capacity at most, and then drop the first of their own. So
    what comes in ever more sizes, as a growing cache of keys does, drops nothing else.
    """

    capacity: int
    kind: Callable[[Any], Hashable] | None = field(default=None, kw_only=True)  # Any: a key
    entries: OrderedDict[Hashable, T] = field(factory=OrderedDict, init=False)
    kinds: dict[Hashable, OrderedDict[Hashable, None]] = field(factory=dict, init=False)
    turns: dict[Hashable, Turn] = field(factory=dict, init=False)
    lock: threading.RLock = field(factory=threading.RLock, init=False)
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)
    builds: int = field(default=0, init=False)
    evictions: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        CACHES.add(self)

    def get(self, key: Hashable) -> T | None:
        """The entry of a key, which becomes the most recent; None if there is none."""
        with self.lock:
            entry = self.entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self.entries.move_to_end(key)
            self.hits += 1
            return entry

    def put(self, key: Hashable, entry: T) -> None:
        """Store an entry, and drop the least recently used ones beyond the capacity, and the first
        of its kind beyond half of it."""
        kind = self.kind and self.kind(key)
        with self.lock:
            self.entries[key] = entry
            self.entries.move_to_end(key)
            if self.kind is not None:
                alike = self.kinds.setdefault(kind, OrderedDict())
                alike[key] = None
                if len(alike) > self.capacity // 2:
                    self.drop(next(iter(alike)), kind)
            while len(self.entries) > self.capacity:
                first = next(iter(self.entries))
                self.drop(first, self.kind and self.kind(first))

    def drop(self, key: Hashable, kind: Hashable) -> None:
        """Drop an entry of a kind."""
        del self.entries[key]
        self.evictions += 1
        if self.kind is not None:
            del self.kinds[kind][key]
            if not self.kinds[kind]:
                del self.kinds[kind]

    def get_or_build(self, key: Hashable, build: Callable[[], T]) -> T:
        """The entry of a key; if there is none, one thread builds it and others wait for it."""
        with self.turn(key):
            entry = self.get(key)
            if entry is None:
                start = time.perf_counter()
                entry = build()
                with self.lock:
                    self.builds += 1
                    self.seconds += time.perf_counter() - start
                self.put(key, entry)
        return entry

    @contextmanager
    def turn(self, key: Hashable) -> Iterator[None]:
        """A context that one thread at a time is in, for each key."""
        with self.lock:
            turn = self.turns.setdefault(key, Turn())
            turn.waiting += 1
        try:
            with turn.lock:
                yield
        finally:
            with self.lock:
                turn.waiting -= 1
                if not turn.waiting and self.turns.get(key) is turn:
                    del self.turns[key]

    def clear(self) -> None:
        """Drop all entries and set all counts to 0."""
        with self.lock:
            self.entries.clear()
            self.kinds.clear()
            self.hits = self.misses = self.builds = self.evictions = 0
            self.seconds = 0.0

    def unlock(self) -> None:
        """Replace all locks: in a forked process the threads that hold them do not exist."""
        self.lock = threading.RLock()
        self.turns = {}


CACHES: WeakSet[Cache[Any]] = WeakSet()  # Any: what each holds


def unlock_all() -> None:
    """Replace the locks of all caches, in a process that was just forked."""
    for each in CACHES:
        each.unlock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=unlock_all)
