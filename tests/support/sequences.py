"""Batches of sequences, packed and padded, for tests of packed tensors and of pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from attrs import evolve, frozen
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph.ir.storage.packing import Unpack, list_sequences
from attn_graph.testing.agreement import run_gradients
from attn_graph.testing.tensors import lay_anyhow, lay_out

I32 = torch.int32
SPEC = ag.TensorSpec


@frozen
class Batch:
    """Sequences: rows and keys of each, and how many rows and keys lie unused after each. full: no
    row is unused, and the graph declares it."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    unused: tuple[tuple[int, int], ...]
    gaps: bool
    full: bool = False

    @property
    def most(self) -> tuple[int, int]:
        """The longest of each side."""
        return max(self.rows, default=0), max(self.keys, default=0)

    def starts(self, side: int) -> torch.Tensor:
        """starts [B+1] of rows, side 0, or keys; unused ones at the end belong to no sequence."""
        pairs = zip((self.rows, self.keys)[side], self.unused, strict=True)
        extents = [n + more[side] * self.gaps for n, more in pairs]
        return torch.tensor([*accumulate(extents, initial=0)], dtype=I32)

    def total(self, side: int) -> int:
        """T: so many rows a packed tensor has."""
        return int(self.starts(side)[-1]) + 2 * (not self.full)

    @property
    def is_alike(self) -> bool:
        """True if q and k may have one tensor of starts."""
        return self.full and self.rows == self.keys

    def lengths(self, side: int) -> torch.Tensor:
        """lengths [B]."""
        return torch.tensor((self.rows, self.keys)[side], dtype=I32)

    def pad(self, x: torch.Tensor, side: int = 0) -> torch.Tensor:
        """A packed tensor, padded with 0."""
        return Unpack(self.most[side]).run(x, self.starts(side), self.lengths(side))[0]

    def members(self, side: int) -> torch.Tensor:
        """Which rows of a packed tensor are of a sequence, [T]."""
        mine = torch.zeros(self.total(side), dtype=torch.bool)
        where = self.starts(side), self.lengths(side)
        for start, n in list_sequences(*where, len(mine), len(mine)):
            mine[start : start + n] = True
        return mine

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """Which rows of a padded result there are."""
        there = torch.arange(x.shape[2]) < self.lengths(0)[:, None]
        return there.view(*there.shape[:1], 1, -1, *(1,) * (x.ndim - 3))

    def outside(self, x: torch.Tensor, side: int = 0) -> torch.Tensor:
        """The rows of a packed tensor that are of no sequence, [H,...]."""
        mine = self.members(side)
        return x[~mine] if x.ndim == 3 else x[:, ~mine]

    def spoil(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """A packed tensor with NaN in the rows of no sequence."""
        shape = (-1, 1, 1) if x.ndim == 3 else (1, -1)
        return x.masked_fill(~self.members(side).view(shape), torch.nan)


SIDES = {"q": 0, "k": 1, "v": 1}  # of what is packed

lengths = st.one_of(st.integers(0, 7), st.sampled_from([0, 1, 1, 17]))


@st.composite
def batches(draw: DrawFn, least: int = 1) -> Batch:
    """One to four sequences of 0 to 17 rows, at least one of them with some."""
    B = draw(st.integers(least, 4))
    rows, keys = (tuple(draw(lengths) for _ in range(B)) for _ in range(2))
    unused = tuple(draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in range(B))
    gaps = draw(st.booleans())
    full = not gaps and draw(st.booleans())
    batch = Batch(rows, rows if full and draw(st.booleans()) else keys, unused, gaps, full)
    return (
        batch
        if min(batch.most)
        else evolve(batch, rows=(4, *batch.rows[1:]), keys=(4, *batch.keys[1:]))
    )


def numbers(spec: ag.TensorSpec, random: torch.Generator) -> torch.Tensor:
    """A tensor for an option, laid out as its spec says: floats, flags, or numbers of few segments;
    lengths among them, which nobody reads by themselves."""

    def values(count: int) -> torch.Tensor:
        if spec.dtype.is_floating_point:
            return torch.randn(count, generator=random).to(spec.dtype)
        most = 2 if spec.shape else 2**40
        return torch.randint(most, (count,), generator=random).to(spec.dtype)

    return lay_out(spec, values, random)


@st.composite
def by_padding(draw: DrawFn, mask: ag.Mask | None) -> ag.Mask | None:
    """The mask, or a part of it by a formula, for which CPUs pad sequences to the longest."""
    formula = draw(st.sampled_from((None, None, ag.Formula("i + j != 3"))))
    return mask if formula is None else formula if mask is None else mask & formula


FAR = st.sampled_from((1.0, 1.0, 30.0))  # times q: an |lse| beyond 32 is too coarse for weights


def lay_like(x: torch.Tensor, spec: ag.TensorSpec) -> torch.Tensor:
    """A copy in the layout of a spec, expanded along axes where that is."""
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in spec.strides)
    room = torch.empty_strided(spec.shape, spec.strides, dtype=x.dtype)
    room[once].copy_(x[once])
    return room


def lay_places(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Starts, lengths and tables of pages, sliced out of something larger, or expanded."""
    random = torch.Generator().manual_seed(seed)
    return {name: lay_anyhow(x, random) for name, x in tensors.items()}


def draw_cotangents(graph: ag.Graph, batch: Batch | None, seed: int) -> list[torch.Tensor | None]:
    """Cotangents of results, NaN in rows of no sequence; None of those that take none. batch: of
    packed results."""
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(t.shape, generator=random).to(t.dtype) for t in graph.output_types]
    takes = [i in graph.differentiable_outputs for i in graph.outputs]
    laid = drawn if batch is None else [batch.spoil(x, 0) for x in drawn]
    return [x if there else None for x, there in zip(laid, takes, strict=True)]


def gradients_on(
    device: str,
    plan: ag.Plan,
    tensors: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
) -> dict[str, torch.Tensor]:
    """What a plan of a device gives by `run_gradients`; tensors come from the CPU, and go back."""
    there = [None if x is None else x.to(device) for x in cotangents]
    grads = run_gradients(plan, [x.to(device) for x in tensors], there)
    return {name: x.cpu() for name, x in grads.items()}


def attend(specs: Sequence[ag.TensorSpec], options: dict[str, Any]) -> ag.Graph:
    """The attention of q, k and v with options."""
    q, k, v = specs
    return ag.attention(q, k, v, **options)
