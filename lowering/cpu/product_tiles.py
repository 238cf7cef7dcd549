"""Attention by matrix products on tiles: every modifier, every gradient, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import final

import torch
from attrs import Factory, evolve, field, frozen

from attn_graph.ir import ops
from attn_graph.ir.attention import GradientOperands, Operands
from attn_graph.ir.modifiers import back_, change_
from attn_graph.ir.philox import counters, keep_
from attn_graph.kernels import products
from attn_graph.kernels.merging import sink_
from attn_graph.lowering.cpu.schedule import (
    MOST_READY,
    POSITIONS,
    Cut,
    Part,
    Tile,
    parts_of,
    place_within,
)
from attn_graph.lowering.problem import Problem
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks.places import Block, Place, join_intervals
from attn_graph.spec import INF, TensorSpec

SCORES = 2**21  # scores held at a time: 8 MiB of float32, what a few cores find in a shared cache
MOST_ROWS = 64
LEAST_ROWS = 16
LEAST_FULL = 64  # keys: on a longer run the mask is not evaluated


@final
@frozen
class Chunk:
    """Batch entries and key/value heads that are computed together."""

    batch: range
    groups: range


@final
@frozen(eq=False)
class ProductSlot:
    """A tile of a chunk, made ready for calls.

    heads: its query heads. shape: how many batch entries, groups, query heads a group and queries.
    rows: cuts its queries out of x [B,H,M,...]. groups: cuts its batch entries and groups out of
    x [B,G,N,D]. runs: its keys, in runs without a hole.
    """

    tile: Tile
    heads: range
    shape: tuple[int, int, int, int]
    rows: Cut
    groups: Cut
    runs: tuple[tuple[int, int], ...]
    keys: int = field(init=False, default=Factory(lambda slot: slot.tile.keys, takes_self=True))


@final
@frozen
class ProductTiles:
    """Forward and backward of one problem. A tile holds n = batch * groups products at a time.

    blind: whether a query may see no key. restores: for each modifier, whether -inf has to be put
    back after it. ready: the tiles, where they are made ready ahead of calls.
    """

    problem: Problem
    rows: int
    batch: int
    groups: int
    blind: bool
    restores: tuple[bool, ...]
    ready: tuple[ProductSlot, ...] | None = field(default=None, eq=False, repr=False)

    @classmethod
    def plan(cls, problem: Problem) -> ProductTiles:
        """Sizes that keep a tile's scores near SCORES: rows first, then heads, then batch."""
        p, r = problem, problem.H // problem.G
        rows = min(p.M, MOST_ROWS, max(LEAST_ROWS, SCORES // (p.N * r)))
        groups = min(p.G, max(1, SCORES // (p.N * r * rows)))
        merges = groups == p.G and all(merges_batch(s) or packs(s, p) for s in p.specs[1:3])
        by_data = p.node.mask is not None and bool(p.node.mask.needs)
        batch = (
            min(p.B, max(1, SCORES // (p.N * r * rows * groups))) if merges and not by_data else 1
        )
        return cls(problem, rows, batch, groups, p.has_blind_rows, p.node.restores)

    @property
    def r(self) -> int:
        """Query heads that share a key/value head."""
        return self.problem.H // self.problem.G

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The scratch buffers, by name."""
        p, wide = self.problem, self.problem.wide
        n, L = self.batch * self.groups, self.r * self.rows
        buffers = {
            name: Buffer(s.shape, wide)
            for name, s in zip("kv", p.specs[1:3], strict=True)
            if packs(s, p)
        }
        buffers |= {"q": Buffer((n * L * p.D,), wide), "s": Buffer((n * L * p.N,), wide)}
        buffers |= {"o": Buffer((n * L * p.E,), wide)}
        buffers |= {name: Buffer((n * L,), wide) for name in ("lse", "total")}
        if p.node.dropout:
            words = n * L * (p.N // 4 + 2)
            buffers["kept"] = Buffer((4 * words,), torch.bool)
            buffers |= {f"word{i}": Buffer((words,), torch.int64) for i in range(6)}
            buffers["weights"] = buffers["s"]
        if p.grad is not None:
            buffers |= self.needed_backward(n, L)
        return buffers

    @cached_property
    def scratch(self) -> Scratch:
        """The same side by side."""
        return Scratch(tuple(self.buffers.values()))

    def needed_backward(self, n: int, L: int) -> dict[str, Buffer]:
        """The scratch buffers that the gradient needs on top, for n heads and L rows a tile."""
        p, wide = self.problem, self.problem.wide
        buffers = {"ds": Buffer((n * L * p.N,), wide), "do": Buffer((n * L * p.E,), wide)}
        buffers |= {"dq": Buffer((n * L * p.D,), wide), "delta": Buffer((n * L,), wide)}
        steps = [i for i, m in enumerate(p.node.modifiers) if not m.additive]
        buffers |= {f"step{i}": Buffer((n * L * p.N,), wide) for i in steps}
        if p.dtype != wide:
            buffers |= {
                f"d{x}": Buffer(s.shape, wide) for x, s in zip("kv", p.specs[1:3], strict=True)
            }
        return buffers

    @property
    def temporary(self) -> int:
        """Bytes that PyTorch allocates beside the workspace, at most: the places that are asked."""
        p = self.problem
        places = self.batch * self.rows * p.N
        scores, node = places * self.groups * self.r, p.node
        words = 2 * bool(node.modifiers) + bool(node.dropout)
        position_bytes = POSITIONS * places if node.mask or node.modifiers else 0
        position_bytes += torch.int64.itemsize * (p.B + p.H + p.M + p.N)
        return position_bytes + scores * (2 + words * p.wide.itemsize)

    def summary(self) -> str:
        """How it runs, for `explain`."""
        heads = self.groups * self.r
        return f"matrix products on tiles of {self.batch} x {heads} heads x {self.rows} queries"

    def chunks(self) -> Iterator[Chunk]:
        """The batch entries and key/value heads that run together, in order."""
        p = self.problem
        for b in range(0, p.B, self.batch):
            for g in range(0, p.G, self.groups):
                yield Chunk(range(b, min(b + self.batch, p.B)), range(g, min(g + self.groups, p.G)))

    def made_ready(self) -> ProductTiles:
        """The same with its tiles made ready, where no data decides them and they are few."""
        p = self.problem
        count = -(-p.B // self.batch) * -(-p.G // self.groups) * -(-p.M // self.rows)
        if count > MOST_READY or (p.node.mask is not None and p.node.mask.needs):
            return self
        return evolve(self, ready=tuple(self.slots({})))

    def slots(self, data: Mapping[str, torch.Tensor]) -> Iterator[ProductSlot]:
        """All tiles, given what the mask reads."""
        p, r = self.problem, self.r
        for chunk in self.chunks():
            b, g = chunk.batch, chunk.groups
            heads = range(g.start * r, g.stop * r)
            for start in range(0, p.M, self.rows):
                rows = range(start, min(start + self.rows, p.M))
                block = Block(b, heads, rows, p.H, p.M, p.N, data)
                tile = Tile(b, rows, parts_of(p.node.mask, block, LEAST_FULL))
                yield ProductSlot(
                    tile,
                    heads,
                    (len(b), len(g), r, len(rows)),
                    itemgetter(tuple(slice(x.start, x.stop) for x in (b, heads, rows))),
                    itemgetter(tuple(slice(x.start, x.stop) for x in (b, g))),
                    join_intervals([(x.start, x.stop) for x in tile.parts], gap=0),
                )

    def visits(
        self, given: Operands[torch.Tensor], scratch: Mapping[str, torch.Tensor]
    ) -> Iterator[Here]:
        """Each tile of a call."""
        p = self.problem
        block = Block(range(p.B), range(p.H), range(p.M), p.H, p.M, p.N, given.mask)
        at = Place.of(block, range(p.N), given.q.device)
        for slot in self.slots(given.mask) if self.ready is None else self.ready:
            yield Here(self, slot, given, scratch, tuple(places_of(at, slot)))

    def packed(
        self, operands: Sequence[torch.Tensor], scratch: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """k and v as the products read them, in scratch if they must be."""
        pairs = zip("kv", operands[1:3], strict=True)
        return [scratch[name].copy_(x) if name in scratch else x for name, x in pairs]

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The results of the attention, in the order of their names."""
        p, given = self.problem, self.problem.node.split(operands)
        k, v = self.packed(operands, scratch)
        o, shape = p.new_o(given.q.device), (p.B, p.H, p.M)
        stats = {n: torch.empty(shape, dtype=p.wide, device=o.device) for n in p.node.stats}
        results = {"o": o, **stats}
        for here in self.visits(given, scratch):
            here.attend(k, v, {name: here.slot.rows(x) for name, x in results.items()})
        return tuple(results.values())

    def backward(
        self, operands: Sequence[torch.Tensor], scratch: Mapping[str, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The gradients of q, k, v and of the modifiers' tensors, by number of the operand."""
        p = self.problem
        assert p.grad is not None
        read = p.grad.split(operands)
        given = p.node.split(read.own)
        k, v = self.packed(operands, scratch)
        dq = torch.empty(given.q.shape, dtype=p.dtype, device=given.q.device)
        dk, dv = (
            scratch[f"d{name}"].zero_()
            if f"d{name}" in scratch
            else torch.zeros_like(x, memory_format=torch.contiguous_format)
            for name, x in zip("kv", (given.k, given.v), strict=True)
        )
        totals = self.totals(given)
        for here in self.visits(given, scratch):
            if here.slot.tile.parts:
                here.pull(k, v, read, (dq, dk, dv), totals)
            else:
                here.slot.rows(dq).zero_()
        gradients = {0: dq, 1: dk.to(p.dtype), 2: dv.to(p.dtype)}
        return gradients | self.collected(given, totals)

    def totals(self, given: Operands[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Zeros for the wanted gradients of the modifiers' tensors, one dict a modifier."""
        node, out, at = self.problem.node, [], 3
        for modifier, data in zip(node.modifiers, given.modifiers, strict=True):
            wanted = {
                name for i, name in enumerate(data, at) if self.wants(i) and name in modifier.trains
            }
            out.append(
                {
                    n: torch.zeros(data[n].shape, dtype=self.problem.wide, device=data[n].device)
                    for n in wanted
                }
            )
            at += len(data)
        return out

    def wants(self, operand: int) -> bool:
        """Whether the gradient of an operand is needed."""
        return self.problem.grad is not None and self.problem.grad.wants[operand]

    def collected(
        self, given: Operands[torch.Tensor], totals: Sequence[Mapping[str, torch.Tensor]]
    ) -> dict[int, torch.Tensor]:
        """The gradients of the modifiers' operands, by number of the operand."""
        gradients: dict[int, torch.Tensor] = {}
        at = 3
        for data, sums in zip(given.modifiers, totals, strict=True):
            gradients |= {i: sums[n].to(data[n].dtype) for i, n in enumerate(data, at) if n in sums}
            at += len(data)
        return gradients


@final
@frozen(eq=False)
class Here:
    """One tile of a call, with the buffers it computes in. places: of each of its parts."""

    tiles: ProductTiles
    slot: ProductSlot
    given: Operands[torch.Tensor]
    scratch: Mapping[str, torch.Tensor]
    places: tuple[Place, ...]

    def room(self, name: str, last: int) -> torch.Tensor:
        """A buffer as [n, L, last]."""
        b, g, r, m = self.slot.shape
        return self.scratch[name][: b * g * r * m * last].view(b * g, r * m, last)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[n,L,S] as [batch,heads,rows,S]."""
        b, g, r, m = self.slot.shape
        return x.view(b, g * r, m, -1)

    def load(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This tile's queries of x [B,H,M,D], gathered in a buffer as [n,L,D]."""
        room = self.room(name, x.shape[3])
        self.heads(room).copy_(self.slot.rows(x))
        return room

    def keys_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tile's keys of x [B,G,N,D], as [n,S,D] for each run of parts without a hole."""
        here = self.slot.groups(x)
        flat = here[0] if self.slot.shape[0] == 1 else here.flatten(0, 1)
        return [flat[:, a:b] for a, b in self.slot.runs]

    def pieces(self, s: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor, Place]]:
        """Each part of the scores [n,L,S] as [batch,heads,rows,keys], and where it is."""
        four, at = self.heads(s), 0
        for part, place in zip(self.slot.tile.parts, self.places, strict=True):
            count = part.stop - part.start
            yield part, four[..., at : at + count], place
            at += count

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, keep: Callable[[int, torch.Tensor], None]
    ) -> torch.Tensor:
        """The modified and masked scores. `keep` is told each step's result before the next."""
        node, s = self.tiles.problem.node, self.room("s", self.slot.keys)
        products.scores_(s, q, self.keys_of(k), node.scale)
        for i, (modifier, data) in enumerate(
            zip(node.modifiers, self.given.modifiers, strict=True)
        ):
            hidden = s == -INF if self.tiles.restores[i] else None
            for _, piece, at in self.pieces(s):
                change_(modifier, piece, at.reading(data))
            if hidden is not None:
                s.masked_fill_(hidden, -INF)
            keep(i, s)
        for part, piece, at in self.pieces(s):
            if part.kind == "mixed" and node.mask is not None:
                piece.masked_fill_(
                    torch.as_tensor(node.mask.keep(at), device=s.device).logical_not(), -INF
                )
        return s

    def dropped_(self, p: torch.Tensor) -> None:
        """p -> p * z / (1 - rate)."""
        node = self.tiles.problem.node
        assert self.given.seed is not None
        assert self.given.offset is not None
        seed, offset = int(self.given.seed), int(self.given.offset)
        for part, piece, at in self.pieces(p):
            assert at.ranges is not None
            words = (*piece.shape[:3], len(counters(range(part.start, part.stop))))
            count = piece.shape[0] * piece.shape[1] * piece.shape[2] * words[3]
            six = [self.scratch[f"word{i}"][:count].view(words) for i in range(6)]
            bits = self.scratch["kept"][: 4 * count].view(*words[:3], 4 * words[3])
            piece.mul_(keep_(bits, node.dropout, seed, offset, at.ranges, at.H, six))
        p.div_(1 - node.dropout)

    def attend(self, k: torch.Tensor, v: torch.Tensor, results: Mapping[str, torch.Tensor]) -> None:
        """Fill this tile's rows of the results, by name."""
        o, lse = self.room("o", v.shape[3]), self.room("lse", 1)
        if self.slot.tile.parts:
            self.softmax(k, v, o, lse, results)
        else:
            o.zero_()
            lse.fill_(-INF)
            self.take_statistics(o.new_empty((*results["lse"].shape, 0)), results)
        four, three = self.heads(o), self.heads(lse)[..., 0]
        if self.given.sinks is not None:
            heads = self.slot.heads
            sink_(four, three, self.given.sinks[heads.start : heads.stop])
        results["o"].copy_(four)
        results["lse"].copy_(three)

    def take_statistics(self, s: torch.Tensor, results: Mapping[str, torch.Tensor]) -> None:
        """Fill the statistics beside lse, each by its own definition on this tile's scores."""
        for name in self.tiles.problem.node.without_gradient:
            results[name].copy_(ops.STATISTICS[name]().run(s)[0])

    def softmax(
        self, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
        results: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """o [n,L,E] and lse [n,L,1] of a tile that has keys, and the statistics beside them."""
        s = self.scores(self.load("q", self.given.q), k, lambda i, s: None)
        self.take_statistics(self.heads(s), results)
        total = self.room("total", 1)
        products.softmax_(s, lse, total)
        if self.tiles.problem.node.dropout:
            self.dropped_(s)
        products.weigh_(o, s, self.keys_of(v))
        o.div_(total)

    def pull(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        read: GradientOperands[torch.Tensor],
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        totals: Sequence[Mapping[str, torch.Tensor]],
    ) -> None:
        """Add this tile's share of every gradient, by the formulas of AttentionGrad."""
        dq, dk, dv = grads
        node = self.tiles.problem.node
        q, kept = self.load("q", self.given.q), self.kept_steps()
        p = self.scores(q, k, kept)
        stats = self.room("lse", 1)
        self.heads(stats).copy_(self.slot.rows(read.lse)[..., None])
        products.weights_(p, stats)
        ds = self.room("ds", self.slot.keys)
        surplus = self.room("delta", 1)
        if read.do is None:
            ds.zero_()
            surplus.zero_()
        else:
            self.cotangent(ds, surplus, p, v, read.o, read.do, dv)
        if read.dlse is not None:
            self.heads(surplus).sub_(self.slot.rows(read.dlse)[..., None])
            self.clear(surplus)
        ds.sub_(surplus).mul_(p)
        self.modifiers_back(ds, totals)
        sums = self.room("dq", q.shape[2])
        products.weigh_(sums, ds, self.keys_of(k), node.scale)
        self.slot.rows(dq).copy_(self.heads(sums))
        products.add_transposed_(self.keys_of(dk), ds, q, node.scale)

    def clear(self, x: torch.Tensor) -> torch.Tensor:
        """x [n,L,.] with 0, in place, in the rows that saw nothing."""
        return x.masked_fill_(self.room("lse", 1) == -INF, 0.0) if self.tiles.blind else x

    def cotangent(
        self, dp: torch.Tensor, delta: torch.Tensor, p: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, do: torch.Tensor, dv: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fill dp and delta, and add to dv."""
        results, cotangents = self.load("o", o), self.clear(self.load("do", do))
        torch.sum(results.mul_(cotangents), -1, keepdim=True, out=delta)
        products.scores_(dp, cotangents, self.keys_of(v), 1.0)
        if self.tiles.problem.node.dropout:
            self.dropped_(dp)
        weights = p
        if self.tiles.problem.node.dropout:
            weights = self.room("weights", self.slot.keys).copy_(p)
            self.dropped_(weights)
        products.add_transposed_(self.keys_of(dv), weights, cotangents)

    def kept_steps(self) -> Callable[[int, torch.Tensor], None]:
        """Remembers the result of each modifier whose derivative needs it."""

        def keep(i: int, s: torch.Tensor) -> None:
            if f"step{i}" in self.scratch:
                self.room(f"step{i}", self.slot.keys).copy_(s)

        return keep

    def modifiers_back(
        self, ds: torch.Tensor, totals: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        """ds of the last step -> ds of the products, collecting the modifiers' own gradients."""
        steps = [*zip(self.tiles.problem.node.modifiers, self.given.modifiers, totals, strict=True)]
        for i, (modifier, data, sums) in reversed([*enumerate(steps)]):
            results = self.room(f"step{i}" if f"step{i}" in self.scratch else "s", self.slot.keys)
            restores = self.tiles.restores[i] and not modifier.additive
            hidden = results == -INF if restores else None
            for (_, piece, at), (_, result, _) in zip(
                self.pieces(ds), self.pieces(results), strict=True
            ):
                if sums:
                    modifier.collect(sums, piece, at.reading(data))
                back_(modifier, piece, result, at.reading(data))
            if hidden is not None:
                ds.masked_fill_(hidden, 0.0)


def places_of(at: Place, slot: ProductSlot) -> Iterator[Place]:
    """Of all places those of each part of a tile."""
    b, h, i = slot.tile.batch, slot.heads, slot.tile.rows
    for part in slot.tile.parts:
        yield place_within(at, b, h, i, range(part.start, part.stop))


def packs(spec: TensorSpec, problem: Problem) -> bool:
    """Whether the products would copy an operand in secret: other dtype, or no unit stride."""
    return spec.dtype != problem.wide or not spec.unit_last


def merges_batch(spec: TensorSpec) -> bool:
    """Whether batch and heads are one axis in memory."""
    return (
        spec.shape[0] <= 1
        or spec.shape[1] <= 1
        or spec.strides[0] == spec.shape[1] * spec.strides[1]
    )
