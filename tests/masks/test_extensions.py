"""Masks and modifiers of one's own, written as a stranger would: right, or refused.

Run with TRITON_INTERPRET=1, as `make test` does too, these tests are Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import pytest
import torch
from attrs import frozen

import attn_graph as ag
from attn_graph.ir.modifiers import Modifier
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.problem import sole
from attn_graph.testing.tensors import tensors_for

CPU = ag.Target.of("cpu")
BACKEND = "triton" if CPU.interprets else "math"
S = 70 if CPU.interprets else 200  # positions: several tiles, so that folding would show
X = ag.TensorSpec((2, 3, S, 8), torch.float32)
SMALL = ag.TensorSpec((2, 2, 6, 8), torch.float32)
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@final
@frozen
class Exponential(Modifier):
    """exp(s / 4), in memory of its own, as its derivative."""

    def change(self, s: torch.Tensor, at: ag.Place) -> torch.Tensor:
        changed: torch.Tensor = (s * 0.25).exp()
        return changed

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: ag.Place) -> torch.Tensor:
        return ds * s * 0.25


@final
@frozen
class Squared(Modifier):
    """s * s / 100, without a derivative."""

    def change(self, s: torch.Tensor, at: ag.Place) -> torch.Tensor:
        return s * s * 0.01


@final
@frozen
class Rows(Modifier):
    """Every seventh query scales its scores; nothing is said of what the step depends on."""

    def factor(self, at: ag.Place) -> Any:
        return (at.i % 7 == 0).to(torch.float32) * 2.0 + 0.5

    def change(self, s: torch.Tensor, at: ag.Place) -> torch.Tensor:
        return s.mul_(self.factor(at))

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: ag.Place) -> torch.Tensor:
        return ds.mul_(self.factor(at))


@final
@frozen
class Shifted(Modifier):
    """Every seventh query adds j / 50; nothing is said of what the step depends on."""

    additive = True

    def change(self, s: torch.Tensor, at: ag.Place) -> torch.Tensor:
        return s.add_((at.i % 7 == 0).to(torch.float32) * at.j * 0.02)


@final
@frozen
class Heads(Modifier):
    """Head h adds h * j / 100, and reads nothing."""

    additive = True

    def change(self, s: torch.Tensor, at: ag.Place) -> torch.Tensor:
        return s.add_(at.h * at.j * 0.01)


@final
@frozen
class Entries(Modifier):
    """The same by batch entry and head, by functions that nobody traces."""

    additive = True

    def change(self, s: torch.Tensor, at: ag.Place) -> torch.Tensor:
        return s + torch.mul(at.b + at.h, at.j) * 0.01


@final
@frozen
class Late(Modifier):
    """Adds 1 / (S - i): infinite just past the last query, where kernels compute as well."""

    additive = True

    def change(self, s: torch.Tensor, at: ag.Place) -> torch.Tensor:
        changed: torch.Tensor = s + 1.0 / (S - at.i).to(torch.float32)
        return changed


CHANGES: dict[Modifier, Change] = {
    Exponential(): lambda s, b, h, i: (s / 4).exp(),
    Squared(): lambda s, b, h, i: s * s * 0.01,
    Rows(): lambda s, b, h, i: s * torch.where(i % 7 == 0, 2.5, 0.5),
    Shifted(): lambda s, b, h, i: s + (i % 7 == 0) * torch.arange(S) * 0.02,
    Heads(): lambda s, b, h, i: s + h * torch.arange(S) * 0.01,
    Entries(): lambda s, b, h, i: s + (b + h) * torch.arange(S) * 0.01,
    Late(): lambda s, b, h, i: s + 1.0 / (S - i),
}
TRACED = [m for m in CHANGES if not (BACKEND == "triton" and isinstance(m, Entries))]
MASK = ag.Window(20, 5)


def graph_of(modifier: Modifier, mask: ag.Mask | None = MASK, x: ag.TensorSpec = X) -> ag.Graph:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ag.Value]:
        s = ag.scores(q, k).then(modifier)
        p, lse = (s if mask is None else s.mask(mask)).softmax()
        return p.weigh(v), lse

    return ag.graph(attend, q=x, k=x, v=x)


def by_hand(change: Change, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """o in float64, with autograd behind it."""
    b, h, i = (torch.arange(n).reshape([-1] + [1] * (3 - a)) for a, n in enumerate((2, 3, S)))
    s = change(q @ k.mT / 8**0.5, b, h, i)
    j = torch.arange(S)
    kept = (i - 20 <= j) & (j <= i + 5)
    return s.masked_fill(~kept, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("modifier", TRACED, ids=lambda m: type(m).__name__)
def test_a_modifier_of_ones_own_is_computed_as_it_says(modifier: Modifier) -> None:
    graph, tensors = graph_of(modifier), tensors_for(graph_of(modifier), 1)
    plan = ag.compile(graph, target=CPU, backends=(BACKEND,))
    given = [t.requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    due = by_hand(CHANGES[modifier], *exact)
    o, _ = plan(*given)
    assert (o - due).abs().max() < 2e-5
    if isinstance(modifier, Squared):
        return
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    due_grads = torch.autograd.grad(due, exact, cotangent.double())
    for grad, due_grad in zip(torch.autograd.grad(o, given, cotangent), due_grads, strict=True):
        assert (grad - due_grad).abs().max() < 2e-5 * max(1.0, float(due_grad.abs().max()))


@pytest.mark.skipif(BACKEND != "math", reason="tiles are folded along the diagonal on CPUs alone")
def test_a_step_that_depends_on_i_is_not_moved_along_the_diagonal() -> None:
    x = ag.TensorSpec((1, 2, 1024, 8), torch.float32)
    graph = graph_of(Shifted(), x=x)
    plan, tensors = ag.compile(graph, target=CPU, backends=("math",)), tensors_for(graph, 1)
    assert plan.verify(*tensors).ok


def test_what_fused_kernels_add_has_the_axes_that_the_definitions_use() -> None:
    for modifier, axes in ((Heads(), "h"), (Entries(), "bh"), (Shifted(), "")):
        problem = sole(ag.compile(graph_of(modifier), target=CPU, backends=("math",)).graph)
        assert problem is not None
        assert FusedTiles.plan(problem).axes == axes


def test_a_step_without_a_derivative_runs_forward_and_its_gradient_is_refused_by_name() -> None:
    graph = graph_of(Squared(), x=SMALL)
    plan = ag.compile(graph, target=CPU, backends=(BACKEND,))
    given = [t.requires_grad_() for t in tensors_for(graph, 1)]
    o, _ = plan(*given)
    assert isinstance(o, torch.Tensor)
    for attempt in (lambda: o.sum().backward(), lambda: ag.vjp(graph), lambda: plan.vjp):
        with pytest.raises(ag.GraphError, match=r"Squared has no gradient.* no back\(ds, s, at\)"):
            attempt()
    assert "runs forward alone: Squared has no gradient" in str(plan.explain())
    assert ag.explain(graph).backward is None
    assert plan.cost().backward is None
    assert plan.memory().gradients == 0


# What is wrong with a definition is told when a graph is built


@frozen
class Leaf(ag.Mask):
    """What leaves below have in common: `size`."""

    size: int = 3

    def keep(self, at: ag.Place) -> Any:
        return at.i // self.size == at.j // self.size


@final
class Undecorated(ag.Mask):
    """Equal to all others of its kind, whatever its size is."""

    def __init__(self, size: int) -> None:
        object.__setattr__(self, "size", size)

    def keep(self, at: ag.Place) -> Any:
        return at.j < self.size  # type: ignore[attr-defined]  # set behind attrs' back


@final
@frozen
class Tabled(ag.Mask):
    table: torch.Tensor

    def keep(self, at: ag.Place) -> Any:
        return self.table[at.i, at.j]


@final
@frozen
class Numbered(Leaf):
    def keep(self, at: ag.Place) -> Any:
        return (at.i - at.j) % 2


@final
@frozen
class Anded(Leaf):
    def keep(self, at: ag.Place) -> Any:
        return at.j <= at.i and at.j >= at.i - self.size


@final
@frozen
class Narrow(Leaf):
    def span(self, block: ag.Block) -> ag.Keys:
        return ag.Keys.between(block.rows.start, min(block.N, block.rows.stop))


@final
@frozen
class Early(Leaf):
    def span(self, block: ag.Block) -> ag.Keys:
        return ag.Keys.between(block.rows.start - 3, block.rows.stop)


@final
@frozen
class Sure(Leaf):
    def surely(self, block: ag.Block) -> ag.Keys:
        return ag.Keys.between(block.rows.start, block.rows.start + 1)


@final
@frozen
class Stripped(Leaf):
    def strip(self, at: ag.Place) -> Any:
        return ag.Causal().strip(at)


@final
@frozen
class Relative(Leaf):
    @property
    def relative(self) -> bool:
        return True


@final
@frozen
class Unindexed(Leaf):
    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"table": ag.Data("bj")}

    def keep(self, at: ag.Place) -> Any:
        return at.load("table") > at.i


@final
@frozen
class Unnamed(Leaf):
    def keep(self, at: ag.Place) -> Any:
        return at.load("table", at.b) > at.j


@final
@frozen
class Limited(Leaf):
    """Reads a tensor, and holds what it says."""

    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"limits": ag.Data("b")}

    def keep(self, at: ag.Place) -> Any:
        return at.j <= at.load("limits", at.b)


@final
@frozen
class ByLengths(Leaf):
    """Lies where data is known alone."""

    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"limits": ag.Data("b")}

    def keep(self, at: ag.Place) -> Any:
        return at.j <= at.load("limits", at.b)

    def span(self, block: ag.Block) -> ag.Keys:
        bounds = block.bounds("limits", "b")
        return ag.Keys.between(0, bounds[0]) if bounds else block.all


LIMITS = {"limits": ag.TensorSpec((2,), torch.int64), "table": ag.TensorSpec((2, 6), torch.int64)}
WRONG_MASKS: dict[str, tuple[Callable[[], ag.Mask], str]] = {
    "no attrs class": (lambda: Undecorated(3), "Undecorated: the class has no fields of its own"),
    "tensor as a field": (
        lambda: Tabled(torch.ones(6, 6, dtype=torch.bool)),
        "Tabled: table is a Tensor",
    ),
    "numbers": (Numbered, "Numbered.keep gives torch.int64, and has to say true or false"),
    "numbers under ~": (lambda: ~Numbered() & ag.Causal(), "Numbered.keep gives torch.int64"),
    "Python's and": (Anded, "Anded.keep fails on a block of places"),
    "span of no keys": (Early, "Early.span of queries 0 to 5 has keys -3 to 5"),
    "span too small": (Narrow, "Narrow.span of queries 1 to 5 lacks key 0"),
    "span too small with data": (ByLengths, "ByLengths.span of queries"),
    "surely too large": (Sure, "Sure.surely of queries 0 to 5 has key 0"),
    "strip of another mask": (Stripped, "Stripped.strip is not what keep keeps"),
    "not relative": (Relative, "Relative says relative = True"),
    "load without indices": (Unindexed, "'table' has 2 axes, and 0 indices are given"),
    "load of a stranger": (Unnamed, "'table' is not among what `needs` names"),
}


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_a_mask_that_does_not_hold_what_it_says_is_refused(name: str) -> None:
    make, words = WRONG_MASKS[name]
    mask = make()
    more: dict[str, Any] = {n: LIMITS[n] for n in mask.needs}
    with pytest.raises(ag.GraphError) as caught:
        ag.attention(SMALL, SMALL, SMALL, mask=mask & ag.Window(9, 9), **more)
    assert words in str(caught.value)


@frozen
class Step(Modifier):
    """What steps below have in common."""

    def change(self, s: torch.Tensor, at: ag.Place) -> Any:
        return s.mul_(2.0)

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: ag.Place) -> Any:
        return ds.mul_(2.0)


@final
class Plain(Step):
    pass


@final
@frozen
class Silent(Step):
    def change(self, s: torch.Tensor, at: ag.Place) -> Any:
        s.mul_(2.0)


@final
@frozen
class SilentBack(Step):
    def back(self, ds: torch.Tensor, s: torch.Tensor, at: ag.Place) -> Any:
        ds.mul_(2.0)


@final
@frozen
class Summed(Step):
    def change(self, s: torch.Tensor, at: ag.Place) -> Any:
        return s.sum(-1)


@final
@frozen
class Scaling(Step):
    additive = True


@final
@frozen
class AddingBack(Step):
    additive = True

    def change(self, s: torch.Tensor, at: ag.Place) -> Any:
        return s + 1.0


@final
@frozen
class Diagonal(Step):
    @property
    def relative(self) -> bool:
        return True

    def change(self, s: torch.Tensor, at: ag.Place) -> Any:
        return s * (at.i + 1)


@final
@frozen
class Branching(Step):
    def change(self, s: torch.Tensor, at: ag.Place) -> Any:
        return s * 2 if at.i < at.j else s


@final
@frozen
class Turned(Modifier):
    """Adds table[j, h], of which `load` gives a copy."""

    additive = True

    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"table": ag.Data("jh", (torch.float32,))}

    @property
    def trains(self) -> tuple[str, ...]:
        return ("table",)

    def change(self, s: torch.Tensor, at: ag.Place) -> torch.Tensor:
        changed: torch.Tensor = s + at.load("table", at.j, at.h)
        return changed

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: ag.Place) -> None:
        share = at.reading(totals).load("table", at.j, at.h)
        share += ds.sum_to_size(share.shape)


def test_a_gradient_that_is_added_to_a_copy_is_refused() -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value, table: ag.Value) -> ag.Value:
        return ag.scores(q, k).then(Turned(), table).softmax()[0].weigh(v)

    table = ag.TensorSpec((6, SMALL.shape[1]), torch.float32)
    with pytest.raises(ag.GraphError, match=r"Turned.collect adds nothing to totals\['table'\]"):
        ag.graph(attend, q=SMALL, k=SMALL, v=SMALL, table=table)


@final
@frozen
class FirstHeadAll(ag.Mask):
    """Head 0 sees all keys, the others what came before."""

    def keep(self, at: ag.Place) -> Any:
        return (at.h == 0) | (at.j <= at.i)

    def surely(self, block: ag.Block) -> ag.Keys:
        last = block.N if block.heads == range(1) else block.rows.start + 1
        return ag.Keys.between(0, last)


def test_a_mask_that_one_head_keeps_whole_is_not_simplified_away() -> None:
    graph = ag.attention(X, X, X, mask=FirstHeadAll())
    plan = ag.compile(graph, target=CPU, backends=(BACKEND,))
    assert plan.verify(*tensors_for(graph, 1)).ok
    q, k, v = tensors_for(graph, 1)
    causal = ag.compile(ag.attention(X, X, X, mask=ag.Causal()), target=CPU, backends=(BACKEND,))
    o, due = plan(q, k, v), causal(q, k, v)
    assert isinstance(o, torch.Tensor)
    assert isinstance(due, torch.Tensor)
    assert torch.allclose(o[:, 1:], due[:, 1:], atol=2e-5)


WRONG_STEPS: dict[Modifier, str] = {
    Plain(): "Plain: the class has no fields of its own",
    Silent(): "Silent.change returns NoneType",
    SilentBack(): "SilentBack.back returns NoneType",
    Summed(): "Summed.change returns torch.float64 [2, 2, 6]",
    Scaling(): "Scaling says additive = True, and back is not ds itself",
    AddingBack(): "AddingBack says additive = True, and back is not ds itself",
    Diagonal(): "Diagonal says relative = True",
    Branching(): "Branching.change fails on a block of places",
}


@pytest.mark.parametrize("modifier", WRONG_STEPS, ids=lambda m: type(m).__name__)
def test_a_modifier_that_does_not_hold_what_it_says_is_refused(modifier: Modifier) -> None:
    with pytest.raises(ag.GraphError) as caught:
        graph_of(modifier, x=SMALL)
    assert WRONG_STEPS[modifier] in str(caught.value)


def test_definitions_are_checked_once_whatever_the_length() -> None:
    from attn_graph.ir.promises import check_leaf

    check_leaf.cache_clear()
    for length in (1024, 2048, 4096):
        x = ag.TensorSpec((8, 4, length, 64), torch.bfloat16)
        ag.attention(x, x, x, mask=Leaf(64) & ag.Causal())
    assert check_leaf.cache_info().misses == 1


def test_checks_that_need_tensors_are_made_under_a_transform() -> None:
    from attn_graph.ir.promises import check_leaf

    def attend(x: torch.Tensor) -> torch.Tensor:
        graphs.append(ag.attention(SMALL, SMALL, SMALL, mask=Limited(), limits=LIMITS["limits"]))
        return x

    check_leaf.cache_clear()
    graphs: list[ag.Graph] = []
    torch.vmap(attend)(torch.zeros(2))
    assert [i.name for i in graphs[0].inputs] == ["q", "k", "v", "limits"]


def test_checks_are_made_under_any_mode() -> None:
    from torch._subclasses import FakeTensorMode

    from attn_graph.ir.promises import check_leaf, check_modifier_once

    for mode in (FakeTensorMode(), torch.device("meta"), torch.inference_mode()):
        check_leaf.cache_clear()
        check_modifier_once.cache_clear()
        with mode:
            graph_of(Rows(), Leaf(64), SMALL)
            with pytest.raises(ag.GraphError, match=r"Narrow\.span"):
                ag.attention(SMALL, SMALL, SMALL, mask=Narrow())
