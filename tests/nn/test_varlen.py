"""`varlen_attn`: PyTorch's words, and what a loop of its SDPA over the sequences gives."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor
from torch.library import opcheck
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest
from torch.utils.flop_counter import FlopCounterMode

import attn_graph as ag
from attn_graph.nn import varlen_attn
from attn_graph.nn.calls import PLAIN, content_of_call, exact
from attn_graph.nn.functional import attention
from attn_graph.testing.strategies import seeds
from tests.support.tracing import traces

I32 = torch.int32
LSE = AuxRequest(lse=True)
PAGE = 3
Window = tuple[int, int]

lengths = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 1, 40]))
bounds = st.sampled_from([-1, -1, 0, 1, 5])
windows = st.one_of(st.sampled_from([(-1, -1), (-1, 0)]), st.tuples(bounds, bounds))


@frozen
class Case:
    """Sequences, heads and a window. used: as many keys of a sequence count."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    used: tuple[int, ...] | None
    H: int
    G: int
    window: Window
    scale: float | None

    def starts(self, side: int) -> Tensor:
        """Where sequences begin."""
        return torch.tensor([*accumulate((self.rows, self.keys)[side], initial=0)], dtype=I32)

    def tensors(self, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """query, key and value, which is narrower, with two rows more than the sequences have."""
        random = torch.Generator().manual_seed(seed)
        T, S = sum(self.rows) + 2, sum(self.keys) + 2
        shapes = (T, self.H, 8), (S, self.G, 8), (S, self.G, 5)
        each = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
        return [x.requires_grad_() for x in each]

    def options(self) -> dict[str, Any]:  # Any: of varlen_attn
        """The arguments of varlen_attn after max_k."""
        used = None if self.used is None else torch.tensor(self.used, dtype=I32)
        return {
            "window_size": self.window, "scale": self.scale, "enable_gqa": self.G < self.H,
            "seqused_k": used,
        }  # fmt: skip

    def call(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:  # Any: of varlen_attn
        """What varlen_attn gives."""
        rows, keys = self.starts(0), self.starts(1)
        longest = max(self.rows, default=0), max(self.keys, default=0)
        return varlen_attn(q, k, v, rows, keys, *longest, **(self.options() | more))

    def loop(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What SDPA gives of one sequence after another, 0 for rows of none."""
        parts = []
        for b, (i, j) in enumerate(zip(self.starts(0), self.starts(1)[:-1], strict=False)):
            rows, keys = self.rows[b], (self.used or self.keys)[b]
            own = (x.transpose(0, 1) for x in (q[i : i + rows], k[j : j + keys], v[j : j + keys]))
            mask = visible(rows, keys, self.window)
            x, y, z = own
            o = F.scaled_dot_product_attention(
                x, y, z, attn_mask=mask, scale=self.scale, enable_gqa=self.G < self.H
            )
            parts.append(o.transpose(0, 1))
        return torch.cat([*parts, q.new_zeros(2, self.H, v.shape[-1])])


def visible(rows: int, keys: int, window: Window) -> Tensor:
    """Which keys a row sees, the last row meeting the last key."""
    left, right = (10**6 if n == -1 else n for n in window)
    i = torch.arange(rows)[:, None] + keys - rows
    j = torch.arange(keys)
    return (i - left <= j) & (j <= i + right)


@st.composite
def cases(draw: DrawFn) -> Case:
    """One to four sequences of no rows or some, whose keys may not all count."""
    pairs = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4))
    rows, keys = zip(*pairs, strict=True)
    used = tuple(draw(st.integers(0, n)) for n in keys) if draw(st.booleans()) else None
    G = draw(st.sampled_from([1, 2]))
    scale = draw(st.sampled_from([None, 0.7]))
    return Case(rows, keys, used, G * draw(st.sampled_from([1, 3])), G, draw(windows), scale)


def check(got: Tensor, due: Tensor, leaves: list[Tensor]) -> None:
    """Assert that results and gradients agree."""
    assert_close(got, due)
    weights = torch.randn(due.shape, dtype=due.dtype, generator=torch.Generator().manual_seed(1))
    each = (
        torch.autograd.grad(x, leaves, weights.to(x.dtype), materialize_grads=True)
        for x in (got, due)
    )
    for ours, theirs in zip(*each, strict=True):
        assert_close(ours, theirs)


def assert_close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


# What it means


@given(cases(), seeds)
def test_it_is_a_loop_of_sdpa(case: Case, seed: int) -> None:
    leaves = case.tensors(seed)
    check(case.call(*leaves), case.loop(*leaves), leaves)


@given(cases(), seeds)
def test_pages_are_their_keys_one_after_another(case: Case, seed: int) -> None:
    leaves = case.tensors(seed)
    counts = [-(-n // PAGE) for n in case.keys]
    table = torch.full((len(counts), max(1, *counts)), -7, dtype=I32)
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed))
    pools = [x.new_full((len(order), PAGE, *x.shape[1:]), torch.nan) for x in leaves[1:]]
    taken = iter(order.tolist())
    for b, (start, n) in enumerate(zip(case.starts(1), case.keys, strict=False)):
        for first in range(0, n, PAGE):
            page = table[b, first // PAGE] = next(taken)
            rows = slice(int(start) + first, int(start) + min(first + PAGE, n))
            for pool, x in zip(pools, leaves[1:], strict=True):
                pool[page, : rows.stop - rows.start] = x[rows]
    used = torch.tensor(case.used or case.keys, dtype=I32)
    keys, values = pools
    options = {**case.options(), "seqused_k": used, "block_table": table}
    longest = max(case.rows), max(case.keys)
    got = varlen_attn(leaves[0], keys, values, case.starts(0), None, *longest, **options)
    assert isinstance(got, Tensor)
    check(got, case.loop(*leaves), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(case=cases(), seed=seeds)
def test_it_has_the_bits_of_a_plan_of_numbers(dtype: torch.dtype, case: Case, seed: int) -> None:
    leaves = case.tensors(seed, dtype)
    specs = [ag.TensorSpec.like(x) for x in leaves]
    named = {"q_starts": case.starts(0), "kv_starts": case.starts(1)}
    if case.used is not None:
        named["kv_lengths"] = torch.tensor(case.used, dtype=I32)
    left, right = (None if n == -1 else n for n in case.window)
    mask = None if left is right is None else ag.Window(left, right, "bottom_right")
    options: dict[str, Any] = {n: ag.TensorSpec.like(x) for n, x in named.items()}
    graph = ag.attention(*specs, **options, mask=mask, scale=case.scale, stats=True)
    plan = ag.compile(graph, target="cpu")
    pairs = zip(case.call(*leaves, return_aux=LSE), plan(*leaves, **named), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_its_arguments_are_those_of_pytorch() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (varlen_attn, varlen.varlen_attn))
    assert theirs.keys() <= ours.keys()
    for name, x in theirs.items():
        assert (ours[name].kind, ours[name].default) == (x.kind, x.default)


# What is planned


def self_attention(*rows: int, like: str = "thd", **more: Any) -> Tensor:
    """Causal attention of sequences within themselves."""
    T = sum(rows)
    x = torch.randn(T, 2, 4) if like == "thd" else torch.randn(2, T, 4).transpose(0, 1)
    starts = torch.tensor([0, *accumulate(rows)], dtype=I32)
    o = varlen_attn(x, x, x, starts, starts, max(rows), max(rows), window_size=(-1, 0), **more)
    assert isinstance(o, Tensor)
    return o


@pytest.mark.parametrize("like", ["thd", "htd"])
def test_lengths_that_change_run_one_plan(like: str) -> None:
    ag.clear_cache()
    self_attention(40, 50, 9, like=like)
    before = ag.cache_info()
    for rows in ((64, 1, 2, 0), (33, 33, 33), (40, 60, 20, 5), (40, 50, 9)):
        self_attention(*rows, like=like)
    assert ag.cache_info().builds == before.builds
    self_attention(100, 50, like=like)
    assert ag.cache_info().builds > before.builds


def test_where_other_data_come_along_sizes_are_numbers() -> None:
    ag.clear_cache()
    starts = torch.tensor([0, 3, 5])
    for T in (5, 6):
        x = torch.randn(T, 2, 4)
        attention(x, x, x, q_starts=starts, max_lengths=(3, 3), bias=torch.randn(1, 2, 3, 3))
    assert ag.cache_info().builds == 2


# Within PyTorch


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@traces
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_gives_what_it_gives_eagerly(backend: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Any:
        return varlen_attn(
            q, k, v, starts, starts, longest, longest, window_size=(-1, 0), enable_gqa=True,
            return_aux=LSE,
        )  # fmt: skip

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for rows in ((3, 5), (10, 20, 30, 0, 1), (10, 21, 32, 0, 1), (11, 20, 12, 4)):
        starts = torch.tensor([0, *accumulate(rows)], dtype=I32)
        leaves = [torch.randn(sum(rows), h, 8, requires_grad=True) for h in (4, 2, 2)]
        each = []
        for call in (attend, compiled):
            q, k, v = leaves
            o, lse = call(q, k, v, starts, max(rows))
            loss = o.square().sum() + lse.sum()
            each.append((o, lse, *torch.autograd.grad(loss, leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*each, strict=True))


@traces
@pytest.mark.usefixtures("_fresh")
def test_compiled_code_serves_new_lengths() -> None:
    frames = 0

    def count(graph: torch.fx.GraphModule, _: object) -> Any:  # Any: a function of tensors
        nonlocal frames
        frames += 1
        return graph.forward

    def attend(x: Tensor, starts: Tensor, longest: int) -> Any:  # Any: as above
        return varlen_attn(x, x, x, starts, starts, longest, longest)

    compiled = torch.compile(attend, fullgraph=True, backend=count, dynamic=True)
    for rows in ((9, 10, 11), (12, 16), (1, 2, 3, 10), (15,) * 6):
        starts = torch.tensor([0, *accumulate(rows)], dtype=I32)
        compiled(torch.randn(sum(rows), 2, 64), starts, max(rows))  # no size equals another
    assert frames == 1


@pytest.mark.parametrize("paged", [False, True])
def test_opcheck_passes(paged: bool) -> None:
    mask = ag.Causal("bottom_right")
    names = ("kv_lengths", "q_starts", "pages") if paged else ("q_starts",)
    usual = (None, None, False, None, ("lse",), (4, None if paged else 4), *PLAIN)
    text = content_of_call(names, mask, exact("scale", 0.5), *usual)
    q = torch.randn(6, 4, 8).requires_grad_()
    k = torch.randn(*((5, 2) if paged else (6,)), 2, 8).requires_grad_()
    starts, ends = torch.tensor([0, 4, 5], dtype=I32), torch.tensor([4, 3], dtype=I32)
    tables = [ends, starts, torch.tensor([[0, 2], [3, 1]])] if paged else [starts]
    opcheck(torch.ops.attn_graph.attention.default, ([q, k, k.detach(), *tables], text))


def test_transforms_and_counters_see_through_it() -> None:
    x, starts = torch.randn(3, 6, 2, 4), torch.tensor([0, 4, 5], dtype=I32)

    def attend(x: Tensor) -> Any:
        return varlen_attn(x, x, x, starts, starts, 4, 4)

    assert torch.equal(torch.func.vmap(attend)(x), torch.stack([*map(attend, x)]))
    double = x[0].double().requires_grad_()
    assert torch.autograd.gradcheck(attend, double, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, double)
    with FlopCounterMode(display=False) as counter:
        attend(x[0])
    assert counter.get_total_flops() > 0


# What is refused

Q, K = torch.zeros(6, 4, 8), torch.zeros(6, 2, 8)
POOL, TABLE = torch.zeros(5, 2, 4, 8), torch.zeros(2, 3, dtype=I32)
C = torch.tensor([0, 4, 6], dtype=I32)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "axes": ((Q[None], Q, Q, C, C, 4, 4), {}, r"query \[1, 6, 4, 8\] has 4 axes.*\[T,H,D\]"),
    "no table": ((Q, POOL, POOL, C, C, 4, 4), {}, r"key .* without block_table it is \[S,G,D\]"),
    "no pool": ((Q, Q, Q, C, None, 4, 4), {"block_table": TABLE}, r"with block_table it is a pool"),
    "no tensor": ((Q, [1], Q, C, C, 4, 4), {}, "key is a list"),
    "heads": ((Q, K, K, C, C, 4, 4), {}, "query has 4 heads and key 2; pass enable_gqa=True"),
    "groups": ((Q[:, :3], K, K, C, C, 4, 4), {"enable_gqa": True}, "not a multiple of key's 2"),
    "rows": ((Q, Q, Q[:5], C, C, 4, 4), {}, r"key \[6, 4, 8\] and value \[5, 4, 8\] disagree"),
    "sequences": ((Q, Q, Q, C, C[:2], 4, 4), {}, r"of 2 sequences, and cu_seq_k is \[2\]"),
    "used": ((Q, Q, Q, C, C, 4, 4), {"seqused_k": C}, r"seqused_k is \[3\]; it has to be \[B\]"),
    "kind": ((Q, Q, Q, C.float(), C, 4, 4), {}, "cu_seq_q is torch.float32; it has to be"),
    "dtypes": ((Q, Q, Q.double(), C, C, 4, 4), {}, "v is torch.float64, and q is torch.float32"),
    "where keys begin": ((Q, Q, Q, C, None, 4, 4), {}, "cu_seq_k is None"),
    "how many": ((Q, POOL, POOL, C, None, 4, 4), {"block_table": TABLE}, "needs seqused_k"),
    "window": ((Q, Q, Q, C, C, 4, 4), {"window_size": (-2, 0)}, r"window_size \(-2, 0\)"),
    "splits": ((Q, Q, Q, C, C, 4, 4), {"num_splits": 3}, "num_splits is 3"),
    "longest": ((Q, Q, Q, C, C, 4.0, 4), {}, "max_q is 4.0"),
    "too long": ((Q, Q, Q, C, C, 2, 2), {}, "sequence 0 has 4.*of at most 2"),
    "descending": ((Q, Q, Q, C.flip(0), C.flip(0), 4, 4), {}, "q_starts: expected 0 first, got 6"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_refused_with_both_values(name: str) -> None:
    arguments, options, words = WRONG[name]
    with pytest.raises(ag.TensorError, match=words):
        varlen_attn(*arguments, **options)


def test_statistics_that_it_has_not_are_named() -> None:
    from torch.nn.attention.flex_attention import AuxRequest as Wanted

    wanted: Any = Wanted(lse=True, max_scores=True)
    with pytest.raises(ag.TensorError, match="return_aux supports lse, not max_scores"):
        self_attention(3, 2, return_aux=wanted)


def test_bits_that_do_not_depend_on_neighbours_are_asked_for_by_one_split() -> None:
    with pytest.raises(ag.NoBackendError, match="batch_invariant=True"):
        self_attention(3, 2, num_splits=1)  # CPUs divide sums by what there is
