"""The backend of a graph and the reasons, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from attrs import evolve

from attn_graph.errors import NoBackendError, Reason
from attn_graph.ir.binding import complete_sizes, replace_sizes
from attn_graph.ir.graph import Graph
from attn_graph.ir.vjp import main_outputs, training_gradient
from attn_graph.lowering.backend import Backend, Foreseen, Options, out_notes
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.target import Target
from attn_graph.planner.choose import (
    BACKENDS,
    Refusals,
    first_that_succeeds,
    resolve_backends,
)
from attn_graph.planner.cost import cost
from attn_graph.planner.explanation import Explanation, Refusal, mask_tiles, sum_memory
from attn_graph.planner.recorded import RUNS_KEPT, recorded_graph, recording_note
from attn_graph.planner.remedies import Request, find_remedies
from attn_graph.planner.self_check import check_notes, known_reasons
from attn_graph.planner.sized import many_sizes
from attn_graph.planner.views import core_of, peel

Among = Sequence[Backend] | None
Read = Callable[[Request], Graph]  # the graph of one pass


def explain_graph(
    graph: Graph,
    target: Target,
    options: Options,
    among: Among,
    wants: Sequence[str] | None = None,
    *,
    named: bool = False,
) -> Explanation:
    """Both passes of a graph, with the fixes of each refusal, and the cost.

    wants: the inputs to differentiate by, by default all floating ones; empty: forward alone.
    named: True if its sizes have names, and these are examples of them.
    """
    question = Request.of(graph, options, wants)
    simple = question.forward()
    forward, ahead = explain_pass(question, Request.forward, target, among)
    if ahead is not None:
        forward = evolve(forward, notes=(*forward.notes, *out_notes(simple, ahead)))
    recorded, most, asked, read = simple, ahead, among, Request.backward
    kept = None if named else find_recorded(question, forward, target, among)
    if kept is not None and ahead is not None:
        forward = evolve(forward, notes=(*forward.notes, recording_note(kept)))
        recorded, read = kept, partial(read_gradient, kept)
        asked = (who,) = resolve_backends(RUNS_KEPT)
        most = ahead.or_more(who.foreseen(kept, target, options))

    def step(gradient: Request) -> Explanation:
        side, behind = explain_pass(gradient, read, target, asked)
        return evolve(side, memory=most and sum_memory(recorded, most, side.graph, behind))

    backward, through_lse, *_ = (*map(step, gradients(question)), None, None)
    return evolve(
        forward,
        backward=backward,
        through_lse=through_lse,
        tiles=tuple(mask_tiles(simple)),
        memory=backward.memory if backward else ahead and sum_memory(simple, ahead),
        cost=cost(simple, target, wants=question.wants, precision=options.precision),
    )


def find_recorded(
    question: Request, forward: Explanation, target: Target, among: Among
) -> Graph | None:
    """The graph recorded by autograd in place of the one asked about; None: no other graph."""
    if forward.backend is None or not any(gradients(question)):
        return None
    return recorded_graph(forward.graph, target, question.options, among, forward.backend)


def read_gradient(recorded: Graph, question: Request) -> Graph:
    """`Request.backward` of the recorded graph."""
    return training_gradient(recorded, question.wants, through_lse=question.through_lse)


def gradients(question: Request) -> Iterator[Request]:
    """The gradient of a training step; then the one through lse, if lse is not the only output."""
    simple = question.forward()
    if question.wants and simple.has_gradient:
        yield question
        if main_outputs(simple) != simple.differentiable_outputs:
            yield evolve(question, through_lse=True)


def explain_pass(
    question: Request, read: Read, target: Target, among: Among
) -> tuple[Explanation, Foreseen | None]:
    """The backend of one pass, and its needs; None if all backends refuse."""
    graph, by_name = read(question), by_names(among)
    peeled, core = peel(graph), core_of(graph)

    def refusals(against: Refusals) -> tuple[Refusal, ...]:
        return tuple(
            explain_refusal(by_name[name], why, question, read, target) for name, why in against
        )

    try:
        choice, foreseen = first_that_succeeds(
            core,
            target,
            question.options,
            among,
            lambda backend: backend.foreseen(core, target, question.options),
        )
    except NoBackendError as error:
        cause = "none supports it"
        return Explanation(graph, target, None, cause, refusals(error.refusals)), None
    foreseen = foreseen if peeled is None else peeled.foresee(foreseen)
    more = (
        *foreseen.notes,
        *check_notes(by_name[choice.backend.name], core, target, question.options),
        *question.options.notes(graph, target),
        *uncertain_workspace(foreseen, question.options, choice.also),
    )
    name, cause, against = choice.backend.name, choice.cause, refusals(choice.refusals)
    return Explanation(graph, target, name, cause, against, more, choice.also), foreseen


def explain_refusals(
    graph: Graph,
    target: Target,
    options: Options,
    among: Sequence[str | Backend] | None,
    refusals: Refusals,
) -> tuple[Refusal, ...]:
    """Known refusals of a graph's forward at its largest sizes, with the changes that lift them."""
    exact = replace_sizes(graph, complete_sizes(graph, "explain", {}))
    quiet = evolve(options, on_fallback="ignore", resized=many_sizes(graph))
    with neutral_state(), target.current():
        question, by_name = Request.of(exact, quiet, ()), by_names(among)
        return tuple(
            explain_refusal(by_name[name], why, question, Request.forward, target)
            for name, why in refusals
        )


def by_names(among: Sequence[str | Backend] | None) -> dict[str, Backend]:
    every = BACKENDS if among is None else resolve_backends(among)
    return {backend.name: backend for backend in every}


def uncertain_workspace(foreseen: Foreseen, options: Options, also: Sequence[str]) -> Iterator[str]:
    """A note if max_workspace limits a workspace known only once the plan is built."""
    if foreseen.workspace is None and options.max_workspace is not None:
        rest = f"then {also[0]} runs it" if also else "then nobody runs it"
        yield f"its built plan may need more workspace than max_workspace allows: {rest}"


def explain_refusal(
    backend: Backend, reasons: tuple[Reason, ...], question: Request, read: Read, target: Target
) -> Refusal:
    """A backend's reasons against one pass, with the changes that lift them."""

    def asks(other: Request) -> tuple[Reason, ...]:
        return known_reasons(backend, core_of(read(other)), target, other.options)

    lifts, smallest = find_remedies(question, reasons, asks)
    return Refusal(backend.name, reasons, lifts, smallest)
