"""compile: validate, choose, lower, and remember."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from attn_graph.backend import Backend, Options
from attn_graph.cache import Cache, CacheInfo
from attn_graph.errors import GraphError
from attn_graph.fused import AttentionGrad
from attn_graph.ir import Graph
from attn_graph.memory import in_bytes
from attn_graph.passes import simplify
from attn_graph.plan import Plan
from attn_graph.planner import lowered, named
from attn_graph.spec import TensorSpec
from attn_graph.store import Store, default_store
from attn_graph.target import Target
from attn_graph.torch_ops import differentiable
from attn_graph.vjp import backward, result_spec, wanted_inputs
from attn_graph.workspace import Workspace, default_workspace

CAPACITY = 1024  # plans; one is a few kilobytes

Backends = tuple[str | Backend, ...]

calls: Cache[Plan] = Cache(4 * CAPACITY)  # what `compile` was asked, word for word
plans: Cache[Plan] = Cache(CAPACITY)  # by simplified graph
preferred: ContextVar[Backends | None] = ContextVar("preferred", default=None)


def compile(
    graph: Graph,
    *,
    target: Target | str | None = None,
    backends: Sequence[str | Backend] | None = None,
    deterministic: bool = False,
    max_workspace: int | str | None = None,
    workspace: Workspace | None = None,
    store: Store | bool = True,
) -> Plan:
    """The plan that runs `graph` on `target`, by default on this machine.

    backends: names or records, in order of preference, instead of the library's own order.
    deterministic: bitwise the same results on the same machine, every run, both passes.
    max_workspace: bytes, or text such as "1GiB", that neither pass may exceed in the workspace.
    workspace: the memory to run in, by default the one that all plans share.
    store: whether what takes long to build is kept on disk, and taken from there; or where.

    Equal graphs give the same plan. Planning reads nothing but these arguments and the target.
    Raises NoBackendError, with every backend's reasons, where none takes the graph.
    """
    among = preferred.get() if backends is None else tuple(backends)
    asked = (graph, target, among, deterministic, max_workspace, workspace, store)
    plan = calls.get(asked)
    if plan is None:
        if not isinstance(graph, Graph):
            raise GraphError(
                f"compile: expected a Graph, got {type(graph).__name__}; see attention and graph"
            )
        place = (
            Target.here()
            if target is None
            else Target.of(target)
            if isinstance(target, str)
            else target
        )
        most = None if max_workspace is None else in_bytes(max_workspace)
        kept = default_store() if store is True else store or None
        options = Options(deterministic, most, workspace or default_workspace(), kept)
        plan = planned(simplify(graph), place, options, among)
        calls.put(asked, plan)
    return plan


def planned(graph: Graph, target: Target, options: Options, among: Backends | None) -> Plan:
    """The plan of a simplified graph, built unless it is known."""
    return plans.built(
        (graph, target, options, among), lambda: build(graph, target, options, among)
    )


def build(graph: Graph, target: Target, options: Options, among: Backends | None) -> Plan:
    choice, executable = lowered(graph, target, options, None if among is None else named(among))

    def gradient(
        wants: Sequence[int] | None = None, cotangents: Sequence[TensorSpec | None] | None = None
    ) -> Plan:
        if any(isinstance(eqn.op, AttentionGrad) for eqn in graph.eqns):
            raise GraphError("a gradient has no gradient: double backward is not built")
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
        executable,
        differentiable,
        gradient,
        target.kind == "cpu" or target == Target.here(),
    )


@contextmanager
def prefer(*backends: str | Backend) -> Iterator[None]:
    """Within this block, in this context alone, `compile` uses these backends, in this order."""
    named(backends)
    token = preferred.set(backends)
    try:
        yield
    finally:
        preferred.reset(token)


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
