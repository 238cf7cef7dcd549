"""Memory of a long attention, measured from outside."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import pytest
import torch
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch.profiler import ProfilerActivity, profile

import attn_graph as ag
from attn_graph.ir.transforms.vjp import main_outputs, residuals
from attn_graph.kernels import fused_cpu
from attn_graph.machine.sizes import Memory
from attn_graph.testing.strategies import graphs, seeds, shuffled_graphs
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import one_way
from tests.support.sources import ROOT

T = TypeVar("T")
CPU = ag.Target.of("cpu")
AMX = torch.cpu._is_amx_tile_supported()  # the fused kernel packs k and v then, in half precision


def allocated(job: Callable[[], T]) -> tuple[T, int, int]:
    """What a job gives, and bytes by PyTorch's allocator: still held when it ends, and the most."""
    activities = [ProfilerActivity.CPU]
    # acc_events: else torch 2.11 warns that events of earlier cycles, of which there are none, go.
    with profile(activities=activities, profile_memory=True, acc_events=True) as watched:
        result = job()
    profiler: Any = watched.profiler  # Any: PyTorch's stubs leave out bytes of an event
    found = profiler.kineto_results.events()
    held = most = 0
    for event in sorted((e for e in found if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return result, held, most


def cotangent(o: torch.Tensor, lies: str) -> torch.Tensor:
    """A cotangent of o, of ones. lies: how, one of LAYOUTS."""
    one, (*rows, last) = torch.ones((), dtype=o.dtype), o.shape
    match lies:
        case "number":  # of one number
            return one.expand(o.shape)
        case "heads":  # of rows that all heads share
            return one.repeat(o.shape[0], 1, *o.shape[2:]).expand(o.shape)
        case "like":
            return torch.ones_like(o)
        case "turned":
            return one.repeat(*rows[:-1], last, rows[-1]).transpose(-1, -2)
        case "apart":
            return one.repeat(*rows, last + 8)[..., :last]
    return one.repeat(o.shape)


LAYOUTS = "dense", "like", "number", "heads", "turned", "apart"  # dense: in C order


def measure(
    plan: ag.Plan, tensors: Sequence[torch.Tensor], lies: str = "dense"
) -> tuple[int, int, int]:
    """The most bytes of a forward, those of the gradients and the most of a backward, by calls
    after the first, which prepares some. lies: how the cotangent does."""
    leaves = [t.requires_grad_() for t in tensors if t.is_floating_point()]
    o = plan(*tensors)
    assert isinstance(o, torch.Tensor)
    do = cotangent(o, lies)

    def backward() -> object:
        return torch.autograd.grad(o, leaves, do, retain_graph=True)

    backward()
    _, _, forward = allocated(lambda: plan(*tensors))
    return forward, *allocated(backward)[1:]


# Bytes that do not grow with what is drawn: single rows of positions and statistics, and operands
# that oneDNN packs for each thread beyond the number of heads.
SMALL = 2**15 * torch.get_num_threads()


def most_bytes(need: Memory) -> tuple[int, int]:
    """The most bytes of a forward and of a backward, results included, by `memory()`."""
    forward = max(need.outputs, need.saved) + need.temporary_forward
    backward = need.gradients + need.temporary_backward
    return (
        forward + need.threads * need.block_forward + SMALL,
        backward + need.threads * need.block_backward + SMALL,
    )


HALF = ag.TensorSpec((2, 12, 4, 16), torch.float16), ag.TensorSpec((2, 3, 4, 16), torch.float16)
SINKS = ag.attention(
    HALF[0], HALF[1], HALF[1], sinks=ag.TensorSpec((12,), torch.float16), stats=True
)


@example(graph=SINKS, seed=0, backends=("math",), through_lse=True)
@given(
    graph=st.one_of(graphs(), shuffled_graphs()),
    seed=seeds,
    backends=st.sampled_from([("math",), None]),
    through_lse=st.booleans(),
)
def test_memory_is_what_the_allocator_gives(
    graph: ag.Graph, seed: int, backends: tuple[str, ...] | None, through_lse: bool
) -> None:
    """Outputs, what is saved and gradients to the byte; what comes and goes from above."""
    plan = ag.compile(graph, target=CPU, backends=backends, workspace=ag.Workspace())
    other = plan.explain().through_lse if through_lse else None
    need = plan.memory() if other is None else other.memory
    assert need is not None
    given = main_outputs(plan.graph) if other is None else plan.graph.differentiable_outputs
    tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors_for(graph, seed)]
    wanted = [t for t in tensors if t.requires_grad]

    def forward() -> tuple[torch.Tensor, ...]:
        found = plan(*tensors)
        return found if isinstance(found, tuple) else (found,)

    def backward() -> object:
        return torch.autograd.grad(used, wanted, cotangents, retain_graph=True)

    outputs = forward()
    used = [o for o, i in zip(outputs, plan.graph.outputs, strict=True) if i in given]
    cotangents = [torch.ones_like(o) for o in used]
    backward()  # the arena is as large as it will be
    again, held, most = allocated(forward)
    copies = sum(o.nbytes for o in outputs[1:])  # lse is handed out in C order, a copy if need be
    kept = {*plan.graph.outputs, *residuals(plan.graph)}
    due = sum(plan.graph.types[i].bytes for i in kept)
    assert due == max(need.outputs, need.saved)
    assert held in (due, due + copies)
    told = most_bytes(need)
    assert most <= copies + told[0]
    _, held, most = allocated(backward)
    assert held == need.gradients
    assert most <= told[1]
    del again


@pytest.mark.parametrize("mask", [None, ag.Causal(), ag.Causal() & ag.Window(200)], ids=str)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 30.0}], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_products_of_half_precision_allocate_what_is_said(
    mask: ag.Mask | None, options: dict[str, Any], layout: str
) -> None:
    q, k = (ag.TensorSpec((1, H, 256, 32), torch.bfloat16, layout=layout) for H in (8, 2))
    graph = ag.attention(q, k, k, mask=mask, **options)
    target = evolve(CPU, native=("bf16",))
    plan = ag.compile(graph, target=target, backends=("math",), workspace=ag.Workspace())
    assert any("bf16" in note for note in plan.explain().notes)
    need = plan.memory()
    forward, held, backward = measure(plan, tensors_for(graph, 1))
    assert held == need.gradients
    told = most_bytes(need)
    assert forward <= told[0]
    assert backward <= told[1]


def twice(graph: ag.Graph) -> ag.Graph:
    """The gradient of a gradient."""
    return ag.vjp(ag.vjp(graph)[1])[1]


@given(
    graph=st.one_of(
        shuffled_graphs().map(lambda graph: ag.vjp(graph)[1]),
        graphs().map(ag.jvp),
        graphs().map(twice),
    ),
    seed=seeds,
)
def test_memory_of_derivatives_is_what_the_allocator_gives(graph: ag.Graph, seed: int) -> None:
    """Of gradients, forward mode and double backward: outputs to the byte, all else from above."""
    plan = ag.compile(graph, target=CPU, workspace=ag.Workspace())
    need, tensors = plan.memory(), tensors_for(graph, seed)
    plan(*tensors)
    _, held, most = allocated(lambda: plan(*tensors))
    assert held >= need.outputs == sum(t.bytes for t in plan.graph.output_types)
    assert most <= most_bytes(need)[0]
    if not graph.has_gradient:
        assert held == need.outputs
        assert need.gradients == need.temporary_backward == need.workspace_backward == 0


LONG = ag.TensorSpec((1, 8, 16384, 64), torch.float32)


def test_second_derivatives_of_a_long_attention_need_little_memory() -> None:
    """Its scores alone would take 8 GiB. What is declared is what the test above measures."""
    graph = ag.attention(LONG, LONG, LONG, mask=ag.Causal(), soft_cap=30.0)
    for derived in (ag.jvp(graph), twice(graph)):
        need = ag.compile(derived, target=CPU).memory()
        assert need.workspace_forward + need.temporary_forward < 250 * 2**20


BIG, FEW = ((4, H, 256, 64) for H in (8, 2))


def test_the_sums_of_a_bias_in_half_precision_are_told() -> None:
    x, bias = ag.TensorSpec(BIG, torch.bfloat16), ag.TensorSpec((4, 8, 256, 256), torch.bfloat16)
    graph = ag.attention(x, x, x, bias=bias)
    with one_way("products"):
        alone, both = (
            ag.compile(ag.vjp(graph, wants=wants)[1], target=CPU, backends=("math",)).memory()
            for wants in (("q",), ("q", "bias"))
        )
    assert both.temporary_forward - alone.temporary_forward >= 2 * bias.bytes  # in float32


def test_few_queries_of_a_cache_take_no_more_workspace_for_more_entries() -> None:
    def workspace(B: int) -> int:
        q, k = (ag.TensorSpec((B, *shape), torch.float32) for shape in ((8, 1, 64), (2, 65536, 64)))
        graph = ag.attention(q, k, k, kv_lengths=ag.TensorSpec((B,), torch.int64))
        return ag.compile(graph, target=CPU, backends=("math",)).memory().workspace_forward

    with one_way("kernel"):
        assert workspace(8) == workspace(32)


@given(
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    M=st.sampled_from((1, 100, 191, 192, 767, 768, 1000)),
    N=st.sampled_from((1, 77, 511, 512, 1024)),
    D=st.sampled_from((1, 16, 24, 64, 128)),
)
@example(torch.bfloat16, 512, 1024, 16)
def test_the_block_of_the_fused_kernel_is_told_for_each_thread(
    dtype: torch.dtype, M: int, N: int, D: int
) -> None:
    """To the byte, but for products of half precision in a backward, whose operands oneDNN packs if
    the CPU multiplies them."""
    q, k = torch.randn(1, 1, M, D).to(dtype), torch.randn(1, 1, N, D).to(dtype)
    (o, lse), _, forward = allocated(lambda: fused_cpu.flash(q, k, k, 0.0, False))
    _, gradients, backward = allocated(
        lambda: fused_cpu.flash_backward(q, q, k, k, o, lse, 0.0, False)
    )
    threads, half = torch.get_num_threads(), dtype.itemsize == 2
    told = fused_cpu.block_bytes(M, N, D, dtype)
    assert half or forward == o.nbytes + lse.nbytes + threads * told
    assert forward <= o.nbytes + lse.nbytes + threads * told + AMX * half * 3 * k.nbytes
    told = fused_cpu.block_bytes(M, N, D, dtype, backward=True)
    once = 0 if threads == 1 else min(M, 256) * 8 * threads  # delta, of threads that work
    assert backward <= gradients + threads * told
    assert half or backward >= gradients + threads * told - once


BOTTOM = ag.Causal("bottom_right")
WINDOW = ag.Causal("bottom_right") & ag.Window(40)
KIND = st.sampled_from(("dense", "packed", "paged"))


@st.composite
def operands(draw: DrawFn) -> tuple[str, dict[str, Any]]:  # Any: of attention
    """A kind of graph and its q, k, v, starts, pages and lengths, of 64 to 400 positions."""
    kind, dtype = draw(KIND), draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    B, G, r, D = (draw(st.sampled_from(x)) for x in ((1, 2, 4), (1, 2), (1, 4), (32, 64)))
    M, N = draw(st.sampled_from((1, 64, 256, 400))), draw(st.sampled_from((64, 256, 400)))
    if kind == "packed":
        q, k = ag.TensorSpec((B * M, G * r, D), dtype), ag.TensorSpec((B * N, G, D), dtype)
        starts = ag.TensorSpec((B + 1,), torch.int64)
        return kind, {"q": q, "k": k, "v": k, "q_starts": starts, "kv_starts": starts}
    q, more = ag.TensorSpec((B, G * r, M, D), dtype), dict[str, Any]()
    k = ag.TensorSpec((B, G, N, D), dtype)
    if kind == "paged":
        k = ag.TensorSpec((B * N // 16, 16, G, D), dtype)
        more["pages"] = ag.TensorSpec((B, N // 16), torch.int64)
    elif draw(st.booleans()):
        more["keep"] = ag.TensorSpec((B, 1, draw(st.sampled_from((1, M))), N), torch.bool)
    elif draw(st.booleans()):
        shape = (draw(st.sampled_from((1, B))), draw(st.sampled_from((1, G * r))), M, N)
        more["bias"] = ag.TensorSpec(shape, dtype)
    if kind == "paged" or draw(st.booleans()):
        more["kv_lengths"] = ag.TensorSpec((B,), torch.int64)
    return kind, {"q": q, "k": k, "v": k, **more}


def fill_data(kind: str, named: dict[str, torch.Tensor]) -> None:
    """Starts, pages and lengths that mean something, and NaN past the lengths."""
    q, k = named["q"], named["k"]
    for name, rows in (("q_starts", q), ("kv_starts", k)):
        if name in named:
            starts = named[name]
            starts.copy_(torch.arange(len(starts)) * (len(rows) // (len(starts) - 1)))
    if kind == "paged":
        pages = named["pages"]
        pages.copy_(torch.arange(pages.numel()).view_as(pages))
        named["kv_lengths"].fill_(pages.shape[1] * 16 - 5)
    elif "kv_lengths" in named:
        named["kv_lengths"].fill_(k.shape[2] - 5)
        k[:, :, -5:] = named["v"][:, :, -5:] = float("nan")


ROWS, KEYS = (ag.TensorSpec((4, H, n, 64), torch.bfloat16) for H, n in ((8, 64), (2, 256)))
NARROW = {"q": ROWS, "k": KEYS, "v": KEYS}
FEW_ROWS, MORE_KEYS = (ag.TensorSpec((4, 2, n, 32), torch.float32) for n in (64, 256))
ENDED = {"q": FEW_ROWS, "k": MORE_KEYS, "v": MORE_KEYS}
ENDED["kv_lengths"] = ag.TensorSpec((4,), torch.int64)
ONE, MORE = (ag.TensorSpec((4, 1, n, 32), torch.float32) for n in (400, 256))
MOVED = {"q": ONE, "k": MORE, "v": MORE, "keep": ag.TensorSpec((4, 1, 400, 256), torch.bool)}
MOVED["kv_lengths"] = ENDED["kv_lengths"]
BIASED = {**NARROW, "bias": ag.TensorSpec((4, 1, 64, 256), torch.bfloat16)}
CORNER = {
    name: ag.TensorSpec(shape, torch.float32)
    for name, shape in {"q": (4, 8, 400, 64), "k": (4, 1, 256, 64), "v": (4, 1, 256, 64)}.items()
}
TALL = {
    name: ag.TensorSpec(shape, torch.bfloat16)
    for name, shape in {"q": (4, 8, 400, 64), "k": (4, 1, 64, 64), "v": (4, 1, 64, 64)}.items()
}
TALL["bias"] = ag.TensorSpec((4, 1, 400, 64), torch.bfloat16)
WIDE = dict.fromkeys("qkv", ag.TensorSpec((1, 4, 512, 256), torch.float32))
FLAT = {
    name: ag.TensorSpec((4, H, n, 64), torch.float16)
    for name, H, n in (("q", 8, 400), ("k", 1, 32), ("v", 1, 32))
}


SHARED, PAIRS = (
    {"q": ag.TensorSpec((4, 4 * G, 400, 64), torch.float32)}
    | dict.fromkeys("kv", ag.TensorSpec((4, G, 64, 64), torch.float32))
    for G in (1, 2)
)
FEWER = {**PAIRS, "kv_lengths": ag.TensorSpec((4,), torch.int64)}
LARGE = 2**20  # bytes: of less, a row of positions or a few numbers of each row are a fifth


def take_most(kind: str, named: dict[str, torch.Tensor]) -> None:
    """Data that cost as much as any: one sequence has all rows, and keys lie in two runs."""
    fill_data(kind, named)
    for name, rows in (("q_starts", named["q"]), ("kv_starts", named["k"])):
        if name in named:
            named[name][1:] = len(rows)
    if "keep" in named:
        keep, middle = named["keep"].fill_(True), named["keep"].shape[3] // 2
        keep[..., middle - 20 : middle + 20] = False
        keep[:, :, 1::2, 1] = False  # of no row, where there is but one


def told_at_most(plan: ag.Plan, specs: dict[str, Any], mask: ag.Mask | None) -> float:
    """How many times what a call takes a plan says at most: see the test."""
    if mask is not None and not specs.keys().isdisjoint({"kv_lengths", "kv_starts"}):
        return 4.0
    two = "keep" in specs or any("records" in note for note in plan.explain().notes)
    two = two or plan.backend == "torch_sdpa"
    return 1.7 if two or specs["q"].dtype == torch.bfloat16 else 1.4


def dense(
    dtype: torch.dtype, keys: tuple[int, ...], **more: tuple[tuple[int, ...], torch.dtype]
) -> tuple[str, dict[str, Any]]:  # Any: of attention
    """A dense graph's operands, of 256 queries and keys."""
    specs = {"q": (BIG, dtype), "k": (keys, dtype), "v": (keys, dtype), **more}
    return "dense", {name: ag.TensorSpec(*spec) for name, spec in specs.items()}


HALF16, BF16, FLAGS = torch.float16, torch.bfloat16, torch.bool
BIAS, ROW_BIAS = ((4, 8, 256, 256), BF16), ((1, 8, 256, 256), HALF16)
PLACES, ROW = ((4, 1, 256, 256), FLAGS), ((4, 1, 1, 256), FLAGS)
NONE = set[str]()


@given(
    drawn=operands(),
    mask=st.sampled_from((None, BOTTOM, WINDOW)),
    steps=st.sets(st.sampled_from(("sinks", "soft_cap", "alibi", "dropout")), max_size=2),
    backends=st.sampled_from((("math",), None)),
    kind=st.sampled_from((*LAYOUTS, "most")),
    seed=seeds,
)
@example(("dense", NARROW), None, {"dropout"}, None, "dense", 0)  # signs in float32 of kept weights
@example(("dense", MOVED), None, {"alibi"}, None, "number", 0)  # distances of each batch entry
@example(("dense", ENDED), None, NONE, None, "number", 0)  # do as one number, by a definition
@example(
    ("dense", BIASED), None, {"sinks"}, None, "dense", 0
)  # sums of a bias beside those of sinks
@example(("dense", CORNER), BOTTOM, NONE, ("math",), "dense", 0)  # o of a tile at a time
@example(("dense", TALL), None, {"sinks"}, ("math",), "dense", 0)  # sums of a bias and of sinks
@example(("dense", FLAT), None, {"sinks"}, ("math",), "dense", 0)  # o once more, for sinks
@example(dense(BF16, BIG, bias=BIAS), None, NONE, ("math",), "dense", 0)
@example(dense(HALF16, FEW, bias=ROW_BIAS), None, {"soft_cap"}, None, "dense", 0)
@example(dense(BF16, BIG, keep=PLACES), None, {"sinks"}, None, "dense", 0)
@example(dense(BF16, FEW, keep=ROW), None, {"sinks"}, None, "number", 0)
@example(("dense", SHARED), None, {"soft_cap"}, ("math",), "most", 0)  # o is a view, and so is dq
@example(("dense", FEWER), None, {"soft_cap"}, None, "most", 0)  # of two key/value heads too
@example(("dense", PAIRS), None, NONE, ("torch_sdpa",), "most", 0)  # dq is not, of this kernel
@example(("dense", WIDE), None, NONE, ("torch_sdpa",), "number", 0)  # do is copied twice
@settings(max_examples=max(20, settings().max_examples // 4))
def test_a_call_allocates_what_is_said(
    drawn: tuple[str, dict[str, Any]],
    mask: ag.Mask | None,
    steps: set[str],
    backends: tuple[str, ...] | None,
    kind: str,
    seed: int,
) -> None:
    """No more than that, dense, packed and paged, in both passes, with NaN in what lengths declare
    absent. kind: how the cotangent lies, or "most": data that cost as much as any.

    And about that: told is at most 1.4 of measured, with the workspace and what is saved, where
    calls take a MiB and data cost as much as any; four in five are within 1.25. A step tells the
    most of each kind of memory at any time, and these are not all at one time. Five kinds say more:

    - Triangles and windows that lengths move, up to 4: other data give all rows the same keys, and
      then one tile has all of them.
    - What runs in one of two ways, by booleans that may keep all or by autograd that may record, up
      to 1.7: of each kind of memory the way is told that needs more.
    - One call of PyTorch's kernel, up to 1.7: it copies a do that lies otherwise than this one.
    - Windows, up to 1.7, as of 256 queries on 400 keys in float32.
    - Products in bfloat16, up to 1.7: oneDNN packs operands for each thread, as for each head is
      told, since no plan knows the number of threads.
    """
    form, specs = drawn
    every: dict[str, Any] = {"soft_cap": 5.0, "alibi": True, "dropout": 0.1}
    every["sinks"] = ag.TensorSpec((specs["q"].shape[1],), specs["q"].dtype)
    options = {name: every[name] for name in steps}
    graph = ag.attention(**specs, **options, mask=mask, align="bottom_right")
    plan = ag.compile(graph, target=CPU, backends=backends, workspace=ag.Workspace(), store=False)
    need, tensors = plan.memory(), tensors_for(graph, seed)
    fill = take_most if kind == "most" else fill_data
    fill(form, {i.name: x for i, x in zip(graph.inputs, tensors, strict=True)})
    forward, held, backward = measure(plan, tensors, "dense" if kind == "most" else kind)
    told, told_backward = most_bytes(need)
    assert forward <= told
    assert held == need.gradients
    assert backward <= told_backward
    if kind == "most":
        limit = told_at_most(plan, specs, mask)
        taken = need.workspace_forward + forward
        assert taken < LARGE or told + need.workspace_forward <= limit * taken
        more = need.saved + need.workspace_backward
        taken = more + backward
        assert taken < LARGE or told_backward + more <= limit * taken


def test_gradients_are_copied_to_their_order_one_at_a_time() -> None:
    x = ag.TensorSpec((1, 4, 512, 256), torch.float32, layout="bshd")
    graph = ag.attention(x, x, x, soft_cap=5.0)
    with one_way("products"):
        plan = ag.compile(graph, target=CPU, backends=("math",), workspace=ag.Workspace())
        need = plan.memory()
        _, held, most = measure(plan, tensors_for(graph, 1), "like")
    assert held == need.gradients == 3 * x.type.bytes
    assert most <= most_bytes(need)[1] < held + 2 * x.type.bytes


def test_copies_of_o_and_do_for_the_gradient_of_sinks_are_told() -> None:
    """By the fused kernel, in half precision: beside their product, more than its tiles take."""
    graph = ag.attention(*FLAT.values(), sinks=ag.TensorSpec((8,), torch.float16))
    with one_way("kernel"):
        plan = ag.compile(graph, target=CPU, backends=("math",), workspace=ag.Workspace())
        need = plan.memory()
        *_, most = measure(plan, tensors_for(graph, 1))
    assert most <= most_bytes(need)[1]


@pytest.mark.parametrize("mask", [None, ag.Causal()], ids=str)
@pytest.mark.parametrize("lies", ["dense", "like"])
def test_the_fused_kernel_copies_neither_cotangent_nor_gradients_in_c_order(
    mask: ag.Mask | None, lies: str
) -> None:
    x = ag.TensorSpec((2, 8, 300, 64), torch.float32)
    graph = ag.attention(x, x, x, mask=mask)
    plan = ag.compile(graph, target=CPU, backends=("torch_sdpa",), workspace=ag.Workspace())
    need = plan.memory()
    backward = plan.explain().backward
    assert backward is not None
    assert not any("gradients are copied" in note for note in backward.notes)
    _, held, most = measure(plan, tensors_for(graph, 1), lies)
    assert held == need.gradients == 3 * x.type.bytes
    lse = x.type.bytes // 64
    assert most <= held + lse + need.threads * need.block_backward + SMALL


@pytest.mark.parametrize(("heads", "layout"), [(1, "bhsd"), (8, "bhsd"), (8, "bshd")])
def test_windows_that_overlap_are_added_a_few_at_a_time(
    heads: int, layout: Literal["bhsd", "bshd"]
) -> None:
    """All at once, their gradients of keys would be seven times as large as the keys."""
    x = ag.TensorSpec((1, heads, 4096, 32), torch.float32, layout=layout)
    plan = ag.compile(ag.attention(x, x, x, mask=ag.Causal() & ag.Window(200)), target=CPU)
    need = plan.memory()
    _, held, most = measure(plan, tensors_for(plan.graph, 1))
    assert held == need.gradients
    assert most <= most_bytes(need)[1] < held + 2**25
    assert most - held < 5 * 2**20  # dk and dv of some windows, 2 MiB each, and what is smaller


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_long_attention_stays_within_a_few_tiles() -> None:
    """16384 x 16384 scores of 2 heads would be 2 GiB; 100 MiB are allowed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "2"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.search(r"peak growth ([-\d.]+) MiB", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < 100, done.stdout
