"""What has to come out right on a device before the Gluon kernels run a graph there."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from attn_graph.ir.graph import Graph
from attn_graph.lowering.backend import DeviceTest
from attn_graph.lowering.small_graphs import shrink
from attn_graph.lowering.triton.gluon_plan import gluon_launches
from attn_graph.lowering.triton.plan import Flash
from attn_graph.spec import NAMES

HOME = "attn_graph.lowering.triton.gluon:BACKEND"
SIZES = ((65, 1), (200, 2), (129, 5), (300, 9))  # queries, and tiles of keys
TAIL = 5  # keys that the last tile lacks, where the variant masks at all
KEYS = 128  # of a tile, where only dk and dv are wanted
# Constants in machine code.
COMPILED = ("D", "E", "BLOCK_M", "BLOCK_N", "STAGES", "FOLD", "LISTED", "MASKED", "TURNS")


def make_device_test(graph: Graph, flash: Flash, way: str | None) -> DeviceTest:
    """The attention or gradient in small sizes: one tile, fewer than buffers, and many.

    way: the variant of which the plan is. Of several heads, small graphs have two or more too.
    """
    small = tuple(shrink(graph, flash.problem, M, N) for M, N in small_sizes(flash))
    variant = ", ".join(filter(None, (way, describe_variant(flash))))
    return DeviceTest(HOME, variant, small, way=way)


def small_sizes(flash: Flash) -> Iterator[tuple[int, int]]:
    """Queries and keys that make the same variants; of gradients, each query sees a key."""
    masks = {
        name: (launch.fixed[name], launch.fixed["MASKED"])
        for launch in gluon_launches(flash)
        for name in ("BLOCK_M", "BLOCK_N")
        if name in launch.fixed
    }
    rows, has_rest = masks.get("BLOCK_M", (1, True))
    keys, has_tail = masks.get("BLOCK_N", (KEYS, True))
    hides = flash.problem.grad is not None and flash.problem.node.mask is not None
    for M, tiles in SIZES:
        N = tiles * keys - (TAIL if has_tail else 0)
        M = M if has_rest else -(-M // rows) * rows
        yield min(M, N) if hides else M, N


def describe_variant(flash: Flash) -> str:
    """All that the machine code depends on beside device, versions and the kernel's source."""
    p, dtypes = flash.problem, flash.dtypes()
    lines = [*p.node.stats]
    for launch in gluon_launches(flash):
        lines += [launch.kernel, *(f"{x}={launch.fixed[x]}" for x in COMPILED if x in launch.fixed)]
        for parameter, x in sorted(launch.tensors.items()):
            read = (x,) if isinstance(x, str) else x
            lines += [f"{parameter}: {', '.join(str(dtypes[name]) for name in read)}"]
        lines += [f"{name}: {text}" for name, text in sorted(launch.texts.items())]
    digest = sha256("\n".join(lines).encode()).hexdigest()[:12]
    backward = ", backward" if p.grad is not None else ""
    return f"{NAMES[p.dtype]}, D {p.D}, E {p.E}{backward}, {digest}"
