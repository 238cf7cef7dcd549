"""Attention on packed tensors: sequence by sequence, each a graph of its own on views.

Nothing of the size of a padded batch is made. A sequence runs as any attention of its lengths does,
its mask being the whole graph's with the lengths as numbers. Keys in pages, or quantised, are read
a block at a time, into memory that stays small: a block is an attention of its own, under a mask
moved there. Results of blocks are joined by their lse. Gradients are added: the lse of all keys
makes them independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import final

import torch
from attrs import evolve, field, frozen

from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.builder import Builder
from attn_graph.ir.fused import Role
from attn_graph.ir.graph import Eqn, Op
from attn_graph.ir.modifiers import SoftCap
from attn_graph.ir.storage.packed import LENGTHS, PLACES, STARTS, Packed, with_operands
from attn_graph.ir.storage.packing import list_sequences, require_fitting, require_last, row_count
from attn_graph.ir.transforms.boxes import move_attention
from attn_graph.ir.transforms.moving import Box
from attn_graph.kernels.merging import sink_
from attn_graph.lowering.backend import Executable, room_name
from attn_graph.lowering.cpu.fused_calls import sink_gradient_of, wanted_sinks
from attn_graph.lowering.cpu.page_entries import (
    PageEntries,
    PageWay,
    cut_runs,
    refuse_entries,
)
from attn_graph.lowering.cpu.sequences import (
    KeyPart,
    Lower,
    Places,
    Sizes,
    Span,
    Tensors,
    add_to_pages,
    block_keys,
    checked_table,
    cut_rows,
    dequantise_keys,
    ending_sides,
    expand_scales,
    gather_pages,
    is_separable,
    join_results,
    key_bytes,
    padded_step,
    repeat_rows,
    replace_lengths,
)
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import has_problem
from attn_graph.lowering.rates import CpuRates
from attn_graph.lowering.steps import Fixed, Step, lease_rooms
from attn_graph.machine.cache import latest
from attn_graph.machine.fitting import Layouts, Read, Shape, compile_layouts, find_reads
from attn_graph.machine.workspace import Buffer, Scratch, Views, Workspace
from attn_graph.masks.canonical import EVERYTHING, canonical_mask
from attn_graph.spec import (
    INF,
    MOST_INT32,
    TensorSpec,
    accumulator,
    dense_strides,
    memory_order,
)
from attn_graph.spec.dims import are_numbers

Rooms = Mapping[int, torch.Tensor]  # for gathered operands, by number
UNKNOWN = (MOST_INT32, MOST_INT32)  # extents of tensors that come later
MOST_PARTS = 2**10  # executables kept by a plan: for each pair of lengths, one for a block of keys


@final
@frozen(eq=False)
class Reading:
    """What a call reads on the host. groups: the sequences that run on pages; others: the numbers
    of those that run by themselves."""

    places: Places
    groups: Sequence[PageEntries]
    others: Sequence[int]

    def fits(self, extents: Sequence[int]) -> bool:
        """True if tensors have all rows and pages that it names. extents: as PackedRun has them."""
        (rows, keys), least = extents, self.places.least
        return rows >= least[0] and keys >= least[1]


@final
@frozen(eq=False)
class PackedRun:
    """Runs an equation on packed tensors. lying: of its operands. lower: of graphs of sequences.
    gives: True if statistics are returned or read, by more than the derivatives. rates: of the CPU,
    where PyTorch's fused kernel may run; else None."""

    eqn: Eqn
    lying: Lying
    lower: Lower
    gives: bool
    rates: CpuRates | None = None
    part_of: Callable[[Sizes, int, int], tuple[KeyPart, Executable]] = field(
        init=False, default=latest("make_part", MOST_PARTS)
    )

    @cached_property
    def op(self) -> Packed:
        op: Packed = self.eqn.op.packed
        return op

    @cached_property
    def node(self) -> Attention:
        """Its attention."""
        return self.op.attention

    @cached_property
    def takes(self) -> tuple[Role, ...]:
        """The operands of `op` within, and scales as those that they scale."""
        own = self.op.op.takes
        return (*own, *own[1:3] * self.op.scaled)

    @cached_property
    def results(self) -> tuple[Role, ...]:
        return self.op.op.gives

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """How its operands lie."""
        return self.lying.given

    @cached_property
    def most(self) -> dict[str, int]:
        """The most rows and keys of a sequence; the size of a padded side."""
        return self.lying.most

    @cached_property
    def ending(self) -> tuple[str, ...]:
        """See `ending_sides`."""
        return ending_sides(self.op)

    def place(self, operands: Tensors, extents: Sequence[int]) -> Places:
        """Raises PlanMismatchError for wrong starts, lengths and pages."""
        (where, read), entries = self.sources, self.op.entries(operands)
        ends = list[list[tuple[int, int]]]()
        for (side, most), extent in zip(self.most.items(), extents, strict=True):
            name = LENGTHS[side]
            if side in self.lying.sides:
                who, (starts, lengths) = name.split("_")[0], (operands[n] for n in where[side])
                ends.append(list_sequences(starts, lengths, extent, most, who))
            else:
                counts = operands[read[name]].tolist() if name in read else [most] * entries
                if name not in map(LENGTHS.get, where):  # of pages: checked with the table
                    require_fitting(name, counts, most)
                ends.append([(0, n) for n in counts])
        rows, keys = ends
        if not self.op.paged:
            return Places(rows, keys)
        seen = self.op.seen(dict(enumerate(operands)), [*self.most.values()])
        table, *ended = (operands[n] for n in where["keys"])
        used = checked_table((extents[1], self.lying.page), table, seen, *ended)
        return Places(rows, keys, seen, used.long())

    def require_all_rows(self, operands: Tensors) -> None:
        """Raise PlanMismatchError unless sequences take all rows of the sides that declare it."""
        (where, _) = self.sources
        for side in self.lying.full:
            starts, total = operands[where[side][0]], row_count(operands[PLACES[side]].shape)
            require_last(STARTS[side], starts, total)

    def extents(self, operands: Tensors) -> tuple[int, int]:
        """How many rows q has, and how many k, or how many pages. They matter for packed tensors
        and pools."""
        q, k = operands[0].shape, operands[1].shape
        return row_count(q), k[0] if self.op.paged else row_count(k)

    @cached_property
    def sources(self) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """The numbers of the operands that place each side, and of the mask's operands."""
        _, where = self.op.split(range(len(self.specs)))
        return where, self.node.slots.mask

    @cached_property
    def entries(self) -> int:
        return self.op.entries([spec.type for spec in self.specs])

    def span(self, places: Places, entry: int) -> Span:
        """The place of a sequence."""
        (row, q_length), (key, kv_length) = places.rows[entry], places.keys[entry]
        M, N = self.clip("rows", q_length), self.clip("keys", kv_length)
        span = Span(entry, row, key, Sizes(M, N, q_length, kv_length))
        if places.table is None or places.seen is None:
            return span
        used = -(-N // max(1, self.lying.page))
        return evolve(span, pages=places.table[entry, :used], seen=places.seen[entry])

    def clip(self, side: str, length: int) -> int:
        """How many rows or keys of a sequence of this length are read."""
        most = self.most[side]
        return min(max(length, 0), most) if side in self.ending else most

    # Few rows on pages

    @cached_property
    def by_pages(self) -> PageWay | None:
        """The way of few rows on pages, if there is one."""
        if self.rates is None or refuse_entries(self.lying) is not None:
            return None
        return PageWay(self.lying, self.rates, self.gives)

    def read(self, operands: Tensors, extents: Sequence[int] = UNKNOWN) -> Reading:
        """What a call reads on the host. Of q, k and v it needs only the `extents`: a call with
        fewer rows or pages than are read here has to read again."""
        places = self.place(operands, extents)
        groups, others = self.group(places, operands)
        return Reading(places, groups, others)

    def group(self, places: Places, operands: Tensors) -> tuple[list[PageEntries], list[int]]:
        """The sequences that run on pages, and the others."""
        way, seen, by_rows = self.by_pages, places.seen, dict[int, list[int]]()
        if way is None or seen is None or places.table is None:
            return [], [*range(len(places.rows))]
        for b, (_, length) in enumerate(places.rows):
            rows = length if "rows" in self.ending else self.most["rows"]
            if rows > 0:
                by_rows.setdefault(rows, []).append(b)
        counts, groups, others = [*map(way.used, seen)], list[PageEntries](), list[int]()
        for rows, every in by_rows.items():
            most = way.count_pages(rows)
            own = [b for b in every if counts[b] <= most]
            others += [b for b in every if counts[b] > most]
            for some in cut_runs(own, [counts[b] for b in own], way.most_parts(rows)):
                at = [places.rows[b][0] for b in some], [seen[b] for b in some]
                groups.append(way.entries(some, rows, *at, operands, places.table))
        return groups, sorted(others)

    def fix(self, operands: Sequence[torch.Tensor | None]) -> Reading | None:
        """What calls read of the operands given in advance; None unless these are all that calls
        read on the host."""
        node, op = self.node, self.op
        later = {0, 1, 2, *op.scales(range(len(self.specs))).values()}
        if node.slots.sinks is not None:
            later.add(node.slots.sinks)
        missing = {n for n, x in enumerate(operands) if x is None} - later
        if missing or op.is_gradient or not (op.sides or op.paged):
            return None
        return self.read(operands)  # type: ignore[arg-type]  # none of those that it reads is None

    # A sequence as a graph

    def make_part(self, sizes: Sizes, entry: int, start: int) -> tuple[KeyPart, Executable]:
        """The keys from `start` on, and their run, in sequences of these sizes. entry: the number
        in the batch, if it matters."""
        op, reads = self.within(sizes, entry)
        keys, piece = range(start, min(start + self.block, sizes.keys)), None
        if len(keys) < sizes.keys:
            node, H = op.attention, self.specs[0].shape[1]
            box = Box(range(1), range(H), range(sizes.rows), keys, (1, H, sizes.rows, sizes.keys))
            piece = move_attention(Eqn(node, tuple(range(len(node.ranks))), ()), box)
        part = KeyPart(op, reads, piece)
        pages = None
        if self.op.paged:
            count = -(-sizes.keys // max(1, self.specs[1].shape[1]))
            pages = torch.empty(count, dtype=torch.int64, device="meta")
        views = self.views(part, self.metas, Span(0, 0, 0, sizes, pages), {}, start)
        b = Builder(trusts=True)
        specs = map(TensorSpec.like, part.operands(views))
        results = b.emit(part.own, *(b.input(f"x{n}", x) for n, x in enumerate(specs)))
        outputs = results[:1] if self.saves and piece is None else results
        return part, self.lower(b.graph(*outputs))

    @property
    def saves(self) -> bool:
        """True if statistics are for derivatives alone: they may be of rounded scores."""
        return not (self.op.is_gradient or self.gives)

    @cached_property
    def block(self) -> int:
        """The most keys read at a time."""
        blocks = (self.op.paged or self.op.scaled) and has_problem(self.op.op)
        return block_keys(self.lying) if blocks else max(1, self.most["keys"])

    @cached_property
    def metas(self) -> list[torch.Tensor]:
        """Its operands without memory."""
        metas = [
            torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
            for spec in self.specs
        ]
        return expand_scales(self.op, metas)

    def views(
        self, part: KeyPart, operands: Tensors, span: Span, rooms: Rooms, start: int
    ) -> Tensors:
        """The operands of a sequence's op, with the keys of a part. k and v are dequantised."""
        own, takes = self.keys_of(part, span, start), [self.takes[n] for n in part.reads]
        cut = [
            self.cut(
                operands[n],
                role,
                own if role.side == "keys" else span,
                rooms.get(n),
                self.shares.get(n, 1),
            )
            for n, role in zip(part.reads, takes, strict=True)
        ]
        return dequantise_keys(cut, self.op.scaled)

    def keys_of(self, part: KeyPart, span: Span, start: int) -> Span:
        """The place of a part's keys, from `start` on."""
        if part.piece is None:
            return span
        return span.of_keys(range(start, start + len(part.piece.box.keys)), self.lying.page)

    def within(self, sizes: Sizes, entry: int) -> tuple[Op, tuple[int, ...]]:
        """The op of a sequence, and the operands it reads."""
        node, op, mask = self.node, self.op.op, None
        if node.dropout:
            b, *place = node.origin or (0, 0, 0, 0, self.specs[0].shape[1])
            node = evolve(node, origin=(b + entry, *place))
        if node.mask is not None:
            numbers = replace_lengths(node.mask, sizes, self.ending, self.most)
            alike = numbers == EVERYTHING
            mask = None if alike else canonical_mask(numbers, sizes.rows, sizes.keys)
        kept = node.slots_under(mask)
        rest = range(len(node.takes), len(op.takes) + 2 * self.op.scaled)
        return with_operands(op, evolve(node, mask=mask), kept), (*kept, *rest)

    @cached_property
    def shares(self) -> dict[int, int]:
        """How many rows of k and of v have one scale, by the number of the operand of scales."""
        first = len(self.op.op.takes)
        return {first + n: rows or 1 for n, (rows, _) in enumerate(self.lying.blocks)}

    def cut(
        self, x: torch.Tensor, role: Role, span: Span, room: torch.Tensor | None = None,
        share: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        """The view of a tensor for one sequence, with one batch entry.

        room: for gathering keys in pages. share: so many rows have one of x, which is repeated.
        """
        sizes, entry = span.sizes, slice(span.entry, span.entry + 1)
        if not role.side:
            most = {"b": 1, "h": self.specs[0].shape[1], "i": sizes.rows, "j": sizes.keys}
            full = dict(zip(role.axes, map(slice, role.shape(most)), strict=True)) | {"b": entry}
            broadcasts = role.data is not None and role.data.broadcasts
            whole = [broadcasts and n == 1 for n in x.shape]
            pairs = zip(role.axes, whole, strict=True)
            return x[tuple(slice(None) if all_ else full[axis] for axis, all_ in pairs)]
        first, n = (span.row, sizes.rows) if role.side == "rows" else (span.key, sizes.keys)
        if role.side == "keys" and span.pages is not None:
            gathered = gather_pages(x, span.pages[None], room)[:, :, : -(-n // share)]
            gathered = repeat_rows(gathered, share, 0, n)
            if span.seen is not None:
                gathered[:, :, : span.seen.start] = 0.0
                gathered[:, :, span.seen.stop :] = 0.0
            return gathered
        begin, end = first // share, -(-(first + n) // share)
        if role.side in self.lying.sides:
            rows = cut_rows(x, begin, end - begin)
        else:
            rows = x[entry, :, begin:end]
        return repeat_rows(rows, share, first - begin * share, n)

    # A call

    @cached_property
    def rooms(self) -> dict[int, Buffer]:
        """Memory for gathering keys in pages, by the number of the operand."""
        if not self.op.paged:
            return {}
        (_, P, G, _), keys = self.specs[1].shape, self.at_once["keys"]
        if self.by_pages is not None:  # of many sequences at once
            keys = max(keys, min(self.block, keys * int(self.entries)))
            keys = max(keys, self.by_pages.width * P)
        rows = -(-keys // max(1, P)) * P * G
        pools = [n for n, side in enumerate(self.op.op.operand_sides) if side == "keys"]
        return {n: Buffer((rows * self.specs[n].shape[3],), self.specs[n].dtype) for n in pools}

    def run(
        self, operands: Tensors, rooms: Rooms, reading: Reading | None = None
    ) -> list[torch.Tensor]:
        return self.run_sequences(operands, rooms, self.results, reading)

    def infer(
        self, operands: Tensors, rooms: Rooms, reading: Reading | None = None
    ) -> list[torch.Tensor]:
        return self.run_sequences(operands, rooms, self.results[:1], reading)

    def run_sequences(
        self, operands: Tensors, rooms: Rooms, wanted: tuple[Role, ...], reading: Reading | None
    ) -> list[torch.Tensor]:
        """The first results: the wanted ones."""
        extents = self.extents(operands)
        self.require_all_rows(operands)
        if reading is None or not reading.fits(extents):
            reading = self.read(operands, extents)
        operands, others = expand_scales(self.op, operands), [*reading.others]
        results = self.new_results(reading.places, operands, wanted, rooms)
        for entries in reading.groups:
            assert self.by_pages is not None
            others += self.by_pages.run(entries, operands, rooms, results)
        for b in others:
            span = self.span(reading.places, b)
            if span.sizes.keys <= self.block:
                self.run_whole(span, operands, results, rooms)
            else:
                run = self.pull if self.op.is_gradient else self.attend
                run(span, operands, results, rooms)
        return [x.to(due.dtype) for x, due in zip(results, self.eqn.outs, strict=False)]

    def parts(self, span: Span) -> Iterator[tuple[int, KeyPart, Executable]]:
        """Blocks of keys, each with its first key."""
        entry, sizes = span.entry if self.node.dropout else 0, span.sizes
        alike = self.alike(sizes)
        for start in range(0, max(1, sizes.keys), self.block):
            full = start + self.block < sizes.keys
            own = (sizes, entry, start) if alike is None or not full else (alike, entry, 0)
            yield start, *self.part_of(*own)

    def alike(self, sizes: Sizes) -> Sizes | None:
        """The sizes that plan all full blocks, one key more than a block; None if a step depends on
        the position of a key. A token more plans the last block alone."""
        node, first = self.node, evolve(sizes, keys=self.block + 1, kv_length=self.block + 1)
        capped = all(isinstance(m, SoftCap) for m in node.modifiers) and not node.dropout
        if sizes.keys <= self.block or not capped:
            return None
        masks = [self.within(x, 0)[0].attention.mask for x in (sizes, first)]
        return first if masks == [None, None] else None

    def run_whole(self, span: Span, operands: Tensors, results: Tensors, rooms: Rooms) -> None:
        ((start, part, run),) = self.parts(span)
        views = self.views(part, operands, span, rooms, start)
        if self.saves:
            made = run.infer(*views)[0] if len(results) == 1 else run.run(*views)[1]
        else:
            made = run.run(*views)[0]
        self.write_each(results, span, made)

    def write_each(self, results: Tensors, span: Span, made: Tensors) -> None:
        for x, role, y in zip(results, self.results, made, strict=False):
            self.write(x, role, span, y)

    def write(self, x: torch.Tensor, role: Role, span: Span, y: torch.Tensor) -> None:
        """Write a sequence's part of a result, or add it to a sum."""
        if role.side == "keys" and span.pages is not None:
            add_to_pages(x, y, span.pages)
        else:
            own = self.cut(x, role, span)
            own.copy_(y) if role.side else own.add_(y)

    def attend(self, span: Span, operands: Tensors, results: Tensors, rooms: Rooms) -> None:
        """Join the results of blocks of keys."""
        made, sinks, node = list[torch.Tensor](), None, self.node
        for start, part, run in self.parts(span):
            views = self.views(part, operands, span, rooms, start)
            more, _ = run.run(*part.operands(views))
            if made:
                join_results(node.stats, made, more)
            else:
                made = [more[0].to(more[1].dtype), *more[1:]]
                sinks = part.op.split(views).sinks
        if sinks is not None:
            sink_(made[0], made[1 + node.stats.index("lse")], sinks)
        self.write_each(results, span, made)

    def pull(self, span: Span, operands: Tensors, results: Tensors, rooms: Rooms) -> None:
        """Add the gradients of blocks of keys. Those of k and v are of one block each."""
        lies = {role.like: (x, role) for x, role in zip(results, self.results, strict=True)}
        totals, homes = dict[int, torch.Tensor](), dict[int, tuple[torch.Tensor, Role]]()
        for start, part, run in self.parts(span):
            assert part.piece is not None
            grad: AttentionGrad = part.op
            views = self.views(part, operands, span, rooms, start)
            if not totals:
                wide = accumulator(views[0].dtype)
                wanted = [n for n, wants in enumerate(grad.wants) if wants and n not in (1, 2)]
                totals = {n: torch.zeros_like(views[n], dtype=wide) for n in wanted}
                if (place := wanted_sinks(grad)) is not None:
                    totals[place] = sink_gradient_of(grad, views[: len(grad.takes)])
                homes = {n: lies[part.reads[n]] for n in totals}
            made, _ = run.run(*part.operands(views))
            axes = {feed.source: feed.axes for feed in part.piece.feeds}
            for n, y in zip(part.gives, made, strict=True):
                if n in totals:
                    part.piece.box.cut(totals[n], axes.get(n, "")).add_(y)
                else:
                    self.write(*lies[part.reads[n]], self.keys_of(part, span, start), y)
        for n, y in totals.items():
            self.write(*homes[n], span, y)

    def new_results(
        self, places: Places, operands: Tensors, wanted: tuple[Role, ...], rooms: Views
    ) -> list[torch.Tensor]:
        """Memory for results, the caller's if given: 0 in sums and in rows of no sequence, -inf in
        statistics."""
        device, covers = operands[0].device, dict[str, bool]()
        for side, own, ends in zip(self.most, operands, (places.rows, places.keys), strict=False):
            whole = side not in self.ending
            count = self.most[side] * len(ends) if whole else sum([n for _, n in ends])
            pools = side == "keys" and self.op.paged
            covers[side] = not pools and count == self.lying.rows_of(own, side)
        room: list[torch.Tensor] = []
        given = {name: rooms[n] for name in self.op.names if (n := room_name(name)) in rooms}
        lies = zip(self.shapes_of(operands), self.layouts, strict=True)
        for role, (layout, spec) in zip(wanted, lies, strict=False):
            x = given.get(role.name)
            if x is None or x.dtype != spec.dtype:
                x = torch.empty_strided(*layout, dtype=spec.dtype, device=device)
            if not covers.get(role.side, False):
                x.fill_(-INF if self.op.hides(role.name) else 0.0)
            room.append(x)
        return room

    @cached_property
    def probes(self) -> tuple[Executable, ...]:
        """Runs of the longest sequences, and of other proportions: they take other tiles, and
        planning each finds the largest memory."""
        M, N = self.most["rows"], self.most["keys"]
        pairs = (M, N), (M // 2 + 1, N), (M, N // 2 + 1), (min(1, M), N)
        fits = [(m, n) for m, n in pairs if m <= M and n <= N]
        return tuple(self.part_of(Sizes(m, n, m, n), 0, 0)[1] for m, n in fits)

    @property
    def held(self) -> int:
        """Bytes of the longest sequence's results, of sums in wider precision, of dequantised keys,
        and of the joined results of blocks."""
        sums = sum(x.type.bytes for x in self.layouts if x.dtype != self.specs[0].dtype)
        if self.op.scaled:  # in float32, times their scales, and rounded
            wide = 3 + any(map(any, self.lying.blocks))  # scales of blocks are as many as numbers
            sums += wide * self.at_once["keys"] * key_bytes(self.lying)
        if self.at_once["keys"] < self.most["keys"]:
            q = self.specs[0]
            rows = self.most["rows"] * q.shape[1] * (q.shape[-1] + 1)
            sums += 2 * accumulator(q.dtype).itemsize * rows
        return sums + sum(
            spec.type.bytes // max(1, self.lying.rows_of(spec, role.side)) * self.at_once[role.side]
            for spec, role in zip(self.layouts, self.results, strict=True)
            if role.side
        )

    @property
    def held_by_pages(self) -> int:
        """Bytes of the sequences that run on pages."""
        way, most = self.by_pages, self.most["rows"]
        if way is None:
            return 0
        few = [2**n for n in range(most.bit_length()) if "rows" in self.ending and 2**n < most]
        return way.held(int(self.entries), [*few, most], self.rooms[1].shape[0])

    @cached_property
    def at_once(self) -> dict[str, int]:
        """The most rows of a side held at a time."""
        return self.most | {"keys": min(self.block, self.most["keys"])}

    @property
    def summary(self) -> str:
        whole, op = "; ".join(self.probes[0].notes), self.op
        reads = "dequantised" if op.scaled else "gathered"
        gathers = f", {self.at_once['keys']} keys {reads} at a time" * (op.paged or op.scaled)
        few = "few rows on the pages of many sequences in one call; more rows: "
        return (
            f"{few * (self.by_pages is not None)}"
            f"each of {self.entries} sequences by itself{gathers}, its memory estimated; "
            f"the longest: {whole}"
        )

    def shapes_of(self, operands: Sequence[torch.Tensor]) -> Sequence[tuple[Shape, Shape]]:
        """Shape and strides of the results of these operands, with named sizes filled in."""
        reads, layouts = self.named
        return layouts(*[(operands[n].shape[axis] - more) // by for n, axis, by, more in reads])

    @cached_property
    def named(self) -> tuple[list[Read], Layouts]:
        """The reads of named sizes, and the layouts of results by these."""
        reads = dict(find_reads(self.specs))
        return [*reads.values()], compile_layouts([*reads], self.layouts)

    @cached_property
    def layouts(self) -> tuple[TensorSpec, ...]:
        """The specs of the results: gradients like their operands, o like q. Sums are wider."""
        wide, specs = accumulator(self.specs[0].dtype), []
        for role, type_ in zip(self.results, self.eqn.outs, strict=True):
            order = None if role.leader is None else memory_order(self.specs[role.leader])
            sums = not role.side or (role.side == "keys" and self.op.paged)
            dtype = wide if sums else type_.dtype
            specs.append(TensorSpec(type_.shape, dtype, dense_strides(type_.shape, order)))
        return tuple(specs)


def runs_any_size(eqn: Eqn, specs: Sequence[TensorSpec]) -> bool:
    """True if one PackedRun serves all sizes with names: rows of packed tensors, sequences, and
    pages with lengths. Strides of statistics [H,T] are read off the tensors."""
    op: Packed | None = eqn.op.packed
    if op is None or not is_separable(op) or (op.paged and not op.ended):
        return False
    padded = [
        x for x, side in zip(specs[:2], op.op.operand_sides, strict=False) if side not in op.sides
    ]
    numbers = are_numbers(*(n for x in padded for n in x.shape[1:]))
    return numbers and all(are_numbers(*x.strides) for x in specs if len(x.shape) != 2)


def any_packed_step(run: PackedRun, workspace: Workspace) -> Step:
    """Sequences one by one, without their memory."""
    lease = partial(lease_rooms, scratch=Scratch(run.rooms), workspace=workspace)

    def fix(operands: Sequence[torch.Tensor | None]) -> Fixed | None:
        reading = run.fix(operands)
        if reading is None:
            return None
        return lease(partial(run.run, reading=reading)), lease(partial(run.infer, reading=reading))

    infer = lease(run.infer) if run.saves else None
    return Step(lease(run.run), infer=infer, writes=True, fix=fix)


def packed_step(run: PackedRun, workspace: Workspace) -> Step:
    if not is_separable(run.op):
        return padded_step(run.lying, run.layouts, run.lower, workspace, run.require_all_rows)
    most = max(probe.workspace for probe in run.probes) + Scratch(run.rooms).bytes
    alone = max(probe.temporary for probe in run.probes) + run.held
    temporary = max(alone, run.held_by_pages)
    block = max(probe.block for probe in run.probes)
    if run.by_pages is not None:
        block = max(block, run.by_pages.block)
    step = any_packed_step(run, workspace)
    return evolve(step, workspace=most, temporary=temporary, note=run.summary, block=block)
