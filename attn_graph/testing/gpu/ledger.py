"""The last write and the last reads of each cell of a memory, to find races."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import numpy as np
from attrs import define, field

from attn_graph.testing.gpu.clocks import Clocks
from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.program import Program
from attn_graph.testing.gpu.rules import Array, any_of


@final
@define(eq=False)
class Ledger:
    """The last write and the last reads of each cell. readers: the agents that may read here.

    inits: lines of PTX by which mbarriers begin or end, or tensor memory is taken: GPUs order these
    before copies behind a barrier. added: times and lines of atomic operations, by warp.
    """

    clocks: Clocks
    cells: int
    readers: Array
    memory: str
    grain: int = 1
    inits: set[int] = field(factory=set[int])
    added: dict[int, Array] = field(factory=dict[int, Array])
    writer: Array = field(init=False)
    time: Array = field(init=False)
    line: Array = field(init=False)
    read_line: Array = field(init=False)
    reads: Array = field(init=False)
    latest: Array = field(init=False)  # the last read of each reader, of any cell
    row: Array = field(init=False)  # of an agent in reads

    def __attrs_post_init__(self) -> None:
        self.writer = np.full(self.cells, -1, np.int16)
        self.time, self.line, self.read_line = np.zeros((3, self.cells), np.int32)
        self.reads = np.zeros((len(self.readers), self.cells), np.int32)
        self.latest = np.zeros(len(self.readers), np.int32)
        self.row = np.zeros(self.clocks.known.shape[1], np.intp)
        self.row[self.readers] = np.arange(len(self.readers))

    def describe(self, cell: int) -> str:
        if not self.grain:
            return f"{self.memory}, cell {cell}"
        return f"{self.memory}, bytes {cell * self.grain} to {(cell + 1) * self.grain - 1}"

    def check_seen(
        self,
        m: Program,
        text: str,
        warps: Array,
        cells: Array,
        proxy: bool = False,
        own: int = -2,
        may_be_unset: bool = False,
    ) -> None:
        """Raise Fault unless a warp in each row of cells comes after the last writes there.

        proxy: the access is by the other proxy. own: an agent whose writes come in order.
        may_be_unset: only note a read of unwritten cells.
        """
        writers, times, row = self.writer[cells], self.time[cells], warps[:, None]
        unset = writers < 0
        if any_of(unset):
            where = self.memory if may_be_unset else self.describe(int(cells[unset].flat[0]))
            report = m.note if may_be_unset else partial(m.report, Omission.UNWRITTEN_LOADS)
            report(f"{text} of {where}, to which nothing was written")
        unseen = (self.clocks.known[row, writers] < times) & (writers != own)
        if any_of(unseen):
            self.blame(m, f"{text} of", "is not ordered after the write by", row, cells, unseen)
        self.check_added(m, f"{text} of", row, cells, proxy)
        if proxy:
            self.check_fenced(m, text, row, cells, writers, times)

    def check_fenced(
        self, m: Program, text: str, row: Array, cells: Array, writers: Array, times: Array
    ) -> None:
        """Raise Fault unless stores of threads are fenced from the other proxy; note others."""
        late = self.clocks.is_generic(writers) & (self.clocks.fenced[row, writers] < times)
        if not any_of(late):
            return
        inits = np.isin(self.line[cells], [*self.inits])
        stores = late & (writers < self.clocks.warps) & ~inits
        if any_of(stores):
            fault = "has no fence.proxy.async after the write by"
            self.blame(m, f"{text} of", fault, row, cells, stores)
        for name, some in (("cp.async", late & ~inits), ("an init or inval", late & inits)):
            lines = ", ".join(map(str, np.unique(self.line[cells[some]])))
            if lines:
                m.note(f"{text} has no fence.proxy.async after {name} in PTX line {lines}")

    def check_free(
        self,
        m: Program,
        text: str,
        warps: Array,
        cells: Array,
        proxy: bool = False,
        own: int = -2,
        same: Callable[[], Array] | None = None,
    ) -> None:
        """Raise Fault unless a write in each row comes after all reads and writes there.

        same: the rows that already hold the written values.
        """
        writers, times, row = self.writer[cells], self.time[cells], warps[:, None]
        unseen = (writers >= 0) & (self.clocks.known[row, writers] < times) & (writers != own)
        if any_of(unseen) and same is not None:
            unseen &= ~same()[:, None]
        if any_of(unseen):
            self.blame(m, f"{text} to", "is not ordered after the write by", row, cells, unseen)
        self.check_added(m, f"{text} to", row, cells, proxy)
        if proxy:
            self.check_fenced(m, text, row, cells, writers, times)
        self.check_read(m, text, warps, cells, own)

    def check_read(self, m: Program, text: str, warps: Array, cells: Array, own: int = -2) -> None:
        """Raise Fault unless a write in each row comes after all reads there."""
        known = self.clocks.known[warps][:, self.readers]
        unknown = (known < self.latest).any(axis=0) & (self.readers != own)
        for reader in np.flatnonzero(unknown).tolist():
            late = self.reads[reader, cells] > known[:, reader, None]
            if any_of(late):
                who = self.clocks.name(int(self.readers[reader])), self.read_line
                fault = "is not ordered after the read by"
                self.blame(m, f"{text} to", fault, warps[:, None], cells, late, who)

    def check_added(self, m: Program, text: str, row: Array, cells: Array, proxy: bool) -> None:
        """Raise Fault unless an access comes after the atomic operations of all warps there."""
        for warp, (times, lines) in self.added.items():
            late = times[cells] > (self.clocks.fenced if proxy else self.clocks.known)[row, warp]
            if any_of(late):
                who, fault = self.clocks.name(warp), "is not ordered after the atomic operation by"
                self.blame(m, text, fault, row, cells, late, (who, lines))

    def add(self, m: Program, text: str, warps: Array, cells: Array) -> bool:
        """Warps change cells by atomic operations, in any order; True if others did so before.

        Raises Fault unless these come after other writes and reads.
        """
        before, self.added = self.added, {}
        self.check_seen(m, text, warps, cells)
        self.check_read(m, text, warps, cells)
        self.added = before
        again = any(times[cells].any() for times, _ in before.values())
        for warp in np.unique(warps).tolist():
            made = self.added.setdefault(warp, np.zeros((2, self.cells), np.int32))
            made[0, cells[warps == warp]] = self.clocks.now(np.array([warp]))
            made[1, cells[warps == warp]] = m.line
        return again

    def blame(
        self,
        m: Program,
        text: str,
        fault: str,
        warps: Array,
        cells: Array,
        wrong: Array,
        before: tuple[str, Array] | None = None,
    ) -> None:
        """Raise Fault with an access, and the last write; or who came before it, and its lines."""
        row, column = np.argwhere(wrong)[0]
        cell, warp = int(cells[row, column]), self.clocks.name(int(warps[row, 0]))
        who, lines = before or (self.clocks.name(int(self.writer[cell])), self.line)
        here, cited = f"{text} {self.describe(cell)}", m.cite(int(lines[cell]))
        first = f"before it, {who} in {cited}"
        m.fault(f"{here} {fault} {who} in {cited}", f"{here} by {warp}", first)

    def note_read(self, m: Program, agents: Array, times: Array, cells: Array) -> None:
        rows = self.row[agents]
        self.reads[rows[:, None], cells] = times[:, None]
        np.maximum.at(self.latest, rows, times)
        self.read_line[cells] = m.line

    def note_write(self, m: Program, agents: Array, times: Array, cells: Array) -> None:
        self.writer[cells], self.time[cells] = agents[:, None], times[:, None]
        self.line[cells] = m.line
        for added in self.added.values():
            added[0, cells] = 0
