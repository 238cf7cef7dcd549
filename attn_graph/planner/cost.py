"""The cost of a graph on a target, from its mask and shapes: flops, bytes, and the least time.

Flops count matrix products over the pairs of query and key kept by the mask, 2 flops for a product
and a sum. Forward, q k^T and p v: 2 (D + E) a pair. Backward, q k^T computed again, dp = do v^T,
dv, dq and dk: 2 (3 D + 2 E) a pair, 2.5 times the forward if D = E. Forward mode with tangents of
q, k and v: 2 (3 D + 3 E), three times the forward. This is the count of FlashAttention's papers
(arXiv 2307.08691, section 4.1) and of its benchmarks, with the mask exact; they take half for
causal. Softmax and modifiers are not counted.

Bytes count each operand and result of an attention once: of q, and tensors with its rows, only rows
that see a key; of k and v only keys that are seen; of a bias [B,H,M,N] at most one element a pair.
No kernel can move less, whatever its caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import prod
from typing import Any, final

import torch
from attrs import asdict, frozen

from attn_graph.errors import GraphError
from attn_graph.ir import ops
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.fused import Fused
from attn_graph.ir.gradient_ops import WeighT
from attn_graph.ir.graph import Eqn, Graph, Op
from attn_graph.ir.packing import Lengths, row_count
from attn_graph.ir.tangents import AttentionJvp
from attn_graph.lowering.facts import Facts, facts_of
from attn_graph.lowering.problem import operand_specs
from attn_graph.machine.cache import remember
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from attn_graph.masks import Mask
from attn_graph.masks.tiles import Coverage, Sizes, count_pairs
from attn_graph.planner.views import core_of, peel
from attn_graph.spec import NAMES, TensorSpec, ValueType

Tensors = Mapping[str, torch.Tensor]


@final
@frozen
class Work:
    """The work of one pass: flops, bytes, and the seconds of each at the target's peak.

    Seconds are None if the target's rate is not known.
    """

    flops: int
    bytes: int
    compute_seconds: float | None = None
    memory_seconds: float | None = None

    @property
    def intensity(self) -> float:
        """Flops a byte; 0 if no bytes are moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def seconds(self) -> float | None:
        """The least time: the longer of computing and moving. None if either is not known."""
        if self.compute_seconds is None or self.memory_seconds is None:
            return None
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound(self) -> str | None:
        """The limit of the least time, "compute" or "memory"; None if it is not known."""
        if self.compute_seconds is None or self.memory_seconds is None:
            return None
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"

    def figures(self) -> tuple[str, str, str, str, str]:
        """Flops, bytes, intensity, least time and its bound, as text; "-": not known."""
        time = "-" if self.seconds is None else format_scaled(self.seconds, "s")
        flops, moved = format_scaled(self.flops, "flop"), format_bytes(self.bytes)
        return flops, moved, f"{self.intensity:.4g}", time, self.bound or "-"

    def achieved(self, measured: float) -> float | None:
        """The least time as a fraction of `measured` seconds; None if it is not known."""
        return None if self.seconds is None else self.seconds / measured

    def __str__(self) -> str:
        flops, moved, intensity, time, bound = self.figures()
        text = f"{flops}, {moved}, {intensity} flop/B"
        return text if self.seconds is None else f"{text}, at least {time}, bound by {bound}"


@final
@frozen(repr=False)
class Cost:
    """The cost of a plan, over all batch entries and heads.

    pairs: places [i,j] kept by the masks of attentions. places: all places; 0 if the graph stays in
    steps, whose products compute every place. exact: False if pairs, flops and bytes are upper
    bounds: data are not given, or the count is `estimated`, because a mask is not a join of strips
    and an exact count would take too long. backward: of a training step, without a gradient of lse;
    None for a graph without gradients.
    """

    pairs: int
    places: int
    exact: bool
    forward: Work
    backward: Work | None
    estimated: bool = False

    def __repr__(self) -> str:
        """The text."""
        return str(self)

    def __str__(self) -> str:
        text = f"forward {self.forward}"
        if self.places:
            text = f"{self.pairs_text()}; {text}"
        text += "" if self.backward is None else f"; backward {self.backward}"
        return text if self.exact else text.replace("at least", "at the roofline")

    def pairs_text(self) -> str:
        """The number of pairs kept, of all places, and its certainty."""
        most = "" if self.exact else "estimated, at most " if self.estimated else "at most "
        share = 100 * self.pairs / self.places
        return f"{most}{self.pairs:,} of {self.places:,} pairs ({share:.3g} %)"

    def _repr_html_(self) -> str:
        """For notebooks: a row for each pass, and the number of pairs kept."""
        from attn_graph.printing import html

        works = {"forward": self.forward} | ({"backward": self.backward} if self.backward else {})
        least = "least time" if self.exact else "time at the roofline"
        rows = [(name, *map(html.Number, work.figures())) for name, work in works.items()]
        head = ("", *map(html.Number, ("flops", "bytes", "flop/B", least, "bound by")))
        pairs = [html.element("p", self.pairs_text())] if self.places else []
        return html.page(html.table(rows, head), *pairs)

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """All fields, and seconds, bound and intensity of each pass."""
        fields = asdict(self, recurse=False)
        for name in ("forward", "backward"):
            if (work := fields[name]) is not None:
                more = {"seconds": work.seconds, "bound": work.bound, "intensity": work.intensity}
                fields[name] = asdict(work) | more
        return fields


def format_scaled(value: float, unit: str) -> str:
    """A number with a prefix of its unit: 1.5e9 -> "1.5 Gflop", 2e-6 -> "2 µs"."""
    prefixes = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ"}
    size = next((size for size in prefixes if value >= size), 1e-9 if value else 1.0)
    return f"{value / size:.4g} {prefixes.get(size, 'n')}{unit}"


def cost(
    graph: Graph,
    target: Target,
    tensors: Tensors | None = None,
    *,
    wants: tuple[str, ...] | None = None,
    precision: str = "ieee",
) -> Cost:
    """The cost of a simplified graph on a target.

    tensors: inputs that the mask reads, by name; with all of them the count is exact. wants: the
    inputs to differentiate by, by default all floating ones. precision: of float32 products, as in
    `compile`. Raises GraphError for unknown tensors, and for tensors that do not fit.
    """
    backward = facts_of(graph).gradient(wants) if graph.has_gradient and wants != () else None
    peeled, backward = peel(graph), None if backward is None else core_of(backward)
    if peeled is not None:
        graph, tensors = peeled.core, peeled.view(tensors or {})
    given = select_tensors(graph, tensors or {})
    forward = count_shares(graph, given)
    return Cost(
        sum(share.pairs for share in forward),
        sum(share.places for share in forward),
        all(share.exact for share in forward),
        sum_work(forward, graph, target, precision),
        None
        if backward is None
        else sum_work(count_shares(backward, given), backward, target, precision),
        any(share.estimated for share in forward),
    )


def select_tensors(graph: Graph, tensors: Tensors) -> Tensors:
    """The tensors. Raises GraphError for one that no mask of the graph reads."""
    read = {name for eqn in graph.eqns for name, _ in mask_sources(graph, eqn).values()}
    if unknown := [name for name in tensors if name not in read]:
        names = ", ".join(sorted(read)) or "no input"
        raise GraphError(f"cost: no mask reads {', '.join(unknown)}; the masks read {names}")
    if others := [n for n, x in tensors.items() if not isinstance(x, torch.Tensor)]:
        kind = type(tensors[others[0]]).__name__
        raise GraphError(f"cost: {others[0]} is a {kind}, not a tensor")
    return tensors


def mask_sources(graph: Graph, eqn: Eqn) -> dict[str, tuple[str, bool]]:
    """The input behind each tensor of an attention's mask, by its name there; True if the input has
    the starts of sequences, and the mask reads their lengths."""
    node: Attention | None = eqn.op.attention
    if node is None:
        return {}
    starts = {outs[0]: e.args[0] for e, outs in graph.numbered if isinstance(e.op, Lengths)}
    own = node.split(eqn.args[: len(node.takes)]).mask
    sources = {name: (starts.get(i, i), i in starts) for name, i in own.items()}
    names = [i.name for i in graph.inputs]
    return {name: (names[i], diff) for name, (i, diff) in sources.items() if i < len(names)}


def mask_data(graph: Graph, eqn: Eqn, given: Tensors) -> Tensors:
    """The tensors read by an attention's mask, by name there, if their inputs are given."""
    sources = mask_sources(graph, eqn) if given else {}
    return {
        name: given[source].diff() if diff else given[source]
        for name, (source, diff) in sources.items()
        if source in given
    }


@final
@frozen
class Share:
    """One equation's part of the cost; pairs and places if it is an attention."""

    flops: int
    bytes: int
    pairs: int = 0
    places: int = 0
    exact: bool = True
    estimated: bool = False


def sum_work(parts: Sequence[Share], graph: Graph, target: Target, precision: str) -> Work:
    """The sum of the parts, and its times at the target's peak for the dtype of the first input."""
    flops, moved = sum(part.flops for part in parts), sum(part.bytes for part in parts)
    dtype = NAMES[graph.inputs[0].spec.dtype] if graph.inputs else "f32"
    peak = target.peak(precision if (dtype, precision) == ("f32", "tf32") else dtype)
    return Work(
        flops,
        moved,
        None if peak is None else flops / peak,
        None if target.bandwidth is None else moved / target.bandwidth,
    )


def known_shares(facts: Facts) -> tuple[Share, ...]:
    """Flops of the products that masks leave, and bytes of each operand and result once: of each
    equation, before any data."""
    return tuple(shares_of(facts.graph, {}))


def count_shares(graph: Graph, given: Tensors) -> tuple[Share, ...]:
    return tuple(shares_of(graph, given)) if given else facts_of(graph).once(known_shares)


def shares_of(graph: Graph, given: Tensors) -> Iterator[Share]:
    """Each equation's part of the cost. An unread result is not written."""
    read, types = {*graph.outputs, *(i for eqn in graph.eqns for i in eqn.args)}, graph.types
    for eqn, outs in graph.numbered:
        operands = operand_specs(graph, eqn)
        written = sum([types[i].bytes for i in outs if i in read])
        if isinstance(eqn.op, Fused):
            data = mask_data(graph, eqn, given)
            yield attention_share(eqn.op, operands, data, written)
        else:
            moved = sum(distinct_elements(x) * x.dtype.itemsize for x in operands) + written
            yield Share(product_flops(eqn, [x.type for x in operands]), moved)


def product_flops(eqn: Eqn, operands: Sequence[ValueType]) -> int:
    """Flops of an equation outside attentions; 0 unless it is a matrix product."""
    match eqn.op:
        case ops.Scores():
            return 2 * prod(eqn.outs[0].shape) * operands[0].shape[-1]
        case ops.Weigh() | WeighT():
            return 2 * prod(operands[0].shape) * operands[1].shape[-1]
        case _:
            return 0


def distinct_elements(spec: TensorSpec) -> int:
    """The number of memory elements read by a spec: an axis of stride 0 has one."""
    if 0 in spec.shape:
        return 0
    pairs = [*zip(spec.shape, spec.strides, strict=True)]
    reach = 1 + sum([(n - 1) * stride for n, stride in pairs])  # less if axes overlap
    return min(reach, prod([n for n, stride in pairs if stride]))


def attention_share(
    whole: Fused, operands: Sequence[TensorSpec], data: Tensors, written: int
) -> Share:
    """An attention's part of the cost, or its gradient's. written: bytes of the results."""
    given, packed, node = [x.type for x in operands], whole.packed, whole.attention
    op: Fused = packed.op if packed else whole
    types = whole.padded(given)
    (B, H, M, D), (_, G, N, _), E = types[0].shape, types[1].shape, types[2].shape[3]
    rows = B * M
    if packed and "rows" in packed.sides:
        rows = row_count(given[0].shape)
        M = min(M, rows)
    places = H * rows * N
    sizes = (packed.fewest(given) if packed else B, H, G, M, N)
    coverage = count_pairs_once(node.mask, sizes)
    if data:
        own = count_pairs(node.mask, (B, H, G, M, N), data)
        coverage = own if own.exact or own.pairs <= coverage.pairs else coverage
    most: list[int | None] = [coverage.queries * D, coverage.keys * D, coverage.keys * E]
    most[2] = 0 if node.v_in_k else most[2]  # read with k
    read = [data for modifier in node.modifiers for data in modifier.needs.values()]
    most += [coverage.pairs if {"i", "j"} <= {*data.axes} else None for data in read]
    most += [None] * (len(node.takes) - len(most))
    each = {"bhie": coverage.queries * E, "bhi": coverage.queries, "bhij": coverage.pairs}
    more = op.takes[len(most) :]
    most += [each[role.axes] if role.like is None else most[role.like] for role in more]
    moved = sum(
        (distinct_elements(x) if cap is None else min(distinct_elements(x), cap)) * x.dtype.itemsize
        for x, cap in zip_longest(operands, most)
    )
    flops = 2 * coverage.pairs * summed_widths(op, D, E)
    counts = min(coverage.pairs, places), places, coverage.exact, coverage.estimated
    return Share(flops, moved + written, *counts)


@remember
def count_pairs_once(mask: Mask | None, sizes: Sizes) -> Coverage:
    """The pairs kept by a mask without its data, cached for all passes and targets."""
    return count_pairs(mask, sizes, {})


def summed_widths(op: Op, D: int, E: int) -> int:
    """The sum of the head sizes of all matrix products of an attention or a derivative of it."""
    match op:
        case AttentionGrad():
            return gradient_widths(op, D, E) - D * op.attention.keeps
        case AttentionJvp(tangents=(tq, tk, tv, *_), grad=None):
            return D * (1 + tq + tk) + E * (2 + tv)
        case AttentionJvp(tangents=(tq, tk, tv, *_), grad=AttentionGrad() as grad):
            cotangents = E * (2 * grad.with_do + 2 * op.with_tdo + (tv and grad.with_do))
            return D * (1 + tq + tk) + cotangents + D * (2 + tk + tq)
        case _:
            return D + E


def gradient_widths(op: AttentionGrad, D: int, E: int) -> int:
    """The sum of head sizes over a gradient's products, without those of unwanted gradients."""
    wants = dict(zip(op.attention.roles, op.wants, strict=True))
    dv = E if wants["v"] and op.with_do else 0
    others = any(wanted for role, wanted in wants.items() if role != "v")
    dp = E if others and op.with_do else 0
    return D + dp + dv + D * wants["q"] + D * wants["k"]
