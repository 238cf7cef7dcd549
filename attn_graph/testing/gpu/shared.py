"""Shared memory: its bytes, their writers and readers. PTX ISA 9.7.9.8 and 9.7.14.5."""

from __future__ import annotations

from typing import Protocol, final

import numpy as np
from attrs import define, field

from attn_graph.testing.gpu.clocks import Clocks
from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.ledger import Ledger
from attn_graph.testing.gpu.program import SHARED, Program
from attn_graph.testing.gpu.regions import UNSET
from attn_graph.testing.gpu.rules import DTYPES, Array, Arrays, action, any_of
from attn_graph.testing.gpu.threads import WARP, Threads

MBARRIER = 8  # bytes


class Occupant(Protocol):
    """An object in shared memory that plain stores must not touch."""

    @property
    def is_idle(self) -> bool: ...


@final
@define(eq=False)
class Shared:
    """The shared memory of a program. occupants: mbarriers by offset, of 8 bytes each."""

    size: int
    grain: int
    clocks: Clocks
    bytes: Array = field(init=False)
    ledger: Ledger = field(init=False)
    occupants: dict[int, Occupant] = field(factory=dict[int, Occupant])

    @classmethod
    def of(cls, m: Program) -> Shared:
        return cls(m.launch.shared, m.launch.code.grain, m.clocks)

    def __attrs_post_init__(self) -> None:
        self.bytes = np.full(-(-self.size // 16) * 16 + 16, UNSET, np.uint8)
        readers = np.r_[self.clocks.agents("warp", "product", "bulk"), self.clocks.tensor]
        cells = len(self.bytes) // self.grain
        self.ledger = Ledger(self.clocks, cells, readers, "shared memory", self.grain)

    def words(self, bytes: int) -> Array:
        """The memory as numbers of `bytes` bytes."""
        return self.bytes.view(f"u{bytes}")

    def offsets(self, m: Program, text: str, addresses: Array, size: int, align: int = 0) -> Array:
        """Addresses from the first byte on. Raises Fault outside of it or if misaligned."""
        offsets = addresses.astype(np.int64) - SHARED
        if not offsets.size:
            return offsets
        self.check_range(m, text, int(offsets.min()), int(offsets.max()) + size)
        if any_of(offsets % (align or size)):
            m.fault(f"{text} of {size} bytes of shared memory at no multiple of {align or size}")
        return offsets

    def check_range(self, m: Program, text: str, first: int, last: int) -> None:
        """Raise Fault for bytes outside of the memory."""
        if first < 0 or last > self.size:
            m.fault(f"{text} at bytes {first} to {last} of {self.size} bytes of shared memory")

    def cells(self, offsets: Array, size: int) -> Array:
        """The cells of `size` bytes from each offset on, a row for each."""
        many = max(1, size // self.grain)
        return (offsets // self.grain)[:, None] + np.arange(many)

    def load(self, m: Program, text: str, warps: Array, offsets: Array, size: int) -> None:
        """Warps load bytes: check and note it."""
        cells = self.cells(offsets, size)
        self.ledger.check_seen(m, text, warps, cells)
        self.ledger.note_read(m, warps, self.clocks.now(warps), cells)

    def store(self, m: Program, text: str, warps: Array, offsets: Array, data: Array) -> None:
        """Warps store rows of bytes, checked and noted. Several may store equal bytes."""
        size = data.shape[1]
        rows, at, cells = self.bytes.reshape(-1, size), offsets // size, self.cells(offsets, size)
        self.forget(m, offsets, size)
        self.ledger.check_free(m, text, warps, cells, same=lambda: (rows[at] == data).all(axis=1))
        self.ledger.note_write(m, warps, self.clocks.now(warps), cells)
        rows[at] = data
        if any_of(rows[at] != data):
            text = f"{text} of other bytes by two threads at once to shared memory"
            m.report(Omission.UNEQUAL_STORES, text)

    def forget(self, m: Program, offsets: Array, size: int) -> None:
        """Stores go to these bytes: mbarriers there end. Raises Fault if one is in use."""
        for at in [*self.occupants]:
            if any_of((offsets < at + MBARRIER) & (offsets + size > at)):
                if not self.occupants.pop(at).is_idle:
                    m.fault(f"a store to the mbarrier at byte {at}, which is in use")
                m.note(f"a store over the mbarrier at byte {at}, which is not invalidated")


@action(r"ld\.shared(?:::cta)?(?P<many>\.v[24])?\.(?P<type>[busf]\d+)", "{type}* <- @")
def load_shared(
    m: Program, g: Threads, address: Array, many: str | None, type: str, used: int | None = None
) -> Array:
    """d = the number at an address, or two or four contiguous ones."""
    dtype, count = DTYPES[type], int((many or ".v1")[2:])
    size, owners = dtype.itemsize * count, g.owners
    offsets = m.part(Shared).offsets(m, "a load", g.take(address), size)
    if used is None:
        m.part(Shared).load(m, "a load", owners, offsets, size)
    else:
        for part in (n for n in range(0, size, m.part(Shared).grain) if used >> n & 1):
            m.part(Shared).load(m, "a load", owners, offsets + part, m.part(Shared).grain)
    at = offsets // dtype.itemsize + np.arange(count)[:, None]
    return g.spread(m.part(Shared).words(dtype.itemsize)[at].view(dtype))


@action(r"st\.shared(?:::cta)?(?:\.v[24])?\.(?P<type>[busf]\d+)", "<- @ {type}*")
def store_shared(m: Program, g: Threads, address: Array, values: Arrays, type: str) -> None:
    """Store a number at an address, or two or four contiguous ones."""
    unsigned = DTYPES[f"b{8 * DTYPES[type].itemsize}"]
    rows = g.stack(x.view(unsigned) for x in values)
    data = np.ascontiguousarray(g.take(rows).T).view(np.uint8)
    offsets = m.part(Shared).offsets(m, "a store", g.take(address), data.shape[1])
    m.part(Shared).store(m, "a store", g.owners, offsets, data)


MATRIX = (
    r"matrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<turned>\.trans)?\.shared(?:::cta)?\.b16"
)


@action("ld" + MATRIX, "b32* <- @")
def load_matrices(m: Program, g: Threads, address: Array, count: str, turned: str | None) -> Array:
    """Each warp loads matrices of 8 x 8 halves; lane 8 k + i names row i of matrix k.

    A lane gets two contiguous numbers of row lane / 4; of column lane / 4 if turned.
    """
    offsets, warps = rows_of_matrices(m, "ldmatrix", g, address, int(count))
    m.part(Shared).load(m, "ldmatrix", np.repeat(warps, 8 * int(count)), offsets.reshape(-1), 16)
    halves = m.part(Shared).words(2)[offsets[..., None] // 2 + np.arange(8)]  # [warp, matrix, 8, 8]
    halves = halves.swapaxes(2, 3) if turned else halves
    lanes = np.ascontiguousarray(halves).view(np.uint32)  # [warp, matrix, 8, 4]
    return g.spread(lanes.swapaxes(0, 1).reshape(int(count), -1))


@action("st" + MATRIX, "<- @ b32*")
def store_matrices(
    m: Program, g: Threads, address: Array, values: Arrays, count: str, turned: str | None
) -> None:
    """Each warp stores matrices of 8 x 8 halves, as ldmatrix loads them."""
    offsets, warps = rows_of_matrices(m, "stmatrix", g, address, int(count))
    lanes = np.ascontiguousarray(g.take(np.stack(values))).reshape(int(count), len(warps), 8, 4)
    halves = lanes.view(np.uint16).swapaxes(0, 1)
    halves = halves.swapaxes(2, 3) if turned else halves
    data = np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 16)
    owners = np.repeat(warps, 8 * int(count))
    m.part(Shared).store(m, "stmatrix", owners, offsets.reshape(-1), data)


def rows_of_matrices(
    m: Program, text: str, g: Threads, address: Array, count: int
) -> tuple[Array, Array]:
    """Offsets of rows named by lanes, [warp, matrix, 8], and the warps."""
    warps = m.together(g)
    named = g.take(address).reshape(-1, WARP)[:, : 8 * count]
    return m.part(Shared).offsets(m, text, named, 16).reshape(-1, count, 8), warps
