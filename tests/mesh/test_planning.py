"""Who has what, who sends what, and how balanced: known without a process."""

from __future__ import annotations

import pickle
import re
from itertools import permutations
from math import inf, nan
from typing import Any, cast

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.mesh.counts import count_box, count_moved, count_seen
from attn_graph.mesh.explanation import predict_ranks
from attn_graph.mesh.layout import (
    SEQUENCES,
    Placement,
    balance,
    chunk,
    chunk_by_weight,
    divide,
    divide_heads,
)
from attn_graph.mesh.schedule import flow_between, sum_bytes, visits_of
from attn_graph.mesh.sharded import Sharded

RANKS = (2, 3, 4, 8, 16, 64)


def graph(N: int, mask: ag.Mask | None, H: int = 8, G: int = 2, **options: Any) -> ag.Graph:
    """Attention of one sequence in bfloat16."""
    q = ag.TensorSpec((1, H, N, 64), torch.bfloat16)
    k = ag.TensorSpec((1, G, N, 64), torch.bfloat16)
    return ag.attention(q, k, k, mask=mask, **options)


def documents(N: int, seed: int, least: int = 64, most: int = 6000) -> tuple[ag.Graph, Any]:
    """A causal mask within random documents, and their numbers."""
    random, lengths = torch.Generator().manual_seed(seed), [0]
    while sum(lengths) < N:
        lengths.append(int(torch.randint(least, most + 1, (), generator=random)))
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None, :N]
    spec = ag.TensorSpec((1, N), torch.int64)
    known = {"q_segments": numbers, "kv_segments": numbers}
    return graph(N, ag.Causal(), segments=(spec, spec)), known


def work(sharded: Sharded) -> list[int]:
    """The pairs of each rank."""
    return [sum(count_seen(sharded, rows) for rows in own.rows) for own in sharded.holdings]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_causal_mask_is_balanced(ranks: int) -> None:
    each = {
        p: balance(work(ag.shard(graph(16384, ag.Causal()), ag.Mesh(ranks), p))) for p in SEQUENCES
    }
    assert each["balanced"] <= 1.05
    assert each["zigzag"] <= 1.05
    assert each["contiguous"] >= 1.49


@pytest.mark.parametrize("ranks", RANKS)
def test_documents_are_balanced(ranks: int) -> None:
    packed, known = documents(32768, ranks)
    each = {p: balance(work(ag.shard(packed, ag.Mesh(ranks), p, **known))) for p in SEQUENCES}
    assert each["balanced"] <= 1.05
    assert each["balanced"] <= min(each.values())


def test_every_rank_has_as_many_queries_under_balance() -> None:
    packed, known = documents(8191, 0)
    sharded = ag.shard(packed, ag.Mesh(7), "balanced", **known)
    counts = [sum(map(len, own.rows)) for own in sharded.holdings]
    assert sum(counts) == 8191
    assert max(counts) - min(counts) <= 8  # one of each chunk


def test_a_window_talks_to_its_neighbour_alone() -> None:
    full, window = (
        ag.shard(graph(16384, mask), ag.Mesh(4), "contiguous", method="ring")
        for mask in (None, ag.Window(511))
    )
    assert 3 * sum_bytes(window) <= sum_bytes(full)
    pairs = {(a, b) for a, b in permutations(range(4), 2) if flow_between(window, a, b).forward}
    assert pairs == {(0, 1), (1, 2), (2, 3)}
    assert flow_between(window, 0, 1).forward == 511 * 2 * 2 * 64 * 2  # keys, heads, k and v


def test_every_rank_has_the_same_steps() -> None:
    """Else one could post keys before gradients to a rank that expects them the other way round."""
    for method in ("ring", "gather"):
        window = ag.shard(graph(1024, ag.Window(30)), ag.Mesh(8), "contiguous", method=method)
        for rank in range(8):
            visits = visits_of(window, rank)
            assert [visit.step for visit in visits] == [*range(8)]
            assert all((visit.to - rank) % 8 == visit.step for visit in visits)
            assert any(not visit.sends for visit in visits[1:])


def test_documents_within_ranks_send_nothing() -> None:
    spec, numbers = ag.TensorSpec((1, 4096), torch.int64), torch.arange(4096)[None] // 512
    packed = graph(4096, ag.Causal(), segments=(spec, spec))
    known: Any = {"q_segments": numbers, "kv_segments": numbers}
    sharded = ag.shard(packed, ag.Mesh(4), "balanced", **known)
    assert sum_bytes(sharded) == 0
    assert sum_bytes(ag.shard(packed, ag.Mesh(4), "balanced")) > 0  # before they are known
    assert not any(visit.sends for rank in range(4) for visit in visits_of(sharded, rank))


@given(st.data())
def test_boxes_are_counted_as_their_moved_masks(data: st.DataObject) -> None:
    N = data.draw(st.integers(1, 40))
    mask = data.draw(
        st.sampled_from(
            [ag.Causal(), ag.Window(5, 2), ag.Prefix(7) | ag.Causal(), ag.Window(None, 3)]
        )
    )
    sharded = ag.shard(graph(N, mask), ag.Mesh(2), "contiguous")
    for visit in (x for rank in range(2) for x in visits_of(sharded, rank)):
        for job in visit.jobs:
            first = data.draw(st.integers(0, len(job.box.keys)))
            box = evolve(job.box, keys=job.box.keys[first:])
            assert count_box(sharded, box) == count_moved(sharded, box)


@pytest.mark.parametrize("placement", ["batch", "heads", *SEQUENCES])
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_join_undoes_split(placement: Placement, ranks: int) -> None:
    q, k = ag.TensorSpec((3, 6, 17, 4), torch.float32), ag.TensorSpec((3, 2, 11, 4), torch.float32)
    sharded = ag.shard(ag.attention(q, k, k, mask=ag.Causal("top_left")), ag.Mesh(ranks), placement)
    tensors = {"q": torch.randn(q.shape), "k": torch.randn(k.shape)}
    own = {
        "bi": torch.arange(51).reshape(3, 17),
        "j": torch.arange(11),
        "bgj": torch.randn(3, 2, 11),
    }
    for axes, x in (tensors | own).items():
        parts = sharded.split(x, axes)
        assert len(parts) == ranks
        assert torch.equal(sharded.join(parts, axes), x)


@given(st.data())
def test_split_refuses_other_sizes_than_the_graphs(data: st.DataObject) -> None:
    """An axis by a letter of the graph has its size, or 1 where all ranks share what is there."""
    placements: list[Placement] = ["batch", "heads", *SEQUENCES]
    placement = data.draw(st.sampled_from(placements))
    q, k = ag.TensorSpec((3, 6, 17, 4), torch.float32), ag.TensorSpec((3, 2, 11, 4), torch.float32)
    graph = ag.attention(q, k, k, mask=ag.Causal("top_left"))
    sharded = ag.shard(graph, ag.Mesh(3), placement)
    axes = "".join(data.draw(st.lists(st.sampled_from("bhgijx"), min_size=1, max_size=4)))
    sizes = {**sharded.axis_sizes, "x": 5}
    shape = [data.draw(st.sampled_from([1, sizes[x], sizes[x] + 1, 2 * sizes[x]])) for x in axes]
    x = torch.randn(shape)
    wrong = [n for n, a in zip(shape, axes, strict=True) if a != "x" and n not in (1, sizes[a])]
    if wrong:
        with pytest.raises(ag.GraphError, match=r"axis \d of .* and the graph has \d"):
            sharded.split(x, axes)
        return
    parts = sharded.split(x, axes)
    shared = [a in sharded.divided and n == 1 for n, a in zip(shape, axes, strict=True)]
    for part in parts:
        assert all(part.shape[n] == 1 for n, one in enumerate(shared) if one)
    once = sum(a in sharded.divided for a in axes) < 2  # else no rank has places of two others
    if once and not any(shared):  # shards of one position look alike
        assert torch.equal(sharded.join(parts, axes), x)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 24))
def test_each_head_is_at_one_rank(groups: int, each: int, ranks: int) -> None:
    parts = divide_heads(groups * each, groups, ranks)
    assert [h for heads, _ in parts for h in heads] == [*range(groups * each)]
    for heads, own in parts:
        assert {h // each for h in heads} == {*own}
        assert len(own) <= 1 or len(heads) == each * len(
            own
        )  # the ratio stays, or one head is read


def test_a_sharded_graph_is_a_value() -> None:
    packed, known = documents(256, 1, 16, 64)
    one, other = (ag.shard(packed, ag.Mesh(4), "balanced", **known) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert str(one) == str(other)
    assert "shard(graph, Mesh(ranks=4), 'balanced', " in str(one)
    different: Any = {name: x + 1 for name, x in known.items()}
    assert str(ag.shard(packed, ag.Mesh(4), "balanced", **different)) != str(one)


def test_text_of_a_sharded_graph_makes_it_again() -> None:
    packed, known = documents(256, 1, 16, 64)
    for sharded in (
        ag.shard(packed, ag.Mesh(4), "balanced", **known),
        ag.shard(packed, ag.Mesh(2), "zigzag", method="gather"),
        ag.shard(packed, ag.Mesh(3), "heads"),
    ):
        assert ag.types.Sharded.parse(str(sharded)) == sharded
    text = str(ag.shard(packed, ag.Mesh(2), "zigzag", **known))
    for old, new, said in (
        ("shard(", "share(", "expected a graph, and below it"),
        ("Mesh(ranks=2)", "Mesh(ranks=0)", "line 10: mesh: 0 is not a number of ranks"),
        ("Mesh(ranks=2), ", "", "line 10: expected `shard(graph, mesh, placements, ...)`"),
        ("'zigzag'", "'zagzig'", "placements 'zagzig' is none of"),
        ("i64[1, 256]((1, ", "i64[1, 255]((1, ", "is given by runs of (element, how many)"),
        ("i64[1, 256]((1, ", "i64[1, 256](('1', ", "is given by runs of (element, how many)"),
        ("def graph(", "def graph(x, ", "line 1: "),
    ):
        with pytest.raises(ag.GraphError, match=re.escape(said)):
            ag.types.Sharded.parse(text.replace(old, new))


ROW, HEADS = (ag.TensorSpec(shape, torch.float32) for shape in ((8, 4, 4), (1, 4, 8, 4)))
PLAIN, MESH = ag.attention(HEADS, HEADS, HEADS), ag.Mesh(2)
BIAS = ag.attention(HEADS, HEADS, HEADS, bias=ag.TensorSpec((1, 4, 8, 8), torch.float32))
WHOLE: Any = ag.shard(PLAIN, MESH, "zigzag")
SHORT = ag.attention(HEADS, HEADS, HEADS, kv_lengths=ag.TensorSpec((1,), torch.int64))
BOTH, FULL = ag.TensorSpec((2,), torch.int64), torch.tensor([8, 8])
ENDED = ag.attention(
    ag.TensorSpec((2, 4, 8, 4), torch.float32),
    *[ag.TensorSpec((2, 4, 16, 4), torch.float32)] * 2,
    kv_lengths=BOTH,
    q_lengths=BOTH,
)
BEYOND: tuple[Any, ...] = (  # Any: text and numbers
    ("kv_lengths", 30, 16, "batch"),
    ("kv_lengths", -1, 16, "zigzag"),
    ("q_lengths", 9, 8, "heads"),
)
LENGTHS: dict[str, Any] = {"kv_lengths": FULL, "q_lengths": FULL}
SEVERAL = cast(Any, ["nvlink"])
PACKED = ag.attention(ROW, ROW, ROW, q_starts=ag.TensorSpec((3,), torch.int64))
POOL = ag.TensorSpec((6, 4, 2, 8), torch.float32)
PAGED = ag.attention(
    ag.TensorSpec((2, 4, 5, 8), torch.float32), POOL, POOL, pages=ag.TensorSpec((2, 3), torch.int64)
)
WRONG: dict[str, Any] = {  # by what is said
    "placements 'rows' is none of batch": lambda: ag.shard(PLAIN, MESH, "rows"),  # type: ignore[arg-type]
    'balanced; write "balanced" for sequences': lambda: ag.shard(PLAIN, MESH, "context"),  # type: ignore[arg-type]
    "link nan is not a number of bytes a second": lambda: ag.explain(WHOLE, link="nan"),
    "link -50000000000.0 is not a number of bytes": lambda: ag.explain(WHOLE, link="-50e9"),
    "method 'ring' is for a divided sequence": lambda: ag.shard(
        PLAIN, MESH, "heads", method="ring"
    ),
    "method 'heads' has 4 heads for 8 ranks": lambda: ag.shard(
        PLAIN, ag.Mesh(8), "zigzag", method="heads"
    ),
    "exchange bias": lambda: ag.shard(BIAS, MESH, "zigzag", method="heads"),
    "no mask reads bias": lambda: ag.shard(BIAS, MESH, "zigzag", bias=torch.zeros(1)),
    "mesh: 0 is not a number of ranks": lambda: ag.Mesh(0),
    "to be one attention, and is attention_grad": lambda: ag.shard(
        ag.vjp(PLAIN)[1], MESH, "zigzag"
    ),
    "belongs to no group": lambda: ag.compile(ag.shard(PLAIN, MESH, "zigzag")),
    "2 shards of 3 ranks": lambda: ag.shard(PLAIN, ag.Mesh(3), "zigzag").join(
        [torch.zeros(1, 4, 4, 4)] * 2, "q"
    ),
    "a shard is": lambda: ag.shard(PLAIN, MESH, "zigzag").join([torch.zeros(1, 4, 3, 4)] * 2, "q"),
    "'bi' has 2 axes, and the tensor 1": lambda: ag.shard(PLAIN, MESH, "zigzag").split(
        torch.zeros(8), "bi"
    ),
    "gradients is for graphs of one device": lambda: ag.explain(WHOLE, gradients=()),
    "backends is for graphs of one device": lambda: ag.explain(WHOLE, backends=("math",)),
    "link is for graphs that shard divided": lambda: ag.explain(PLAIN, link=1e9),  # type: ignore[call-overload]
    "group is for graphs that shard divided": lambda: ag.compile(PLAIN, group=3),  # type: ignore[call-overload]
    "link 'rope'": lambda: ag.explain(ag.shard(PLAIN, MESH, "zigzag"), target="h200", link="rope"),
    **{
        f"link {x!r} is not a number of bytes a second": lambda x=x: ag.explain(WHOLE, link=x)
        for x in (0, -1.5, inf, nan, True)
    },
    "link ['nvlink'] of": lambda: ag.explain(WHOLE, link=SEVERAL),
    "kv_lengths is [3], not a tensor; pass torch.tensor([3])": lambda: ag.shard(
        SHORT,
        MESH,
        "batch",
        kv_lengths=[3],  # type: ignore[arg-type]
    ),
    "kv_lengths is i64[1], and the graph declares i64[2]": lambda: ag.shard(
        ENDED, MESH, "batch", kv_lengths=torch.tensor([3]), q_lengths=FULL
    ),
    **{
        f"{name}: entry 1 has {n}, of {rows} rows; give 0 to {rows}": (
            lambda name=name, n=n, how=how: ag.shard(
                ENDED, MESH, how, **{**LENGTHS, name: torch.tensor([3, n])}
            )
        )
        for name, n, rows, how in BEYOND
    },
    "kv_lengths is a Tensor of layout torch.strided on meta": lambda: ag.shard(
        SHORT, MESH, "batch", kv_lengths=torch.empty(1, dtype=torch.int64, device="meta")
    ),
    "'zigzag' divides sequences with packed queries and keys, and these have padded ones, or": (
        lambda: ag.shard(PAGED, MESH, "zigzag")
    ),
    "by 'zigzag' a rank's rows depend on q_starts; pass q_starts= with its numbers, or divide by "
    "'heads'": lambda: ag.shard(PACKED, MESH, "zigzag"),
    "a rank's rows depend on q_starts; pass q_starts= with its numbers": lambda: ag.shard(
        PACKED, MESH, "batch"
    ),
    "q_starts: expected ascending ones, got 5, 3": lambda: ag.shard(
        PACKED, MESH, "batch", q_starts=torch.tensor([0, 5, 3])
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_can_t_be_divided_says_so(text: str) -> None:
    with pytest.raises(ag.GraphError, match=re.escape(text)):
        WRONG[text]()


def test_divided_positions_are_all_there() -> None:
    assert [len(x) for x in divide(10, 4)] == [2, 3, 2, 3]
    assert sum(map(len, divide(3, 8))) == 3
    assert divide(11, 3, 4) == [range(4), range(4, 8), range(8, 11)]


@given(st.integers(0, 40), st.integers(1, 9), st.sampled_from([1, 4]))
def test_chunks_are_those_of_pytorch(size: int, parts: int, grain: int) -> None:
    """Of as many ranks: the last may have less, or nothing."""
    chunks = chunk(size, parts, grain)
    if grain == 1:
        due = [len(x) for x in torch.arange(size).chunk(parts)] if size else []
        assert [len(x) for x in chunks] == [*due, *[0] * (parts - len(due))]
    assert [n for own in chunks for n in own] == [*range(size)]
    assert all(own.start % grain == 0 for own in chunks if own)


@given(st.lists(st.integers(0, 50)), st.integers(1, 5))
def test_sequences_are_divided_by_their_rows(rows: list[int], parts: int) -> None:
    """No rank has more than its share and half of a sequence at either end."""
    chunks = chunk_by_weight(rows, parts)
    assert [n for own in chunks for n in own] == [*range(len(rows))]
    for own in chunks:
        assert sum(rows[n] for n in own) <= sum(rows) / parts + max(rows, default=0)


# Explanations


def test_an_explanation_compares_the_methods() -> None:
    sharded = ag.shard(graph(65536, ag.Causal()), ag.Mesh(4), "balanced", method="ring")
    outlook = ag.explain(sharded, target="h200", link="nvlink")
    assert {x.method for x in outlook.others} == {"gather", "heads"}
    assert outlook.balance <= 1.05
    assert outlook.sent.forward + outlook.sent.backward == sum_bytes(sharded)
    assert sum(rank.pairs for rank in outlook.ranks) == 8 * 65536 * 65537 // 2
    for rank in outlook.ranks:
        assert rank.compute is not None
        assert rank.transfer is not None
        assert rank.seconds is not None
        assert max(rank.compute, rank.transfer) <= rank.seconds <= rank.compute + rank.transfer
    assert "450 GB/s a way" in str(outlook)
    assert outlook.to_dict()["ranks"][3]["pairs"] == outlook.ranks[3].pairs
    assert ag.explain(sharded, target="cpu").seconds is None


@given(st.floats(1, 1e15))
def test_a_link_is_read_as_text_too(speed: float) -> None:
    sharded = ag.shard(PLAIN, MESH, "zigzag")
    assert ag.explain(sharded, target="h200", link=str(speed)) == ag.explain(
        sharded, target="h200", link=speed
    )


@pytest.mark.parametrize("name", ["b200", "gb200", "b300", "gb300"])
def test_gpus_of_one_generation_have_one_nvlink(name: str) -> None:
    assert ag.explain(WHOLE, target=name, link="nvlink").link == 900e9


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from(["batch", "heads", "balanced"]))
def test_ranks_without_work_are_named(entries: int, ranks: int, placement: Placement) -> None:
    spec = ag.TensorSpec((entries, 2, 4, 8), torch.float32)
    outlook = ag.explain(ag.shard(ag.attention(spec, spec, spec), ag.Mesh(ranks), placement))
    idle = [str(n) for n, rank in enumerate(outlook.ranks) if not rank.pairs]
    first = outlook.title()
    assert first.endswith("nothing to do") == bool(idle)
    named = re.findall(r"\d+", first.partition("; balance")[2].partition("; rank")[2])
    more = [str(len(idle) - 8)] if len(idle) > 8 else []
    assert named == [*idle[:8], *more]


@given(st.integers(1, 9), st.sampled_from(SEQUENCES), st.floats(1e-6, 1), st.floats(0, 1))
def test_ranks_share_the_price_of_the_whole(
    ranks: int, placement: Placement, forward: float, backward: float
) -> None:
    """By their pairs, where messages take no time; and no less where they do."""
    sharded = ag.shard(graph(256, ag.Causal()), ag.Mesh(ranks), placement)
    outlook = ag.explain(sharded, target="h200")
    alone = predict_ranks(outlook, [forward, backward])
    assert alone == pytest.approx((forward + backward) * outlook.balance / ranks)
    linked = ag.explain(sharded, target="h200", link=1e6)
    assert predict_ranks(linked, [forward, backward]) >= alone
    assert predict_ranks(linked, [forward]) <= predict_ranks(linked, [forward, backward])


def test_a_picture_of_the_mask_shows_the_ranks() -> None:
    window = graph(32, ag.Causal() & ag.Window(7))
    outlook = ag.explain(ag.shard(window, ag.Mesh(2), "zigzag"), target="h200")
    lines = outlook.picture().splitlines()
    for i, line in enumerate(lines):
        rank = "0" if i < 8 or i >= 24 else "1"
        assert line == "".join(rank if 0 <= i - j <= 7 else "-" for j in range(32))
    page = outlook._repr_html_()
    assert page.count("<path") == 2
    assert "hsl(180 60% 50%)" in page
    assert not ag.explain(ag.shard(window, ag.Mesh(2), "heads"), target="h200").owners


def test_bytes_of_a_hop_add_up_to_those_of_the_ranks() -> None:
    sharded = ag.shard(graph(4096, ag.Window(700, 100)), ag.Mesh(4), "zigzag", method="ring")
    for rank, own in enumerate(ag.explain(sharded, target="h200").ranks):
        others = [r for r in range(4) if r != rank]
        flows = [flow_between(sharded, rank, r) for r in others]
        back = [flow_between(sharded, r, rank) for r in others]
        assert own.sent.forward == sum(flow.forward for flow in flows)
        assert own.sent.backward == sum(flow.backward for flow in flows)
        assert own.received.backward == sum(flow.backward for flow in back)
