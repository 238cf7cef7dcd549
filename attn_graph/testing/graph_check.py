"""Compares attention with a mask or a modifier with the formula, also on a virtual GPU."""

from __future__ import annotations

from hypothesis.strategies import SearchStrategy

from attn_graph.compiler import compile
from attn_graph.ir.graph import Graph
from attn_graph.ir.transforms.parse import parse
from attn_graph.lowering.backend import Backend
from attn_graph.machine.target import Target
from attn_graph.rings import find
from attn_graph.testing.agreement import check_gradients, check_outputs, search
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for

FEWER = 5  # times fewer graphs on a virtual GPU: each takes seconds, mostly Triton's


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
