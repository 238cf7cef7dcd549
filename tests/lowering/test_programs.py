"""The number and the order of programs: how they fill a GPU, and what they compute."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import ceil
from typing import Any, final

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.kernels.tilings import Pass, Tiling
from attn_graph.lowering.codegen.launches import Launch, load_kernel
from attn_graph.lowering.codegen.machine_code import compile_for
from attn_graph.lowering.parts import choose_parts
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.request import Options, Request
from attn_graph.lowering.triton.backend import launch_notes, plan_flash
from attn_graph.lowering.triton.divisions import Division
from attn_graph.lowering.triton.plan import Flash, FlashBuilder
from attn_graph.lowering.triton.work import split_graph
from attn_graph.machine.gpus import devices
from attn_graph.masks.places import Block
from attn_graph.sparsity.tiles import bound_tiles
from attn_graph.testing import rule
from attn_graph.testing.agreement import run_gradients
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.kernels import CPU, compiled, interpreted

GPUS = [*devices()]
LONG = ("forward", "query_gradient", "key_gradient")
BELOW = ag.Causal("bottom_right")


def flashes(graph: ag.Graph, target: ag.Target, options: Options | None = None) -> list[Flash]:
    """The plans of both passes."""
    parts = [facts_of(simplify(x)).once(split_graph) for x in ag.vjp(graph, ["q", "k", "v"])]
    request = Request(simplify(graph), target, options or Options())
    return [plan_flash(part, request) for each in parts for part in each]


def attention(
    B: int, H: int, G: int, M: int, N: int, D: int = 128, **more: Any
) -> ag.Graph:  # Any: masks and the like
    q, k = (ag.TensorSpec((B, n, s, D), torch.bfloat16) for n, s in ((H, M), (G, N)))
    return ag.attention(q, k, k, **more)


def tile_of(launch: Launch) -> Tiling:
    """The tile of a launch."""
    fixed = launch.fixed
    return Tiling(fixed["BLOCK_M"], fixed["BLOCK_N"], launch.warps, launch.stages)


def tiles_of(flash: Flash, launch: Launch) -> list[int]:
    """The tiles of each of its blocks."""
    table = flash.tables.get(str(launch.tensors.get("lists_ptr")))
    if table is not None:
        return (table[:, 1] + table[:, 2]).tolist()
    p, tile = flash.problem, tile_of(launch)
    mask = ag.Prefix(1 << 30) if p.node.mask is None else p.node.mask
    kinds = bound_tiles(mask, Block.whole(p.sizes), (tile.block_m, tile.block_n))
    walked = kinds.T if launch.kernel == "key_gradient" else kinds
    return walked.count_nonzero(dim=1).tolist()


@contextmanager
def divided(pass_: Pass, splits: int = 1, parts: int = 1) -> Iterator[None]:
    """Within this block the work of a pass is divided so, whatever the sizes."""
    usual = FlashBuilder.divide

    def divide(self: FlashBuilder, of: Pass, *given: Any, **named: Any) -> Division:
        own = usual(self, of, *given, **named)
        return Division(own.tile, splits, parts) if of == pass_ else own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlashBuilder, "divide", divide)
        yield


@final
@frozen
class Documents(ag.Mask):
    """Causal within documents of a size: no strip, so its tiles are listed."""

    size: int

    def keep(self, at: ag.extend.Place) -> Any:
        return (at.i // self.size == at.j // self.size) & (at.j <= at.i)


@pytest.mark.parametrize("gpu", GPUS)
def test_sums_are_made_where_they_spare_more_than_they_take(gpu: str) -> None:
    """One group of heads and a chunk of a long prompt are shared, short texts of few heads hardly:
    a launch that joins takes longer than all of their scores."""
    target = ag.Target.of(gpu)
    forward, _ = flashes(attention(1, 8, 8, 128, 32768, mask=BELOW), target)
    assert forward.launches[0].fixed["PARTS"] > 1
    _, backward = flashes(attention(1, 16, 1, 2048, 2048, mask=ag.Causal()), target)
    (launch,) = (x for x in backward.launches if x.kernel == "key_gradient")
    assert launch.fixed["SPLITS"] > 1
    forward, backward = flashes(attention(1, 8, 8, 128, 128, 64), target)
    assert not forward.buffers
    assert [*backward.buffers] == ["delta"]


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_queries_of_few_heads_are_divided_in_the_backward(gpu: str) -> None:
    """Not where sums have no room, nor where bits may not depend on the batch."""
    graph, target = attention(1, 2, 2, 4096, 4096, mask=ag.Causal()), ag.Target.of(gpu)
    backward = flashes(graph, target)[1]
    launch = next(x for x in backward.launches if x.kernel == "key_gradient")
    assert launch.fixed["PARTS"] == 2
    assert "2 programs share the queries of a head" in backward.division
    for options in (Options(max_workspace=2**20), Options(batch_invariant=True)):
        backward = flashes(graph, target, options)[1]
        launch = next(x for x in backward.launches if x.kernel == "key_gradient")
        assert launch.fixed["PARTS"] == 1
        assert [*backward.buffers] == ["delta"]
        assert ("max_workspace does not allow" in backward.division) == (
            not options.batch_invariant
        )


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_blocks_are_half_as_long_where_they_are_few(gpu: str) -> None:
    target, tiles = ag.Target.of(gpu), {}
    for B, H, S in ((1, 4, 512), (1, 8, 1024), (1, 8, 2048), (1, 8, 4096), (4, 8, 8192)):
        forward, _ = flashes(attention(B, H, H, S, S, mask=ag.Causal()), target)
        launch = next(x for x in forward.launches if x.kernel == "forward")
        tiles[S] = launch.fixed["BLOCK_M"], launch.fixed["BLOCK_N"], launch.warps
        assert launch.fixed["PARTS"] == 1
    half, alone, pair = (64, 128, 4), (128, 128, 8), (128, 64, 4)
    assert tiles == {512: half, 1024: half, 2048: alone, 4096: pair, 8192: pair}
    forward, _ = flashes(attention(1, 12, 12, 1280, 1280), target)  # one on a multiprocessor
    launch = forward.launches[0]
    assert (launch.fixed["BLOCK_M"], launch.fixed["BLOCK_N"], launch.warps) == (128, 128, 8)
    for options in (Options(batch_invariant=True), Options(variant="a stage more")):
        forward, _ = flashes(attention(1, 8, 8, 1024, 1024), target, options)
        assert (forward.launches[0].fixed["BLOCK_M"], forward.launches[0].warps) == (128, 4)


def test_sums_take_of_max_workspace_what_is_left() -> None:
    """With less memory programs walk more heads, and `explain` says why."""
    graph, target = attention(1, 8, 1, 4096, 4096, mask=ag.Causal()), ag.Target.of("h200")
    whole = flashes(graph, target)[1].scratch.bytes
    splits = []
    for most in (None, whole, whole - 1, whole // 2, 2**20):
        flash = flashes(graph, target, Options(max_workspace=most))[1]
        assert flash.scratch.bytes <= (whole if most is None else most)
        splits.append(next(x for x in flash.launches if x.kernel == "key_gradient").fixed["SPLITS"])
        limited = most is not None and most < whole
        assert ("which max_workspace does not allow" in flash.division) == limited
    assert splits == [4, 4, 3, 1, 1]


def test_explain_tells_programs_and_waves() -> None:
    graph = attention(1, 8, 1, 4096, 4096, mask=ag.Causal())
    plan = ag.explain(graph, target="h200", backends=("triton",))
    assert plan.backward is not None
    (line,) = (x for x in plan.backward.notes if x.startswith("key_gradient: 256 programs"))
    assert line == "key_gradient: 256 programs, 1.94 waves, tiles of 64 x 64, 4 warps, 2 stages"
    (added,) = (x for x in plan.backward.notes if x.startswith("sum_parts: 256 programs"))
    assert added.endswith(", 2 times")  # of dk and dv
    unknown = evolve(ag.Target.of("h200"), multiprocessors=None)
    forward, _ = flashes(graph, unknown)
    assert next(launch_notes(forward)).startswith("forward: 256 programs, tiles")


@given(programs=st.integers(1, 900), places=st.integers(1, 300), tiles=st.integers(0, 900))
@example(programs=81, places=100, tiles=60)
def test_parts_are_as_many_as_flash_decoding_takes(programs: int, places: int, tiles: int) -> None:
    """`num_splits_heuristic` of csrc/flash_attn/flash_api.cpp, as it stands there."""
    most = min(128, places, tiles)
    if programs >= 0.8 * places:
        due = 1
    else:
        best, shares = 0.0, []
        for n in range(1, most + 1):
            eligible = n == 1 or ceil(tiles / n) != ceil(tiles / (n - 1))
            waves = programs * n / places
            shares.append(waves / ceil(waves) if eligible else 0.0)
            best = max(best, shares[-1])
        due = next((n for n, x in enumerate(shares, 1) if x and x >= 0.85 * best), 1)
    assert choose_parts(programs, places, tiles) == due


@pytest.mark.parametrize("gpu", GPUS)
def test_blocks_with_the_most_to_do_begin(gpu: str) -> None:
    """In closed form and in lists, of queries and of keys."""
    c = ag.Causal()
    for mask in (c, ~c, c & ag.Window(512), c | ag.Prefix(300), Documents(700), None):
        for flash in flashes(attention(2, 4, 2, 4096, 4096, mask=mask), ag.Target.of(gpu)):
            for launch in (x for x in flash.launches if x.kernel in LONG):
                costs = tiles_of(flash, launch)
                costs = costs[::-1] if launch.fixed["LAST_FIRST"] else costs
                assert all(a >= b for a, b in pairwise(costs)), (mask, launch.kernel, costs)


@given(
    blocks=st.integers(1, 7), H=st.integers(1, 5), B=st.integers(1, 3), last_first=st.booleans(),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=2 * settings().max_examples // 5)
@interpreted
def test_every_block_of_every_head_has_its_program(
    blocks: int, H: int, B: int, last_first: bool, data: st.DataObject
) -> None:
    """Once, and in the order that the simulation takes: of `together` heads by block."""
    together = data.draw(st.integers(1, B * H))
    out = torch.empty(blocks * H * B, 3, dtype=torch.int32)
    importlib.import_module("tests.support.triton_probes").places[(len(out),)](
        out, blocks, H, together, LAST_FIRST=last_first
    )
    order = range(blocks)[::-1] if last_first else range(blocks)
    heads = [divmod(n, H)[::-1] for n in range(B * H)]
    due = [
        [block, *head]
        for start in range(0, B * H, together)
        for block in order
        for head in heads[start : start + together]
    ]
    assert out.tolist() == due


@interpreted
@pytest.mark.parametrize(
    ("dtype", "heads", "N", "splits", "parts", "mask"),
    [
        (torch.float32, 3, 45, 2, 1, BELOW),
        (torch.bfloat16, 4, 47, 4, 2, BELOW),
        (torch.float16, 3, 42, 3, 4, BELOW | ag.Prefix(9)),  # listed
        (torch.float32, 1, 41, 1, 2, None),
        (torch.float16, 1, 43, 1, 8, BELOW & ag.Window(20, align="bottom_right")),
    ],
)
def test_gradients_agree_however_queries_are_divided(
    dtype: torch.dtype, heads: int, N: int, splits: int, parts: int, mask: ag.Mask | None
) -> None:
    """The heads of a group, and then the queries of a head, evenly or not; and are the same bits
    every time."""
    specs = [
        ag.TensorSpec((1, h, s, d), dtype) for h, s, d in ((heads, 40, 8), (1, N, 8), (1, N, 20))
    ]
    graph = ag.attention(*specs, mask=mask, stats=True)
    with divided("key_gradient", splits, parts):
        backward = flashes(graph, CPU)[1]
        (launch,) = (x for x in backward.launches if x.kernel == "key_gradient")
        assert (launch.fixed["SPLITS"], launch.fixed["PARTS"]) == (splits, parts)
        check_repeated_gradients(graph)


def check_repeated_gradients(graph: ag.Graph) -> None:
    """Assert that gradients of Triton's agree with the formula, and are the same bits again."""
    plan, tensors = ag.compile(graph, backends=("triton",)), tensors_for(graph, 3)
    cotangents = cotangents_for(graph, 4)
    first, again = (run_gradients(plan, tensors, cotangents) for _ in range(2))
    for name, due in rule.expect_gradients(graph, tensors, cotangents).items():
        due.check(first[name])
        assert torch.equal(first[name], again[name])


# Compiles

SHAPES = [  # B, H, G, M, N
    (*heads, *lengths)
    for heads in ((2, 8, 8), (2, 16, 2), (4, 16, 16), (3, 32, 8), (2, 2, 1))
    for lengths in (
        (512, 512), (640, 1152), (1000, 1000), (77, 777), (4096, 4096), (333, 4096), (16, 17),
        (2048, 2049),
    )
]  # fmt: skip
VARIETIES: dict[str, tuple[int, Callable[[int, int, int], dict[str, Any]]]] = {
    "none": (3, lambda B, M, N: {}),
    "causal": (3, lambda B, M, N: {"mask": BELOW}),
    "window": (3, lambda B, M, N: {"mask": BELOW & ag.Window(3 + N // 4, align="bottom_right")}),
    "listed": (3, lambda B, M, N: {"mask": BELOW | ag.Prefix(1 + N // 8)}),
    "lengths": (3, lambda B, M, N: {"kv_lengths": ag.TensorSpec((B,), torch.int32)}),
    # with rows on multiples of 16, several elements are loaded at once, and else not
    "bias": (6, lambda B, M, N: {"bias": ag.TensorSpec((1, 1, M, N), torch.bfloat16)}),
}
KINDS = {  # by head size; others are one
    64: {"key_gradient": 3, "forward": 4, "query_gradient": 2, "merge_parts": 2},
    128: {"key_gradient": 3, "forward": 4, "query_gradient": 3, "merge_parts": 2},
}


@compiled
@pytest.mark.parametrize("D", KINDS)
@pytest.mark.parametrize("name", VARIETIES)
def test_new_shapes_need_few_new_kernels(name: str, D: int) -> None:
    """At most 4 of each for 40 shapes: Triton's key, as launches with their arguments make it.

    Three are of dk and dv: of one head, of all of a group, and of a part of one, in float32. Of o
    there are whole ones and parts of two tiles, of dq whole ones and parts; with heads of 128
    another tile of dq, without which launches take 3 % more time, and at most 31 %.
    """
    jit = importlib.import_module("triton.runtime.jit")
    most, more = VARIETIES[name]
    keys: dict[str, set[str]] = {}

    def note_key(kernel: Any, key: str, *_: object) -> None:  # Any: Triton's
        """In place of compiling. Triton 3.6 can't tell its own hook of kernels with functions."""
        keys.setdefault(kernel.__name__, set()).add(key)

    with pytest.MonkeyPatch.context() as patch, compile_for(90):
        patch.setattr(jit.JITFunction, "_do_compile", note_key)
        for B, H, G, M, N in SHAPES:
            graph = attention(B, H, G, M, N, D, **more(B, M, N))
            for flash in flashes(graph, ag.Target.of("h200")):
                tensors: dict[str, Any] = {n: jit.MockTensor(x) for n, x in flash.dtypes().items()}
                tensors["o.strides"] = flash.problem.layout_of_o[1]
                for launch in flash.launches:
                    load_kernel(launch.kernel).warmup(grid=(1,), **launch.arguments(tensors))
    assert {"forward", "query_gradient", "key_gradient"} <= keys.keys()
    counts = {n: len(own) for n, own in keys.items()}
    assert all(count <= most // 3 * KINDS[D].get(n, 1) for n, count in counts.items()), counts


@interpreted
def test_kernels_list_the_tiles_of_many_blocks_as_planning_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of masks without tensors too, alike in all heads or not."""
    monkeypatch.setattr("attn_graph.lowering.triton.launch_list.MOST_AHEAD", 2)
    x = torch.randn(2, 2, 200, 16)
    spec = ag.TensorSpec.like(x)
    for mask in (
        ag.Formula("i // 40 == j // 40"),
        ag.Formula("i // 40 == j // 40") & ~ag.Formula("(i + h) % 2 == j % 3"),
    ):
        graph = ag.attention(spec, spec, spec, mask=mask)
        plan = ag.compile(graph, backends=("triton",), store=False)
        assert any(note.startswith("list_tiles") for note in plan.explain().notes)
        assert plan.verify(x, x, x).ok
        check_repeated_gradients(graph)
