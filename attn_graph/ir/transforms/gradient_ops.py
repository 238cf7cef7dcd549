"""The ops in derivatives of single steps, each with its own derivative."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch.autograd import forward_ad

from attn_graph.ir.graph import Alike, Emit, Gradients, Op, Values, gives, require_finite, takes
from attn_graph.ir.modifiers import Back, Collect, Modifier, ScoreGradient
from attn_graph.ir.transforms.sums import add_up, apply, fill_zeros
from attn_graph.ir.transforms.tracing import trace_results
from attn_graph.spec import INF, ValueType, to_number


@final
@takes(s=4, ds=4)
@frozen
class Unmasked(ScoreGradient):
    """s, ds -> ds, with 0 where s is -inf."""

    def run(self, s: torch.Tensor, ds: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.where(s == -INF, 0.0, ds),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        return None, emit(self, operands[0], grads[0])[0]

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (None if tangents[1] is None else emit(self, operands[0], tangents[1])[0],)


@final
@takes(p=4, dp=4, dlse=3)
@frozen
class SoftmaxGrad(ScoreGradient):
    """p, dp, dlse -> ds = p * (dp - sum_j p dp + dlse); 0 at p = 0, for any dp and dlse."""

    def run(self, p: torch.Tensor, dp: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor]:
        dp = dp.masked_fill(p == 0, 0.0)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True) + dlse[..., None])
        return (torch.where(p == 0, 0.0, ds),)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return emit(SoftmaxGradJvp(), *operands, *fill_zeros(emit, operands, tangents))


@final
@takes(sinks=1, lse=3, p=4, dp=4, dlse=3)
@gives("dsinks")
@frozen
class SinkGrad(Alike):
    """sinks, lse, p, dp, dlse -> dsinks [H] = sum_bi exp(sink - lse) * (dlse - sum_j p dp)."""

    is_gradient = True

    def run(
        self,
        sinks: torch.Tensor,
        lse: torch.Tensor,
        p: torch.Tensor,
        dp: torch.Tensor,
        dlse: torch.Tensor,
    ) -> tuple[torch.Tensor]:
        return (sink_gradient(sinks, lse, dlse - (p * dp.masked_fill(p == 0, 0.0)).sum(-1)),)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return emit(SinkGradJvp(), *operands, *fill_zeros(emit, operands, tangents))


def sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, surplus: torch.Tensor) -> torch.Tensor:
    """dsinks [H] = sum_bi exp(sink - lse) surplus, with surplus = dlse - delta [B,H,M].

    A row that sees nothing and has the sink -inf adds 0, for any surplus.
    """
    shares = torch.exp(sinks.to(lse.dtype)[:, None] - lse).mul_(surplus)
    return shares.masked_fill_(lse == -INF, 0.0).sum((0, 2)).to(sinks.dtype)


def weigh_again(
    s: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, part: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights p of masked scores s, and the divisor of exp(s - lse): [B,H,M].

    lse is one rounded number. For large scores its rounding error exceeds any weight, so weights
    are divided by their own sum, sinks included. part: no division, since lse covers more keys.
    """
    p = torch.exp(s - lse.masked_fill(lse == -INF, 0.0)[..., None])
    total = torch.ones_like(lse)
    if not part:
        total = p.sum(-1)
        if sinks is not None:
            total += torch.exp(sinks.to(lse.dtype)[:, None] - lse).nan_to_num(1.0)
        total = total.masked_fill((lse == -INF) | (total == 0.0), 1.0)
    return p / total[..., None], total


def clear_blind_rows(x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """A copy of x [B,H,M] or [B,H,M,E] with 0 in the rows that see nothing: lse is -inf.

    Applied to cotangents, so that their values in these rows, NaN included, have no effect.
    """
    blind = lse == -INF
    return x.masked_fill(blind if x.ndim == lse.ndim else blind[..., None], 0.0)


@final
@takes(p=4, x=4, like=4)
@gives("dv")
@frozen
class WeighT(Op):
    """p [B,H,M,N], x [B,H,M,E], like [B,G,N,E] -> scale * p^T x, summed over groups of heads.

    A row of p with only zeros adds 0, for any x there.
    """

    scale: float = field(default=1.0, converter=to_number, validator=require_finite)
    is_gradient = True

    def infer(self, p: ValueType, x: ValueType, like: ValueType) -> tuple[ValueType]:
        return (like,)

    def run(self, p: torch.Tensor, x: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor]:
        return (weigh_rows(p, x, like, p == 0, self.scale),)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        (p, x, like), (tp, tx, _) = operands, tangents
        return (add_up(emit, apply(emit, self, tp, x, like), apply(emit, self, p, tx, like)),)


def weigh_rows(
    p: torch.Tensor, x: torch.Tensor, like: torch.Tensor, unseen: torch.Tensor, scale: float
) -> torch.Tensor:
    """scale * p^T x, summed over groups of heads, without the rows of x whose p is all unseen."""
    B, G, N, E = like.shape
    weighed = x.to(p.dtype).masked_fill(unseen.all(-1, keepdim=True), 0.0)
    full = scale * (p.mT @ weighed)
    return full.reshape(B, G, p.shape[1] // max(1, G), N, E).sum(2).to(like.dtype)


@final
@gives("tp", "tlse")
@frozen
class SoftmaxJvp(Op):
    """p, lse, ts, [sinks, tsinks] -> tp = p (ts - tlse), tlse = sum_j p ts + p(sink) tsinks.

    ts: the tangent of the scores. tsinks: of the sinks. p(sink) = exp(sinks - lse).
    """

    sinks: bool = False
    is_gradient = True

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (4, 3, 4, 1, 1) if self.sinks else (4, 3, 4)

    def infer(self, p: ValueType, lse: ValueType, *_: ValueType) -> tuple[ValueType, ValueType]:
        return p, lse

    def run(
        self, p: torch.Tensor, lse: torch.Tensor, ts: torch.Tensor, *sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ts = ts.masked_fill(p == 0, 0.0)
        tlse = (p * ts).sum(-1)
        if sinks:
            own, tsinks = (x.to(lse.dtype)[:, None] for x in sinks)
            tlse = tlse + torch.exp(own - lse).masked_fill_(lse == -INF, 0.0).mul_(tsinks)
        return p * (ts - tlse[..., None]), tlse


@final
@takes(p=4, dp=4, dlse=3, tp=4, tdp=4, tdlse=3)
@gives("tds")
@frozen
class SoftmaxGradJvp(Alike):
    """p, dp, dlse, tp, tdp, tdlse -> tds, the tangent of ds = p (dp - sum_j p dp + dlse)."""

    is_gradient = True

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return trace_results(SoftmaxGrad().run, operands[:3], operands[3:])[1]


@final
@takes(sinks=1, lse=3, p=4, dp=4, dlse=3, tsinks=1, tlse=3, tp=4, tdp=4, tdlse=3)
@gives("tdsinks")
@frozen
class SinkGradJvp(Alike):
    """sinks, lse, p, dp, dlse and the tangent of each -> the tangent of SinkGrad's dsinks."""

    is_gradient = True

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return trace_results(SinkGrad().run, operands[:5], operands[5:])[1]


Pair = tuple[torch.Tensor, torch.Tensor]  # a value and its tangent


def sink_gradient_tangent(sinks: Pair, lse: Pair, surplus: Pair) -> torch.Tensor:
    """Its tangent: sum_bi exp(sink - lse) ((tsink - tlse) g + tg).

    g is the surplus. Each argument is a value and its tangent.
    """
    moved = sinks[1].to(lse[0].dtype)[:, None] - lse[1]
    return sink_gradient(sinks[0], lse[0], moved * surplus[0] + surplus[1])


def run_traced(op: Op, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of a step; in PyTorch's forward mode, a modifier's by its own derivatives."""
    if not isinstance(op, Modifier | Back | Collect):
        return op.run(*operands)
    given, tangents = zip(*map(forward_ad.unpack_dual, operands), strict=True)
    results = op.run(*given)
    if all(t is None for t in tangents):
        return results
    moved = op.push(lambda step, *xs: step.run(*xs), given, results, tangents)
    pairs = zip(results, moved, strict=True)
    return tuple([x if t is None else forward_ad.make_dual(x, t) for x, t in pairs])
