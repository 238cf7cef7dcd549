"""compile: validate, choose, lower, and remember."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from attrs import evolve

from attn_graph.errors import GraphError, NoBackendError
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
from attn_graph.machine.cache import Cache, CacheInfo
from attn_graph.machine.likeness import look_at
from attn_graph.machine.sizes import parse_bytes
from attn_graph.machine.store import Store, default_store
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import Precision, Switches, read_switches
from attn_graph.machine.workspace import Workspace, default_workspace
from attn_graph.plan import Plan
from attn_graph.planner.builds import BuildLog
from attn_graph.planner.choose import Choice, choose, choose_and_lower, resolve_backends
from attn_graph.planner.views import core_of, peel
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from attn_graph.planner.explanation import Explanation

CAPACITY = 1024  # plans; one is a few kilobytes

Backends = tuple[str | Backend, ...]
Value = TypeVar("Value")
Switch = Literal[True, False]
Key = tuple[object, ...]  # all that a plan depends on beside tensors; with their looks, on all

calls: Cache[Plan] = Cache(CAPACITY)  # by the arguments of `compile`, as they are given
plans: Cache[Plan] = Cache(CAPACITY)  # by simplified graph, target, options and backends
looks: dict[Key, Plan] = {}  # of calls without a plan: who runs such tensors
recent: dict[Key, Plan] = {}  # of those: who ran last where all but the tensors was so
build_log = BuildLog()
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
    store: Store | str | os.PathLike[str] | bool = True,
    tune: bool = False,
) -> Plan:
    """The plan that runs `graph` on `target`, by default on this machine.

    target: a device and its libraries, or its name; by default the current GPU, or else the CPU.
    `Target.here("cuda:1")` is another GPU of this machine; equal ones share their plans.
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
    store: whether what takes long to build is kept on disk, and taken from there; or where, as a
    folder or a Store.
    tune: choose by measuring, on this machine, all backends that take the graph and the variants
    that they have, of each pass when it is first asked for. Figures are stored, and measured once;
    progress is shown in a terminal, and what is known at an interrupt is kept.

    Equal graphs give the same plan. Planning reads nothing but these arguments, the target, the
    store, and PyTorch's switches, once, which are part of the cache's key; docs/torch-controls.md
    lists them. What PyTorch's own kernels allocate is not in the workspace; `Plan.memory` tells it.
    Raises NoBackendError, with every backend's reasons, where none takes the graph; GraphError for
    an option that means nothing.
    """
    among = preferred.get() if backends is None else as_tuple("backends", backends)
    shunned = (avoided.get() if backends is None else ()) + as_tuple("avoid", avoid)
    switches, where = read_switches(), Target.here() if target is None else target
    request = (
        graph, where, among, shunned, deterministic, precision, on_fallback, max_workspace,
        workspace, store, tune, switches,
    )  # fmt: skip
    plan = find_known(request) if isinstance(graph, Graph) else None
    if plan is None:
        check_graph(graph, "compile")
        place = resolve_target(where)
        options = Options(
            workspace=resolve_workspace(workspace),
            store=resolve_store(store),
            on_fallback=one_of("on_fallback", on_fallback, Fallback),
            tune=one_of("tune", tune, Switch),
            **constraints(place, switches, shunned, deterministic, precision, max_workspace),
        )
        plan = plan_simplified(simplify(graph), place, options, among)
        calls.put(request, plan)
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
    store: Store | str | os.PathLike[str] | bool = True,
    wants: Sequence[str] | None = None,
) -> Explanation:
    """Who would run `graph`, and its gradient, on `target`; why; and what it would cost.

    Arguments as those of `compile`. wants: the inputs to differentiate by, by default all of a
    floating dtype; `()` where nothing is trained, which leaves the backward out.

    Builds and compiles nothing, and takes some milliseconds. Raises nothing where all backends
    refuse: the explanation's backend is None then. For each reason against it names the changes of
    the graph that lift it, and for each backend that refuses the least change after which it
    takes the graph, which is a graph to compile. Raises GraphError for an option that means
    nothing.
    """
    from attn_graph.planner.explain import explain_graph

    check_graph(graph, "explain")
    among = preferred.get() if backends is None else as_tuple("backends", backends)
    shunned = (avoided.get() if backends is None else ()) + as_tuple("avoid", avoid)
    place = resolve_target(target)
    options = Options(
        store=resolve_store(store),
        **constraints(place, read_switches(), shunned, deterministic, precision, max_workspace),
    )
    with neutral_state(), place.current():
        return explain_graph(
            graph, place, options, None if among is None else resolve_backends(among), wants
        )


def constraints(
    target: Target,
    switches: Switches,
    shunned: Backends,
    deterministic: bool,
    precision: Precision | None,
    max_workspace: int | str | None,
) -> dict[str, Any]:  # Any: fields of Options
    """What binds whoever runs a graph, PyTorch's switches among it."""
    return {
        "deterministic": one_of("deterministic", deterministic, Switch) or switches.deterministic,
        "max_workspace": None if max_workspace is None else parse_bytes(max_workspace),
        "precision": one_of(
            "precision",
            switches.precision(target.kind) if precision is None else precision,
            Precision,
        ),
        "avoid": backend_names(shunned),
        "switches": switches,
    }


def find_known(request: object) -> Plan | None:
    """The plan of a call that was made before; None for arguments that mean nothing, too."""
    try:
        return calls.get(request)
    except TypeError:  # what has no hash is no option, and is refused when it is read
        return None


def as_tuple(name: str, backends: Sequence[str | Backend]) -> Backends:
    """Several backends as a tuple. Raises GraphError for one alone, or for none."""
    if isinstance(backends, str | Backend) or not isinstance(backends, Iterable):
        raise GraphError(f"{name}={backends!r} is no sequence of backends; say ({backends!r},)")
    return tuple(backends)


def resolve_workspace(workspace: Workspace | None) -> Workspace:
    """The workspace that is meant. Raises GraphError for what is none."""
    if workspace is not None and not isinstance(workspace, Workspace):
        raise GraphError(f"workspace {workspace!r} is no Workspace; bytes are for max_workspace")
    return workspace or default_workspace()


def recall(key: Key, tensors: Sequence[torch.Tensor]) -> Plan | None:
    """The plan of an earlier call with this key and such tensors. It is the recent one from now."""
    try:
        plan = looks.get(with_looks(key, tensors))
    except TypeError:  # sizes that are symbols have no hash
        return None
    if plan is not None:
        recent[key] = plan
    return plan


def remember(key: Key, tensors: Sequence[torch.Tensor], plan: Plan) -> None:
    """Keep the plan of a call. Many share a plan, so all go at once."""
    if len(looks) >= CAPACITY:
        looks.clear()
        recent.clear()
    looks[with_looks(key, tensors)] = recent[key] = plan


def with_looks(key: Key, tensors: Sequence[torch.Tensor]) -> Key:
    """The key of a call, and what its tensors look like."""
    return (*key, *map(look_at, tensors), *map(type, tensors))


def plan_simplified(graph: Graph, target: Target, options: Options, among: Backends | None) -> Plan:
    """The plan of a simplified graph, built unless it is known."""
    return plans.get_or_build(
        (graph, target, options, among), lambda: build(graph, target, options, among)
    )


def resolve_target(target: Target | str | None) -> Target:
    """The target that is meant: by itself, by its name, or this machine's current device."""
    if target is None:
        return Target.here()
    if isinstance(target, str):
        return Target.of(target)
    if not isinstance(target, Target):
        raise GraphError(f"target {target!r} is no Target, nor the name of one")
    return target


def resolve_store(store: Store | str | os.PathLike[str] | bool) -> Store | None:
    """The store that is meant: the user's own, none, or one in a folder."""
    if isinstance(store, bool):
        return default_store() if store else None
    if isinstance(store, Store):
        return store
    if not isinstance(store, (str, os.PathLike)) or not os.fspath(store):
        raise GraphError(f"store {store!r} is no folder, no Store, and neither True nor False")
    return Store(Path(store))


def one_of(name: str, value: Value, values: object) -> Value:
    """The value, if it is one of a literal type's. Raises GraphError for any other."""
    known = get_args(values)
    if value not in known:
        raise GraphError(f"{name} {value!r} is not known; known are {', '.join(map(repr, known))}")
    return value


def build(graph: Graph, target: Target, options: Options, among: Backends | None) -> Plan:
    """Choose a backend and make a plan of a simplified graph. Raises NoBackendError."""
    chosen = None if among is None else resolve_backends(among)
    build_log.add(graph)
    peeled, core = peel(graph), core_of(graph)
    with neutral_state(), target.current():
        choice, executable = (choose_by_measuring if options.tune else choose_and_lower)(
            core, target, options, chosen
        )
    if peeled is not None:
        executable = peeled.wrap(executable)

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
    )


def with_notes(executable: Executable, notes: tuple[str, ...]) -> Executable:
    """An executable that says more of how it runs."""
    return evolve(executable, notes=(*executable.notes, *notes)) if notes else executable


def alone(graph: Graph) -> Iterator[str]:
    """Notes for a forward that has no gradient."""
    if not graph.is_gradient:
        yield from (f"runs forward alone: {text}" for text in graph.gradient_problems)


def loses(
    odd: Graph, plain: Graph, target: Target, options: Options, among: Sequence[Backend] | None
) -> bool:
    """Whether a layout of cotangents keeps away the backend that runs a gradient otherwise."""
    best = best_backend(plain, target, options, among)
    return best is not None and best is not best_backend(odd, target, options, among)


def best_backend(
    graph: Graph, target: Target, options: Options, among: Sequence[Backend] | None
) -> Backend | None:
    """The backend that would be chosen; None where all refuse."""
    try:
        with neutral_state():
            quiet = evolve(options, on_fallback="ignore")
            return choose(core_of(graph), target, quiet, among).backend
    except NoBackendError:
        return None


def choose_by_measuring(
    graph: Graph, target: Target, options: Options, among: Sequence[Backend] | None
) -> tuple[Choice, Executable]:
    """`choose_fastest`, which few ask for: importing the library does not import it."""
    from attn_graph.planner.tuning import choose_fastest

    return choose_fastest(graph, target, options, among)


@contextmanager
def prefer(*backends: str | Backend) -> Iterator[None]:
    """Within this block, in this context alone, `compile` uses these backends, in this order."""
    resolve_backends(backends)
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
    token = avoided.set((*avoided.get(), *backend_names(backends)))
    try:
        yield
    finally:
        avoided.reset(token)


def backend_names(backends: Sequence[str | Backend]) -> tuple[str, ...]:
    """The names of backends, each once and sorted. Raises GraphError for one that is not known."""
    return tuple(sorted({backend.name for backend in resolve_backends(backends)}))


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
    looks.clear()
    recent.clear()
    build_log.clear()
