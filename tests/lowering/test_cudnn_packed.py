"""Packed tensors and pages given to cuDNN, with what its documentation says in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.errors import Reason
from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage.packed import Packed, run_one
from attn_graph.ir.storage.packing import Unpack
from attn_graph.ir.transforms.vjp import backward
from attn_graph.lowering.cudnn.backend import describe_problem, read_case
from attn_graph.lowering.cudnn.graph import round_total
from attn_graph.lowering.cudnn.memory import key_splits
from attn_graph.lowering.cudnn.run import Run, run_notes, temporary_bytes
from attn_graph.lowering.libraries.cudnn_limits import reasons
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.target import Target
from attn_graph.machine.workspace import Workspace
from attn_graph.nn.functional import attention
from attn_graph.spec import FLOATS, INF
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.strategies import Shape, seeds
from tests.support import ragged
from tests.support.cudnn_graphs import aligned, cudnn_options
from tests.support.cudnn_model import Model
from tests.support.freed_pages import free_hidden
from tests.support.ragged import Case, are_same, check_pulled, check_results, fill, make_packed
from tests.support.sequences import SPEC, Batch, batches

VERSIONS = (("nvidia-cudnn-frontend", "1.28.0"), ("nvidia-cudnn-cu13", "9.26.0"))
H200 = Target("h200", "cuda", 90, (), VERSIONS)
HALVES = st.sampled_from([torch.float16, torch.bfloat16])
OFTEN = st.sampled_from([True, True, True, False])
I32, BRAIN = torch.int32, torch.bfloat16


def refusals(graph: Graph) -> list[Reason]:
    case = read_case(Request(graph, H200, Options()))
    assert case is not None
    return [*reasons(case)]


def modelled(graph: Graph) -> Run:
    """How a simplified graph, one that cuDNN takes, would run."""
    case, call = describe_problem(Request(graph, H200, Options()))
    return Run.of(case, call, graph, Workspace(), 128, Model(call))


def gradient_of(graph: Graph, do: torch.Tensor) -> tuple[Graph, list[str]]:
    """The backward graph by every floating input, of o alone, and their names."""
    trained = evolve(graph, outputs=graph.outputs[:1])
    wants = [n for n, i in enumerate(graph.inputs) if i.spec.dtype in FLOATS]
    return backward(trained, wants, [SPEC.like(do)]), [graph.inputs[n].name for n in wants]


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=random).to(like.dtype)


# Packed tensors


@st.composite
def cases(draw: DrawFn) -> Case:
    """Sequences with gaps or not, some of 0 or 1 rows, NaN in rows of no sequence."""
    batch, dtype = draw(batches()), draw(HALVES)
    G, r = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    D, E = draw(st.sampled_from([(8, 8), (16, 16), (24, 8), (8, 16)]))
    shape = Shape(len(batch.rows), G * r, G, *batch.most, D, E)
    options = {n: x for n, x in draw(cudnn_options(shape, dtype)).items() if n not in m.LENGTHS}
    options["align"] = options["align"] or draw(st.sampled_from(["top_left", "bottom_right"]))
    options["stats"] = draw(st.booleans())
    dims = {"q": (0, shape.H, D), "k": (1, G, D), "v": (1, G, E)}
    return make_packed(batch, shape, dtype, dims, options, draw(seeds))


def make_plain(batch: Batch, **options: Any) -> Case:
    """Four heads that share two of keys."""
    shape = Shape(len(batch.rows), 4, 2, *batch.most, 16, 16)
    dims = {"q": (0, 4, 16), "k": (1, 2, 16), "v": (1, 2, 16)}
    return make_packed(batch, shape, BRAIN, dims, options, 3)


KEYLESS, HALF_SINKS = (
    make_plain(
        Batch((3, 5, 0, 2), (4, 0, 7, 9), ((0, 1), (1, 2), (2, 0), (1, 1)), gaps=True),
        stats=True,
        sinks=SPEC((4,), dtype),
    )
    for dtype in (torch.float32, BRAIN)
)
TIGHT = make_plain(
    Batch((3, 0, 1), (5, 2, 0), ((0, 0),) * 3, gaps=False),
    mask=ag.Causal("bottom_right"),
    stats=True,
)


@given(case=cases(), seed=seeds)
@example(case=KEYLESS, seed=0)
@example(case=HALF_SINKS, seed=0)
@example(case=TIGHT, seed=0)
def test_what_cudnn_is_told_of_packed_tensors_means_what_the_graph_means(
    case: Case, seed: int
) -> None:
    """To the bit, whatever is in rows of no sequence."""
    simple = simplify(case.graph)
    assume(not refusals(simple))
    tensors = [*map(aligned, case.inputs)]
    outputs, (o, lse) = modelled(simple)(*tensors)
    check_results(case, outputs)
    for x, i in zip(outputs, simple.outputs, strict=True):
        assert SPEC.like(x) == result_spec(simple, i)
    do = case.batch.spoil(noise(o, seed), 0)
    empty = [aligned(fill(x, False)) for x in tensors]
    assert are_same(modelled(simple)(*empty)[0], outputs)
    back, names = gradient_of(simple, do)
    assume(not refusals(back))
    gradients, _ = modelled(back)(*tensors, o, lse, do)
    assert are_same(modelled(back)(*empty, o, lse, fill(do, False))[0], gradients)
    cotangents = [do, *(None for _ in outputs[1:])]
    check_pulled(case, dict(zip(names, gradients, strict=True)), cotangents)


PARTLY: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, list[int]]]] = {
    "q": (  # shapes of q and k; what is given besides
        {"q": (12, 4, 16), "k": (4, 2, 7, 16)},
        {"q_starts": [0, 3, 3, 9, 10], "kv_lengths": [7, 4, 0, 2]},
    ),
    "k": ({"q": (4, 4, 5, 16), "k": (12, 2, 16)}, {"kv_starts": [0, 3, 3, 9, 10]}),
}


@pytest.mark.parametrize("side", PARTLY)
def test_queries_alone_or_keys_alone_may_be_packed(side: str) -> None:
    """The other side has as many rows for all. Where one side has none, the other gets zeros. Rows
    of no sequence, and padded keys past a length, hold NaN."""
    shapes, extra = PARTLY[side]
    random, counts = torch.Generator().manual_seed(0), torch.tensor([3, 0, 6, 1], dtype=I32)
    own = {n: torch.tensor(x, dtype=I32) for n, x in extra.items()}
    starts = next(iter(own.values()))

    def pad(x: torch.Tensor) -> torch.Tensor:
        return run_one(Unpack(6), x, starts, counts) if x.shape[0] == 12 else x

    q, k, v = (torch.randn(shapes[n], generator=random).half() for n in "qkk")
    for x in (q,) if side == "q" else (k, v):
        x[10:] = torch.nan
    if "kv_lengths" in own:
        past = torch.arange(k.shape[2]) >= own["kv_lengths"][:, None]
        for x in (k, v):
            x.masked_fill_(past[:, None, :, None], torch.nan)
    specs: dict[str, Any] = {n: SPEC.like(x) for n, x in own.items()}
    most = (6, None) if side == "q" else (None, 6)
    simple = simplify(
        ag.attention(*map(SPEC.like, (q, k, v)), stats=True, max_lengths=most, **specs)
    )
    assert not refusals(simple)
    named = {"q": q, "k": k, "v": v, **own}
    tensors = [named[i.name] for i in simple.inputs]

    whole = {n: pad(named[n]).nan_to_num() for n in "qkv"} | {
        n: own[n] for n in own if n == "kv_lengths"
    }
    whole[f"{side}_lengths".replace("k_", "kv_")] = counts
    ends: dict[str, Any] = {n: SPEC.like(x) for n, x in whole.items() if n in m.LENGTHS}
    mask = m.KeyLengths() & m.QueryLengths() if side == "q" else m.KeyLengths()
    padded = ag.attention(*(SPEC.like(whole[n]) for n in "qkv"), mask=mask, stats=True, **ends)
    inputs = [whole[i.name] for i in padded.inputs]

    _, (o, lse) = modelled(simple)(*tensors)
    o_due, lse_due = expect_outputs(padded, inputs)
    o_due.check(pad(o))
    there = torch.arange(6) < counts[:, None]
    got = run_one(Unpack(6), lse, starts, counts) if side == "q" else lse
    lse_due.check(torch.where(there[:, None], got, -INF) if side == "q" else got)

    do = noise(o, 1)
    back, names = gradient_of(simple, do)
    assert not refusals(back)
    gradients, _ = modelled(back)(*tensors, o, lse, do)
    dues = expect_gradients(padded, inputs, [pad(do), None])
    for name, x in zip(names, gradients, strict=True):
        dues[name].check(pad(x))


@pytest.mark.parametrize("strides", [(3 * 64, 16, 1), (64, 16, 1)])
def test_packed_tensors_are_read_where_they_lie(strides: tuple[int, int, int]) -> None:
    """q, k and v side by side in each row, and apart."""
    spec, starts = SPEC((9, 4, 16), BRAIN, strides), torch.tensor([0, 2, 9], dtype=I32)
    graph = simplify(ag.attention(spec, spec, spec, mask=ag.Causal(), q_starts=SPEC((3,), I32)))
    given = [noise(torch.empty(9 * strides[0]), n).bfloat16() for n in range(3)]
    tensors = [x.as_strided(spec.shape, strides) for x in given]
    run = modelled(graph)
    assert [x.strides[2] for x in run.call.inputs[:3]] == [
        strides[0],
        strides[0],
        64,
    ]  # v is a copy
    outputs, _ = run(*tensors, starts)
    loop = torch.cat([alone(*(x[a:b] for x in tensors)) for a, b in ((0, 2), (2, 9))])
    torch.testing.assert_close(outputs[0], loop)


def alone(*x: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence [T,H,D], in float32."""
    q, k, v = (t.transpose(0, 1).float() for t in x)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return o.transpose(0, 1).bfloat16()


def test_one_plan_serves_batches_of_any_number_of_rows() -> None:
    """A forward's call does not depend on T, and a backward's on what T is rounded up to."""

    def calls(T: int) -> list[Any]:  # Any: JSON
        x = SPEC((T, 4, 64), BRAIN)
        graph = simplify(
            ag.attention(
                x, x, x, mask=ag.Causal(), q_starts=SPEC((9,), I32), max_lengths=(512, 512)
            )
        )
        back = backward(graph, [0, 1, 2], [x])
        return [describe_problem(Request(g, H200, Options()))[1].plain for g in (graph, back)]

    (forward, back), (other, near), (third, far) = calls(1000), calls(1024), calls(1025)
    assert forward == other == third
    assert back == near != far
    assert back["options"]["max_total_seq_len_q"] == back["options"]["max_total_seq_len_kv"] == 1024


@given(st.integers(1, 10**7))
def test_totals_are_rounded_up_by_an_eighth_at_most(T: int) -> None:
    assert T <= round_total(T) < max(T * 1.125, T + 64)
    assert round_total(round_total(T)) == round_total(T)


def test_what_is_copied_of_packed_tensors_is_told_and_counted(
    golden: Callable[[object], None],
) -> None:
    q, k = SPEC((1000, 32, 128), BRAIN), SPEC((1000, 8, 128), BRAIN)
    starts = SPEC((9,), I32)
    graph = simplify(
        ag.attention(q, k, k, mask=ag.Causal(), q_starts=starts, max_lengths=(512, 512))
    )
    texts = []
    for each in (graph, backward(graph, [0, 1], [q])):
        case, call = describe_problem(Request(each, H200, Options()))
        room = Run.of(case, call, each, Workspace(), 128, Model(call))
        texts += [
            *run_notes(case, call, each),
            f"{temporary_bytes(case, call, each)} bytes besides",
            f"{room.scratch.bytes} bytes leased, for {', '.join(room.scratch.buffers)}",
            str(call),
            "",
        ]
    golden("\n".join(texts))


def test_an_address_off_16_bytes_is_an_error_that_says_so() -> None:
    case = make_plain(Batch((3, 2), (4, 5), ((0, 0),) * 2, gaps=False))
    tensors = dict(case.tensors)
    room = torch.zeros(1 + tensors["q"].numel(), dtype=BRAIN)
    tensors["q"] = room[1:].view(tensors["q"].shape).copy_(tensors["q"])
    simple = simplify(case.graph)
    with pytest.raises(ag.PlanMismatchError, match=r"q: expected an address .* 2 bytes past"):
        modelled(simple)(*(tensors[i.name] for i in simple.inputs))


# Pages


@st.composite
def paged_cases(draw: DrawFn) -> ragged.Case:
    """q packed or not, pages of 1 to 64 rows; the table holds anything past lengths."""
    batch, dtype, packed = draw(batches()), draw(HALVES), draw(st.booleans())
    P = draw(st.sampled_from([1, 2, 16, 64]))
    N = P * (-(-batch.most[1] // P) + draw(st.integers(0, 1)))
    M = batch.most[0] if packed else draw(st.sampled_from([1, 2, 5]))
    G, r = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    D, E = draw(st.sampled_from([(8, 8), (16, 16), (24, 8), (8, 16)]))
    shape = Shape(len(batch.rows), G * r, G, M, N, D, E)
    options = {n: x for n, x in draw(cudnn_options(shape, dtype)).items() if n not in m.LENGTHS}
    options["align"] = options["align"] or draw(st.sampled_from(["top_left", "bottom_right"]))
    options["stats"], ended = draw(st.booleans()), draw(st.booleans())
    batch = evolve(batch, rows=batch.rows if packed else (M,) * shape.B)
    batch = evolve(batch, keys=batch.keys if ended else (N,) * shape.B)
    layout = ragged.Layout(P, draw(st.booleans()), ended, packed)
    return ragged.make_paged(batch, layout, shape, dtype, options, draw(seeds), finite=draw(OFTEN))


def is_declared(graph: Graph) -> bool:
    """Whether the pools of a graph are declared finite."""
    return any(isinstance(e.op, Packed) and e.op.finite for e in graph.eqns)


MIDWAY = ragged.make_paged(  # the first key that is seen lies within a page
    Batch((1, 1), (40, 30), ((0, 0),) * 2, gaps=False),
    ragged.Layout(16, heads_first=False, ended=True, packed=False),
    Shape(2, 4, 2, 1, 48, 16, 16),
    BRAIN,
    {"mask": ag.Window(20, 0, "bottom_right"), "stats": True},
    seed=3,
    finite=True,
)


@given(case=paged_cases())
@example(case=MIDWAY)
def test_what_cudnn_is_told_of_pages_means_what_the_graph_means(case: ragged.Case) -> None:
    """Whatever the rows hold that no query sees, unless they are declared finite, and whatever the
    table has for their pages."""
    simple = simplify(case.graph)
    assume(not refusals(simple))
    named = {i.name: x for i, x in zip(case.graph.inputs, case.inputs, strict=True)}
    freed = free_hidden(case.graph, named)
    if is_declared(simple):
        freed |= {n: freed[n].nan_to_num(3.0) for n in "kv"}
    outputs, _ = modelled(simple)(*(aligned(x) for x in freed.values()))
    ragged.check_results(case, outputs)


def test_pages_with_absent_keys_are_refused_until_they_are_declared_finite() -> None:
    """A length ends a page anywhere, and a band begins one anywhere."""
    q, pool, where = SPEC((2, 4, 1, 64), BRAIN), SPEC((9, 16, 4, 64), BRAIN), SPEC((2, 3), I32)
    window, causal = ag.Window(9, 0, "bottom_right"), ag.Causal("bottom_right")
    for options, hides in (
        ({"kv_lengths": SPEC((2,), I32)}, True),
        ({"kv_lengths": SPEC((2,), I32), "mask": causal}, True),
        ({"mask": window}, True),
        ({"mask": ag.Causal("top_left")}, True),
        ({"mask": causal}, False),
        ({}, False),
    ):
        for finite in (False, True):
            own: dict[str, Any] = {**options, "pages": where, "finite_pages": finite}
            graph = ag.attention(q, pool, pool, **own)
            said = ag.explain(graph, target="h200")
            against = [str(x) for r in said.refusals if r.backend == "cudnn" for x in r.reasons]
            assert any("lacks finite_pages=True" in x for x in against) == (hides and not finite)
            assert said.backend == ("triton" if against else "cudnn")
            assert ag.parse(str(graph)) == graph
            assert is_declared(simplify(graph)) == finite


def test_a_declaration_that_speaks_of_no_pages_is_an_error() -> None:
    x, q = SPEC((2, 4, 8, 64), BRAIN), torch.randn(1, 2, 3, 8)
    with pytest.raises(ag.GraphError, match="speaks of pools, and pages= is not given"):
        ag.attention(x, x, x, finite_pages=True)
    with pytest.raises(ag.GraphError, match="finite_pages 1 is neither True nor False"):
        attention(q, q, q, finite_pages=1)  # type: ignore[arg-type]  # a mistake


def decode(B: int = 4, N: int = 4096, table: torch.dtype = I32, **options: Any) -> Graph:
    """One query each over pages of 16, 32 heads that share 8."""
    q, pool = SPEC((B, 32, 1, 128), BRAIN), SPEC((5000, 16, 8, 128), BRAIN)
    own: dict[str, Any] = {"pages": SPEC((B, N // 16), table), "kv_lengths": SPEC((B,), I32)}
    return simplify(ag.attention(q, pool, pool, **own, **options))


def test_one_query_at_the_end_of_its_keys_has_no_diagonal() -> None:
    """cuDNN's kernel for bands does not split keys."""
    graph = decode(mask=ag.Causal("bottom_right"))
    assert graph == decode()
    x, pool = SPEC((9, 32, 128), BRAIN), SPEC((5000, 16, 8, 128), BRAIN)
    starts, pages, n = SPEC((5,), I32), SPEC((4, 256), I32), SPEC((4,), I32)
    given_specs: dict[str, Any] = {"q_starts": starts, "pages": pages, "kv_lengths": n}
    packed = [
        simplify(ag.attention(x, pool, pool, mask=mask, max_lengths=(1, None), **given_specs))
        for mask in (ag.Causal("bottom_right"), None)
    ]
    assert packed[0] == packed[1]


def test_keys_of_one_query_are_split_by_the_batch() -> None:
    def splits(graph: Graph) -> int:
        return key_splits(describe_problem(Request(graph, H200, Options()))[0])

    assert [splits(decode(B=b)) for b in (1, 2, 3, 4, 5, 8, 9, 64)] == [32, 16, 8, 8, 4, 4, 1, 1]
    assert [splits(decode(B=1, N=n)) for n in (512, 640, 1024, 65536)] == [1, 4, 8, 32]
    window = decode(mask=ag.Window(99, 0, "bottom_right"))
    assert splits(window) == 1


@pytest.mark.parametrize("mask", [m.Band(1, 3), m.Band(-3, -1)])
def test_a_row_that_a_band_hides_everything_from_is_cleared_though_all_rows_are_there(
    mask: ag.Mask,
) -> None:
    """Its do may be NaN, and its lse is -inf, or cuDNN would divide by 0."""
    x = SPEC((8, 4, 16), BRAIN)
    options: dict[str, Any] = {"q_starts": SPEC((3,), I32), "max_lengths": (5, 5)}
    graph = simplify(ag.attention(x, x, x, mask=mask, all_rows=True, **options))
    case, _ = describe_problem(
        Request(gradient_of(graph, torch.zeros(x.shape, dtype=BRAIN))[0], H200, Options())
    )
    assert case.clears
    assert case.copies == ("do",)
    seen = simplify(ag.attention(x, x, x, mask=m.Band(-3, 2), all_rows=True, **options))
    back = gradient_of(seen, torch.zeros(x.shape, dtype=BRAIN))[0]
    assert not describe_problem(Request(back, H200, Options()))[0].copies
