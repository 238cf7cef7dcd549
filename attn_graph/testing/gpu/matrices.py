"""Places of the elements of matrices: fragments in registers, and tiles in shared memory.

PTX ISA 9.7.14 (mma), 9.7.15.5 (layouts and descriptors of wgmma), 9.7.16.4 (those of tcgen05).
"""

from __future__ import annotations

from functools import lru_cache
from typing import final

import numpy as np
from attrs import frozen

from attn_graph.testing.gpu.program import SHARED
from attn_graph.testing.gpu.rules import Array

SPANS = (16, 32, 64, 128)  # bytes swizzled together, by a tensor map's mode; 16: none


def swizzle(addresses: Array, span: int) -> Array:
    """Addresses of the bytes of a tile: bits 4 to 6 are changed by bits 7 to 9."""
    moved = addresses >> 7 & (span // 16 - 1)
    return np.asarray(addresses ^ moved << 4)


@final
@frozen
class Tile:
    """An operand [rows, k] in shared memory; k elements of `size` bytes have 32 bytes.

    It lies in cores of 8 rows of `span` bytes. Not turned, k is contiguous, and cores are `stride`
    bytes apart along the rows; without swizzling, `lead` bytes along k. Turned, rows are
    contiguous, and cores are `lead` bytes apart along these, `stride` along k.
    """

    start: int
    lead: int
    stride: int
    span: int
    rows: int
    turned: bool
    size: int = 2

    @property
    def addresses(self) -> Array:
        i, j = np.ogrid[: self.rows, : 32 // self.size]
        lead, stride, span = self.lead, self.stride, self.span
        if not self.turned:
            j = j * self.size
            along = j // 16 * lead + j % 16 if span == 16 else j
            at = i // 8 * stride + i % 8 * span + along
        elif span == 16:
            at = i // 8 * stride + j // 8 * lead + j % 8 * 16 + i % 8 * 2
        else:
            at = i // (span // 2) * lead + j // 8 * stride + j % 8 * span + i % (span // 2) * 2
        return swizzle(self.start + at.astype(np.int64), span)


@lru_cache(maxsize=4096)
def places_of(tile: Tile, grain: int, parts: int) -> tuple[Array, Array]:
    """Offsets of elements, and the cells of each part; smaller parts repeat cells."""
    offsets = tile.addresses - SHARED
    cells = [np.unique(part // grain) for part in np.split(offsets, parts)]
    most = max(map(len, cells))
    return offsets, np.stack([np.pad(each, (0, most - len(each)), "edge") for each in cells])


# Fragments: 32-bit registers [register, 32 w] of w warps to matrices [w, rows, columns]. In each
# quad of lanes a lane has two elements side by side; eight quads have eight rows.


def left_fragment(items: Array) -> Array:
    """A [16, 8 n], from [4, 32 w, n]: registers are rows 0 and 8, then the second half of k."""
    n = items.shape[-1]
    x = items.reshape(2, 2, -1, 8, 4, n)  # half of k, rows 8, warp, row, quad, item
    return x.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 8 * n)


def right_fragment(items: Array) -> Array:
    """B [8 n, 8], from [2, 32 w, n]: registers are the halves of k."""
    n = items.shape[-1]
    x = items.reshape(2, -1, 8, 4, n)  # half of k, warp, column, quad, item
    return x.transpose(1, 0, 3, 4, 2).reshape(-1, 8 * n, 8)


def sum_fragment(numbers: Array) -> Array:
    """C [16, n], from [n / 2, 32 w]: pairs of columns, rows 0 and 8, then eight columns on."""
    x = numbers.reshape(-1, 2, 2, numbers.shape[1] // 32, 8, 4)  # columns 8, rows 8, pair, w, row
    return x.transpose(3, 1, 4, 0, 5, 2).reshape(x.shape[3], 16, -1)


def spread_sums(sums: Array) -> Array:
    """[n / 2, 32 w] from C [w, 16, n], the inverse of sum_fragment."""
    x = sums.reshape(len(sums), 2, 8, -1, 4, 2)
    return x.transpose(3, 1, 5, 0, 2, 4).reshape(-1, 32 * len(sums))
