"""A plan's explanation: the backend, the reasons, and the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve

from attn_graph.errors import NoBackendError
from attn_graph.instruments.explain import explain_each, read_gradient
from attn_graph.instruments.explanation import Explanation, mask_tiles
from attn_graph.instruments.remedies import Question, Read
from attn_graph.ir.attention import Attention
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.ir.rewrite import replay
from attn_graph.ir.transforms.binding import complete_sizes
from attn_graph.ir.transforms.vjp import backward, cotangent_specs, main_outputs, wanted_inputs
from attn_graph.lowering.backend import each_once, out_notes
from attn_graph.plan.extras.memory import sum_needs
from attn_graph.planner.forms.recorded import recording_note
from attn_graph.printing import html

if TYPE_CHECKING:
    from attn_graph.lowering.request import Request
    from attn_graph.plan import Plan


def explain_plan(plan: Plan, sizes: Mapping[str, int]) -> Explanation:
    """`Plan.explain`."""
    if plan.sized is not None:
        exact = explain_plan(plan.at(**sizes), {})
        return evolve(exact, notes=(*exact.notes, plan.sized.note))
    complete_sizes(plan.graph, "explain", sizes)
    usual, every = main_outputs(plan.graph), plan.graph.differentiable_outputs
    gradient = explain_backward(plan, usual) if plan.graph.has_gradient else None
    inspected, recorded = plan.executable.inspect(), plan.recorded
    side = explain_side(plan, Question.of(as_written(plan)), Question.forward, inspected)
    side = evolve(side, notes=(*side.notes, *out_notes(plan.graph, plan.executable)))
    if recorded is not plan:
        side = evolve(side, notes=(*side.notes, recording_note(recorded.graph)))
    return evolve(
        side,
        backward=gradient,
        through_lse=explain_backward(plan, every) if gradient and usual != every else None,
        tiles=tuple(mask_tiles(plan.graph)),
        memory=gradient.memory if gradient else sum_needs(plan, None),
        cost=plan.cost(),
    )


def explain_backward(plan: Plan, outputs: Sequence[int]) -> Explanation:
    """The backend of the gradient if these outputs have cotangents, with the memory of both passes.

    If all backends refuse, the memory is of this pass alone.
    """
    recorded = plan.recorded
    specs = cotangent_specs(recorded.graph, outputs)
    through_lse = outputs != main_outputs(plan.graph)
    question = evolve(Question.of(as_written(plan)), through_lse=through_lse)
    read = Question.backward if recorded is plan else partial(read_gradient, recorded.graph)
    try:
        gradient = recorded.backward(None, specs)
    except NoBackendError as error:
        graph = backward(recorded.graph, wanted_inputs(recorded.graph, None), specs)
        refusals = explain_each(error.refusals, question, read)
        memory = sum_needs(plan, None)
        return Explanation(graph, plan.target, None, "none supports it", refusals, memory=memory)
    side = explain_side(gradient, question, read, gradient.executable.inspect())
    return evolve(side, memory=sum_needs(plan, gradient))


def as_written(plan: Plan) -> Request:
    """The request of a plan, for its graph in single steps, of which changes may drop some."""
    return plan.request.with_graph(write_steps(plan.graph))


def explain_side(
    plan: Plan, question: Question, read: Read, inspected: Sequence[str] = ()
) -> Explanation:
    """One pass alone: its backend and notes, and the other backends' refusals."""
    made = plan.executable
    return Explanation(
        plan.graph,
        plan.target,
        plan.backend,
        plan.cause,
        explain_each(plan.refusals, question, read),
        each_once((*made.notes, *made.launches(), *inspected)),
        plan.also,
    )


def show_plan(plan: Plan) -> str:
    """For notebooks: the backend, the other backends, and the graph. It compiles nothing."""
    question = Question.of(as_written(plan), ())
    table = explain_side(plan, question, Question.forward).table(f"a plan for {plan.target}")
    return html.page(html.Html(table), html.Html(plan.graph._repr_html_()))


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
