"""Whether operands are as many, and have as many axes, as an op takes."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

from attn_graph.ir.arguments import add_axes
from attn_graph.ir.graph import Op, op_name
from attn_graph.spec import ValueType


def count_read(op: Op) -> int:
    """How many operands, from the first, `infer` reads: those that it names, or all."""
    needed = [x for x in signature(op.infer).parameters.values() if x.default is x.empty]
    return sum(x.kind is not x.VAR_POSITIONAL for x in needed) or len(op.ranks)


def rank_problems(op: Op, types: Sequence[ValueType], *, partial: bool = False) -> list[str]:
    """Operands whose count, or whose number of axes, does not fit the op."""
    ranks = op.ranks
    pairs = [*zip(types, ranks, strict=False)]
    misfits = [rank for type_, rank in pairs if rank is not None and len(type_.shape) != rank]
    if not misfits and (partial or len(types) == len(ranks)):
        return []
    who, roles = op_name(type(op)), dict(enumerate(op.roles))
    if len(types) != len(ranks) and not partial:
        return [f"{who}: {len(types)} operands given, {len(ranks)} needed"]
    return [
        f"{who}: {roles.get(place, place)} {type_} has {len(type_.shape)} axes and needs {rank}"
        f"{add_axes(str(roles.get(place)), rank - len(type_.shape))}"
        for place, (type_, rank) in enumerate(pairs)
        if rank is not None and len(type_.shape) != rank
    ]
