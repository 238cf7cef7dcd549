"""An attention, or a derivative, on packed tensors or pages as one op: what lowerings take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.graph import Emit, Gradients, Op, Values
from attn_graph.ir.kept import KeptAttention, KeptAttentionGrad
from attn_graph.ir.packing import (
    Pack,
    Unpack,
    count_sequences,
    integer_problems,
    row_count,
    to_most,
)
from attn_graph.ir.paging import SumPages, Unpage, table_problems
from attn_graph.ir.tangents import AttentionGradJvp, AttentionJvp, attention_in
from attn_graph.masks import And, KeyLengths, Mask, QueryLengths, flatten_join
from attn_graph.spec import ValueType

T = TypeVar("T")
X = TypeVar("X", ValueType, torch.Tensor)
OWN = ("rows", "keys", "keys")  # the sides of q, k and v
STARTS = {"rows": "q_starts", "keys": "kv_starts"}
LENGTHS = {"rows": "q_lengths", "keys": "kv_lengths"}
PLACES = {"rows": 0, "keys": 1}  # of the first operand of a side
LEAVES: dict[str, Mask] = {"rows": QueryLengths(), "keys": KeyLengths()}  # that a packed side needs


def fused_op(op: Op) -> Op:
    """The op within a Packed; any other op as it is."""
    return op.op if isinstance(op, Packed) else op


def fused_attention(op: Op) -> Attention:
    """The attention that an op is, or is a derivative of. Raises GraphError for any other op."""
    node = attention_in(op)
    if node is None:
        raise GraphError(f"packed: {op} is not an attention, nor a derivative of one")
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
        case KeptAttention():
            return evolve(op, attention=node)
        case KeptAttentionGrad(wants=wants):
            return evolve(op, attention=node, wants=tuple(wants[i] for i in kept))
        case Packed(op=inner):
            return evolve(op, op=with_operands(inner, node, kept))
    return node


def and_parts(mask: Mask | None) -> list[Mask]:
    """The masks that all have to keep a place."""
    return [] if mask is None else flatten_join(And, mask)


def infer_one(op: Op, *operands: ValueType) -> ValueType:
    """The type of the one result of an op."""
    (result,) = op.infer(*operands)
    return result


def run_one(op: Op, *operands: torch.Tensor) -> torch.Tensor:
    """The one result of an op."""
    (result,) = op.run(*operands)
    return result


def extent_of(shape: Sequence[int]) -> Sequence[int]:
    """How many pages of how many rows a pool [n,P,G,D] has; how many rows a packed tensor has."""
    return shape[:2] if len(shape) == 4 else (row_count(shape),)


def blind_in(writer: Pack | SumPages, hides: bool) -> Pack | SumPages:
    """The same op, which leaves -inf in rows of no sequence if it `hides` them."""
    return evolve(writer, blind=hides) if isinstance(writer, Pack) else writer


@final
@frozen
class Packed(Op):
    """A fused op whose q, or k and v, or all, are packed, or whose k and v lie in pages.

    Its operands are those of `op`, then q_starts and kv_starts of what is packed, or `pages` last.
    It means: unpack what lies as q and k do, do `op`, pack the results.

    rows, keys: the most rows of a sequence of q and of k; None of a side that is not packed. The
    lengths of sequences are those that the mask of `op` reads: so it has QueryLengths() where q is
    packed, KeyLengths() where k and v are.

    paged: k and v, their gradients and their tangents are pools [n,P,G,D], and pages is [B,pages].
    With KeyLengths() in the mask the keys of a sequence end by kv_lengths, and nothing past them
    is read, entries of the table included; without it all of its pages count.
    """

    op: Op = field()
    rows: int | None = field(default=None, converter=to_most)
    keys: int | None = field(default=None, converter=to_most)
    paged: bool = field(default=False, converter=bool)

    def __attrs_post_init__(self) -> None:
        parts = and_parts(self.attention.mask)
        if missing := [str(LEAVES[side]) for side in self.sides if LEAVES[side] not in parts]:
            raise GraphError(f"packed: the mask of {self.op} lacks & {' & '.join(missing)}")
        if self.paged and self.keys is not None:
            raise GraphError(f"packed: keys is {self.keys}, and they are in pages; say keys=None")

    @property
    def attention(self) -> Attention:
        """The attention that `op` is, or is a derivative of."""
        return fused_attention(self.op)

    @property
    def most(self) -> dict[str, int]:
        """The most rows of a sequence, by the sides that are packed."""
        given = {"rows": self.rows, "keys": self.keys}
        return {side: n for side, n in given.items() if n is not None}

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that are packed, of "rows" and "keys"."""
        return tuple(self.most)

    @property
    def ended(self) -> bool:
        """Whether kv_lengths end the keys of each sequence."""
        return LEAVES["keys"] in and_parts(self.attention.mask)

    @property
    def readers(self) -> dict[str, Unpack | Unpage]:
        """What makes the operands of `op` of those that lie otherwise, by side."""
        readers: dict[str, Unpack | Unpage] = {side: Unpack(n) for side, n in self.most.items()}
        if self.paged:
            readers["keys"] = Unpage(self.ended)
        return readers

    def writers(self, shapes: Sequence[Sequence[int]]) -> dict[str, Pack | SumPages]:
        """What makes results that lie so of those of `op`, by side. shapes: of the operands."""
        writers: dict[str, Pack | SumPages] = {
            side: Pack(row_count(shapes[PLACES[side]])) for side in self.sides
        }
        if self.paged:
            writers["keys"] = SumPages(shapes[1][0], shapes[1][1], self.ended)
        return writers

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
        starts = (STARTS[side] for side in self.sides)
        return (*self.op.roles, *starts, *(("pages",) * self.paged))

    @property
    def ranks(self) -> tuple[int | None, ...]:
        pairs = zip(self.op.ranks, operand_sides(self.op), strict=True)
        own = (n - 1 if n is not None and side in self.sides else n for n, side in pairs)
        return (*own, *(1 for _ in self.sides), *((2,) * self.paged))

    def split(self, operands: Sequence[T]) -> tuple[tuple[T, ...], dict[str, tuple[T, ...]]]:
        """The operands of `op`, and by side what its reader takes besides: starts and lengths, or
        pages and, where they end the keys, lengths."""
        count, node = len(self.op.ranks), self.attention
        mask = node.split(operands[: len(node.ranks)]).mask
        starts = zip(self.sides, operands[count:], strict=False)
        where: dict[str, tuple[T, ...]] = {side: (x, mask[LENGTHS[side]]) for side, x in starts}
        if self.paged:
            ends = (mask[LENGTHS["keys"]],) if self.ended else ()
            where["keys"] = (operands[-1], *ends)
        return tuple(operands[:count]), where

    def entries(self, types: Sequence[X]) -> int:
        """B, by the types of the operands, or themselves."""
        return types[-1].shape[0] if self.paged else count_sequences(types[-1])

    def fewest(self, types: Sequence[ValueType]) -> int:
        """The fewest sequences that there can be, each as long as there can be."""
        full = (
            -(-row_count(types[PLACES[side]].shape) // max(1, n)) for side, n in self.most.items()
        )
        return min([self.entries(types), *full])

    def padded(self, types: Sequence[ValueType]) -> list[ValueType]:
        """The types of the operands of `op`."""
        return self.read(infer_one, types)

    def read(self, use: Callable[..., X], operands: Sequence[X]) -> list[X]:
        """The operands of `op`. use: what gives the one result of an op."""
        own, where = self.split(operands)
        readers, sides = self.readers, operand_sides(self.op)
        return [
            use(readers[side], x, *where[side]) if side in readers else x
            for x, side in zip(own, sides, strict=True)
        ]

    def write(
        self, use: Callable[..., X], results: Sequence[X], operands: Sequence[X]
    ) -> tuple[X, ...]:
        """Its results, of those of `op` on what `read` gives of these operands."""
        writers, (_, where) = self.writers([x.shape for x in operands]), self.split(operands)
        named = zip(self.names, results, result_sides(self.op), strict=True)
        return tuple(
            use(blind_in(writers[side], self.hides(name)), x, *where[side])
            if side in writers
            else x
            for name, x, side in named
        )

    def problems(self, *types: ValueType) -> Iterator[str]:
        own, where = self.split(types)
        for side in self.sides:
            yield from integer_problems("packed", **{STARTS[side]: where[side][0]})
        if self.paged:
            yield from table_problems("packed", *where["keys"])
        yield from self.op.problems(*self.padded(types))
        entries = {count_sequences(where[side][0]) for side in self.sides} | {self.entries(types)}
        if len(entries) > 1:
            names = " and ".join(self.roles[len(own) :])
            yield f"packed: {names} are of {sorted(entries)} sequences"
        for x, side in zip(own, operand_sides(self.op), strict=True):
            due = own[PLACES.get(side, 0)]
            if side in where and extent_of(x.shape) != extent_of(due.shape):
                yield f"packed: {x} should have as many rows as {due}, which is beside it"

    def gradient_problems(self) -> Iterator[str]:
        yield from self.op.gradient_problems()

    def push_problems(self) -> Iterator[str]:
        yield from self.op.push_problems()

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        return self.write(infer_one, self.op.infer(*self.read(infer_one, types)), types)

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.write(run_one, self.op.run(*self.read(run_one, operands)), operands)

    def hides(self, name: str) -> bool:
        """Whether a result is -inf in rows of no sequence, as statistics of rows are."""
        return name in self.attention.statistics

    def within(self, emit: Emit, where: Values) -> Emit:
        """Emits what derivatives of `op` emit, on tensors that lie as these do."""

        def emit_packed(op: Op, *operands: object) -> tuple[object, ...]:
            if attention_in(op) is None:
                return emit(op, *operands)
            return emit(evolve(self, op=op), *operands, *where)

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
