"""What a plan depends on besides its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from attrs import frozen

from attn_graph.ir.graph import Graph
from attn_graph.lowering.backend import Backend, Options
from attn_graph.machine.target import Target
from attn_graph.planner.arguments import Backends
from attn_graph.planner.choose import resolve_backends
from attn_graph.planner.content import write_plan


@final
@frozen
class Recipe:
    """The target, options and permitted backends for planning graphs."""

    target: Target
    options: Options
    among: Backends | None

    @property
    def backends(self) -> Sequence[Backend] | None:
        """The permitted backends as records. Raises GraphError for an unknown name."""
        return None if self.among is None else resolve_backends(self.among)

    def text(self, graph: Graph) -> str:
        """A simplified graph's plan as text. Raises PlanTargetError for another machine's."""
        return write_plan(graph, self.target, self.options, self.among)
