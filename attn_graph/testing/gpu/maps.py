"""Tensor maps: how the copy engine sees a tensor. PTX ISA 5.5.8, 9.7.9.26 and 9.7.13.4.

The host makes them, in the form of driver.c; or the kernel does, in shared memory, field by field,
and copies them to global memory.
"""

from __future__ import annotations

import struct
from math import prod
from typing import final

import numpy as np
from attrs import define, field, frozen

from attn_graph.testing.gpu.barriers import MBarrier
from attn_graph.testing.gpu.memory import Memory
from attn_graph.testing.gpu.products import SPANS
from attn_graph.testing.gpu.program import PARAMETERS, Program
from attn_graph.testing.gpu.regions import Access
from attn_graph.testing.gpu.rules import Array, action
from attn_graph.testing.gpu.shared import Shared
from attn_graph.testing.gpu.threads import Threads

MAP = struct.Struct("<Q5Q4Q5I2B2B")  # as driver.c writes tensor maps
MAP_BYTES, MAP_RANK = 128, 5  # its size, and the most axes
PADDED = 16  # in place of an element's bytes: 16 of 4 bits, and 8 bytes left free in copies
ITEMS = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4, 0, PADDED)  # by the type in PTX
FIELDS = {  # where MAP holds a field that kernels set, and its bytes
    "global_address": (0, 8),
    "global_dim": (8, 8),
    "global_stride": (48, 8),
    "box_dim": (80, 4),
    "rank": (100, 1),
    "elemtype": (101, 1),
    "swizzle_mode": (102, 1),
    "fill_mode": (103, 1),
}
PLAIN = {"element_stride": 1, "interleave_layout": 0}  # fields with one known value


@final
@define(eq=False)
class Maps:
    """Maps of a program. stale: addresses of those changed since the last fence for them."""

    stale: set[int] = field(factory=set[int])

    @classmethod
    def of(cls, m: Program) -> Maps:
        return cls()


@final
@frozen
class TensorMap:
    """A tensor as the copy engine sees it, innermost axis first. strides: bytes, from axis 1 on.

    item: bytes of an element; or of 16 elements of 4 bits, padded to 16 bytes in shared memory.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    item: int
    span: int
    nan: bool
    padded: bool = False

    @classmethod
    def at(cls, m: Program, warp: int, address: int, axes: int) -> TensorMap:
        """The map of so many axes used by a warp: a parameter, or made by the kernel.

        Raises Fault.
        """
        if address >= PARAMETERS:
            made = cls.read(m.parameter_at(address))
        else:
            who, at = Access.by(m, "a tensor map's use of", np.array([warp])), np.array([address])
            words = m.part(Memory).load(m, who, at.astype(np.uint64), 8, MAP_BYTES // 8, MAP_BYTES)
            made = cls.read(words.tobytes())
        if address in m.part(Maps).stale:
            m.fault("a tensor map is used without fence.proxy.tensormap after its change")
        if not 1 <= len(made.box) <= MAP_RANK or not made.item:
            m.fault(f"no tensor map is at {address:#x}")
        if axes != len(made.box):
            m.fault(f"{axes} coordinates for a tensor map of {len(made.box)} axes")
        return made

    @classmethod
    def read(cls, contents: bytes) -> TensorMap:
        """From the bytes written by driver.c."""
        address, *rest = MAP.unpack_from(contents)
        rank, item, mode, nan = rest[14:]
        shape, strides, box = rest[:rank], rest[5 : 4 + rank], rest[9 : 9 + rank]
        if padded := item == PADDED and rank > 0:
            item, shape[0], box[0] = 8, shape[0] // 16, box[0] // 16
        span = SPANS[mode & 3]
        return cls(address, (*shape,), (*strides,), (*box,), item, span, bool(nan), padded)

    def places(self, first: tuple[int, ...]) -> tuple[Array, Array, Array]:
        """Places of a box at `first` within the tensor: rows of the box, columns, and addresses of
        the rows' first columns."""
        columns = first[0] + np.arange(self.box[0])
        (kept,) = np.nonzero((columns >= 0) & (columns < self.shape[0]))
        above = np.array([first[1:], self.shape[1:], self.strides], np.int64)[..., None]
        counts = np.indices(self.box[:0:-1]).reshape(len(self.box) - 1, prod(self.box[1:]))
        at = counts[::-1] + above[0]
        inside = ((at >= 0) & (at < above[1])).all(axis=0)
        (rows,) = np.nonzero(inside & (kept.size > 0))
        steps = (at * above[2]).sum(axis=0)[rows]
        return rows, kept, (self.address + steps + columns[kept[:1]] * self.item).astype(np.uint64)

    def fetch(self, m: Program, warp: int, bar: MBarrier, first: tuple[int, ...]) -> Array:
        """A warp fetches the bytes of a box, [rows, bytes]; zeros outside of the tensor."""
        if self.padded and first[0] % 128:
            m.fault(f"a padded copy begins at element {first[0]}, not a multiple of 128")
        rows, columns, at = self.places((first[0] // 16, *first[1:]) if self.padded else first)
        data = np.zeros((prod(self.box[1:]), self.box[0]), f"u{self.item}")
        if rows.size:
            who, many = bar.fetching(warp, len(at)), len(columns)
            words = m.part(Memory).load(m, who, at, self.item, many, self.item)
            data[np.ix_(rows, columns)] = words.T
        return data.view(np.uint8)

    def store(self, m: Program, who: Access, first: tuple[int, ...], data: Array) -> None:
        """Write the bytes of a box, [rows, bytes], inside of the tensor."""
        rows, columns, at = self.places(first)
        if rows.size:
            numbers = np.ascontiguousarray(data).view(f"u{self.item}")[np.ix_(rows, columns)].T
            each = who.select(np.zeros(len(at), np.intp))
            m.part(Memory).store(m, each, at, np.ascontiguousarray(numbers), align=self.item)


@action(
    r"tensormap\.replace\.tile\.(?P<name>\w+)\.shared::cta\.b1024\.(?P<type>b32|b64)",
    "<- @ {type} {type}?",
)
def replace_field(
    m: Program, g: Threads, address: Array, first: Array, second: Array | None = None, **words: str
) -> None:
    """Set a field of a map in shared memory, or its element for axis `first`."""
    name, shared = words["name"], m.part(Shared)
    axes, numbers = (0, first) if second is None else (first, second)
    offsets = shared.offsets(m, "tensormap.replace", g.take(address), MAP_BYTES).tolist()
    given = zip(g.owners.tolist(), offsets, g.each(axes).tolist(), g.each(numbers), strict=True)
    for warp, offset, axis, number in given:
        if name in PLAIN and number == PLAIN[name]:
            continue
        if name not in FIELDS or axis >= MAP_RANK or (name == "elemtype" and number >= len(ITEMS)):
            m.refuse(f"a tensor map's {name} of {number}")
        start, size = FIELDS[name]
        value = ITEMS[number] if name == "elemtype" else number + (name == "rank")
        data = np.array([value], f"u{size}").view(np.uint8)[None]
        at = np.array([offset + start + size * axis])
        shared.store(m, "tensormap.replace", np.array([warp]), at, data)


@action(
    r"tensormap\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release\.(?:cta|cluster|gpu|sys)\.sync\.aligned",
    "<- @ @ #",
)
def publish_map(m: Program, g: Threads, target: Array, source: Array, size: int) -> None:
    """Each warp copies a map from shared to global memory."""
    warps, shared = m.together(g), m.part(Shared)
    places, at = (g.take(x).reshape(len(warps), -1)[:, 0] for x in (source, target))
    offsets = shared.offsets(m, "tensormap.cp_fenceproxy", places, size)
    shared.load(m, "tensormap.cp_fenceproxy", warps, offsets, size)
    numbers = shared.words(8)[offsets // 8 + np.arange(size // 8)[:, None]]
    who = Access.by(m, "a tensor map's store to", warps, stores=True)
    m.part(Memory).store(m, who, at, numbers, MAP_BYTES)
    m.part(Maps).stale.update(at.tolist())


@action(r"fence\.proxy\.tensormap::generic\.acquire\.(?:cta|cluster|gpu|sys)", "<- @ #")
def fence_map(m: Program, g: Threads, address: Array, size: int) -> None:
    """The copy engine may use a changed map."""
    m.part(Maps).stale.difference_update(g.take(address).tolist())


@action(r"prefetch\.tensormap", "<- @")
def prefetch_map(m: Program, g: Threads, address: Array) -> None:
    """Prefetch a tensor map; only its address is checked."""
    for each in g.take(address).tolist():
        m.parameter_at(each)
