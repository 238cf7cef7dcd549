"""An attention that keeps its weights, so that its gradient computes no softmax again.

This is worth its memory for short rows: weights [B,H,M,N] take no more bytes than q, k, v and o of
as many heads while N <= 2 (D + E).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError
from attn_graph.ir import ops
from attn_graph.ir.attention import Attention, AttentionGrad, as_flags, dropout_factor
from attn_graph.ir.gradient_ops import SoftmaxGrad, WeighT
from attn_graph.ir.graph import Emit, Eqn, Gradients, Graph, Op, Values
from attn_graph.ir.modifiers import Collect
from attn_graph.spec import ValueType, accumulator

T = TypeVar("T")


def is_keepable(attention: Attention) -> bool:
    """True for a softmax of scores, and perhaps a bias, under a mask and dropout."""
    alone = evolve(attention, dropout=0.0)
    return alone.is_bare or alone.is_biased


def require_keepable(op: Op, _: object, attention: Attention) -> None:
    if not is_keepable(attention):
        limit = "more than a softmax of scores and a bias under a mask"
        raise GraphError(f"{type(op).__name__}: {attention} is {limit}")


@final
@frozen
class KeptAttention(Op):
    """The operands of an Attention -> o, weights [B,H,M,N] in the dtype of q.

    weights = exp(s - lse): 0 at masked places and in rows that see nothing; negative if dropped by
    dropout. They serve the gradient alone, and have none themselves.
    """

    attention: Attention = field(validator=require_keepable)

    @property
    def names(self) -> tuple[str, ...]:
        return ("o", "weights")

    @property
    def saved(self) -> tuple[str, ...]:
        return ("weights",)

    @property
    def without_gradient(self) -> tuple[str, ...]:
        return ("weights",)

    @property
    def reads(self) -> int:
        return self.attention.reads

    @property
    def roles(self) -> tuple[str, ...]:
        return self.attention.roles

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return self.attention.ranks

    def problems(self, *types: ValueType) -> Iterator[str]:
        yield from self.attention.problems(*types)

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        q, k = types[:2]
        weights = ValueType((*q.shape[:3], k.shape[2]), q.dtype)
        return self.attention.infer(*types)[0], weights

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given, node = self.attention.split(operands), self.attention
        (s,) = ops.Scores(node.scale).run(given.q, given.k)
        for modifier, data in zip(node.modifiers, given.modifiers, strict=True):
            (s,) = modifier.run(s, *data.values())
        if node.mask is not None:
            (s,) = ops.Mask(node.mask).run(s, *given.mask.values())
        p, _ = ops.Softmax().run(s)
        z = dropout_factor(node, given, s)
        return *ops.Weigh().run(p * z, given.v), torch.where(z == 0, -p, p).to(given.q.dtype)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        ops.refuse_cotangents(self, grads)
        trains = self.attention.trains
        made = iter(
            emit(KeptAttentionGrad(self.attention, trains), *operands, results[1], grads[0])
        )
        return tuple(next(made) if trained else None for trained in trains)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (*self.attention.push(emit, operands, (), tangents)[:1], None)


@final
@frozen
class KeptAttentionGrad(Op):
    """The operands of an Attention, weights, do -> a gradient for each wanted operand.

    By the formulas of AttentionGrad, with p given and delta = sum_j p dp. Its derivatives are those
    of AttentionGrad, with o and lse computed anew.
    """

    attention: Attention = field(validator=require_keepable)
    wants: tuple[bool, ...] = field(converter=as_flags)
    is_gradient = True

    @property
    def names(self) -> tuple[str, ...]:
        return self.again.names

    @property
    def reads(self) -> int:
        return self.attention.reads

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (*self.attention.ranks, 4, 4)

    @property
    def again(self) -> AttentionGrad:
        """This gradient, by o and lse instead of weights."""
        return AttentionGrad(self.attention, self.wants)

    @property
    def carried(self) -> tuple[int, ...]:
        return (len(self.wants),)

    def split(self, operands: Sequence[T]) -> tuple[tuple[T, ...], T, T]:
        """The attention's own operands, weights, do."""
        *own, weights, do = operands
        return tuple(own), weights, do

    def problems(self, *types: ValueType) -> Iterator[str]:
        own, weights, do = self.split(types)
        yield from self.attention.problems(*own)
        due = KeptAttention(self.attention).infer(*own)
        for name, type_, right in zip(("do", "weights"), (do, weights), due, strict=True):
            if type_ != right:
                yield f"kept_attention_grad: {name} {type_} should be {right}"

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        return self.again.infer(*types[: len(self.wants)])

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, weights, do = self.split(operands)
        (q, k, v), node, scale = own[:3], self.attention, self.attention.scale
        signed = weights.to(accumulator(q.dtype))
        p, left = signed.abs(), signed.clamp(min=0.0) / (1 - node.dropout)
        do = do.to(p.dtype).masked_fill((p == 0).all(-1, keepdim=True), 0.0)
        (dp,) = ops.Scores().run(do, v.to(p.dtype))
        dp = (dp / (1 - node.dropout)).masked_fill(signed < 0, 0.0)
        (ds,) = SoftmaxGrad().run(p, dp, torch.zeros_like(dp[..., 0]))
        steps = zip(node.modifiers, node.split(own).modifiers, strict=True)
        gradients = (
            *ops.Weigh(scale).run(ds, k),
            *WeighT(scale).run(ds, q, k),
            *WeighT().run(left, do, v),
            *(x for step, data in steps for x in Collect(step).run(ds, *data.values())),
        )
        return tuple(g for g, wanted in zip(gradients, self.wants, strict=False) if wanted)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        own, _, do = self.split(operands)
        *gradients, _, _, ddo = self.again.pull(
            emit, self.read_again(emit, own, do), results, grads
        )
        return (*gradients, None, ddo)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        own, _, do = self.split(operands)
        moved, _, tdo = self.split(tangents)
        return self.again.push(
            emit, self.read_again(emit, own, do), results, (*moved, None, None, tdo)
        )

    def read_again(self, emit: Emit, own: Values, do: object) -> Values:
        return (*own, *emit(self.attention, *own), do)


def keep_weights(graph: Graph) -> Graph | None:
    """A graph of one attention with kept weights, if o is its only output; else None."""
    if len(graph.eqns) != 1 or graph.outputs != (len(graph.inputs),):
        return None
    (eqn,) = graph.eqns
    if not isinstance(eqn.op, Attention) or not is_keepable(eqn.op):
        return None
    op = KeptAttention(eqn.op)
    outs = op.infer(*(graph.types[i] for i in eqn.args))
    return evolve(graph, eqns=(Eqn(op, eqn.args, outs),))


def keeps_weights(graph: Graph) -> bool:
    """True if an attention keeps its weights, or a gradient reads kept ones."""
    return any(isinstance(eqn.op, KeptAttention | KeptAttentionGrad) for eqn in graph.eqns)
