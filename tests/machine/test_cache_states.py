"""The cache against a simple model, whatever is asked in whatever order, by threads and forks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from attn_graph.machine.cache import Cache
from tests.support.forking import forks, in_child

keys = st.integers(0, 4)


class BuildError(Exception):
    """A build that fails."""


class CacheMachine(RuleBasedStateMachine):
    """Every count, and every entry from the least to the most recently used."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: OrderedDict[int, str] = OrderedDict()
        self.hits = self.misses = self.builds = self.evictions = self.made = 0

    @initialize(capacity=st.integers(0, 3))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.cache: Cache[str] = Cache(capacity)

    def text(self) -> str:
        """An entry like no other."""
        self.made += 1
        return f"entry {self.made}"

    def due(self, key: int) -> str | None:
        """What a look at the model finds."""
        entry = self.entries.get(key)
        if entry is None:
            self.misses += 1
        else:
            self.hits += 1
            self.entries.move_to_end(key)
        return entry

    def keep(self, key: int, entry: str) -> None:
        self.entries.pop(key, None)
        self.entries[key] = entry
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)
            self.evictions += 1

    @rule(key=keys)
    def get(self, key: int) -> None:
        assert self.cache.get(key) == self.due(key)

    @rule(key=keys)
    def put(self, key: int) -> None:
        entry = self.text()
        self.cache.put(key, entry)
        self.keep(key, entry)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.entries.clear()
        self.hits = self.misses = self.builds = self.evictions = 0

    @rule(key=keys, callers=st.integers(1, 4), failures=st.integers(0, 2))
    def build(self, key: int, callers: int, failures: int) -> None:
        """Callers at once give what they would give one after another; some builds fail."""
        left = [failures]
        alone = threading.Lock()
        made: list[str] = []

        def build() -> str:
            assert alone.acquire(blocking=False), "two threads build one entry"
            try:
                if left[0]:
                    left[0] -= 1
                    raise BuildError
                made.append(self.text())
                return made[-1]
            finally:
                alone.release()

        results = at_once(callers, lambda: self.cache.get_or_build(key, build))
        dues: list[str | None] = []
        fresh = iter(made)
        for _ in range(callers):
            entry = self.due(key)
            if entry is None and failures:
                failures -= 1
            elif entry is None:
                entry = next(fresh)
                self.builds += 1
                self.keep(key, entry)
            dues.append(entry)
        assert sorted(map(str, results)) == sorted(map(str, dues))
        assert next(fresh, None) is None

    @invariant()
    def agrees(self) -> None:
        cache = self.cache
        assert [*cache.entries.items()] == [*self.entries.items()]
        assert (cache.hits, cache.misses) == (self.hits, self.misses)
        assert (cache.builds, cache.evictions) == (self.builds, self.evictions)
        assert not cache.turns


def at_once(callers: int, call: Callable[[], str]) -> list[str | None]:
    """What each of so many threads gets, None for a build that fails."""
    start = threading.Barrier(callers)

    def wait_and_call(_: int) -> str | None:
        start.wait()
        try:
            return call()
        except BuildError:
            return None

    with ThreadPoolExecutor(callers) as pool:
        return [*pool.map(wait_and_call, range(callers))]


TestCacheStates = CacheMachine.TestCase


class Key:
    """A key that says when a thread is about to ask for it."""

    def __init__(self) -> None:
        self.asks: dict[str, threading.Event] = {n: threading.Event() for n in ("a", "b", "c")}

    def __hash__(self) -> int:
        self.asks[threading.current_thread().name].set()
        return 1


def test_after_a_failed_build_one_thread_builds_at_a_time() -> None:
    """The first fails, the second builds, a third comes: it waits for the second."""
    cache: Cache[str] = Cache(3)
    key = Key()
    builds: dict[str, threading.Event] = {n: threading.Event() for n in ("a", "b", "c")}
    ends: dict[str, threading.Event] = {n: threading.Event() for n in ("a", "b")}
    results: dict[str, str] = {}

    def call() -> None:
        name = threading.current_thread().name

        def build() -> str:
            builds[name].set()
            if name in ends:
                ends[name].wait()
            if name == "a":
                raise BuildError
            return name

        try:
            results[name] = cache.get_or_build(key, build)
        except BuildError:
            results[name] = "failed"

    threads = {name: threading.Thread(target=call, name=name) for name in builds}
    threads["a"].start()
    builds["a"].wait()
    threads["b"].start()
    key.asks["b"].wait()
    ends["a"].set()
    builds["b"].wait()
    threads["c"].start()
    key.asks["c"].wait()
    ends["b"].set()
    for thread in threads.values():
        thread.join()
    assert results == {"a": "failed", "b": "b", "c": "b"}
    assert not builds["c"].is_set()
    assert not cache.turns


def test_a_build_that_asks_for_itself_does_not_wait_for_itself() -> None:
    cache: Cache[str] = Cache(3)

    def build() -> str:
        return cache.get_or_build("key", build)

    with pytest.raises(RecursionError):
        cache.get_or_build("key", build)
    assert not cache.turns


@forks
def test_a_fork_while_another_thread_builds_does_not_hang() -> None:
    cache: Cache[str] = Cache(3)
    started, end = threading.Event(), threading.Event()

    def build() -> str:
        started.set()
        end.wait()
        return "parent"

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(cache.get_or_build, "key", build)
        started.wait()
        try:
            assert in_child(lambda: cache.get_or_build("key", lambda: "child") == "child")
        finally:
            end.set()
        assert result.result() == "parent"
    assert cache.get("key") == "parent"


@forks
def test_a_fork_while_another_thread_holds_the_lock_does_not_hang() -> None:
    cache: Cache[str] = Cache(3)
    cache.put("key", "entry")
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with cache.lock:
            held.set()
            end.wait()

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(hold)
        held.wait()
        try:
            assert in_child(lambda: cache.get("key") == "entry")
        finally:
            end.set()
        result.result()
