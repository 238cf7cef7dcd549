"""The limits of FlashAttention 4 as a table: each with its condition, its sentence, its source.

Sources are files of flash_attn/cute in flash-attn-4 4.0.0b36; 4.0.0b35 refuses nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import final

import torch
from attrs import frozen

from attn_graph.errors import Reason
from attn_graph.ir.storage.paging import hides_keys
from attn_graph.lowering.libraries.fa4_masks import (
    NativeMask,
    copied_names,
    end_names,
    forward_tile,
    native_mask,
)
from attn_graph.lowering.limits import (
    AMPERE,
    BACKWARD,
    FIRST,
    FORWARD,
    HOPPER,
    WIDTHS,
    Limit,
    Limits,
    Place,
)
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import ALIGNED, Problem, is_misaligned
from attn_graph.lowering.reasons import (
    no_elements,
    other_dtype,
    other_gradients,
    other_statistics,
    uneven_heads,
    wide_heads,
)
from attn_graph.spec import HALF, TensorSpec, dense_like

INTERFACE = "interface.py"
ARGUMENTS = "the package has no such argument"
PAGES = "k and v lie in pages"
UNTRIED = "its kernels for this architecture were run by nobody here"
DATACENTER, GEFORCE = (range(100, 120),), (range(120, 130),)
SMALL = (AMPERE, *GEFORCE)
WIDE_PAIRS = ((192, 128), (256, 256))  # D and E beyond 128 with kernels for sm_100


@final
@frozen
class Fa4Case:
    """A problem and the compute capability of its GPU."""

    lying: Lying
    sm: int
    deterministic: bool = False

    @cached_property
    def problem(self) -> Problem:
        """Padded, if tensors are packed or in pages."""
        return self.lying.stepped

    @cached_property
    def place(self) -> Place:
        """Everything beside the problem that decides which limits may refuse it."""
        return "forward" if self.problem.grad is None else "backward", self.sm, FIRST

    @property
    def native(self) -> NativeMask | None:
        """The mask as a native one."""
        return native_mask(self.lying)

    @property
    def totals(self) -> dict[str, int]:
        """T of each packed side."""
        return self.lying.totals

    @property
    def is_paged(self) -> bool:
        return self.lying.pages is not None

    @property
    def sinks(self) -> TensorSpec | None:
        return self.problem.by_role.sinks

    @property
    def page(self) -> int:
        """Rows of a page; 0 without pages."""
        return self.lying.page


def limit_reasons(case: Fa4Case) -> tuple[Reason, ...]:
    return LIMITS.reasons(case, case.place)


def other_strides(case: Fa4Case) -> Iterator[Reason]:
    """Operands with gaps between rows, and pages off 16 bytes: kernels would need a copy of the
    whole pool."""
    operands = dict(zip("qkv", case.problem.specs, strict=False))
    operands |= case.lying.in_place
    copied = copied_names(case.lying)
    for name, given in operands.items():
        spec = dense_like(given) if name in copied else given
        if not spec.unit_last:
            limit = "needs stride 1 along the last axis"
            yield Reason(f"stride.{name}", limit, f"{name} is {spec}")
        elif is_misaligned(spec):
            limit = f"reads {ALIGNED} bytes at a time"
            yield Reason(f"misaligned.{name}", limit, f"rows of {name} {spec} start in between")


def splits_values(case: Fa4Case) -> bool:
    """True if a gradient's tiles of v do not fill the rows of D's layout."""
    D, E = (-(-size // 16) * 16 for size in (case.problem.D, case.problem.E))
    if case.sm in HOPPER:
        return E % next(n for n in (64, 32, 16) if D % n == 0) > 0
    return D % 64 == 0 and E <= 32


def is_wide(case: Fa4Case) -> bool:
    """True if Blackwell's gradient has a special kernel for the head size."""
    return case.problem.D == case.problem.E == 256


def has_whole_pages(case: Fa4Case) -> bool:
    """True if a page has as many rows as a tile of keys."""
    if not case.is_paged or case.problem.is_empty:
        return False
    return case.page == forward_tile(case.sm, case.problem)[1]


def hides_page_rows(case: Fa4Case) -> bool:
    """True if no query may see some keys before the length of an entry, which may be NaN."""
    p = case.problem
    hides = case.is_paged and not case.lying.finite and not p.is_empty
    return hides and hides_keys(p.node.mask, p.M, p.N)


def beyond_causal(case: Fa4Case) -> bool:
    """True unless the mask is none or causal, bottom right."""
    native = case.native
    return native is None or native.left is not None or native.right not in (None, 0)


def of_wide(what: str, has: Callable[[Fa4Case], object], key: str) -> Limit[Fa4Case]:
    """A limit of the kernel of `is_wide`."""
    return Limit(
        f"wide_gradient.{key}",
        lambda c: is_wide(c) and has(c),
        f"has no gradient of D = 256 with {what} on sm_{{c.sm}}, and the graph does",
        f"{INTERFACE}, _flash_attn_bwd: use_dedicated_hd256_kernel",
        BACKWARD,
        sm=DATACENTER,
        says="unasked" if key == "modifiers" else "no",
    )


ROWS: tuple[Limit[Fa4Case], ...] = (
    Limit(
        "architecture",
        lambda c: (c.sm,),
        "runs on sm_80 to sm_129, and the target has sm_{it}",
        f"{INTERFACE}: Unsupported compute capability",
        sm=(range(80), range(130, 1000)),
    ),
    Limit(
        "gradient",
        lambda c: (c.sm,),
        "computes no gradients on sm_{it}, and the graph is a gradient",
        f"{INTERFACE}, _flash_attn_bwd: arch // 10 in [9, 10, 11, 12]",
        BACKWARD,
        sm=(AMPERE,),
    ),
    Limit("dtype", lambda c: other_dtype(c.problem, HALF), "{it}", f"{INTERFACE}: inputs must be"),
    Limit(
        "sizes",
        lambda c: no_elements(c.problem, c.totals),
        "{it}",
        ARGUMENTS,
        says="unasked",
    ),
    Limit(
        "head_multiple",
        lambda c: uneven_heads(c.problem, ALIGNED // c.problem.dtype.itemsize),
        "{it}",
        f"{INTERFACE}, _validate_head_dims",
    ),
    Limit(
        "head_widest",
        lambda c: wide_heads(c.problem, 256),
        "{it}",
        f"{INTERFACE}, _validate_head_dims",
        sm=(HOPPER,),
    ),
    Limit(
        "head_pair",
        lambda c: (
            (c.problem.D, c.problem.E) not in WIDE_PAIRS
            and not (8 <= c.problem.D <= 128 and 8 <= c.problem.E <= 128)
        ),
        "supports head sizes up to 128, D = 192 with E = 128, and D = E = 256 on sm_{c.sm}, and "
        + WIDTHS,
        f"{INTERFACE}, _validate_head_dims",
        sm=DATACENTER,
    ),
    Limit(
        "head_widest",
        lambda c: wide_heads(c.problem, 128),
        "{it}",
        UNTRIED,
        sm=SMALL,
        says="unasked",
    ),
    Limit(
        "grouped_heads",
        lambda c: c.problem.G < c.problem.H and c.problem.D != c.problem.E,
        "has gradients of grouped heads where D = E on sm_{c.sm}, and " + WIDTHS,
        "flash_bwd_sm90.py: GQA backward requires head_dim == head_dim_v",
        BACKWARD,
        sm=(HOPPER,),
    ),
    Limit(
        "value_size",
        lambda c: splits_values(c),
        "has gradients where the head size of v fills rows of shared memory on sm_{c.sm}, and "
        + WIDTHS,
        "flash_bwd_sm90.py, flash_bwd_sm100.py: layouts by head_dim, as compiled",
        BACKWARD,
        sm=(HOPPER, *DATACENTER),
        says="unasked",
    ),
    Limit(
        "mask",
        lambda c: c.native is None and str(c.problem.node.mask),
        "is given a band that holds the diagonal of the bottom right corner, and no other mask, on "
        "sm_{c.sm}, and {it}",
        UNTRIED,
        sm=SMALL,
        says="unasked",
    ),
    Limit(
        "modifiers",
        lambda c: ", ".join(type(m).__name__ for m in c.problem.node.modifiers),
        "changes no scores on sm_{c.sm}, and {it}",
        f"{INTERFACE}: Custom user-provided score_mod; not supported on SM 12.0",
        sm=SMALL,
        says="unasked",
    ),
    Limit(
        "sinks",
        lambda c: c.problem.node.sinks,
        "has no sinks on sm_{c.sm}, and the graph does",
        "flash_fwd.py: Learnable sink is not supported in this kernel",
        sm=SMALL,
        says="unasked",
    ),
    Limit(
        "deterministic",
        lambda c: c.deterministic,
        "adds up gradients in any order on sm_{c.sm}, and deterministic=True",
        f"{INTERFACE}: deterministic backward not supported on SM 12.0",
        BACKWARD,
        sm=GEFORCE,
    ),
    of_wide("sinks", lambda c: c.problem.node.sinks, "sinks"),
    of_wide("a gradient through lse", lambda c: c.problem.grad and c.problem.grad.with_dlse, "lse"),
    of_wide("modifiers", lambda c: c.problem.node.modifiers, "modifiers"),
    of_wide("a mask that is not causal, bottom right,", beyond_causal, "mask"),
    Limit(
        "dropout",
        lambda c: c.problem.node.dropout,
        "has no dropout, and the graph drops {it}",
        ARGUMENTS,
        says="unasked",
    ),
    Limit(
        "scale",
        lambda c: c.problem.low_scale,
        "takes maxima before it scales: needs a scale above 0, and it is {it}",
        "softmax.py: the maximum is taken of unscaled scores",
        says="unasked",
    ),
    Limit(
        "lengths",
        lambda c: ", ".join(end_names(c.problem)),
        "is given no lengths on sm_{c.sm}, and {it}",
        UNTRIED,
        sm=SMALL,
        says="unasked",
    ),
    Limit(
        "pages",
        lambda c: c.is_paged,
        f"reads no pages on sm_{{c.sm}}, and {PAGES}",
        f"{INTERFACE}: paged KV not supported on SM 8.0, SM 12.0",
        sm=SMALL,
    ),
    Limit(
        "pages_gradient",
        lambda c: c.is_paged,
        f"has no gradient over pages, and {PAGES}",
        ARGUMENTS,
        BACKWARD,
        says="unasked",
    ),
    Limit(
        "page_size",
        lambda c: has_whole_pages(c) and not c.lying.finite and c.page,
        "multiplies rows past a length by 0, where NaN would stay NaN, if pages have as many rows "
        "as a tile of keys: they have {it}, and the graph lacks finite_pages=True",
        f"{INTERFACE}: paged_kv_tma; paged_kv.py leaves these rows out",
        FORWARD,
        says="unasked",
    ),
    Limit(
        "pages_hidden",
        lambda c: hides_page_rows(c) and str(c.problem.node.mask),
        "multiplies rows of a page that the mask hides from all queries by 0, where NaN would stay "
        "NaN: the mask is {it}, and the graph lacks finite_pages=True",
        f"{INTERFACE}: paged_kv.py leaves out rows past a length alone",
        FORWARD,
        says="unasked",
    ),
    Limit("statistics", lambda c: other_statistics(c.problem), "{it}", ARGUMENTS, says="unasked"),
    Limit(
        "gradient.of",
        lambda c: other_gradients(c.problem, ("sinks",)),
        "{it}",
        "interface.py: _flash_attn_bwd returns dq, dk, dv and dsink",
        says="unasked",
    ),
    Limit(
        "sinks_stride",
        lambda c: c.sinks and not c.sinks.unit_last and c.sinks,
        "reads sinks with stride 1, and it is {it}",
        f"{INTERFACE}: maybe_contiguous(learnable_sink)",
        says="unasked",
    ),
    Limit(
        "sinks_dtype",
        lambda c: c.sinks and c.sinks.dtype not in (*HALF, torch.float32) and c.sinks,
        "reads sinks in float16, bfloat16 and float32, and it is {it}",
        f"{INTERFACE}: learnable_sink must be float16, bfloat16, or float32",
    ),
    Limit("strides", other_strides, "{it}", "cute_dsl_utils.py: maybe_contiguous", says="unasked"),
)
LIMITS = Limits(ROWS)
