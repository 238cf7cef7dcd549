"""Compares plans with the formula, forward and backward: one, or those of drawn graphs, also on a
virtual GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from attn_graph.compiler import compile
from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.transforms.parse import parse
from attn_graph.lowering.backend import Backend
from attn_graph.machine.target import Target
from attn_graph.plan import Plan
from attn_graph.rings import find
from attn_graph.spec import TensorSpec
from attn_graph.testing.formula import poison_blind_rows
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import cotangents_for, tensors_for

Tensors = Sequence[torch.Tensor]
FEWER = 5  # times fewer graphs on a virtual GPU: each takes seconds, mostly Triton's


def search(
    check: Callable[..., None], fewer: int = 1, **strategies: SearchStrategy[object]
) -> None:
    """Call `check` with drawn arguments; raise its error for the smallest failing example.

    The hypothesis profile sets the number of examples and the seed. fewer: draw this many times
    fewer examples and, above 1, do not shrink.
    """
    slow = settings(
        max_examples=-(-settings().max_examples // fewer),
        deadline=None,
        phases=set(Phase) - {Phase.explain, *([Phase.shrink] if fewer > 1 else [])},  # take long
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    slow(given(**strategies)(check))()


def run_plan(plan: Plan, tensors: Tensors, **named: torch.Tensor) -> tuple[torch.Tensor, ...]:
    outputs = plan(*tensors, **named)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def as_leaves(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """These tensors, strides included, as leaves; floating ones require grad."""
    return tuple(t.detach().requires_grad_(t.is_floating_point()) for t in tensors)


def run_gradients(
    plan: Plan, tensors: Tensors, cotangents: Sequence[torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """The gradient of each floating input by autograd, by name; a None cotangent is left out."""
    constants = plan.graph.constants
    leaves = tuple(
        t.detach() if n in constants else leaf
        for n, (t, leaf) in enumerate(zip(tensors, as_leaves(tensors), strict=True))
    )
    outputs = run_plan(plan, leaves)
    pairs = [(o, d) for o, d in zip(outputs, cotangents, strict=True) if d is not None]
    wanted = {i.name: t for i, t in zip(plan.graph.inputs, leaves, strict=True) if t.requires_grad}
    grads = torch.autograd.grad(
        [o for o, _ in pairs], [*wanted.values()], [d for _, d in pairs], allow_unused=True
    )
    return {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}


def check_outputs(plan: Plan, graph: Graph, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """The outputs of a call, compared with the formula.

    Raises AssertionError if they differ, if they are not dense or not new memory, or if the call
    changes an input.
    """
    before, who = [t.clone() for t in tensors], f"{plan.backend}: "
    dues = expect_outputs(graph, tensors)
    outputs = run_plan(plan, tensors)
    for i, t, old in zip(graph.inputs, tensors, before, strict=True):
        same = torch.equal(*(x.view(torch.int8) if x.itemsize == 1 else x for x in (t, old)))
        assert same, f"{who}a call changed its input {i.name}\n{t}\nwas\n{old}"
    for output, due, n in zip(outputs, dues, plan.graph.outputs, strict=True):
        due.check(output, who)
        spec, like = result_spec(plan.graph, n), TensorSpec.like(output)
        assert like == spec, f"{who}{due.name} is laid out as {like}, and should be {spec}"
    storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
    for output in outputs:
        shared = output.numel() and output.untyped_storage().data_ptr() in storages
        assert not shared, f"{who}an output lies in the memory of an input"
    return outputs


def check_gradients(
    plan: Plan, graph: Graph, tensors: Tensors, seed: int, *, skip: int | None = None
) -> dict[str, torch.Tensor]:
    """The gradients of a plan, compared with the formula. Raises AssertionError.

    In rows that see nothing, cotangents are NaN or infinite, and must count as 0. skip: of two
    differentiable outputs, the one without a cotangent.
    """
    drawn = cotangents_for(plan.graph, seed, str(tensors[0].device))
    cotangents, poisoned = [*drawn], [*poison_blind_rows(graph, tensors, drawn, seed)]
    if skip is not None and len(plan.graph.differentiable_outputs) == 2:
        n = plan.graph.outputs.index(plan.graph.differentiable_outputs[skip])
        cotangents[n] = poisoned[n] = None
    grads = run_gradients(plan, tensors, poisoned)
    for name, due in expect_gradients(graph, tensors, cotangents).items():
        assert name in grads, f"{plan.backend}: no d{name}; the formula gives\n{due.ref}"
        due.check(grads[name], f"{plan.backend}: ")
        assert grads[name].isfinite().all() or not due.ref.isfinite().all(), (
            f"{plan.backend}: d{name} is not finite\n{grads[name]}\nis not\n{due.ref}"
        )
    return grads


def check_graphs(
    graphs: SearchStrategy[Graph],
    known: type,
    backend: str | Backend,
    target: Target | str,
    gpu: Target | str | None,
    trained: bool = True,
) -> None:
    """Raise AssertionError unless drawn graphs survive printing and parsing and run correctly.

    A backend computes them, and with `gpu` Triton's compiled kernels too. known: a class named in
    the text. trained: check the backward too.
    """

    def check_plan(graph: Graph, seed: int, backend: str | Backend, target: Target | str) -> None:
        plan, tensors = compile(graph, target=target, backends=(backend,)), tensors_for(graph, seed)
        check_outputs(plan, graph, tensors)
        if trained:
            check_gradients(plan, graph, tensors, seed)

    def check_here(graph: Graph, seed: int) -> None:
        again = parse(str(graph), known=[known])
        assert again == graph, f"the text of a graph is read as another:\n{again}\nis not\n{graph}"
        check_plan(graph, seed, backend, target)

    def check_there(graph: Graph, seed: int) -> None:
        assert gpu is not None
        with find("virtual_gpu")(gpu) as device:
            check_plan(graph, seed, "triton", device.target)

    search(check_here, graph=graphs, seed=seeds)
    if gpu is not None:
        some = graphs.filter(lambda graph: all(0 not in x.spec.shape for x in graph.inputs))
        search(check_there, FEWER, graph=some, seed=seeds)
