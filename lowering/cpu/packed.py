"""Attention on packed tensors: sequence by sequence, each a graph of its own on views.

Nothing of the size of a padded batch is made. A sequence runs as any attention of its lengths does,
its mask being the whole graph's with the lengths as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, final

import torch
from attrs import Factory, evolve, field, frozen

from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.builder import Builder
from attn_graph.ir.graph import Eqn, Graph, Op
from attn_graph.ir.modifiers import Alibi, Bias, Modifier, SoftCap
from attn_graph.ir.packed import (
    LEAVES,
    LENGTHS,
    Packed,
    and_parts,
    label_operands,
    label_results,
    operand_sides,
    run_one,
)
from attn_graph.ir.packing import list_sequences, row_count
from attn_graph.ir.tangents import AttentionGradJvp, AttentionJvp
from attn_graph.lowering.backend import Executable
from attn_graph.machine.ambient import without_autocast
from attn_graph.masks import LEAVES as KNOWN_LEAVES
from attn_graph.masks import Band, Data, Join, KeyLengths, Mask, Prefix, QueryLengths
from attn_graph.masks.canonical import EVERYTHING, canonical_mask
from attn_graph.masks.runs import leaves
from attn_graph.spec import (
    FLOATS,
    INF,
    TensorSpec,
    accumulator,
    dense_strides,
    memory_order,
)

MOST_PARTS = 256  # executables that a plan keeps, one for each pair of lengths
Label = str | Data  # "rows", "keys", or the axes of other data
Lower = Callable[[Graph], Executable]


@final
@frozen
class Sizes:
    """The queries and keys of a sequence, and its lengths as the mask reads them."""

    rows: int
    keys: int
    q_length: int
    kv_length: int


@final
@frozen
class Span:
    """Where one sequence lies: its batch entry, first row and first key, which are 0 in tensors
    that are not packed."""

    entry: int
    row: int
    key: int
    sizes: Sizes


@final
@frozen
class SequenceRun:
    """What runs sequences of some sizes. reads: which operands, by number."""

    executable: Executable
    reads: tuple[int, ...]


def is_separable(op: Packed) -> bool:
    """Whether a sequence is an attention of its own, of its lengths: no step depends on its number
    in the batch, or on how long sequences can be."""
    node = op.attention
    masks = leaves(node.mask) if node.mask else ()
    known = all(type(leaf) in KNOWN_LEAVES for leaf in masks)
    alone = known and not node.dropout and all(is_relative(m, op) for m in node.modifiers)
    return alone and not op.paged


def is_relative(modifier: Modifier, op: Packed) -> bool:
    """Whether a modifier means the same for a sequence alone."""
    if isinstance(modifier, Alibi):
        fixed = modifier.align == "top_left"
        named = {LENGTHS[side] for side in ending_sides(op)} <= {*modifier.ragged}
        return fixed or (modifier.align == "bottom_right" and named)
    return isinstance(modifier, SoftCap | Bias)


def ending_sides(op: Packed) -> tuple[str, ...]:
    """The sides whose sequences the mask ends, so that no more of them is read.

    Not so queries [B,H,M,D] beside sinks: a row that sees nothing has the sink for its lse.
    """
    parts, sinks = and_parts(op.attention.mask), op.attention.sinks
    ended = [side for side, leaf in LEAVES.items() if leaf in parts]
    return tuple(side for side in ended if side == "keys" or side in op.sides or not sinks)


@final
@frozen(eq=False)
class PackedRun:
    """Runs an equation on packed tensors. specs: of its operands. lower: of graphs of sequences."""

    eqn: Eqn
    specs: tuple[TensorSpec, ...]
    lower: Lower
    part_of: Callable[[Sizes], SequenceRun] = field(  # what runs sequences of some sizes
        init=False,
        default=Factory(lambda run: lru_cache(MOST_PARTS)(run.make_part), takes_self=True),
    )

    @cached_property
    def op(self) -> Packed:
        """What it computes."""
        assert isinstance(self.eqn.op, Packed)
        return self.eqn.op

    @cached_property
    def node(self) -> Attention:
        """The attention that it is, or is a derivative of."""
        return self.op.attention

    @cached_property
    def own(self) -> tuple[Label, ...]:
        """The label of each operand of the attention."""
        data = [data for m in self.node.modifiers for data in m.needs.values()]
        data += self.node.mask.needs.values() if self.node.mask else ()
        data += [Data("h", FLOATS)] * self.node.sinks
        return ("rows", "keys", "keys", *data)

    @cached_property
    def labels(self) -> tuple[Label, ...]:
        """The label of each operand of the op within."""
        return label_operands(self.op.op, self.own, "rows")

    @cached_property
    def results(self) -> tuple[Label, ...]:
        """The label of each result."""
        return label_results(self.op.op, self.own, "rows")

    @cached_property
    def most(self) -> dict[str, int]:
        """The most rows and keys of a sequence: of what is not packed, the size."""
        q, k = self.specs[0].shape, self.specs[1].shape
        rows, keys = self.op.rows, self.op.keys
        return {"rows": q[2] if rows is None else rows, "keys": k[2] if keys is None else keys}

    @cached_property
    def sides(self) -> tuple[str, ...]:
        """The sides that are packed."""
        return self.op.sides

    @cached_property
    def ending(self) -> tuple[str, ...]:
        """See `ending_sides`."""
        return ending_sides(self.op)

    def spans(self, operands: Sequence[torch.Tensor]) -> list[Span]:
        """Where each sequence lies. Raises PlanMismatchError for starts and lengths that don't."""
        own, where = self.op.split(operands)
        read = self.node.split(own[: len(self.node.ranks)]).mask
        ends = []
        for (side, most), x in zip(self.most.items(), own[:2], strict=True):
            name = LENGTHS[side]
            if side in where:
                who, (starts, lengths) = name.split("_")[0], where[side]
                ends.append(list_sequences(starts, lengths, row_count(x.shape), most, who))
            else:
                counts = read[name].tolist() if name in read else [most] * x.shape[0]
                ends.append([(0, n) for n in counts])
        return [self.span(b, *each) for b, each in enumerate(zip(*ends, strict=True))]

    def span(self, entry: int, rows: tuple[int, int], keys: tuple[int, int]) -> Span:
        """rows, keys: the first one, and the length as the mask has it."""
        pairs = zip(self.most.items(), (rows, keys), strict=True)
        M, N = (
            min(max(n, 0), most) if side in self.ending else most for (side, most), (_, n) in pairs
        )
        return Span(entry, rows[0], keys[0], Sizes(M, N, rows[1], keys[1]))

    # A sequence as a graph

    def make_part(self, sizes: Sizes) -> SequenceRun:
        """What runs sequences of these sizes."""
        (op, reads), span = self.within(sizes), Span(0, 0, 0, sizes)
        views = [self.cut(as_meta(self.specs[n]), self.labels[n], span) for n in reads]
        b = Builder(True)
        values = [b.input(f"x{n}", TensorSpec.like(x)) for n, x in zip(reads, views, strict=True)]
        return SequenceRun(self.lower(b.graph(*b.emit(op, *values))), reads)

    def within(self, sizes: Sizes) -> tuple[Op, tuple[int, ...]]:
        """The op of a sequence, and which of the operands it reads."""
        node, op, mask = self.node, self.op.op, None
        if node.mask is not None:
            numbers = replace_lengths(node.mask, sizes, self.ending, self.most)
            mask = canonical_mask(numbers, sizes.rows, sizes.keys)
        before = 3 + sum(len(m.needs) for m in node.modifiers)
        known = {name: before + n for n, name in enumerate(node.mask.needs if node.mask else ())}
        after = range(before + len(known), len(node.ranks))
        kept = (*range(before), *(known[name] for name in (mask.needs if mask else ())), *after)
        rest = range(len(node.ranks), len(op.ranks))
        return with_operands(op, evolve(node, mask=mask), kept), (*kept, *rest)

    def cut(self, x: torch.Tensor, label: Label, span: Span) -> torch.Tensor:
        """The view of a tensor that a sequence reads or writes, with one batch entry."""
        sizes, entry = span.sizes, slice(span.entry, span.entry + 1)
        if isinstance(label, Data):
            cuts = {"b": entry, "h": slice(None), "i": slice(sizes.rows), "j": slice(sizes.keys)}
            whole = [label.broadcasts and n == 1 for n in x.shape]
            pairs = zip(label.axes, whole, strict=True)
            return x[tuple(slice(None) if all_ else cuts[axis] for axis, all_ in pairs)]
        first, n = (span.row, sizes.rows) if label == "rows" else (span.key, sizes.keys)
        return cut_rows(x, first, n) if label in self.sides else x[entry, :, :n]

    # A call

    def run(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results."""
        spans = self.spans(operands)
        results = self.new_results(spans, operands[0].device)
        for span in spans:
            part = self.part_of(span.sizes)
            views = [self.cut(operands[n], self.labels[n], span) for n in part.reads]
            outputs, _ = part.executable.run(*views)
            for x, label, y in zip(results, self.results, outputs, strict=True):
                own = self.cut(x, label, span)
                own.add_(y) if isinstance(label, Data) else own.copy_(y)
        return [x.to(due.dtype) for x, due in zip(results, self.eqn.outs, strict=True)]

    def new_results(self, spans: Sequence[Span], device: torch.device) -> list[torch.Tensor]:
        """Room for the results: sums are 0, and so are rows of no sequence, -inf in statistics."""
        covers = {
            "rows": self.covers("rows", sum(span.sizes.rows for span in spans), len(spans)),
            "keys": self.covers("keys", sum(span.sizes.keys for span in spans), len(spans)),
        }
        room: list[torch.Tensor] = []
        for name, label, spec in zip(self.op.names, self.results, self.layouts, strict=True):
            x = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=device)
            if not covers.get(str(label), False):
                x.fill_(-INF if self.op.hides(name) else 0.0)
            room.append(x)
        return room

    @cached_property
    def probes(self) -> tuple[Executable, ...]:
        """What runs sequences as long as there can be, and some of other proportions: they run in
        other tiles, and which of them needs most memory only planning each tells."""
        M, N = self.most["rows"], self.most["keys"]
        pairs = (M, N), (M // 2 + 1, N), (M, N // 2 + 1), (min(1, M), N)
        fits = [(m, n) for m, n in pairs if m <= M and n <= N]
        return tuple(self.part_of(Sizes(m, n, m, n)).executable for m, n in fits)

    @property
    def held(self) -> int:
        """Bytes of the longest sequence's results, and of sums in wider precision."""
        sums = sum(x.type.bytes for x in self.layouts if x.dtype != self.specs[0].dtype)
        return sums + sum(
            spec.type.bytes // max(1, row_count(spec.shape)) * self.most[label]
            for spec, label in zip(self.layouts, self.results, strict=True)
            if not isinstance(label, Data)
        )

    @property
    def summary(self) -> str:
        """How it runs, for `explain`."""
        entries, whole = self.specs[-1].shape[0] - 1, "; ".join(self.probes[0].notes)
        return f"each of {entries} sequences by itself, its memory estimated; the longest: {whole}"

    def covers(self, side: str, count: int, entries: int) -> bool:
        """Whether sequences of so many rows in all leave none out."""
        x = self.specs[0 if side == "rows" else 1]
        return count == (row_count(x.shape) if side in self.op.sides else entries * x.shape[2])

    @cached_property
    def layouts(self) -> tuple[TensorSpec, ...]:
        """How the results lie: gradients as what they are by, o as q. Sums are wider."""
        numbers = label_results(self.op.op, range(len(self.own)), -1)
        main, wide = len(self.specs[0].shape), accumulator(self.specs[0].dtype)
        specs = []
        for n, type_, label in zip(numbers, self.eqn.outs, self.results, strict=True):
            like = self.specs[max(n, 0)] if n >= 0 or len(type_.shape) == main else None
            order = None if like is None else memory_order(like)
            dtype = wide if isinstance(label, Data) else type_.dtype
            specs.append(TensorSpec(type_.shape, dtype, dense_strides(type_.shape, order)))
        return tuple(specs)


def cut_rows(x: torch.Tensor, first: int, n: int) -> torch.Tensor:
    """Rows of a packed tensor [T,H,D] as [1,H,n,D], or of a statistic [H,T] as [1,H,n]: in one
    step, since a short sequence takes little longer than the views of it."""
    if x.ndim == 2:
        head, row = x.stride()
        return x.as_strided((1, x.shape[0], n), (0, head, row), x.storage_offset() + first * row)
    (_, H, D), (row, head, each) = x.shape, x.stride()
    return x.as_strided((1, H, n, D), (0, head, row, each), x.storage_offset() + first * row)


def as_meta(spec: TensorSpec) -> torch.Tensor:
    """A tensor of a spec, without memory."""
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")


def replace_lengths(mask: Mask, sizes: Sizes, ending: Sequence[str], most: dict[str, int]) -> Mask:
    """A mask with the lengths of one sequence as numbers, of which it has no more rows and keys
    than those of the sides `ending`. most: the sizes that count where no length does."""
    match mask:
        case KeyLengths():
            return EVERYTHING if "keys" in ending else Prefix(max(0, sizes.kv_length))
        case QueryLengths() if "rows" in ending:
            return EVERYTHING
        case Band(low, high, ragged) if ragged:
            keys = sizes.kv_length if LENGTHS["keys"] in ragged else most["keys"]
            rows = sizes.q_length if LENGTHS["rows"] in ragged else most["rows"]
            low, high = (None if edge is None else edge + keys - rows for edge in (low, high))
            return Band(low, high)
        case Join():
            return type(mask)(*(replace_lengths(x, sizes, ending, most) for x in mask.parts))
    return mask


def with_operands(
    op: Op, node: Attention, kept: Sequence[int]
) -> Any:  # Any: an op of the same class
    """The op with another attention, which reads these of its operands."""
    match op:
        case AttentionGrad(wants=wants):
            return evolve(op, attention=node, wants=tuple(wants[i] for i in kept))
        case AttentionJvp(tangents=tangents):
            return evolve(op, attention=node, tangents=tuple(tangents[i] for i in kept))
        case AttentionGradJvp(grad=grad, tangents=tangents):
            within = with_operands(grad, node, kept)
            return evolve(op, grad=within, tangents=tuple(tangents[i] for i in kept))
    return node


@final
@frozen(eq=False)
class PaddedRun:
    """The same with sequences padded to the longest that there can be, in one graph: for steps
    that depend on a sequence's number in the batch, or on how long sequences can be."""

    eqn: Eqn
    specs: tuple[TensorSpec, ...]
    lower: Lower

    @property
    def op(self) -> Packed:
        """What it computes."""
        assert isinstance(self.eqn.op, Packed)
        return self.eqn.op

    @cached_property
    def padded(self) -> Executable:
        """What runs the padded graph."""
        packed = [side in self.op.readers for side in operand_sides(self.op.op)]
        types = self.op.padded([spec.type for spec in self.specs])
        b = Builder(True)
        specs = [
            TensorSpec(t.shape, t.dtype) if pads else spec
            for t, spec, pads in zip(types, self.specs, packed, strict=False)
        ]
        values = [b.input(f"x{n}", spec) for n, spec in enumerate(specs)]
        return self.lower(b.graph(*b.emit(self.op.op, *values)))

    @property
    def probes(self) -> tuple[Executable, ...]:
        """What runs all sequences."""
        return (self.padded,)

    @property
    def held(self) -> int:
        """Bytes of the padded operands and results."""
        types = self.op.padded([spec.type for spec in self.specs])
        return sum(t.bytes for t in (*types, *self.op.op.infer(*types)))

    @property
    def summary(self) -> str:
        """How it runs, for `explain`."""
        return f"sequences padded to the longest; {'; '.join(self.padded.notes)}"

    def run(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results."""
        outputs, _ = self.padded.run(*self.op.read(run_one, operands))
        return [*self.op.write(run_one, outputs, operands)]


@final
@frozen
class PackedPlan:
    """How an equation on packed tensors runs, and what that takes, in bytes."""

    call: Callable[..., Sequence[torch.Tensor]]
    workspace: int
    temporary: int
    note: str


def plan_packed(eqn: Eqn, specs: tuple[TensorSpec, ...], lower: Lower) -> PackedPlan:
    """specs: of the operands. lower: makes a graph of one attention run."""
    assert isinstance(eqn.op, Packed)
    each = is_separable(eqn.op)
    run = PackedRun(eqn, specs, lower) if each else PaddedRun(eqn, specs, lower)

    def call(device: torch.device, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
        with torch.no_grad(), without_autocast():
            return run.run(operands)

    workspace = max(probe.workspace for probe in run.probes)
    temporary = max(probe.temporary for probe in run.probes)
    return PackedPlan(call, workspace, temporary + run.held, run.summary)
