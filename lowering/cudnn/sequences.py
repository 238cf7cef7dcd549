"""Packed tensors and paged caches in cuDNN's terms: padded shapes, and starts of sequences.

cuDNN sees a packed tensor [T,H,D] as [B,H,M,D], with the first element of each batch entry: T is
not a part of the call, so one plan serves batches of any number of rows. It sees a pool of pages
[n,P,G,D] as [n,G,P,D], with the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.ir.fused import Fused
from attn_graph.ir.graph import Graph
from attn_graph.ir.packed import LENGTHS, PLACES, STARTS, Packed
from attn_graph.ir.packing import Lengths, row_count
from attn_graph.lowering.cudnn.graph import CudnnCall, Slot, slot
from attn_graph.lowering.cudnn.quantised import quantised_problem
from attn_graph.lowering.lengths import gapless_sides, sequence_rows, shares_lengths
from attn_graph.lowering.problem import Problem, has_problem, operand_specs, sole
from attn_graph.spec import TensorSpec, dense_strides

LEAST_STEP = 64  # rows: the grain of planned totals of backwards
GRAIN = 4  # bits of a planned total: it exceeds the number of rows by an eighth at most
SIDES = {  # of cuDNN's operands and results
    **dict.fromkeys(("q", "o", "lse", "do", "dq"), "rows"),
    **dict.fromkeys(("k", "v", "dk", "dv"), "keys"),
}
COPIED = {"forward": ("v",), "backward": ("q", "k", "v", "do")}  # packed ones, by pass
TOTALS = {"rows": "max_total_seq_len_q", "keys": "max_total_seq_len_kv"}
TABLES = ("paged_attention_k_table", "paged_attention_v_table")


@final
@frozen
class CudnnSequences:
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

    @property
    def packed(self) -> dict[str, TensorSpec]:
        """The packed ones of q, k and v read in place, by name."""
        return {name: x for name, x in self.specs if len(x.shape) == 3}

    @property
    def pools(self) -> dict[str, TensorSpec]:
        """k and v in pages, by name."""
        return {name: x for name, x in self.specs if len(x.shape) == 4}

    @property
    def page(self) -> int:
        """Rows of a page of k and v; 0 without pages."""
        return next((x.shape[1] for x in self.pools.values()), 0)

    def absent(self, side: str, most: int, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """True for rows of a side outside sequences, [T,1,1], or past lengths, [B,1,most,1].

        x: starts and lengths, by name.
        """
        lengths = None if side in self.gapless else x[LENGTHS[side]]
        if side in self.totals:
            return ~sequence_rows(x[STARTS[side]], lengths, self.totals[side])[:, None, None]
        assert lengths is not None  # only packed sides are gapless
        place = torch.arange(most, device=lengths.device)
        return (place >= lengths[:, None])[:, None, :, None]


DENSE = CudnnSequences()


@lru_cache(64)  # asked for when planning and when lowering
def read_problem(graph: Graph) -> tuple[Problem, CudnnSequences] | None:
    """The problem of a graph of one attention, or of its gradient, padded if the tensors are packed
    or in pages, and the layout of these; None for other graphs."""
    if (problem := sole(graph) or quantised_problem(graph)) is not None:
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


def find_sequences(graph: Graph, op: Packed, specs: Sequence[TensorSpec]) -> CudnnSequences:
    """The layout of the operands of a packed graph. op, specs: of its last equation."""
    copies = copied_places(op.op)
    own = (
        (name, x)
        for n, (name, x, side) in enumerate(zip("qkv", specs, op.op.operand_sides, strict=False))
        if side in op.readers and (side not in op.sides or n not in copies)
    )
    totals = {side: row_count(specs[PLACES[side]].shape) for side in op.sides}
    return CudnnSequences(
        totals.get("rows"),
        totals.get("keys"),
        tuple(own),
        specs[-1] if op.paged else None,
        gapless_sides(graph),
        shares_lengths(graph),
        op.finite,
    )


# The call


def pack_call(call: CudnnCall, sequences: CudnnSequences) -> CudnnCall:
    """The call on packed tensors and pages, of the same on padded ones."""
    totals, goes_back = sequences.totals, call.name == "sdpa_backward"
    copies = COPIED["backward" if goes_back else "forward"]
    own = tuple(pack_slot(x, sequences, dense=x.source in copies) for x in call.inputs)
    outputs = tuple(pack_slot(x, sequences, dense=True) for x in call.outputs)
    packed = (x for x in (*own, *outputs) if x.offsets)
    starts = dict.fromkeys(start_slot(x, sequences) for x in packed)
    bounds = {TOTALS[side]: round_total(T) for side, T in totals.items()}
    options = call.options + (tuple(bounds.items()) if goes_back else ())
    tables = table_slots(sequences)
    if tables:
        most = tables[0].shape[2] * sequences.page
        options += (("paged_attention_max_seq_len_kv", most),)
    return CudnnCall(call.name, (*own, *starts, *tables), outputs, options)


def pack_slot(x: Slot, sequences: CudnnSequences, *, dense: bool) -> Slot:
    """A packed slot [B,H,M,D] with the offsets of its sequences, or [n,G,P,D] of a pool; any other
    unchanged.

    dense: True for copies and results of the call: [T,H,D] without gaps. lse is [T,H].
    """
    if x.source in sequences.pools:
        pool = sequences.pools[x.source]
        (n, P, G, D), (outer, row, head, last) = pool.shape, pool.strides
        return slot(
            x.argument, x.source, TensorSpec((n, G, P, D), pool.dtype, (outer, head, row, last))
        )
    side = SIDES.get(x.source, "")
    if side not in sequences.totals:
        return x
    _, H, M, D = x.shape
    row, head, last = H * D, D, 1
    if not dense and x.source != "lse":
        head, last = x.strides[1] if H > 1 else D, x.strides[3]
        row = x.strides[2] if M > 1 else max(x.strides[0], row)
    strides = (M * row, head, row, last)
    return evolve(x, strides=strides, offsets=f"{STARTS[side]}_{row}")


def start_slot(x: Slot, sequences: CudnnSequences) -> Slot:
    """The offsets of a packed slot: the first element of each sequence, and the end of the last.

    cuDNN has no int64 kernel for them if only keys are packed.
    """
    source, _, step = x.offsets.rpartition("_")
    shape, dtype = (x.shape[0] + 1, 1, 1, 1), torch.int32 if sequences.rows is None else torch.int64
    return Slot(x.offsets, source, shape, dense_strides(shape), dtype, step=int(step))


def table_slots(sequences: CudnnSequences) -> tuple[Slot, ...]:
    """The table of k and the table of v, one tensor."""
    if sequences.table is None:
        return ()
    B, pages = sequences.table.shape
    shape = (B, 1, pages, 1)
    return tuple(Slot(x, "pages", shape, dense_strides(shape), torch.int32) for x in TABLES)


def round_total(T: int) -> int:
    """T, rounded up a little: cuDNN sizes the backward's workspace by it, and one plan serves all
    totals of equal rounding."""
    return round_up_to(T, max(LEAST_STEP, 1 << max(0, T.bit_length() - GRAIN)))


def round_up_to(n: int, step: int) -> int:
    return -(-n // step) * step
