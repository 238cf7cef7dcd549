"""Paged caches: keys and values in pages of P rows each, which a table puts in order.

A pool is [n,P,G,D], in any memory order, and a table [B,pages] names the pages of each batch entry,
the first of which holds its first P rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from attrs import field, frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.ir.graph import Emit, Gradients, Op, Values
from attn_graph.ir.packing import integer_problems, to_size
from attn_graph.ir.sums import apply
from attn_graph.spec import ValueType


def require_pages(table: torch.Tensor, count: int) -> torch.Tensor:
    """The table as int64. Raises PlanMismatchError for a page that is not in the pool."""
    if table.numel():
        least, most = map(int, torch.aminmax(table))
        if not 0 <= least <= most < count:
            raise PlanMismatchError(f"table: pages from {least} to {most}, of a pool of {count}")
    return table.long()


@final
@frozen
class Unpage(Op):
    """pool [n,P,G,D], table [B,pages] -> x [B,G,pages * P,D], the rows of each entry's pages."""

    @property
    def reads(self) -> int:
        return 2

    @property
    def roles(self) -> tuple[str, ...]:
        return "pool", "table"

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return 4, 2

    def problems(self, pool: ValueType, table: ValueType) -> Iterator[str]:
        yield from integer_problems("unpage", table=table)

    def infer(self, pool: ValueType, table: ValueType) -> tuple[ValueType]:
        (B, pages), (_, P, G, D) = table.shape, pool.shape
        return (ValueType((B, G, pages * P, D), pool.dtype),)

    def run(self, pool: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor]:
        rows = pool[require_pages(table, len(pool))]
        return (rows.flatten(1, 2).transpose(1, 2),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        pool, table = operands
        count, page = pool.type.shape[:2]
        return apply(emit, SumPages(count, page), grads[0], table), None

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (apply(emit, self, tangents[0], operands[1]),)


@final
@frozen
class SumPages(Op):
    """x [B,G,pages * page,D], table [B,pages] -> pool [count,page,G,D]: what each page is given.

    A page that several entries name, or one entry twice, gets the sum, in their order and in
    float32 or wider; a page that none names is 0. It is what Unpage is the gradient of, too.
    """

    count: int = field(converter=to_size)
    page: int = field(converter=to_size)

    @property
    def names(self) -> tuple[str, ...]:
        return ("pool",)

    @property
    def reads(self) -> int:
        return 2

    @property
    def roles(self) -> tuple[str, ...]:
        return "x", "table"

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return 4, 2

    def problems(self, x: ValueType, table: ValueType) -> Iterator[str]:
        yield from integer_problems("sum_pages", table=table)
        (B, pages), rows = table.shape, x.shape[2]
        if (x.shape[0], rows) != (B, pages * self.page):
            yield (
                f"sum_pages: x {x} and table {table} disagree: {pages} pages of {self.page} rows "
                f"are {pages * self.page} rows"
            )

    def infer(self, x: ValueType, table: ValueType) -> tuple[ValueType]:
        return (ValueType((self.count, self.page, x.shape[1], x.shape[3]), x.dtype),)

    def run(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor]:
        B, G, _, D = x.shape
        wide = torch.promote_types(x.dtype, torch.float32)
        pages = x.transpose(1, 2).reshape(B * table.shape[1], self.page, G, D).to(wide)
        order = require_pages(table, self.count).flatten().tolist()
        pool = torch.zeros(self.count, self.page, G, D, dtype=wide, device=x.device)
        for page, rows in zip(order, pages, strict=True):
            pool[page] += rows
        return (pool.to(x.dtype),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        return apply(emit, Unpage(), grads[0], operands[1]), None

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (apply(emit, self, tangents[0], operands[1]),)
