"""The tiles of matrix products, for every modifier and every derivative, and their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar, final

import torch
from attrs import frozen

from attn_graph.ir.attention import Attention, AttentionGrad, GradientOperands, Operands
from attn_graph.ir.modifiers import SoftCap
from attn_graph.ir.terms.relative import MODIFIERS
from attn_graph.ir.transforms.tangents import AttentionJvp, GradientTangents
from attn_graph.kernels import products
from attn_graph.lowering.cpu.asking import WORD, Extent, ask_bits, ask_modifiers
from attn_graph.lowering.cpu.tile_grid import TileGrid, choose_sizes, needed_to_draw, packs
from attn_graph.lowering.problem import Problem
from attn_graph.machine.philox import WORDS
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks.places import Place
from attn_graph.spec import NAMES, TensorSpec

ROWS = 5  # numbers of each row of scores beside the scratch: its sink, and the terms of a sum
SINKS = 8  # the same, for the gradient or the tangent of its sink
MOST_CAP = 2.0**64  # its products, and products of scale / cap, fit in float32
TRACED = 8  # blocks of scores held by PyTorch, at most, while it differentiates a step
ADDED = 3  # the same of a step's own tangent: the block, its distances, their product
Tensors = Mapping[str, torch.Tensor]
Maybe = torch.Tensor | None
T = TypeVar("T", torch.Tensor, Maybe, covariant=True)
Pair = tuple[torch.Tensor, torch.Tensor]


@final
@frozen
class ProductTiles(TileGrid):
    """One pass of one problem: forward or gradient, or the tangent of either.

    factors: the dtype of products' factors and results, the scores' own or the operands' half
    precision; everything between two products has the scores' dtype. blind: True if a query may see
    no key. jvp: the tangent; moved: the spec of each tangent of the attention's operands, or None.
    """

    factors: torch.dtype
    blind: bool
    jvp: AttentionJvp | None = None
    moved: tuple[TensorSpec | None, ...] = ()

    @classmethod
    def plan(cls, problem: Problem, factors: torch.dtype) -> ProductTiles:
        """The tiles of a problem, of sizes chosen for it alone."""
        sizes = choose_sizes(problem, factors)
        return cls(problem, *sizes, False, factors, problem.has_blind_rows)

    @classmethod
    def push(cls, jvp: AttentionJvp, specs: Sequence[TensorSpec]) -> ProductTiles:
        """The tiles of a tangent. specs: of its operands, in their order."""
        own, moved = jvp.split(specs)
        p = Problem.of(jvp.of, own)
        sizes = choose_sizes(p, p.wide)
        return cls(p, *sizes, False, p.wide, p.has_blind_rows, jvp, moved)

    @property
    def op(self) -> Attention | AttentionGrad | AttentionJvp:
        return self.jvp or self.problem.grad or self.problem.node

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
        """True if delta of a row is the sum of p dp, of all its keys, else of do o.

        With p = 1 on one key and 0 elsewhere, the first is that key's dp to the bit, however the
        product rounds it, so ds = p (dp - delta) is 0. The second has roundings of its own: o to
        half precision, dp too if products round. It leaves ds of a row with nearly all its weight
        on one key off by u |do o|, one number for a row, and a gradient summed from ds over places,
        as of slopes, adds it up. In float32 it is a sum in another order, off by as much as dp is.
        A part of the keys has no other sum.
        """
        p = self.problem
        shows = (p.dtype != p.wide and not p.node.part) or p.gathers
        return shows and p.grad is not None and p.grad.with_do and self.jvp is None

    @cached_property
    def more(self) -> tuple[str, ...]:
        return self.problem.node.without_gradient

    @cached_property
    def rounds(self) -> bool:
        return self.factors != self.problem.wide

    @property
    def lines(self) -> int:
        """Rows of scores of a tile, at most."""
        return self.batch * self.groups * self.r * self.rows

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The scratch buffers. A tangent lies beside its value, with a t before the name."""
        p, keys = self.problem, self.reach
        sizes = {"s": keys, "o": p.E, "lse": 1, "total": 1}  # numbers of a row
        if p.grad is not None:
            sizes |= {"ds": keys, "do": p.E, "dq": p.D, "delta": 1}
            sizes |= {f"step{i}": keys for i in self.bent}
        if self.jvp is not None:
            alone = "total", "dq"
            sizes |= {f"t{name}": n for name, n in sizes.items() if name not in alone}
            sizes |= {"tq": p.D}
            sizes |= {"step0": keys} if self.cap is not None else {}
            sizes |= {"scrap": keys} if any(i or self.cap is None for i in self.bent) else {}
        buffers = self.packed | {"q": Buffer((self.lines * p.D,), self.factors)}
        buffers |= {name: Buffer((self.lines * n,), p.wide) for name, n in sizes.items()}
        if p.node.dropout:
            buffers |= needed_to_draw(self.lines, keys, p.wide)
        return buffers | self.needed_to_round | self.needed_to_sum

    @cached_property
    def unmoved(self) -> Operands[Maybe]:
        """No tangents."""
        return self.problem.node.split((None,) * len(self.problem.node.takes))

    @cached_property
    def bent(self) -> list[int]:
        """The modifiers with a derivative other than 1, by number."""
        return [i for i, m in enumerate(self.problem.node.modifiers) if not m.additive]

    @property
    def packed(self) -> dict[str, Buffer]:
        """Room for k, v and their tangents, if products can't read them in place."""
        named = zip("kv", self.problem.specs[1:3], strict=True)
        moved = zip(("tk", "tv"), self.moved[1:3], strict=False)
        return {
            name: Buffer(x.shape, self.factors)
            for name, x in (*named, *moved)
            if x is not None and packs(x, self.factors)
        }

    @property
    def needed_to_round(self) -> dict[str, Buffer]:
        """Room for rounded factors, and for products before they are widened."""
        p, rows = self.problem, self.lines
        if not self.rounds:
            return {}
        product = max(rows, self.batch * self.groups * self.reach) * max(p.D, p.E)
        sizes = {"factor": rows * self.reach, "product": product}
        sizes |= {"cotangent": rows * p.E} if p.grad is not None else {}
        return {name: Buffer((n,), self.factors) for name, n in sizes.items()}

    @property
    def needed_to_sum(self) -> dict[str, Buffer]:
        """Room for sums of narrower gradients of k and v."""
        p = self.problem
        specs = zip(("dk", "dv"), (1, 2), p.specs[1:3], strict=True)
        return {
            name: Buffer(x.shape, p.wide)
            for name, n, x in specs
            if self.wants(n) and p.dtype != p.wide
        }

    @cached_property
    def scratch(self) -> Scratch:
        return Scratch(self.buffers)

    @property
    def temporary(self) -> int:
        """Bytes allocated by PyTorch beside the workspace, at most: of one tile the booleans of its
        places, draws, rows of numbers, tangents of steps, oneDNN's packed operands; lse of all."""
        p, wide = self.problem, self.problem.wide.itemsize
        at = Extent(self.batch, self.groups * self.r, self.rows, self.reach)
        scores, rows = at.count("bhij"), at.count("bhi")
        _, bits = ask_bits(p, at)
        drawn = scores * WORD // WORDS if p.node.dropout else 0
        stats = scores * wide if self.more else 0
        steps = ask_modifiers(p, at, first=int(self.cap is not None), collects=self.collects)
        most = max(bits, drawn, stats, steps) + ROWS * rows * wide
        most += WORD * (p.B + p.H + p.M + p.N)
        most += self.packing if self.rounds else 0
        if p.grad is not None:
            most += p.B * p.H * p.M * (wide + torch.bool.itemsize)
        if p.node.sinks and self.op is not p.node:
            most += SINKS * (rows + p.H) * wide
        if self.jvp is not None:
            traced = any(type(m) not in MODIFIERS for m in p.node.modifiers)
            blocks = (TRACED if traced else 0) + (ADDED if p.node.modifiers else 0)
            most += scores * (torch.bool.itemsize + blocks * wide)
        return most

    def summary(self) -> str:
        dtype = f"{NAMES[self.factors]} " if self.rounds else ""
        tangents = "tangents by " if self.jvp is not None else ""
        return f"{tangents}{dtype}matrix products on tiles of {self.size}"

    def divides(self, lse: torch.Tensor) -> bool:
        """True if recomputed weights are divided by their sum: lse does not tell it, unless it is
        small, or of more keys than these. Off the CPU looking at lse takes longer."""
        tells = self.problem.node.part or (lse.is_cpu and not products.reaches_far(lse))
        return self.rounds or self.weighs_cotangents or not tells


# Operands of a call


class Dual(NamedTuple, Generic[T]):
    """A value and its tangent; None is zero. A call makes many."""

    value: T
    tangent: Maybe = None

    @property
    def known(self) -> list[torch.Tensor]:
        return [x for x in (self.value, self.tangent) if x is not None]


ZERO: Dual[Maybe] = Dual(None)


def product_of(a: Dual[Maybe], b: Dual[Maybe]) -> list[Pair]:
    """The factors of a b; none if it is zero."""
    x, y = a.value, b.value
    return [] if x is None or y is None else [(x, y)]


def moves_of(a: Dual[Maybe], b: Dual[Maybe]) -> list[Pair]:
    """The factors of the two products in the tangent of a b."""
    pairs = (a.tangent, b.value), (a.value, b.tangent)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


@final
@frozen(eq=False)
class Read:
    """What a gradient reads beside the attention's operands. lse, dlse: [B,H,M,1]."""

    o: Dual[torch.Tensor]
    lse: Dual[torch.Tensor]
    do: Dual[Maybe]
    dlse: Dual[Maybe]

    @classmethod
    def of(
        cls, x: GradientOperands[torch.Tensor], moved: GradientTangents[torch.Tensor] | None
    ) -> Read:
        dlse = None if x.dlse is None else x.dlse[..., None]
        if moved is None:
            return cls(Dual(x.o), Dual(x.lse[..., None]), Dual(x.do), Dual(dlse))
        tdlse = None if moved.tdlse is None else moved.tdlse[..., None]
        lse = Dual(x.lse[..., None], moved.tlse[..., None])
        return cls(Dual(x.o, moved.to), lse, Dual(x.do, moved.tdo), Dual(dlse, tdlse))


@final
@frozen(eq=False)
class Call:
    """The operands of a call and its memory.

    given, moved: the attention's own operands, and their tangents. k, v: as products read them.
    read: o, lse, do and dlse, of a gradient. places: all. divides: as `ProductTiles` has it.
    """

    tiles: ProductTiles
    scratch: Tensors
    given: Operands[torch.Tensor]
    moved: Operands[Maybe]
    k: Dual[torch.Tensor]
    v: Dual[torch.Tensor]
    read: Read | None
    places: Place
    divides: bool

    @classmethod
    def of(cls, tiles: ProductTiles, operands: Sequence[torch.Tensor], scratch: Tensors) -> Call:
        node, grad, jvp = tiles.problem.node, tiles.problem.grad, tiles.jvp
        own, moves = (operands, ()) if jvp is None else jvp.split(operands)
        read = None if grad is None else Read.of(grad.split(own), jvp and jvp.directions(operands))
        given = node.split(own)
        moved = node.split(moves) if moves else tiles.unmoved
        k, v = (
            Dual(
                as_factor(name, x, scratch),
                None if t is None else as_factor(f"t{name}", t, scratch),
            )
            for name, x, t in (("k", given.k, moved.k), ("v", given.v, moved.v))
        )
        places = tiles.places(given.mask, given.q)
        divides = read is not None and tiles.divides(read.lse.value)
        return cls(tiles, scratch, given, moved, k, v, read, places, divides)

    @cached_property
    def seed(self) -> tuple[int, int]:
        """The seed and the offset of dropout."""
        assert self.given.seed is not None
        assert self.given.offset is not None
        return int(self.given.seed), int(self.given.offset)

    @cached_property
    def moves_scores(self) -> bool:
        """True if a score moves: not if v and the sinks alone have tangents."""
        parts = (x for each in self.moved.modifiers for x in each.values())
        return any(x is not None for x in (self.moved.q, self.moved.k, *parts))


def as_factor(name: str, x: torch.Tensor, scratch: Tensors) -> torch.Tensor:
    """k, v or a tangent of them as products read it, in scratch if it must be."""
    return scratch[name].copy_(x) if name in scratch else x
