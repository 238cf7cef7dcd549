"""When products with a softmax between, on whole rows, are faster than PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import torch

from attn_graph.kernels.row_sums import has_whole_rows
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
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
from attn_graph.lowering.problem import Problem
from attn_graph.masks import KeepBlocks, Mask
from attn_graph.masks.joins import leaves

# From LEAST_HALF multiplications of q k^T on products of half precision are faster; the kernel
# reads a key in the time of READ_ROWS rows.
LEAST_HALF, READ_ROWS = 2**18, 5
# In float32 products are not faster than the kernel's, but fewer steps are. This counts for at
# least SHORT_HEADS heads, of at most MOST_SHORT scores each, and of at least SHORT_ROWS rows or at
# most FEW_SHORT scores. If at most MOST_READING rows read LEAST_READ bytes of k, k q^T takes a
# third of the time of q k^T, and the kernel twice as long.
MOST_SHORT, SHORT_HEADS, SHORT_ROWS, FEW_SHORT = 2**14, 48, 16, 2**10
MOST_READING, LEAST_READ = 4, 2**22
# For at most MOST_SUMMED rows of a key/value head, p v is made as sums of rows of v, if v has
# LEAST_SUMMED numbers, in float32 only from E = LONG_NUMBERS on. Sums take half the time of a
# product, in float16 a twentieth.
LONG_NUMBERS = 128
MOST_SUMMED, LEAST_SUMMED = {torch.float32: 2, torch.bfloat16: 1, torch.float16: 4}, 2**20
# So float16 too takes down to half the time of the kernel, as the kernel also multiplies copies of
# v: with MOST_READ_ROWS rows, or more rows of READ_HEADS heads. With more keys than MOST_HALF_KEYS
# even equal weights would be below the least normal number of float16, and lose digits.
MOST_READ_ROWS, READ_HEADS, MOST_HALF_KEYS = 2, 32, 2**14
# From LEAST_KEPT multiplications of q k^T on kept weights make both passes faster, in float32 with
# few heads from LEAST_KEPT_OF_FEW on. LEAST_SEEN is the least share of scores in tiles of some rows
# under a mask: in float32 the kernel is faster if a mask hides half of long rows.
LEAST_KEPT, LEAST_KEPT_OF_FEW, LEAST_SEEN = 2**19, 2**22, 0.6


def keeps(problem: Problem, own: Collection[torch.dtype], rate: float) -> bool:
    """True if keeping the weights, in no more bytes than q, k, v and o, makes both passes faster
    than recomputing them. rate: of the dropout left out of the problem. own: see `pays`."""
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
    p, mask = problem, problem.node.mask
    if mask is None or mask.needs or p.M * p.N <= MOST_SHORT:
        return True
    return p.dtype != p.wide and sees_most(p)


def sees_most(problem: Problem) -> bool:
    return count_tile_keys(problem) >= LEAST_SEEN * problem.N


def count_tile_keys(problem: Problem) -> int:
    """Keys of a query's tile of whole rows, on average; all if data decide."""
    p, mask = problem, problem.node.mask
    if mask is None or mask.needs:
        return p.N
    tiles = row_tiles(p, mask, range(1), WHOLE_MASKED_ROWS, LEAST_FULL)
    return sum(len(t.rows) * t.keys for t in tiles) // p.M


def pays(problem: Problem, own: Collection[torch.dtype], statistics: bool) -> bool:
    """True if products with a softmax between are faster than PyTorch's fused kernel. own: the
    CPU's native product dtypes. statistics: True if statistics are returned; then they are not of
    rounded scores."""
    if not own or problem.is_empty or is_part(problem):
        return False
    if problem.dtype == torch.float16:
        return reads_half(problem) and takes(problem)
    if problem.dtype not in own:
        return False
    if hides_few(problem) and takes(problem):
        return not statistics or problem.dtype == problem.wide
    if problem.dtype != problem.wide:
        return not statistics and has_work(problem) and not suits_fused(problem)
    suits = is_short(problem) or just_reads(problem) or cuts_entries(problem)
    return suits and takes(problem)


def reads_half(problem: Problem) -> bool:
    """True of a forward in float16 with few rows, and with k and v read in place."""
    p, mask = problem, problem.node.mask
    few = p.lines <= MOST_READ_ROWS or p.B * p.G >= READ_HEADS
    if p.N > MOST_HALF_KEYS or not (few and sums_rows(p)) or not (mask is None or caps_entries(p)):
        return False
    return all(map(lies_flat, p.specs[:3]))


def is_part(problem: Problem) -> bool:
    """True of the gradient of a part of the keys: weights are divided by their own sum here, as of
    a whole row."""
    return problem.grad is not None and problem.node.part


def hides_few(problem: Problem) -> bool:
    """True if data hide some of few scores, in float32 of few rows by lengths read as numbers:
    making the kernel's addend takes longer than computing all scores."""
    p, mask = problem, problem.node.mask
    if mask is None or not mask.needs or not has_few_scores(p):
        return False
    return p.dtype != p.wide or (p.lines <= SHORT_ROWS and reads_numbers(p))


def is_short(problem: Problem) -> bool:
    """True of many key/value heads of few scores. Data must hide them in one operation, and a known
    mask must hide little."""
    p, mask = problem, problem.node.mask
    few = p.lines * p.N <= MOST_SHORT and p.B * p.G >= SHORT_HEADS
    rows = p.lines >= SHORT_ROWS or p.lines * p.N <= FEW_SHORT
    if not (few and rows) or copies_gaps(p):
        return False
    if mask is None:
        return True
    at_once = has_few_scores(p) or (p.grad is None and caps_entries(p))
    return at_once if mask.needs else sees_most(p)


def copies_gaps(problem: Problem) -> bool:
    """True if products would copy operands with gaps, as model layers bring them. One call of the
    kernel reads them in place, in 0.6 to 0.7 of the time forward and 0.85 of both passes, with one
    thread and with two."""
    flat = all(map(lies_flat, problem.specs[:3]))
    return not flat and FusedTiles.plan(problem).alone is not None


def sums_rows(problem: Problem, parts: int = 1) -> bool:
    """True if p v of a problem, or of each of its parts, is made as sums of rows of v."""
    p, v = problem, problem.specs[2]
    few = p.grad is None and MOST_SUMMED.get(p.dtype, 0) >= p.lines
    suits = p.E >= LONG_NUMBERS or p.dtype != torch.float32
    return few and suits and prod(v.shape) >= parts * LEAST_SUMMED and has_whole_rows(v)


def just_reads(problem: Problem) -> bool:
    """True if few queries in float32 read much of k and v, in place in products."""
    p, (k, v) = problem, problem.specs[1:3]
    suits = p.grad is None and p.node.mask is None and p.dtype == p.wide
    return suits and reads_much(p) and lies_flat(k) and lies_flat(v)


def reads_much(problem: Problem, parts: int = 1) -> bool:
    return problem.lines <= MOST_READING and problem.specs[1].type.bytes > parts * LEAST_READ


def has_work(problem: Problem) -> bool:
    """True if a problem in half precision takes longer than the steps of the products."""
    p = problem
    return p.B * p.G * (p.lines + READ_ROWS) * p.N * p.D >= LEAST_HALF


def suits_fused(problem: Problem) -> bool:
    """True if the fused kernel is better forward in half precision: it cuts documents exactly, and
    reads keys in place. This counts if few queries read each key or see few."""
    p, mask = problem, problem.node.mask
    if p.grad is not None:
        return False
    data = set() if mask is None or caps_entries(p) else mask.needs
    if p.lines < FEW_ROWS:
        return bool(data) or not all(x.is_dense for x in p.specs[1:3]) or not sees_most(p)
    return "q_segments" in data or (bool(data) and reads_tables(mask))


def reads_tables(mask: Mask | None) -> bool:
    """True if a table of blocks picks keys."""
    return mask is not None and any(isinstance(leaf, KeepBlocks) for leaf in leaves(mask))


def takes(problem: Problem) -> bool:
    """True if these tiles compute a problem: softmax(scale q k^T) v under a mask."""
    grad = problem.grad
    return problem.node.is_bare and (grad is None or (grad.with_do and not grad.with_dlse))
