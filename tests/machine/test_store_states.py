"""A store against a simple model: a folder in which others write, damage and delete."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from attrs import frozen
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from attn_graph.machine.store import MAGIC, Store, seal

MOST = 700  # bytes: some files
NAMES = tuple("abcde")
WRITERS = 2
keys = st.sampled_from(NAMES)
writers = st.integers(0, WRITERS - 1)
data = st.binary(max_size=300)


@frozen
class Held:
    """What lies under a key's name. data: None where it is not what was put under that key."""

    data: bytes | None
    size: int
    time: int
    folder: bool = False


class StoreMachine(RuleBasedStateMachine):
    """Two writers, one folder. The model has what each name holds, and when it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(TemporaryDirectory())) / "plans"
        self.stores = [Store(self.folder, MOST) for _ in range(WRITERS)]
        self.held: dict[str, Held] = {}
        self.times = count(1)
        log = logging.getLogger("attn_graph")
        self.stack.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)  # the reasons are other tests' business

    def path(self, key: str) -> Path:
        return self.stores[0].path(key)

    def use(self, key: str) -> int:
        """The next point in time, at which the file was used."""
        time = next(self.times)
        os.utime(self.path(key), ns=(time, time), follow_symlinks=False)
        return time

    def keep(self, key: str, content: bytes) -> None:
        """What a put does to the model."""
        self.held[key] = Held(content, len(seal(key, content)), next(self.times))
        self.trim_model()

    def trim_model(self) -> None:
        """The latest stay, as many as are small enough together."""
        total = 0
        for name, each in sorted(self.held.items(), key=lambda item: -item[1].time):
            if not each.folder:
                total += each.size
                if total > MOST:
                    del self.held[name]

    def settle(self, key: str) -> None:
        """The real file gets the time that the model's has."""
        if key in self.held:
            time = self.held[key].time
            os.utime(self.path(key), ns=(time, time))

    @rule(writer=writers, key=keys, content=data)
    def put(self, writer: int, key: str, content: bytes) -> None:
        self.stores[writer].put(key, content)
        if not (key in self.held and self.held[key].folder):
            self.keep(key, content)
            self.settle(key)

    @rule(key=keys, content=data, other=keys, others=data)
    def put_while_another_puts(self, key: str, content: bytes, other: str, others: bytes) -> None:
        """The second writer's file appears when the first is about to put its own in place."""
        replace = os.replace

        def late(source: str, target: Path) -> None:
            with patch.object(os, "replace", replace):
                self.put(1, other, others)
            replace(source, target)

        with patch.object(os, "replace", late):
            self.put(0, key, content)

    @rule(writer=writers, key=keys)
    def get(self, writer: int, key: str) -> None:
        held = self.held.get(key)
        content = self.stores[writer].get(key)
        assert content == (None if held is None else held.data)
        if held is not None and content is not None:
            self.held[key] = Held(content, held.size, self.use(key))

    def spoil(self, key: str, size: int | None = None, folder: bool = False) -> None:
        size = self.path(key).lstat().st_size if size is None else size
        self.held[key] = Held(None, size, self.use(key), folder)

    def vacate(self, key: str) -> Path:
        """The path, at which nothing is any more."""
        path = self.path(key)
        path.parent.mkdir(exist_ok=True)
        if key in self.held and self.held.pop(key).folder:
            path.rmdir()
        path.unlink(missing_ok=True)
        return path

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.vacate(key)

    @rule(key=keys, content=data | st.sampled_from([MAGIC, MAGIC + b"x" * 99, b"\x80\x04pickle"]))
    def be_foreign(self, key: str, content: bytes) -> None:
        self.vacate(key).write_bytes(content)
        self.spoil(key)

    @rule(key=keys, other=keys, content=data)
    def be_of_another_key(self, key: str, other: str, content: bytes) -> None:
        if key != other:
            self.vacate(key).write_bytes(seal(other, content))
            self.spoil(key)

    @rule(key=keys)
    def be_a_fifo(self, key: str) -> None:
        path = self.vacate(key)
        if hasattr(os, "mkfifo"):
            os.mkfifo(path)
            self.spoil(key)

    @rule(key=keys)
    def be_a_folder(self, key: str) -> None:
        self.vacate(key).mkdir()
        self.spoil(key, folder=True)

    @rule(key=keys)
    def be_a_link_to_itself(self, key: str) -> None:
        path = self.vacate(key)
        path.symlink_to(path)
        self.spoil(key)

    @rule(name=st.sampled_from(["notes.txt", "half.part"]))
    def be_a_strangers(self, name: str) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / name).write_text("x" * 999)

    @rule(writer=writers)
    def trim(self, writer: int) -> None:
        self.stores[writer].trim()
        self.trim_model()

    @rule(writer=writers)
    def clear(self, writer: int) -> None:
        files = [key for key, held in self.held.items() if not held.folder]
        assert self.stores[writer].clear() == len(files)
        for key in files:
            del self.held[key]
        assert not [*self.folder.glob("*.part")]

    @invariant()
    def agrees(self) -> None:
        store = self.stores[0]
        entries = {entry.path: entry for entry in store.entries()}
        assert entries.keys() == {self.path(key) for key in self.held}
        for key, held in self.held.items():
            entry = entries[self.path(key)]
            assert entry.key == (None if held.data is None else key)
            assert (entry.unfit is None) == (held.data is not None)
        assert store.bytes == sum(held.size for held in self.held.values() if not held.folder)

    def teardown(self) -> None:
        self.stack.close()


TestStoreStates = StoreMachine.TestCase
