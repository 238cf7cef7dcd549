"""Packed tensors and paged caches as padded ones, with the starts of their sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.fused import Fused
from attn_graph.ir.graph import Graph
from attn_graph.ir.packed import LENGTHS, PLACES, STARTS, Packed
from attn_graph.ir.packing import Lengths, row_count
from attn_graph.lowering.facts import Facts
from attn_graph.lowering.lengths import gapless_sides, rows_outside, shares_lengths
from attn_graph.lowering.lying.quantised import quantised_problem
from attn_graph.lowering.problem import Problem, has_problem, operand_specs
from attn_graph.spec import TensorSpec, dense_strides

SIDES = {  # of operands and results
    **dict.fromkeys(("q", "o", "lse", "do", "dq"), "rows"),
    **dict.fromkeys(("k", "v", "dk", "dv"), "keys"),
}
COPIED = {"forward": ("v",), "backward": ("q", "k", "v", "do")}  # packed ones, by pass


@final
@frozen
class PaddedSequences:
    """The layout of packed or paged operands, padded in the problem; empty without any.

    rows: T of packed q; keys: T of k and v. specs: of packed or paged q, k and v, unless copied, by
    name. table: [B,pages] of k and v in pages. gapless: the sides with lengths equal to the
    differences of their starts. alike: True if q and k have equal lengths. finite: True if the
    pools are declared so.
    """

    rows: int | None = None
    keys: int | None = None
    specs: tuple[tuple[str, TensorSpec], ...] = ()
    table: TensorSpec | None = None
    gapless: tuple[str, ...] = ()
    alike: bool = False
    finite: bool = False

    @cached_property
    def totals(self) -> dict[str, int]:
        """T of each packed side."""
        both = {"rows": self.rows, "keys": self.keys}
        return {side: T for side, T in both.items() if T is not None}

    @cached_property
    def packed(self) -> dict[str, TensorSpec]:
        """The packed ones of q, k and v read in place, by name."""
        return {name: x for name, x in self.specs if len(x.shape) == 3}

    @cached_property
    def pools(self) -> dict[str, TensorSpec]:
        """k and v in pages, by name."""
        return {name: x for name, x in self.specs if len(x.shape) == 4}

    @property
    def page(self) -> int:
        """Rows of a page of k and v; 0 without pages."""
        return next((x.shape[1] for x in self.pools.values()), 0)

    def absent(
        self, sides: Iterable[str], p: Problem, x: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """By side, True for rows outside sequences, [T,1,1], or past lengths, [B,1,M or N,1]; one
        tensor for both sides if they have the same starts and lengths.

        x: starts and lengths, by name.
        """
        made: dict[tuple[int, ...], torch.Tensor] = {}
        names = {}
        for side in sides:
            most = self.totals.get(side, p.M if side == "rows" else p.N)
            names[side] = most, *(id(x.get(name[side])) for name in (STARTS, LENGTHS))
            if names[side] not in made:
                made[names[side]] = self.absent_rows(side, most, x)
        return {side: made[name] for side, name in names.items()}

    def absent_rows(self, side: str, most: int, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`absent` of one side, of `most` rows."""
        lengths = None if side in self.gapless else x[LENGTHS[side]]
        if side in self.totals:
            return rows_outside(x[STARTS[side]], lengths, most)[:, None, None]
        assert lengths is not None  # only packed sides are gapless
        place = torch.arange(most, device=lengths.device)
        return (place >= lengths[:, None])[:, None, :, None]


DENSE = PaddedSequences()


def read_problem(facts: Facts) -> tuple[Problem, PaddedSequences] | None:
    """The problem of a graph of one attention, or of its gradient, padded if the tensors are packed
    or in pages, and the layout of these; None for other graphs."""
    graph = facts.graph
    if (problem := facts.problem or quantised_problem(graph)) is not None:
        return problem, DENSE
    if not graph.eqns or any(not isinstance(eqn.op, Lengths) for eqn in graph.eqns[:-1]):
        return None
    last = graph.eqns[-1]
    op: Packed | None = last.op.packed
    if op is None or op.scaled or not has_problem(op.op):
        return None
    if min(graph.outputs) < len(graph.types) - len(last.outs):
        return None
    specs = operand_specs(graph, last)
    return Problem.of(op.op, padded_specs(op, specs)), find_sequences(graph, op, specs)


def padded_specs(op: Packed, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The specs of the operands of the op within. A packed or paged operand keeps the strides of
    its own rows and heads; no others are read. A copied operand is dense."""
    types = op.padded([x.type for x in specs])
    copies = copied_places(op.op)
    return [
        pad_spec(x, due.shape, dense=n in copies and side in op.sides) if side in op.readers else x
        for n, (x, due, side) in enumerate(zip(specs, types, op.op.operand_sides, strict=False))
    ]


def copied_places(op: Fused) -> tuple[int, ...]:
    """The packed operands of an attention or its gradient copied by a call: cuDNN multiplies them
    by 0 in masked places. v; of a gradient q, k, v and do."""
    copied = COPIED["backward" if op.is_gradient else "forward"]
    return tuple(n for n, role in enumerate(op.takes) if role.name in copied)


def pad_spec(x: TensorSpec, shape: tuple[int, ...], *, dense: bool) -> TensorSpec:
    """x [T,H,D] or a pool [n,P,G,D] as [B,H,M,D], or a statistic [H,T] as [B,H,M].

    dense: as if it were [T,H,D] without gaps.
    """
    if len(shape) == 3:
        return TensorSpec(shape, x.dtype)
    *_, H, D = x.shape
    *_, row, head, last = dense_strides(x.shape) if dense else x.strides
    step = row if x.shape[-3] > 1 else max(H * D, (H - 1) * head + D)
    outer = x.strides[0] if len(x.shape) == 4 else shape[2] * step
    return TensorSpec(shape, x.dtype, (outer, head, step, last))


def find_sequences(graph: Graph, op: Packed, specs: Sequence[TensorSpec]) -> PaddedSequences:
    """The layout of the operands of a packed graph. op, specs: of its last equation."""
    copies = copied_places(op.op)
    own = (
        (name, x)
        for n, (name, x, side) in enumerate(zip("qkv", specs, op.op.operand_sides, strict=False))
        if side in op.readers and (side not in op.sides or n not in copies)
    )
    totals = {side: row_count(specs[PLACES[side]].shape) for side in op.sides}
    return PaddedSequences(
        totals.get("rows"),
        totals.get("keys"),
        tuple(own),
        specs[-1] if op.paged else None,
        gapless_sides(graph),
        shares_lengths(graph),
        op.finite,
    )
