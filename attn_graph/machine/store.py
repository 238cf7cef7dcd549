"""A store on disk for slow results: plans built by cuDNN, choices by measurement."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar, final

from attrs import field, frozen
from platformdirs import user_cache_path

from attn_graph.errors import GraphError, show
from attn_graph.spec import require_size

LOG = logging.getLogger("attn_graph")
MAGIC = b"attn_graph store 1\n"  # another number for another form: older files are misses then
MOST = 256 * 2**20  # bytes; a plan of cuDNN's is about 100 KB
LARGEST = 64 * 2**20  # bytes of one file that is read

T = TypeVar("T")


class Unfit(Exception):
    """The file is foreign or corrupt, or its key does not match its name."""


@final
@frozen
class Entry:
    """A file of a store.

    key: None if the file is corrupt; then `unfit` tells why. used: the last write or read, in
    seconds since 1970.
    """

    path: Path
    key: str | None
    bytes: int
    used: float
    unfit: str | None = None


def as_folder(folder: object) -> Path:
    """A converter. Raises GraphError unless the value names a folder."""
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        raise GraphError(f"store: folder {show(folder)} is not a path; write the path as text")
    try:
        whole = b"\0" not in os.fsencode(folder)
    except UnicodeEncodeError:
        whole = False
    if not whole:
        raise GraphError(f"store: folder {show(folder)} has characters that no path has")
    return Path(folder)


def as_most(most: object) -> int:
    """A converter. Raises GraphError unless the value is a number of bytes."""
    return require_size("store: most", most)


@final
@frozen
class Store:
    """Bytes by key in a folder: at most `most` bytes of files; the least recently used go first.

    A key is a text with everything the bytes depend on; its sha256 names the file, and the file
    repeats the key. Each file has a checksum. A damaged, foreign or unreadable file counts as none,
    the reason is logged, and the next `put` replaces it; folders in the folder stay, whatever their
    names. Processes may share a folder: a file appears complete or not at all.
    """

    folder: Path = field(converter=as_folder)
    most: int = field(default=MOST, converter=as_most)

    def path(self, key: str) -> Path:
        """The file of a key; it may not exist."""
        return self.folder / f"{sha256(key.encode()).hexdigest()}.plan"

    def get(self, key: str) -> bytes | None:
        """The bytes of a key; None for a missing or corrupt file."""
        return self.load(key, bytes)

    def load(self, key: str, read: Callable[[bytes], T]) -> T | None:
        """`read` of the bytes of a key; None without a file, or if `read` raises Unfit."""
        path = self.path(key)
        try:
            name, data = unseal(contents(path))
            if name != key:
                raise Unfit("it holds another key")
            record = read(data)
        except FileNotFoundError:
            return None
        except (OSError, Unfit) as error:
            LOG.warning("stored plan %s is not used: %s", path, error)
            return None
        with suppress(OSError):  # a read-only folder serves as well
            os.utime(path)
        return record

    def put(self, key: str, data: bytes) -> None:
        """Store the bytes of a key. A folder without write access is only logged."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
                try:
                    file.write(seal(key, data))
                    file.flush()
                    os.replace(file.name, self.path(key))
                finally:
                    Path(file.name).unlink(missing_ok=True)
            self.trim()
        except OSError as error:
            LOG.warning("plan is not stored in %s: %s", self.folder, error)

    def trim(self) -> None:
        """Delete the least recently used files until the rest are at most `most` bytes."""
        total = 0
        for path, stat in sorted(self.files(), key=lambda pair: -pair[1].st_mtime_ns):
            total += stat.st_size
            if total > self.most:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # another user's, say
                    LOG.warning("stored plan %s is not given up: %s", path, error)

    def paths(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The path and status of everything named like a file of the store."""
        for path in self.folder.glob("*.plan"):
            with suppress(FileNotFoundError):  # another process has just trimmed it
                yield path, path.lstat()

    def files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The path and status of every file of the store."""
        return ((path, stat) for path, stat in self.paths() if not S_ISDIR(stat.st_mode))

    def entries(self) -> Iterator[Entry]:
        """Every file, read and checked, corrupt ones and folders in place of files too."""
        for path, stat in self.paths():
            key, unfit = None, None
            try:
                key, _ = unseal(contents(path))
            except (OSError, Unfit) as error:
                unfit = str(error)
            if key is not None and path != self.path(key):
                key, unfit = None, "it holds another key"
            yield Entry(path, key, stat.st_size, stat.st_mtime, unfit)

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(stat.st_size for _, stat in self.files())

    def clear(self) -> int:
        """Delete every file, and return their number."""
        paths = [path for path, _ in self.files()]
        for path in (*paths, *self.folder.glob("*.part")):
            path.unlink(missing_ok=True)
        return len(paths)


def contents(path: Path) -> bytes:
    """The bytes of a regular file. Raises Unfit for others: reading a FIFO might never end."""
    status = path.stat()
    if not S_ISREG(status.st_mode):
        raise Unfit("it is not a regular file")
    if status.st_size > LARGEST:
        raise Unfit(
            f"it has {status.st_size:,} bytes, and {LARGEST:,} is the most of a stored plan"
        )
    return path.read_bytes()


def read_json(data: bytes | str) -> Any:  # Any: JSON
    """The value of a text in JSON. Raises ValueError for any other text, and for one nested deeper
    than Python calls functions."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def seal(key: str, data: bytes) -> bytes:
    """The bytes of a file: magic, checksum, length of the key, key, data."""
    name = key.encode()
    body = len(name).to_bytes(8, "big") + name + data
    return MAGIC + sha256(body).digest() + body


def read_positive(number: Any) -> float:  # Any: JSON
    """A finite number of at least 0. Raises ValueError for any other, TypeError for no number."""
    try:
        value = float(number)
    except OverflowError:  # of an integer of 400 digits
        value = math.inf
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is not a finite number of at least 0")
    return value


def unseal(file: bytes) -> tuple[str, bytes]:
    """The key and the data of a file's bytes. Raises Unfit if they are corrupt."""
    if not file.startswith(MAGIC):
        raise Unfit(f"it starts with {file[: len(MAGIC)]!r}, not with {MAGIC!r}")
    digest, body = file[len(MAGIC) : len(MAGIC) + 32], file[len(MAGIC) + 32 :]
    if sha256(body).digest() != digest:
        raise Unfit("its checksum is wrong")
    end = 8 + int.from_bytes(body[:8], "big")
    if end > len(body):
        raise Unfit(f"its key ends at byte {end}, and it at byte {len(body)}")
    try:
        return body[8:end].decode(), body[end:]
    except UnicodeDecodeError as error:
        raise Unfit(f"its key is not text: {error}") from error


@cache
def default_store() -> Store:
    """The store in the user's cache folder, used by plans unless they are given another."""
    return Store(user_cache_path("attn_graph"))
