"""Other ways to compute a job in PyTorch, which `benchmarks/cpu.py` compares ours with.

Whatever a peer may know before it is called is made ahead, outside of what is timed: dense masks,
lists of documents, compiled code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.cpu_jobs import Job, Operands, document_ends

INF = math.inf
Attend = Callable[[Operands], torch.Tensor]
sdpa = F.scaled_dot_product_attention


@frozen
class Peer:
    """A way to compute jobs: which, and how; `make` does what need not be done in each call."""

    fits: Callable[[Job], bool]
    make: Callable[[Job, Operands], Attend]
    compiles: bool = False  # for seconds


def visible_places(job: Job, x: Operands) -> torch.Tensor | None:
    """The mask as a dense tensor that broadcasts to [B,H,M,N], True where a query sees a key."""
    i, j = torch.arange(job.before, job.N)[:, None], torch.arange(job.N)
    seen = torch.ones(1, job.N, dtype=torch.bool)
    if job.causal:
        seen = (j <= i) | (j < job.prefix)
    if job.left is not None:
        seen = seen & (j >= i - job.left)
    if job.documents:
        number = x["q_segments"][0]
        seen = seen & (number[:, None] == number)
    if job.lengths:
        seen = seen & (j < x["kv_lengths"][:, None, None, None])
    if job.block:
        seen = seen & x["keep_blocks"][:, :, i[:, 0] // job.block][..., j // job.block]
    if job.keep:
        seen = x["keep"]
    return seen if job.is_masked else None


def alibi_addend(job: Job) -> torch.Tensor:
    """-slope |i - j| [1,H,M,N], slopes as the paper has them for a power of 2 heads.

    Of three axes alone, SDPA's fused kernel would not take it.
    """
    i, j = torch.arange(job.sizes[2])[:, None], torch.arange(job.N)
    H = job.sizes[1]
    slopes = 2.0 ** (-8 * torch.arange(1, H + 1) / H)
    return -slopes[None, :, None, None] * (i - j).abs()


def dense_addend(job: Job, x: Operands) -> torch.Tensor:
    """What is added to scores that broadcasts to [B,H,M,N], -inf where a place is hidden."""
    addend = alibi_addend(job) if job.alibi else torch.zeros(())
    seen = visible_places(job, x)
    return (addend if seen is None else torch.where(seen, addend, -INF)).to(job.dtype)


def make_bias(job: Job, x: Operands) -> torch.Tensor:
    """The bias [1,H,M,N]: given, or gathered from a table as each call has to."""
    if job.bias:
        return x["bias"]
    apart = torch.arange(job.N) - torch.arange(job.sizes[2])[:, None]
    return x["table"][None, :, apart.clamp(-job.reach, job.reach) + job.reach]


def make_sdpa(job: Job, x: Operands) -> Attend:
    """SDPA: causal by its flag, any other mask as a dense tensor."""
    call = partial(sdpa, enable_gqa=job.r > 1)
    if job.is_biased:
        return lambda x: call(x["q"], x["k"], x["v"], attn_mask=make_bias(job, x))
    if is_just_causal(job):
        return lambda x: call(x["q"], x["k"], x["v"], is_causal=True)
    mask = dense_addend(job, x) if job.alibi else visible_places(job, x)
    return lambda x: call(x["q"], x["k"], x["v"], attn_mask=mask)


def is_just_causal(job: Job) -> bool:
    """Whether `is_causal` says it all, to which the first query is at the first key."""
    others = job.left is not None or job.documents or job.lengths or job.prefix or job.alibi
    return job.causal and job.before == 0 and not others


def make_addend(job: Job, x: Operands) -> Attend:
    """SDPA with a mask of floats, which it need not make of booleans in each call."""
    addend = dense_addend(job, x)
    return lambda x: sdpa(x["q"], x["k"], x["v"], attn_mask=addend, enable_gqa=job.r > 1)


def fold_heads(job: Job, q: torch.Tensor) -> torch.Tensor:
    """[B,H,M,D] -> [B,G,r M,D]: the query heads of a key head as rows of one head."""
    return q.reshape(q.shape[0], job.G, -1, q.shape[-1])


def make_folded(job: Job, x: Operands) -> Attend:
    """SDPA on key heads alone, which reads each key and value once."""
    mask, (B, H, M, _) = visible_places(job, x), job.sizes

    def attend(x: Operands) -> torch.Tensor:
        o = sdpa(fold_heads(job, x["q"]), x["k"], x["v"], attn_mask=mask)
        return o.reshape(B, H, M, -1)

    return attend


def make_formula(job: Job, x: Operands) -> Attend:
    """Products, a softmax and the steps between, each an operator of PyTorch."""
    (B, H, M, D), seen = job.sizes, visible_places(job, x)
    cap, hidden = job.soft_cap, None if seen is None else ~seen
    addend = dense_addend(job, x) if job.alibi else None

    def attend(x: Operands) -> torch.Tensor:
        q = fold_heads(job, x["q"]) if job.r > 1 else x["q"]
        s = (q * D**-0.5) @ x["k"].mT
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        if job.is_biased:
            s = s + make_bias(job, x)
        if addend is not None:
            s = s + addend
        elif hidden is not None:
            s = s.masked_fill(hidden, -INF)
        return (torch.softmax(s, -1) @ x["v"]).reshape(B, H, M, -1)

    return attend


def make_loop(job: Job, x: Operands) -> Attend:
    """SDPA of each document in turn, or of each sequence with its keys."""
    if not job.documents:
        return partial(attend_by_length, job)
    ends = document_ends(job)

    def attend(x: Operands) -> torch.Tensor:
        q, k, v = x["q"], x["k"], x["v"]
        parts = [
            sdpa(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=job.causal) for a, b in ends
        ]
        return torch.cat(parts, 2)

    return attend


def attend_by_length(job: Job, x: Operands) -> torch.Tensor:
    """SDPA of each sequence in turn, with its keys alone."""
    q, k, v = x["q"], x["k"], x["v"]
    call = partial(sdpa, is_causal=job.causal, enable_gqa=job.r > 1)
    parts = [
        call(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        for b, n in enumerate(x["kv_lengths"].tolist())
    ]
    return torch.cat(parts)


def make_flex(job: Job, x: Operands, *, compiled: bool = True) -> Attend:
    """FlexAttention, compiled for the job, with its mask of blocks; else as a formula."""
    (B, _, M, _), N = job.sizes, job.N
    seen, blocks = visible_places(job, x), None
    if seen is not None:
        keep = flex_mask(job, x)
        each = (B if job.lengths or job.keep or job.block else None, None, M, N)
        blocks = create_block_mask(keep, *each, device="cpu")
    torch._dynamo.reset()  # else the ninth job would not be compiled
    call: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    call = partial(call, block_mask=blocks, enable_gqa=job.r > 1)
    change = flex_change(job)

    def attend(x: Operands) -> torch.Tensor:
        o: torch.Tensor = call(x["q"], x["k"], x["v"], score_mod=change)
        return o

    if compiled:
        attend(x)
    return attend


def flex_mask(job: Job, x: Operands) -> Callable[..., torch.Tensor]:
    """The mask in FlexAttention's terms."""

    def keep(b: Any, h: Any, m: Any, j: Any) -> torch.Tensor:
        i = m + job.before
        seen: torch.Tensor = (j >= 0) if not job.causal else (j <= i) | (j < job.prefix)
        if job.left is not None:
            seen = seen & (j >= i - job.left)
        if job.documents:
            seen = seen & (x["q_segments"][0][m] == x["q_segments"][0][j])
        if job.lengths:
            seen = seen & (j < x["kv_lengths"][b])
        if job.block:
            seen = seen & x["keep_blocks"][b, 0, m // job.block, j // job.block]
        return seen & x["keep"][b, 0, m, j] if job.keep else seen

    return keep


def flex_change(job: Job) -> Callable[..., torch.Tensor] | None:
    """The steps on scores in FlexAttention's terms."""
    H, cap = job.sizes[1], job.soft_cap
    if cap is not None:
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    if job.alibi:
        return lambda s, b, h, i, j: s - torch.exp2(-8.0 * (h + 1) / H) * (i - j).abs()
    return None


PEERS = {
    "sdpa": Peer(lambda job: job.soft_cap is None, make_sdpa),
    "sdpa, mask of floats": Peer(
        lambda job: job.is_masked and not (is_just_causal(job) or job.soft_cap or job.alibi),
        make_addend,
    ),
    "sdpa, heads folded": Peer(
        lambda job: job.is_foldable and job.r > 1 and job.soft_cap is None,
        make_folded,
    ),
    "sdpa, in a loop": Peer(
        lambda job: bool(job.documents or job.lengths) and job.soft_cap is None, make_loop
    ),
    "formula": Peer(lambda job: job.is_foldable or job.r == 1, make_formula),
    "flex": Peer(lambda job: not (job.backward or job.is_biased), make_flex, compiles=True),
}


def make_peers(
    job: Job, x: Operands, peers: Mapping[str, Peer] = PEERS, *, compiled: bool = False
) -> dict[str, Attend]:
    """Each peer that can do the job, by name; compiled: also those that compile for seconds."""
    return {
        name: peer.make(job, x)
        for name, peer in peers.items()
        if peer.fits(job) and (compiled or not peer.compiles)
    }
