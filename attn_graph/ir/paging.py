"""Paged caches: keys and values in pages of P rows each, put in order by a table.

A pool is [n,P,G,D], in any memory order. A table [B,pages] names the pages of each batch entry; the
first has its first P rows. Lengths [B] count the rows of an entry: pages past them are not read,
and the table may hold anything there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from attrs import field, frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.ir.graph import Op, gives
from attn_graph.ir.packing import integer_problems, to_size
from attn_graph.ir.sums import Linear
from attn_graph.spec import ValueType


def table_problems(who: str, table: ValueType, *lengths: ValueType) -> Iterator[str]:
    given = zip(("table", "lengths"), (table, *lengths), strict=False)
    yield from integer_problems(who, **dict(given))
    for n in lengths:
        if n.shape[0] != table.shape[0]:
            yield f"{who}: table {table} and lengths {n} disagree in batch"


def list_entries(
    page: int,
    pool: int,
    table: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    seen: Sequence[range] | None = None,
) -> Iterator[tuple[int, list[int], int]]:
    """The number of each entry, its pages, and its rows, which end within the last page.

    page: rows of one. pool: the number of pages. seen: the keys of each entry that count; None: all
    within its length. Reads the tensors on the host. Raises PlanMismatchError for lengths beyond
    all pages of an entry, and for pages outside the pool that hold keys that count.
    """
    most = table.shape[1] * page
    counts = [most] * len(table) if lengths is None else lengths.tolist()
    for b, (pages, count) in enumerate(zip(table.tolist(), counts, strict=True)):
        if not 0 <= count <= most:
            raise PlanMismatchError(
                f"kv_lengths: entry {b} has {count}, and its pages {most} rows",
                way_out="give as many keys as are in its pages, or a table of more of them",
            )
        used = pages[: -(-count // max(1, page))]
        first = seen[b].start // max(1, page) if seen else 0
        own = used[first : -(-seen[b].stop // max(1, page))] if seen else used
        if own and not 0 <= min(own) <= max(own) < pool:
            extent = f"pages from {min(own)} to {max(own)}, of a pool of {pool}"
            raise PlanMismatchError(
                f"pages: entry {b} has {extent}",
                way_out="name pages of the pool; the table may hold anything past kv_lengths, and "
                "behind a window that hides them from all queries",
            )
        yield b, used, count


@final
@frozen
class Unpage(Linear):
    """pool [n,P,G,D], table [B,pages] -> x [B,G,pages * P,D], the rows of each entry's pages.

    ended: a third operand, lengths [B], counts the rows of each entry; the others are 0.
    """

    ended: bool = field(default=False, converter=bool)

    @property
    def roles(self) -> tuple[str, ...]:
        return "pool", "table", *(("lengths",) * self.ended)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return 4, 2, *((1,) * self.ended)

    def problems(self, pool: ValueType, *where: ValueType) -> Iterator[str]:
        yield from table_problems("unpage", *where)

    def infer(self, pool: ValueType, table: ValueType, *_: ValueType) -> tuple[ValueType]:
        (B, pages), (_n, P, G, D) = table.shape, pool.shape
        return (ValueType((B, G, pages * P, D), pool.dtype),)

    def run(
        self, pool: torch.Tensor, table: torch.Tensor, *lengths: torch.Tensor
    ) -> tuple[torch.Tensor]:
        (due,) = self.infer(*(ValueType(tuple(x.shape), x.dtype) for x in (pool, table)))
        x = pool.new_zeros(due.shape)
        for b, each, count in list_entries(pool.shape[1], len(pool), table, *lengths):
            x[b, :, :count] = pool[each].flatten(0, 1)[:count].transpose(0, 1)
        return (x,)

    def transposed(self, pool: ValueType) -> Op:
        count, page = pool.shape[:2]
        return SumPages(count, page, self.ended)


@final
@gives("pool")
@frozen
class SumPages(Linear):
    """x [B,G,pages * page,D], table [B,pages] -> pool [count,page,G,D]: the sum for each page.

    A page named several times gets the sum in order, in float32 or wider; a page never named is 0.
    This is the gradient of Unpage, and Unpage is its gradient. ended: a third operand, lengths [B],
    counts the rows of each entry.
    """

    count: int = field(converter=to_size)
    page: int = field(converter=to_size)
    ended: bool = field(default=False, converter=bool)

    @property
    def roles(self) -> tuple[str, ...]:
        return "x", "table", *(("lengths",) * self.ended)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return 4, 2, *((1,) * self.ended)

    def problems(self, x: ValueType, *where: ValueType) -> Iterator[str]:
        yield from table_problems("sum_pages", *where)
        table, rows = where[0], x.shape[2]
        (B, pages) = table.shape
        if (x.shape[0], rows) != (B, pages * self.page):
            yield (
                f"sum_pages: x {x} and table {table} disagree: {pages} pages of {self.page} rows "
                f"are {pages * self.page} rows"
            )

    def infer(self, x: ValueType, *_: ValueType) -> tuple[ValueType]:
        return (ValueType((self.count, self.page, x.shape[1], x.shape[3]), x.dtype),)

    def run(
        self, x: torch.Tensor, table: torch.Tensor, *lengths: torch.Tensor
    ) -> tuple[torch.Tensor]:
        _, G, _, D = x.shape
        wide = torch.promote_types(x.dtype, torch.float32)
        pool = torch.zeros(self.count, self.page, G, D, dtype=wide, device=x.device)
        for b, pages, count in list_entries(self.page, self.count, table, *lengths):
            parts = x[b, :, :count].transpose(0, 1).split(max(1, self.page))
            for page, rows in zip(pages, parts, strict=False):
                pool[page, : len(rows)] += rows
        return (pool.to(x.dtype),)

    def transposed(self, x: ValueType) -> Op:
        return Unpage(self.ended)
