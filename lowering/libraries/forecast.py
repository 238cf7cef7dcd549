"""The least time of kernels on a GPU, to order the able backends.

The time is the longer of two: the products at a share of the GPU's peak (lowering/rates.toml, with
its sources), and one read of every operand. Both grow if there are fewer programs than
multiprocessors. A program has up to 128 rows: queries forward, keys backward. Launches common to
all are left out, copies ahead of a kernel are not. Equal times are ordered by the bytes that
programs move between the multiprocessors and memory, or its cache.

Lengths of sequences are data. Packed tensors are priced as the fewest sequences with all their
rows, each as long as allowed, and pages as if every sequence had all of its own. Queries packed
over a cache may be prompts and decoding steps: the price is that of as few prompts, and of a step
of each other sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import final

from attrs import evolve, frozen

from attn_graph.lowering.backend import UNPRICED, Price
from attn_graph.lowering.libraries.fa4_masks import LEAST_SPLIT
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.parts import LEAST, WORTH, choose_parts, is_decoding, short_rows
from attn_graph.lowering.problem import Facts, Problem
from attn_graph.lowering.rates import Rate, When, least_seconds, peak_of, read_rates
from attn_graph.lowering.request import Request
from attn_graph.lowering.shares import count_pairs_once, distinct_elements, known_shares
from attn_graph.spec import TensorSpec

MOST_ROWS = 128  # of one program


@final
@frozen
class EqualSequences:
    """Sequences of equal lengths: so many entries of a padded problem, with flops and bytes.

    again: bytes of values within keys, for backends that read them a second time.
    """

    problem: Problem
    packed: bool
    entries: int
    flops: float
    bytes: float
    again: float


def split_by_length(facts: Facts) -> tuple[EqualSequences, ...]:
    """The work of one attention, or its gradient: all of it, or of prompts and of steps."""
    lying, share = facts.once(Lying.of), facts.once(known_shares)[-1]
    assert lying is not None
    p, entries, mixed = lying.problem, lying.fewest, short_rows(lying) > 0
    if lying.T is not None and mixed:
        entries = max(1, -(-(lying.T - p.B) // (p.M - 1)))
    keys, part = lying.specs[1], entries / lying.fewest
    again = distinct_elements(keys) // p.D * p.E * keys.dtype.itemsize if p.node.v_in_k else 0
    each = part * share.flops, part * share.bytes, part * again
    prompts = EqualSequences(p, "rows" in lying.sides, entries, *each)
    return (prompts, steps_of(p, p.B - entries)) if mixed and entries < p.B else (prompts,)


def steps_of(problem: Problem, entries: int) -> EqualSequences:
    """The work of one packed query of each of so many sequences."""
    p = problem
    q, k, v, *others = p.specs
    one = evolve(p, specs=(TensorSpec((p.B, p.H, 1, p.D), q.dtype), k, v, *others))
    seen = count_pairs_once(p.node.mask, (entries, p.H, p.G, 1, p.N))
    again = seen.keys * p.E * v.dtype.itemsize
    moved = seen.queries * (p.D + p.E) * q.dtype.itemsize + seen.keys * p.D * k.dtype.itemsize
    moved, again = (moved, again) if p.node.v_in_k else (moved + again, 0)
    return EqualSequences(one, True, entries, 2 * seen.pairs * (p.D + p.E), moved, again)


@final
@frozen
class Programs:
    """The work of one attention, or its gradient, divided among programs of equal size.

    problem: padded. entries: the fewest sequences with all rows. tile: the fewest rows that a
    program multiplies. heads: how many have their queries in one program. splits: True if programs
    may share the keys of a head.
    """

    problem: Problem
    entries: int
    tile: int
    heads: int
    splits: bool

    @classmethod
    def of(cls, work: EqualSequences, rate: Rate) -> Programs:
        p, packed = work.problem, work.packed
        holds = p.grad is None and happens(rate.packs, p, packed)
        splits = p.grad is None and happens(rate.splits, p, packed)
        few = holds and rate.packs == "few_rows"
        tile = MOST_ROWS if packed and not few else rate.tile  # as for long sequences
        if p.M == 1 and not packed and rate.one is not None:
            tile = rate.one
        return cls(p, work.entries, tile, p.H // p.G if holds else 1, splits)

    @cached_property
    def rows(self) -> int:
        """Rows divided among the programs of some heads: queries, of a gradient keys."""
        return self.problem.N if self.problem.grad else self.problem.M * self.heads

    @property
    def columns(self) -> int:
        """Rows walked by each program."""
        return self.problem.M if self.problem.grad else self.problem.N

    @cached_property
    def count(self) -> int:
        """The number of programs, before any share keys."""
        return self.entries * self.problem.H // self.heads * programs_of(self.rows)

    @property
    def padding(self) -> float:
        """How many times more products programs compute, with their empty rows."""
        size = min(MOST_ROWS, max(self.tile, 1 << (self.rows - 1).bit_length()))
        return -(-self.rows // size) * size / self.rows

    def parts(self, places: int) -> int:
        """The number of programs per head's keys; 1 if all multiprocessors are busy without it."""
        tiles = -(-self.problem.N // LEAST)
        return choose_parts(self.count, places, tiles) if self.splits else 1

    def fullness(self, processors: int) -> tuple[float, float]:
        """The fractions of multiprocessors that compute, over time, and that read at all."""
        programs = self.count
        if self.splits and programs < processors:
            programs = min(programs * programs_of(self.columns), processors)
        waves = -(-programs // processors)
        return programs / (waves * processors), min(1.0, programs / processors)

    def traffic(self, parts: int) -> int:
        """Bytes of keys and values read from memory or its cache, and of the parts written and
        joined; 0 for a gradient."""
        p = self.problem
        read = self.count * p.N * (p.D + p.E) * p.dtype.itemsize
        joined = 8 * self.entries * p.H * parts * p.M * (p.E + 2) if parts > 1 else 0
        return 0 if p.grad else read + joined


def happens(when: When, problem: Problem, packed: bool) -> bool:
    """True if a rate's rule applies to a forward: that of kernels for one query to padded ones."""
    match when:
        case "always":
            return True
        case "many_keys":
            return problem.D == problem.E and problem.N > LEAST_SPLIT * MOST_ROWS and not packed
        case "one_query":
            return problem.M == 1 and not packed
        case "few_rows":
            return packs_rows(problem)
    return False


def packs_rows(problem: Problem) -> bool:
    """True if Triton's programs have the rows of all heads that share keys."""
    rows = problem.M * (problem.H // problem.G)
    return is_decoding(problem) and WORTH * rows <= problem.N


def programs_of(rows: int) -> int:
    """The number of programs for the rows of a head."""
    return -(-rows // MOST_ROWS)


def forecast(
    request: Request, name: str, copies: Callable[[Request], Iterable[str]] = lambda _: ()
) -> Price:
    """The price of a backend's kernels on a GPU. copies: the operands, by name, copied by a call
    before its kernel runs.

    UNPRICED if a rate is not known: the backend's there, in this dtype, or the GPU's own; and for
    graphs beyond one attention or its gradient.
    """
    facts, target = request.facts, request.target
    rate, processors, bandwidth = (
        read_rates().gpus.get((name, target.sm)),
        target.multiprocessors,
        target.bandwidth,
    )
    if rate is None or processors is None or bandwidth is None:
        return UNPRICED
    lying = facts.once(Lying.of)
    if lying is None or lying.problem.is_empty or 0 in lying.totals.values():
        return UNPRICED
    p = lying.problem
    peak = peak_of(target, name, p.dtype, max(p.D, p.E), backward=p.grad is not None)
    if peak is None:
        return UNPRICED
    seconds, traffic = 0.0, 0
    for work in facts.once(split_by_length):
        programs = Programs.of(work, rate)
        parts = programs.parts(rate.fills * processors)
        filled, busy = programs.fullness(processors)
        moved = work.bytes + work.again * rate.rereads
        flops = work.flops * programs.padding
        seconds += least_seconds(flops, peak * filled, moved, bandwidth * busy, int(parts > 1))
        traffic += programs.traffic(parts)
    for operand in copies(request):  # read and written
        spec = lying.large.get(operand) or lying.saved[operand]
        seconds += read_rates().launch + 2 * spec.type.bytes / bandwidth
    return Price(seconds, traffic)
