"""Blocks of few queries against long keys: programs share the keys, and all of a GPU is busy."""

from __future__ import annotations

from importlib.metadata import version
from itertools import product
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.lowering.codegen.launches import Launch
from attn_graph.lowering.codegen.machine_code import inspect_launch
from attn_graph.lowering.request import Options
from attn_graph.lowering.triton.plan import Flash, mock_tensors
from attn_graph.testing.agreement import check_outputs, run_plan
from attn_graph.testing.strategies import Shape, dtypes, mask_options, score_options, seeds
from attn_graph.testing.tensors import tensors_for
from docs.generate.kernel_rows import Kernel, target_of
from docs.generate.sass import read_body
from tests.lowering.test_programs import (
    BELOW,
    GPUS,
    attention,
    check_repeated_gradients,
    divided,
    flashes,
)
from tests.support.kernels import CPU, compiled, interpreted

H200 = ag.Target.of("h200")
BY_QUERIES = ("forward", "query_gradient")
JOINED = {"forward": "merge_parts", "query_gradient": "sum_parts"}
CHUNKS = [*product(((8, 8), (8, 1), (32, 8)), (128, 256, 512, 1024, 2048), (32768,))]


def launch_of(flash: Flash, name: str) -> Launch:
    return next(x for x in flash.launches if x.kernel == name)


# Planning


@compiled
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("mask", [BELOW, None], ids=["causal", "full"])
def test_chunks_of_a_long_prompt_fill_every_gpu(gpu: str, mask: ag.Mask | None) -> None:
    """One program for each block of queries leaves up to 95 % of a GPU idle. Launches of fewer
    programs than multiprocessors leave less than a quarter, and others end within a wave."""
    processors = ag.Target.of(gpu).multiprocessors or 0
    for (H, G), M, N in CHUNKS:
        for flash in flashes(attention(1, H, G, M, N, mask=mask), ag.Target.of(gpu)):
            for launch in (x for x in flash.launches if x.kernel in BY_QUERIES):
                waves = launch.grid / processors
                assert waves / ceil(waves) >= 0.5, f"{gpu} {launch.kernel} {H} {G} {M} {waves}"
                assert waves >= 0.75, f"{gpu} {launch.kernel} {H} {G} {M} {waves}"


@pytest.mark.parametrize("gpu", GPUS)
def test_a_full_gpu_shares_no_keys_and_takes_no_memory(gpu: str) -> None:
    for B, H, G, S in ((4, 32, 8, 4096), (8, 64, 8, 4096), (8, 32, 32, 1024)):
        graph = attention(B, H, G, S, S, mask=ag.Causal())
        forward, backward = flashes(graph, ag.Target.of(gpu))
        assert not forward.buffers
        assert "parts.dq" not in backward.buffers
        assert gpu != "h200" or [*backward.buffers] == ["delta"]
        assert launch_of(forward, "forward").fixed["PARTS"] == 1


@pytest.mark.parametrize(
    ("gpu", "sizes"), [("b200", (1, 32, 8, 512, 32768)), ("h200", (1, 8, 8, 1024, 1024))]
)
def test_parts_that_gain_less_than_joining_them_takes_are_not_made(
    gpu: str, sizes: tuple[int, int, int, int, int]
) -> None:
    """Or little more: 0.85 of the time is not less enough."""
    forward, _ = flashes(attention(*sizes, mask=BELOW), ag.Target.of(gpu))
    assert launch_of(forward, "forward").fixed["PARTS"] == 1


def test_parts_are_memory_that_max_workspace_bounds_and_explain_tells() -> None:
    graph = attention(1, 8, 8, 512, 32768, mask=BELOW)
    plan = ag.compile(graph, target="h200", backends=("triton",))
    bytes_ = 4 * 8 * 512 * (128 + 2) * 4
    assert plan.memory().workspace_forward == bytes_
    text = str(ag.explain(graph, target="h200", backends=("triton",)))
    shared = "programs share the keys of a block of queries"
    assert f"forward: 4 {shared}, merge_parts joins their parts" in text
    assert f"query_gradient: 4 {shared}, sum_parts adds up their sums" in text
    assert "forward: 128 programs, 0.97 waves, tiles of 128 x 128" in text
    for most, parts in ((bytes_, 4), (bytes_ - 1, 3), (0, 1)):
        forward, _ = flashes(graph, H200, Options(max_workspace=most))
        assert launch_of(forward, "forward").fixed["PARTS"] == parts
        assert forward.scratch.bytes <= most
        assert ("which max_workspace does not allow" in forward.division) == (parts < 4)


def test_who_may_not_share_keys_says_why() -> None:
    """Of a batch apart, and with the largest score of each row; forward mode never does."""
    sizes = 1, 8, 8, 512, 32768
    for options, stats, parts, words in (
        (Options(batch_invariant=True), False, 7, "which batch_invariant=True forbids"),
        (Options(), ("max",), 4, "parts of the largest score are not put together"),
    ):
        forward, backward = flashes(attention(*sizes, mask=BELOW, stats=stats), H200, options)
        share = f"if {parts} programs share the keys of a block of queries, but "
        assert f"would take less time {share}" in forward.division
        assert words in forward.division
        assert [x.kernel for x in forward.launches] == ["forward"]
        assert ("sum_parts" in [x.kernel for x in backward.launches]) == (
            not options.batch_invariant
        )
    alone, many = (
        flashes(attention(B, *sizes[1:]), H200, Options(batch_invariant=True)) for B in (1, 64)
    )
    names = ("BLOCK_M", "BLOCK_N", "PARTS")
    for one, other in zip(alone, many, strict=True):
        fixed = (
            [[x.fixed.get(n) for n in names] for x in flash.launches] for flash in (one, other)
        )
        assert next(fixed) == next(fixed)


def test_what_a_mask_drops_for_sure_is_not_shared() -> None:
    """A narrow window beside data: each program walks few tiles, however long the keys are."""
    keep = ag.TensorSpec((1, 1, 1, 32768), torch.bool)
    for mask, shares in ((ag.Window(64, 64, "bottom_right"), False), (None, True)):
        forward, _ = flashes(attention(1, 8, 8, 512, 32768, mask=mask, keep=keep), H200)
        assert (launch_of(forward, "forward").fixed["PARTS"] > 1) == shares


# Results


@st.composite
def chunks(draw: st.DrawFn) -> tuple[ag.Graph, int]:
    """More queries than decoding takes, with any mask and modifier; and a seed."""
    G, r, B = (draw(st.sampled_from(x)) for x in ([1, 2], [1, 2], [1, 1, 2]))
    M = draw(st.sampled_from([65, 66]))
    N = draw(st.sampled_from([1, 31, 64, 98, 130]))
    D, E = draw(st.sampled_from([16, 8])), draw(st.sampled_from([16, 5]))
    shape, dtype = Shape(B, G * r, G, M, N, D, E), draw(dtypes.filter(lambda x: x.itemsize < 8))
    options: dict[str, Any] = {"align": draw(st.sampled_from(["top_left", "bottom_right"]))}
    options |= draw(mask_options(shape)) | draw(score_options(shape, dtype))
    specs = (ag.TensorSpec(x, dtype) for x in (shape.q, shape.k, shape.v))
    return ag.attention(*specs, **options, stats=True), draw(seeds)


Q, K = (ag.TensorSpec((1, 2, n, 8), torch.float32) for n in (65, 98))
WITH_SINKS = ag.attention(Q, K, K, sinks=ag.TensorSpec((2,), torch.float32), stats=True)


@interpreted
@given(chunk=chunks())
@example(chunk=(WITH_SINKS, 1))
@settings(max_examples=max(3, settings().max_examples // 5))  # each is interpreted
def test_shared_keys_give_the_whole(chunk: tuple[ag.Graph, int]) -> None:
    """o and lse, against float64, and the same bits every time."""
    graph, seed = chunk
    with divided("forward", parts=2):
        forward, _ = flashes(graph, CPU)
        parts = {x.kernel: x.fixed.get("PARTS") for x in forward.launches}
        assert parts["forward"] == parts["merge_parts"] == 2
        plan, tensors = ag.compile(graph, backends=("triton",)), tensors_for(graph, seed)
        results, again = check_outputs(plan, graph, tensors), run_plan(plan, tensors)
    assert all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(results, again, strict=True)
    )


@interpreted
@pytest.mark.parametrize(
    ("dtype", "M", "N", "more"),
    [
        (torch.float32, 40, 75, {"mask": BELOW}),
        (torch.bfloat16, 40, 97, {"mask": BELOW | ag.Prefix(9)}),  # listed
        (torch.float16, 40, 35, {"soft_cap": 5.0}),
        (torch.float32, 40, 99, {"mask": BELOW & ag.Window(20, align="bottom_right")}),
        (torch.float32, 33, 40, {"dropout": 0.5}),
    ],
)
def test_gradients_agree_however_keys_are_divided(
    dtype: torch.dtype, M: int, N: int, more: dict[str, Any]
) -> None:
    """And are the same bits every time."""
    specs = [ag.TensorSpec((1, h, s, d), dtype) for h, s, d in ((2, M, 8), (1, N, 8), (1, N, 20))]
    graph = ag.attention(*specs, **more, stats=True)
    with divided("query_gradient", parts=2):
        backward = flashes(graph, CPU)[1]
        assert launch_of(backward, "query_gradient").fixed["PARTS"] == 2
        check_repeated_gradients(graph)


@interpreted
def test_rows_of_very_different_parts_are_merged() -> None:
    """Weights of one part far beyond those of others, and beyond what exp2 of a score holds."""
    q, k = torch.full((1, 1, 66, 8), 10.0), torch.zeros(1, 1, 97, 8)
    k[:, :, :40], k[:, :, 70:] = 8.0, -8.0
    graph = ag.attention(*map(ag.TensorSpec.like, (q, k, k)), scale=1.0, stats=True)
    check_outputs(ag.compile(graph, backends=("triton",)), graph, (q, k, k))


@interpreted
def test_dropout_drops_the_same_places_whoever_walks_them() -> None:
    """All weights on one key: a row is 0 or whole, by its place alone."""
    q, k, v = torch.zeros(1, 2, 66, 8), torch.zeros(1, 2, 101, 8), torch.ones(1, 2, 101, 8)
    seed, offset = torch.tensor(3), torch.tensor(5)
    results: list[torch.Tensor] = []
    for invariant in (False, True):
        graph = ag.attention(*map(ag.TensorSpec.like, (q, k, v)), dropout=0.5)
        plan = ag.compile(graph, backends=("triton",), batch_invariant=invariant)
        results += run_plan(plan, (q, k, v), seed=seed, offset=offset)
    assert torch.allclose(results[0], results[1], atol=1e-6)


# Machine code

VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"mask": BELOW},
    "soft cap": {"mask": BELOW, "soft_cap": 30.0},
    "listed": {"mask": BELOW | ag.Prefix(900)},
    "lengths": {"mask": BELOW, "kv_lengths": ag.TensorSpec((1,), torch.int32)},
}


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "name"), [(90, "causal"), (100, "soft cap"), (80, "listed"), (90, "lengths")]
)
def test_kernels_of_parts_spill_no_more_than_whole_ones(sm: int, name: str) -> None:
    """In the loop of full tiles, where that is one register at most; by Triton 3.6 one more."""
    target = target_of(sm)
    graph = attention(1, 8, 8, 256, 32768, **VARIANTS[name], stats=True)
    both = (flashes(graph, target, x) for x in (Options(), Options(batch_invariant=True)))
    for flash, whole, kernel in zip(*both, BY_QUERIES, strict=True):
        launches = [launch_of(x, kernel) for x in (flash, whole)]
        assert [x.fixed["PARTED"] for x in launches] == [True, False]
        machine, other = (inspect_launch(x, mock_tensors(flash), sm) for x in launches)
        assert not [*Kernel(sm, 2, 128, kernel).complaints(machine)]
        spills, usual = (read_body(x.sass).full.spills for x in (machine, other))
        assert spills <= min(usual, 1) + version("triton").startswith("3.6.")
        joined = inspect_launch(launch_of(flash, JOINED[kernel]), mock_tensors(flash), sm)
        assert joined.spilled == 0
