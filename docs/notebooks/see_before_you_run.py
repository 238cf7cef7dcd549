# %% [markdown]
# # See before you run
#
# Who runs this attention on that machine, why nobody faster, how many bytes it takes and how long
# it lasts at least: all of it is known before there is a tensor, and on a laptop.

# %%
import torch

import attn_graph as ag

# %% [markdown]
# ## A mask is a value
#
# It prints, compares and shows itself. This one lets a token see the 256 before it, and the first
# four of all.

# %%
mask = ag.Causal() & (ag.Window(256) | ag.Prefix(4))
mask

# %%
print(ag.tiles(mask, 8192, 8192))

# %% [markdown]
# ## A graph is a value

# %%
x = ag.TensorSpec((2, 32, 8192, 128), torch.bfloat16)
keys = ag.TensorSpec((2, 8, 8192, 128), torch.bfloat16)
graph = ag.attention(x, keys, keys, mask=mask, soft_cap=30.0)
graph

# %% [markdown]
# ## Which backend runs it, and why not the others
#
# Each reason names a limit, what there is instead, and what would lift it.

# %%
ag.explain(graph, target="h200")

# %% [markdown]
# ## Several machines at once

# %%
for name in ("a100", "h200", "b200"):
    explanation = ag.explain(graph, target=name)
    forward = explanation.cost.forward
    print(
        f"{name}: {explanation.backend}, at least {1e3 * forward.seconds:.2f} ms, "
        f"bound by {forward.bound}"
    )

# %% [markdown]
# ## How many bytes
#
# A plan for the machine at hand, of a smaller problem: what the outputs, the tensors that wait for
# the backward pass, and the workspace take.

# %%
small = ag.TensorSpec((1, 4, 1024, 64), torch.float32)
plan = ag.compile(ag.attention(small, small, small, mask=mask), target="cpu")
plan.memory()

# %% [markdown]
# ## And then it runs as it said

# %%
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, 1024, 64).unbind()
print(plan.verify(q, k, v))
