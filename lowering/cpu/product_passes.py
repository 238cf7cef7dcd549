"""Attention and its derivatives by matrix products: one loop over tiles for all four passes.

In forward mode each block has a block of tangents, and a product's tangent is two products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import final

import torch
from attrs import frozen

from attn_graph.ir import ops
from attn_graph.ir.modifiers import Modifier, back_, change_
from attn_graph.kernels import products
from attn_graph.kernels.hiding import hide_
from attn_graph.lowering.cpu.product_tiles import (
    ZERO,
    Call,
    Dual,
    Maybe,
    Pair,
    ProductTiles,
    Read,
    Tensors,
    moves_of,
    product_of,
)
from attn_graph.lowering.cpu.tile_grid import draw
from attn_graph.machine.philox import Compare, place_in_whole
from attn_graph.masks.places import Place
from attn_graph.sparsity.parts import Tile
from attn_graph.spec import INF


def run_products(
    tiles: ProductTiles, operands: Sequence[torch.Tensor], scratch: Tensors
) -> Sequence[torch.Tensor]:
    """The results of a pass, in the order of their names."""
    call = Call.of(tiles, operands, scratch)
    return attend(call) if tiles.problem.grad is None else pull(call)


def attend(call: Call) -> list[torch.Tensor]:
    """The results of an attention, and their tangents."""
    tiles, p, op, device = call.tiles, call.tiles.problem, call.tiles.op, call.given.q.device
    made = {"o": p.new_o(device, call.scratch)}
    made |= {n: p.new_statistic(n, device, call.scratch) for n in op.names if n not in ("o", "to")}
    made |= {"to": p.new_o(device)} if "to" in op.names else {}
    for tile in tiles.tiles(call.given.mask):
        Here(tiles, call, tile).attend({name: tile.cut_queries(x) for name, x in made.items()})
    return [made[name] for name in op.names]


def pull(call: Call) -> list[torch.Tensor]:
    """The wanted gradients of an attention, or their tangents."""
    p, tiles, grad = call.tiles.problem, call.tiles, call.tiles.problem.grad
    assert grad is not None
    sums, totals = start_sums(call), tiles.totals(call.given)
    for tile in tiles.tiles(call.given.mask):
        Here(tiles, call, tile).pull(sums, totals)
    made = {n: x.to(p.specs[n].dtype) for n, x in sums.items()}
    made |= tiles.collected(totals)
    return [made[n] for n, wanted in enumerate(grad.wants) if wanted]


def start_sums(call: Call) -> dict[int, torch.Tensor]:
    """Room for the wanted gradients of q, k, v and sinks, by number of the operand: zeros, but for
    q, filled by its rows."""
    p, given, wants = call.tiles.problem, call.given, call.tiles.wants
    sums = {0: given.q.new_empty(given.q.shape)} if wants(0) else {}
    for n, name, x in ((1, "dk", given.k), (2, "dv", given.v)):
        if wants(n):
            room = call.scratch.get(name)
            sums[n] = x.new_zeros(x.shape) if room is None else room.zero_()
    if given.sinks is not None and wants(place := p.node.roles.index("sinks")):
        sums[place] = given.sinks.new_zeros(given.sinks.shape, dtype=p.wide)
    return sums


@final
@frozen(eq=False)
class Here:
    """One tile of a call."""

    tiles: ProductTiles
    call: Call
    tile: Tile

    # Memory

    def room(self, name: str, last: int) -> torch.Tensor:
        """A buffer as [n,L,last]."""
        n, L = self.tile.lines
        return self.call.scratch[name][: n * L * last].view(n, L, last)

    def block(self, name: str) -> torch.Tensor:
        """A buffer of scores."""
        return self.room(name, self.tile.keys)

    def rooms(self, name: str, last: int) -> Dual[torch.Tensor]:
        """A buffer, and that of its tangent in forward mode."""
        moved = None if self.tiles.jvp is None else self.room(f"t{name}", last)
        return Dual(self.room(name, last), moved)

    def save(self, name: str, x: torch.Tensor) -> None:
        """Copy scores for a derivative, if it needs them."""
        if name in self.call.scratch:
            self.block(name).copy_(x)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[n,L,S] as [batch,heads,rows,S]."""
        return x.view(self.tile.grid)

    def load(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This tile's queries of x [B,H,M,D], gathered in a buffer as [n,L,D]."""
        room = self.room(name, x.shape[3])
        room.view(self.tile.grid).copy_(self.tile.cut_queries(x))
        return room

    def load_known(self, name: str, x: Maybe) -> Maybe:
        return None if x is None else self.load(name, x)

    def load_both(self, name: str, x: torch.Tensor, moved: Maybe) -> Dual[torch.Tensor]:
        return Dual(self.load(name, x), None if moved is None else self.load(f"t{name}", moved))

    def spread(self, x: Maybe) -> Maybe:
        """A number of each head, x [H], as [n,L,1]."""
        if x is None:
            return None
        room, heads = torch.empty_like(self.room("lse", 1)), self.tile.heads
        self.heads(room).copy_(x[heads.start : heads.stop, None, None])
        return room

    @cached_property
    def sinks(self) -> Dual[Maybe]:
        """The sink of each row, [n,L,1] in the dtype of scores."""
        sinks, moved = self.call.given.sinks, self.call.moved.sinks
        return ZERO if sinks is None else Dual(self.spread(sinks), self.spread(moved))

    def clear(self, x: torch.Tensor) -> torch.Tensor:
        """x [n,L,.] with 0, in place, in the rows without keys."""
        return x.masked_fill_(self.room("lse", 1) == -INF, 0.0) if self.tiles.blind else x

    # Products

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        """x [n,L,S] as a factor of products, in the buffer of factors unless it has the right
        dtype."""
        return self.block("factor").copy_(x) if self.tiles.rounds else x

    def result(self, a: Dual[Maybe], b: Dual[Maybe]) -> list[Pair]:
        """The products that make a result of this pass: of a b, or of its tangent."""
        return product_of(a, b) if self.tiles.jvp is None else moves_of(a, b)

    def multiply(self, s: torch.Tensor, terms: Sequence[Pair], scale: float) -> None:
        """s [n,L,S] = scale * the sum of x keys^T, of this tile's keys."""
        room = self.block("factor") if self.tiles.rounds else None
        if not terms:
            s.zero_()
        for n, (x, keys) in enumerate(terms):
            products.scores_(s, x, self.tile.cut_keys(keys), scale, min(n, 1), room)

    def weigh(self, o: torch.Tensor, terms: Sequence[Pair], scale: float = 1.0) -> None:
        """o [n,L,E] = scale * the sum of p values, of this tile's keys."""
        if not terms:
            o.zero_()
        for n, (p, values) in enumerate(terms):
            keys = self.tile.cut_keys(values)
            products.weigh_(o, p, keys, scale, min(n, 1), self.call.scratch.get("product"))

    def weigh_back(self, total: torch.Tensor, terms: Sequence[Pair], scale: float) -> None:
        """Add scale * the sum of p^T x to this tile's keys of a total [B,G,N,E]."""
        for p, x in terms:
            room = self.call.scratch.get("product")
            products.add_transposed_(self.tile.cut_keys(total), p, x, scale, room)

    # Scores, from the products to the weights

    def scores(self, q: Dual[torch.Tensor]) -> Dual[torch.Tensor]:
        """The modified and masked scores, and their tangents, 0 in masked places."""
        node, cap, both = self.tiles.problem.node, self.tiles.cap, self.rooms("s", self.tile.keys)
        s, ts = both.value, both.tangent
        if ts is not None:
            self.multiply(ts, moves_of(q, self.call.k), node.scale)
        first = s if cap is None or "step0" not in self.call.scratch else self.block("step0")
        self.multiply(first, product_of(q, self.call.k), node.scale / (cap or 1.0))
        if cap is not None:
            products.cap_(s, first, cap)
            if ts is not None:
                products.cap_back_(ts, first)
                self.save("tstep0", ts)
        for i in range(int(cap is not None), len(node.modifiers)):
            self.change_(i, s)
            self.save(f"step{i}", s)
            if ts is not None:
                self.push_(i, s, ts)
                self.save(f"tstep{i}", ts)
        for at, part in self.tile.mixed:
            keys = slice(at, at + len(part))
            piece = s.view(self.tile.grid)[..., keys]
            hide_(piece, self.tiles.bits(self.tile, part, self.call.places, piece))
            if ts is not None:
                self.cut(keys, ts).masked_fill_(piece == -INF, 0.0)
        if ts is not None and any(m.hides for m in node.modifiers):
            ts.masked_fill_(s == -INF, 0.0)
        return both

    def step(self, i: int) -> tuple[Modifier, Tensors]:
        """A modifier, and its tensors."""
        return self.tiles.problem.node.modifiers[i], self.call.given.modifiers[i]

    def pieces(self) -> Iterator[tuple[Place, partial[torch.Tensor]]]:
        """The places of each part of the keys, and a cut of its scores [batch,heads,rows,keys] out
        of a block."""
        tile, at = self.tile, 0
        for part in tile.parts:
            keys = range(part.start, part.stop)
            place = self.call.places.within(tile.batch, tile.heads, tile.rows, keys)
            yield place, partial(self.cut, slice(at, at + len(part)))
            at += len(part)

    def cut(self, keys: slice, s: torch.Tensor) -> torch.Tensor:
        return self.heads(s)[..., keys]

    def change_(self, i: int, s: torch.Tensor) -> None:
        modifier, data = self.step(i)
        hidden = s == -INF if self.tiles.problem.node.restores[i] else None
        for place, cut in self.pieces():
            change_(modifier, cut(s), place.reading(data))
        if hidden is not None:
            s.masked_fill_(hidden, -INF)

    def push_(self, i: int, s: torch.Tensor, ts: torch.Tensor) -> None:
        """Take the tangents of scores through the modifier with result s."""
        modifier, data = self.step(i)
        moved = self.call.moved.modifiers[i]
        tangents = {name: t for name, t in moved.items() if t is not None}
        for place, cut in self.pieces():
            piece, at = cut(ts), place.reading(data)
            if not modifier.additive:
                back_(modifier, piece, cut(self.block("scrap")).copy_(cut(s)), at)
            if tangents and (spread := modifier.spread(piece, tangents, at)) is not piece:
                piece.copy_(spread)

    def draw(self, at: Place, compare: Compare) -> torch.Tensor:
        """Dropout's draws for a part of this tile, [batch,heads,rows,keys]."""
        node, call = self.tiles.problem.node, self.call
        assert at.ranges is not None
        ranges, H, period = place_in_whole(node.origin, at.ranges, at.H)
        return draw(node.dropout, call.seed, ranges, H, call.scratch, compare, period)

    def dropped_(self, *weights: torch.Tensor) -> None:
        """p -> p * z / (1 - rate), of each p, by the same z."""
        for place, cut in self.pieces():
            z = self.draw(place, torch.ge)
            for p in weights:
                cut(p).mul_(z)
        for p in weights:
            p.div_(1 - self.tiles.problem.node.dropout)

    def weigh_again_(self, s: torch.Tensor, lse: torch.Tensor) -> Maybe:
        """s -> exp(s - lse), divided by its sum with the sinks if lse [n,L,1] is rounded or of
        other scores. Returns this sum if it was needed."""
        products.exp_(s, lse)
        if not self.call.divides:
            return None
        total = torch.sum(s, -1, keepdim=True, out=self.room("total", 1))
        if self.sinks.value is not None:
            total.add_(products.exp_of(self.sinks.value, lse))
        s.div_(total.masked_fill_(total == 0.0, 1.0))
        return total

    # The attention

    def attend(self, results: Tensors) -> None:
        """Fill this tile's rows of the results, by name."""
        o, lse = self.rooms("o", self.tiles.problem.E), self.rooms("lse", 1)
        (self.softmax if self.tile.parts else self.see_nothing)(o, lse, results)
        if o.tangent is not None and lse.tangent is not None:
            o.tangent.addcmul_(o.value, lse.tangent, value=-1)
            results["to"].copy_(self.heads(o.tangent))
            results["tlse"].copy_(self.heads(lse.tangent)[..., 0])
        results["o"].copy_(o.value.view(self.tile.grid))
        results["lse"].copy_(lse.value.view(self.tile.grid)[..., 0])

    def see_nothing(self, o: Dual[torch.Tensor], lse: Dual[torch.Tensor], results: Tensors) -> None:
        """`softmax` of a tile without keys."""
        self.take_statistics(o.value.new_empty((*results["lse"].shape, 0)), results)
        sink, moved = self.sinks.value, self.sinks.tangent
        o.value.zero_()
        lse.value.fill_(-INF) if sink is None else lse.value.copy_(sink)
        if o.tangent is not None and lse.tangent is not None:
            o.tangent.zero_()
            lse.tangent.zero_()
            if moved is not None:
                lse.tangent.copy_(moved).masked_fill_(lse.value == -INF, 0.0)

    def take_statistics(self, s: torch.Tensor, results: Tensors) -> None:
        """Fill the statistics beside lse, each by its own definition on this tile's scores."""
        for name in self.tiles.more:
            results[name].copy_(ops.STATISTICS[name]().run(s)[0])

    def softmax(self, o: Dual[torch.Tensor], lse: Dual[torch.Tensor], results: Tensors) -> None:
        """o [n,L,E] and lse [n,L,1] of a tile with keys, and the statistics beside them; of the
        tangent of o the part sum_j p z (ts v + tv)."""
        s, total, v = self.scores(self.queries), self.room("total", 1), self.call.v
        if self.tiles.more:
            self.take_statistics(self.heads(s.value), results)
        own = products.softmax_(s.value, lse.value, total, self.sinks.value)
        if s.tangent is not None and lse.tangent is not None:
            torch.sum(s.tangent.mul_(s.value), -1, keepdim=True, out=lse.tangent)
            if own is not None and self.sinks.tangent is not None:
                lse.tangent.addcmul_(own, self.sinks.tangent)
            lse.tangent.div_(total)
        if self.tiles.problem.node.dropout:
            self.dropped_(*s.known)
        weights = Dual(self.factor(s.value), s.tangent if self.call.moves_scores else None)
        self.weigh(o.value, product_of(weights, v))
        o.value.div_(total)
        if o.tangent is not None:
            self.weigh(o.tangent, moves_of(weights, v))
            o.tangent.div_(total)

    @property
    def queries(self) -> Dual[torch.Tensor]:
        """This tile's rows of q."""
        return self.load_both("q", self.call.given.q, self.call.moved.q)

    # Its gradient

    def pull(self, sums: Mapping[int, torch.Tensor], totals: Sequence[Tensors]) -> None:
        """Add this tile's share of every wanted gradient, by the formulas of AttentionGrad; or of
        its tangent, by those of AttentionJvp."""
        read, roles = self.call.read, self.tiles.problem.node.roles
        assert read is not None
        lse = self.load_both("lse", read.lse.value, read.lse.tangent)
        do = Dual(self.load_known("do", read.do.value), self.load_known("tdo", read.do.tangent))
        for x in (lse.tangent, *do.known):
            if x is not None:
                self.clear(x)
        surplus, total = self.surplus(read, do), None
        if self.tile.parts:
            total = self.pull_scores(lse, do, surplus, sums, totals)
        elif 0 in sums:
            self.tile.cut_queries(sums[0]).zero_()
        if "sinks" in roles and (place := roles.index("sinks")) in sums:
            self.pull_sinks(lse, surplus, total, sums[place])

    def surplus(self, read: Read, do: Dual[Maybe]) -> Dual[torch.Tensor]:
        """delta - dlse [n,L,1]; without delta if it is to be summed from p dp."""
        surplus, o = self.rooms("delta", 1), ZERO
        if not self.tiles.weighs_cotangents and do.known:
            o = self.load_both("o", read.o.value, read.o.tangent)
        if surplus.tangent is not None:  # first: o is overwritten then
            pairs, room = moves_of(o, do), self.room("to", self.tiles.problem.E)
            self.sum_products(surplus.tangent, pairs, room, read.dlse.tangent)
        pairs, room = product_of(o, do), self.room("o", self.tiles.problem.E)
        self.sum_products(surplus.value, pairs, room, read.dlse.value)
        return surplus

    def sum_products(
        self, out: torch.Tensor, pairs: Sequence[Pair], room: torch.Tensor, less: Maybe
    ) -> None:
        """out [n,L,1] = sum_e x y, of each pair, less numbers [B,H,M,1]; 0 in rows without keys."""
        if not pairs:
            out.zero_()
        for n, (x, y) in enumerate(pairs):
            torch.mul(x, y, out=room)
            out.add_(room.sum(-1, keepdim=True)) if n else torch.sum(room, -1, True, out=out)
        if less is not None:
            self.heads(out).sub_(self.tile.cut_queries(less))
        self.clear(out)

    def pull_scores(
        self, lse: Dual[torch.Tensor], do: Dual[Maybe], surplus: Dual[torch.Tensor],
        sums: Mapping[int, torch.Tensor], totals: Sequence[Tensors],
    ) -> Maybe:  # fmt: skip
        """Add the shares that go through scores. Returns the divisor of exp(s - lse), unless 1."""
        q, rate = self.queries, self.tiles.problem.node.dropout
        scores = self.scores(q)
        p, u = scores.value, scores.tangent  # u: the tangent of p over p
        total = self.weigh_again_(p, lse.value)
        if u is not None and lse.tangent is not None:
            u.sub_(lse.tangent)
        if self.tiles.rounds and do.value is not None:  # as do is itself
            do = Dual(self.room("cotangent", do.value.shape[2]).copy_(do.value))
        if rate:  # dropped weights become negative
            for place, cut in self.pieces():
                cut(p).copysign_(self.draw(place, torch.sub))
        if 2 in sums:
            self.weigh_back(sums[2], self.result(self.left(p, u), do), 1 / (1 - rate))
        if self.tiles.weighs_cotangents or 0 in sums or 1 in sums or any(totals):
            ds = self.pull_weights(p, u, do, surplus)
            self.pull_steps(ds, totals)
            self.pull_products(q, ds, sums)
        return total

    def left(self, p: torch.Tensor, u: Maybe) -> Dual[torch.Tensor]:
        """The weights that dropout left, as factors. p: negative where dropped."""
        if self.tiles.problem.node.dropout:
            p = torch.clamp(p, min=0.0, out=self.block("ds"))
        moved = None if u is None else torch.mul(p, u, out=self.block("tds"))
        return Dual(self.factor(p), moved)

    def pull_weights(
        self, p: torch.Tensor, u: Maybe, do: Dual[Maybe], surplus: Dual[torch.Tensor]
    ) -> Dual[torch.Tensor]:
        """ds = p g, and tds = p (u g + tg), of the masked scores, with g = dp - surplus."""
        scores, rate = self.rooms("ds", self.tile.keys), self.tiles.problem.node.dropout
        ds, tds = scores.value, scores.tangent
        self.multiply(ds, product_of(do, self.call.v), 1 / (1 - rate))
        if tds is not None:
            self.multiply(tds, moves_of(do, self.call.v), 1 / (1 - rate))
        if rate:
            for x in scores.known:
                products.drop_(x, p)
            p.abs_()
        if self.tiles.weighs_cotangents:
            self.take_mean_(ds, p, surplus.value)
            return scores
        ds.sub_(surplus.value)
        if tds is not None and u is not None and surplus.tangent is not None:
            tds.sub_(surplus.tangent).addcmul_(u, ds).mul_(p)
        ds.mul_(p)
        return scores

    def take_mean_(self, ds: torch.Tensor, p: torch.Tensor, surplus: torch.Tensor) -> None:
        """ds = p (dp - delta + dlse), from dp, with delta the sum of p dp; in one look at each row,
        unless sinks read delta as well. surplus: -dlse, and delta - dlse for sinks then."""
        assert self.call.read is not None
        if self.sinks.value is not None:
            surplus.add_(ds.mul_(p).sum(-1, keepdim=True))
            ds.addcmul_(p, surplus, value=-1)
            return
        products.softmax_backward(ds, p, -1, ds.dtype, grad_input=ds)
        if self.call.read.dlse.value is not None:
            ds.addcmul_(p, surplus, value=-1)

    def pull_steps(self, ds: Dual[torch.Tensor], totals: Sequence[Tensors]) -> None:
        """ds of the last step -> ds of the products, collecting the modifiers' own gradients."""
        for i, sums in reversed([*enumerate(totals)]):
            if i == 0 and self.tiles.cap is not None:
                self.pull_cap(ds, self.tiles.cap)
            elif sums or i in self.tiles.bent:
                self.pull_step(i, ds, sums)

    def pull_cap(self, ds: Dual[torch.Tensor], cap: float) -> None:
        tanh = self.block("step0")
        if ds.tangent is not None:
            moved = self.block("tstep0")
            products.bend_cap_(moved, ds.value, tanh, cap)
            products.cap_back_(ds.tangent, tanh)
            ds.tangent.add_(moved)
        products.cap_back_(ds.value, tanh)

    def pull_step(self, i: int, ds: Dual[torch.Tensor], sums: Tensors) -> None:
        modifier, data = self.step(i)
        result = ds.value if ds.tangent is None else ds.tangent
        restores = self.tiles.problem.node.restores[i] and not modifier.additive
        hidden = self.block(f"step{i}") == -INF if restores else None
        for place, cut in self.pieces():
            at = place.reading(data)
            if sums:
                modifier.collect(sums, cut(result), at)
            if modifier.additive:
                continue
            s, bent = cut(self.block(f"step{i}")), None
            if ds.tangent is not None:
                again = cut(self.block("scrap")).copy_(s)
                bent = modifier.bend(cut(ds.value), cut(self.block(f"tstep{i}")), s, at)
                back_(modifier, cut(ds.tangent), again, at)
                if bent is not None:
                    cut(ds.tangent).add_(bent)
            back_(modifier, cut(ds.value), s, at)
        if hidden is not None:
            for x in ds.known:
                x.masked_fill_(hidden, 0.0)

    def pull_products(
        self, q: Dual[torch.Tensor], ds: Dual[torch.Tensor], sums: Mapping[int, torch.Tensor]
    ) -> None:
        """dq = scale ds k, and dk += scale ds^T q, or their tangents."""
        scale, factors = self.tiles.problem.node.scale, Dual(self.factor(ds.value), ds.tangent)
        if 0 in sums:
            dq = self.room("dq", self.tiles.problem.D)
            self.weigh(dq, self.result(factors, self.call.k), scale)
            self.tile.cut_queries(sums[0]).copy_(self.heads(dq))
        if 1 in sums:
            self.weigh_back(sums[1], self.result(factors, q), scale)

    def pull_sinks(
        self, lse: Dual[torch.Tensor], surplus: Dual[torch.Tensor], total: Maybe,
        dsinks: torch.Tensor,
    ) -> None:  # fmt: skip
        """Add - sum_bi exp(sinks - lse) surplus, or its tangent. total: divides exp(. - lse)."""
        sink, moved, heads = self.sinks.value, self.sinks.tangent, self.tile.heads
        assert sink is not None
        shares, due = products.exp_of(sink, lse.value), surplus.value
        if total is not None:
            shares.div_(total)
        if lse.tangent is not None and surplus.tangent is not None:
            moves = -lse.tangent if moved is None else moved - lse.tangent
            due = moves.mul_(due).add_(surplus.tangent)
        dsinks[heads.start : heads.stop] -= self.heads(shares.mul_(due)).sum((0, 2, 3))
