"""The fallback that takes everything: PyTorch's matrix products and, on CPUs, its fused kernel.

Equation by equation. An attention runs on the tiles that its mask leaves, so that no more than a
tile of scores ever exists; whatever is no attention runs as its own definition says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import final

import torch
from attrs import frozen

from attn_graph.errors import PlanTargetError, Reason
from attn_graph.ir.attention import SAVED, Attention, AttentionGrad
from attn_graph.ir.gradient_ops import sink_gradient
from attn_graph.ir.graph import Eqn, Graph, Op
from attn_graph.ir.packed import Packed
from attn_graph.ir.packing import Lengths
from attn_graph.ir.tangents import AttentionGradJvp, AttentionJvp
from attn_graph.ir.vjp import residuals, statistics
from attn_graph.lowering.backend import Backend, Executable, Options, switch_name
from attn_graph.lowering.cpu import half_tiles, sdpa
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.cpu.product_tiles import ProductTiles
from attn_graph.lowering.cpu.schedule import POSITIONS
from attn_graph.lowering.cpu.tangent_tiles import TangentTiles
from attn_graph.lowering.folding import folds_heads
from attn_graph.lowering.problem import Problem, operand_specs, sole
from attn_graph.machine.ambient import plain_ops_on, without_autocast
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import products_round
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.spec import NAMES, TensorSpec

Tiles = FusedTiles | half_tiles.HalfTiles | ProductTiles | TangentTiles
# Where the blocked math lowering, which computes half precision in float32, beats PyTorch's own
# half precision kernel on CPUs: by dtype and pass, and whether the CPU has the dtype natively. For
# bf16 that is native, `is_fast` decides by size.
# Measured by benchmarks/choice.py; benchmarks/results has the figures of a CPU with native bf16.
MATH_IS_FASTER = {
    ("f16", "forward", False),
    ("f16", "backward", False),
    ("f16", "forward", True),
    ("f16", "backward", True),
    ("bf16", "backward", False),
}
NOTHING = Scratch()
MOST_PADDING = 2  # times the smaller head size: from there on padding costs more than it saves
Work = Callable[..., Sequence[torch.Tensor]]  # of the device of a call, and of operands on it


def why_not(graph: Graph, target: Target, options: Options) -> Iterator[Reason]:
    """Every reason against a graph: PyTorch's switches, the workspace, rounded products."""
    yield from options.switched_off("math")
    if options.max_workspace is not None:  # tiling takes time, and another backend may run it
        yield from unbounded_workspace(graph, options)
        tilings = plan_tiles(graph, target, options)
        yield from options.over_workspace(max((t.scratch.bytes for t in tilings if t), default=0))
    yield from options.rounded(graph, target)


def unbounded_workspace(graph: Graph, options: Options) -> Iterator[Reason]:
    """Against a limit of the workspace, where lengths that are not known yet decide it."""
    if any(isinstance(eqn.op, Packed) for eqn in graph.eqns):
        limit = f"max_workspace is {options.max_workspace} bytes"
        actual = "what packed sequences need depends on their lengths"
        yield Reason("packed_workspace", limit, actual)


def plan_tiles(graph: Graph, target: Target, options: Options) -> tuple[Tiles | None, ...]:
    """How each equation is tiled; None for what is no attention or has nothing to compute."""
    fused = target.kind == "cpu" and options.switches.flash
    return tile_equations(graph, fused, has_own_products(target))


@lru_cache(64)  # `why_not` asks for it, and `lower` again
def tile_equations(graph: Graph, fused: bool, native: bool) -> tuple[Tiles | None, ...]:
    """The same. fused: whether PyTorch's fused CPU kernel may run. native: whether products of
    bfloat16 are the CPU's own."""
    return tuple([tile_equation(graph, eqn, fused, native) for eqn in graph.eqns])


def tile_equation(graph: Graph, eqn: Eqn, fused: bool, native: bool) -> Tiles | None:
    """The same of one equation."""
    specs = operand_specs(graph, eqn)
    if isinstance(eqn.op, (AttentionJvp, AttentionGradJvp)):
        empty = 0 in (*specs[0].shape, *specs[1].shape)
        return None if empty else TangentTiles.plan(eqn.op, specs)
    if not isinstance(eqn.op, (Attention, AttentionGrad)):
        return None
    problem = Problem.of(eqn.op, specs)
    if problem.is_empty:
        return None
    half = native and half_tiles.pays(problem) and not gives_lse(graph, eqn)
    if half and half_tiles.takes(problem):
        return half_tiles.HalfTiles.plan(problem)
    if half or not (fused and fuses(problem)):
        return ProductTiles.plan(problem, problem.dtype if half else problem.wide)
    return FusedTiles.plan(problem)


def where_faster(graph: Graph, target: Target) -> str | None:
    """Of what graphs math is the faster, if this is such a one: by dtype and pass, and size."""
    dtype = NAMES[graph.inputs[0].spec.dtype] if graph.inputs else "f32"
    pass_ = "backward" if graph.is_gradient else "forward"
    if (dtype, pass_, dtype in target.native) in MATH_IS_FASTER:
        return f"{dtype} {pass_}"
    return f"{dtype} {pass_} of this size" if is_fast(graph, target) else None


def is_fast(graph: Graph, target: Target) -> bool:
    """Whether products of half precision, the CPU's own, make it faster than PyTorch's kernel."""
    problem = sole(graph)
    if problem is None or not has_own_products(target) or gives_lse(graph, graph.eqns[0]):
        return False
    return half_tiles.pays(problem)


def gives_lse(graph: Graph, eqn: Eqn) -> bool:
    """Whether an attention's lse is returned, or read: it is not of rounded scores then."""
    if not isinstance(eqn.op, Attention):
        return False
    (lse,) = (outs[1] for each, outs in graph.numbered if each is eqn)
    return lse in graph.outputs or any(lse in each.args for each in graph.eqns)


def has_own_products(target: Target) -> bool:
    """Whether a target multiplies bfloat16 in instructions of its CPU."""
    return target.kind == "cpu" and "bf16" in target.native


def fuses(problem: Problem) -> bool:
    """Whether PyTorch's fused CPU kernel can compute the tiles: it adds, gives o and lse, and
    pulls to q, k, v."""
    node, grad = problem.node, problem.grad
    if node.dropout or not all(m.additive for m in node.modifiers):
        return False
    if node.names != SAVED:
        return False
    sizes = problem.D, problem.E
    if node.mask is not None and max(sizes) >= MOST_PADDING * min(sizes):
        return False
    if grad is None:
        return True
    trained = (name for m in node.modifiers for name in m.needs)
    wanted = dict(zip(node.roles[3:], grad.wants[3:], strict=True))
    return grad.with_do and not grad.with_dlse and not any(wanted[name] for name in trained)


@final
@frozen
class Step:
    """One equation, ready to run."""

    call: Work
    scratch: Scratch = NOTHING
    temporary: int = 0
    note: str | None = None


def lower(graph: Graph, target: Target, options: Options) -> Executable:
    """One step for each equation, run in order."""
    tilings = plan_tiles(graph, target, options)
    steps = [step_of(graph, *x, target, options) for x in zip(graph.eqns, tilings, strict=True)]
    return run_steps(graph, steps, target, options)


def lower_packed_steps(graph: Graph, target: Target, options: Options) -> Executable | None:
    """Steps on packed tensors, whose sequences are of any sizes anyway; None where others are."""
    steps = [any_step(graph, eqn, target, options) for eqn in graph.eqns]
    known = [step for step in steps if step is not None]
    return None if len(known) < len(steps) else run_steps(graph, known, target, options)


def any_step(graph: Graph, eqn: Eqn, target: Target, options: Options) -> Step | None:
    """How an equation runs in any sizes; None where each size is lowered by itself."""
    from attn_graph.lowering.cpu.packed import PackedRun, call_packed, runs_any_size

    specs = tuple(operand_specs(graph, eqn))
    if isinstance(eqn.op, Lengths):
        return Step(run_definition(eqn.op, specs))
    if not runs_any_size(eqn, specs):
        return None
    return Step(call_packed(PackedRun(eqn, specs, partial(lower_part, target, options))))


def run_steps(graph: Graph, steps: Sequence[Step], target: Target, options: Options) -> Executable:
    """Steps, one for each equation, run in order."""
    plan = [(eqn.args, step.call) for eqn, step in zip(graph.eqns, steps, strict=True)]
    saved, stats = residuals(graph), statistics(graph)
    exact = options.exact(graph)

    def run(*tensors: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        device = tensors[0].device if tensors else torch.device(target.kind)
        if exact and products_round(target.kind):
            raise PlanTargetError(
                f'math was planned with precision "ieee", and now {switch_name(target.kind)}; '
                "set it back, or compile again"
            )
        values = list(tensors)
        for args, call in plan:
            values += call(device, *[values[i] for i in args])
        return hand_out(values, graph.outputs, stats), [values[i] for i in saved]

    return Executable(
        run,
        max((step.scratch.bytes for step in steps), default=0),
        max((step.temporary for step in steps), default=0) + bytes_between(graph, saved),
        tuple(step.note for step in steps if step.note),
    )


def bytes_between(graph: Graph, saved: Sequence[int]) -> int:
    """Bytes of the values between equations: neither inputs, nor returned, nor saved."""
    kept = {*range(len(graph.inputs)), *graph.outputs, *saved}
    return sum(t.bytes for i, t in enumerate(graph.types) if i not in kept)


def hand_out(
    values: Sequence[torch.Tensor], outputs: Sequence[int], stats: frozenset[int]
) -> list[torch.Tensor]:
    """The outputs: statistics in C order, and a value that is returned twice as two tensors."""
    results: list[torch.Tensor] = []
    for place, i in enumerate(outputs):
        value = values[i].contiguous() if i in stats else values[i]
        results.append(value.clone() if i in outputs[:place] else value)
    return results


def step_of(graph: Graph, eqn: Eqn, tiles: Tiles | None, target: Target, options: Options) -> Step:
    """How an equation runs: in tiles, or by its definition."""
    from attn_graph.lowering.cpu.fused_calls import FusedRun  # planning needs it, importing not

    if isinstance(eqn.op, Packed):
        return packed_step(graph, eqn, target, options)
    if tiles is None:
        specs = operand_specs(graph, eqn)
        return Step(run_definition(eqn.op, specs), temporary=needed_by_definition(eqn, specs))
    scratch, names = tiles.scratch, tuple(tiles.buffers)
    work: Work
    if isinstance(tiles, TangentTiles):
        work = tiles.run
    else:
        run = FusedRun.of(tiles) if isinstance(tiles, FusedTiles) else tiles
        forward = tiles.problem.grad is None
        work = run.forward if forward else partial(run_backward, tiles.problem, run.backward)

    def call(device: torch.device, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
        rooms = options.workspace.lease(scratch, device)
        with torch.no_grad(), without_autocast(), rooms as views:
            return work(operands, dict(zip(names, views, strict=True)))

    more = 0 if isinstance(tiles, TangentTiles) else sink_bytes(tiles.problem)
    return Step(call, scratch, tiles.temporary + more, tiles.summary())


def packed_step(graph: Graph, eqn: Eqn, target: Target, options: Options) -> Step:
    """How an equation on packed tensors runs."""
    from attn_graph.lowering.cpu.packed import plan_packed

    lower = partial(lower_part, target, options)
    plan = plan_packed(eqn, tuple(operand_specs(graph, eqn)), lower)
    scratch = Scratch((Buffer((plan.workspace,), torch.uint8),))  # leased by what it calls
    return Step(plan.call, scratch, plan.temporary, plan.note)


def lower_part(target: Target, options: Options, part: Graph) -> Executable:
    """What runs a sequence, as a graph of its own."""
    faster = where_faster(part, target) is not None
    refused = faster or sdpa.BACKEND.reasons(part, target, options)
    return (BACKEND if refused else sdpa.BACKEND).lower(part, target, options)


def sink_bytes(problem: Problem) -> int:
    """What `sink_gradient_of` allocates at one time: do and its product with o, in the dtype of
    scores, and four numbers a row."""
    grad = problem.grad
    if grad is None or not dict(zip(grad.attention.roles, grad.wants, strict=True)).get("sinks"):
        return 0
    return problem.B * problem.H * problem.M * (2 * problem.E + 4) * problem.wide.itemsize


def needed_by_definition(eqn: Eqn, specs: Sequence[TensorSpec]) -> int:
    """Bytes that a definition allocates, estimated from above: copies of all that it reads and
    gives in the widest dtype, and the places that a mask or a modifier is asked at."""
    shapes = [*(s.shape for s in specs), *(t.shape for t in eqn.outs)]
    most = max((n for shape in shapes for n in shape[2:]), default=0)
    return 3 * torch.float64.itemsize * sum(map(prod, shapes)) + POSITIONS * most * most


def run_definition(op: Op, specs: Sequence[TensorSpec]) -> Work:
    """An equation by its definition: what is no attention, and attentions without a score."""

    def call(device: torch.device, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
        with torch.no_grad(), plain_ops_on(device):
            results = op.run(*operands)
            if isinstance(op, Attention):
                return Problem.of(op, specs).new_o(device).copy_(results[0]), *results[1:]
            if isinstance(op, AttentionJvp):  # o and to in the memory order of q
                like = Problem.of(op.attention, specs).new_o
                named = zip(op.names, results, strict=True)
                return [like(device).copy_(x) if n in ("o", "to") else x for n, x in named]
            return results

    return call


def run_backward(
    problem: Problem,
    backward: Callable[..., dict[int, torch.Tensor]],
    operands: Sequence[torch.Tensor],
    scratch: Mapping[str, torch.Tensor],
) -> Sequence[torch.Tensor]:
    """The wanted gradients, in the order of the operands. backward: those of tiles, by number."""
    grad = problem.grad
    assert grad is not None
    gradients = backward(operands, scratch)
    if grad.attention.sinks:
        place = grad.attention.roles.index("sinks")
        wanted = grad.wants[place]
        gradients[place] = sink_gradient_of(grad, operands) if wanted else operands[place]
    return [gradients[i] for i, wanted in enumerate(grad.wants) if wanted]


def sink_gradient_of(grad: AttentionGrad, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """dsinks [H] = sum_bi exp(sink - lse) (dlse - delta), the same bits however lse lies."""
    given = grad.split(operands)
    sinks, lse = grad.attention.split(given.own).sinks, given.lse.contiguous()
    assert sinks is not None
    surplus = torch.zeros_like(lse) if given.dlse is None else given.dlse.clone()
    if given.do is not None:
        surplus -= (given.do.to(lse.dtype) * given.o).sum(-1)
    return sink_gradient(sinks, lse, surplus)


BACKEND = folds_heads(Backend("math", why_not, lower, lower_any=lower_packed_steps), "cpu")
