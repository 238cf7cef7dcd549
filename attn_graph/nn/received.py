"""The statistic "received": the weight that each key gets from all queries, by a second pass.

It is the gradient of o by a v of a few columns: dv = p^T do. If column c of do is 1 in the heads h
with h % r = c, for r = H / G heads of one key, then column c of dv has the sums of the weights of
head g r + c. So each backend with a backward pass gives it, in memory of its size, and its
derivatives are the second derivatives of attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_graph.errors import GraphError
from attn_graph.ir.arguments import RECEIVED, statistic_names
from attn_graph.ir.storage.scaling import SCALES
from attn_graph.machine.tensors import is_distributed
from attn_graph.nn import ops
from attn_graph.nn.calls import (
    GRAPH_OPTIONS,
    Named,
    Options,
    Values,
    attend_as,
    cast_inputs,
    text_of_call,
)
from attn_graph.nn.results import strides_like
from attn_graph.spec import accumulator

ALIGNED = 8  # columns of v are a multiple of it, as most kernels of GPUs need
STATS, OUTPUTS, WITHIN = (GRAPH_OPTIONS.index(name) for name in ("stats", "outputs", "v"))


def attend_received(
    out: object, q: Tensor, k: Tensor, v: Values, named: Named, options: Options
) -> tuple[Tensor, ...]:
    """o and the statistics of a call, "received" among them."""
    if out is not None:
        raise GraphError(
            f'attention: out= has no tensor for stats "{RECEIVED}", which another pass makes; '
            "leave out= out"
        )
    names = statistic_names(options[STATS], also=(RECEIVED,))
    require_summable(q, k, named)
    others = ("lse", *(name for name in names if name not in ("lse", RECEIVED)))
    results = attend_as(q, k, v, named, with_options(options, {STATS: others}))
    made = dict(zip(("o", *others), results, strict=True))
    made[RECEIVED] = sum_by_key(q, k, named, options, made["lse"])
    return tuple(made[name] for name in ("o", *names))


def require_summable(q: Tensor, k: Tensor, named: Named) -> None:
    """Raise GraphError for tensors without sums of weights."""
    if scales := {*SCALES} & named.keys():
        raise GraphError(
            f'attention: stats "{RECEIVED}" is a gradient, and keys in 8 bits ({min(scales)}) have '
            "none; pass k * k_scale and v * v_scale"
        )
    if any(x.is_nested for x in (q, k)):
        raise GraphError(
            f'attention: stats "{RECEIVED}" has one number of each key; pass packed rows with '
            "q_starts=, q.values() and q.offsets(), in place of jagged tensors"
        )
    if is_distributed(q):
        raise GraphError(
            f'attention: stats "{RECEIVED}" sums over all queries; pass local tensors, and add '
            "the sums of processes that share keys"
        )


def with_options(options: Options, changes: Mapping[int, object]) -> Options:
    """Options with others at some places."""
    return tuple([changes.get(n, x) for n, x in enumerate(options)])


def sum_by_key(q: Tensor, k: Tensor, named: Named, options: Options, lse: Tensor) -> Tensor:
    """The sums of weights by key, [B,H,N]; [H,S] of packed keys, and [H,n,P] of pages."""
    q, k, _, named = cast_inputs(q, k, None, named)
    heads = 1 if "q_starts" in named else -3
    H, G = q.shape[heads], k.shape[2 if "pages" in named else heads]
    shared = H // G if G else 1
    columns = -(-shared // ALIGNED) * ALIGNED
    v = k.new_zeros(()).expand(*k.shape[:-1], columns)
    if "pages" not in named:  # whose pools are large, and whose backends read any strides
        v = v.contiguous()
    shape = (*q.shape[:-1], columns)
    o = q.new_empty_strided(shape, strides_like(shape, q.shape, q.stride())).zero_()
    column = torch.eye(shared, columns, dtype=q.dtype, device=q.device).repeat(G, 1)
    do = torch.zeros_like(o) + (column if heads == 1 else column[:, None])
    plain = with_options(options, {STATS: True, OUTPUTS: None, WITHIN: None})
    text = text_of_call(tuple(named), plain)
    needs = [n == 2 for n in range(3 + len(named))]
    tensors = [q, k, v, *named.values(), o, lse.to(accumulator(q.dtype)), do]
    gradients: list[Tensor] = ops.OP_BACKWARD(tensors, text, needs, [True, False])
    dv = gradients[0][..., :shared]
    if heads == 1 or "pages" in named:  # [..,G,r] after rows or pages
        return dv.flatten(-2).movedim(-1, 0)
    return dv.transpose(-1, -2).flatten(1, 2)
