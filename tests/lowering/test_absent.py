"""The law of absent rows: what lengths, starts and pages declare absent is never seen.

NaN and Inf in rows of q, k, v, do and of tangents past a length, in gaps and in unused rows of
pages change no bit of any result, beside zeros there. Run with TRITON_INTERPRET=1, Triton's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import product
from operator import and_
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph.lowering.cpu import absent
from attn_graph.testing.agreement import run_gradients, run_plan
from attn_graph.testing.strategies import (
    Shape,
    mask_options,
    score_options,
    seeds,
    shapes,
    specs,
)
from attn_graph.testing.tensors import cotangents_for, lay_anyhow, tensors_for
from tests.lowering.test_lowering import planned
from tests.support.ragged import are_same, poison
from tests.support.sequences import lay_like

CPU = ag.Target.of("cpu")
BACKEND = "triton" if CPU.interprets else "math"
SPEC = ag.TensorSpec
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
KINDS = (F32, F16, BF16) if CPU.interprets else (F32, F16, BF16, F64)
ENDED: dict[str, ag.Mask] = {"q_lengths": ag.QueryLengths(), "kv_lengths": ag.KeyLengths()}
LENGTHS = {"q": "q_lengths", "do": "q_lengths", "k": "kv_lengths", "v": "kv_lengths"}
QUERIES, KEYS = (1, 16, 64), (40, 64, 130 if CPU.interprets else 200)
EXAMPLES = settings().max_examples
FEW = max(1, EXAMPLES // 10) if CPU.interprets else EXAMPLES  # each is interpreted
Tensor = torch.Tensor
Options = dict[str, Any]  # Any: options of `attention`


BESIDE: tuple[Options, ...] = (
    {"soft_cap": 5.0},
    {"sinks": SPEC((2,), F32)},
    {"dropout": 0.3},
    {"mask": ag.Causal("bottom_right")},
    {"mask": ag.Causal("top_left") | ag.Prefix(3)},
    {"bias": SPEC((4, 2, 16, 40), F32)},
)
SIZES = (  # of which every way of tiling takes some
    Shape(3, 8, 8, 1, 256, 16, 16),
    Shape(1, 8, 2, 4, 2048, 128, 128),
    Shape(3, 4, 2, 130, 300, 32, 32),
    Shape(4, 8, 8, 1, 2048, 64, 64),
    Shape(2, 4, 2, 5, 9, 8, 16),
    Shape(64, 2, 1, 2, 17, 8, 8),
)


@frozen
class Case:
    """A graph with lengths. ends: those of queries and of keys that it has, by name."""

    graph: ag.Graph
    ends: Mapping[str, Tensor]
    seed: int

    def spoil(self, name: str, x: Tensor, spoilt: bool) -> Tensor:
        """x [B,.,L,.], an operand or a tangent of it, with poison or 0 in its absent rows."""
        ended = self.ends.get(LENGTHS.get(name.removeprefix("t"), ""))
        for b, n in enumerate(() if ended is None else ended.tolist()):
            x[b, :, n:] = poison(x[b, :, n:].shape) if spoilt else 0.0
        return x

    def tensors(self, spoilt: bool) -> list[Tensor]:
        """Operands, made anew, with poison or 0 in absent rows of q, k and v."""
        named = zip(self.graph.inputs, tensors_for(self.graph, self.seed), strict=True)
        return [self.ends.get(i.name, self.spoil(i.name, x, spoilt)) for i, x in named]

    def cotangents(self, spoilt: bool) -> list[Tensor | None]:
        """One for each output that has a gradient, with poison or 0 in absent rows of do."""
        first, *rest = cotangents_for(self.graph, self.seed)
        return [self.spoil("do", first, spoilt), *rest]

    def derived(self, graph: ag.Graph, spoilt: bool) -> list[Tensor]:
        """The operands of a graph that derives this one; what it reads besides is drawn."""
        own = {i.name: x for i, x in zip(self.graph.inputs, self.tensors(spoilt), strict=True)}
        saved = ag.vjp(self.graph)[0]
        results = run_plan(planned(saved, BACKEND), self.tensors(False))
        own |= dict(zip(saved.result_names, results, strict=True))
        random, made = torch.Generator().manual_seed(self.seed), list[Tensor]()
        for i in graph.inputs:
            drawn = torch.randn(i.spec.shape, generator=random, dtype=F64).to(i.spec.dtype)
            laid = own[i.name] if i.name in own else lay_like(drawn, i.spec)
            made.append(self.spoil(i.name, laid, spoilt))
        return made


def lies_apart(spec: SPEC) -> bool:
    """Whether no two elements share a place, so that each row can be written."""
    return absent.lies_apart(torch.empty_strided(spec.shape, spec.strides, device="meta"))


def make_case(
    size: Shape, dtype: torch.dtype, options: Options, ends: Mapping[str, tuple[int, ...]],
    seed: int, laid: Sequence[SPEC] = (),
) -> Case:  # fmt: skip
    """An attention with lengths, which are laid out anyhow."""
    random = torch.Generator().manual_seed(seed)
    own = {n: lay_anyhow(torch.tensor(x, dtype=torch.int32), random) for n, x in ends.items()}
    given = laid or [SPEC(x, dtype) for x in (size.q, size.k, size.v)]
    leaves: list[ag.Mask] = [ENDED[n] for n in own]
    given_mask = [options["mask"]] if options.get("mask") is not None else []
    mask = reduce(and_, (*given_mask, *leaves))  # beside any other part that reads lengths
    options = options | {n: SPEC.like(x) for n, x in own.items()} | {"mask": mask}
    return Case(ag.attention(*given, **options), own, seed)


@st.composite
def cases(draw: DrawFn) -> Case:
    """Any masks, modifiers, sinks, dropout, statistics and layouts, with lengths."""
    drawn = shapes(most=80, heads=4) if CPU.interprets else shapes()
    size, dtype = draw(drawn), draw(st.sampled_from(KINDS))
    options = draw(mask_options(size)) | draw(score_options(size, dtype))
    options["stats"] = draw(st.booleans())
    names = draw(st.sets(st.sampled_from(("q_lengths", "kv_lengths")), min_size=1))
    most = {"q_lengths": size.M, "kv_lengths": size.N}
    ends = {n: tuple(draw(st.integers(0, most[n])) for _ in range(size.B)) for n in sorted(names)}
    laid = [draw(specs(x, dtype).filter(lies_apart)) for x in (size.q, size.k, size.v)]
    return make_case(size, dtype, options, ends, draw(seeds), laid)


def every_result(case: Case, plan: ag.Plan, spoilt: bool) -> list[Tensor]:
    """What a plan gives where nothing is saved, where something is, and its gradients."""
    tensors = case.tensors(spoilt)
    gradients = run_gradients(plan, tensors, case.cotangents(spoilt))
    return [*run_plan(plan, tensors), *gradients.values()]


def check_case(case: Case) -> None:
    """Poison in absent rows gives the bits that zeros give, forward and backward."""
    plan = planned(case.graph, BACKEND)
    zeros, poisoned = (every_result(case, plan, spoilt) for spoilt in (False, True))
    assert are_same(poisoned, zeros), str(plan.graph)


def issue(dtype: torch.dtype, M: int, N: int, **options: Any) -> Case:
    """A cache that is partly filled, and queries that are partly there."""
    size = Shape(4, 2, 1, M, N, 8, 8)
    ends = {"kv_lengths": (N // 2, 0, N, 3), "q_lengths": (M, M // 2, 1, 0)}
    return make_case(size, dtype, options, ends, 5)


@given(case=cases())
@settings(max_examples=FEW)
def test_absent_rows_are_never_seen(case: Case) -> None:
    check_case(case)


def in_turn(turn: int) -> Sequence[torch.dtype]:
    """Every dtype; in the interpreter, which is slow, the one whose turn it is."""
    return KINDS[turn % 3 :][:1] if CPU.interprets else KINDS


TILES = [*(zip if CPU.interprets else product)(QUERIES, KEYS)]


@pytest.mark.parametrize(
    ("dtype", "M", "N"), [(t, *sizes) for n, sizes in enumerate(TILES) for t in in_turn(n)]
)
def test_absent_rows_of_tiles(dtype: torch.dtype, M: int, N: int) -> None:
    check_case(issue(dtype, M, N))


@pytest.mark.parametrize(
    ("dtype", "options"), [(t, some) for n, some in enumerate(BESIDE) for t in in_turn(n)]
)
def test_absent_rows_beside_other_steps(dtype: torch.dtype, options: Options) -> None:
    check_case(issue(dtype, 16, 40, **options))


@pytest.mark.skipif(CPU.interprets, reason="tiles of the CPU")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_absent_rows_of_every_way_of_tiling(sizes: Shape, dtype: torch.dtype, share: float) -> None:
    """One query and many, small entries and large, caches mostly empty and mostly full."""
    lengths = tuple(int(sizes.N * share) + b % 3 for b in range(sizes.B))
    check_case(make_case(sizes, dtype, {}, {"kv_lengths": lengths}, 4))


@given(case=cases())
@settings(max_examples=max(1, FEW // 2))
@example(issue(F32, 16, 40))
@example(issue(BF16, 5, 40, soft_cap=3.0, sinks=SPEC((2,), F32)))
def test_absent_rows_are_never_seen_by_derivatives_of_higher_order(case: Case) -> None:
    forward, backward = ag.vjp(case.graph)
    for graph in (ag.jvp(forward), ag.jvp(backward), ag.vjp(backward)[1]):
        plan = planned(graph, BACKEND)
        zeros, poisoned = (run_plan(plan, case.derived(graph, spoilt)) for spoilt in (False, True))
        assert are_same(poisoned, zeros), str(graph)


@pytest.mark.skipif(CPU.interprets, reason="the definitions, which no kernel runs")
@given(case=cases())
@settings(max_examples=max(1, FEW // 2))
@example(issue(F32, 16, 40))
@example(issue(F16, 5, 40, soft_cap=3.0, sinks=SPEC((2,), F32)))
@example(issue(F64, 5, 40, alibi=True, align="bottom_right"))
def test_absent_rows_are_never_seen_by_definitions(case: Case) -> None:
    """What `evaluate` computes, in every order of derivatives."""
    forward, backward = ag.vjp(case.graph)
    derived = ag.jvp(forward), ag.jvp(backward), ag.vjp(backward)[1]
    for graph in (case.graph, forward, backward, *derived):
        zeros, poisoned = (
            ag.evaluate(graph, case.derived(graph, spoilt)) for spoilt in (False, True)
        )
        assert are_same(poisoned, zeros), str(graph)


def weigh_openly(q: Any, k: Any, v: Any, kv_lengths: Any, **sinks: Any) -> Any:  # Any: of a builder
    """Attention that also gives its weights: no step of it is fused."""
    s = ag.scores(q, k).soft_cap(3.0).mask(ag.KeyLengths(), kv_lengths=kv_lengths)
    p, lse = s.softmax(**sinks)
    return p.weigh(v), lse, p


@pytest.mark.skipif(CPU.interprets, reason="steps that no kernel runs")
@pytest.mark.parametrize("sinks", [{}, {"sinks": SPEC((2,), F32)}])
@pytest.mark.parametrize("dtype", KINDS)
def test_absent_rows_are_never_seen_step_by_step(dtype: torch.dtype, sinks: Options) -> None:
    own = {"kv_lengths": torch.tensor([20, 0, 40, 3])}
    q, k = SPEC((4, 2, 16, 8), dtype), SPEC((4, 1, 40, 8), dtype)
    inputs = {"q": q, "k": k, "v": k, "kv_lengths": SPEC((4,), torch.int64), **sinks}
    case = Case(ag.graph(weigh_openly, **inputs), own, 7)
    check_case(case)
    forward, backward = ag.vjp(case.graph)
    for graph in (ag.jvp(forward), ag.jvp(backward)):  # of single steps no vjp is taken twice
        both = (evolve(case, graph=graph).tensors(spoilt) for spoilt in (False, True))
        zeros, poisoned = (run_plan(planned(graph, BACKEND), tensors) for tensors in both)
        assert are_same(poisoned, zeros), str(graph)


def test_pytorchs_kernel_for_cpus_takes_no_lengths() -> None:
    with pytest.raises(ag.NoBackendError, match="KeyLengths"):
        ag.compile(issue(F32, 16, 40).graph, target=CPU, backends=("torch_sdpa",))


@pytest.mark.parametrize("dtype", in_turn(1))
@pytest.mark.parametrize("name", ["keep", "segments"])
def test_keys_hidden_by_a_tensor_are_present(name: str, dtype: torch.dtype) -> None:
    """NaN in one reaches the rows that see it, and no other entry of the batch."""
    M, at, x = 20, 7, SPEC((2, 1, 20, 8), dtype)
    places = torch.arange(M).expand(2, M) // 10
    same = places[:, None, :, None] == places[:, None, None]
    given = [same] if name == "keep" else [places, places]
    specs: Any = SPEC.like(same) if name == "keep" else tuple(map(SPEC.like, given))
    plan = planned(ag.attention(x, x, x, **{name: specs}), BACKEND)
    random = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, *x.shape, generator=random).to(dtype).unbind()
    results = list[list[Tensor]]()
    for number in (1.0, torch.nan):
        k[0, :, at], v[0, :, at] = number, number
        tensors = [q, k, v, *given]
        results.append([*run_plan(plan, tensors), *run_gradients(plan, tensors, [do]).values()])
    assert are_same(*([y[1:] for y in each] for each in results))
    assert results[1][0][0, :, :10].isnan().all()
