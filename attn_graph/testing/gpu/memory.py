"""Global memory of a launch: the tensors' own, and the bytes that programs may touch.

A program may touch the bytes of elements of the launch's tensors, not the gaps between them. It may
not read unwritten bytes, nor bytes written by another program of the launch. Two warps of one
program order their stores to one place, or store equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, final

import numpy as np
import torch
from attrs import define, field, frozen

from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.program import Program
from attn_graph.testing.gpu.rules import DTYPES, Array, action
from attn_graph.testing.gpu.threads import Threads

ADDED = -1  # in the place of a program's number: programs add there, in any order
UNSET = 0xFB  # an unwritten byte; NaN in every type
PAGE = 1 << 16  # bytes of a storage examined together; no element lies in two


def bytes_of(tensor: torch.Tensor) -> Array:
    """All bytes of a tensor's storage, in place."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


@final
@define(eq=False)
class Unset:
    """Unwritten bytes of new tensors, by the first address of their storage.

    The tensors' storages are kept: else another tensor might reuse the address.
    """

    written: dict[int, Array] = field(factory=dict[int, Array])
    kept: list[torch.UntypedStorage] = field(factory=list[torch.UntypedStorage])

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            bytes_of(tensor)[:] = UNSET
            self.written[storage.data_ptr()] = np.zeros(storage.nbytes(), np.uint8)
            self.kept.append(storage)

    def written_of(self, start: int, unit: int) -> Array | None:
        """Flags of written bytes of a storage, by unit; None: all are."""
        if start not in self.written:
            return None
        written = self.written[start]
        return written[: len(written) // unit * unit].reshape(-1, unit)


@final
@frozen(eq=False)
class Region:
    """The storage of tensors of a launch, in units of the smallest element.

    met: pages touched by the launch; other pages take no memory. valid: flags of units of elements
    in these. written: bytes that hold something. writer, reader: the program that wrote, and read,
    a unit, from 1 on; 0: none; ADDED: several that add to it. warp, time, line: of the last store:
    its warp, that warp's time, the line of the PTX.
    """

    tensors: Mapping[str, torch.Tensor]
    start: int
    data: Array
    unit: int
    met: Array
    valid: Array
    written: Array | None
    writer: Array
    reader: Array
    warp: Array
    time: Array
    line: Array

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], unset: Unset) -> Region:
        first = next(iter(tensors.values()))
        start, data = first.untyped_storage().data_ptr(), bytes_of(first)
        unit = min(t.itemsize for t in tensors.values())
        units = len(data) // unit
        return cls(
            tensors=tensors,
            start=start,
            data=data,
            unit=unit,
            met=np.zeros(len(data) // PAGE + 1, bool),
            valid=np.zeros(units, bool),
            written=unset.written_of(start, unit),
            writer=np.zeros(units, np.int32),
            reader=np.zeros(units, np.int32),
            warp=np.zeros(units, np.int16),
            time=np.zeros(units, np.int32),
            line=np.zeros(units, np.int32),
        )

    @property
    def name(self) -> str:
        return ", ".join(self.tensors)

    @property
    def stop(self) -> int:
        """The address after its last byte."""
        return self.start + len(self.data)

    def words(self, size: int) -> Array:
        """The memory as numbers of `size` bytes."""
        return self.data[: len(self.data) // size * size].view(f"u{size}")

    def are_valid(self, units: Array) -> bool:
        """True if all of these units belong to elements."""
        if self.valid[units].all():
            return True
        for page in np.unique(units // (PAGE // self.unit)).tolist():
            if not self.met[page]:
                self.meet(page)
        return bool(self.valid[units].all())

    def meet(self, page: int) -> None:
        """Prepare a page: find its elements, and the writes of the CPU since it was new."""
        self.met[page] = True
        first, last = page * PAGE, min((page + 1) * PAGE, self.valid.size * self.unit)
        for tensor in self.tensors.values():
            mark_elements(self.valid, self.unit, tensor.detach(), first, last)
        if self.written is not None:
            units = self.data[first:last].reshape(-1, self.unit)
            self.written[first // self.unit :][: len(units)][(units != UNSET).any(axis=1)] = 1

    def check(
        self,
        m: Program,
        text: str,
        warps: Array,
        offsets: Array,
        size: int,
        store: bool,
        add: bool = False,
        same: Callable[[], Array] | None = None,
    ) -> None:
        """Check an access of warps to `size` bytes from each offset on, and note it. Raises Fault.

        add: a sum; others may add there too, but not access it otherwise. same: places that already
        held the stored values.
        """
        units = (offsets // self.unit)[:, None] + np.arange(max(1, size // self.unit))
        me = ADDED if add else m.number
        if not self.are_valid(units):
            m.fault(f"{text} bytes of {self.name} that belong to no element")
        self.check_stores(m, text, warps, units, me, same)
        if self.written is not None and (add or not store) and not self.written[units].all():
            m.fault(f"{text} bytes of {self.name} to which nothing was written")
        if not store:
            self.reader[units] = me
            return
        readers = self.reader[units]
        others = (readers != 0) & (readers != me)
        if others.any():
            m.fault(f"{text} bytes of {self.name} that program number {readers[others][0]} reads")
        self.writer[units], self.line[units] = me, m.line
        self.warp[units], self.time[units] = warps[:, None], m.clocks.now(warps)[:, None]
        if self.written is not None:
            self.written[units] = 1

    def check_stores(
        self,
        m: Program,
        text: str,
        warps: Array,
        units: Array,
        me: int,
        same: Callable[[], Array] | None,
    ) -> None:
        """Raise Fault for stores to places with a store by others.

        A warp may store again after the stores of its own program, or store equal values.
        """
        writers = self.writer[units]
        if not writers.any():
            return
        others, own = (writers != 0) & (writers != me), (writers == me) & (me != ADDED)
        seen = m.clocks.known[warps[:, None], self.warp[units]] >= self.time[units]
        unequal = np.True_ if same is None else ~same()[:, None]
        if others.any() and same is not None and not (others & unequal).any():
            text = f"several programs store equal bytes to {self.name}"
            m.report(Omission.EQUAL_STORES, text)
        elif others.any():
            who, line = writers[others][0], m.cite(int(self.line[units][others][0]))
            by = "programs add to" if who == ADDED else f"program number {who} stores"
            m.fault(f"{text} bytes of {self.name} that {by} in {line}")
        if (late := own & ~seen & unequal).any():
            unit, other = units[late][0], "" if same is None else " of other bytes"
            m.fault(
                f"{text} bytes of {self.name} is not ordered after the store{other} by warp "
                f"{self.warp[unit]} in {m.cite(int(self.line[unit]))}"
            )


def holds(words: Array, places: Array, values: Array) -> Array:
    """The columns of places in a memory that hold these values."""
    return np.asarray((words[places] == values).all(axis=0))


def mark_elements(valid: Array, unit: int, tensor: torch.Tensor, first: int, last: int) -> None:
    """Mark the units of a tensor's elements at bytes `first` to `last` of its storage."""
    size = tensor.itemsize
    reach = [(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    begin = tensor.storage_offset() * size
    end = begin + (sum(reach) + 1) * size
    if not tensor.numel() or end <= first or last <= begin:
        return
    if first <= begin and end <= last:
        shape = (*tensor.shape, size // unit)
        strides = (*(s * size // unit for s in tensor.stride()), 1)
        np.lib.stride_tricks.as_strided(valid[begin // unit :], shape, strides)[...] = True
        return
    for half in tensor.chunk(2, reach.index(max(reach))):
        mark_elements(valid, unit, half, first, last)


@final
@frozen(eq=False)
class Memory:
    """Global memory of a launch."""

    regions: tuple[Region, ...]

    @classmethod
    def of(cls, m: Program) -> Memory:
        """That of a program's launch."""
        memory = m.launch.memory
        assert isinstance(memory, Memory)
        return memory

    @classmethod
    def around(cls, tensors: Mapping[str, torch.Tensor], unset: Unset) -> Memory:
        """Of the tensors of a launch, by name."""
        storages: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if tensor.untyped_storage().nbytes():
                start = tensor.untyped_storage().data_ptr()
                storages.setdefault(start, {})[name] = tensor
        regions = (Region.of(storages[start], unset) for start in sorted(storages))
        return cls(tuple(regions))

    @cached_property
    def starts(self) -> Array:
        """The first address of each region."""
        return np.array([region.start for region in self.regions], np.uint64)

    def split(
        self, m: Program, text: str, addresses: Array, size: int, align: int = 0
    ) -> Iterator[tuple[Region, Any, Array]]:  # Any: an index of arrays
        """The regions of accesses to `size` bytes, the indices of those in each, and offsets."""
        if (addresses % np.uint64(align or size)).any():
            m.fault(f"{text} {size} bytes of global memory at no multiple of {align or size}")
        homes = np.searchsorted(self.starts, addresses, "right") - 1
        for home in np.unique(homes).tolist():
            at = slice(None) if (homes == home).all() else np.flatnonzero(homes == home)
            region = self.regions[max(home, 0)]
            last = int(addresses[at].max()) + size
            if home < 0 or last > region.stop:
                m.fault(
                    f"{text} global memory at {last - size:#x}, which is in no tensor; "
                    f"{region.name} is at {region.start:#x} to {region.stop:#x}"
                )
            yield region, at, (addresses[at] - np.uint64(region.start)).astype(np.int64)

    def load(
        self,
        m: Program,
        text: str,
        warps: Array,
        addresses: Array,
        size: int,
        count: int,
        align: int = 0,
    ) -> Array:
        """Warps load `count` numbers of `size` bytes at each address, [count, addresses]."""
        loaded = np.zeros((count, len(addresses)), f"u{size}")
        for region, at, offsets in self.split(m, text, addresses, size * count, align):
            region.check(m, text, warps[at], offsets, size * count, store=False)
            loaded[:, at] = region.words(size)[offsets // size + np.arange(count)[:, None]]
        return loaded

    def store(
        self, m: Program, warps: Array, addresses: Array, values: Array, align: int = 0
    ) -> None:
        """Warps store numbers to each address, [count, addresses]."""
        size, count = values.itemsize, len(values)
        for region, at, offsets in self.split(m, "a store to", addresses, size * count, align):
            words, places = region.words(size), offsets // size + np.arange(count)[:, None]
            new = values[:, at]
            same, many = partial(holds, words, places, new), size * count
            region.check(m, "a store to", warps[at], offsets, many, store=True, same=same)
            words[places] = new
            if not same().all():
                m.fault(f"a store of other bytes by two threads at once to {region.name}")

    def add(
        self, m: Program, warps: Array, addresses: Array, values: Array, align: int = 0
    ) -> None:
        """Warps add numbers to those at each address, [count, addresses]."""
        size, count = values.itemsize, len(values)
        for region, at, offsets in self.split(m, "a sum to", addresses, size * count, align):
            region.check(m, "a sum to", warps[at], offsets, size * count, store=True, add=True)
            places = offsets // size + np.arange(count)[:, None]
            np.add.at(region.words(size).view(values.dtype), places, values[:, at])


@action(r"ld\.param(?P<many>\.v[24])?\.(?P<type>[busf]\d+)", "{type}* <- param")
def load_parameter(
    m: Program, g: Threads, name: str, offset: int, many: str | None, type: str
) -> Array:
    """d = a part of a parameter of the kernel, or several contiguous parts."""
    contents, dtype, count = m.launch.parameters[name], DTYPES[type], int((many or ".v1")[2:])
    size = dtype.itemsize * count
    if offset + size > len(contents):
        m.fault(f"a load of {size} bytes at {offset} of {name}, which has {len(contents)}")
    numbers = np.frombuffer(contents, dtype, count, offset)
    return np.repeat(numbers[:, None], g.count, 1)


@action(r"ld\.global(?P<many>\.v[248])?\.(?P<type>[busf]\d+)", "{type}* <- @")
def load_global(
    m: Program, g: Threads, address: Array, many: str | None, type: str, used: int | None = None
) -> Array:
    """d = the number at an address, or several contiguous ones."""
    dtype, count = DTYPES[type], int((many or ".v1")[2:])
    at = g.take(address)
    words = m.part(Memory).load(m, "a load of", g.owners, at, dtype.itemsize, count)
    return g.spread(words.view(dtype))


@action(r"st\.global(?:\.v[248])?\.(?P<type>[busf]\d+)", "<- @ {type}*")
def store_global(
    m: Program, g: Threads, address: Array, values: tuple[Array, ...], type: str
) -> None:
    """Store a number at an address, or several contiguous ones."""
    size = DTYPES[type].itemsize
    rows = g.stack(x.view(f"u{size}") for x in values)
    m.part(Memory).store(m, g.owners, g.take(address), g.take(rows))
