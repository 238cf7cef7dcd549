"""When products with a softmax between, on whole rows, are faster than PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import torch

from attn_graph.kernels.row_sums import has_whole_rows
from attn_graph.lowering.cpu.product_slots import (
    LEAST_FULL,
    WHOLE_MASKED_ROWS,
    has_few_scores,
    lies_flat,
)
from attn_graph.lowering.cpu.run_mask import (
    FEW_ROWS,
    caps_entries,
    cuts_entries,
    reads_numbers,
)
from attn_graph.lowering.cpu.schedule import row_tiles
from attn_graph.lowering.cpu.whole_tiles import WholeTiles
from attn_graph.lowering.problem import Problem

# Multiplications of q k^T from which products of half precision are the faster: backward, and
# forward where every key/value head has one row, on which PyTorch's fused kernel spends as long as
# on four. Measured on an AVX512 with native bf16, 1 and 2 threads, as is all that follows.
LEAST_BACKWARD, LEAST_OF_ONE_ROW = 2**21, 2**16
# Forward elsewhere: what the kernel has more to do, counted in multiplications. It reads a number
# of k in the time of five, and a key/value head costs it as much as PER_HEAD.
LEAST_FORWARD, PER_NUMBER, PER_HEAD = 2**21, 5, 2**16
# And where modifiers change scores, of one query or more: their heads are not rows of one.
LEAST_CHANGED_OF_ONE, LEAST_CHANGED = 2**19, 2**22
# In float32, whose products are no faster, fewer steps are: where a head has few scores, at most so
# many, and there are many heads. Below, the kernel is as fast or, of few rows, faster.
MOST_SHORT, SHORT_HEADS, SHORT_ROWS = 2**14, 48, 16
# And forward of fewer rows, whose scores of a key/value head are at most so many, without a mask:
# of so many such heads; where each has one row, of twice as many and so many multiplications. Up to
# three times as fast with two threads, and 0.93 to 1.4 times with one.
MOST_FEW, FEW_HEADS, LEAST_FEW = 2**13, 16, 2**19
# The same forward without a mask and without lse, of FEW_ROWS rows: up to 1.3 times as fast with
# two threads, and about as fast with one.
MOST_WHOLE, WHOLE_HEADS, LEAST_WHOLE = 200**2, 8, 2**22
# And where so few queries read so many bytes of k that no cache holds them, or so many numbers of
# long rows: k q^T takes a third of the time of q k^T, and the kernel twice as long.
MOST_READING, LEAST_READ = 4, 2**24
LONG_NUMBERS, LEAST_NUMBERS = 128, 2**21
# Rows of a key/value head, at most, whose p v is made as sums of rows of v, of so many numbers; in
# float32 of long rows alone. They take half the time of a product, in float16 a twentieth.
MOST_SUMMED, LEAST_SUMMED = {torch.float32: 2, torch.bfloat16: 1, torch.float16: 4}, 2**20
# So float16 too takes down to half the time of the kernel, which multiplies copies of v as well: of
# so many rows, or of some more of so many heads. Of more keys even equal weights would be below the
# least normal number of float16, and lose digits.
MOST_READ_ROWS, READ_HEADS, MOST_HALF_KEYS = 2, 32, 2**14
# And where lengths hide keys of few scores of up to SHORT_ROWS rows, half as many backward: one
# product of all heads takes two thirds of the time.
MOST_BOUNDED = 2**15
# Multiplications of q k^T from which weights that are kept make both passes faster, in float32 of
# few heads more; and the part of the scores that tiles of some rows have at least, where a mask
# hides others. In float32 the kernel is faster where a mask hides half of long rows.
LEAST_KEPT, LEAST_KEPT_OF_FEW, LEAST_SEEN = 2**19, 2**22, 0.6


def keeps(problem: Problem, own: Collection[torch.dtype], rate: float) -> bool:
    """Whether weights that the forward keeps for its backward, in no more bytes than q, k, v and o
    have, make both passes faster than computing them again, with what dropout of this rate, which
    the problem is without, drew. own: as `pays` has it."""
    p, scores = problem, prod(problem.sizes)
    suits = p.node.is_bare or (p.node.is_biased and p.dtype == p.wide)
    if p.dtype not in own or p.is_empty or not suits:
        return False
    few = scores <= p.B * p.H * p.M * p.E + sum(prod(x.shape) for x in p.specs[:3])
    few_heads = p.dtype == p.wide and p.B * p.H < SHORT_HEADS
    least = LEAST_KEPT_OF_FEW if few_heads else LEAST_KEPT
    if not rate and p.dtype == p.wide and copies_gaps(p):
        return False
    return few and (scores * p.D >= least or rate > 0) and reads_most(p)


def reads_most(problem: Problem) -> bool:
    """Whether little is lost where whole rows of scores are computed, and a mask hides some."""
    p, mask = problem, problem.node.mask
    if mask is None or mask.needs or p.M * p.N <= MOST_SHORT:
        return True
    return p.dtype != p.wide and sees_most(p)


def sees_most(problem: Problem) -> bool:
    """Whether tiles of whole rows have most of the scores."""
    return count_tile_keys(problem) >= LEAST_SEEN * problem.N


def count_tile_keys(problem: Problem) -> int:
    """How many keys a query's tile of whole rows has, on average; all where data decide."""
    p, mask = problem, problem.node.mask
    if mask is None or mask.needs:
        return p.N
    tiles = row_tiles(p, mask, range(1), WHOLE_MASKED_ROWS, LEAST_FULL)
    return sum(len(t.rows) * t.keys for t in tiles) // p.M


def pays(problem: Problem, own: Collection[torch.dtype], statistics: bool) -> bool:
    """Whether products with a softmax between are faster than PyTorch's fused kernel.

    own: the dtypes whose products are the CPU's own, none on another device. statistics: whether
    lse or another one is returned, which is not of rounded scores then.
    """
    if not own or problem.is_empty or is_part(problem):
        return False
    if problem.dtype == torch.float16:
        return reads_half(problem) and takes(problem)
    if problem.dtype not in own:
        return False
    if problem.dtype == problem.wide:
        few = has_few_rows(problem) or just_reads(problem) or is_bounded(problem)
        short = is_short(problem) or (has_short_rows(problem) and not statistics)
        short = short and not copies_gaps(problem)
        return (few or short or cuts_entries(problem)) and takes(problem)
    return not statistics and (pays_half(problem) or (takes(problem) and skips_little(problem)))


def reads_half(problem: Problem) -> bool:
    """Whether a forward in float16 has few rows, of k and v that are read as they lie."""
    p, mask = problem, problem.node.mask
    few = p.lines <= MOST_READ_ROWS or p.B * p.G >= READ_HEADS
    if p.N > MOST_HALF_KEYS or not (few and sums_rows(p)) or not (mask is None or caps_entries(p)):
        return False
    return all(map(lies_flat, p.specs[:3]))


def is_part(problem: Problem) -> bool:
    """Whether it is the gradient of a part of the keys: weights are divided by their own sum here,
    and the derivative of their softmax is that of a whole row."""
    return problem.grad is not None and problem.node.part


def is_short(problem: Problem) -> bool:
    """Whether a problem has many heads of few scores each."""
    p, mask = problem, problem.node.mask
    rows = p.lines
    as_it_is = has_few_scores(p) or (p.grad is None and caps_entries(p))
    if mask is not None and mask.needs and not as_it_is:
        return False
    return p.M * p.N <= MOST_SHORT and p.B * p.H >= SHORT_HEADS and rows >= SHORT_ROWS


def copies_gaps(problem: Problem) -> bool:
    """Whether products would copy operands with gaps, as layers of models bring them, which one
    call of the kernel reads as they lie: it takes 0.6 to 0.7 of the time forward, and 0.85 of both
    passes, with one thread and with two."""
    flat = all(map(lies_flat, problem.specs[:3]))
    return not flat and WholeTiles.plan(problem) is not None


def has_few_rows(problem: Problem) -> bool:
    """Whether a forward has few rows, of many heads or under a mask that is known, hides little and
    is not the kernel's own: its tiles of mixed places take up to six times as long."""
    p, rows = problem, problem.lines
    if p.grad is not None or not all(map(lies_flat, p.specs[:3])):
        return False
    if p.node.mask is not None:
        known = p.M * p.N <= MOST_SHORT and not p.node.mask.needs
        return known and WholeTiles.plan(p) is None and sees_most(p)
    if rows == 1 and count_products(p) < LEAST_FEW:
        return False
    return FEW_HEADS * (1 + (rows == 1)) <= p.B * p.G and rows * p.N <= MOST_FEW


def has_short_rows(problem: Problem) -> bool:
    """Whether a forward without a mask has some heads of rows that are short."""
    p = problem
    heads, rows = p.B * p.H, p.lines
    if p.grad is not None or p.node.mask is not None or heads < WHOLE_HEADS or rows < FEW_ROWS:
        return False
    return p.M * p.N <= MOST_WHOLE and count_products(p) >= LEAST_WHOLE


def sums_rows(problem: Problem, parts: int = 1) -> bool:
    """Whether p v of a problem, or of each of its parts, is made as sums of rows of v."""
    p, v = problem, problem.specs[2]
    few = p.grad is None and MOST_SUMMED.get(p.dtype, 0) >= p.lines
    suits = p.E >= LONG_NUMBERS or p.dtype != torch.float32
    return few and suits and prod(v.shape) >= parts * LEAST_SUMMED and has_whole_rows(v)


def just_reads(problem: Problem) -> bool:
    """Whether few queries in float32 read much of k and v, which lie as products take them."""
    p, (k, v) = problem, problem.specs[1:3]
    suits = p.grad is None and p.node.mask is None and p.dtype == p.wide
    much = k.type.bytes > LEAST_READ or reads_long(p)
    return suits and p.lines <= MOST_READING and much and lies_flat(k) and lies_flat(v)


def reads_long(problem: Problem, parts: int = 1) -> bool:
    """Whether k, or each part of it, has many keys of many numbers."""
    k = problem.specs[1]
    return problem.D >= LONG_NUMBERS and prod(k.shape) >= parts * LEAST_NUMBERS


def is_bounded(problem: Problem) -> bool:
    """Whether lengths, which a call reads as numbers, leave out keys of a few queries."""
    p, mask = problem, problem.node.mask
    most = MOST_BOUNDED if p.grad is None else MOST_BOUNDED // 2
    few = p.lines <= SHORT_ROWS and prod(p.sizes) <= most
    if not few or mask is None or not mask.needs:
        return False
    return reads_numbers(p) and all(map(lies_flat, p.specs[:3]))


def skips_little(problem: Problem) -> bool:
    """Whether what data hides is so little that leaving it out takes longer than computing it."""
    mask = problem.node.mask
    return mask is not None and bool(mask.needs) and has_few_scores(problem)


def pays_half(problem: Problem) -> bool:
    """Whether products of half precision are the faster for a problem."""
    p, rows = problem, problem.lines
    if p.grad is not None:  # weights are divided by their own sum: lse may be of rounded scores
        forward = Problem.of(p.node, p.grad.split(p.specs).own)
        return count_products(p) >= LEAST_BACKWARD or pays_half(forward)
    if suits_fused(p):
        return False
    seen = count_tile_keys(p) if rows < FEW_ROWS else p.N
    read = p.B * p.G * seen * p.D
    work = rows * read
    if not takes(p):
        return work >= (LEAST_CHANGED_OF_ONE if p.M == 1 else LEAST_CHANGED)
    if rows == 1 and seen == p.N:
        return work >= LEAST_OF_ONE_ROW
    return work + PER_NUMBER * read + PER_HEAD * p.B * p.G >= LEAST_FORWARD


def count_products(problem: Problem) -> int:
    """Multiplications of q k^T."""
    return prod(problem.sizes) * problem.D


def suits_fused(problem: Problem) -> bool:
    """Whether the fused kernel has an advantage forward: it cuts documents exactly, and reads keys
    where they lie, which counts where few queries read each."""
    p, mask = problem, problem.node.mask
    data = set() if mask is None or caps_entries(p) else mask.needs
    if p.lines < FEW_ROWS:
        return bool(data) or not all(x.is_dense for x in p.specs[1:3])
    return "q_segments" in data


def takes(problem: Problem) -> bool:
    """Whether these tiles compute a problem: softmax(scale q k^T) v under a mask, and no more."""
    grad = problem.grad
    return problem.node.is_bare and (grad is None or (grad.with_do and not grad.with_dlse))
