"""PyTorch's flash kernel on packed tensors: what is refused, what is mended, and both right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.layouts import result_spec
from attn_graph.kernels import fused_cuda
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.strategies import Shape, seeds
from tests.lowering.test_torch_cuda import H200, pulled, ran
from tests.support.ragged import (
    Case,
    are_same,
    check_case,
    check_gradients,
    check_pulled,
    check_results,
    fill,
    make_packed,
)
from tests.support.sequences import I32, SPEC, Batch, batches, draw_cotangents
from tests.support.torch_kernels import PLAYED

BF16 = torch.bfloat16
NAME = "torch_flash"
MASKS = (
    None,
    ag.Causal("bottom_right"),
    ag.Window(3, 2, "bottom_right"),
    ag.Causal("bottom_right") & ag.Window(2, align="bottom_right"),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Masks, dtypes, grouped heads and statistics that the kernel takes; NaN in rows of none."""
    batch = evolve(draw(batches()), gaps=False)
    batch = evolve(batch, unused=tuple((0, 0) for _ in batch.rows))
    G, r, D = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2))), draw(st.sampled_from((8, 16)))
    dtype = draw(st.sampled_from((torch.float16, BF16)))
    shape = Shape(len(batch.rows), G * r, G, *batch.most, D, D)
    dims = {"q": (0, G * r, D), "k": (1, G, D), "v": (1, G, D)}
    options = {"mask": draw(st.sampled_from(MASKS)), "stats": draw(st.booleans())}
    return make_packed(batch, shape, dtype, dims, options, draw(seeds), anyhow=False)


def plan_of(graph: ag.Graph, **options: Any) -> ag.Plan:  # Any: of `compile`
    return ag.compile(graph, target=H200, backends=(NAME,), **options)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_cuda, "aten", PLAYED)


@pytest.mark.usefixtures("played")
@given(case=cases(), seed=seeds)
def test_by_the_kernels_contract_results_and_gradients_are_those_of_padded(
    case: Case, seed: int
) -> None:
    """What is around the kernel: it is played, with its habits."""
    plan = plan_of(case.graph)
    outputs, saved = ran(plan, case.inputs)
    check_results(case, outputs)
    assert [*map(SPEC.like, outputs)] == [result_spec(plan.graph, i) for i in plan.graph.outputs]
    cotangents: Any = draw_cotangents(plan.graph, case.batch, seed)  # of all outputs
    needs = [i.spec.dtype.is_floating_point for i in case.graph.inputs]
    grads = pulled(plan, case.inputs, saved, cotangents, needs)
    check_pulled(case, grads, cotangents)

    def every_result(spoilt: bool) -> list[torch.Tensor]:
        tensors = [fill(x, spoilt) for x in case.inputs]
        given = [fill(x, spoilt) for x in cotangents]
        outputs, saved = ran(plan, tensors)
        return [*outputs, *pulled(plan, tensors, saved, given, needs).values()]

    assert are_same(every_result(True), every_result(False))


def packed(
    T: int = 64, *, size: int = 64, keys: int | None = None, dtype: torch.dtype = BF16,
    starts: torch.dtype = I32, **options: Any,
) -> ag.Graph:  # fmt: skip
    """Four sequences, four heads to two. keys: T of k, with starts of its own."""
    q, k = SPEC((T, 4, size), dtype), SPEC((keys or T, 2, size), dtype)
    where: dict[str, Any] = {"q_starts": SPEC((5,), starts)}
    where |= {"kv_starts": SPEC((5,), starts)} if keys else {}
    return ag.attention(q, k, k, **where, **options)


def test_a_copy_of_o_for_the_gradient_is_told() -> None:
    graph, o = packed(), SPEC((64, 4, 64), BF16, (4 * 72, 72, 1))
    for laid, copies in ((graph, 0), (ag.lay_out(graph, {"o": o}), 1)):
        notes = plan_of(laid).vjp.executable.notes
        assert sum("is copied: the kernel's rows have no gaps" in note for note in notes) == copies


CALLS: tuple[tuple[ag.Graph, tuple[int, int], bool, tuple[int, int]], ...] = (
    (packed(), (64, 64), False, (-1, -1)),
    (packed(max_lengths=(16, 16)), (16, 16), False, (-1, -1)),
    (packed(max_lengths=(1, 1)), (2, 1), False, (-1, -1)),
    (
        packed(keys=80, max_lengths=(16, 32), mask=ag.Causal("bottom_right")),
        (16, 32),
        True,
        (-1, 0),
    ),
    (packed(mask=ag.Causal("top_left")), (64, 64), True, (-1, 0)),
    (packed(mask=ag.Window(5, 3, "bottom_right")), (64, 64), False, (5, 3)),
    (packed(mask=ag.Causal() & ag.Window(5), align="top_left"), (64, 64), False, (5, 0)),
)


@pytest.mark.parametrize(("graph", "most", "causal", "window"), CALLS)
def test_what_the_kernel_is_told(
    graph: ag.Graph, most: tuple[int, int], causal: bool, window: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    told: list[Any] = []

    def forward(*given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        told.append((given[5:7], given[8], tuple(named[f"window_size_{n}"] for n in SIDES)))
        q = given[0]
        return torch.empty_like(q), torch.empty(q.shape[1], len(q))

    monkeypatch.setattr(PLAYED._flash_attention_forward, "default", forward)
    monkeypatch.setattr(fused_cuda, "aten", PLAYED)
    tensors = [torch.zeros(i.spec.shape, dtype=i.spec.dtype) for i in graph.inputs]
    ran(plan_of(graph), tensors)
    assert told == [(most, causal, window)]


SIDES = ("left", "right")


@pytest.mark.parametrize("stats", [True, False])
def test_this_torch_takes_what_the_kernel_is_called_with(stats: bool) -> None:
    """Names, order and kinds of the arguments, and shapes: by its functions for meta tensors."""
    graph = packed(keys=80, mask=ag.Causal("bottom_right"), stats=stats)
    plan = plan_of(graph)
    tensors = [torch.empty(i.spec.shape, dtype=i.spec.dtype, device="meta") for i in graph.inputs]
    outputs, (o, lse) = ran(plan, tensors)
    assert (o.dtype, o.shape, lse.dtype, lse.shape) == (BF16, (64, 4, 64), torch.float32, (4, 64))
    needs = (True, True, True, False, False)
    grads = pulled(plan, tensors, (o, lse), [torch.empty_like(x) for x in outputs], needs)
    shapes = {"q": (64, 4, 64), "k": (80, 2, 64), "v": (80, 2, 64)}
    assert {n: tuple(x.shape) for n, x in grads.items()} == shapes


LENGTHS: dict[str, Any] = {"q_lengths": SPEC((4,), I32), "kv_lengths": SPEC((4,), I32)}
POOL = SPEC((9, 16, 2, 64), BF16)
REFUSED: tuple[tuple[ag.Graph, str], ...] = (
    (packed(dtype=torch.float32), "f16 and bf16, and the graph is in f32"),
    (packed(size=264), "up to 256, and q has D = 264"),
    (packed(size=60), "multiples of 8, and q has D = 60"),
    (packed(dropout=0.5), "no dropout, and the rate is 0.5"),
    (packed(sinks=SPEC((4,), torch.float32)), "no sinks"),
    (packed(soft_cap=3.0), "does not support SoftCap"),
    (packed(alibi=True), "does not support Alibi"),
    (packed(stats=("lse", "max")), "the graph returns max"),
    (packed(scale=-1.0), "scale above 0, and it is -1.0"),
    (packed(keys=80, mask=ag.Causal("top_left")), "bottom right in each sequence, and the mask is"),
    (packed(mask=ag.Causal() | ag.Prefix(2), align="top_left"), "bottom right in each sequence"),
    (packed(mask=ag.Window(5, -1, "bottom_right")), "bottom right in each sequence"),
    (packed(keys=80, **LENGTHS), "no gaps between sequences: starts say their lengths, and q_st"),
    (packed(starts=torch.int64), r"starts in i32, side by side, and q_starts is i64\[5\]"),
    (
        ag.attention(*[SPEC((64, 4, 64), BF16)] * 3, q_starts=SPEC((5,), I32, (2,))),
        r"starts in i32, side by side, and q_starts is i32\[5\]",
    ),
    (
        ag.attention(
            SPEC((64, 4, 64), BF16), *[SPEC((4, 2, 16, 64), BF16)] * 2, q_starts=SPEC((5,), I32)
        ),
        "needs q, k and v packed, and kv_starts is not given",
    ),
    (
        ag.attention(
            SPEC((64, 4, 64), BF16), POOL, POOL,
            q_starts=SPEC((5,), I32), pages=SPEC((4, 2), I32),
        ),
        "reads no pages",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("graph", "words"), REFUSED)
def test_each_limit_is_told_with_what_was_found(graph: ag.Graph, words: str) -> None:
    with pytest.raises(ag.NoBackendError, match=words):
        plan_of(graph)


def test_limits_of_places_options_and_gradients_are_told_too() -> None:
    with pytest.raises(ag.NoBackendError, match="needs an NVIDIA GPU, and the target is cpu"):
        ag.compile(packed(), target="cpu", backends=(NAME,))
    with pytest.raises(ag.NoBackendError, match="by the size of the batch"):
        plan_of(packed(), batch_invariant=True)
    with pytest.raises(ag.NoBackendError, match="use_deterministic_algorithms"):
        _ = plan_of(packed(), deterministic=True).vjp
    ada = ag.compile(packed(size=208), target=evolve(H200, sm=89), backends=(NAME,))
    with pytest.raises(ag.NoBackendError, match="from 193 to 224 on sm_89, and D = 208"):
        _ = ada.vjp


def test_how_it_runs_is_told_and_what_it_allocates_is_counted() -> None:
    plan = plan_of(packed(8192, mask=ag.Causal("bottom_right"), stats=True))
    said = str(plan.explain())
    assert "flash kernel on packed tensors, as of varlen_attn" in said
    assert "do is copied, 4 MiB, with 0 in rows that see nothing" in said
    assert "the gradient through lse by one more call of each pass" in said
    memory = plan.memory()
    assert memory.temporary_backward > 4 * 8192 * 4 * 64  # sums in float32
    assert memory.temporary_forward < memory.temporary_backward


LONG = Batch((300, 1, 0, 130), (257, 40, 9, 513), ((0, 0),) * 4, False)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_on_a_gpu_results_and_gradients_agree(mask: ag.Mask | None, dtype: torch.dtype) -> None:
    shape = Shape(4, 4, 2, *LONG.most, 64, 64)
    dims = {"q": (0, 4, 64), "k": (1, 2, 64), "v": (1, 2, 64)}
    case = make_packed(LONG, shape, dtype, dims, {"mask": mask, "stats": True}, 5, anyhow=False)
    plan = ag.compile(case.graph, backends=(NAME,))
    check_case(case, plan, "cuda")
    check_gradients(case, plan, 5, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_varlen_attn_gives() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="of newer PyTorch")
    graph = packed(512, mask=ag.Causal("bottom_right"))
    q, k, v = (torch.randn(i.spec.shape, device="cuda").bfloat16() for i in graph.inputs[:3])
    starts = torch.tensor([0, 100, 101, 300, 512], dtype=I32, device="cuda")
    due = varlen.varlen_attn(
        q, k, v, starts, starts, 512, 512, window_size=(-1, 0), enable_gqa=True
    )
    (o,) = run_plan(ag.compile(graph, backends=(NAME,)), (q, k, v, starts))
    assert torch.equal(o, due)
