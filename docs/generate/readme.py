"""README's example with what `explain` prints."""

from __future__ import annotations

import torch

import attn_graph as ag
from docs.generate.support import GPU

EXAMPLE = """\
import torch, attn_graph as ag

x = ag.TensorSpec((2, 8, 512, 64), torch.float16)  # [batch, heads, positions, head size]
mask = ag.Causal() & (ag.Window(64) | ag.Prefix(4))  # 64 positions back, and the first four
graph = ag.attention(x, x, x, mask=mask, stats=True)  # an immutable value: ==, hash, print, parse
plan = ag.compile(graph)  # validated, chosen, lowered, cached

q, k, v = torch.randn(3, 2, 8, 512, 64).half().requires_grad_().unbind()
o, lse = plan(q, k, v)  # differentiable, lse as well as o
"""


def example() -> str:
    """The example in Markdown."""
    return f"```python\n{EXAMPLE}```"


def explain_example() -> str:
    """Who would run the example on an H200: what `explain` says before the graph."""
    x = ag.TensorSpec((2, 8, 512, 64), torch.float16)
    mask = ag.Causal() & (ag.Window(64) | ag.Prefix(4))
    graph = ag.attention(x, x, x, mask=mask, stats=True)
    explanation = ag.explain(graph, target=GPU, backends=("cudnn", "triton"), gradients=())
    text = str(explanation).removesuffix(f"\n{explanation.graph}")
    return f"```text\n{text}\n```"
