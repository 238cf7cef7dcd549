"""Boolean masks that keep all places: a call with them runs as one without them.

Models pass padding masks for batches without padding. One look finds this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_

import torch
from attrs import evolve

from attn_graph.ir.builder import Builder
from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.storage.packed import and_parts
from attn_graph.ir.transforms.binding import settle_attention
from attn_graph.lowering.backend import Backend, Executable, Run, Tensors, Write
from attn_graph.lowering.request import Request
from attn_graph.machine.ambient import is_traced
from attn_graph.masks import Keep
from attn_graph.masks.canonical import canonical_mask

Opened = tuple[Graph, tuple[int, ...], tuple[int, ...]]
Lower = Callable[[Request], Executable | None]


def skips_booleans(backend: Backend, lower_open: Lower) -> Backend:
    """On CPUs calls with all places kept by their boolean masks run `lower_open` of the graph
    without these masks."""

    def lower(request: Request) -> Executable:
        return join_open(request, backend.lower(request), lower_open)

    def lower_any(request: Request) -> Executable | None:
        executable = backend.lower_any(request)
        if executable is None:
            return None
        return join_open(request, executable, backend.lower_any)

    return evolve(backend, lower=lower, lower_any=lower_any)


def join_open(request: Request, usual: Executable, lower_open: Lower) -> Executable:
    limited = request.options.max_workspace is not None
    opened = None if limited or request.target.kind != "cpu" else open_graph(request.graph)
    other = opened and lower_open(request.with_graph(opened[0]))
    if not opened or not other:
        return usual
    _, read, looks = opened
    return evolve(
        usual,
        run=run_either(usual.run, other.run, read, looks),
        infer=run_either(usual.infer, other.infer, read, looks),
        write=write_either(usual, other, read, looks),
        workspace=max(usual.workspace, other.workspace),
        temporary=max(usual.temporary, other.temporary),
        block=max(usual.block, other.block),
        notes=(*usual.notes, f"where booleans keep all places, {'; '.join(other.notes)}"),
    )


def run_either(usual: Run, other: Run, read: Sequence[int], looks: Sequence[int]) -> Run:
    """Runs a call. read: the inputs of `other`. looks: the boolean masks."""

    def run(*tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        for n in looks:
            if not keeps_all(tensors[n]):
                return usual(*tensors)
        return other(*[tensors[n] for n in read])

    return run


def write_either(
    usual: Executable, other: Executable, read: Sequence[int], looks: Sequence[int]
) -> Write | None:
    """`run_either` for outputs in the caller's tensors."""

    def write(rooms: Tensors, *tensors: torch.Tensor) -> Tensors:
        if all(keeps_all(tensors[n]) for n in looks):
            return other.place(rooms, [tensors[n] for n in read])
        return usual.place(rooms, tensors)

    return usual.write and write


def keeps_all(flags: torch.Tensor) -> bool:
    """True if all flags are true and may be looked at."""
    if type(flags) is not torch.Tensor or not flags.is_cpu or is_traced():
        return False
    once = flags
    if not flags.is_contiguous():  # each element in shared memory is read once
        once = flags[tuple([slice(None) if step else slice(1) for step in flags.stride()])]
    return once.numel() > 0 and bool(once.view(torch.uint8).amin())


def open_graph(graph: Graph) -> Opened | None:
    """The graph of one attention, or a gradient, without its boolean masks joined by &, with the
    remaining inputs and the removed ones; None for other graphs."""
    flags = any(i.spec.dtype == torch.bool for i in graph.inputs)
    op = graph.eqns[0].op if flags and len(graph.eqns) == 1 else None
    node = None if op is None or op.packed else op.attention
    parts = and_parts(node.mask) if node else []
    rest = [part for part in parts if not isinstance(part, Keep)]
    if node is None or len(rest) == len(parts):
        return None
    mask, (eqn,) = reduce(and_, rest) if rest else None, graph.eqns
    q, k, *_ = (graph.types[i] for i in eqn.args)
    M, N = q.shape[2], k.shape[2]
    op, kept = settle_attention(
        eqn.op, node, None if mask is None else canonical_mask(mask, M, N), M, N, len(eqn.args)
    )
    own = range(len(graph.inputs))
    if kept is None or not {*graph.outputs}.isdisjoint(own):
        return None
    args = [eqn.args[n] for n in kept]
    read, dropped = tuple(sorted({*args})), {*eqn.args} - {*args}
    return rebuild(graph, op, args, read), read, tuple(sorted(dropped))


def rebuild(graph: Graph, op: Op, args: Sequence[int], read: Sequence[int]) -> Graph:
    """A graph of one equation with another op, of these inputs alone."""
    b = Builder(trusts=True)
    values = {n: b.input(graph.inputs[n].name, graph.inputs[n].spec) for n in read}
    made = b.emit(op, *(values[n] for n in args))
    return b.graph(*(made[n - len(graph.inputs)] for n in graph.outputs))
