# %% [markdown]
# # Attention, backward
#
# The gradient of the attention of [the notebook before](attention_forward.py): GPT-2's batch of 4,
# 12 heads, 1,024 tokens, head size 64, float16, causal. The backward pass is a graph like any
# other: it is derived, planned and explained before a tensor exists.

# %%
import torch

import attn_graph as ag

B, H, S, D = 4, 12, 1024, 64
x = ag.TensorSpec((B, H, S, D), torch.float16, layout="bshd")
graph = ag.attention(x, x, x, mask=ag.Causal(), stats=True)

# %% [markdown]
# ## The gradient as a graph
#
# `vjp` returns two graphs: the forward pass with what it saves, and the backward pass, which reads
# that and the gradients of the outputs.

# %%
forward, backward = ag.vjp(graph)
print(backward)

# %% [markdown]
# ## Ask who would run it
#
# `explain` covers both passes. cuDNN's backward reads o and the statistics, as its samples pass
# them from one call to the other; here the plan keeps them.

# %%
print(ag.explain(graph, target="h200", backends=("cudnn", "triton")))

# %% [markdown]
# ## Run it here
#
# A plan is differentiable: `backward()` and `torch.autograd.grad` run the plan of the gradient. The
# statistics have a gradient too.

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
plan = ag.compile(graph)
torch.manual_seed(0)
q, k, v = (
    torch.randn(B, S, H, D, device=device).half().transpose(1, 2).requires_grad_() for _ in "qkv"
)
o, lse = plan(q, k, v)
do = torch.randn(B, S, H, D, device=device).half().transpose(1, 2)
dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
print(plan.backend, [tuple(g.stride()) for g in (dq, dk, dv)])

# %% [markdown]
# ## Compare
#
# PyTorch's own gradients, of the first batch entry, are the same within float16's rounding.

# %%
first = [t[:1].detach().requires_grad_() for t in (q, k, v)]
theirs = torch.nn.functional.scaled_dot_product_attention(*first, is_causal=True)
for mine, due in zip((dq, dk, dv), torch.autograd.grad(theirs, first, do[:1]), strict=True):
    print(f"largest difference {(mine[:1] - due).abs().max():.1e} of {due.abs().max():.1f}")
    torch.testing.assert_close(mine[:1], due, atol=2e-2, rtol=2e-2)
