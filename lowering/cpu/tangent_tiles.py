"""Forward mode on tiles, by matrix products: tangents of an attention, and of its gradient.

Each block of scores has a block of tangents beside it. Products, places, masks and dropout come
from `product_tiles`; at most some tiles of scores ever exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.attention import AttentionGrad, Operands
from attn_graph.ir.modifiers import Modifier, back_
from attn_graph.ir.relative import MODIFIERS
from attn_graph.ir.tangents import AttentionJvp, GradientTangents
from attn_graph.kernels import products
from attn_graph.lowering.cpu.product_slots import packs
from attn_graph.lowering.cpu.product_tiles import Here, ProductTiles
from attn_graph.lowering.problem import Problem
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks.places import Place
from attn_graph.spec import INF, TensorSpec

TRACED = 8  # blocks of scores held by PyTorch, at most, while it differentiates a step
ADDED = 3  # the same of a step's own tangent: the block, its distances, their product
Tensors = Mapping[str, torch.Tensor]
Maybe = torch.Tensor | None


@final
@frozen
class TangentTiles:
    """The tiles of an AttentionJvp. tiles: of the function it differentiates.

    moved: the spec of each tangent of the attention's operands; None without a tangent.
    """

    op: AttentionJvp
    tiles: ProductTiles
    moved: tuple[TensorSpec | None, ...]

    @classmethod
    def plan(cls, op: AttentionJvp, specs: Sequence[TensorSpec]) -> TangentTiles:
        """specs: of the operands, in their order."""
        read, moved = op.split(specs)
        problem = Problem.of(op.of, read)
        return cls(op, ProductTiles.plan(problem, problem.wide), moved)

    @property
    def problem(self) -> Problem:
        return self.tiles.problem

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        p, wide, tiles = self.problem, self.problem.wide, self.tiles
        rows = tiles.batch * tiles.groups * tiles.r * tiles.rows
        block = Buffer((rows * tiles.reach,), wide)
        buffers = {name: x for name, x in tiles.buffers.items() if name != "weights"}
        for name, spec in zip("kv", self.moved[1:3], strict=True):
            if spec is not None and packs(spec, p.wide):
                buffers[f"t{name}"] = Buffer(spec.shape, wide)
        buffers |= {"ts": block, "tq": Buffer((rows * p.D,), wide)}
        buffers |= {"to": Buffer((rows * p.E,), wide), "mu": Buffer((rows,), wide)}
        steps = [i for i, m in enumerate(p.node.modifiers) if not m.additive]
        buffers |= {f"step{i}": block for i in steps if i == 0 or p.grad is not None}
        if any(i or tiles.cap is None for i in steps):
            buffers["scrap"] = block
        if p.grad is not None:
            buffers |= {f"tstep{i}": block for i in steps} | {"tds": block, "pu": block}
            buffers |= {"tdo": buffers["do"], "tdelta": Buffer((rows,), wide)}
        return buffers

    @cached_property
    def scratch(self) -> Scratch:
        return Scratch(self.buffers)

    @property
    def temporary(self) -> int:
        """Bytes allocated by PyTorch beside the workspace, at most."""
        tiles, p = self.tiles, self.problem
        rows = tiles.batch * tiles.groups * tiles.r * tiles.rows
        traced = any(type(m) not in MODIFIERS for m in p.node.modifiers)
        blocks = (TRACED if traced else 0) + (ADDED if p.node.modifiers else 0)
        vectors = 8 * (rows + p.H) * p.wide.itemsize if p.node.sinks else 0
        return tiles.temporary + rows * tiles.reach * (1 + blocks * p.wide.itemsize) + vectors

    def summary(self) -> str:
        return f"tangents by {self.tiles.summary()}"

    def run(self, operands: Sequence[torch.Tensor], scratch: Tensors) -> Sequence[torch.Tensor]:
        if self.op.grad is None:
            return self.push(*self.op.split(operands), scratch)
        return self.push_gradient(self.op.grad, self.op.directions(operands), scratch)

    def moves(self, own: Sequence[torch.Tensor], moved: Sequence[Maybe], scratch: Tensors) -> Moves:
        """k, v and their tangents as products read them, in scratch if they must be."""

        def pack(name: str, x: torch.Tensor) -> torch.Tensor:
            return scratch[name].copy_(x) if name in scratch else x

        k, v = pack("k", own[1]), pack("v", own[2])
        tk, tv = (
            None if x is None else pack(name, x)
            for name, x in zip(("tk", "tv"), moved[1:3], strict=True)
        )
        return Moves(k, v, tk, tv, self.problem.node.split(moved))

    def push(
        self, own: Sequence[torch.Tensor], moved: Sequence[Maybe], scratch: Tensors
    ) -> tuple[torch.Tensor, ...]:
        p, given = self.problem, self.problem.node.split(own)
        moves = self.moves(own, moved, scratch)
        device, shape = given.q.device, (p.B, p.H, p.M)
        stats = (*p.node.stats, "tlse")
        results = {"o": p.new_o(device), "to": p.new_o(device)}
        results |= {n: torch.empty(shape, dtype=p.wide, device=device) for n in stats}
        for here in self.tiles.visits(given, scratch):
            rows = {name: here.slot.rows(x) for name, x in results.items()}
            attend(here, moves, rows)
        return tuple(results[name] for name in self.op.names)

    def push_gradient(
        self, grad: AttentionGrad, x: GradientTangents[torch.Tensor], scratch: Tensors
    ) -> list[torch.Tensor]:
        p, own = self.problem, x.read.own
        given = p.node.split(own)
        moves = self.moves(own, x.own, scratch)
        sums = self.start_sums(given, scratch)
        for here in self.tiles.visits(given, scratch, self.tiles.divisors_of(x.read.lse)):
            push_back(here, moves, x, sums)
        gradients = {i: t.to(p.dtype) for i, t in enumerate(sums.qkv) if t is not None}
        gradients |= self.tiles.collected(given, sums.totals)
        if given.sinks is not None and sums.sinks is not None:
            gradients[p.node.roles.index("sinks")] = sums.sinks.to(given.sinks.dtype)
        return [gradients[i] for i, wanted in enumerate(grad.wants) if wanted]

    def start_sums(self, given: Operands[torch.Tensor], scratch: Tensors) -> Sums:
        """Room for the tangents of the wanted gradients: zeros, but for dq, written by its rows."""
        p, wants = self.problem, self.tiles.wants

        def zeros(name: str, like: torch.Tensor) -> torch.Tensor:
            if name in scratch:
                return scratch[name].zero_()
            return torch.zeros_like(like, memory_format=torch.contiguous_format)

        sinks = given.sinks
        if sinks is not None and not wants(p.node.roles.index("sinks")):
            sinks = None
        return Sums(
            torch.empty_like(given.q, memory_format=torch.contiguous_format) if wants(0) else None,
            zeros("dk", given.k) if wants(1) else None,
            zeros("dv", given.v) if wants(2) else None,
            self.tiles.totals(given),
            None if sinks is None else torch.zeros_like(sinks, dtype=p.wide),
        )


@final
@frozen(eq=False)
class Moves:
    """k and v and their tangents as products read them, and the tangents of all operands."""

    k: torch.Tensor
    v: torch.Tensor
    tk: Maybe
    tv: Maybe
    given: Operands[Maybe]

    @cached_property
    def scores(self) -> bool:
        """True if a score moves: not if v and the sinks alone have tangents."""
        parts = (x for each in self.given.modifiers for x in each.values())
        return any(x is not None for x in (self.given.q, self.tk, *parts))


@final
@frozen(eq=False)
class Sums:
    """Tangents of gradients, summed over tiles; None for unwanted ones."""

    dq: Maybe
    dk: Maybe
    dv: Maybe
    totals: list[dict[str, torch.Tensor]]
    sinks: Maybe

    @property
    def qkv(self) -> tuple[Maybe, Maybe, Maybe]:
        return self.dq, self.dk, self.dv

    @cached_property
    def scores(self) -> bool:
        return self.dq is not None or self.dk is not None or any(self.totals)


def push_tile_scores(
    here: Here, moves: Moves, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The modified and masked scores [n,L,S], and their tangents, 0 in masked places."""
    node, ts, moved = here.tiles.problem.node, here.room("ts", here.slot.keys), moves.given
    if moved.q is None and moves.tk is None:
        ts.zero_()
    if moved.q is not None:
        tq = here.load("tq", moved.q)
        products.scores_(ts, tq, here.keys_of(moves.k), node.scale)
    if moves.tk is not None:
        beta = int(moved.q is not None)
        products.scores_(ts, q, here.keys_of(moves.tk), node.scale, beta)

    def push(i: int, s: torch.Tensor) -> None:
        push_step(here, i, s, ts, moved.modifiers[i])

    s = here.scores(q, moves.k, push, lambda: push(0, ts))
    if any(m.hides for m in node.modifiers):
        ts.masked_fill_(s == -INF, 0.0)
    else:
        for at, part in here.slot.mixed:
            piece = slice(at, at + len(part))
            ts[..., piece].masked_fill_(s[..., piece] == -INF, 0.0)
    return s, ts


def push_step(
    here: Here, i: int, s: torch.Tensor, ts: torch.Tensor, moved: Mapping[str, Maybe]
) -> None:
    """Take the tangents of scores through the modifier with result s."""
    keys, data = here.slot.keys, here.given.modifiers[i]
    modifier = here.tiles.problem.node.modifiers[i]
    if i == 0 and here.tiles.cap is not None:
        products.cap_back_(ts, here.room("step0", keys))
    else:
        if f"step{i}" in here.scratch:
            here.room(f"step{i}", keys).copy_(s)
        copy = None if modifier.additive else here.room("scrap", keys).copy_(s)
        tangents = {name: t for name, t in moved.items() if t is not None}
        for (part, piece), each in zip(here.pieces(ts), optional_pieces(here, copy), strict=True):
            at = here.place(part).reading(data)
            if each is not None:
                back_(modifier, piece, each, at)
            if tangents:
                spread_(modifier, piece, tangents, at)
    if f"tstep{i}" in here.scratch:
        here.room(f"tstep{i}", keys).copy_(ts)


def spread_(modifier: Modifier, ts: torch.Tensor, tangents: Tensors, at: Place) -> None:
    """Add the part of a step's own tensors' tangents to ts, in its memory."""
    moved = modifier.spread(ts, tangents, at)
    if moved is not ts:
        ts.copy_(moved)


def optional_pieces(here: Here, s: Maybe) -> Iterator[Maybe]:
    """Each part of a block of scores, or None for each part."""
    if s is None:
        yield from (None for _ in here.slot.tile.parts)
    else:
        yield from (piece for _, piece in here.pieces(s))


def attend(here: Here, moves: Moves, results: Tensors) -> None:
    """Fill this tile's rows of the results and of their tangents, by name."""
    E = here.tiles.problem.E
    o, to = here.room("o", E), here.room("to", E)
    lse, mu = here.room("lse", 1), here.room("mu", 1)
    if here.slot.tile.parts:
        take_softmax(here, moves, (o, to), (lse, mu), results)
    else:
        here.see_nothing(o, lse)
        here.take_statistics(o.new_empty((*results["lse"].shape, 0)), results)
        to.zero_()
        mu.zero_()
        if moves.given.sinks is not None:
            mu.copy_(here.spread(moves.given.sinks)).masked_fill_(lse == -INF, 0.0)
    to.addcmul_(o, mu, value=-1)
    results["o"].copy_(here.heads(o))
    results["to"].copy_(here.heads(to))
    results["lse"].copy_(here.heads(lse)[..., 0])
    results["tlse"].copy_(here.heads(mu)[..., 0])


Pair = tuple[torch.Tensor, torch.Tensor]


def take_softmax(here: Here, moves: Moves, outs: Pair, stats: Pair, results: Tensors) -> None:
    """o [n,L,E] and sum_j p z (ts v + tv); lse and its tangent [n,L,1]."""
    (o, to), (lse, mu), total = outs, stats, here.room("total", 1)
    s, ts = push_tile_scores(here, moves, here.load("q", here.given.q))
    here.take_statistics(here.heads(s), results)
    own = products.softmax_(s, lse, total, here.sinks)
    torch.sum(ts.mul_(s), -1, keepdim=True, out=mu)
    if own is not None and moves.given.sinks is not None:
        mu.addcmul_(own, here.spread(moves.given.sinks))
    if here.tiles.problem.node.dropout:
        here.dropped_(s, ts)
    values = here.keys_of(moves.v)
    products.weigh_(o, s, values)
    if moves.scores:
        products.weigh_(to, ts, values)
    else:
        to.zero_()
    if moves.tv is not None:
        products.weigh_(to, s, here.keys_of(moves.tv), beta=1)
    for x in (o, to, mu):
        x.div_(total)


def push_back(here: Here, moves: Moves, x: GradientTangents[torch.Tensor], sums: Sums) -> None:
    """Add this tile's share of every tangent, by the formulas of AttentionJvp."""
    lse, mu = here.room("lse", 1), here.room("mu", 1)
    here.heads(lse).copy_(here.slot.rows(x.read.lse)[..., None])
    here.heads(mu).copy_(here.slot.rows(x.tlse)[..., None])
    here.clear(mu)
    surplus = find_surplus(here, x)
    if not here.slot.tile.parts:
        add_sinks(here, moves.given.sinks, surplus, sums.sinks, None)
        if sums.dq is not None:
            here.slot.rows(sums.dq).zero_()
        return
    q = here.load("q", here.given.q)
    p, u = push_tile_scores(here, moves, q)
    total = here.weigh_(p, lse)
    add_sinks(here, moves.given.sinks, surplus, sums.sinks, total)
    if sums.dv is None and not sums.scores:
        return
    pu = torch.mul(p, u.sub_(mu), out=here.room("pu", here.slot.keys))
    grads = pull_weights(here, moves, x, (p, pu), surplus) if sums.scores else None
    if sums.dv is not None:
        pull_values(here, x, (p, pu), here.keys_of(sums.dv))
    if grads is not None:
        pull_steps(here, *grads, sums.totals)
        pull_products(here, moves, (q, *grads), sums)


def pull_values(
    here: Here, x: GradientTangents[torch.Tensor], weights: Pair, dv: Sequence[torch.Tensor]
) -> None:
    """Add (p u z)^T do + (p z)^T tdo to the rows of tdv; z is put into the weights."""
    if here.tiles.problem.node.dropout:
        here.dropped_(*weights)
    E, (p, pu) = here.tiles.problem.E, weights
    if x.read.do is not None:
        products.add_transposed_(dv, pu, here.room("do", E))
    if x.tdo is not None:
        products.add_transposed_(dv, p, here.room("tdo", E))


def find_surplus(here: Here, x: GradientTangents[torch.Tensor]) -> Pair:
    """delta - dlse and its tangent, [n,L,1]; and do and tdo in their rooms, 0 in blind rows."""
    E, delta, tdelta = here.tiles.problem.E, here.room("delta", 1), here.room("tdelta", 1)
    read, pairs = x.read, ((delta, x.read.dlse), (tdelta, x.tdlse))
    for each in (delta, tdelta):
        each.zero_()
    o, products_of = here.load("o", read.o), here.room("to", E)
    if read.do is not None:
        do = here.clear(here.load("do", read.do))
        to = here.clear(here.load("to", x.to)).mul_(do)
        torch.sum(to, -1, keepdim=True, out=tdelta)
        torch.sum(torch.mul(do, o, out=products_of), -1, keepdim=True, out=delta)
    if x.tdo is not None:
        tdo = here.clear(here.load("tdo", x.tdo))
        tdelta.add_(torch.mul(tdo, o, out=products_of).sum(-1, keepdim=True))
    for each, cotangent in pairs:
        if cotangent is not None:
            here.heads(each).sub_(here.slot.rows(cotangent)[..., None])
            here.clear(each)
    return delta, tdelta


def add_sinks(here: Here, moved: Maybe, surplus: Pair, sums: Maybe, total: Maybe) -> None:
    """Add sum_bi exp(sinks - lse) ((tsinks - tlse) g + tg), g being minus the surplus. total:
    divides exp(. - lse) unless None."""
    if sums is None or here.sinks is None:
        return
    (g, tg), mu, heads = surplus, here.room("mu", 1), here.slot.heads
    shares = products.exp_of(here.sinks, here.room("lse", 1))
    if total is not None:
        shares.div_(total)
    moves = -mu if moved is None else here.spread(moved).sub_(mu)
    each = here.heads(shares.mul_(moves.mul_(g).add_(tg)))
    sums[heads.start : heads.stop] -= each.sum((0, 2, 3))


def pull_weights(
    here: Here, moves: Moves, x: GradientTangents[torch.Tensor], weights: Pair, surplus: Pair
) -> Pair:
    """ds = p g and tds = p u g + p tg, of the masked scores. weights: p and p u."""
    keys, (p, pu) = here.slot.keys, weights
    ds, tds = here.room("ds", keys), here.room("tds", keys)
    values, E = here.keys_of(moves.v), here.tiles.problem.E
    for block, cotangent, name in ((ds, x.read.do, "do"), (tds, x.tdo, "tdo")):
        if cotangent is None:
            block.zero_()
        else:
            products.scores_(block, here.room(name, E), values, 1.0)
    if x.read.do is not None and moves.tv is not None:
        products.scores_(tds, here.room("do", E), here.keys_of(moves.tv), 1.0, beta=1)
    if here.tiles.problem.node.dropout:
        here.dropped_(ds, tds)
    for block, each in zip((ds, tds), surplus, strict=True):
        block.sub_(each)
    tds.mul_(p).addcmul_(pu, ds)
    return ds.mul_(p), tds


def pull_steps(
    here: Here, ds: torch.Tensor, tds: torch.Tensor, totals: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    """ds and tds of the last step -> ds and tds of the products, with the modifiers' gradients."""
    keys, cap = here.slot.keys, here.tiles.cap
    for i, modifier in reversed([*enumerate(here.tiles.problem.node.modifiers)]):
        if modifier.additive:
            for part, piece in here.pieces(tds) if totals[i] else ():
                modifier.collect(
                    totals[i], piece, here.place(part).reading(here.given.modifiers[i])
                )
            continue
        s, t = here.room(f"step{i}", keys), here.room(f"tstep{i}", keys)
        if i == 0 and cap is not None:
            products.bend_cap_(t, ds, s, cap)
            products.cap_back_(tds, s)
            products.cap_back_(ds, s)
            tds.add_(t)
        else:
            bend_step(here, i, modifier, (ds, tds), (s, t), totals[i])


def bend_step(
    here: Here, i: int, modifier: Modifier, grads: Pair, steps: Pair,
    totals: Mapping[str, torch.Tensor],
) -> None:  # fmt: skip
    """`pull_steps` through one nonadditive step, from its results and tangents."""
    (ds, tds), (s, t) = grads, steps
    hidden = s == -INF if here.tiles.restores[i] else None
    copy = here.room("scrap", here.slot.keys).copy_(s)
    blocks = [(piece for _, piece in here.pieces(x)) for x in (ds, tds, s, t, copy)]
    for part, one, two, result, moved, again in zip(here.slot.tile.parts, *blocks, strict=True):
        at = here.place(part).reading(here.given.modifiers[i])
        if totals:
            modifier.collect(totals, two, at)
        bent = modifier.bend(one, moved, result, at)
        back_(modifier, two, again, at)
        if bent is not None:
            two.add_(bent)
        back_(modifier, one, result, at)
    if hidden is not None:
        for x in (ds, tds):
            x.masked_fill_(hidden, 0.0)


def pull_products(
    here: Here, moves: Moves, blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sums: Sums
) -> None:
    """tdq = scale (tds k + ds tk), and tdk += scale (tds^T q + ds^T tq)."""
    (q, ds, tds), scale = blocks, here.tiles.problem.node.scale
    if sums.dq is not None:
        dq = here.room("dq", q.shape[2])
        products.weigh_(dq, tds, here.keys_of(moves.k), scale)
        if moves.tk is not None:
            products.weigh_(dq, ds, here.keys_of(moves.tk), scale, beta=1)
        here.slot.rows(sums.dq).copy_(here.heads(dq))
    if sums.dk is None:
        return
    dk = here.keys_of(sums.dk)
    products.add_transposed_(dk, tds, q, scale)
    if moves.given.q is not None:
        products.add_transposed_(dk, ds, here.room("tq", q.shape[2]), scale)
