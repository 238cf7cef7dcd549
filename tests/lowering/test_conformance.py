"""Whoever takes an attention gives what the formula says, however its operands lie.

One property over backends, passes, how operands lie, and masks, modifiers and statistics of any
kind. Dense operands without scales are in test_lowering.py; kernels of others, by models of them,
beside their limits. Run with TRITON_INTERPRET=1, as `make test` does too, these tests are Triton's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton.language as tl
from attrs import evolve, frozen
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import canonicalise, simplify
from attn_graph.ir.reference import evaluate
from attn_graph.ir.storage.packed import Packed
from attn_graph.ir.storage.packing import Pack, Unpack
from attn_graph.ir.storage.paging import SumPages, Unpage
from attn_graph.kernels import sequences as starts
from attn_graph.lowering.cpu import sequences as blocks
from attn_graph.testing.agreement import check_gradients, check_outputs, run_gradients, run_plan
from attn_graph.testing.strategies import Shape, graphs, seeds, shapes
from attn_graph.testing.tensors import tensors_for
from tests.lowering.test_lowering import refused
from tests.lowering.test_sequences import gradient_is_taken
from tests.support import ragged
from tests.support.freed_pages import free_hidden
from tests.support.kernels import CPU
from tests.support.quantised import all_kinds, kinds, quantise_graph, quantise_tensors
from tests.support.sequences import Batch

BACKEND = "triton" if CPU.interprets else "math"
BF16 = torch.bfloat16
FLOATS = (torch.float32, torch.float16, BF16) + (torch.float64,) * (not CPU.interprets)
EXAMPLES = settings().max_examples
FEW = max(1, EXAMPLES // 4) if CPU.interprets else EXAMPLES  # each is interpreted for seconds
RAGGED = {"packed": ragged.packed_cases, "paged": ragged.paged_cases}
STEPS = {Pack, Unpack, Unpage, SumPages}  # by themselves


@frozen
class Parts:
    """How a run is divided, which changes nothing. block: bytes of keys that a CPU gathers at once.
    at_once: starts that a kernel reads at once. invariant: batch_invariant=."""

    block: int
    at_once: int
    invariant: bool


parts = st.builds(
    Parts,
    st.sampled_from((blocks.BLOCK_BYTES, 1)),
    st.sampled_from((starts.AT_ONCE.value, 1, 2, 4)),
    st.booleans() if CPU.interprets else st.just(False),
)


@contextmanager
def planned(graph: ag.Graph, of: Parts) -> Iterator[ag.Plan]:
    """A plan whose one op reads the operands as they lie; a graph that is refused is not drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", of.block)
        patch.setattr(starts, "AT_ONCE", tl.constexpr(of.at_once))
        ag.clear_cache()
        try:
            plan = ag.compile(graph, target=CPU, backends=(BACKEND,), batch_invariant=of.invariant)
        except ag.NoBackendError as error:
            refused(error)
        assert ag.parse(str(graph)) == graph
        assert ag.parse(str(plan.graph)) == plan.graph == simplify(graph)
        yield plan
    ag.clear_cache()


def check_ops(graph: ag.Graph, scaled: bool) -> None:
    """Assert that one op is left of a graph, and of its gradient, and that nothing is padded."""
    passes = (graph, *ag.vjp(graph)) if graph.has_gradient else (graph,)
    for each in map(simplify, passes):
        ops = [e.op for e in each.eqns]
        assert [x.scaled for x in ops if isinstance(x, Packed)] in ([scaled], [])
        assert not {type(x) for x in ops} & STEPS
    assert any(isinstance(e.op, Packed) for e in simplify(graph).eqns)


@pytest.mark.parametrize("lies", RAGGED)
@given(data=st.data(), seed=seeds, of=parts)
@settings(max_examples=FEW)
def test_ragged_attention_is_the_formula_and_absent_rows_are_never_seen(
    lies: str, data: st.DataObject, seed: int, of: Parts
) -> None:
    """To the bit: NaN and Inf in rows of none, and whatever lies behind a window."""
    case = data.draw(RAGGED[lies](data.draw(st.sampled_from(FLOATS))))
    check_case(case, seed, of, data.draw(st.sampled_from(alike(case))))


def check_case(case: ragged.Case, seed: int, of: Parts, same: tuple[ag.Graph, ragged.Case]) -> None:
    """Assert that results and gradients are the formula's, and those of a graph and tensors that
    are to give the same bits."""
    check_ops(case.graph, False)
    poisoned = evolve(case, tensors={n: ragged.fill(x, True) for n, x in case.tensors.items()})
    made = list[tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]]()
    for graph, given_case in ((case.graph, poisoned), same):
        with planned(graph, of) as plan:
            made.append(run_both(graph, plan, given_case, seed))
    (results, grads), (results_again, again) = made
    ragged.check_results(case, results)
    if grads:
        ragged.check_pulled(case, grads, case.cotangents(seed))
    assert ragged.are_same(results, results_again)
    assert ragged.are_same([*grads.values()], [*again.values()])


UNUSED = ((0, 0), (0, 0))
FOUND: dict[str, tuple[ragged.Case, int]] = {  # what found a fault, and its bytes of keys at once
    "a mask over blocks of keys": (
        ragged.make_paged(
            Batch((5, 5), (48, 30), UNUSED, False),
            ragged.Layout(4, heads_first=False, ended=True, packed=False),
            Shape(2, 4, 2, 5, 48, 3, 3),
            torch.float32, {"mask": ag.Causal("bottom_right"), "stats": True}, 3,
        ),
        1,
    ),
    "a bias longer than a sequence": (
        ragged.sequences(
            Batch((7, 3), (17, 5), UNUSED, False),
            {"bias": ag.TensorSpec((1, 1, 7, 17), torch.float32)},
            torch.float32,
        ),
        blocks.BLOCK_BYTES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_found_a_fault_is_the_formula(name: str) -> None:
    case, block = FOUND[name]
    check_case(case, 3, Parts(block, starts.AT_ONCE.value, False), alike(case)[0])


def run_both(
    graph: ag.Graph, plan: ag.Plan, case: ragged.Case, seed: int
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Results, and gradients unless Triton refuses them: those of what modifiers read."""
    tensors = [case.tensors[i.name] for i in graph.inputs]
    results = run_plan(plan, tensors)
    if not graph.has_gradient:
        return results, {}
    try:
        return results, run_gradients(plan, tensors, case.cotangents(seed))
    except ag.NoBackendError:
        assert BACKEND == "triton"
        assert not gradient_is_taken(case.graph)
        return results, {}


def alike(case: ragged.Case) -> list[tuple[ag.Graph, ragged.Case]]:
    """Graphs and tensors that are to give the same bits: zeros in rows that are nobody's, pages
    freed behind a window, and no word of whether all rows lie in sequences."""
    made = [
        (
            case.graph,
            evolve(case, tensors={n: ragged.fill(x, False) for n, x in case.tensors.items()}),
        )
    ]
    if case.layout is not None:
        made.append((case.graph, evolve(case, tensors=free_hidden(case.graph, case.tensors))))
    if case.batch.full and case.layout is None:
        text = str(case.graph)
        assert "all_rows=True" in text
        made.append((ag.parse(text.replace(", all_rows=True", "")), case))
    return made


@pytest.mark.parametrize("names", ["kv", "qkv"])
@pytest.mark.parametrize("lies", RAGGED)
@given(data=st.data(), seed=seeds, of=parts)
@settings(max_examples=FEW)
def test_ragged_quantised_tensors_are_their_numbers_times_scales(
    lies: str, names: str, data: st.DataObject, seed: int, of: Parts
) -> None:
    dtype = BF16 if "q" in names else data.draw(st.sampled_from(FLOATS))
    case, kind = data.draw(RAGGED[lies](dtype)), data.draw(kinds if "q" in names else all_kinds)
    graph = quantise_graph(case.graph, kind, seed, names)
    check_ops(graph, True)
    own, plain = quantise_tensors(graph, case.tensors, seed)
    due, quantised = evolve(case, tensors=plain), evolve(case, tensors=own)
    with planned(graph, of) as plan:
        results, grads = run_both(graph, plan, quantised, seed)
    ragged.check_results(due, results)
    if grads:
        ragged.check_pulled(due, grads, case.cotangents(seed), but=names)


@pytest.mark.parametrize("names", ["kv", "qkv", "qkvo"])
@given(data=st.data(), seed=seeds, of=parts)
@settings(max_examples=FEW)
def test_quantised_tensors_are_their_numbers_times_scales(
    names: str, data: st.DataObject, seed: int, of: Parts
) -> None:
    dtypes = (BF16,) if "q" in names else FLOATS
    size: Any = shapes(8, 6) if CPU.interprets else None
    plain = data.draw(graphs(size, st.sampled_from(dtypes)))
    kind = data.draw(kinds if "q" in names else all_kinds)
    graph = quantise_graph(plain, kind, seed, names)
    assume("o" not in names or graph.inputs[-1].name == "o_scale")
    check_ops(graph, True)
    tensors = tensors_for(graph, seed)
    with planned(graph, of) as plan:
        check_outputs(plan, graph, tensors)
        if "o" in names:
            assert plan.verify(*tensors).allowed
        elif graph.has_gradient:
            assert graph.output_types == plain.output_types
            try:
                check_gradients(plan, graph, tensors, seed)
            except ag.NoBackendError as error:
                refused(error)


@pytest.mark.skipif(CPU.interprets, reason="the definitions, which no kernel runs")
@pytest.mark.parametrize("lies", RAGGED)
@given(data=st.data())
def test_the_slow_meaning_of_a_fused_graph_is_that_of_its_steps(
    lies: str, data: st.DataObject
) -> None:
    case = data.draw(RAGGED[lies](torch.float64))
    tensors = [x.nan_to_num() if x.is_floating_point() else x for x in case.inputs]
    fused = simplify(case.graph)
    for a, b in zip(evaluate(case.graph, tensors), evaluate(fused, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)
    for graph in (case.graph, canonicalise(case.graph), fused):
        assert ag.parse(str(graph)) == graph
        shapes = [tuple(x.shape) for x in evaluate(graph, tensors)]
        assert shapes == [t.shape for t in graph.output_types]
