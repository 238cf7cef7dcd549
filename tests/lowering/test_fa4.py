"""FlashAttention 4's backend without the package: what it is told, and that this is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import attn_graph as ag
from attn_graph.errors import Reason
from attn_graph.ir.passes import simplify
from attn_graph.lowering.backend import Options
from attn_graph.lowering.fa4 import lists as fa4_lists
from attn_graph.lowering.fa4 import run as fa4_run
from attn_graph.lowering.fa4.backend import BACKEND, PACKAGE
from attn_graph.lowering.fa4.call import Fa4Call
from attn_graph.lowering.fa4.dialect import in_place, read_axes_of
from attn_graph.lowering.fa4.lists import FULL, MIXED, TileLists, classify, make_lists
from attn_graph.lowering.problem import Problem, sole
from attn_graph.lowering.triton.launches import Launch
from attn_graph.machine.target import VIRTUAL
from attn_graph.masks import LENGTHS
from attn_graph.masks.places import Place, Untraceable
from attn_graph.testing import agreement, backend_check
from attn_graph.testing import strategies as drawn
from attn_graph.testing.agreement import run_plan
from tests.lowering import test_absent as absent
from tests.lowering import test_paged
from tests.lowering.test_lowering import refused
from tests.lowering.test_packed import Case as Packed
from tests.lowering.test_packed import check_case, check_gradients, make_case
from tests.support.fa4_model import call_model
from tests.support.sequences import batches, draw_cotangents

BF16 = torch.bfloat16
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


def problem_of(graph: ag.Graph) -> Problem:
    problem = sole(graph)
    assert problem is not None
    return problem


def keys_of(graph: ag.Graph, target: ag.Target, options: Options | None = None) -> set[str]:
    """The keys of the reasons against a graph."""
    return {r.key for r in BACKEND.reasons(graph, target, options or Options())}


def apart(shape: tuple[int, ...], layout: str, gap: int) -> ag.TensorSpec:
    """A tensor with unused elements behind each row."""
    wide = ag.TensorSpec((*shape[:-1], shape[-1] + gap), BF16, layout=layout)
    return ag.TensorSpec(shape, BF16, wide.strides)


@st.composite
def near(draw: st.DrawFn) -> ag.Graph:
    """Graphs that the package takes, or nearly."""
    G = draw(st.integers(1, 2))
    D = draw(st.sampled_from((8, 16)))
    M, N = (draw(st.one_of(st.integers(1, 40), st.integers(129, 300))) for _ in "MN")
    size = drawn.Shape(draw(st.integers(1, 2)), G * draw(st.integers(1, 2)), G, M, N, D, D)
    layout = draw(st.sampled_from(("bhsd", "bshd", "sbhd")))
    q, k, v = (
        apart(x, layout, draw(st.sampled_from((0, 0, 3, 8)))) for x in (size.q, size.k, size.v)
    )
    options = draw(drawn.mask_options(size)) | draw(drawn.score_options(size, BF16))
    options |= {"scale": None, "dropout": 0.0}
    return ag.attention(q, k, v, **options, stats=draw(st.booleans()))


@pytest.fixture(params=[H200, B200], ids=["sm_90", "sm_100"])
def modelled(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ag.Target]:
    """A target on which a model of the package runs, with lists wherever there may be some."""
    monkeypatch.setattr(fa4_run, "call_package", call_model)
    monkeypatch.setattr(fa4_run, "find_misplaced", lambda _: [])  # as drawn they begin anywhere
    monkeypatch.setattr(fa4_lists, "WORTH", 0.0)
    VIRTUAL.add(request.param)
    yield request.param
    VIRTUAL.discard(request.param)


def test_the_package_is_told_what_the_graph_says(modelled: ag.Target) -> None:
    """Both passes, by a model of the package that reads masks and modifiers off their text."""
    backend_check.check_backend(BACKEND, modelled, graphs=near())


@st.composite
def ended(draw: st.DrawFn) -> absent.Case:
    """Graphs that the package takes, with lengths from 0 to all."""
    M, N = (draw(st.one_of(st.integers(1, 20), st.integers(129, 140))) for _ in "MN")
    G, B = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    size = drawn.Shape(B, G * draw(st.integers(1, 2)), G, M, N, 8, 16)
    dtype = draw(st.sampled_from((BF16, torch.float16)))
    options = draw(drawn.mask_options(size)) | draw(drawn.score_options(size, dtype))
    masks = st.sampled_from((None, ag.Causal("bottom_right"), ag.Window(9, 4, "bottom_right")))
    options |= {"scale": None, "dropout": 0.0, "stats": draw(st.booleans())}
    if not getattr(options.get("mask"), "needs", ()):
        options |= {"mask": draw(masks)} if draw(st.booleans()) else {}
    names = draw(st.sets(st.sampled_from(("q_lengths", "kv_lengths")), min_size=1))
    most = {"q_lengths": M, "kv_lengths": N}
    ends = {n: tuple(draw(st.integers(0, most[n])) for _ in range(B)) for n in sorted(names)}
    return absent.make_case(size, dtype, options, ends, draw(drawn.seeds))


@given(case=ended())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_absent_rows_are_never_seen(modelled: ag.Target, case: absent.Case) -> None:
    """The model multiplies them by 0, as the package does, and NaN stays NaN."""
    try:
        plan = ag.compile(case.graph, target=modelled, backends=("fa4", "math"))
    except ag.NoBackendError as error:
        refused(error)
    assume(plan.backend == "fa4")
    zeros, poisoned = (absent.every_result(case, plan, spoilt) for spoilt in (False, True))
    assert absent.are_same(poisoned, zeros)
    agreement.check_outputs(plan, case.graph, case.tensors(False))


@st.composite
def packed(draw: st.DrawFn) -> Packed:
    """Sequences with gaps or not, some of no rows or no keys."""
    batch, G = draw(batches()), draw(st.integers(1, 2))
    D, E = draw(st.sampled_from([(8, 8), (16, 16), (16, 8)]))
    shape = drawn.Shape(len(batch.rows), G * draw(st.integers(1, 2)), G, *batch.most, D, E)
    dtype = draw(st.sampled_from((BF16, torch.float16)))
    options = draw(drawn.mask_options(shape)) | draw(drawn.score_options(shape, dtype))
    options = {n: x for n, x in options.items() if n not in LENGTHS}
    options |= {"scale": None, "dropout": 0.0, "stats": draw(st.booleans())}
    options["align"] = options["align"] or draw(st.sampled_from(["top_left", "bottom_right"]))
    if not getattr(options.get("mask"), "needs", ()):
        own = (None, ag.Causal("bottom_right"), ag.Window(3, 1, "bottom_right"))
        options |= {"mask": draw(st.sampled_from(own))} if draw(st.booleans()) else {}
    dims = {"q": (0, shape.H, D), "k": (1, G, D), "v": (1, G, E)}
    return make_case(batch, shape, dtype, dims, options, draw(drawn.seeds))


@given(case=packed(), seed=drawn.seeds)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_packed_sequences_are_padded_ones(modelled: ag.Target, case: Packed, seed: int) -> None:
    """NaN lies in rows of no sequence, which the model multiplies by 0."""
    try:
        plan = ag.compile(case.packed, target=modelled, backends=("fa4", "math"))
    except ag.NoBackendError as error:
        refused(error)
    assume(plan.backend == "fa4")
    check_case(plan, case)
    check_gradients(plan, case, seed)
    cotangents = draw_cotangents(plan.graph, case.batch, seed)
    absent.check_spoilt(plan, case.packed_tensors, cotangents)


@st.composite
def paged(draw: st.DrawFn) -> test_paged.Case:
    """Keys in pages, NaN in rows that are nobody's, garbage in entries of the table past a length;
    queries packed or not."""
    batch, P, G = draw(batches()), draw(st.sampled_from((1, 3, 16))), draw(st.integers(1, 2))
    is_packed, ended = draw(st.booleans()), draw(st.booleans())
    N = P * (-(-batch.most[1] // P) + draw(st.integers(0, 1)))
    M = batch.most[0] if is_packed else draw(st.sampled_from((1, 5)))
    shape = drawn.Shape(len(batch.rows), G * draw(st.integers(1, 2)), G, M, N, 8, 16)
    options = draw(drawn.mask_options(shape)) | draw(drawn.score_options(shape, BF16))
    options |= {"scale": None, "dropout": 0.0, "stats": draw(st.booleans())}
    options["align"] = options["align"] or draw(st.sampled_from(["top_left", "bottom_right"]))
    if not getattr(options.get("mask"), "needs", ()):
        own = (None, ag.Causal("bottom_right"), ag.Window(3, 1, "bottom_right"))
        options |= {"mask": draw(st.sampled_from(own))} if draw(st.booleans()) else {}
    ended = ended or "kv_lengths" in options
    batch = evolve(batch, rows=batch.rows if is_packed else (M,) * shape.B)
    batch = evolve(batch, keys=batch.keys if ended else (N,) * shape.B)
    layout = test_paged.Layout(P, draw(st.booleans()), ended, is_packed)
    return test_paged.make_case(batch, layout, shape, BF16, options, draw(drawn.seeds))


@given(case=paged())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pages_are_keys_in_one_piece(modelled: ag.Target, case: test_paged.Case) -> None:
    try:
        plan = ag.compile(case.graph, target=modelled, backends=("fa4", "math"))
    except ag.NoBackendError as error:
        refused(error)
    assume(plan.backend == "fa4")
    test_paged.check_case(case, plan)
    zeros, poisoned = ([absent.fill(x, spoilt) for x in case.inputs] for spoilt in (False, True))
    assert absent.are_same(run_plan(plan, poisoned), run_plan(plan, zeros))


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


def test_rows_off_16_bytes_are_copied_and_told() -> None:
    """A row of 67 elements; of 72 it is read where it lies."""
    copies = []
    for gap in (3, 8):
        x = apart((2, 4, 300, 64), "bhsd", gap)
        forward = simplify(ag.attention(x, x, x))
        for graph in (forward, simplify(ag.vjp(forward)[1])):
            made = BACKEND.foreseen(graph, H200, Options())
            told = [x for x in made.notes if "copied, 300 KiB, to rows at multiples of 16" in x]
            copies.append(len(told))
            assert made.temporary >= 2 * 4 * 300 * 64 * 2 * len(told)
    assert copies == [3, 3, 0, 0]


def test_lse_is_the_sink_where_it_is_far_above_all_scores(modelled: ag.Target) -> None:
    """The package gives inf there."""
    q = spec(1, 2, 5, 8)
    graph = ag.attention(q, q, q, sinks=spec(2, dtype=torch.float32), stats=True)
    plan = ag.compile(graph, target=modelled, backends=("fa4",))
    scores = torch.full((1, 2, 5, 8), 30.0, dtype=BF16)
    _, lse = plan(scores, -scores, scores, torch.zeros(2))
    assert lse.tolist() == torch.zeros(1, 2, 5).tolist()


def test_a_gradient_of_rows_that_see_nothing_is_never_seen(modelled: ag.Target) -> None:
    """The model multiplies it by 0, and NaN would stay NaN."""
    x = spec(1, 2, 20, 8)
    graph = ag.attention(x, x, x, mask=ag.Causal("top_left") & ~ag.Prefix(5))
    plan = ag.compile(graph, target=modelled, backends=("fa4",))
    given = [torch.randn(1, 2, 20, 8, dtype=BF16, requires_grad=True) for _ in range(3)]
    o = plan(*given)
    assert isinstance(o, torch.Tensor)
    do = torch.ones_like(o)
    do[:, :, :5] = torch.nan
    assert all(x.isfinite().all() for x in torch.autograd.grad(o, given, do))


# Masks


@given(st.data(), st.booleans(), st.sampled_from(((128, 128), (256, 128), (128, 80))))
def test_lists_are_the_mask_by_tiles(
    data: st.DataObject, backward: bool, tile: tuple[int, int]
) -> None:
    M, N = (data.draw(st.integers(1, 700)) for _ in "MN")
    mask = data.draw(drawn.masks(drawn.Shape(1, 1, 1, M, N, 8, 8), "top_left"))
    if not mask.needs:
        check_lists(mask, M, N, tile, backward)


@pytest.mark.parametrize("backward", [False, True])
def test_lists_of_full_edges_and_of_empty_tiles_are_the_mask_by_tiles(backward: bool) -> None:
    mask = ag.Causal("top_left") | ag.Prefix(500) & ~ag.Prefix(130)
    check_lists(mask, 300, 500, (128, 128), backward)


def check_lists(mask: ag.Mask, M: int, N: int, tile: tuple[int, int], backward: bool) -> None:
    """Compare lists with the mask at every place."""
    q, k = spec(1, 1, M, 8), spec(1, 1, N, 8)
    graph = simplify(ag.attention(q, k, k, mask=mask, align="top_left"))
    if problem_of(graph).node.mask is None:
        return
    problem = problem_of(graph)
    kinds = classify(problem, tile, exact=True)
    i, j = torch.arange(M)[:, None], torch.arange(N)
    resolved = problem.node.mask
    assert resolved is not None
    kept = torch.as_tensor(resolved.keep(Place(0, 0, i, j, 1, M, N))).expand(M, N)
    for x, line in enumerate(kept.split(tile[0])):
        for y, each in enumerate(line.split(tile[1], 1)):
            whole = each.shape == tile and bool(each.all())
            assert kinds[x, y] == (FULL if whole else MIXED if each.any() else 0)
    if backward:
        graph = ag.vjp(graph)[1]
        problem = problem_of(simplify(graph))
    found = make_lists(problem, tile, exact=True)
    if found is None:
        return
    for kind, (count, numbers) in zip(
        (MIXED, FULL), (found.tensors[:2], found.tensors[2:]), strict=True
    ):
        lines = kinds.T if backward else kinds
        assert numbers.stride(-1) == 1
        for line, n, each in zip(lines, count[0, 0], numbers[0, 0], strict=True):
            assert each[: int(n)].tolist() == (line == kind).nonzero().flatten().tolist()


def test_lists_of_masks_that_read_tensors_hold_for_whatever_these_are() -> None:
    graph = make(segments=(spec(2, 300, dtype=torch.int64),) * 2, mask=ag.Causal())
    lists = Fa4Call.of(problem_of(graph), 90, admits=lambda _: False).lists
    assert isinstance(lists, TileLists)
    assert lists.empty == 3
    assert not lists.tensors[2].any()  # none is sure to be full


def documents(length: int) -> ag.Graph:
    """Causal attention within segments."""
    numbers = spec(2, length, dtype=torch.int32)
    return make(length, length, segments=(numbers, numbers), mask=ag.Causal())


def test_tiles_that_data_decide_are_listed_by_each_call_where_that_may_repay() -> None:
    """Without Triton, or where kernels without lists take less than the launches, planning lists
    those that are empty whatever the data."""
    for length, target, shown in (
        (4096, WITH_TRITON, "each call lists tiles of 128 x 128 by the mask's tensors"),
        (300, WITH_TRITON, "33 % are empty"),
        (4096, H200, "48 % are empty"),
    ):
        for graph in (documents(length), simplify(ag.vjp(documents(length))[1])):
            made = BACKEND.foreseen(graph, target, Options())
            assert shown in "\n".join(made.notes)
            assert bool(made.workspace) == ("each call" in shown)


def test_lists_that_do_not_fit_the_workspace_are_not_made() -> None:
    graph = documents(4096)
    need = BACKEND.foreseen(graph, WITH_TRITON, Options()).workspace
    assert need is not None
    for most, room in ((need, need), (need - 1, 0)):
        assert BACKEND.foreseen(graph, WITH_TRITON, Options(max_workspace=most)).workspace == room
        assert not keys_of(graph, WITH_TRITON, Options(max_workspace=most))


def test_self_checks_of_listed_tiles_list_tiles_though_their_graphs_are_small() -> None:
    test = BACKEND.device_test(documents(4096), WITH_TRITON, Options())
    assert test is not None
    for graph in test.graphs:
        made = BACKEND.foreseen(graph, WITH_TRITON, Options(variant=test.way))
        assert any("each call lists" in note for note in made.notes)
        again = BACKEND.device_test(graph, WITH_TRITON, Options(variant=test.way))
        assert again is not None
        assert again.variant == test.variant


def test_a_call_that_lists_tiles_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no element of a tensor, and gives the package lists of the workspace."""
    launched, given = [], []
    monkeypatch.setattr(Launch, "__call__", lambda self, tensors: launched.append(self.kernel))
    monkeypatch.setattr(fa4_run, "call_package", lambda *x: given.append(x[3]))
    monkeypatch.setattr("attn_graph.machine.target.VIRTUAL", {WITH_TRITON})
    graph = documents(1024)
    workspace = ag.Workspace()
    made = BACKEND.lower(graph, WITH_TRITON, Options(variant="lists", workspace=workspace))
    tensors = [torch.zeros(x.spec.shape, dtype=x.spec.dtype) for x in graph.inputs]
    made.infer(*tensors)
    assert launched == ["extremes", "extremes", "list_tiles"]
    assert [x.shape for x in given[0]] == [(2, 1, 8), (2, 1, 8, 8)] * 2
    assert workspace.bytes == made.workspace > 0
    with NoReads():  # type: ignore[no-untyped-call]
        made.infer(*tensors)


class NoReads(TorchDispatchMode):
    """Refuses to read an element on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mask", [None, ag.Causal("bottom_right"), ag.Window(9, 2, "bottom_right")])
def test_bands_by_the_bottom_right_corner_are_the_packages_own(mask: ag.Mask | None) -> None:
    call = Fa4Call.of(problem_of(make(200, 300, mask=mask)), 90)
    assert call.native is not None
    assert call.lists is None
    assert "keep" not in call.code.texts


@pytest.mark.parametrize("names", [("kv_lengths",), ("q_lengths", "kv_lengths")])
def test_lengths_are_the_packages_own_beside_bands_by_their_corner(names: tuple[str, ...]) -> None:
    ends: dict[str, Any] = {name: spec(2, dtype=torch.int32) for name in names}
    for mask in (None, ag.Causal("bottom_right"), ag.Window(9, 2, "bottom_right")):
        call = Fa4Call.of(problem_of(make(200, 300, mask=mask, **ends)), 90)
        assert call.ends == names
        assert "keep" not in call.code.texts
    others: tuple[ag.Mask, ...] = ag.Causal("top_left"), ag.Causal("bottom_right") | ag.Prefix(4)
    for other in others:
        call = Fa4Call.of(problem_of(make(200, 300, mask=other, **ends)), 90)
        assert not call.ends
        assert "keep" in call.code.texts


def test_a_causal_mask_by_the_top_left_corner_is_a_function() -> None:
    call = Fa4Call.of(problem_of(make(200, 300, mask=ag.Causal("top_left"))), 90)
    assert call.native is None
    assert "keep" in call.code.texts


def test_a_function_never_stands_beside_a_mask_of_the_packages_own() -> None:
    """The forward drops it, the backward applies both."""
    for mask in (JOINED, ag.Causal(), ag.Window(3), ~ag.Causal(), ag.Prefix(4)):
        plain = Fa4Call.of(problem_of(make(mask=mask)), 90).plain(True)
        own = {name for name, x in plain["options"].items() if x is not None}
        assert ("keep" in plain["texts"]) != bool(own - {"softmax_scale"})


# What generated code reads


def test_code_reads_no_place_past_the_last_query_or_key() -> None:
    """Kernels for sm_90 ask for places past M and N where tiles reach further."""
    graph = make(keep=spec(1, 4, 300, 300, dtype=torch.bool), bias=spec(2, 1, 300, 300))
    texts = Fa4Call.of(problem_of(graph), 90).code.texts
    assert "read_bool(data[1], h, inside(i, M), inside(j, N))" in texts["keep"]
    assert "read_float(data[0], b, inside(i, M), inside(j, N))" in texts["change"]


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
    shared = [Fa4Call.of(problem_of(g), sm).shared for g in (forward, backward) for sm in (90, 100)]
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
    (reason,) = BACKEND.reasons(make(mask=JOINED), bare, Options())
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
        assert "sizes" in {x.key for x in BACKEND.reasons(simplify(each), target, Options())}


def test_other_versions_are_refused() -> None:
    for number in ("4.0.0b34", "4.0.0b35", "4.0.0b36", "4.0.0b37"):
        found = keys_of(make(), evolve(H200, libraries=((PACKAGE, number),)))
        assert found == ({f"version.{PACKAGE}"} if number[-2:] in ("34", "37") else set())


def test_gradients_are_in_order_only_if_that_is_asked_for() -> None:
    backward = simplify(ag.vjp(make())[1])
    assert keys_of(backward, H200, Options(batch_invariant=True)) == {"batch_invariant"}
    ordered = Options(batch_invariant=True, deterministic=True)
    assert not keys_of(backward, H200, ordered)
    call = Fa4Call.of(problem_of(simplify(ag.vjp(make(mask=JOINED))[1])), 90, deterministic=True)
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
        reasons = BACKEND.why_not(simplify(graph), target, Options())
        keys = {Reason.of(reason).key for reason in reasons}
        assert ("value_size" not in keys) is compiles


def test_a_tensor_that_nothing_reads_is_no_part_of_a_self_check() -> None:
    mask = ag.Causal("top_left") | ag.Keep()
    keep = ag.TensorSpec((1, 1, 2, 1), torch.bool)
    graph = simplify(ag.attention(spec(1, 1, 2, 8), *[spec(1, 1, 1, 8)] * 2, mask=mask, keep=keep))
    assert BACKEND.device_test(graph, H200, Options()) is not None
