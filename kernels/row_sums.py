"""A product p v of few rows as weighted sums of the rows of v, for CPUs.

PyTorch's `embedding_bag` sums rows of a table, each times a weight, in float32 for any dtype of the
table: it fetches rows ahead, and reads about as fast as memory allows. A product of matrices copies
v first, or reads it at half the rate and less; in float16 at a twentieth.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from attn_graph.kernels.products import multiply_
from attn_graph.machine.ambient import is_traced, neutral_state
from attn_graph.spec import TensorSpec

# Float32 sums are of this many rows, then of the sums. With one row of p this makes errors smaller;
# with more a cache also holds the rows until the next sum reads them. Half precision would round
# each sum, so it has one.
PIECE_OF_ONE, PIECE = 1024, 256
MOST_INDEXED, HELD = 2**17, 32  # numbers of an index, 8 bytes each, and indices held: 32 MiB
sum_bags = torch.ops.aten._embedding_bag_forward_only.default


def sum_rows_(o: torch.Tensor, p: torch.Tensor, v: torch.Tensor) -> None:
    """o [n,L,E] = p v; p [n,L,S], and v [n,S,E] with `has_whole_rows`."""
    if is_traced() or type(v) is not torch.Tensor:
        multiply_(o, p, v)
        return
    n, L, S = p.shape
    most = max(1, MOST_INDEXED // (L * S))
    if n <= most:
        sum_heads_(o, p, v)
        return
    for each in zip(o.split(most), p.split(most), v.split(most), strict=True):
        sum_heads_(*each)


def sum_heads_(o: torch.Tensor, p: torch.Tensor, v: torch.Tensor) -> None:
    """`sum_rows_` for as many heads as one index has."""
    (n, L, S), E = p.shape, v.shape[2]
    head, row = v.stride(0) // E, v.stride(1) // E
    table = v.as_strided(((n - 1) * head + (S - 1) * row + 1, E), (E, 1))
    size = find_piece(L, S, p.dtype)
    rest = S % size
    pieces = (S - rest) // size
    index, starts = index_rows(n, L, pieces, size, head, row)
    if rest == 0 and pieces == 1:
        o.copy_(sum_pieces(table, p, index, starts).view(o.shape))
        return
    sums = sum_pieces(table, p[..., : S - rest].unflatten(2, (pieces, size)), index, starts)
    torch.sum(sums.view(n, pieces, L, E), 1, out=o)
    if rest:
        more = index_rows(n, L, 1, rest, head, row)
        o.add_(sum_pieces(table[(S - rest) * row :], p[..., S - rest :], *more).view(o.shape))


def sum_pieces(
    table: torch.Tensor, p: torch.Tensor, index: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """The sums [.,E] of rows of a table times p [n,L,size] or [n,L,pieces,size], by piece."""
    weights = (p if p.ndim == 3 else p.transpose(1, 2)).reshape(-1).contiguous()
    sums: torch.Tensor = sum_bags(table, index, starts, False, 0, False, weights)[0]
    return sums


def index_rows(
    n: int, L: int, pieces: int, size: int, head: int, row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of `list_rows`, held for later calls unless it is too large."""
    few = n * L * pieces * size <= MOST_INDEXED
    return (list_rows if few else list_rows.__wrapped__)(n, L, pieces, size, head, row)


@lru_cache(HELD)
@neutral_state()
def list_rows(
    n: int, L: int, pieces: int, size: int, head: int, row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a table in each sum, and the start of each sum in the list.

    Sums are in the order of n heads, then pieces of `size` rows, then L rows of p, with equal rows
    of the table. head, row: the distance from one to the next, in rows of the table.
    """
    first = torch.arange(n).mul_(head)[:, None] + torch.arange(pieces).mul_(size * row)
    rows = first[:, :, None, None] + torch.arange(size).mul_(row)
    index = rows.expand(n, pieces, L, size).reshape(-1).contiguous()  # it is read as it lies
    return index, torch.arange(0, index.numel(), size)


def find_piece(L: int, S: int, dtype: torch.dtype) -> int:
    """The number of rows in each sum."""
    if dtype != torch.float32:
        return S
    return min(S, PIECE if L > 1 else PIECE_OF_ONE)


def count_sum_bytes(n: int, L: int, S: int, E: int, dtype: torch.dtype) -> int:
    """PyTorch's bytes for it, at most: the index and its parts, p again, and sums of pieces."""
    heads = min(n, max(1, MOST_INDEXED // (L * S)))
    sums = -(-S // find_piece(L, S, dtype)) + 1
    index = torch.int64.itemsize * (heads * L * (S + 2 * sums) + (heads + 1) * S)
    return index + heads * L * (S + 2 * sums * E) * dtype.itemsize


def has_whole_rows(spec: TensorSpec) -> bool:
    """True if x [B,G,N,E] can be v: each row is whole, and a multiple of rows from any other, so
    all are rows of one table."""
    apart = (step for size, step in zip(spec.shape[:3], spec.strides, strict=False) if size > 1)
    return spec.unit_last and spec.shape[3] > 0 and all(step % spec.shape[3] == 0 for step in apart)
