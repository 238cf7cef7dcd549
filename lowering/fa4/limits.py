"""The limits of FlashAttention 4 as a table: each with its condition, its sentence, its source.

Sources are files of flash_attn/cute in flash-attn-4 4.0.0b36; 4.0.0b35 refuses nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Literal, final

import torch
from attrs import frozen

from attn_graph.errors import Reason
from attn_graph.lowering.cudnn.sequences import DENSE, CudnnSequences
from attn_graph.lowering.fa4.call import (
    NativeMask,
    copied_names,
    end_names,
    native_mask,
    new_like,
)
from attn_graph.lowering.fa4.lists import forward_tile
from attn_graph.lowering.problem import ALIGNED, Problem, is_misaligned
from attn_graph.lowering.reasons import (
    head_sizes,
    no_elements,
    other_dtype,
    other_gradients,
    other_statistics,
    uneven_heads,
    wide_heads,
)
from attn_graph.machine.cache import remember
from attn_graph.spec import HALF

INTERFACE = "interface.py"
MEANING = "the package has no such argument"
PAGES = "k and v lie in pages"
UNTRIED = "its kernels for this architecture were run by nobody here"
AMPERE, HOPPER, BLACKWELL, THOR, GEFORCE = 8, 9, 10, 11, 12  # compute capabilities less their tens
DATACENTER = (BLACKWELL, THOR)
SMALL = (AMPERE, GEFORCE)
EVERY = (AMPERE, HOPPER, BLACKWELL, THOR, GEFORCE)
WIDE_PAIRS = ((192, 128), (256, 256))  # D and E beyond 128 with kernels for sm_100
Says = Literal["refuses", "unasked"]


@final
@frozen
class Fa4Case:
    """A problem and the compute capability of its GPU."""

    problem: Problem
    sm: int
    deterministic: bool = False
    sequences: CudnnSequences = DENSE

    @cached_property
    def family(self) -> int:
        """The architecture: 9 of sm_90."""
        return self.sm // 10

    @cached_property
    def is_backward(self) -> bool:
        return self.problem.grad is not None

    @property
    def is_native(self) -> bool:
        """True if kernels have the mask built in."""
        return self.native is not None

    @property
    def native(self) -> NativeMask | None:
        """The mask as a native one."""
        return native_mask(self.problem, "rows" in self.totals)

    @property
    def totals(self) -> dict[str, int]:
        """T of each packed side."""
        return self.sequences.totals

    @property
    def is_paged(self) -> bool:
        return self.sequences.table is not None

    @property
    def page(self) -> int:
        """Rows of a page; 0 without pages."""
        return self.sequences.page


Found = Iterator[Reason] | str | bool


@final
@frozen
class Limit:
    """One limit. found: the graph's part of the reason, whole reasons, or a boolean.

    says: the package's own answer to such a call; "unasked" if it would compute another result,
    refuses only while it compiles, or is untested.
    """

    key: str
    found: Callable[[Fa4Case], Found]
    limit: str
    source: str
    families: tuple[int, ...] = EVERY
    backward: bool | None = None
    says: Says = "refuses"

    def holds(self, family: int, is_backward: bool) -> bool:
        """True for a limit of an architecture and a pass."""
        return family in self.families and self.backward in (None, is_backward)

    def reasons(self, case: Fa4Case) -> Iterator[Reason]:
        """Of a case of such an architecture and pass."""
        found = self.found(case)
        if isinstance(found, str | bool):
            if found:
                where = "" if len(self.families) == len(EVERY) else f" on sm_{case.sm}"
                actual = found if isinstance(found, str) else "the graph does"
                yield Reason(self.key, f"{self.limit}{where}", actual)
        else:
            yield from found


def limit_reasons(case: Fa4Case) -> Iterator[Reason]:
    for limit in limits_at(case.family, case.is_backward):
        yield from limit.reasons(case)


@remember  # of each there are many cases
def limits_at(family: int, is_backward: bool) -> tuple[Limit, ...]:
    """The limits of an architecture and a pass."""
    return tuple([limit for limit in LIMITS if limit.holds(family, is_backward)])


def other_strides(case: Fa4Case) -> Iterator[Reason]:
    """Operands with gaps between rows, and pages off 16 bytes: kernels would need a copy of the
    whole pool."""
    operands = dict(zip("qkv", case.problem.specs, strict=False))
    operands |= dict(case.sequences.specs)
    copied = copied_names(case.problem, case.sequences)
    for name, given in operands.items():
        spec = new_like(given) if name in copied else given
        if not spec.unit_last:
            limit = "needs stride 1 along the last axis"
            yield Reason(f"stride.{name}", limit, f"{name} is {spec}")
        elif is_misaligned(spec):
            limit = f"reads {ALIGNED} bytes at a time"
            yield Reason(f"misaligned.{name}", limit, f"rows of {name} {spec} start in between")


def other_heads(case: Fa4Case) -> str:
    """The head sizes, if Blackwell has no kernel for them."""
    D, E = case.problem.D, case.problem.E
    known = (D, E) in WIDE_PAIRS or (8 <= D <= 128 and 8 <= E <= 128)
    return "" if known else head_sizes(case.problem)


def split_values(case: Fa4Case) -> str:
    """The head sizes, if a gradient's tiles of v do not fill the rows of D's layout."""
    D, E = (-(-size // 16) * 16 for size in (case.problem.D, case.problem.E))
    if case.family == HOPPER:
        row = next(n for n in (64, 32, 16) if D % n == 0)
        return head_sizes(case.problem) if E % row else ""
    return head_sizes(case.problem) if D % 64 == 0 and E <= 32 else ""


def is_wide(case: Fa4Case) -> bool:
    """True if Blackwell's gradient has a special kernel for the head size."""
    return case.problem.D == case.problem.E == 256


def has_whole_pages(case: Fa4Case) -> bool:
    """True if a page has as many rows as a tile of keys."""
    if not case.is_paged or case.problem.is_empty:
        return False
    return case.page == forward_tile(case.sm, case.problem)[1]


def beyond_causal(case: Fa4Case) -> bool:
    """True unless the mask is none or causal, bottom right."""
    native = case.native
    return native is None or native.left is not None or native.right not in (None, 0)


def of_wide(what: str, has: Callable[[Fa4Case], object], key: str) -> Limit:
    """A limit of the kernel of `is_wide`."""
    return Limit(
        f"wide_gradient.{key}",
        lambda c: is_wide(c) and bool(has(c)),
        f"has no gradient of D = 256 with {what}",
        f"{INTERFACE}, _flash_attn_bwd: use_dedicated_hd256_kernel",
        DATACENTER,
        backward=True,
        says="unasked" if key == "modifiers" else "refuses",
    )


LIMITS = (
    Limit(
        "architecture",
        lambda c: f"the target has sm_{c.sm}",
        "runs on sm_80 to sm_129",
        f"{INTERFACE}: Unsupported compute capability",
        tuple(n for n in range(30) if n not in EVERY),
    ),
    Limit(
        "gradient",
        lambda c: "the graph is a gradient",
        "computes no gradients",
        f"{INTERFACE}, _flash_attn_bwd: arch // 10 in [9, 10, 11, 12]",
        (AMPERE,),
        backward=True,
    ),
    Limit("dtype", lambda c: other_dtype(c.problem, HALF), "", f"{INTERFACE}: inputs must be"),
    Limit("sizes", lambda c: no_elements(c.problem, c.totals), "", MEANING, says="unasked"),
    Limit(
        "head_multiple",
        lambda c: uneven_heads(c.problem, ALIGNED // c.problem.dtype.itemsize),
        "",
        f"{INTERFACE}, _validate_head_dims",
    ),
    Limit(
        "head_widest",
        lambda c: wide_heads(c.problem, 256),
        "",
        f"{INTERFACE}, _validate_head_dims",
        (HOPPER,),
    ),
    Limit(
        "head_pair",
        other_heads,
        "supports head sizes up to 128, D = 192 with E = 128, and D = E = 256",
        f"{INTERFACE}, _validate_head_dims",
        DATACENTER,
    ),
    Limit(
        "head_widest",
        lambda c: wide_heads(c.problem, 128),
        "",
        UNTRIED,
        SMALL,
        says="unasked",
    ),
    Limit(
        "grouped_heads",
        lambda c: (
            head_sizes(c.problem)
            if c.problem.G < c.problem.H and c.problem.D != c.problem.E
            else ""
        ),
        "has gradients of grouped heads where D = E",
        "flash_bwd_sm90.py: GQA backward requires head_dim == head_dim_v",
        (HOPPER,),
        backward=True,
    ),
    Limit(
        "value_size",
        split_values,
        "has gradients where the head size of v fills rows of shared memory",
        "flash_bwd_sm90.py, flash_bwd_sm100.py: layouts by head_dim, as compiled",
        (HOPPER, *DATACENTER),
        backward=True,
        says="unasked",
    ),
    Limit(
        "mask",
        lambda c: not c.is_native and str(c.problem.node.mask),
        "is given a band that holds the diagonal of the bottom right corner, and no other mask,",
        UNTRIED,
        SMALL,
        says="unasked",
    ),
    Limit(
        "modifiers",
        lambda c: ", ".join(type(m).__name__ for m in c.problem.node.modifiers),
        "changes no scores",
        f"{INTERFACE}: Custom user-provided score_mod; not supported on SM 12.0",
        SMALL,
        says="unasked",
    ),
    Limit(
        "sinks",
        lambda c: c.problem.node.sinks,
        "has no sinks",
        "flash_fwd.py: Learnable sink is not supported in this kernel",
        SMALL,
        says="unasked",
    ),
    Limit(
        "deterministic",
        lambda c: c.deterministic and "deterministic=True",
        "adds up gradients in any order",
        f"{INTERFACE}: deterministic backward not supported on SM 12.0",
        (GEFORCE,),
        backward=True,
    ),
    of_wide("sinks", lambda c: c.problem.node.sinks, "sinks"),
    of_wide("a gradient through lse", lambda c: c.problem.grad and c.problem.grad.with_dlse, "lse"),
    of_wide("modifiers", lambda c: c.problem.node.modifiers, "modifiers"),
    of_wide("a mask that is not causal, bottom right,", beyond_causal, "mask"),
    Limit(
        "dropout",
        lambda c: f"the graph drops {c.problem.node.dropout}" if c.problem.node.dropout else "",
        "has no dropout",
        MEANING,
        says="unasked",
    ),
    Limit(
        "scale",
        lambda c: c.problem.low_scale and f"it is {c.problem.low_scale}",
        "takes maxima before it scales: needs a scale above 0",
        "softmax.py: the maximum is taken of unscaled scores",
        says="unasked",
    ),
    Limit(
        "lengths",
        lambda c: ", ".join(end_names(c.problem)),
        "is given no lengths",
        UNTRIED,
        SMALL,
        says="unasked",
    ),
    Limit(
        "pages",
        lambda c: c.is_paged and PAGES,
        "reads no pages",
        f"{INTERFACE}: paged KV not supported on SM 8.0, SM 12.0",
        SMALL,
    ),
    Limit(
        "pages_gradient",
        lambda c: c.is_paged and PAGES,
        "has no gradient over pages",
        MEANING,
        backward=True,
        says="unasked",
    ),
    Limit(
        "page_size",
        lambda c: has_whole_pages(c) and f"they have {c.page}",
        "multiplies rows past a length by 0, where NaN would stay NaN, if pages have as many rows "
        "as a tile of keys",
        f"{INTERFACE}: paged_kv_tma; paged_kv.py leaves these rows out",
        backward=False,
        says="unasked",
    ),
    Limit("statistics", lambda c: other_statistics(c.problem), "", MEANING, says="unasked"),
    Limit(
        "gradient.of",
        lambda c: other_gradients(c.problem, ("sinks",)),
        "",
        "interface.py: _flash_attn_bwd returns dq, dk, dv and dsink",
        says="unasked",
    ),
    Limit(
        "sinks_stride",
        lambda c: (
            f"it is {c.problem.by_role.sinks}"
            if c.problem.by_role.sinks is not None and not c.problem.by_role.sinks.unit_last
            else ""
        ),
        "reads sinks with stride 1",
        f"{INTERFACE}: maybe_contiguous(learnable_sink)",
        says="unasked",
    ),
    Limit(
        "sinks_dtype",
        lambda c: (
            f"it is {c.problem.by_role.sinks}"
            if c.problem.by_role.sinks is not None
            and c.problem.by_role.sinks.dtype not in (*HALF, torch.float32)
            else ""
        ),
        "reads sinks in float16, bfloat16 and float32",
        f"{INTERFACE}: learnable_sink must be float16, bfloat16, or float32",
    ),
    Limit("strides", other_strides, "", "cute_dsl_utils.py: maybe_contiguous", says="unasked"),
)
