"""Attention on tiles of whole rows of scores: products with a softmax between, and no modifier but
a bias where weights are kept.

What products multiply and give is in the dtype of the operands, scores and weights among it; the
softmax of a row, and sums over tiles, are in float32. Each tile has all keys of its queries, so the
softmax and its derivative are those of whole rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.modifiers import change_
from attn_graph.kernels.hiding import hide_
from attn_graph.kernels.products import LEAST_FLOAT
from attn_graph.lowering.cpu.product_slots import (
    MOST_HELD,
    ProductSlot,
    TileGrid,
    choose_entries,
    choose_kept_sizes,
    choose_row_sizes,
    has_few_scores,
    lies_flat,
)
from attn_graph.lowering.cpu.row_choice import just_reads
from attn_graph.lowering.cpu.row_core import Change, Core, RowSteps
from attn_graph.lowering.cpu.run_mask import Hiding, RunMask, caps_entries, count_caps
from attn_graph.lowering.cpu.schedule import POSITIONS, place_within
from attn_graph.lowering.problem import Problem
from attn_graph.machine.ambient import is_traced
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks.places import Place
from attn_graph.spec import INF, NAMES, TensorSpec

# PyTorch's softmax, a single call, is the faster where a key/value head has less than SINGLE_ROWS
# rows; and in half precision, unless rows are shorter than LONG_ROW and no multiple of VECTORS: it
# takes what is left one by one. Elsewhere several passes are as fast or up to a third faster.
SINGLE_ROWS, VECTORS, LONG_ROW = 64, 32, 400
Tensors = Mapping[str, torch.Tensor]


@final
@frozen
class RowTiles(TileGrid):
    """Forward and backward of one problem.

    blind: whether a query may see no key. kept: whether the forward gives its weights, and the
    backward reads them, where others give and read lse.
    """

    blind: bool
    kept: bool = False

    @classmethod
    def plan(cls, problem: Problem) -> RowTiles:
        """The tiles of a problem, of sizes chosen for it alone."""
        choose = choose_row_sizes
        if problem.grad is None and runs_by_entries(problem):
            choose = choose_entries
        return cls(problem, *choose(problem), problem.has_blind_rows)

    @classmethod
    def keep(cls, problem: Problem) -> RowTiles:
        """The same whose weights are kept: of tiles that are `flat` or `whole` alone."""
        choose = choose_entries if runs_by_entries(problem) else choose_kept_sizes
        return cls(problem, *choose(problem), problem.has_blind_rows, kept=True)

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The scratch buffers, by name."""
        p, dtype, wide = self.problem, self.problem.dtype, self.problem.wide
        n, keys = self.count, self.reach
        rows, buffers = n * self.r * self.rows, dict[str, Buffer]()
        if not self.kept:
            shape = (*self.shapes[0][:2], keys) if self.is_one_run else (rows * keys,)
            buffers["p"] = Buffer(shape, dtype)
        if not self.kept or (p.grad is None and not self.single):
            buffers |= {name: Buffer((rows,), wide) for name in ("top", "total")}
            if self.rounds:
                buffers["wide"] = Buffer((rows * keys,), wide)
        if self.turns:
            buffers["turned"] = buffers["p"]
        if p.grad is not None:
            buffers["ds"] = Buffer((rows * keys,), dtype)
        return buffers if self.flat else buffers | self.needed_to_move(n, rows)

    def needed_to_move(self, n: int, rows: int) -> dict[str, Buffer]:
        """The scratch buffers of tiles that are copied, of n key/value heads and `rows` rows."""
        p, dtype = self.problem, self.problem.dtype
        sizes = {"q": rows * p.D, "o": rows * p.E}
        sizes |= {"k": n * self.reach * p.D, "v": n * self.reach * p.E}
        buffers = dict[str, Buffer]() if self.kept else {"lse": Buffer((rows,), p.wide)}
        if p.grad is not None:
            sizes["dq"] = sizes["q"]
        if p.grad is not None and not self.whole:
            sizes |= {"dk": sizes["k"], "dv": sizes["v"]}
            sums = zip("kv", p.specs[1:3], strict=True) if self.rounds else ()
            buffers |= {f"sum of d{x}": Buffer(s.shape, p.wide) for x, s in sums}
        return buffers | {name: Buffer((n,), dtype) for name, n in sizes.items()}

    @property
    def block(self) -> int:
        """Key/value heads of a tile that is a block of batch entries and groups."""
        return self.batch * self.groups

    @cached_property
    def runs(self) -> int:
        """How many tiles there are of heads as they lie, all of about the same size."""
        return -(-self.heads // self.block)

    @cached_property
    def heads(self) -> int:
        """Key/value heads of all batch entries."""
        return self.problem.B * self.problem.G

    @cached_property
    def count(self) -> int:
        """The most key/value heads of a tile."""
        if self.by_entries or not self.flat:
            return self.block
        return -(-self.heads // self.runs)

    @cached_property
    def steps(self) -> RowSteps:
        """How each tile is computed."""
        p = self.problem
        return RowSteps(p.node.scale, self.single, self.turns, self.rounds, self.kept)

    @property
    def single(self) -> bool:
        """Whether PyTorch's softmax, a single call, is the faster; always where a bias is added,
        which is in base e."""
        p = self.problem
        few, suits = self.r * p.M < SINGLE_ROWS, p.N % VECTORS == 0 or p.N >= LONG_ROW
        return bool(p.node.modifiers) or few or (self.rounds and suits)

    @cached_property
    def shapes(self) -> Sequence[tuple[int, int, int]]:
        """How `cut` views q, k, v, o or do, what is saved, dq, dk and dv."""
        p, n, saved = self.problem, self.heads, self.problem.N if self.kept else 1
        rows = self.r * p.M
        q, k, v, o = (n, rows, p.D), (n, -1, p.D), (n, -1, p.E), (n, rows, p.E)
        return q, k, v, o, (n, rows, saved), q, k, v

    @cached_property
    def mask(self) -> RunMask | None:
        """The mask of tiles that are runs of heads."""
        return RunMask.of(self, cuts=not self.kept and self.problem.grad is None)

    @property
    def rounds(self) -> bool:
        """Whether products give another dtype than that of the softmax."""
        return self.problem.dtype != self.problem.wide

    @cached_property
    def flat(self) -> bool:
        """Whether tiles are runs of whole heads as they lie, and nothing is copied."""
        p, mask = self.problem, self.problem.node.mask
        if p.node.modifiers or self.rows < p.M or self.reach < p.N or not self.lies_flat:
            return False
        few = self.by_entries or (self.holds and p.M * p.N <= MOST_HELD)
        return mask is None or has_few_scores(p) or few

    @cached_property
    def by_entries(self) -> bool:
        """Whether a run has whole batch entries, each with data of its own."""
        return (self.kept or self.problem.grad is None) and runs_by_entries(self.problem)

    @property
    def lies_flat(self) -> bool:
        """Whether all operands and o are runs of heads as they lie; without gaps where oneDNN
        multiplies, which copies others, and where rows are those of several heads."""
        p = self.problem
        shape, strides = p.layout_of_o
        rows = [p.specs[0], TensorSpec(shape, p.dtype, strides)]
        if p.grad is not None:
            rows = [p.specs[0], *(x for x in [p.grad.split(p.specs).do] if x is not None)]
        if self.rounds:
            return all(x.is_dense for x in (*rows, *p.specs[1:3]))
        whole = self.r == 1 or all(x.is_dense for x in rows)
        return whole and all(map(lies_flat, (*rows, *p.specs[1:3])))

    @cached_property
    def whole(self) -> bool:
        """Whether a tile has all queries and keys of its heads, so that no sum is over tiles."""
        p = self.problem
        if self.rows < p.M or self.listed is None:
            return False
        return all(slot.runs == ((0, p.N),) for slot in self.listed)

    @property
    def turns(self) -> bool:
        """Whether scores are made as k q^T."""
        return just_reads(self.problem) and not self.kept

    @cached_property
    def scratch(self) -> Scratch:
        """The same side by side."""
        return Scratch(self.buffers)

    @property
    def temporary(self) -> int:
        """Bytes that PyTorch allocates beside the workspace, at most: the places that a mask is
        asked at, with their bits or caps, caps of few scores, rows of o and two of their sums,
        what oneDNN packs of weights that it transposes, and a tile's share of a bias's gradient."""
        p, rows = self.problem, self.batch * self.rows
        caps = count_caps(p) if self.by_entries else rows * self.reach
        places = caps * (POSITIONS + 8) if p.node.mask else 0
        places += torch.int64.itemsize * (p.B + p.H + p.M + p.N)
        lines = rows * self.groups * self.r
        packed = lines * self.reach * p.dtype.itemsize
        if p.node.mask and has_few_scores(p):
            places += packed
        shares = lines * self.reach * p.wide.itemsize * len(p.node.modifiers)
        return places + packed + shares + 2 * lines * (p.E + 1) * p.wide.itemsize

    def summary(self) -> str:
        """How it runs, for `explain`."""
        size = f"{self.count * self.r} heads x {self.rows} queries" if self.flat else self.size
        kept = ", which read the weights that the forward kept" * self.kept
        return f"{NAMES[self.problem.dtype]} products on tiles of {size}{kept}"

    # Calls

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Tensors
    ) -> tuple[torch.Tensor, ...]:
        """o and lse, or o and weights where they are kept."""
        p = self.problem
        shape, dtype = ((*p.sizes,), p.dtype) if self.kept else (p.sizes[:3], p.wide)
        saved = torch.empty(shape, dtype=dtype, device=operands[0].device)
        return *self.infer(operands, scratch, saved), saved

    def infer(
        self, operands: Sequence[torch.Tensor], scratch: Tensors, saved: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """o alone. saved: room for lse [B,H,M], or for weights [B,H,M,N], where that is wanted."""
        if self.flat:
            return self.infer_runs(operands, scratch, saved, self.mask and self.mask.read(operands))
        q, k, v = operands[:3]
        o = self.problem.new_o(q.device)
        for spot in self.spots(operands, scratch, q):
            spot.attend((q, k, v), o, saved)
        return (o,)

    def infer_runs(
        self, operands: Sequence[torch.Tensor], scratch: Tensors, saved: torch.Tensor | None,
        hiding: Hiding | None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """The same on runs of heads. hiding: what the mask hides of each."""
        q, k, v = operands[:3]
        o = self.problem.new_o(q.device)
        core = Core(self.steps, scratch, hiding.blind if hiding else self.blind)
        if hiding and hiding.reach < self.problem.N:
            k, v = k[:, :, : hiding.reach], v[:, :, : hiding.reach]
        hides: Iterable[Change | None] = repeat(hiding and hiding.hide)
        if hiding and self.by_entries:
            hides = hiding.runs(self.batch)
        runs = self.cut((q, k, v, o) if saved is None else (q, k, v, o, saved))
        for hide, views in zip(hides, runs, strict=False):
            core.attend(hide, *views)
        return (o,)

    @property
    def is_one_run(self) -> bool:
        """Whether `OneRun` computes o alone: a run of all heads, whose softmax is one call."""
        more = self.kept or self.turns or not self.single
        takes_scale = abs(self.problem.node.scale) >= LEAST_FLOAT
        return self.flat and self.runs == 1 and takes_scale and not more

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
            core = Core(self.steps, scratch, hiding.blind if hiding else blind)
            for views in self.cut((*tensors, do, saved.contiguous(), *grads)):
                core.pull(hiding and hiding.hide, *views)
            return dict(enumerate(grads))
        dq, *sums = do.new_empty(tensors[0].shape), *self.sums(tensors, scratch)
        given, dtype = self.problem.node.split(own), self.problem.dtype
        totals = self.totals(given)
        for spot in self.spots(own, scratch, do):
            spot.pull(tensors, do, saved, (dq, *sums))
            spot.collect(totals)
        gradients = {0: dq, 1: sums[0].to(dtype), 2: sums[1].to(dtype)}
        return gradients | self.collected(given, totals)

    def read(
        self, operands: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor, torch.Tensor]:
        """The attention's own operands, lse or weights, and do: what a backward reads."""
        if self.kept:
            *own, weights, do = operands
            return own, weights, do
        assert self.problem.grad is not None
        read = self.problem.grad.split(operands)
        assert read.do is not None
        return read.own, read.lse, read.do

    def cut(self, tensors: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
        """What `Core` reads and fills, as runs [n,.,.] of key/value heads, as they lie."""
        heads = [*map(torch.Tensor.view, tensors, self.shapes)]
        if self.runs == 1:
            return (heads,)
        return zip(*(x.split(self.count) for x in heads), strict=True)

    def spots(
        self, own: Sequence[torch.Tensor], scratch: Tensors, like: torch.Tensor
    ) -> Iterator[Spot]:
        """Each tile of a call. own: the attention's operands. like: a tensor on their device."""
        given = self.problem.node.split(own)
        core = Core(self.steps, scratch, self.leaves_blind(given.modifiers))
        places = self.places(given.mask, like)
        for slot in self.tiles(given.mask):
            yield Spot(self, slot, core, places, given.modifiers)

    def leaves_blind(self, given: Sequence[Tensors]) -> bool:
        """Whether a query of a call may see no key. given: what the modifiers read."""
        if not given or not self.blind or self.problem.mask_has_blind_rows or is_traced():
            return self.blind
        return not all(bool(x.amin() > -INF) for data in given for x in data.values())

    def sums(self, tensors: Sequence[torch.Tensor], scratch: Tensors) -> list[torch.Tensor]:
        """Room for the gradients of k and v; zeros, in the dtype of sums, where those are over
        tiles."""
        if self.whole:
            return [x.new_empty(x.shape) for x in tensors[1:3]]
        if self.rounds:
            return [scratch[f"sum of d{x}"].zero_() for x in "kv"]
        return [x.new_zeros(x.shape) for x in tensors[1:3]]


def runs_by_entries(problem: Problem) -> bool:
    """Whether runs of whole batch entries are capped by data, and their scores are not few."""
    return not has_few_scores(problem) and caps_entries(problem)


@final
@frozen(eq=False)
class Spot:
    """A tile that is cut out of a problem, with its copies.

    places: all, not its own alone. given: what the modifiers read.
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
        """This tile's queries of x [B,H,M,D] as [n,L,D]: as they lie, or else room for them, since
        oneDNN copies what has gaps."""
        rows, room = self.slot.rows(x), self.room(name, x.shape[3])
        return rows.view(room.shape) if rows.is_contiguous() else room

    def load(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The same with what is there."""
        room, rows = self.rows(name, x), self.slot.rows(x)
        if not rows.is_contiguous():
            self.heads(room).copy_(rows)
        return room

    def store(self, x: torch.Tensor, made: torch.Tensor) -> None:
        """This tile's queries of x [B,H,M,D] = what was made in the room for them."""
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
        """Where this tile's gradient [n,S,D] by k or v is made: in x [B,G,N,D], if it is all."""
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
        """Where this tile is, of all keys."""
        slot = self.slot
        keys = range(self.tiles.problem.N)
        return place_within(self.places, slot.tile.batch, slot.heads, slot.tile.rows, keys)

    def change(self, s: torch.Tensor) -> None:
        """Run the modifiers on the scores of this tile, and hide what the mask drops."""
        for modifier, data in zip(self.tiles.problem.node.modifiers, self.given, strict=True):
            change_(modifier, self.heads(s), self.place.reading(data))
        for at, part in self.slot.mixed:
            piece = self.heads(s)[..., at : at + len(part)]
            hide_(piece, self.tiles.bits(self.slot, part, self.places, piece))

    def attend(
        self, operands: Sequence[torch.Tensor], o: torch.Tensor, saved: torch.Tensor | None
    ) -> None:
        """Fill this tile's rows of o [B,H,M,E], and of lse [B,H,M] or weights where wanted."""
        if not self.slot.tile.parts:  # never, where weights are kept
            self.slot.rows(o).zero_()
            if saved is not None:
                self.slot.rows(saved).fill_(-INF)
            return
        q, k, v = operands
        made, room = self.rows("o", o), None if saved is None else self.saved_room(saved)
        keys = self.load_keys("k", k), self.load_keys("v", v)
        self.core.attend(self.change, self.load("q", q), *keys, made, room)
        self.store(o, made)
        if saved is not None and room is not None and not self.tiles.kept:
            self.slot.rows(saved).copy_(self.heads(room)[..., 0])

    def saved_room(self, saved: torch.Tensor) -> torch.Tensor:
        """This tile's rows of weights [B,H,M,N] as [n,L,N], where they lie; or room for those of
        lse [B,H,M], as [n,L,1]."""
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
        """Add this tile's share to the gradients of what the modifiers read."""
        steps = zip(self.tiles.problem.node.modifiers, self.given, totals, strict=True)
        for modifier, data, sums in steps:
            if sums:
                ds = self.heads(self.room("ds", self.slot.keys))
                modifier.collect(sums, ds, self.place.reading(data))
