# %% [markdown]
# # Attention, forward
#
# Scaled dot product attention of GPT-2, as cuDNN's samples show it: a batch of 4, 12 heads, 1,024
# tokens, head size 64, float16, causal, with the statistics that a backward pass reads. It is
# declared here without a tensor, planned for an H200 that need not be there, and then run on the
# machine at hand, into buffers of our own.
#
# o = softmax(q kᵀ / √D) v

# %%
import torch

import attn_graph as ag

# %% [markdown]
# ## Declare
#
# A `TensorSpec` is what is known of a tensor before there is one: shape, dtype and memory order.
# The shape is logical, `[batch, heads, positions, head size]`, whatever the order in memory; `bshd`
# is that of a projection's output. `stats=True` returns the logarithm of the softmax's denominator
# beside o.
#
# | cuDNN's sample | here |
# |---|---|
# | `graph.tensor(dim=..., stride=..., data_type=...)` | `TensorSpec(shape, dtype, strides)` |
# | `graph.sdpa(..., use_causal_mask=True)` | `attention(..., mask=Causal())` |
# | `generate_stats=True` | `stats=True` |
# | `o.set_output(True).set_dim(...).set_stride(...)` | `outputs={"o": ...}` |
# | `graph.build([cudnn.heur_mode.A])` | `compile(graph)` |
# | `graph.get_workspace_size()` | `plan.memory().workspace_forward` |
# | `graph.execute({q: q_gpu, ..., o: o_gpu}, ...)` | `plan(q, k, v, out=o)` |
# | `graph.execute(..., workspace)` | `compile(graph, workspace=Workspace(memory=workspace))` |

# %%
B, H, S, D = 4, 12, 1024, 64
x = ag.TensorSpec((B, H, S, D), torch.float16)
graph = ag.attention(x, x, x, mask=ag.Causal(), stats=True, outputs={"o": "bshd"})
print(graph)

# %% [markdown]
# q, k and v are dense here, and o is to lie like the input of the projection behind it: the text
# says so after the arrow. Without `outputs=` o would lie like q.
#
# ## Which backend would run it?
#
# `explain` builds nothing and needs no GPU. It says which backend runs the graph on a machine, what
# speaks against the others, and what the call costs at least. Here it is asked for cuDNN first,
# which writes o in these strides itself.

# %%
explanation = ag.explain(graph, target="h200", backends=("cudnn", "triton"), gradients=())
print(explanation)

# %%
work = explanation.cost.forward
print(f"{work.flops / 1e9:.2f} Gflop, at least {1e6 * work.seconds:.1f} us, bound by {work.bound}")

# %% [markdown]
# ## Run it here
#
# The same graph, planned for the current GPU, or for the CPU where there is none. The workspace and
# the results are ours: the call allocates neither. The plan takes tensors as declared, and refuses
# others.

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
count = ag.compile(graph).memory().workspace_forward
workspace = torch.empty(count, dtype=torch.uint8, device=device)
plan = ag.compile(graph, workspace=ag.Workspace(memory=workspace))

torch.manual_seed(0)
q, k, v = (torch.randn(B, H, S, D, device=device).half() for _ in "qkv")
o = torch.empty(B, S, H, D, dtype=torch.float16, device=device).transpose(1, 2)
lse = torch.empty(B, H, S, device=device)
plan(q, k, v, out=(o, lse))
print(plan.backend, list(o.shape), o.stride(), list(lse.shape))

# %% [markdown]
# ## Compare
#
# PyTorch's own attention gives the same within float16's rounding. `verify` holds a plan to the
# formula in float64, by the accuracy rule of the semantics; two heads are enough to see it.

# %%
theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(o, theirs, atol=2e-3, rtol=2e-3)

part = [t[:1, :2] for t in (q, k, v)]
specs = [ag.TensorSpec.like(t) for t in part]
print(ag.compile(ag.attention(*specs, mask=ag.Causal(), stats=True)).verify(*part))
