"""Paged caches: keys and values in pages of P rows each, put in order by a table.

A pool is [n,P,G,D], in any memory order. A table [B,pages] names the pages of each batch entry; the
first has its first P rows. Lengths [B] count the rows of an entry. Keys past them, and keys that
the strips of a mask hide from all queries of an entry, are absent: their pages are not read, and
the table may hold anything there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from attrs import field, frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.ir.graph import Op, gives
from attn_graph.ir.storage.packing import integer_problems, to_size
from attn_graph.ir.transforms.sums import Linear
from attn_graph.masks import And, Band, KeyLengths, Mask, QueryLengths, flatten_join
from attn_graph.masks.places import Place, Strip, Term, maximum, minimum
from attn_graph.spec import ValueType

OUTSIDE = (
    "name pages of the pool; the table may hold anything where no query sees a key, past "
    "kv_lengths or behind a window"
)
Seen = tuple[Term, Term]  # the first key of each entry that counts, and the end: numbers or [B,1]


def table_problems(who: str, table: ValueType, *lengths: ValueType) -> Iterator[str]:
    given = zip(("table", "lengths"), (table, *lengths), strict=False)
    yield from integer_problems(who, **dict(given))
    for n in lengths:
        if n.shape[0] != table.shape[0]:
            yield f"{who}: table {table} and lengths {n} disagree in batch"


def bound_seen_keys(mask: Mask | None, at: Place) -> tuple[Term, Term]:
    """The first key that some query of batch entry at.b may see, and the end of these keys.

    By the strips among the parts that `&` joins: bands, prefixes and lengths. Any other part hides
    nothing here. Keys outside are absent, however large the entry's pages are.
    """
    strip = Strip(keys=at.N, rows=at.M)
    for part in [] if mask is None else flatten_join(And, mask):
        strip &= part.strip(at) or Strip()
    stop = strip.keys if strip.high is None else minimum(strip.keys, strip.rows + strip.high)
    return 0 if strip.low is None else maximum(strip.low, 0), stop


def hides_keys(mask: Mask | None, M: int, N: int) -> bool:
    """True if `bound_seen_keys` may leave out keys before the lengths of an entry."""
    for part in [] if mask is None else flatten_join(And, mask):
        match part:
            case KeyLengths() | QueryLengths():
                continue
            case Band(None, high, ragged) if high is None or high >= (0 if ragged else N - M):
                continue
        if type(part).strip is not Mask.strip:
            return True
    return False


def seen_by_entry(
    mask: Mask | None, table: torch.Tensor, M: int, N: int, data: Mapping[str, torch.Tensor]
) -> Seen:
    """`bound_seen_keys` of all entries of a table [B,pages]: [B,1] on its device, or a number.

    data: of the mask, by name.
    """
    if mask not in (None, KeyLengths()):  # the bounds of bands may be too large for int32
        data = {name: x.long() if x.ndim == 1 else x for name, x in data.items()}
    B, one = table.shape[0], range(1)
    b = torch.arange(B, device=table.device)
    first, stop = (
        x if isinstance(x, int) else x.reshape(-1, 1)
        for x in bound_seen_keys(mask, Place(b, 0, 0, 0, 1, M, N, data, (range(B), one, one, one)))
    )
    return first, stop


def readable_table(page: int, table: torch.Tensor, seen: Seen) -> torch.Tensor:
    """The table with the first page of an entry that counts, 0 without one, in place of pages that
    do not count. page: rows of one."""
    first, stop = seen
    begins_late = not isinstance(first, int) or first > 0
    begin = (page * torch.arange(table.shape[1], device=table.device)).expand_as(table)
    counted: torch.Tensor = begin < stop  # [B,pages]
    if begins_late:
        counted = counted & (begin + page > first) & (stop > first)
    spare = table[:, :1]
    if table.numel() and begins_late:
        spare = table.gather(1, counted.long().argmax(1, keepdim=True))
    return table.where(counted, spare * counted.any(1, keepdim=True))


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
            more = ", or a table of more pages" * (count > 0)
            raise PlanMismatchError(
                f"kv_lengths: entry {b} has {count}, and its pages {most} rows",
                way_out=f"give 0 to {most}{more}",
            )
        used = pages[: -(-count // max(1, page))]
        first = seen[b].start // max(1, page) if seen else 0
        own = used[first : -(-seen[b].stop // max(1, page))] if seen else used
        if own and not 0 <= min(own) <= max(own) < pool:
            extent = f"pages from {min(own)} to {max(own)}, of a pool of {pool}"
            raise PlanMismatchError(f"pages: entry {b} has {extent}", way_out=OUTSIDE)
        yield b, used, count


@final
@frozen
class Unpage(Linear):
    """pool [n,P,G,D], table [B,pages] -> x [B,G,pages * P,D], the rows of each entry's pages.

    ended: a third operand, lengths [B], counts the rows of each entry; the others are 0. finite:
    the caller declares that no row of the pool holds NaN or Inf, unused rows included.
    """

    ended: bool = field(default=False, converter=bool)
    finite: bool = field(default=False, converter=bool)

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
