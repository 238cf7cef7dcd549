"""compile: validate, choose, lower, and remember."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, final, overload

from attrs import evolve, frozen

from attn_graph.errors import GraphError, NoBackendError, read_renamed
from attn_graph.ir.binding import bind_graph, complete_sizes, largest, replace_sizes
from attn_graph.ir.graph import Graph, check_graph
from attn_graph.ir.passes import simplify
from attn_graph.ir.vjp import (
    backward,
    check_gradient,
    cotangent_specs,
    result_spec,
    wanted_inputs,
)
from attn_graph.lowering.backend import Backend, Executable, Fallback, Options
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.cache import CacheInfo
from attn_graph.machine.imports import load_modules
from attn_graph.machine.store import Store
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import Precision, as_switches, raw_switches, read_switches
from attn_graph.plan import Plan
from attn_graph.plan.cache import PlanCache
from attn_graph.planner.arguments import (
    DEFAULTS,
    Backends,
    CompileOptions,
    Switch,
    as_tuple,
    backend_names,
    complete,
    constraints,
    one_of,
    require_absent,
    resolve_store,
    resolve_target,
    resolve_workspace,
    shows,
    unknown_option,
)
from attn_graph.planner.choose import choose, choose_and_lower, resolve_backends
from attn_graph.planner.recorded import RUNS_KEPT, recorded_graph
from attn_graph.planner.sized import Sized, lower_graph, many_sizes
from attn_graph.planner.tuning import choose_fastest
from attn_graph.planner.views import core_of
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from attn_graph.planner.choose import Refusals
    from attn_graph.planner.explanation import Explanation, Refusal

PlanT = TypeVar("PlanT")
ExplanationT = TypeVar("ExplanationT")

cache = PlanCache()
preferred: ContextVar[Backends | None] = ContextVar("preferred", default=None)
avoided: ContextVar[tuple[str, ...]] = ContextVar("avoided", default=())
EXPLAINED = {  # the options of `explain`
    name: value
    for name, value in DEFAULTS.items()
    if name not in ("on_fallback", "workspace", "tune")
}


@final
@frozen
class Recipe:
    """The target, options and permitted backends for planning graphs."""

    target: Target
    options: Options
    among: Backends | None

    def plan(self, graph: Graph) -> Plan:
        """The plan of a graph. Raises NoBackendError, which searches for fixes when it is read."""
        try:
            return plan_simplified(simplify(graph), self.target, self.options, self.among)
        except NoBackendError as error:
            error.search = partial(self.explain, graph, error.refusals)
            raise

    def explain(self, graph: Graph, refusals: Refusals) -> tuple[Refusal, ...]:
        """The refusals of a graph's forward, with their fixes."""
        search = load_modules("attn_graph.planner.explain").explain_refusals
        told: tuple[Refusal, ...] = search(graph, self.target, self.options, self.among, refusals)
        return told


class Compilable(ABC, Generic[PlanT, ExplanationT]):
    """A value made of several graphs, accepted by `compile` and `explain`."""

    __slots__ = ()

    @abstractmethod
    def compile(self, recipe: Recipe, group: ProcessGroup | None) -> PlanT:
        """The result of `attn_graph.compile`. recipe: plans each of its graphs."""

    @abstractmethod
    def explain(self, target: Target, link: str | float | None) -> ExplanationT:
        """The result of `attn_graph.explain`."""


@overload
def compile(graph: Graph, **options: Unpack[CompileOptions]) -> Plan:
    """The plan of a graph."""


@overload
def compile(
    graph: Compilable[PlanT, Any],  # Any: `compile` explains nothing
    *,
    group: ProcessGroup | None = None,
    **options: Unpack[CompileOptions],
) -> PlanT:
    """The plan of a divided graph for this process, as one rank."""


@shows(DEFAULTS)
def compile(
    graph: Graph | Compilable[PlanT, Any],  # Any: as above
    *,
    group: ProcessGroup | None = None,
    **options: Unpack[CompileOptions],
) -> Plan | PlanT:
    """The plan that runs `graph` on `target`, by default on this machine.

    graph: an attention graph, or one divided by `shard`: then this process's plan, as one rank.

    target: a device and its libraries, or its name; by default the current GPU, or else the CPU.
    `Target.here("cuda:1")` is another GPU of this machine; equal ones share their plans.
    backends: names or records, in order of preference, instead of the library's own order; `prefer`
    and `avoid` around the call do not count then.
    avoid: names or records of backends that must not run.
    deterministic: bitwise the same results on the same machine, every run, both passes. It is also
    on while torch.use_deterministic_algorithms is.
    batch_invariant: a batch entry has bitwise the same results alone, among others, and in a longer
    cache (kv_lengths), both passes. Backends refuse if they split sums by the size of the batch.
    precision: of products of float32 tensors. "ieee": float32, and backends without it refuse.
    "tf32": inputs may be rounded to TF32 on GPUs, on CPUs by PyTorch's switch. None: the switch
    torch.backends.cuda.matmul.fp32_precision, on CPUs torch.backends.mkldnn's.
    on_fallback: if only `math` is left because every other backend refused, in either pass:
    "ignore" it; "warn", once a plan, with every reason; or "raise" NoBackendError.
    max_workspace: the most bytes of workspace for each pass, as a number or text, "1GiB" say.
    workspace: the memory to run in, by default the one shared by all plans.
    store: True keeps slow builds on disk and reuses them, False does not; or a folder or a Store.
    tune: choose by measuring, on this machine, all backends that support the graph and their
    variants, for each pass at its first use. Figures are stored, and measured once; a terminal
    shows progress, and an interrupt keeps the figures so far.
    group: the process group of a divided graph's ranks, by default of all processes.

    Equal graphs give the same plan. Planning reads nothing but these arguments, the target, the
    store, and PyTorch's switches, once. The switches are part of the cache's key;
    docs/torch-controls.md lists them. Allocations of PyTorch's own kernels are outside the
    workspace; `Plan.memory` reports them. Raises NoBackendError, with every backend's reasons, if
    all refuse the graph; GraphError for an invalid option.
    """
    given, raw = steer(compile, options), raw_switches()
    if given["target"] is None:
        given["target"] = Target.here()
    request = graph, *given.values(), raw, group
    plan = cache.lookup(request) if isinstance(graph, Graph) else None
    if plan is None:
        if not isinstance(graph, Compilable):
            check_graph(graph, "compile")
            require_absent("group", group, "graphs that shard divided")
        target = resolve_target(given["target"])
        settings = Options(
            workspace=resolve_workspace(given["workspace"]),
            store=resolve_store(given["store"]),
            on_fallback=one_of("on_fallback", given["on_fallback"], Fallback),
            tune=one_of("tune", given["tune"], Switch),
            **constraints(target, as_switches(raw), given),
        )
        among = given["backends"]
        if among is not None:
            resolve_backends(among)
        recipe = Recipe(target, settings, among)
        if isinstance(graph, Compilable):
            return graph.compile(recipe, group)
        plan = recipe.plan(graph)
        cache.calls.put(request, plan)
    return plan


def steer(
    function: Callable[..., object], options: Mapping[str, object]
) -> dict[str, Any]:  # Any: as CompileOptions has them
    """All options of a call, with `prefer` and `avoid` around it. Raises GraphError."""
    given = complete(function, DEFAULTS, options)
    among, shunned = given["backends"], given["avoid"]
    given["backends"] = preferred.get() if among is None else as_tuple("backends", among)
    given["avoid"] = avoided.get() if among is None else ()
    if shunned != ():
        given["avoid"] = (*given["avoid"], *as_tuple("avoid", shunned))
    return given


@overload
def explain(
    graph: Graph,
    *,
    target: Target | str | None = None,
    backends: Sequence[str | Backend] | None = None,
    avoid: Sequence[str | Backend] = (),
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Precision | None = None,
    max_workspace: int | str | None = None,
    store: Store | str | os.PathLike[str] | bool = True,
    gradients: Sequence[str] | None = None,
    **sizes: int,
) -> Explanation:
    """The explanation of a graph."""


@overload
def explain(
    graph: Compilable[Any, ExplanationT],  # Any: `explain` compiles nothing
    *,
    target: Target | str | None = None,
    link: str | float | None = None,
) -> ExplanationT:
    """The work of a divided graph's ranks."""


@shows(EXPLAINED)
def explain(
    graph: Graph | Compilable[Any, ExplanationT],  # Any: as above
    *,
    gradients: Sequence[str] | None = None,
    link: str | float | None = None,
    **sizes: Any,  # Any: options too
) -> Explanation | ExplanationT:
    """The backend that would run `graph`, and its gradient, on `target`; the reasons; and the cost.

    Arguments as in `compile`. gradients: the inputs to differentiate by, by default all of a
    floating dtype; `()` leaves the backward out, as for inference. sizes: the values of the graph's
    Dims, by name, by default the largest.

    For a graph divided by `shard`: each rank's computation and traffic, its balance and time, and a
    comparison with other methods, as an `Outlook`. It needs no process, and takes target and link
    alone. link: the ranks' connection: "nvlink", "pcie4", "pcie5", "infiniband", or bytes a second
    each way; None leaves times out.

    Builds and compiles nothing, and takes some milliseconds. Raises nothing if all backends refuse:
    the explanation's backend is None then. For each refusal it names, by reason, the changes of the
    graph that lift it, and the smallest change for the backend to support the graph: a graph to
    compile. Raises GraphError for an invalid option.
    """
    options = {name: sizes.pop(name) for name in EXPLAINED if name in sizes}
    if isinstance(graph, Compilable):
        for name, value in {**options, "gradients": gradients, **sizes}.items():
            if name != "target" and value != DEFAULTS.get(name):
                require_absent(name, value, "graphs of one device")
        return graph.explain(resolve_target(options.get("target")), link)
    check_graph(graph, "explain")
    if not any(symbol.name == "wants" for symbol in graph.symbols):
        gradients = read_renamed(sizes, "wants", "gradients", gradients)
    if sizes and not graph.symbols:
        raise unknown_option(explain, sizes)
    require_absent("link", link, "graphs that shard divided")
    request = steer(explain, options)
    place, among = resolve_target(request["target"]), request["backends"]
    limits = constraints(place, read_switches(), request)
    settings = Options(store=resolve_store(request["store"]), resized=many_sizes(graph), **limits)
    exact = replace_sizes(graph, complete_sizes(graph, "explain", sizes))
    with neutral_state(), place.current():
        chosen = None if among is None else resolve_backends(among)
        planner = load_modules("attn_graph.planner.explain")
        explanation: Explanation = planner.explain_graph(
            exact, place, settings, chosen, gradients, named=bool(graph.symbols)
        )
    return explanation


def plan_simplified(graph: Graph, target: Target, options: Options, among: Backends | None) -> Plan:
    """The plan of a simplified graph, built unless it is known."""
    return cache.plans.get_or_build(
        (graph, target, options, among), lambda: build(graph, target, options, among)
    )


def build(graph: Graph, target: Target, options: Options, among: Backends | None) -> Plan:
    """Choose a backend and make a plan of a simplified graph. Raises NoBackendError."""
    chosen = None if among is None else resolve_backends(among)
    cache.builds.add(graph)
    sized = None
    if graph.symbols:
        if options.tune:
            names = ", ".join(f"{symbol.name}=..." for symbol in graph.symbols)
            raise GraphError(
                "tune=True measures one size, and sizes of the graph have names; "
                f"say compile(compile(graph).at({names}).graph, tune=True)"
            )
        sized = Sized.of(graph, target, options, chosen)
        choice, executable = sized.most.choice, sized.executable
    else:
        by = choose_fastest if options.tune else choose_and_lower
        choice, executable = lower_graph(graph, target, options, chosen, by)

    def gradient(
        wants: Sequence[int] | None = None,
        cotangents: Sequence[TensorSpec | None] | None = None,
        saved: Sequence[TensorSpec] | None = None,
    ) -> Plan:
        check_gradient(graph)
        given = wanted_inputs(graph, None) if wants is None else wants
        dense = [result_spec(graph, i) for i in graph.outputs]
        every = cotangent_specs(graph, graph.differentiable_outputs)
        specs = every if cotangents is None else cotangents
        same = [None if x is None else own for x, own in zip(specs, dense, strict=True)]
        as_found, as_declared = (backward(graph, given, each, saved) for each in (specs, same))
        if as_found != as_declared and loses(as_found, as_declared, target, options, chosen):
            return plan_simplified(as_declared, target, options, among)
        return plan_simplified(as_found, target, options, among)

    def keeping() -> Plan | None:
        kept = recorded_graph(graph, target, options, chosen, choice.backend.name)
        return kept and plan_simplified(kept, target, options, RUNS_KEPT)

    return Plan(
        graph,
        target,
        choice.backend.name,
        choice.cause,
        choice.refusals,
        choice.also,
        with_notes(executable, (*options.notes(graph, target), *alone(graph))),
        gradient,
        (plan_simplified, (graph, target, options, among)),
        options.precision,
        sized,
        keeping,
    )


def with_notes(executable: Executable, notes: tuple[str, ...]) -> Executable:
    """An executable with further notes."""
    return evolve(executable, notes=(*executable.notes, *notes)) if notes else executable


def alone(graph: Graph) -> Iterator[str]:
    """Notes for a forward without a gradient."""
    if not graph.is_gradient:
        yield from (f"runs forward alone: {text}" for text in graph.gradient_problems)


def loses(
    odd: Graph, plain: Graph, target: Target, options: Options, among: Sequence[Backend] | None
) -> bool:
    """True if a layout of cotangents costs the backend that else runs the gradient."""
    best = best_backend(plain, target, options, among)
    return best is not None and best is not best_backend(odd, target, options, among)


def best_backend(
    graph: Graph, target: Target, options: Options, among: Sequence[Backend] | None
) -> Backend | None:
    """The planner's choice; None if all backends refuse."""
    try:
        with neutral_state():
            quiet = evolve(options, on_fallback="ignore")
            exact = bind_graph(graph, largest(graph)) if graph.symbols else graph
            return choose(core_of(exact), target, quiet, among).backend
    except NoBackendError:
        return None


@contextmanager
def prefer(*backends: str | Backend) -> Iterator[None]:
    """Within this block, in this context alone, `compile` uses these backends, in this order.
    Raises GraphError for an unknown name."""
    resolve_backends(backends)
    token = preferred.set(backends)
    try:
        yield
    finally:
        preferred.reset(token)


@contextmanager
def avoid(*backends: str | Backend) -> Iterator[None]:
    """Within this block, in this context alone, `compile` lets none of these backends run.

    Nested blocks add up. Raises GraphError for an unknown name.
    """
    token = avoided.set((*avoided.get(), *backend_names(backends)))
    try:
        yield
    finally:
        avoided.reset(token)


def cache_info() -> CacheInfo:
    """Counts of the plan cache since it was cleared."""
    return cache.info()


def clear_cache() -> None:
    """Forget every plan and every count. Plans in use go on working."""
    cache.clear()
