"""The work of Triton's kernels: one attention, its gradient, and forward mode through either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, final

from attrs import evolve, frozen

from attn_graph.ir.attention import Operands
from attn_graph.ir.graph import Eqn, Graph, Input, Op, unused_names
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.storage.packed import LENGTHS
from attn_graph.ir.transforms.tangents import AttentionJvp
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import Facts, Problem, facts_of, has_problem, operand_specs
from attn_graph.lowering.triton.places import kernel_pointers
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:  # imported on use: not needed on machines without a GPU
    from attn_graph.lowering.codegen.device_code import DeviceCode


@final
@frozen(cache_hash=True)
class Push:
    """Forward mode through one attention, or through its gradient.

    moved: the spec of the tangent of each operand of the attention, None without one. cotangents:
    specs of the tangents of do and dlse, through the gradient.
    """

    problem: Problem
    op: AttentionJvp
    moved: tuple[TensorSpec | None, ...]
    cotangents: tuple[TensorSpec | None, TensorSpec | None] = (None, None)

    @classmethod
    def of(cls, graph: Graph) -> Push | None:
        """Of a graph of one AttentionJvp; None of others."""
        if len(graph.eqns) != 1 or not is_tangent(graph.eqns[0].op):
            return None
        op: AttentionJvp = graph.eqns[0].op.jvp
        specs = operand_specs(graph, graph.eqns[0])
        read, moved = op.split(specs)
        given = op.directions(specs) if op.grad else None
        return cls(
            Problem.of(op.of, read), op, moved, (given.tdo, given.tdlse) if given else (None, None)
        )

    @cached_property
    def lying(self) -> Lying:
        """How the operands lie."""
        return Lying.dense(self.problem)

    @property
    def by_role(self) -> Operands[TensorSpec | None]:
        """How the tangents of the attention's own operands lie."""
        return self.problem.node.split(self.moved)

    @property
    def steps(self) -> tuple[Mapping[str, TensorSpec], ...]:
        """For each modifier, how the tangents of its tensors lie, by name."""
        return tuple(keep_given(tensors) for tensors in self.by_role.modifiers)

    @property
    def large(self) -> dict[str, TensorSpec]:
        """How the tangents of q, k, v and the cotangents lie, by name."""
        given = (*self.moved[:3], *self.cotangents)
        return keep_given(dict(zip(("tq", "tk", "tv", "tdo", "tdlse"), given, strict=True)))


def keep_given(specs: Mapping[str, TensorSpec | None]) -> dict[str, TensorSpec]:
    return {name: x for name, x in specs.items() if x is not None}


Work = Lying | Push


def lying_of(work: Work) -> Lying:
    """How the operands of the attention, or of its gradient, lie."""
    return work.lying if isinstance(work, Push) else work


def trace(work: Work) -> DeviceCode:
    """The mask and the modifiers as kernels take them. Raises Untraceable."""
    from attn_graph.lowering.codegen.device_code import Tracer

    steps, lying = work.steps if isinstance(work, Push) else None, lying_of(work)
    pointers, paged = kernel_pointers(lying), lying.pages is not None
    named = (LENGTHS["rows"], "M"), (LENGTHS["keys"], "N")  # equal in kernels that read these
    sizes = {name: size for name, size in named if f"{name}_ptr" in pointers}
    return Tracer.of(work.problem, steps, sizes=sizes, paged=paged).trace()


def is_tangent(op: Op) -> bool:
    return op.jvp is not None and not op.packed


def work_of(facts: Facts) -> Work | None:
    """A graph of one attention or derivative as work; None without kernels for it."""
    return facts.once(Lying.of) or Push.of(facts.graph)


@final
@frozen
class Single:
    """One equation of a graph as a graph of its own. args: its inputs among the graph's values."""

    args: tuple[int, ...]
    graph: Graph
    work: Work

    @cached_property
    def code(self) -> DeviceCode:
        """The traced mask and modifiers. Raises Untraceable."""
        return trace(self.work)


def split_graph(facts: Facts) -> tuple[Single, ...]:
    """The equations of a graph of attentions and their derivatives, each by itself.

    None without kernels for one of them. None without a tangent too, since several attentions are
    several graphs, and if one equation reads a gradient of another.
    """
    graph = facts.graph
    gradients = {i for eqn, outs in graph.numbered if eqn.op.grad for i in outs}
    read = {i for eqn in graph.eqns for i in eqn.args}
    if work := work_of(facts):
        return (Single(tuple(range(len(graph.inputs))), graph, work),)
    moves = any(is_tangent(eqn.op) for eqn in graph.eqns)
    known = all(is_tangent(eqn.op) or has_problem(eqn.op) for eqn in graph.eqns)
    if not known or not moves or gradients & read:
        return ()
    return tuple(cut_equation(graph, eqn) for eqn in graph.eqns)


def cut_equation(graph: Graph, eqn: Eqn) -> Single:
    """An equation as a graph, with all its results."""
    args = tuple(dict.fromkeys(eqn.args))
    known = graph.inputs
    names = (known[i].name if i < len(known) else f"x{i}" for i in args)
    specs = (known[i].spec if i < len(known) else result_spec(graph, i) for i in args)
    inputs = tuple(map(Input, unused_names(names, ()), specs))
    own = evolve(eqn, args=tuple(args.index(i) for i in eqn.args))
    alone = Graph(inputs, (own,), tuple(range(len(args), len(args) + len(eqn.outs))))
    work = work_of(facts_of(alone))
    assert work is not None  # of kinds let through by `split_graph`
    return Single(args, alone, work)


def tangent_specs(push: Push | None) -> Sequence[TensorSpec]:
    """How the tangents of modifiers' tensors lie, in the order of the operands."""
    return [spec for tensors in push.steps for spec in tensors.values()] if push else []
