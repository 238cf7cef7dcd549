"""Launches for making lists of tiles on the device, at each call, from the tensors of a mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.kernels.tilings import LISTS, Tiling
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.launches import Launch, Pointers
from attn_graph.lowering.triton.tile_lists import HEAD, ListCode, blocks, list_room, most_listed
from attn_graph.machine.workspace import Buffer
from attn_graph.masks import Data
from attn_graph.masks.joins import BLOCKS
from attn_graph.spec import TensorSpec, dense_strides
from attn_graph.spec.formulas import is_one

KINDS = ("mixed_count", "mixed", "full_count", "full")  # the tensors of lists by kind
HELD = 2**14  # elements of a tile held by four warps; of larger ones there are twice as many
POSITIONS = str.maketrans(BLOCKS)  # from the letters of blocks to letters of positions


@final
@frozen(eq=False)
class DeviceLists:
    """The lists of one kernel's tiles.

    shape: [B or 1, H or 1, blocks, at least 3 + tiles], of lists by kind [.., tiles]. buffers: of
    the lists and of their sources, by name. launches: in order. kinds: for lists by kind the names
    of the number of mixed tiles, of these tiles, and of both for full ones.
    """

    shape: tuple[int, ...]
    buffers: Mapping[str, Buffer]
    launches: tuple[Launch, ...]
    kinds: tuple[str, ...] = ()

    @classmethod
    def plan(
        cls,
        name: str,
        problem: Problem,
        tiling: Tiling,
        by_keys: bool,
        data: tuple[str, ...],
        *,
        by_kind: bool = False,
    ) -> DeviceLists:
        """name: of the lists' buffer. data: names of all tensors for kernels beside the operands,
        the mask's last. by_kind: True for mixed and full tiles in tensors of their own.

        Raises Untraceable for a mask beyond tracing.
        """
        code = ListCode.trace(problem, tiling)
        shape = code.shape(problem, tiling, by_keys)
        own = data[len(data) - len(code.reads) :]
        reads = zip(own, code.reads, strict=True)
        sizes = problem.M, problem.N
        ends = [TileEnds(name, x, *read, sizes, tiling) for x, read in reads]
        fixed: dict[str, Any] = {  # Any: arguments of a kernel
            "numbers": code.numbers,
            "H": shape[1],
            "M": problem.M,
            "N": problem.N,
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "TILES": list_room(shape[3] - HEAD),
            "BY_KEYS": by_keys,
        }
        pointers: Pointers = {"data": tuple(n for each in ends for n in each.names)}
        kinds = tuple(f"{name}.{kind}" for kind in KINDS) if by_kind else ()
        if by_kind:
            shape = *shape[:3], most_listed(fixed)
            buffers = dict(zip(kinds, (shape[:3], shape) * 2, strict=True))
            pointers["kinds"] = kinds
            fixed |= {"lists_ptr": None, "lists_strides": (0, 0, 0)}
        else:
            buffers = {name: shape}
            pointers["lists_ptr"] = name
            fixed |= {"kinds": None, "lists_strides": dense_strides(shape)[:3]}
        texts = {"CLASSIFY": code.source}
        last = Launch("list_tiles", prod(shape[:3]), pointers, fixed, texts, *LISTS.options)
        made = {n: Buffer(x, torch.int32) for n, x in buffers.items()}
        made |= {n: x for each in ends for n, x in each.buffers()}
        return cls(shape, made, (*(x for each in ends for x in each.launches()), last), kinds)


@final
@frozen
class TileEnds:
    """The least and the greatest element of a mask's tensor in each tile.

    lists: the name of their lists. data: the axes of the tensor. sizes: M and N.
    """

    lists: str
    tensor: str
    spec: TensorSpec
    data: Data
    sizes: tuple[int, int]
    tiling: Tiling

    @property
    def is_needed(self) -> bool:
        """True if the tensor has an axis of queries or of keys. Else kernels read it itself."""
        return bool(set(self.data.axes) & set("ijxy"))

    @property
    def names(self) -> tuple[str, str]:
        """Of the least and of the most."""
        if not self.is_needed:
            return self.tensor, self.tensor
        return f"{self.lists}.{self.tensor}.least", f"{self.lists}.{self.tensor}.most"

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides by batch entry, head, and queries and keys: 1 and 0 of absent axes."""
        pairs = zip(self.spec.shape, self.spec.strides, strict=True)
        full = dict(zip(self.data.axes.translate(POSITIONS), pairs, strict=True))
        sizes, strides = zip(*(full.get(axis, (1, 0)) for axis in "bhij"), strict=True)
        return sizes, strides

    @property
    def sides(self) -> tuple[AxisTiles, AxisTiles]:
        """How a tile reads rows and columns."""
        rows, columns = (
            AxisTiles.of(n, axis in self.data.axes, *each)
            for n, axis, *each in zip(
                self.layout[0][2:],
                BLOCKS,
                self.sizes,
                (self.tiling.block_m, self.tiling.block_n),
                self.data.block,
                self.data.start,
                strict=True,
            )
        )
        return rows, columns

    @property
    def count(self) -> int:
        """The number of tiles, of all batch entries and heads of the tensor."""
        B, H, *_ = self.layout[0]
        return B * H * prod(blocks(side.positions, side.tile) for side in self.sides)

    def buffers(self) -> Iterator[tuple[str, Buffer]]:
        if self.is_needed:
            yield from ((name, Buffer((self.count,), torch.int64)) for name in self.names)

    def launches(self) -> Iterator[Launch]:
        if not self.is_needed:
            return
        (_, H, *_), strides = self.layout
        least, most = self.names
        rows, columns = self.sides
        fixed = {
            "strides": strides,
            "H": H,
            "rows": rows.positions,
            "columns": columns.positions,
            "sizes": (rows.block, columns.block),
            "starts": (rows.start, columns.start),
            "TILE_I": rows.tile,
            "TILE_J": columns.tile,
            "WIDTH_I": rows.room,
            "WIDTH_J": columns.room,
        }
        pointers = {"x_ptr": self.tensor, "least_ptr": least, "most_ptr": most}
        warps = LISTS.warps * blocks(rows.room * columns.room, HELD)
        yield Launch("extremes", self.count, pointers, fixed, {}, warps, LISTS.stages)


@final
@frozen
class AxisTiles:
    """How tiles of `tile` positions read the elements of one axis.

    Position n reads element (start + n) // block.
    """

    positions: int
    tile: int
    block: int = 1
    start: int = 0

    @classmethod
    def of(
        cls, size: int, has_blocks: bool, positions: int, tile: int, block: int, start: int
    ) -> AxisTiles:
        """Of an axis of this size, with an element for each block or for each position."""
        if is_one(size):
            return cls(1, 1)
        return cls(positions, tile, block, start) if has_blocks else cls(size, tile)

    @property
    def room(self) -> int:
        """A power of two, at least one tile's elements."""
        most = self.tile if self.block == 1 else (self.tile - 1) // self.block + 2
        return 1 << (most - 1).bit_length()
