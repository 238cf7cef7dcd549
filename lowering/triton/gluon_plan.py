"""What the Gluon backend has to launch for one attention."""

from __future__ import annotations

from attn_graph.kernels.tilings import Tiling, padded_head_size
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.device_code import Tracer
from attn_graph.lowering.triton.launch_list import Fixed
from attn_graph.lowering.triton.launches import Descriptor, Launch
from attn_graph.lowering.triton.plan import Flash, FlashBuilder
from attn_graph.lowering.triton.tile_lists import blocks
from attn_graph.machine.target import Target

ROWS = 64  # queries of one group of warps,
GROUPS = 2  # of which a program has two; as kernels/gluon_forward.py says
WARPS = 4  # of a group
NARROWEST = 64  # elements of a row of a tile: 128 bytes, the swizzle of shared memory
# By the larger width of a tile, its keys and how many tiles are in flight: the most that fit into
# 227 KiB of shared memory and the 240 registers of a thread; docs/reports/gluon.md has both.
TILES = {64: (128, 4), 128: (128, 2), 256: (64, 2)}


def plan_launches(problem: Problem, target: Target) -> Flash:
    """The launch of the kernel, behind those that make its lists of tiles where data decide.

    Raises Untraceable where the mask or a modifier can't be made a kernel's.
    """
    builder = FlashBuilder(problem, target, Tracer.of(problem, plain=True).trace())
    keys, stages = TILES[max(tile_width(problem.D), tile_width(problem.E))]
    tile = Tiling(GROUPS * ROWS, keys, WARPS, stages)
    lists, listed = builder.listed(tile, by_keys=False)
    pointers, absent = builder.operands("o", "lse", "max", "sinks")
    if builder.data():
        pointers["data"] = builder.data()
    else:
        absent["data"] = None
    builder.launches.append(
        Launch(
            "gluon_forward",
            blocks(problem.M, tile.block_m) * problem.H * problem.B,
            pointers | lists,
            absent
            | listed
            | fixed_arguments(builder, tile)
            | builder.order(tile, "forward", lists),
            builder.texts("keep", "strip", "change"),
            *tile.options,
            descriptors=describe_operands(problem, tile),
        )
    )
    return builder.finish()


def fixed_arguments(builder: FlashBuilder, tile: Tiling) -> Fixed:
    """Sizes and constants of the kernel."""
    p, sinks = builder.problem, builder.problem.by_role.sinks
    return {
        "numbers": builder.code.numbers or None,
        "o_strides": p.layout_of_o[1],
        "sinks_stride": sinks.strides[0] if sinks else 0,
        "H": p.H,
        "GROUP": p.H // p.G,
        "M": p.M,
        "N": p.N,
        "scale": p.node.scale,
        "E": p.E,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "FOLD": not p.low_scale and not p.node.modifiers,
        "MASKED": p.node.mask is not None or p.N % tile.block_n > 0,
    }


def describe_operands(problem: Problem, tile: Tiling) -> dict[str, Descriptor]:
    """q, k and v in tiles, by parameter."""
    rows = {"q": ROWS, "k": tile.block_n, "v": tile.block_n}
    specs = zip(rows.items(), problem.specs, strict=False)
    return {
        f"{name}_desc": Descriptor.tiles(name, x, count, tile_width(x.shape[-1]), gluon=True)
        for (name, count), x in specs
    }


def tile_width(size: int) -> int:
    """A head size as tiles hold it."""
    return max(NARROWEST, padded_head_size(size))
