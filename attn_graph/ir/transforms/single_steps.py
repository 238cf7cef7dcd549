"""Simplified graphs in single steps again."""

from __future__ import annotations

from collections.abc import Sequence

from attn_graph.ir.attention import Attention
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.ir.rewrite import replay


def write_steps(graph: Graph) -> Graph:
    """A simplified graph in single steps, as a user writes it; to drop some."""

    def write(b: Builder, eqn: Eqn, operands: Sequence[Value]) -> Sequence[Value] | None:
        packed, node = eqn.op.packed, eqn.op.forward
        if not isinstance(node, Attention) or node.keeps:
            return None
        if packed is None:
            return node.unfold(b.emit, operands)
        read = packed.read(lambda *given: b.emit(*given)[0], operands)
        results = node.unfold(b.emit, read)
        made: Sequence[Value] = packed.write(lambda *given: b.emit(*given)[0], results, operands)
        return made

    return replay(graph, write)
