"""compile: validate, choose, lower, and remember."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from attn_graph.errors import binds, show
from attn_graph.ir.graph import Graph, check_graph
from attn_graph.ir.transforms.binding import complete_sizes, many_sizes, replace_sizes
from attn_graph.lowering.backend import Backend
from attn_graph.lowering.request import Fallback, Options, Request
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.cache import CacheInfo
from attn_graph.machine.store import Store
from attn_graph.machine.target import Target, default_target
from attn_graph.machine.torch_switches import Precision, as_switches, raw_switches, read_switches
from attn_graph.plan import Plan
from attn_graph.plan.cache import cache
from attn_graph.planner import arguments
from attn_graph.rings import find

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from attn_graph.instruments.explanation import Explanation

PlanT = TypeVar("PlanT")
ExplanationT = TypeVar("ExplanationT")
preferred: ContextVar[arguments.Backends | None] = ContextVar("preferred", default=None)
avoided: ContextVar[tuple[str, ...]] = ContextVar("avoided", default=())
EXPLAINED = {  # the options of `explain`
    name: value
    for name, value in arguments.DEFAULTS.items()
    if name not in ("on_fallback", "workspace", "tune")
}


class Compilable(ABC, Generic[PlanT, ExplanationT]):
    """A value made of several graphs, accepted by `compile` and `explain`."""

    __slots__ = ()
    graph: Graph  # that it divides

    @abstractmethod
    def compile(self, request: Request, group: ProcessGroup | None) -> PlanT:
        """The result of `attn_graph.compile`. request: for `graph`; its parts are planned alike."""

    @abstractmethod
    def explain(self, target: Target, link: str | float | None) -> ExplanationT:
        """The result of `attn_graph.explain`."""


@overload
def compile(graph: Graph, **options: Unpack[arguments.CompileOptions]) -> Plan:
    """The plan of a graph."""


@overload
def compile(
    graph: Compilable[PlanT, Any],  # Any: `compile` explains nothing
    *,
    group: ProcessGroup | None = None,
    **options: Unpack[arguments.CompileOptions],
) -> PlanT:
    """The plan of a divided graph for this process, as one rank."""


@binds(lambda *given, **_: graph_code("compile", *given))
@arguments.shows(arguments.DEFAULTS)
def compile(
    graph: Graph | Compilable[PlanT, Any],  # Any: as above
    *,
    group: ProcessGroup | None = None,
    **options: Unpack[arguments.CompileOptions],
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
    torch.backends.cuda.matmul.fp32_precision, on CPUs torch.backends.mkldnn's. "fp8": as "ieee",
    and beside q, k and v in float8 backends may round weights to 8 bits.
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
        given["target"] = default_target()
    key = graph, *given.values(), raw, group
    plan = cache.lookup(key) if isinstance(graph, Graph) else None
    if plan is None:
        if not isinstance(graph, Compilable):
            check_graph(graph, "compile")
            arguments.require_absent("group", group, "graphs that shard divided")
        target = arguments.resolve_target(given["target"])
        settings = Options(
            workspace=arguments.resolve_workspace(given["workspace"]),
            store=arguments.resolve_store(given["store"]),
            on_fallback=arguments.one_of("on_fallback", given["on_fallback"], Fallback),
            tune=arguments.one_of("tune", given["tune"], arguments.Switch),
            **arguments.constraints(target, as_switches(raw), given),
        )
        among = given["backends"]
        if among is not None:
            find("resolve_backends")(among)
        if isinstance(graph, Compilable):
            return graph.compile(Request(graph.graph, target, settings, among), group)
        built: Plan = find("plan_graph")(Request(graph, target, settings, among))
        cache.calls.put(key, built)
        return built
    return plan


def graph_code(function: str, graph: object = None, second: object = None, *_: object) -> str:
    """What to write in place of a call with more than a graph, or with tensors or specs for one."""
    if isinstance(graph, Graph) and isinstance(second, str | Target):
        return f"write {function}(graph, target={show(second)})"
    if isinstance(graph, Graph):
        return f"write {function}(graph); a mask is in its graph, attention(q, k, v, mask=...)"
    return (
        f"write {function}(attention(q, k, v)), of specs, or "
        "attn_graph.nn.functional.attention(q, k, v), of tensors"
    )


def steer(
    function: Callable[..., object], options: Mapping[str, object]
) -> dict[str, Any]:  # Any: as CompileOptions has them
    """All options of a call, with `prefer` and `avoid` around it. Raises GraphError."""
    given = arguments.complete(function, arguments.DEFAULTS, options)
    among, shunned = given["backends"], given["avoid"]
    given["backends"] = preferred.get() if among is None else arguments.as_tuple("backends", among)
    given["avoid"] = avoided.get() if among is None else ()
    if shunned != ():
        given["avoid"] = (*given["avoid"], *arguments.as_tuple("avoid", shunned))
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


@binds(lambda *given, **_: graph_code("explain", *given))
@arguments.shows(EXPLAINED)
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
            if name != "target" and value != arguments.DEFAULTS.get(name):
                arguments.require_absent(name, value, "graphs of one device")
        return graph.explain(arguments.resolve_target(options.get("target")), link)
    check_graph(graph, "explain")
    if sizes and not graph.symbols:
        raise arguments.unknown_option(explain, sizes)
    arguments.require_absent("link", link, "graphs that shard divided")
    given = steer(explain, options)
    place, among = arguments.resolve_target(given["target"]), given["backends"]
    if among is not None:
        find("resolve_backends")(among)
    limits = arguments.constraints(place, read_switches(), given)
    settings = Options(
        store=arguments.resolve_store(given["store"]), resized=many_sizes(graph), **limits
    )
    exact = replace_sizes(graph, complete_sizes(graph, "explain", sizes))
    with neutral_state(), place.current():
        explanation: Explanation = find("explain_graph")(
            Request(exact, place, settings, among), gradients, named=bool(graph.symbols)
        )
    return explanation


@contextmanager
def prefer(*backends: str | Backend) -> Iterator[None]:
    """Within this block, in this context alone, `compile` uses these backends, in this order.
    Raises GraphError for an unknown name."""
    find("resolve_backends")(backends)
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
    token = avoided.set((*avoided.get(), *arguments.backend_names(backends)))
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
