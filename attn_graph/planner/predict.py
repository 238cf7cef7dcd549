"""The least time of each backend's kernels on a GPU, to order the backends that can run.

The time is the longer of two: the products at a share of the GPU's peak (lowering/rates.toml, with
its sources), and one read of every operand. Both grow if there are fewer programs than
multiprocessors. A program has up to 128 rows: queries forward, keys backward. Launches common to
all are left out. Equal times are ordered by the bytes that programs move between the
multiprocessors and memory, or its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from attrs import frozen

from attn_graph.ir.graph import Graph
from attn_graph.ir.packed import LEAVES, and_parts
from attn_graph.lowering.problem import Problem, sole
from attn_graph.lowering.rates import Rate, least_seconds, peak_of, rates
from attn_graph.lowering.triton.divisions import LEAST, choose_parts, is_decoding
from attn_graph.machine.cache import remember
from attn_graph.machine.target import Target
from attn_graph.masks.tiles import most_pairs
from attn_graph.planner.cost import distinct_elements, summed_widths

LEAST_ROWS, MOST_ROWS = 16, 128  # of one program


@final
@frozen
class Forecast:
    """A backend's least seconds for one attention, or its gradient, and the bytes that its programs
    move: keys and values read from memory or its cache, and parts written and joined; 0 for a
    gradient."""

    seconds: float
    traffic: int


def forecast(graph: Graph, target: Target, name: str) -> Forecast | None:
    """A backend's forecast on a GPU.

    None if a rate is not known: the backend's there, in this dtype, or the GPU's own.
    """
    rate, processors, bandwidth = (
        rates().get((name, target.sm)),
        target.multiprocessors,
        target.bandwidth,
    )
    if rate is None or processors is None or bandwidth is None:
        return None
    p = sole(graph)
    if p is None or p.is_empty:
        return None
    backward, width = p.grad is not None, max(p.D, p.E)
    peak = peak_of(target, name, p.dtype, width, backward=backward)
    if peak is None:
        return None
    heads, splits = heads_as_rows(rate, p), rate.splits != "never" and not backward
    parts = predict_parts(rate, p, processors)
    filled, busy = fullness(p, processors, splits)
    flops, moved = least_work(graph)
    seconds = least_seconds(
        flops * row_padding(p, heads), peak * filled, moved, bandwidth * busy, int(parts > 1)
    )
    read = p.B * p.H // heads * programs_of(p.M * heads) * p.N * (p.D + p.E) * p.dtype.itemsize
    joined = 8 * p.B * p.H * parts * p.M * (p.E + 2) if parts > 1 else 0
    return Forecast(seconds + copied_bytes(p, name) / bandwidth, 0 if backward else read + joined)


def heads_as_rows(rate: Rate, problem: Problem) -> int:
    """The number of heads held as rows of one program, which reads their common keys once."""
    once = problem.M == 1 if rate.splits == "one_query" else rate.splits == "few_rows"
    return problem.H // problem.G if once and is_decoding(problem) else 1


def predict_parts(rate: Rate, problem: Problem, processors: int) -> int:
    """The number of programs per head's keys; 1 if all multiprocessors are busy without it."""
    p, heads = problem, heads_as_rows(rate, problem)
    if rate.splits == "never" or p.grad is not None:
        return 1
    programs = p.B * p.H // heads * programs_of(p.M * heads)
    return choose_parts(programs, rate.fills * processors, -(-p.N // LEAST))


def copied_bytes(problem: Problem, name: str) -> int:
    """Bytes that copies read and write before the kernel runs: cuDNN's of k and v with lengths."""
    copies = name == "cudnn" and LEAVES["keys"] in and_parts(problem.node.mask)
    return 2 * sum(x.type.bytes for x in problem.specs[1:3]) if copies else 0


def fullness(problem: Problem, processors: int, splits: bool) -> tuple[float, float]:
    """The fractions of multiprocessors that compute, over time, and that read at all."""
    rows, columns = rows_and_columns(problem)
    programs = problem.B * problem.H * programs_of(rows)
    if splits and programs < processors:
        programs = min(programs * programs_of(columns), processors)
    waves = -(-programs // processors)
    return programs / (waves * processors), min(1.0, programs / processors)


def rows_and_columns(problem: Problem) -> tuple[int, int]:
    """The lengths divided among programs and walked by each: M and N, backward N and M."""
    return (problem.M, problem.N) if problem.grad is None else (problem.N, problem.M)


def programs_of(rows: int) -> int:
    """The number of programs for the rows of a head."""
    return -(-rows // MOST_ROWS)


def row_padding(problem: Problem, heads: int) -> float:
    """How many times more products programs compute, with their empty rows; `heads` of them are in
    a program's rows."""
    rows = rows_and_columns(problem)[0] * heads
    size = min(MOST_ROWS, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
    return -(-rows // size) * size / rows


@remember  # each backend's forecast asks
def least_work(graph: Graph) -> tuple[float, int]:
    """Flops of the products that the mask leaves, and bytes of each operand and result, once."""
    p = sole(graph)
    assert p is not None  # `forecast` asked for one
    pairs = most_pairs(p.node.mask, (p.B, p.H, p.G, p.M, p.N))
    once = p.specs[:2] + p.specs[2 + p.node.v_in_k :]
    read = sum(distinct_elements(x) * x.dtype.itemsize for x in once)
    written = sum(type_.bytes for type_ in graph.output_types)
    return 2.0 * pairs * summed_widths(graph.eqns[0].op, p.D, p.E), read + written


def rank(graph: Graph, target: Target, names: Sequence[str]) -> dict[str, float]:
    """Forecast seconds by backend, the fastest first; backends without a forecast are left out.

    Ties are ordered by the bytes that programs move, then by the order of `names`.
    """
    made = {name: x for name in names if (x := forecast(graph, target, name)) is not None}
    order = sorted(made, key=lambda name: (made[name].seconds, made[name].traffic))
    return {name: made[name].seconds for name in order}
