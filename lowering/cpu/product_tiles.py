"""Attention by matrix products on tiles: every modifier, every gradient, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import final

import torch
from attrs import frozen

from attn_graph.ir import ops
from attn_graph.ir.attention import GradientOperands, Operands
from attn_graph.ir.modifiers import SoftCap, back_, change_
from attn_graph.ir.philox import WORDS, Compare, place_in_whole
from attn_graph.kernels import products
from attn_graph.kernels.hiding import hide_
from attn_graph.lowering.cpu.asking import WORD, Extent, ask_bits, ask_modifiers
from attn_graph.lowering.cpu.dropping import draw, needed_to_draw
from attn_graph.lowering.cpu.product_slots import ProductSlot, TileGrid, choose_sizes, packs
from attn_graph.lowering.cpu.schedule import Part, place_within
from attn_graph.lowering.cpu.sink_sums import sink_gradient_of
from attn_graph.lowering.problem import Problem
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks.places import Place
from attn_graph.spec import INF, NAMES

ROWS = 5  # numbers of each row of scores beside the scratch: its sink, and the terms of a sum
MOST_CAP = 2.0**64  # its products, and products of scale / cap, fit in float32


@final
@frozen
class ProductTiles(TileGrid):
    """Forward and backward of one problem.

    factors: the dtype of products' factors and results, the scores' own or the operands' half
    precision; everything between two products has the scores' dtype. blind: True if a query may see
    no key. restores: for each modifier, True if -inf has to be put back after it.
    """

    factors: torch.dtype
    blind: bool
    restores: tuple[bool, ...]

    @classmethod
    def plan(cls, problem: Problem, factors: torch.dtype) -> ProductTiles:
        """The tiles of a problem, of sizes chosen for it alone."""
        sizes = choose_sizes(problem, factors)
        return cls(problem, *sizes, factors, problem.has_blind_rows, problem.node.restores)

    @cached_property
    def cap(self) -> float | None:
        """The cap of a first soft cap; the products divide by it themselves."""
        (first, *_), scale = (*self.problem.node.modifiers, None), self.problem.node.scale
        if not isinstance(first, SoftCap):
            return None
        divides = first.cap <= MOST_CAP and abs(scale) <= MOST_CAP * first.cap
        return first.cap if divides else None

    @cached_property
    def weighs_cotangents(self) -> bool:
        """True if delta of a row is the sum of p dp, else of do o. Its rounding error is one number
        for a row, and a gradient summed from ds over places, as of slopes, adds it up. See
        `Problem.drops_rounded` for half precision."""
        p = self.problem
        return p.grad is not None and (p.drops_rounded or p.gathers)

    @cached_property
    def more(self) -> tuple[str, ...]:
        return self.problem.node.without_gradient

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        p, wide, keys = self.problem, self.problem.wide, self.reach
        n, L = self.batch * self.groups, self.r * self.rows
        buffers = {
            name: Buffer(s.shape, self.factors)
            for name, s in zip("kv", p.specs[1:3], strict=True)
            if packs(s, self.factors)
        }
        buffers |= {"q": Buffer((n * L * p.D,), self.factors), "s": Buffer((n * L * keys,), wide)}
        buffers |= {"o": Buffer((n * L * p.E,), wide)}
        buffers |= {name: Buffer((n * L,), wide) for name in ("lse", "total")}
        if p.node.dropout:
            buffers |= needed_to_draw(n * L, keys, wide)
        if self.rounds:
            widest = max(p.D, p.E)
            buffers["factor"] = Buffer((n * L * keys,), self.factors)
            buffers["product"] = Buffer((n * max(L, keys) * widest,), self.factors)
        if p.grad is not None:
            buffers |= self.needed_backward(n, L)
        return buffers

    @cached_property
    def rounds(self) -> bool:
        return self.factors != self.problem.wide

    @cached_property
    def scratch(self) -> Scratch:
        return Scratch(self.buffers)

    def needed_backward(self, n: int, L: int) -> dict[str, Buffer]:
        """The gradient's additional scratch buffers, for n heads and L rows a tile."""
        p, wide = self.problem, self.problem.wide
        buffers = {"ds": Buffer((n * L * self.reach,), wide), "do": Buffer((n * L * p.E,), wide)}
        buffers |= {"dq": Buffer((n * L * p.D,), wide), "delta": Buffer((n * L,), wide)}
        if self.rounds:
            buffers["cotangent"] = Buffer((n * L * p.E,), self.factors)
        if p.node.dropout:
            buffers["weights"] = buffers["ds"]
        steps = [i for i, m in enumerate(p.node.modifiers) if not m.additive]
        buffers |= {f"step{i}": Buffer((n * L * self.reach,), wide) for i in steps}
        if p.dtype != wide:
            buffers |= {
                f"d{x}": Buffer(s.shape, wide) for x, s in zip("kv", p.specs[1:3], strict=True)
            }
        return buffers

    @property
    def temporary(self) -> int:
        """Bytes allocated by PyTorch beside the workspace, at most: of one tile the booleans of its
        places, draws, rows of numbers, oneDNN's packed operands; sums of weights of all."""
        p, wide = self.problem, self.problem.wide.itemsize
        at = Extent(self.batch, self.groups * self.r, self.rows, self.reach)
        scores, rows = at.count("bhij"), at.count("bhi")
        _, bits = ask_bits(p, at)
        drawn = scores * WORD // WORDS if p.node.dropout else 0
        stats = scores * wide if self.more else 0
        steps = ask_modifiers(p, at, first=int(self.cap is not None), collects=self.wants)
        positions = WORD * (p.B + p.H + p.M + p.N)
        sums = p.B * p.H * p.M * (wide + 1) if p.grad is not None else 0
        sums += self.packing if self.rounds else 0
        return positions + sums + ROWS * rows * wide + max(bits, drawn, stats, steps)

    def summary(self) -> str:
        dtype = f"{NAMES[self.factors]} " if self.rounds else ""
        return f"{dtype}matrix products on tiles of {self.size}"

    def visits(
        self, given: Operands[torch.Tensor], scratch: Mapping[str, torch.Tensor],
        divisors: torch.Tensor | None = None,
    ) -> Iterator[Here]:  # fmt: skip
        """Each tile of a call. divisors: as `divisors_of` gives them."""
        places = self.places(given.mask, given.q)
        for slot in self.tiles(given.mask):
            yield Here(self, slot, given, scratch, places, divisors)

    def divisors_of(self, lse: torch.Tensor) -> torch.Tensor | None:
        """Room for the sums that divide recomputed weights, 1 until known; None if lse suffices: it
        is small, or of more keys than these. Off the CPU looking at lse takes longer."""
        tells = self.problem.node.part or (lse.is_cpu and not products.reaches_far(lse))
        divides = self.rounds or self.problem.gathers or not tells
        return torch.ones_like(lse) if divides else None

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
        o = p.new_o(given.q.device, scratch)
        stats = {n: p.new_statistic(n, o.device, scratch) for n in p.node.stats}
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
        totals, divisors = self.totals(given), self.divisors_of(read.lse)
        for here in self.visits(given, scratch, divisors):
            if here.slot.tile.parts:
                here.pull(k, v, read, (dq, dk, dv), totals)
            else:
                here.slot.rows(dq).zero_()
        gradients = {0: dq, 1: dk.to(p.dtype), 2: dv.to(p.dtype)}
        gradients |= self.collected(given, totals)
        del totals  # else sums of narrow gradients would stay beside the sinks' memory
        if given.sinks is not None and divisors is not None:
            place = p.node.roles.index("sinks")
            gradients[place] = sink_gradient_of(p.grad, operands, divisors)
        return gradients


@final
@frozen(eq=False)
class Here:
    """One tile of a call, with its buffers.

    places: all, not its own alone. divisors: room [B,H,M] for the sums of weights; None if weights
    are not divided by them.
    """

    tiles: ProductTiles
    slot: ProductSlot
    given: Operands[torch.Tensor]
    scratch: Mapping[str, torch.Tensor]
    places: Place
    divisors: torch.Tensor | None = None

    def room(self, name: str, last: int) -> torch.Tensor:
        """A buffer as [n, L, last]."""
        n, L = self.slot.lines
        return self.scratch[name][: n * L * last].view(n, L, last)

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        """x [n,L,S] as a factor of products, in the buffer of factors unless it has the right
        dtype."""
        return self.room("factor", x.shape[2]).copy_(x) if self.tiles.rounds else x

    @property
    def product(self) -> torch.Tensor | None:
        return self.scratch.get("product")

    def multiply(self, s: torch.Tensor, x: torch.Tensor, keys: torch.Tensor, scale: float) -> None:
        """s [n,L,S] = scale * x keys^T, of this tile's keys."""
        room = self.room("factor", s.shape[2]) if self.tiles.rounds else None
        products.scores_(s, x, self.slot.keys_of(keys), scale, room=room)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[n,L,S] as [batch,heads,rows,S]."""
        return x.view(self.slot.grid)

    def load(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This tile's queries of x [B,H,M,D], gathered in a buffer as [n,L,D]."""
        room = self.room(name, x.shape[3])
        self.heads(room).copy_(self.slot.rows(x))
        return room

    def keys_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tile's keys of x [B,G,N,D], as [n,S,D] for each run of parts without a hole."""
        return self.slot.keys_of(x)

    def place(self, part: Part) -> Place:
        tile = self.slot.tile
        keys = range(part.start, part.stop)
        return place_within(self.places, tile.batch, self.slot.heads, tile.rows, keys)

    def pieces(self, s: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """Each part of the scores [n,L,S] as [batch,heads,rows,keys]."""
        four, at = self.heads(s), 0
        for part in self.slot.tile.parts:
            yield part, four[..., at : at + len(part)]
            at += len(part)

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, save: Callable[[int, torch.Tensor], None],
        first: Callable[[], None] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The modified and masked scores. `save` gets each step's result before the next; `first`
        is called after a soft cap in the products, with its tanh in step0."""
        node, s = self.tiles.problem.node, self.room("s", self.slot.keys)
        cap = self.tiles.cap
        if cap is None:
            self.multiply(s, q, k, node.scale)
        else:
            tanh = self.room("step0", self.slot.keys) if "step0" in self.scratch else s
            self.multiply(tanh, q, k, node.scale / cap)
            products.cap_(s, tanh, cap)
            if first is not None:
                first()
        for i in range(int(cap is not None), len(node.modifiers)):
            self.change_(i, s)
            save(i, s)
        for at, part in self.slot.mixed:
            assert node.mask is not None
            piece = self.heads(s)[..., at : at + len(part)]
            hide_(piece, self.tiles.bits(self.slot, part, self.places, piece))
        return s

    def change_(self, i: int, s: torch.Tensor) -> None:
        modifier, data = self.tiles.problem.node.modifiers[i], self.given.modifiers[i]
        hidden = s == -INF if self.tiles.restores[i] else None
        for part, piece in self.pieces(s):
            change_(modifier, piece, self.place(part).reading(data))
        if hidden is not None:
            s.masked_fill_(hidden, -INF)

    def draw(self, part: Part, compare: Compare) -> torch.Tensor:
        """Dropout's draws for a part of this tile, [batch,heads,rows,keys]."""
        at, given, node = self.place(part), self.given, self.tiles.problem.node
        assert at.ranges is not None
        assert given.seed is not None
        assert given.offset is not None
        seed = int(given.seed), int(given.offset)
        ranges, H, period = place_in_whole(node.origin, at.ranges, at.H)
        return draw(node.dropout, seed, ranges, H, self.scratch, compare, period)

    def dropped_(self, *weights: torch.Tensor) -> None:
        """p -> p * z / (1 - rate), of each p, by the same z."""
        for several in zip(*map(self.pieces, weights), strict=True):
            z = self.draw(several[0][0], torch.ge)
            for _, piece in several:
                piece.mul_(z)
        for p in weights:
            p.div_(1 - self.tiles.problem.node.dropout)

    def sign_(self, p: torch.Tensor) -> None:
        for part, piece in self.pieces(p):
            piece.copysign_(self.draw(part, torch.sub))

    def attend(self, k: torch.Tensor, v: torch.Tensor, results: Mapping[str, torch.Tensor]) -> None:
        o, lse = self.room("o", v.shape[3]), self.room("lse", 1)
        if self.slot.tile.parts:
            self.softmax(k, v, o, lse, results)
        else:
            self.see_nothing(o, lse)
            self.take_statistics(o.new_empty((*results["lse"].shape, 0)), results)
        results["o"].copy_(self.heads(o))
        results["lse"].copy_(self.heads(lse)[..., 0])

    def see_nothing(self, o: torch.Tensor, lse: torch.Tensor) -> None:
        """o [n,L,E] and lse [n,L,1] of a tile without keys."""
        o.zero_()
        lse.fill_(-INF)
        if self.sinks is not None:
            lse.copy_(self.sinks)

    @cached_property
    def sinks(self) -> torch.Tensor | None:
        """The sink of each row, [n,L,1] in the dtype of scores."""
        return None if self.given.sinks is None else self.spread(self.given.sinks)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """A number of each head, x [H], as [n,L,1]."""
        room, heads = torch.empty_like(self.room("lse", 1)), self.slot.heads
        self.heads(room).copy_(x[heads.start : heads.stop, None, None])
        return room

    def take_statistics(self, s: torch.Tensor, results: Mapping[str, torch.Tensor]) -> None:
        """Fill the statistics beside lse, each by its own definition on this tile's scores."""
        for name in self.tiles.more:
            results[name].copy_(ops.STATISTICS[name]().run(s)[0])

    def softmax(
        self, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
        results: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """o [n,L,E] and lse [n,L,1] of a tile with keys, and the statistics beside them."""
        s = self.scores(self.load("q", self.given.q), k, lambda i, s: None)
        self.take_statistics(self.heads(s), results)
        total = self.room("total", 1)
        products.softmax_(s, lse, total, None if self.given.sinks is None else self.sinks)
        if self.tiles.problem.node.dropout:
            self.dropped_(s)
        products.weigh_(o, self.factor(s), self.slot.keys_of(v), room=self.product)
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
        self.weigh_(p, stats)
        ds = self.room("ds", self.slot.keys)
        surplus = self.room("delta", 1)
        if read.do is None:
            ds.zero_()
            surplus.zero_()
        else:
            self.cotangent(ds, surplus, p, v, read.o, read.do, dv)
            if self.tiles.weighs_cotangents:
                torch.sum(ds.mul_(p), -1, keepdim=True, out=surplus)
        if read.dlse is not None:
            self.heads(surplus).sub_(self.slot.rows(read.dlse)[..., None])
            self.clear(surplus)
        if read.do is not None and self.tiles.weighs_cotangents:
            ds.addcmul_(p, surplus, value=-1)
        else:
            ds.sub_(surplus).mul_(p)
        self.modifiers_back(ds, totals)
        sums, factor = self.room("dq", q.shape[2]), self.factor(ds)
        products.weigh_(sums, factor, self.slot.keys_of(k), node.scale, room=self.product)
        self.slot.rows(dq).copy_(self.heads(sums))
        products.add_transposed_(self.slot.keys_of(dk), factor, q, node.scale, self.product)

    def weigh_(self, s: torch.Tensor, lse: torch.Tensor) -> torch.Tensor | None:
        """s -> exp(s - lse), divided by its sum with the sinks if lse [n,L,1] is rounded or of
        other scores. Returns this sum if it was needed."""
        products.exp_(s, lse)
        if self.divisors is None:
            return None
        total = torch.sum(s, -1, keepdim=True, out=self.room("total", 1))
        if self.sinks is not None:
            total.add_(products.exp_of(self.sinks, lse))
        s.div_(total.masked_fill_(total == 0.0, 1.0))
        self.slot.rows(self.divisors).copy_(self.heads(total)[..., 0])
        return total

    def clear(self, x: torch.Tensor) -> torch.Tensor:
        """x [n,L,.] with 0, in place, in the rows without keys."""
        return x.masked_fill_(self.room("lse", 1) == -INF, 0.0) if self.tiles.blind else x

    def cotangent(
        self, dp: torch.Tensor, delta: torch.Tensor, p: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, do: torch.Tensor, dv: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fill dp, and delta unless it comes from dp, and add to dv."""
        cotangents = self.clear(self.load("do", do))
        if not self.tiles.weighs_cotangents:
            torch.sum(self.load("o", o).mul_(cotangents), -1, keepdim=True, out=delta)
        if self.tiles.rounds:  # as do is itself
            cotangents = self.room("cotangent", do.shape[3]).copy_(cotangents)
        rate = self.tiles.problem.node.dropout
        weights, scale = p, 1 / (1 - rate)
        if rate:
            self.sign_(p)
            weights = torch.clamp(p, min=0.0, out=self.room("weights", self.slot.keys))
        factor, values = self.factor(weights), self.slot.keys_of(dv)
        products.add_transposed_(values, factor, cotangents, scale, self.product)
        self.multiply(dp, cotangents, v, scale)
        if rate:
            products.drop_(dp, p, out=p)

    def kept_steps(self) -> Callable[[int, torch.Tensor], None]:
        """Stores the result of each modifier for its derivative, if needed."""

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
            if i == 0 and self.tiles.cap is not None:
                products.cap_back_(ds, self.room("step0", self.slot.keys))
                break
            results = self.room(f"step{i}" if f"step{i}" in self.scratch else "s", self.slot.keys)
            restores = self.tiles.restores[i] and not modifier.additive
            hidden = results == -INF if restores else None
            for (part, piece), (_, result) in zip(
                self.pieces(ds), self.pieces(results), strict=True
            ):
                at = self.place(part).reading(data)
                if sums:
                    modifier.collect(sums, piece, at)
                back_(modifier, piece, result, at)
            if hidden is not None:
                ds.masked_fill_(hidden, 0.0)
