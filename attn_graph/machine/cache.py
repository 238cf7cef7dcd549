"""A bounded cache that builds each entry once, even if threads want it at the same time."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, final
from weakref import WeakSet

from attrs import Factory, define, field, frozen

P = ParamSpec("P")
S = TypeVar("S", bound="Remembers")
T = TypeVar("T")
CAPACITY = 1024  # plans, and answers of each question about graphs: mostly some kilobytes each
UNANSWERED = object()
remember = lru_cache(CAPACITY)


def latest(method: str, most: int) -> Any:  # Any: a function like the method
    """The default of a field: a method of the value, which keeps its latest answers."""
    return Factory(lambda value: lru_cache(most)(getattr(value, method)), takes_self=True)


class Remembers:
    """A value that keeps the answers to questions about it, of modules above its own."""

    __slots__ = ()
    answers: dict[tuple[object, ...], Any]  # a field of each class; Any: by question

    def once(
        self: S, question: Callable[Concatenate[S, P], T], *more: P.args, **named: P.kwargs
    ) -> T:
        """The answer to a question, worked out at its first call."""
        key = question, more, *named.items()
        answer: T = self.answers.get(key, UNANSWERED)  # a key takes long to hash
        if answer is UNANSWERED:
            answer = self.answers[key] = question(self, *more, **named)
        return answer


@final
@frozen
class CacheInfo:
    """Counts of the plan cache since it was cleared.

    hits, misses: of `compile`, and of calls that look up their backward plan. builds: plans built;
    graphs that simplify to one graph share one. evictions: plans dropped for newer ones. seconds:
    spent building. size, capacity: plans in the cache now, and at most. bytes: the largest
    workspace among them.
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
        """The mean seconds to build a plan; 0 before the first."""
        return self.seconds / self.builds if self.builds else 0.0


@final
@define(eq=False)
class Turn:
    """A lock for building one entry. waiting: the number of threads at it, the builder too."""

    # The thread that builds may come back: a backend that compiles its own graph while it lowers
    # it gets RecursionError then, and does not wait for itself.
    lock: threading.RLock = field(factory=threading.RLock, init=False)
    waiting: int = field(default=0, init=False)


@final
@define(eq=False)
class Cache(Generic[T]):
    """Entries by key; the least recently used go first.

    kind: a function of the key that ignores sizes; None: no limit by kind. The entries of one kind
    take half of the capacity at most, and then drop the first of their own. So a growing cache of
    keys, with ever new sizes, drops nothing else.
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
        """The entry of a key, now the most recent; None if there is none."""
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


CACHES: WeakSet[Cache[Any]] = WeakSet()  # Any: their entries


def unlock_all() -> None:
    """Replace the locks of all caches, in a newly forked process."""
    for each in CACHES:  # a forked process lacks the threads that hold them
        each.lock, each.turns = threading.RLock(), {}


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=unlock_all)
