"""Few rows of sequences against keys in pages: some pages of a sequence are an entry of one batch.

PyTorch's fused kernel runs once for the entries of many sequences, with an addend that hides all
but a sequence's own keys. Its results are joined by lse. No length is in a plan, and pages that
fill most of a range of the pool are read in place. Products of gathered pages are in the kernel's
place under soft caps, for v of another head size, and in bfloat16, which the kernel packs before it
multiplies: that takes longer than a few rows do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import inf, prod
from typing import final

import torch
from attrs import evolve, field, frozen

from attn_graph.ir.attention import SAVED, Attention
from attn_graph.ir.modifiers import change_
from attn_graph.ir.storage.packed import run_one
from attn_graph.ir.storage.scaling import Dequantise
from attn_graph.kernels import fused_cpu
from attn_graph.kernels.products import FAR, softmax_
from attn_graph.lowering.cpu.absent import copy_alike, is_finite
from attn_graph.lowering.cpu.fused_slots import fill_addend
from attn_graph.lowering.cpu.sequences import gather_pages, place_pages
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.rates import CpuRates
from attn_graph.masks import And, Band, KeyLengths, Prefix, QueryLengths, flatten_join
from attn_graph.masks.places import Place
from attn_graph.spec import IN_PAIRS, INF, TensorSpec, accumulator

Tensors = Sequence[torch.Tensor]
STRIPS = (Band, Prefix, KeyLengths, QueryLengths)  # masks of which a row sees neighbouring keys
NOWHERE = Place(0, 0, 0, 0, 1, 1, 1)  # soft caps do not ask where a score is
Rooms = Mapping[int, torch.Tensor]  # for gathered pages, by the number of the operand
PARTS_BYTES = 2**23  # of the results of pages, before they are joined
PACKS = 1e-6  # seconds: to begin a head of a page, where the kernel packs bfloat16
CLEARED = 4  # parts of a room copied at once, where rows that nobody has hold NaN or Inf
ALONE = 8  # product calls: a sequence by itself, planned anew for each length
ENTRY = 128  # keys of gathered pages in an entry, or of one page
ALIGNED = 4  # elements: rows that begin at multiples of them have equal bits wherever they lie


@final
@frozen(eq=False)
class PageEntries:
    """Sequences with equally many rows, and their pages.

    own: the sequences, by number. rows: how many each has. lines: these in a packed q, [B * rows].
    pages [n,width]: the pages of each run, the last one again where a sequence has no more. owner:
    of each run its sequence, counted among these. span: the range of pages read in place, if one
    is; a run is one page then.

    Entries of the kernel are the runs, or the pages of the span. reads, local: of each entry its
    rows, as `lines` has them, else the sequence by number; and which of its pages is the first.
    seen: the first row that counts, and the end. addend: of scores. unseen: rows without a key, for
    the kernel. placed: the places of the pages, by shape and strides of a pool.
    """

    own: torch.Tensor
    rows: int
    lines: torch.Tensor | None
    owner: torch.Tensor
    pages: torch.Tensor
    span: range | None
    reads: torch.Tensor
    local: torch.Tensor
    seen: tuple[torch.Tensor, torch.Tensor]
    addend: torch.Tensor | None
    unseen: torch.Tensor | None
    placed: dict[tuple[object, ...], torch.Tensor] = field(init=False, factory=dict)

    def places(self, pool: torch.Tensor) -> torch.Tensor:
        """`place_pages` in a pool. Pools of all layers of a step mostly lie alike."""
        lies = (pool.shape, pool.stride())
        places = self.placed.get(lies)
        if places is None:
            places = self.placed[lies] = place_pages(pool, self.pages)
        return places


@final
@frozen(eq=False)
class PageWay:
    """Runs few rows of sequences on pages.

    gives: True if statistics are returned or read.
    """

    lying: Lying
    rates: CpuRates
    gives: bool

    @cached_property
    def node(self) -> Attention:
        node: Attention = self.lying.op.attention
        return node

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """How its operands lie."""
        return self.lying.given

    @cached_property
    def sinks(self) -> int | None:
        """The number of the sinks."""
        return self.node.slots.sinks

    @cached_property
    def heads(self) -> tuple[int, int]:
        """G, and query heads for each."""
        G = self.specs[1].shape[2]
        return G, self.specs[0].shape[1] // G

    @cached_property
    def adds(self) -> bool:
        """True if the kernel could run: all modifiers are part of the addend."""
        return fits_kernel(self.node, self.specs)

    @cached_property
    def factors(self) -> torch.dtype:
        """The dtype of the operands of the kernel, or of products."""
        dtype = self.specs[0].dtype
        return dtype if dtype == torch.bfloat16 and self.adds else accumulator(dtype)

    @cached_property
    def by_kernel(self) -> bool:
        """True if the kernel runs, and not products. Those of bfloat16 have coarser scores, which
        statistics may not be of."""
        rounds = self.factors == torch.bfloat16 and self.rates.native_half
        return self.adds and (self.gives or not rounds)

    @cached_property
    def in_place(self) -> bool:
        """True if the kernel may read the pools as they lie."""
        return self.by_kernel and all(
            x.dtype == self.factors and x.unit_last and not any(s % ALIGNED for s in x.strides[:3])
            for x in self.specs[1:3]
        )

    @cached_property
    def width(self) -> int:
        """How many pages an entry has."""
        return 1 if self.in_place else max(1, ENTRY // max(1, self.lying.page))

    def used(self, seen: range) -> int:
        """How many pages a sequence has in entries. seen: its keys that count."""
        page = self.lying.page
        pages = -(-seen.stop // page) - seen.start // page if seen else 0
        return -(-pages // self.width) * self.width

    @cached_property
    def sees_strip(self) -> bool:
        """True if the one row of a sequence sees all its keys in `seen` and no others: nothing but
        bands, prefixes and lengths hides keys, and no modifier adds to scores."""
        node = self.node
        parts = () if node.mask is None else flatten_join(And, node.mask)
        return all(isinstance(part, STRIPS) for part in parts) and not (
            node.modifiers and self.adds
        )

    # Prices

    @cached_property
    def numbers(self) -> int:
        """Of k and v in a page."""
        return sum(prod(x.shape[1:]) for x in self.specs[1:3])

    @cached_property
    def copy_seconds(self) -> float:
        """To gather a page."""
        return self.numbers * self.specs[1].dtype.itemsize / self.rates.copies

    @cached_property
    def begin_seconds(self) -> float:
        """To begin a page, apart from its rows."""
        packs = self.factors == torch.bfloat16 and self.rates.native_half and self.by_kernel
        return PACKS * self.heads[0] if packs else 0.0

    @cached_property
    def read_seconds(self) -> float:
        """To read a page."""
        return self.numbers / self.rates.kernel_reads + self.begin_seconds

    def count_pages(self, rows: int) -> float:
        """The most pages of a sequence of so many rows, if this way is cheaper than a run of its
        own: that copies its pages and is planned; pages begin anew, and have results of their own.
        """
        rates, lines = self.rates, self.specs[0].shape[1] * rows
        results = lines * rates.kernel_row + self.part_bytes(rows) / rates.copies
        more = results + self.begin_seconds - self.copy_seconds
        return min(self.most_parts(rows), ALONE * rates.product_call / more if more > 0 else inf)

    def most_parts(self, rows: int) -> int:
        """How many pages are read before their results are joined."""
        return PARTS_BYTES // self.part_bytes(rows)

    def part_bytes(self, rows: int) -> int:
        """Bytes of a page's queries and results."""
        H, D = self.specs[0].shape[1], max(x.shape[-1] for x in self.specs[:3])
        wide = accumulator(self.factors).itemsize
        return max(1, rows * H * (D * (self.factors.itemsize + wide) + 4 * wide))

    def held(self, batch: int, rows: Sequence[int], room: int) -> int:
        """Bytes of queries, results and addends of the most pages at once, and of pages that are
        converted. rows: of sequences, some numbers of them. room: numbers of gathered pages."""
        wide, (G, r), node, most = accumulator(self.factors).itemsize, self.heads, self.node, 0
        longest = self.used(range(self.lying.most["keys"]))
        for m in rows:
            lines = m * r if node.modifiers or node.mask not in (None, KeyLengths()) else 1
            places = (G if node.modifiers else 1) * lines * self.lying.page
            each = self.part_bytes(m) + places * (wide + torch.int64.itemsize)
            pages = min(batch * min(longest, self.count_pages(m)), self.most_parts(m))
            scores = 0 if self.by_kernel else 3 * room // self.specs[1].shape[-1] * m * r * wide
            most = max(most, int(pages) * each + scores)
        converts = self.specs[1].dtype != self.factors
        copies = (
            self.in_place / CLEARED + converts + (not self.by_kernel) + 3 * bool(self.lying.scales)
        )
        return most + int(2 * copies * room * wide) if most else 0

    @property
    def block(self) -> int:
        """Bytes that each thread of PyTorch's kernel works in."""
        if not self.by_kernel:
            return 0
        lines = self.heads[1] * self.lying.most["rows"]
        return fused_cpu.block_bytes(lines, self.lying.page, self.specs[0].shape[-1], self.factors)

    # Once a step

    def entries(
        self, sequences: Sequence[int], rows: int, starts: Sequence[int], seen: Sequence[range],
        operands: Tensors, table: torch.Tensor,
    ) -> PageEntries:  # fmt: skip
        """sequences: their numbers, of `rows` each. starts, seen: of each its first row, and the
        keys that count. table: checked."""
        (P, W), own = (self.lying.page, self.width), torch.tensor(sequences, device="cpu")
        bounds = [(keys.start, keys.stop) for keys in seen]
        first, stop = torch.tensor(bounds, device="cpu").unbind(1)
        behind = torch.where(stop > first, (stop + P - 1) // P, first // P)
        count = (behind - first // P + W - 1) // W
        owner = torch.repeat_interleave(ordinals(own.shape[0]), count)
        before = (count.cumsum(0) - count)[owner]
        local = (ordinals(owner.shape[0]) - before) * W + (first // P)[owner]
        last = (behind - 1)[owner, None]
        pages = table[own[owner, None], torch.minimum(local[:, None] + ordinals(W), last)]
        lines = None
        if "rows" in self.lying.sides:
            lines = (torch.tensor(starts, device="cpu")[:, None] + ordinals(rows)).flatten()
        span, readers = self.span_of(pages), owner
        if span is not None:
            reading = torch.zeros_like(ordinals(len(span)))
            reading[pages[:, 0] - span.start] = ordinals(pages.shape[0])
            readers, local = owner[reading], local[reading]
        ends = first[readers], stop[readers]
        reads = own[readers]
        addend = self.addend(reads, local, ends, rows, operands)
        unseen = None
        if addend is not None and self.by_kernel:
            unseen = fused_cpu.find_unseen(addend)
        if lines is not None:
            reads = lines[readers] if rows == 1 else lines.view(-1, rows)[readers]
        return PageEntries(own, rows, lines, owner, pages, span, reads, local, ends, addend, unseen)

    def span_of(self, pages: torch.Tensor) -> range | None:
        """The range of these pages, if to read all of it in place takes less time than to gather
        them. A page named twice is gathered."""
        count = pages.shape[0]
        if not (self.in_place and count):
            return None
        pages = pages[:, 0]
        low, high = (int(x) for x in pages.aminmax())
        if (high + 1 - low) * self.read_seconds > count * (self.read_seconds + self.copy_seconds):
            return None
        times = torch.bincount(pages - low)
        return range(low, high + 1) if int(times.max()) == 1 else None

    def addend(
        self, entries: torch.Tensor, local: torch.Tensor, ends: tuple[torch.Tensor, torch.Tensor],
        rows: int, operands: Tensors,
    ) -> torch.Tensor | None:  # fmt: skip
        """What is added to the scores of entries, -inf at keys that a row does not see; None if
        nothing is. entries: of each its sequence, by number in the batch. ends: as `seen`."""
        node, (G, r), P = self.node, self.heads, self.lying.page
        plain = node.mask is None and not (node.modifiers and self.adds)
        if plain and self.width == 1:
            return None
        hidden = self.outside(local, ends)[:, None, None]
        if plain or (rows == 1 and self.sees_strip):
            return torch.zeros(hidden.shape, dtype=accumulator(self.factors)).masked_fill_(
                hidden, -INF
            )
        given, line = node.split(operands[: len(node.takes)]), ordinals(r * rows)
        keys = self.lying.most["keys"]
        at = Place(
            entries.view(-1, 1, 1, 1),
            (ordinals(G) * r).view(1, -1, 1, 1) + (line // rows).view(1, 1, -1, 1),
            (line % rows).view(1, 1, -1, 1),
            # no key of the last pages named again is read
            ((local * P).view(-1, 1, 1, 1) + ordinals(hidden.shape[-1])).clamp_(max=keys - 1),
            G * r,
            self.lying.most["rows"],
            keys,
            # beyond int32 if the bounds of a band are added to lengths
            {name: x.long() if x.ndim == 1 else x for name, x in given.mask.items()},
        )
        shape: Sequence[int] = (entries.shape[0], G, r * rows, hidden.shape[-1])
        if not self.adds:  # soft caps do not
            node = evolve(node, modifiers=())
        if not node.modifiers:
            assert node.mask is not None
            keep = torch.as_tensor(node.mask.keep(at))
            shape = *((1,) * (4 - keep.ndim) + keep.shape)[:3], hidden.shape[-1]
        room = torch.empty(shape, dtype=accumulator(self.factors), device="cpu")
        mixed = node.mask is not None
        addend = fill_addend(room, node, given.modifiers, at, mixed)
        return addend if self.width == 1 else addend.masked_fill(hidden, -INF)

    # A call

    def run(
        self, entries: PageEntries, operands: Tensors, rooms: Rooms, results: Tensors
    ) -> Sequence[int]:
        """Write the results of the sequences, o or o and lse. Returns the numbers of those to run
        by themselves: an lse is too coarse to join pages by it."""
        parts = self.attend(entries, operands, rooms)
        o, lse = self.join(entries, operands, *parts)
        if not (self.lying.finite or is_finite(o)):  # perhaps by rows that nobody has
            parts = self.attend(entries, operands, rooms, True)
            o, lse = self.join(entries, operands, *parts)
        self.write(entries, results, o, lse)
        if not lse.numel() or torch.linalg.vector_norm(lse, INF).item() <= FAR:
            return []
        far = (lse.abs() > FAR).logical_and_(self.sees(entries, parts[1])).flatten(1).any(1)
        return [b for b, is_far in zip(entries.own.tolist(), far.tolist(), strict=True) if is_far]

    def attend(
        self, entries: PageEntries, operands: Tensors, rooms: Rooms, clear: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o [n,G,R,E] and lse [n,G,R] of each run, in the order of `pages`. clear: True reads 0 in
        rows that nobody has as keys."""
        scale, made = self.node.scale, list[tuple[torch.Tensor, torch.Tensor]]()
        q = self.queries(entries, operands[0])
        for part, k, v in self.keys(entries, operands, rooms, clear):
            addend, unseen = entries.addend, entries.unseen
            if addend is not None and addend.shape[0] > 1:
                addend = addend[part]
                unseen = unseen if unseen is None else unseen[part]
            if self.by_kernel:
                made.append(fused_cpu.attend(q[part], k, v, scale, False, addend, unseen))
            else:
                made.append(attend_by_products(self.node, q[part], k, v, addend))
        if not made:
            lse = q.new_zeros(q.shape[:3], dtype=accumulator(q.dtype))
            return q.new_zeros(0, *q.shape[1:3], self.specs[2].shape[3]), lse
        del q  # else it would need room beside copies of the results
        x, lse = made[0] if len(made) == 1 else map(torch.cat, zip(*made, strict=True))
        if entries.span is None:
            return x, lse
        places = entries.pages[:, 0] - entries.span.start
        return x.index_select(0, places), lse.index_select(0, places)

    def queries(self, entries: PageEntries, q: torch.Tensor) -> torch.Tensor:
        """The rows of each entry, [n,G,R,D]: of each query head of a group in turn."""
        G, r = self.heads
        if entries.lines is None:
            own = q[:, :, : entries.rows].index_select(0, entries.reads)
        elif entries.rows == 1:
            own = q.index_select(0, entries.reads)
        else:
            own = q[entries.reads].transpose(1, 2)
        return own.reshape(own.shape[0], G, r * entries.rows, q.shape[-1]).to(self.factors)

    def keys(
        self, entries: PageEntries, operands: Tensors, rooms: Rooms, clear: bool
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Runs of entries, with their k and v [n,G,S,D]; gathered ones fit in the rooms."""
        total, span = entries.local.shape[0], entries.span
        step = rooms[1].numel() // max(1, self.width * prod(self.specs[1].shape[1:]))
        if span is not None:
            step = max(1, step // CLEARED) if clear else total
        scales = self.lying.op.packed.scales(operands)
        for start in range(0, total, max(1, step)):
            part, pair = slice(start, start + step), list[torch.Tensor]()
            for n in (1, 2):
                if span is not None:
                    x = operands[n][span.start : span.stop][part].transpose(1, 2)
                    x = copy_alike(x) if clear else x
                else:
                    pages, places = entries.pages[part], entries.places(operands[n])[part]
                    x = gather_pages(operands[n], pages, rooms[n], places)
                if n in scales:
                    scale = gather_pages(scales[n], entries.pages[part])
                    x = run_one(Dequantise(), x, scale, operands[0])
                x = x.to(self.factors)
                pair.append(self.cleared(x, entries, part) if clear else x)
            yield part, pair[0], pair[1]

    def cleared(self, x: torch.Tensor, entries: PageEntries, part: slice) -> torch.Tensor:
        """x [n,G,S,D] with 0 in rows outside the keys of their sequence."""
        ends = entries.seen[0][part], entries.seen[1][part]
        return x.masked_fill_(self.outside(entries.local[part], ends)[:, None, :, None], 0.0)

    def outside(self, local: torch.Tensor, ends: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Booleans [n,width P], true for rows of entries outside the keys in `seen`."""
        j = local[:, None] * self.lying.page + ordinals(self.lying.page * self.width)
        first, stop = (edge[:, None] for edge in ends)
        return (j < first) | (j >= stop)

    def join(
        self, entries: PageEntries, operands: Tensors, x: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o [B,G,R,E] and lse [B,G,R] of the sequences, from those of their entries, added in the
        order of their keys."""
        G, r = self.heads
        shape, owner = (entries.own.shape[0], G, r * entries.rows), entries.owner
        w = lse.exp()  # of an lse within FAR no largest one has to be subtracted
        total = lse.new_zeros(shape).index_add_(0, owner, w)
        if self.sinks:
            sinks = operands[self.sinks].to(lse.dtype).exp()
            total += sinks.repeat_interleave(entries.rows).view(shape[1:])
        parts = x.to(lse.dtype).mul_(w[..., None])  # of x itself, or of a copy in wider precision
        o = lse.new_zeros((*shape, x.shape[3])).index_add_(0, owner, parts)
        return o.div_(total.masked_fill(total == 0.0, 1.0)[..., None]), total.log()

    def sees(self, entries: PageEntries, lse: torch.Tensor) -> torch.Tensor:
        """Booleans [B,G,R], true for rows with a key. lse: of entries."""
        seen = lse.new_zeros(entries.own.shape[0], *lse.shape[1:])
        return seen.index_add_(0, entries.owner, (lse > -INF).to(lse.dtype)) > 0

    def write(
        self, entries: PageEntries, results: Tensors, o: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """results: o, or o and lse, of the batch."""
        rows, (G, r) = entries.rows, self.heads
        for x, y in zip(results, (o, lse), strict=False):
            own = y.reshape(y.shape[0], G * r, rows, *y.shape[3:]).to(x.dtype)
            if entries.lines is None:
                x.narrow(2, 0, rows).index_copy_(0, entries.own, own)
            elif x.ndim == 3:
                x.index_copy_(0, entries.lines, own.transpose(1, 2).flatten(0, 1))
            else:
                x.index_copy_(1, entries.lines, own.transpose(0, 1).flatten(1))


def ordinals(n: int) -> torch.Tensor:
    """0 to n - 1, whatever the default device is."""
    return torch.arange(n, device="cpu")


def cut_runs(items: Sequence[int], sizes: Sequence[int], most: float) -> list[list[int]]:
    """Runs of items with no more than `most` by their sizes in all, each item having no more."""
    runs, room = list[list[int]](), -1.0
    for item, size in zip(items, sizes, strict=True):
        if size > room:
            runs.append([])
            room = most
        room -= size
        runs[-1].append(item)
    return runs


def attend_by_products(
    node: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, addend: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n,G,R,D], k [n,G,S,D], v [n,G,S,E] -> o [n,G,R,E], lse [n,G,R]. The addend has all
    modifiers but soft caps.

    Of dense operands, so that an entry has equal bits beside any others. A product of bfloat16 is
    rounded to it: a second one gives the rest, half as many bits again.
    """
    (n, G, R, _), wide = q.shape, accumulator(q.dtype)
    q, k, v = q.flatten(0, 1), k.contiguous().flatten(0, 1), v.contiguous().flatten(0, 1)
    product = torch.bmm(q, k.mT)
    s = product.to(wide)
    if wide != q.dtype:
        s += torch.baddbmm(product, q, k.mT, beta=-1)
    s = s.mul_(node.scale).view(n, G, R, -1)
    for modifier in node.modifiers:
        if not modifier.additive:
            change_(modifier, s, NOWHERE)
    if addend is not None:
        s.add_(addend)
    lse, total = s.new_empty(2, n, G, R, 1)
    softmax_(s, lse, total)
    o = torch.bmm(s.to(q.dtype).flatten(0, 1), v).view(n, G, R, -1)
    return o.to(wide).div_(total), lse.squeeze(3)


def refuse_entries(lying: Lying) -> str | None:
    """The reason against `PageWay`, if there is one."""
    node: Attention = lying.op.attention
    _, k, v = lying.specs[:3]
    if not lying.pages or lying.within is not node:
        return "it is of an attention over pages"
    if node.dropout or node.names != SAVED:
        return "it gives o and lse without dropout"
    if not fits_kernel(node, lying.specs) and not (node.is_capped and aligns(k) and aligns(v)):
        return "the kernel adds to scores, and products are under soft caps"
    if IN_PAIRS in (k.dtype, v.dtype):
        return "a byte has one number"
    return None if 0 not in (*k.shape[1:], *v.shape[1:]) else "pages have no numbers"


def fits_kernel(node: Attention, specs: Sequence[TensorSpec]) -> bool:
    """True if the kernel computes an attention: it adds to scores, and has one head size."""
    _, k, v = specs[:3]
    return all(m.additive for m in node.modifiers) and k.shape[-1] == v.shape[-1] and aligns(k)


def aligns(x: TensorSpec) -> bool:
    """True if rows have equal bits wherever they lie."""
    return x.shape[-1] % ALIGNED == 0
