"""Attention as one op, and its gradient as another: the input of lowerings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar, final

import torch
from attrs import evolve, field, frozen

from attn_graph import masks
from attn_graph.errors import GraphError, show
from attn_graph.ir import ops
from attn_graph.ir.fused import Fused, Role, mark_flagged, misfits, select_flagged
from attn_graph.ir.graph import Emit, Gradients, Op, Values, require_finite
from attn_graph.ir.modifiers import (
    Back,
    Bias,
    Collect,
    Modifier,
    SoftCap,
)
from attn_graph.ir.transforms.gradient_ops import (
    WeighT,
    run_traced,
    sink_gradient,
    weigh_again,
    weigh_rows,
)
from attn_graph.masks.places import Place
from attn_graph.spec import INF, ValueType, to_number

T = TypeVar("T")
SAVED = ("o", "lse")  # results of an attention read by its gradient, unless weights are kept
QKV = Role("q", "bhid", 0, True), Role("k", "bgjd", 1, True), Role("v", "bgje", 2, True)


def sort_statistics(names: Iterable[str]) -> tuple[str, ...]:
    """The statistics in canonical order. Raises GraphError unless known, with lse."""
    given = tuple(names)
    if "lse" not in given or not {*given} <= {*ops.ROW_RESULTS}:
        raise GraphError(f"attention: stats {given} are not lse and some of {ops.ROW_RESULTS}")
    return tuple([name for name in ops.ROW_RESULTS if name in given])


def in_order(steps: Iterable[Modifier]) -> tuple[Modifier, ...]:
    return tuple(steps)


def as_flags(values: Iterable[bool]) -> tuple[bool, ...]:
    return tuple(map(bool, values))


@final
@frozen
class Operands(Generic[T]):
    """The operands of an Attention, by role."""

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
class KeepWeights(Op):
    """p, p after dropout, v -> weights for a gradient: p in v's dtype, negative where dropped.

    A step of an Attention, and in no graph: its gradient reads them, and nothing else does.
    """

    def infer(self, p: ValueType, left: ValueType, v: ValueType) -> tuple[ValueType]:
        return (ValueType(p.shape, v.dtype),)

    def run(self, p: torch.Tensor, left: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.where(left == 0, -p, p).to(v.dtype),)


@final
@frozen
class Attention(Fused):
    """q, k, v, operands of the modifiers, of the mask, sinks, seed and offset -> o, lse, ...

    The chain scores, modifiers, mask, softmax, dropout, weigh; `unfold` emits it step by step.
    `stats`: the statistics of each row returned after o, by name: always lse, which the gradient
    reads, and any of STATISTICS. `origin`: as of Dropout. `part`: o and lse given to the gradient
    are of more keys, or of sinks too, so that the weights of a row add up to less than 1. `v_in_k`:
    v is the first E elements of each key, in one memory, so that kernels may read it once.

    `keeps`: the results are o and the weights [B,H,M,N] of `KeepWeights`, for a gradient
    without a softmax. This is worth its memory for short rows: weights take no more bytes than q,
    k, v and o of as many heads while N <= 2 (D + E).
    """

    scale: float = field(default=1.0, converter=to_number, validator=require_finite)
    modifiers: tuple[Modifier, ...] = field(default=(), converter=in_order)
    mask: masks.Mask | None = None
    sinks: bool = field(default=False, converter=bool)
    dropout: float = field(default=0.0, converter=to_number, validator=ops.require_rate)
    stats: tuple[str, ...] = field(default=("lse",), converter=sort_statistics)
    origin: tuple[int, ...] = field(default=(), converter=ops.to_origin)
    part: bool = False
    keeps: bool = field(default=False, converter=bool)
    v_in_k: bool = False

    def __attrs_post_init__(self) -> None:
        if self.keeps and not self.is_keepable:
            limit = "keeps weights of a softmax of scores and a bias under a mask, and of no more"
            raise GraphError(f"attention: {self} {limit}")

    @cached_property
    def takes(self) -> tuple[Role, ...]:
        steps = [(m, n, *data) for m in self.modifiers for n, data in enumerate(m.needs.items(), 1)]
        more = [
            Role(name, x.axes, None, name in m.trains, n in m.constants, x)
            for m, n, name, x in steps
        ]
        more += [Role(name, x.axes, data=x) for name, x in masks.needs_of(self.mask).items()]
        more += [Role("sinks", "h", trains=True)] * self.sinks
        more += [Role("seed", ""), Role("offset", "")] if self.dropout else []
        return (*QKV, *(evolve(role, like=n) for n, role in enumerate(more, len(QKV))))

    @cached_property
    def gives(self) -> tuple[Role, ...]:
        names = ("o", *(("weights",) if self.keeps else self.stats))
        return tuple([Role.of_rows(name) for name in names])

    @property
    def statistics(self) -> tuple[str, ...]:
        return () if self.keeps else self.stats

    @property
    def without_gradient(self) -> tuple[str, ...]:
        return tuple([name for name in self.names if name not in SAVED])

    @property
    def saved(self) -> tuple[str, ...]:
        return ("weights",) if self.keeps else SAVED

    @property
    def is_bare(self) -> bool:
        """True for a softmax under a mask and nothing else: Attention(scale, mask=mask)."""
        return not self.modifiers and self.is_softmax

    @property
    def is_biased(self) -> bool:
        """True for Attention(scale, (Bias(),), mask)."""
        return self.modifiers == (Bias(),) and self.is_softmax

    @property
    def is_capped(self) -> bool:
        """True if nothing but soft caps changes scores: all heads and places alike."""
        return all(isinstance(m, SoftCap) for m in self.modifiers)

    @property
    def is_softmax(self) -> bool:
        """True without sinks, dropout, kept weights, and statistics other than lse."""
        return not (self.sinks or self.dropout or self.origin or self.keeps) and not self.more_stats

    @property
    def is_keepable(self) -> bool:
        """True for a softmax of scores, and perhaps a bias, under a mask and dropout."""
        added = self.modifiers in ((), (Bias(),))
        return added and not (self.sinks or self.origin or self.more_stats)

    @property
    def more_stats(self) -> tuple[str, ...]:
        return tuple(name for name in self.stats if name != "lse")

    @property
    def trains(self) -> tuple[bool, ...]:
        """For each operand: does it have a gradient?"""
        return tuple([role.trains for role in self.takes])

    @cached_property
    def restores(self) -> tuple[bool, ...]:
        """For each modifier: must -inf be put back after it, at places that an earlier one hides?
        To add finite numbers leaves -inf as it is."""
        steps = self.modifiers
        hidden = [any(m.hides for m in steps[:n]) for n in range(len(steps))]
        pairs = zip(steps, hidden, strict=True)
        return tuple([before and (m.hides or not m.additive) for m, before in pairs])

    @cached_property
    def data_names(self) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
        """Names of the tensors read by each modifier, and of those read by the mask."""
        modifiers = tuple(tuple(m.needs) for m in self.modifiers)
        return modifiers, tuple(masks.needs_of(self.mask))

    def split(self, operands: Sequence[T]) -> Operands[T]:
        q, k, v, *rest = operands
        more, (modifiers, mask) = iter(rest), self.data_names
        return Operands(
            q,
            k,
            v,
            tuple([dict(zip(names, more, strict=False)) for names in modifiers]),
            dict(zip(mask, more, strict=False)),
            next(more) if self.sinks else None,
            *((next(more), next(more)) if self.dropout else (None, None)),
        )

    @property
    def slots(self) -> Operands[int]:
        """The number of each operand."""
        return self.split(range(len(self.takes)))

    def slots_under(self, mask: masks.Mask | None) -> tuple[int, ...]:
        """The numbers of the operands that it reads with another mask of the same tensors."""
        known, every = self.slots.mask, range(len(self.takes))
        first = min(known.values(), default=0)
        after = every[first + len(known) :]
        return (*every[:first], *(known[name] for name in masks.needs_of(mask)), *after)

    def unfold(self, emit: Emit, operands: Values) -> tuple[Any, ...]:  # Any: values
        """Emit the single steps one by one; return the results in the order of `names`."""
        given = self.split(operands)
        (s,) = emit(ops.Scores(self.scale), given.q, given.k)
        for modifier, data in zip(self.modifiers, given.modifiers, strict=True):
            (s,) = emit(modifier, s, *data.values())
        if self.mask is not None:
            (s,) = emit(ops.Mask(self.mask), s, *given.mask.values())
        more = [emit(ops.STATISTICS[name](), s)[0] for name in self.more_stats]
        p, lse = emit(ops.Softmax(self.sinks), s, *([given.sinks] if self.sinks else []))
        left = p
        if self.dropout:
            (left,) = emit(ops.Dropout(self.dropout, self.origin), p, given.seed, given.offset)
        (o,) = emit(ops.Weigh(), left, given.v)
        return (o, *emit(KeepWeights(), p, left, given.v)) if self.keeps else (o, lse, *more)

    def problems(self, *types: ValueType) -> Iterator[str]:
        problems: list[str] = []

        def check(op: Op, *given: ValueType) -> tuple[ValueType, ...]:
            problems.extend(op.problems(*given))
            return op.infer(*given)

        self.unfold(check, types)
        yield from problems

    def gradient_problems(self) -> Iterator[str]:
        for modifier in self.modifiers:
            yield from modifier.gradient_problems()

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        return self.unfold(lambda op, *given: op.infer(*given), types)

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.unfold(run_traced, operands)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        ops.refuse_cotangents(self, grads)
        saved, given = (dict(zip(self.names, x, strict=True)) for x in (results, grads))
        cotangents = [given.get(name) for name in SAVED]
        gradient = AttentionGrad(self, self.trains, *(g is not None for g in cotangents))
        read = [*map(saved.get, self.saved), *[g for g in cotangents if g is not None]]
        made = iter(emit(gradient, *operands, *read))
        return tuple(next(made) if wanted else None for wanted in self.trains)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        from attn_graph.ir.transforms.tangents import push_attention  # which imports this module

        last = push_attention(self, emit, operands, tangents)[-2:]
        moved: dict[str, Any] = dict(zip(SAVED, last, strict=False))  # Any: values
        return tuple(moved.get(name) for name in self.names)


@final
@frozen
class GradientOperands(Generic[T]):
    """The operands of an AttentionGrad, by role; own: those of the attention itself."""

    own: tuple[T, ...]
    o: T
    lse: T
    do: T | None
    dlse: T | None


def as_saved(attention: Attention) -> Attention:
    """The attention with no more statistics than its gradient reads."""
    if not isinstance(attention, Attention):
        raise GraphError(f"attention_grad: {show(attention)} is not an Attention")
    return evolve(attention, stats=SAVED[1:])


@final
@frozen
class AttentionGrad(Fused):
    """The operands of an Attention, o, lse, do, dlse -> a gradient for each wanted operand.

    With p = exp(s - lse) and z the kept places of dropout over (1 - rate):

        dv     = (p z)^T do
        dp     = (do v^T) z
        delta  = sum_j p dp = sum_e do o        (so nothing of size [M,N] is needed for it)
        ds     = p (dp - delta + dlse)          then back through the modifiers
        dq     = scale ds k,   dk = scale ds^T q
        dsinks = sum_bi exp(sink - lse) (dlse - delta)

    A row that sees nothing, with lse = -inf, adds 0 to every gradient, for any do and dlse. `wants`
    flags the operands that get a gradient. Without `with_do` or `with_dlse` that cotangent is zero.

    If the attention keeps its weights, they are read in place of o and lse: p is known, and delta
    is sum_j p dp. The derivatives are of the gradient by o and lse, both computed anew.
    """

    attention: Attention = field(converter=as_saved)
    wants: tuple[bool, ...] = field(converter=as_flags)
    with_do: bool = True
    with_dlse: bool = False
    is_gradient = True

    def __attrs_post_init__(self) -> None:
        given, needed = len(self.wants), len(self.attention.takes)
        if given != needed:
            raise GraphError(f"attention_grad: {given} wants for {needed} operands; pass one each")
        if self.attention.keeps and (self.with_dlse or not self.with_do):
            raise GraphError("attention_grad: by kept weights it takes do and no dlse")

    @cached_property
    def takes(self) -> tuple[Role, ...]:
        return (*self.attention.takes, *map(Role.of_rows, self.more))

    @cached_property
    def gives(self) -> tuple[Role, ...]:
        return mark_flagged(self.attention.takes, self.wants, "d")

    @cached_property
    def more(self) -> tuple[str, ...]:
        """Names of the operands after the attention's own."""
        cotangents = *(("do",) * self.with_do), *(("dlse",) * self.with_dlse)
        return (*self.attention.saved, *cotangents)

    def split(self, operands: Sequence[T]) -> GradientOperands[T]:
        """For a gradient that reads o and lse."""
        n = len(operands) - len(self.more)
        given = dict(zip(self.more, operands[n:], strict=True))
        cotangents = given.get("do"), given.get("dlse")
        return GradientOperands(tuple(operands[:n]), given["o"], given["lse"], *cotangents)

    def problems(self, *types: ValueType) -> Iterator[str]:
        node, n = self.attention, len(self.wants)
        yield from node.problems(*types[:n])
        yield from node.gradient_problems()
        known = dict(zip(node.names, node.infer(*types[:n]), strict=True))
        due = [known[name.removeprefix("d")] for name in self.more]
        yield from misfits("attention_grad", self.more, types[n:], due)

    @property
    def carried(self) -> tuple[int, ...]:
        n = len(self.wants)
        return tuple(range(n, n + len(self.attention.saved)))

    @property
    def grad(self) -> AttentionGrad:
        return self

    @property
    def by_lse(self) -> AttentionGrad:
        """This gradient, by o and lse."""
        return evolve(self, attention=evolve(self.attention, keeps=False))

    def gradient_problems(self) -> Iterator[str]:
        for modifier in self.attention.modifiers:
            yield from modifier.second_problems()

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        return select_flagged(types[: len(self.wants)], self.wants)

    def run(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = len(self.wants)
        read = dict(zip(self.more, operands[n:], strict=True))
        return select_flagged(compute_gradients(self.attention, operands[:n], read), self.wants)

    def read_again(self, emit: Emit, operands: Values) -> Values:
        """The operands of `by_lse`."""
        *own, _, do = operands
        return (*own, *emit(self.by_lse.attention, *own), do)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        """By the tangents of all results as q, k, v, ... move along the given cotangents.

        The second derivative is symmetric. o and lse move with q, k and v: they have no gradient.
        """
        from attn_graph.ir.transforms.tangents import AttentionJvp, present, push_attention, some

        if self.attention.keeps:
            again = self.read_again(emit, operands)
            *pulled, _, _, ddo = self.by_lse.pull(emit, again, results, grads)
            return (*pulled, None, ddo)
        node, each = self.attention, iter(grads)
        moved = [next(each) if wanted else None for wanted in self.wants]
        own = operands[: len(moved)]
        to, tlse = push_attention(node, emit, own, moved)[-2:]
        op = AttentionJvp(evolve(self, wants=node.trains), present(moved))
        made = iter(emit(op, *operands, to, tlse, *some(moved)))
        gradients = (next(made) if trained else None for trained in node.trains)
        cotangents = (*((to,) * self.with_do), *((tlse,) * self.with_dlse))
        return (*gradients, None, None, *cotangents)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        """o and lse move with q, k and v: their tangents are operands, or computed."""
        from attn_graph.ir.transforms.tangents import AttentionJvp, present, push_attention, some

        if self.attention.keeps:
            *moves, _, tdo = tangents
            again = self.read_again(emit, operands)
            return self.by_lse.push(emit, again, results, (*moves, None, None, tdo))
        given, x = self.split(tangents), self.split(operands)
        pairs = zip(given.own, self.attention.trains, strict=True)
        moved, turned = [t if has else None for t, has in pairs], (given.do, given.dlse)
        if not some(moved):
            alone = evolve(self, with_do=given.do is not None, with_dlse=given.dlse is not None)
            return emit(alone, *x.own, x.o, x.lse, *some(turned))
        to, tlse = given.o, given.lse
        if to is None or tlse is None:
            to, tlse = push_attention(self.attention, emit, x.own, moved)[-2:]
        op = AttentionJvp(self, present(moved), *present(turned))
        return emit(op, *operands, to, tlse, *some(moved), *some(turned))


def compute_gradients(
    node: Attention, operands: Sequence[torch.Tensor], read: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The formulas of AttentionGrad on whole arrays, for every operand.

    read: the further operands of the gradient, by name. PyTorch differentiates this function, so
    places are hidden where p is 0, not where ds is 0, which may move.
    """
    given = node.split(operands)
    steps = [*ops.Scores(node.scale).run(given.q, given.k)]
    for modifier, data in zip(node.modifiers, given.modifiers, strict=True):
        steps += run_traced(modifier, steps[-1], *data.values())
    s = steps[-1]
    if node.mask is not None:
        (s,) = ops.Mask(node.mask).run(s, *given.mask.values())
    if node.keeps:
        signed = read["weights"].to(s.dtype)
        p, total = signed.abs(), s.new_ones(())
        z, blind = (signed > 0).to(s.dtype) / (1 - node.dropout), (p == 0).all(-1)
    else:
        z, blind = dropout_factor(node, given, s), read["lse"] == -INF
        p, total = weigh_again(s, read["lse"], given.sinks, node.part)
    unseen = p == 0  # there dp may be NaN, from rows beyond the lengths
    do, dlse = s.new_zeros(*s.shape[:3], given.v.shape[3]), s.new_zeros(s.shape[:3])
    if "do" in read:
        do = read["do"].to(s.dtype).masked_fill(blind[..., None], 0.0)
    if "dlse" in read:
        dlse = read["dlse"].masked_fill(blind, 0.0)
    dp = (ops.Scores().run(do, given.v.to(s.dtype))[0] * z).masked_fill(unseen, 0.0)
    delta = (p * dp).sum(-1) if node.keeps else (do * read["o"]).sum(-1)
    surplus = dlse - delta.masked_fill(unseen.all(-1), 0.0)
    ds = (p * (dp + surplus[..., None])).masked_fill(unseen, 0.0)
    extra: list[torch.Tensor | None] = []
    for modifier, data, after in reversed(
        [*zip(node.modifiers, given.modifiers, steps[1:], strict=True)]
    ):
        sums = iter(run_traced(Collect(modifier), ds, *data.values()) if modifier.trains else ())
        extra = [*(next(sums) if name in modifier.trains else None for name in data), *extra]
        (ds,) = run_traced(Back(modifier), after, ds, *data.values())
        ds = ds.masked_fill(unseen, 0.0)
    made: list[torch.Tensor | None] = [
        ops.weigh(ds, given.k, unseen, node.scale),
        weigh_rows(ds, given.q, given.k, unseen, node.scale),
        *WeighT().run(p * z, do, given.v),
        *extra,
        *(None for _ in given.mask),
    ]
    if given.sinks is not None:
        made += [sink_gradient(given.sinks, read["lse"], surplus / total)]
    return [*made, *[None] * (len(operands) - len(made))]  # type: ignore[list-item]  # None only for unwanted ones


def dropout_factor(node: Attention, given: Operands[torch.Tensor], s: torch.Tensor) -> torch.Tensor:
    """z / (1 - rate) of dropout, at every place of s."""
    if given.seed is None or given.offset is None:
        return s.new_ones(())
    at, seed, offset = Place.whole(s, {}), int(given.seed), int(given.offset)
    bits = ops.dropout_keeps(at, node.dropout, seed, offset, node.origin)
    return bits.to(s.dtype) / (1 - node.dropout)
