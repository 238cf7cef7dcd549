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


HOLES = torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1])
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
    "holes": (
        lambda: F.attention(
            *[
                torch.nested.narrow(
                    torch.randn(3, 7, 4, 8), 1, *HOLES, layout=torch.jagged
                ).transpose(1, 2)
            ]
            * 3
        ),
        r"holes between its rows; pass x.contiguous\(\)",
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
