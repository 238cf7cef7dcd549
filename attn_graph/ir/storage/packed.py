"""An attention, or a derivative, on packed, paged or quantised tensors as one op for lowerings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.fused import Fused, Role
from attn_graph.ir.graph import Emit, Eqn, Gradients, Graph, Op, Values
from attn_graph.ir.storage.packing import (
    Lengths,
    Pack,
    Unpack,
    count_sequences,
    integer_problems,
    row_count,
    to_most,
)
from attn_graph.ir.storage.paging import (
    SumPages,
    Unpage,
    seen_by_entry,
    table_problems,
)
from attn_graph.ir.storage.scaling import KEY_SCALES, Dequantise
from attn_graph.ir.transforms.tangents import AttentionJvp
from attn_graph.masks import And, KeyLengths, Mask, QueryLengths, flatten_join
from attn_graph.spec import ValueType

T = TypeVar("T")
X = TypeVar("X", ValueType, torch.Tensor)
STARTS = {"rows": "q_starts", "keys": "kv_starts"}
LENGTHS = {"rows": "q_lengths", "keys": "kv_lengths"}
PLACES = {"rows": 0, "keys": 1}  # of the first operand of a side
TOTALS = {"rows": "t", "keys": "u"}  # axes: of all packed rows of a side
LEAVES: dict[str, Mask] = {"rows": QueryLengths(), "keys": KeyLengths()}  # needed by a packed side


def with_operands(
    op: Op, node: Attention, kept: Sequence[int]
) -> Any:  # Any: an op of the same class
    """The op with another attention. kept: the numbers of the old operands it reads."""
    match op:
        case AttentionGrad(wants=wants):
            return evolve(op, attention=node, wants=tuple(wants[i] for i in kept))
        case AttentionJvp(of=of, tangents=tangents):
            within = with_operands(of, node, kept)
            return evolve(op, of=within, tangents=tuple(tangents[i] for i in kept))
        case Packed(op=inner):
            return evolve(op, op=with_operands(inner, node, kept))
    return node


def and_parts(mask: Mask | None) -> list[Mask]:
    return [] if mask is None else flatten_join(And, mask)


def without_hidden(table: torch.Tensor, page: int, seen: Sequence[range]) -> torch.Tensor:
    """The table [B,pages] with some seen page of an entry, else page 0, in the place of those that
    it does not see. page: rows of one. seen: the keys of each entry."""
    if not page or not table.numel():
        return table
    first = table.new_tensor([keys.start // page for keys in seen])[:, None]
    behind = table.new_tensor([-(-keys.stop // page) * bool(keys) for keys in seen])[:, None]
    places = torch.arange(table.shape[1], device=table.device)
    some = (behind > first) & (first < table.shape[1])
    known = table.gather(1, first.clamp(max=max(0, table.shape[1] - 1)).long())
    filled = torch.where(some, known, torch.zeros_like(known))
    return torch.where((places >= first) & (places < behind), table, filled)


def infer_one(op: Op, *operands: ValueType) -> ValueType:
    (result,) = op.infer(*operands)
    return result


def run_one(op: Op, *operands: torch.Tensor) -> torch.Tensor:
    (result,) = op.run(*operands)
    return result


def shape_of(x: Any) -> Sequence[int]:  # Any: a type, a tensor, a value of a graph being built
    shape: Sequence[int] = (
        x.type.shape if isinstance(getattr(x, "type", None), ValueType) else x.shape
    )
    return shape


def extent_of(shape: Sequence[int]) -> Sequence[int]:
    """A pool's pages and rows a page, of [n,P,G,D]; the rows of a packed tensor."""
    return shape[:2] if len(shape) == 4 else (row_count(shape),)


def blind_in(op: T, hides: bool) -> T:
    """The op; if it packs or unpacks, with -inf in rows outside sequences if `hides`."""
    return evolve(op, blind=hides) if isinstance(op, Pack | Unpack) else op


@final
@frozen
class Packed(Fused):
    """A fused op with q, or k and v, or all, packed, with k and v in pages, or quantised.

    Its operands are those of `op`, then k_scale and v_scale, q_starts and kv_starts of the packed
    sides, or `pages` last. Its meaning: dequantise k and v, unpack q, k and v, do `op`, pack the
    results.

    rows, keys: the most rows of a sequence of q and of k; None for a side that is not packed. The
    mask of `op` has the lengths: QueryLengths() if q is packed, KeyLengths() if k and v are.

    paged: k and v, their gradients and tangents are pools [n,P,G,D], and pages is [B,pages]. With
    KeyLengths() in the mask the keys of a sequence end by kv_lengths, and nothing past them is
    read, entries of the table included, nor what `bound_seen_keys` leaves out; without both all
    pages count.

    finite: the pools are declared finite, rows of nobody included.

    scaled: k and v are quantised, as operands of `Dequantise` with q last. They have no gradient.
    """

    op: Fused
    rows: int | None = field(default=None, converter=to_most)
    keys: int | None = field(default=None, converter=to_most)
    paged: bool = field(default=False, converter=bool)
    scaled: bool = field(default=False, converter=bool)
    finite: bool = field(default=False, converter=bool)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.op, Fused) or self.op.packed:
            raise GraphError(f"packed: {self.op} is not an attention, nor a derivative of one")
        parts = and_parts(self.attention.mask)
        if missing := [str(LEAVES[side]) for side in self.sides if LEAVES[side] not in parts]:
            raise GraphError(f"packed: the mask of {self.op} lacks & {' & '.join(missing)}")
        if self.attention.keeps:
            raise GraphError(f"packed: {self.op} keeps weights, which are of sequences in a batch")
        if self.paged and self.keys is not None:
            raise GraphError(f"packed: keys={self.keys}, but keys are in pages; pass keys=None")

    @property
    def attention(self) -> Attention:
        node: Attention = self.op.attention
        return node

    @property
    def grad(self) -> Any:  # Any: as of Op
        return self.op.grad

    @property
    def jvp(self) -> Any:  # Any: as above
        return self.op.jvp

    @property
    def packed(self) -> Packed:
        return self

    @property
    def most(self) -> dict[str, int]:
        """The most rows of a sequence, by packed side."""
        given = {"rows": self.rows, "keys": self.keys}
        return {side: n for side, n in given.items() if n is not None}

    @property
    def sides(self) -> tuple[str, ...]:
        return tuple(self.most)

    @property
    def ended(self) -> bool:
        """True if kv_lengths end the keys of each sequence."""
        return LEAVES["keys"] in and_parts(self.attention.mask)

    @property
    def readers(self) -> dict[str, Unpack | Unpage]:
        """By side, the op that unpacks an operand for `op`."""
        readers: dict[str, Unpack | Unpage] = {side: Unpack(n) for side, n in self.most.items()}
        if self.paged:
            readers["keys"] = Unpage(self.ended, self.finite)
        return readers

    def writers(self, shapes: Sequence[Sequence[int]]) -> dict[str, Pack | SumPages]:
        """By side, the op that packs a result of `op`. shapes: of the operands."""
        writers: dict[str, Pack | SumPages] = {
            side: Pack(row_count(shapes[PLACES[side]])) for side in self.sides
        }
        if self.paged:
            writers["keys"] = SumPages(shapes[1][0], shapes[1][1], self.ended)
        return writers

    @property
    def is_gradient(self) -> bool:  # type: ignore[override]  # here it depends on the op within
        return self.op.is_gradient

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

    @cached_property
    def takes(self) -> tuple[Role, ...]:
        """Of axes "s": one more than sequences. "w": the pages of one sequence."""
        own = [self.packed_role(role) for role in self.op.takes]
        more = []
        if self.scaled:
            own[1:3] = [evolve(role, trains=False, constant=True) for role in own[1:3]]
            more = [evolve(x, name=name) for x, name in zip(own[1:3], KEY_SCALES, strict=True)]
        more += [Role(STARTS[side], "s") for side in self.sides]
        more += [Role("pages", "bw")] * self.paged
        return (*own, *(evolve(role, like=n) for n, role in enumerate(more, len(own))))

    @cached_property
    def gives(self) -> tuple[Role, ...]:
        return tuple([self.packed_role(role) for role in self.op.gives])

    def packed_role(self, role: Role) -> Role:
        """The role of an operand or result of `op` as it lies here. A pool has axes "npgd"."""
        head, last = role.axes[1:2], role.axes[3:]
        if role.side == "keys" and self.paged:
            return evolve(role, axes="np" + head + last)
        if role.side not in self.sides:
            return role
        row = TOTALS[role.side]
        return evolve(role, axes=row + head + last if last else head + row)

    def scales(self, operands: Sequence[T]) -> dict[int, T]:
        """The scale of each quantised operand, by number."""
        first = len(self.op.takes)
        return dict(enumerate(operands[first : first + 2], 1)) if self.scaled else {}

    def split(self, operands: Sequence[T]) -> tuple[tuple[T, ...], dict[str, tuple[T, ...]]]:
        """The operands of `op`, and, by side, the further operands of its reader.

        These are starts and lengths, or pages and, if they end the keys, lengths.
        """
        count, node = len(self.op.takes), self.attention
        mask = {name: operands[n] for name, n in node.slots.mask.items()}
        starts = zip(self.sides, operands[count + 2 * self.scaled :], strict=False)
        where: dict[str, tuple[T, ...]] = {side: (x, mask[LENGTHS[side]]) for side, x in starts}
        if self.paged:
            ends = (mask[LENGTHS["keys"]],) if self.ended else ()
            where["keys"] = (operands[-1], *ends)
        return tuple(operands[:count]), where

    def entries(self, types: Sequence[X]) -> int:
        """B, from the operands or their types."""
        if self.sides and not self.paged:
            return count_sequences(types[-1])
        return types[-1 if self.paged else 0].shape[0]

    def fewest(self, types: Sequence[ValueType]) -> int:
        """The fewest sequences possible: all as long as possible."""
        full = (
            -(-row_count(types[PLACES[side]].shape) // max(1, n)) for side, n in self.most.items()
        )
        return min([self.entries(types), *full])

    def padded(self, types: Sequence[ValueType]) -> list[ValueType]:
        """The types of the operands of `op`."""
        return self.read(infer_one, types)

    def read(self, use: Callable[..., X], operands: Sequence[X]) -> list[X]:
        """The operands of `op`. use: applies an op to values."""
        own, where = self.split(operands)
        readers, roles = self.readers, self.op.takes
        scales = self.scales(operands)
        own = tuple(
            use(Dequantise(), x, scales[n], own[0]) if n in scales else x for n, x in enumerate(own)
        )
        return [
            use(blind_in(readers[role.side], self.hides(role.name)), x, *where[role.side])
            if role.side in readers
            else x
            for x, role in zip(own, roles, strict=True)
        ]

    def write(
        self, use: Callable[..., X], results: Sequence[X], operands: Sequence[X]
    ) -> tuple[X, ...]:
        """Its results from those of `op`. operands: its own. use: applies an op to values."""
        shapes = [shape_of(x) for x in operands]
        writers, (_, where) = self.writers(shapes), self.split(operands)
        named = zip(results, self.op.gives, strict=True)
        return tuple(
            use(blind_in(writers[role.side], self.hides(role.name)), x, *where[role.side])
            if role.side in writers
            else x
            for x, role in named
        )

    def problems(self, *types: ValueType) -> Iterator[str]:
        own, where = self.split(types)
        for side in self.sides:
            yield from integer_problems("packed", **{STARTS[side]: where[side][0]})
        if self.paged:
            yield from table_problems("packed", *where["keys"])
        for n, scale in self.scales(types).items():
            yield from Dequantise().problems(types[n], scale, types[0])
        yield from self.op.problems(*self.padded(types))
        entries = {count_sequences(where[side][0]) for side in self.sides} | {self.entries(types)}
        if len(entries) > 1:
            names = " and ".join(self.roles[len(own) :])
            yield f"packed: {names} are of {sorted(entries)} sequences"
        for x, side in zip(own, self.op.operand_sides, strict=True):
            due = own[PLACES.get(side, 0)]
            if side in where and extent_of(x.shape) != extent_of(due.shape):
                yield f"packed: {x} should have as many rows as {due}"

    def gradient_problems(self) -> Iterator[str]:
        yield from self.op.gradient_problems()

    def push_problems(self) -> Iterator[str]:
        yield from self.op.push_problems()

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        return self.write(infer_one, self.op.infer(*self.read(infer_one, types)), types)

    def seen(self, operands: Mapping[int, torch.Tensor], sizes: Sequence[int]) -> list[range]:
        """The keys of each entry that count, by `bound_seen_keys`. operands: lengths and the table,
        by number. sizes: the most rows and keys."""
        mask, table, (rows, keys) = self.attention.mask, operands[len(self.takes) - 1], sizes
        data = {name: operands[n] for name, n in self.attention.slots.mask.items()}
        B = table.shape[0]
        bounds = (
            [x] * B if isinstance(x, int) else x.expand(B, 1).flatten().tolist()
            for x in seen_by_entry(mask, table, rows, keys, data)
        )
        return [range(a, max(a, b)) for a, b in zip(*bounds, strict=True)]

    def with_seen_pages(self, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The operands, with pages that no query sees out of the table."""
        if not self.paged:
            return operands
        sizes = [
            x.shape[2]
            for x in self.padded([ValueType(tuple(x.shape), x.dtype) for x in operands])[:2]
        ]
        seen = self.seen(dict(enumerate(operands)), sizes)
        return *operands[:-1], without_hidden(operands[-1], operands[1].shape[1], seen)

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands = (*self.with_seen_pages(operands),)
        return self.write(run_one, self.op.run(*self.read(run_one, operands)), operands)

    def hides(self, name: str) -> bool:
        """True if a tensor is -inf in rows outside sequences, as statistics are."""
        return name in self.attention.statistics

    def within(self, emit: Emit, where: Values) -> Emit:
        """An `emit` for derivatives of `op`, which packs them like this op."""

        def emit_packed(op: Op, *operands: object) -> tuple[object, ...]:
            if not isinstance(op, Fused):
                return emit(op, *operands)
            return emit(evolve(self, op=op), *operands, *where)

        return emit_packed

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        count = len(self.op.takes)
        own, where = operands[:count], operands[count:]
        made = self.op.pull(self.within(emit, where), own, results, grads)
        return (*made, *(None for _ in where))

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        count = len(self.op.takes)
        own, where = operands[:count], operands[count:]
        return self.op.push(self.within(emit, where), own, results, tangents[:count])


def full_sides(graph: Graph, eqn: Eqn) -> tuple[str, ...]:
    """The packed sides of an equation that are declared to have all rows in sequences."""
    full = {
        (*each.args, outs[0])
        for each, outs in graph.numbered
        if isinstance(each.op, Lengths) and each.op.all_rows
    }
    return tuple(side for side, where in packed_sides(eqn).items() if where in full)


def packed_sides(eqn: Eqn) -> dict[str, tuple[int, ...]]:
    """The numbers of starts and lengths of each packed side of an equation."""
    op: Packed = eqn.op.packed
    _, where = op.split(eqn.args)
    return {side: where[side] for side in op.sides}
