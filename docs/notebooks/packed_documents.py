# %% [markdown]
# # Packed documents
#
# Documents of different lengths, one after the other in rows of equal length, none of which sees
# another. No dense mask is made, and no padding is computed.

# %%
import torch

import attn_graph as ag

# %% [markdown]
# ## Pack
#
# Every position carries the number of its document.

# %%
lengths = torch.tensor([[300, 212, 512], [700, 100, 224]])
S = int(lengths[0].sum())
documents = torch.stack([torch.repeat_interleave(torch.arange(3), row) for row in lengths])
print(list(documents.shape))

# %% [markdown]
# ## What is left to compute
#
# The mask and the numbers say which tiles of the scores are empty before anything runs.

# %%
mask = ag.Causal() & ag.SameSegment()
data = {"q_segments": documents, "kv_segments": documents}
print(mask.picture(S, S, **{name: x[:1] for name, x in data.items()}))

# %%
print(ag.tiles(mask, S, S, B=2, data=data))

# %% [markdown]
# ## Plan and run
#
# `segments` declares the numbers as inputs, which the plan takes by name.

# %%
B, H, D = 2, 4, 64
x = ag.TensorSpec((B, H, S, D), torch.float32)
numbers = ag.TensorSpec.like(documents)
plan = ag.compile(ag.attention(x, x, x, mask=ag.Causal(), segments=(numbers, numbers)))
torch.manual_seed(0)
q, k, v = torch.randn(3, B, H, S, D, device=plan.target.device).unbind()
data = {name: numbers.to(q.device) for name, numbers in data.items()}
o = plan(q, k, v, **data)
print(plan.backend)

# %%
plan.cost(**data)

# %% [markdown]
# ## It is what each document alone gives

# %%
start = 0
for length in lengths[0].tolist():
    alone = (slice(0, 1), slice(None), slice(start, start + length))
    due = torch.nn.functional.scaled_dot_product_attention(
        q[alone], k[alone], v[alone], is_causal=True
    )
    torch.testing.assert_close(o[alone], due)
    start += length

# %% [markdown]
# ## From FlexAttention
#
# A `mask_mod` that compares captured numbers of documents is read as the same mask; the tensors
# that it captures come beside it.


# %%
def same_document(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (documents[b, q_idx] == documents[b, kv_idx])


translation, tensors = ag.from_flex(same_document)
print(translation, list(tensors))
