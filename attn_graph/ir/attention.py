"""The whole of attention as one op, and its gradient as another: what lowerings take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, final

import torch
from attrs import field, frozen

from attn_graph import masks
from attn_graph.errors import GraphError
from attn_graph.ir import ops
from attn_graph.ir.graph import Emit, Gradients, Op, Values
from attn_graph.ir.modifiers import INF, Modifier, every_place, find_restores, require_finite
from attn_graph.spec import ValueType, to_number

T = TypeVar("T")


def in_order(steps: Iterable[Modifier]) -> tuple[Modifier, ...]:
    """A converter: modifiers as a tuple."""
    return tuple(steps)


def as_flags(values: Iterable[bool]) -> tuple[bool, ...]:
    """A converter: booleans as a tuple."""
    return tuple(map(bool, values))


@final
@frozen
class Operands(Generic[T]):
    """What an Attention reads, by role."""

    q: T
    k: T
    v: T
    modifiers: tuple[dict[str, T], ...]
    mask: dict[str, T]
    sinks: T | None
    seed: T | None
    offset: T | None


@final
@frozen
class Attention(Op):
    """q, k, v, operands of the modifiers, of the mask, sinks, seed and offset -> o, lse.

    The chain scores, modifiers, mask, softmax, dropout, weigh; `unfold` spells it out.
    """

    scale: float = field(default=1.0, converter=to_number, validator=require_finite)
    modifiers: tuple[Modifier, ...] = field(default=(), converter=in_order)
    mask: masks.Mask | None = None
    sinks: bool = field(default=False, converter=bool)
    dropout: float = field(default=0.0, converter=to_number, validator=ops.share)
    names = ("o", "lse")

    @property
    def reads(self) -> int:  # type: ignore[override]  # a class's constant elsewhere
        """How many operands `infer` reads: all."""
        return len(self.ranks)

    @property
    def roles(self) -> tuple[str, ...]:  # type: ignore[override]  # a class's constant elsewhere
        """A name for each operand, in order."""
        return (
            *("q", "k", "v"),
            *(name for modifier in self.modifiers for name in modifier.needs),
            *(self.mask.needs if self.mask else ()),
            *(("sinks",) if self.sinks else ()),
            *(("seed", "offset") if self.dropout else ()),
        )

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (
            *(4, 4, 4),
            *(rank for modifier in self.modifiers for rank in modifier.ranks[1:]),
            *(ops.Mask(self.mask).ranks[1:] if self.mask else ()),
            *((1,) if self.sinks else ()),
            *((0, 0) if self.dropout else ()),
        )

    @property
    def trains(self) -> tuple[bool, ...]:
        """Which operands have a gradient."""
        return (
            *(True, True, True),
            *(name in m.trains for m in self.modifiers for name in m.needs),
            *(False for _ in (self.mask.needs if self.mask else ())),
            *((True,) if self.sinks else ()),
            *((False, False) if self.dropout else ()),
        )

    @property
    def restores(self) -> tuple[bool, ...]:
        """For each modifier, whether -inf has to be put back after it."""
        return find_restores(self.modifiers)

    def split(self, operands: Sequence[T]) -> Operands[T]:
        """The operands by role."""
        q, k, v, *rest = operands
        more = iter(rest)
        return Operands(
            q,
            k,
            v,
            tuple({name: next(more) for name in m.needs} for m in self.modifiers),
            {name: next(more) for name in (self.mask.needs if self.mask else ())},
            next(more) if self.sinks else None,
            *((next(more), next(more)) if self.dropout else (None, None)),
        )

    def unfold(self, emit: Emit, operands: Values) -> tuple[Any, Any]:  # Any: values
        """The same in single steps, emitted one by one: o, lse."""
        given = self.split(operands)
        (s,) = emit(ops.Scores(self.scale), given.q, given.k)
        for modifier, data in zip(self.modifiers, given.modifiers, strict=True):
            (s,) = emit(modifier, s, *data.values())
        if self.mask:
            (s,) = emit(ops.Mask(self.mask), s, *given.mask.values())
        p, lse = emit(ops.Softmax(self.sinks), s, *([given.sinks] if self.sinks else []))
        if self.dropout:
            (p,) = emit(ops.Dropout(self.dropout), p, given.seed, given.offset)
        return emit(ops.Weigh(), p, given.v)[0], lse

    def problems(self, *types: ValueType) -> Iterator[str]:
        found: list[str] = []

        def check(op: Op, *given: ValueType) -> tuple[ValueType, ...]:
            found.extend(op.problems(*given))
            return op.infer(*given)

        self.unfold(check, types)
        yield from found

    def gradient_problems(self) -> Iterator[str]:
        for modifier in self.modifiers:
            yield from modifier.gradient_problems()

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        return self.unfold(lambda op, *given: op.infer(*given), types)

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.unfold(lambda op, *given: op.run(*given), operands)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        given = tuple(g is not None for g in grads)
        gradient = AttentionGrad(self, self.trains, *given)
        found = iter(emit(gradient, *operands, *results, *(g for g in grads if g is not None)))
        return tuple(next(found) if wanted else None for wanted in self.trains)


@final
@frozen
class AttentionGrad(Op):
    """The operands of an Attention, o, lse, do, dlse -> a gradient for each wanted operand.

    With p = exp(s - lse) and z the kept places of dropout over (1 - rate):

        dv     = (p z)^T do
        dp     = (do v^T) z
        delta  = sum_j p dp = sum_e do o        (so nothing of size [M,N] is needed for it)
        ds     = p (dp - delta + dlse)          then back through the modifiers
        dq     = scale ds k,   dk = scale ds^T q
        dsinks = sum_bi exp(sink - lse) (dlse - delta)

    A row that saw nothing, lse = -inf, adds 0 to every gradient, whatever do and dlse hold there.
    `wants` says which operands need one; `with_do` and `with_dlse` which cotangents are given,
    the others being zero.
    """

    attention: Attention
    wants: tuple[bool, ...] = field(converter=as_flags)
    with_do: bool = True
    with_dlse: bool = False
    is_gradient = True

    def __attrs_post_init__(self) -> None:
        given, needed = len(self.wants), len(self.attention.ranks)
        if given != needed:
            raise GraphError(f"attention_grad: {given} wants for {needed} operands; say each")

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]  # a class's constant elsewhere
        """A name for each gradient: dq of q."""
        named = zip(self.attention.roles, self.wants, strict=True)
        return tuple(f"d{role}" for role, wanted in named if wanted)

    @property
    def reads(self) -> int:  # type: ignore[override]  # a class's constant elsewhere
        """How many operands `infer` reads: all."""
        return len(self.ranks)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (*self.attention.ranks, 4, 3, *((4,) * self.with_do), *((3,) * self.with_dlse))

    def split(self, operands: Sequence[T]) -> tuple[tuple[T, ...], T, T, T | None, T | None]:
        """The attention's own operands, o, lse, do, dlse."""
        n = len(self.attention.ranks)
        own, (o, lse, *rest) = operands[:n], operands[n:]
        more = iter(rest)
        do = next(more) if self.with_do else None
        return tuple(own), o, lse, do, next(more) if self.with_dlse else None

    def problems(self, *types: ValueType) -> Iterator[str]:
        own, *results = self.split(types)
        yield from self.attention.problems(*own)
        yield from self.attention.gradient_problems()
        o, lse = self.attention.infer(*own)
        for name, type_, due in zip(
            ("o", "lse", "do", "dlse"), results, (o, lse, o, lse), strict=True
        ):
            if type_ is not None and type_ != due:
                yield f"attention_grad: {name} {type_} should be {due}"

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        return tuple(t for t, wanted in zip(types, self.wants, strict=False) if wanted)

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, o, lse, do, dlse = self.split(operands)
        do = torch.zeros_like(o) if do is None else do
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        do, dlse = (ops.clear_blind_rows(x.to(lse.dtype), lse) for x in (do, dlse))
        found = compute_gradients(self.attention, own, o, lse, do, dlse)
        return tuple(g for g, wanted in zip(found, self.wants, strict=True) if wanted)


def compute_gradients(
    node: Attention,
    operands: Sequence[torch.Tensor],
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor,
) -> list[torch.Tensor]:
    """The formulas of AttentionGrad on whole arrays, for every operand."""
    given = node.split(operands)
    steps = [ops.Scores(node.scale).run(given.q, given.k)[0]]
    for modifier, data in zip(node.modifiers, given.modifiers, strict=True):
        steps += modifier.run(steps[-1], *data.values())
    s = steps[-1]
    if node.mask:
        (s,) = ops.Mask(node.mask).run(s, *given.mask.values())
    p = torch.exp(s - lse.masked_fill(lse == -INF, 0.0)[..., None])
    z = dropout_factor(node, given, s)
    (dp,) = ops.Scores().run(do, given.v.to(do.dtype))
    surplus = dlse - (do * o).sum(-1)
    ds = p * (dp * z + surplus[..., None])
    extra: list[torch.Tensor | None] = []
    for modifier, data, after in reversed(
        [*zip(node.modifiers, given.modifiers, steps[1:], strict=True)]
    ):
        ds, *found = modifier.pull(
            lambda op, *xs: op.run(*xs), (s, *data.values()), (after,), (ds,)
        )
        extra = [*found, *extra]
    (dv,) = ops.WeighT().run(p * z, do, given.v)
    (dq,) = ops.Weigh(node.scale).run(ds, given.k)
    (dk,) = ops.WeighT(node.scale).run(ds, given.q, given.k)
    tail: list[torch.Tensor | None] = [None for _ in given.mask]
    if given.sinks is not None:
        tail += [ops.sink_gradient(given.sinks, lse, surplus)]
    tail += [None, None] if node.dropout else []
    return [dq, dk, dv, *extra, *tail]  # type: ignore[list-item]  # None only where none is wanted


def dropout_factor(node: Attention, given: Operands[torch.Tensor], s: torch.Tensor) -> torch.Tensor:
    """z / (1 - rate) of dropout, at every place of s."""
    if given.seed is None or given.offset is None:
        return s.new_ones(())
    bits = ops.dropout_keeps(every_place(s, {}), node.dropout, int(given.seed), int(given.offset))
    return bits.to(s.dtype) / (1 - node.dropout)
