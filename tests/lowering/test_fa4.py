"""FlashAttention 4's backend without the package: what it is told, and that this is right."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, assume, example, given, reject, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.errors import Reason
from attn_graph.ir.passes import simplify
from attn_graph.lowering.backend import RefusedError
from attn_graph.lowering.fa4 import offline as fa4_offline
from attn_graph.lowering.fa4 import run as fa4_run
from attn_graph.lowering.fa4.backend import BACKEND, PACKAGE
from attn_graph.lowering.fa4.call import Fa4Call
from attn_graph.lowering.fa4.dialect import in_place, read_axes_of
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.target import VIRTUAL
from attn_graph.masks import LENGTHS
from attn_graph.masks.places import Untraceable
from attn_graph.testing import backend_check
from attn_graph.testing import strategies as drawn
from attn_graph.testing.agreement import run_plan
from tests.lowering import test_absent as absent
from tests.lowering.test_lowering import refused
from tests.support import ragged
from tests.support.cudnn_graphs import spaced
from tests.support.fa4_model import call_model
from tests.support.freed_pages import free_hidden
from tests.support.kernels import lying_of
from tests.support.sequences import Batch, batches, draw_cotangents

BF16, I32 = torch.bfloat16, torch.int32
H200 = evolve(ag.Target.of("h200"), libraries=((PACKAGE, "4.0.0b36"),))
WITH_TRITON = evolve(H200, libraries=(*H200.libraries, ("triton", "3.7.1")))
B200 = evolve(ag.Target.of("b200"), libraries=H200.libraries)
JOINED = ag.Causal("top_left") & (ag.Window(64, 0, "top_left") | ag.Prefix(4))


def spec(*shape: int, dtype: torch.dtype = BF16) -> ag.TensorSpec:
    return ag.TensorSpec(shape, dtype)


def make(M: int = 300, N: int = 300, H: int = 4, G: int = 2, **options: Any) -> ag.Graph:
    """A graph as the backend sees it."""
    k = spec(2, G, N, 64)
    return simplify(ag.attention(spec(2, H, M, 64), k, k, **options))


def keys_of(graph: ag.Graph, target: ag.Target, options: Options | None = None) -> set[str]:
    """The keys of the reasons against a graph."""
    return {r.key for r in BACKEND.reasons(Request(graph, target, options or Options()))}


def apart(shape: tuple[int, ...], layout: str, gap: int) -> ag.TensorSpec:
    """A tensor with unused elements behind each row."""
    wide = ag.TensorSpec((*shape[:-1], shape[-1] + gap), BF16, layout=layout)
    return ag.TensorSpec(shape, BF16, wide.strides)


@st.composite
def near(draw: st.DrawFn) -> ag.Graph:
    """Graphs that the package takes, or nearly."""
    G = draw(st.integers(1, 2))
    D = draw(st.sampled_from((8, 16)))
    M, N = (draw(st.one_of(st.integers(1, 40), st.integers(129, 140))) for _ in "MN")
    size = drawn.Shape(draw(st.integers(1, 2)), G * draw(st.integers(1, 2)), G, M, N, D, D)
    layout = draw(st.sampled_from(("bhsd", "bshd", "sbhd")))
    q, k, v = (
        apart(x, layout, draw(st.sampled_from((0, 0, 3, 8)))) for x in (size.q, size.k, size.v)
    )
    options = draw(drawn.mask_options(size)) | draw(drawn.score_options(size, BF16))
    options |= {"scale": None, "dropout": 0.0}
    return ag.attention(q, k, v, **options, stats=draw(st.booleans()))


def lay_apart(graph: ag.Graph, strides: tuple[int, ...], step: int) -> ag.Graph:
    """o with these strides, and lse with one of `step` along its rows."""
    o, lse = graph.output_types
    _, H, M = lse.shape
    each = ag.TensorSpec(lse.shape, lse.dtype, (H * M * step, M * step, step))
    return ag.lay_out(graph, {"o": ag.TensorSpec(o.shape, o.dtype, strides), "lse": each})


APART = lay_apart(  # elements of o, and rows of lse, have others between them
    ag.attention(spec(1, 2, 5, 8), spec(1, 2, 5, 8), spec(1, 2, 5, 8), stats=True),
    (240, 120, 24, 3),
    2,
)


def rows(shape: Sequence[int], dtype: torch.dtype) -> st.SearchStrategy[ag.TensorSpec]:
    """Layouts of outputs, most of them as the package writes them."""
    return st.one_of(drawn.specs(shape, dtype), spaced(shape, dtype))


TARGETS = (H200, B200)
Skip = int | None
targets: st.SearchStrategy[ag.Target] = st.sampled_from(TARGETS)
skips: st.SearchStrategy[Skip] = st.sampled_from((None, 0, 1))
fixed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On both targets a model of the package runs, with lists wherever there may be some."""
    monkeypatch.setattr(fa4_run, "call_package", call_model)
    monkeypatch.setattr(fa4_run, "find_misplaced", lambda _: [])  # as drawn they begin anywhere
    VIRTUAL.update(TARGETS)
    yield
    VIRTUAL.difference_update(TARGETS)


def check_backend(graph: ag.Graph, target: ag.Target, seed: int, skip: Skip) -> None:
    """Assert what `check_backend` asserts of one graph, which the package takes."""
    plan = backend_check.plan_graph(BACKEND, graph, target)
    assume(plan is not None)
    assert plan is not None
    backend_check.check_runs(plan, graph, seed, skip, target)


def plan_on(target: ag.Target, graph: ag.Graph) -> ag.Plan:
    """The package's plan, its gradient another's where it has none."""
    try:
        plan = ag.compile(graph, target=target, backends=("fa4", "math"))
    except ag.NoBackendError as error:
        refused(error)
    assume(plan.backend == "fa4")
    return plan


@pytest.mark.usefixtures("modelled")
@given(drawn.with_layouts(near(), rows), targets, drawn.seeds, skips)
@example(APART, H200, 0, None)
@fixed
def test_the_package_is_told_what_the_graph_says(
    graph: ag.Graph, target: ag.Target, seed: int, skip: Skip
) -> None:
    """Both passes, by a model of the package that reads masks and modifiers off their text."""
    check_backend(graph, target, seed, skip)


def draw_options(draw: st.DrawFn, size: drawn.Shape, dtype: torch.dtype) -> dict[str, Any]:
    """What the package takes, more often than else with a mask of its own."""
    options = draw(drawn.mask_options(size)) | draw(drawn.score_options(size, dtype))
    options |= {"scale": None, "dropout": 0.0, "stats": draw(st.booleans())}
    own = (None, ag.Causal("bottom_right"), ag.Window(3, 1, "bottom_right"))
    if not getattr(options.get("mask"), "needs", ()):
        options |= {"mask": draw(st.sampled_from(own))} if draw(st.booleans()) else {}
    return options


@st.composite
def ended(draw: st.DrawFn) -> absent.Case:
    """Graphs that the package takes, with lengths from 0 to all."""
    M, N = (draw(st.one_of(st.integers(1, 20), st.integers(129, 140))) for _ in "MN")
    G, B = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    size = drawn.Shape(B, G * draw(st.integers(1, 2)), G, M, N, 8, 16)
    dtype = draw(st.sampled_from((BF16, torch.float16)))
    options = draw_options(draw, size, dtype)
    names = draw(st.sets(st.sampled_from(("q_lengths", "kv_lengths")), min_size=1))
    most = {"q_lengths": M, "kv_lengths": N}
    ends = {n: tuple(draw(st.integers(0, most[n])) for _ in range(B)) for n in sorted(names)}
    return absent.make_case(size, dtype, options, ends, draw(drawn.seeds))


@pytest.mark.usefixtures("modelled")
@given(case=ended(), target=targets)
@fixed
def test_absent_rows_are_never_seen(case: absent.Case, target: ag.Target) -> None:
    """The model multiplies them by 0, as the package does, and NaN stays NaN."""
    plan = plan_on(target, case.graph)
    zeros, poisoned = (absent.every_result(case, plan, spoilt) for spoilt in (False, True))
    assert ragged.are_same(poisoned, zeros)


@st.composite
def packed(draw: st.DrawFn) -> ragged.Case:
    """Sequences with gaps or not, some of no rows or no keys."""
    batch, G = draw(batches()), draw(st.integers(1, 2))
    D, E = draw(st.sampled_from([(8, 8), (16, 16), (16, 8)]))
    shape = drawn.Shape(len(batch.rows), G * draw(st.integers(1, 2)), G, *batch.most, D, E)
    dtype = draw(st.sampled_from((BF16, torch.float16)))
    options = {n: x for n, x in draw_options(draw, shape, dtype).items() if n not in LENGTHS}
    options["align"] = options["align"] or draw(st.sampled_from(["top_left", "bottom_right"]))
    dims = {"q": (0, shape.H, D), "k": (1, G, D), "v": (1, G, E)}
    return ragged.make_packed(batch, shape, dtype, dims, options, draw(drawn.seeds))


@pytest.mark.usefixtures("modelled")
@given(case=packed(), target=targets, seed=drawn.seeds)
@fixed
def test_packed_sequences_are_padded_ones(case: ragged.Case, target: ag.Target, seed: int) -> None:
    """NaN lies in rows of no sequence, which the model multiplies by 0."""
    plan = plan_on(target, case.graph)
    ragged.check_case(case, plan)
    ragged.check_gradients(case, plan, seed)
    cotangents = draw_cotangents(plan.graph, case.batch, seed)
    ragged.check_spoilt(plan, case.inputs, cotangents)


@pytest.mark.usefixtures("modelled")
@given(target=targets)
@fixed
def test_slopes_count_places_by_the_lengths_of_packed_sequences(target: ag.Target) -> None:
    batch = Batch((0, 3, 1), (2, 4, 2), ((0, 0),) * 3, gaps=False, full=False)
    shape, dims = drawn.Shape(3, 2, 1, *batch.most, 8, 8), {"q": (0, 2, 8), "k": (1, 1, 8)}
    options = {"alibi": True, "align": "bottom_right", "stats": True}
    case = ragged.make_packed(batch, shape, BF16, dims | {"v": (1, 1, 8)}, options, 0)
    plan = plan_on(target, case.graph)
    ragged.check_case(case, plan)
    ragged.check_gradients(case, plan, 0)


@st.composite
def paged(draw: st.DrawFn) -> ragged.Case:
    """Keys in pages, NaN in rows that are nobody's, garbage in entries of the table past a length;
    queries packed or not."""
    batch, P, G = draw(batches()), draw(st.sampled_from((1, 3, 16))), draw(st.integers(1, 2))
    is_packed, ended = draw(st.booleans()), draw(st.booleans())
    N = P * (-(-batch.most[1] // P) + draw(st.integers(0, 1)))
    M = batch.most[0] if is_packed else draw(st.sampled_from((1, 5)))
    shape = drawn.Shape(len(batch.rows), G * draw(st.integers(1, 2)), G, M, N, 8, 16)
    options = draw_options(draw, shape, BF16)
    options["align"] = options["align"] or draw(st.sampled_from(["top_left", "bottom_right"]))
    ended = ended or "kv_lengths" in options
    batch = evolve(batch, rows=batch.rows if is_packed else (M,) * shape.B)
    batch = evolve(batch, keys=batch.keys if ended else (N,) * shape.B)
    layout = ragged.Layout(P, draw(st.booleans()), ended, is_packed)
    seed, finite = draw(drawn.seeds), draw(st.booleans())
    case = ragged.make_paged(batch, layout, shape, BF16, options, seed, finite=finite)
    if not finite:
        return case
    return evolve(case, tensors=case.tensors | {n: case.tensors[n].nan_to_num(3.0) for n in "kv"})


@pytest.mark.usefixtures("modelled")
@given(case=paged(), target=targets)
@fixed
def test_pages_are_keys_in_one_piece(case: ragged.Case, target: ag.Target) -> None:
    """Where the mask hides keys in pages from all queries, once they are declared finite."""
    assume("pages_hidden" not in keys_of(simplify(case.graph), target))
    plan = plan_on(target, case.graph)
    freed = case.tensors | {"pages": free_hidden(case.graph, case.tensors)["pages"]}
    ragged.check_results(case, run_plan(plan, [freed[i.name] for i in case.graph.inputs]))
    zeros, poisoned = ([ragged.fill(x, spoilt) for x in case.inputs] for spoilt in (False, True))
    assert ragged.are_same(run_plan(plan, poisoned), run_plan(plan, zeros))


def test_pages_as_large_as_a_tile_are_refused_and_so_are_gradients_over_any() -> None:
    """Kernels read such a page whole, and nobody says that its rows past a length are not NaN."""
    for D, tile in ((64, 128), (256, 80)):
        for P in (16, tile):
            pool, table = spec(40, P, 2, D), spec(2, 16, dtype=torch.int32)
            graph = ag.attention(
                spec(2, 4, 5, D), pool, pool, pages=table, kv_lengths=spec(2, dtype=torch.int32)
            )
            found = keys_of(simplify(graph), H200)
            assert found == ({"page_size"} if tile == P else set())
            assert keys_of(simplify(ag.vjp(graph)[1]), H200) == {"pages_gradient"}


def test_pages_behind_a_window_are_refused_until_they_are_declared_finite() -> None:
    pool, table, n = spec(40, 16, 2, 64), spec(2, 16, dtype=I32), spec(2, dtype=I32)
    for mask, hides in (
        (ag.Window(9, 0, "bottom_right"), True),
        (ag.Causal("bottom_right"), False),
    ):
        for finite in (False, True):
            graph = ag.attention(
                spec(2, 4, 5, 64), pool, pool,
                mask=mask, pages=table, kv_lengths=n, finite_pages=finite,
            )  # fmt: skip
            due = {"pages_hidden"} if hides and not finite else set()
            assert keys_of(simplify(graph), H200) == due


def test_rows_off_16_bytes_are_copied_and_told() -> None:
    """A row of 67 elements; of 72 it is read where it lies."""
    copies = []
    for gap in (3, 8):
        x = apart((2, 4, 300, 64), "bhsd", gap)
        forward = simplify(ag.attention(x, x, x))
        for graph in (forward, simplify(ag.vjp(forward)[1])):
            made = BACKEND.foreseen(Request(graph, H200, Options()))
            told = [x for x in made.notes if "copied, 300 KiB, to rows at multiples of 16" in x]
            copies.append(len(told))
            assert made.temporary >= 2 * 4 * 300 * 64 * 2 * len(told)
    assert copies == [3, 3, 0, 0]


def test_o_and_statistics_declared_apart_are_copied_for_the_gradient_and_told() -> None:
    """Rows of 72 elements are read where they lie."""
    x = spec(2, 4, 300, 64)
    graph = ag.attention(x, x, x, stats=True)
    told, bytes_ = [], []
    for row, last in ((64, 1), (72, 1), (65, 1), (128, 2)):
        laid = lay_apart(graph, (4 * 300 * row, 300 * row, row, last), last)
        made = BACKEND.foreseen(Request(simplify(ag.vjp(laid)[1]), H200, Options()))
        told.append([note for note in made.notes if re.match("(o|lse|dlse) is copied", note)])
        bytes_.append(made.temporary)
    o = "o is copied, 300 KiB, to rows at multiples of 16 bytes"
    statistics = [f"{name} is copied, 9.375 KiB, in C order" for name in ("lse", "dlse")]
    assert told == [[], [], [o], [o, *statistics]]
    assert [x - bytes_[0] for x in bytes_] == [0, 0, 307200, 307200 + 2 * 9600]


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("target", TARGETS)
def test_lse_is_the_sink_where_it_is_far_above_all_scores(target: ag.Target) -> None:
    """The package gives inf there."""
    q = spec(1, 2, 5, 8)
    graph = ag.attention(q, q, q, sinks=spec(2, dtype=torch.float32), stats=True)
    plan = ag.compile(graph, target=target, backends=("fa4",))
    scores = torch.full((1, 2, 5, 8), 30.0, dtype=BF16)
    _, lse = plan(scores, -scores, scores, torch.zeros(2))
    assert lse.tolist() == torch.zeros(1, 2, 5).tolist()


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("target", TARGETS)
def test_a_gradient_of_rows_that_see_nothing_is_never_seen(target: ag.Target) -> None:
    """The model multiplies it by 0, and NaN would stay NaN."""
    x = spec(1, 2, 20, 8)
    graph = ag.attention(x, x, x, mask=ag.Causal("top_left") & ~ag.Prefix(5))
    plan = ag.compile(graph, target=target, backends=("fa4",))
    given = [torch.randn(1, 2, 20, 8, dtype=BF16, requires_grad=True) for _ in range(3)]
    o = plan(*given)
    assert isinstance(o, torch.Tensor)
    do = torch.ones_like(o)
    do[:, :, :5] = torch.nan
    assert all(x.isfinite().all() for x in torch.autograd.grad(o, given, do))


@pytest.mark.parametrize(
    ("program", "seconds", "words"),
    [
        ("raise SystemExit('no compiler')", 60, "it ended with 1: no compiler"),
        ("import time; time.sleep(60)", 0.1, "it had not ended after 0.1 s"),
        ("", 60, "it ended without an answer"),
    ],
)
def test_a_compiler_that_dies_or_takes_too_long_is_a_reason(
    program: str, seconds: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa4_offline, "PROGRAM", program)
    monkeypatch.setattr(fa4_offline, "PATIENCE", seconds)
    with pytest.raises(RefusedError, match=f"is planned in a process of its own, and {words}"):
        fa4_offline.run_builder({}, H200, None)


# What generated code reads


def test_code_reads_no_place_past_the_last_query_or_key() -> None:
    """Kernels for sm_90 ask for places past M and N where tiles reach further."""
    graph = make(keep=spec(1, 4, 300, 300, dtype=torch.bool), bias=spec(2, 1, 300, 300))
    texts = Fa4Call.of(lying_of(graph), 90).code.texts
    assert "read_bool(data[1], h, inside(i, M), inside(j, N))" in texts["keep"]
    assert "read_float(data[0], b, inside(i, M), inside(j, N))" in texts["change"]


@given(st.data())
def test_code_reads_no_place_outside_of_a_tensor(data: st.DataObject) -> None:
    """Nor a place computed from one past M or N, as of a block or of a table of distances."""
    shape = drawn.Shape(2, 4, 4, 9, 9, 8, 8)
    options: dict[str, Any] = data.draw(drawn.mask_options(shape))
    options |= data.draw(drawn.score_options(shape, BF16)) | {"dropout": 0.0}
    graph = ag.attention(*[spec(2, 4, 9, 8)] * 3, **options)
    try:
        texts = Fa4Call.of(lying_of(simplify(graph)), 100).code.texts
    except Untraceable:  # two axes of stride 1, which is refused
        reject()
    for text in texts.values():
        for places in re.findall(r"= read_\w+\(data\[\d+\], (.*)\)$", text, re.MULTILINE):
            for place in re.split(r", (?![^(]*\))", places):
                assert re.fullmatch(r"b|h|\d+|inside\((i, M|j, N)\)|between\(.*\)", place), text


def test_a_block_past_the_last_is_read_as_the_last() -> None:
    graph = make(mask=ag.KeepBlocks(7, 64), keep_blocks=spec(1, 1, 43, 5, dtype=torch.bool))
    text = Fa4Call.of(lying_of(graph), 100).code.texts["keep"]
    assert re.search(r"read_bool\(data\[0\], between\(.*data\[0\].shape\[0\]\), between", text)


@given(st.data())
def test_a_tensor_that_code_reads_has_one_axis_of_stride_1(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    read = data.draw(drawn.specs(shape, BF16))
    try:
        kept, ends = read_axes_of(read)
    except Untraceable:
        strides = [s for n, s in zip(read.shape, read.strides, strict=True) if n > 1]
        assert strides.count(1) > 1
        return
    strides = [read.strides[n] for n in kept] + [1] * ends
    assert strides.count(1) == 1
    assert 0 not in strides


@given(st.integers(0, 3), st.integers(0, 40), st.integers(2, 4))
def test_places_are_undone_as_the_package_says_them(h: int, i: int, r: int) -> None:
    assert in_place(h * r + i % r, i // r, r) == (h, i)


def test_places_are_undone_only_where_the_package_says_others() -> None:
    forward = make(soft_cap=30.0)
    backward = simplify(ag.vjp(forward)[1])
    shared = [Fa4Call.of(lying_of(g), sm).shared for g in (forward, backward) for sm in (90, 100)]
    assert shared == [1, 1, 2, 1]


# Choice


def test_it_is_predicted_before_triton_where_it_takes_the_graph() -> None:
    libraries = WITH_TRITON.libraries
    for target in (H200, B200):
        told = ag.explain(
            make(8192, 8192, mask=ag.Causal() | ag.Prefix(4)),
            target=evolve(target, libraries=libraries),
        )
        assert "fa4 runs this on " in str(told)


# Reasons


def test_without_the_package_only_that_is_in_the_way() -> None:
    bare = evolve(H200, libraries=())
    (reason,) = BACKEND.reasons(Request(make(mask=JOINED), bare, Options()))
    assert "pip install 'attn-graph[fa4]'" in str(reason)


@pytest.mark.parametrize("name", ["a100", "h200", "b200", "rtx4090"])
@pytest.mark.parametrize("shape", [(0, 2, 8, 16), (1, 0, 8, 16), (1, 2, 0, 16)])
def test_graphs_without_an_element_are_refused_by_their_sizes(
    name: str, shape: tuple[int, ...]
) -> None:
    x = ag.TensorSpec(shape, torch.float16)
    target = evolve(ag.Target.of(name), libraries=((PACKAGE, "4.0.0b36"),))
    graph = ag.attention(x, x, x, mask=ag.Causal(), stats=True)
    for each in (graph, ag.vjp(graph)[1]):
        assert "sizes" in {
            x.key for x in BACKEND.reasons(Request(simplify(each), target, Options()))
        }


def test_other_versions_are_refused() -> None:
    for number in ("4.0.0b34", "4.0.0b35", "4.0.0b36", "4.0.0b37"):
        found = keys_of(make(), evolve(H200, libraries=((PACKAGE, number),)))
        assert found == ({f"version.{PACKAGE}"} if number[-2:] in ("34", "37") else set())


def test_gradients_are_in_order_only_if_that_is_asked_for() -> None:
    backward = simplify(ag.vjp(make())[1])
    assert keys_of(backward, H200, Options(batch_invariant=True)) == {"batch_invariant"}
    ordered = Options(batch_invariant=True, deterministic=True)
    assert not keys_of(backward, H200, ordered)
    call = Fa4Call.of(lying_of(ag.vjp(make(mask=JOINED))[1]), 90, deterministic=True)
    assert call.plain(True)["deterministic"]
    assert call.lists is None


@pytest.mark.parametrize("name", ["l40s", "a100"])
def test_older_gpus_run_the_forward_of_plain_graphs(name: str) -> None:
    target = evolve(ag.Target.of(name), libraries=H200.libraries)
    graph = make(mask=ag.Causal())
    assert not keys_of(graph, target)
    assert keys_of(simplify(ag.vjp(graph)[1]), target) == {"gradient"}
    assert keys_of(make(mask=JOINED, soft_cap=3.0), target) == {"mask", "modifiers"}


COMPILES = {  # D, E: whether 4.0.0b36 compiled a gradient, for sm_90 and for sm_100
    (64, 32): (False, False),
    (128, 32): (False, False),
    (64, 16): (False, False),
    (64, 48): (False, True),
    (32, 16): (False, True),
    (128, 96): (False, True),
    (96, 64): (True, True),
    (96, 32): (True, True),
    (32, 64): (True, True),
    (64, 128): (True, True),
    (128, 64): (True, True),
    (192, 128): (True, True),
}


@pytest.mark.parametrize(("D", "E"), COMPILES)
def test_gradients_that_the_package_can_not_compile_are_refused(D: int, E: int) -> None:
    q, k, v = spec(1, 2, 256, D), spec(1, 2, 256, D), spec(1, 2, 256, E)
    graph = ag.vjp(ag.attention(q, k, v))[1]
    for target, compiles in zip((H200, B200), COMPILES[D, E], strict=True):
        reasons = BACKEND.why_not(Request(simplify(graph), target, Options()))
        keys = {Reason.of(reason).key for reason in reasons}
        assert ("value_size" not in keys) is compiles


def test_a_tensor_that_nothing_reads_is_no_part_of_a_self_check() -> None:
    mask = ag.Causal("top_left") | ag.Keep()
    keep = ag.TensorSpec((1, 1, 2, 1), torch.bool)
    graph = simplify(ag.attention(spec(1, 1, 2, 8), *[spec(1, 1, 1, 8)] * 2, mask=mask, keep=keep))
    assert BACKEND.device_test(Request(graph, H200, Options())) is not None
