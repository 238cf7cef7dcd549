"""FlashAttention 4: single attentions and their gradients, in half precision, on NVIDIA GPUs.

Its kernels take masks and modifiers as functions, and lists of the tiles with kept places. The
package is imported when a call runs, and in processes for compiling ahead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve

from attn_graph.errors import Reason
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
from attn_graph.lowering.problem import Facts, places_of_rows, returns_lse
from attn_graph.lowering.reasons import missing_library, no_gpu, other_equations, untraceable
from attn_graph.lowering.request import Request
from attn_graph.lowering.small_graphs import shrink
from attn_graph.machine.target import Target

if TYPE_CHECKING:  # imported on use: not needed on machines without a GPU
    from attn_graph.lowering.codegen.machine_code import MachineCode
    from attn_graph.lowering.fa4.call import Fa4Call
    from attn_graph.lowering.fa4.offline import CompiledKernel
    from attn_graph.lowering.fa4.run import Fa4Run

HOME = "attn_graph.lowering.fa4.backend:BACKEND"
PACKAGE = "flash-attn-4"
LISTED = "lists"  # the variant for self-checks, whose graphs are small
MOST_SPILLED = 1024  # bytes of a thread: our limit, not the package's; no GPU has timed it
SIZES = ((65, 123), (200, 251), (300, 700))  # queries and keys of self-checks
VERSIONS = ((4, 0, 0, 35), (4, 0, 0, 36))  # b35, b36: the first and the last tested
VARIES = "adds up gradients of queries in the order in which programs end"


def why_not(request: Request) -> Iterator[Reason]:
    from attn_graph.lowering.lying import Lying

    lying = request.facts.once(Lying.for_libraries)
    against = [*package_reasons(request.target)]
    if lying is None:
        yield from (*against, other_equations(request.graph, packs=True))
        return
    from attn_graph.lowering.libraries.fa4_limits import Fa4Case, limit_reasons

    options = request.options
    own = [*limit_reasons(Fa4Case(lying, request.target.sm, options.deterministic))]
    if lying.stepped.grad is not None and not options.deterministic:
        own += options.varying(VARIES)
    yield from (*against, *own)
    if own:
        return
    from attn_graph.masks.places import Untraceable

    try:
        describe_fa4(request)
    except Untraceable as error:
        yield untraceable(error)


def price(request: Request) -> Price:
    return forecast(request, "fa4", fa4_copies)


def fa4_copies(request: Request) -> Iterable[str]:
    """The operands that a call copies."""
    from attn_graph.lowering.libraries import fa4_masks
    from attn_graph.lowering.lying import Lying

    lying = request.facts.once(Lying.for_libraries)
    return fa4_masks.copies(lying) if lying else ()


def package_reasons(target: Target) -> Iterator[Reason]:
    """Against a target without the package, or with another version of it: its functions are not
    a stable interface."""
    number = dict(target.libraries).get(PACKAGE)
    if number is None:
        yield missing_library(PACKAGE, "pip install 'attn-graph[fa4]'")
        return
    first, last = VERSIONS
    if not first <= tuple(map(int, re.findall(r"\d+", number)[:4])) <= last:
        known = f"is written for {PACKAGE} {version_text(first)} to {version_text(last)}"
        yield Reason(f"version.{PACKAGE}", known, f"{number} is installed")


def version_text(numbers: tuple[int, ...]) -> str:
    """ "4.0.0b36"."""
    return f"{'.'.join(map(str, numbers[:3]))}b{numbers[3]}"


def describe_fa4(request: Request) -> Fa4Call:
    """The call for a graph within the limits."""
    options, listed = request.options, request.options.variant == LISTED
    limits = options.deterministic, options.max_workspace
    shares = not options.batch_invariant
    return request.facts.once(make_fa4_call, request.target, *limits, listed, shares)


def make_fa4_call(
    facts: Facts, target: Target, deterministic: bool, most: int | None, listed: bool, shares: bool
) -> Fa4Call:
    """most: bytes of workspace; None: no limit. listed: True to have each call list tiles, even if
    that can't save time. shares: True if the batch may decide how many programs share keys."""
    from attn_graph.lowering.fa4.call import Fa4Call
    from attn_graph.lowering.fa4.lists import MadeLists, may_repay
    from attn_graph.lowering.lying import Lying

    lying = facts.once(Lying.for_libraries)
    assert lying is not None  # why_not said so

    def admits(lists: MadeLists) -> bool:
        fits = most is None or lists.scratch.bytes <= most
        runs = "triton" in dict(target.libraries)
        return runs and fits and (listed or may_repay(lists, lying.stepped, target))

    processors = target.multiprocessors if shares else None
    return Fa4Call.of(lying, target.sm, deterministic, admits, processors)


def lower(request: Request) -> Executable:
    """The package's call for a graph. Raises RefusedError if kernels spill much."""
    run, target = describe_run(request), request.target
    backward = run.call.problem.grad is not None
    if target.tensors_on == target.kind:  # virtual GPUs execute PTX, before anything is spilled
        run = fit_registers(run, request)

    def kernels() -> list[CompiledKernel | MachineCode]:
        return [*compile_lists(run.call, target), *compile_for_target(run, request)]

    infer = run.backward if backward else run.inference
    return Executable(
        run.backward if backward else run.forward,
        run.leased,
        run.temporary,
        tuple(run.notes()),
        inspect=lambda: tuple(map(str, kernels())),
        text=lambda: "\n".join([*run.call.texts, *(x.ptx for x in kernels())]),
        infer=infer,
        write=partial(write_named, infer, request.graph.result_names),
        prepare=kernels,
    )


def foresee_call(request: Request) -> Foreseen:
    """The needs of a call, without compiling."""
    run = describe_run(request)
    return Foreseen(run.leased, run.temporary, tuple(run.notes()))


def describe_run(request: Request) -> Fa4Run:
    from attn_graph.lowering.fa4.run import Fa4Run

    call = describe_fa4(request)
    return Fa4Run(call, request.graph, request.options.store, request.options.workspace)


def fit_registers(run: Fa4Run, request: Request) -> Fa4Run:
    """The run, with narrow tiles if its kernels spill much. Raises RefusedError if those do too."""
    against = [*stack_reasons(run, request)]
    if not against:
        return run
    narrow = evolve(run, call=evolve(run.call, narrow=True)) if run.call.may_be_narrow else None
    if narrow is None or [*stack_reasons(narrow, request)]:
        raise RefusedError(*against)
    return narrow


def stack_reasons(run: Fa4Run, request: Request) -> Iterator[Reason]:
    """Reasons against kernels slowed down by spilled registers. It compiles them."""
    for kernel in compile_for_target(run, request):
        if kernel.spilled > MOST_SPILLED:
            limit = f"runs kernels that spill at most {MOST_SPILLED:,} bytes of a thread"
            yield Reason("spilled", limit, f"its {kernel.kernel} kernel spills {kernel.spilled:,}")


def compile_for_target(run: Fa4Run, request: Request) -> list[CompiledKernel]:
    """The kernels, compiled for the target; of a forward the ones with lse, if it is read."""
    from attn_graph.lowering.fa4.offline import compile_call

    call, store = run.call, request.options.store
    plain = call.plain(call.problem.grad is not None or returns_lse(run.graph))
    return compile_call(plain, call.kernels, request.target, store)


def compile_lists(call: Fa4Call, target: Target) -> list[MachineCode]:
    """The kernels of lists made by each call, compiled for the target; none without such lists."""
    from attn_graph.lowering.codegen.machine_code import inspect_launches
    from attn_graph.lowering.fa4.lists import MadeLists

    if not isinstance(call.lists, MadeLists):
        return []
    made = call.lists.made
    dtypes = {name: x.dtype for name, x in made.buffers.items()}
    dtypes |= {name: x.dtype for name, x in call.problem.by_role.mask.items()}
    return inspect_launches(made.launches, dtypes, target.sm)


def small_test(request: Request) -> DeviceTest | None:
    """The attention or gradient in small sizes, off the tiles."""
    call = describe_fa4(request)
    problem = call.problem
    small = tuple(shrink(request.graph, problem, M, N) for M, N in SIZES)
    from attn_graph.lowering.fa4.lists import MadeLists

    way = LISTED if isinstance(call.lists, MadeLists) else None
    return DeviceTest(HOME, call.variant, small, way=way)


BACKEND = Backend(
    "fa4", why_not, lower, foresee_call, device_test=small_test, lays=places_of_rows, price=price,
    no_device=no_gpu,
)  # fmt: skip
