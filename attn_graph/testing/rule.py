"""The accuracy rule of docs/semantics.md: the allowed distance of a result from the formula.

`expect_outputs` and `expect_gradients` give the right results; `check` of each raises
AssertionError with the error and the allowance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import Alibi, Bias, Modifier, SoftCap, every_place
from attn_graph.ir.reference import round_twice
from attn_graph.ir.relative import RelativeBias
from attn_graph.ir.scaling import saturate, stands_in, weights_dtype
from attn_graph.ir.tracing import trace_along_data
from attn_graph.spec import INF
from attn_graph.testing.formula import (
    Chain,
    Evaluation,
    Tensor,
    alibi_penalty,
    attend,
    cast,
    differentiate,
    evaluate,
    gradients,
    output_roles,
    per_head,
    read_chain,
    read_table,
)
from attn_graph.testing.mask_formula import Data, Places

NOTHING = torch.zeros(1, dtype=torch.float64)
HALF = (torch.float16, torch.bfloat16)
UNIT = {  # the largest relative error of one rounding
    torch.float8_e5m2: 2.0**-3,
    torch.float8_e4m3fn: 2.0**-4,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
EXP_ERROR = 2.0**-13  # of PyTorch's fused CPU kernel in half precision: see docs/semantics.md


def distance(x: Tensor, ref: Tensor) -> float:
    """max|x - ref|: equal infinities have distance 0, one NaN or infinity has distance inf."""
    a, b = x.detach().to("cpu", torch.float64), ref.to(torch.float64)
    apart = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=INF, posinf=INF)
    return float(apart.max()) if apart.numel() else 0.0


def allowance(ref: Tensor, low: Tensor, dtype: torch.dtype, *, gradient: bool = False) -> float:
    """The allowed distance of a result of `dtype`: 2 max|low - ref| + 2 max|ref's rounding|.

    Rounding is the change by adding and subtracting 0.3 in `dtype`. Gradients in half precision
    have 3 for the first 2. For float64, with the page's `low` equal to `ref`, `low` is float32's
    and counts 2^-29: rounding errors are, to first order, linear in the unit roundoff.
    """
    shrink = 2.0**-29 if dtype == torch.float64 else 1.0
    times = 3 if gradient and dtype in HALF else 2
    return shrink * times * distance(low, ref) + 2 * distance(round_twice(ref, dtype), ref)


@frozen
class Expectation:
    """The right result, and `terms`: the size of the terms that add up to it.

    `low` may be exact by luck, or if terms cancel to 0 while another order of operations leaves a
    rounding error: a row that sees one key has ds = p (dp - delta) = 0. So max|low - ref| counts as
    at least the first term of the a-priori bound of any sum of rounded terms, u * sum|terms|, with
    u the unit roundoff of accumulated sums.
    """

    name: str
    ref: Tensor
    low: Tensor
    terms: Tensor
    gradient: bool = False

    def allowance(self, dtype: torch.dtype) -> float:
        """The allowed distance of a result of `dtype` from `ref`."""
        rule = allowance(self.ref, self.low, dtype, gradient=self.gradient)
        if rule == INF and self.ref.isfinite().all():
            rule = 0.0  # in half precision the formula overflowed: then only the bound counts
        unit = UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
        luck = unit * float(self.terms.max()) if self.terms.numel() else 0.0
        return max(rule, 2 * luck + 2 * distance(round_twice(self.ref, dtype), self.ref))

    def check(self, x: Tensor, who: str = "") -> None:
        """Raise AssertionError unless x is close enough, with the error and the allowance.

        who: a prefix for the message.
        """
        name = f"{who}{self.name}"
        assert x.shape == self.ref.shape, f"{name}: {x.shape} is not {self.ref.shape}"
        most, error = self.allowance(x.dtype), distance(x, self.ref)
        assert most < INF, f"{name}: the rule does not apply, low is {self.low}"
        message = f"{name}: error {error:.3g}, allowed {most:.3g}\n{x}\nis not\n{self.ref}"
        assert error <= most, message


def low_dtype(graph: Graph) -> torch.dtype:
    """The dtype of `low`: q's, float32 if q's is `ref`'s, or bfloat16 if q is quantised."""
    dtype = stands_in(graph.inputs[0].spec.dtype)
    return torch.float32 if dtype == torch.float64 else dtype


def expect_outputs(
    graph: Graph, tensors: Sequence[Tensor], precision: str = "ieee"
) -> tuple[Expectation, ...]:
    """The right outputs of a graph of one attention, within the accuracy rule.

    precision: as plans have it.
    """
    narrow = weights_dtype(graph, precision)
    refs, lows = evaluate(graph, tensors), evaluate(graph, tensors, low_dtype(graph), narrow)
    c = read_chain(graph, cast(graph, tensors, torch.float64))
    sizes = forward_terms(c, attend(c))
    if narrow is not None:
        sizes["o"] = sizes["o"] + narrow_terms(c, attend(c), narrow)
    if c.o_scale is not None:
        sizes |= {"o8": sizes["o"] / c.o_scale, "amax": largest(sizes["o"])}
        refs = tuple(
            saturate(ref, t.dtype) for ref, t in zip(refs, graph.output_types, strict=True)
        )
    if low_dtype(graph) in HALF:
        sizes["lse"] = sizes["lse"] + EXP_ERROR / (2 * UNIT[torch.float32])  # terms count twice
    return tuple(
        Expectation(role, ref, low, sizes[role])
        for role, ref, low in zip(output_roles(graph), refs, lows, strict=True)
    )


def expect_gradients(
    graph: Graph, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> dict[str, Expectation]:
    """The right gradient of each floating input, by the input's name.

    A cotangent of None is zero.
    """
    refs = gradients(graph, tensors, cotangents)
    lows = gradients(graph, tensors, cotangents, low_dtype(graph))
    exact = cast(graph, tensors, torch.float64)
    c, given = read_chain(graph, exact), dict(zip(output_roles(graph), cotangents, strict=True))
    do, dlse = (
        torch.zeros(()) if x is None else x.detach().cpu() for x in map(given.get, ("o", "lse"))
    )
    rounding = UNIT[low_dtype(graph)] / UNIT[torch.float32]  # of o, an operand of the gradient
    sizes = gradient_terms(c, attend(c), do.double().abs(), dlse.double().abs(), rounding)
    return {
        i.name: Expectation(
            f"d{i.name}", refs[i.name], lows[i.name], sizes.get(id(x), NOTHING), True
        )
        for i, x in zip(graph.inputs, exact, strict=True)
        if i.name in refs
    }


def score_sizes(c: Chain, f: Evaluation) -> Tensor:
    """sum|terms| of each score: with every minus a plus."""
    size = abs(c.scale) * torch.einsum(
        "bhid,bhjd->bhij", c.q.abs(), per_head(c.k.abs(), c.sizes[1])
    )
    for (op, data), before, after in zip(
        c.modifiers, f.finite_steps, f.finite_steps[1:], strict=False
    ):
        added = after.abs() * (not op.additive)
        added = added + (after - before).abs() * (not isinstance(op, SoftCap))
        size = size * slope(op, data, before, after) + added
    return size


def add_exp_error(c: Chain, f: Evaluation, weights: Tensor) -> Tensor:
    """Weights computed from p, with the error of p = exp(s - lse).

    s is known to u * sum|terms|, lse, a rounded number, to u |lse|, and their difference is rounded
    too: to first order p is off by 2 u (sum|terms| + |lse|) of itself.
    """
    lse = torch.where(f.lse == -INF, 0.0, f.lse.abs())
    return weights * (1 + 2 * (score_sizes(c, f) + lse[..., None]))


def forward_terms(c: Chain, f: Evaluation) -> dict[str, Tensor]:
    """sum|terms| of each output: the formula, with every minus a plus."""
    size = score_sizes(c, f)
    seen = size.amax(-1) if size.shape[-1] else size.new_zeros(f.lse.shape)
    o = torch.einsum("bhij,bhje->bhie", add_exp_error(c, f, f.pz), per_head(c.v.abs(), c.sizes[1]))
    lse = seen + torch.where(f.lse == -INF, 0.0, f.lse.abs())
    weights = {"p": add_exp_error(c, f, f.p), "pz": add_exp_error(c, f, f.pz)}
    return {**weights, "lse": lse, "max": seen, "o": o}


def narrow_terms(c: Chain, f: Evaluation, dtype: torch.dtype) -> Tensor:
    """The most by which weights rounded to 8 bits change o, in terms, which count twice.

    A weight is off by a roundoff of itself, or by half the distance of the least numbers of
    `dtype`, as a share of 16 times the largest weight.
    """
    if not f.p.shape[-1]:
        return NOTHING
    least = torch.finfo(dtype).smallest_normal * UNIT[dtype]
    off = UNIT[dtype] * f.p + least / 16 * f.p.amax(-1, keepdim=True)
    size = torch.einsum("bhij,bhje->bhie", off, per_head(c.v.abs(), c.sizes[1]))
    return size / (2 * UNIT[torch.float32])


def largest(x: Tensor) -> Tensor:
    """The largest number; 0 of none."""
    return x.amax() if x.numel() else x.new_zeros(())


def slope(op: Modifier, data: Data, before: Tensor, after: Tensor) -> Tensor:
    if isinstance(op, SoftCap):
        return 1 - (after / op.cap) ** 2
    if op.additive:
        return torch.ones(())
    return differentiate(op, before, data, torch.ones_like(before))[0].abs()


def gradient_terms(
    c: Chain, f: Evaluation, do: Tensor, dlse: Tensor, rounding: float
) -> dict[int, Tensor]:
    """sum|terms| of each tensor's gradient, by its id; do and dlse without their signs.

    delta = sum_e do o uses an o rounded to q's dtype, `rounding` times as coarse as accumulated
    sums; that one term counts more by this factor.
    """
    H = c.sizes[1]
    do, dlse = do.expand(f.o.shape), dlse.expand(f.lse.shape)
    v, k = per_head(c.v.abs(), H), per_head(c.k.abs(), H)
    dp = torch.einsum("bhie,bhje->bhij", do, v) * f.z
    coarse = (rounding - 1) * (do * f.o.abs()).sum(-1)
    surplus = (f.p * dp).sum(-1) + dlse + coarse
    ds = add_exp_error(c, f, f.p) * (dp + surplus[..., None])
    sizes: dict[int, Tensor] = {}

    def add(x: Tensor, terms: Tensor) -> None:
        sizes[id(x)] = sizes.get(id(x), NOTHING) + terms

    add(c.v, sum_groups(torch.einsum("bhij,bhie->bhje", add_exp_error(c, f, f.pz), do), c.v))
    steps = zip(c.modifiers, f.finite_steps, f.finite_steps[1:], strict=False)
    for (op, data), before, after in reversed([*steps]):
        for name in op.trains:
            add(data[name], operand_terms(c, op, data, before, name, ds))
        ds = ds * slope(op, data, before, after)
    add(c.q, abs(c.scale) * torch.einsum("bhij,bhjd->bhid", ds, k))
    add(c.k, abs(c.scale) * sum_groups(torch.einsum("bhij,bhid->bhjd", ds, c.q.abs()), c.k))
    if c.sinks is not None:
        off = forward_terms(c, f)["lse"] + c.sinks.abs()[:, None]  # as in `add_exp_error`
        share = torch.exp(c.sinks[:, None] - f.lse) * (1 + 2 * off)
        share = torch.where(c.sinks[:, None] == -INF, 0.0, share)
        add(c.sinks, (share * surplus).sum((0, 2)))
    return sizes


def operand_terms(
    c: Chain, op: Modifier, data: Data, before: Tensor, name: str, ds: Tensor
) -> Tensor:
    """sum|terms| of the gradient of a modifier's tensor."""
    x = data[name]
    if isinstance(op, Bias):
        return ds.sum_to_size(x.shape)
    if isinstance(op, Alibi):
        far = ds * alibi_penalty(op, ds, Places(c.sizes, {**data, name: torch.ones(1, 1)}))
        return far.sum((2, 3)).sum_to_size(x.shape)
    if isinstance(op, RelativeBias):
        return table_terms(op, x, ds, Places(c.sizes, data))
    units = torch.eye(x.numel(), dtype=ds.dtype).reshape(x.numel(), *x.shape)
    slopes = (
        trace_along_data(lambda s, t: op.change(s, every_place(s, t)), before, data, {name: unit})
        for unit in units
    )
    return ds.new_tensor([(ds * each.abs()).sum() for each in slopes]).reshape(x.shape)


def table_terms(op: RelativeBias, table: Tensor, ds: Tensor, at: Places) -> Tensor:
    """sum|terms| of the gradient of a table."""
    with torch.enable_grad():
        zeros = torch.zeros(table.shape, dtype=ds.dtype, requires_grad=True)
        read = read_table(op, zeros, at).expand(ds.shape)
        (terms,) = torch.autograd.grad(read, zeros, ds)
    return terms


def sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """[B,H,N,E] -> [B,G,N,E], each group of heads added up."""
    B, G, N, E = like.shape
    return x.reshape(B, G, x.shape[1] // max(1, G), N, E).sum(2)
