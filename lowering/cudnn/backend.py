"""cuDNN: single attentions and their gradients on NVIDIA GPUs, in half precision, and attentions
in 8 bits.

On every machine a table decides if cuDNN supports a graph. This backend also builds plans for
absent GPUs, in a process with a stand-in for their driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve

from attn_graph.errors import Reason
from attn_graph.ir.graph import Graph
from attn_graph.lowering.backend import (
    Backend,
    DeviceTest,
    Executable,
    Foreseen,
    Price,
    RefusedError,
    write_named,
)
from attn_graph.lowering.libraries.forecast import forecast
from attn_graph.lowering.problem import places_of_rows
from attn_graph.lowering.reasons import missing_library, no_gpu, other_equations
from attn_graph.lowering.request import Request
from attn_graph.lowering.small_graphs import shrink
from attn_graph.machine.target import FRONTEND
from attn_graph.spec import NAMES

if TYPE_CHECKING:  # imported on use: a large table, not needed on CPUs
    from attn_graph.lowering.cudnn.graph import CudnnCall
    from attn_graph.lowering.libraries.cudnn_case import Case

VARIES = "chooses its kernel, and how it divides sums, by the size of the batch"
HOME = "attn_graph.lowering.cudnn.backend:BACKEND"
UNREAD = "reads no keys with scales beside another q, packed or in pages"
DOCUMENTED = 256  # the widest heads of its support matrix
WIDE_ROWS, WIDE_KEYS = 200, (251, 700)  # the most queries, and the keys of self-checks


def why_not(request: Request) -> Iterator[Reason]:
    backend, frontend = request.target.cudnn_versions
    if frontend is None:
        yield missing_library(FRONTEND, "pip install 'attn-graph[cuda]'")
    if backend is None:
        yield missing_library(
            "cuDNN",
            "PyTorch's CUDA build brings it; to plan without a GPU, "
            "pip install 'attn-graph[offline]'",
        )
    yield from request.options.switched_off("cudnn")
    case = read_case(request)
    if case is None:
        reason = other_equations(request.graph, packs=True)
        yield evolve(reason, limit=UNREAD) if reason.key == "quantised" else reason
    else:
        yield from request.options.varying(VARIES)
        yield from case_reasons(case, request)


def case_reasons(case: Case, request: Request) -> Iterator[Reason]:
    """The limits of cuDNN exceeded by a case."""
    from attn_graph.lowering.cudnn.memory import workspace
    from attn_graph.lowering.libraries.cudnn_limits import exceeded_limits

    options, against = request.options, request.facts.once(exceeded_limits, case)
    yield from against
    if case.problem.scales and options.precision != "fp8":
        limit = "rounds weights beside quantised tensors to 8 bits"
        yield Reason("precision", limit, f'precision is "{options.precision}"')
    if not against and (need := workspace(case)) is not None:
        yield from options.over_workspace(need)


def read_case(request: Request) -> Case | None:
    """The attention of a graph, or its gradient, with the library versions and the GPU; None for
    other graphs."""
    from attn_graph.lowering.libraries.cudnn_case import case_of

    return request.facts.once(case_of, request.target, request.options.deterministic)


def price(request: Request) -> Price:
    return forecast(request, "cudnn", cudnn_copies)


def cudnn_copies(request: Request) -> Iterable[str]:
    """The operands that a call copies."""
    case = read_case(request)
    return case.copies if case else ()


def lower(request: Request) -> Executable:
    """cuDNN's plan for a graph. Raises RefusedError if cuDNN declines it."""
    from attn_graph.lowering.cudnn.plan import load_or_build
    from attn_graph.lowering.cudnn.run import Run

    case, call = describe_problem(request)
    plan = load_or_build(call, request.target, (case.backend, case.frontend), request.options)
    need = needs(case, call, request.graph, plan.workspace)
    if over := [*request.options.over_workspace(need.workspace or 0)]:
        raise RefusedError(*over)
    run = Run.of(case, call, request.graph, request.options.workspace, plan.workspace, plan.execute)
    return Executable(
        run,
        need.workspace or 0,
        need.temporary,
        (str(plan), *need.notes),
        inspect=lambda: (f"built in {plan.seconds:.2f} s",),
        text=lambda: f"{call}\n{plan}",
        write=partial(write_named, run, request.graph.result_names),
    )


def needs(case: Case, call: CudnnCall, graph: Graph, need: int | None) -> Foreseen:
    """A call's memory besides cuDNN's own `need` bytes of workspace (None: not known), and notes
    for `explain`."""
    from attn_graph.lowering.cudnn.run import buffers, run_notes, temporary_bytes
    from attn_graph.machine.workspace import Scratch

    return Foreseen(
        None if need is None else Scratch(buffers(case, call, need)).bytes,
        temporary_bytes(case, call, graph),
        tuple(run_notes(case, call, graph)),
    )


def foresees(request: Request) -> Foreseen:
    """The workspace by a stored plan or by a formula; otherwise only a built plan tells it."""
    from attn_graph.lowering.cudnn.memory import workspace
    from attn_graph.lowering.cudnn.plan import load_stored

    case, call = describe_problem(request)
    try:
        plan = load_stored(call, request.target, (case.backend, case.frontend), request.options)
    except RefusedError:  # of a GPU outside all tables: lowering will say so
        plan = None
    need = needs(case, call, request.graph, plan.workspace if plan else workspace(case))
    return evolve(need, notes=(str(plan), *need.notes)) if plan else need


def describe_problem(request: Request) -> tuple[Case, CudnnCall]:
    """The call for a supported graph."""
    from attn_graph.lowering.cudnn.graph import describe_call, pack_call
    from attn_graph.lowering.libraries.cudnn_case import needs_padding_mask

    case = read_case(request)
    assert case is not None  # why_not said so
    padded, in_order = needs_padding_mask(case), request.options.deterministic
    call = describe_call(case.problem, padded=padded, deterministic=in_order, clears=case.clears)
    return case, pack_call(call, case.lying)


def variants(request: Request) -> tuple[str, ...]:
    """The other plans proposed by cuDNN, by cuDNN's names."""
    from attn_graph.lowering.cudnn.plan import load_or_build

    case, call = describe_problem(request)
    libraries = case.backend, case.frontend
    return load_or_build(call, request.target, libraries, request.options).plans[1:]


def wide_test(request: Request) -> DeviceTest | None:
    """Small attentions of the head sizes beyond cuDNN's own support matrix, or of quantised
    tensors; None for others."""
    case = read_case(request)
    assert case is not None  # why_not said so
    problem = case.problem
    if max(problem.D, problem.E) <= DOCUMENTED and not problem.scales:
        return None
    M = min(problem.M, WIDE_ROWS)
    small = tuple(shrink(request.graph, problem, M, N) for N in WIDE_KEYS)
    kind = f", {NAMES[problem.dtype]}" if problem.scales else ""
    variant = f"heads of {problem.D} and {problem.E}, {M} queries{kind}"
    return DeviceTest(HOME, variant, small, precision=request.options.precision)


BACKEND = Backend(
    "cudnn", why_not, lower, foresees, variants, one_size=True, device_test=wide_test,
    lays=places_of_rows, real=True, price=price, no_device=no_gpu,
)  # fmt: skip
