"""Backends that are named already, so that a request for one is answered with reasons."""

from __future__ import annotations

from collections.abc import Iterator

from attn_graph.backend import Backend, Executable, Options
from attn_graph.ir import Graph
from attn_graph.target import Target


def refusing(name: str, library: str, least_sm: int) -> Backend:
    """A backend for NVIDIA GPUs that this version has no lowering for."""

    def why_not(graph: Graph, target: Target, options: Options) -> Iterator[str]:
        if target.kind != "cuda":
            yield f"runs on NVIDIA GPUs, and the target is {target}"
        elif target.sm < least_sm:
            yield f"needs compute capability sm_{least_sm}, and the target has sm_{target.sm}"
        if library not in dict(target.libraries):
            yield f"needs {library}, which is not installed; pip install 'attn-graph[cuda]'"
        yield "has no lowering in this version of attn_graph"

    def lower(graph: Graph, target: Target, options: Options) -> Executable:
        raise AssertionError(f"{name} refuses every graph")

    return Backend(name, why_not, lower)


CUDNN = refusing("cudnn", "nvidia-cudnn-frontend", 80)
