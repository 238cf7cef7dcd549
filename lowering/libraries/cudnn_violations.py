"""Where limits of cuDNN are written, and the functions to find violations of them."""

from __future__ import annotations

from math import prod
from operator import mul

import torch

from attn_graph.ir.modifiers import Alibi, Bias, SoftCap
from attn_graph.lowering.libraries.cudnn_case import Case
from attn_graph.lowering.limits import AMPERE, Violations
from attn_graph.lowering.problem import is_broadcast
from attn_graph.lowering.reasons import without_rule
from attn_graph.spec import NAMES, TensorSpec

OFF_90_TO_109 = (AMPERE, range(110, 1000))
LONG = 2**31  # more elements than int32 counts

# Sources of limits. The headers ship in the wheel of nvidia-cudnn-frontend, under
# include/cudnn_frontend/node: version 1.28.0 was read.
FORWARD_HEADER = "cudnn-frontend 1.28.0, sdpa_support_surface.h"
BACKWARD_HEADER = "cudnn-frontend 1.28.0, scaled_dot_product_flash_attention.h"
HEADERS = f"{FORWARD_HEADER} and {BACKWARD_HEADER}"
MEASURED = "planned without a device, cuDNN 9.20.0"


def dtype_name(spec: TensorSpec | None, *fitting: torch.dtype) -> Violations:
    """The dtype of an operand, if it exists and none of `fitting` is its dtype."""
    return () if spec is None or spec.dtype in fitting else (NAMES[spec.dtype],)


def name_mask(c: Case) -> str:
    """The mask of a case as text; "" without one."""
    mask = c.problem.node.mask
    return "" if mask is None else str(mask.written())


def name_broadcast(c: Case) -> str:
    """The strides of k and v, if one of them shares elements."""
    named = zip("kv", c.problem.specs[1:3], strict=True)
    return " and ".join(f"{name} is {x}" for name, x in named if is_broadcast(x))


def other_modifiers(c: Case) -> Violations:
    """Classes of modifiers without a counterpart in cuDNN."""
    kinds = dict.fromkeys(type(m) for m in c.problem.node.modifiers)
    others = "; the modifiers it has one for are SoftCap, Bias and Alibi"
    known = (SoftCap, Bias, Alibi)
    return tuple(without_rule(kind.__name__, others) for kind in kinds if kind not in known)


def foreign_statistics(c: Case) -> Violations:
    """Results of rows beside lse, without those of cuDNN."""
    names = c.problem.node.without_gradient
    return () if c.backend >= (9, 24, 0) and names == ("max",) else " and ".join(names)


def rows_without_maximum(c: Case) -> Violations:
    """The cause, if cuDNN's largest scores may not be kept keys' alone."""
    if "max" not in c.problem.node.stats:
        return ()
    if c.problem.node.sinks:
        return ("the graph has sinks",)
    return c.lying.has_blind_rows and "a query may see none"


def foreign_alibi(c: Case) -> Violations:
    """ALiBi with other slopes or another diagonal than cuDNN's own."""
    all_alibi = [m for m in c.problem.node.modifiers if isinstance(m, Alibi)]
    slopes = ["slopes of its own" for m in all_alibi if not m.default]
    aligned = [f'align="{m.align}"' for m in all_alibi if m.align != "top_left"]
    return " and ".join(dict.fromkeys([*slopes, *aligned]))


def left_of_diagonal(c: Case) -> Violations:
    """The mask, if its left bound excludes the query's own place."""
    left = c.diagonal.left
    return left is not None and left < 1 and str(c.problem.node.mask)


def far_keys(c: Case) -> Violations:
    """Packed k and v, with more elements than int32 counts, if q is not packed."""
    given = c.lying.rows_in_place.items() if "rows" not in c.packed else ()
    reach = ((n, x.shape[0] * max(x.strides[0], prod(x.shape[1:]))) for n, x in given)
    return tuple((n, count) for n, count in reach if count >= LONG)


def far_entries(c: Case) -> TensorSpec | None:
    """Padded q beside packed keys, if its entries begin more elements apart than each has.

    One entry counts as far as its rows and heads reach: a call says so (`slot` of
    lowering/cudnn/graph.py).
    """
    q = c.specs["q"]
    apart = q.strides[0] if q.shape[0] > 1 else max(map(mul, q.shape, q.strides))
    return q if c.packed == ("keys",) and apart > prod(q.shape[1:]) else None


def has_rows_outermost(x: TensorSpec) -> bool:
    """True if the heads of a row [H,D] of x [T,H,D] lie side by side, and rows apart."""
    (T, H, D), (row, head, _) = x.shape, x.strides
    within = head if H > 1 else D
    return within >= D and (T <= 1 or row >= (H - 1) * within + D)


def bias_column(c: Case) -> Violations:
    """A bias shared by all keys, unless it is one number per head, contiguous."""
    if c.bias is None or c.bias.shape[3] > 1:
        return ()
    B, H, M, _ = c.bias.shape
    by_head = M == 1 and (c.bias.strides[1] == 1 or B == H == 1)
    return () if by_head else (c.bias,)
