"""How the operands of one attention lie: dense, packed, in pages, or in 8 bits.

A packed tensor [T,H,D] has its sequences one after another, and starts [B+1] say where each begins.
A pool [n,P,G,D] has the rows of k or v in pages, and a table [B,pages] says which are an entry's.
Quantised k and v have scales. `problem` and `stepped` are the same attention on padded tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import final

import torch
from attrs import evolve, field, frozen

from attn_graph.ir.attention import Attention
from attn_graph.ir.fused import Fused
from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import value_spec
from attn_graph.ir.storage.packed import (
    LEAVES,
    LENGTHS,
    PLACES,
    STARTS,
    Packed,
    and_parts,
    full_sides,
)
from attn_graph.ir.storage.packing import row_count
from attn_graph.ir.storage.scaling import (
    KEY_SCALES,
    O_SCALE,
    SCALES,
    Dequantise,
    Quantise,
    neighbours,
    whole_shape,
)
from attn_graph.lowering.problem import (
    PREPARING,
    Facts,
    Lies,
    Problem,
    declared_strides,
    has_problem,
    operand_specs,
)
from attn_graph.machine.device_memo import DeviceMemo, full_vector
from attn_graph.masks import Band, Mask
from attn_graph.spec import IN_PAIRS, TensorSpec, ValueType, dense_strides

SIDES = {  # of operands and results
    **dict.fromkeys(("q", "o", "lse", "do", "dlse", "dq"), "rows"),
    **dict.fromkeys(("k", "v", "dk", "dv", *KEY_SCALES), "keys"),
}
# Packed operands that are multiplied by 0 in masked places, by pass: libraries copy them with 0 in
# rows of no sequence, unless all rows are in one.
COPIED = {"forward": ("v",), "backward": ("q", "k", "v", "do")}
DECLARED = "all_rows=True declares that all rows are in sequences: none is copied or cleared then"

ZEROS: DeviceMemo[torch.Tensor] = DeviceMemo()  # one of each dtype on each device


@final
@frozen(cache_hash=True)
class Lying:
    """How the operands and results of an attention, or of a derivative, lie."""

    op: Fused
    """With all operands: a Packed if some are packed, in pages, or quantised."""
    given: tuple[TensorSpec, ...]
    """Of the operands of `op`, as they are."""
    lies: Lies = ()
    """The declared strides of results, by name."""
    narrow: tuple[TensorSpec, ...] = ()
    """The scales of q, k and v, if a backend reads these in 8 bits, and of o, if it gives it so."""
    gapless: tuple[str, ...] = ()
    """The packed sides whose lengths are the differences of their starts."""
    full: tuple[str, ...] = ()
    """Those of them that are declared to have all rows in sequences."""
    alike: bool = False
    """True if packed q and k have equal lengths."""
    whole: Problem | None = field(default=None, eq=False, repr=False)
    """`problem`, if it was read before."""

    @classmethod
    def of(cls, facts: Facts) -> Lying | None:
        """Of a graph of one attention, or one gradient, after the equations that prepare its
        operands; None of others."""
        graph = facts.graph
        if facts.problem is not None:
            return cls.dense(facts.problem)
        if not graph.eqns or any(not isinstance(eqn.op, PREPARING) for eqn in graph.eqns[:-1]):
            return None
        last, outs = graph.numbered[-1]
        packed: Packed | None = last.op.packed
        if packed is None or not has_problem(packed.op) or min(graph.outputs) < outs.start:
            return None
        makers = {made[0]: eqn.args for eqn, made in graph.numbered}
        _, where = packed.split(last.args)
        pairs = {side: where[side] for side in packed.sides}  # of starts and lengths
        return cls(
            packed,
            tuple(operand_specs(graph, last)),
            declared_strides(graph, last, outs),
            gapless=tuple(s for s, (start, n) in pairs.items() if makers.get(n) == (start,)),
            full=full_sides(graph, last),
            alike=len(pairs) == 2 and len({n for _, n in pairs.values()}) == 1,
        )

    @classmethod
    def for_libraries(cls, facts: Facts) -> Lying | None:
        """For cuDNN and FlashAttention 4, which read q, k and v in 8 bits as they are; None if
        anything else is quantised."""
        graph = facts.graph
        if facts.problem is None and any(isinstance(eqn.op, Dequantise) for eqn in graph.eqns):
            places = quantised_places(graph)
            return cls.eight_bits(graph, places) if places else None
        lying = facts.once(Lying.of)
        return None if lying is None or lying.scales else lying

    @classmethod
    def eight_bits(cls, graph: Graph, places: Mapping[str, int]) -> Lying:
        specs = {name: graph.inputs[n].spec for name, n in places.items()}
        main, outs = graph.numbered[1]
        node = main.op.attention
        lies = (("o", value_spec(graph, outs.start).strides),)
        scales = tuple(specs[name] for name in (*SCALES, O_SCALE) if name in specs)
        return cls(node, tuple(specs[name] for name in node.roles), lies, scales)

    @classmethod
    def dense(cls, problem: Problem) -> Lying:
        op = problem.grad or problem.node
        return cls(op, problem.specs, problem.lies, problem.scales, whole=problem)

    # Operands

    @cached_property
    def packed(self) -> Packed | None:
        """The op if it is of packed, paged or quantised tensors."""
        packed: Packed | None = self.op.packed
        return packed

    @cached_property
    def within(self) -> Fused:
        """The op on padded operands."""
        return self.packed.op if self.packed else self.op

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """How the operands of `within` lie."""
        return self.given[: len(self.within.takes)] if self.packed else self.given

    @cached_property
    def tables(self) -> dict[str, TensorSpec]:
        """The further operands by name: scales, starts, and then pages."""
        if (count := len(self.specs)) == len(self.given):
            return {}
        return dict(zip(self.op.roles[count:], self.given[count:], strict=True))

    @cached_property
    def sides(self) -> tuple[str, ...]:
        """The packed sides, of "rows" and "keys"."""
        return self.packed.sides if self.packed else ()

    @property
    def scales(self) -> tuple[str, ...]:
        """The names of the scales, if k and v are quantised."""
        return KEY_SCALES if self.packed and self.packed.scaled else ()

    @cached_property
    def row_axis(self) -> int:
        """The axis of rows of k and v as they lie."""
        return 0 if "keys" in self.sides else 1 if self.pages else 2

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """How many neighbours, of rows and of columns, have one scale of k, and how many of v, if
        they are quantised; 0: all."""
        axes, scales = (self.row_axis, -1), [self.tables[name] for name in self.scales]
        return tuple(
            (block_along(x, scale, axes[0]), block_along(x, scale, axes[1]))
            for x, scale in zip(map(whole_shape, self.specs[1:3]), scales, strict=False)
        )

    @cached_property
    def pages(self) -> TensorSpec | None:
        """The table of pages, if k and v lie in them."""
        return self.tables["pages"] if self.packed and self.packed.paged else None

    @cached_property
    def page(self) -> int:
        """Rows of a page of k and v; 0 without pages."""
        return self.specs[1].shape[1] if self.pages else 0

    @property
    def finite(self) -> bool:
        """True if pools are declared finite."""
        return self.packed is not None and self.packed.finite

    @cached_property
    def totals(self) -> dict[str, int]:
        """The rows of each packed side."""
        if not self.sides:
            return {}
        return {side: row_count(self.specs[PLACES[side]].shape) for side in self.sides}

    @cached_property
    def T(self) -> int | None:
        """Rows of q, if it is packed."""
        return self.totals.get("rows")

    @cached_property
    def T_keys(self) -> int | None:
        """Rows of k, if it is packed."""
        return self.totals.get("keys")

    def rows_of(self, x: TensorSpec | torch.Tensor, side: str) -> int:
        """The rows of a tensor of a side: of all sequences, entries or pages."""
        if side in self.sides:
            return row_count(x.shape)
        return x.shape[0] * x.shape[1 if side == "keys" and self.pages else 2]

    @cached_property
    def fewest(self) -> int:
        """The fewest sequences with all rows; B without packed tensors."""
        return self.packed.fewest([x.type for x in self.given]) if self.packed else self.problem.B

    @cached_property
    def pools(self) -> dict[str, TensorSpec]:
        """k and v in pages, by name."""
        return dict(zip("kv", self.specs[1:3], strict=True)) if self.pages else {}

    @cached_property
    def rows_in_place(self) -> dict[str, TensorSpec]:
        """Packed q, k and v that libraries do not copy, by name."""
        if not self.sides:
            return {}
        each = zip("qkv", self.specs, strict=False)
        return {n: x for n, x in each if SIDES[n] in self.sides and n not in self.copied}

    @cached_property
    def in_place(self) -> dict[str, TensorSpec]:
        """These, and k and v in pages."""
        return self.rows_in_place | self.pools

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """The packed operands that libraries copy. Of do rows that see no key count too."""
        names = COPIED["backward" if self.within.is_gradient else "forward"]
        stay = {n for n in names if SIDES[n] in self.full}
        if not self.sees_itself:
            stay -= {"do"}
        return tuple(n for n in names if SIDES[n] in self.sides and n not in stay)

    @property
    def same_starts(self) -> bool:
        """True if q and k are packed by one tensor of starts."""
        return self.alike and {*self.gapless} == {"rows", "keys"}

    @property
    def leaves_none(self) -> bool:
        """True if no row is outside sequences, and no sequence lacks queries or keys that the other
        side has."""
        return self.same_starts and {*self.full} == {"rows", "keys"}

    @cached_property
    def sees_itself(self) -> bool:
        """True if each row is in a sequence, and sees the key at its own place."""
        return self.leaves_none and sees_itself(self.within.attention)

    @property
    def has_blind_rows(self) -> bool:
        """True if a row may see no key, or belong to no sequence."""
        return not self.sees_itself and self.stepped.has_blind_rows

    @cached_property
    def large(self) -> dict[str, TensorSpec]:
        """The specs of q, k, v, do and dlse, by name."""
        specs = dict(zip("qkv", self.specs, strict=False))
        if self.problem.grad is not None:
            given = self.problem.grad.split(self.specs)
            cotangents = ("do", given.do), ("dlse", given.dlse)
            specs |= {name: x for name, x in cotangents if x is not None}
        return specs

    @cached_property
    def saved(self) -> dict[str, TensorSpec]:
        """The specs of a gradient's o and lse, by name."""
        if self.problem.grad is None:
            return {}
        read = self.problem.grad.split(self.specs)
        return {"o": read.o, "lse": read.lse}

    # On padded tensors

    @cached_property
    def padded(self) -> list[ValueType]:
        """The types of the operands of `within`."""
        return self.op.padded([x.type for x in self.given])

    @cached_property
    def most(self) -> dict[str, int]:
        """The most rows and keys of a sequence, the sizes of a padded side; named ones at their
        largest."""
        return {side: int(self.padded[n].shape[2]) for side, n in PLACES.items()}

    @cached_property
    def problem(self) -> Problem:
        """The attention or gradient, dense where operands are packed or in pages."""
        if self.whole is not None:
            return self.whole
        readers = self.packed.readers if self.packed else {}
        each = zip(self.within.takes, self.specs, self.padded, strict=True)
        specs = [  # numbers in pairs are as many as these would be, one a byte
            TensorSpec(t.shape, x.dtype) if role.side in readers or t.shape != x.shape else x
            for role, x, t in each
        ]
        op = self.within
        return Problem(op.attention, tuple(specs), op.grad, self.lies, self.narrow)

    @cached_property
    def stepped(self) -> Problem:
        """The attention or gradient for libraries: packed and paged operands keep the strides of
        their rows and heads, the only ones that are read, and those that are copied are dense."""
        if self.packed is None:
            return self.problem
        readers, copied = self.packed.readers, {*self.copied}
        each = zip(self.within.takes, self.specs, self.padded, strict=True)
        specs = [
            pad_spec(x, t.shape, dense=role.name in copied and role.side in self.sides)
            if role.side in readers
            else x
            for role, x, t in each
        ]
        return Problem.of(self.within, specs)

    @cached_property
    def flat(self) -> Problem:
        """The problem with all packed sequences as one, with the true number of programs and
        memory."""
        p = self.problem
        shapes = [x.shape for x in p.specs[:3]]
        if self.T is not None:
            shapes[0] = (1, p.H, self.T, p.D)
        if self.T_keys is not None:
            shapes[1], shapes[2] = (1, p.G, self.T_keys, p.D), (1, p.G, self.T_keys, p.E)
        pairs = zip(shapes, p.specs, strict=False)
        specs = (TensorSpec(shape, x.dtype) for shape, x in pairs)
        return evolve(p, specs=(*specs, *p.specs[3:])) if self.sides else p

    # Results

    def o(self) -> TensorSpec:
        """How o lies: as declared, or dense in the memory order of q."""
        p = self.problem
        shape = (p.B, p.H, p.M, p.E) if self.T is None else (self.T, p.H, p.E)
        return p.lay("o", shape, self.specs[0])

    def statistic(self) -> tuple[int, ...]:
        """The shape of lse and other statistics of rows."""
        p = self.problem
        return (p.B, p.H, p.M) if self.T is None else (p.H, self.T)

    def gradient(self, n: int) -> TensorSpec:
        """How the gradient of q, k or v lies: as declared, or dense in the operand's order."""
        spec = self.specs[n]
        return self.problem.lay(f"d{self.problem.node.roles[n]}", spec.shape, spec)

    # Rows of nobody

    def absent(
        self, sides: Iterable[str], x: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """By side, True for rows outside sequences, [T,1,1], or past lengths, [B,1,M or N,1]; one
        tensor for both sides if they have the same starts and lengths.

        x: starts and lengths, by name.
        """
        made: dict[tuple[int, ...], torch.Tensor] = {}
        names = {}
        for side in sides:
            most = self.totals.get(side, self.most[side])
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


def sees_itself(node: Attention) -> bool:
    """True if each query sees the key at its own place, where q and k have equal lengths."""
    parts = [x for x in and_parts(node.mask) if x not in LEAVES.values()]
    return not any(m.hides for m in node.modifiers) and all(map(keeps_own_place, parts))


def keeps_own_place(part: Mask) -> bool:
    if not isinstance(part, Band) or len(part.ragged) == 1:
        return False
    return (part.low is None or part.low <= 0) and (part.high is None or part.high >= 0)


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


def rows_outside(starts: torch.Tensor, lengths: torch.Tensor | None, T: int) -> torch.Tensor:
    """Marks each of T packed rows that belongs to no sequence: [T] of bool. lengths: None without
    gaps."""
    row = torch.arange(T, dtype=starts.dtype, device=starts.device)
    if lengths is None:  # then a row is past both the first and the last start, or neither
        past = row >= starts[:: max(1, len(starts) - 1), None]
        return past[0] == past[-1]
    last = torch.searchsorted(starts.contiguous(), row, right=True) - 1
    entry = last.clamp(0, len(lengths) - 1)
    return (row < starts[entry]) | (row >= starts[entry] + lengths[entry])


def copy_cleared(x: torch.Tensor, where: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A copy of x in `out`, with 0 in some rows, in one pass; 8 bits of 0 are 0 in any dtype."""
    bits = torch.uint8 if x.dtype.itemsize == 1 else x.dtype
    zero = ZEROS.get((x.device, bits), lambda: full_vector(1, 0, x.device, bits))
    torch.where(where, zero, x.view(bits), out=out.view(bits))
    return out


def block_along(shape: tuple[int, ...], scale: TensorSpec, axis: int) -> int:
    """How many neighbours along an axis have one scale; 0: all."""
    count = scale.shape[axis]
    return 0 if count == 1 else neighbours(shape[axis], count)


def quantised_places(graph: Graph) -> dict[str, int]:
    """The input for each operand of one attention on q, k and v in 8 bits, with a scale each, by
    name, and that for the scale of an o in as many bits; empty for other graphs, with packed
    tensors, pages or k and v alone quantised among them.

    cuDNN multiplies them as they are, and then scores and o by the scales. It rounds weights to the
    dtype of q, after it has multiplied them by WEIGHT_SCALE: docs/semantics.md has the error of it.
    """
    if not 2 <= len(graph.eqns) <= 3 or min(graph.outputs) <= len(graph.inputs):
        return {}
    first, main, *last = graph.eqns
    if not isinstance(first.op, Dequantise) or main.args[0] != len(graph.inputs):
        return {}
    packed: Packed | None = main.op.packed
    if packed is None or packed != Packed(packed.op, scaled=True) or packed.forward is None:
        return {}
    if IN_PAIRS in (graph.types[n].dtype for n in main.args[1:3]):
        return {}
    q, q_scale, _ = first.args
    places = dict(zip(packed.roles, main.args, strict=True)) | {"q": q, "q_scale": q_scale}
    if not last:
        return places
    return places | {O_SCALE: last[0].args[1]} if isinstance(last[0].op, Quantise) else {}
