"""Kernels are compiled for kinds of sizes, not for sizes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.codegen.launches import Launch, load_kernel
from attn_graph.lowering.codegen.symbols import SPECIAL
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.triton.plan import Flash
from attn_graph.lowering.triton.work import work_of
from attn_graph.spec import TensorSpec
from attn_graph.spec.dims import bind
from tests.support.kernels import CPU

H200 = ag.Target.of("h200")
F16, I32 = torch.float16, torch.int32
BOTTOM = ag.Causal("bottom_right")


def dense(H: int = 8, G: int = 8, D: int = 64, most: int = 4096, **options: Any) -> ag.Graph:
    """Attention of B entries, M queries and N keys."""
    B, M, N = ag.Dim("B", most=8), ag.Dim("M", most=most), ag.Dim("N", most=most)
    lies = {"layout": options.pop("layout", None)}
    M = options.pop("M", M)
    for name, shape in options.pop("reads", {}).items():
        axes = {"B": B, "M": M, "N": N}
        spec = [TensorSpec([axes.get(x, x) for x in each], t) for *each, t in shape]
        options[name] = tuple(spec) if len(spec) > 1 else spec[0]
    q, k = (TensorSpec((B, h, n, D), F16, **lies) for h, n in ((H, M), (G, N)))
    return ag.attention(q, k, k, **options)


def packed(H: int = 8, G: int = 8, D: int = 64, **options: Any) -> ag.Graph:
    """Attention of B sequences of up to 1024 rows, T rows in all."""
    B, T = ag.Dim("B", most=200), ag.Dim("T", most=65536)
    q, k = (TensorSpec((T, h, D), F16) for h in (H, G))
    starts = TensorSpec((B + 1,), I32)
    return ag.attention(q, k, k, q_starts=starts, max_lengths=(1024, 1024), **options)


def paged(**options: Any) -> ag.Graph:
    """One query of each of B sequences, against keys in n pages of 16."""
    B, n, P = ag.Dim("B", most=64), ag.Dim("n", most=9999), ag.Dim("P", most=2048)
    q, pool = TensorSpec((B, 8, 1, 128), F16), TensorSpec((n, 16, 2, 128), F16)
    lengths, pages = TensorSpec((B,), I32), TensorSpec((B, P), I32)
    return ag.attention(q, pool, pool, pages=pages, kv_lengths=lengths, **options)


SEGMENTS = {"segments": [("B", "M", I32), ("B", "N", I32)]}
GRAPHS = {
    "plain": dense(),
    "causal": dense(mask=BOTTOM),
    "causal, grouped heads": dense(G=2, mask=BOTTOM, stats=True),
    "window, soft cap": dense(mask=ag.Window(100, align="bottom_right"), soft_cap=30.0, D=128),
    "positions interleaved": dense(layout="bshd", mask=ag.Causal("top_left"), D=40),
    "few queries or many": dense(G=2, most=300),
    "bias": dense(reads={"bias": [("B", 8, "M", "N", F16)]}),
    "lengths, alibi": dense(
        mask=BOTTOM, alibi=True, align="bottom_right", reads={"kv_lengths": [("B", I32)]}
    ),
    "segments": dense(reads=SEGMENTS, mask=ag.Causal("top_left")),
    "no strip": dense(mask=ag.Window(64, align="top_left") | ag.Prefix(16), most=1000),
    "dropout": dense(dropout=0.1, mask=BOTTOM),
    "decode": dense(G=2, M=1, most=32768),
    "packed": packed(mask=BOTTOM),
    "packed, grouped heads": packed(G=2, mask=ag.Window(100)),
    "paged": paged(mask=BOTTOM),
}
LISTED = ("segments", "no strip")
MOST_KERNELS = 6  # of one kernel: `delta`, by what the strides of the gradient of lse are


def passes(name: str) -> Iterator[ag.Graph]:
    """The passes of a graph, simplified; of pages the forward alone."""
    graph = GRAPHS[name]
    both = (graph,) if name in ("paged", "decode") else ag.vjp(graph)
    yield from map(simplify, both)


def draw_sizes(name: str, graph: ag.Graph, count: int) -> Iterator[dict[str, int]]:
    """Sizes of a graph, of all magnitudes: from 2, or, of lists of tiles, from two tiles."""
    rng, least = random.Random(0), 257 if name in LISTED else 2
    for _ in range(count):
        most = {s.name: rng.choice((s.most, s.most, min(s.most, 80))) for s in graph.symbols}
        yield {
            x: rng.randrange(least, max(n, 2 * least)) if x in "MN" else rng.randrange(2, n + 1)
            for x, n in most.items()
        }


def variant(launch: Launch) -> tuple[object, ...]:
    """All that the machine code of a launch depends on: constants, and what Triton makes of
    integers, which are 1, multiples of 16, or others, of 32 bits or 64."""
    given = [
        (p.name, x if p.is_constexpr else kind_of(x, p.do_not_specialize))
        for p in load_kernel(launch.kernel).params
        if (x := launch.fixed.get(p.name, p.name)) is not None
    ]
    return launch.kernel, tuple(launch.texts.values()), launch.warps, launch.stages, *given


def kind_of(x: object, plain: bool) -> object:
    """What machine code is made for, of an argument."""
    if isinstance(x, tuple):
        return tuple(kind_of(part, plain) for part in x)
    if type(x) is not int:
        return type(x)
    special = "" if plain else "one" if x == 1 else "many" if x % SPECIAL == 0 else ""
    return special, x >= 2**31


@pytest.mark.skipif(CPU.interprets, reason="interpreted kernels have no parameters to look at")
@pytest.mark.parametrize("name", GRAPHS)
def test_no_size_is_compiled_for(name: str) -> None:
    """40 sizes are few kernels: of whole tiles or halves, keys in multiples of 16 or not, ..."""
    for graph in passes(name):
        work = work_of(facts_of(graph))
        plans = [Flash.plan(bind(work, x), H200) for x in draw_sizes(name, graph, 40)]
        kernels = Counter(key[0] for key in {variant(x) for flash in plans for x in flash.launches})
        assert max(kernels.values()) <= MOST_KERNELS, kernels
