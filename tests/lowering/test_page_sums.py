"""Gradients of keys in pages by Triton's kernels, under its interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage.paging import SumPages
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.triton.places import NAMED, ORDER, order_pages
from attn_graph.lowering.triton.plan import Flash
from attn_graph.testing.agreement import run_gradients
from attn_graph.testing.rule import expect_gradients
from attn_graph.testing.strategies import Shape
from tests.lowering.test_sequences import (
    I32,
    SPEC,
    inside_nan,
    interpreted,
    watch_around_results,
)
from tests.support import ragged
from tests.support.sequences import Batch, lay_like

HALF = (torch.float32, torch.float16, torch.bfloat16)
THREE = Batch((2, 33, 0), (40, 1, 33), ((0, 0),) * 3, False)  # several tiles of rows and keys


def compile_both(graph: ag.Graph, **options: Any) -> ag.Plan:
    """Both passes by Triton."""
    return ag.compile(graph, backends=("triton",), **options)


def make_case(
    page: int, packed: bool, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> ragged.Case:
    """Three entries in pages, grouped heads, NaN wherever no key is."""
    batch = THREE if packed else evolve(THREE, rows=(2, 2, 2))
    layout = ragged.Layout(page, heads_first=page == 5, ended=True, packed=packed)
    shape = Shape(3, 2, 1, 33 if packed else 2, -(-40 // page) * page, 8, 8)
    return ragged.make_paged(batch, layout, shape, dtype, options, 3)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"mask": ag.Causal("bottom_right"), "stats": True},
    {"mask": ag.Window(20, 3, "bottom_right"), "soft_cap": 2.0},
    {"mask": ag.Causal("bottom_right") | ag.Prefix(2), "align": "bottom_right"},
    {"mask": None, "dropout": 0.3},
    {"mask": None, "sinks": SPEC((2,), torch.float32), "stats": True},
)


@interpreted
@pytest.mark.parametrize(("page", "options"), [*zip((1, 5, 16, 32, 64), OPTIONS, strict=True)])
def test_pages_of_every_size(page: int, options: dict[str, Any]) -> None:
    """Some tiles in a page, some pages in a tile; and the same bits in every run."""
    case = make_case(page, page % 3 == 1, options, HALF[page % 3])  # packed by turns
    plan = compile_both(case.graph)
    ragged.check_case(case, plan)
    grads = ragged.check_gradients(case, plan, 7)
    again = run_gradients(plan, case.inputs, case.cotangents(7))
    assert all(torch.equal(grads[name], again[name]) for name in grads)


def share_pages(case: ragged.Case) -> ragged.Case:
    """The same, the first entry's pages being named by the third one too, and one of them twice."""
    pages = case.tensors["pages"].clone()
    pages[2] = pages[0]
    pages[2, 2] = pages[2, 0]
    pages = lay_like(pages, SPEC.like(case.tensors["pages"]))
    shared = evolve(case, tensors=case.tensors | {"pages": pages})
    for x in (case.tensors["k"], case.tensors["v"]):
        x.masked_fill_(shared.unused(x), torch.nan)
    return shared


@interpreted
@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("wanted", ["k", "v", "kv"])
def test_a_page_that_several_name_gets_the_sum(page: int, wanted: str) -> None:
    """Of what its rows would get as keys in one piece; also where one of k and v is a constant."""
    case = share_pages(make_case(page, False, {"mask": ag.Causal("bottom_right")}))
    forward, backward = ag.vjp(case.graph, [*wanted])
    plan, do = compile_both(backward), torch.randn(3, 2, 2, 8)
    o, lse = ag.compile(forward, backends=("triton",))(*case.inputs)[:2]
    given_tensors = {**case.tensors, "o": o, "lse": lse, "do": do}
    made = plan(*(given_tensors[i.name] for i in plan.graph.inputs))
    grads = dict(zip(wanted, made if isinstance(made, tuple) else (made,), strict=True))
    dues = expect_gradients(case.padded, case.padded_inputs, [do])
    for name, x in grads.items():
        pool = case.tensors[name]
        (due,) = SumPages(len(pool), page, True).run(dues[name].ref.float(), *case.places)
        torch.testing.assert_close(x, due, rtol=1e-5, atol=1e-5)
        assert (x.masked_select(case.unused(x)) == 0).all()


def test_entries_are_in_the_order_of_pages_and_then_of_the_table() -> None:
    table = torch.tensor([[3, 1, 9], [1, 3, 3]], dtype=I32)
    made = order_pages(table, torch.tensor([4, 5]), page=2, pool=5)
    assert made[NAMED].tolist() == [1, 1, 3, 3, 3, 5]
    assert made[ORDER].tolist() == [1, 3, 0, 4, 5, 2]
    assert order_pages(table, None, 2, 5)[NAMED].tolist() == [1, 1, 3, 3, 3, 4]


@interpreted
@pytest.mark.parametrize("lengths", [[10**6, -5, 33], [40, 40, 40]])
def test_nothing_is_read_or_written_outside_whatever_tables_and_lengths_are(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are undefined then, and finite: NaN surrounds every tensor."""
    case = make_case(16, True, {"mask": ag.Causal("bottom_right"), "stats": True})
    tensors = {n: x.nan_to_num() if x.is_floating_point() else x for n, x in case.tensors.items()}
    wrong = {"kv_lengths": torch.tensor(lengths), "pages": torch.tensor([[10**6, -7, 3]] * 3)}
    tensors |= {n: lay_like(x.int(), SPEC.like(tensors[n])) for n, x in wrong.items()}
    rooms = watch_around_results(monkeypatch)
    given_tensors = [inside_nan(tensors[i.name]) for i in case.graph.inputs]
    plan = compile_both(case.graph)
    grads = run_gradients(plan, given_tensors, case.cotangents(3))
    assert len(rooms) == 5  # o, lse, dq, dk and dv
    assert not any(x.isnan().any() for x in grads.values())


# Planning


def paged_gradient(B: int, count: int, **options: Any) -> ag.Graph:
    """The gradient of a prefill of B entries in `count` pages of 16 each, 32 heads to 8."""
    q, k = SPEC((B, 32, 512, 128), torch.bfloat16), SPEC((B * count, 16, 8, 128), torch.bfloat16)
    table: dict[str, Any] = {"pages": SPEC((B, count), I32), "kv_lengths": SPEC((B,), I32)}
    return ag.vjp(ag.attention(q, k, k, mask=ag.Causal("bottom_right"), **table, **options))[1]


def test_what_pages_take_to_add_up_is_counted() -> None:
    """Sums in float32 for every key of every entry and part of a group; and their order."""
    plan = ag.compile(paged_gradient(4, 64), target="h200", backends=("triton",))
    layout = facts_of(plan.graph).once(Lying.of)
    assert layout is not None
    flash = Flash.plan(layout, ag.Target.of("h200"))
    (splits,) = {x.fixed["SPLITS"] for x in flash.launches if x.kernel == "key_gradient"}
    sums, delta = 2 * 4 * 8 * splits * 1024 * 128 * 4, 4 * 32 * 512 * 4
    assert sums + delta <= plan.memory().workspace_forward < sums + delta + 2**12
    assert plan.memory().temporary_forward >= 4 * 64 * (4 + 8)


def test_the_grid_of_sums_is_that_of_the_pool() -> None:
    layout = facts_of(simplify(paged_gradient(4, 64))).once(Lying.of)
    assert layout is not None
    flash = Flash.plan(layout, ag.Target.of("h200"))
    sums = [x for x in flash.launches if x.kernel == "sum_pages"]
    assert [x.grid for x in sums] == [4 * 64 * 16 // sums[0].fixed["BLOCK_N"] * 8] * 2


def test_too_little_workspace_is_a_reason() -> None:
    with pytest.raises(ag.NoBackendError, match="max_workspace"):
        ag.compile(paged_gradient(4, 64), target="h200", backends=("triton",), max_workspace=2**20)
