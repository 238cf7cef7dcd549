"""The backend of a graph and the reasons, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from attrs import evolve

from attn_graph.errors import NoBackendError
from attn_graph.instruments.explanation import Explanation, Refusal, mask_tiles
from attn_graph.instruments.remedies import Question, Read, Search
from attn_graph.ir.graph import Graph
from attn_graph.ir.transforms.binding import complete_sizes, many_sizes, replace_sizes
from attn_graph.ir.transforms.vjp import main_outputs
from attn_graph.lowering.backend import Foreseen, out_notes
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.request import Request
from attn_graph.planner.choose import (
    BACKENDS,
    Refusals,
    first_that_succeeds,
    is_checked,
    permitted_backends,
    resolve_backends,
)
from attn_graph.planner.cost import cost
from attn_graph.planner.forms.recorded import RUNS_KEPT, recorded_graph, recording_note
from attn_graph.planner.forms.views import peel
from attn_graph.planner.memory import sum_memory
from attn_graph.rings import find


def explain_graph(
    request: Request,
    wants: Sequence[str] | None = None,
    *,
    named: bool = False,
) -> Explanation:
    """Both passes of a graph, with the fixes of each refusal, and the cost.

    wants: the inputs to differentiate by, by default all floating ones; empty: forward alone.
    named: True if its sizes have names, and these are examples of them.
    """
    question = Question.of(request, wants)
    simple = question.forward()
    forward, ahead = explain_pass(question, Question.forward)
    if ahead is not None:
        forward = evolve(forward, notes=(*forward.notes, *out_notes(simple, ahead)))
    recorded, most, read = simple, ahead, Question.backward
    kept = None
    if not named and forward.backend is not None and any(gradients(question)):
        kept = recorded_graph(request.with_graph(forward.graph), forward.backend)
    if kept is not None and ahead is not None:
        forward = evolve(forward, notes=(*forward.notes, recording_note(kept)))
        recorded, read = kept, partial(read_gradient, kept)
        question = evolve(question, request=evolve(request, among=RUNS_KEPT))
        (keeper,) = resolve_backends(RUNS_KEPT)
        most = ahead.or_more(keeper.foreseen(request.with_graph(kept)))

    def step(gradient: Question) -> Explanation:
        side, behind = explain_pass(gradient, read)
        return evolve(side, memory=most and sum_memory(recorded, most, side.graph, behind))

    backward, through_lse, *_ = (*map(step, gradients(question)), None, None)
    return evolve(
        forward,
        backward=backward,
        through_lse=through_lse,
        tiles=tuple(mask_tiles(simple)),
        memory=backward.memory if backward else ahead and sum_memory(simple, ahead),
        cost=cost(
            simple, request.target, wants=question.wants, precision=request.options.precision
        ),
    )


def read_gradient(recorded: Graph, question: Question) -> Graph:
    """`Question.backward` of the recorded graph."""
    return facts_of(recorded).gradient(question.wants, through_lse=question.through_lse)


def gradients(question: Question) -> Iterator[Question]:
    """The gradient of a training step; then the one through lse, if lse is not the only output."""
    simple = question.forward()
    if question.wants and simple.has_gradient:
        yield question
        if main_outputs(simple) != simple.differentiable_outputs:
            yield evolve(question, through_lse=True)


def explain_pass(question: Question, read: Read) -> tuple[Explanation, Foreseen | None]:
    """The backend of one pass, and its needs; None if all backends refuse."""
    graph, target = read(question), question.request.target
    peeled = peel(graph)
    request = question.request.with_graph(graph)
    core = request if peeled is None else request.with_graph(peeled.core)
    try:
        choice, foreseen = first_that_succeeds(core, lambda backend: backend.foreseen(core))
    except NoBackendError as error:
        cause = "none supports it"
        refusals = explain_each(error.refusals, question, read)
        return Explanation(graph, target, None, cause, refusals), None
    foreseen = foreseen if peeled is None else peeled.foresee(foreseen)
    more = [
        *foreseen.notes,
        *(find("check_notes")(choice.backend, core) if is_checked(choice.backend) else ()),
        *request.notes(),
    ]
    if foreseen.workspace is None and request.options.max_workspace is not None:
        rest = f"then {choice.also[0]} runs it" if choice.also else "then nobody runs it"
        more.append(f"its built plan may need more workspace than max_workspace allows: {rest}")
    name, cause = choice.backend.name, choice.cause
    refusals = explain_each(choice.refusals, question, read)
    return Explanation(graph, target, name, cause, refusals, tuple(more), choice.also), foreseen


def explain_refusals(
    request: Request,
    refusals: Refusals,
) -> tuple[Refusal, ...]:
    """Known refusals of a graph's forward at its largest sizes, with the changes to lift them."""
    graph = request.graph
    exact = replace_sizes(graph, complete_sizes(graph, "explain", {}))
    quiet = request.with_options(on_fallback="ignore", resized=many_sizes(graph))
    return explain_each(refusals, Question.of(quiet.with_graph(exact), ()), Question.forward)


def explain_each(against: Refusals, question: Question, read: Read) -> tuple[Refusal, ...]:
    """The reasons of each backend against one pass; the changes that lift them are searched when
    they are read."""
    by_name = {b.name: b for b in permitted_backends(question.request) or BACKENDS}
    return tuple(
        [Refusal(name, why, Search(question, why, by_name[name], read)) for name, why in against]
    )
