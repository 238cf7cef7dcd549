"""How long each backend's kernels should take on a GPU, at best, to order those that can run.

The time is that of the products at a share of the GPU's peak (lowering/rates.toml, with its
sources), or that of reading every operand once, whichever is longer. Both are longer where programs
are too few for all multiprocessors. A program has up to 128 rows: queries forward, keys backward.
Launches are left out that all have. Equal times are ordered by what programs move between the
multiprocessors and memory, or its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from attn_graph.ir.graph import Graph
from attn_graph.lowering.cudnn.run import ends_keys
from attn_graph.lowering.problem import Problem, sole
from attn_graph.lowering.rates import Rate, least_seconds, peak_of, rates
from attn_graph.lowering.triton.few_rows import LEAST_KEYS, choose_parts, is_decoding
from attn_graph.machine.target import Target
from attn_graph.masks import Mask
from attn_graph.masks.tiles import Sizes, most_pairs
from attn_graph.planner.cost import distinct_elements, summed_widths

LEAST_ROWS, MOST_ROWS = 16, 128  # of one program


@lru_cache(256)
def predicted_seconds(graph: Graph, target: Target, name: str) -> float | None:
    """How long a backend should take for one attention, or its gradient, on a GPU, at best.

    None where no rate is known: of this backend there, in this dtype, or of the GPU itself.
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
    """Whether programs share the keys of one head, where there are few programs."""
    return rate.splits != "never" and problem.grad is None


def heads_as_rows(rate: Rate, problem: Problem) -> int:
    """How many heads that share keys are rows of one program, so that it reads each key once."""
    once = problem.M == 1 if rate.splits == "one_query" else rate.splits == "few_rows"
    return problem.H // problem.G if once and is_decoding(problem) else 1


def predict_parts(rate: Rate, problem: Problem, processors: int) -> int:
    """How many programs share the keys of a head; 1 where that leaves no multiprocessor idle."""
    p, heads = problem, heads_as_rows(rate, problem)
    if not shares_keys(rate, problem):
        return 1
    programs = p.B * p.H // heads * programs_of(p.M * heads)
    if programs >= processors:
        return 1
    return choose_parts(programs, rate.fills * processors, p.N, LEAST_KEYS)


def traffic(graph: Graph, target: Target, name: str) -> int:
    """Bytes of keys and values that all programs of a forward read, from memory or its cache, and
    of the parts that they write and others join; 0 of gradients."""
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

    Of equal ones, those whose programs move less come first, then in the order of `names`.
    """
    times = {name: predicted_seconds(graph, target, name) for name in names}
    known = {name: time for name, time in times.items() if time is not None}

    def order(name: str) -> tuple[float, int]:
        return known[name], traffic(graph, target, name)

    return {name: known[name] for name in sorted(known, key=order)}
