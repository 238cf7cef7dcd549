"""Forward mode through a whole attention, or through its gradient, as one op.

With it every second derivative is a graph. Forward over reverse is the tangent of a gradient. So is
double backward, since second derivatives are symmetric: the
cotangents of dq, dk and dv are directions in which q, k and v move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError
from attn_graph.ir import ops
from attn_graph.ir.attention import (
    SAVED,
    Attention,
    AttentionGrad,
    GradientOperands,
    as_flags,
)
from attn_graph.ir.fused import Fused, Role, mark_flagged, misfits
from attn_graph.ir.graph import Emit, Gradients, Values
from attn_graph.ir.terms.promises import tangent_promise_problems
from attn_graph.ir.transforms.gradient_ops import clear_blind_rows
from attn_graph.ir.transforms.tracing import trace_results
from attn_graph.spec import ValueType

T = TypeVar("T")
MOVED = ("to", "tlse")  # the tangents of a gradient's o and lse
NO_THIRD = (
    "third derivatives are not built: forward or reverse mode over a second derivative. There are "
    "jvp and vjp of an attention, jvp and vjp of its vjp, and vjp of its jvp"
)
NO_SECOND_PUSH = (
    "jvp of a jvp is not built: take jvp of the vjp, which gives every second derivative, as "
    "torch.func.jacfwd over jacrev does"
)


def spread_flags(flags: Iterable[bool], tangents: Iterable[T]) -> tuple[T | None, ...]:
    """The tangents in the places of their flagged operands; None for the others."""
    each = iter(tangents)
    return tuple(next(each) if flag else None for flag in flags)


@final
@frozen
class GradientTangents(Generic[T]):
    """The operands of an AttentionJvp through a gradient, and their tangents.

    own: of the attention's operands, None for those without.
    """

    read: GradientOperands[T]
    to: T
    tlse: T
    own: tuple[T | None, ...]
    tdo: T | None
    tdlse: T | None


@final
@frozen
class AttentionJvp(Fused):
    """Forward mode through an attention, or through its gradient.

    The operands of `of`, tangents of those flagged -> o, lse, ..., to, tlse. With r the products,
    p = exp(s - lse) and z the kept places of dropout over (1 - rate):

        tr   = scale (tq k^T + q tk^T)
        ts   = tr, forward through the modifiers; 0 where s is -inf
        tlse = sum_j p ts + exp(sinks - lse) tsinks
        to   = sum_j (p z) (ts v + tv) - tlse o

    Through a gradient: its operands, to, tlse, tangents -> the tangent of each gradient. With the
    letters of AttentionGrad, and g = dp - delta + dlse:

        tp     = p (ts - tlse)
        tdp    = (tdo v^T + do tv^T) z
        tdelta = sum_e (tdo o + do to)
        tg     = tdp - tdelta + tdlse,   tds = tp g + p tg   then back through the modifiers
        tdq    = scale (tds k + ds tk),  tdk = scale (tds^T q + ds^T tq)
        tdv    = (tp z)^T do + (p z)^T tdo
        tdsinks = sum_bi exp(sinks - lse) ((tsinks - tlse) (dlse - delta) + tdlse - tdelta)

    `tangents` flags the operands of the attention that have one, `with_tdo` and `with_tdlse` the
    cotangents; the others stay fixed.
    """

    of: Attention | AttentionGrad
    tangents: tuple[bool, ...] = field(converter=as_flags)
    with_tdo: bool = False
    with_tdlse: bool = False
    is_gradient = True

    def __attrs_post_init__(self) -> None:
        node, flags = self.attention, self.tangents
        if node.keeps:
            raise GraphError(
                f"attention_jvp: {node} keeps weights, which have no tangent; pass keeps=False"
            )
        if len(flags) != len(node.ranks):
            problem = f"{len(flags)} tangents for {len(node.ranks)} operands; pass a flag for each"
            raise GraphError(f"attention_jvp: {problem}")
        pairs = zip(node.roles, flags, node.trains, strict=True)
        if fixed := [role for role, flag, trained in pairs if flag and not trained]:
            raise GraphError(f"attention_jvp: {', '.join(fixed)} can't have a tangent")
        if self.grad is None and (self.with_tdo or self.with_tdlse):
            raise GraphError(
                "attention_jvp: tangents of do and dlse go with a gradient, not a forward"
            )

    @property
    def grad(self) -> AttentionGrad | None:
        """The gradient it goes through; None if it goes through an attention."""
        return self.of.grad

    @property
    def jvp(self) -> AttentionJvp:
        return self

    @property
    def attention(self) -> Attention:
        return self.of.attention

    @cached_property
    def takes(self) -> tuple[Role, ...]:
        moved = mark_flagged(self.attention.takes, self.tangents, "t")
        first = MOVED if self.grad else ()
        last = *(("tdo",) * self.with_tdo), *(("tdlse",) * self.with_tdlse)
        return (*self.of.takes, *map(Role.of_rows, first), *moved, *map(Role.of_rows, last))

    @cached_property
    def gives(self) -> tuple[Role, ...]:
        if self.grad is not None:
            return tuple([role.marked("t") for role in self.grad.gives])
        return (*self.attention.gives, *map(Role.of_rows, MOVED))

    @property
    def statistics(self) -> tuple[str, ...]:
        return () if self.grad else (*self.attention.statistics, "tlse")

    @property
    def without_gradient(self) -> tuple[str, ...]:
        return self.of.without_gradient

    @property
    def saved(self) -> tuple[str, ...]:
        return () if self.grad else (*SAVED, *MOVED)

    @property
    def carried(self) -> tuple[int, ...]:
        n = len(self.of.takes)
        return (*self.of.carried, *((n, n + 1) if self.grad else ()))

    def split(self, operands: Sequence[T]) -> tuple[tuple[T, ...], tuple[T | None, ...]]:
        """The operands of `of`, and the tangent of each of the attention's own, or None."""
        n = len(self.of.takes)
        first = n + len(MOVED) if self.grad else n
        return tuple(operands[:n]), spread_flags(self.tangents, operands[first:])

    def directions(self, operands: Sequence[T]) -> GradientTangents[T]:
        """The operands by role, through a gradient."""
        assert self.grad is not None
        read, moved = self.split(operands)
        (to, tlse, *more), count = operands[len(read) :], sum(self.tangents)
        rest = iter(more[count:])
        return GradientTangents(
            self.grad.split(read),
            to,
            tlse,
            moved,
            next(rest) if self.with_tdo else None,
            next(rest) if self.with_tdlse else None,
        )

    def problems(self, *types: ValueType) -> Iterator[str]:
        node, (read, moved) = self.attention, self.split(types)
        own = read[: len(self.tangents)]
        yield from self.of.problems(*read)
        who, names = "attention_jvp", [f"t{x}" for x in node.roles]
        yield from misfits(who, names, moved, own)
        if self.grad is not None:
            x, (o, lse) = self.directions(types), node.infer(*own)
            yield from misfits(
                who, [*MOVED, "tdo", "tdlse"], [x.to, x.tlse, x.tdo, x.tdlse], [o, lse, o, lse]
            )
            yield from self.of.gradient_problems()
        (B, H, M, _), N = types[0].shape, types[1].shape[2]
        for modifier in node.modifiers:
            yield from tangent_promise_problems(modifier, (B, H, M, N))

    def gradient_problems(self) -> Iterator[str]:
        if self.grad is not None:
            yield NO_THIRD
        for modifier in () if self.grad else self.attention.modifiers:
            yield from modifier.second_problems()

    def push_problems(self) -> Iterator[str]:
        yield NO_THIRD if self.grad else NO_SECOND_PUSH

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        results = self.of.infer(*types[: len(self.of.takes)])
        return results if self.grad else (*results, *results[:2])

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """By PyTorch's forward mode over the definition of the attention, or of its gradient."""
        if self.grad is None:
            results, moved = trace_results(self.attention.run, *self.split(operands))
            return (*results, *(clear_blind_rows(t, results[1]) for t in moved[:2]))
        x, whole = self.directions(operands), evolve(self.grad, with_do=True, with_dlse=True)
        o, lse, do, dlse = x.read.o, x.read.lse, x.read.do, x.read.dlse
        do = torch.zeros_like(o) if do is None else do
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        moves = (*x.own, x.to, x.tlse, x.tdo, x.tdlse)
        return trace_results(whole.run, (*x.read.own, o, lse, do, dlse), moves)[1]

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        """First gradients by the tangents; second derivatives along them by the others."""
        ops.refuse_cotangents(self, grads)
        node, (own, moved) = self.attention, self.split(operands)
        saved, given = (dict(zip(self.names, x, strict=True)) for x in (results, grads))
        usual, second = ([given[name] for name in names] for names in (SAVED, MOVED))
        read = [*own, *(saved[name] for name in SAVED)]
        if all(x is None for x in second):
            made = emit(AttentionGrad(node, node.trains, *present(usual)), *read, *some(usual))
            return (*spread_flags(node.trains, made), *(None for _ in some(moved)))
        alone = emit(AttentionGrad(node, self.tangents, *present(second)), *read, *some(second))
        grad = AttentionGrad(node, node.trains, *present(second))
        along = AttentionJvp(grad, self.tangents, *present(usual))
        moves = [*(saved[name] for name in MOVED), *some(moved), *some(usual)]
        made = emit(along, *read, *some(second), *moves)
        return (*spread_flags(node.trains, made), *alone)


def present(values: Values) -> tuple[bool, ...]:
    return tuple(x is not None for x in values)


def some(values: Values) -> list[Any]:  # Any: values
    return [x for x in values if x is not None]


def push_attention(node: Attention, emit: Emit, operands: Values, tangents: Values) -> Values:
    """The results of an AttentionJvp, by lse; empty if no operand has a tangent."""
    moved = [t if trained else None for t, trained in zip(tangents, node.trains, strict=True)]
    if not some(moved):
        return ()
    by_lse = evolve(node, keeps=False)
    return emit(AttentionJvp(by_lse, present(moved)), *operands, *some(moved))
