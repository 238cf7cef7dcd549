"""Evaluates graphs by the `run` of each op, in float64 by default: exact, slow, the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.errors import GraphError, PlanMismatchError, binds, show
from attn_graph.ir.graph import Emit, Graph, Op, Values, check_graph
from attn_graph.ir.ops import Softmax
from attn_graph.ir.rewrite import replay
from attn_graph.ir.storage.scaling import (
    Quantise,
    round_weights,
    saturate,
    stands_in,
    to_eight,
    weights_dtype,
)
from attn_graph.ir.transforms.binding import replace_sizes
from attn_graph.machine.ambient import plain_ops_on
from attn_graph.machine.fitting import read_sizes
from attn_graph.spec import FLOATS, HALF, INF, QUANTISED, TensorSpec, layout_problem
from attn_graph.spec.dims import Dim

FAR = 2.0**5  # |lse| from which kernels divide weights by their own sum: docs/semantics.md, Edges


@binds(lambda *_, **__: "write evaluate(graph, (q, k, v))")
def evaluate(
    graph: Graph, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = torch.float64
) -> tuple[torch.Tensor, ...]:
    """The outputs of a graph; floating inputs are cast to `dtype` unless it is None.

    Dims take their sizes from the tensors. Raises PlanMismatchError for tensors whose shapes differ
    from the inputs', and GraphError for a wrong graph or dtype.
    """
    check_graph(graph, "evaluate")
    if dtype is not None and dtype not in FLOATS:
        raise GraphError(f"evaluate: dtype {show(dtype)} is none of {', '.join(map(str, FLOATS))}")
    require_shapes(graph, tensors)
    graph = replace_sizes(graph, read_sizes([i.spec for i in graph.inputs], tensors))
    values = [t.to(dtype) if dtype and t.is_floating_point() else t for t in tensors]
    with plain_ops_on(device_of(tensors)):
        for eqn in graph.eqns:
            values += eqn.op.run(*(values[i] for i in eqn.args))
    return tuple(values[i] for i in graph.outputs)


def require_shapes(graph: Graph, tensors: object) -> None:
    """Raise PlanMismatchError unless each input has a tensor of its shape; Dims fit any size."""
    given = tuple(tensors) if isinstance(tensors, Iterable) else ()
    differences = [
        f"{i.name}: expected {i.spec.type}, got {describe(x)}"
        for i, x in zip_longest(graph.inputs, given, fillvalue=None)
        if i is not None and not is_shaped(x, i.spec)
    ]
    if len(given) > len(graph.inputs):
        differences += [f"expected {len(graph.inputs)} tensors, got {len(given)}"]
    if differences:
        raise PlanMismatchError(*differences, way_out="pass one tensor for each input, in order")


def is_shaped(x: object, spec: TensorSpec) -> bool:
    """True for a dense tensor of the spec's shape; Dims fit any size."""
    if not isinstance(x, torch.Tensor) or layout_problem(x) or x.ndim != len(spec.shape):
        return False
    sizes = zip(x.shape, spec.shape, strict=True)
    alike = x.is_floating_point() == spec.dtype.is_floating_point
    return alike and all(n == m or isinstance(m, Dim) for n, m in sizes)


def describe(x: object) -> str:
    """A tensor by dtype and shape, or its layout problem; anything else by its class."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    problem = layout_problem(x)
    return f"one that {problem}" if problem else f"{x.dtype} {[*x.shape]}"


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


@final
@frozen
class Verification:
    """Errors of results against float64: a number for each of `names`, the outputs and, of a plan
    with a gradient, the gradients of a training step."""

    names: tuple[str, ...]
    errors: tuple[float, ...]
    allowed: tuple[float, ...]

    @property
    def ok(self) -> bool:
        """True if no error is larger than allowed."""
        return all(e <= a for e, a in zip(self.errors, self.allowed, strict=True))

    def __str__(self) -> str:
        rows = zip(self.names, self.errors, self.allowed, strict=True)
        each = "; ".join(f"{name}: error {e:.3g}, allowed {a:.3g}" for name, e, a in rows)
        return f"{'ok' if self.ok else 'WRONG'}: {each}"


def compare(
    graph: Graph,
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    precision: str = "ieee",
    also: Sequence[Sequence[torch.Tensor]] = (),
) -> Verification:
    """Compare results with `evaluate` by the rule |x - ref| <= 2 max|low - ref| + 2 rounding.

    low is the formula with every step rounded to the digits of the inputs' dtype. rounding is the
    change of ref by adding and subtracting 0.3 in the result's dtype. This is FlashAttention's rule
    with FlashAttention-4's floor. Gradients in half precision may use 3 instead of the first 2. For
    float64, with low equal to ref, the allowance is the error of float32 times 2^-29, the ratio of
    their unit roundoffs. precision: "fp8" has low round weights to the 8 bits of a quantised q.
    also: other results of low; the worst counts, as each may be exact by luck.
    """
    exact = evaluate(graph, tensors)
    exact = tuple(saturate(ref, x.dtype) for ref, x in zip(exact, results, strict=True))
    lows = evaluate_low(graph, tensors, precision), *also
    finer = 2.0**-29 if low_dtype(tensors) == torch.float64 else 1.0
    errors = [distance(x, ref) for x, ref in zip(results, exact, strict=True)]
    rough = [
        max(distance(low, ref) for low in each)
        for ref, each in zip(exact, zip(*lows, strict=True), strict=True)
    ]
    allowed = [
        factor(graph, x) * off * finer + 2 * distance(round_twice(ref, x.dtype), ref)
        for x, ref, off in zip(results, exact, rough, strict=True)
    ]
    names = tuple(f"output {n}" for n, _ in enumerate(results))
    return Verification(names, tuple(errors), tuple(allowed))


def low_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of `low`: of the first floating tensor, bfloat16 if that has 8 bits."""
    kinds = (t.dtype for t in tensors if t.is_floating_point() or t.dtype in QUANTISED)
    return stands_in(next(kinds, torch.float32))


def round_twice(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to a dtype, and again after an addition; to 8 bits, which nothing adds, once."""
    return to_eight(x, dtype) if dtype in QUANTISED else (x.to(dtype) + 0.3) - 0.3


def factor(graph: Graph, x: torch.Tensor) -> int:
    """The allowed multiple of the low formula's error for an output."""
    return 3 if graph.is_gradient and x.dtype in HALF else 2


def distance(x: torch.Tensor, ref: torch.Tensor) -> float:
    """max|x - ref|. Equal infinities, and two NaN, are at distance 0; one NaN is at inf."""
    x = x.to(ref.dtype)
    same = (x == ref) | (x.isnan() & ref.isnan())
    apart = torch.where(same, 0.0, (x - ref).abs()).nan_to_num(nan=INF, posinf=INF)
    return float(apart.max()) if apart.numel() else 0.0


def evaluate_low(
    graph: Graph,
    tensors: Sequence[torch.Tensor],
    precision: str = "ieee",
    random: torch.Generator | None = None,
) -> tuple[torch.Tensor, ...]:
    """The outputs, computed in single steps that each round to `low_dtype`, to float32 instead of
    float64. precision: see `compare`. random: draws errors that kernels make and steps do not.

    Rounding a sum of n products gives the sum of products each off by n unit roundoffs at most, and
    a last digit is two: so each float32 number is off by one. Weights made again of a rounded lse
    are off by as much of themselves, times |lse|, up to the |lse| from which no kernel needs it.
    """
    narrow, low = weights_dtype(graph, precision), low_dtype(tensors)
    values = [x.float() if x.dtype == torch.float64 else x for x in tensors]
    if random is not None:
        values = [move_apart(x, random) if x.dtype == torch.float32 else x for x in values]

    def step(op: Op, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if isinstance(op, Quantise):  # low is not rounded to 8 bits
            operands = *operands[:2], operands[0]
        results = op.run(*operands)
        if narrow and isinstance(op, Softmax):
            results = round_weights(results[0], narrow), *results[1:]
        if random is not None and isinstance(op, Softmax):
            p, lse = results
            results = (
                p * move_apart(torch.ones_like(lse), random, lse.abs().clamp(1, FAR))[..., None],
                lse,
            )
        return tuple(round_digits(x, low) if x.dtype in FLOATS else x for x in results)

    with plain_ops_on(device_of(tensors)):
        for eqn in graph.eqns:
            values += run_in_steps(step, eqn.op, [values[i] for i in eqn.args])
    return tuple(values[i] for i in graph.outputs)


def move_apart(
    x: torch.Tensor, random: torch.Generator, times: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Each number up or down by so many `times` its last digit in float32."""
    signs = torch.randint(2, x.shape, generator=random, device="cpu").to(x.device).mul(2).sub(1)
    return torch.where(x.isfinite(), x * (1 + signs * 2.0**-23 * times), x)


def run_in_steps(emit: Emit, op: Op, operands: Values) -> Sequence[Any]:  # Any: values
    """The results of an op; of an attention by its single steps, packed or not."""

    def one(op: Op, *operands: object) -> Any:
        return run_in_steps(emit, op, operands)[0]

    if packed := op.packed:
        own = packed.read(one, operands)
        return packed.write(one, run_in_steps(emit, packed.op, own), operands)  # type: ignore[no-any-return]  # of a Packed
    return op.forward.unfold(emit, operands) if op.forward else emit(op, *operands)


def in_single_steps(graph: Graph) -> Graph:
    """The graph with each attention in single steps."""
    return replay(graph, lambda b, eqn, operands: run_in_steps(b.emit, eqn.op, operands))


def round_digits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to the digits of a dtype, but not to its range.

    Scores of float16 inputs may exceed 65504.
    """
    narrow = x.to(dtype).to(x.dtype)
    digits, exponent = torch.frexp(x)
    beyond = narrow.isinf() & x.isfinite()
    return torch.where(beyond, torch.ldexp(digits.to(dtype).to(x.dtype), exponent), narrow)
