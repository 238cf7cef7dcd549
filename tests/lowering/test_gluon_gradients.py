"""The kernels of kernels/gluon_backward.py on an emulated multiprocessor, as in
test_gluon_schedule.py: their schedule, their visits and their numbers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.problem import Problem, sole
from attn_graph.lowering.triton.device_code import DeviceCode, Tracer, compile_text
from attn_graph.lowering.triton.gluon_plan import plan_launches
from attn_graph.lowering.triton.launch_list import BY_KEYS
from attn_graph.lowering.triton.tile_lists import HEAD
from attn_graph.masks import Align
from attn_graph.testing.rule import expect_gradients
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for

pytest.importorskip("triton", reason="needs triton, which is for Linux alone")

from attn_graph.kernels import gluon_backward as source
from tests.support.gluon_instructions import run_kernel
from tests.support.gluon_machine import Machine
from tests.support.gluon_programs import descriptor, edited, lists_of, memory, tile_kinds

PASSING = 16  # queries or keys of a tile that passes by
OWN = 128  # two consumers of 64
HALF = torch.float16
CPU = ag.Target.of("cpu")
KERNELS = ("gluon_query_gradient", "gluon_key_gradient")
CASES: dict[str, dict[str, Any]] = {  # in each of which every query sees a key
    "full": {},
    "causal": {"mask": ag.Causal()},
    "window": {"mask": ag.Window(37, 2)},
    "prefix": {"mask": ag.Causal() | ag.Prefix(20)},
    "window or sinks": {"mask": ag.Causal() & (ag.Window(20) | ag.Prefix(3))},
    "documents": {"mask": ag.Causal() & ag.SameSegment()},
    "lengths": {"mask": ag.KeyLengths()},
    "soft cap": {"mask": ag.Causal(), "soft_cap": 3.0},
    "alibi": {"mask": ag.Causal(), "alibi": True},
    "bias": {},
}


def graph_of(
    kernel: str, case: str, tiles: int, short: int, dtype: torch.dtype = HALF, group: int = 1
) -> ag.Graph:
    """One case with so many tiles passing by, the last `short` rows shorter, in 1 to 3 blocks."""
    passing, own = PASSING * tiles - short, 70 if case != "causal" else 160
    M, N = (passing, own) if kernel in BY_KEYS else (own, passing)
    M = min(M, N + 30) if case == "window" else min(M, N) if case == "documents" else M
    N = M if case == "documents" else N
    q, k, v = (ag.TensorSpec(x, dtype) for x in ((1, 2, M, 16), (1, 2 // group, N, 16),
                                                 (1, 2 // group, N, 12)))  # fmt: skip
    q = ag.TensorSpec((1, 2, M, 16), dtype, (2 * M * 16, 16, 2 * 16, 1))  # heads side by side
    options = dict(CASES[case])
    needs = options["mask"].needs if "mask" in options else {}
    if "q_segments" in needs:
        options["segments"] = tuple(ag.TensorSpec((1, n), torch.int32) for n in (M, N))
    if "kv_lengths" in needs:
        options["kv_lengths"] = ag.TensorSpec((1,), torch.int32)
    if case == "bias":
        options["bias"] = ag.TensorSpec((1, 2, M, N), dtype)
    align: Align = "bottom_right" if M <= N and case != "prefix" else "top_left"
    return ag.attention(q, k, v, **options, align=align, stats=True)


@frozen
class Pass:
    """A backward to emulate: its forward's graph and tensors, and what the kernels read."""

    forward: ag.Graph
    tensors: list[torch.Tensor]
    problem: Problem
    named: dict[str, torch.Tensor]
    code: DeviceCode

    @classmethod
    def of(cls, graph: ag.Graph, seed: int) -> Pass:
        """With the o and lse that the formula gives."""
        tensors = [*tensors_for(graph, seed)]
        names = [i.name for i in graph.inputs]
        for name in ("q_segments", "kv_segments"):  # the same of a query and of its key
            if name in names:
                tensors[names.index(name)] = tensors[names.index("q_segments")].clone()
        if "kv_lengths" in names:
            tensors[names.index("kv_lengths")].clamp_(min=1)
        o, lse = ag.compile(graph, target=CPU, store=False)(*tensors)
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(seed)).to(o.dtype)
        problem = sole(simplify(ag.vjp(graph, ["q", "k", "v"])[1]))
        assert problem is not None
        delta = (o.float() * do.float()).sum(-1)
        more = {"lse": lse, "delta": delta, "do": do}
        named = dict(zip("qkv", tensors, strict=False)) | more
        return cls(graph, tensors, problem, named, Tracer.of(problem, plain=True).trace())


def arguments(
    p: Problem, code: DeviceCode, given: Pass, kernel: str, stages: int
) -> dict[str, Any]:
    """What a kernel is called with, but for its results."""
    by_keys, named = kernel in BY_KEYS, given.named
    operands = simplify(given.forward).eqns[0].args
    split = p.node.split([given.tensors[i] for i in operands])
    data = [x for each in (*split.modifiers, split.mask) for x in each.values()]
    listed = p.node.mask is not None and not code.strip
    blocks = (PASSING, OWN) if by_keys else (OWN, PASSING)
    kinds = tile_kinds(p, split.mask, *blocks, by_keys)
    lists = lists_of(kinds.transpose(2, 3) if by_keys else kinds)
    lists = lists if listed else torch.zeros(1, 1, 1, HEAD)
    passing = ("q", "do") if by_keys else ("k", "v")
    tiles = {
        f"{x}_desc": descriptor(x, named[x], PASSING if x in passing else 64)
        for x in ("q", "k", "v", "do")
    }
    keep = code.keep_by_keys if by_keys else code.keep
    texts = {"KEEP": keep, "STRIP": code.strip, "CHANGE": code.change, "BACK": code.back}
    return {
        **tiles,
        "lse_ptr": memory("lse", named["lse"]),
        "delta_ptr": memory("delta", named["delta"]),
        "lists_ptr": memory("lists", lists.int()) if listed else None,
        "data": tuple(memory(f"data {n}", x) for n, x in enumerate(data)) or None,
        "numbers": code.numbers or None,
        "lists_strides": lists.stride()[:3],
        "H": p.H,
        "GROUP": p.H // p.G,
        "M": p.M,
        "N": p.N,
        "D": p.D,
        **({"E": p.E} if by_keys else {}),
        "BLOCK_M" if by_keys else "BLOCK_N": PASSING,
        "TOGETHER": 1,
        "LAST_FIRST": True,
        "scale": p.node.scale,
        "STAGES": stages,
        **{name: compile_text(text) for name, text in texts.items()},
        "LISTED": listed,
        "MASKED": p.node.mask is not None or (p.M if by_keys else p.N) % PASSING > 0,
    }


def check(
    kernel: str, graph: ag.Graph, data: int, seed: int, stages: int, module: ModuleType = source
) -> None:
    """Raise unless a kernel runs without a fault, visits each tile and gives what it should."""
    given = Pass.of(graph, data)
    p, by_keys = given.problem, kernel in BY_KEYS
    sizes = {"dk": (p.N, p.D), "dv": (p.N, p.E)} if by_keys else {"dq": (p.M, p.D)}
    results = {name: torch.full((p.B, p.H, *x), torch.nan) for name, x in sizes.items()}
    fixed = arguments(p, given.code, given, kernel, stages)
    fixed |= {f"{name}_ptr": memory(name, x) for name, x in results.items()}
    fixed |= {f"{name}_strides": x.stride() for name, x in results.items()}
    count = p.B * p.H * -(-(p.N if by_keys else p.M) // OWN)
    for program in range(count):
        machine = Machine(seed + program, (program, 0, 0), (count, 1, 1))
        run_kernel(machine, getattr(module, kernel), **fixed)
        check_visits(given, kernel, program, machine.multiplied)
    assert all((fixed[f"{name}_ptr"].memory.writes == 1).all() for name in results)
    dues = expect_gradients(graph, given.tensors, (given.named["do"], None))
    for name, x in results.items():
        heads = p.H if name == "dq" else p.G
        total = x.reshape(p.B, heads, -1, *x.shape[2:]).sum(2)
        dues[name[1:]].check(total.to(p.dtype))


def check_visits(
    given: Pass, kernel: str, program: int, products: list[tuple[str, str, str]]
) -> None:
    """Raise AssertionError unless each consumer visits each tile with an unmasked place once.

    Each product reads the tile that it should, and the one that adds ds of the tile before comes
    once more, with the 0 that is there before the first.
    """
    p, by_keys = given.problem, kernel in BY_KEYS
    blocks = (PASSING, OWN) if by_keys else (OWN, PASSING)
    operands = simplify(given.forward).eqns[0].args
    mask = p.node.split([given.tensors[i] for i in operands]).mask
    kinds = tile_kinds(p, mask, *blocks, by_keys)
    kinds = kinds.transpose(2, 3) if by_keys else kinds
    count = kinds.shape[2]
    block, h = count - 1 - program % count, program // count
    needed = {PASSING * int(t) for t in kinds[0, h, block].nonzero()}
    own, passing = (("k", "v"), ("q", "do")) if by_keys else (("q", "do"), ("k", "v"))
    g = h * p.G // p.H
    mine, theirs = (g, h) if by_keys else (h, g)
    for c, part in enumerate(sorted({part for part, _, _ in products})):
        reads = [(left, right) for who, left, right in products if who == part]
        seen = [int(right.split(", ")[2]) for left, right in reads if left.startswith(f"{own[0]} ")]
        assert len(seen) == len({*seen}), f"{part} visits a tile twice: {seen}"
        assert {*seen} >= needed, f"{part} visits {seen} and not {needed}"
        for n, one in enumerate(own):
            place = f"{one} [0, {mine}, {block * OWN + 64 * c}, 0]"
            tiles = [f"{passing[n]} [0, {theirs}, {t}, 0]" for t in seen]
            assert [x for x in reads if x[0].startswith(f"{one} ")] == [(place, x) for x in tiles]
        summed = [right for left, right in reads if left == "registers"]
        due = {passing[0]: [*seen[:1], *seen]} | ({passing[1]: seen} if by_keys else {})
        for name, order in due.items():
            labels = [x for x in summed if x.startswith(f"{name} ")]
            assert labels == [f"{name} [0, {theirs}, {t}, 0]" for t in order], f"adds {labels}"
        assert len(summed) == sum(map(len, due.values()))


tile_counts = st.integers(1, 20)
short = st.integers(0, 15)
stages = st.integers(2, 4)
kernels = pytest.mark.parametrize("kernel", KERNELS)


@kernels
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=settings().max_examples // 10)
@given(tiles=tile_counts, short=short, stages=stages, order=seeds, data=seeds)
def test_gradients_are_right_in_any_order_of_events(
    kernel: str, case: str, tiles: int, short: int, stages: int, order: int, data: int
) -> None:
    check(kernel, graph_of(kernel, case, tiles, short), data, order, stages)


@kernels
@settings(max_examples=settings().max_examples // 12)
@given(tiles=tile_counts, stages=stages, order=seeds, data=seeds)
def test_bfloat16_and_groups_of_heads_obey_the_rule_too(
    kernel: str, tiles: int, stages: int, order: int, data: int
) -> None:
    check(kernel, graph_of(kernel, "soft cap", tiles, 0, torch.bfloat16, 2), data, order, stages)


@pytest.mark.slow
@kernels
@pytest.mark.parametrize("case", CASES)
def test_every_number_of_tiles_and_stages(kernel: str, case: str) -> None:
    for tiles in range(1, 21):
        for count in (2, 3, 4):
            check(kernel, graph_of(kernel, case, tiles, tiles % 3), tiles, count, count)


@kernels
def test_keys_that_no_query_sees_and_queries_of_one_tile(kernel: str) -> None:
    """dk and dv of the keys behind the window of all queries are 0."""
    q, k = (ag.TensorSpec((1, 1, n, 16), HALF) for n in (48, 300))
    graph = ag.attention(q, k, k, mask=ag.Window(9, 2), align="top_left", stats=True)
    check(kernel, graph, 0, 0, 2)


@kernels
@pytest.mark.parametrize("case", [x for x in CASES if x not in ("documents", "lengths", "bias")])
def test_the_kernels_are_called_here_as_their_backend_calls_them(kernel: str, case: str) -> None:
    given = Pass.of(graph_of(kernel, case, 8, 0), 0)
    here = arguments(given.problem, given.code, given, kernel, 2)
    flash = plan_launches(given.problem, ag.Target.of("h200"))
    (launch,) = (x for x in flash.launches if x.kernel == kernel)
    there = {**launch.fixed} | {name: compile_text(text) for name, text in launch.texts.items()}
    of_tiles = {"BLOCK_M", "BLOCK_N", "STAGES", "lists_strides", "MASKED"}  # larger ones there
    of_tiles |= {"TOGETHER", "LAST_FIRST"}  # and in another order
    common = here.keys() & there.keys() - of_tiles
    assert {"M", "scale", "KEEP", "STRIP", "CHANGE", "BACK", "LISTED"} <= common
    assert {name: here[name] for name in common} == {name: there[name] for name in common}
    results = {f"{x}_{y}" for x in ("dq", "dk", "dv") for y in ("ptr", "strides")}
    pointers = {*launch.tensors, *launch.descriptors}
    assert here.keys() - results == (there.keys() | pointers) - results


# Kernels that are wrong: whoever changes the kernels learns here that a mistake is seen.

KEYS, QUERIES = "gluon_key_gradient", "gluon_query_gradient"
WAIT = "    mbarrier.wait(ready.index(at), t // STAGES & 1)\n"
NEXT_QUERIES = "    q, do = flat(passing[0].index(at)), flat(passing[1].index(at))\n"
NEXT_KEYS = "    k, v = flat(passing[0].index(at)), flat(passing[1].index(at))\n"
WAIT_OWN = "    mbarrier.wait(own_ready.index(which), 0)\n"
OWN_KEYS = "    k, v = flat(k.index(which)), flat(v.index(which))\n"
OWN_QUERIES = "    q, do = flat(q.index(which)), flat(do.index(which))\n"
REUSE = "        mbarrier.wait(free.index(at), t // STAGES & 1 ^ 1)\n"
COPY_QUERIES = "        copy(q_desc, b, h, query, ready.index(at), q.index(at))\n"
COPY_KEYS = "        copy(k_desc, b, g, key, ready.index(at), k.index(at))\n"
FREE = "    mbarrier.arrive(free.index(before), count=1, pred=t > 0)\n"
WAIT_DK = "    dk, ds = warpgroup_mma_wait(0, [dk, ds])\n"
WAIT_DQ = "    dq, ds, following = warpgroup_mma_wait(0, [dq, ds, following])\n"
WAIT_SCORES = "    s = warpgroup_mma_wait(1, [s])\n"
WAIT_DP = "    dp = warpgroup_mma_wait(1, [dp])\n    surplus"
STORE_LSE = "        lse.index(at).store(of_lse)\n"
STORE_DELTA = "        surplus.index(at).store(of_delta)\n"
ARRIVE = "        mbarrier.arrive(ready.index(at), count=1)\n"
MISTAKES: dict[str, tuple[str, str, str, str]] = {  # kernel, the text, what replaces it, the fault
    "no wait for queries": (KEYS, WAIT + NEXT_QUERIES, NEXT_QUERIES, "by then"),
    "no wait for keys": (QUERIES, WAIT + NEXT_KEYS, NEXT_KEYS, "by then"),
    "no wait for its keys": (KEYS, OWN_KEYS + WAIT_OWN, OWN_KEYS, "by then"),
    "no wait for its queries": (QUERIES, OWN_QUERIES + WAIT_OWN, OWN_QUERIES, "by then"),
    "queries overwritten": (KEYS, REUSE + COPY_QUERIES, COPY_QUERIES, "by then"),
    "keys overwritten": (QUERIES, REUSE + COPY_KEYS, COPY_KEYS, "by then|are due"),
    "queries of another phase": (
        KEYS, REUSE + COPY_QUERIES, REUSE.replace(" ^ 1", "") + COPY_QUERIES, "deadlock",
    ),
    "queries freed too early": (KEYS, WAIT_DK + FREE, FREE + WAIT_DK, "by then"),
    "keys freed too early": (QUERIES, WAIT_DQ + FREE, FREE + WAIT_DQ, "by then"),
    "queries never freed": (KEYS, WAIT_DK + FREE, WAIT_DK, "deadlock"),
    "keys never freed": (QUERIES, WAIT_DQ + FREE, WAIT_DQ, "deadlock"),
    "scores read too early": (KEYS, WAIT_SCORES, WAIT_SCORES.replace("1,", "2,"), "no wait"),
    "dp read too early": (KEYS, WAIT_DP, WAIT_DP.replace("1,", "2,", 1), "no wait"),
    "statistics of another tile": (
        KEYS, STORE_LSE, STORE_LSE.replace("index(at)", "index(at ^ 1)"), "by then|nothing was",
    ),
    "statistics behind the arrival": (
        KEYS, STORE_LSE + STORE_DELTA + ARRIVE, ARRIVE + STORE_LSE + STORE_DELTA, "by then|nothing",
    ),
    "statistics not awaited": (KEYS, "make_barriers(STAGES, 3)", "make_barriers(STAGES, 2)", "due"),
    "the last tile left out": (KEYS, "    if count > 0:\n", "    if count > 99:\n", "adds"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    kernel, text, by, fault = MISTAKES[mistake]
    wrong = edited(source, text, by)
    with pytest.raises(AssertionError, match=fault):
        check(kernel, graph_of(kernel, "causal", 7, 0), 1, 1, 2, wrong)
