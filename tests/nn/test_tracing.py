"""torch.compile traces calls where it keeps masks and plans as constants, and else goes around."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.exc import Unsupported

import attn_graph as ag
from attn_graph.nn.functional import attention
from attn_graph.nn.tracing import KEEPS_CONSTANTS

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
X = ag.TensorSpec((1, 2, 16, 8), torch.float32)


def test_which_versions_keep_constants() -> None:
    assert (VERSION >= (2, 12)) == KEEPS_CONSTANTS


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of 2.11
def test_code_compiles_with_a_call_in_it_whichever_torch_this_is() -> None:
    """Both forms of a call, with a mask that is made inside, and their gradients."""
    plan = ag.compile(ag.attention(X, X, X, mask=ag.Causal()), target="cpu")
    leaves = [torch.randn(1, 2, 16, 8).requires_grad_() for _ in "qkv"]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = plan(2 * q, k, v)
        windowed = attention(q, k, v, mask=ag.Causal() & ag.Window(4))
        assert isinstance(o, torch.Tensor)
        assert isinstance(windowed, torch.Tensor)
        return o + windowed.exp()

    torch._dynamo.reset()
    outputs = [run(*leaves) for run in (torch.compile(attend, backend="aot_eager"), attend)]
    gradients = [torch.autograd.grad(o.sum(), leaves) for o in outputs]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(*gradients)


@pytest.mark.skipif(KEEPS_CONSTANTS, reason="torch.compile traces calls from torch 2.12 on")
def test_where_calls_are_not_traced_a_whole_graph_is_refused() -> None:
    plan = ag.compile(ag.attention(X, X, X), target="cpu")
    compiled = torch.compile(lambda x: plan(x, x, x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match="marked as skipped"):
        compiled(torch.randn(1, 2, 16, 8))
