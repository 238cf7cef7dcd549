"""The tiles visited by Triton's kernels: in closed form, from a list made once, or made each call.

A strip along the diagonal needs no list. A mask without tensors gets its lists when it is lowered,
by `span` and `surely` of each block of queries. For all others two small kernels make the lists on
the device, from the least and greatest element of each block of their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from attrs import frozen

from attn_graph.kernels.tilings import Tiling
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.device_code import element_reach, size_reach
from attn_graph.lowering.triton.layout import MOST_TILES
from attn_graph.lowering.triton.symbols import Array, Code, Numbers, Operand, Symbol
from attn_graph.masks import Data, Mask
from attn_graph.masks.intervals import Range, lower_end, upper_end
from attn_graph.masks.places import Block, Place, Untraceable
from attn_graph.spec import TensorSpec, dense_strides
from attn_graph.spec.formulas import is_one

AT_ONCE = 2**15  # tiles sorted at a time; for more PyTorch starts threads, which takes longer
HEAD = 3  # first elements of a list: its block, and the numbers of full and mixed tiles
CLASSIFY = "b, h, i0, i1, j0, j1, x, y, data, numbers"


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` positions cover `count` of them."""
    return -(-count // size)


def classify_blocks(mask: Mask, problem: Problem, tiling: Tiling) -> torch.Tensor:
    """For each tile, 0: empty, 1: mixed, 2: full; int8 [blocks of queries, blocks of keys]."""
    BM, BN, M, N = tiling.block_m, tiling.block_n, problem.M, problem.N
    kinds = torch.zeros(blocks(M, BM), blocks(N, BN), dtype=torch.int8, device="cpu")
    for x, row in enumerate(kinds):
        rows = range(x * BM, min((x + 1) * BM, M))
        block = Block(range(problem.B), range(problem.H), rows, problem.H, M, N)
        for a, b in mask.span(block).intervals:
            row[a // BN : blocks(b, BN)] = 1
        for a, b in mask.surely(block).intervals:
            row[blocks(a, BN) : max(blocks(a, BN), b // BN)] = 2
    return kinds


def list_tiles_of(kinds: torch.Tensor) -> torch.Tensor:
    """A list for each row of `kinds`, the longest first: the row's number, how many tiles are full,
    how many mixed, then the full, then the mixed, then the empty ones; int32 [rows, at least 3 +
    tiles]."""
    rows = max(1, AT_ONCE // (HEAD + kinds.shape[1]))
    lists = torch.cat([*map(list_at_once, kinds.split(rows))])
    lists[:, 0] = torch.arange(len(kinds), device="cpu")
    longest = torch.argsort(lists[:, 1] + lists[:, 2], descending=True, stable=True)
    return lists[longest]


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
    """The lists of all blocks of queries, or of keys, for whatever a mask's tensors hold."""
    assert problem.node.mask is not None
    kinds = classify_blocks(problem.node.mask, problem, tiling)
    if by_keys:  # a partial last block of queries must be masked, one of keys need not
        short = problem.M % tiling.block_m > 0
        kinds[-1] = kinds[-1].clamp(max=1) if short else kinds[-1]
        kinds = kinds.mT.contiguous()
    lists = list_tiles_of(kinds)
    return lists if longest_first else lists[lists[:, 0].argsort()]


def shape_of_lists(problem: Problem, tiling: Tiling, by_keys: bool) -> tuple[int, int]:
    """The shape of `list_ahead`'s lists: [blocks, at least 3 + tiles]."""
    tiles = blocks(problem.M, tiling.block_m), blocks(problem.N, tiling.block_n)
    lines, each = reversed(tiles) if by_keys else tiles
    return lines, list_width(each)


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
        code = Code(numbers, reach=size_reach(p.B, p.H, p.M, p.N))
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
        keep = mask.keep(Place(b, h, i, j, problem.H, problem.M, problem.N, data))
        bounds = [as_boolean(code, end(keep)) for end in (lower_end, upper_end)]
        axes = "".join(a for a in "bh" if any(a in x.axes for x in bounds))
        source = code.write_function("classify", CLASSIFY, *bounds)
        reads = tuple((spec, mask.needs[name]) for name, spec in operands.items())
        return cls(source, tuple(numbers.values), axes, reads)

    def shape(self, problem: Problem, tiling: Tiling, by_keys: bool) -> tuple[int, ...]:
        """The shape of the lists: [B or 1, H or 1, blocks, at least 3 + tiles]."""
        B = problem.B if "b" in self.axes else 1
        H = problem.H if "h" in self.axes else 1
        return B, H, *shape_of_lists(problem, tiling, by_keys)


def reduced_shape(
    spec: TensorSpec, axes: str, problem: Problem, tiling: Tiling
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor with one element for each tile of queries and of keys."""
    if not set(axes) & set("ijxy"):
        return spec.shape, spec.strides
    tiles = blocks(problem.M, tiling.block_m), blocks(problem.N, tiling.block_n)
    count = dict(zip("ijxy", tiles * 2, strict=True))
    pairs = zip(axes, spec.shape, strict=True)
    shape = tuple(n if is_one(n) else count.get(axis, n) for axis, n in pairs)
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
