"""The limits of cuDNN on quantised tensors, rows of the table in limits.py."""

from __future__ import annotations

from attn_graph.lowering.libraries.cudnn_case import Case
from attn_graph.lowering.libraries.cudnn_violations import FORWARD_HEADER, MEASURED
from attn_graph.lowering.limits import BLACKWELL, FIRST, HOPPER, WIDTHS, Limit
from attn_graph.spec import NAMES


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
