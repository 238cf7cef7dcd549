"""Outputs in declared layouts: `attention(..., outputs={"o": "bshd"})`, `lay_out`, `vjp`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import attn_graph as ag
from attn_graph.testing.agreement import as_leaves, run_plan
from attn_graph.testing.strategies import graphs, seeds, simple_graphs, with_layouts
from attn_graph.testing.tensors import tensors_for
from tests.ir.test_dims import draw_sizes, named_graphs
from tests.test_outputs import check_written

attention: Any = ag.nn.functional.attention  # Any: with wrong arguments
CPU = ag.Target.of("cpu")
X = ag.TensorSpec((2, 4, 48, 16), torch.float32)
LSE = ag.TensorSpec((2, 4, 48), torch.float32, (400, 1, 8))
GAPS = ag.TensorSpec(X.shape, X.dtype, (10000, 40, 200, 2))
NAMES = st.sampled_from(("math", "torch_sdpa", ""))


def plain(graph: ag.Graph) -> ag.Graph:
    return ag.Graph(graph.inputs, graph.eqns, graph.outputs)


def check_laid(plan: ag.Plan, due: ag.Plan, tensors: tuple[torch.Tensor, ...]) -> None:
    """The bits of a plan without layouts, in the declared ones; in the caller's tensors too."""
    pairs = zip(run_plan(plan, tensors), run_plan(due, tensors), strict=True)
    for (x, y), spec in zip(pairs, plan.graph.declared_outputs, strict=True):
        assert torch.equal(x.nan_to_num(3.5), y.nan_to_num(3.5))
        assert ag.TensorSpec.like(x) == (spec or ag.TensorSpec.like(y))
    check_written(plan, tensors, 3)


@given(graph=with_layouts(graphs()))
def test_layouts_are_a_part_of_the_value_and_of_the_text(graph: ag.Graph) -> None:
    assert ag.parse(str(graph)) == graph
    assert (graph == plain(graph)) == (not graph.layouts)
    forward, _ = ag.vjp(graph) if graph.has_gradient else (graph, None)
    assert forward.layouts[: len(graph.layouts)] == graph.layouts
    assert ag.lay_out(plain(graph), {}) == plain(graph)


@given(graph=with_layouts(st.one_of(graphs(), simple_graphs())), seed=seeds, name=NAMES)
def test_results_lie_as_declared(graph: ag.Graph, seed: int, name: str) -> None:
    among = (name, "math") if name else None
    plan, due = (ag.compile(g, target=CPU, backends=among) for g in (graph, plain(graph)))
    check_laid(plan, due, tensors_for(graph, seed))


@given(graph=graphs(), seed=seeds, data=st.data())
def test_gradients_lie_as_declared(graph: ag.Graph, seed: int, data: st.DataObject) -> None:
    due = ag.compile(graph, target=CPU)
    assume(due.graph.has_gradient)
    back = data.draw(with_layouts(st.just(due.vjp.graph)))
    check_laid(ag.compile(back, target=CPU), due.vjp, tensors_for(back, seed))


@given(graph=with_layouts(graphs(stats=True)), seed=seeds)
def test_autograd_and_forward_mode_follow_declared_layouts(graph: ag.Graph, seed: int) -> None:
    """The backward reads o where the forward left it, and gives what it gives of any o."""
    plans = [ag.compile(g, target=CPU) for g in (graph, plain(graph))]
    assume(plans[0].graph.has_gradient)
    tensors, made = tensors_for(graph, seed), list[list[torch.Tensor]]()
    for plan in plans:
        leaves = as_leaves(tensors)
        outputs = run_plan(plan, leaves)
        wanted = [x for x in leaves if x.requires_grad]
        cotangents = [torch.ones_like(x) for x in outputs]
        made.append([*outputs, *torch.autograd.grad(outputs, wanted, cotangents)])
        with forward_ad.dual_level():
            moved = [forward_ad.make_dual(x, x) if x.is_floating_point() else x for x in tensors]
            primal, _ = forward_ad.unpack_dual(run_plan(plan, tuple(moved))[0])
            assert ag.TensorSpec.like(primal) == ag.TensorSpec.like(outputs[0])
    for x, y in zip(*made, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("order", ["bshd", "sbhd", "bhds"])
def test_whole_heads_are_written_where_o_is_declared(heads: int, named: bool, order: str) -> None:
    """As runs of heads, which are no views of every o."""
    N: Any = ag.Dim("N", most=64) if named else 3
    q, k = (ag.TensorSpec((2, *x, 4), torch.float32) for x in ((2, 2), (heads, N)))
    graph = ag.attention(q, k, k, soft_cap=5.0, stats=True)
    tensors = tensors_for(ag.compile(graph).at(N=3).graph if named else graph, 0)
    due = run_plan(ag.compile(graph, target=CPU), tensors)
    laid = ag.compile(ag.lay_out(graph, {"o": order}), target=CPU)
    for x, y in zip(run_plan(laid, tensors), due, strict=True):
        assert torch.equal(x, y)
    leaves = [t.requires_grad_() for t in tensors]
    for x, y in zip(run_plan(laid, leaves), due, strict=True):
        assert torch.equal(x, y)


@given(graph=named_graphs(), seed=seeds, data=st.data())
def test_sizes_by_name_keep_the_order_of_axes(
    graph: ag.Graph, seed: int, data: st.DataObject
) -> None:
    laid = ag.lay_out(graph, {"o": data.draw(st.sampled_from(("bshd", "sbhd", "bhds")))})
    assert ag.parse(str(laid)) == laid
    plan, due = (ag.compile(g, target=CPU) for g in (laid, graph))
    for _ in range(2):
        sizes = draw_sizes(data, graph)
        tensors = tensors_for(due.at(**sizes).graph, seed)
        exact = plan.at(**sizes).graph
        for x, y in zip(run_plan(plan, tensors), run_plan(due, tensors), strict=True):
            assert torch.equal(x.nan_to_num(3.5), y.nan_to_num(3.5))
        spec = exact.declared_outputs[0]
        assert ag.TensorSpec.like(run_plan(plan, tensors)[0]) == spec


@given(data=st.data())
def test_packed_and_paged_results_lie_as_declared(data: st.DataObject) -> None:
    like, starts = ag.TensorSpec.like, torch.tensor([0, 3, 3, 9, 14])
    q, k = torch.randn(16, 4, 8), torch.randn(16, 2, 8)
    specs, most = [*map(like, (q, k, k))], (9, 9)
    rows = ag.attention(*specs, q_starts=like(starts), max_lengths=most, stats=True)
    pool, pages = torch.randn(6, 4, 2, 8), torch.tensor([[3, 1], [0, 5]])
    one = torch.randn(2, 4, 1, 8)
    paged = ag.attention(*map(like, (one, pool, pool)), pages=like(pages), stats=True)
    for graph, tensors in (rows, (q, k, k, starts)), (paged, (one, pool, pool, pages)):
        laid = data.draw(with_layouts(st.just(graph)))
        check_laid(ag.compile(laid, target=CPU), ag.compile(graph, target=CPU), tensors)


@given(graph=with_layouts(st.just(ag.attention(X, X, X))))
def test_traced_calls_know_declared_layouts(graph: ag.Graph) -> None:
    plan = ag.compile(graph, target=CPU)
    with FakeTensorMode() as mode:
        fake = plan(*(mode.from_tensor(torch.empty(X.shape)) for _ in "qkv"))
    assert isinstance(fake, torch.Tensor)
    assert fake.stride() == run_plan(plan, tensors_for(plan.graph, 0))[0].stride()


@given(graph=with_layouts(graphs()), seed=seeds)
@example(graph=ag.attention(X, X, X, outputs={"o": GAPS}), seed=0)
def test_memory_counts_the_gaps_of_declared_layouts(graph: ag.Graph, seed: int) -> None:
    plan = ag.compile(graph, target=CPU)
    outputs = run_plan(plan, tensors_for(graph, seed))
    assert plan.memory().outputs == sum(x.untyped_storage().nbytes() for x in outputs)


def test_a_gradient_is_named_by_its_input_whatever_adds_it_up() -> None:
    shared = ag.attention(X, X, 8, soft_cap=2.0)
    forward, back = ag.vjp(shared, outputs={"dq": "sbhd", "dk": "bshd"})
    assert [x and x.strides for x in back.declared_outputs] == [(64, 16, 128, 1), (3072, 16, 64, 1)]
    assert ag.parse(str(back)) == back
    check_laid(
        ag.compile(back, target=CPU), ag.compile(plain(back), target=CPU), tensors_for(back, 0)
    )
    with pytest.raises(ag.GraphError, match="no output is named dv; there are dq, dk"):
        ag.vjp(shared, outputs={"dv": "bshd"})
    assert not forward.layouts
    laid = ag.lay_out(shared, {"o": "sbhd"})
    check_laid(ag.compile(laid, target=CPU), ag.compile(shared, target=CPU), tensors_for(laid, 0))
    half = ag.TensorSpec(X.shape, torch.float16)
    there = ag.explain(
        ag.attention(half, half, 8, outputs={"o": "bshd"}), target="h100", backends=("triton",)
    )
    assert "declared layout" not in str(there)


def test_explain_tells_each_copy_to_a_declared_layout() -> None:
    graph = ag.attention(X, X, X, stats=True, outputs={"o": GAPS, "lse": LSE})
    text = str(ag.explain(graph, target=CPU, backends=("torch_sdpa",)))
    assert "o is copied, 24 KiB, to its declared layout\n" in text
    assert "lse is copied, 1.5 KiB, to its declared layout\n" in text
    assert "out= takes a copy" in text
    capped = ag.attention(X, X, X, soft_cap=3.0, outputs={"o": GAPS})
    text = str(ag.explain(capped, target=CPU, backends=("math",)))
    assert "out= takes" not in text
    assert "o is copied, 24 KiB, to its declared layout, in calls that autograd records" in text
    due = ag.attention(X, X, X, stats=True, outputs={"o": X})
    assert "declared" not in str(ag.explain(due, target=CPU))


@pytest.mark.parametrize("stats", [("max",), ("lse", "max")], ids=str)
@pytest.mark.parametrize("laid", [("o",), ("max",), ("o", "max")], ids=str)
def test_the_fix_of_a_statistic_keeps_other_layouts(
    stats: tuple[str, ...], laid: tuple[str, ...]
) -> None:
    """A refusal says that the graph would run without it, and it does."""
    half, lies = ag.TensorSpec(X.shape, torch.bfloat16), {"o": GAPS.strides, "max": LSE.strides}
    shapes = {"o": (X.shape, torch.bfloat16), "max": (LSE.shape, LSE.dtype)}
    outputs = {name: ag.TensorSpec(*shapes[name], lies[name]) for name in laid}
    graph = ag.attention(half, half, half, stats=stats, outputs=outputs)
    with pytest.raises(ag.NoBackendError, match="would run without max in stats"):
        ag.compile(graph, target="h200", backends=("cudnn",))
    assert "without max in stats" in str(ag.explain(graph, target="h200"))
    kept = {name: spec for name, spec in outputs.items() if name != "max"}
    rest = ag.attention(half, half, half, stats="lse" in stats, outputs=kept)
    assert ag.explain(rest, target="h200", backends=("cudnn",)).backend == "cudnn"


@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_a_gradient_tells_and_counts_the_copy_of_an_lse_declared_apart(backend: str) -> None:
    x = ag.TensorSpec((2, 4, 300, 64), torch.float16)
    graph, o = ag.attention(x, x, x, stats=True), x
    apart = ag.lay_out(graph, {"lse": ag.TensorSpec((2, 4, 300), torch.float32, (2400, 600, 2))})
    dense, moved = (
        ag.compile(g, target="h200", backends=(backend,)).backward([0, 1, 2], [o, None]).executable
        for g in (graph, apart)
    )
    assert moved.temporary == dense.temporary + 2 * 4 * 300 * 4
    assert len([note for note in moved.notes if note.startswith("lse is copied")]) == 1


def test_explain_tells_the_copies_of_out_for_gradients() -> None:
    _, back = ag.vjp(ag.attention(X, X, X))
    texts = [str(ag.explain(back, target=CPU)), str(ag.compile(back, target=CPU).explain())]
    assert all("out= takes a copy: the kernels write to memory of their own" in t for t in texts)
    for name in ("triton", "cudnn"):
        half = ag.TensorSpec(X.shape, torch.bfloat16)
        _, back = ag.vjp(ag.attention(half, half, half))
        text = str(ag.explain(back, target="h100", backends=(name,)))
        assert "out= takes a copy of gradients that lie otherwise than without it" in text
    whole = str(ag.explain(ag.attention(X, X, X, soft_cap=2.0), target=CPU, backends=("math",)))
    assert "out= takes" not in whole


WRONG: dict[str, Any] = {  # Any: wrong ones
    r"outputs 'bshd' is not a mapping": "bshd",
    r"no output is named p; there are o, lse": {"p": X},
    r"o 3 is neither a TensorSpec nor an order of axes": {"o": 3},
    r"lse is f32\[2, 4, 48\], and its layout is for f32\[2, 4, 48, 16\]": {"lse": X},
    r"layout 'bsh' for 4 axes": {"o": "bsh"},
    r"o .* has elements in one place": {"o": ag.TensorSpec(X.shape, X.dtype, (0, 1, 4, 8))},
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_layouts_are_refused(text: str) -> None:
    with pytest.raises(ag.GraphError, match=text):
        ag.attention(X, X, X, stats=True, outputs=WRONG[text])


def test_sizes_of_no_input_are_refused() -> None:
    size = ag.Dim("Z", most=9)
    strides = (size * 100000, 10000, 100, 1)
    with pytest.raises(ag.GraphError, match="has Z, which is not a size of the graph"):
        ag.attention(X, X, X, outputs={"o": ag.TensorSpec(X.shape, X.dtype, strides)})


def test_maps_and_meshes_have_layouts_of_their_own() -> None:
    graph = ag.attention(X, X, X, outputs={"o": "bshd"})
    with pytest.raises(ag.GraphError, match="vmap: the graph declares layouts"):
        ag.vmap(graph, size=2)
    with pytest.raises(ag.GraphError, match="shard: the graph declares layouts"):
        ag.shard(graph, ag.Mesh(2), "heads")
    mapped = ag.lay_out(ag.vmap(plain(graph), size=2), {"o": ag.TensorSpec((2, *X.shape), X.dtype)})
    tensors = tensors_for(mapped, 0)
    assert ag.TensorSpec.like(run_plan(ag.compile(mapped, target=CPU), tensors)[0]).is_dense
