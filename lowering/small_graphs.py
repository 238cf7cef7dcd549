"""Small graphs of the same kind as a large one, for self-checks of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve

from attn_graph.ir.graph import Graph, Input
from attn_graph.ir.packed import PLACES, Packed, operand_sides
from attn_graph.ir.packing import row_count
from attn_graph.lowering.problem import Problem
from attn_graph.masks import Data, needs_of
from attn_graph.spec import TensorSpec

TOTALS = {"rows": "t", "keys": "u"}  # axes: of all packed rows
MOST = {"rows": "i", "keys": "j"}  # and of those of one sequence
Label = str | Data  # the axes of an operand


def shrink(graph: Graph, problem: Problem, M: int, N: int) -> Graph:
    """A graph of one attention with M queries and N keys, few heads, and dense tensors. Packed, M
    and N are those of all sequences."""
    G, group = min(problem.G, 2), min(problem.H // problem.G, 2)
    sizes = {"b": min(problem.B, 2), "g": G, "h": G * group, "i": M, "j": N}
    sizes |= {"d": problem.D, "e": problem.E}
    before = {"b": problem.B, "g": problem.G, "h": problem.H, "i": problem.M, "j": problem.N}
    before |= {"d": problem.D, "e": problem.E}
    last = graph.eqns[-1]
    labels = [*operand_axes(problem)]
    if isinstance(last.op, Packed):
        labels = [*packed_axes(last.op, labels)]
        totals = {side: graph.types[last.args[PLACES[side]]] for side in last.op.sides}
        before |= {TOTALS[side]: row_count(x.shape) for side, x in totals.items()}
        sizes |= {"t": M, "u": N, "s": sizes["b"] + 1}
        before["s"] = problem.B + 1
        if last.op.paged:
            (before["n"], page, *_), (_, before["w"]) = (
                graph.types[last.args[at]].shape for at in (1, -1)
            )
            before["p"] = sizes["p"] = page
            sizes["w"] = -(-N // page)
            sizes |= {"j": sizes["w"] * page, "n": sizes["b"] * sizes["w"]}
    axes = dict(zip(last.args, labels, strict=True))

    def resize(n: int, x: Input) -> Input:
        if n not in axes:  # nothing reads it
            return x
        each = zip(x.spec.shape, *(sizes_of(axes[n], own) for own in (before, sizes)), strict=True)
        shape = tuple(new if size == old else 1 for size, old, new in each)
        return Input(x.name, TensorSpec(shape, x.spec.dtype))

    inputs = tuple(resize(n, x) for n, x in enumerate(graph.inputs))
    types, eqns = [x.spec.type for x in inputs], []
    for eqn in graph.eqns:
        op = eqn.op
        if isinstance(op, Packed):
            rows, keys = (sizes[axis] if x in op.most else None for x, axis in MOST.items())
            op = evolve(op, rows=rows, keys=keys)
        outs = op.infer(*(types[n] for n in eqn.args))
        types += outs
        eqns.append(evolve(eqn, op=op, outs=outs))
    return evolve(graph, inputs=inputs, eqns=tuple(eqns), layouts=())


def sizes_of(label: Label, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if isinstance(label, Data):
        return label.shape(sizes)
    return tuple(sizes[axis] for axis in label)


def packed_axes(op: Packed, labels: Sequence[Label]) -> Iterator[Label]:
    """The axes of the operands of an attention on packed tensors or pages, by those of padded ones:
    t: all rows, u: all keys, s: one more than sequences, n: all pages of p rows, w: those of one
    sequence."""
    for label, side in zip(labels, operand_sides(op.op), strict=True):
        if isinstance(label, Data):
            yield label
        elif side == "keys" and op.paged:
            yield "np" + label[1] + label[3]
        elif side in op.sides:
            head, last = label[1], label[3:]
            yield TOTALS[side] + head + last if last else head + TOTALS[side]
        else:
            yield label
    yield from "s" * len(op.sides)
    yield from ["bw"] * op.paged


def operand_axes(problem: Problem) -> Iterator[Label]:
    """The axes of each operand, of "bhijgde", or its `Data`; none of dropout's seed and offset."""
    node, grad = problem.node, problem.grad
    yield from ("bhid", "bgjd", "bgje")
    for needs in (*(m.needs for m in node.modifiers), needs_of(node.mask)):
        yield from needs.values()
    if node.sinks:
        yield "h"
    if grad is not None:  # o, lse, do and dlse
        yield from ("bhie", "bhi", *("bhie",) * grad.with_do, *("bhi",) * grad.with_dlse)
