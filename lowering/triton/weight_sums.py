"""When a backward sums rows of weights again, and its launch: see kernels/weight_sums.py."""

from __future__ import annotations

from attn_graph.ir.modifiers import SoftCap
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.launch_list import PASS_OF, Fixed, LaunchList
from attn_graph.machine.workspace import Buffer

# By bytes of an element: the |lse| whose rounding, 2^-24 of it at most, shows beside other errors:
# in float32 as on CPUs; in half precision beside the weights' rounding, at least 2^-12 of them.
FAR_LSE = {4: 2.0**5, 2: 2.0**10}
LOG_OF_KEYS = 21  # more than the logarithm of the most keys, 2^30
DIAGONAL, ALL = 1, 2  # the rows with delta = sum_j p z dp
ROWS = ("q", "k", "v", "dlse", "lse", "delta", "rest", "sinks")
COTANGENTS = ("do", "seed", "offset")  # read to overwrite delta


def may_be_far(problem: Problem) -> bool:
    """True if rows of a gradient may have too large an lse: modifiers may add any number.

    Scores of products alone were rounded by as much as their lse, and a soft cap holds scores
    small. lse of a part belongs to more keys than are here.
    """
    node, limit = problem.node, FAR_LSE[problem.dtype.itemsize]
    if not node.modifiers or node.part:
        return False
    last = node.modifiers[-1]
    capped = isinstance(last, SoftCap) and last.cap + LOG_OF_KEYS <= limit
    return node.sinks or not capped


def rows_weighed(problem: Problem, invariant: bool) -> int:
    """0, DIAGONAL or ALL: the rows with sum_j p z dp as delta. invariant: the keys a cache has room
    for may not decide it. Listed tiles may follow them."""
    if problem.gathers or (problem.drops_rounded and invariant):
        return ALL
    return DIAGONAL if problem.drops_rounded else 0


def add_weight_sums(plan: LaunchList) -> None:
    """Add the launch, for a gradient in need of it."""
    p, layout, pass_ = plan.problem, plan.layout, PASS_OF["query_gradient"]
    given = "do" in layout.large() and plan.push is None
    weighed = rows_weighed(p, plan.invariant) if given else 0
    if may_be_far(p):
        plan.buffers["rest"] = Buffer(layout.lines(), plan.buffers["delta"].dtype)
    elif not weighed:
        return
    tile = next(iter(plan.tilings(pass_)))
    lists, listed = plan.listed(tile, by_keys=False)
    names = ROWS + COTANGENTS if weighed else ROWS
    sinks = p.by_role.sinks
    more: Fixed = {} if weighed else {f"{name}_ptr": None for name in COTANGENTS}
    more |= plan.strides("do", "dlse") | listed
    more |= {"H": p.H, "sinks_stride": sinks.strides[0] if sinks else 0, "WEIGHED": weighed}
    more |= {"FAR_LSE": FAR_LSE[p.dtype.itemsize]}
    lines = layout.row_programs(tile.block_m)
    texts = plan.texts("keep", "strip", "ends", "change")
    plan.launch("sum_weights", lines, tile, names, more, texts, lists)
