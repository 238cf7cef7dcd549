"""Predicted times order the backends of a GPU until one measures."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.transforms.vjp import training_gradient
from attn_graph.lowering.backend import Price
from attn_graph.lowering.libraries.forecast import Programs, split_by_length
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.rates import read_rates
from attn_graph.lowering.request import Options, Request
from attn_graph.lowering.triton.plan import Flash
from attn_graph.machine.gpus import devices
from attn_graph.planner.choose import BACKENDS, choose, price_all
from attn_graph.planner.forms.views import core_of
from attn_graph.sparsity.tiles import count_pairs, most_pairs
from benchmarks import catalogue
from tests.support.equipped import equip

HALF = torch.bfloat16
Shape = tuple[int, ...]
LONG = (4, 32, 4096, 128)


def declare(
    q: Shape, kv: Shape | None = None, dtype: torch.dtype = HALF, mask: ag.Mask | None = None
) -> ag.Graph:
    """A graph of these sizes."""
    other = ag.TensorSpec(kv or q, dtype)
    return ag.attention(ag.TensorSpec(q, dtype), other, other, mask=mask)


def forward(graph: ag.Graph) -> ag.Graph:
    """The graph as backends see it."""
    return ag.explain(graph, target="cpu").graph


def prices(graph: ag.Graph, target: ag.Target) -> dict[str, Price]:
    """The price of each backend that has one for a simplified graph."""
    made = price_all(Request(graph, target, Options()))
    return {name: price for name, price in made.items() if price.is_known}


def seconds(graph: ag.Graph, target: str, name: str) -> float:
    """What is predicted for the forward of a graph."""
    return prices(forward(graph), ag.Target.of(target))[name].seconds


def test_every_rate_names_a_backend_and_is_a_share_of_a_peak() -> None:
    known = {backend.name for backend in BACKENDS}
    for (name, _), rate in read_rates().gpus.items():
        assert name in known
        shares = [*rate.forward, *rate.backward]
        assert all(0 < share < 1 for _, share in shares)
        assert [*rate.forward] == sorted(rate.forward)


@pytest.mark.parametrize("name", sorted(devices()))
def test_every_gpu_of_the_table_has_a_rate_for_each_kernel_of_both_passes(name: str) -> None:
    target = ag.Target.of(name)
    known = {b for b, sm in read_rates().gpus if sm == target.sm}
    assert known >= {"cudnn", "triton", "torch_flash"}


def test_a_long_product_takes_its_flops_at_the_share_of_the_peak() -> None:
    B, H, S, D = LONG
    flops = 4 * B * H * S * S * D
    peak = ag.Target.of("h200").peak("bf16")
    assert peak is not None
    share = dict(read_rates().gpus["cudnn", 90].forward)[128]
    programs = B * H * S // 128
    waves = -(-programs // 132)
    expected = flops / (peak * share) * waves * 132 / programs
    assert seconds(declare(LONG), "h200", "cudnn") == pytest.approx(expected)


def test_a_decode_step_takes_its_bytes_at_the_bandwidth_if_keys_are_split() -> None:
    graph = declare((1, 32, 1, 128), (1, 8, 32768, 128))
    bandwidth = ag.Target.of("h200").bandwidth
    assert bandwidth is not None
    reading = 2 * 8 * 32768 * 128 * 2 / bandwidth
    least = reading + read_rates().launch  # of what joins the parts
    assert seconds(graph, "h200", "torch_flash") == pytest.approx(least, rel=0.01)
    assert seconds(graph, "h200", "triton") == pytest.approx(least, rel=0.01)
    assert seconds(graph, "h200", "triton") < 50e-6
    many = declare((1, 32, 65, 128), (1, 8, 32768, 128))  # each head by itself, of rows half empty
    assert 3 * least < seconds(many, "h200", "triton") < 6 * least  # which share keys too
    enough = declare((64, 32, 1, 128), (64, 8, 4096, 128))  # programs without parts
    assert seconds(enough, "h200", "triton") == pytest.approx(8 * reading, rel=0.01)


@pytest.mark.parametrize("target", ["a100", "l40s", "rtx4090", "gb10"])
def test_decode_goes_to_who_joins_the_fewest_parts_of_equal_prices(target: str) -> None:
    said = ag.explain(declare((1, 32, 1, 128), (1, 8, 32768, 128)), target=equip(target))
    assert said.backend == "triton"
    assert "predicted to be the fastest, at best: triton" in said.cause
    names = [name for name in said.also if name != "math"]
    assert names == ["torch_flash", "cudnn"]


@pytest.mark.parametrize("target", ["h100", "b200"])
def test_cudnn_comes_first_where_it_moves_as_many_bytes_for_the_same_price(target: str) -> None:
    said = ag.explain(declare((1, 32, 1, 128), (1, 8, 32768, 128)), target=equip(target))
    assert (said.backend, said.also[0]) == ("cudnn", "triton")


@pytest.mark.parametrize("target", sorted(devices()))
@pytest.mark.parametrize(("G", "M"), [(8, 1), (32, 1), (8, 4)])
def test_equal_predictions_are_ordered_by_what_programs_move(target: str, G: int, M: int) -> None:
    graph, place = forward(declare((1, 32, M, 128), (1, G, 8192, 128))), ag.Target.of(target)
    made, chosen = prices(graph, place), choose(Request(graph, equip(target), Options()))
    able = [made[name] for name in (chosen.backend.name, *chosen.also) if name in made]
    ties = [(a, b) for a, b in pairwise(able) if a.seconds == b.seconds]
    assert ties or M > 1  # cuDNN pads rows of several queries
    assert all(a.traffic <= b.traffic for a, b in ties)


def test_cudnn_has_about_as_many_parts_on_an_a100_as_in_its_plan() -> None:
    """266,368 bytes of workspace for 32 heads of 128 are 16 parts of each, with two statistics."""
    (work,) = split_by_length(facts_of(forward(declare((1, 32, 1, 128), (1, 32, 8192, 128)))))
    assert 266_368 // (4 * 32 * (128 + 2)) == 16
    rate = read_rates().gpus["cudnn", 80]
    assert Programs.of(work, rate).parts(rate.fills * 108) == pytest.approx(16, abs=2)


def test_fewer_pairs_take_less_time_and_no_pair_is_left_out() -> None:
    full, causal = (declare(LONG, mask=mask) for mask in (None, ag.Causal()))
    assert seconds(causal, "h200", "triton") < 0.6 * seconds(full, "h200", "triton")
    sizes = (2, 4, 2, 300, 400)
    for mask in (None, ag.Causal("top_left"), ag.Window(64, align="top_left")):
        assert most_pairs(mask, sizes) == count_pairs(mask, sizes, {}).pairs
    assert most_pairs(ag.SameSegment(), sizes) == 2 * 4 * 300 * 400


def test_the_order_is_that_of_the_predictions_and_the_cause_says_them() -> None:
    said = ag.explain(declare(LONG, mask=ag.Causal()), target="h200")
    times = {n: x.seconds for n, x in prices(said.graph, ag.Target.of("h200")).items()}
    able = [name for name in (said.backend, *said.also) if name in times]
    assert [said.backend, *said.also][: len(able)] == able == sorted(able, key=times.__getitem__)
    assert said.cause.startswith("predicted to be the fastest, at best: ")


@pytest.mark.parametrize(
    "change",
    [{"dtype": torch.float32}, {"peaks": ()}, {"bandwidth": None}, {"sm": 87}],
    ids=["float32", "no peak", "no bandwidth", "unknown architecture"],
)
def test_nothing_is_predicted_without_a_rate(change: dict[str, Any]) -> None:
    target = ag.Target.of("h200")
    dtype = change.get("dtype", HALF)
    target = evolve(target, **{k: x for k, x in change.items() if k != "dtype"})
    graph = forward(declare((1, 2, 256, 64), dtype=dtype))
    assert prices(graph, target) == {}
    assert "predicted" not in ag.explain(declare((1, 2, 256, 64), dtype=dtype), target=target).cause


@settings(max_examples=settings().max_examples * 6 // 5)
@given(
    st.sampled_from([1, 64, 384, 2048]), st.sampled_from([1, 2]), st.booleans(), st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from(["cpu", "a100", "h200", "b200"]), st.booleans(),
)  # fmt: skip
def test_the_able_backend_with_the_least_price_runs(
    M: int, group: int, causal: bool, back: bool, dtype: torch.dtype, gpu: str, invariant: bool
) -> None:
    """On every kind of target; the bits of a batch matter to who is able, not to the order."""
    q, k = ((2, 4, M, 64), (2, 4 // group, 2048, 64))
    graph = pass_of(declare(q, k, dtype, ag.Causal("bottom_right") if causal else None), back)
    request = Request(graph, equip(gpu), Options(batch_invariant=invariant))
    try:
        chosen = choose(request)
    except ag.NoBackendError:
        assert invariant
        return
    by_name = price_all(request)
    able = [by_name[name] for name in (chosen.backend.name, *chosen.also)]
    assert able == sorted(able, key=lambda price: (price.seconds, price.traffic))
    known = [price for price in able if price.is_known]
    assert ("predicted to be the fastest" in chosen.cause) == (len(known) > 1)


def test_a_backend_for_other_devices_is_asked_nothing_more() -> None:
    def never(request: Request) -> Any:
        raise AssertionError(request)

    nowhere = ag.extend.Reason("device", "needs an abacus", "there is none")
    mine = ag.extend.Backend("mine", never, never, no_device=lambda target: nowhere)
    with pytest.raises(ag.NoBackendError, match="needs an abacus"):
        ag.compile(declare(LONG), target="cpu", backends=(mine,))


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_backends_for_other_devices_have_no_price(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything asked of them but their device; they stand in the same order as before."""
    request = Request(forward(declare(LONG)), ag.Target.of(name), Options())
    elsewhere = {b.name for b in BACKENDS if b.no_device(request.target) is not None}
    usual = choose(request)

    def never(request: Request) -> Any:
        raise AssertionError(request)

    barred = [evolve(b, price=never, why_not=never) if b.name in elsewhere else b for b in BACKENDS]
    monkeypatch.setattr("attn_graph.planner.choose.BACKENDS", tuple(barred))
    assert elsewhere
    assert evolve(choose(request), backend=usual.backend) == usual


# Milliseconds that others published: of entries, queries, keys, and heads of q and k, of 128.
PUBLISHED = [
    # fa4 without splits, github.com/Dao-AILab/flash-attention/pull/2415
    ("fa4", "h200", (1, 1, 4096, 32, 8), 0.05),
    ("fa4", "h200", (1, 1, 16384, 32, 8), 0.18),
    ("fa4", "h200", (1, 1, 65536, 32, 8), 0.69),
    ("fa4", "h200", (4, 1, 16384, 32, 8), 0.18),
    ("fa4", "h200", (1, 64, 16384, 32, 8), 0.18),
    # cuDNN 9.27, decode_sweep of 2026-09-28 in github.com/NVIDIA/cudnn-frontend
    ("cudnn", "h200", (32, 1, 8192, 64, 8), 0.2515),
    ("cudnn", "h200", (128, 1, 32768, 64, 8), 3.823),
    ("cudnn", "h200", (8, 8, 8192, 64, 8), 0.3964),
    ("cudnn", "h200", (32, 16, 32768, 64, 8), 6.004),
    ("cudnn", "a100", (8, 1, 8192, 64, 8), 0.1679),
    ("cudnn", "a100", (32, 8, 8192, 64, 8), 2.760),
    ("cudnn", "a100", (32, 16, 32768, 64, 8), 11.245),
]


@pytest.mark.parametrize(("name", "target", "sizes", "published"), PUBLISHED)
def test_steps_of_decoding_have_the_published_price(
    name: str, target: str, sizes: tuple[int, ...], published: float
) -> None:
    B, M, N, H, G = sizes
    price = 1e3 * seconds(declare((B, H, M, 128), (B, G, N, 128)), target, name)
    assert price == pytest.approx(published, rel=0.35)


def pack(B: int, M: int, heads: tuple[int, int], mask: ag.Mask | None) -> ag.Graph:
    """B sequences of M rows, one after another."""
    q, k = (ag.TensorSpec((B * M, h, 128), HALF) for h in heads)
    starts = ag.TensorSpec((B + 1,), torch.int32)
    return ag.attention(q, k, k, mask=mask, q_starts=starts, max_lengths=(M, M))


def pass_of(graph: ag.Graph, backward: bool) -> ag.Graph:
    """A pass as backends see it."""
    simple = forward(graph)
    return training_gradient(simple, through_lse=False) if backward else simple


@settings(deadline=None)
@given(
    st.integers(1, 8), st.integers(128, 4096), st.sampled_from([(8, 8), (8, 2)]),
    st.sampled_from([None, ag.Causal()]), st.booleans(),
    st.sampled_from(["a100", "h200", "b200", "rtx5090"]),
)  # fmt: skip
def test_full_packed_sequences_have_the_price_of_a_padded_batch_and_of_their_copies(
    B: int, M: int, heads: tuple[int, int], mask: ag.Mask | None, backward: bool, gpu: str
) -> None:
    """Triton and PyTorch's flash kernel copy nothing; cuDNN and FlashAttention 4 do."""
    H, G = heads
    target = ag.Target.of(gpu)
    dense = pass_of(declare((B, H, M, 128), (B, G, M, 128), mask=mask), backward)
    packed = pass_of(pack(B, M, heads, mask), backward)
    bandwidth, launch = target.bandwidth, read_rates().launch
    assert bandwidth is not None
    copied = [B * M * 128 * 2 * (H if name in ("q", "do") else G) for name in COPIED[backward]]
    for name in ("triton", "torch_flash", "cudnn", "fa4"):
        padded, own = (prices(x, target).get(name) for x in (dense, packed))
        if padded is None:
            assert own is None
            continue
        assert own is not None
        copies = copied if name in ("cudnn", "fa4") else []
        more = sum(launch + 2 * size / bandwidth for size in copies)
        # Starts are read too, and rows of no sequence may be there.
        least = padded.seconds + more
        if (gpu, name, backward) == ("b200", "fa4", False):  # only padded ones share their keys
            assert own.seconds >= 0.98 * least
        else:
            assert own.seconds == pytest.approx(least, rel=0.02)


COPIED = {False: ("v",), True: ("q", "k", "v", "do")}


@settings(deadline=None)
@given(
    st.integers(1, 64), st.sampled_from([1, 4, 256]), st.sampled_from([16, 64, 128]),
    st.integers(1, 64), st.booleans(), st.sampled_from(sorted(devices())),
)  # fmt: skip
def test_every_packed_or_paged_graph_has_a_price_by_every_rate(
    B: int, M: int, page: int, pages: int, packs: bool, gpu: str
) -> None:
    pool = ag.TensorSpec((B * pages, page, 2, 128), HALF)
    table, lengths = ag.TensorSpec((B, pages), torch.int32), ag.TensorSpec((B,), torch.int32)
    more: dict[str, Any] = {}
    q = ag.TensorSpec((B, 8, M, 128), HALF)
    if packs:
        q = ag.TensorSpec((B * M, 8, 128), HALF)
        starts = ag.TensorSpec((B + 1,), torch.int32)
        more = {"q_starts": starts, "max_lengths": (M, None)}
    graph = forward(ag.attention(q, pool, pool, pages=table, kv_lengths=lengths, **more))
    target = ag.Target.of(gpu)
    made = prices(graph, target)
    assert {*made} == {b for b, sm in read_rates().gpus if sm == target.sm}
    assert all(x.seconds > 0 for x in made.values())


def test_values_within_keys_are_read_once_by_triton_and_twice_by_cudnn() -> None:
    q, k = ag.TensorSpec((64, 16, 1, 256), HALF), ag.TensorSpec((64, 1, 8192, 256), HALF)
    within = core_of(forward(ag.attention(q, k, 256)))
    bandwidth = ag.Target.of("b200").bandwidth
    assert bandwidth is not None
    both = prices(within, ag.Target.of("b200"))
    again = k.type.bytes / bandwidth
    assert both["cudnn"].seconds - both["triton"].seconds == pytest.approx(again, rel=0.05)


def test_lengths_cost_fa4_a_copy_of_v_and_of_all_operands_going_back() -> None:
    q, k = ag.TensorSpec((4, 8, 512, 128), HALF), ag.TensorSpec((4, 8, 2048, 128), HALF)
    lengths = ag.TensorSpec((4,), torch.int32)
    target, launch = ag.Target.of("h200"), read_rates().launch
    assert target.bandwidth is not None
    for backward, names in ((False, "v"), (True, "kv")):
        bare, ended = (
            prices(pass_of(x, backward), target)["fa4"]
            for x in (ag.attention(q, k, k), ag.attention(q, k, k, kv_lengths=lengths))
        )
        least = len(names) * (launch + 2 * k.type.bytes / target.bandwidth)
        assert ended.seconds - bare.seconds >= 0.99 * least


def test_wide_heads_are_slower_by_triton_than_by_fa4() -> None:
    """Gemma 2's heads of 256 with a soft cap; a tie would go to Triton."""
    x, k = ag.TensorSpec((1, 16, 8192, 256), HALF), ag.TensorSpec((1, 8, 8192, 256), HALF)
    graph = forward(ag.attention(x, k, k, mask=ag.Causal(), soft_cap=50.0))
    made = prices(graph, ag.Target.of("h200"))
    assert 2 * made["fa4"].seconds < made["triton"].seconds


@pytest.mark.parametrize("target", catalogue.GPUS)
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_few_packed_queries_of_a_sequence_take_as_long_as_padded_ones(
    target: str, rows: int
) -> None:
    """Of each model of the catalogue, over the same pages, by launches of as many programs too."""
    place, B, N = ag.Target.of(target), 64, 8192
    for model in catalogue.DECODERS.values():
        packed = forward(catalogue.paged(model, B, N, (B * rows, rows)))
        padded = forward(catalogue.paged(model, B, N, queries=rows))
        (x, launched), (due, usual) = (price(graph, place) for graph in (packed, padded))
        assert x <= 1.15 * due
        assert launched == usual


@pytest.mark.parametrize("target", catalogue.GPUS)
@pytest.mark.parametrize("steps", [16, 128])
def test_prompts_beside_steps_take_as_long_as_each_alone(target: str, steps: int) -> None:
    """Of each model of the catalogue, by the kernels of each."""
    place, N, rows = ag.Target.of(target), 8192, 2048
    for model in catalogue.DECODERS.values():
        mixed = forward(catalogue.paged(model, steps + 1, N, (rows + steps, rows)))
        each = [(1, (rows, rows)), (steps, (steps, 1))]
        apart = [price(forward(catalogue.paged(model, B, N, q)), place) for B, q in each]
        made, launches = price(mixed, place)
        total = sum(seconds for seconds, _ in apart)
        assert total / 1.15 <= made <= 1.15 * total
        kernels = [name for _, of_these in reversed(apart) for name, _ in of_these]
        assert [name for name, _ in launches] == kernels


def price(graph: ag.Graph, place: ag.Target) -> tuple[float, list[tuple[str, int]]]:
    """The predicted seconds of Triton, and its launches by kernel and number of programs."""
    made, layout = prices(graph, place)["triton"], Lying.of(facts_of(graph))
    assert layout is not None
    launches = Flash.plan(layout, place).launches
    return made.seconds, [(x.kernel, x.grid) for x in launches]
