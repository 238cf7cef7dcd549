"""Small graphs of the same kind as a large one, for self-checks of kernels."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from attn_graph.ir.graph import Graph, Input
from attn_graph.ir.storage.packed import PLACES, TOTALS
from attn_graph.ir.storage.packing import row_count
from attn_graph.ir.storage.scaling import Dequantise, Quantise, neighbours
from attn_graph.lowering.problem import Problem
from attn_graph.spec import TensorSpec

MOST = {"rows": "i", "keys": "j"}  # axes: of the rows of one sequence


def shrink(graph: Graph, problem: Problem, M: int, N: int) -> Graph:
    """A graph of one attention with M queries and N keys, few heads, and dense tensors. Packed, M
    and N are those of all sequences."""
    G, group = min(problem.G, 2), min(problem.H // problem.G, 2)
    sizes = {"b": min(problem.B, 2), "g": G, "h": G * group, "i": M, "j": N}
    sizes |= {"d": problem.D, "e": problem.E}
    before = {"b": problem.B, "g": problem.G, "h": problem.H, "i": problem.M, "j": problem.N}
    before |= {"d": problem.D, "e": problem.E}
    last: Any = next(eqn for eqn in reversed(graph.eqns) if eqn.op.attention)  # Any: of a Fused
    if packed := last.op.packed:
        totals = {side: graph.types[last.args[PLACES[side]]] for side in packed.sides}
        before |= {TOTALS[side]: row_count(x.shape) for side, x in totals.items()}
        sizes |= {"t": M, "u": N, "s": sizes["b"] + 1}
        before["s"] = problem.B + 1
        if packed.paged:
            (before["n"], page, *_), (_, before["w"]) = (
                graph.types[last.args[at]].shape for at in (1, -1)
            )
            before["p"] = sizes["p"] = page
            sizes["w"] = -(-N // page)
            sizes |= {"j": sizes["w"] * page, "n": sizes["b"] * sizes["w"]}
    roles = dict(zip(last.args, last.op.takes, strict=True))
    for eqn, made in graph.numbered:
        if isinstance(eqn.op, Dequantise):
            roles |= dict.fromkeys(eqn.args, roles[made[0]])
        if isinstance(eqn.op, Quantise):
            roles[eqn.args[1]] = last.op.gives[0]

    def resize(n: int, x: Input) -> Input:
        if n not in roles:  # nothing reads it
            return x
        each = zip(x.spec.shape, *(roles[n].shape(own) for own in (before, sizes)), strict=True)
        shape = tuple(resize_axis(*sizes) for sizes in each)
        return Input(x.name, TensorSpec(shape, x.spec.dtype))

    inputs = tuple(resize(n, x) for n, x in enumerate(graph.inputs))
    types, eqns = [x.spec.type for x in inputs], []
    for eqn in graph.eqns:
        op = eqn.op
        if packed := op.packed:
            rows, keys = (sizes[axis] if x in packed.most else None for x, axis in MOST.items())
            op = evolve(packed, rows=rows, keys=keys)
        outs = op.infer(*(types[n] for n in eqn.args))
        types += outs
        eqns.append(evolve(eqn, op=op, outs=outs))
    return evolve(graph, inputs=inputs, eqns=tuple(eqns), layouts=())


def resize_axis(size: int, old: int, new: int) -> int:
    """The size along an axis that is `new` long instead of `old`: scales of blocks keep these, as
    far as they divide it."""
    block = neighbours(old, size) if size > 1 or size == old else 0
    return new // block if block and new % block == 0 else 1
