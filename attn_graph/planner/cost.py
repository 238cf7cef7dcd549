"""The cost of a graph on a target: flops, bytes, and the least time.

`lowering/shares` says what is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from attrs import asdict, frozen

from attn_graph.errors import GraphError
from attn_graph.ir.graph import Graph
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.shares import Share, count_shares, mask_sources
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from attn_graph.planner.forms.views import core_of, peel
from attn_graph.spec import NAMES

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
    `compile`. Raises GraphError for unknown tensors, and for tensors of other sizes.
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
    """The tensors. Raises GraphError for one read by no mask of the graph."""
    read = {name for eqn in graph.eqns for name, _ in mask_sources(graph, eqn).values()}
    if unknown := [name for name in tensors if name not in read]:
        names = ", ".join(sorted(read)) or "no input"
        raise GraphError(f"cost: no mask reads {', '.join(unknown)}; the masks read {names}")
    if others := [n for n, x in tensors.items() if not isinstance(x, torch.Tensor)]:
        kind = type(tensors[others[0]]).__name__
        raise GraphError(f"cost: {others[0]} is a {kind}, not a tensor")
    return tensors


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
