"""How long each backend's kernels should take on a GPU: what orders them until one measures.

The time is that of the products at a share of the GPU's peak (rates.toml, with its sources), or
that of reading every operand once, whichever is longer. Both are longer where programs are too
few for all multiprocessors. A program has up to 128 rows: queries forward, keys backward. What a
launch itself takes is left out: it is the same for all.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, final

import torch
from attrs import frozen

from attn_graph.ir.graph import Graph
from attn_graph.lowering.cudnn.run import ends_keys
from attn_graph.lowering.problem import Problem, sole
from attn_graph.lowering.triton.few_rows import is_decoding
from attn_graph.machine.target import Target
from attn_graph.masks import Mask
from attn_graph.masks.tiles import Sizes, most_pairs
from attn_graph.planner.cost import distinct_elements, summed_widths
from attn_graph.spec import NAMES

HALF = (torch.float16, torch.bfloat16)
LEAST_ROWS, MOST_ROWS = 16, 128  # of one program
Shares = tuple[tuple[int, float], ...]  # (head size, share of the peak)


@final
@frozen
class Rate:
    """What rates.toml says of some backends on some GPUs; it explains the fields at its top."""

    backends: tuple[str, ...]
    sm: tuple[int, ...]
    forward: Shares
    backward: Shares
    splits: Literal["always", "few_rows", "never"]

    def shares_keys(self, problem: Problem) -> bool:
        """Whether programs share the keys of one head, where there are few programs."""
        return self.splits != "never" and problem.grad is None


@cache
def rates() -> dict[tuple[str, int], Rate]:
    """All rates, by backend and compute capability."""
    text = Path(__file__).with_name("rates.toml").read_text()
    rows = [
        Rate(
            tuple(fields["backends"]),
            tuple(fields["sm"]),
            read_shares(fields["forward"]),
            read_shares(fields["backward"]),
            fields["splits"],
        )
        for fields in tomllib.loads(text)["rate"]
    ]
    return {(name, sm): rate for rate in rows for name in rate.backends for sm in rate.sm}


def read_shares(table: dict[str, float]) -> Shares:
    """A table of the file, the least head size first."""
    return tuple(sorted((int(size), share) for size, share in table.items()))


def share_of(shares: Shares, width: int) -> float:
    """The share of the peak at a head size."""
    return next((share for size, share in shares if size >= width), shares[-1][1])


def predicted_seconds(graph: Graph, target: Target, name: str) -> float | None:
    """How long a backend should take for one attention, or its gradient, on a GPU.

    None where no rate is known: of this backend there, in this dtype, or of the GPU itself.
    """
    problem, rate = sole(graph), rates().get((name, target.sm))
    if problem is None or rate is None or problem.dtype not in HALF or problem.is_empty:
        return None
    peak, bandwidth, processors = (
        target.peak(NAMES[problem.dtype]),
        target.bandwidth,
        target.multiprocessors,
    )
    if peak is None or bandwidth is None or processors is None:
        return None
    shares = rate.forward if problem.grad is None else rate.backward
    share = share_of(shares, max(problem.D, problem.E))
    filled, busy = fullness(problem, processors, rate.shares_keys(problem))
    heads = problem.H // problem.G if rate.splits == "few_rows" and is_decoding(problem) else 1
    computing = padded_flops(problem, graph, heads) / (peak * share * filled)
    reading = moved_bytes(problem, graph) / (bandwidth * busy)
    return max(computing, reading) + copied_bytes(problem, name) / bandwidth


def copied_bytes(problem: Problem, name: str) -> int:
    """Bytes that copies read and write before the kernel runs: cuDNN's of k and v with lengths."""
    copies = name == "cudnn" and ends_keys(problem)
    return 2 * sum(x.type.bytes for x in problem.specs[1:3]) if copies else 0


def fullness(problem: Problem, processors: int, splits: bool) -> tuple[float, float]:
    """How much of the GPU's time its multiprocessors compute, and how many of them read at all."""
    rows, columns = rows_and_columns(problem)
    programs = problem.B * problem.H * programs_of(rows)
    if splits and programs < processors:
        programs = min(programs * programs_of(columns), processors)
    waves = -(-programs // processors)
    return programs / (waves * processors), min(1.0, programs / processors)


def rows_and_columns(problem: Problem) -> tuple[int, int]:
    """What programs share, and what each of them walks: queries and keys, backward the reverse."""
    return (problem.M, problem.N) if problem.grad is None else (problem.N, problem.M)


def programs_of(rows: int) -> int:
    """How many programs hold the rows of a head."""
    return -(-rows // MOST_ROWS)


def padded_flops(problem: Problem, graph: Graph, heads: int) -> float:
    """Flops of the products, those for the empty rows of a program included.

    heads: how many a program has the rows of.
    """
    p, rows = problem, rows_and_columns(problem)[0] * heads
    size = min(MOST_ROWS, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
    pairs = pairs_once(p.node.mask, (p.B, p.H, p.G, p.M, p.N))
    return (
        2.0 * pairs * summed_widths(graph.eqns[0].op, p.D, p.E) * (-(-rows // size) * size / rows)
    )


@lru_cache(256)
def pairs_once(mask: Mask | None, sizes: Sizes) -> int:
    """At most how many pairs the mask keeps, once for all backends and both passes."""
    return most_pairs(mask, sizes)


def moved_bytes(problem: Problem, graph: Graph) -> int:
    """Bytes of all operands and results, each once."""
    read = sum(distinct_elements(x) * x.dtype.itemsize for x in problem.specs)
    return read + sum(type_.bytes for type_ in graph.output_types)


def rank(graph: Graph, target: Target, names: Sequence[str]) -> dict[str, float]:
    """Predicted seconds by backend, the fastest first; those without a prediction are left out.

    Equal ones stay in the order of `names`.
    """
    times = {name: predicted_seconds(graph, target, name) for name in names}
    known = {name: time for name, time in times.items() if time is not None}
    return dict(sorted(known.items(), key=lambda pair: pair[1]))
