"""What has to come out right on a device before the Gluon kernel runs a graph there."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from attrs import evolve

from attn_graph.ir.graph import Graph, Input
from attn_graph.lowering.backend import DeviceTest
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.plan import Flash
from attn_graph.spec import NAMES, TensorSpec

HOME = "attn_graph.lowering.triton.gluon:BACKEND"
SIZES = ((65, 1), (200, 2), (129, 5), (300, 9))  # queries, and tiles of keys
TAIL = 5  # keys that the last tile lacks, where the variant masks at all
COMPILED = ("E", "BLOCK_N", "STAGES", "FOLD", "LISTED", "MASKED")  # constants in machine code


def make_device_test(graph: Graph, flash: Flash) -> DeviceTest:
    """The attention of a graph in small sizes: one tile, fewer than buffers, and many."""
    launch, problem = flash.launches[-1], flash.problem
    short = TAIL if launch.fixed["MASKED"] else 0
    keys = launch.fixed["BLOCK_N"]
    small = (shrink(graph, problem, M, tiles * keys - short) for M, tiles in SIZES)
    return DeviceTest(HOME, describe_variant(flash), tuple(small))


def describe_variant(flash: Flash) -> str:
    """All that the machine code depends on beside device, versions and the kernel's source."""
    p, launch = flash.problem, flash.launches[-1]
    constants = [f"{name}={launch.fixed[name]}" for name in COMPILED]
    dtypes = flash.dtypes()
    read = [f"{name}: {dtypes[name]}" for name in sorted(dtypes)]
    texts = [f"{name}: {text}" for name, text in sorted(launch.texts.items())]
    whole = "\n".join([*constants, *read, *map(str, p.node.stats), *texts])
    digest = sha256(whole.encode()).hexdigest()[:12]
    return f"{NAMES[p.dtype]}, D {p.D}, E {p.E}, {digest}"


def shrink(graph: Graph, problem: Problem, M: int, N: int) -> Graph:
    """A graph of one attention with M queries and N keys, few heads, and dense tensors."""
    G, group = min(problem.G, 2), min(problem.H // problem.G, 2)
    sizes = {"b": min(problem.B, 2), "g": G, "h": G * group, "i": M, "j": N}
    sizes |= {"d": problem.D, "e": problem.E}
    before = {"b": problem.B, "g": problem.G, "h": problem.H, "i": problem.M, "j": problem.N}
    before |= {"d": problem.D, "e": problem.E}
    (eqn,) = graph.eqns
    axes = dict(zip(eqn.args, operand_axes(problem), strict=True))

    def resize(n: int, x: Input) -> Input:
        pairs = zip(axes[n], x.spec.shape, strict=True)
        shape = tuple(sizes[axis] if size == before[axis] else 1 for axis, size in pairs)
        return Input(x.name, TensorSpec(shape, x.spec.dtype))

    inputs = tuple(resize(n, x) for n, x in enumerate(graph.inputs))
    outs = eqn.op.infer(*(inputs[n].spec.type for n in eqn.args))
    return evolve(graph, inputs=inputs, eqns=(evolve(eqn, outs=outs),))


def operand_axes(problem: Problem) -> Iterator[str]:
    """The axes of each operand, of "bhijgde"; dropout, which the kernel lacks, has none here."""
    node = problem.node
    yield from ("bhid", "bgjd", "bgje")
    for needs in (*(m.needs for m in node.modifiers), node.mask.needs if node.mask else {}):
        yield from (data.axes for data in needs.values())
    if node.sinks:
        yield "h"
