"""compile: validate, choose, lower, and remember."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from attrs import evolve

from attn_graph.backend import Backend, Executable, Fallback, Options
from attn_graph.cache import Cache, CacheInfo
from attn_graph.errors import GraphError
from attn_graph.ir import Graph
from attn_graph.memory import in_bytes
from attn_graph.passes import simplify
from attn_graph.plan import Plan
from attn_graph.planner import Choice, lowered, named
from attn_graph.spec import TensorSpec
from attn_graph.store import Store, default_store
from attn_graph.switches import Precision, Switches, read
from attn_graph.target import Target
from attn_graph.torch_ops import differentiable
from attn_graph.vjp import backward, result_spec, wanted_inputs
from attn_graph.workspace import Workspace, default_workspace

if TYPE_CHECKING:
    from attn_graph.explanation import Explanation

CAPACITY = 1024  # plans; one is a few kilobytes

Backends = tuple[str | Backend, ...]
Value = TypeVar("Value")

calls: Cache[Plan] = Cache(4 * CAPACITY)  # what `compile` was asked, word for word
plans: Cache[Plan] = Cache(CAPACITY)  # by simplified graph
preferred: ContextVar[Backends | None] = ContextVar("preferred", default=None)
avoided: ContextVar[tuple[str, ...]] = ContextVar("avoided", default=())


def compile(
    graph: Graph,
    *,
    target: Target | str | None = None,
    backends: Sequence[str | Backend] | None = None,
    avoid: Sequence[str | Backend] = (),
    deterministic: bool = False,
    precision: Precision | None = None,
    on_fallback: Fallback = "ignore",
    max_workspace: int | str | None = None,
    workspace: Workspace | None = None,
    store: Store | bool = True,
    tune: bool = False,
) -> Plan:
    """The plan that runs `graph` on `target`, by default on this machine.

    backends: names or records, in order of preference, instead of the library's own order; then
    what `prefer` and `avoid` say around the call does not count.
    avoid: names or records that are not to run, whoever else would.
    deterministic: bitwise the same results on the same machine, every run, both passes. So it is
    also while torch.use_deterministic_algorithms is on.
    precision: of products of float32 tensors. "ieee": float32, and who can't refuses. "tf32":
    inputs may be rounded to TF32 on GPUs, on CPUs as PyTorch's switch says. None: as
    torch.backends.cuda.matmul.fp32_precision, of CPUs torch.backends.mkldnn, says.
    on_fallback: where `math` is to run because every other backend refused, in either pass:
    "ignore" it; "warn", once a plan, with every reason; or "raise" NoBackendError.
    max_workspace: bytes, or text such as "1GiB", that neither pass may exceed in the workspace.
    workspace: the memory to run in, by default the one that all plans share.
    store: whether what takes long to build is kept on disk, and taken from there; or where.
    tune: choose by measuring, on this machine, all backends that take the graph and the variants
    that they have, of each pass when it is first asked for. Figures are stored, and measured once;
    progress is shown in a terminal, and what is known at an interrupt is kept.

    Equal graphs give the same plan. Planning reads nothing but these arguments, the target, the
    store, and PyTorch's switches, once, which are part of the cache's key; docs/torch-controls.md
    lists them. What PyTorch's own kernels allocate is not in the workspace; `Plan.memory` tells it.
    Raises NoBackendError, with every backend's reasons, where none takes the graph; GraphError for
    an option that means nothing.
    """
    among = preferred.get() if backends is None else tuple(backends)
    shunned = (avoided.get() if backends is None else ()) + tuple(avoid)
    found = read()
    asked = (
        graph, target, among, shunned, deterministic, precision, on_fallback, max_workspace,
        workspace, store, tune, found,
    )  # fmt: skip
    plan = calls.get(asked) if isinstance(graph, Graph) else None
    if plan is None:
        check_graph(graph, "compile")
        place = place_of(target)
        options = Options(
            workspace=workspace or default_workspace(),
            store=default_store() if store is True else store or None,
            on_fallback=one_of("on_fallback", on_fallback, Fallback),
            tune=tune,
            **constraints(place, found, shunned, deterministic, precision, max_workspace),
        )
        plan = planned(simplify(graph), place, options, among)
        calls.put(asked, plan)
    return plan


def explain(
    graph: Graph,
    *,
    target: Target | str | None = None,
    backends: Sequence[str | Backend] | None = None,
    avoid: Sequence[str | Backend] = (),
    deterministic: bool = False,
    precision: Precision | None = None,
    max_workspace: int | str | None = None,
    store: Store | bool = True,
    wants: Sequence[str] | None = None,
) -> Explanation:
    """Who would run `graph`, and its gradient, on `target`; why; and what it would cost.

    Arguments as those of `compile`. wants: the inputs to differentiate by, by default all of a
    floating dtype; `()` where nothing is trained, which leaves the backward out.

    Builds and compiles nothing, and takes some milliseconds. Raises nothing where all backends
    refuse: the explanation's backend is None then. For each reason against it names the changes of
    the graph that lift it, and for each backend that refuses the least change found after which it
    takes the graph, which is a graph to compile. Raises GraphError for an option that means
    nothing.
    """
    from attn_graph.verdicts import explained

    check_graph(graph, "explain")
    among = preferred.get() if backends is None else tuple(backends)
    shunned = (avoided.get() if backends is None else ()) + tuple(avoid)
    place = place_of(target)
    options = Options(
        store=default_store() if store is True else store or None,
        **constraints(place, read(), shunned, deterministic, precision, max_workspace),
    )
    return explained(graph, place, options, None if among is None else named(among), wants)


def constraints(
    target: Target,
    found: tuple[bool, bool, bool, bool, bool, bool, str | None],
    shunned: Backends,
    deterministic: bool,
    precision: Precision | None,
    max_workspace: int | str | None,
) -> dict[str, Any]:  # Any: fields of Options
    """What is asked of whoever runs a graph, PyTorch's switches among it."""
    switches = Switches(*found)
    return {
        "deterministic": deterministic or switches.deterministic,
        "max_workspace": None if max_workspace is None else in_bytes(max_workspace),
        "precision": one_of(
            "precision",
            switches.precision(target.kind) if precision is None else precision,
            Precision,
        ),
        "avoid": names_of(shunned),
        "switches": switches,
    }


def planned(graph: Graph, target: Target, options: Options, among: Backends | None) -> Plan:
    """The plan of a simplified graph, built unless it is known."""
    return plans.built(
        (graph, target, options, among), lambda: build(graph, target, options, among)
    )


def check_graph(graph: object, name: str) -> None:
    if not isinstance(graph, Graph):
        raise GraphError(
            f"{name}: expected a Graph, got {type(graph).__name__}; see attention and graph"
        )


def place_of(target: Target | str | None) -> Target:
    """The target that is meant: by itself, by its name, or this machine."""
    if target is None:
        return Target.here()
    if isinstance(target, str):
        return Target.of(target)
    if not isinstance(target, Target):
        raise GraphError(f"target {target!r} is no Target, nor the name of one")
    return target


def one_of(name: str, value: Value, values: object) -> Value:
    """The value, if it is one of a literal type's. Raises GraphError for any other."""
    known = get_args(values)
    if value not in known:
        raise GraphError(f"{name} {value!r} is not known; known are {', '.join(map(repr, known))}")
    return value


def build(graph: Graph, target: Target, options: Options, among: Backends | None) -> Plan:
    asked = None if among is None else named(among)
    choice, executable = (measured if options.tune else lowered)(graph, target, options, asked)

    def gradient(
        wants: Sequence[int] | None = None, cotangents: Sequence[TensorSpec | None] | None = None
    ) -> Plan:
        given = wanted_inputs(graph, None) if wants is None else wants
        specs = [result_spec(graph, i) for i in graph.outputs] if cotangents is None else cotangents
        return planned(backward(graph, given, specs), target, options, among)

    return Plan(
        graph,
        target,
        choice.backend.name,
        choice.cause,
        choice.refusals,
        choice.also,
        evolve(executable, notes=(*executable.notes, *options.notes(graph, target))),
        differentiable,
        gradient,
        target.kind == "cpu" or target == Target.here(),
        options.precision,
    )


def measured(
    graph: Graph, target: Target, options: Options, among: Sequence[Backend] | None
) -> tuple[Choice, Executable]:
    """`tuned`, which few ask for: importing the library does not import it."""
    from attn_graph.tuning import tuned

    return tuned(graph, target, options, among)


@contextmanager
def prefer(*backends: str | Backend) -> Iterator[None]:
    """Within this block, in this context alone, `compile` uses these backends, in this order."""
    named(backends)
    token = preferred.set(backends)
    try:
        yield
    finally:
        preferred.reset(token)


@contextmanager
def avoid(*backends: str | Backend) -> Iterator[None]:
    """Within this block, in this context alone, `compile` lets none of these backends run.

    Blocks within blocks add up. Raises GraphError for a name that is not known.
    """
    token = avoided.set((*avoided.get(), *names_of(backends)))
    try:
        yield
    finally:
        avoided.reset(token)


def names_of(backends: Sequence[str | Backend]) -> tuple[str, ...]:
    """The names of backends, each once and sorted. Raises GraphError for one that is not known."""
    return tuple(sorted({backend.name for backend in named(backends)}))


def cache_info() -> CacheInfo:
    """What the plan cache has done since it was cleared."""
    with plans.lock:
        held = list(plans.entries.values())
    return CacheInfo(
        calls.hits,
        calls.misses,
        plans.builds,
        plans.evictions,
        plans.seconds,
        len(held),
        plans.capacity,
        max((plan.executable.workspace for plan in held), default=0),
    )


def clear_cache() -> None:
    """Forget every plan and every count. Plans that you hold go on working."""
    calls.clear()
    plans.clear()
