# %% [markdown]
# # Attention, backward
#
# The gradient of the attention of [the notebook before](attention_forward.py): GPT-2's batch of 4,
# 12 heads, 1,024 tokens, head size 64, float16, causal. The backward pass is a graph like any
# other: it is derived, planned and explained before a tensor exists. Here it is called by hand, as
# in cuDNN's samples, with the statistics of the forward pass and into buffers of our own.

# %%
import torch

import attn_graph as ag

B, H, S, D = 4, 12, 1024, 64
x = ag.TensorSpec((B, H, S, D), torch.float16)
graph = ag.attention(x, x, x, mask=ag.Causal(), stats=True, outputs={"o": "bshd"})

# %% [markdown]
# ## The gradient as a graph
#
# `vjp` returns two graphs: the forward pass with what it saves, and the backward pass, which reads
# that and the gradients of the outputs. `cotangents=("o",)`: the statistics are only passed on, as
# cuDNN's `stats`, and have no gradient. `outputs=` sets the strides of the gradients, as
# `dQ.set_stride(...)` does; o and do are read where the forward pass left o.

# %%
order = dict.fromkeys(("dq", "dk", "dv"), "bshd")
forward, backward = ag.vjp(graph, cotangents=("o",), outputs=order)
print(backward)

# %% [markdown]
# ## Which backend would run it?
#
# `explain` names the backend of each pass, and any copy that other strides would cost.

# %%
for each in (forward, backward):
    print(ag.explain(each, target="h200", backends=("cudnn", "triton"), gradients=()))

# %% [markdown]
# ## Run it here, by hand
#
# Two plans, one after the other. Nothing is recorded, and the results lie in our tensors.

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(B, H, S, D, device=device).half() for _ in "qkv")
do, o, dq, dk, dv = (
    torch.randn(B, S, H, D, device=device).half().transpose(1, 2) for _ in range(5)
)
lse = torch.empty(B, H, S, device=device)

ag.compile(forward)(q, k, v, out=(o, lse))
plan = ag.compile(backward)
plan(q, k, v, o, lse, do, out=(dq, dk, dv))
print(plan.backend, [tuple(g.stride()) for g in (dq, dk, dv)])

# %% [markdown]
# ## Or by autograd
#
# A plan is differentiable: `backward()` and `torch.autograd.grad` run the plan of the gradient. The
# statistics have a gradient too.

# %%
leaves = [t.clone().requires_grad_() for t in (q, k, v)]
again, _ = ag.compile(graph)(*leaves)
for mine, due in zip((dq, dk, dv), torch.autograd.grad(again, leaves, do), strict=True):
    torch.testing.assert_close(mine, due, atol=2e-2, rtol=2e-2)

# %% [markdown]
# ## Compare
#
# PyTorch's own gradients, of the first batch entry, are the same within float16's rounding.

# %%
first = [t[:1].clone().requires_grad_() for t in (q, k, v)]
theirs = torch.nn.functional.scaled_dot_product_attention(*first, is_causal=True)
for mine, due in zip((dq, dk, dv), torch.autograd.grad(theirs, first, do[:1]), strict=True):
    print(f"largest difference {(mine[:1] - due).abs().max():.1e} of {due.abs().max():.1f}")
    torch.testing.assert_close(mine[:1], due, atol=2e-2, rtol=2e-2)
