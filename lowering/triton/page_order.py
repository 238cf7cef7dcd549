"""A table's entries sorted by page: the order for adding their gradients.

Several entries may name a page. A stable sort brings them together and leaves them in the order of
the table, so sums have equal bits each time.
"""

from __future__ import annotations

from math import prod

import torch

from attn_graph.lowering.triton.layout import Layout

NAMED, ORDER = "pages.named", "pages.order"  # read by the summing kernel
DTYPES = {NAMED: torch.int32, ORDER: torch.int64}
KEPT = sum(dtype.itemsize for dtype in DTYPES.values())  # bytes of an entry
PASSING = 2 * KEPT + 16  # and while they are sorted: copies, and a table within the lengths


def sums_pages(layout: Layout) -> bool:
    grad = layout.problem.grad
    return layout.pages is not None and grad is not None and any(grad.wants[1:3])


def order_pages(
    table: torch.Tensor, lengths: torch.Tensor | None, page: int, pool: int
) -> dict[str, torch.Tensor]:
    """NAMED: the pages of a table [B,pages], ascending. ORDER: the entry naming each.

    page: rows of one. pool: the number of pages; it also stands for entries past the lengths [B].
    """
    named = table.clamp(0, pool - 1).to(DTYPES[NAMED])
    if lengths is not None:
        begin = torch.arange(0, table.shape[1] * page, page, device=table.device)
        named = named.where(begin < lengths[:, None], pool)
    values, order = named.flatten().sort(stable=True)
    return {NAMED: values, ORDER: order}


def order_bytes(layout: Layout) -> int:
    """Bytes allocated by `order_pages`, at most."""
    if layout.pages is None or not sums_pages(layout):
        return 0
    return (KEPT + PASSING) * prod(layout.pages.shape)
