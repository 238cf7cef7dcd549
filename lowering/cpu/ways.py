"""The three ways to compute an attention on CPUs, with their prices: the cheapest one runs.

kernel: calls of PyTorch's fused kernel. rows: whole rows of scores, products with a softmax between
them. products: tiles with every modifier and every gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.attention import SAVED
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.lowering.cpu.fused_tiles import FusedTiles, hides_by_booleans
from attn_graph.lowering.cpu.product_tiles import ProductTiles
from attn_graph.lowering.cpu.row_core import sums_rows
from attn_graph.lowering.cpu.row_tiles import RowTiles
from attn_graph.lowering.cpu.run_mask import FEW_ROWS, caps_entries, cuts_entries, reads_numbers
from attn_graph.lowering.cpu.schedule import DATA_ROWS, count_looks, looks_pay, score_seconds
from attn_graph.lowering.cpu.tile_grid import has_few_scores, lies_flat
from attn_graph.lowering.folding import fold_problem
from attn_graph.lowering.problem import Facts, Problem
from attn_graph.lowering.rates import CpuRates, cpu_rates
from attn_graph.lowering.request import Request
from attn_graph.machine.target import Target
from attn_graph.masks import Keep
from attn_graph.masks.joins import leaves
from attn_graph.sparsity.tiles import most_pairs

AttentionTiles = FusedTiles | RowTiles | ProductTiles
HALF_KEYS = 2**14  # of more even equal weights are below float16's least normal, and lose digits
PULL = 5 / 2  # products of a backward for each of a forward, where it makes weights again
KEPT = 4 / 2  # and where it reads them, with a softmax for each of a forward
PACKED = 4.5  # times as long as reading a key, where the kernel packs bfloat16 for its products
READ_MASK = 5  # product calls: the operations that make caps of data, and the look at all of a row
COPIED = 2  # how many times faster a way must be to hold float32 copies of all operands


@final
@frozen
class CpuCase:
    """One problem on one kind of CPU. own: the dtypes with product instructions. fused: True if
    PyTorch's fused kernel may run. statistics: True if statistics are returned; then they are not
    of rounded scores."""

    problem: Problem
    own: frozenset[torch.dtype]
    fused: bool = True
    statistics: bool = False

    @cached_property
    def rates(self) -> CpuRates:
        return cpu_rates(torch.bfloat16 in self.own)

    @property
    def factors(self) -> torch.dtype:
        """The dtype of the factors of products."""
        p = self.problem
        return p.dtype if p.dtype in self.own and not (self.statistics or is_part(p)) else p.wide

    @cached_property
    def share(self) -> float:
        """The share of the scores in blocks of queries, under a mask without data; else all."""
        p, mask = self.problem, self.problem.node.mask
        if mask is None or p.mask_reads:
            return 1.0
        pairs = most_pairs(mask, (p.B, p.H, p.G, p.M, p.N)) + count_edges(p) // 2
        return min(1.0, pairs / prod(p.sizes))

    @cached_property
    def gaps(self) -> int:
        """Bytes of q, k and v copied for products, as oneDNN needs them without gaps."""
        return sum(spec.type.bytes for spec in self.problem.specs[:3] if not lies_flat(spec))

    @property
    def products(self) -> int:
        """Calls for one product: operands with gaps between heads are multiplied by entries."""
        return self.problem.B if self.gaps else 1

    @cached_property
    def kernel_pass(self) -> float:
        """The price of one forward of the fused kernel, or of as much of a backward."""
        p, rates, mask = self.problem, self.rates, self.problem.node.mask
        packs = rates.native_half and p.dtype == torch.bfloat16 and p.grad is None
        reads = (PACKED if packs else 1) * count_numbers(p) / rates.kernel_reads
        once = p.B * p.H * p.M * rates.kernel_row
        touches = 1 if p.grad is None else 2  # gradients of k and v too
        computes = prod(p.sizes) * score_seconds(p, rates) + touches * p.H // p.G * reads
        if mask is None or not p.mask_reads:
            return once + self.share * computes
        whole = rates.hides * prod(p.sizes) + computes
        if not looks_pay(p, rates):  # then all keys are read
            return once + whole + (0.0 if hides_by_booleans(p) else READ_MASK * rates.product_call)
        if any(isinstance(leaf, Keep) for leaf in leaves(mask)):
            return once + rates.look + whole
        return once + count_looks(p) * rates.look + computes / 2

    @cached_property
    def cheapest(self) -> tuple[CpuWay, float]:
        """The cheapest way, and its price; the first of equal ones."""
        able = [(way, way.seconds(self)) for way in WAYS if way.refuses(self) is None]
        return min(able, key=lambda priced: priced[1])


@final
@frozen
class CpuWay:
    """One way to compute a problem. refuses: the reason against it, if any. seconds: its price, on
    one thread. tile: plans it."""

    name: str
    refuses: Callable[[CpuCase], str | None]
    seconds: Callable[[CpuCase], float]
    tile: Callable[[CpuCase], AttentionTiles]


def sole_case(facts: Facts, own: frozenset[torch.dtype], fused: bool) -> CpuCase | None:
    """The case of a graph that is one attention, or one gradient; None of others."""
    graph, problem = facts.graph, facts.problem
    if problem is None or problem.is_empty:
        return None
    statistics = gives_statistics(graph, graph.eqns[0])
    return CpuCase(fold_problem(problem) or problem, own, fused, statistics)


def gives_statistics(graph: Graph, eqn: Eqn) -> bool:
    """True if an attention's lse or another statistic is returned or read: it is not of rounded
    scores then."""
    if not eqn.op.forward:
        return False
    given = {i for each, outs in graph.numbered if each is eqn for i in outs[1:]}
    read = {i for each in graph.eqns for i in each.args}
    return bool(given & (read | {*graph.outputs}))


def cpu_case(request: Request) -> CpuCase | None:
    """The case of a request for a CPU; None of other graphs and targets."""
    if request.target.kind != "cpu":
        return None
    return request.facts.once(sole_case, own_products(request.target), may_fuse(request))


def may_fuse(request: Request) -> bool:
    """True if PyTorch's fused CPU kernel may run."""
    return request.target.kind == "cpu" and request.options.switches.flash


def own_products(target: Target) -> frozenset[torch.dtype]:
    """The dtypes with product instructions on a target's CPU; none on other kinds."""
    if target.kind != "cpu":
        return frozenset()
    half = {torch.bfloat16} if "bf16" in target.native else set[torch.dtype]()
    return frozenset({torch.float32, torch.float64, *half})


# What each way refuses


def refuses_kernel(case: CpuCase) -> str | None:
    """The kernel adds to scores, gives o and lse, and pulls to q, k and v."""
    node, grad = case.problem.node, case.problem.grad
    if not case.fused:
        return "PyTorch's fused kernel may not run"
    if node.dropout or not all(m.additive for m in node.modifiers) or node.names != SAVED:
        return "it adds to scores, and gives o and lse"
    if grad is None:
        return None
    data = (wanted for role, wanted in zip(node.takes, grad.wants, strict=True) if role.data)
    if not grad.with_do or grad.with_dlse or any(data):
        return "it has the gradients of o by q, k and v"
    return None


def refuses_rows(case: CpuCase) -> str | None:
    """Whole rows are of softmax(scale q k^T) v under a mask, in the dtype of the operands.

    A forward of few rows or scores may also cap these, unless they are rounded.
    """
    p, grad = case.problem, case.problem.grad
    capped = p.node.is_capped and p.node.is_softmax and grad is None and p.dtype == p.wide
    suits = p.node.is_bare or (capped and (p.lines < FEW_ROWS or has_few_scores(p)))
    if not suits or (grad is not None and (grad.with_dlse or not grad.with_do)):
        return "they are of softmax(scale q k^T) v under a mask"
    if is_part(p):
        return "weights are divided by their own sum, and these keys are a part"
    if case.statistics and p.dtype not in (p.wide, torch.float16):
        return "statistics would be of rounded scores"
    if p.dtype in case.own or (case.own and p.dtype == torch.float16 and reads_half(p)):
        return None
    return "the CPU has no products of this dtype"


def is_part(problem: Problem) -> bool:
    """True of the gradient of a part of the keys."""
    return problem.grad is not None and problem.node.part


def reads_half(problem: Problem) -> bool:
    """True of a forward in float16 with sums of rows of v in place of products."""
    p, mask = problem, problem.node.mask
    hides = mask is None or caps_entries(p)
    return hides and p.N <= HALF_KEYS and sums_rows(p) and all(map(lies_flat, p.specs[:3]))


# Prices


def kernel_seconds(case: CpuCase) -> float:
    """A gradient in half precision takes float32 copies of all operands and gradients, more than
    twice the operands' bytes. If products read the operands in place, the kernel must be COPIED
    times as fast to be worth this memory. A forward in float16 copies k and v."""
    p = case.problem
    copies = p.grad is not None and case.factors != p.wide
    once = (COPIED if copies else 1) * pulls(p) * case.kernel_pass
    reads = count_numbers(p) * p.dtype.itemsize / case.rates.product_reads
    return once + (reads if p.dtype == torch.float16 and p.grad is None else 0.0)


def sdpa_seconds(case: CpuCase) -> float:
    """The price of one call on operands in their own dtype. In half precision the kernel converts k
    and v for each block of queries, unless it multiplies bfloat16."""
    p = case.problem
    converts = p.dtype == torch.float16 or (p.dtype != p.wide and p.grad is not None)
    blocks = -(-p.M // DATA_ROWS) if converts else 0
    more = blocks * count_numbers(p) / case.rates.kernel_reads
    return pulls(p) * (case.kernel_pass + more)


def rows_seconds(case: CpuCase) -> float:
    p, rates = case.problem, case.rates
    again = rows_pass(case, case.share) + case.gaps / rates.copies
    return pulls(p) * again + hide_seconds(case)


def rows_pass(case: CpuCase, share: float) -> float:
    """Without copies and masks. share: of the scores, unless data picks the keys of an entry."""
    p, rates = case.problem, case.rates
    cuts = p.mask_reads and cuts_entries(p)
    dtype = p.wide if p.dtype == torch.float16 else p.dtype
    computes = compute_seconds(case, dtype, dtype)
    computes += count_numbers(p) * dtype.itemsize / rates.product_reads
    calls = p.B if cuts else case.products
    return calls * rates.product_call + computes * (0.5 if cuts else share)


def products_seconds(case: CpuCase) -> float:
    """A pass has three times the calls of whole rows, with a softmax of our own. A forward in
    half precision without its own products takes float32 copies of k and v, unlike the kernel."""
    p, rates, factors = case.problem, case.rates, case.factors
    reads = rates.kernel_reads if factors != p.dtype else rates.product_reads / factors.itemsize
    computes = compute_seconds(case, factors, p.wide)
    computes += count_numbers(p) / reads
    copied = case.gaps / rates.copies if factors != p.wide else 0.0
    again = 3 * case.products * rates.product_call + case.share * computes + copied
    once = pulls(p) * again + hide_seconds(case, by_tile=True)
    return (COPIED if factors != p.dtype and p.grad is None else 1) * once


def compute_seconds(case: CpuCase, factors: torch.dtype, scores: torch.dtype) -> float:
    """The products and the softmax of all scores, in these dtypes."""
    p, rates = case.problem, case.rates
    each = 2 * (p.D + p.E) / rates.flops[factors] + scores.itemsize / rates.softmax
    return prod(p.sizes) * each


def hide_seconds(case: CpuCase, *, by_tile: bool = False) -> float:
    """by_tile: True if masks with data are always evaluated tile by tile."""
    p, rates, mask = case.problem, case.rates, case.problem.node.mask
    if mask is None:
        return 0.0
    places = prod(p.sizes)
    if not p.mask_reads:
        return count_edges(p) * rates.hides_by_tile * case.factors.itemsize / p.wide.itemsize
    if by_tile or not (has_few_scores(p) or (p.grad is None and caps_entries(p))):
        return places * rates.hides_by_tile + p.B * READ_MASK * rates.product_call
    return places * rates.hides + (0.0 if reads_numbers(p) else READ_MASK * rates.product_call)


def pulls(problem: Problem) -> float:
    return 1.0 if problem.grad is None else PULL


def count_numbers(problem: Problem) -> int:
    """Of k and v."""
    return sum(prod(spec.shape) for spec in problem.specs[1:3])


def count_edges(problem: Problem) -> int:
    """Scores at the edges of a mask that depends on j - i, in blocks of queries."""
    return problem.B * problem.H * problem.M * min(problem.M, DATA_ROWS)


# Kept weights


def keeps(problem: Problem, own: frozenset[torch.dtype], rate: float) -> bool:
    """True if keeping the weights, in no more bytes than q, k, v and o, makes both passes faster
    than recomputing them. rate: of the dropout left out of the problem."""
    p, scores = problem, prod(problem.sizes)
    suits = p.node.is_bare or (p.node.is_biased and p.dtype == p.wide)
    few = scores <= p.B * p.H * p.M * p.E + sum(prod(x.shape) for x in p.specs[:3])
    if p.dtype not in own or p.is_empty or not (suits and few):
        return False
    case = CpuCase(p, own, fused=not rate and p.node.is_bare)
    return kept_seconds(case) < (1 + PULL) * case.cheapest[1]


def kept_seconds(case: CpuCase) -> float:
    """The price of a forward and a backward on kept weights, which are of all scores."""
    p, rates = case.problem, case.rates
    scores = prod(p.sizes) * p.dtype.itemsize
    moved = 2 * scores / rates.product_reads
    copied = (1 + PULL) * case.gaps / rates.copies
    again = (1 + KEPT) * rows_pass(case, 1.0) - (KEPT - 1) * scores / rates.softmax
    return again + moved + copied + hide_seconds(case)


WAYS = (
    CpuWay(
        "kernel",
        refuses_kernel,
        kernel_seconds,
        lambda case: FusedTiles.plan(case.problem, case.rates),
    ),
    CpuWay("rows", refuses_rows, rows_seconds, lambda case: RowTiles.plan(case.problem)),
    CpuWay(
        "products",
        lambda case: None,
        products_seconds,
        lambda case: ProductTiles.plan(case.problem, case.factors),
    ),
)
