"""Attention in 8 bits by cuDNN: the model of its kernels, its limits, and real plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.passes import simplify
from attn_graph.ir.reference import compare
from attn_graph.ir.storage.scaling import FLOATS_OF_8, O_SCALE, PAIRS, SCALES
from attn_graph.lowering.cudnn import backend as cudnn_backend
from attn_graph.lowering.cudnn.backend import describe_problem
from attn_graph.lowering.cudnn.graph import CudnnCall
from attn_graph.lowering.cudnn.run import Run
from attn_graph.lowering.libraries.cudnn_case import Case
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.target import Target, Version
from attn_graph.machine.workspace import Workspace
from attn_graph.measuring.device_test import tensors_of
from attn_graph.testing import formula, rule
from attn_graph.testing.strategies import Shape, seeds
from attn_graph.testing.tensors import tensors_for
from tests.support.cudnn_graphs import aligned, cudnn_options
from tests.support.cudnn_model import Model
from tests.support.cudnn_questions import Question

cudnn = cudnn_backend.BACKEND
B200, H200 = Target.of("b200"), Target.of("h200")
NARROW = Options(precision="fp8")
E4M3, E5M2 = FLOATS_OF_8
planning = pytest.mark.skipif(find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend")


def declare(
    kinds: Sequence[torch.dtype] = (E4M3,) * 3,
    sizes: tuple[int, int, int, int, int, int] = (2, 8, 2, 256, 512, 64),
    scale: tuple[int, ...] = (1, 1, 1, 1),
    **options: Any,
) -> ag.Graph:
    """sizes: B, H, G, M, N, D. scale: the shape of v's."""
    B, H, G, M, N, D = sizes
    shapes = (B, H, M, D), (B, G, N, D), (B, G, N, options.pop("E", D))
    specs: dict[str, Any] = {
        n: ag.TensorSpec(x, kind) for n, x, kind in zip("qkv", shapes, kinds, strict=True)
    }
    specs |= {name: ag.TensorSpec((1, 1, 1, 1), torch.float32) for _, name in PAIRS}
    specs["v_scale"] = ag.TensorSpec(scale, torch.float32)
    return ag.attention(**specs, **options)


def modelled(graph: ag.Graph, model: Callable[..., Any] = Model) -> Run:
    """How a simplified graph would run."""
    assert not cudnn.reasons(Request(graph, B200, NARROW))
    case, call = describe_problem(Request(graph, B200, NARROW))
    return Run.of(case, call, graph, Workspace(), 128, model(call))


@st.composite
def quantised_graphs(draw: st.DrawFn) -> ag.Graph:
    """Graphs of three tensors in 8 bits, without modifiers, and perhaps with o in as many."""
    length, kind = st.integers(1, 20), draw(st.sampled_from(FLOATS_OF_8))
    M, N, G = draw(length), draw(length), draw(st.integers(1, 2))
    D, E = (draw(st.sampled_from([16, 64])) for _ in range(2))
    shape = Shape(draw(st.integers(1, 3)), G * draw(st.integers(1, 3)), G, M, N, D, E)
    layouts = st.sampled_from(["bhsd", "bshd", "sbhd"])
    given: dict[str, Any] = {
        n: ag.TensorSpec(x, kind, layout=draw(layouts))
        for n, x in zip("qkv", (shape.q, shape.k, shape.v), strict=True)
    }
    scales = [*SCALES, *[O_SCALE] * draw(st.booleans())]
    given |= {name: ag.TensorSpec((1, 1, 1, 1), torch.float32) for name in scales}
    drawn = draw(cudnn_options(shape, torch.bfloat16))
    options = {n: x for n, x in drawn.items() if n in ("mask", "align", "kv_lengths", "sinks")}
    scale, stats = draw(st.floats(0.05, 1.0)), draw(st.booleans())
    return ag.attention(**given, **options, scale=scale, stats=stats)


@given(graph=quantised_graphs(), target=st.sampled_from([B200, H200]), seed=seeds)
def test_what_cudnn_is_told_means_what_the_graph_means(
    graph: ag.Graph, target: Target, seed: int
) -> None:
    """With o in bfloat16, or in 8 bits by a scale, and its largest number."""
    simple = cudnn.seen(simplify(graph))
    assume(not cudnn.reasons(Request(simple, target, NARROW)))
    tensors = tuple(map(aligned, tensors_for(graph, seed)))
    outputs, _ = modelled(simple)(*tensors)
    dues = rule.expect_outputs(graph, tensors, "fp8")
    for x, due, i in zip(outputs, dues, simple.outputs, strict=True):
        due.check(x)
        assert ag.TensorSpec.like(x) == result_spec(simple, i)


def shares(graph: ag.Graph, model: Callable[..., Any]) -> tuple[float, ...]:
    """The largest error of each graph of the self-check, as a share of the allowance."""
    test = cudnn.device_test(Request(simplify(graph), B200, NARROW))
    assert test is not None
    assert test.precision == "fp8"
    worst = []
    for small in test.graphs:
        tensors = tensors_of(small)
        made, _ = modelled(small, model)(*map(aligned, tensors))
        found = compare(small, tensors, made, test.precision)
        worst.append(max(e / a for e, a in zip(found.errors, found.allowed, strict=True)))
    return tuple(worst)


def overflowing(call: CudnnCall) -> Callable[..., None]:
    """A kernel with weights that overflow: shares of a maximum that is 2^8 times too small."""
    factors = {"scale_s": 2.0**8, "descale_s": 2.0**-8}

    def run(pack: dict[int, torch.Tensor], workspace: Any, device: torch.device) -> None:
        changed = {
            n: pack[n] * factors[x.argument]
            for n, x in enumerate(call.slots, start=1)
            if x.argument in factors
        }
        Model(call)(pack | changed, workspace, device)

    return run


@pytest.mark.parametrize("kind", FLOATS_OF_8)
def test_the_self_check_passes_and_finds_weights_that_overflow(kind: torch.dtype) -> None:
    options: tuple[dict[str, Any], ...] = {}, {"o_scale": ag.TensorSpec((1,) * 4, torch.float32)}
    for more in options:
        graph = declare((kind,) * 3, mask=ag.Causal("bottom_right"), **more)
        assert max(shares(graph, Model)) <= 1
    assert max(shares(declare(), overflowing)) > 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kinds": (torch.int8,) * 3}, "computes in f8e4m3 and f8e5m2, and the graph is in i8"),
        ({"sizes": (2, 8, 2, 64, 64, 24)}, "needs head sizes that are multiples of 16"),
    ],
)
def test_limits_of_all_graphs_have_other_numbers(given: dict[str, Any], message: str) -> None:
    assert message in str(ag.explain(declare(**given), target="b200", precision="fp8"))


def test_weights_are_rounded_only_where_the_call_permits_it() -> None:
    found = ag.explain(declare(), target="b200")
    assert found.backend == "triton"
    said = 'rounds weights beside quantised tensors to 8 bits, and precision is "ieee"'
    assert f'{said} (would run with precision="fp8", which changes the result)' in str(found)
    permitted = ag.explain(declare(), target="b200", precision="fp8")
    assert permitted.backend == "cudnn"
    assert "weights are rounded to f8e4m3" in str(permitted)
    assert "a self-check on the device itself comes before its first use" in str(permitted)


@planning
@pytest.mark.parametrize(
    "given",
    [
        {"kv_lengths": ag.TensorSpec((2,), torch.int32), "mask": ag.Causal("bottom_right")},
        {"kinds": (E5M2,) * 3, "mask": ag.Window(100, 0, "top_left"), "stats": True},
        {"sizes": (1, 8, 2, 1, 4096, 128)},
        {"sizes": (1, 4, 4, 100, 77, 192), "E": 128, "sinks": ag.TensorSpec((4,), torch.float32)},
    ],
    ids=["lengths", "window", "decode", "latent"],
)
def test_real_plans_are_built_for_blackwell(given: dict[str, Any]) -> None:
    plan = ag.compile(declare(**given), target="b200", precision="fp8", backends=("cudnn",))
    assert re.search(r"scale_s=16\.0 f32\[1, 1, 1, 1\]", plan.text())


@planning
@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("h200", {"mask": ag.Causal("top_left"), "stats": True}),
        ("h200", {"kinds": (E5M2,) * 3, "sizes": (2, 8, 2, 100, 77, 256)}),
        ("b200", {"kv_lengths": ag.TensorSpec((2,), torch.int32)}),
    ],
    ids=["hopper", "wide", "blackwell"],
)
def test_real_plans_give_o_in_8_bits(target: str, given: dict[str, Any]) -> None:
    graph = declare(**given, o_scale=ag.TensorSpec((1, 1, 1, 1), torch.float32))
    plan = ag.compile(graph, target=target, precision="fp8", backends=("cudnn",))
    assert re.search(r"-> o=o f8e\dm\d\[.*amax_o=amax f32", plan.text())


@given(seed=seeds, kind=st.sampled_from(FLOATS_OF_8), rise=st.integers(0, 4))
def test_weights_rounded_beside_any_earlier_maximum_are_within_the_rule(
    seed: int, kind: torch.dtype, rise: int
) -> None:
    """Kernels round them before they know the largest, as shares of one up to 2^4 times smaller."""
    graph = declare((kind,) * 3, (1, 2, 1, 8, 100, 64), stats=True)
    tensors = tensors_for(graph, seed)
    c = formula.read_chain(graph, formula.cast(graph, tensors, torch.float64))
    exact = formula.attend(c)
    most = exact.p.amax(-1, keepdim=True) / 2**rise
    weights = (16 * exact.p / most).to(kind).double() * most / 16
    o = (weights @ formula.per_head(c.v, 2)).bfloat16()
    due, _ = rule.expect_outputs(graph, tensors, "fp8")
    due.check(o)
    assert compare(graph, tensors, (o, exact.lse.float()), "fp8").ok


@pytest.mark.parametrize(
    ("versions", "M", "is_taken"),
    [
        (((9, 26, 0), (1, 32, 0)), 256, True),
        (((9, 26, 0), (1, 32, 0)), 1, False),
        (((9, 26, 0), (1, 28, 0)), 256, False),
        (((9, 25, 0), (1, 32, 0)), 256, False),
    ],
)
def test_blackwell_has_heads_of_256_from_two_versions_and_two_queries_on(
    versions: tuple[Version, Version], M: int, is_taken: bool
) -> None:
    lying = facts_of(simplify(declare(sizes=(2, 8, 2, M, 512, 256)))).once(Lying.for_libraries)
    assert lying is not None
    refusing = [x.name for x, _ in Question("", Case(lying, 100, *versions)).against]
    assert refusing == ([] if is_taken else ["quantised_heads"])
