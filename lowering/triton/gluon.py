"""Attention and its gradient on Hopper GPUs by kernels in Gluon, Triton's lower level.

It takes what the `triton` backend takes, as far as the copy engine (TMA) reads its tensors. No
interpreter runs Gluon, so kernels are checked on a device before they compute anything there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from attn_graph.errors import Reason
from attn_graph.ir.attention import AttentionGrad
from attn_graph.ir.graph import Graph
from attn_graph.lowering.backend import Backend, DeviceTest, Executable, Options
from attn_graph.lowering.problem import (
    Problem,
    is_broadcast,
    is_misaligned,
    returns_lse,
    sole,
)
from attn_graph.lowering.reasons import missing_library, other_device, other_equations
from attn_graph.lowering.triton.backend import (
    attention_reasons,
    compile_kernels,
    generated_text,
    machines_of,
    plan_reasons,
    temporary_of,
)
from attn_graph.lowering.triton.calls import TritonCall
from attn_graph.lowering.triton.layout import Layout
from attn_graph.machine.target import Target
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:  # and imported where it is used: machines without a GPU never ask for it
    from attn_graph.lowering.triton.launches import Launch
    from attn_graph.lowering.triton.plan import Flash

SM = 90
VERSIONS = ((3, 6), (3, 9))  # of Triton: the first and the last whose Gluon has these names
DTYPES = (torch.float16, torch.bfloat16)
WIDEST = 128  # head size of a gradient: two sums of 64 x 256 take more registers than there are
ALIGNED = 16  # bytes that TMA needs strides to be multiples of


def why_not(graph: Graph, target: Target, options: Options) -> Iterator[Reason]:
    """Every reason against a graph: the target, the sizes, what can't be traced."""
    if target.kind != "cuda":
        yield other_device("on GPUs of compute capability 9.0", target)
        return
    against = [*gluon_target_reasons(target)]
    problem = sole(graph)
    if problem is None:
        against.append(other_equations(graph))
    else:
        against += gluon_problem_reasons(problem)
    yield from against
    if problem is not None and not against:
        yield from plan_reasons(lambda: plan_gluon(problem, target, options.variant), options)


def gluon_target_reasons(target: Target) -> Iterator[Reason]:
    """What a GPU lacks."""
    if target.sm != SM:
        limit = f"has instructions of compute capability sm_{SM} alone"
        yield Reason("architecture", limit, f"the target has sm_{target.sm}")
    libraries = dict(target.libraries)
    if "triton" not in libraries:
        yield missing_library("triton", "pip install 'attn-graph[cuda]'")
    else:
        yield from other_version(libraries["triton"])
    if target.interprets:
        limit = "can't be interpreted"
        yield Reason("interpreter", limit, "TRITON_INTERPRET=1 was set before Python started")


def other_version(version: str) -> Iterator[Reason]:
    """Against a version of Triton with another Gluon, which is no stable interface."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    first, last = VERSIONS
    if numbers and not first <= numbers <= last:
        known = " to ".join(".".join(map(str, each)) for each in VERSIONS)
        yield Reason("version.triton", f"is written for triton {known}", f"{version} is installed")


def gluon_problem_reasons(problem: Problem) -> Iterator[Reason]:
    """What the kernels do not compute."""
    yield from attention_reasons(problem, DTYPES)
    if problem.node.dropout:
        yield Reason("dropout", "has no dropout", f"the graph drops {problem.node.dropout}")
    for name, spec in Layout.dense(problem).large().items():
        if name != "dlse":  # which no copy engine reads
            yield from layout_reasons(name, spec)
    if problem.grad is not None:
        yield from gradient_reasons(problem, problem.grad)


def gradient_reasons(problem: Problem, grad: AttentionGrad) -> Iterator[Reason]:
    """What the kernels of a gradient do not compute."""
    if max(problem.D, problem.E) > WIDEST:
        limit = f"computes gradients of head sizes up to {WIDEST}"
        yield Reason("gradient_head", limit, f"D = {problem.D}, E = {problem.E}")
    if problem.has_blind_rows:
        limit = "computes gradients where each query sees a key"
        yield Reason("gradient_rows", limit, "here one may see none")
    if not grad.with_do:
        yield Reason("gradient_do", "computes gradients from that of o", "there is none")
    if grad.wants[1] != grad.wants[2]:
        limit = "computes the gradients of k and v together"
        yield Reason("gradient_wants", limit, "the graph wants one of them")


def layout_reasons(name: str, spec: TensorSpec) -> Iterator[Reason]:
    """Why TMA can't read a tensor where it lies."""
    if not spec.unit_last:
        limit = "copies rows whose elements lie side by side"
        yield Reason(f"last_stride.{name}", limit, f"{name} is {spec}")
    elif is_misaligned(spec):
        limit = f"copies rows that begin at multiples of {ALIGNED} bytes"
        yield Reason(f"strides.{name}", limit, f"{name} is {spec}")
    if is_broadcast(spec):
        limit = "copies tensors whose elements have each their own place"
        yield Reason(f"broadcast.{name}", limit, f"{name} is {spec}")


@lru_cache(maxsize=256)
def plan_gluon(problem: Problem, target: Target, variant: str | None) -> Flash:
    """What `why_not` and `lower` both ask for."""
    from attn_graph.lowering.triton.gluon_plan import plan_launches

    return plan_launches(problem, target, variant)


def lower(graph: Graph, target: Target, options: Options) -> Executable:
    """The launches that run a graph."""
    from attn_graph.lowering.triton.gluon_plan import gluon_launches

    problem = sole(graph)
    assert problem is not None  # why_not said so
    flash = plan_gluon(problem, target, options.variant)
    call = TritonCall(flash, graph, options)
    run = call.run
    return Executable(
        run,
        flash.scratch.bytes,
        temporary_of(flash),
        notes=tuple(describe_launch(flash, launch) for launch in gluon_launches(flash)),
        inspect=lambda: tuple(map(str, machines_of(flash))),
        text=lambda: generated_text(flash),
        infer=run if graph.is_gradient or returns_lse(graph) else call.inference,
        prepare=lambda: compile_kernels(flash),
    )


def describe_launch(flash: Flash, launch: Launch) -> str:
    """How a kernel runs, for `explain`."""
    from attn_graph.lowering.triton.gluon_plan import describe_programs

    queries, keys = (launch.descriptors[name].tile[2] for name in ("q_desc", "k_desc"))
    turns = " that take turns" if launch.fixed.get("TURNS") else ""
    return (
        f"{launch.kernel}: {describe_programs(flash, launch)}, two groups of {launch.warps} warps"
        f"{turns} with tiles of {queries} x {keys} each, "
        f"one warp that copies {launch.stages} tiles ahead"
    )


def variants(graph: Graph, target: Target, options: Options) -> tuple[str, ...]:
    """Programs of several heads, and groups of warps that take turns."""
    from attn_graph.lowering.triton.gluon_plan import list_variants

    problem = sole(graph)
    return () if problem is None else list_variants(problem, target)


@lru_cache(maxsize=256)
def device_test(graph: Graph, target: Target, options: Options) -> DeviceTest:
    """What has to come out right on a device before a graph runs there."""
    from attn_graph.lowering.triton.gluon_check import make_device_test

    problem = sole(graph)
    assert problem is not None  # why_not said so
    flash = plan_gluon(problem, target, options.variant)
    return make_device_test(graph, flash, options.variant)


BACKEND = Backend("gluon", why_not, lower, variants=variants, device_test=device_test)
