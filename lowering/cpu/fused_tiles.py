"""The tiles of an attention for PyTorch's fused CPU kernel, and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, starmap
from math import prod
from typing import Literal, final

import torch
from attrs import evolve, frozen

from attn_graph.kernels.fused_cpu import block_bytes
from attn_graph.kernels.merging import MERGED
from attn_graph.lowering.cpu import schedule
from attn_graph.lowering.cpu.asking import (
    Extent,
    Tensors,
    ask_bits,
    ask_mask,
    ask_modifiers,
    depends,
)
from attn_graph.lowering.problem import Problem, has_flash_order, is_readable
from attn_graph.lowering.rates import CpuRates
from attn_graph.lowering.reasons import cpu_bias_reasons
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks import Keep, KeepBlocks, needs_of
from attn_graph.masks.canonical import is_ours
from attn_graph.masks.joins import leaves
from attn_graph.masks.places import Block
from attn_graph.sparsity.layers import MOST_POINTS, is_layered, list_layers
from attn_graph.sparsity.parts import Part, Tile
from attn_graph.spec import TensorSpec

MOST_BLOCKS = 2**9  # of queries, whose keys planning asks a mask for
FEW_QUERIES = 64  # k and v are read once or twice for them
MOST_PACKED = 2**23  # bytes of k and v packed at a time for FEW_QUERIES
LEAST_KEYS = FEW_QUERIES  # packed at a time
MOST_HELD = 2**17  # elements of addends held by a plan: 512 KiB of float32
MOST_BOOLEANS = 2**20  # of a mask that one addend hides by: 4 MiB of float32
POINTS_A_CALL = 2**12  # places a call may evaluate a mask at to list layers: some 5 ms
JOINED = 2**21  # numbers added at a time to neighbours with the same keys, 8 MiB of float32


@final
@frozen
class FusedTiles:
    """Forward and backward of one problem: everything known before the call.

    axes: the addend's axes of "b" and "h", besides i and j. width: the head size of the
    computation, the larger of D and E; the smaller is padded with zeros. blind: True if a query may
    see no key. layered: True if tiles are cut from the places that the mask exactly keeps, if these
    are few.
    """

    problem: Problem
    rates: CpuRates
    axes: str
    width: int
    blind: bool
    layered: bool

    @classmethod
    def plan(cls, problem: Problem, rates: CpuRates) -> FusedTiles:
        p = problem
        return cls(p, rates, depends(p), max(p.D, p.E), p.has_blind_rows, takes_layers(p))

    @cached_property
    def static(self) -> tuple[Tile, ...] | None:
        """The tiles; None if data decide them, or if there are more than planning lists."""
        p, mask, bounded = self.problem, self.problem.node.mask, bool(self.problem.node.modifiers)
        if mask is None and (p.M <= schedule.DATA_ROWS or not bounded):
            return tuple(self.shortened([whole_tile(p, "full")]))
        if p.mask_reads:
            whole = None if schedule.looks_pay(p, self.rates) else [whole_tile(p, "mixed")]
        else:
            whole = self.list_tiles({}, MOST_POINTS)
        return (
            None
            if whole is None or len(whole) > schedule.MOST_TILES
            else tuple(self.shortened(whole))
        )

    @cached_property
    def computes(self) -> torch.dtype:
        """The dtype of the kernel's operands and results: bfloat16 as it is, but not for a
        gradient."""
        p = self.problem
        return p.dtype if p.dtype == torch.bfloat16 and p.grad is None else p.wide

    @cached_property
    def keys_a_part(self) -> int | None:
        """The most keys of a part, if k and v are packed a part at a time: few queries read so many
        keys that copies of all would be large. None: packed at once, or read in place."""
        p = self.problem
        row = p.G * self.width * self.computes.itemsize * sum(n in self.packed for n in "kv")
        if p.grad is not None or p.M > FEW_QUERIES or p.B * p.N * row <= MOST_PACKED:
            return None
        return max(LEAST_KEYS, MOST_PACKED // (row * p.B))

    def shortened(self, tiles: Sequence[Tile]) -> Sequence[Tile]:
        most = self.keys_a_part
        return tiles if most is None else [schedule.shorten_parts(tile, most) for tile in tiles]

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The scratch buffers: packed operands, one addend, and sums in wider precision."""
        p, sums = self.problem, dict[str, TensorSpec]()
        if p.grad is not None:
            made = {f"d{name}": spec for name, spec in zip("qkv", p.specs, strict=False)}
            sums = {n: s for n, s in made.items() if (s.dtype, s.shape[3]) != (p.wide, self.width)}
        buffers = dict[str, Buffer]()
        for name, spec in (self.packed | sums).items():
            B, H, L, _ = spec.shape
            if name in ("k", "v") and self.keys_a_part is not None:
                L = self.keys_a_part
            buffers[name] = Buffer((B, H, L, self.width), self.computes)
        return buffers | ({"addend": Buffer((self.addends,), p.wide)} if self.addends else {})

    @cached_property
    def scratch(self) -> Scratch:
        return Scratch(self.buffers)

    @cached_property
    def operands(self) -> dict[str, TensorSpec]:
        p = self.problem
        specs = dict(zip("qkv", p.specs, strict=False))
        if p.grad is not None:
            given = p.grad.split(p.specs)
            specs |= {"o": given.o} | ({"do": given.do} if given.do is not None else {})
        return specs

    @cached_property
    def packed(self) -> dict[str, TensorSpec]:
        """The operands that need room: the kernel can't read them in place, or rows of do are to be
        cleared."""
        clears = {"do"} if self.blind else set()
        return {n: x for n, x in self.operands.items() if n in clears or n not in self.in_place}

    @cached_property
    def in_place(self) -> set[str]:
        """The operands read by the kernel as they lie: of its dtype and head size, and with fitting
        strides."""
        due = self.computes, self.width
        return {
            n
            for n, x in self.operands.items()
            if (x.dtype, x.shape[3]) == due and is_readable(x, like=n == "q")
        }

    @cached_property
    def holds(self) -> bool:
        """True if a plan holds all addends: they are small, and no data decide them."""
        node = self.problem.node
        needs = (*(m.needs for m in node.modifiers), needs_of(node.mask))
        if self.static is None or any(needs):
            return False
        heads = (self.problem.B if "b" in self.axes else 1) * self.copies
        outlines = {(*self.corner(t, x), len(t.rows), len(x)) for t, x in self.changed_parts()}
        return heads * sum([rows * keys for *_, rows, keys in outlines]) <= MOST_HELD

    @cached_property
    def shares_addends(self) -> bool:
        """True if an addend depends on j - i alone: tiles along the diagonal have the same."""
        node = self.problem.node
        mask = None if node.modifiers else node.mask
        return mask is not None and mask.relative and is_ours(mask)

    def corner(self, tile: Tile, part: Part) -> tuple[int, int]:
        """Equal for parts with equal addends, if these are of one size."""
        first, start = tile.rows.start, part.start
        return (0, start - first) if self.shares_addends else (first, start)

    def changed_parts(self) -> Iterator[tuple[Tile, Part]]:
        everywhere = bool(self.problem.node.modifiers)
        for tile in self.static or ():
            yield from ((tile, x) for x in tile.parts if x.kind == "mixed" or everywhere)

    @cached_property
    def only(self) -> Part | None:
        """The keys of the kernel's only call, if it reads all operands in place. If they are
        "mixed", one tensor of booleans hides some of them; else the scores may have a bias."""
        p, static = self.problem, self.static
        if self.packed or static is None or not (self.whole and self.is_direct):
            return None
        (part,) = static[0].parts
        if p.node.modifiers:
            return part if adds_in_place(p, part) else None
        return part if part.kind != "mixed" or hides_by_booleans(p) else None

    @property
    def alone(self) -> Part | None:
        """`only`, if that call also gives o."""
        return None if self.problem.node.sinks else self.only

    @property
    def takes_any_keys(self) -> bool:
        """True if a call may bring another number of keys: it reads all of them."""
        part = self.only
        if part is None or len(part) < self.problem.N:
            return False
        return part.kind == "full" or (part.kind == "mixed" and self.alone is not None)

    @cached_property
    def addends(self) -> int:
        """Elements of a call's largest addend in scratch; 0 without one."""
        if self.holds or self.alone is not None:
            return 0
        b = self.problem.B if "b" in self.axes and self.static is not None else 1
        return self.most_scores * b * (self.problem.H if "h" in self.axes else 1)

    @cached_property
    def most_scores(self) -> int:
        """The most scores of one head with an addend."""
        p = self.problem
        if self.static is None:
            keys = min(p.N, self.keys_a_part or p.N)
            entries = p.B if "b" in self.axes and self.joins_entries else 1
            return min(max(schedule.DATA_ROWS * keys, self.joined), entries * p.M * keys)
        return max((len(t.rows) * len(x) for t, x in self.changed_parts()), default=0)

    @property
    def joins_entries(self) -> bool:
        """True if batch entries with equal keys are one tile. If few queries read many keys, an
        addend of all entries would need more room than all else."""
        return self.problem.M > FEW_QUERIES

    @property
    def joined(self) -> int:
        """The most scores of one head in a tile joined of several with an addend."""
        most = JOINED // self.copies if needs_of(self.problem.node.mask) else 0
        return max(schedule.DATA_ROWS * self.problem.N, most)

    @property
    def copies(self) -> int:
        """The addend's heads."""
        return self.problem.H if "h" in self.axes else 1

    @property
    def temporary(self) -> int:
        """Bytes beside the workspace, at most: copied keys and results of a tile, unless they are
        the whole's, and before these the memory of the mask and the modifiers."""
        p, copied = self.problem, self.copied
        if p.grad is None:
            return copied + self.temporary_forward
        lse = p.B * p.H * p.M * (p.wide.itemsize + torch.bool.itemsize)
        cotangent = p.B * p.H * p.M * self.width * p.wide.itemsize  # as the kernel reads it
        if self.whole:
            return lse + max(self.asked, self.sum_bytes + cotangent)
        pairs = [(t, x) for t in self.reached for x in t.parts]
        shares = max((self.count_shares(*x, first=not n) for n, x in enumerate(pairs)), default=0)
        return copied + lse + max(self.asked, shares)

    @property
    def block(self) -> int:
        """Bytes of the block in which each thread of the kernel works on a tile."""
        p = self.problem
        sizes = {(len(tile.rows), len(part)) for tile in self.reached for part in tile.parts}
        if self.static is None:  # as large as data may pick
            sizes = {(p.M, p.N)}
        made = partial(block_bytes, D=self.width, dtype=self.computes, backward=p.grad is not None)
        return max(starmap(made, sizes), default=0)

    @property
    def sum_bytes(self) -> int:
        """Bytes of dq, dk and dv of the whole, if the kernel gives them in another dtype, or
        padded."""
        p, sizes = self.problem, zip("qkv", self.problem.specs, strict=False)
        made = [prod(x.shape[:3]) for name, x in sizes if f"d{name}" in self.buffers]
        return sum(made) * self.width * p.wide.itemsize

    @property
    def temporary_forward(self) -> int:
        """Sums of a tile, o and lse of a part, and vectors of lse's size made by merging. With one
        tile of all, o and lse are results."""
        p, wide, most = self.problem, self.problem.wide.itemsize, self.asked
        narrow = self.computes != p.wide
        if self.alone is not None and self.alone.kind == "mixed":
            most += prod(p.specs[3].shape) * p.dtype.itemsize
        direct = self.is_direct and self.is_whole(self.reached)
        for tile in self.reached:
            rows, parts = tile.entries * p.H * len(tile.rows), len(tile.parts)
            beside = rows * (MERGED * wide + torch.bool.itemsize)
            if not direct:
                joins = parts > 1 or p.node.sinks
                made = rows * (self.width * self.computes.itemsize + wide)
                sums = rows * (self.width + 1) * wide if joins else 0
                beside += made if parts > 1 or narrow or not joins else 0
                most = max(most, sums + self.asked, sums + beside)
            most = max(most, beside)
        return most

    @cached_property
    def is_direct(self) -> bool:
        """True if the kernel's result of the whole is o as it is due."""
        p = self.problem
        joins = p.node.sinks and self.computes != p.wide
        keeps_order = "q" in self.in_place and has_flash_order(p.specs[0])
        return p.D <= p.E and keeps_order and not joins

    @property
    def reached(self) -> tuple[Tile, ...]:
        """The tiles, or as large a one as data may pick, in two parts."""
        if self.static is not None:
            return self.static
        p = self.problem
        half, entries = -(-p.N // 2), p.B if self.joins_entries else 1
        parts = Part(0, half, "mixed"), Part(half, p.N, "mixed")
        batch, heads, groups = range(entries), range(p.H), range(p.G)
        return (Tile(batch, heads, groups, range(p.M), parts[: min(2, p.N)]),)

    def count_shares(self, tile: Tile, part: Part, *, first: bool) -> int:
        """Bytes of dq, dk and dv of a part of a tile, and of the kernel's copy of do. first: True
        if dk and dv of the part become the sums, if it has all keys."""
        p = self.problem
        keys = p.N if self.static is None else len(part)
        sums = first and (len(tile.batch), keys) == (p.B, p.N) and "dk" not in self.buffers
        keys = 0 if sums and self.static is not None else keys
        numbers = 2 * (p.H * len(tile.rows) + p.G * keys)
        return tile.entries * numbers * self.width * p.wide.itemsize

    @cached_property
    def asked(self) -> int:
        """Bytes for making an addend; 0 if the plan holds all of them, or if it is the bias."""
        if self.holds or (self.alone is not None and self.alone.kind == "full"):
            return 0
        return max((self.count_asked(at) for at in self.asked_blocks), default=0)

    def count_asked(self, at: Extent) -> int:
        p = self.problem
        stays, bits = ask_bits(p, at)
        if not p.node.modifiers:
            return ask_mask(p.node.mask, p.by_role.mask, at).most if p.node.mask is not None else 0
        return max(bits, stays + ask_modifiers(p, at))

    @property
    def asked_blocks(self) -> Iterator[Extent]:
        heads = self.problem.H if "h" in self.axes else 1
        if self.static is not None:
            for t, x in self.changed_parts():
                yield Extent(len(t.batch), heads, len(t.rows), len(x))
            return
        p = self.problem
        keys, entries = min(p.N, self.keys_a_part or p.N), p.B if self.joins_entries else 1
        rows = min(p.M, -(-self.most_scores // keys))
        yield Extent(entries, heads, rows, keys)

    def summary(self) -> str:
        """The number of kernel calls and their share of the scores, if planning knows them."""
        if self.static is None:
            mask = self.problem.node.mask
            why = "data picks the keys" if needs_of(mask) else "each call lists them"
            kinds = "rectangles and triangles, else on " if self.layered else ""
            return f"PyTorch's fused CPU kernel on {kinds}tiles of {self.rows} queries; {why}"
        p, calls = self.problem, schedule.kernel_calls(self.static)
        whole = p.B * p.M * p.N
        percent = 100 * sum([tile.area for tile in self.static]) / whole
        share = f"{percent:.3g} % of the {p.H * whole:,} scores"
        return f"{calls} call{'s' * (calls != 1)} of PyTorch's fused CPU kernel, {share}"

    def tiles(self, data: Tensors) -> Sequence[Tile]:
        """The tiles of a call, given the mask's tensors."""
        if self.static is not None:
            return self.static
        tiles = self.list_tiles(data, POINTS_A_CALL)
        assert tiles is not None
        return self.shortened(tiles)

    def list_tiles(self, data: Tensors, most_points: int) -> list[Tile] | None:
        """The tiles; None if planning would list too many. Blocks of queries, if layers take more
        calls and more time than these."""
        p, mask = self.problem, self.problem.node.mask
        whole, layered = Block.whole(p.sizes, data), None
        if self.layered and mask is not None:
            kept, single = list_layers(mask, whole, most_points), "b" in self.axes
            if kept is not None:
                layered = schedule.layer_tiles(p, kept, self.rows, self.rates, single=single)
        rates, rows = self.rates, -(-p.M // schedule.DATA_ROWS)
        least = schedule.count_looks(p) * rates.look if data else rows * rates.product_call
        if layered is not None and schedule.kernel_calls(layered) * rates.product_call <= least:
            return layered
        if most_points == MOST_POINTS and MOST_BLOCKS * self.rows < p.M:
            return layered
        listed = self.block_tiles(whole)
        seconds = partial(schedule.tiles_seconds, p, rates)
        return listed if layered is None else min(layered, listed, key=seconds)

    def block_tiles(self, whole: Block) -> list[Tile]:
        """Tiles of blocks of queries, and of each batch entry if data decide."""
        p, bounded = self.problem, bool(self.problem.node.modifiers)
        entries = split_range(whole.batch, bool(whole.data))
        listed, step = list[Tile](), p.H // len(self.groups)
        for at, groups in enumerate(self.groups):
            heads = whole.heads[at * step :][:step]
            blocks = (evolve(whole, batch=batch, heads=heads) for batch in entries)
            each = (schedule.row_tiles(p.node.mask, x, groups, min(self.rows, p.M)) for x in blocks)
            gathered = ([self.gather(tile) for tile in tiles] for tiles in each)
            joined = [schedule.join_neighbours(tiles, self.joined, bounded) for tiles in gathered]
            if self.joins_entries:
                listed += schedule.join_entries(
                    joined, self.joined if "b" in self.axes else None, bounded
                )
            else:
                listed += chain.from_iterable(joined)
        return listed

    @cached_property
    def tables(self) -> tuple[KeepBlocks, ...]:
        """The tables of blocks in the mask."""
        mask = self.problem.node.mask
        every = () if mask is None else leaves(mask)
        return tuple(leaf for leaf in every if isinstance(leaf, KeepBlocks))

    @cached_property
    def rows(self) -> int:
        """Queries of a tile with an addend. If data decides their keys, at most the least number of
        whole blocks of a table, not below ROW_BLOCKS."""
        if not needs_of(self.problem.node.mask):
            return schedule.choose_rows(self.problem, self.rates, self.problem.N)
        blocks = [-(-schedule.ROW_BLOCKS[0] // leaf.rows) * leaf.rows for leaf in self.tables]
        return min(schedule.DATA_ROWS, *blocks) if blocks else schedule.DATA_ROWS

    @cached_property
    def groups(self) -> Sequence[range]:
        """The key/value heads of each tile: one, if tables tell heads apart; else all."""
        p = self.problem
        apart = any(p.by_role.mask[leaf.name].shape[1] > 1 for leaf in self.tables)
        return split_range(range(p.G), apart)

    def gather(self, tile: Tile) -> Tile:
        """A tile with few parts: their keys are copied to lie side by side."""
        return (
            schedule.gather_parts(tile, schedule.LEAST_FULL, self.most_gathered)
            if self.most_gathered
            else tile
        )

    @cached_property
    def most_gathered(self) -> int:
        """The keys after which another part is begun, of those copied to lie side by side; 0 unless
        data pick them, and if k and v are packed by parts."""
        by_data = needs_of(self.problem.node.mask) and self.static is None
        if not by_data or self.keys_a_part is not None:
            return 0
        return MOST_PACKED // self.bytes_of_key

    @property
    def bytes_of_key(self) -> int:
        """Bytes of k and v of one key of a tile listed by data. All batch entries may be joined."""
        numbers = self.problem.B * len(self.groups[0]) * 2 * self.width
        return numbers * self.computes.itemsize

    @property
    def copied(self) -> int:
        """Bytes of the keys and values copied for a part."""
        most = self.most_gathered
        return min(self.problem.N, most + schedule.LEAST_FULL) * self.bytes_of_key if most else 0

    @cached_property
    def whole(self) -> bool:
        """True if one call of the kernel gives all results of every call of the plan."""
        return self.static is not None and self.is_whole(self.static)

    def is_whole(self, tiles: Sequence[Tile]) -> bool:
        """True if one call of the kernel gives all results."""
        if len(tiles) != 1 or len(tiles[0].parts) != 1 or tiles[0].repeat > 1:
            return False
        p, tile = self.problem, tiles[0]
        keys = p.grad is None or len(tile.parts[0]) == p.N
        return keys and (*map(len, (tile.batch, tile.heads, tile.rows)),) == (p.B, p.H, p.M)


def hides_by_booleans(problem: Problem) -> bool:
    """True if a forward has one tensor of booleans as its mask, small enough as an addend."""
    p, mask = problem, problem.node.mask
    if p.grad is not None or not isinstance(mask, Keep):
        return False
    return prod(p.by_role.mask[mask.name].shape) <= MOST_BOOLEANS


def adds_in_place(problem: Problem, part: Part) -> bool:
    """True if a forward adds one bias to the scores of these keys, as the kernel reads it."""
    p = problem
    if part.kind != "full" or p.grad is not None or not p.node.is_biased:
        return False
    fits = not part.start and p.specs[3].shape[-1] in (1, part.stop)  # else a mask leaves fewer
    return fits and not any(cpu_bias_reasons(p.specs[3], p.dtype))


def whole_tile(problem: Problem, kind: Literal["full", "mixed"]) -> Tile:
    """All scores as one tile."""
    p, parts = problem, (Part(0, problem.N, kind),)
    return Tile(range(p.B), range(p.H), range(p.G), range(p.M), parts)


def takes_layers(problem: Problem) -> bool:
    """With a modifier each part has an addend anyway. The kernel masks before it scales, so a scale
    of 0 or less turns the -inf of a triangle into NaN or inf; nor is one too small sure."""
    node = problem.node
    if node.mask is None or node.modifiers or problem.low_scale or problem.is_empty:
        return False
    zeros = {  # in the shapes of the mask's tensors: no answer depends on values
        n: torch.zeros((), dtype=s.dtype, device="cpu").expand(s.shape)
        for n, s in problem.by_role.mask.items()
    }
    return is_layered(node.mask, Block.whole(problem.sizes, zeros))


def split_range(whole: range, apart: bool) -> list[range]:
    return [range(n, n + 1) for n in whole] if apart else [whole]
