"""The inputs of cuDNN's limits: the problem, the GPU and the library versions; the documents of the
limits, and the functions to find violations of them.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from operator import mul
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.modifiers import Alibi, Bias, SoftCap
from attn_graph.ir.storage.paging import hides_keys
from attn_graph.lowering.libraries.cudnn_masks import CudnnBand, CudnnMask, translate_mask
from attn_graph.lowering.limits import AMPERE, Pass, Place, Violations
from attn_graph.lowering.lying import SIDES, Lying
from attn_graph.lowering.problem import Facts, Problem, is_broadcast
from attn_graph.lowering.reasons import without_rule
from attn_graph.machine.target import Target, Version
from attn_graph.spec import NAMES, TensorSpec

# Assumed versions of missing libraries, for finding the graph's own reasons as well.
ASSUMED: tuple[Version, Version] = ((9, 20, 0), (1, 28, 0))
OFF_90_TO_109 = (AMPERE, range(110, 1000))
LONG = 2**31  # more elements than int32 counts

# Sources of limits. The headers ship in the wheel of nvidia-cudnn-frontend, under
# include/cudnn_frontend/node: version 1.28.0 was read.
FORWARD_HEADER = "cudnn-frontend 1.28.0, sdpa_support_surface.h"
BACKWARD_HEADER = "cudnn-frontend 1.28.0, scaled_dot_product_flash_attention.h"
HEADERS = f"{FORWARD_HEADER} and {BACKWARD_HEADER}"
MEASURED = "planned without a device, cuDNN 9.20.0"


@final
@frozen
class Case:
    """A problem with its GPU and library versions.

    sm: the compute capability, 90 for 9.0. backend, frontend: versions of cuDNN and its frontend.
    deterministic: equal calls must give equal bits.
    """

    lying: Lying
    sm: int
    backend: Version
    frontend: Version
    deterministic: bool = False

    @cached_property
    def problem(self) -> Problem:
        """Padded, if tensors are packed or in pages."""
        return self.lying.stepped

    @property
    def place(self) -> Place:
        """Everything beside the problem that decides which limits may refuse it."""
        return self.pass_, self.sm, self.backend

    @cached_property
    def packed(self) -> tuple[str, ...]:
        """The packed sides, of "rows" and "keys"."""
        return self.lying.sides

    @property
    def is_paged(self) -> bool:
        return self.lying.pages is not None

    @property
    def multiplies_absent(self) -> bool:
        """True if a tile may have rows of a page that no query sees, which may hold NaN."""
        p = self.problem
        if not self.is_paged or self.lying.finite:
            return False
        return bool(self.mask.lengths) or hides_keys(p.node.mask, p.M, p.N)

    @cached_property
    def cleaned(self) -> dict[str, str]:
        """The side of each operand that a call copies, with 0 in rows outside sequences.

        cuDNN multiplies packed ones by 0 there, and of k and v that end by lengths no document
        says that it does not.
        """
        packed = {n: SIDES[n] for n in self.lying.copied if n != "do"}
        if "keys" in self.packed or self.is_paged or "kv_lengths" not in self.mask.lengths:
            return packed
        return packed | dict.fromkeys("kv", "keys")

    @property
    def clears(self) -> bool:
        """True if do is copied, with 0 in rows without keys, and lse with +inf."""
        grad = self.problem.grad
        return grad is not None and grad.with_do and self.lying.has_blind_rows

    @property
    def copies(self) -> tuple[str, ...]:
        """The operands copied by a call, do among them."""
        return (*self.cleaned, *["do"] * self.clears)

    @cached_property
    def pass_(self) -> Pass:
        return "forward" if self.problem.grad is None else "backward"

    @property
    def cudnn(self) -> str:
        """The version of cuDNN as people write it."""
        return ".".join(map(str, self.backend))

    @property
    def front(self) -> str:
        """The version of its frontend as people write it."""
        return ".".join(map(str, self.frontend))

    @cached_property
    def mask(self) -> CudnnMask:
        """The mask in cuDNN's terms. An untranslatable mask counts as no mask; a rule of its own
        refuses it."""
        return translate_mask(self.problem) or CudnnMask()

    @cached_property
    def diagonal(self) -> CudnnBand:
        """The band of the mask."""
        return self.mask.diagonal

    @property
    def at_right(self) -> bool:
        """True if cuDNN measures a causal bound from the bottom right corner."""
        return self.diagonal.align == "bottom_right" and self.diagonal.right is not None

    @property
    def larger(self) -> int:
        """The larger head size."""
        return max(self.problem.D, self.problem.E)

    @property
    def wide_on_blackwell(self) -> bool:
        """True if Blackwell's backward runs its kernel for D = E = 256, a deterministic one."""
        return self.problem.D == self.problem.E == 256 and self.backend >= (9, 23, 0)

    @property
    def too_wide_for_blackwell(self) -> bool:
        """True if Blackwell's backward has no kernel for the head sizes."""
        if self.problem.D == 192:
            return self.problem.E != 128
        return self.larger > 128 and not self.wide_on_blackwell

    @property
    def sums_in_order(self) -> bool:
        """True if Blackwell's backward runs a deterministic kernel, by choice or not."""
        return self.deterministic or self.wide_on_blackwell

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """q, k, v and, of a backward, o and do."""
        specs = dict(zip("qkv", self.problem.specs, strict=False))
        if self.problem.grad is not None:
            given = self.problem.grad.split(self.problem.specs)
            specs |= {"o": given.o} | ({"do": given.do} if given.do is not None else {})
        return specs

    @property
    def bias(self) -> TensorSpec | None:
        return self.operand("bias")

    def operand(self, role: str) -> TensorSpec | None:
        pairs = zip(self.problem.node.roles, self.problem.specs, strict=False)
        return next((spec for name, spec in pairs if name == role), None)

    def wants(self, role: str) -> bool:
        """True if this is a backward with the gradient of an operand among its results."""
        grad = self.problem.grad
        return grad is not None and f"d{role}" in grad.names

    def count(self, kind: type) -> int:
        """The number of modifiers of a class."""
        return sum(isinstance(m, kind) for m in self.problem.node.modifiers)


def case_of(facts: Facts, target: Target, deterministic: bool) -> Case | None:
    """The case of a graph of one attention, or of its gradient; None of other graphs."""
    lying = facts.once(Lying.for_libraries)
    if lying is None:
        return None
    backend, frontend = target.cudnn_versions
    pair = backend or ASSUMED[0], frontend or ASSUMED[1]
    return Case(lying, target.sm, *pair, deterministic)


def needs_padding_mask(case: Case) -> bool:
    """True if the call needs a padding mask of full lengths although the graph has no lengths.

    Kernels for pages require one. The mask also avoids two errors of cuDNN's backward. Below 9.26
    Hopper's kernel reads beyond the keys if N leaves half a tile of 128 and no mask hides that
    half: dq becomes NaN for lse below -88.7 (pytorch/pytorch#196678). With a single query dk and dv
    become NaN (NVIDIA/cudnn-frontend#1072, in 9.25.1 and 9.26.0).
    """
    p, right = case.problem, case.diagonal.right
    if case.is_paged and not case.mask.lengths:
        return True
    if case.pass_ == "forward" or case.mask.lengths:
        return False
    shift = p.N - p.M if case.diagonal.align == "bottom_right" else 0
    beyond = right is None or p.M - 1 + right + shift >= p.N
    half = 90 <= case.sm < 100 and case.backend < (9, 26, 0) and p.N % 128 == 64 and beyond
    return half or p.M == 1


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
