"""The steps of attention, each with its meaning on any machine and its derivatives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import final

import torch
from attrs import field, frozen

from attn_graph import masks
from attn_graph.errors import GraphError, problems_of, show
from attn_graph.ir.graph import (
    Alike,
    Emit,
    Gradients,
    Op,
    Values,
    gives,
    range_problem,
    require_constant,
    require_finite,
    takes,
    with_values,
)
from attn_graph.ir.terms.promises import leaf_promise_problems
from attn_graph.ir.transforms.gradient_ops import (
    SinkGrad,
    SoftmaxGrad,
    SoftmaxJvp,
    Unmasked,
    WeighT,
)
from attn_graph.ir.transforms.sums import Linear, Zeros, add_up, apply
from attn_graph.machine.philox import ROOMS, WORDS, counters, draw_, place_in_whole
from attn_graph.masks.canonical import canonical_mask
from attn_graph.masks.joins import reading_problems
from attn_graph.masks.places import Place
from attn_graph.spec import FLOATS, INF, ValueType, accumulator, to_integer, to_number
from attn_graph.spec.dims import are_numbers


def per_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B,G,N,D] -> [B,H,N,D]: query head h reads key/value head h // (H / G)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // max(1, x.shape[1]), 1)


@final
@takes(q=4, k=4)
@gives("s")
@frozen
class Scores(Op):
    """q [B,H,M,D], k [B,G,N,D] -> scale * q k^T [B,H,M,N], in float32 or wider."""

    scale: float = field(default=1.0, converter=to_number, validator=require_finite)

    def problems(self, q: ValueType, k: ValueType) -> Iterator[str]:
        if not are_numbers(*q.shape[1::2], *k.shape[1::2]):
            yield f"scores: q {q} and k {k} have names for heads or head sizes; give numbers"
            return
        for a, b, name in (
            (q.shape[0], k.shape[0], "batch"),
            (q.shape[3], k.shape[3], "head size"),
        ):
            if a != b:
                yield f"scores: q {q} and k {k} disagree in {name}, {a} and {b}"
        if q.shape[3] == 0:
            yield f"scores: q {q} has head size 0; it is at least 1"
        if (k.shape[1] == 0 and q.shape[1]) or (k.shape[1] and q.shape[1] % k.shape[1]):
            heads = f"{q.shape[1]} heads of q {q}"
            problem = f"{heads} are not a multiple of {k.shape[1]} heads of k {k}"
            yield f"scores: {problem}"
        if q.dtype != k.dtype:
            yield f"scores: q {q} and k {k} disagree in dtype, {q.dtype} and {k.dtype}"
        if q.dtype not in FLOATS:
            yield f"scores: q {q} must be of {' or '.join(map(str, FLOATS))}"
        if problem := range_problem(self.scale, accumulator(q.dtype)):
            yield f"scores: scale {problem}"

    def infer(self, q: ValueType, k: ValueType) -> tuple[ValueType]:
        return (ValueType((*q.shape[:3], k.shape[2]), accumulator(q.dtype)),)

    def run(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor]:
        wide = accumulator(q.dtype)
        return (self.scale * (q.to(wide) @ per_head(k.to(wide), q.shape[1]).mT),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        (q, k), (ds,) = operands, grads
        return emit(Weigh(self.scale), ds, k)[0], emit(WeighT(self.scale), ds, q, k)[0]

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        (q, k), (tq, tk) = operands, tangents
        return (add_up(emit, apply(emit, self, tq, k), apply(emit, self, q, tk)),)


@final
@gives("s")
@frozen
class Mask(Alike):
    """s [B,H,M,N], the mask's tensors -> s, with -inf where the mask does not keep."""

    mask: masks.Mask = field(validator=masks.require_mask)

    @property
    def roles(self) -> tuple[str, ...]:
        """The name of each operand: s, then the tensors of the mask."""
        return ("s", *self.mask.needs)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (4, *(None for _ in self.mask.needs))  # `Data` says how many axes

    def problems(self, s: ValueType, *given: ValueType) -> Iterator[str]:
        B, H, M, N = s.shape
        sizes = {"b": B, "h": H, "i": M, "j": N}
        for (name, data), type_ in zip(self.mask.needs.items(), given, strict=True):
            yield from data.problems("mask", name, type_, sizes)
        yield from reading_problems(self.mask)
        broken = [*leaf_promise_problems(self.mask, (B, H, M, N))]
        yield from broken or problems_of(lambda: canonical_mask(self.mask, M, N))

    def run(self, s: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor]:
        kept = self.mask.keep(Place.whole(s, dict(zip(self.mask.needs, given, strict=True))))
        return (torch.where(kept, s, -INF),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        nothing = (None,) * (len(operands) - 1)
        return (emit(Unmasked(), results[0], grads[0])[0], *nothing)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (apply(emit, Unmasked(), results[0], tangents[0]),)


class Statistic(Op):
    """A statistic of masked scores, named by its result: s [B,H,M,N] -> [B,H,M].

    Keys at -inf have no effect, so tiles may leave them out.
    """

    @abstractmethod
    def join(self, own: torch.Tensor, more: torch.Tensor) -> None:
        """Join, in `own`, the results of one set of rows over two disjoint sets of keys."""


@final
@takes(s=4)
@gives("max")
@with_values(statistics=("max",), without_gradient=("max",))
@frozen
class MaxScores(Statistic):
    """s [B,H,M,N] -> max [B,H,M] = max_j s, -inf for a row that sees nothing. Without gradient."""

    def infer(self, s: ValueType) -> tuple[ValueType]:
        return (ValueType(s.shape[:3], s.dtype),)

    def run(self, s: torch.Tensor) -> tuple[torch.Tensor]:
        return (s.new_full(s.shape[:3], -INF) if is_empty(s.shape[-1]) else s.amax(-1),)

    def join(self, own: torch.Tensor, more: torch.Tensor) -> None:
        torch.maximum(own, more, out=own)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        refuse_cotangents(self, grads)
        return (None,)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (None,)


# The statistics of masked scores other than lse, a result of Softmax.
STATISTICS: dict[str, type[Statistic]] = {"max": MaxScores}
ROW_RESULTS = ("lse", *STATISTICS)  # the names allowed in `stats`, in canonical order


def join_statistics(own: Mapping[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> None:
    """Join, in `own`, statistics but lse of one set of rows over two disjoint sets of keys."""
    for name in STATISTICS.keys() & own.keys():
        STATISTICS[name]().join(own[name], more[name])


def refuse_cotangents(op: Op, grads: Values) -> None:
    """Raise GraphError if a result without gradient has a cotangent."""
    given = dict(zip(op.names, grads, strict=True))
    if names := [name for name in op.without_gradient if given[name] is not None]:
        raise GraphError(*map(no_gradient, names))


def no_gradient(name: str) -> str:
    return f"{name} is a statistic without a gradient; pass no cotangent for it"


@final
@gives("p", "lse")
@with_values(statistics=("lse",))
@frozen
class Softmax(Op):
    """s [B,H,M,N] -> p = exp(s - lse), lse [B,H,M] = log sum_j exp(s).

    Sinks [H], if given, add exp(sink) to the sum and no weight. A row that sees nothing has p = 0
    and lse = -inf.
    """

    sinks: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        return ("s", "sinks")[: 1 + self.sinks]

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (4, 1)[: 1 + self.sinks]

    def problems(self, s: ValueType, sinks: ValueType | None = None) -> Iterator[str]:
        if sinks is not None:
            yield from masks.Data("h", FLOATS).problems(
                "softmax", "sinks", sinks, {"h": s.shape[1]}
            )

    def infer(self, s: ValueType, sinks: ValueType | None = None) -> tuple[ValueType, ValueType]:
        return s, ValueType(s.shape[:3], s.dtype)

    def run(
        self, s: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return softmax(s, sinks)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        (p, lse), (dp, dlse) = results, grads
        dp = dp if dp is not None else emit(Zeros.like(p.type))[0]
        dlse = dlse if dlse is not None else emit(Zeros.like(lse.type))[0]
        (ds,) = emit(SoftmaxGrad(), p, dp, dlse)
        sinks = operands[1:]
        return (ds, *(emit(SinkGrad(), x, lse, p, dp, dlse)[0] for x in sinks))

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        (p, lse), (ts, *moved) = results, tangents
        ts = emit(Zeros.like(p.type))[0] if ts is None else ts
        sinks = [operands[1], *moved] if moved and moved[0] is not None else []
        return emit(SoftmaxJvp(bool(sinks)), p, lse, ts, *sinks)


def softmax(
    s: torch.Tensor, sinks: torch.Tensor | None = None, *, hides: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """p and lse, as of `Softmax`. hides: a row may see nothing."""
    wide = s if sinks is None else beside(s, sinks)
    if is_empty(wide.shape[-1]):
        return s, s.new_full(s.shape[:3], -INF)
    if not hides:
        return torch.softmax(wide, -1)[..., : s.shape[-1]], torch.logsumexp(wide, -1)
    blind = (wide == -INF).all(-1, keepdim=True)  # OpenVINO's maximum is never below -3.4e38
    seen = wide.masked_fill(blind, 0.0)
    p = torch.softmax(seen, -1)[..., : s.shape[-1]].masked_fill(blind, 0.0)
    return p, torch.logsumexp(seen, -1).masked_fill(blind.squeeze(-1), -INF)


def is_empty(size: int) -> bool:
    """True for 0. A size that is a symbol of traced code counts as another number."""
    return type(size) is int and size == 0


def beside(s: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Scores [B,H,M,N] with the sink [H] of each head as a last key."""
    column = sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)
    return torch.cat([s, column], -1)


def require_rate(_: object, attribute: object, rate: float) -> None:
    """A validator. Raises GraphError for a rate outside [0, 1)."""
    if not (isinstance(rate, float) and 0 <= rate < 1):
        require_constant("rate", rate)
        raise GraphError(f"dropout: rate {show(rate)} is not in [0, 1)")


def to_origin(value: Iterable[int]) -> tuple[int, ...]:
    """A converter. Raises GraphError unless it has no, five or six numbers."""
    origin = tuple(map(to_integer, value))
    wrong = any(n is None or n < 0 for n in origin) or origin[5:] == (0,)
    if origin and (len(origin) not in (5, 6) or wrong):
        raise GraphError(
            f"dropout: origin {show(value)} is not (b, h, i, j, H) or (b, h, i, j, H, period): "
            "the first place in the whole, its number of heads, and the number of batch entries "
            "after which draws repeat"
        )
    return tuple(n for n in origin if n is not None)


@final
@takes(p=4, seed=0, offset=0)
@gives("p")
@frozen
class Dropout(Linear):
    """p, seed, offset -> p * z / (1 - rate), z from Philox at (seed, offset; b, h, i, j).

    origin: for a part of a larger whole, the b, h, i, j of its first place there and the whole's H:
    z is then the whole's at these places. A sixth number is the period: batch entries at multiples
    of it draw alike.
    """

    rate: float = field(converter=to_number, validator=require_rate)
    origin: tuple[int, ...] = field(default=(), converter=to_origin)

    def problems(self, p: ValueType, seed: ValueType, offset: ValueType) -> Iterator[str]:
        for name, type_ in (("seed", seed), ("offset", offset)):
            if type_ != ValueType((), torch.int64):
                yield f"dropout: {name} {type_} must be i64[()], one number"

    def infer(self, p: ValueType, *_: ValueType) -> tuple[ValueType]:
        return (p,)

    def transposed(self, p: ValueType) -> Op:
        return self

    def run(self, p: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor]:
        at = Place.whole(p, {})
        keeps = dropout_keeps(at, self.rate, int(seed), int(offset), self.origin)
        return (p * keeps / (1 - self.rate),)


def dropout_keeps(
    at: Place, rate: float, seed: int, offset: int, origin: tuple[int, ...] = ()
) -> torch.Tensor:
    """z of a block, as booleans. origin: as of Dropout."""
    assert at.ranges is not None
    ranges, H, period = place_in_whole(origin, at.ranges, at.H)
    shape = [*map(len, ranges[:3]), len(counters(ranges[3]))]
    rooms = [torch.empty(shape, dtype=torch.int64, device=at.b.device) for _ in range(ROOMS)]
    bits = torch.empty([*shape[:3], WORDS * shape[3]], dtype=torch.bool, device=at.b.device)
    return draw_(bits, rate, seed, offset, ranges, H, rooms, period)


@final
@takes(p=4, v=4)
@gives("o")
@frozen
class Weigh(Op):
    """p [B,H,M,N], v [B,G,N,E] -> scale * p v [B,H,M,E], in v's dtype.

    A row of v under weights of 0 alone adds 0, whatever it holds.
    """

    scale: float = field(default=1.0, converter=to_number, validator=require_finite)

    def problems(self, p: ValueType, v: ValueType) -> Iterator[str]:
        for a, b, who, name in (
            (p.shape[0], v.shape[0], "q", "batch entries"),
            (p.shape[3], v.shape[2], "k", "keys"),
        ):
            if a != b:
                yield f"weigh: p {p} and v {v} disagree: {who} has {a} {name} and v has {b}"
        if not are_numbers(p.shape[1], *v.shape[1::2]):
            yield f"weigh: p {p} and v {v} have names for heads or head sizes; give numbers"
            return
        if (v.shape[1] == 0 and p.shape[1]) or (v.shape[1] and p.shape[1] % v.shape[1]):
            heads = f"{p.shape[1]} heads of p {p}"
            problem = f"{heads} are not a multiple of {v.shape[1]} heads of v {v}"
            yield f"weigh: {problem}"
        if v.shape[3] == 0:
            yield f"weigh: v {v} has head size 0; it is at least 1"
        if v.dtype in FLOATS and p.dtype != accumulator(v.dtype):
            yield f"weigh: p {p} and v {v} disagree in dtype; p is in {accumulator(v.dtype)}"
        if v.dtype not in FLOATS:
            yield f"weigh: v {v} must be of {' or '.join(map(str, FLOATS))}"

    def infer(self, p: ValueType, v: ValueType) -> tuple[ValueType]:
        return (ValueType((*p.shape[:3], v.shape[3]), v.dtype),)

    def run(self, p: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
        return (weigh(p, v, p == 0, self.scale),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        (p, v), (do,) = operands, grads
        return emit(Scores(self.scale), do, v)[0], emit(WeighT(self.scale), p, do, v)[0]

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        (p, v), (tp, tv) = operands, tangents
        return (add_up(emit, apply(emit, self, tp, v), apply(emit, self, p, tv)),)


def weigh(
    p: torch.Tensor, v: torch.Tensor, unseen: torch.Tensor | None, scale: float = 1.0
) -> torch.Tensor:
    """scale * p v, without the rows of v that are unseen [B|1,H|1,M|1,N] by every query."""
    rows = per_head(v.to(p.dtype), p.shape[1])
    if unseen is not None:
        rows = rows.masked_fill(unseen.all(2)[..., None], 0.0)
    o = p @ rows
    return (o if scale == 1.0 else scale * o).to(v.dtype)
