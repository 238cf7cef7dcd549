"""What is kept on disk comes back as it was, or not at all."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attn_graph.machine.store import MAGIC, Store, Unfit, default_store, seal
from tests.support.forking import forks, in_child

KEY, DATA = "cudnn {a graph, a device, versions}", bytes(range(256)) * 20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "plans")


shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@shared
@given(key=st.text(), data=st.binary())
def test_what_is_put_is_got(store: Store, key: str, data: bytes) -> None:
    store.put(key, data)
    assert store.get(key) == data
    assert (store.path(key), key) in [(entry.path, entry.key) for entry in store.entries()]


@given(where=st.integers(0, 10**6), change=st.integers(1, 255), cut=st.integers(0, 10**6))
@shared
def test_a_damaged_file_is_a_miss_with_a_logged_reason(
    store: Store, where: int, change: int, cut: int
) -> None:
    """Any one byte, or any end cut off."""
    whole = bytearray(seal(KEY, DATA))
    other = bytearray(whole)
    other[where % len(whole)] ^= change
    for damaged in (bytes(other), bytes(whole[: cut % len(whole)])):
        store.put(KEY, DATA)
        store.path(KEY).write_bytes(damaged)
        said = logged(store)
        assert str(store.path(KEY)) in said
        assert store.get(KEY) is None


def logged(store: Store) -> str:
    """What a `get` that misses says in the log."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("attn_graph")
    log.addHandler(handler)
    try:
        assert store.get(KEY) is None
    finally:
        log.removeHandler(handler)
    return "\n".join(found)


@forks
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs os.mkfifo")
def test_a_fifo_is_a_miss_that_nobody_waits_for(store: Store) -> None:
    store.put(KEY, DATA)
    store.path(KEY).unlink()
    os.mkfifo(store.path(KEY))
    assert in_child(lambda: "it is not a regular file" in logged(store))
    assert in_child(lambda: [x.unfit for x in store.entries()] == ["it is not a regular file"])
    store.put(KEY, DATA)
    assert store.get(KEY) == DATA


def test_a_folder_in_the_store_stays_and_hinders_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, most=len(seal("new", DATA)))
    folder = store.path(KEY)
    folder.mkdir()
    os.utime(folder, (100, 200))
    for key in ("old", "new"):
        store.put(key, DATA)
    assert (store.get("old"), store.get("new")) == (None, DATA)
    assert not caplog.records
    assert store.bytes == store.most
    assert [e.unfit for e in store.entries() if e.path == folder] == ["it is not a regular file"]
    store.put(KEY, DATA)
    assert "is not stored" in caplog.text
    assert store.clear() == 1
    assert [*store.folder.iterdir()] == [folder]


def test_a_file_that_cannot_be_given_up_does_not_keep_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, most=len(seal("2", DATA)))
    for n in range(2):
        Store(tmp_path).put(str(n), DATA)
        os.utime(store.path(str(n)), ns=(9 - n, 9 - n))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == store.path("0"):
            raise PermissionError("not yours")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    store.put("2", DATA)
    assert sorted(path.name for path, _ in store.files()) == sorted(
        store.path(key).name for key in ("0", "2")
    )
    assert "is not given up: not yours" in caplog.text


def test_a_whole_file_whose_lengths_lie_is_a_miss(store: Store) -> None:
    store.put(KEY, DATA)
    for body in (b"", (3).to_bytes(8, "big") + b"ab", b"\xff" * 99):
        store.path(KEY).write_bytes(MAGIC + sha256(body).digest() + body)
        assert "its key ends at byte" in logged(store)


def test_what_a_reader_takes_for_unfit_is_a_miss(store: Store) -> None:
    def read(data: bytes) -> str:
        if data == b"no":
            raise Unfit("it holds no word")
        return data.decode()

    for data, due in ((b"yes", "yes"), (b"no", None)):
        store.put(KEY, data)
        assert store.load(KEY, read) == due


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    size = len(seal("0", DATA))
    store = Store(tmp_path, most=3 * size)
    for n in range(3):
        store.put(str(n), DATA)
        os.utime(store.path(str(n)), ns=(n, n))
    assert store.get("0") == DATA  # now the most recent
    store.put("3", DATA)
    assert [store.get(str(n)) is not None for n in range(4)] == [True, False, True, True]
    assert store.bytes == 3 * size


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "plans")
    store.put(KEY, DATA)
    assert store.get(KEY) is None
    assert "is not stored" in caplog.text


def test_a_folder_that_can_only_be_read_is_as_good(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*asked: object) -> None:
        raise PermissionError

    store.put(KEY, DATA)
    monkeypatch.setattr(os, "utime", refused)
    assert store.get(KEY) == DATA
    monkeypatch.setattr(os, "replace", refused)
    store.put("other", DATA)
    assert [p.suffix for p in store.folder.iterdir()] == [".plan"]


def test_a_whole_file_whose_key_is_no_text_is_a_miss(store: Store) -> None:
    store.put(KEY, DATA)
    body = (1).to_bytes(8, "big") + b"\xff"
    store.path(KEY).write_bytes(MAGIC + sha256(body).digest() + body)
    assert "its key is not text" in logged(store)


def test_entries_tell_what_is_there_and_what_is_wrong(store: Store) -> None:
    for key in ("whole", "cut", "foreign", "moved"):
        store.put(key, DATA)
    os.utime(store.path("whole"), (100, 200))
    store.path("cut").write_bytes(seal("cut", DATA)[:-1])
    store.path("foreign").write_bytes(b"hello")
    os.replace(store.path("moved"), store.folder / "moved.plan")
    found = {entry.path: entry for entry in store.entries()}
    whole = found[store.path("whole")]
    assert (whole.key, whole.used, whole.unfit) == ("whole", 200, None)
    assert whole.bytes == len(seal("whole", DATA))
    wrong = {path.name: entry.unfit for path, entry in found.items() if entry.key is None}
    assert wrong == {
        store.path("cut").name: "its checksum is wrong",
        store.path("foreign").name: f"it starts with b'hello', not with {MAGIC!r}",
        "moved.plan": "it holds another key",
    }


def test_threads_may_share_a_folder(store: Store) -> None:
    """Readers see a whole file or none while others write the same one."""

    def turn(n: int) -> bytes | None:
        store.put(KEY, DATA)
        return store.get(KEY)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(turn, range(200))) == {DATA}
    assert not [*store.folder.glob("*.part")]


def test_the_default_folder_is_the_users_cache() -> None:
    assert default_store().folder == Path(os.environ["XDG_CACHE_HOME"], "attn_graph")
    assert default_store() is default_store()
