"""PyTorch's own fused attention kernel for CPUs, whole graphs at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from attn_graph.backend import Backend, Executable, Options
from attn_graph.ir.attention import AttentionGrad
from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import Bias, Modifier
from attn_graph.ir.ops import clear_blind_rows
from attn_graph.kernels.fused_cpu import INF, flash, flash_backward
from attn_graph.lowering.problem import (
    Problem,
    cotangent_bytes,
    cotangent_note,
    flash_order,
    is_readable,
    other_equations,
    select_outputs,
    sole,
)
from attn_graph.machine.target import Target
from attn_graph.masks import Band
from attn_graph.spec import NAMES, memory_order

TOP_LEFT = Band(None, 0)
Pair = tuple[torch.Tensor, torch.Tensor]
Pulled = tuple[torch.Tensor, torch.Tensor, torch.Tensor, *tuple[torch.Tensor | None, ...]]


def why_not(graph: Graph, target: Target, options: Options) -> Iterator[str]:
    if target.kind != "cpu":
        yield f"runs PyTorch's CPU kernel, and the target is {target}"
        return
    yield from options.switched_off("flash")
    yield from options.rounded(graph, target)
    problem = sole(graph)
    if problem is None:
        yield other_equations(graph)
        return
    yield from node_reasons(problem, (Bias,))
    yield from cpu_size_reasons(problem)
    yield from operand_reasons(problem)
    if problem.grad is not None:
        yield from gradient_reasons(problem, problem.grad)


def node_reasons(problem: Problem, rules: Sequence[type[Modifier]]) -> Iterator[str]:
    """What is against an attention of a kernel that has rules for these modifiers, or for none."""
    node = problem.node
    known = " and ".join(rule.__name__ for rule in rules)
    only = f"; the only modifier it has one for is {known}" if rules else ", nor for any other"
    for modifier in dict.fromkeys(type(m) for m in node.modifiers):
        if modifier not in rules:
            yield f"has no rule for {modifier.__name__}{only}"
    if sum(isinstance(m, Bias) for m in node.modifiers) > 1:
        yield f"adds one bias, and the graph has {len(node.modifiers)}"
    if node.mask not in (None, TOP_LEFT):
        yield f"masks by {TOP_LEFT} (causal, top left) or not at all, and the mask is {node.mask}"
    elif node.mask is not None and Bias in rules and node.modifiers:
        yield "takes a bias or a causal mask, and the graph has both"
    if node.mask is not None and problem.low_scale:
        yield f"masks before it scales, which needs a scale above 0, and it is {problem.low_scale}"
    if node.sinks:
        yield "has no sinks, and the graph has"
    if node.dropout:
        yield f"has no dropout, and the rate is {node.dropout}"


def cpu_size_reasons(problem: Problem) -> Iterator[str]:
    if problem.D != problem.E:
        yield f"needs one head size, and q has D = {problem.D}, v has E = {problem.E}"
    if problem.is_empty:
        sizes = f"B = {problem.B}, H = {problem.H}, M = {problem.M}, N = {problem.N}"
        yield f"needs sizes of at least 1, and {sizes}"


def operand_reasons(problem: Problem) -> Iterator[str]:
    named = dict(zip(problem.node.roles, problem.specs, strict=False))
    if problem.grad is not None:
        _, o, _, do, _ = problem.grad.split(problem.specs)
        named |= {"o": o} | ({"do": do} if do is not None else {})
    for name in ("q", "k", "v", "o", "do"):
        spec = named.get(name)
        if spec is not None and not is_readable(spec, like=name == "q"):
            yield f"needs rows of {spec.shape[3]} that lie together and apart, and {name} is {spec}"
    bias = named.get("bias")
    if bias is not None and not bias.unit_last:
        yield f"needs a bias with stride 1 along its last axis, and it has {bias.strides[-1]}"
    if bias is not None and bias.dtype not in (problem.dtype, torch.float32):
        yield f"adds a bias of dtype {NAMES[problem.dtype]} or f32, and it is {NAMES[bias.dtype]}"
    if bias is not None and problem.dtype == torch.float64 and bias.dtype != problem.dtype:
        yield "adds a bias of dtype f64 to f64 scores, and it is f32"


def gradient_reasons(problem: Problem, grad: AttentionGrad) -> Iterator[str]:
    wanted = [r for r, w in zip(problem.node.roles, grad.wants, strict=True) if w]
    for role in wanted:
        if role not in ("q", "k", "v"):
            yield f"has gradients of q, k and v, and that of {role} is wanted"


def lower(graph: Graph, target: Target, options: Options) -> Executable:
    problem = sole(graph)
    assert problem is not None  # why_not said so
    if problem.grad is None:
        return lower_forward(problem, graph)
    return lower_backward(problem, problem.grad, graph)


def lower_forward(problem: Problem, graph: Graph) -> Executable:
    (eqn,) = graph.eqns
    at_q, at_k, at_v, *rest = eqn.args
    causal, scale = problem.node.mask is not None, problem.node.scale
    base = len(graph.inputs)
    wanted = tuple(i - base for i in graph.outputs)
    reorders = flash_order(problem.specs[0]) != memory_order(problem.specs[0])

    def attend(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = tensors[rest[0]] if rest else None
        q, k, v = tensors[at_q], tensors[at_k], tensors[at_v]
        o, lse = flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        if bias is not None:
            lse = lse.masked_fill(bias.amax(-1) == -INF, -INF)
        return (problem.new_o(o.device).copy_(o) if reorders else o), lse

    def run_o(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        found = attend(*tensors)
        return found[:1], found

    def run(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        o, lse = attend(*tensors)
        both = o, lse.contiguous()
        return [both[i] for i in wanted], both

    def run_plain(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        q, k, v = tensors
        found = flash(q, k, v, 0.0, causal, scale=scale)
        return found[:1], found

    plain = base == 3 and eqn.args == (0, 1, 2) and not reorders and wanted == (0,)
    chosen = run_plain if plain else run_o if wanted == (0,) else run
    return Executable(chosen, notes=("one call of PyTorch's fused CPU kernel",))


def lower_backward(problem: Problem, grad: AttentionGrad, graph: Graph) -> Executable:
    (eqn,) = graph.eqns
    node = problem.node
    causal, scale, blind = node.mask is not None, node.scale, problem.has_blind_rows

    def run_plain(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        q, k, v, o, lse, do = tensors
        return flash_backward(do, q, k, v, o, lse, 0.0, causal, scale=scale), ()

    def run(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        own, o, lse, do, dlse = grad.split([tensors[i] for i in eqn.args])
        q, k, v, *rest = own
        bias = rest[0] if rest else None
        do = torch.zeros_like(o) if do is None else do
        if blind:
            do = clear_blind_rows(do, lse)
            dlse = None if dlse is None else clear_blind_rows(dlse, lse)
            lse = lse.masked_fill(lse == -INF, 0.0)
        found = list(flash_backward(do, q, k, v, o, lse, 0.0, causal, attn_mask=bias, scale=scale))
        if dlse is not None:
            attend = partial(flash, dropout_p=0.0, is_causal=causal, attn_mask=bias, scale=scale)
            pull = partial(
                flash_backward, dropout_p=0.0, is_causal=causal, attn_mask=bias, scale=scale
            )
            dq, dk = through_lse(attend, pull, q, k, lse, dlse, scale)
            found[0].add_(dq)
            found[1].add_(dk)
        made = [g for g, wanted in zip(found, grad.wants, strict=False) if wanted]
        return select_outputs(graph, made), ()

    more = sum(s.type.bytes for s in problem.specs[:2]) * (2 * grad.with_dlse)
    whole = grad.wants == (True, True, True) and grad.with_do and not grad.with_dlse
    plain = whole and eqn.args == tuple(range(6)) and graph.outputs == (6, 7, 8) and not blind
    odd = cotangent_note(problem, "is broadcast, or has rows that lie apart or overlap")
    return Executable(
        run_plain if plain else run,
        temporary=more + cotangent_bytes(problem),
        notes=("one call of PyTorch's fused CPU kernel", *odd),
    )


def through_lse(
    attend: Callable[..., Pair], pull: Callable[..., Pulled],
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq and dk of lse alone, from a kernel's own two passes: q, k, v -> o, ...; do, q, k, v, o,
    lse -> dq, dk, dv, ...

    d lse_i / d s_ij = p_ij, so dq_i = scale dlse_i sum_j p_ij k_j: an attention over k in place of
    v, times scale dlse. And dk_j = scale sum_i p_ij dlse_i q_i: the gradient of v, where the
    cotangent of o is scale dlse q.
    """
    mean = attend(q, k, k)[0]
    weight = (scale * dlse)[..., None].to(q.dtype)
    dk = pull(q * weight, q, k, k, mean, lse)[2]
    return mean.mul_(weight), dk


BACKEND = Backend("torch_sdpa", why_not, lower)
