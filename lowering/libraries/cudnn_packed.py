"""The limits of cuDNN on packed tensors and on pages, rows of the table in limits.py.

Both lengths and a padding mask are in every call on them. A backward without would be taken too,
and be wrong.
"""

from __future__ import annotations

from attn_graph.ir.modifiers import SoftCap
from attn_graph.lowering.libraries.cudnn_case import Case
from attn_graph.lowering.libraries.cudnn_violations import (
    BACKWARD_HEADER,
    FORWARD_HEADER,
    HEADERS,
    MEASURED,
    far_entries,
    far_keys,
    has_rows_outermost,
)
from attn_graph.lowering.limits import AMPERE, BACKWARD, BLACKWELL, FIRST, FORWARD, Limit

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
