"""Tensors without strides, nested and sparse ones, are refused in words wherever tensors go in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError

import attn_graph as ag
from attn_graph import nn
from attn_graph.nn import functional as F
from attn_graph.plan import content_of

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype)")

Q, ROWS = torch.randn(2, 2, 6, 8), torch.randn(6, 2, 8)
STARTS = torch.tensor([0, 6], dtype=torch.int32)
X, EYE = ag.TensorSpec.like(Q), torch.eye(8)
B = ag.Dim("B", 8)
NAMED = ag.TensorSpec((B, 2, 6, 8), torch.float32)
FLAGS = ag.TensorSpec((1, 1, 6, 6), torch.bool)
PLAN, NAMED_PLAN = ag.compile(ag.attention(X, X, X)), ag.compile(ag.attention(*[NAMED] * 3))
MASKED = ag.compile(ag.attention(X, X, X, keep=FLAGS))


@pytest.fixture(scope="module", params=["strided", "jagged", "csr", "csc", "bsr", "coo", "mkldnn"])
def odd(request: pytest.FixtureRequest) -> torch.Tensor:
    """A tensor without strides, or with some that mean nothing."""
    parts = [torch.randn(4, 2, 8), torch.randn(6, 2, 8)]
    make: dict[str, Callable[[], torch.Tensor]] = {
        "strided": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
        "csr": EYE.to_sparse_csr,
        "csc": EYE.to_sparse_csc,
        "bsr": lambda: EYE.to_sparse_bsr((2, 2)),
        "coo": EYE.to_sparse,
        "mkldnn": EYE.to_mkldnn,
    }
    return make[request.param]()


WIDE = torch.randn(2, 6, 8)
TEXT = content_of(PLAN)
MULTIHEAD, TORCHS = nn.MultiheadAttention, torch.nn.MultiheadAttention


def without_autograd(x: torch.Tensor) -> object:
    with torch.inference_mode():
        return torch.ops.attn_graph.attention([x, x, x], TEXT)


def multihead(*tensors: torch.Tensor, **options: Any) -> object:  # Any: arguments of the module
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    return module(*tensors, **{"need_weights": False, **options})


ENTRIES: dict[str, Callable[[Any], object]] = {  # Any: anything that is not a dense tensor
    "a spec": ag.TensorSpec.like,
    "attention": lambda x: F.attention(x, x, x),
    "keys": lambda x: F.attention(Q, x, x),
    "a mask": lambda x: F.attention(Q, Q, Q, keep=x),
    "a bias": lambda x: F.attention(Q, Q, Q, bias=x),
    "compiled": lambda x: torch.compile(lambda x: F.attention(x, x, x), backend="eager")(x),
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, x),
    "a mask of sdpa": lambda x: F.scaled_dot_product_attention(Q, Q, Q, attn_mask=x),
    "an operator": lambda x: torch.ops.attn_graph.attention([x, x, x], TEXT),
    "an operator without autograd": without_autograd,
    "varlen": lambda x: nn.varlen_attn(x, x, x, STARTS, STARTS, 6, 6),
    "starts": lambda x: nn.varlen_attn(ROWS, ROWS, ROWS, x, STARTS, 6, 6),
    "a module": lambda x: nn.Attention()(x, x, x),
    "a plan": lambda x: PLAN(x, x, x),
    "keys of a plan": lambda x: PLAN(Q, x, v=x),
    "a plan of names": lambda x: NAMED_PLAN(x, x, x),
    "a masked plan": lambda x: MASKED(Q, Q, Q, keep=x),
    "a check": lambda x: PLAN.check(x, x, x),
    "verify": lambda x: PLAN.verify(Q, Q, x),
    "cost": lambda x: MASKED.cost(keep=x),
    "evaluate": lambda x: ag.evaluate(PLAN.graph, (x, Q, Q)),
    "tiles": lambda x: ag.tiles(ag.Keep(), 6, 6, data={"keep": x}),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_tensor_without_strides_is_refused_with_what_to_pass(
    entry: str, odd: torch.Tensor
) -> None:
    """After a call with dense ones too, whose likeness is remembered."""
    for plan in (PLAN, NAMED_PLAN):
        plan(Q, Q, Q)
    MASKED(Q, Q, Q, keep=torch.ones(1, 1, 6, 6, dtype=torch.bool))
    F.attention(Q, Q, Q)
    F.scaled_dot_product_attention(Q, Q, Q)
    with pytest.raises((ag.GraphError, ag.PlanMismatchError, TorchRuntimeError)) as caught:
        ENTRIES[entry](odd)  # torch.compile may repeat our words in an error of its own
    told = str(caught.value)
    way_out = "x.values() [T,H,D]" if odd.is_nested else "x.to_dense()"
    named = way_out in told or any(
        form in told for form in ("axes", "int32", "layout=torch.jagged")
    )
    assert named, told


WAYS: dict[str, Callable[[Any], object]] = {  # Any: as above
    "all": lambda x: multihead(x, x, x),
    "with weights": lambda x: multihead(x, x, x, need_weights=True),
    "keys": lambda x: multihead(WIDE, x, x),
    "padding": lambda x: multihead(WIDE, WIDE, WIDE, key_padding_mask=x),
    "mask": lambda x: multihead(WIDE, WIDE, WIDE, attn_mask=x),
}


@pytest.mark.parametrize("way", WAYS)
def test_multi_head_attention_refuses_a_tensor_without_strides(way: str, odd: torch.Tensor) -> None:
    """Nested ones that PyTorch's fast path may take are PyTorch's to refuse, in its words."""
    theirs = odd.is_nested and odd.layout == torch.strided and way not in ("padding", "mask")
    told = "(?i)nested" if theirs else r"x\.to_dense\(\)"
    if odd.is_nested and not theirs:
        forms = {"all": r"pass \[B,lengths,E\]", "keys": "pass q, k and v nested"}
        told = {**forms, "with weights": forms["all"]}.get(way, "to_padded_tensor")
    with pytest.raises(AssertionError if theirs else ag.GraphError, match=told):
        WAYS[way](odd)


@pytest.mark.parametrize("weights", [False, True])
def test_multi_head_attention_takes_the_nested_tensors_that_pytorch_takes(weights: bool) -> None:
    own, theirs = (kind(8, 2, batch_first=True).eval() for kind in (MULTIHEAD, TORCHS))
    own.load_state_dict(theirs.state_dict())
    parts = [torch.randn(4, 8), torch.randn(6, 8)]
    x = torch.nested.nested_tensor(parts)
    with torch.no_grad():
        o, due = (module(x, x, x, need_weights=weights)[0] for module in (own, theirs))
    for part, exact in zip(o.unbind(), due.unbind(), strict=True):
        torch.testing.assert_close(part, exact, rtol=0, atol=0)


def test_multi_head_attention_gives_jagged_tensors_what_padded_ones_have() -> None:
    parts = [torch.randn(4, 8), torch.randn(6, 8)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    module = MULTIHEAD(8, 2, batch_first=True)
    padded = torch.nested.to_padded_tensor(x, 0.0)
    past = torch.arange(6) >= torch.tensor([4, 6])[:, None]
    o, _ = module(padded, padded, padded, key_padding_mask=past, need_weights=False)
    jagged, _ = module(x, x, x, need_weights=False)
    for part, own, rows in zip(parts, o, jagged.unbind(), strict=True):
        due, _ = module(part[None], part[None], part[None], need_weights=False)
        torch.testing.assert_close(own[: len(part)], due[0])
        torch.testing.assert_close(rows, due[0])


def test_what_is_told_of_a_jagged_tensor_runs() -> None:
    parts = [torch.randn(4, 2, 8), torch.randn(6, 2, 8)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    rows, starts = jagged.values(), jagged.offsets()  # type: ignore[attr-defined]  # of a subclass
    o = F.attention(rows, rows, rows, q_starts=starts, kv_starts=starts)
    assert isinstance(o, torch.Tensor)
    for part, own in zip(parts, o.split([4, 6]), strict=True):
        heads = part.transpose(0, 1)
        due = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        torch.testing.assert_close(own.transpose(0, 1), due)
