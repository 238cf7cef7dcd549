"""Storages of tensors in global memory, with the last accesses to each place.

A program may touch the bytes of elements of the launch's tensors, not the gaps between them. It may
not read unwritten bytes, nor bytes written by another program of the launch, unless atomic
operations order the two. Two warps of one program order their stores to one place, or store equal
bytes. Copies of the copy engine, and cp.async, touch a place until somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, final

import numpy as np
import torch
from attrs import define, evolve, field, frozen

from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.program import Program
from attn_graph.testing.gpu.rules import Array, any_of

MANY = -1  # in the place of an era: several programs, in any order
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


@final
@frozen(eq=False)
class Access:
    """Accesses to global memory, one for each address: `text` names them, "a load of".

    warps: that begin them. agents, times: by whom they are made, and when. proxy: by that of the
    copy engine.
    """

    text: str
    warps: Array
    agents: Array
    times: Array
    stores: bool = False
    proxy: bool = False
    atomic: bool = False
    reads: bool = False  # what it overwrites

    @classmethod
    def by(cls, m: Program, text: str, warps: Array, **kind: bool) -> Access:
        """By warps themselves, now."""
        return cls(text, warps, warps, m.clocks.now(warps), **kind)

    def select(self, at: Any) -> Access:  # Any: an index of arrays
        if isinstance(at, slice):
            return self
        warps, agents, times = self.warps[at], self.agents[at], self.times[at]
        return evolve(self, warps=warps, agents=agents, times=times)


@final
@frozen(eq=False)
class Record:
    """The last accesses of a kind to each unit of a region.

    era: of the program, see Launch; 0: none; MANY: of several. agent, time: of that program. line:
    of the PTX.
    """

    era: Array
    agent: Array
    time: Array
    line: Array

    @classmethod
    def of(cls, units: int) -> Record:
        era, time, line = (np.zeros(units, np.int32) for _ in range(3))
        return cls(era, np.zeros(units, np.int16), time, line)

    def put(self, m: Program, who: Access, units: Array) -> None:
        """Note accesses."""
        self.era[units], self.line[units] = m.era, m.line
        self.agent[units], self.time[units] = who.agents[:, None], who.times[:, None]

    def describe(self, m: Program, unit: int) -> tuple[str, str]:
        """Who made the last access, and its line."""
        era, cited = int(self.era[unit]), m.cite(int(self.line[unit]))
        if era >= m.first_era:
            return m.clocks.name(int(self.agent[unit])), cited
        return (
            "several programs" if era == MANY else f"program {m.launch.place(m.launch.eras[era])}",
            cited,
        )


@final
@frozen(eq=False)
class Region:
    """The storage of tensors of a launch, in units of the smallest element.

    met: pages touched by the launch; other pages take no memory. valid: flags of units of elements
    in these. written: bytes that hold something. last: the last write of each unit, and reads: its
    reads. atomic: units last written by an atomic operation. fetched: the times at which agents
    other than warps read each unit.
    """

    tensors: Mapping[str, torch.Tensor]
    start: int
    data: Array
    unit: int
    met: Array
    valid: Array
    written: Array | None
    last: Record
    reads: Record
    atomic: Array
    fetched: dict[int, Array] = field(factory=dict[int, Array])

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], unset: Unset) -> Region:
        first = next(iter(tensors.values()))
        start, data = first.untyped_storage().data_ptr(), bytes_of(first)
        unit = min(t.itemsize for t in tensors.values())
        units, pages = len(data) // unit, len(data) // PAGE + 1
        met, valid, atomic = (np.zeros(n, bool) for n in (pages, units, units))
        last, reads, written = Record.of(units), Record.of(units), unset.written.get(start)
        if written is not None:
            written = written[: len(written) // unit * unit].reshape(-1, unit)
        return cls(tensors, start, data, unit, met, valid, written, last, reads, atomic)

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

    def touched(self) -> tuple[Array, Array, Array]:
        """The stored units, their bytes, and the read units."""
        size = PAGE // self.unit
        near = (np.flatnonzero(self.met)[:, None] * size + np.arange(size)).reshape(-1)
        near = near[near < self.valid.size]
        stored, read = (near[x.era[near] != 0] for x in (self.last, self.reads))
        return stored, self.units[stored], read

    @property
    def units(self) -> Array:
        """The memory by units."""
        return self.data[: self.valid.size * self.unit].reshape(-1, self.unit)

    def put(self, units: Array, words: Array) -> None:
        """Store the bytes of units, as another process did."""
        self.units[units] = words
        if self.written is not None:
            self.written[units] = 1

    def are_valid(self, units: Array) -> bool:
        """True if all of these units belong to elements."""
        if not any_of(~self.valid[units]):
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
        who: Access,
        offsets: Array,
        size: int,
        same: Callable[[], Array] | None = None,
    ) -> None:
        """Check accesses to `size` bytes from each offset on, and note them. Raises Fault.

        same: places that already held the stored values.
        """
        units = (offsets // self.unit)[:, None] + np.arange(max(1, size // self.unit))
        if not self.are_valid(units):
            self.blame(m, who, units, ~self.valid[units], "that belong to no element")
        self.check_writes(m, who, units, same)
        if self.written is not None and (who.reads or not who.stores):
            unset = np.asarray(~self.written[units].all(axis=2))
            if any_of(unset) and Omission.UNWRITTEN_LOADS in m.launch.omits:
                m.note(f"{who.text} bytes of {self.name} to which nothing was written")
            elif any_of(unset):
                self.blame(m, who, units, unset, "to which nothing was written")
        if who.stores:
            self.check_reads(m, who, units)
            self.note_write(m, who, units)
        else:
            self.note_read(m, who, units)

    def check_writes(
        self, m: Program, who: Access, units: Array, same: Callable[[], Array] | None
    ) -> None:
        """Raise Fault for places written by others without an order between the two.

        A warp may store again after the stores of its own program, or store equal values.
        """
        eras, last = self.last.era[units], self.last
        if not any_of(eras):
            return
        unequal = np.True_ if same is None else ~same()[:, None]
        apart = ~self.atomic[units] if who.atomic else np.True_
        others: Array = m.is_unordered(eras) & apart
        if any_of(others) and same is not None and not any_of(others & unequal):
            text = f"several programs store equal bytes to {self.name}"
            m.report(Omission.EQUAL_STORES, text)
        elif any_of(others):
            did = "added to by" if self.atomic[units[others][0]] else "stored by"
            self.blame(m, who, units, others, did, last)
        own, row = eras >= m.first_era, who.warps[:, None]
        agents, times = last.agent[units], last.time[units]
        late: Array = own & apart & unequal & (m.clocks.known[row, agents] < times)
        if any_of(late):
            other = "" if same is None else " of other bytes"
            text = f"is not ordered after the store{other} by"
            self.blame(m, who, units, late, text, last)
        if not who.proxy:
            return
        unfenced = m.clocks.fenced_global[row, agents] < times
        if any_of(late := own & m.clocks.is_generic(agents) & unfenced):
            self.blame(m, who, units, late, "has no fence.proxy.async after the store by", last)

    def check_reads(self, m: Program, who: Access, units: Array) -> None:
        """Raise Fault for places read by other programs, or by copies that nobody waited for."""
        others = m.is_unordered(self.reads.era[units])
        if any_of(others):
            self.blame(m, who, units, others, "read by", self.reads)
        for agent, times in self.fetched.items():
            late = times[units] > m.clocks.known[who.warps, agent][:, None]
            if any_of(late):
                text = f"is not ordered after the read by {m.clocks.name(agent)} of"
                self.blame(m, who, units, late, text, self.reads)

    def note_read(self, m: Program, who: Access, units: Array) -> None:
        """Note loads. A place that several programs read has MANY as its reader."""
        several = m.is_unordered(self.reads.era[units])
        self.reads.put(m, who, units)
        self.reads.era[units[several]] = MANY
        if who.agents is not who.warps:
            for agent in np.unique(who.agents).tolist():
                times = self.fetched.setdefault(agent, np.zeros(self.valid.size, np.int32))
                own = who.agents == agent
                times[units[own]] = who.times[own, None]

    def note_write(self, m: Program, who: Access, units: Array) -> None:
        """Note stores, and atomic operations."""
        several = m.is_unordered(self.last.era[units])  # atomic ones, or of equal bytes
        self.last.put(m, who, units)
        self.last.era[units[several]] = MANY
        self.atomic[units] = who.atomic
        if self.written is not None:
            self.written[units] = 1

    def blame(
        self,
        m: Program,
        who: Access,
        units: Array,
        wrong: Array,
        text: str,
        before: Record | None = None,
    ) -> NoReturn:
        """Raise Fault with an access, and the one before it in a record, if any."""
        row, column = np.argwhere(np.broadcast_to(wrong, units.shape))[0]
        unit = int(units[row, column])
        text = f"{who.text} bytes of {self.name} {text}"
        places = [f"{who.text} {self.spot(unit)} by {m.clocks.name(int(who.agents[row]))}"]
        if before is not None:
            other, cited = before.describe(m, unit)
            text = f"{text} {other} in {cited}"
            agent = m.clocks.name(int(before.agent[unit]))
            places.append(
                f"before it, {agent}{'' if other == agent else f' of {other}'} in {cited}"
            )
        m.fault(text, *places)

    def spot(self, unit: int) -> str:
        """The element that holds a unit, and its bytes in the storage."""
        first = unit * self.unit
        for name, tensor in self.tensors.items():
            index = index_of(tensor, first - int(tensor.storage_offset()) * tensor.itemsize)
            if index is not None:
                start = first - first % tensor.itemsize
                return f"{name}{[*index]} (bytes {start} to {start + tensor.itemsize - 1})"
        return f"{self.name} (byte {first} of its storage)"


def index_of(tensor: torch.Tensor, offset: int) -> tuple[int, ...] | None:
    """The index of the element at an offset in bytes; None: of no element."""
    rest, index = offset // tensor.itemsize, [0] * tensor.dim()
    if offset < 0 or not tensor.numel():
        return None
    steps = [*tensor.stride()]
    for axis in sorted(range(tensor.dim()), key=lambda n: -steps[n]):
        if steps[axis]:
            index[axis] = min(rest // steps[axis], tensor.shape[axis] - 1)
            rest -= index[axis] * steps[axis]
    return None if rest else (*index,)


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
