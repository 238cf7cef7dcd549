"""PyTorch's own fused attention kernel for CPUs, whole graphs at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from attn_graph.errors import Reason
from attn_graph.ir.attention import AttentionGrad
from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import Bias
from attn_graph.ir.transforms.binding import bind_graph
from attn_graph.ir.transforms.gradient_ops import clear_blind_rows
from attn_graph.kernels.fused_cpu import block_bytes, flash, flash_backward, pull_heads
from attn_graph.kernels.products import reaches_far
from attn_graph.lowering import reasons
from attn_graph.lowering.backend import UNPRICED, Backend, Executable, Price
from attn_graph.lowering.cpu.far_rows import ByProducts
from attn_graph.lowering.cpu.ways import cpu_case, sdpa_seconds
from attn_graph.lowering.folding import folds_heads, folds_one_row
from attn_graph.lowering.problem import (
    Problem,
    cotangent_bytes,
    cotangent_note,
    has_flash_order,
    in_bshd,
    in_c_order,
    is_readable,
    relaid_bytes,
    relaid_note,
    select_outputs,
)
from attn_graph.lowering.request import Request
from attn_graph.lowering.steps import Work
from attn_graph.lowering.through_lse import through_lse
from attn_graph.machine.target import Target
from attn_graph.spec import INF
from attn_graph.spec.dims import are_numbers


def no_cpu(target: Target) -> Reason | None:
    return None if target.kind == "cpu" else reasons.other_device("is PyTorch's CPU kernel", target)


def why_not(request: Request) -> Iterator[Reason]:
    yield from request.options.switched_off("flash")
    yield from request.options.varying(reasons.BY_THREADS)
    yield from request.rounded()
    problem = request.facts.problem
    if problem is None:
        yield reasons.other_equations(request.graph)
        return
    yield from reasons.node_reasons(problem, (Bias,))
    yield from reasons.different_heads(problem)
    yield from reasons.no_elements(problem)
    yield from operand_reasons(problem)
    yield from reasons.other_gradients(problem)


def operand_reasons(problem: Problem) -> Iterator[Reason]:
    named = dict(zip(problem.node.roles, problem.specs, strict=False))
    if problem.grad is not None:
        given = problem.grad.split(problem.specs)
        named |= {"o": given.o} | ({"do": given.do} if given.do is not None else {})
    for name in ("q", "k", "v", "o", "do"):
        spec = named.get(name)
        if spec is not None and not is_readable(spec, like=name == "q"):
            limit = f"needs contiguous, non-overlapping rows of {spec.shape[3]} elements"
            yield Reason(f"rows.{name}", limit, f"{name} is {spec}")
    if "bias" in named:
        yield from reasons.cpu_bias_reasons(named["bias"], problem.dtype)


def price(request: Request) -> Price:
    case = cpu_case(request)
    return UNPRICED if case is None else Price(sdpa_seconds(case))


def lower(request: Request) -> Executable:
    problem = request.facts.problem
    assert problem is not None  # why_not said so
    if problem.grad is None:
        return lower_forward(problem, request.graph)
    return lower_backward(
        problem, problem.grad, request.graph, ByProducts(problem.grad, request.options)
    )


def lower_whole(request: Request) -> Executable | None:
    """One call in any sizes, read off its tensors. None if o changes its memory order, if one query
    would be read otherwise than several, or if the kernel refuses the largest or the smallest
    sizes."""
    problem = request.facts.problem
    smallest = bind_graph(request.graph, {symbol.name: 1 for symbol in request.graph.symbols})
    if problem is None or reorders(problem) or folds_one_row(request.graph):
        return None
    refused = any(any(why_not(request.with_graph(each))) for each in (request.graph, smallest))
    return None if refused else lower(request)


def count_block(problem: Problem) -> int:
    """Bytes of the kernel's block in each thread; 0 for sizes by name, whose plan has none."""
    p = problem
    if not are_numbers(p.M, p.N):
        return 0
    return block_bytes(p.M, p.N, p.E, p.dtype, backward=p.grad is not None)


def pulls_heads(problem: Problem, grad: AttentionGrad) -> bool:
    """True if gradients are made with each head as a batch entry, so that they lie in C order."""
    p, given = problem, grad.split(problem.specs)
    alike = p.H == p.G and len(given.own) == 3 and not grad.with_dlse
    return alike and not in_bshd(p.specs[0]) and all(x.is_dense for x in (*given.own, given.o))


def reorders(problem: Problem) -> bool:
    """True if o of the kernel is copied into the due memory order."""
    return problem.grad is None and not has_flash_order(problem.specs[0])


def lower_forward(problem: Problem, graph: Graph) -> Executable:
    """The forward kernel, with as little around it as the graph allows."""
    (eqn,) = graph.eqns
    at_q, at_k, at_v, *rest = eqn.args
    causal, scale = problem.node.mask is not None, problem.node.scale
    names = graph.result_names
    copies = reorders(problem)

    def attend(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = attend_once(*tensors)
        if rest:
            lse = lse.masked_fill(tensors[rest[0]].amax(-1) == -INF, -INF)
        return o, lse

    def attend_once(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = tensors[rest[0]] if rest else None
        q, k, v = tensors[at_q], tensors[at_k], tensors[at_v]
        o, lse = flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return (problem.new_o(o.device).copy_(o) if copies else o), lse

    def infer_o(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        return attend_once(*tensors)[:1], ()

    def run_o(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        pair = attend(*tensors)
        return pair[:1], pair

    def run(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        o, lse = attend(*tensors)
        results = {"o": o, "lse": lse.contiguous()}
        return [results[name] for name in names], [*results.values()]

    def run_plain(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        q, k, v = tensors
        pair = flash(q, k, v, 0.0, causal, scale=scale)
        return pair[:1], pair

    alone = len(graph.inputs) == 3 and eqn.args == (0, 1, 2)  # a simplified mask still has data
    plain = alone and not copies and names == ("o",)
    notes, block = ("one call of PyTorch's fused CPU kernel",), count_block(problem)
    if names != ("o",) or plain:
        return Executable(run_plain if plain else run, notes=notes, block=block)
    return Executable(run_o, infer=infer_o, notes=notes, block=block)


def lower_backward(
    problem: Problem, grad: AttentionGrad, graph: Graph, by_products: Work
) -> Executable:
    """The backward kernel, and another call of both if lse has a gradient. by_products: computes
    rows with an lse too coarse for their weights."""
    (eqn,) = graph.eqns
    node = problem.node
    causal, scale, blind = node.mask is not None, node.scale, problem.has_blind_rows
    by_heads = pulls_heads(problem, grad)

    def run_plain(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        q, k, v, o, lse, do = tensors
        if reaches_far(lse) and not node.part:
            return by_products(q.device, *tensors), ()
        if by_heads:
            return pull_heads(do, q, k, v, o, lse, scale, causal), ()
        return flash_backward(do, q, k, v, o, lse, 0.0, causal, scale=scale), ()

    def run(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        operands = [tensors[i] for i in eqn.args]
        given = grad.split(operands)
        if reaches_far(given.lse) and not node.part:
            return select_outputs(graph, by_products(given.o.device, *operands)), ()
        q, k, v, *rest = given.own
        o, lse, dlse = given.o, given.lse, given.dlse
        bias = rest[0] if rest else None
        do = torch.zeros_like(o) if given.do is None else given.do
        if blind:
            do = clear_blind_rows(do, lse)
            dlse = None if dlse is None else clear_blind_rows(dlse, lse)
            lse = lse.masked_fill(lse == -INF, 0.0)
        pull = partial(flash_backward, dropout_p=0.0, is_causal=causal, attn_mask=bias, scale=scale)
        if by_heads:
            gradients = pull_heads(do, q, k, v, o, lse, scale, causal)
        else:
            gradients = list(pull(do, q, k, v, o, lse))
        if dlse is not None:
            attend = partial(flash, dropout_p=0.0, is_causal=causal, attn_mask=bias, scale=scale)
            dq, dk = through_lse(attend, pull, q, k, lse, dlse, scale)
            gradients[0].add_(dq)
            gradients[1].add_(dk)
        made = [g for g, wanted in zip(gradients, grad.wants, strict=False) if wanted]
        return select_outputs(graph, made), ()

    more = sum(s.type.bytes for s in problem.specs[:2]) * (2 * grad.with_dlse)
    rows = problem.B * problem.H * problem.M * problem.wide.itemsize
    more += 4 * rows * grad.with_dlse
    whole = grad.wants == (True, True, True) and grad.with_do and not grad.with_dlse
    plain = whole and eqn.args == tuple(range(6)) and graph.outputs == (6, 7, 8) and not blind
    odd = cotangent_note(problem, "is broadcast, or has rows that lie apart or overlap")
    keeps = in_c_order if by_heads else in_bshd
    more += rows * by_heads  # lse in C order
    return Executable(
        run_plain if plain else run,
        temporary=more + cotangent_bytes(problem) + relaid_bytes(problem, keeps),
        notes=("one call of PyTorch's fused CPU kernel", *odd, *relaid_note(problem, keeps)),
        block=count_block(problem),
    )


BACKEND = folds_heads(
    Backend("torch_sdpa", why_not, lower, lower_any=lower_whole, price=price, no_device=no_cpu),
    "cpu",
)
