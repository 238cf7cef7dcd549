"""An attention, or a derivative of one, on packed tensors as one op: what lowerings take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.graph import Emit, Gradients, Op, Values
from attn_graph.ir.packing import (
    Pack,
    Unpack,
    count_sequences,
    integer_problems,
    row_count,
    to_most,
)
from attn_graph.ir.tangents import AttentionGradJvp, AttentionJvp, attention_in
from attn_graph.masks import And, KeyLengths, Mask, QueryLengths, flatten_join
from attn_graph.spec import ValueType

T = TypeVar("T")
OWN = ("rows", "keys", "keys")  # the sides of q, k and v
STARTS = {"rows": "q_starts", "keys": "kv_starts"}
LENGTHS = {"rows": "q_lengths", "keys": "kv_lengths"}
LEAVES: dict[str, Mask] = {"rows": QueryLengths(), "keys": KeyLengths()}  # that a packed side needs


def fused_op(op: Op) -> Op:
    """The op within a Packed; any other op as it is."""
    return op.op if isinstance(op, Packed) else op


def fused_attention(op: Op) -> Attention:
    """The attention that an op is, or is a derivative of. Raises GraphError for any other op."""
    node = attention_in(op)
    if node is None:
        raise GraphError(f"packed: {op} is no attention, nor a derivative of one")
    return node


def label_operands(op: Op, own: Sequence[T], row: T) -> tuple[T, ...]:
    """A label for each operand of a fused op: those of its attention's operands, which tangents
    have too, and `row` for o, lse and what else has the rows of q."""
    match op:
        case AttentionGrad():
            return (*own, *(row for _ in op.ranks[len(own) :]))
        case AttentionJvp():
            return (*own, *select_flagged(own, op.tangents))
        case AttentionGradJvp():
            first = (*label_operands(op.grad, own, row), row, row)
            return (
                *first,
                *select_flagged(own, op.tangents),
                *(row,) * (op.with_tdo + op.with_tdlse),
            )
        case _:
            return tuple(own)


def label_results(op: Op, own: Sequence[T], row: T) -> tuple[T, ...]:
    """The same for each result: a gradient has the label of what it is by."""
    match op:
        case AttentionGrad():
            return select_flagged(own, op.wants)
        case AttentionGradJvp():
            return select_flagged(own, op.grad.wants)
        case _:
            return (row,) * len(op.names)


def own_sides(op: Op) -> tuple[str, ...]:
    """For each operand of the attention of a fused op "rows" for q, "keys" for k and v, else ""."""
    return (*OWN, *("" for _ in fused_attention(op).ranks[3:]))


def operand_sides(op: Op) -> tuple[str, ...]:
    """For each operand of a fused op "rows" where it lies as q does, "keys" as k; else ""."""
    return label_operands(op, own_sides(op), "rows")


def result_sides(op: Op) -> tuple[str, ...]:
    """The same for each result."""
    return label_results(op, own_sides(op), "rows")


def select_flagged(values: Sequence[T], flags: Sequence[bool]) -> tuple[T, ...]:
    """Those of the values that are flagged."""
    return tuple(x for x, flag in zip(values, flags, strict=True) if flag)


def with_operands(
    op: Op, node: Attention, kept: Sequence[int]
) -> Any:  # Any: an op of the same class
    """The op with another attention, which reads these of the operands of its own, by number."""
    match op:
        case AttentionGrad(wants=wants):
            return evolve(op, attention=node, wants=tuple(wants[i] for i in kept))
        case AttentionJvp(tangents=tangents):
            return evolve(op, attention=node, tangents=tuple(tangents[i] for i in kept))
        case AttentionGradJvp(grad=grad, tangents=tangents):
            within = with_operands(grad, node, kept)
            return evolve(op, grad=within, tangents=tuple(tangents[i] for i in kept))
        case Packed(op=inner):
            return evolve(op, op=with_operands(inner, node, kept))
    return node


def and_parts(mask: Mask | None) -> list[Mask]:
    """The masks that all have to keep a place."""
    return [] if mask is None else flatten_join(And, mask)


@final
@frozen
class Packed(Op):
    """A fused op whose q, or k and v, or all, are packed; then q_starts and kv_starts, if so.

    It means: unpack what lies as q and k do, do `op`, pack the results. The lengths of sequences
    are those that the mask of `op` reads: so it has QueryLengths() where q is packed, KeyLengths()
    where k and v are. rows, keys: the most rows of a sequence of q and of k; None of a side that
    is not packed.
    """

    op: Op = field()
    rows: int | None = field(default=None, converter=to_most)
    keys: int | None = field(default=None, converter=to_most)

    def __attrs_post_init__(self) -> None:
        parts = and_parts(self.attention.mask)
        if missing := [str(LEAVES[side]) for side in self.sides if LEAVES[side] not in parts]:
            raise GraphError(f"packed: the mask of {self.op} lacks & {' & '.join(missing)}")

    @property
    def attention(self) -> Attention:
        """The attention that `op` is, or is a derivative of."""
        return fused_attention(self.op)

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that are packed, of "rows" and "keys"."""
        most = {"rows": self.rows, "keys": self.keys}
        return tuple(side for side, n in most.items() if n is not None)

    @property
    def is_gradient(self) -> bool:  # type: ignore[override]  # here it depends on the op within
        """As that of the op within."""
        return self.op.is_gradient

    @property
    def names(self) -> tuple[str, ...]:
        return self.op.names

    @property
    def statistics(self) -> tuple[str, ...]:
        return self.op.statistics

    @property
    def saved(self) -> tuple[str, ...]:
        return self.op.saved

    @property
    def carried(self) -> tuple[int, ...]:
        return self.op.carried

    @property
    def without_gradient(self) -> tuple[str, ...]:
        return self.op.without_gradient

    @property
    def reads(self) -> int:
        """How many operands `infer` reads: all."""
        return len(self.ranks)

    @property
    def roles(self) -> tuple[str, ...]:
        return (*self.op.roles, *(STARTS[side] for side in self.sides))

    @property
    def ranks(self) -> tuple[int | None, ...]:
        pairs = zip(self.op.ranks, operand_sides(self.op), strict=True)
        own = (n - 1 if n is not None and side in self.sides else n for n, side in pairs)
        return (*own, *(1 for _ in self.sides))

    def split(self, operands: Sequence[T]) -> tuple[tuple[T, ...], dict[str, tuple[T, T]]]:
        """The operands of `op`, and the starts and lengths of each packed side."""
        count, node = len(self.op.ranks), self.attention
        mask = node.split(operands[: len(node.ranks)]).mask
        starts = zip(self.sides, operands[count:], strict=True)
        return tuple(operands[:count]), {side: (x, mask[LENGTHS[side]]) for side, x in starts}

    def totals(self, types: Sequence[ValueType]) -> dict[str, int]:
        """T of each packed side, by its first operand."""
        first = {"rows": 0, "keys": 1}
        return {side: row_count(types[first[side]].shape) for side in self.sides}

    def fewest(self, place: int, x: ValueType) -> int:
        """The fewest sequences that q (place 0) or k (1) can be, each as long as there can be."""
        most = (self.rows, self.keys)[place]
        return x.shape[0] if most is None else -(-row_count(x.shape) // max(1, most))

    def padded(self, types: Sequence[ValueType]) -> list[ValueType]:
        """The types of the operands of `op`."""
        own, where = self.split(types)
        steps = [self.unpacking(side) for side in operand_sides(self.op)]
        return [
            x if step is None else step[1].infer(x, *where[step[0]])[0]
            for x, step in zip(own, steps, strict=True)
        ]

    def unpacking(self, side: str) -> tuple[str, Unpack] | None:
        """The op that pads an operand of a side; None where it is not packed."""
        most = {"rows": self.rows, "keys": self.keys}.get(side)
        return None if most is None else (side, Unpack(most))

    def problems(self, *types: ValueType) -> Iterator[str]:
        own, where = self.split(types)
        for side, (starts, _) in where.items():
            yield from integer_problems("packed", **{STARTS[side]: starts})
        yield from self.op.problems(*self.padded(types))
        totals, entries = self.totals(types), {count_sequences(x) for x, _ in where.values()}
        if len(entries) > 1:
            yield f"packed: q_starts and kv_starts are of {sorted(entries)} sequences"
        for x, side in zip(own, operand_sides(self.op), strict=True):
            if side in totals and row_count(x.shape) != totals[side]:
                yield f"packed: {x} should have {totals[side]} rows, as others beside it"

    def gradient_problems(self) -> Iterator[str]:
        yield from self.op.gradient_problems()

    def push_problems(self) -> Iterator[str]:
        yield from self.op.push_problems()

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        totals, results = self.totals(types), self.op.infer(*self.padded(types))
        return tuple(
            Pack(totals[side]).infer(x)[0] if side in totals else x
            for x, side in zip(results, result_sides(self.op), strict=True)
        )

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, where = self.split(operands)
        return self.pack_results(self.op.run(*self.pad(own, where)), own, where)

    def pad(
        self, own: Sequence[torch.Tensor], where: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """The operands of `op`. own, where: as `split` gives them."""
        steps = [self.unpacking(side) for side in operand_sides(self.op)]
        return [
            x if step is None else step[1].run(x, *where[step[0]])[0]
            for x, step in zip(own, steps, strict=True)
        ]

    def pack_results(
        self,
        results: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        where: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
        """The results of `op` packed. own, where: as `split` gives them."""
        totals = self.totals([ValueType(tuple(x.shape), x.dtype) for x in own])
        each = zip(self.names, results, result_sides(self.op), strict=True)
        return tuple(
            Pack(totals[side], self.hides(name)).run(x, *where[side])[0] if side in totals else x
            for name, x, side in each
        )

    def hides(self, name: str) -> bool:
        """Whether a result is -inf in rows of no sequence, as statistics of rows are."""
        return name in self.attention.statistics

    def within(self, emit: Emit, where: Values) -> Emit:
        """Emits what derivatives of `op` emit, on packed tensors."""

        def emit_packed(op: Op, *operands: object) -> tuple[object, ...]:
            if attention_in(op) is None:
                return emit(op, *operands)
            return emit(Packed(op, self.rows, self.keys), *operands, *where)

        return emit_packed

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        count = len(self.op.ranks)
        own, where = operands[:count], operands[count:]
        made = self.op.pull(self.within(emit, where), own, results, grads)
        return (*made, *(None for _ in where))

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        count = len(self.op.ranks)
        own, where = operands[:count], operands[count:]
        return self.op.push(self.within(emit, where), own, results, tangents[:count])
