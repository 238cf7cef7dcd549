"""Attention on tiles of whole rows of scores: products with a softmax between, and no modifiers but
soft caps, and a bias with kept weights.

Products read and give the dtype of the operands, scores and weights included, except float16
scores, in float32. The softmax of a row and sums over tiles are in float32. Each tile has all keys
of its queries, so the softmax and its derivative are of whole rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.modifiers import change_
from attn_graph.kernels.hiding import hide_
from attn_graph.kernels.products import reaches_far
from attn_graph.lowering.cpu.dropping import draw
from attn_graph.lowering.cpu.product_slots import ProductSlot
from attn_graph.lowering.cpu.row_core import Change, Core
from attn_graph.lowering.cpu.row_grid import RowGrid
from attn_graph.lowering.cpu.run_mask import Hiding, RunMask
from attn_graph.lowering.cpu.schedule import place_within
from attn_graph.machine.ambient import is_traced
from attn_graph.masks.places import Place
from attn_graph.spec import INF, TensorSpec

Tensors = Mapping[str, torch.Tensor]
Seed = tuple[int, int]  # and an offset


@final
@frozen
class RowTiles(RowGrid):
    """Forward and backward of one problem."""

    @cached_property
    def mask(self) -> RunMask | None:
        cuts = not self.kept and self.problem.grad is None
        return RunMask.of(self, cuts, self.spans)

    @property
    def cuts(self) -> bool:
        return self.flat and self.mask is not None and self.mask.cuts

    def count_keys(self, operands: Sequence[torch.Tensor], _counts: Sequence[int]) -> int:
        assert self.mask is not None
        return 1 if self.spans else self.mask.read(operands).reach  # of an entry without keys

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Tensors
    ) -> tuple[torch.Tensor, ...]:
        """o and lse, or o and weights if they are kept."""
        p, (own, seed) = self.problem, self.take_seed(operands)
        device = operands[0].device
        if self.kept:
            saved = torch.empty((*p.sizes,), dtype=p.dtype, device=device)
        else:
            saved = p.new_statistic("lse", device, scratch)
        return *self.infer(own, scratch, saved, seed), saved

    def take_seed(
        self, operands: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Seed | None]:
        """The operands of the problem, and seed and offset of dropout."""
        if not self.rate:
            return operands, None
        *own, seed, offset = operands
        return own, (int(seed), int(offset))

    def infer(
        self, operands: Sequence[torch.Tensor], scratch: Tensors, saved: torch.Tensor | None = None,
        seed: Seed | None = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """o alone. saved: room for lse [B,H,M], or for weights [B,H,M,N], if wanted. seed: as
        `take_seed` has it."""
        if self.flat:
            hiding = self.mask and self.mask.read(operands)
            if hiding is not None and self.spans:
                return self.infer_entries(operands, scratch, saved, hiding)
            return self.infer_runs(operands, scratch, saved, hiding, seed)
        q, k, v = operands[:3]
        o = self.problem.new_o(q.device, scratch)
        for spot in self.spots(operands, scratch, q):
            spot.attend((q, k, v), o, saved, seed)
        return (o,)

    def infer_runs(
        self, operands: Sequence[torch.Tensor], scratch: Tensors, saved: torch.Tensor | None,
        hiding: Hiding | None, seed: Seed | None = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """o alone, on runs of heads. hiding: of each, by the mask."""
        q, k, v = operands[:3]
        o = self.problem.new_o(q.device, scratch)
        core = Core(self.steps, scratch, hiding.blind if hiding else self.blind)
        if hiding and hiding.reach < self.problem.N:
            k, v = k[:, :, : hiding.reach], v[:, :, : hiding.reach]
        hides: Iterable[Change | None] = repeat(hiding and hiding.hide)
        if hiding and self.by_entries:
            hides = hiding.runs(self.batch)
        if self.problem.node.modifiers:
            at = self.places({}, q)
            hides = (partial(self.cap, at, hide) for hide in hides)
        runs = self.cut((q, k, v, o) if saved is None else (q, k, v, o, saved))
        if seed is None:
            for hide, views in zip(hides, runs, strict=False):
                core.attend(hide, *views)
        else:
            for hide, views, heads in zip(hides, runs, self.query_heads, strict=False):
                core.attend(hide, *views, sign=self.signer(scratch, seed, range(1), heads))
        return (o,)

    def cap(self, at: Place, hide: Change | None, s: torch.Tensor) -> None:
        """Cap the scores of a run, and hide some. at: any places, since caps read none."""
        for modifier in self.problem.node.modifiers:
            change_(modifier, s, at)
        if hide is not None:
            hide(s)

    def infer_entries(
        self, operands: Sequence[torch.Tensor], scratch: Tensors, saved: torch.Tensor | None,
        hiding: Hiding,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """o alone, one batch entry after the other, of the keys left by data."""
        p, o = self.problem, self.problem.new_o(operands[0].device, scratch)
        core, fills = Core(self.steps, scratch, hiding.blind), self.fills_o
        each = [x.view(p.B, p.G, -1, x.shape[3]).unbind() for x in (*operands[:3], o)]
        rooms = repeat(None) if saved is None else saved.view(p.B, p.G, -1, 1).unbind()
        for (hide, keys), q, k, v, rows, room in zip(hiding.entries(), *each, rooms, strict=False):
            made = rows if fills else scratch["o"].view(rows.shape)
            core.attend(hide, q, k[:, keys], v[:, keys], made, room)
            if not fills:
                rows.copy_(made)
        return (o,)

    @property
    def query_heads(self) -> Iterator[range]:
        """The query heads of all batch entries in each run."""
        for first in range(0, self.heads, self.count):
            yield range(first * self.r, min(first + self.count, self.heads) * self.r)

    def signer(self, scratch: Tensors, seed: Seed, batch: range, heads: range) -> Change:
        """Makes dropped weights of whole heads negative."""
        p = self.problem

        def sign(weights: torch.Tensor) -> None:
            ranges = batch, heads, range(p.M), range(p.N)
            drawn = draw(self.rate, seed, ranges, p.H, scratch, torch.sub)
            weights.view(drawn.shape).copysign_(drawn)

        return sign

    def backward(
        self, operands: Sequence[torch.Tensor], scratch: Tensors
    ) -> dict[int, torch.Tensor]:
        """The gradients of q, k and v, by number of the operand."""
        own, saved, do = self.read(operands)
        tensors = own[:3]
        if self.flat:
            grads = [x.new_empty(x.shape) for x in tensors]
            hiding = None if self.kept else self.mask and self.mask.read(own)
            blind = self.blind and self.mask is not None and self.mask.blinds(own)
            core = Core(self.steps, scratch, hiding.blind if hiding else blind, self.divides(saved))
            for views in self.cut((*tensors, do, saved.contiguous(), *grads)):
                core.pull(hiding and hiding.hide, *views)
            return dict(enumerate(grads))
        dq, *sums = do.new_empty(tensors[0].shape), *self.sums(tensors, scratch)
        given, dtype = self.problem.node.split(own), self.problem.dtype
        totals = self.totals(given)
        for spot in self.spots(own, scratch, do, self.divides(saved)):
            spot.pull(tensors, do, saved, (dq, *sums))
            spot.collect(totals)
        gradients = {0: dq, 1: sums[0].to(dtype), 2: sums[1].to(dtype)}
        return gradients | self.collected(given, totals)

    def read(
        self, operands: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor, torch.Tensor]:
        """The attention's own operands, lse or weights, and do, for a backward."""
        if self.kept:
            *own, weights, do = operands
            do = do.contiguous() if self.reads_in_order else do
            return own[: self.problem.node.reads], weights, do
        assert self.problem.grad is not None
        read = self.problem.grad.split(operands)
        assert read.do is not None
        return read.own, read.lse, read.do

    @cached_property
    def reads_in_order(self) -> bool:
        """True if do lies in C order, or if no tile reads it in place."""
        assert self.problem.grad is not None
        do = self.problem.grad.split(self.problem.specs).do
        return do == TensorSpec(do.shape, do.dtype) if do is not None else False

    def cut(self, tensors: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
        """The views for `Core`, as runs [n,.,.] of key/value heads in place."""
        if self.r == 1 and len(tensors) == 4:  # `view` with a shape takes twice as long
            heads = [x.flatten(0, 1) for x in tensors]
        else:
            heads = [*map(torch.Tensor.view, tensors, self.shapes)]
        if self.runs == 1:
            return (heads,)
        return zip(*(x.split(self.count) for x in heads), strict=True)

    def spots(
        self, own: Sequence[torch.Tensor], scratch: Tensors, like: torch.Tensor,
        divides: bool = False,
    ) -> Iterator[Spot]:  # fmt: skip
        """Each tile of a call. own: the attention's operands. like: a tensor on their device.
        divides: as `Core` has it."""
        given = self.problem.node.split(own)
        core = Core(self.steps, scratch, self.leaves_blind(given.modifiers), divides)
        places = self.places(given.mask, like)
        for slot in self.tiles(given.mask):
            yield Spot(self, slot, core, places, given.modifiers)

    def divides(self, saved: torch.Tensor) -> bool:
        """True if weights are divided by their own sum: a large lse does not tell it. saved: lse,
        or the weights."""
        return not self.kept and reaches_far(saved)

    def leaves_blind(self, given: Sequence[Tensors]) -> bool:
        """True if a query of a call may see no key. given: data of the modifiers."""
        if not given or not self.blind or self.problem.mask_has_blind_rows or is_traced():
            return self.blind
        return not all(bool(x.amin() > -INF) for data in given for x in data.values())

    def sums(self, tensors: Sequence[torch.Tensor], scratch: Tensors) -> list[torch.Tensor]:
        """Room for the gradients of k and v; for sums over tiles zeros, in the dtype of sums."""
        if self.whole:
            return [x.new_empty(x.shape) for x in tensors[1:3]]
        if self.rounds:
            return [scratch[f"sum of d{x}"].zero_() for x in "kv"]
        return [x.new_zeros(x.shape) for x in tensors[1:3]]


@final
@frozen(eq=False)
class Spot:
    """A tile cut out of a problem, with its copies.

    places: all, not its own alone. given: the modifiers' tensors.
    """

    tiles: RowTiles
    slot: ProductSlot
    core: Core
    places: Place
    given: Sequence[Tensors]

    def room(self, name: str, last: int) -> torch.Tensor:
        """A buffer as [n,L,last]."""
        n, L = self.slot.lines
        return self.core.scratch[name][: n * L * last].view(n, L, last)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[n,L,S] as [batch,heads,rows,S]."""
        return x.view(self.slot.grid)

    def rows(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This tile's queries of x [B,H,M,D] as [n,L,D]: in place, or room for them, since oneDNN
        copies gaps."""
        rows, room = self.slot.rows(x), self.room(name, x.shape[3])
        return rows.view(room.shape) if rows.is_contiguous() else room

    def load(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """`rows`, filled."""
        room, rows = self.rows(name, x), self.slot.rows(x)
        if not rows.is_contiguous():
            self.heads(room).copy_(rows)
        return room

    def store(self, x: torch.Tensor, made: torch.Tensor) -> None:
        """This tile's queries of x [B,H,M,D] = the result in their room."""
        rows = self.slot.rows(x)
        if not rows.is_contiguous():
            rows.copy_(self.heads(made))

    def load_keys(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This tile's keys of x [B,G,N,D] as [n,S,D], without gaps too."""
        here, n = self.slot.groups(x), self.slot.lines[0]
        pieces = [here[:, :, a:b] for a, b in self.slot.runs]
        if len(pieces) == 1 and pieces[0].is_contiguous():
            return pieces[0].view(n, -1, x.shape[3])
        room = self.key_room(name, x.shape[3])
        torch.cat(pieces, 2, out=room.view(*here.shape[:2], -1, x.shape[3]))
        return room

    def key_room(self, name: str, last: int) -> torch.Tensor:
        """A buffer as [n,S,last]."""
        n, S = self.slot.lines[0], self.slot.keys
        return self.core.scratch[name][: n * S * last].view(n, S, last)

    def keys_made(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Room for this tile's gradient [n,S,D] by k or v: in x [B,G,N,D] if it is all."""
        if not self.tiles.whole:
            return self.key_room(name, x.shape[3])
        return self.slot.groups(x).view(-1, self.slot.keys, x.shape[3])

    def add_keys(self, x: torch.Tensor, made: torch.Tensor) -> None:
        """This tile's keys of x [B,G,N,D] += made [n,S,D]."""
        at = 0
        for piece in self.slot.keys_of(x):
            piece.add_(made[:, at : at + piece.shape[1]])
            at += piece.shape[1]

    @property
    def place(self) -> Place:
        slot = self.slot
        keys = range(self.tiles.problem.N)
        return place_within(self.places, slot.tile.batch, slot.heads, slot.tile.rows, keys)

    def change(self, s: torch.Tensor) -> None:
        """Run the modifiers on the scores of this tile, and hide its masked places."""
        for modifier, data in zip(self.tiles.problem.node.modifiers, self.given, strict=True):
            change_(modifier, self.heads(s), self.place.reading(data))
        for at, part in self.slot.mixed:
            piece = self.heads(s)[..., at : at + len(part)]
            hide_(piece, self.tiles.bits(self.slot, part, self.places, piece))

    def attend(
        self, operands: Sequence[torch.Tensor], o: torch.Tensor, saved: torch.Tensor | None,
        seed: Seed | None,
    ) -> None:  # fmt: skip
        """Fill this tile's rows of o [B,H,M,E], and of lse [B,H,M] or weights if wanted."""
        if not self.slot.tile.parts:  # never with kept weights
            self.slot.rows(o).zero_()
            if saved is not None:
                self.slot.rows(saved).fill_(-INF)
            return
        q, k, v = operands
        made, room = self.rows("o", o), None if saved is None else self.saved_room(saved)
        keys = self.load_keys("k", k), self.load_keys("v", v)
        sign = seed and self.tiles.signer(
            self.core.scratch, seed, self.slot.tile.batch, self.slot.heads
        )
        self.core.attend(self.change, self.load("q", q), *keys, made, room, sign=sign)
        self.store(o, made)
        if saved is not None and room is not None and not self.tiles.kept:
            self.slot.rows(saved).copy_(self.heads(room)[..., 0])

    def saved_room(self, saved: torch.Tensor) -> torch.Tensor:
        """This tile's rows of weights [B,H,M,N] as [n,L,N] in place, or room for rows of lse
        [B,H,M] as [n,L,1]."""
        if self.tiles.kept:
            return self.slot.rows(saved).view(*self.slot.lines, -1)
        return self.room("lse", 1)

    def pull(
        self, operands: Sequence[torch.Tensor], do: torch.Tensor, saved: torch.Tensor,
        grads: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Fill this tile's rows of dq, and add to dk and dv."""
        (q, k, v), (dq, dk, dv) = operands, grads
        if not self.slot.tile.parts:
            self.slot.rows(dq).zero_()
            return
        keys = self.load_keys("k", k), self.load_keys("v", v)
        made = self.keys_made("dk", dk), self.keys_made("dv", dv)
        rows, room = self.rows("dq", dq), self.saved_room(saved)
        if not self.tiles.kept:
            self.heads(room).copy_(self.slot.rows(saved)[..., None])
        self.core.pull(self.change, self.load("q", q), *keys, self.load("o", do), room, rows, *made)
        self.store(dq, rows)
        if not self.tiles.whole:
            self.add_keys(dk, made[0])
            self.add_keys(dv, made[1])

    def collect(self, totals: Sequence[Tensors]) -> None:
        """Add this tile's share to the gradients of the modifiers' tensors."""
        steps = zip(self.tiles.problem.node.modifiers, self.given, totals, strict=True)
        for modifier, data, sums in steps:
            if sums:
                ds = self.heads(self.room("ds", self.slot.keys))
                modifier.collect(sums, ds, self.place.reading(data))
