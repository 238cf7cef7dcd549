"""Modifiers as an option of attention: those that flex score mods become, and one's own."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.extend import Place
from attn_graph.nn.functional import attention
from attn_graph.nn.tracing import KEEPS_CONSTANTS
from attn_graph.testing.tensors import tensors_for
from tests.support.tracing import WHY

X = ag.TensorSpec((1, 2, 9, 8), torch.float32)
SLOPES, BIAS = ag.TensorSpec((2,), torch.float32), ag.TensorSpec((1, 2, 9, 9), torch.float32)


@frozen
class Doubled(ag.Modifier):
    """s -> 2 s."""

    def change(self, s: Any, at: Place) -> Any:
        return 2 * s

    def back(self, ds: Any, s: Any, at: Place) -> Any:
        return 2 * ds


STEPS: list[tuple[ag.Modifier, dict[str, ag.TensorSpec]]] = [
    (ag.SoftCap(3.0), {}),
    (Doubled(), {}),
    (ag.Addend("-0.5 * real(abs(i - j))"), {}),
    (ag.Alibi(align="top_left"), {"alibi": SLOPES}),
    (ag.Bias(), {"bias": BIAS}),
]


@given(st.permutations(STEPS), st.integers(1, 3))
def test_modifiers_are_the_steps_before_the_mask_in_their_order(
    steps: list[tuple[ag.Modifier, dict[str, ag.TensorSpec]]], count: int
) -> None:
    modifiers = tuple(step for step, _ in steps[:count])
    own: dict[str, Any] = {name: spec for _, needs in steps[:count] for name, spec in needs.items()}

    def attend(q: ag.Value, k: ag.Value, v: ag.Value, **data: ag.Value) -> ag.Value:
        s = ag.scores(q, k)
        for step in modifiers:
            s = s.then(step, *(data[name] for name in step.needs))
        return s.mask(ag.Causal()).softmax()[0].weigh(v)

    order = {name: own[name] for name in ("bias", "alibi") if name in own}
    options: dict[str, Any] = {"modifiers": modifiers, "mask": ag.Causal()}
    graph = ag.attention(X, X, X, **options, **own)
    assert graph == ag.graph(attend, q=X, k=X, v=X, **order)
    q, k, v, *more = tensors_for(graph, 3)
    tensors: dict[str, Any] = dict(zip(order, more, strict=True))
    o, due = attention(q, k, v, **options, **tensors), ag.compile(graph)(q, k, v, **tensors)
    assert isinstance(o, torch.Tensor)
    assert isinstance(due, torch.Tensor)
    assert o.equal(due)


@pytest.mark.skipif(not KEEPS_CONSTANTS, reason=WHY)
def test_compiled_code_keeps_modifiers() -> None:
    module = ag.nn.Attention(modifiers=(ag.SoftCap(3.0), ag.Bias(), Doubled()))
    q, k, v, bias = tensors_for(ag.attention(X, X, X, bias=BIAS), 3)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert compiled(q, k, v, bias=bias).equal(module(q, k, v, bias=bias))


@pytest.mark.parametrize("mask", [None, ag.Prefix(7)])
@pytest.mark.parametrize("among", [(ag.Causal(),), (ag.Causal() | ag.Prefix(2), ag.Window(4))])
def test_masks_among_modifiers_are_masks_within_transforms(
    mask: ag.Mask | None, among: tuple[ag.Mask, ...]
) -> None:
    joined = reduce(and_, among if mask is None else (mask, *among))
    call: Any = attention  # Any: its results without statistics
    q, k, v = tensors_for(ag.attention(X, X, X), 3)

    def slope(mask: ag.Mask | None, *steps: ag.Modifier | ag.Mask) -> torch.Tensor:
        loss = torch.func.grad(lambda q: call(q, k, v, mask=mask, modifiers=steps).sum())
        return loss(q)  # type: ignore[no-any-return]  # of torch

    assert torch.equal(slope(mask, ag.SoftCap(3.0), *among), slope(joined, ag.SoftCap(3.0)))


def test_what_is_no_modifier_is_refused_with_the_way_to_one() -> None:
    wrong: Any = 3
    with pytest.raises(ag.GraphError, match=r"modifiers 3 are not a sequence.*from_flex_score"):
        ag.attention(X, X, X, modifiers=wrong)
    with pytest.raises(ag.GraphError, match=r"Bias.* reads bias; pass bias="):
        ag.attention(X, X, X, modifiers=(ag.Bias(),))
    with pytest.raises(ag.GraphError, match="use modifiers=m"):
        ag.attention(X, X, X, score_mod=wrong)
