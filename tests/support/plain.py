"""What docs/semantics.md says, in plain PyTorch: the formula, and the rule of accuracy.

Written from that page and from nothing else: of the library it reads the graph, not one op's code.
Everything is whole arrays and out of place, so `torch.autograd` gives the gradients. `expected`
and `expected_gradients` say what a lowering should give and how far from it it may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from attrs import frozen

from attn_graph import masks
from attn_graph.ir import ops
from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.modifiers import Alibi, Bias, Modifier, SoftCap
from tests.support.plain_masks import Data, Where, kept

INF = float("inf")
Tensor = torch.Tensor
NOTHING = torch.zeros(1, dtype=torch.float64)
HALF = (torch.float16, torch.bfloat16)
UNIT = {  # the most that one rounding is off
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}


# Where a graph's chain says what to compute.


@frozen
class Chain:
    """One attention: its tensors by role, and what is done to the scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    modifiers: tuple[tuple[Modifier, Data], ...]
    masks: tuple[tuple[masks.Mask, Data], ...]
    sinks: Tensor | None
    rate: float
    seed: int
    offset: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, M, N."""
        B, H, M, _ = self.q.shape
        return B, H, M, self.k.shape[2]


def chain_of(graph: Graph, tensors: Sequence[Tensor]) -> Chain:
    """The attention that a graph is, whether in single steps or as one op."""
    values: dict[int, Tensor] = dict(enumerate(tensors))
    found: dict[str, Any] = {  # Any: the fields of a Chain
        "modifiers": (),
        "masks": (),
        "sinks": None,
        "rate": 0.0,
        "seed": 0,
        "offset": 0,
    }
    for eqn in graph.eqns:
        found |= step(eqn.op, [values.get(i, torch.empty(0)) for i in eqn.args], found)
    return Chain(**found)


def step(op: Op, given: list[Tensor], before: dict[str, Any]) -> dict[str, Any]:  # Any: as above
    """What one equation adds to a chain. Operands that are no inputs of the graph are not read."""
    match op:
        case ops.Scores(scale):
            return {"q": given[0], "k": given[1], "scale": scale}
        case Modifier():
            data = dict(zip(op.needs, given[1:], strict=True))
            return {"modifiers": (*before["modifiers"], (op, data))}
        case ops.Mask(mask):
            data = dict(zip(mask.needs, given[1:], strict=True))
            return {"masks": (*before["masks"], (mask, data))}
        case ops.MaxScores():
            return {}
        case ops.Softmax():
            return {"sinks": given[1] if op.sinks else None}
        case ops.Dropout(rate):
            return {"rate": rate, "seed": int(given[1]), "offset": int(given[2])}
        case ops.Weigh():
            return {"v": given[1]}
        case Attention():
            return fused_step(op, given)
        case _:
            raise NotImplementedError(f"{op} is no part of one attention")


def fused_step(op: Attention, given: list[Tensor]) -> dict[str, Any]:  # Any: as above
    """All of a chain: q, k, v, then what modifiers, mask, sinks and dropout read, in that order."""
    q, k, v, *rest = given
    more = iter(rest)
    modifiers = tuple((m, {name: next(more) for name in m.needs}) for m in op.modifiers)
    under = [op.mask] if op.mask is not None else []
    return {
        "q": q,
        "k": k,
        "v": v,
        "scale": op.scale,
        "modifiers": modifiers,
        "masks": tuple((m, {name: next(more) for name in m.needs}) for m in under),
        "sinks": next(more) if op.sinks else None,
        "rate": op.dropout,
        "seed": int(next(more)) if op.dropout else 0,
        "offset": int(next(more)) if op.dropout else 0,
    }


def roles(graph: Graph) -> list[str]:
    """What each output of a graph is: "p", "lse", "max", "pz" (p with dropout) or "o"."""
    names: dict[int, str] = {}
    for eqn, outs in graph.numbered():
        match eqn.op:
            case ops.Softmax():
                names |= zip(outs, ("p", "lse"), strict=True)
            case ops.MaxScores():
                names[outs[0]] = "max"
            case ops.Dropout():
                names[outs[0]] = "pz"
            case ops.Weigh():
                names[outs[0]] = "o"
            case Attention():
                names |= zip(outs, ("o", *eqn.op.stats), strict=True)
    return [names[i] for i in graph.outputs]


# The modifiers, each one step of the scores, and what it makes of an error in them.


def slopes_of(heads: int) -> list[float]:
    """The slopes of the ALiBi paper, as its authors' code finds them."""
    power = math.log2(heads) if heads else 0
    if power == int(power):
        first = 2 ** (-(2 ** -(power - 3)))
        return [first ** (n + 1) for n in range(heads)]
    below = 2 ** int(power)
    return slopes_of(below) + slopes_of(2 * below)[0::2][: heads - below]


def alibi(op: Alibi, s: Tensor, at: Where) -> Tensor:
    """slope[h] * |i' - j|."""
    slopes = torch.tensor(slopes_of(at.sizes[1])) if op.default else at.data["alibi"]
    slopes = slopes.to(s.dtype)[..., None, None]
    ragged = op.ragged if op.align == "bottom_right" else ()
    return slopes * (at.moved(op.align, ragged) - at.axis("j")).abs().to(s.dtype)


STEPS: dict[type[Modifier], Callable[[Any, Tensor, Where], Tensor]] = {
    SoftCap: lambda op, s, at: op.cap * torch.tanh(s / op.cap),
    Bias: lambda op, s, at: s + at.data["bias"].to(s.dtype),
    Alibi: lambda op, s, at: s - alibi(op, s, at),
}


# Dropout's generator, in Python's integers.


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 (Salmon et al., SC 2011), one block."""
    word = 2**32
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, word)
        high1, low1 = divmod(0xCD9E8D57 * c2, word)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % word, (k1 + 0xBB67AE85) % word
    return c0, c1, c2, c3


@lru_cache(maxsize=16)  # the same dropout is wanted in float64 and in the graph's dtype
def dropout(rate: float, seed: int, offset: int, sizes: tuple[int, int, int, int]) -> Tensor:
    """z [B,H,M,N] in {0, 1}: place (b,h,i,j) draws word j % 4 at (j // 4, i, b H + h, offset)."""
    B, H, M, N = sizes
    key = (seed % 2**32, seed // 2**32 % 2**32)
    rows = [
        [
            word
            for block in range(-(-N // 4))
            for word in philox(key, (block, i, bh, offset % 2**32))
        ][:N]
        for bh, i in product(range(B * H), range(M))
    ]
    drawn = torch.tensor(rows, dtype=torch.int64).reshape(sizes)
    return (drawn >= round(rate * 2**32)).double()


# The formula.


@frozen
class Found:
    """Every value of one attention that a graph may return, and those its gradient is made of."""

    steps: tuple[Tensor, ...]  # scores, then the result of each modifier
    p: Tensor
    z: Tensor  # of dropout, over 1 - rate
    lse: Tensor
    max: Tensor
    pz: Tensor
    o: Tensor

    @property
    def seen(self) -> tuple[Tensor, ...]:
        """The steps, with 0 at places of -inf, where p is 0 however large the terms are."""
        return tuple(s.masked_fill(self.steps[-1] == -INF, 0.0) for s in self.steps)

    def __getitem__(self, role: str) -> Tensor:
        value: Tensor = getattr(self, role)
        return value


def per_head(x: Tensor, heads: int) -> Tensor:
    """Query head h reads key/value head h // r."""
    r = heads // max(1, x.shape[1])
    return x[:, [h // r for h in range(heads)]]


def attend(c: Chain) -> Found:
    """The page's seven steps. Rows that see nothing, and no sink, have o = 0 and lse = -inf."""
    B, H, M, N = c.sizes
    s = c.scale * torch.einsum("bhid,bhjd->bhij", c.q, per_head(c.k, H))
    steps = [s]
    for op, data in c.modifiers:
        hidden = s == -INF  # and stays so
        s = STEPS[type(op)](op, torch.where(hidden, 0.0, s), Where(c.sizes, data))
        s = torch.where(hidden, -INF, s)
        steps.append(s)
    keep = torch.ones((), dtype=torch.bool)
    for mask, data in c.masks:
        keep = keep & kept(mask, Where(c.sizes, data))
    keep = keep.expand(B, H, M, N)
    sinks = c.sinks.to(s.dtype)[:, None, None] if c.sinks is not None else None
    p, lse = softmax(s, keep, sinks)
    z = dropout(c.rate, c.seed, c.offset, c.sizes).to(s.dtype) / (1 - c.rate) if c.rate else None
    z = torch.ones_like(s) if z is None else z
    o = torch.einsum("bhij,bhje->bhie", p * z, per_head(c.v, H))
    largest = torch.where(keep, s, -INF).amax(-1) if N else s.new_full((B, H, M), -INF)
    return Found(tuple(steps), p, z, lse, largest.detach(), p * z, o)


def softmax(s: Tensor, keep: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """p and lse. Nothing is ever divided by 0 or taken the log of, so no gradient is NaN."""
    shown = torch.where(keep, s, -INF)
    columns = torch.cat([shown, sinks.expand(*s.shape[:3], 1)], -1) if sinks is not None else shown
    blind = (columns == -INF).all(-1, keepdim=True)
    if not columns.shape[-1]:
        return shown, s.new_full(s.shape[:3], -INF)
    sums = torch.logsumexp(torch.where(blind, 0.0, columns), -1, keepdim=True)
    return torch.exp(shown - sums), torch.where(blind, -INF, sums)[..., 0]


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Inputs as the formula takes them: floats in `dtype`, and leaves of a new autograd graph."""
    return [
        x.detach().to("cpu", dtype).clone() if x.is_floating_point() else x.detach().cpu()
        for x in tensors
    ]


def evaluate(
    graph: Graph, tensors: Sequence[Tensor], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """The outputs, every step of the formula in `dtype`."""
    found = attend(chain_of(graph, cast(tensors, dtype)))
    return tuple(found[role] for role in roles(graph))


def gradients(
    graph: Graph,
    tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """The gradient of every floating input, by its name; a cotangent of None is zero."""
    given = cast(tensors, dtype)
    leaves = {
        i.name: x.requires_grad_()
        for i, x in zip(graph.inputs, given, strict=True)
        if x.is_floating_point()
    }
    found = attend(chain_of(graph, given))
    pairs = [
        (found[role], d.detach().to("cpu", dtype))
        for role, d in zip(roles(graph), cotangents, strict=True)
        if d is not None and found[role].requires_grad
    ]
    if not pairs:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    outputs, given_for = zip(*pairs, strict=True)
    got = torch.autograd.grad(outputs, [*leaves.values()], given_for, allow_unused=True)
    return {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), got, strict=True)
    }


def poisoned(
    graph: Graph, tensors: Sequence[Tensor], cotangents: Sequence[Any], seed: int
) -> tuple[Any, ...]:  # Any: tensors, and None where there is no cotangent
    """The cotangents with NaN and infinities in rows that see nothing, where they count 0."""
    blind = attend(chain_of(graph, cast(tensors, torch.float64))).lse == -INF
    random = torch.Generator().manual_seed(seed)
    poison = torch.tensor([math.nan, INF, -INF])[torch.randint(3, blind.shape, generator=random)]

    def poison_rows(x: Tensor) -> Tensor:
        shape = (*blind.shape, *[1] * (x.dim() - blind.dim()))
        return torch.where(blind.view(shape).to(x.device), poison.view(shape).to(x), x)

    return tuple(None if x is None else poison_rows(x) for x in cotangents)


# The rule.


def distance(x: Tensor, ref: Tensor) -> float:
    """max|x - ref|, equal infinities being no distance; inf where only one is NaN or infinite."""
    a, b = x.detach().to("cpu", torch.float64), ref.to(torch.float64)
    apart = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=INF, posinf=INF)
    return float(apart.max()) if apart.numel() else 0.0


def allowed(ref: Tensor, low: Tensor, dtype: torch.dtype, *, gradient: bool = False) -> float:
    """How far a result of `dtype` may be from `ref`: 2 max|low - ref| + 2 max|ref's rounding|.

    Rounding is what adding and subtracting 0.3 in `dtype` does; gradients in half precision have 3
    for the first 2. For float64, where the page's `low` would be `ref` itself, `low` is float32's
    and counts 2^-29: rounding errors are, to first order, linear in the unit roundoff.
    """
    shrink = 2.0**-29 if dtype == torch.float64 else 1.0
    times = 3 if gradient and dtype in HALF else 2
    return shrink * times * distance(low, ref) + 2 * distance((ref.to(dtype) + 0.3) - 0.3, ref)


@frozen
class Expected:
    """What a result should be, and `terms`: the size of what was added up to make it.

    `low` may come out exact by luck, or where terms cancel to 0 that another order of operations
    leaves at rounding size: a row that sees one key has ds = p (dp - delta) = 0. So max|low - ref|
    is never taken to be less than the first term of the a-priori bound of any sum of rounded
    terms, u * sum|terms|, u being the unit roundoff that sums are accumulated in.
    """

    name: str
    ref: Tensor
    low: Tensor
    terms: Tensor
    gradient: bool = False

    def allowed(self, dtype: torch.dtype) -> float:
        rule = allowed(self.ref, self.low, dtype, gradient=self.gradient)
        if rule == INF and self.ref.isfinite().all():
            rule = 0.0  # in half precision the formula overflowed: then only the bound is asked
        unit = UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
        luck = unit * float(self.terms.max()) if self.terms.numel() else 0.0
        return max(rule, 2 * luck + 2 * distance((self.ref.to(dtype) + 0.3) - 0.3, self.ref))

    def check(self, x: Tensor) -> None:
        """Assert that x is what was expected."""
        assert x.shape == self.ref.shape, f"{self.name}: {x.shape} is not {self.ref.shape}"
        most, error = self.allowed(x.dtype), distance(x, self.ref)
        assert most < INF, f"{self.name}: the rule can't judge, low is {self.low}"
        told = f"{self.name}: error {error:.3g}, allowed {most:.3g}\n{x}\nis not\n{self.ref}"
        assert error <= most, told


def low_dtype(graph: Graph) -> torch.dtype:
    """The dtype that `low` is computed in: q's, or float32 where `ref` has q's."""
    dtype = graph.inputs[0].spec.dtype
    return torch.float32 if dtype == torch.float64 else dtype


def expected(graph: Graph, tensors: Sequence[Tensor]) -> tuple[Expected, ...]:
    """What each output of a graph that is one attention should be."""
    refs, lows = evaluate(graph, tensors), evaluate(graph, tensors, low_dtype(graph))
    c = chain_of(graph, cast(tensors, torch.float64))
    sizes = forward_terms(c, attend(c))
    return tuple(
        Expected(role, ref, low, sizes[role])
        for role, ref, low in zip(roles(graph), refs, lows, strict=True)
    )


def expected_gradients(
    graph: Graph, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> dict[str, Expected]:
    """What the gradient of each floating input should be, by the input's name."""
    refs = gradients(graph, tensors, cotangents)
    lows = gradients(graph, tensors, cotangents, low_dtype(graph))
    exact = cast(tensors, torch.float64)
    c, given = chain_of(graph, exact), dict(zip(roles(graph), cotangents, strict=True))
    do, dlse = (
        torch.zeros(()) if x is None else x.detach().cpu() for x in map(given.get, ("o", "lse"))
    )
    rounding = UNIT[low_dtype(graph)] / UNIT[torch.float32]  # of o, which the gradient reads
    sizes = gradient_terms(c, attend(c), do.double().abs(), dlse.double().abs(), rounding)
    return {
        i.name: Expected(f"d{i.name}", refs[i.name], lows[i.name], sizes.get(id(x), NOTHING), True)
        for i, x in zip(graph.inputs, exact, strict=True)
        if i.name in refs
    }


def score_sizes(c: Chain, f: Found) -> Tensor:
    """sum|terms| of each score: with every minus a plus."""
    size = abs(c.scale) * torch.einsum(
        "bhid,bhjd->bhij", c.q.abs(), per_head(c.k.abs(), c.sizes[1])
    )
    for (op, _), before, after in zip(c.modifiers, f.seen, f.seen[1:], strict=False):
        added = (after - before).abs()
        size = size * slope(op, after) + after.abs() if isinstance(op, SoftCap) else size + added
    return size


def inexact(c: Chain, f: Found, weights: Tensor) -> Tensor:
    """Weights made of p, with the error that p = exp(s - lse) brings.

    s is known to u * sum|terms|, lse, a rounded number, to u |lse|, and their difference is rounded
    too: to first order p is off by 2 u (sum|terms| + |lse|) of itself.
    """
    lse = torch.where(f.lse == -INF, 0.0, f.lse.abs())
    return weights * (1 + 2 * (score_sizes(c, f) + lse[..., None]))


def forward_terms(c: Chain, f: Found) -> dict[str, Tensor]:
    """sum|terms| of each output: the formula, with every minus a plus."""
    size = score_sizes(c, f)
    seen = size.amax(-1) if size.shape[-1] else size.new_zeros(f.lse.shape)
    o = torch.einsum("bhij,bhje->bhie", inexact(c, f, f.pz), per_head(c.v.abs(), c.sizes[1]))
    lse = seen + torch.where(f.lse == -INF, 0.0, f.lse.abs())
    weights = {"p": inexact(c, f, f.p), "pz": inexact(c, f, f.pz)}
    return {**weights, "lse": lse, "max": seen, "o": o}


def slope(op: Modifier, after: Tensor) -> Tensor:
    """The derivative of a step, at its result."""
    return 1 - (after / op.cap) ** 2 if isinstance(op, SoftCap) else torch.ones(())


def gradient_terms(
    c: Chain, f: Found, do: Tensor, dlse: Tensor, rounding: float
) -> dict[int, Tensor]:
    """sum|terms| of each tensor's gradient, by its id; do and dlse are given without their signs.

    delta = sum_e do o is made of an o that was rounded to q's dtype, `rounding` times as coarse
    as what sums are accumulated in: by so much that one term counts more.
    """
    B, H, *_ = c.sizes
    do, dlse = do.expand(f.o.shape), dlse.expand(f.lse.shape)
    v, k = per_head(c.v.abs(), H), per_head(c.k.abs(), H)
    dp = torch.einsum("bhie,bhje->bhij", do, v) * f.z
    coarse = (rounding - 1) * (do * f.o.abs()).sum(-1)
    surplus = (f.p * dp).sum(-1) + dlse + coarse
    ds = inexact(c, f, f.p) * (dp + surplus[..., None])
    found: dict[int, Tensor] = {}

    def add(x: Tensor, terms: Tensor) -> None:
        found[id(x)] = found.get(id(x), NOTHING) + terms

    add(c.v, grouped(torch.einsum("bhij,bhie->bhje", inexact(c, f, f.pz), do), c.v))
    for (op, data), after in reversed([*zip(c.modifiers, f.seen[1:], strict=True)]):
        if isinstance(op, Bias):
            add(data["bias"], ds.sum_to_size(data["bias"].shape))
        if isinstance(op, Alibi) and not op.default:
            far = ds * alibi(op, ds, Where(c.sizes, {**data, "alibi": torch.ones(1, 1)}))
            add(data["alibi"], far.sum((2, 3)).sum_to_size((B, H) if op.per_batch else (H,)))
        ds = ds * slope(op, after)
    add(c.q, abs(c.scale) * torch.einsum("bhij,bhjd->bhid", ds, k))
    add(c.k, abs(c.scale) * grouped(torch.einsum("bhij,bhid->bhjd", ds, c.q.abs()), c.k))
    if c.sinks is not None:
        off = forward_terms(c, f)["lse"] + c.sinks.abs()[:, None]  # as `inexact` has it
        share = torch.exp(c.sinks[:, None] - f.lse) * (1 + 2 * off)
        share = torch.where(c.sinks[:, None] == -INF, 0.0, share)
        add(c.sinks, (share * surplus).sum((0, 2)))
    return found


def grouped(x: Tensor, like: Tensor) -> Tensor:
    """[B,H,N,E] -> [B,G,N,E], each group of heads added up."""
    B, G, N, E = like.shape
    return x.reshape(B, G, x.shape[1] // max(1, G), N, E).sum(2)
