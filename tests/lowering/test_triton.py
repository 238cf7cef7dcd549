"""Triton's kernels under its interpreter: what they read, write, skip and draw.

That they agree with the formula is in test_lowering.py, which runs under the interpreter too.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.vjp import backward
from attn_graph.kernels.tilings import INTERPRETED, VARIANTS
from attn_graph.lowering.codegen.device_code import DeviceCode, Tracer, compile_text
from attn_graph.lowering.codegen.launches import Launch, check_interpreter
from attn_graph.lowering.codegen.tile_lists import blocks, list_width
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.request import Options, Request
from attn_graph.lowering.triton import backend as triton_flash
from attn_graph.lowering.triton.plan import Flash, FlashBuilder
from attn_graph.masks import needs_of
from attn_graph.masks.places import Block
from attn_graph.sparsity.tiles import bound_tiles
from attn_graph.spec import TensorSpec
from attn_graph.testing import rule
from attn_graph.testing.agreement import check_gradients, run_plan
from attn_graph.testing.mask_formula import Places, evaluate_mask
from attn_graph.testing.strategies import Shape, data_specs, masks, seeds
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.kernels import CPU, interpreted, problem_of
from tests.support.sources import ROOT, load_file

NAN = float("nan")
HALF = (torch.float16, torch.bfloat16)
KERNELS = True, ("lse", "max")  # statistics by a kernel for few queries, and by one for any number
SENTINEL = -7.5  # exact in every dtype; NaN + 1 would still be NaN
HALO = 4096  # elements on each side
pytestmark = interpreted


def probes() -> Any:  # Any: a module that imports Triton, under which type checkers lose their way
    return importlib.import_module("tests.support.triton_probes")


# Reads and writes


def haloed(
    spec: TensorSpec, halo: float, values: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor that meets the spec, with `halo` on all sides and in its gaps; and its storage."""
    reach = sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True)) + 1
    room = torch.full((reach + 2 * HALO,), halo).to(spec.dtype)
    tensor = room.as_strided(spec.shape, spec.strides, HALO)
    if values is not None:
        tensor.copy_(values)
    return tensor, room


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> st.SearchStrategy[TensorSpec]:
    """Apart, in some memory order, with gaps."""
    order = st.sampled_from(((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)))

    def with_gaps(axes: tuple[int, ...], gap: int) -> TensorSpec:
        strides, step = [0] * 4, 1
        for axis in reversed(axes):
            strides[axis] = step
            step = step * shape[axis] + gap
        return TensorSpec(shape, dtype, strides)

    return st.builds(with_gaps, order, st.integers(0, 5))


def launched(graph: ag.Graph, named: dict[str, Any], results: dict[str, TensorSpec]) -> None:
    """Launch a graph's kernels on these tensors. What they write lies in halos, unchanged after."""
    flash, rooms = Flash.plan(problem_of(graph), CPU), {}
    named |= flash.tables
    buffers = {n: TensorSpec(b.shape, b.dtype) for n, b in flash.buffers.items()}
    for name, spec in (results | buffers).items():
        named[name], rooms[name] = haloed(spec, SENTINEL)
    for launch in flash.launches:
        launch(named)
    for name, room in rooms.items():
        inside = torch.zeros(room.shape, dtype=torch.bool)
        inside.as_strided(named[name].shape, named[name].stride(), HALO).fill_(True)
        assert (room[~inside] == SENTINEL).all(), f"{name} was written outside"


@given(data=st.data(), dtype=st.sampled_from((*HALF, torch.float32)), seed=seeds)
@settings(max_examples=settings().max_examples // 2)  # each is interpreted
def test_nothing_is_read_or_written_outside(
    data: st.DataObject, dtype: torch.dtype, seed: int
) -> None:
    """NaN around the inputs never shows in a result; around the results nothing changes."""
    size = Shape(1, 2, 1, data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70)), 5, 20)
    specs = [data.draw(layouts(x, dtype)) for x in (size.q, size.k, size.v)]
    band = ag.Window(data.draw(st.integers(0, 40)), 3, "bottom_right")
    mask = data.draw(st.sampled_from((None, ag.Causal("bottom_right"), band, ~band)))
    graph = ag.attention(*specs, mask=mask, soft_cap=5.0, stats=True)
    tensors = tensors_for(graph, 1)
    forward, backward = ag.vjp(graph)
    named: dict[str, Any] = {
        n: haloed(s, NAN, x)[0] for n, s, x in zip("qkv", specs, tensors, strict=True)
    }
    results = [result_spec(forward, i) for i in forward.outputs]
    launched(forward, named, dict(zip(("o", "lse"), results, strict=True)))
    for name, due in zip(("o", "lse"), rule.expect_outputs(graph, tensors), strict=True):
        due.check(named[name])
    cotangents = cotangents_for(forward, seed)
    for name, spec, x in zip(("do", "dlse"), results, cotangents, strict=True):
        named[name] = haloed(spec, NAN, x)[0]
    named["o.strides"] = named["o"].stride()
    lying = Lying.dense(problem_of(backward))
    launched(backward, named, {f"grad{n}": lying.gradient(n) for n in range(3)})
    for n, due in enumerate(rule.expect_gradients(graph, tensors, cotangents).values()):
        due.check(named[f"grad{n}"])


# Tiles


def visited(graph: ag.Graph, tensors: dict[str, torch.Tensor], by_keys: bool) -> torch.Tensor:
    """For each tile, 0: not visited, 1: masked, 2: taken whole; [B,H,blocks of M,blocks of N]."""
    problem = problem_of(graph)
    flash = FlashBuilder(problem, CPU, Tracer.of(problem).trace())
    pointer, fixed = flash.listed(INTERPRETED, by_keys)
    data = [tensors[name] for name in needs_of(problem.node.mask)]
    lines, tiles = (blocks(n, 32) for n in (problem.M, problem.N))
    lines, tiles = (tiles, lines) if by_keys else (lines, tiles)
    found = torch.zeros(problem.B, problem.H, lines, tiles, dtype=torch.int8)
    if fixed["LISTED"]:
        named: dict[str, Any] = {f"data.{k}": x for k, x in enumerate(data)} | flash.tables
        named |= {n: torch.empty(b.shape, dtype=b.dtype) for n, b in flash.buffers.items()}
        for launch in flash.launches:
            launch(named)
        lists = named[str(pointer["lists_ptr"])].reshape(-1, lines, list_width(tiles))
        lists = lists.as_strided(
            (problem.B, problem.H, lines, list_width(tiles)), (*fixed["lists_strides"], 1)
        )
        for at in torch.cartesian_prod(*map(torch.arange, found.shape[:3])).tolist():
            b, h, place = at
            block, full, mixed, *which = lists[b, h, place].tolist()
            assert len(set(which[: full + mixed])) == full + mixed
            for n, t in enumerate(which[: full + mixed]):
                found[b, h, block, t] = 2 if n < full else 1
    else:
        rows = strip_tiles(problem, flash.code, data, by_keys, lines)
        for b, line in torch.cartesian_prod(torch.arange(problem.B), torch.arange(lines)).tolist():
            start, full_start, full_stop, stop = rows[b, line].tolist()
            found[b, :, line, start:stop] = 1
            found[b, :, line, full_start:full_stop] = 2
    return found.mT if by_keys else found


def strip_tiles(
    problem: Problem, code: DeviceCode, data: list[torch.Tensor], by_keys: bool, lines: int
) -> torch.Tensor:
    """start, full_start, full_stop, stop of each batch entry and block, as kernels find them."""
    out = torch.empty(problem.B, lines, 4, dtype=torch.int32)
    probes().closed_form[(problem.B * lines,)](
        out, lines, problem.M, problem.N, tuple(data), code.numbers,
        STRIP=compile_text(code.strip), BLOCK=32, BY_KEYS=by_keys,
    )  # fmt: skip
    return out


def tiled(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each tile keeps any place, and whether all; kept [B,H,M,N]."""
    B, H, M, N = kept.shape
    room = [torch.full((B, H, blocks(M, 32) * 32, blocks(N, 32) * 32), x) for x in (False, True)]
    for each in room:
        each[:, :, :M, :N] = kept
    some, full = (x.unflatten(3, (-1, 32)).unflatten(2, (-1, 32)) for x in room)
    return some.any(5).any(3), full.all(5).all(3)


def places_kept(graph: ag.Graph, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    problem = problem_of(graph)
    sizes = problem.B, problem.H, problem.M, problem.N
    assert problem.node.mask is not None
    return evaluate_mask(problem.node.mask, Places(sizes, tensors)).expand(sizes)


@st.composite
def masked_graphs(draw: st.DrawFn) -> ag.Graph:
    """A mask, over several tiles a side."""
    M = draw(st.integers(1, 200))
    N = draw(st.one_of(st.just(M), st.integers(1, 200)))
    size = Shape(draw(st.integers(1, 2)), 2, 1, M, N, 4, 4)
    mask = draw(masks(size, depth=2))
    given: dict[str, Any] = draw(data_specs(mask.needs, size))
    if "q_segments" in given:
        given["segments"] = (given.pop("q_segments"), given.pop("kv_segments"))
    q, k, v = (TensorSpec(x, torch.float32) for x in (size.q, size.k, size.v))
    return simplify(ag.attention(q, k, v, mask=mask, **given))


@given(graph=masked_graphs(), seed=seeds, by_keys=st.booleans())
def test_every_tile_that_keeps_a_place_is_visited(
    graph: ag.Graph, seed: int, by_keys: bool
) -> None:
    """And of the others none, where closed form or `span` knows; none is taken whole that isn't."""
    problem = problem_of(graph)
    if problem.node.mask is None:
        return
    names = [i.name for i in graph.inputs]
    tensors = dict(zip(names, tensors_for(graph, seed), strict=True))
    found = visited(graph, tensors, by_keys)
    some, full = tiled(places_kept(graph, tensors))
    assert (found[some] > 0).all()
    assert full[found == 2].all()
    flash = Flash.plan(problem, CPU)
    if flash.code.strip:
        assert torch.equal(found > 0, some)
    elif not problem.node.mask.needs:
        tile = INTERPRETED.block_m, INTERPRETED.block_n
        due = bound_tiles(problem.node.mask, Block.whole(problem.sizes), tile)
        assert torch.equal(found > 0, (due > 0).expand(found.shape))


def test_a_last_block_of_queries_that_is_not_whole_is_masked_by_keys() -> None:
    x, y = TensorSpec((1, 1, 40, 4), torch.float32), TensorSpec((1, 1, 64, 4), torch.float32)
    graph = simplify(ag.attention(x, y, y, mask=~ag.Prefix(2)))
    found = visited(graph, {}, by_keys=True)
    assert (found[:, :, 0] == torch.tensor([1, 2])).all()
    assert (found[:, :, 1] == 1).all()


def test_a_block_of_queries_that_lengths_end_in_is_masked() -> None:
    x, lengths = TensorSpec((1, 1, 64, 4), torch.float32), torch.tensor([40])
    graph = simplify(ag.attention(x, x, x, q_lengths=TensorSpec.like(lengths)))
    for by_keys in (False, True):
        found = visited(graph, {"q_lengths": lengths}, by_keys)
        assert torch.equal(found[0, 0], torch.tensor([[2, 2], [1, 1]]))


def test_a_window_at_64k_visits_less_than_a_hundredth() -> None:
    x = TensorSpec((1, 1, 65536, 16), torch.float16)
    graph = simplify(ag.attention(x, x, x, mask=ag.Causal() & ag.Window(256)))
    problem = problem_of(graph)
    rows = strip_tiles(problem, Flash.plan(problem, CPU).code, [], False, 2048)
    count = int((rows[..., 3] - rows[..., 0]).sum())
    assert count / 2048**2 < 0.01
    assert count == sum(i // 32 - max(0, i - 256) // 32 + 1 for i in range(0, 65536, 32))


@pytest.mark.parametrize("by_keys", [False, True])
def test_data_decides_tile_by_tile(by_keys: bool) -> None:
    """Sorted segments and a boolean tensor: exactly the tiles that keep a place."""
    x = TensorSpec((2, 2, 160, 4), torch.float32)
    numbers = TensorSpec((2, 160), torch.int64)
    graph = simplify(ag.attention(x, x, x, segments=(numbers, numbers)))
    ids = torch.arange(160).div(45, rounding_mode="floor").repeat(2, 1)
    tensors = {"q_segments": ids, "kv_segments": ids}
    some, full = tiled(places_kept(graph, tensors))
    found = visited(graph, tensors, by_keys)
    assert torch.equal(found > 0, some)
    assert torch.equal(found == 2, full)
    graph = simplify(ag.attention(x, x, x, keep=TensorSpec((1, 2, 160, 160), torch.bool)))
    keep = torch.zeros(1, 2, 160, 160, dtype=torch.bool)
    keep[:, 0, 40:, :70], keep[:, 1, 3, 5] = True, True
    some, full = tiled(keep.expand(2, 2, 160, 160))
    found = visited(graph, {"keep": keep}, by_keys)
    assert torch.equal(found > 0, some)
    assert torch.equal(found == 2, full)


# Definitions of others, and dropout


def own_mask() -> Any:  # Any: a module
    return load_file(ROOT / "examples" / "own_mask.py")


def apart(graph: ag.Graph, tensors: tuple[torch.Tensor, ...]) -> list[str]:
    """Where triton and math give other results or gradients than each other."""
    results = []
    for backend in ("triton", "math"):
        given = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        outputs = ag.compile(graph, backends=(backend,))(*given)
        wanted, pulled = ([t for t in ts if t.requires_grad] for ts in (given, outputs))
        found = torch.autograd.grad(pulled, wanted, [torch.ones_like(x) for x in pulled])
        results.append((*outputs, *found))
    return [
        f"{n}: {a} is not {b}"
        for n, (a, b) in enumerate(zip(*results, strict=True))
        if not torch.allclose(a, b, atol=2e-5, rtol=2e-5)
        or (a.shape, a.dtype) != (b.shape, b.dtype)
    ]


def test_a_mask_of_a_user_runs_in_the_kernels_and_skips() -> None:
    x = TensorSpec((1, 2, 256, 16), torch.float32)
    mask = ag.Causal() & (own_mask().Blocks(64) | ag.Prefix(4))
    graph = ag.attention(x, x, x, mask=mask, stats=True)
    assert not apart(graph, tensors_for(graph, 3))
    i, j = torch.arange(256)[:, None], torch.arange(256)
    near = (i // 64 - j // 64).clamp(0, 1) == i // 64 - j // 64
    some, _ = tiled(((j <= i) & (near | (j < 4)))[None, None])
    found_tiles = visited(simplify(graph), {}, False)[:, :1]
    assert (found_tiles > 0).sum() == some.sum() < 36  # of the 36 that are causal


def test_masks_and_modifiers_read_nothing_beyond_the_last_query_and_key() -> None:
    """What is read where a tile reaches over the edge changes no result, so none would tell."""
    x, full = TensorSpec((1, 2, 70, 8), torch.float32), (1, 2, 70, 70)
    keep, bias = TensorSpec(full, torch.bool), TensorSpec(full, torch.float32)
    code = Flash.plan(problem_of(ag.attention(x, x, x, keep=keep, bias=bias)), CPU).code
    for text in (code.keep, code.change):
        loads = [line for line in str(text).splitlines() if "tl.load(" in line]
        assert loads
        assert all("mask=(i < M) & (j < N), other=0)" in line for line in loads)


@pytest.mark.parametrize("stats", KERNELS)
def test_query_heads_read_the_keys_and_values_of_their_group(stats: Any) -> None:
    """Of two tiles, the first of which the second block of queries sees whole."""
    x, few = (TensorSpec((1, heads, 40, 8), torch.float32) for heads in (4, 2))
    graph = ag.attention(x, few, few, mask=ag.Causal(), stats=stats)
    assert not apart(graph, tensors_for(graph, 1))


def test_division_rounds_down_as_in_python() -> None:
    """Not towards 0, as Triton's does."""
    x = TensorSpec((1, 1, 40, 8), torch.float32)
    graph = ag.attention(x, x, x, mask=probes().Striped(), stats=True)
    assert not apart(graph, tensors_for(graph, 2))


def test_a_modifier_of_a_user_runs_in_the_kernels_with_its_gradient() -> None:
    sloped = probes().Sloped()

    def attend(q: Any, k: Any, v: Any, weight: Any) -> Any:  # Any: values
        p, lse = ag.scores(q, k).then(sloped, weight).softmax()
        return p.weigh(v), lse

    x, weight = TensorSpec((2, 3, 40, 8), torch.float32), TensorSpec((3,), torch.float32)
    graph = ag.graph(attend, q=x, k=x, v=x, weight=weight)
    q, k, v, w = tensors_for(graph, 2)
    assert not apart(graph, (q, k, v, w * 0.01))


def test_a_derivative_that_is_infinite_where_no_key_is_reaches_no_gradient() -> None:
    x = TensorSpec((1, 2, 6, 8), torch.float32)

    def attend(q: Any, k: Any, v: Any) -> Any:  # Any: values
        p, lse = ag.scores(q, k).then(probes().Steep()).mask(ag.Causal()).softmax()
        return p.weigh(v), lse

    graph = ag.graph(attend, q=x, k=x, v=x)
    q, k, v = tensors_for(graph, 2)
    assert not apart(graph, (q.abs() / 5 + 1.25, k.abs() / 5 + 1.25, v))


@pytest.mark.parametrize("stats", KERNELS)
def test_a_bias_hides_rows_in_tiles_that_need_no_mask_too(stats: Any) -> None:
    """Weights of such rows are 0, and their cotangents, NaN here, reach nothing."""
    x, bias = TensorSpec((1, 1, 64, 16), torch.float32), torch.zeros(1, 1, 64, 64)
    bias[:, :, 3:40] = -torch.inf
    graph = ag.attention(x, x, x, bias=TensorSpec.like(bias), stats=stats)
    tensors = [t.requires_grad_() for t in (*tensors_for(graph, 1)[:3], bias)]
    do = torch.randn(x.shape).index_fill(2, torch.arange(3, 40), NAN)
    results = []
    for backend in ("triton", "math"):
        o, *_ = run_plan(ag.compile(graph, backends=(backend,)), tensors)
        results.append((o.detach(), *torch.autograd.grad(o, tensors, do)))
    for found, due in zip(*results, strict=True):
        assert torch.allclose(found, due, atol=2e-5, rtol=2e-5)


def test_the_interpreter_rounds_to_bfloat16_as_pytorch_does() -> None:
    exact = torch.randn(1024).bfloat16().float()
    halfway = exact + exact.sign() * 2.0 ** (exact.abs().log2().floor() - 8)
    for x in (torch.randn(1024), halfway):
        out = torch.empty(1024)
        probes().rounded[(1,)](x, out, SIZE=1024)
        assert torch.equal(out, x.bfloat16().float())


def test_what_can_not_be_traced_is_refused_with_a_reason() -> None:
    """By Triton alone: the math backend asks such a mask with tensors."""
    x = TensorSpec((1, 1, 8, 4), torch.float32)
    for mask, word in (
        (probes().Branching(), "has no all"),
        (probes().Calling(), "where of torch"),
    ):
        graph = ag.attention(x, x, x, mask=mask)
        with pytest.raises(ag.NoBackendError, match=word):
            ag.compile(graph, backends=("triton",))
    assert ag.compile(graph, backends=("math",)).backend == "math"


def test_the_workspace_is_what_memory_says() -> None:
    """Lists, extremes, delta and sums lie in the arena, and nowhere else."""
    x, numbers = TensorSpec((2, 2, 70, 8), torch.float32), TensorSpec((2, 70), torch.int64)
    slopes = TensorSpec((2,), torch.float32)
    graph = ag.attention(x, x, x, segments=(numbers, numbers), alibi=slopes)
    workspace = ag.Workspace()
    plan = ag.compile(graph, backends=("triton",), workspace=workspace)
    need = plan.memory()
    tensors = tensors_for(graph, 1)
    plan(*tensors)
    assert workspace.bytes == need.workspace_forward > 0
    given = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    o = plan(*given)
    assert isinstance(o, torch.Tensor)
    torch.autograd.grad(o.sum(), [t for t in given if t.requires_grad])
    assert workspace.bytes == need.workspace_backward > need.workspace_forward
    with pytest.raises(
        ag.NoBackendError, match=f"needs a workspace of {need.workspace_forward:,} b"
    ):
        ag.compile(graph, backends=("triton",), max_workspace=need.workspace_forward - 1)


@pytest.mark.parametrize("mask", [None, ag.Window(20, 20, "bottom_right")])
def test_a_table_is_trained_by_diagonals(mask: ag.Mask | None) -> None:
    """In several tiles of queries and of keys, and beyond both ends of the table."""
    q, k = (TensorSpec((1, 2, n, 8), torch.float32) for n in (70, 90))
    step, table = ag.RelativeBias(75, "bottom_right"), TensorSpec((2, 75), torch.float32)
    graph = ag.attention(q, k, k, mask=mask, modifiers=(step,), table=table, stats=True)
    check_gradients(ag.compile(graph, backends=("triton",)), graph, tensors_for(graph, 1), 1)


@pytest.mark.parametrize("stats", [False, True])
def test_lse_is_stored_where_someone_may_read_it(
    stats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient, or who called; else the kernel is given no place for it."""
    x = TensorSpec((2, 4, 40, 8), torch.float32)  # enough programs not to share keys
    graph = ag.attention(x, x, x, mask=ag.Causal(), stats=stats)
    plan, tensors = ag.compile(graph, backends=("triton",)), tensors_for(graph, 1)
    stored: list[bool] = []
    run = Launch.__call__

    def launch(self: Launch, named: dict[str, Any]) -> None:
        stored.append(self.arguments(named)["lse_ptr"] is not None)
        run(self, named)

    monkeypatch.setattr(Launch, "__call__", launch)
    leaves = [t.detach().requires_grad_() for t in tensors]
    plan(*tensors)
    with torch.no_grad():
        plan(*leaves)
    plan(*leaves)
    assert stored == [stats, stats, True]


def test_a_plan_for_compiled_kernels_is_not_interpreted() -> None:
    """The interpreter knows no bfloat16 and says nothing: only kernels that know of it may run."""
    check_interpreter(True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        check_interpreter(False)


# Variants


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_the_tiles_computes_the_same(variant: str) -> None:
    x = TensorSpec((1, 2, 90, 16), torch.float32)
    graph = ag.attention(x, x, x, mask=ag.Causal() & (ag.Window(40) | ag.Prefix(5)), stats=True)
    simple = simplify(graph)
    tensors, cotangents = tensors_for(graph, 1), cotangents_for(simple, 1)
    cotangent_specs = [TensorSpec.like(d) for d in cotangents]
    options = Options(variant=variant)
    outputs, saved = triton_flash.lower(Request(simple, CPU, options)).run(*tensors)
    for found, due in zip(outputs, rule.expect_outputs(graph, tensors), strict=True):
        due.check(found)
    back = backward(simple, (0, 1, 2), cotangent_specs)
    gradients, _ = triton_flash.lower(Request(back, CPU, options)).run(
        *tensors, *saved, *cotangents
    )
    dues = rule.expect_gradients(graph, tensors, cotangents)
    for name, found in zip("qkv", gradients, strict=True):
        dues[name].check(found)
