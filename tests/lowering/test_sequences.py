"""Packed tensors and keys in pages by Triton's kernels, under its interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.kernels import sequences
from attn_graph.lowering.codegen.launches import Launch
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.triton.places import lying_reasons
from attn_graph.lowering.triton.plan import Flash
from attn_graph.measuring.tuning import elements_spanned
from attn_graph.testing.agreement import run_gradients, run_plan
from attn_graph.testing.strategies import Shape
from tests.support import ragged
from tests.support.freed_pages import free_hidden
from tests.support.sequences import Batch

CPU = ag.Target.of("cpu")
SPEC = ag.TensorSpec
I32 = torch.int32
LONG = Batch((40, 1), (70, 9), ((35, 40), (0, 2)), True)
STEPS = Batch((3, 1), (70, 9), ((35, 40), (0, 2)), True)  # few queries, whose keys are divided
WINDOW = ag.Window(9, 0, "bottom_right")
CAUSAL = {"mask": ag.Causal("bottom_right")}
interpreted = pytest.mark.skipif(
    not CPU.interprets, reason="needs TRITON_INTERPRET=1 before Python starts, as in `make test`"
)


def gradient_is_taken(graph: ag.Graph) -> bool:
    """Whether Triton takes the gradient: not that of what a modifier reads."""
    layout = facts_of(simplify(ag.vjp(graph)[1])).once(Lying.of)
    return layout is not None and not [*lying_reasons(layout)]


@interpreted
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("mask", [WINDOW, WINDOW & ag.Keep(), ag.Causal("top_left"), ag.Prefix(11)])
@pytest.mark.parametrize("page", [8, 64])
def test_pages_behind_a_window_may_be_freed(rows: int, mask: ag.Mask, page: int) -> None:
    """In closed form and by lists of tiles, split and not, pages smaller and larger than a tile."""
    batch = Batch((rows,) * 2, (150, 12), ((0, 0),) * 2, False)
    layout = ragged.Layout(page, heads_first=False, ended=True, packed=rows > 1)
    shape = Shape(2, 4, 2, rows, 192, 8, 8)
    keep = {"keep": SPEC((1, 1, rows, 192), torch.bool)} if "keep" in mask.needs else {}
    case = ragged.make_paged(
        batch, layout, shape, torch.float32, {"mask": mask, "stats": True, **keep}, 3
    )
    check_freed_pages(case, ag.compile(case.graph, backends=("triton",)), 5)


def check_freed_pages(case: ragged.Case, plan: ag.Plan, seed: int | None) -> None:
    """The results, and, with a seed, the gradients of a plan are as without freed pages."""
    given = {i.name: x for i, x in zip(case.graph.inputs, case.inputs, strict=True)}
    freed = [*free_hidden(case.graph, given).values()]
    for x, due in zip(run_plan(plan, freed), run_plan(plan, case.inputs), strict=True):
        torch.testing.assert_close(x, due, rtol=0, atol=0, equal_nan=True)
    if seed is not None:
        cotangents = case.cotangents(seed)
        dues = run_gradients(plan, case.inputs, cotangents)
        for name, x in run_gradients(plan, freed, cotangents).items():
            torch.testing.assert_close(x, dues[name], rtol=0, atol=0, equal_nan=True)


# Bits


@interpreted
def test_sequences_that_come_after_change_no_bit() -> None:
    whole = ragged.sequences(LONG, CAUSAL, torch.float32)
    cut = evolve(LONG, rows=LONG.rows[:1], keys=LONG.keys[:1], unused=LONG.unused[:1])
    alone = ragged.sequences(cut, CAUSAL, torch.float32)
    tensors = {n: whole.tensors[n][: len(x)] for n, x in alone.tensors.items()}
    few = run_plan(
        ag.compile(alone.graph, backends=("triton",), batch_invariant=True),
        [tensors[i.name] for i in alone.graph.inputs],
    )
    all_ = run_plan(
        ag.compile(whole.graph, backends=("triton",), batch_invariant=True), whole.inputs
    )
    (n,) = cut.rows
    assert torch.equal(few[0][:n], all_[0][:n])
    assert torch.equal(few[1][:, :n], all_[1][:, :n])


@interpreted
def test_paged_is_dense_bit_by_bit() -> None:
    batch = Batch((1, 1), (70, 33), ((0, 0),) * 2, False)
    layout = ragged.Layout(16, heads_first=False, ended=True, packed=False)
    shape = Shape(2, 4, 2, 1, 80, 8, 8)
    case = ragged.make_paged(batch, layout, shape, torch.float32, {"mask": None}, 3)
    plans = [
        ag.compile(g, backends=("triton",), batch_invariant=True) for g in (case.graph, case.padded)
    ]
    (x,), (y,) = (
        run_plan(plan, tensors)
        for plan, tensors in zip(plans, (case.inputs, case.padded_inputs), strict=True)
    )
    assert torch.equal(x, y)


# Data that are wrong


@interpreted
@pytest.mark.parametrize("batch", [LONG, STEPS], ids=["long", "steps"])
@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ([-9, 50, 20], [10**6, -5]),
        ([90, 30, -7], [5, 5]),
        ([0, 10**9, 10**9], [10**9] * 2),
    ],
)
def test_nothing_is_read_or_written_outside_whatever_the_starts_are(
    starts: list[int], lengths: list[int], batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are undefined then, and finite: NaN surrounds every tensor. Around results there is
    a number, which stays."""
    case = ragged.sequences(batch, CAUSAL, torch.float32, anyhow=False)
    tensors = {n: x.nan_to_num() for n, x in case.tensors.items()}
    for name in ("q_starts", "kv_starts"):
        tensors[name] = torch.tensor(starts, dtype=I32)
    for name in ("q_lengths", "kv_lengths"):
        tensors[name] = torch.tensor(lengths, dtype=I32)
    given_tensors = [inside_nan(tensors[i.name]) for i in case.graph.inputs]
    rooms = watch_around_results(monkeypatch)
    o, lse = run_plan(ag.compile(case.graph, backends=("triton",)), given_tensors)
    assert rooms
    assert not o.isnan().any()
    assert not lse.isnan().any()


def inside_nan(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, laid out alike, between NaN, or, of integers, between large ones."""
    count = elements_spanned(SPEC.like(x))
    room = torch.full((count + 8192,), float("nan") if x.is_floating_point() else 10**6)
    room = room.to(x.dtype)
    room[4096:-4096] = x.as_strided((count,), (1,))
    return room.as_strided(x.shape, x.stride(), 4096)


Rooms = list[tuple[torch.Tensor, torch.Tensor]]  # around results, and which places are inside


def watch_around_results(monkeypatch: pytest.MonkeyPatch) -> Rooms:
    """Have each launch assert that nothing is written around the results made so far."""
    rooms: Rooms = []
    run = Launch.__call__

    def launch(self: Launch, named: dict[str, Any]) -> None:
        run(self, named)
        assert all((room[~inside] == 7.5).all() for room, inside in rooms)

    monkeypatch.setattr(Launch, "__call__", launch)
    monkeypatch.setattr(Flash, "new_result", lambda *given: new_haloed(rooms, *given))
    return rooms


def new_haloed(rooms: Rooms, flash: Flash, name: str, *_given: object) -> torch.Tensor:
    """A result as `Flash.new_result` makes it, haloed."""
    shape, strides, dtype = flash.results[name]
    return haloed(SPEC(shape, dtype, strides), rooms)


def haloed(spec: ag.TensorSpec, rooms: Rooms) -> torch.Tensor:
    """A new tensor of a spec with 7.5 around it."""
    count = spec.type.bytes // spec.dtype.itemsize
    room, inside = torch.full((count + 8192,), 7.5), torch.zeros(count + 8192, dtype=torch.bool)
    inside[4096:-4096] = True
    rooms.append((room, inside))
    return room.as_strided(spec.shape, spec.strides, 4096)


# Planning


def flash_of(graph: ag.Graph) -> Flash:
    layout = facts_of(simplify(graph)).once(Lying.of)
    assert layout is not None
    return Flash.plan(layout, ag.Target.of("h200"))


def packed(B: int, T: int, **options: Any) -> ag.Graph:
    q, k = (SPEC((T, h, 64), torch.bfloat16) for h in (32, 8))
    return ag.attention(q, k, k, q_starts=SPEC((B + 1,), I32), mask=ag.Causal(), **options)


def test_the_grid_follows_from_shapes_alone() -> None:
    """And nothing of the size of a padded batch is made, forward or backward."""
    for graph in ag.vjp(packed(64, 16384)):
        flash = flash_of(graph)
        for launch in flash.launches:
            if "BATCH" in launch.fixed:
                size = launch.fixed["BLOCK_N" if launch.kernel == "key_gradient" else "BLOCK_M"]
                heads = 32 if launch.kernel != "key_gradient" else 8 * launch.fixed["SPLITS"]
                assert launch.grid == (-(-16384 // size) + 64 + 2) * heads
        assert flash.scratch.bytes <= 4 * 32 * 16384 * (1 + 2 * 64)


def test_a_new_batch_of_sequences_needs_no_new_kernel() -> None:
    one, two = (flash_of(packed(B, T)).launches[0] for B, T in ((5, 1000), (6, 16384)))
    assert one.texts == two.texts
    sizes = ("M", "N", "H", "G", "B", "T", "T_KEYS", "POOL", "TOGETHER")
    constants = [n for n in one.fixed if n.isupper() and n not in sizes]
    assert all(one.fixed[n] == two.fixed[n] for n in constants)


def test_what_kernels_know_of_a_sequence_is_not_read_again_by_its_mask() -> None:
    pool, starts = SPEC((99, 16, 8, 64), torch.bfloat16), SPEC((9,), I32)
    bottom = ag.Causal("bottom_right")
    paged = ag.attention(
        SPEC((200, 32, 64), torch.bfloat16), pool, pool, mask=bottom, q_starts=starts,
        pages=SPEC((8, 8), I32), kv_lengths=SPEC((8,), I32),
    )  # fmt: skip
    q, k = (SPEC((T, 8, 64), torch.bfloat16) for T in (200, 300))
    apart = ag.attention(q, k, k, mask=bottom, q_starts=starts, kv_starts=starts)
    for graph in (packed(8, 200), apart, paged):
        for each in ag.vjp(graph, ["q", "k", "v"]):
            texts = [text for launch in flash_of(each).launches for text in launch.texts.values()]
            assert any(texts)
            assert not any("tl.load" in text for text in texts)


def test_as_many_sequences_as_there_are_run_on_it() -> None:
    """Programs read so many starts at a time, and walk on only where there are more of them."""
    at_once = sequences.AT_ONCE.value
    for B, many in ((at_once - 2, False), (at_once - 1, True), (5000, True), (100_000, True)):
        for each in ag.vjp(packed(B, 2 * B), ["q", "k", "v"]):
            plan = ag.compile(each, target="h200", backends=("triton",))
            assert plan.backend == "triton"
            batches = {x.fixed["BATCH"] for x in flash_of(each).launches if "BATCH" in x.fixed}
            assert batches == {2 * at_once if many else at_once}


REFUSED: dict[str, tuple[ag.Graph, str]] = {
    "no pages": (
        ag.attention(
            SPEC((2, 8, 1, 64), torch.bfloat16),
            *[SPEC((0, 16, 8, 64), torch.bfloat16)] * 2,
            pages=SPEC((2, 4), I32),
        ),
        "needs a page at least",
    ),
    "pages beyond 32 bits": (
        ag.attention(
            SPEC((2, 8, 1, 64), torch.bfloat16),
            *[SPEC((2, 16, 8, 64), torch.bfloat16, (2**32, 2**28, 64, 1))] * 2,
            pages=SPEC((2, 4), I32),
        ),
        f"reads pages whose rows lie within {2**31 - 1} elements",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_can_not_do_it_refuses(name: str) -> None:
    graph, reason = REFUSED[name]
    with pytest.raises(ag.NoBackendError, match=reason):
        ag.compile(graph, target="h200", backends=("triton",))


def test_gradients_of_modifiers_are_left_to_others() -> None:
    pool, q = SPEC((9, 16, 8, 64), torch.bfloat16), SPEC((2, 8, 1, 64), torch.bfloat16)
    bias = SPEC((1, 8, 1, 64), torch.bfloat16)
    paged = ag.attention(q, pool, pool, pages=SPEC((2, 4), I32), bias=bias)
    for graph in (paged, packed(2, 64, bias=SPEC((1, 32, 64, 64), torch.bfloat16))):
        said = ag.explain(graph, target="h200", backends=("triton", "math"))
        assert said.backend == "triton"
        assert said.backward is not None
        assert said.backward.backend == "math"
        assert "that of bias is wanted" in str(said.backward)
