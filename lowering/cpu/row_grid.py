"""The tiles of whole rows of scores of a problem, their computation, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Self

import torch
from attrs import frozen

from attn_graph.ir.philox import WORDS
from attn_graph.kernels.row_sums import count_sum_bytes, has_whole_rows
from attn_graph.lowering.cpu.asking import WORD, Extent, ask_mask
from attn_graph.lowering.cpu.dropping import needed_to_draw
from attn_graph.lowering.cpu.product_slots import (
    MOST_HELD,
    TileGrid,
    choose_entries,
    choose_kept_sizes,
    choose_row_sizes,
    has_few_scores,
    lies_flat,
)
from attn_graph.lowering.cpu.row_core import MOST_CAST, RowSteps
from attn_graph.lowering.cpu.run_mask import caps_entries, cuts_entries
from attn_graph.lowering.problem import Problem, cotangent_bytes
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.spec import NAMES, TensorSpec

# PyTorch's softmax, a single call, is the faster where a key/value head has less than SINGLE_ROWS
# rows; and in half precision, unless rows are shorter than LONG_ROW and no multiple of VECTORS: it
# takes what is left one by one. Elsewhere several passes are as fast or up to a third faster.
SINGLE_ROWS, VECTORS, LONG_ROW = 64, 32, 400
# For at most MOST_READING rows that read LEAST_READ bytes of k, k q^T takes a third of the time of
# q k^T.
MOST_READING, LEAST_READ = 4, 2**22
# For at most MOST_SUMMED rows of a key/value head, p v is made as sums of rows of v, if v has
# LEAST_SUMMED numbers, in float32 only from E = LONG_NUMBERS on. Sums take half the time of a
# product, in float16 a twentieth.
LONG_NUMBERS = 128
MOST_SUMMED, LEAST_SUMMED = {torch.float32: 2, torch.bfloat16: 1, torch.float16: 4}, 2**20


@frozen
class RowGrid(TileGrid):
    """The tiles of one problem.

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
        return cls(problem, *sizes, problem.has_blind_rows)

    @classmethod
    def keep(cls, problem: Problem, rate: float = 0.0) -> Self:
        """Tiles with kept weights, if they are `flat` or `whole`."""
        sizes = (
            choose_entries(problem)
            if runs_by_entries(problem)
            else choose_kept_sizes(problem, rate > 0 and problem.grad is None)
        )
        return cls(problem, *sizes, problem.has_blind_rows, True, rate)

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
        if not self.kept or (p.grad is None and not self.single):
            buffers |= {name: Buffer((rows,), wide) for name in ("top", "total")}
            if self.rounds:
                buffers["wide"] = Buffer((rows * keys,), wide)
        if self.turns:
            buffers["turned"] = buffers["p"]
        if p.grad is not None:
            buffers["ds"] = Buffer((rows * keys,), dtype)
        elif self.rate:
            buffers |= needed_to_draw(rows, keys, p.dtype)  # signs, of weights as they are kept
        if self.spans and not self.fills_o:
            buffers["o"] = Buffer((rows * p.E,), dtype)
        return buffers if self.flat else buffers | self.needed_to_move(n, rows)

    @cached_property
    def fills_o(self) -> bool:
        """True if products fill o of a batch entry in place: with gaps they would fill it head by
        head."""
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
    def steps(self) -> RowSteps:
        p = self.problem
        return RowSteps(
            p.node.scale, self.single, turns=self.turns, rounds=self.rounds, kept=self.kept,
            sums=self.sums_rows, casts=self.casts, rate=self.rate,
        )  # fmt: skip

    @property
    def single(self) -> bool:
        """True if PyTorch's softmax, a single call, is faster; always in base e
        after a modifier."""
        p = self.problem
        few, suits = p.lines < SINGLE_ROWS, p.N % VECTORS == 0 or p.N >= LONG_ROW
        return bool(p.node.modifiers) or few or (self.rounds and suits)

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
        return all(slot.runs == ((0, p.N),) for slot in self.listed)

    @property
    def turns(self) -> bool:
        p = self.problem
        if self.spans:
            return reads_much(p, p.B)
        return just_reads(p) and not self.kept

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
        if self.spans:  # copies of each entry's mask, one of them turned, and of the caps
            each += p.B * p.N * (2 * torch.bool.itemsize + item)
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


def runs_by_entries(problem: Problem) -> bool:
    return not has_few_scores(problem) and caps_entries(problem)


def sums_rows(problem: Problem, parts: int = 1) -> bool:
    """True if p v of a problem, or of each of its parts, is made as sums of rows of v."""
    p, v = problem, problem.specs[2]
    few = p.grad is None and MOST_SUMMED.get(p.dtype, 0) >= p.lines
    suits = p.E >= LONG_NUMBERS or p.dtype != torch.float32
    return few and suits and prod(v.shape) >= parts * LEAST_SUMMED and has_whole_rows(v)


def just_reads(problem: Problem) -> bool:
    """True if few queries in float32 read much of k and v, in place in products."""
    p, (k, v) = problem, problem.specs[1:3]
    suits = p.grad is None and p.node.mask is None and p.dtype == p.wide
    return suits and reads_much(p) and lies_flat(k) and lies_flat(v)


def reads_much(problem: Problem, parts: int = 1) -> bool:
    return problem.lines <= MOST_READING and problem.specs[1].type.bytes >= parts * LEAST_READ
