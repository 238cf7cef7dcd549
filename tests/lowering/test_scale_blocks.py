"""Scales of blocks of 8-bit keys and values, as caches of serving engines have them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.cpu import sequences
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.small_graphs import shrink
from attn_graph.planner.cost import cost
from attn_graph.testing.agreement import check_gradients, check_outputs, run_plan
from attn_graph.testing.formula import expand_blocks
from attn_graph.testing.rule import expect_outputs
from attn_graph.testing.strategies import seeds
from tests.support.kernels import CPU

WAYS = [("math",), ("triton",)] if CPU.interprets else [("math",)]
ways = pytest.mark.parametrize("backends", WAYS, ids=str)
F32, BF16 = torch.float32, torch.bfloat16
GROUP = 32


def declare(**tensors: Tensor) -> tuple[ag.Graph, list[Tensor]]:
    """The graph of an attention of these tensors, and they as its inputs."""
    specs: dict[str, Any] = {name: ag.TensorSpec.like(x) for name, x in tensors.items()}
    graph = ag.attention(**specs, stats=True)
    return graph, [tensors[i.name] for i in graph.inputs]


def check_attention(backends: tuple[str, ...], **tensors: Tensor) -> None:
    """Run both passes of these tensors, and hold them to the rule."""
    graph, given = declare(**tensors)
    plan = ag.compile(graph, target=CPU, backends=backends)
    check_outputs(plan, graph, given)
    check_gradients(plan, graph, given, 1)


def gather(pool: Tensor, pages: Tensor) -> Tensor:
    """The pages of each entry, page 0 for other numbers, as [B,G,N,D]."""
    return pool[pages.clamp(min=0).long()].flatten(1, 2).transpose(1, 2)


def quantise(x: Tensor, *blocks: int) -> tuple[Tensor, Tensor]:
    """x in int8, and a scale for each block of so many numbers along each axis."""
    sizes = [n for size, block in zip(x.shape, blocks, strict=True) for n in (size // block, block)]
    split = x.float().reshape(sizes)
    scale = split.abs().amax([*range(1, 2 * x.ndim, 2)], keepdim=True) / 127
    eight = (split / scale).round().to(torch.int8).view(x.shape)
    return eight, scale.reshape([n // b for n, b in zip(x.shape, blocks, strict=True)])


@ways
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_cache_as_of_kivi_has_keys_by_channel_and_values_by_token(
    backends: tuple[str, ...], rows: int, dtype: torch.dtype
) -> None:
    """Keys lie [B,G,D,N], with scales [B,G,D,N/32]; values [B,G,N,E], with scales [B,G,N,E/32]."""
    B, G, N, D = 2, 2, 96, 64
    random = torch.Generator().manual_seed(rows)
    by_channel, k_scale = quantise(torch.randn(B, G, D, N, generator=random), 1, 1, 1, GROUP)
    v, v_scale = quantise(torch.randn(B, G, N, D, generator=random), 1, 1, 1, GROUP)
    q = torch.randn(B, 4, rows, D, generator=random).to(dtype)
    lengths = torch.tensor([96, 37], dtype=torch.int32)
    scales = {"k_scale": k_scale.mT, "v_scale": v_scale}
    check_attention(backends, q=q, k=by_channel.mT, v=v, kv_lengths=lengths, **scales)


@ways
def test_a_cache_as_of_vllm_has_scales_between_the_bytes_of_a_row(
    backends: tuple[str, ...],
) -> None:
    """A row of a head is K, its scales, V, its scales, in one array of bytes [n,G,P,bytes]: one
    scale for 32 elements, or, as of int8_per_token_head, for all."""
    n, G, P, D = 5, 2, 16, 64
    random = torch.Generator().manual_seed(2)
    for count in (1, D // GROUP):
        each = D + 4 * count
        cache = torch.randint(0, 256, (n, G, P, 2 * each), generator=random, dtype=torch.uint8)
        halves = cache.transpose(1, 2).split(each, -1)
        k, v = (half[..., :D].view(torch.int8) for half in halves)
        k_scale, v_scale = (half[..., D:].view(F32) for half in halves)
        for scale in (k_scale, v_scale):
            scale.copy_(torch.rand(scale.shape, generator=random) / 64)
        pages = torch.tensor([[3, 0, 4], [1, 2, -1]], dtype=torch.int32)
        lengths = torch.tensor([41, 17], dtype=torch.int32)
        q = torch.randn(2, 4, 1, D, generator=random).to(BF16)
        pools = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
        assert k.data_ptr() == cache.data_ptr()
        assert k_scale.data_ptr() == cache.data_ptr() + D
        paged, tensors = declare(q=q, **pools, pages=pages, kv_lengths=lengths)
        gathered = {name: gather(x, pages) for name, x in pools.items()}
        results = run_plan(ag.compile(paged, target=CPU, backends=backends), tensors)
        dues = expect_outputs(*declare(q=q, **gathered, kv_lengths=lengths))
        for due, x in zip(dues, results, strict=True):
            due.check(x)


def test_blocks_of_packed_rows_count_from_the_first_row_of_the_tensor() -> None:
    random = torch.Generator().manual_seed(5)
    k, k_scale = quantise(torch.randn(24, 2, 8, generator=random), 8, 1, 2)
    v, v_scale = quantise(torch.randn(24, 2, 8, generator=random), 4, 1, 8)
    starts = torch.tensor([0, 5, 6, 24], dtype=torch.int32)
    q = torch.randn(4, 4, 8, generator=random)
    where = {"q_starts": torch.tensor([0, 2, 3, 4], dtype=torch.int32), "kv_starts": starts}
    packed, tensors = declare(q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale, **where)
    pairs = {"k": (k, k_scale), "v": (v, v_scale)}
    whole = {n: (x * expand_blocks(scale, x.shape)).float() for n, (x, scale) in pairs.items()}
    plain, floats = declare(q=q, **whole, **where)
    dues = run_plan(ag.compile(plain, target=CPU), floats)
    for x, due in zip(run_plan(ag.compile(packed, target=CPU), tensors), dues, strict=True):
        assert x.equal(due)


@ways
def test_a_wide_head_in_two_pieces_has_scales_of_each(backends: tuple[str, ...]) -> None:
    random = torch.Generator().manual_seed(3)
    k, k_scale = quantise(torch.randn(1, 1, 32, 576, generator=random), 1, 1, 1, 64)
    v, v_scale = quantise(torch.randn(1, 1, 32, 512, generator=random), 1, 1, 16, 128)
    q = torch.randn(1, 2, 1, 576, generator=random).to(BF16)
    check_attention(backends, q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def test_gradients_of_a_bias_read_scales_of_blocks() -> None:
    random = torch.Generator().manual_seed(4)
    k, k_scale = quantise(torch.randn(1, 2, 32, 16, generator=random), 1, 1, 16, 4)
    v, v_scale = quantise(torch.randn(1, 2, 32, 16, generator=random), 1, 1, 1, 8)
    q, bias = torch.randn(1, 2, 24, 16, generator=random), torch.randn(1, 1, 24, 32)
    for backends in WAYS:
        check_attention(backends, q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale, bias=bias)


def specs_of(**shapes: tuple[int, ...]) -> dict[str, Any]:
    dtypes = {"q": BF16, "k": torch.int8, "v": torch.int8, "pages": torch.int32}
    dtypes |= dict.fromkeys(("q_starts", "kv_starts"), torch.int32)
    return {name: ag.TensorSpec(shape, dtypes.get(name, F32)) for name, shape in shapes.items()}


PADDED: dict[str, tuple[int, ...]] = {"q": (2, 4, 1, 96), "k": (2, 4, 96, 96), "v": (2, 4, 96, 96)}


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        ((2, 2, 96, 1), "has scales of blocks of rows and of columns; of other axes of each, or"),
        ((2, 4, 2, 1), "has scales of 1, 2, 4, 8, ... rows or columns, or of all; k_scale is"),
        ((2, 4, 96, 2), "has scales of 1, 2, 4, 8, ... rows or columns, or of all; k_scale is"),
    ],
)
def test_triton_refuses_other_blocks_by_name(scale: tuple[int, ...], reason: str) -> None:
    graph = ag.attention(**specs_of(**PADDED, k_scale=scale, v_scale=(1, 1, 1, 1)))
    text = str(ag.explain(graph, target="h100"))
    assert text.startswith("math runs this")
    assert re.search(f"triton.*{re.escape(reason.partition(';')[0])}", text, re.DOTALL), text


def test_triton_refuses_blocks_of_packed_rows_by_name() -> None:
    shapes = {"q": (8, 4, 64), "k": (96, 4, 64), "v": (96, 4, 64), "v_scale": (1, 1, 1)}
    starts = {"q_starts": (3,), "kv_starts": (3,)}
    for k_scale, runs in (((3, 4, 1), "math"), ((96, 4, 2), "triton")):
        graph = ag.attention(**specs_of(**shapes, **starts, k_scale=k_scale), max_lengths=(8, 96))
        text = str(ag.explain(graph, target="h100"))
        assert text.startswith(f"{runs} runs this")
        due = "has scales of blocks of rows of padded keys or pages, not of packed ones"
        assert (due in text) == (runs == "math")


@pytest.mark.parametrize("name", ["a100", "h100", "b200"])
def test_other_backends_refuse_scales_of_blocks_and_triton_runs_both_passes(name: str) -> None:
    shapes = {"q": (1, 8, 300, 64), "k": (1, 8, 4096, 64), "v": (1, 8, 4096, 64)}
    scales = {"k_scale": (1, 8, 128, 64), "v_scale": (1, 8, 4096, 2)}
    text = str(ag.explain(ag.attention(**specs_of(**shapes, **scales)), target=name))
    assert text.startswith("triton runs this")
    assert "backward: triton runs this" in text
    assert text.count("reads no keys with scales") >= 2


def test_bytes_of_scales_are_counted() -> None:
    shapes = {"q": (1, 8, 1, 64), "k": (1, 8, 4096, 64), "v": (1, 8, 4096, 64)}
    sizes = []
    for scale in ((1, 1, 1, 1), (1, 8, 4096, 2)):
        graph = ag.attention(**specs_of(**shapes, k_scale=scale, v_scale=scale))
        sizes.append(cost(simplify(graph), ag.Target.of("h100")).forward.bytes)
    assert sizes[1] - sizes[0] == 2 * 4 * (8 * 4096 * 2 - 1)


@pytest.mark.parametrize("layout", ["padded", "pages"])
def test_scales_of_blocks_are_repeated_for_a_block_of_keys_at_a_time(layout: str) -> None:
    G, N, D = 2, 2**15, 64
    shape, where = (1, G, N, D), dict[str, Tensor]()
    scale = torch.ones(1, G, N // GROUP, D)
    if layout == "pages":
        shape, where = (N // 64, 64, G, D), {"pages": torch.arange(N // 64)[None]}
        scale = torch.ones(N // 64, 64 // GROUP, G, D)
    k = torch.randint(-127, 128, shape, dtype=torch.int8)
    tensors = {"q": torch.randn(1, 4, 1, D), "k": k, "v": k, "k_scale": scale, "v_scale": scale}
    specs: dict[str, Any] = {n: ag.TensorSpec.like(x) for n, x in (tensors | where).items()}
    plan = ag.compile(ag.attention(**specs), target=CPU, backends=("math",))
    needs = plan.memory()
    least = needs.workspace_forward + needs.temporary_forward
    assert sequences.BLOCK_BYTES < least < 2 * 4 * k.numel()
    plan(**tensors, **where)


@given(st.sampled_from([(2, 1), (1, 8), (16, 4)]), st.integers(1, 40), seeds)
def test_small_graphs_keep_blocks_that_divide_their_sizes(
    blocks: tuple[int, int], N: int, seed: int
) -> None:
    rows, columns = blocks
    scale = (1 + seed % 2, 4, 64 // rows, 32 // columns)
    shapes = {"q": (2, 4, 8, 32), "k": (2, 4, 64, 32), "v": (2, 4, 64, 32)}
    graph = simplify(ag.attention(**specs_of(**shapes, k_scale=scale, v_scale=scale)))
    problem = facts_of(graph).once(Lying.of).problem  # type: ignore[union-attr]  # it is one
    small = {i.name: i.spec.shape for i in shrink(graph, problem, 8, N).inputs}
    assert small["k"][2:] == (N, 32)
    assert small["k_scale"][2:] == (1 if N % rows else N // rows, 32 // columns)


def test_repeated_scales_are_those_of_the_formula() -> None:
    scale = torch.arange(12.0).view(2, 1, 3, 2)
    due = scale.repeat_interleave(2, 0).repeat_interleave(4, 2).repeat_interleave(8, 3)
    assert expand_blocks(scale, (4, 1, 12, 16)).equal(due.double())


def in_pairs(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """x in two integers a byte, and a scale for so many elements of a row."""
    split = x.float().unflatten(-1, (-1, columns))
    scale = split.abs().amax(-1, keepdim=True) / 7
    four = ((split / scale).round() + 8).flatten(-2).to(torch.uint8)
    return four[..., ::2] | four[..., 1::2] << 4, scale[..., 0]


@ways
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32], ids=str)
def test_keys_in_4_bits_are_their_numbers_times_scales(
    backends: tuple[str, ...], rows: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(rows)
    k, k_scale = in_pairs(torch.randn(2, 2, 70, 64, generator=random), GROUP)
    v, v_scale = quantise(torch.randn(2, 2, 70, 32, generator=random), 1, 1, 1, GROUP)
    q = torch.randn(2, 4, rows, 64, generator=random).to(dtype)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check_attention(backends, q=q, k=k, v=v, **scales)
    check_attention(backends, q=q, k=k, v=k, k_scale=k_scale, v_scale=torch.ones(1, 1, 1, 1) / 8)


def test_the_lower_half_of_a_byte_is_the_first_number() -> None:
    v = torch.tensor([[[[0x1F, 0x80]]]], dtype=torch.uint8)
    one = torch.ones(1, 1, 1, 1)
    o = ag.nn.functional.attention(torch.ones(1, 1, 1, 4), v, v, k_scale=one, v_scale=one)
    assert isinstance(o, Tensor)
    assert o.flatten().tolist() == [7, -7, -8, 0]


def test_bytes_of_4_bits_are_a_quarter_of_bfloat16() -> None:
    shapes = {"q": (1, 8, 1, 64), "k": (1, 8, 4096, 64), "v": (1, 8, 4096, 64)}
    wide: dict[str, Any] = {n: ag.TensorSpec(shape, BF16) for n, shape in shapes.items()}
    plain = ag.attention(**wide)
    four = specs_of(**shapes, k_scale=(1, 1, 1, 1), v_scale=(1, 1, 1, 1))
    four |= {n: ag.TensorSpec((1, 8, 4096, 32), torch.uint8) for n in "kv"}
    graph = ag.attention(**four)
    assert "k: u8[1, 8, 4096, 32]" in str(graph)
    costs = [cost(simplify(x), ag.Target.of("h100")).forward.bytes for x in (plain, graph)]
    assert costs[1] / costs[0] < 0.26
    for name in ("a100", "h100", "b200"):
        text = str(ag.explain(graph, target=name))
        assert text.startswith("triton runs this")
        assert text.count("reads no keys with scales") >= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 2, 5, 16)}, "uint8 has two numbers a byte, so write k.view(dtype) if it has"),
        ({"k_scale": None, "v_scale": None}, "k and v are quantised; pass k_scale= and v_scale="),
        ({"k_scale": (1, 1, 1, 3)}, "3 on axis 3, not a divisor of 16, as a tensor [2, 2, 5, 16]"),
    ],
)
def test_wrong_pairs_are_refused_in_words(change: dict[str, Any], message: str) -> None:
    shapes: dict[str, Any] = {"q": (2, 2, 3, 16), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8)}
    shapes |= {"k_scale": (1, 1, 1, 2), "v_scale": (1, 1, 1, 1)} | change
    specs = specs_of(**{n: shape for n, shape in shapes.items() if shape is not None})
    specs |= {n: ag.TensorSpec(shapes[n], torch.uint8) for n in "kv"}
    with pytest.raises(ag.GraphError, match=re.escape(message)):
        ag.attention(**specs)


def test_heads_beyond_one_piece_in_pairs_are_refused_by_name() -> None:
    shapes = {"q": (1, 2, 1, 576), "k_scale": (1, 1, 1, 1), "v_scale": (1, 1, 1, 1)}
    pairs: dict[str, Any] = {n: ag.TensorSpec((1, 1, 32, 288), torch.uint8) for n in "kv"}
    text = str(ag.explain(ag.attention(**specs_of(**shapes), **pairs), target="h100"))
    assert text.startswith("math runs this")
    assert "has heads of at most 512 beside keys of two numbers a byte" in text


def test_4_bits_are_no_queries_and_are_not_appended() -> None:
    q, one = torch.zeros(1, 1, 1, 4, dtype=torch.uint8), torch.ones(1, 1, 1, 1)
    with pytest.raises(ag.GraphError, match=r"uint8.*must be|q.*uint8"):
        declare(q=q, k=q, v=q, q_scale=one, k_scale=one, v_scale=one)
    x, pool = torch.zeros(1, 1, 8), torch.zeros(1, 1, 1, 4, dtype=torch.uint8)
    with pytest.raises(ag.GraphError, match="pool_k"):
        ag.nn.append_to_pages(x, None, pool, None, slot_mapping=torch.tensor([0]), k_scale=one)


def test_4_bits_beside_8_bit_queries_run_on_triton() -> None:
    names = ("q_scale", "k_scale", "v_scale")
    specs = specs_of(q=(2, 4, 300, 64), **dict.fromkeys(names, (1, 1, 1, 1)))
    specs |= {"q": ag.TensorSpec((2, 4, 300, 64), torch.float8_e4m3fn)}
    specs |= {n: ag.TensorSpec((2, 4, 300, 32), torch.uint8) for n in "kv"}
    for name in ("h100", "b200"):
        text = str(ag.explain(ag.attention(**specs), target=name, precision="fp8"))
        assert text.startswith("triton runs this")
        assert "cudnn can't: reads no keys with scales beside another q" in text


def test_values_within_keys_in_4_bits_are_refused_with_their_view() -> None:
    k, one = torch.zeros(1, 2, 5, 8, dtype=torch.uint8), torch.ones(1, 1, 1, 1)
    attend_to = ag.nn.functional.attention
    with pytest.raises(ag.GraphError, match=re.escape("pass a tensor for v, k[..., :E // 2]")):
        attend_to(torch.zeros(1, 2, 3, 16), k, 8, k_scale=one)
    attend_to(torch.zeros(1, 2, 3, 16), k, k[..., :4], k_scale=one, v_scale=one)
