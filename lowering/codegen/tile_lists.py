"""The tiles visited by Triton's kernels: in closed form, from a list made once, or made each call.

A strip along the diagonal needs no list. A mask without tensors gets its lists when it is lowered,
by `span` and `surely` of each block of queries, if these are few. For all others small kernels make
the lists on the device, from the least and greatest element of each block of their tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.kernels.tilings import LISTS, Tiling
from attn_graph.lowering.codegen.device_code import element_reach
from attn_graph.lowering.codegen.launches import Launch, Pointers
from attn_graph.lowering.codegen.symbols import Array, Code, Numbers, Operand, Symbol
from attn_graph.lowering.problem import Problem
from attn_graph.machine.workspace import Buffer
from attn_graph.masks import Data
from attn_graph.masks.intervals import Range, lower_end, upper_end
from attn_graph.masks.joins import BLOCKS
from attn_graph.masks.places import Block, Place, Untraceable, trace_definition
from attn_graph.sparsity.tiles import bound_tiles
from attn_graph.spec import TensorSpec, dense_strides

MOST_TILES = 2**15  # in one list; a vector within one program
MOST_AHEAD = 2**9  # blocks of queries, whose tiles planning lists if a kernel can
MOST_TABLE = 2**22  # tiles of a mask that only planning can list
AT_ONCE = 2**15  # tiles sorted at a time; for more PyTorch starts threads, which takes longer
KINDS = ("mixed_count", "mixed", "full_count", "full")  # the tensors of lists by kind
HELD = 2**14  # elements of a tile held by four warps; of larger ones there are twice as many
POSITIONS = str.maketrans(BLOCKS)  # from the letters of blocks to letters of positions
HEAD = 3  # first elements of a list: its block, and the numbers of full and mixed tiles
CLASSIFY = "b, h, i0, i1, j0, j1, x, y, data, numbers"


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` positions cover `count` of them."""
    return -(-count // size)


def list_at_once(kinds: torch.Tensor) -> torch.Tensor:
    """The lists of a few rows, sorted at once in little memory, without their numbers."""
    lists = torch.zeros(len(kinds), list_width(kinds.shape[1]), dtype=torch.int32, device="cpu")
    lists[:, 1], lists[:, 2] = ((kinds == kind).sum(1) for kind in (2, 1))
    order = torch.argsort(kinds, dim=1, descending=True, stable=True)
    lists[:, HEAD : HEAD + kinds.shape[1]] = order
    return lists


def list_width(tiles: int) -> int:
    """Elements of a list: a multiple of 16, so one kernel serves every number of tiles."""
    return 16 * blocks(HEAD + tiles, 16)


def list_ahead(
    problem: Problem, tiling: Tiling, by_keys: bool, longest_first: bool = True
) -> torch.Tensor:
    """The lists of all blocks of queries, or of keys, for whatever a mask's tensors hold: of each
    its number, how many tiles are full, how many mixed, then the full, then the mixed, then the
    empty ones; int32 [blocks, at least 3 + tiles]."""
    p, mask = problem, problem.node.mask
    assert mask is not None
    kinds = bound_tiles(mask, Block.whole(p.sizes), (tiling.block_m, tiling.block_n))
    if by_keys:  # a partial last block of queries must be masked, one of keys need not
        short = p.M % tiling.block_m > 0
        kinds[-1] = kinds[-1].clamp(max=1) if short else kinds[-1]
        kinds = kinds.mT.contiguous()
    rows = max(1, AT_ONCE // (HEAD + kinds.shape[1]))
    lists = torch.cat([*map(list_at_once, kinds.split(rows))])
    lists[:, 0] = torch.arange(len(kinds), device="cpu")
    if not longest_first:
        return lists
    longest = torch.argsort(lists[:, 1] + lists[:, 2], descending=True, stable=True)
    return lists[longest]


def most_listed(fixed: Mapping[str, int]) -> int:
    """How many tiles a block may have to visit. fixed: the arguments of `list_tiles`."""
    length, size = ("M", "BLOCK_M") if fixed["BY_KEYS"] else ("N", "BLOCK_N")
    return blocks(fixed[length], fixed[size])


def list_room(tiles: int) -> int:
    """How many tiles a listing program holds: of few sizes, since each is a kernel."""
    return next(room for room in (2**6, 2**9, 2**12, MOST_TILES) if room >= min(tiles, MOST_TILES))


@final
@frozen
class ListCode:
    """Code for making lists on the device.

    source: the text of the function to classify tiles. numbers: its integers. axes: the lists' axes
    of "bh". reads: spec and `Data` of each tensor of the mask.
    """

    source: str
    numbers: tuple[int, ...]
    axes: str
    reads: tuple[tuple[TensorSpec, Data], ...]

    @classmethod
    def trace(cls, problem: Problem, tiling: Tiling) -> ListCode:
        """Trace the problem's mask. Raises Untraceable if interval arithmetic can't follow it."""
        p, mask, numbers = problem, problem.node.mask, Numbers()
        code = Code(numbers, reach=max(p.B, p.H, p.M, p.N))
        assert mask is not None
        operands = problem.by_role.mask
        i, j = (Range(*(code.argument(f"{a}{n}", axes=a) for n in "01")) for a in "ij")
        x, y = code.argument("x", axes="i"), code.argument("y", axes="j")
        places = {id(i): x, id(j): y}
        data: dict[str, Extremes] = {}
        for slot, (name, spec) in enumerate(operands.items()):
            axes = mask.needs[name].axes
            shape, strides = reduced_shape(spec, axes, p, tiling)
            texts = numbers.add_strides(strides, kernels_apart=False)
            kind = spec.dtype if set(axes) <= set("bh") else torch.int64
            most = element_reach(spec, mask)
            ends = (Array(code, 2 * slot + k, shape, kind, texts, False, {}, most) for k in (0, 1))
            cells = tuple({"x": x, "y": y}.get(axis) for axis in axes)
            flags = spec.dtype == torch.bool
            data[name] = Extremes(shape, next(ends), next(ends), places, cells, flags)
        b, h = code.argument("b"), code.argument("h")
        keep = trace_definition(mask.keep, Place(b, h, i, j, problem.H, problem.M, problem.N, data))
        bounds = [as_boolean(code, end(keep)) for end in (lower_end, upper_end)]
        axes = "".join(a for a in "bh" if any(a in x.axes for x in bounds))
        source = code.write_function("classify", CLASSIFY, *bounds)
        reads = tuple((spec, mask.needs[name]) for name, spec in operands.items())
        return cls(source, tuple(numbers.values), axes, reads)

    def shape(self, problem: Problem, tiling: Tiling, by_keys: bool) -> tuple[int, ...]:
        """The shape of the lists: [B or 1, H or 1, blocks, at least 3 + tiles]."""
        B = problem.B if "b" in self.axes else 1
        H = problem.H if "h" in self.axes else 1
        tiles = blocks(problem.M, tiling.block_m), blocks(problem.N, tiling.block_n)
        lines, each = reversed(tiles) if by_keys else tiles
        return B, H, lines, list_width(each)


def reduced_shape(
    spec: TensorSpec, axes: str, problem: Problem, tiling: Tiling
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor with one element for each tile of queries and of keys."""
    if not set(axes) & set("ijxy"):
        return spec.shape, spec.strides
    tiles = blocks(problem.M, tiling.block_m), blocks(problem.N, tiling.block_n)
    count = dict(zip("ijxy", tiles * 2, strict=True))
    pairs = zip(axes, spec.shape, strict=True)
    shape = tuple(n if n == 1 else count.get(axis, n) for axis, n in pairs)
    return shape, dense_strides(shape)


def as_boolean(code: Code, x: Operand) -> Symbol:
    """x as one boolean for each tile. Raises Untraceable for a number."""
    if isinstance(x, Symbol) and x.kind != "bool":
        raise Untraceable("tile lists support masks that give booleans, not numbers")
    x0, y0 = code.argument("x", axes="i"), code.argument("y", axes="j")
    everywhere = code.add_line("(x == x) & (y == y)", "bool", (x0, y0))
    answer: Symbol = everywhere & x
    return answer


@final
@frozen(eq=False)
class Extremes:
    """Read by `Place.load` instead of a tensor: the least and greatest element of each block.

    least, most: Arrays with one element per tile, or twice the tensor itself if it has no axis of
    positions or blocks. tiles: for the ranges of i and of j, by identity, the symbol for the number
    of the tile. cells: this symbol for each axis of blocks, with one index; None for other axes.
    """

    shape: tuple[int, ...]
    least: Array
    most: Array
    tiles: dict[int, Symbol]
    cells: tuple[Symbol | None, ...]
    is_bool: bool

    def __getitem__(self, index: tuple[Operand, ...]) -> Range:
        cells = zip(index, self.cells, strict=True)
        own = [self.tiles.get(id(x)) if cell is None else cell for x, cell in cells]
        pairs = [*zip(index, own, strict=True)]
        if any(isinstance(x, Range) and tile is None for x, tile in pairs):
            raise Untraceable(
                "tile lists support masks that read their tensors at i and j themselves"
            )
        at = tuple(tile if isinstance(x, Range) else x for x, tile in pairs)
        values = Range(self.least[at], self.most[at])
        if self.is_bool and values.least.kind != "bool":
            return Range(values.least != 0, values.most != 0)
        return values


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
        if size == 1:
            return cls(1, 1)
        return cls(positions, tile, block, start) if has_blocks else cls(size, tile)

    @property
    def room(self) -> int:
        """A power of two, at least one tile's elements."""
        most = self.tile if self.block == 1 else (self.tile - 1) // self.block + 2
        return 1 << (most - 1).bit_length()
