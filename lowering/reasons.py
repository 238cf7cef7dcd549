"""The reasons that several backends share: each sentence and its key stand here once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from attn_graph.errors import DEVICE, Reason
from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.modifiers import Bias, Modifier
from attn_graph.ir.storage.packing import Pack, Unpack
from attn_graph.ir.storage.paging import SumPages, Unpage
from attn_graph.ir.storage.scaling import Dequantise
from attn_graph.lowering.problem import Problem
from attn_graph.machine.target import Target
from attn_graph.masks.canonical import CAUSAL
from attn_graph.spec import NAMES, TensorSpec

PACKING = (Unpack, Pack)
PAGING = (Unpage, SumPages)
BY_THREADS = "has products that PyTorch divides among threads by the size of the batch"


def other_device(limit: str, target: Target) -> Reason:
    """Against a target of another kind. `limit` names the right one."""
    return Reason(DEVICE, limit, f"the target is {target}")


def no_gpu(target: Target) -> Reason | None:
    """Against a target other than an NVIDIA GPU."""
    return None if target.kind == "cuda" else other_device("needs an NVIDIA GPU", target)


def lacks_machine(reason: Reason) -> bool:
    """True for a missing device or library, which no change of a graph lifts."""
    return reason.key == DEVICE or reason.key.startswith("library.")


def old_gpu(least: int, sm: int) -> Iterator[Reason]:
    """Against a GPU of a compute capability below `least`; both as 90 for 9.0."""
    if sm < least:
        limit = f"needs compute capability sm_{least}"
        yield Reason("architecture", limit, f"the target has sm_{sm}")


def missing_library(library: str, way_out: str) -> Reason:
    """Against a target without a library; `way_out` says how to get it."""
    actual = f"which is not installed; {way_out}"
    return Reason(f"library.{library}", f"needs {library}", actual, "{limit}, {actual}")


def dead_planner(failure: str) -> Reason:
    """Against a backend whose planner, a process of its own, fails or takes too long."""
    return Reason("planner", "is planned in a process of its own", f"it {failure}")


def other_equations(graph: Graph, *, pushes: bool = False, packs: bool = False) -> Reason:
    """Against any graph but one attention or its gradient.

    pushes: True if the backend computes their tangents. packs: True if it takes packed tensors or
    pages.
    """
    ops = [eqn.op for eqn in graph.eqns]
    pushed = [op.jvp for op in ops if op.jvp]
    packed = any(op.packed and op.jvp for op in ops)
    if pushed and (packed or not pushes):
        names = ", ".join(f"AttentionJvp{' of a gradient' if op.grad else ''}" for op in pushed)
        limit = f"computes no tangents{' of packed tensors' * pushes}"
        return Reason("tangents", limit, f"the graph has {names}")
    return (
        scaling_reason(ops)
        or (not packs and packing_reason(ops))
        or Reason(
            "equations",
            "supports one attention",
            f"the graph has {len(ops)} equations: {', '.join(type(op).__name__ for op in ops)}",
        )
    )


def scaling_reason(ops: Sequence[Op]) -> Reason | None:
    """Against keys and values with scales, quantised or in another float; None without them."""
    if any(isinstance(op, Dequantise) or (op.packed and op.packed.scaled) for op in ops):
        return Reason("quantised", "reads no keys with scales", "the graph has some")
    return None


def packing_reason(ops: Sequence[Op]) -> Reason | None:
    """Against packed tensors and pages; None without them."""
    if any(isinstance(op, PAGING) or (op.packed and op.packed.paged) for op in ops):
        return Reason("pages", "reads no pages", "the graph has some")
    if any(op.packed or isinstance(op, PACKING) for op in ops):
        return Reason("packed", "reads no packed tensors", "the graph has some")
    return None


def without_rule(modifier: str, others: str) -> Reason:
    """Against a modifier without code in the backend. `others` names those with code."""
    return Reason(f"modifier.{modifier}", others, modifier, "does not support {actual}{limit}")


def several_biases(count: int) -> Iterator[Reason]:
    if count > 1:
        yield Reason("biases", "adds one bias", f"the graph has {count}")


def no_elements(problem: Problem, totals: Mapping[str, int] | None = None) -> Iterator[Reason]:
    """Against a graph with nothing to compute. totals: the rows of each packed side."""
    sides = totals or {}
    if problem.is_empty or 0 in sides.values():
        p = problem
        packed = "".join(f", {n} packed {side}" for side, n in sides.items())
        actual = f"B = {p.B}, H = {p.H}, M = {p.M}, N = {p.N}{packed}"
        yield Reason("sizes", "needs sizes of at least 1", actual)


def other_dtype(problem: Problem, dtypes: Sequence[torch.dtype]) -> Iterator[Reason]:
    """Against a dtype of q, k and v without a kernel."""
    if problem.dtype not in dtypes:
        *most, last = (NAMES[dtype] for dtype in dtypes)
        limit = f"computes in {', '.join(most)} and {last}"
        yield Reason("dtype", limit, f"the graph is in {NAMES[problem.dtype]}")


def wide_heads(problem: Problem, widest: int, rest: int = 0) -> Iterator[Reason]:
    """Against head sizes above `widest`, of q and k above `widest + rest`."""
    if widest + rest < problem.D or widest < problem.E:
        key, more = "head_widest", ""
        if rest:
            key, more = "head_pieces", f", of q and k up to {widest + rest}"
        yield Reason(key, f"supports head sizes up to {widest}{more}", head_sizes(problem))


def uneven_heads(problem: Problem, step: int) -> Iterator[Reason]:
    """Against head sizes other than multiples of `step`."""
    if problem.D % step or problem.E % step:
        limit = f"needs head sizes that are multiples of {step}"
        yield Reason("head_multiple", limit, head_sizes(problem))


def different_heads(problem: Problem) -> Iterator[Reason]:
    """Against another head size of v than of q and k."""
    if problem.D != problem.E:
        yield Reason("head_equal", "needs one head size", head_sizes(problem))


def head_sizes(problem: Problem) -> str:
    """The head sizes of a problem, in words."""
    return f"q has D = {problem.D}, v has E = {problem.E}"


def other_gradients(problem: Problem, allowed: Sequence[str] = ()) -> Iterator[Reason]:
    """Against gradients of anything but q, k, v and the roles `allowed`."""
    if problem.grad is None:
        return
    for role, wanted in zip(problem.node.roles, problem.grad.wants, strict=True):
        if wanted and role not in ("q", "k", "v", *allowed):
            actual = f"that of {role} is wanted"
            yield Reason(f"gradient.{role}", "has gradients of q, k and v", actual)


def other_statistics(problem: Problem, known: Sequence[str] = ("lse",)) -> Iterator[Reason]:
    """Against statistics beyond `known`."""
    for name in problem.node.stats:
        if name not in known:
            limit = f"gives {' and '.join(known)} and no other statistic"
            yield Reason("statistics", limit, f"the graph returns {name}")


def untraceable(error: Exception) -> Reason:
    """Against a mask or a modifier that gives no kernel."""
    limit = "has to trace the mask and the modifiers into a kernel"
    return Reason("trace", limit, f"could not: {error}")


def node_reasons(problem: Problem, rules: Sequence[type[Modifier]]) -> Iterator[Reason]:
    """rules: the supported modifiers of a kernel."""
    yield from modifier_reasons(problem.node, rules)
    yield from mask_reasons(problem, takes_bias=Bias in rules)
    yield from feature_reasons(problem)


def feature_reasons(problem: Problem) -> Iterator[Reason]:
    """Sinks, dropout and statistics, unknown to PyTorch's kernels or other than ours."""
    if problem.node.sinks:
        yield Reason("no_sinks", "has no sinks", "the graph has")
    if problem.node.dropout:
        yield Reason("no_dropout", "has no dropout", f"the rate is {problem.node.dropout}")
    yield from other_statistics(problem)


def modifier_reasons(node: Attention, rules: Sequence[type[Modifier]]) -> Iterator[Reason]:
    for modifier in dict.fromkeys(type(m) for m in node.modifiers):
        if modifier not in rules:
            known = " and ".join(rule.__name__ for rule in rules)
            others = f", only {known}" if rules else ", nor any other modifier"
            yield without_rule(modifier.__name__, others)
    yield from several_biases(sum(isinstance(m, Bias) for m in node.modifiers))


def mask_reasons(problem: Problem, *, takes_bias: bool) -> Iterator[Reason]:
    mask = problem.node.mask
    if mask not in (None, CAUSAL):
        limit = "supports Causal() from the top left, or no mask"
        yield Reason("causal_alone", limit, f"the mask is {mask.written()}")
    elif mask is not None and takes_bias and problem.node.modifiers:
        yield Reason("bias_beside_mask", "supports a bias or a causal mask", "the graph has both")
    if mask is not None:
        yield from scale_reasons(problem)


def scale_reasons(problem: Problem) -> Iterator[Reason]:
    if problem.low_scale:
        limit = "masks before it scales, which needs a scale above 0"
        yield Reason("masked_scale", limit, f"it is {problem.low_scale}")


def cpu_bias_reasons(bias: TensorSpec, dtype: torch.dtype) -> Iterator[Reason]:
    """Reasons of PyTorch's fused CPU kernel. dtype: of its operands."""
    actual = f"it is {NAMES[bias.dtype]}"
    if not bias.unit_last:
        limit = "needs a bias with stride 1 along its last axis"
        yield Reason("bias_stride", limit, f"it has {bias.strides[-1]}")
    if bias.dtype not in (dtype, torch.float32):
        yield Reason("bias_dtype", f"adds a bias of dtype {NAMES[dtype]} or f32", actual)
    elif dtype == torch.float64 and bias.dtype != dtype:
        yield Reason("wide_bias_dtype", "adds a bias of dtype f64 to f64 scores", actual)
