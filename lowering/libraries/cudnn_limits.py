"""The limits of cuDNN as a table: each with its condition, its sentence and its source.

Head counts have no row: in every graph H is a multiple of G, and cuDNN needs no more. Neither have
addresses: a call checks their alignment to 16 bytes. Packed tensors have both lengths and a padding
mask in every call. A backward without would be taken too, and be wrong.
"""

from __future__ import annotations

import torch

from attn_graph.errors import Reason
from attn_graph.ir.modifiers import Alibi, Bias, SoftCap
from attn_graph.ir.storage.scaling import FLOATS_OF_8
from attn_graph.lowering.libraries.cudnn_case import (
    BACKWARD_HEADER,
    FORWARD_HEADER,
    HEADERS,
    MEASURED,
    OFF_90_TO_109,
    Case,
    bias_column,
    dtype_name,
    far_entries,
    far_keys,
    foreign_alibi,
    foreign_statistics,
    has_rows_outermost,
    left_of_diagonal,
    name_broadcast,
    name_mask,
    needs_padding_mask,
    other_modifiers,
    rows_without_maximum,
)
from attn_graph.lowering.libraries.cudnn_masks import mask_problems
from attn_graph.lowering.limits import (
    AMPERE,
    BACKWARD,
    BLACKWELL,
    FIRST,
    FORWARD,
    HOPPER,
    MEANING,
    WIDTHS,
    Limit,
    Limits,
)
from attn_graph.lowering.problem import Facts, is_misaligned
from attn_graph.lowering.reasons import (
    no_elements,
    old_gpu,
    other_dtype,
    several_biases,
    uneven_heads,
)
from attn_graph.spec import HALF, NAMES


def reasons(case: Case) -> tuple[Reason, ...]:
    """Every reason against a case; without one, cuDNN plans it and computes it right."""
    return LIMITS.reasons(case, case.place)


def exceeded_limits(facts: Facts, case: Case) -> tuple[Reason, ...]:
    """`reasons` against a case of a graph: PyTorch's own call of cuDNN has these limits too."""
    return reasons(case)


OFF_90_TO_119 = (AMPERE, range(120, 1000))

PACKED_LIMITS: tuple[Limit[Case], ...] = (
    Limit(
        "packed_rows",
        lambda c: tuple(
            (n, x) for n, x in c.lying.rows_in_place.items() if not has_rows_outermost(x)
        ),
        "reads packed tensors whose heads lie side by side in each row, and {it[0]} is {it[1]}",
        "cudnn-frontend 1.28.0, test_mhas_v2.py: packed tensors lie so there",
        says="yes",
    ),
    Limit(
        "packed_keys_alone",
        far_keys,
        "counts elements of packed keys and values in i32 where queries are not packed, and "
        "{it[0]} has {it[1]}",
        "planned without a device: it has no kernel for offsets in i64 there",
        says="yes",
    ),
    Limit(
        "page_size",
        lambda c: c.lying.page & (c.lying.page - 1) and c.lying.page,
        "reads pages of a power of two of rows, and they have {it}",
        FORWARD_HEADER,
    ),
    Limit(
        "pages_absent",
        lambda c: c.multiplies_absent,
        "multiplies rows of a page that no query sees by 0, where NaN would stay NaN, and the "
        "graph lacks finite_pages=True",
        "what no document excludes: NVIDIA/cudnn-frontend#624 says so of packed rows",
        FORWARD,
        says="yes",
    ),
    Limit(
        "pages_backward",
        lambda c: c.is_paged,
        "has no gradient over pages, and k and v lie in pages",
        "the arguments of sdpa_backward",
        BACKWARD,
        says="unasked",
    ),
    Limit(
        "pages_soft_cap",
        lambda c: c.is_paged and c.problem.node.mask is None and c.count(SoftCap),
        "caps scores without lengths, which it needs over pages, and k and v lie in pages",
        f"{HEADERS}: score_mod excludes them",
    ),
    Limit(
        "packed_version",
        lambda c: bool(c.packed),
        "reads packed tensors on sm_80 to sm_89 from cuDNN 9.18.1, and this is {c.cudnn}",
        FORWARD_HEADER,
        sm=(AMPERE,),
        versions=(FIRST, (9, 18, 1)),
    ),
    Limit(
        "packed_statistics",
        lambda c: "rows" in c.packed,
        "goes back through packed queries on sm_90 to sm_119, since elsewhere it reads lse of "
        "padded ones, and the target has sm_{c.sm}",
        BACKWARD_HEADER,
        BACKWARD,
        sm=OFF_90_TO_119,
    ),
    Limit(
        "packed_keys_entries",
        far_entries,
        "goes back through padded queries beside packed keys on sm_{c.sm} if their entries begin "
        "at most H * M * D elements apart, and q is {it}",
        MEASURED,
        BACKWARD,
        sm=(range(120, 121),),
    ),
    Limit(
        "packed_keys_backward",
        lambda c: c.packed == ("keys",),
        "goes back through packed keys beside padded queries below sm_121, and the target has "
        "sm_{c.sm}",
        MEASURED,
        BACKWARD,
        sm=(range(121, 1000),),
    ),
    Limit(
        "packed_one_query",
        lambda c: c.packed and c.problem.B == c.problem.M == 1,
        "goes back through packed tensors of more than one query, and B = {c.problem.B}, M = "
        "{c.problem.M}",
        "planned without a device: its kernel does not compile in 9.20 to 9.27",
        BACKWARD,
        sm=(BLACKWELL,),
        says="yes",
    ),
    Limit(
        "packed_in_order",
        lambda c: c.deterministic and bool(c.packed),
        "is deterministic with packed tensors on sm_90 to sm_119, and the target has sm_{c.sm}",
        BACKWARD_HEADER,
        BACKWARD,
        sm=OFF_90_TO_119,
    ),
    Limit(
        "packed_bias_gradient",
        lambda c: c.packed and c.wants("bias"),
        "gives the gradient of a bias beside packed tensors on sm_90 to sm_99, and the target "
        "has sm_{c.sm}",
        f"{BACKWARD_HEADER}; below sm_90 {MEASURED}",
        BACKWARD,
        sm=(AMPERE, range(100, 1000)),
    ),
    Limit(
        "packed_sinks",
        lambda c: c.packed and c.problem.node.sinks,
        "goes back through sinks beside packed tensors from cuDNN 9.26, and this is {c.cudnn}",
        "cudnn-frontend 1.32.0, scaled_dot_product_flash_attention.h",
        BACKWARD,
        versions=(FIRST, (9, 26, 0)),
        says="yes",
    ),
)


def has_own_kernel(c: Case) -> bool:
    """True for larger head sizes with a kernel for Blackwell: latent attention's, and 256, for
    more queries than one."""
    match c.problem.D, c.problem.E:
        case 192, 128:
            return c.backend >= (9, 19, 0)
        case 256, 256:
            return c.problem.M > 1 and c.backend >= (9, 26, 0) and c.frontend >= (1, 32, 0)
    return False


QUANTISED_LIMITS: tuple[Limit[Case], ...] = (
    Limit(
        "quantised_architecture",
        lambda c: c.problem.scales and not 90 <= c.sm < 110,
        "multiplies 8 bits on sm_90 to sm_109, and the target has sm_{c.sm}",
        f"{FORWARD_HEADER}; for sm_120 plans with o in 8 bits exist, and no page names them",
        says="yes",
    ),
    Limit(
        "quantised_output",
        lambda c: c.problem.scales and not c.problem.narrow_o,
        "gives o of quantised tensors in bf16 on sm_100 to sm_109, with o_scale in 8 bits on "
        "sm_90 too, and the target has sm_{c.sm}",
        FORWARD_HEADER,
        sm=(range(100),),
    ),
    Limit(
        "quantised_version",
        lambda c: bool(c.problem.scales),
        "gives o of quantised tensors in bf16 from cuDNN 9.13, and this is {c.cudnn}",
        FORWARD_HEADER,
        versions=(FIRST, (9, 13, 0)),
    ),
    Limit(
        "quantised_dtypes",
        lambda c: tuple(
            (name, NAMES[x.dtype])
            for name, x in zip("kv", c.problem.specs[1:3], strict=True)
            if c.problem.scales and x.dtype != c.problem.dtype
        ),
        "multiplies tensors of one dtype, and {it[0]} is in {it[1]} beside another q",
        "planned without a device: taken from cuDNN 9.25, and no page says what weights round to",
        says="yes",
    ),
    Limit(
        "quantised_scales",
        lambda c: tuple(
            (name, x.type)
            for name, x in zip("qkvo", c.problem.scales, strict=False)
            if x.shape != (1, 1, 1, 1)
        ),
        "has one scale for a tensor, and {it[0]}_scale is {it[1]}",
        "the arguments of sdpa_fp8",
        says="unasked",
    ),
    Limit(
        "quantised_heads",
        lambda c: c.problem.scales and c.larger > 128 and not has_own_kernel(c),
        "multiplies 8 bits in head sizes up to 128, of D = 192 with E = 128 from cuDNN 9.19, or of "
        "256 for M > 1 from cuDNN 9.26 and frontend 1.32, and M = {c.problem.M}, " + WIDTHS,
        f"{FORWARD_HEADER}, and of 1.32.0, which has wider kernels that are not cuDNN's",
        sm=(BLACKWELL,),
        says="yes",
    ),
    Limit(
        "quantised_heads_hopper",
        lambda c: c.problem.scales and c.larger > 256,
        "multiplies 8 bits in head sizes up to 256, and " + WIDTHS,
        FORWARD_HEADER,
        sm=(HOPPER,),
    ),
    Limit(
        "quantised_query",
        lambda c: c.problem.scales and c.problem.M == 1,
        "multiplies 8 bits of one query from sm_100 on, and the target has sm_{c.sm}",
        MEASURED,
        sm=(HOPPER,),
    ),
    Limit(
        "quantised_corner",
        lambda c: c.problem.scales and c.diagonal.align == "bottom_right",
        "masks scores of 8 bits from the bottom right from sm_100 on, and the target has sm_{c.sm}",
        FORWARD_HEADER,
        sm=(HOPPER,),
    ),
    Limit(
        "quantised_sinks",
        lambda c: c.problem.scales and c.problem.node.sinks,
        "has sinks beside quantised tensors from sm_100 on, and the target has sm_{c.sm}",
        f"{MEASURED}: its kernel does not compile",
        sm=(HOPPER,),
        says="unasked",
    ),
    Limit(
        "quantised_modifiers",
        lambda c: (
            *dict.fromkeys(type(m).__name__ for m in c.problem.node.modifiers if c.problem.scales),
        ),
        "changes no scores of quantised tensors, and the graph has {it}",
        f"{FORWARD_HEADER}: no bias; others are not built here",
        says="unasked",
    ),
)

LONGER = "M = {c.problem.M}, N = {c.problem.N}"

ROWS: tuple[Limit[Case], ...] = (
    Limit(
        "architecture",
        lambda c: old_gpu(80, c.sm),
        "{it}",
        FORWARD_HEADER,
    ),
    Limit(
        "backend",
        lambda c: (c.cudnn,),
        "needs cuDNN 9.10.2, the first without known errors in attention, and has {it}",
        HEADERS,
        versions=(FIRST, (9, 10, 2)),
    ),
    Limit(
        "frontend",
        lambda c: c.frontend < (1, 28, 0) and c.front,
        "needs nvidia-cudnn-frontend 1.28, the first that loads plans without running them, and "
        "has {it}",
        "cudnn-frontend 1.28.0, graph_interface.h: deserialize by device properties; cudnn.Handle",
        says="unasked",
    ),
    # The graph's computation
    Limit(
        "dtype",
        lambda c: other_dtype(c.problem, FLOATS_OF_8 if c.problem.scales else HALF),
        "{it}",
        "support matrix of cuDNN 9.20; float32 has a forward plan and no backward",
        says="yes",
    ),
    Limit(
        "sizes",
        lambda c: no_elements(c.problem, c.lying.totals),
        "{it}",
        MEASURED,
        says="unasked",
    ),
    Limit(
        "modifiers",
        other_modifiers,
        "{it}",
        MEANING,
        says="unasked",
    ),
    Limit(
        "biases",
        lambda c: several_biases(c.count(Bias)),
        "{it}",
        MEANING,
        says="unasked",
    ),
    Limit(
        "soft_caps",
        lambda c: c.count(SoftCap) > 1 and c.count(SoftCap),
        "caps scores once, and the graph has {it} soft caps",
        MEANING,
        says="unasked",
    ),
    Limit(
        "soft_cap_order",
        lambda c: c.count(SoftCap) and not isinstance(c.problem.node.modifiers[0], SoftCap),
        "caps scores before a bias is added, and the graph caps them later",
        MEANING,
        says="unasked",
    ),
    Limit(
        "soft_cap_mask",  # ALiBi needs one too
        lambda c: (
            c.count(SoftCap) and (name_mask(c) or c.count(Alibi)) and (name_mask(c) or "None")
        ),
        "supports a soft cap only without a mask and ALiBi, and the mask is {it}",
        f"{HEADERS}: score_mod excludes them",
    ),
    Limit(
        "soft_cap",
        lambda c: c.count(SoftCap),
        "goes back through a soft cap on sm_90 to sm_109, and the target has sm_{c.sm}",
        MEASURED,
        BACKWARD,
        sm=OFF_90_TO_109,
    ),
    Limit(
        "soft_cap_bias_gradient",
        lambda c: c.count(SoftCap) and c.wants("bias"),
        "gives no gradient of a bias beside a soft cap, and it is wanted",
        MEASURED,
        BACKWARD,
    ),
    Limit(
        "soft_cap_way_round",
        lambda c: c.count(SoftCap) and needs_padding_mask(c),
        "goes back through such lengths right only under a padding mask, which excludes a soft "
        "cap, and " + LONGER,
        "the errors that `needs_padding_mask` of lowering/libraries/cudnn_case.py avoids",
        BACKWARD,
        says="yes",
    ),
    Limit(
        "alibis",
        lambda c: c.count(Alibi) > 1 and c.count(Alibi),
        "adds ALiBi once, and the graph has it {it} times",
        MEANING,
        says="unasked",
    ),
    Limit(
        "alibi",
        foreign_alibi,
        "has ALiBi by the paper's slopes along the top left diagonal, and the graph's has {it}",
        "cudnn-frontend 1.28.0, utils/attn_score_modifiers.h",
        says="unasked",
    ),
    Limit(
        "alibi_mask",
        lambda c: (
            c.count(Alibi)
            and (c.diagonal.right, c.diagonal.align) != (0, "top_left")
            and str(c.problem.node.mask)
        ),
        "adds ALiBi under a causal mask at the top left alone, and the mask is {it}",
        HEADERS,
    ),
    Limit(
        "dropout",
        lambda c: c.problem.node.dropout,
        "draws dropout from a generator of its own, and the graph's, of rate {it}, is Philox "
        "4x32-10 by place",
        MEANING,
        says="unasked",
    ),
    Limit(
        "statistics",
        foreign_statistics,
        "gives lse, and from cuDNN 9.24 the largest scores, and the graph returns {it} by "
        "{c.cudnn}",
        "planned without a device: 9.20 has an output for them in place of lse",
        FORWARD,
    ),
    Limit(
        "statistics_rows",
        rows_without_maximum,
        "gives the largest scores where no sinks are among them and each query sees a key, and "
        "{it}",
        "cudnn-frontend 1.32.0, softmax.h: sinks are; no page says what a row without keys gets",
        FORWARD,
        says="yes",
    ),
    Limit(
        "statistics_operands",
        lambda c: "max" in c.problem.node.stats and (c.lying.T is not None or c.problem.scales),
        "gives the largest scores of padded queries in 16 bits, and the graph's are packed or in 8",
        "what is built here",
        FORWARD,
        says="unasked",
    ),
    Limit("mask", lambda c: mask_problems(c.problem.node.mask), "{it}", MEANING, says="unasked"),
    Limit(
        "query_lengths",
        lambda c: "q_lengths" in c.mask.lengths and "rows" not in c.packed and name_mask(c),
        "leaves rows beyond q_lengths undefined, which must be 0 here, and the mask is {it}",
        "cudnn-frontend 1.23.0, test_mhas.py: o is not compared there",
        says="yes",
    ),
    Limit(
        "ended_broadcast",
        lambda c: "keys" not in c.packed and "k" in c.cleaned and name_broadcast(c),
        "reads copies of k and v that are 0 past kv_lengths, laid out alike, and {it}",
        "what lies past a length may be NaN, and no page of cuDNN's says that it is not read",
        says="unasked",
    ),
    Limit(
        "scale",
        lambda c: c.problem.low_scale,
        "is not known to be right with a scale of 0 or below, and it is {it}",
        "kernels may take maxima before they scale, as FlashAttention's do",
        says="yes",
    ),
    Limit(
        "band_right",
        lambda c: (c.diagonal.right or 0) < 0 and name_mask(c),
        "supports bands that reach the diagonal from the left, and the mask is {it}",
        HEADERS,
    ),
    Limit(
        "band_left",
        left_of_diagonal,
        "supports bands that reach the diagonal from the right, and the mask is {it}",
        BACKWARD_HEADER,
        BACKWARD,
    ),
    Limit(
        "band_left_forward",
        left_of_diagonal,
        "supports bands that reach the diagonal from the right, and the mask is {it}",
        "what the backward takes",
        FORWARD,
        says="yes",
    ),
    Limit(
        "lse_gradient",
        lambda c: c.problem.grad is not None and c.problem.grad.with_dlse,
        "has no gradient through lse, and the graph has",
        "the arguments of sdpa_backward",
        BACKWARD,
        says="unasked",
    ),
    Limit(
        "no_cotangent",
        lambda c: c.problem.grad is not None and not c.problem.grad.with_do,
        "goes back from o, and the gradient of lse alone is wanted",
        "the arguments of sdpa_backward",
        BACKWARD,
        says="unasked",
    ),
    # How operands look
    Limit(
        "head_multiple",
        lambda c: uneven_heads(c.problem, 16 if c.problem.scales else 8),
        "{it}",
        HEADERS,
    ),
    Limit(
        "head_forward",
        lambda c: c.problem.D > 576 or c.problem.E > 512,
        "supports head sizes up to D = 576 and E = 512, and " + WIDTHS,
        "MLA's sizes; the support matrix of cuDNN 9.20 ends at 256, and self-checks decide beyond",
        FORWARD,
        says="yes",
    ),
    Limit(
        "head_hopper",
        lambda c: c.larger > 256,
        "goes back through head sizes up to 256, and " + WIDTHS,
        BACKWARD_HEADER,
        BACKWARD,
        sm=(HOPPER,),
    ),
    Limit(
        "head_blackwell",
        lambda c: c.too_wide_for_blackwell,
        "goes back through head sizes up to 128, of D = 192 with E = 128, or from cuDNN 9.23 of "
        "256, and " + WIDTHS,
        BACKWARD_HEADER,
        BACKWARD,
        sm=(BLACKWELL,),
    ),
    Limit(
        "head",
        lambda c: c.larger > 128,
        "goes back through head sizes up to 128 on sm_{c.sm}, and " + WIDTHS,
        BACKWARD_HEADER,
        BACKWARD,
        sm=OFF_90_TO_109,
    ),
    Limit(
        "head_9_11",
        lambda c: (
            128 < c.problem.D <= 192
            and 64 < c.problem.E <= 128
            and c.problem.E != 128
            and c.problem.D != 192
        ),
        "goes back through such head sizes by D = 192 with E = 128 alone below cuDNN 9.13, and "
        + WIDTHS,
        BACKWARD_HEADER,
        BACKWARD,
        sm=(HOPPER,),
        versions=((9, 11, 0), (9, 13, 0)),
    ),
    Limit(
        "unit_last",
        lambda c: tuple((n, x) for n, x in c.specs.items() if not x.unit_last),
        "needs rows of contiguous elements, and {it[0]} is {it[1]}",
        HEADERS,
    ),
    Limit(
        "aligned_rows",
        lambda c: tuple((n, x) for n, x in c.specs.items() if is_misaligned(x)),
        "needs rows that start at multiples of 16 bytes, and {it[0]} is {it[1]}",
        "cudnn-frontend 1.32.0, scaled_dot_product_flash_attention.h: wrong output otherwise",
        says="yes",
    ),
    Limit(
        "bias_dtype",
        lambda c: dtype_name(c.bias, c.problem.dtype, torch.float32),
        "adds a bias of q's dtype or f32, and it is {it}",
        MEANING,
        says="yes",
    ),
    Limit(
        "bias_rows",
        lambda c: c.bias is not None and not c.bias.unit_last and c.bias,
        "adds a bias with contiguous keys, and it is {it}",
        "planned without a device: 9.20 crashes for sm_100, 9.27 refuses it for sm_90",
        says="unasked",
    ),
    Limit(
        "bias_column",
        bias_column,
        "goes back through a bias that differs by key, or by head alone, on sm_{c.sm}, and it "
        "is {it}",
        MEASURED,
        BACKWARD,
        sm=OFF_90_TO_109,
    ),
    Limit(
        "bias_column_in_order",
        lambda c: bias_column(c) if c.wants("bias") or c.sums_in_order else (),
        "goes back deterministically, or to a bias, where that differs by key, or by head alone, "
        "and it is {it}",
        MEASURED,
        BACKWARD,
        sm=(BLACKWELL,),
    ),
    Limit(
        "bias_gradient_192",
        lambda c: c.wants("bias") and c.problem.D == 192,
        "gives no gradient of a bias at D = 192 on Blackwell, and " + WIDTHS,
        MEASURED,
        BACKWARD,
        sm=(BLACKWELL,),
    ),
    Limit(
        "bias_gradient_dtype",
        lambda c: dtype_name(c.bias, c.problem.dtype) if c.wants("bias") else (),
        "gives a bias's gradient in q's dtype, and the bias is of {it}",
        MEASURED,
        BACKWARD,
    ),
    # Combinations
    Limit(
        "one_by_one",
        lambda c: c.problem.M == c.problem.N == 1,
        "can't go back through one query and one key, and " + LONGER,
        BACKWARD_HEADER,
        BACKWARD,
    ),
    Limit(
        "right_corner",
        lambda c: c.at_right and not c.mask.lengths and c.problem.M > c.problem.N,
        "masks from the bottom right where M <= N or lengths are given, and " + LONGER,
        HEADERS,
    ),
    Limit(
        "window_longer",
        lambda c: c.diagonal.left is not None and not c.mask.lengths and c.problem.M > c.problem.N,
        "bounds a window on the left where M <= N or lengths are given, and " + LONGER,
        HEADERS,
    ),
    Limit(
        "right_corner_additions",
        lambda c: c.at_right and (c.count(Bias) or c.count(Alibi)) and name_mask(c),
        "adds no bias under a mask from the bottom right, and the mask is {it}",
        HEADERS,
    ),
    Limit(
        "window_9_14_0",
        lambda c: c.diagonal.left is not None and c.diagonal.right is None and c.problem.N > 1024,
        "is wrong in cuDNN 9.14.0 for windows without an end on the right over more than 1024 "
        "keys, and N = {c.problem.N}",
        HEADERS,
        versions=((9, 14, 0), (9, 14, 1)),
    ),
    Limit(
        "sinks_version",
        lambda c: c.problem.node.sinks,
        "has sinks from cuDNN 9.13, and this is {c.cudnn}",
        BACKWARD_HEADER,
        versions=(FIRST, (9, 13, 0)),
    ),
    Limit(
        "sinks_decode",
        lambda c: c.problem.node.sinks and c.problem.M == 1,
        "supports sinks with two queries or more, and M = 1",
        FORWARD_HEADER,
        FORWARD,
    ),
    Limit(
        "sinks_in_order",
        lambda c: c.deterministic and c.wants("sinks"),
        "promises no order for the gradient of sinks, and deterministic=True asks for one",
        "cudnn-frontend 1.23.0, test_mhas_v2.py: repeated runs are compared but for dSink",
        BACKWARD,
        says="yes",
    ),
    Limit(
        "deterministic_blackwell",
        lambda c: c.deterministic,
        "is deterministic on Blackwell from cuDNN 9.18, and this is {c.cudnn}",
        BACKWARD_HEADER,
        BACKWARD,
        sm=(BLACKWELL,),
        versions=(FIRST, (9, 18, 0)),
    ),
    Limit(
        "deterministic_bias",
        lambda c: c.deterministic and c.bias,
        "is deterministic on Blackwell with a bias from cuDNN 9.24, and the bias is {it}",
        "planned without a device: its kernel does not compile in 9.19 and 9.20",
        BACKWARD,
        sm=(BLACKWELL,),
        versions=(FIRST, (9, 24, 0)),
        says="yes",
    ),
    Limit(
        "deterministic_additions",
        lambda c: c.sums_in_order and (c.wants("bias") or c.count(Alibi)),
        "is deterministic on Blackwell, as it always is at D = E = 256, without ALiBi and without "
        "the gradient of a bias, and the graph has one",
        BACKWARD_HEADER,
        BACKWARD,
        sm=(BLACKWELL,),
    ),
    *PACKED_LIMITS,
    *QUANTISED_LIMITS,
)
LIMITS = Limits(ROWS)
