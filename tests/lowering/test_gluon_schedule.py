"""The kernel of kernels/gluon_forward.py on an emulated multiprocessor: its schedule, its numbers.

The kernel's own functions run, see tests/support/gluon_machine.py; whatever order things happen in,
nothing may wait for ever, be overwritten before it is read or read before it is there, each tile is
visited once, and results obey the accuracy rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.problem import Problem, sole
from attn_graph.lowering.triton.device_code import Tracer, compile_text
from attn_graph.lowering.triton.gluon_plan import plan_launches
from attn_graph.lowering.triton.tile_lists import HEAD
from attn_graph.masks import Align
from attn_graph.testing.rule import expect_outputs
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for

pytest.importorskip("triton", reason="needs triton, which is for Linux alone")

from attn_graph.kernels import gluon_forward as source
from tests.support.gluon_instructions import run_kernel
from tests.support.gluon_machine import Machine
from tests.support.gluon_programs import descriptor, edited, lists_of, memory, tile_kinds

BLOCK_N = 16
BLOCK_M = 128  # two consumers of 64 rows

HALF = torch.float16
CASES: dict[str, dict[str, Any]] = {  # options of `attention`, by what the kernel does with them
    "full": {},
    "causal": {"mask": ag.Causal()},
    "window": {"mask": ag.Window(37, 2)},
    "behind all keys": {"mask": ag.Window(left=None, right=-90)},
    "prefix": {"mask": ag.Causal() | ag.Prefix(20)},
    "documents": {"mask": ag.Causal() & ag.SameSegment()},
    "lengths": {"mask": ag.KeyLengths()},
    "soft cap": {"mask": ag.Causal(), "soft_cap": 3.0},
    "sinks": {},
}


def graph_of(
    case: str, tiles: int, short: int, dtype: torch.dtype = HALF, each: int = 1
) -> ag.Graph:
    """One case with so many tiles of keys, the last `short` keys shorter, for 1 or 2 blocks of one
    or two times `each` heads."""
    N = BLOCK_N * tiles - short
    B, H, G, M = (1, 2 * each, each, 70) if case != "causal" else (1, each, 1, 160)
    q, k, v = (ag.TensorSpec(x, dtype) for x in ((B, H, M, 16), (B, G, N, 16), (B, G, N, 12)))
    q = ag.TensorSpec((B, H, M, 16), dtype, (H * M * 16, 16, H * 16, 1))  # heads side by side
    options = dict(CASES[case])
    needs = options["mask"].needs if "mask" in options else {}
    if "q_segments" in needs:
        options["segments"] = tuple(ag.TensorSpec((B, n), torch.int32) for n in (M, N))
    if "kv_lengths" in needs:
        options["kv_lengths"] = ag.TensorSpec((B,), torch.int32)
    if case == "sinks":
        options["sinks"] = ag.TensorSpec((H,), torch.float32)
    align: Align = "bottom_right" if M != N and case != "prefix" else "top_left"
    return ag.attention(q, k, v, **options, align=align, stats=True)


@frozen
class Run:
    """What a kernel gave, and what each of its programs multiplied: (part, left, right)."""

    o: torch.Tensor
    lse: torch.Tensor
    multiplied: dict[int, list[tuple[str, str, str]]]
    once: bool  # whether every element of o and lse was stored once


def arguments(
    problem: Problem, operands: Sequence[torch.Tensor], stages: int, each: int = 1,
    turns: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What the kernel is called with, but for its results."""
    p, node = problem, problem.node
    given, code = node.split(operands), Tracer.of(problem, plain=True).trace()
    mask = given.mask
    data = [x for each in (*given.modifiers, mask) for x in each.values()]
    listed = node.mask is not None and not code.strip
    lists = (
        lists_of(tile_kinds(problem, mask, BLOCK_M, BLOCK_N))
        if listed
        else torch.zeros(1, 1, 1, HEAD)
    )
    return {
        "q_desc": descriptor("q", given.q, 64),
        "k_desc": descriptor("k", given.k, BLOCK_N),
        "v_desc": descriptor("v", given.v, BLOCK_N),
        "max_ptr": None,
        "sinks_ptr": None if given.sinks is None else memory("sinks", given.sinks),
        "lists_ptr": memory("lists", lists.int()) if listed else None,
        "data": tuple(memory(f"data {n}", x) for n, x in enumerate(data)) or None,
        "numbers": code.numbers or None,
        "o_strides": p.layout_of_o[1],
        "lists_strides": lists.stride()[:3],
        "sinks_stride": 0 if given.sinks is None else given.sinks.stride(0),
        "H": p.H,
        "GROUP": p.H // p.G,
        "EACH": each,
        "TURNS": turns,
        "M": p.M,
        "N": p.N,
        "TOGETHER": 1,
        "LAST_FIRST": True,
        "scale": node.scale,
        "E": p.E,
        "BLOCK_N": BLOCK_N,
        "STAGES": stages,
        "KEEP": compile_text(code.keep),
        "STRIP": compile_text(code.strip),
        "CHANGE": compile_text(code.change),
        "FOLD": not p.low_scale and not node.modifiers,
        "LISTED": listed,
        "MASKED": node.mask is not None or p.N % BLOCK_N > 0,
    }


def emulate(
    graph: ag.Graph, tensors: Sequence[torch.Tensor], seed: int, stages: int, each: int = 1,
    turns: bool = False, module: Any = source,
) -> Run:  # fmt: skip
    """All programs of the kernel, one after the other. Raises Fault for what its schedule does."""
    problem = sole(graph)
    assert problem is not None
    p = problem
    shape, strides = p.layout_of_o
    o = torch.full((int(np.prod(shape)),), torch.nan, dtype=p.dtype).as_strided(shape, strides)
    lse = torch.full(shape[:3], torch.nan)
    results = {"o_ptr": memory("o", o), "lse_ptr": memory("lse", lse)}
    fixed = arguments(p, [tensors[i] for i in graph.eqns[0].args], stages, each, turns)
    multiplied = {}
    count = p.B * p.H // each * -(-p.M // BLOCK_M)
    for program in range(count):
        machine = Machine(seed + program, (program, 0, 0), (count, 1, 1))
        run_kernel(machine, module.gluon_forward, **fixed, **results)
        multiplied[program] = machine.multiplied
    if p.dtype == torch.bfloat16:
        o.untyped_storage().copy_(
            torch.from_numpy(results["o_ptr"].memory.data).bfloat16().untyped_storage()
        )
    once = all((x.memory.writes == 1).all() for x in results.values())
    return Run(o, lse, multiplied, once)


def check_turns(run: Run) -> None:
    """Raise AssertionError unless the consumers issue their scores one after the other."""
    for products in run.multiplied.values():
        parts = [part for part, left, _ in products if left != "registers"]
        first, second = sorted({*parts})
        assert parts == [first, second] * (len(parts) // 2), f"turns are {parts}"


def check_visits(run: Run, problem: Problem, tensors: dict[str, torch.Tensor], each: int) -> None:
    """Raise AssertionError unless each consumer sees each tile with an unmasked place once."""
    p, kinds = problem, tile_kinds(problem, tensors, BLOCK_M, BLOCK_N)
    blocks = kinds.shape[2]
    for program, products in run.multiplied.items():
        block, first = blocks - 1 - program % blocks, program // blocks * each
        b, heads = first // p.H, range(first % p.H, first % p.H + each)
        queries = [[f"q [{b}, {h}, {block * BLOCK_M + 64 * c}, 0]" for h in heads] for c in (0, 1)]
        parts = sorted({part for part, _, _ in products})
        assert len(parts) == 2, parts
        for part, due in zip(parts, queries, strict=True):
            own = [(left, right) for who, left, right in products if who == part]
            scores = [(left, right) for left, right in own if left != "registers"]
            values = [right for left, right in own if left == "registers"]
            assert values == [right.replace("k", "v", 1) for _, right in scores]
            assert [*dict(scores)] == due
            for h, q in zip(heads, due, strict=True):
                keys = [right for left, right in scores if left == q]
                seen = [int(text.split(", ")[2]) for text in keys]
                assert keys == [f"k [{b}, {h * p.G // p.H}, {n}, 0]" for n in seen]
                needed = {BLOCK_N * int(t) for t in kinds[b, h, block].nonzero()}
                assert len(seen) == len({*seen}), f"{part} visits a tile twice: {seen}"
                assert {*seen} >= needed, f"{part} visits {seen} and not {needed}"


def check(
    graph: ag.Graph, data: int, seed: int, stages: int, each: int = 1, turns: bool = False,
    module: Any = source,
) -> None:  # fmt: skip
    """Raise unless the kernel runs without a fault, visits each tile and gives what it should."""
    simple = simplify(graph)
    problem = sole(simple)
    assert problem is not None
    tensors = tensors_for(simple, data)
    run = emulate(simple, tensors, seed, stages, each, turns, module)
    assert run.once
    if turns:
        check_turns(run)
    named = problem.node.split([tensors[i] for i in simple.eqns[0].args])
    check_visits(run, problem, named.mask, each)
    results = {"o": run.o, "lse": run.lse}
    for due in expect_outputs(simple, tensors):
        due.check(results[due.name])


tile_counts = st.integers(1, 20)
short = st.integers(0, 15)
stages = st.integers(2, 4)
heads = st.integers(1, 3)  # of a program


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=settings().max_examples // 10)
@given(
    tiles=tile_counts, short=short, stages=stages, each=heads, turns=st.booleans(), order=seeds,
    data=seeds,
)  # fmt: skip
def test_the_kernel_is_right_in_any_order_of_events(
    case: str, tiles: int, short: int, stages: int, each: int, turns: bool, order: int, data: int
) -> None:
    check(graph_of(case, tiles, short, each=each), data, order, stages, each, turns)


@settings(max_examples=settings().max_examples // 12)
@given(tiles=tile_counts, stages=stages, order=seeds, data=seeds)
def test_bfloat16_obeys_the_rule_too(tiles: int, stages: int, order: int, data: int) -> None:
    check(graph_of("soft cap", tiles, 0, torch.bfloat16), data, order, stages)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", range(1, 21))
def test_every_number_of_tiles_stages_and_heads(tiles: int) -> None:
    for stages, each, turns in product((2, 3, 4), (1, 2, 3), (False, True)):
        check(graph_of("causal", tiles, tiles % 3, each=each), tiles, stages, stages, each, turns)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_called_here_as_its_backend_calls_it(case: str) -> None:
    simple = simplify(graph_of(case, 8, 0))
    problem = sole(simple)
    assert problem is not None
    operands = [tensors_for(simple, 0)[i] for i in simple.eqns[0].args]
    here = arguments(problem, operands, 2)
    launch = plan_launches(problem, ag.Target.of("h200")).launches[-1]
    there = {**launch.fixed} | {name: compile_text(text) for name, text in launch.texts.items()}
    of_tiles = {"BLOCK_N", "STAGES", "lists_strides"}  # larger ones there, and in another order
    of_tiles |= {"TOGETHER", "LAST_FIRST"}
    common = here.keys() & there.keys() - of_tiles
    assert {"M", "scale", "KEEP", "STRIP", "FOLD", "LISTED", "MASKED"} <= common
    assert {name: here[name] for name in common} == {name: there[name] for name in common}
    pointers = {*launch.tensors, *launch.descriptors, "lse_ptr", "o_ptr"}
    assert here.keys() | {"lse_ptr", "o_ptr"} == there.keys() | pointers


# Kernels that are wrong: whoever changes the kernel learns here that a mistake is seen.

WAIT_VALUES = "    mbarrier.wait(v_ready.index(u % STAGES), u // STAGES & 1)\n"
WAIT_SCORES = "    s = warpgroup_mma_wait(1, [issued])\n"
FIRST_SCORES = """\
    s = warpgroup_mma_wait(0, [issued])
    mbarrier.arrive(k_free.index(done % STAGES), count=1)
"""
FREED_FIRST = """\
    mbarrier.arrive(k_free.index(done % STAGES), count=1)
    s = warpgroup_mma_wait(0, [issued])
"""
WAIT_SUMS = "    acc, p, following = warpgroup_mma_wait(0, [summed, p, following])\n"
FREE_VALUES = "    mbarrier.arrive(v_free.index(u % STAGES), count=1)\n"
WAIT_KEYS = "    mbarrier.wait(k_ready.index(w % STAGES), w // STAGES & 1, pred=w < count)\n"
WAIT_QUERIES = "    mbarrier.wait(q_ready.index(which), r & 1)\n"
FREE_QUERIES = "    mbarrier.arrive(q_free.index(which), count=1)\n"
REUSE_QUERIES = "            mbarrier.wait(q_free.index(c), r & 1 ^ 1)\n"
LAST_SUMS = """\
    acc = warpgroup_mma_wait(
        0, [warpgroup_mma(p, flat(v.index(last % STAGES)), acc, is_async=True)]
    )
"""
FREE_LAST = "    mbarrier.arrive(v_free.index(last % STAGES), count=1)\n"
REUSE_KEYS = "            mbarrier.wait(k_free.index(at), phase ^ 1)\n"
REUSE_VALUES = "            mbarrier.wait(v_free.index(at), phase ^ 1)\n"
LAST_TILE = "        n = full_tile(t - mixed, list_ptr, bounds, LISTED)\n    return n\n"
NEXT_MIXED = "            n = mixed_tile(t, list_ptr, bounds, full, LISTED)\n"
MISTAKES: dict[str, tuple[str, str, str]] = {  # what is wrong: the text, what replaces it, fault
    "no wait for values": (WAIT_VALUES, "", "by then"),
    "no wait for keys": (WAIT_KEYS, "", "by then"),
    "no wait for queries": (WAIT_QUERIES, "", "by then"),
    "keys overwritten": (REUSE_KEYS, "", "by then"),
    "values overwritten": (REUSE_VALUES, "", "by then"),
    "keys of another phase": (REUSE_KEYS, REUSE_KEYS.replace(" ^ 1", ""), "deadlock"),
    "values of another phase": (WAIT_VALUES, WAIT_VALUES.replace("& 1", "& 1 ^ 1"), "deadlock"),
    "keys freed too early": (FIRST_SCORES, FREED_FIRST, "by then"),
    "values freed too early": (WAIT_SUMS + FREE_VALUES, FREE_VALUES + WAIT_SUMS, "by then"),
    "values never freed": (FREE_VALUES, "", "deadlock"),
    "scores read too early": (WAIT_SCORES, WAIT_SCORES.replace("1,", "2,"), "no wait has ended"),
    "sums read too early": (WAIT_SUMS, WAIT_SUMS.replace("0,", "1,"), "no wait has ended"),
    "fewer bytes": ("desc.block_type.nbytes", "desc.block_type.nbytes // 2", "deadlock"),
    "more bytes": ("desc.block_type.nbytes", "desc.block_type.nbytes + 16", "deadlock"),
    "other buffers": (
        "at, phase = (done + t) % STAGES",
        "at, phase = (done + t + 1) % STAGES",
        "deadlock",
    ),
    "a tile twice": (
        LAST_TILE,
        LAST_TILE.replace("t - mixed", "gl.maximum(t - mixed - 1, 0)"),
        "twice",
    ),
    "a tile less": ("count = full + mixed\n", "count = full + mixed - 1\n", "and not"),
    "the mask of another tile": (NEXT_MIXED, NEXT_MIXED.replace("(t,", "(t - 1,"), "o: error"),
}


SEVERAL: dict[str, tuple[str, str, str]] = {  # the same of programs of several heads
    "queries overwritten": (REUSE_QUERIES, "", "by then"),
    "queries of another phase": (REUSE_QUERIES, REUSE_QUERIES.replace(" ^ 1", ""), "deadlock"),
    "queries of the head before": (
        WAIT_QUERIES,
        WAIT_QUERIES.replace("r & 1", "0"),
        "by then|deadlock",
    ),
    "queries freed twice": (FREE_QUERIES, FREE_QUERIES + FREE_QUERIES, "deadlock"),
    "queries never freed": (FREE_QUERIES, "", "deadlock"),
    "the last values never freed": (FREE_LAST, "", "deadlock"),
    "the last values freed too early": (LAST_SUMS + FREE_LAST, FREE_LAST + LAST_SUMS, "by then"),
    "buffers from the start of each head": ("        done += count\n", "", "deadlock|by then"),
    "results of the first head": ("(b, head + r, opaque", "(b, head, opaque", "assert"),
}


TAKE_TURN = "    if TURNS:\n        mbarrier.wait(turns.index(which), t & 1 ^ 1 - which)\n"
GIVE_TURN = """\
    summed = warpgroup_mma(p, flat(v.index(u % STAGES)), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index(1 - which), count=1)
"""
IN_TURNS: dict[str, tuple[str, str, str]] = {  # the same of consumers that take turns
    "no turn awaited": (TAKE_TURN, "", "turns are"),
    "turns of another phase": (TAKE_TURN, TAKE_TURN.replace(" ^ 1 - which", ""), "deadlock"),
    "no turn given": (GIVE_TURN, GIVE_TURN.splitlines(keepends=True)[0], "deadlock"),
}


@pytest.mark.parametrize("mistake", [*MISTAKES, *SEVERAL, *IN_TURNS])
def test_a_mistake_is_seen(mistake: str) -> None:
    text, by, fault = (MISTAKES | SEVERAL | IN_TURNS)[mistake]
    kernel, each = edited(source, text, by), 1 + (mistake in SEVERAL)
    with pytest.raises(AssertionError, match=fault):
        check(graph_of("causal", 7, 0, each=each), 1, 1, 2, each, mistake in IN_TURNS, kernel)
