"""Statistics of rows: which are returned and in which order, who gives them, and their gradients.

That their numbers are right is drawn in test_lowering, as all results are. Run with
TRITON_INTERPRET=1, as `make test` does too, these tests are Triton's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, final

import pytest
import torch
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir import ops
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.passes import simplify
from attn_graph.masks import Data
from attn_graph.masks.places import Place
from attn_graph.mesh.totals import RowResults
from attn_graph.spec import FLOATS, ValueType
from attn_graph.testing.strategies import seeds
from tests.support.equipped import equip

CPU = ag.Target.of("cpu")
BACKEND = "triton" if CPU.interprets else "math"
INF = float("inf")
X = ag.TensorSpec((2, 4, 6, 8), torch.float32)
Options = dict[str, Any]  # Any: options of `attention`


def run(graph: ag.Graph, *tensors: torch.Tensor, **named: torch.Tensor) -> tuple[Any, ...]:
    """The outputs, by the backend that is tested."""
    found = ag.compile(graph, target=CPU, backends=(BACKEND,))(*tensors, **named)
    return found if isinstance(found, tuple) else (found,)


def qkv(seed: int = 0) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, *X.shape, generator=torch.Generator().manual_seed(seed)))


# Which, and in which order


@pytest.mark.parametrize("stats", [("lse",), ("max",), ("lse", "max"), ("max", "lse"), ["max"]])
def test_statistics_come_after_o_in_the_order_of_their_names(stats: Any) -> None:
    q, k, v = qkv()
    _, *found = run(ag.attention(X, X, X, mask=ag.Causal(), stats=stats), q, k, v)
    s = (q @ k.mT / math.sqrt(8)).masked_fill(~torch.ones(6, 6).tril().bool(), -INF)
    due = {"lse": s.logsumexp(-1), "max": s.amax(-1)}
    assert len(found) == len(stats)
    for x, name in zip(found, stats, strict=True):
        torch.testing.assert_close(x, due[name])
        assert x.is_contiguous()


def test_true_is_lse_and_false_is_none() -> None:
    assert ag.attention(X, X, X, stats=True) == ag.attention(X, X, X, stats=("lse",))
    assert ag.attention(X, X, X, stats=False) == ag.attention(X, X, X, stats=())


@pytest.mark.parametrize(
    ("stats", "problem"),
    [
        ("lse", "stats 'lse' is not a sequence of names; write stats=(\"lse\",)"),
        (1, 'stats 1 is not a sequence of names; write stats=("lse",)'),
        (("lse", "mean"), "stats 'mean' is none of lse, max"),
        (("max", "max"), "stats ('max', 'max') name one statistic twice"),
    ],
)
def test_what_names_no_statistic_is_refused(stats: Any, problem: str) -> None:
    with pytest.raises(ag.GraphError) as error:
        ag.attention(X, X, X, stats=stats)
    assert problem in str(error.value)


def test_an_attention_always_gives_lse_which_its_gradient_reads() -> None:
    assert Attention().names == ("o", "lse")
    assert Attention(stats=("max", "lse")).names == ("o", "lse", "max")
    for stats in (("max",), ("lse", "mean")):
        with pytest.raises(ag.GraphError, match="are not lse and some of"):
            Attention(stats=stats)


def test_a_graph_without_the_largest_score_prints_as_it_always_did() -> None:
    assert "stats" not in str(simplify(ag.attention(X, X, X, stats=True)))
    assert "stats=('lse', 'max')" in str(simplify(ag.attention(X, X, X, stats=("max",))))


# In single steps


@pytest.mark.parametrize("last", [False, True])
def test_the_largest_of_the_scores_that_softmax_reads_is_a_result_of_attention(last: bool) -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ...]:
        s = ag.scores(q, k).soft_cap(3.0).mask(ag.Causal())
        early = None if last else s.max_scores()
        o = s.softmax()[0].weigh(v)
        return o, s.max_scores() if early is None else early

    steps = ag.graph(attend, q=X, k=X, v=X)
    once = ag.attention(X, X, X, soft_cap=3.0, mask=ag.Causal(), stats=("max",))
    assert simplify(steps) == simplify(once)


def before_the_mask(s: ag.Value) -> tuple[ag.Value, ag.Value]:
    return s.mask(ag.Causal()), s.max_scores()


def before_a_cap(s: ag.Value) -> tuple[ag.Value, ag.Value]:
    s = s.mask(ag.Causal())
    return s.soft_cap(0.5), s.max_scores()


def twice(s: ag.Value) -> tuple[ag.Value, ag.Value, ag.Value]:
    s = s.mask(ag.Causal())
    return s, s.max_scores(), s.max_scores()


@pytest.mark.parametrize("steps", [before_the_mask, before_a_cap, twice])
def test_the_largest_of_other_scores_stays_a_step(steps: Any) -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ...]:
        s, *more = steps(ag.scores(q, k))
        return (s.softmax()[0].weigh(v), *more)

    graph = ag.graph(attend, q=X, k=X, v=X)
    assert not any(isinstance(eqn.op, Attention) for eqn in simplify(graph).eqns)
    tensors = qkv()
    assert ag.compile(graph, target=CPU).verify(*tensors).ok
    s = tensors[0] @ tensors[1].mT / math.sqrt(8)
    kept = torch.ones(6, 6).tril().bool() | (steps is before_the_mask)
    for found in ag.evaluate(graph, tensors)[1:]:
        torch.testing.assert_close(found.float(), s.masked_fill(~kept, -INF).amax(-1))


# What it says of rows


def test_a_row_that_sees_nothing_has_minus_infinity_whatever_its_sink() -> None:
    lengths, sinks = torch.tensor([4, 0]), torch.tensor([50.0, -INF, 2.0, 0.0])
    like = ag.TensorSpec.like
    graph = ag.attention(
        *(X, X, X), q_lengths=like(lengths), sinks=like(sinks), stats=("max", "lse")
    )
    q, k, v = qkv()
    o, found, lse = run(graph, q, k, v, q_lengths=lengths, sinks=sinks)
    blind = torch.arange(6)[None] >= lengths[:, None]
    s = (q @ k.mT / math.sqrt(8)).amax(-1)
    torch.testing.assert_close(found, s.masked_fill(blind[:, None], -INF))
    torch.testing.assert_close(lse[1], sinks[:, None].expand(4, 6))
    assert (o[1] == 0).all()


@pytest.mark.skipif(CPU.interprets, reason="Triton's kernels need a key")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_without_keys_every_row_has_minus_infinity(dtype: torch.dtype) -> None:
    q, k = ag.TensorSpec((1, 2, 3, 8), dtype), ag.TensorSpec((1, 2, 0, 8), dtype)
    tensors = [torch.zeros(x.shape, dtype=dtype) for x in (q, k, k)]
    _, found = run(ag.attention(q, k, k, stats=("max",)), *tensors)
    assert (found == -INF).all()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_nan_among_the_scores_of_a_row_shows() -> None:
    q, k, v = qkv()
    q[0, 1, 3] = float("nan")
    _, found = run(ag.attention(X, X, X, stats=("max",)), q, k, v)
    assert found.isnan().nonzero().tolist() == [[0, 1, 3]]


@given(seed=seeds, seen=st.integers(1, 6))
def test_lse_lies_between_the_largest_score_and_that_with_all_keys_alike(
    seed: int, seen: int
) -> None:
    """max <= lse <= max + log n; and keys that are masked, however large, change neither."""
    q, k, v = qkv(seed)
    k[:, :, seen:] *= 100
    lengths = torch.tensor([seen, seen])
    graph = ag.attention(X, X, X, kv_lengths=ag.TensorSpec.like(lengths), stats=("max", "lse"))
    _, largest, lse = run(graph, q, k, v, kv_lengths=lengths)
    room = 2.0**-20 * (1 + largest.abs())
    assert (largest <= lse + room).all()
    assert (lse <= largest + math.log(seen) + room).all()


# Gradients


def test_it_does_not_require_grad_and_changes_no_gradient() -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    o, largest, lse = run(ag.attention(X, X, X, stats=("max", "lse")), *leaves)
    assert (o.requires_grad, largest.requires_grad, lse.requires_grad) == (True, False, True)
    loss = o.square().sum() + (lse + largest).sum()
    with pytest.raises(RuntimeError, match="does not require grad"):
        largest.sum().backward()
    due_o, due_lse = run(ag.attention(X, X, X, stats=True), *leaves)
    due = torch.autograd.grad(due_o.square().sum() + due_lse.sum(), leaves)
    for a, b in zip(torch.autograd.grad(loss, leaves), due, strict=True):
        torch.testing.assert_close(a, b)


def test_its_gradient_is_the_gradient_of_the_graph_without_it() -> None:
    with_it, without = (ag.attention(X, X, X, stats=s) for s in (("max", "lse"), ("lse",)))
    assert ag.vjp(with_it)[1] == ag.vjp(without)[1]
    plan = ag.compile(with_it, target=CPU)
    assert plan.training_vjp is ag.compile(without, target=CPU).training_vjp
    assert AttentionGrad(Attention(stats=("lse", "max")), (True,) * 3).attention == Attention()


@pytest.mark.parametrize("simple", [False, True])
def test_a_cotangent_for_it_is_refused(simple: bool) -> None:
    graph = ag.attention(X, X, X, stats=("lse", "max"))
    graph = simplify(graph) if simple else graph
    for cotangents in (("max",), ("o", "max")):
        with pytest.raises(ag.GraphError, match="max is a statistic without a gradient"):
            ag.vjp(graph, cotangents=cotangents)
    for op in (Attention(stats=("lse", "max")), ops.MaxScores()):
        grads = [object() if name == "max" else None for name in op.names]
        with pytest.raises(ag.GraphError, match="max is a statistic"):
            op.pull(lambda *_: (), (), grads, grads)


def test_a_graph_that_returns_nothing_else_has_no_gradient() -> None:
    graph = ag.graph(lambda q, k: ag.scores(q, k).max_scores(), q=X, k=X)
    assert not graph.has_gradient
    with pytest.raises(ag.GraphError, match="returns nothing that has a gradient"):
        ag.vjp(graph)
    plan = ag.compile(graph, target=CPU)
    assert "runs forward alone: it returns nothing that has a gradient" in str(plan.explain())
    q, k, _ = (x.requires_grad_() for x in qkv())
    found = plan(q, k)
    assert isinstance(found, torch.Tensor)
    assert not found.requires_grad


@final
@frozen
class BelowMaximum(Modifier):
    """s - top, of the largest scores that another attention gave; trained: top has a gradient."""

    trained: bool = False
    additive = True

    @property
    def needs(self) -> dict[str, Data]:
        return {"top": Data("bhi", FLOATS)}

    @property
    def trains(self) -> tuple[str, ...]:
        return ("top",) if self.trained else ()

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        return s.sub_(at.load("top", at.b, at.h, at.i))

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        share = at.reading(totals).load("top", at.b, at.h, at.i)
        share -= ds.sum_to_size(share.shape)


def reading_the_maximum(step: Modifier) -> ag.Graph:
    """Two attentions, the second of which reads the largest scores of the first."""

    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ag.Value]:
        s = ag.scores(q, k)
        top, o = s.max_scores(), s.softmax()[0].weigh(v)
        return o, ag.scores(q, k).then(step, top).softmax()[0].weigh(v)

    return ag.graph(attend, q=X, k=X, v=X)


@pytest.mark.skipif(CPU.interprets, reason="Triton takes one attention")
def test_another_attention_may_read_it_as_a_constant() -> None:
    graph = reading_the_maximum(BelowMaximum())
    first, _ = simplify(graph).eqns
    assert isinstance(first.op, Attention)
    assert first.op.names == ("o", "lse", "max")
    leaves = [x.requires_grad_() for x in qkv()]
    o, again = run(graph, *leaves)
    torch.testing.assert_close(o, again)  # a shift of a row's scores changes nothing
    due = torch.autograd.grad(o.square().sum(), leaves, retain_graph=True)
    for a, b in zip(torch.autograd.grad(again.square().sum(), leaves), due, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_loss_of_it_is_refused_since_it_has_no_gradient() -> None:
    graph = reading_the_maximum(BelowMaximum(trained=True))
    for each in (graph, simplify(graph)):
        with pytest.raises(ag.GraphError, match="max is a statistic"):
            ag.vjp(each)


# Who gives it


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_who_does_not_give_it_says_so_and_what_would_lift_that(target: str) -> None:
    x = ag.TensorSpec((2, 4, 256, 64), torch.float16)
    explanation = ag.explain(ag.attention(x, x, x, stats=("lse", "max")), target=equip(target))
    reasons = {(r.backend, n): x for r in explanation.refusals for n, x in enumerate(r.reasons)}
    places = {name: n for (name, n), x in reasons.items() if x.key == "statistics"}
    assert all("returns max" in str(reasons[place]) for place in places.items())
    against = {r.backend: r for r in explanation.refusals if r.backend in places}
    if target == "cpu":
        assert (explanation.backend, [*against]) == ("math", ["torch_sdpa"])
    else:
        assert explanation.backend == "triton"
        assert {*against} == {"cudnn", "fa4", "torch_flash", "torch_efficient", "torch_cudnn"}
        assert explanation.backward is not None
        assert explanation.backward.backend == "cudnn"  # which reads o and lse alone
    for refusal in against.values():
        (remedy,) = refusal.lifts[places[refusal.backend]]
        assert (remedy.text, remedy.changes_result) == ("drop max from stats", True)
        if len(refusal.reasons) == 1:  # fa4 is not installed, which no graph mends
            assert refusal.smallest is not None
            assert refusal.smallest.graph == ag.attention(x, x, x, stats=True)


def test_memory_counts_it_among_outputs_and_what_a_loss_keeps() -> None:
    with_it, without = (
        ag.compile(ag.attention(X, X, X, stats=s), target=CPU, backends=("math",)).memory()
        for s in (("max",), ())
    )
    size = math.prod(X.shape[:3]) * 4
    assert with_it.outputs == without.outputs + size
    assert with_it.saved == without.saved + size


def test_the_cost_counts_the_bytes_of_what_is_returned() -> None:
    costs = [ag.compile(ag.attention(X, X, X, stats=s), target=CPU).cost() for s in (("max",), ())]
    size = math.prod(X.shape[:3]) * 4
    assert costs[0].forward.bytes == costs[1].forward.bytes + size
    assert costs[0].backward == costs[1].backward


# Over keys in several parts


@final
@frozen
class CountKeys(ops.Statistic):
    """s [B,H,M,N] -> seen [B,H,M]: how many keys a row sees, which adds up over parts."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("seen",)

    @property
    def roles(self) -> tuple[str, ...]:
        return ("s",)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (4,)

    @property
    def statistics(self) -> tuple[str, ...]:
        return self.names

    @property
    def without_gradient(self) -> tuple[str, ...]:
        return self.names

    def infer(self, s: ValueType) -> tuple[ValueType]:
        return (ValueType(s.shape[:3], s.dtype),)

    def run(self, s: torch.Tensor) -> tuple[torch.Tensor]:
        return ((s > -INF).sum(-1).to(s.dtype),)

    def join(self, own: torch.Tensor, more: torch.Tensor) -> None:
        own += more


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`seen` is a statistic too, which this library does not know."""
    monkeypatch.setitem(ops.STATISTICS, "seen", CountKeys)
    monkeypatch.setattr(ops, "ROW_RESULTS", (*ops.ROW_RESULTS, "seen"))


@pytest.mark.usefixtures("counted")
@given(data=st.data(), seed=seeds)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_statistic_of_all_keys_is_joined_from_parts(data: st.DataObject, seed: int) -> None:
    s = torch.randn(2, 3, 4, 9, generator=torch.Generator().manual_seed(seed))
    s[s > 1] = -INF
    cut = sorted(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    parts = s.tensor_split(cut, dim=3)
    for name, kind in ops.STATISTICS.items():
        own = {name: kind().run(s[..., :0])[0]}
        for part in parts:
            ops.join_statistics(own, {name: kind().run(part)[0]})
        assert torch.equal(own[name], kind().run(s)[0])


@pytest.mark.usefixtures("counted")
@pytest.mark.skipif(CPU.interprets, reason="Triton gives no other statistic")
def test_pages_join_a_statistic_that_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_graph.lowering.cpu.sequences.BLOCK_BYTES", 2**9)
    q, pool = torch.randn(1, 4, 6, 8), torch.randn(3, 8, 2, 8)
    pages, lengths, like = torch.tensor([[2, 0, 1]]), torch.tensor([21]), ag.TensorSpec.like
    graph = ag.attention(
        *map(like, (q, pool, pool)), pages=like(pages), kv_lengths=like(lengths),
        stats=("max", "seen"),
    )  # fmt: skip
    _, largest, seen = run(graph, q, pool, pool, pages=pages, kv_lengths=lengths)
    k = pool[pages[0]].flatten(0, 1)[:21].permute(1, 2, 0).repeat_interleave(2, 0)
    assert (seen == 21).all()
    torch.testing.assert_close(largest, (q @ k / math.sqrt(8)).amax(-1))


@pytest.mark.usefixtures("counted")
def test_ranks_join_a_statistic_that_is_new() -> None:
    """A range of queries that sees two sets of keys, and queries that have seen none yet."""
    x = ag.TensorSpec((1, 2, 4, 8), torch.float32)
    graph = ag.attention(x, x, x, stats=("max", "seen"))
    sharded = ag.shard(graph, ag.Mesh(2), "contiguous")
    site: Any = SimpleNamespace(sharded=sharded)  # Any: all that `empty` reads of a site
    rows = RowResults.empty(site, torch.zeros(1, 2, 6, 8), 8)
    o, three = torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 4)
    rows.add((range(4),), o, three, three, three)
    rows.add((range(4),), o, three, 2 * three, 5 * three)
    assert rows.rows["max"][0, 0].tolist() == [2.0] * 4 + [-INF] * 2
    assert rows.rows["seen"][0, 0].tolist() == [6.0] * 4 + [0.0] * 2
