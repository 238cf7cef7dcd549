"""Forward mode of an attention by one of Triton's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, final

from attrs import evolve, frozen

from attn_graph.errors import Reason
from attn_graph.ir.graph import Graph
from attn_graph.ir.tangents import AttentionJvp
from attn_graph.lowering.problem import Problem, operand_specs
from attn_graph.lowering.reasons import wide_heads
from attn_graph.machine.target import Target
from attn_graph.machine.torch_switches import Precision
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:  # and imported where they are used: machines without a GPU never ask for them
    from attn_graph.kernels.tilings import Tiling
    from attn_graph.lowering.triton.plan import Flash

WIDEST = 128  # two sums of rows, and as many tangents, have no room beyond
MOVED = ("q", "k", "v", "sinks")  # the operands whose tangents the kernel reads
Maybe = TensorSpec | None


@final
@frozen
class Push:
    """The forward mode of one problem. moved: how each tangent lies, by role; sinks last."""

    problem: Problem
    op: AttentionJvp
    moved: tuple[tuple[str, TensorSpec], ...]

    @classmethod
    def of(cls, graph: Graph) -> Push | None:
        """Of a graph of one AttentionJvp; None of others."""
        if len(graph.eqns) != 1 or not isinstance(graph.eqns[0].op, AttentionJvp):
            return None
        op = graph.eqns[0].op
        own, moved = op.split(operand_specs(graph, graph.eqns[0]))
        pairs = zip(op.attention.roles, moved, strict=True)
        given = tuple((role, spec) for role, spec in pairs if spec is not None)
        return cls(Problem(op.attention, own), op, given)

    @property
    def large(self) -> tuple[tuple[str, TensorSpec], ...]:
        """The tangents of q, k and v."""
        return tuple((role, spec) for role, spec in self.moved if role in "qkv")

    def reasons(self) -> Iterator[Reason]:
        """Against head sizes that have no tiles, and tangents that the kernel does not read."""
        yield from wide_heads(self.problem, WIDEST)
        for role, spec in self.moved:
            if role not in MOVED:
                limit = f"reads tangents of {', '.join(MOVED)}"
                yield Reason(f"tangents.{role}", limit, f"{role} has one, {spec}")


@lru_cache(maxsize=256)
def plan_push(push: Push, target: Target, precision: Precision, variant: str | None) -> Flash:
    """The launch of the kernel, behind those that make its lists of tiles where data decide.

    Raises Untraceable where the mask or a modifier can't be made a kernel's.
    """
    from attn_graph.lowering.triton.device_code import Tracer
    from attn_graph.lowering.triton.operands import takes_tf32
    from attn_graph.lowering.triton.plan import FlashBuilder
    from attn_graph.lowering.triton.tile_lists import blocks

    p, tracer = push.problem, Tracer.of(push.problem)
    code = evolve(tracer.trace(), back=tracer.back())
    code = evolve(code, numbers=tuple(tracer.numbers.values))
    best = precision if takes_tf32(p, target.sm) else "ieee"
    builder = FlashBuilder(p, target, code, best, variant)
    tile = choose_push_tiling(p, target, variant)
    lists, listed = builder.listed(tile, by_keys=False)
    sinks, moved = p.by_role.sinks, dict(push.moved)
    pointers = {f"t{role}_ptr": f"t{role}" for role in moved} | {"to_ptr": "to"}
    absent = {f"t{role}_ptr": None for role in MOVED if role not in moved}
    more: dict[str, Any] = {
        "o_strides": p.layout_of_o[1],
        "sinks_stride": sinks.strides[0] if sinks else 0,
        "tsinks_stride": moved["sinks"].strides[0] if "sinks" in moved else 0,
        "H": p.H,
    }
    more |= {
        f"t{role}_strides": moved[role].strides if role in moved else (0, 0, 0, 0) for role in "qkv"
    }
    more |= absent | listed | builder.order(tile, by_keys=False, pointers=lists)
    names = ("q", "k", "v", "o", "lse", "max", "sinks", "seed", "offset")
    texts = builder.texts("keep", "strip", "change", "back")
    lines = blocks(p.M, tile.block_m) * p.H * p.B
    builder.launch("push", lines, tile, names, more, texts, lists | pointers | {"tlse_ptr": "tlse"})
    return builder.finish()


def choose_push_tiling(problem: Problem, target: Target, variant: str | None) -> Tiling:
    """What the table has, or a variant of that; in the interpreter what all passes have."""
    from attn_graph.kernels.tilings import INTERPRETED, PUSH, VARIANTS, padded_head_size, table_arch

    width = padded_head_size(max(problem.D, problem.E))
    key = table_arch(target.sm), problem.dtype.itemsize
    usual = INTERPRETED if target.interprets else PUSH[key][width]
    return usual if variant is None else VARIANTS[variant](usual)
