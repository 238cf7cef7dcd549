"""All that is known before a run: text in a terminal, HTML in a notebook, a dict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from attrs import asdict, evolve, field, frozen

from attn_graph.errors import Reason, refusal_lines
from attn_graph.instruments.remedies import Change, Remedy, Search
from attn_graph.ir.graph import Graph
from attn_graph.machine.sizes import Memory
from attn_graph.machine.target import Target
from attn_graph.masks import Mask
from attn_graph.planner.cost import Cost
from attn_graph.sparsity.tiles import Tiles, tiles

OTHER = "which changes the result"
IF_LSE = "backward, if lse gets a gradient"


@final
@frozen
class Refusal:
    """A backend that can't run a graph, with every reason. search: for the changes below."""

    backend: str
    reasons: tuple[Reason, ...]
    search: Search | None = field(default=None, eq=False, repr=False)

    @property
    def lifts(self) -> tuple[tuple[Remedy, ...], ...]:
        """For each reason, the single changes to lift it; they are tried when first read."""
        return self.search.remedies[0] if self.search else ((),) * len(self.reasons)

    @property
    def smallest(self) -> Change | None:
        """The fewest changes for the backend to support the graph, without a change of its result
        if possible; None if there are none."""
        return self.search.remedies[1] if self.search else None

    def __str__(self) -> str:
        return next(refusal_lines([self.told]))

    @property
    def told(self) -> tuple[str, tuple[object, ...]]:
        """The backend and its reasons. The last one carries the fix for all, if there is one; else
        each carries its own."""
        if self.smallest is None:
            return self.backend, tuple(map(add_fix, self.reasons, self.fixes))
        *most, last = self.reasons
        return self.backend, (*most, add_fix(last, self.way_out))

    @property
    def way_out(self) -> str:
        """The smallest change in words; "" without one. Only one that keeps the result is a fix."""
        if self.smallest is None:
            return ""
        same, other = split_remedies(self.smallest.remedies)
        if not other:
            return f"fix: {', '.join(same)}"
        also = f", if you also {', '.join(same)}" if same else ""
        return f"would run {' and '.join(other)}, {OTHER}{also}"

    @property
    def fixes(self) -> tuple[str, ...]:
        """For each reason, the single changes to lift it, in words; "" without any."""
        return tuple(map(format_lifts, self.lifts))

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """Texts, lists and dicts; `lifts_changing_result` has some of `lifts`, those apart."""
        return {
            "backend": self.backend,
            "reasons": [*map(str, self.reasons)],
            "keys": [reason.key for reason in self.reasons],
            "lifts": [[*map(str, remedies)] for remedies in self.lifts],
            "lifts_changing_result": [
                [each.text for each in remedies if each.changes_result] for remedies in self.lifts
            ],
            "smallest": [*self.smallest.texts] if self.smallest else None,
            "smallest_changes_result": self.smallest.changes_result if self.smallest else None,
        }


def split_remedies(remedies: Sequence[Remedy]) -> tuple[list[str], list[str]]:
    """In words: changes that keep the result, and what a run with the other changes would be."""
    same = [remedy.text for remedy in remedies if not remedy.changes_result]
    return same, [remedy.instead for remedy in remedies if remedy.changes_result]


def format_lifts(remedies: Sequence[Remedy]) -> str:
    """Changes that lift one reason, in words, those that change the result after the others."""
    same, other = map(" or ".join, split_remedies(remedies))
    texts = (same and f"fix: {same}", other and f"not a limit {other}, {OTHER}")
    return "; ".join(filter(None, texts))


def add_fix(reason: Reason, fix: str) -> Reason | str:
    """A reason, and the way out if there is one."""
    return f"{reason} ({fix})" if fix else reason


@final
@frozen(repr=False)
class Explanation:
    """The backend of a graph on a target, the reasons, the others' refusals, and the cost.

    backend: None if all refuse. notes: how it runs. also: other backends that support the graph.
    tiles: of each attention's mask. memory: of both passes, None if no backend runs the forward; a
    backward without a backend is not counted. backward: the explanation of a training step's
    gradient, with cotangents of all outputs but lse; memory and cost are with this one.
    through_lse: the explanation of the gradient with a cotangent of lse too; None unless lse is one
    of several outputs.
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
        verdict, *others = self.lines()
        return "\n".join([verdict, *self.figures(), *others, str(self.graph)])

    def __repr__(self) -> str:
        """The first line of the text."""
        return self.verdict

    def lines(self) -> Iterator[str]:
        """The chosen backend, its notes, others able to run the graph, and the refusals."""
        yield self.verdict
        yield from (f"  - {note}" for note in self.notes)
        if self.also:
            yield f"also able: {', '.join(self.also)}"
        yield from refusal_lines(each.told for each in self.refusals)
        for name, side in self.gradients.items():
            first, *rest = side.lines()
            yield f"{name}: {first}"
            yield from (f"  {line}" for line in rest)

    @property
    def verdict(self) -> str:
        """The backend, the target and the cause."""
        if self.backend is None:
            return f"no backend can run this on {self.target}"
        return f"{self.backend} runs this on {self.target}: {self.cause}"

    @property
    def gradients(self) -> dict[str, Explanation]:
        """The explanations of the gradient, without and through lse; without repeated refusals."""
        known, sides = {*map(str, self.refusals)}, dict[str, Explanation]()
        for name, side in (("backward", self.backward), (IF_LSE, self.through_lse)):
            if side is not None:
                own = tuple(each for each in side.refusals if str(each) not in known)
                sides[name] = evolve(side, refusals=own)
                known |= {*map(str, own)}
        return sides

    def figures(self) -> Iterator[str]:
        """Memory, cost and tiles, a line each."""
        if self.memory:
            yield f"memory: {self.memory}"
        if self.through_lse and self.through_lse.memory != self.memory:
            yield f"memory, if lse gets a gradient: {self.through_lse.memory}"
        if self.cost:
            yield f"cost: {self.cost}"
        for mask, found in zip(attention_masks(self.graph), self.tiles, strict=True):
            yield f"mask: {mask.written() if mask is not None else 'none'}, {found}"

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

        parts = [html.element("p", line) for line in (self.verdict, *self.figures())]
        sides = {"forward": self, **self.gradients}
        parts += [html.Html(side.table(name)) for name, side in sides.items()]
        return html.page(*parts, html.code(self.graph))

    def table(self, name: str) -> str:
        """One pass as HTML: the chosen backend, others able to run it, and the refusals."""
        from attn_graph.printing import html

        name_of = self.backend or "none"
        rows = [(name_of, html.verdict(self.verdict.removeprefix(f"{name_of} "), self.notes))]
        rows += [(other, html.verdict("also able")) for other in self.also]
        for name_, reasons in (each.told for each in self.refusals):
            rows.append((name_, html.verdict("can't", reasons)))
        return html.element("h4", name) + html.table(rows)


def attention_masks(graph: Graph) -> list[Mask | None]:
    return [eqn.op.forward.mask for eqn in graph.eqns if eqn.op.forward and not eqn.op.packed]


def mask_tiles(graph: Graph) -> Iterator[Tiles]:
    for eqn in graph.eqns:
        node = None if eqn.op.packed else eqn.op.forward
        if node:
            (B, H, M), N = graph.types[eqn.args[0]].shape[:3], graph.types[eqn.args[1]].shape[2]
            yield tiles(node.mask, M, N, B=B, H=H)
