"""The least time of each backend's kernels on a GPU, to order the backends that can run.

The time is the longer of two: the products at a share of the GPU's peak (lowering/rates.toml, with
its sources), and one read of every operand. Both grow if there are fewer programs than
multiprocessors. A program has up to 128 rows: queries forward, keys backward. Launches common to
all are left out. Equal times are ordered by the bytes that programs move between the
multiprocessors and memory, or its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from attn_graph.ir.graph import Graph
from attn_graph.lowering.cudnn.run import ends_keys
from attn_graph.lowering.problem import Problem, sole
from attn_graph.lowering.rates import Rate, least_seconds, peak_of, rates
from attn_graph.lowering.triton.divisions import LEAST, choose_parts, is_decoding
from attn_graph.machine.target import Target
from attn_graph.masks.tiles import most_pairs
from attn_graph.planner.cost import distinct_elements, summed_widths

LEAST_ROWS, MOST_ROWS = 16, 128  # of one program


def predicted_seconds(graph: Graph, target: Target, name: str) -> float | None:
    """The least seconds of a backend for one attention, or its gradient, on a GPU.

    None if a rate is not known: the backend's there, in this dtype, or the GPU's own.
    """
    problem, rate = sole(graph), rates().get((name, target.sm))
    bandwidth, processors = target.bandwidth, target.multiprocessors
    if problem is None or rate is None or problem.is_empty:
        return None
    width, backward = max(problem.D, problem.E), problem.grad is not None
    peak = peak_of(target, name, problem.dtype, width, backward=backward)
    if peak is None or bandwidth is None or processors is None:
        return None
    shares = shares_keys(rate, problem)
    filled, busy = fullness(problem, processors, shares)
    flops = padded_flops(problem, graph, heads_as_rows(rate, problem))
    joins = int(shares and predict_parts(rate, problem, processors) > 1)
    moved = moved_bytes(problem, graph)
    seconds = least_seconds(flops, peak * filled, moved, bandwidth * busy, launches=joins)
    return seconds + copied_bytes(problem, name) / bandwidth


def shares_keys(rate: Rate, problem: Problem) -> bool:
    """True if programs of this forward may share the keys of one head."""
    return rate.splits != "never" and problem.grad is None


def heads_as_rows(rate: Rate, problem: Problem) -> int:
    """The number of heads held as rows of one program, which reads their common keys once."""
    once = problem.M == 1 if rate.splits == "one_query" else rate.splits == "few_rows"
    return problem.H // problem.G if once and is_decoding(problem) else 1


def predict_parts(rate: Rate, problem: Problem, processors: int) -> int:
    """The number of programs per head's keys; 1 if all multiprocessors are busy without it."""
    p, heads = problem, heads_as_rows(rate, problem)
    if not shares_keys(rate, problem):
        return 1
    programs = p.B * p.H // heads * programs_of(p.M * heads)
    return choose_parts(programs, rate.fills * processors, -(-p.N // LEAST))


def traffic(graph: Graph, target: Target, name: str) -> int:
    """Bytes moved by all programs of a forward: keys and values read from memory or its cache, and
    parts written and joined. 0 for gradients."""
    problem, rate, processors = sole(graph), rates()[name, target.sm], target.multiprocessors
    assert problem is not None
    assert processors is not None
    p = problem
    if p.grad is not None:
        return 0
    heads = heads_as_rows(rate, p)
    read = p.B * p.H // heads * programs_of(p.M * heads) * p.N * (p.D + p.E) * p.dtype.itemsize
    parts = predict_parts(rate, p, processors)
    return read + (8 * p.B * p.H * parts * p.M * (p.E + 2) if parts > 1 else 0)


def copied_bytes(problem: Problem, name: str) -> int:
    """Bytes that copies read and write before the kernel runs: cuDNN's of k and v with lengths."""
    copies = name == "cudnn" and ends_keys(problem)
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


@lru_cache(256)
def padded_flops(problem: Problem, graph: Graph, heads: int) -> float:
    """Flops of the products, including empty rows of a program.

    heads: the number of heads in a program's rows.
    """
    p, rows = problem, rows_and_columns(problem)[0] * heads
    size = min(MOST_ROWS, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
    pairs = most_pairs(p.node.mask, (p.B, p.H, p.G, p.M, p.N))
    return (
        2.0 * pairs * summed_widths(graph.eqns[0].op, p.D, p.E) * (-(-rows // size) * size / rows)
    )


@lru_cache(256)
def moved_bytes(problem: Problem, graph: Graph) -> int:
    once = problem.specs[:2] + problem.specs[2 + problem.node.v_in_k :]
    read = sum(distinct_elements(x) * x.dtype.itemsize for x in once)
    return read + sum(type_.bytes for type_ in graph.output_types)


def rank(graph: Graph, target: Target, names: Sequence[str]) -> dict[str, float]:
    """Predicted seconds by backend, the fastest first; backends without a prediction are left out.

    Ties are ordered by the bytes that programs move, then by the order of `names`.
    """
    times = {name: predicted_seconds(graph, target, name) for name in names}
    known = {name: time for name, time in times.items() if time is not None}

    def order(name: str) -> tuple[float, int]:
        return known[name], traffic(graph, target, name)

    return {name: known[name] for name in sorted(known, key=order)}
