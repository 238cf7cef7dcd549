"""On a real GPU: sequences, packed, in pages and with pages in common, and their gradients.

Every body runs once without one too: by `math` in the same sizes, and by Triton's interpreter in
smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.strategies import Shape, seeds
from benchmarks.gpu.device import capture_step
from tests.lowering.test_sequences import gradient_is_taken
from tests.support import ragged
from tests.support.equipped import equip
from tests.support.freed_pages import free_hidden
from tests.support.kernels import CPU
from tests.support.sequences import I32, SPEC, Batch, draw_cotangents, gradients_on

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
KINDS = st.sampled_from([F16, BF16, F32])
HERE = ("math", "triton") if CPU.interprets else ("math",)  # who runs on a CPU
OURS = ("math", "triton")  # who reads everything
BOTTOM = ag.Causal("bottom_right")
WINDOW = ag.Window(9, 0, "bottom_right")
Options = dict[str, Any]  # Any: of `attention`
Tensors = tuple[torch.Tensor, ...]


@frozen
class Sizes:
    """Rows and keys of sequences, how many rows each leaves unused, heads of q and k, and D."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    unused: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    size: int

    def batch(self, gaps: bool) -> Batch:
        """The sequences, side by side or with rows of nobody between them."""
        return Batch(self.rows, self.keys, self.unused, gaps)


WHOLE = Sizes(  # several tiles of every kernel
    (150, 1, 0, 70), (131, 40, 9, 260), ((3, 70), (0, 2), (0, 0), (1, 5)), (4, 2), 64
)
FEW = Sizes((34, 1), (40, 9), ((3, 35), (0, 2)), (2, 1), 16)


def sizes_on(device: str, backend: str) -> Sizes:
    """The interpreter takes seconds for a few tiles."""
    return FEW if (device, backend) == ("cpu", "triton") else WHOLE


def plan_on(device: str, backend: str, graph: ag.Graph) -> ag.Plan:
    """The plan of one backend, which may not be installed where there is a GPU."""
    try:
        return ag.compile(graph, target=ag.Target.here(device), backends=(backend,))
    except ag.NoBackendError as error:
        if device == "cpu":
            raise
        pytest.skip(str(error))


def jobs(cases: dict[str, tuple[str, ...]]) -> list[Any]:  # Any: parameters of pytest
    """Each case by each of its backends on a GPU. Here one by each: other tests draw such cases."""
    pairs = [(case, backend) for case, backends in cases.items() for backend in backends]
    first = {backend: case for case, backend in reversed(pairs) if backend in HERE}
    here = [pytest.param(case, backend, "cpu") for backend, case in first.items()]
    return [*here, *(pytest.param(*pair, "cuda", marks=pytest.mark.gpu) for pair in pairs)]


# Packed tensors

PACKED: dict[str, tuple[tuple[str, ...], torch.dtype, bool, Options]] = {
    "full": ((*OURS, "cudnn", "torch_flash"), F16, False, {}),
    "causal": ((*OURS, "cudnn", "torch_flash"), BF16, False, {"mask": BOTTOM}),
    "window": (
        (*OURS, "cudnn", "torch_flash"),
        F16,
        False,
        {"mask": ag.Window(20, 3, "bottom_right")},
    ),
    "gaps": ((*OURS, "cudnn"), BF16, True, {"mask": BOTTOM}),
    "sinks, gaps": (OURS, F16, True, {"mask": BOTTOM, "sinks": True}),
    "soft cap, alibi": (
        OURS,
        BF16,
        True,
        {"mask": BOTTOM, "soft_cap": 2.0, "alibi": True, "align": "bottom_right"},
    ),
    "listed": (OURS, F16, False, {"mask": ag.Causal("top_left") | ag.Prefix(2)}),
    "dropout, float32": (OURS, F32, False, {"mask": BOTTOM, "dropout": 0.3}),
}


def packed_case(name: str, sizes: Sizes, *, stats: bool) -> ragged.Case:
    """Attention of packed queries, keys and values, NaN in rows of no sequence. Where sequences
    have gaps, starts and lengths have strides too."""
    _, dtype, gaps, options = PACKED[name]
    (H, G), D, batch = sizes.heads, sizes.size, sizes.batch(gaps)
    sinks = {"sinks": SPEC((H,), F32)} if "sinks" in options else {}
    shape = Shape(len(batch.rows), H, G, *batch.most, D, D)
    dims = {"q": (0, H, D), "k": (1, G, D), "v": (1, G, D)}
    options = {**options, **sinks, "stats": stats}
    return ragged.make_packed(batch, shape, dtype, dims, options, 5, anyhow=gaps)


@pytest.mark.parametrize(
    ("name", "backend", "device"), jobs({n: backends for n, (backends, *_) in PACKED.items()})
)
def test_packed_sequences_and_their_gradients(name: str, backend: str, device: str) -> None:
    """Through o, and where its backend has one, through lse."""
    case = packed_case(name, sizes_on(device, backend), stats=backend != "cudnn")
    plan = plan_on(device, backend, case.graph)
    ragged.check_case(case, plan, device)
    ragged.check_gradients(case, plan, 7, device)


@pytest.mark.gpu
@given(case=KINDS.flatmap(lambda kind: ragged.packed_cases(dtype=kind)), seed=seeds)
@settings(max_examples=10)
def test_any_packed_sequences_on_a_gpu(case: ragged.Case, seed: int) -> None:
    """Of any options: tests/lowering/test_sequences.py has them interpreted."""
    plan = plan_on("cuda", "triton", case.graph)
    ragged.check_case(case, plan, "cuda")
    if gradient_is_taken(case.graph):
        ragged.check_gradients(case, plan, seed, "cuda")


# Keys and values in pages

PAGED: dict[str, tuple[int, bool, torch.dtype, Options]] = {  # rows of a page, whether q is packed
    "chunks of prompts": (64, False, BF16, {"mask": BOTTOM}),
    "packed chunks": (16, True, F16, {"mask": BOTTOM}),
    "a row a page": (1, True, BF16, {"mask": ag.Window(20, 3, "bottom_right")}),
    "pages of 24": (24, False, F16, {"mask": BOTTOM, "soft_cap": 2.0}),
    "listed, large pages": (96, True, F32, {"mask": ag.Causal("top_left") | ag.Prefix(2)}),
    "dropout": (32, False, F32, {"dropout": 0.3}),
}


def paged_case(name: str, sizes: Sizes, finite: bool = False) -> ragged.Case:
    """Attention over keys in pages of any order, NaN in rows that are nobody's keys, unless they
    are to be declared finite."""
    page, packed, dtype, options = PAGED[name]
    batch = sizes.batch(gaps=False)
    batch = batch if packed else Batch((33,) * len(batch.keys), batch.keys, batch.unused, False)
    M, N = batch.most
    layout = ragged.Layout(page, heads_first=page == 64, ended=True, packed=packed)
    lengths = M, -(-N // page) * page
    shape = Shape(len(batch.rows), *sizes.heads, *lengths, sizes.size, sizes.size)
    given = {"mask": None, "stats": True, **options}
    case = ragged.make_paged(batch, layout, shape, dtype, given, 5, finite=finite)
    if not finite:
        return case
    return evolve(case, tensors=case.tensors | {n: case.tensors[n].nan_to_num(3.0) for n in "kv"})


@pytest.mark.parametrize(("name", "backend", "device"), jobs(dict.fromkeys(PAGED, OURS)))
def test_keys_in_pages_and_their_gradients(name: str, backend: str, device: str) -> None:
    case = paged_case(name, sizes_on(device, backend))
    plan = plan_on(device, backend, case.graph)
    ragged.check_case(case, plan, device)
    ragged.check_gradients(case, plan, 7, device)


@pytest.mark.gpu
@given(case=KINDS.flatmap(lambda kind: ragged.paged_cases(dtype=kind)), seed=seeds)
@settings(max_examples=10)
def test_any_pages_on_a_gpu(case: ragged.Case, seed: int) -> None:
    """Of any options: tests/lowering/test_page_sums.py has them interpreted."""
    plan = plan_on("cuda", "triton", case.graph)
    ragged.check_case(case, plan, "cuda")
    if gradient_is_taken(case.graph):
        ragged.check_gradients(case, plan, seed, "cuda")


FREED: dict[str, tuple[int, int, torch.dtype, Options]] = {  # queries of an entry, rows of a page
    "one query": (1, 16, F16, {"mask": WINDOW}),
    "a chunk, pages within tiles": (33, 8, BF16, {"mask": WINDOW}),
    "a chunk, pages beyond tiles": (6, 96, F16, {"mask": WINDOW & ag.Keep()}),
    "from the left": (20, 16, F32, {"mask": ag.Causal("top_left")}),
    "a prefix": (3, 8, BF16, {"mask": ag.Prefix(11), "soft_cap": 2.0}),
    "behind lengths alone": (20, 16, F16, {"mask": None}),
}


def freed_case(name: str, sizes: Sizes) -> ragged.Case:
    """Attention over keys in pages, from which `free_hidden` frees some."""
    rows, page, dtype, options = FREED[name]
    batch = Batch((rows,) * len(sizes.keys), sizes.keys, ((0, 0),) * len(sizes.keys), False)
    layout = ragged.Layout(page, heads_first=rows == 1, ended=True, packed=rows > 20)
    N = -(-batch.most[1] // page) * page
    shape = Shape(len(batch.rows), *sizes.heads, rows, N, sizes.size, sizes.size)
    keep = {"keep": SPEC((1, 1, rows, N), torch.bool)} if "Keep" in str(options["mask"]) else {}
    return ragged.make_paged(batch, layout, shape, dtype, {"stats": True, **options, **keep}, 5)


def check_freed(case: ragged.Case, plan: ag.Plan, device: str) -> None:
    """With NaN in rows of hidden keys, and numbers of no page in the table, both passes give what
    keys in one piece do."""
    freed = free_hidden(case.graph, case.tensors)
    given = [freed[i.name] for i in case.graph.inputs]
    ragged.check_results(case, [x.cpu() for x in run_plan(plan, [x.to(device) for x in given])])
    cotangents = case.cotangents(7)
    grads = gradients_on(device, plan, given, cotangents)
    ragged.check_pulled(case, grads, cotangents)


@pytest.mark.parametrize(("name", "backend", "device"), jobs(dict.fromkeys(FREED, OURS)))
def test_freed_pages_are_not_read(name: str, backend: str, device: str) -> None:
    case = freed_case(name, sizes_on(device, backend))
    check_freed(case, plan_on(device, backend, case.graph), device)


def repeatable(device: str, step: Callable[[], Tensors]) -> Callable[[], Tensors]:
    """A step on a GPU as a captured graph that is replayed; where there is none, the step."""
    if device == "cpu":
        return step
    graph, results = capture_step(step)

    def replay() -> Tensors:
        graph.replay()
        return tuple(x.clone() for x in results)

    return replay


@pytest.mark.parametrize(("name", "backend", "device"), jobs({"packed chunks": ("triton",)}))
def test_tables_that_change_between_replays_are_read_anew(
    name: str, backend: str, device: str
) -> None:
    """Forward and backward, whose results are the same bits in every run."""
    case = paged_case(name, sizes_on(device, backend))
    plan = plan_on(device, backend, case.graph)
    tensors = {n: x.to(device) for n, x in case.tensors.items()}
    leaves = [tensors[n].requires_grad_() for n in "qkv"]
    cotangents = [x.to(device) for x in case.cotangents(7) if x is not None]

    def step() -> Tensors:
        results = run_plan(plan, [tensors[i.name] for i in plan.graph.inputs])
        return (*results, *torch.autograd.grad(results, leaves, cotangents))

    repeat = repeatable(device, step)
    before = [*repeat()]
    assert all(torch.equal(x, y) for x, y in zip(before, repeat(), strict=True))
    tensors["q_starts"][1] -= 13
    tensors["kv_lengths"][0] -= 7
    tensors["pages"][0, :2] = tensors["pages"][0, :2].flip(0)
    for x, y, old in zip(repeat(), step(), before, strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, old)


# Pages in common

PAGE = 16  # rows


@frozen
class Crowd:
    """Sequences that begin with the same `common` pages; and all their queries as those of one
    sequence against every row of the pool, each with the rows that it sees, [T,rows]."""

    graph: ag.Graph
    whole: ag.Graph
    tensors: dict[str, torch.Tensor]
    seen: torch.Tensor
    common: int

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Those of the graph of sequences."""
        return [self.tensors[i.name] for i in self.graph.inputs]

    @property
    def whole_inputs(self) -> list[torch.Tensor]:
        """Those of the other: q [1,H,T,D], k and v [1,G,rows,D], keep [1,1,T,rows]."""
        pools = (self.tensors[n].nan_to_num().flatten(0, 1) for n in "kv")
        return [*(as_one(x) for x in (self.tensors["q"], *pools)), self.seen[None, None]]

    def check_outputs(self, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Assert that results are those of one sequence."""
        dues = expect_outputs(self.whole, self.whole_inputs)
        for x, due in zip((as_one(o), lse[None]), dues, strict=True):
            due.check(x)

    def check_gradients(
        self, grads: dict[str, torch.Tensor], do: torch.Tensor, dlse: torch.Tensor
    ) -> None:
        """Assert that gradients are those of one sequence, whose keys are each there once."""
        dues = expect_gradients(self.whole, self.whole_inputs, [as_one(do), dlse[None]])
        for name in "qkv":
            x = grads[name].cpu()
            dues[name].check(as_one(x if name == "q" else x.flatten(0, 1)))


def as_one(x: torch.Tensor) -> torch.Tensor:
    """Rows [T,H,D] as those of one sequence, [1,H,T,D]."""
    return x.transpose(0, 1)[None]


def crowd_of(
    count: int, heads: tuple[int, int], size: int, dtype: torch.dtype, common: int, own: int
) -> Crowd:
    """`count` sequences of 1 to 5 queries and of up to `own` pages after those in common; NaN in
    rows that are nobody's keys, and garbage in tables where nobody reads."""
    random, P = torch.Generator().manual_seed(3), PAGE
    rows = [1 + n % 5 for n in range(count)]
    lengths = [common * P + 5 + 7 * n % (own * P - 4) for n in range(count)]
    order = torch.randperm(common + count * own + 2, generator=random).int()
    tails = order[common : common + count * own].view(count, own)
    table = torch.cat((order[:common].expand(count, common), tails), 1)
    starts = torch.tensor([*accumulate(rows, initial=0)], dtype=I32)
    T, N = sum(rows), len(order) * P
    seen = torch.zeros(T, N, dtype=torch.bool)
    for pages, first, n, M in zip(table, starts.tolist(), lengths, rows, strict=False):
        places = (pages[:, None].long() * P + torch.arange(P)).flatten()
        for i in range(M):
            seen[first + i, places[: n - M + i + 1]] = True
    shapes = (T, heads[0], size), *[(len(order), P, heads[1], size)] * 2
    q, k, v = (torch.randn(x, generator=random).to(dtype) for x in shapes)
    for x in (k, v):
        x.flatten(0, 1)[~seen.any(0)] = torch.nan
    ends = torch.tensor(lengths, dtype=I32)
    used = torch.arange(common + own) * P < ends[:, None]
    where = {"q_starts": starts, "kv_lengths": ends}
    where["pages"] = table.where(used, ragged.GARBAGE[1])
    graph = crowd_graph((q, k, v), where, BOTTOM)
    alone = [SPEC((1, *x), dtype) for x in ((heads[0], T, size), *[(heads[1], N, size)] * 2)]
    whole = ag.attention(*alone, keep=SPEC((1, 1, T, N), torch.bool), stats=True)
    return Crowd(graph, whole, {"q": q, "k": k, "v": v, **where}, seen, common)


def crowd_graph(
    tensors: Sequence[torch.Tensor], where: Mapping[str, torch.Tensor], mask: ag.Mask | None
) -> ag.Graph:
    """Packed queries against pages, with lse."""
    own: Options = {name: SPEC.like(x) for name, x in where.items()}
    return ag.attention(
        *map(SPEC.like, tensors), **own, max_lengths=(len(tensors[0]), None), mask=mask, stats=True
    )


CROWDS = {"half": F16, "bfloat16": BF16, "float32": F32}


def crowd_on(device: str, backend: str, name: str) -> Crowd:
    """Eight heads share each one of keys, or four."""
    if sizes_on(device, backend) is FEW:
        return crowd_of(3, (4, 1), 16, CROWDS[name], common=2, own=1)
    return crowd_of(24, (16, 2), 64, CROWDS[name], common=20, own=3)


@pytest.mark.parametrize(
    ("name", "backend", "device"),
    jobs({"half": (*OURS, "cudnn"), "bfloat16": (*OURS, "cudnn"), "float32": OURS}),
)
def test_many_sequences_begin_with_the_same_pages(name: str, backend: str, device: str) -> None:
    crowd = crowd_on(device, backend, name)
    if backend == "cudnn":  # it reads all rows of a page that has a key
        crowd.tensors.update({n: crowd.tensors[n].nan_to_num(3.0) for n in "kv"})
    plan = plan_on(device, backend, crowd.graph)
    o, lse = run_plan(plan, [x.to(device) for x in crowd.inputs])
    crowd.check_outputs(o.cpu(), lse.cpu())


@pytest.mark.parametrize(("name", "backend", "device"), jobs(dict.fromkeys(CROWDS, OURS)))
def test_pages_in_common_get_the_sum_of_all_gradients(name: str, backend: str, device: str) -> None:
    crowd = crowd_on(device, backend, name)
    plan = plan_on(device, backend, crowd.graph)
    drawn = draw_cotangents(plan.graph, None, 7)
    cotangents = [x for x in drawn if x is not None]
    crowd.check_gradients(gradients_on(device, plan, crowd.inputs, cotangents), *cotangents)


def join(o: torch.Tensor, lse: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor) -> Tensors:
    """Attention over two sets of keys, o [T,H,D] and lse [H,T], by that over each."""
    both = torch.logaddexp(lse, lse2)
    first, second = (torch.exp(x - both).mT[..., None] for x in (lse, lse2))
    return o * first + o2 * second, both


@pytest.mark.parametrize(("name", "backend", "device"), jobs({"float32": OURS}))
def test_pages_in_common_are_attended_once_for_all_queries(
    name: str, backend: str, device: str
) -> None:
    """As one sequence of all queries, joined by lse with what is each one's own."""
    crowd = crowd_on(device, backend, name)
    common, tensors = crowd.common, {n: x.to(device) for n, x in crowd.tensors.items()}
    q, k, v = (tensors[n].requires_grad_() for n in "qkv")
    own = {n: tensors[n] for n in ("q_starts", "kv_lengths", "pages")}
    first = {"q_starts": own["q_starts"][[0, -1]], "pages": own["pages"][:1, :common].contiguous()}
    own["pages"] = own["pages"][:, common:].contiguous()
    own["kv_lengths"] = own["kv_lengths"] - PAGE * common
    parts = list[torch.Tensor]()
    for where, mask in ((first, None), (own, BOTTOM)):
        plan = plan_on(device, backend, crowd_graph((q, k, v), where, mask))
        parts += run_plan(plan, (q, k, v), **where)
    o, lse = join(*parts)
    crowd.check_outputs(o.detach().cpu(), lse.detach().cpu())
    random = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(x.shape, generator=random) for x in (o, lse)]
    grads = torch.autograd.grad((o, lse), (q, k, v), [x.to(device) for x in cotangents])
    crowd.check_gradients(dict(zip("qkv", grads, strict=True)), *cotangents)


# Who takes what


def refusals(graph: ag.Graph) -> dict[str, list[str]]:
    """Why backends take a graph not on an H200 that has all libraries."""
    said = ag.explain(graph, target=equip("h200"), gradients=())
    return {x.backend: [str(reason) for reason in x.reasons] for x in said.refusals}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_skip_on_no_h200(name: str) -> None:
    """Each backend of a case takes both its passes."""
    for backend in PACKED[name][0]:
        case = packed_case(name, FEW, stats=backend != "cudnn")
        for graph in (case.graph, ag.vjp(case.graph)[1]):
            assert not refusals(graph).get(backend)


def test_pages_skip_on_no_h200() -> None:
    """And who gives no gradients, or takes no float32, says so."""
    for name in PAGED:
        case = paged_case(name, FEW)
        for graph in (case.graph, ag.vjp(case.graph)[1]):
            assert not set(OURS) & refusals(graph).keys()
    for name, dtype in CROWDS.items():
        graph = crowd_on("cpu", "triton", name).graph
        reasons = [x for x in refusals(graph).get("cudnn", []) if "lacks finite_pages" not in x]
        assert bool(reasons) == (dtype == F32)
        assert "cudnn" in refusals(ag.vjp(graph)[1])
