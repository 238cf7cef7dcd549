"""cuDNN: what it would say to a graph, known on every machine. It runs none in this version."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attn_graph.backend import Backend, Executable, Options
from attn_graph.ir import Graph
from attn_graph.lowering.problem import other_equations, sole
from attn_graph.target import Target

FRONTEND = "nvidia-cudnn-frontend"
LIBRARIES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")  # of which one is cuDNN itself


def why_not(graph: Graph, target: Target, options: Options) -> Iterator[str]:
    if target.kind != "cuda":
        yield f"runs on NVIDIA GPUs, and the target is {target}"
    frontend = version(target, FRONTEND)
    backend = next(filter(None, (version(target, name) for name in LIBRARIES)), None)
    if frontend is None:
        yield f"needs {FRONTEND}, which is not installed; pip install 'attn-graph[cuda]'"
    if backend is None:
        yield "needs cuDNN, which is not installed; PyTorch's builds for CUDA bring it"
    problem = sole(graph)
    if problem is None:
        yield other_equations(graph)
    elif target.kind == "cuda":
        from attn_graph.lowering.cudnn_limits import reasons  # a large table; CPUs never ask it

        pair = backend or NEWEST[0], frontend or NEWEST[1]
        yield from reasons(problem, target.sm, *pair, deterministic=options.deterministic)
    yield "has no lowering in this version of attn_graph"


# What is assumed of libraries that are not there, so that a graph's own reasons are told as well.
NEWEST = ((9, 20, 0), (1, 28, 0))


def version(target: Target, library: str) -> tuple[int, int, int] | None:
    """Major, minor and patch of a library of the target; None where it is not there."""
    found = re.findall(r"\d+", dict(target.libraries).get(library, ""))[:3]
    major, minor, patch = (*map(int, found), 0, 0, 0)[:3]
    return (major, minor, patch) if found else None


def lower(graph: Graph, target: Target, options: Options) -> Executable:
    raise AssertionError("cudnn refuses every graph")


BACKEND = Backend("cudnn", why_not, lower)
