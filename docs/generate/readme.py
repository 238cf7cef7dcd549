"""README's examples with what `explain` prints."""

from __future__ import annotations

import torch

import attn_graph as ag
from docs.generate.support import GPU

CALL = """\
import torch
import attn_graph as ag
from attn_graph.nn.functional import attention

q, k, v = torch.randn(3, 2, 8, 512, 64).half().requires_grad_().unbind()  # [batch, heads, S, D]
mask = ag.Causal() & (ag.Window(64) | ag.Prefix(4))  # 64 positions back, and the first four
o = attention(q, k, v, mask=mask)  # differentiable; planned by the first call
"""
PLAN = """\
x = ag.TensorSpec.like(q)
graph = ag.attention(x, x, x, mask=mask, stats=True)  # an immutable value: ==, hash, print, parse
plan = ag.compile(graph)  # checks it, chooses a backend, builds it, caches the plan
o, lse = plan(q, k, v)  # gradients flow through o and lse
"""


def call_example() -> str:
    """Attention of tensors, in Markdown."""
    return f"```python\n{CALL}```"


def plan_example() -> str:
    """The same as a graph and its plan, in Markdown."""
    return f"```python\n{PLAN}```"


def explain_example() -> str:
    """Who would run the example on an H200: what `explain` says before the graph."""
    x = ag.TensorSpec((2, 8, 512, 64), torch.float16)
    mask = ag.Causal() & (ag.Window(64) | ag.Prefix(4))
    graph = ag.attention(x, x, x, mask=mask, stats=True)
    explanation = ag.explain(graph, target=GPU, backends=("cudnn", "triton"), gradients=())
    text = str(explanation).removesuffix(f"\n{explanation.graph}")
    return f"```text\n{text}\n```"
