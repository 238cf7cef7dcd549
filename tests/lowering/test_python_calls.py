"""How much Python a call runs: counted, not timed. What is known ahead is not worked out again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.errors import HOMES
from attn_graph.lowering.cpu.math import plan_tiles
from attn_graph.lowering.request import Request
from attn_graph.machine.target import Target
from attn_graph.nn.functional import attention, scaled_dot_product_attention
from attn_graph.testing.tensors import tensors_for

# Calls for an attention on an H200, each backend priced: both passes, and forward alone. A window
# has fixes besides, which are searched when they are printed.
EXPLAINED, FORWARD_EXPLAINED, FIXES_PRINTED = 5_400, 2_900, 2_850
COMPILED_MOVES, COMPILED_FILES = 415, 58  # between files, for a new graph on a CPU
FIXED = 40  # calls, for a graph of no more parts than TILES
DECODING = {
    "plain": 21,
    "biased": 34,
    "padded": 24,
    "capped": 50,
    "sinks": 49,
}  # calls, for one key more than before
MASKED, BIASED = 40, 30  # calls, with a mask tensor
TRAINED, BIASED_TRAINED, PROMPT = 120, 300, 60
PREPARED = {8: 120, 64: 120}  # calls, for a layer of a step, with one row of so many sequences
NEW_PROMPT = 2_900  # for rows over pages of a length that was not there before
UNPREPARED = 300  # and where the call itself reads lengths and tables
TILES = 2
PER_PART = 12  # a mask of two leaves and a join, or a modifier, asked at each call
WINDOW = ag.Causal() & ag.Window(255)


def files_called(act: Callable[[], object]) -> list[str]:
    """The file of each function of Python called meanwhile, but by a collection of garbage: a weak
    reference to what an earlier test left calls one."""
    files: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return files


def count_calls(act: Callable[[], object]) -> int:
    """How many functions of Python are called meanwhile."""
    return len(files_called(act))


def python_calls(plan: Callable[..., object], tensors: list[torch.Tensor]) -> int:
    """How many functions of Python a call of the plan calls, the second time."""
    plan(*tensors)
    return count_calls(lambda: plan(*tensors))


def test_an_explanation_asks_each_backend_a_few_times() -> None:
    """Every change is asked about alone; no combination is searched."""

    def explain(M: int, mask: ag.Mask, gradients: list[str] | None = None) -> object:
        x = ag.TensorSpec((2, 16, M, 128), torch.bfloat16)
        graph = ag.attention(x, x, x, mask=mask)
        return ag.explain(graph, target="h200", gradients=gradients)

    causal, window = ag.Causal(), ag.Causal() & ag.Window(64)
    str(explain(2048, window))
    assert count_calls(lambda: explain(4096, causal)) <= EXPLAINED
    assert count_calls(lambda: explain(1024, causal, [])) <= FORWARD_EXPLAINED
    shown = explain(4096, window)
    assert count_calls(lambda: str(shown)) <= FIXES_PRINTED


def test_compiling_for_a_cpu_is_a_short_road() -> None:
    """The files that a debugger shows, one after the other: it asks little of a dense graph."""

    def graph_of(M: int) -> ag.Graph:
        x = ag.TensorSpec((2, 4, M, 64), torch.float32)
        return ag.attention(x, x, x, mask=ag.Causal() & ag.Window(64))

    target = evolve(Target.of("cpu"), native=(), interprets=False)
    ag.compile(graph_of(256), target=target)
    new = graph_of(512)
    files = [x for x in files_called(lambda: ag.compile(new, target=target)) if x.startswith(HOMES)]
    assert len({*files}) <= COMPILED_FILES
    assert sum(a != b for a, b in pairwise(files)) <= COMPILED_MOVES


def masked(M: int, mask: ag.Mask, **options: Any) -> tuple[ag.Plan, list[torch.Tensor], int]:
    """A plan of `math`, tensors for it, and how many parts its tiles have in all."""
    x = ag.TensorSpec((1, 4, M, 64), torch.float32)
    graph = ag.attention(x, x, x, mask=mask, **options)
    plan = ag.compile(graph, backends=("math",), target=Target.of("cpu"))
    (tiles,) = plan_tiles(Request(plan.graph, plan.target, ag.extend.Options()))
    parts = sum(len(tile.parts) for tile in getattr(tiles, "static", None) or ())
    tensors = tensors_for(graph, 1)
    return plan, [*tensors[:3], *(x.abs() for x in tensors[3:])], parts  # slopes are positive


def test_a_call_on_few_tiles_runs_little_python() -> None:
    plan, tensors, parts = masked(1024, WINDOW)
    assert parts == TILES
    assert python_calls(plan, tensors) <= FIXED


@pytest.mark.parametrize("options", [{}, {"alibi": ag.TensorSpec((4,), torch.float32)}])
def test_each_more_part_takes_a_few_calls_more(options: dict[str, Any]) -> None:
    plan, tensors, parts = masked(2048, ag.Causal() & (ag.Window(100) | ag.Prefix(40)), **options)
    assert parts > TILES
    assert python_calls(plan, tensors) <= FIXED + PER_PART * parts * (1 + len(options))


@pytest.mark.parametrize("mask", [WINDOW, ag.Causal()])
def test_products_take_no_more_calls_than_a_tile_has_steps(mask: ag.Mask) -> None:
    """Soft caps run by matrix products, 64 queries a tile."""
    plan, tensors, _ = masked(1024, mask, soft_cap=30.0)
    assert python_calls(plan, tensors) <= FIXED + 47 * (1024 // 64)


def test_where_lengths_leave_few_scores_all_are_one_tile() -> None:
    q, k = (ag.TensorSpec((8, 4, n, 64), torch.float32) for n in (1, 128))
    lengths = ag.TensorSpec((8,), torch.int64)
    graph = ag.attention(q, k, k, mask=ag.KeyLengths(), kv_lengths=lengths)
    plan = ag.compile(graph, backends=("math",), target=Target.of("cpu"))
    assert python_calls(plan, [*tensors_for(graph, 1)]) <= FIXED


def test_where_lengths_leave_out_much_each_entry_has_its_own_tiles() -> None:
    q = ag.TensorSpec((8, 4, 1024, 64), torch.float32)
    lengths = ag.TensorSpec((8,), torch.int64)
    graph = ag.attention(q, q, q, mask=ag.KeyLengths(), kv_lengths=lengths)
    (tiles,) = plan_tiles(
        Request(ag.compile(graph, backends=("math",)).graph, Target.of("cpu"), ag.extend.Options())
    )
    assert getattr(tiles, "static", ()) is None


@pytest.mark.parametrize("kind", DECODING)
def test_a_token_more_takes_few_calls(kind: str) -> None:
    """Nothing is planned, and each size is compared once."""
    kinds: dict[str, dict[str, Any]] = {
        "capped": {"soft_cap": 30.0},
        "sinks": {"sinks": torch.randn(8)},
    }
    options, heads = kinds.get(kind, {}), {"biased": 8, "padded": 1}

    def decode(N: int) -> object:
        if kind in heads:
            options["bias"] = torch.randn(1, heads[kind], 1, N)
        return attention(torch.randn(1, 8, 1, 64), *torch.randn(2, 1, 2, N, 64), **options)

    for N in (66, 67):
        decode(N)
    assert count_calls(lambda: decode(68)) <= DECODING[kind]


def masks_of(dtype: torch.dtype, M: int, N: int) -> dict[str, torch.Tensor]:
    """Masks for scores [2,4,M,N] of a few shapes, as PyTorch takes them."""
    flags = torch.rand(2, 1, M, N, generator=torch.Generator().manual_seed(0)) < 0.7
    flags[..., 0] = True
    bias = torch.randn(1, 4, M, N, generator=torch.Generator().manual_seed(1)).to(dtype)
    return {
        "booleans [B,1,M,N]": flags,
        "booleans [B,1,1,N]": flags[:, :, :1].contiguous(),
        "booleans [1,M,N]": flags[0],
        "booleans [M,N]": flags[0, 0],
        "bias [1,H,M,N]": bias,
        "bias [M,N]": bias[0, 0],
    }


@pytest.mark.parametrize("kind", masks_of(torch.float32, 1, 1))
@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("M", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_repeated_call_with_a_mask_tensor_is_remembered(
    kind: str, axes: int, M: int, dtype: torch.dtype
) -> None:
    """Whatever the axes of the mask and of the others, and for one query as for several."""
    mask = masks_of(dtype, M, 33)[kind]
    q, k, v = (torch.randn(2, 4, n, 32, dtype=dtype) for n in (M, 33, 33))
    if axes == 3:
        q, k, v, mask = (x[-1] if x.ndim == 4 else x for x in (q, k, v, mask))
    most = MASKED if "booleans" in kind else BIASED

    def attend() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    with torch.no_grad():
        attend()
        assert count_calls(attend) <= most


@pytest.mark.parametrize("kind", ["booleans [B,1,M,N]", "booleans [B,1,1,N]", "booleans [M,N]"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_with_a_mask_tensor_asks_little_again(kind: str, dtype: torch.dtype) -> None:
    mask = masks_of(dtype, 33, 33)[kind]
    q, k, v = (torch.randn(2, 4, 33, 32, dtype=dtype, requires_grad=True) for _ in range(3))

    def train() -> None:
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        o.backward(torch.ones_like(o))

    train()
    assert count_calls(train) <= TRAINED


def test_a_biased_backward_under_lengths_runs_few_tiles() -> None:
    """As T5's encoder trains: all queries and keys of many heads are one tile."""
    q, k, v = (torch.randn(8, 4, 64, 32, requires_grad=True) for _ in range(3))
    bias, lengths = torch.randn(1, 4, 64, 64, requires_grad=True), torch.arange(57, 65)

    def train() -> None:
        o = attention(q, k, v, bias=bias, mask=ag.KeyLengths(), kv_lengths=lengths)
        assert isinstance(o, torch.Tensor)  # without statistics
        o.backward(torch.ones_like(o))

    train()
    assert count_calls(train) <= BIASED_TRAINED


@pytest.mark.parametrize("M", [200, 224])
def test_a_prompt_padded_on_the_left_is_one_tile(M: int) -> None:
    """With few scores, to find each block's keys takes longer than what they save."""
    q = torch.randn(4, 8, M, 64)
    k, v = torch.randn(2, 4, 2, M, 64)
    keep = torch.arange(M) >= torch.tensor([0, 20, 50, 100])[:, None, None, None]

    def prompt() -> object:
        return attention(q, k, v, mask=ag.Causal(), keep=keep)

    with torch.no_grad():
        prompt()
        assert count_calls(prompt) <= PROMPT


def test_a_prompt_of_a_new_length_over_pages_is_planned_by_few_calls() -> None:
    pool, T = ag.TensorSpec((20, 64, 4, 64), torch.bfloat16), ag.Dim("T", 512)
    starts, lengths, table = (ag.TensorSpec(x, torch.int32) for x in ((2,), (1,), (1, 8)))
    graph = ag.attention(
        ag.TensorSpec((T, 16, 64), torch.bfloat16), pool, pool, mask=ag.Causal("bottom_right"),
        q_starts=starts, kv_lengths=lengths, pages=table, max_lengths=(512, None),
    )  # fmt: skip
    plan = ag.compile(graph, target=Target.here("cpu"))
    k, counts = torch.randn(20, 64, 4, 64).bfloat16(), list[int]()
    for n in (300, 310, 325):
        given = torch.tensor([0, n]).int(), torch.tensor([n]).int(), torch.arange(8).int()[None]
        q = torch.randn(n, 16, 64).bfloat16()
        x = dict(zip(("q_starts", "kv_lengths", "pages"), given, strict=True))
        counts += [count_calls(lambda q=q, x=x: plan(q, k, k, **x)) for _ in range(2)]  # type: ignore[misc]
    _, _, *later = counts
    assert max(later[::2]) <= NEW_PROMPT
    assert max(later[1::2]) <= UNPREPARED + TILES * 50


def paged_step(B: int, length: int) -> dict[str, torch.Tensor]:
    """One row of each of B sequences over pages of 32 rows, packed."""
    random = torch.Generator().manual_seed(B)
    k, v = torch.randn(2, B * 8, 32, 2, 32, generator=random)
    lengths = torch.arange(B, dtype=torch.int32) % 90 + length
    table = torch.randperm(B * 8, generator=random).view(B, 8).int()
    starts = torch.arange(B + 1, dtype=torch.int32)
    q = torch.randn(B, 4, 32, generator=random)
    return {"q": q, "k": k, "v": v, "kv_lengths": lengths, "q_starts": starts, "pages": table}


@pytest.mark.parametrize("B", PREPARED)
def test_rows_over_pages_take_few_calls_whatever_the_lengths_are(B: int) -> None:
    """Every sequence is a token longer in each step, and all layers of a step share its lengths."""
    spec, size, pages = ag.TensorSpec, ag.Dim("B", 128), ag.Dim("C", 64)
    pool = spec((ag.Dim("n", 4096), 32, 2, 32), torch.float32)
    graph = ag.attention(
        spec((ag.Dim("T", 128), 4, 32), torch.float32), pool, pool,
        mask=ag.Causal("bottom_right"), q_starts=spec((size + 1,), torch.int32),
        kv_lengths=spec((size,), torch.int32), pages=spec((size, pages), torch.int32),
        max_lengths=(1, None),
    )  # fmt: skip
    plan = ag.compile(graph, target=Target.here("cpu"))
    for length in range(40, 44):
        x = paged_step(B, length)
        layer, o = [x.pop(n) for n in "qkv"], torch.empty(B, 4, 32)
        prepared = plan.prepare(**x)
        prepared(*layer, out=o)
        once = count_calls(lambda layer=layer, o=o, f=prepared: f(*layer, out=o))  # type: ignore[misc]
        each = count_calls(lambda layer=layer, x=x: plan(*layer, **x))  # type: ignore[misc]
        if length > 40:  # the first call makes what all later ones share
            assert once <= PREPARED[B]
            assert each <= UNPREPARED
