"""Attention on tiles of whole rows of scores: products with a softmax between, and no modifiers but
soft caps, and a bias with kept weights.

Products read and give the dtype of the operands, scores and weights included, except float16
scores, in float32. The softmax of a row and sums over tiles are in float32. Each tile has all keys
of its queries, so the softmax and its derivative are of whole rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Self, final

import torch
from attrs import frozen

from attn_graph.ir.modifiers import SoftCap
from attn_graph.kernels.products import reaches_far
from attn_graph.kernels.row_sums import count_sum_bytes
from attn_graph.lowering.cpu.asking import WORD, Extent, ask_mask
from attn_graph.lowering.cpu.row_core import MOST_CAST, Change, Core, RowVariant, Spot, sums_rows
from attn_graph.lowering.cpu.run_mask import RunMask, cuts_entries, runs_by_entries
from attn_graph.lowering.cpu.tile_grid import (
    MOST_HELD,
    TileGrid,
    choose_entries,
    choose_kept_sizes,
    choose_row_sizes,
    draw,
    has_few_scores,
    lies_flat,
    needed_to_draw,
)
from attn_graph.lowering.problem import Problem, cotangent_bytes
from attn_graph.machine.ambient import is_traced
from attn_graph.machine.philox import WORDS
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.spec import INF, NAMES, TensorSpec

Tensors = Mapping[str, torch.Tensor]
Seed = tuple[int, int]  # and an offset
# For at most MOST_READING rows that read LEAST_READ bytes of k in float32, k q^T takes a third of
# the time of q k^T; of fewer bytes, which lie in a CPU's cache, up to a fifth more.
MOST_READING, LEAST_READ = 4, 2**22


@final
@frozen
class RowTiles(TileGrid):
    """Forward and backward of one problem.

    blind: True if a query may see no key. kept: True if the forward gives its weights, and the
    backward reads them; otherwise lse. rate: of dropout, left out of the problem: dropped weights
    are kept as negative numbers.
    """

    blind: bool
    kept: bool = False
    rate: float = 0.0

    @classmethod
    def plan(cls, problem: Problem) -> Self:
        """The tiles of a problem, of sizes chosen for it alone."""
        if cuts_entries(problem):
            sizes = problem.M, 1, problem.G
        elif problem.grad is None and runs_by_entries(problem):
            sizes = choose_entries(problem)
        else:
            sizes = choose_row_sizes(problem)
        return cls(problem, *sizes, False, problem.has_blind_rows)

    @classmethod
    def keep(cls, problem: Problem, rate: float = 0.0) -> Self:
        """Tiles with kept weights, if they are `flat` or `whole`."""
        sizes = (
            choose_entries(problem)
            if runs_by_entries(problem)
            else choose_kept_sizes(problem, rate > 0 and problem.grad is None)
        )
        return cls(problem, *sizes, problem.node.is_biased, problem.has_blind_rows, True, rate)

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        p, wide = self.problem, self.problem.wide
        dtype = wide if self.casts else p.dtype
        n, keys = self.count, self.reach
        rows, buffers = n * self.r * self.rows, dict[str, Buffer]()
        if not self.kept or self.rate:
            buffers["p"] = Buffer((n, self.r * self.rows, keys), dtype)
        if self.casts:
            buffers |= self.needed_to_cast(n, rows)
        if not self.kept:
            buffers |= {name: Buffer((rows,), wide) for name in ("top", "total")}
            if self.rounds:
                buffers["wide"] = Buffer((rows * keys,), wide)
        if self.turns:
            buffers["turned"] = buffers["p"]
        if p.grad is not None:
            buffers["ds"] = Buffer((rows * keys,), dtype)
        elif self.rate:
            buffers |= needed_to_draw(rows, keys, p.dtype)  # signs, of weights as they are kept
        if not self.fills_o:
            buffers["o"] = Buffer((rows * p.E,), dtype)
        return buffers if self.flat else buffers | self.needed_to_move(n, rows)

    @cached_property
    def fills_o(self) -> bool:
        """True if products fill o in place: with gaps in a batch entry they would fill it head by
        head."""
        if not self.spans:
            return True
        shape, strides = self.problem.layout_of_o
        return TensorSpec(shape[1:], self.problem.dtype, strides[1:]).is_dense

    @cached_property
    def spans(self) -> bool:
        """True if each tile is a batch entry, of the keys left by data."""
        return not self.kept and cuts_entries(self.problem)

    def needed_to_cast(self, n: int, rows: int) -> dict[str, Buffer]:
        """The scratch buffers of q and of a piece of k of n heads for making scores, and then, in
        place of k, of weights of `rows` rows for summing v."""
        p = self.problem
        piece = min(n * p.N * p.D, max(MOST_CAST, p.D))
        weights = -(-rows * self.reach * p.dtype.itemsize // p.wide.itemsize)
        sizes = {"cast q": rows * p.D, "cast": max(piece, weights)}
        return {name: Buffer((size,), p.wide) for name, size in sizes.items()}

    def needed_to_move(self, n: int, rows: int) -> dict[str, Buffer]:
        """The scratch buffers of copied tiles, of n key/value heads and `rows` rows."""
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
        """Key/value heads of a tile of whole batch entries and groups."""
        return self.batch * self.groups

    @cached_property
    def runs(self) -> int:
        """How many tiles there are of heads as they lie, all of about the same size."""
        return -(-self.heads // self.block)

    @cached_property
    def heads(self) -> int:
        return self.problem.B * self.problem.G

    @cached_property
    def count(self) -> int:
        if self.by_entries or not self.flat:
            return self.block
        return -(-self.heads // self.runs)

    @cached_property
    def steps(self) -> RowVariant:
        p = self.problem
        return RowVariant(
            p.node.scale, turns=self.turns, rounds=self.rounds, kept=self.kept,
            sums=self.sums_rows, casts=self.casts, rate=self.rate, caps=self.caps,
        )  # fmt: skip

    @property
    def caps(self) -> tuple[float, ...]:
        """Of soft caps, which are all modifiers or none."""
        return tuple([m.cap for m in self.problem.node.modifiers if isinstance(m, SoftCap)])

    @cached_property
    def shapes(self) -> Sequence[tuple[int, int, int]]:
        """The views made by `cut` of q, k, v, o or do, the saved tensor, dq, dk and dv."""
        p, n, saved = self.problem, self.heads, self.problem.N if self.kept else 1
        rows = p.lines
        q, k, v, o = (n, rows, p.D), (n, -1, p.D), (n, -1, p.E), (n, rows, p.E)
        return q, k, v, o, (n, rows, saved), q, k, v

    @property
    def rounds(self) -> bool:
        return self.problem.dtype != self.problem.wide and not self.casts

    @property
    def casts(self) -> bool:
        """True if scores are of q and k in float32: float16 ends at 65504."""
        return self.problem.dtype == torch.float16

    @cached_property
    def sums_rows(self) -> bool:
        return not self.rate and sums_rows(self.problem, self.problem.B if self.spans else 1)

    @cached_property
    def flat(self) -> bool:
        """True if tiles are runs of whole heads in place."""
        p, mask = self.problem, self.problem.node.mask
        if self.spans:
            return True
        if not p.node.is_capped or self.rows < p.M or self.reach < p.N or not self.lies_flat:
            return False
        few = self.by_entries or (self.holds and p.M * p.N <= MOST_HELD)
        return mask is None or has_few_scores(p) or few

    @property
    def takes_any_keys(self) -> bool:
        """True if a call may bring fewer keys: it reads all of them, in place."""
        return self.flat and self.problem.node.mask is None

    @cached_property
    def by_entries(self) -> bool:
        """True if a run has whole batch entries, each with data of its own."""
        runs = (self.kept or self.problem.grad is None) and runs_by_entries(self.problem)
        return runs or self.spans

    @property
    def lies_flat(self) -> bool:
        """True if no operand must be copied. oneDNN and grouped heads also need dense memory."""
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
        """True if a tile has all queries and keys of its heads: no sum is over tiles."""
        p = self.problem
        if self.rows < p.M or self.listed is None:
            return False
        return all(tile.runs == ((0, p.N),) for tile in self.listed)

    @property
    def turns(self) -> bool:
        """True if few queries in float32 read much of k, in place in products."""
        p = self.problem
        if p.grad is not None or self.kept or p.dtype != p.wide or p.lines > MOST_READING:
            return False
        if p.specs[1].type.bytes < LEAST_READ * (p.B if self.spans else 1):
            return False
        return self.spans or (p.node.mask is None and all(map(lies_flat, p.specs[1:3])))

    @cached_property
    def scratch(self) -> Scratch:
        return Scratch(self.buffers)

    @property
    def temporary(self) -> int:
        """Bytes allocated by PyTorch beside the workspace, at most: masks with their bits or caps,
        two numbers of each row; for a gradient lse and rows of do, else one of four drawn words; a
        tile's share of a bias; oneDNN's packed operands, and the memory of sums of rows of v."""
        p, item = self.problem, self.problem.dtype.itemsize
        lines = self.batch * self.groups * self.r * self.rows
        each = self.asked + WORD * (p.B + p.H + p.M + p.N) + 2 * lines * p.wide.itemsize
        each += lines * self.reach * p.wide.itemsize * p.node.is_biased
        if self.cuts:  # what some and all rows keep of each entry, turned too, and the caps
            each += p.B * p.N * (4 * torch.bool.itemsize + item)
        elif p.node.mask is not None and has_few_scores(p):
            each += lines * self.reach * item
        if p.grad is not None:
            each += 2 * p.B * p.H * p.M * p.wide.itemsize
            each += lines * p.E * item * self.blind + cotangent_bytes(p) * self.kept
        elif self.rate:
            each += lines * self.reach * WORD // WORDS
        if p.dtype != p.wide:
            each += self.packing
        if self.sums_rows:
            each += count_sum_bytes(self.count, self.r * self.rows, p.N, p.E, p.dtype)
        return each

    @property
    def asked(self) -> int:
        """Bytes of evaluating a mask, at all places at once if tiles are runs of heads."""
        p = self.problem
        if p.node.mask is None:
            return 0
        tile = self.batch, self.groups * self.r, self.rows, self.reach
        at = Extent(*(p.sizes if self.flat else tile))
        asked = ask_mask(p.node.mask, p.by_role.mask, at)
        bits = 2 * p.dtype.itemsize * at.count(asked.axes)
        return max(asked.most, asked.made + bits)

    def summary(self) -> str:
        size = f"{self.count * self.r} heads x {self.rows} queries" if self.flat else self.size
        more = ", of the keys that count" * self.spans
        more += ", which read the weights that the forward kept" * self.kept
        more += ", and sums of rows of v" * self.sums_rows
        dtype = self.problem.wide if self.casts else self.problem.dtype
        return f"{NAMES[dtype]} products on tiles of {size}{more}"

    @cached_property
    def mask(self) -> RunMask | None:
        cuts = self.by_entries and not self.kept and self.problem.grad is None
        return RunMask.of(self, self.batch if cuts else 0)

    @property
    def cuts(self) -> bool:
        return self.flat and self.mask is not None and self.mask.batch > 0

    def count_keys(self, operands: Sequence[torch.Tensor], _counts: Sequence[int]) -> int:
        assert self.mask is not None
        if self.spans:
            return 1  # of an entry without keys
        return self.mask.read(operands).reach or self.problem.N

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Tensors
    ) -> tuple[torch.Tensor, ...]:
        """o and lse, or o and weights if they are kept."""
        p, device = self.problem, operands[0].device
        own, seed = operands, None
        if self.rate:
            *own, first, offset = operands
            seed = int(first), int(offset)
        if self.kept:
            saved = torch.empty((*p.sizes,), dtype=p.dtype, device=device)
        else:
            saved = p.new_statistic("lse", device, scratch)
            if self.flat and "out.lse" in scratch and not self.is_cut(saved):
                saved = p.new_statistic("lse", device, {})
        return *self.infer(own, scratch, saved, seed), saved

    def infer(
        self, operands: Sequence[torch.Tensor], scratch: Tensors, saved: torch.Tensor | None = None,
        seed: Seed | None = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """o alone. saved: room for lse [B,H,M], or for weights [B,H,M,N], if wanted. seed: of
        dropout, with its offset."""
        q, k, v = operands[:3]
        o = self.problem.new_o(q.device, scratch)
        if self.flat:
            if "out.o" in scratch and not self.is_cut(o):
                o = self.problem.new_o(q.device)
            self.attend(operands, scratch, o, saved, seed)
            return (o,)
        for spot in self.spots(operands, scratch, q):
            sign = seed and self.signer(scratch, seed, spot.tile.batch, spot.tile.heads)
            spot.attend((q, k, v), o, saved, sign)
        return (o,)

    def is_cut(self, x: torch.Tensor) -> bool:
        """True if the runs of heads are views of a caller's o [B,H,M,E] or lse [B,H,M]: else one
        of the tiles' own is filled, for the caller to copy."""
        p, (b, h, m, *_) = self.problem, x.stride()
        entries = self.spans or p.B == 1 or p.G == 1 or b == p.H * h
        return entries and (self.r == 1 or p.M == 1 or h == p.M * m)

    def attend(
        self, operands: Sequence[torch.Tensor], scratch: Tensors, o: torch.Tensor,
        saved: torch.Tensor | None, seed: Seed | None,
    ) -> None:  # fmt: skip
        """Fill o, and `saved` if given, on runs of heads."""
        hiding, (q, k, v) = self.mask and self.mask.read(operands), operands[:3]
        core = Core(self.steps, scratch, hiding.blind if hiding else self.blind)
        own: Iterable[tuple[Change | None, slice | None]] = repeat((hiding and hiding.hide, None))
        if hiding and self.by_entries:
            own = hiding.entries(self.batch)
        runs = self.cut((q, k, v, o) if saved is None else (q, k, v, o, saved))
        signs: Iterable[Change | None] = repeat(None)
        if seed is not None:
            signs = (self.signer(scratch, seed, range(1), heads) for heads in self.query_heads)
        for (hide, keys), sign, (q, k, v, o, *room) in zip(own, signs, runs, strict=False):
            if keys is not None:
                k, v = k[:, keys], v[:, keys]
            made = o if self.fills_o else scratch["o"].view(o.shape)
            core.attend(hide, q, k, v, made, *room, sign=sign)
            if made is not o:
                o.copy_(made)

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
            blind = hiding.blind if hiding else bool(self.mask and self.mask.blinds(own))
            core = Core(self.steps, scratch, blind, self.divides(saved))
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
        return gradients | self.collected(totals)

    def read(
        self, operands: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor, torch.Tensor]:
        """The attention's own operands, lse or weights, and do, for a backward."""
        if self.kept:
            *own, weights, do = operands
            do = do.contiguous() if self.reads_in_order else do
            return own[: len(self.problem.node.takes)], weights, do
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
        if self.spans:
            p, last = self.problem, len(self.problem.sizes)
            entries = (x.view(p.B, p.G, -1, x.shape[3] if x.ndim == last else 1) for x in tensors)
            return zip(*(x.unbind() for x in entries), strict=True)
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
        for tile in self.tiles(given.mask):
            yield Spot(self, self.whole, tile, core, places, given.modifiers)

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
