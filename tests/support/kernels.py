"""Triton's kernels in tests: interpreted or compiled, whichever Triton was imported for."""

from __future__ import annotations

import pytest

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import Problem, facts_of, sole

CPU = ag.Target.of("cpu")
interpreted = pytest.mark.skipif(
    not CPU.interprets, reason="needs TRITON_INTERPRET=1 before Python starts, as in `make test`"
)
compiled = pytest.mark.skipif(
    CPU.interprets, reason="with TRITON_INTERPRET=1 Triton compiles nothing"
)


def problem_of(graph: ag.Graph) -> Problem:
    """The attention that a graph is, or its gradient."""
    problem = sole(simplify(graph))
    assert problem is not None
    return problem


def lying_of(graph: ag.Graph) -> Lying:
    """How the operands of an attention, or of its gradient, lie."""
    lying = facts_of(simplify(graph)).once(Lying.of)
    assert lying is not None
    return lying
