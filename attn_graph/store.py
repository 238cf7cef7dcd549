"""What took long to make, kept on disk: plans that cuDNN built, choices that were measured."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import final

from attrs import field, frozen

LOG = logging.getLogger("attn_graph")
MAGIC = b"attn_graph store 1\n"  # another number for another form: older files are misses then
MOST = 256 * 2**20  # bytes; a plan of cuDNN's is about 100 KB


class Unfit(Exception):
    """A file is none of ours, or not as it was written."""


@final
@frozen
class Entry:
    """A file of a store.

    key: None where the file is not whole, and then `unfit` says what is wrong with it. used: when
    it was put or got last, in seconds since 1970.
    """

    path: Path
    key: str | None
    bytes: int
    used: float
    unfit: str | None = None


@final
@frozen
class Store:
    """Bytes by key in a folder: at most `most` bytes of files, the least recently used go first.

    A key is a text that tells all that matters; its sha256 names the file, and the file repeats it.
    Each file has a checksum. Whatever is damaged, foreign or unreadable is a miss, with the reason
    logged, and is replaced by the next `put`. Processes may share a folder: files appear whole.
    """

    folder: Path = field(converter=Path)
    most: int = MOST

    def path(self, key: str) -> Path:
        return self.folder / f"{sha256(key.encode()).hexdigest()}.plan"

    def get(self, key: str) -> bytes | None:
        """What was put under the key; None if nothing was, or if it is not whole."""
        path = self.path(key)
        try:
            found, data = opened(path.read_bytes())
            if found != key:
                raise Unfit("it holds another key")
        except FileNotFoundError:
            return None
        except (OSError, Unfit) as error:
            LOG.warning("stored plan %s is not used: %s", path, error)
            return None
        with suppress(OSError):  # a folder that can only be read is as good
            os.utime(path)
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep the bytes. Where the folder can't be written to, that is logged and all."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
                try:
                    file.write(sealed(key, data))
                    file.flush()
                    os.replace(file.name, self.path(key))
                finally:
                    Path(file.name).unlink(missing_ok=True)
            self.trim()
        except OSError as error:
            LOG.warning("plan is not stored in %s: %s", self.folder, error)

    def trim(self) -> None:
        """Give up the files that were not used for longest, until the rest is small enough."""
        held = sorted(self.files(), key=lambda found: -found[1].st_mtime_ns)
        total = 0
        for path, stat in held:
            total += stat.st_size
            if total > self.most:
                path.unlink(missing_ok=True)

    def files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.folder.glob("*.plan"):
            with suppress(FileNotFoundError):  # another process has just trimmed it
                yield path, path.stat()

    def entries(self) -> Iterator[Entry]:
        """Every file, read and checked, whole or not."""
        for path, stat in self.files():
            key, unfit = None, None
            try:
                key, _ = opened(path.read_bytes())
            except (OSError, Unfit) as error:
                unfit = str(error)
            if key is not None and path != self.path(key):
                key, unfit = None, "it holds another key"
            yield Entry(path, key, stat.st_size, stat.st_mtime, unfit)

    def held(self) -> Iterator[tuple[Path, str | None]]:
        """Every file with its key, or with None if it is not whole."""
        for entry in self.entries():
            yield entry.path, entry.key

    @property
    def bytes(self) -> int:
        """How much the folder holds."""
        return sum(stat.st_size for _, stat in self.files())

    def clear(self) -> int:
        """Delete every file; how many there were."""
        held = [path for path, _ in self.files()]
        for path in (*held, *self.folder.glob("*.part")):
            path.unlink(missing_ok=True)
        return len(held)


def sealed(key: str, data: bytes) -> bytes:
    """A file: magic, checksum, then the key by its length, then the data."""
    name = key.encode()
    body = len(name).to_bytes(8, "big") + name + data
    return MAGIC + sha256(body).digest() + body


def opened(file: bytes) -> tuple[str, bytes]:
    """The key and the data of a file. Raises Unfit unless it is whole."""
    if not file.startswith(MAGIC):
        raise Unfit(f"it starts with {file[: len(MAGIC)]!r}, not with {MAGIC!r}")
    digest, body = file[len(MAGIC) : len(MAGIC) + 32], file[len(MAGIC) + 32 :]
    if sha256(body).digest() != digest:
        raise Unfit("its checksum is wrong")
    end = 8 + int.from_bytes(body[:8], "big")
    try:
        return body[8:end].decode(), body[end:]
    except UnicodeDecodeError as error:
        raise Unfit(f"its key is no text: {error}") from error


@cache
def default_store() -> Store:
    """The store in the user's cache folder, which plans use unless told otherwise."""
    from platformdirs import user_cache_path

    return Store(user_cache_path("attn_graph"))
