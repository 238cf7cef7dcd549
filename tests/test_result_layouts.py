"""Real against fake: every result of every pass lies as the graph says, as fake kernels say, and as
`out=` takes it; a gradient lies as its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import attn_graph as ag
from attn_graph.ir.layouts import output_specs
from attn_graph.ir.transforms.vjp import output_names
from attn_graph.spec import QUANTISED, dense_like, dense_strides
from attn_graph.testing.agreement import as_leaves, run_plan
from attn_graph.testing.strategies import (
    graphs,
    seeds,
    shuffled_graphs,
    simple_graphs,
    with_layouts,
)
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support import ragged
from tests.support.quantised import kinds, quantise_graph, quantise_tensors
from tests.support.sequences import lay_like

attention: Any = ag.nn.functional.attention  # Any: tensors by name, and options
CPU = ag.Target.of("cpu")
LIKE = ag.TensorSpec.like
Tensors = Sequence[torch.Tensor]
some = settings(max_examples=max(1, settings().max_examples // 2))  # each makes four plans or more
NAMES = st.sampled_from((("math",), ("torch_sdpa", "math"), None))


def in_fake_mode(call: Callable[..., Any], tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """The results of a call for fake tensors like these."""
    with FakeTensorMode() as mode:
        made = call(*map(mode.from_tensor, tensors))
    return made if isinstance(made, tuple) else (made,)


def check_plan(plan: ag.Plan, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The results of a plan by name, all lying as is due."""
    names, made = output_names(plan.graph), run_plan(plan, tensors)
    fakes, due = in_fake_mode(plan, tensors), output_specs(plan.graph)
    for name, real, fake, spec in zip(names, made, fakes, due, strict=True):
        assert LIKE(real) == LIKE(fake) == spec, f"{name} of {plan.backend}\n{plan.graph}"
    rooms = tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in made)
    plan(*tensors, out=rooms[0] if plan.single else rooms)
    return dict(zip(names, made, strict=True))


def fill_inputs(graph: ag.Graph, known: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """A tensor for each input of a derivative: a known one, laid as declared, or numbers."""
    random = torch.Generator().manual_seed(0)
    return [
        lay_like(known[i.name], i.spec)
        if i.name in known
        else lay_like(torch.randn(i.spec.shape, generator=random).to(i.spec.dtype), i.spec)
        for i in graph.inputs
    ]


def check_passes(graph: ag.Graph, tensors: Tensors, among: Sequence[str] | None = None) -> None:
    """Forward, backward and forward mode; gradients by plans and by autograd."""
    plan = ag.compile(graph, target=CPU, backends=among)
    known = dict(zip((i.name for i in plan.graph.inputs), tensors, strict=True))
    check_plan(plan, tensors)
    if not plan.graph.has_gradient:
        return
    forward, back = (ag.compile(x, target=CPU, backends=among) for x in ag.vjp(graph))
    known |= check_plan(forward, tensors)
    made = check_plan(back, fill_inputs(back.graph, known))
    wanted = dict(wanted_inputs(plan.graph))
    for spec, (name, grad) in zip(wanted.values(), made.items(), strict=True):
        assert LIKE(grad) == dense_like(spec), f"{name}\n{back.graph}"
    push = ag.compile(ag.jvp(graph), target=CPU, backends=among)
    check_plan(push, fill_inputs(push.graph, known))
    for name, grad in autograd_gradients(plan, tensors):
        assert LIKE(grad) == dense_like(wanted[name]), f"d{name} by autograd\n{graph}"


def wanted_inputs(graph: ag.Graph) -> Iterator[tuple[str, ag.TensorSpec]]:
    for n, i in enumerate(graph.inputs):
        if i.spec.dtype.is_floating_point and n not in graph.constants:
            yield i.name, i.spec


def autograd_gradients(plan: ag.Plan, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    constants = plan.graph.constants
    leaves = [x.detach() if n in constants else x for n, x in enumerate(as_leaves(tensors))]
    outputs = zip(run_plan(plan, leaves), cotangents_for(plan.graph, 0), strict=True)
    used = [(x, dx) for x, dx in outputs if dx is not None and x.requires_grad]
    named = zip(plan.graph.inputs, leaves, strict=True)
    wanted = {i.name: x for i, x in named if x.requires_grad}
    if used and wanted:
        xs, dxs = zip(*used, strict=True)
        grads = torch.autograd.grad(xs, [*wanted.values()], dxs, allow_unused=True)
        yield from ((n, g) for n, g in zip(wanted, grads, strict=True) if g is not None)


def relaid(graph: ag.Graph, given: Tensors, seed: int) -> tuple[ag.Graph, list[torch.Tensor]]:
    """The same with q, k and v in any order of axes."""
    random, inputs, tensors = Random(seed), list[Any](), list[torch.Tensor]()
    for i, x in zip(graph.inputs, given, strict=True):
        order = random.sample(range(x.ndim), x.ndim)
        strides = dense_strides(x.shape, order) if i.name in "qkv" else i.spec.strides
        spec = ag.TensorSpec(i.spec.shape, i.spec.dtype, strides)
        inputs.append(evolve(i, spec=spec))
        tensors.append(lay_like(x, spec) if i.name in "qkv" else x)
    return ag.parse(str(evolve(graph, inputs=tuple(inputs)))), tensors


@given(graph=with_layouts(st.one_of(graphs(), simple_graphs())), seed=seeds, among=NAMES)
def test_results_of_every_pass_lie_as_the_graph_says(
    graph: ag.Graph, seed: int, among: tuple[str, ...] | None
) -> None:
    check_passes(graph, tensors_for(graph, seed), among)


@some
@given(graph=shuffled_graphs(), seed=seeds)
def test_results_of_single_steps_lie_as_those_of_one_attention(graph: ag.Graph, seed: int) -> None:
    check_passes(*relaid(graph, tensors_for(graph, seed), seed))


@some
@given(case=ragged.packed_cases(), paged=ragged.paged_cases(), seed=seeds)
def test_results_of_packed_and_paged_tensors_lie_so_too(
    case: ragged.Case, paged: ragged.Case, seed: int
) -> None:
    check_passes(*relaid(case.graph, case.inputs, seed))
    check_passes(*relaid(paged.graph, paged.inputs, seed))


BF16 = torch.bfloat16


@some
@given(
    plain=graphs(dtype=st.just(BF16)), case=ragged.packed_cases(BF16), kind=kinds, seed=seeds,
    names=st.sampled_from(("kv", "qkv", "qkvo")),
)  # fmt: skip
def test_results_of_quantised_tensors_lie_so_too(
    plain: ag.Graph, case: ragged.Case, kind: torch.dtype, seed: int, names: str
) -> None:
    for bare, given_ in (
        (plain, tensors_for(plain, seed)),
        (case.graph, case.inputs),
    ):
        graph, tensors = relaid(bare, given_, seed)
        quantised = quantise_graph(graph, kind, seed, names if bare is plain else names[:3])
        known = dict(zip((i.name for i in graph.inputs), tensors, strict=True))
        own, _ = quantise_tensors(quantised, known, seed)
        scales = {i.name: torch.ones(i.spec.shape) for i in quantised.inputs[-1:]}
        every = {**scales, **own}
        inputs = [lay_like(every[i.name], i.spec) for i in quantised.inputs]
        check_passes(quantised, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, *QUANTISED])
@pytest.mark.parametrize("packed", [None, "i >= j", "(b + i + j) % 2 == 0"])
def test_functions_of_tensors_say_how_results_lie(dtype: torch.dtype, packed: str | None) -> None:
    """packed: the mask of packed tensors. One that knows the batch has sequences padded."""
    x = (torch.randn(2, 6, 4, 8) * 3).to(dtype).transpose(1, 2)
    tensors, options = {"q": x, "k": x, "v": x}, dict[str, Any](stats=True)
    if packed is not None:
        tensors = dict.fromkeys("qkv", x[0].contiguous().transpose(0, 1))  # rows [T,H,D] by head
        tensors["q_starts"] = torch.tensor([0, 2, 6])
        options |= {"mask": ag.Formula(packed), "max_lengths": (4, 4)}
    if dtype in QUANTISED:
        ones = torch.ones((1,) * tensors["q"].ndim)
        tensors |= dict.fromkeys(("q_scale", "k_scale", "v_scale"), ones)

    def call(*given: torch.Tensor) -> Any:
        return attention(**dict(zip(tensors, given, strict=True)), **options)

    real, fake = call(*tensors.values()), in_fake_mode(call, [*tensors.values()])
    for a, b in zip(real, fake, strict=True):
        assert LIKE(a) == LIKE(b)
