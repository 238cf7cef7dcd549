"""What is known before anything runs: text in a terminal, HTML in a notebook, a dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from textwrap import indent
from typing import Any, final

from attrs import asdict, evolve, frozen

from attn_graph.errors import Reason, format_refusal
from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Graph
from attn_graph.ir.kept import KeptAttention
from attn_graph.ir.packed import fused_op
from attn_graph.ir.vjp import residuals
from attn_graph.lowering.backend import Foreseen
from attn_graph.machine.sizes import Memory
from attn_graph.machine.target import Target
from attn_graph.masks import Mask
from attn_graph.masks.tiles import Tiles, tiles
from attn_graph.planner.cost import Cost
from attn_graph.planner.remedies import Change, Remedy

HELD = 256  # counts of masks
ELSE = "only by computing something else"
IF_LSE = "backward, if lse gets a gradient"


@final
@frozen
class Refusal:
    """A backend that does not take a graph: every reason, each a clause for "no, because it".

    lifts: for each reason, what single changes lift it. smallest: the fewest changes after which
    the backend takes the graph, and the graph computes the same if that is possible; None where
    none were found, or none were looked for.
    """

    backend: str
    reasons: tuple[Reason, ...]
    lifts: tuple[tuple[Remedy, ...], ...] = ()
    smallest: Change | None = None

    def __str__(self) -> str:
        ending = f"\n  {self.way_out}" if self.smallest else ""
        return format_refusal(self.backend, self.lines()) + ending

    def lines(self) -> Iterator[str]:
        """Each reason, with what lifts it."""
        for reason, remedies in zip(
            self.reasons, self.lifts or ((),) * len(self.reasons), strict=True
        ):
            yield f"{reason} ({format_remedies(remedies)})" if remedies else str(reason)

    @property
    def way_out(self) -> str:
        """The smallest change in words."""
        same, other = split_remedies(self.smallest.remedies if self.smallest else ())
        if not other:
            return f"it would with: {', '.join(same)}"
        start = f"it would with: {', '.join(same)};" if same else "it would,"
        return f"{start} but {ELSE}: {', '.join(other)}"

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """Texts, lists and dicts; `lifts_changing_result` has some of `lifts`, those apart."""
        return {
            "backend": self.backend,
            "reasons": [*map(str, self.reasons)],
            "keys": [reason.key for reason in self.reasons],
            "lifts": [[*map(str, remedies)] for remedies in self.lifts],
            "lifts_changing_result": [split_remedies(remedies)[1] for remedies in self.lifts],
            "smallest": [*self.smallest.texts] if self.smallest else None,
            "smallest_changes_result": self.smallest.changes_result if self.smallest else None,
        }


def split_remedies(remedies: Sequence[Remedy]) -> tuple[list[str], list[str]]:
    """In words: those after which the result is the same, and those that change it."""
    same = [remedy.text for remedy in remedies if not remedy.changes_result]
    return same, [remedy.text for remedy in remedies if remedy.changes_result]


def format_remedies(remedies: Sequence[Remedy]) -> str:
    """What lifts a reason; apart from the rest, what does so by computing something else."""
    same, other = ("; or ".join(texts) for texts in split_remedies(remedies))
    if not same:
        return f"{ELSE}: {other}"
    return f"lifted by: {same}" + (f"; or {ELSE.removeprefix('only ')}: {other}" if other else "")


@final
@frozen
class Explanation:
    """Who runs a graph on a target and why, why the others don't, and what it costs.

    backend: None where all refuse. notes: how it runs. also: who could run it too. tiles: of each
    attention's mask. memory: of both passes, None where nobody runs the forward; a backward that
    nobody runs is not counted. backward: the same of the gradient that a training step runs, which
    has gradients of all outputs but lse; memory and cost are with this one. through_lse: the same
    of the gradient where lse has one too; None where lse is no output beside others.
    """

    graph: Graph
    target: Target
    backend: str | None
    cause: str
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    tiles: tuple[Tiles, ...] = ()
    memory: Memory | None = None
    cost: Cost | None = None
    backward: Explanation | None = None
    through_lse: Explanation | None = None

    def __str__(self) -> str:
        return "\n".join(
            [str(self.graph), f"target: {self.target}", *self.lines(), *self.figures()]
        )

    def lines(self) -> Iterator[str]:
        """Who runs it, who could, who not."""
        chosen = f"{self.backend}: chosen, because {self.cause}"
        yield chosen if self.backend else f"no backend takes it: {self.cause}"
        yield from (f"  - {note}" for note in self.notes)
        yield from (f"{name}: could run it too" for name in self.also)
        yield from map(str, group_alike(self.refusals))
        if self.backward:
            yield "backward"
            yield from (indent(line, "  ") for line in self.backward.lines())
        if self.apart:
            yield IF_LSE
            yield from (indent(line, "  ") for line in self.apart.lines())

    @property
    def apart(self) -> Explanation | None:
        """What `through_lse` says and `backward` does not: the choice, and refusals of its own."""
        if self.through_lse is None or self.backward is None:
            return None
        known = {*map(str, self.backward.refusals)}
        own = tuple(each for each in self.through_lse.refusals if str(each) not in known)
        return evolve(self.through_lse, refusals=own)

    def figures(self) -> Iterator[str]:
        """Tiles, memory and cost, a line each."""
        yield from (f"mask: {tiles}" for tiles in self.tiles)
        if self.memory:
            yield f"memory: {self.memory}"
        if self.through_lse and self.through_lse.memory != self.memory:
            yield f"memory, if lse gets a gradient: {self.through_lse.memory}"
        if self.cost:
            yield f"cost: {self.cost}"

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """Plain numbers, texts, lists and dicts."""
        return {
            "graph": str(self.graph),
            "target": str(self.target),
            "backend": self.backend,
            "cause": self.cause,
            "notes": [*self.notes],
            "also": [*self.also],
            "refusals": [each.to_dict() for each in self.refusals],
            "tiles": [asdict(each) for each in self.tiles],
            "memory": asdict(self.memory) | {"peak": self.memory.peak} if self.memory else None,
            "cost": self.cost.to_dict() if self.cost else None,
            "backward": self.backward.to_dict() if self.backward else None,
            "through_lse": self.through_lse.to_dict() if self.through_lse else None,
        }

    def _repr_html_(self) -> str:
        """For notebooks: the choice, then a row for each other backend, then the figures."""
        from attn_graph.printing import html

        sides = {"forward": self, "backward": self.backward, IF_LSE: self.apart}
        parts = [html.code(self.graph), html.element("p", f"target: {self.target}")]
        parts += [html.Html(side.table(name)) for name, side in sides.items() if side]
        parts += [html.element("p", line) for line in self.figures()]
        return html.page(*parts)

    def table(self, name: str) -> str:
        """Who runs one pass, who could, and why the others don't, as HTML."""
        from attn_graph.printing import html

        chosen = html.verdict(f"chosen, because {self.cause}", self.notes)
        rows = [(self.backend or "no backend takes it", chosen if self.backend else self.cause)]
        rows += [(other, html.verdict("could run it too")) for other in self.also]
        for each in group_alike(self.refusals):
            more = (each.way_out,) if each.smallest else ()
            rows.append((each.backend, html.verdict("no, because it", (*each.lines(), *more))))
        return html.element("h4", name) + html.table(rows)


def group_alike(refusals: Iterable[Refusal]) -> Iterator[Refusal]:
    """Those of the same reasons as one, by all their names."""
    names: dict[Refusal, list[str]] = {}
    for each in refusals:
        names.setdefault(evolve(each, backend=""), []).append(each.backend)
    return (evolve(each, backend=", ".join(told)) for each, told in names.items())


def mask_tiles(graph: Graph) -> Iterator[Tiles]:
    """The tiles of each attention's mask, before any data."""
    for eqn in graph.eqns:
        if isinstance(eqn.op, Attention):
            (B, H, M), N = graph.types[eqn.args[0]].shape[:3], graph.types[eqn.args[1]].shape[2]
            yield count_tiles_once(eqn.op.mask, M, N, B, H)


@lru_cache(HELD)
def count_tiles_once(mask: Mask | None, M: int, N: int, B: int, H: int) -> Tiles:
    """The tiles of a mask before any data: every target has the same."""
    return tiles(mask, M, N, B=B, H=H)


def sum_memory(
    graph: Graph, ahead: Foreseen, gradient: Graph | None = None, behind: Foreseen | None = None
) -> Memory:
    """What a simplified graph needs, by what its passes do; a backward that nobody runs nothing."""
    types, both = graph.types, {"forward": ahead} | ({"backward": behind} if behind else {})
    return Memory(
        outputs=sum(t.bytes for t in graph.output_types),
        saved=sum(types[i].bytes for i in saved_values(graph)),
        workspace_forward=ahead.workspace or 0,
        workspace_backward=(behind.workspace or 0) if behind else 0,
        temporary_forward=ahead.temporary,
        temporary_backward=behind.temporary if behind else 0,
        gradients=sum(t.bytes for t in gradient.output_types) if gradient and behind else 0,
        untold=tuple(name for name, x in both.items() if x.workspace is None),
    )


def saved_values(graph: Graph) -> set[int]:
    """The attentions' results that stay alive between forward and backward.

    The backward reads them, or the graph returns them.
    """
    kinds = Attention | KeptAttention
    fused = {i for e, outs in graph.numbered if isinstance(fused_op(e.op), kinds) for i in outs}
    return {*residuals(graph), *(fused & {*graph.outputs})}
