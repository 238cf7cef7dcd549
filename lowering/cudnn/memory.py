"""The workspace of cuDNN's plans, in bytes, where it is known without a plan."""

from __future__ import annotations

from attn_graph.ir.modifiers import Alibi
from attn_graph.lowering.cudnn.case import Case
from attn_graph.lowering.cudnn.sequences import round_up_to


def workspace(case: Case) -> int | None:
    """Bytes of workspace; None if only a plan tells them, as for all but Hopper's backward."""
    hopper = 90 <= case.sm < 100 and case.backend < (9, 25, 0)
    return hopper_backward_bytes(case) if hopper and case.pass_ == "backward" else None


def hopper_backward_bytes(case: Case) -> int:
    """Bytes of workspace of Hopper's backward kernel.

    dq is summed in float32 [B,H,M,D]. In order, or for the gradient of a bias, ds is stored
    instead, in half precision [B,H,M,N] with rows in tiles of 64 and keys in tiles of 128. Then
    come delta [B,H,M], dk and dv for each query head where heads share them, and ALiBi's slopes.

    This equals what cuDNN reported of every plan that was built for docs/reports/cudnn.md.
    """
    p = case.problem
    stores_ds = case.deterministic or case.wants("bias")
    main = round_up_to(p.M, 64) * round_up_to(p.N, 128) * 2 if stores_ds else p.M * p.D * 4
    shared = [p.B * p.H * p.N * n * 2 for n in (p.D, p.E) if p.H != p.G]
    slopes = [4 * p.H for m in p.node.modifiers if isinstance(m, Alibi)]
    return (
        p.B * p.H * (main + p.M * 4)
        + sum(round_up_to(n, 128) for n in shared)
        + sum(round_up_to(n, 16) for n in slopes)
        + 256
    )
