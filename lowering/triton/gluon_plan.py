"""What the Gluon backend has to launch for one attention, or for its gradient."""

from __future__ import annotations

from math import gcd
from typing import final

from attrs import define, evolve

from attn_graph.kernels.tilings import Tiling, padded_head_size
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.backend import count_of
from attn_graph.lowering.triton.device_code import Tracer
from attn_graph.lowering.triton.launch_list import PASS_OF, TILED, Fixed
from attn_graph.lowering.triton.launches import Descriptor, Launch, Pointers
from attn_graph.lowering.triton.plan import Flash, FlashBuilder
from attn_graph.lowering.triton.programs import describe_waves
from attn_graph.lowering.triton.tile_lists import blocks
from attn_graph.machine.target import Target

ROWS = 64  # queries, or keys, of one group of warps,
GROUPS = 2  # of which a program has two; as kernels/gluon_forward.py says
OWN = GROUPS * ROWS
WARPS = 4  # of a group
NARROWEST = 64  # elements of a row of a tile: 128 bytes, the swizzle of shared memory
# By kernel and the larger width of a tile, the queries or keys that pass by at a time and how many
# tiles are in flight: the most that fit into 227 KiB of shared memory and the 240 registers of a
# thread; docs/reports/gluon.md has both.
TILES = {
    "gluon_forward": {64: (128, 4), 128: (128, 2), 256: (64, 2)},
    "gluon_query_gradient": {64: (64, 4), 128: (64, 4)},
    "gluon_key_gradient": {64: (64, 4), 128: (64, 4)},
}
# Variants of the forward by name, also joined by a comma: how many heads, of the same queries, a
# program takes in turn; and that its two groups take turns at issuing their products.
HEADS = {f"{n} heads": n for n in (2, 4, 8)}
TURNS = "turns"


def plan_launches(problem: Problem, target: Target, variant: str | None = None) -> Flash:
    """The launches of the kernels, behind those that make their lists of tiles where data decide.

    variant: of HEADS, as far as H has such a divisor, and TURNS; None: neither. Raises Untraceable
    where the mask or a modifier can't be made a kernel's.
    """
    code = Tracer.of(problem, plain=True).trace()
    ways = variant.split(", ") if variant else []
    each = next((gcd(HEADS[way], problem.H) for way in ways if way != TURNS), 1)
    return GluonBuilder(problem, target, code, each=each, turns=TURNS in ways).build()


def gluon_launches(flash: Flash) -> list[Launch]:
    """The launches of kernels in Gluon, among those of others."""
    return [launch for launch in flash.launches if launch.kernel in TILES]


def describe_programs(flash: Flash, launch: Launch) -> str:
    """ "512 programs of 4 heads in turn, 3.88 waves", as far as it is known."""
    each = launch.fixed.get("EACH", 1)
    text = count_of(launch.grid, "program") + (f" of {each} heads in turn" if each > 1 else "")
    waves = describe_waves(launch.grid, flash.target) if "EACH" in launch.fixed else ""
    return ", ".join(filter(None, (text, waves)))


def list_variants(problem: Problem, target: Target) -> tuple[str, ...]:
    """Those of a forward to measure: numbers of heads with which programs still fill the GPU, and
    each with turns and without, which no model tells apart."""
    if problem.grad is not None:
        return ()
    blocks_of_heads, count = problem.B * blocks(problem.M, OWN), target.multiprocessors or 0
    heads = [
        name
        for name, each in HEADS.items()
        if problem.H % each == 0 and problem.H // each * blocks_of_heads >= count > 0
    ]
    return *heads, TURNS, *(f"{name}, {TURNS}" for name in heads)


@final
@define(eq=False)
class GluonBuilder(FlashBuilder):
    """The launches of each pass, of which the forward, dq, and dk with dv are kernels in Gluon.

    each: how many heads a program of the forward takes. turns: whether its groups take turns.
    """

    each: int = 1
    turns: bool = False

    def forward(self) -> None:
        """Add the launch of the forward."""
        p, sinks = self.problem, self.problem.by_role.sinks
        more = {
            "EACH": self.each,
            "TURNS": self.turns,
            "o_strides": p.layout_of_o[1],
            "sinks_stride": sinks.strides[0] if sinks else 0,
            "E": p.E,
            "FOLD": p.folds_scale,
        }
        self.launch_gluon("gluon_forward", ("o", "lse", "max", "sinks"), more)

    def sum_weights(self) -> None:
        """Add nothing: these kernels make weights of lse alone."""

    def query_gradient(self) -> None:
        """Add the launch of dq."""
        more = {"dq_strides": self.gradient_strides(0), "D": self.problem.D}
        self.launch_gluon("gluon_query_gradient", ("lse", "delta", "dq"), more)

    def key_gradient(self) -> None:
        """Add the launch of dk and dv, or, of query heads in groups, of their sums and of what adds
        these up. Where the registers have no room for modifiers, they are the plain kernel's."""
        if self.problem.node.modifiers and self.width > NARROWEST:
            super().key_gradient()
            return
        p, parts = self.problem, {"dk": "parts.dk", "dv": "parts.dv"}
        grouped = p.H > p.G
        if grouped:
            sums = {x: self.sums_buffer(n, p.H) for n, x in enumerate(parts.values(), start=1)}
            self.buffers |= sums
        more: Fixed = {"D": p.D, "E": p.E} | {
            f"{name}_strides": self.parts_strides(x) if grouped else self.gradient_strides(n)
            for n, (name, x) in enumerate(parts.items(), start=1)
        }
        pointers: Pointers = {f"{name}_ptr": x for name, x in parts.items() if grouped}
        self.launch_gluon("gluon_key_gradient", ("lse", "delta", "dk", "dv"), more, pointers)
        for n, x in enumerate(parts.values() if grouped else (), start=1):
            self.sum_parts(x, n)

    def launch_gluon(
        self, kernel: str, names: tuple[str, ...], more: Fixed, pointers: Pointers | None = None
    ) -> None:
        """Add the launch of a kernel, with a program for each block of each query head."""
        p, pass_ = self.problem, PASS_OF[kernel]
        by_keys = pass_ == "key_gradient"
        passing, stages = TILES[kernel][self.width]
        sizes = (passing, OWN) if by_keys else (OWN, passing)
        tile = Tiling(*sizes, WARPS, stages)
        lists, listed = self.listed(tile, by_keys)
        own, others = (p.N, p.M) if by_keys else (p.M, p.N)
        named, absent = self.operands(*names)
        if self.data():
            named["data"] = self.data()
        else:
            absent["data"] = None
        more = more | {
            "BLOCK_M" if by_keys else "BLOCK_N": passing,
            "MASKED": p.node.mask is not None or others % passing > 0,
        }
        resident = evolve(tile, warps=GROUPS * WARPS)
        order = self.order(resident, pass_, lists, splits=p.H // p.G)  # no program sums over heads
        each = more.get("EACH", 1)
        order["TOGETHER"] = -(-order["TOGETHER"] // each)
        backwards = () if p.grad is None else ("back",)
        keep = self.code.keep_by_keys if by_keys else self.code.keep
        self.launches.append(
            Launch(
                kernel,
                blocks(own, OWN) * (p.H // each) * p.B,
                named | lists | (pointers or {}),
                absent | listed | more | self.sizes(stages) | order,
                self.texts("strip", "change", *backwards) | {"KEEP": keep},
                *tile.options,
                descriptors=self.describe_tiles(by_keys, passing),
            )
        )

    @property
    def width(self) -> int:
        """The larger width of a tile."""
        return max(tile_width(self.problem.D), tile_width(self.problem.E))

    def sizes(self, stages: int) -> Fixed:
        """Sizes and constants of every kernel."""
        p = self.problem
        return {
            "numbers": self.code.numbers or None,
            "H": p.H,
            "GROUP": p.H // p.G,
            "M": p.M,
            "N": p.N,
            "scale": p.node.scale,
            "STAGES": stages,
        }

    def describe_tiles(self, by_keys: bool, passing: int) -> dict[str, Descriptor]:
        """Operands in tiles, by parameter: of ROWS rows, or of those that pass by."""
        specs = self.layout.large()
        return {
            f"{name}_desc": Descriptor.tiles(
                name, x, passing if (name in "kv") != by_keys else ROWS,
                tile_width(x.shape[-1]), gluon=True,
            )
            for name in TILED
            if (x := specs.get(name)) is not None
        }  # fmt: skip


def tile_width(size: int) -> int:
    """A head size as tiles hold it."""
    return max(NARROWEST, padded_head_size(size))
