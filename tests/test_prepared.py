"""Inputs given in advance: what a plan does, with starts, lengths and tables read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

import attn_graph as ag
from attn_graph.lowering.cpu.packed import PackedRun
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.strategies import graphs, seeds
from attn_graph.testing.tensors import tensors_for
from tests.support import ragged

CPU = Target.here("cpu")
SPEC = ag.TensorSpec
I32 = torch.int32
F32 = torch.float32
LATER = ("q", "k", "v", "sinks")
FEW = settings(max_examples=max(10, settings().max_examples // 2))


def check_prepared(plan: ag.Plan, tensors: dict[str, torch.Tensor]) -> None:
    """The bits of the plan: by position, by name, and in the caller's memory."""
    due = run_plan(plan, [tensors[n] for n in plan.names])
    later = {n: x for n, x in tensors.items() if n in LATER and n in plan.names}
    prepared = plan.prepare(**{n: tensors[n] for n in plan.names if n not in later})
    order = [later[n] for n in plan.names if n in later]
    results: list[Any] = [prepared(*order), prepared(*order[:1], **dict([*later.items()][1:]))]
    rooms = tuple(torch.empty_like(x) for x in due)
    results.append(prepared(*order, out=rooms[0] if len(rooms) == 1 else rooms))
    for made in results:
        given = made if isinstance(made, tuple) else (made,)
        for x, y in zip(given, due, strict=True):
            assert torch.equal(x.isnan(), y.isnan())
            assert torch.equal(x.nan_to_num(), y.nan_to_num())


@given(ragged.paged_cases())
@FEW
def test_a_prepared_call_over_pages_has_the_plans_bits(case: ragged.Case) -> None:
    check_prepared(ag.compile(case.graph, target=CPU), case.tensors)


@given(ragged.packed_cases())
@FEW
def test_a_prepared_call_on_packed_tensors_has_the_plans_bits(case: ragged.Case) -> None:
    names = (i.name for i in case.graph.inputs)
    tensors = dict(zip(names, case.inputs, strict=True))
    check_prepared(ag.compile(case.graph, target=CPU), tensors)


@given(graphs(), seeds)
@FEW
def test_a_prepared_call_of_any_graph_has_the_plans_bits(graph: ag.Graph, seed: int) -> None:
    names = (i.name for i in graph.inputs)
    plan = ag.compile(graph, target=CPU)
    check_prepared(plan, dict(zip(names, tensors_for(graph, seed), strict=True)))


def alone(made: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    assert isinstance(made, torch.Tensor)
    return made


def decoding(B: int = 3) -> tuple[ag.Plan, dict[str, torch.Tensor]]:
    """One row of each sequence over pages, sizes by name."""
    size, pages, n = ag.Dim("B", 64), ag.Dim("C", 64), ag.Dim("n", 1024)
    pool = SPEC((n, 4, 2, 8), F32)
    graph = ag.attention(
        SPEC((size, 4, 1, 8), F32), pool, pool, mask=ag.Causal("bottom_right"),
        pages=SPEC((size, pages), I32), kv_lengths=SPEC((size,), I32),
    )  # fmt: skip
    x = torch.randn(2, B * 4, 4, 2, 8)
    tensors = {"q": torch.randn(B, 4, 1, 8), "k": x[0], "v": x[1]}
    tensors["pages"] = torch.randperm(B * 4).view(B, 4).to(I32)
    tensors["kv_lengths"] = torch.arange(5, 5 + B, dtype=I32)
    return ag.compile(graph, target=CPU), tensors


def test_layers_of_a_step_read_starts_and_tables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, x = decoding()
    read, count = PackedRun.place, list[int]()

    def place(run: PackedRun, *of: Any) -> Any:
        count.append(1)
        return read(run, *of)

    monkeypatch.setattr(PackedRun, "place", place)
    prepared = plan.prepare(pages=x["pages"], kv_lengths=x["kv_lengths"])
    for layer in range(5):
        prepared(x["q"] + layer, x["k"], x["v"])
    assert len(count) == 1


def test_tables_of_any_width_are_of_one_plan() -> None:
    """Entries past the lengths are not read."""
    plan, x = decoding()
    due = alone(plan(**x))
    builds = ag.cache_info().builds
    for more in (1, 9, 40):
        wide = torch.cat([x["pages"], torch.full((3, more), -1, dtype=I32)], 1)
        prepared = plan.prepare(pages=wide, kv_lengths=x["kv_lengths"])
        assert torch.equal(alone(prepared(x["q"], x["k"], x["v"])), due)
    assert ag.cache_info().builds == builds


def test_a_gradient_passes_through_a_prepared_call() -> None:
    plan, x = decoding()
    prepared = plan.prepare(pages=x["pages"], kv_lengths=x["kv_lengths"])
    made = []
    for call in (prepared, lambda q, k, v: plan(**{**x, "q": q, "k": k, "v": v})):
        leaves = [x[n].clone().requires_grad_() for n in "qkv"]
        alone(call(*leaves)).sum().backward()  # type: ignore[no-untyped-call]  # of torch
        made.append([leaf.grad for leaf in leaves])
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


def test_a_prepared_call_is_mapped_as_the_plan() -> None:
    x = SPEC((1, 2, 6, 8), F32)
    plan = ag.compile(ag.attention(x, x, x, kv_lengths=SPEC((1,), I32)), target=CPU)
    q, lengths = torch.randn(4, 1, 2, 6, 8), torch.tensor([3], dtype=I32)
    prepared = plan.prepare(kv_lengths=lengths)
    mapped = torch.vmap(lambda q: alone(prepared(q, q, q)))(q)
    for one, each in zip(mapped, q, strict=True):
        assert torch.equal(one, alone(plan(each, each, each, kv_lengths=lengths)))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a stranger": ({"page": 0}, "page: is not an input; write pages="),
    "a dtype": ({"pages": torch.zeros(3, 4)}, "pages"),
    "sizes that disagree": ({"kv_lengths": torch.zeros(2, dtype=I32)}, "B"),
    "lengths beyond the pages": ({"kv_lengths": torch.full((3,), 99, dtype=I32)}, "kv_lengths"),
    "pages below 0": ({"pages": torch.full((3, 4), -1, dtype=I32)}, "pages"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_inputs_are_refused_when_they_are_given(kind: str) -> None:
    plan, x = decoding()
    given, words = WRONG[kind]
    with pytest.raises(ag.PlanMismatchError, match=words):
        plan.prepare(**{"pages": x["pages"], "kv_lengths": x["kv_lengths"], **given})


def test_a_call_that_does_not_fit_what_was_prepared_is_refused() -> None:
    plan, x = decoding()
    prepared = plan.prepare(pages=x["pages"], kv_lengths=x["kv_lengths"])
    with pytest.raises(ag.PlanMismatchError, match="pages"):
        prepared(x["q"], x["k"][:3], x["v"][:3])
    with pytest.raises(ag.PlanMismatchError, match="B"):
        prepared(x["q"][:2], x["k"], x["v"])
    with pytest.raises(ag.PlanMismatchError, match="v: expected"):
        prepared(x["q"], x["k"])
    x["kv_lengths"].add_(1)
    with pytest.raises(ag.PlanMismatchError, match="written to after") as stale:
        prepared(x["q"], x["k"], x["v"])
    assert str(stale.value).endswith("call it again for each step")


def test_a_prepared_plan_prints_its_given_inputs() -> None:
    plan, x = decoding()
    prepared = plan.prepare(pages=x["pages"], kv_lengths=x["kv_lengths"])
    assert (
        repr(prepared) == f"Prepared({plan.backend} on cpu, kv_lengths: i32[3], pages: i32[3, 4])"
    )
