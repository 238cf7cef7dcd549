"""Checks starts, lengths and pages for plans that do not read them on the host.

On a CPU a running plan reads and checks them. Kernels on a GPU read them there, and can't raise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.storage.packed import LENGTHS, PLACES, STARTS, full_sides, packed_sides
from attn_graph.ir.storage.packing import (
    Lengths,
    list_sequences,
    require_first,
    require_fitting,
    require_last,
    row_count,
)
from attn_graph.ir.storage.paging import list_entries
from attn_graph.spec import ValueType


def check_data(graph: Graph, tensors: Mapping[int, torch.Tensor]) -> None:
    """Check starts, lengths and pages, reading the tensors on the host. tensors: by the number of
    the input; what reads others is not checked.

    Raises PlanMismatchError for starts that descend or leave their tensor, for lengths beyond the
    rows, and for pages outside the pool. The graph must have attention as one op, as in plans.
    """
    values = {i: x.cpu() for i, x in tensors.items()}
    for eqn, outs in graph.numbered:
        if isinstance(eqn.op, Lengths):
            if eqn.args[0] in values:
                require_first(graph.inputs[eqn.args[0]].name, values[eqn.args[0]])
                (values[outs[0]],) = eqn.op.run(values[eqn.args[0]])
        elif eqn.op.attention is not None:
            for side in full_sides(graph, eqn) if eqn.op.packed else ():
                starts = packed_sides(eqn)[side][0]
                if starts in values:
                    total = row_count(graph.types[eqn.args[PLACES[side]]].shape)
                    require_last(STARTS[side], values[starts], total)
            known = {n: values[i] for n, i in enumerate(eqn.args) if i in values}
            check_operands(eqn.op, [graph.types[i] for i in eqn.args], known)


def show_seen_pages(graph: Graph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with tables of pages that some query sees: for `evaluate` in single steps, where
    a step that reads pages does not know the mask."""
    made, values = [*tensors], dict(enumerate(tensors))
    for eqn, outs in graph.numbered:
        packed, last = eqn.op.packed, eqn.args[-1]
        if isinstance(eqn.op, Lengths):
            (values[outs[0]],) = eqn.op.run(values[last])
        elif packed and packed.paged and last < len(made) and values.keys() >= {*eqn.args}:
            made[last] = packed.with_seen_pages([values[i] for i in eqn.args])[-1]
    return made


def check_operands(op: Op, types: Sequence[ValueType], known: Mapping[int, torch.Tensor]) -> None:
    """Check the operands of an attention. known: those already known, by number."""
    padded, packed, where = op.padded(types), op.packed, dict[str, tuple[int, ...]]()
    if packed:
        _, where = packed.split(range(len(types)))
        for side, most in packed.most.items():
            if known.keys() >= {*where[side]}:
                starts, lengths = (known[n] for n in where[side])
                total = row_count(types[PLACES[side]].shape)
                list_sequences(starts, lengths, total, most, LENGTHS[side].split("_")[0])
        if packed.paged and known.keys() >= {*where["keys"]}:
            n, page = types[PLACES["keys"]].shape[:2]
            table, *ends = (known[n] for n in where["keys"])
            sizes = [padded[n].shape[2] for n in PLACES.values()]
            seen = packed.seen(known, sizes) if page else None
            deque(list_entries(page, n, table, *ends, seen=seen), 0)
    read = op.attention.slots.mask
    for side, name in LENGTHS.items():
        if side not in where and read.get(name) in known:
            require_fitting(name, known[read[name]].tolist(), padded[PLACES[side]].shape[2])
