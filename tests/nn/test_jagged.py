"""Jagged nested tensors: attended in packed form, and given back with the lengths of the query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch.nested import nested_tensor, nested_tensor_from_jagged

import attn_graph as ag
from attn_graph.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype|The PyTorch API of nested)")
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def draw_rows(lengths: Sequence[int], H: int, D: int) -> list[torch.Tensor]:
    """The rows [j,H,D] of each batch entry."""
    return [torch.randn(n, H, D) for n in lengths]


def as_jagged(rows: Sequence[torch.Tensor]) -> Any:  # Any: a private class of PyTorch
    """A jagged tensor [B,H,j,D]."""
    return nested_tensor(list(rows), layout=torch.jagged).transpose(1, 2)


def like(x: Any, H: int, D: int) -> Any:  # Any: as above
    """A jagged tensor [B,H,j,D] with the lengths of another."""
    rows = torch.randn(len(x.values().transpose(0, 1)), H, D)
    return nested_tensor_from_jagged(rows, x.offsets()).transpose(1, 2)


def sequences(x: Any) -> list[torch.Tensor]:  # Any: as above
    """Each batch entry of a jagged tensor [B,H,j,...] as [1,H,j,...]."""
    return [part.transpose(0, 1)[None] for part in x.transpose(1, 2).unbind()]


@given(LENGTHS, st.data())
@example([3, 0, 5], None)
def test_each_sequence_attends_to_itself(lengths: list[int], data: Any) -> None:
    """With keys of the same lengths and of others, heads shared, masks and statistics."""
    mask = (
        data.draw(st.sampled_from([None, ag.Causal("top_left"), ag.Window(2, 1, "bottom_right")]))
        if data
        else None
    )
    G, E = (data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 9))) if data else (2, 8)
    torch.manual_seed(0)
    q = as_jagged(draw_rows(lengths, 4, 8))
    others = bool(data and data.draw(st.booleans()))
    k = as_jagged(draw_rows(lengths[::-1], G, 8)) if others else like(q, G, 8)
    v = like(k, G, E)
    o, lse = F.attention(q, k, v, mask=mask, stats=True)
    assert o.shape == (len(lengths), 4, q.shape[2], E)
    for got, statistic, *parts in zip(*map(sequences, (o, lse, q, k, v)), strict=True):
        if got.numel():
            due, lse_due = F.attention(*(x.contiguous() for x in parts), mask=mask, stats=True)
            torch.testing.assert_close(got, due)
            torch.testing.assert_close(statistic, lse_due)


def copies(call: Callable[[], object]) -> int:
    """Copies that PyTorch makes in a call like an earlier one."""
    call()
    with torch.profiler.profile() as profile:
        call()
    events = profile.events()
    assert events is not None
    return sum(event.name == "aten::copy_" for event in events)


def test_a_call_does_what_the_packed_one_does_and_gives_the_query_s_lengths() -> None:
    q = as_jagged(draw_rows([3, 2, 5], 4, 8))
    rows = q.values().transpose(0, 1)

    def attend_packed() -> torch.Tensor:
        o = F.attention(rows, rows, rows, q_starts=q.offsets())
        assert isinstance(o, torch.Tensor)
        return o

    o: Any = F.attention(q, q, q)  # Any: as above
    assert torch.equal(o.values().transpose(0, 1), attend_packed())
    assert copies(lambda: F.attention(q, q, q)) == copies(attend_packed)
    assert (o + q).shape == q.shape


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_is_differentiated_and_compiled_whole(backend: str) -> None:
    rows = draw_rows([3, 2, 5], 4, 8)
    x = nested_tensor(rows, layout=torch.jagged, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(1, 2)
        return (F.scaled_dot_product_attention(y, y, y, is_causal=True) + y).transpose(1, 2)

    def attend(x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(y, y, y, is_causal=True) + y

    dense = [row.clone().requires_grad_() for row in rows]
    torch.stack([attend(row).square().sum() for row in dense]).sum().backward()
    for call in (run, torch.compile(run, fullgraph=True, backend=backend)):
        x.grad = None
        call(x).values().square().sum().backward()
        assert x.grad is not None
        for grad, row in zip(x.grad.unbind(), dense, strict=True):
            torch.testing.assert_close(grad, row.grad)


def test_replaced_calls_run_by_plans() -> None:
    """PyTorch's own CPU path refuses is_causal here."""
    q = as_jagged(draw_rows([3, 2, 5], 4, 8))
    with ag.replace_sdpa(report=True) as report:
        o = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(o, F.attention(q, q, q, mask=ag.Causal("top_left")))
    assert report is not None
    assert all(row.usage.backend for row in report.rows)


def test_a_second_call_reads_the_tensors_of_masks_by_their_names() -> None:
    """Here the first keys of heads and the starts of rows have one shape."""
    x = as_jagged(draw_rows([3, 4], 3, 8))
    mask = ag.Formula("j >= first", (("first", "h"),))
    for first in (torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1])):
        o: Any = F.attention(x, x, x, mask=mask, first=first)
        for part, due in zip(sequences(x), sequences(o), strict=True):
            alone = F.attention(part, part, part, mask=mask, first=first)
            torch.testing.assert_close(alone, due)


def test_dropout_is_fixed_by_the_seed() -> None:
    q = as_jagged(draw_rows([3, 2, 5], 4, 8))
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).values())
    assert torch.equal(*results)


def with_holes(x: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Any:
    """Some rows of each entry of x [B,M,...] as a jagged tensor, a view with the others between."""
    places = torch.tensor(starts), torch.tensor(lengths)
    return torch.nested.narrow(x, 1, *places, layout=torch.jagged)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4),
    st.sampled_from([None, ag.Causal(), ag.Window(1, 1, "bottom_right")]),
    st.booleans(),
)
@example([(0, 2), (1, 3), (2, 1)], ag.Causal(), True)
def test_rows_in_holes_are_never_seen(
    rows: list[tuple[int, int]], mask: ag.Mask | None, compiles: bool
) -> None:
    """Both passes, and the forward under torch.compile; o has the holes of q."""
    starts, lengths = zip(*rows, strict=True)
    x = torch.randn(len(rows), 7, 4, 8)
    for entry, (first, n) in zip(x, rows, strict=True):
        entry[:first], entry[first + n :] = torch.nan, torch.nan
    x.requires_grad_()
    q = with_holes(x, starts, lengths).transpose(1, 2)
    o, lse = F.attention(q, q, q, mask=mask, stats=True)
    alone = [x[b : b + 1, i : i + n].transpose(1, 2) for b, (i, n) in enumerate(rows)]
    due = [F.attention(part, part, part, mask=mask, stats=True) for part in alone]
    for got, statistic, (exact, lse_due) in zip(*map(sequences, (o, lse)), due, strict=True):
        torch.testing.assert_close(got, exact)
        torch.testing.assert_close(statistic, lse_due)
    assert (o + q).shape == q.shape
    (grad,) = torch.autograd.grad([p.square().sum() for p in o.unbind()], x)
    (exact,) = torch.autograd.grad([p.square().sum() for p, _ in due], x)
    torch.testing.assert_close(grad, exact)
    if compiles:

        def run(y: Any) -> Any:
            return F.attention(y, y, y, mask=mask)

        attend = torch.compile(run, backend="aot_eager")
        torch.testing.assert_close(attend(q.detach()).values(), o.values())


def test_keys_of_other_lengths_may_have_holes() -> None:
    q = as_jagged(draw_rows([3, 2], 4, 8))
    k = with_holes(torch.randn(2, 7, 4, 8), (0, 4), (5, 2)).transpose(1, 2)
    o = F.attention(q, k, k, mask=ag.Causal("bottom_right"))
    for got, *parts in zip(*map(sequences, (o, q, k)), strict=True):
        own, keys = (x.contiguous() for x in parts)
        due = F.attention(own, keys, keys, mask=ag.Causal("bottom_right"))
        torch.testing.assert_close(got, due)


@given(LENGTHS, LENGTHS, st.booleans(), st.booleans())
@example([3, 0, 5], [2, 4, 4], True, True)
def test_multi_head_attention_of_jagged_tensors_is_that_of_each_sequence(
    lengths: list[int], others: list[int], is_causal: bool, itself: bool
) -> None:
    """Of self and cross attention, with gradients; PyTorch's module refuses these tensors."""
    others = lengths if itself else (others * 4)[: len(lengths)]
    module = ag.nn.MultiheadAttention(8, 2, batch_first=True)
    parts = [torch.randn(n, 8, requires_grad=True) for n in lengths]
    keys = parts if itself else [torch.randn(n, 8, requires_grad=True) for n in others]
    x = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    y = x if itself else torch.nested.as_nested_tensor(keys, layout=torch.jagged)
    o, _ = module(x, y, y, need_weights=False, is_causal=is_causal)
    assert o.shape == x.shape
    inputs = [*module.parameters(), *parts]
    due = []
    for part, key in zip(parts, keys, strict=True):
        mask = torch.ones(len(part), len(key), dtype=torch.bool).triu(1) if is_causal else None
        due.append(module(part, key, key, need_weights=False, attn_mask=mask)[0])
    torch.testing.assert_close(o.values(), torch.cat(due))
    for got, exact in zip(
        torch.autograd.grad(o.values().square().sum(), inputs, allow_unused=True),
        torch.autograd.grad(torch.cat(due).square().sum(), inputs, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


def test_multi_head_attention_never_sees_rows_in_holes() -> None:
    """NaN there reaches no result, and no gradient of the parameters."""
    module, rows = ag.nn.MultiheadAttention(8, 2, batch_first=True), ((0, 3), (2, 1), (1, 4))
    values = torch.full((3, 6, 8), torch.nan)
    for entry, (i, n) in zip(values, rows, strict=True):
        entry[i : i + n] = torch.randn(n, 8)
    x = with_holes(values, *zip(*rows, strict=True))
    o, _ = module(x, x, x, need_weights=False)
    parts = [values[b, i : i + n] for b, (i, n) in enumerate(rows)]
    due = [module(part, part, part, need_weights=False)[0] for part in parts]
    for got, exact in zip(o.unbind(), due, strict=True):
        torch.testing.assert_close(got, exact)
    each = (
        torch.autograd.grad(torch.cat([*own]).square().sum(), [*module.parameters()])
        for own in (o.unbind(), due)
    )
    for got, exact in zip(*each, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


MULTIHEAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "weights": ({}, {"need_weights": True}, "need_weights=True does not fit nested tensors"),
    "order": ({"batch_first": False}, {}, "batch_first=False does not fit nested tensors"),
    "padding": ({}, {"key_padding_mask": torch.zeros(2, 5)}, "pass is_causal=True for a causal"),
    "zero": ({"add_zero_attn": True}, {}, "add_zero_attn do not fit nested tensors"),
}


@pytest.mark.parametrize("name", MULTIHEAD)
def test_multi_head_attention_says_what_does_not_fit_jagged_tensors(name: str) -> None:
    made, given_, text = MULTIHEAD[name]
    x = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5)], layout=torch.jagged)
    module = ag.nn.MultiheadAttention(8, 2, **{"batch_first": True, **made})
    with pytest.raises(ag.TensorError, match=text):
        module(x, x, x, **{"need_weights": False, **given_})


Q = as_jagged(draw_rows([3, 2, 5], 4, 8))
DENSE = torch.randn(3, 4, 5, 8)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "dense keys": (lambda: F.attention(Q, DENSE, DENSE), "k is dense .* pass q, k and v nested"),
    "dense queries": (lambda: F.attention(DENSE, Q, Q), "k is nested"),
    "strided": (
        lambda: F.attention(*[nested_tensor(draw_rows([3, 2], 4, 8))] * 3),
        r"as_nested_tensor\(x.unbind\(\), layout=torch.jagged\)",
    ),
    "rows before heads": (
        lambda: F.attention(*[Q.transpose(1, 2)] * 3),
        r"lengths on axis 1; pass .* x.transpose\(1, 2\)",
    ),
    "values of other lengths": (
        lambda: F.attention(Q, Q, as_jagged(draw_rows([3, 2, 5], 4, 8))),
        r"offsets=k.offsets\(\)",
    ),
    "starts": (lambda: F.attention(Q, Q, Q, q_starts=Q.offsets()), "q_starts is given with nested"),
    "a mask tensor": (
        lambda: F.scaled_dot_product_attention(
            Q, Q, Q, attn_mask=torch.ones(5, 5, dtype=torch.bool)
        ),
        "attn_mask does not fit nested tensors",
    ),
    "fewer heads": (
        lambda: F.scaled_dot_product_attention(Q, like(Q, 2, 8), like(Q, 2, 8)),
        "enable_gqa=True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tensors_are_refused_with_what_to_pass(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ag.GraphError, match=text):
        call()
